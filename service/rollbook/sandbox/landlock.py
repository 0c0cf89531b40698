"""Landlock: a process gives up the file system and what lies outside it, without namespaces and without privileges.

Owns the three system calls and the rules of a job. Standard library only. Source: landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_READ = (1 << 0) | (1 << 2) | (1 << 3)
"""Execute, read a file, read a directory."""
_READ_DIRECTORY = 1 << 3
ABI_MIN = 6
"""The first that keeps signals and abstract sockets inside as well."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *values: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"landlock: {os.strerror(error)}")
    return int(result)


def abi() -> int:
    """Version this kernel speaks. Raises OSError where it has none."""
    return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))


def without(libraries: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """What to allow so that ``libraries`` are readable but for ``hidden``: a rule holds for everything below its path."""
    avoided, allowed = list(hidden), []
    waiting = [os.path.realpath(path) for path in libraries if os.path.exists(path)]
    while waiting:
        path = waiting.pop()
        if path in avoided:
            continue
        if any(other.startswith(f"{path}/") for other in avoided):
            waiting += [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
        else:
            allowed.append(path)
    return sorted({path for path in allowed if not any(path.startswith(f"{other}/") for other in allowed)})


def ruleset(readable: list[str], scratch: str) -> int:
    """A descriptor of rules: ``readable`` to read, ``scratch`` to write, nothing else. Raises OSError.

    Made while this process may still open all of them.
    """
    version = abi()
    if version < ABI_MIN:
        raise OSError(f"landlock: ABI {version}; {ABI_MIN} is needed")
    everything = (1 << 16) - 1
    rules = struct.pack("<QQQ", everything, 3, 3)
    made = _call(_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path, allowed in (*((path, _READ) for path in readable), (scratch, everything)):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # A file takes no rights that only directories have.
        rule = struct.pack("<Qi", allowed if os.path.isdir(path) else allowed & ~_READ_DIRECTORY, fd)
        _call(_ADD, ctypes.c_int(made), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        os.close(fd)
    return made


def restrict(rules: int) -> None:
    """Leave this process what ``ruleset`` says; needs no_new_privs. Raises OSError."""
    _call(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)
