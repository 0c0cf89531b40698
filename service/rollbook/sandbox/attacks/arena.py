"""A place of its own for programs that nothing else contains: private namespaces with a throwaway view of the files.

Owns mount, process, network, IPC and host name namespaces (and a user namespace where it was not started by root) in which the
machine's temporary and home directories are empty memory file systems and, for root, the rest is read-only. Never judges. Its
guard keeps positive controls and weak backends from running anywhere else. Sources: namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rollbook.core.errors import ConfigError
from rollbook.core.host import host
from rollbook.sandbox import kernel

KINDS = ("mnt", "pid", "net", "ipc", "uts")
OUTER_VARIABLE = "ROLLBOOK_ARENA"
"""Names the namespaces that the arena left."""
LONGEST_S = 180
MEMORY_BYTES = 12 << 30
"""Address space of any one process in it."""
FILES_BYTES = 512 << 20
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def inside() -> bool:
    """Whether this process is in an arena: every namespace differs from the ones outside it."""
    outer = dict(part.split("=", 1) for part in host().environ.get(OUTER_VARIABLE, "").split(";") if "=" in part)
    return set(outer) == set(KINDS) and all(os.readlink(f"/proc/self/ns/{kind}") != outer[kind] for kind in KINDS)


def require(what: str) -> None:
    """Refuse to go on outside an arena. Raises ConfigError."""
    if not inside():
        raise ConfigError(f"{what} may harm the machine and runs only in an arena: python -m rollbook.sandbox.attacks.arena -- …")


def command(argv: Sequence[str], uid: int | None = None) -> list[str]:
    """``argv`` in an arena of its own, as ``uid`` where root starts it."""
    user = [] if uid is None else ["--uid", str(uid)]
    return [sys.executable, "-m", "rollbook.sandbox.attacks.arena", *user, "--", *argv]


def run(argv: Sequence[str], uid: int | None) -> int:
    """Run a command in an arena and return its exit code, 124 when it took longer than ``LONGEST_S``.

    Raises ConfigError where this kernel or container gives no namespaces, or another user is asked for by a user who is not root.
    """
    if uid is not None and os.geteuid() != 0:
        raise ConfigError("only root can start an arena for another user: leave --uid out")
    outer = ";".join(f"{kind}={os.readlink(f'/proc/self/ns/{kind}')}" for kind in KINDS)
    root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NAMESPACES | (0 if root else kernel.CLONE_NEWUSER))
        if not root:
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        raise ConfigError(f"no arena can be made here ({error}): allow user namespaces, or start it as root") from None
    first = os.fork()
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _furnish(root)
        code = _run_as_first_process(argv, uid, outer)
    except (OSError, ConfigError) as error:
        print(f"arena: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def _run_as_first_process(argv: Sequence[str], uid: int | None, outer: str) -> int:
    """Everything in the arena ends with this process, the first of its namespace."""
    child = os.fork()
    if child == 0:
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.execvpe(argv[0], list(argv), {**host().environ, OUTER_VARIABLE: outer, "TMPDIR": "/tmp", "HOME": "/tmp"})

    def over(_number: int, _frame: FrameType | None) -> None:
        os._exit(124)

    signal.signal(signal.SIGALRM, over)
    signal.alarm(LONGEST_S)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _furnish(root: bool) -> None:
    """Private mounts, an own /proc, loopback up, bounded memory. Raises OSError."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    needed = _needed()
    hidden = {os.path.realpath(path): mode for path, mode in _hidden(root).items() if os.path.isdir(path)}
    kept = {path: os.open(path, os.O_PATH) for path in needed if any(Path(path).is_relative_to(top) for top in hidden)}
    for path, mode in hidden.items():
        kernel.mount("arena", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={FILES_BYTES},mode={mode:o}")
    for path, fd in kept.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", path, flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if root:
        kernel.mount("none", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # it is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _hidden(root: bool) -> dict[str, int]:
    """Directories that are replaced by empty ones, and their modes."""
    homes = {"/root": 0o755} if root else {os.path.expanduser("~"): 0o755}
    return {"/tmp": 0o1777, "/var/tmp": 0o1777, "/dev/shm": 0o1777, **{path: mode for path, mode in homes.items() if path != "/"}}


def _needed() -> list[str]:
    """Directories that Python needs, wherever they are."""
    paths = [sys.prefix, sys.base_prefix, os.getcwd(), str(Path(__file__).parents[3])]
    paths += [entry for entry in host().environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return sorted({os.path.realpath(path) for path in paths if os.path.isdir(path)})


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m rollbook.sandbox.attacks.arena [--uid N] -- COMMAND …``."""
    parser = argparse.ArgumentParser(prog="arena", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--uid", type=int)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    try:
        return run(args.command, args.uid)
    except ConfigError as error:
        print(f"arena: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
