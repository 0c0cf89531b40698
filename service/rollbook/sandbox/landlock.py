"""Landlock: a process gives up the file system and what lies outside it, without namespaces and without privileges.

Owns the three system calls and the rules of a job. Standard library only. Source: landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_READ = (1 << 0) | (1 << 2) | (1 << 3)
"""Execute, read a file, read a directory."""
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib")
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


def restrict(scratch: str) -> None:
    """Leave this process the libraries to read and ``scratch`` to write; needs no_new_privs. Raises OSError."""
    version = abi()
    if version < ABI_MIN:
        raise OSError(f"landlock: ABI {version}; {ABI_MIN} is needed")
    everything = (1 << 16) - 1
    rules = struct.pack("<QQQ", everything, 3, 3)
    ruleset = _call(_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path, allowed in (*((path, _READ) for path in _READABLE), (scratch, everything)):
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", allowed, fd)
        _call(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        os.close(fd)
    _call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)
