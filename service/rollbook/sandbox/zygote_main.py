"""The zygote: a small warm interpreter that forks one watcher, and through it one isolated job, per request.

Owns what happens between a request and a contained process. Never sees a program: source, set-up and files arrive on a descriptor
that only the job reads. The chain: zygote → watcher (outside, trusted) → first process of the new pid namespace (trusted, drops
everything, reaps) → the job. Closing the owner's end of the life pipe ends the watcher's job; closing the control socket ends
the zygote. Standard library only; nothing of the owner's memory or environment is here.

Sources: unshare(2), user_namespaces(7), pivot_root(2), pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import json
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback

from rollbook.sandbox import bubblewrap, kernel, landlock
from rollbook.sandbox.cgroups import Groups
from rollbook.sandbox.job import become_job, reap
from rollbook.sandbox.seccomp import filter_program
from rollbook.sandbox.trees import remove
from rollbook.sandbox.unlinked import Unlinked
from rollbook.sandbox.watch import SETUP_S, Watch, resident_bytes, sweep, threads_of, write_report

MODES = ("namespaces", "bubblewrap", "landlock", "nothing")
PID_NAMESPACED = MODES[:2]
REQUEST_BYTES_MAX = 65536
REPORT_PLACE = 5
"""Among the descriptors of a request: standard input, output, error, payload, answers, report, life."""
UID_FIRST, SLOTS_MAX = 200_000, 64
"""Outer user ids where the zygote is root: one for each slot of each zygote of the machine, so that limits per user are limits
per job, and what is killed by its user is nobody else's."""
INNER_ID = 1000
PREIMPORTED = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "itertools", "math", "mmap", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading",
    "time", "typing", "unittest",
)  # fmt: skip
seen: list[str] = []
"""What every job is shown: paths, or the arguments of bwrap that say it."""
_PLACES = ("/mnt", "/media", "/srv", "/var/empty")


def main() -> None:
    """``MODE CONTROL_FD [BWRAP]``: serve requests until the control socket closes."""
    mode, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    is_root = os.geteuid() == 0
    for name in PREIMPORTED:
        __import__(name)
    program, root = filter_program(shared=mode == "landlock"), ""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children"):
            pass  # without it a job's processes could not be found
        libraries(), packages()
        bwrap = mode == "bubblewrap"
        if mode == "namespaces" or (bwrap and is_root):
            root = prepare_root(is_root, bubblewrap.NEEDED if bwrap else ())
        if mode == "landlock":
            seen.extend(landlock.without(libraries(), packages()))
        if bwrap:
            seen.extend(bubblewrap.view(libraries(), packages(), root))
    except (OSError, KeyError) as error:
        control.send(json.dumps({"error": f"{error}"}).encode())
        return
    gc.collect()
    gc.freeze()
    # Watchers are nobody's business once they run; they reset this for their own children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    groups: dict[int, Groups] = {}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads it from here on
    uid_first = UID_FIRST + os.getpid() * SLOTS_MAX
    control.send(b'{"ready": true}')
    while True:
        message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 8)
        if not message:
            break
        request = json.loads(message)
        slot = request["slot"]
        if mode in PID_NAMESPACED and slot not in groups:
            groups[slot] = Groups(slot)
        try:
            outer_id = uid_first + slot if is_root else 0
            if os.fork() == 0:
                control.close()
                watcher(mode, request, fds, root, outer_id, groups.get(slot), program)
        except OSError as error:
            write_report(fds[REPORT_PLACE], {"is_spawned": False, "error": str(error), "enforced": []})
        for fd in fds:
            os.close(fd)
    for group in groups.values():
        group.remove()


def prepare_root(is_root: bool, more: tuple[str, ...]) -> str:
    """Once per zygote: a read-only tree with what Python needs, in a mount namespace of our own. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    if not is_root:
        kernel.unshare(kernel.CLONE_NEWUSER)
        map_ids("self", 0, uid, gid)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = next((place for place in _PLACES if os.path.isdir(place)), None) or tempfile.mkdtemp(prefix="rollbook-root-")
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for name in ("work", "dev"):
        os.mkdir(f"{root}/{name}", 0o755)
    os.symlink("work", f"{root}/tmp")
    for path in libraries():
        bind(path, root, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    for path in packages():
        # What is installed beside the standard library may be data with answers in it.
        if os.path.isdir(root + path):
            kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,mode=755")
    for path in more:
        bind(path, root, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    for path in bubblewrap.DEVICES:
        bind(path, root, kernel.MS_NOSUID)
    kernel.mount("none", root, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    return root


@functools.cache  # asked for while this process may still look
def libraries() -> list[str]:
    """Directories that Python needs."""
    # The place of Python, which must not be where a job has its scratch space.
    own = [os.path.realpath(path) for path in (sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib")]
    if hidden := [path for path in own if path.startswith("/work/")]:
        raise OSError(f"Python lies in {hidden[0]}, but /work is the name of a job's scratch space: install it elsewhere")
    return list(dict.fromkeys(["/lib", "/lib64", "/usr/lib", "/usr/lib64", *own]))


@functools.cache
def packages() -> list[str]:
    """Directories of installed packages below them."""
    patterns = (f"{top}/{inner}{kind}-packages" for top in libraries() for inner in ("", "python*/") for kind in ("site", "dist"))
    return sorted({os.path.realpath(path) for pattern in patterns for path in glob.glob(pattern)})


def bind(path: str, root: str, flags: int) -> None:
    """Show ``path`` of the machine at the same place under ``root``."""
    target = root + path
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        open(target, "x").close()
    kernel.mount(path, target, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mounts(target, flags)


def map_ids(who: int | str, inner: int, uid: int, gid: int) -> None:
    """One user and one group of a new user namespace. Raises OSError."""
    with contextlib.suppress(OSError), open(f"/proc/{who}/setgroups", "w") as file:
        file.write("deny")
    for name, outer in (("uid_map", uid), ("gid_map", gid)):
        with open(f"/proc/{who}/{name}", "w") as file:
            file.write(f"{inner} {outer} 1")


def watcher(
    mode: str, request: dict, fds: list[int], root: str, outer_id: int, groups: Groups | None, program: bytes
) -> None:
    """Isolate, start and watch one job, report when nothing of it is left, and end."""
    report = fds[REPORT_PLACE]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        try:
            result = watched(mode, request["limits"], fds, root, outer_id, groups, program)
        except OSError as error:
            result = {"is_spawned": False, "error": str(error), "enforced": []}
        except Exception:  # noqa: BLE001 - boundary of the process: the owner is told instead of an interpreter's traceback
            result = {"is_spawned": False, "error": traceback.format_exc()[-2000:], "enforced": []}
        write_report(report, result)
    finally:
        os._exit(0)


def watched(
    mode: str, limits: dict, fds: list[int], root: str, outer_id: int, groups: Groups | None, program: bytes
) -> dict:
    """The report on one job, of which nothing is left, whatever was raised here."""
    stdin, stdout, stderr, payload, answers, report, life = fds
    inner = (stdin, stdout, stderr, payload, answers)
    claim_r, claim_w = os.pipe()
    status_r, status_w = os.pipe()
    up_r, up_w = os.pipe()
    down_r, down_w = os.pipe()
    enforced: tuple[str, ...] = ("rlimits",)
    if mode == "namespaces":
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET)
        enforced += ("userns", "pidns", "mountns", "ipcns", "utsns", "netns", "read-only root", "seccomp", "uid")
    elif mode == "bubblewrap":
        enforced += ("bwrap", "userns", "pidns", "mountns", "ipcns", "utsns", "netns", "read-only root", "seccomp")
    elif mode == "landlock":
        enforced += ("landlock", "seccomp", *(("uid",) if outer_id else ()))
    if groups is not None:
        groups.limit(limits["memory_bytes"] + limits["disk_bytes"], limits["processes"] + 1)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    size_shared = resident_bytes(os.getpid())
    with contextlib.ExitStack() as after:
        place = root if mode in PID_NAMESPACED else make_scratch(outer_id)
        scratch = "" if mode in PID_NAMESPACED else place
        if scratch:
            after.callback(remove, scratch)
        unlinked = Unlinked(scratch) if scratch else None
        if mode != "nothing":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # what outlives its parent stays findable
        pid = os.fork()
        if pid == 0:
            for fd in (report, life, claim_r, status_r, up_r, down_w):
                os.close(fd)
            first_process(mode, limits, place, outer_id, program, size, (*inner, claim_w), (status_w, up_w, down_r))
        after.callback(sweep, outer_id if mode == "landlock" else 0)
        for fd in (*inner, claim_w, status_w, up_w, down_r):
            os.close(fd)
        watch = Watch(limits, life, claim_r, status_r if mode in PID_NAMESPACED else -1, groups, enforced, scratch, unlinked)
        watch.error = let_in(pid, mode, outer_id, groups, up_r, down_w)
        watch.base_bytes = 0 if mode == "bubblewrap" else size_shared
        return watch.run(pid)


def let_in(pid: int, mode: str, outer_id: int, groups: Groups | None, up: int, down: int) -> str:
    """Wait until the first process is ready for its ids, give them, and let it go on; returns what it says is wrong."""
    until = time.monotonic() + SETUP_S
    if _read_until(up, 1, until) == b"u":
        if groups is not None:
            groups.join(pid)
        if mode == "namespaces":
            map_ids(pid, INNER_ID, outer_id, outer_id)
        os.write(down, b"g")
    os.close(down)
    error = b""
    while data := _read_until(up, 4096, until):
        error += data
    return error.decode("utf-8", "replace")


def _read_until(fd: int, n: int, until: float) -> bytes:
    """What comes before the monotonic time ``until``; empty when nothing does."""
    ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
    return os.read(fd, n) if ready else b""


def first_process(
    mode: str, limits: dict, place: str, outer_id: int, program: bytes, size: int, inner: tuple[int, ...], pipes: tuple[int, ...]
) -> None:
    """Contain this process for good, then start the job and reap until it has ended."""
    status, up, down = pipes
    stdin, stdout, stderr, payload, answers, claim = inner
    try:
        if mode != "nothing":
            os.setsid()  # a signal to the job's process group reaches every member of it, also one outside of its namespaces
        if mode == "namespaces":
            enter_root(place, limits, outer_id)
            kernel.unshare(kernel.CLONE_NEWUSER)
        else:
            os.chdir("/" if mode == "bubblewrap" else place)
        os.write(up, b"u")
        if os.read(down, 1) != b"g":
            os._exit(1)
        rules = landlock.ruleset(seen, place) if mode == "landlock" else -1
        # Bwrap's is set inside, where the user is the job's alone; where it is not, others of that user count as well.
        others = threads_of(os.getuid()) if mode == "landlock" and not outer_id else 0
        bound(limits, size, 0 if mode == "bubblewrap" else others + limits["processes"] + 1)
        if mode == "namespaces":
            become(INNER_ID)
        if mode in ("landlock", "bubblewrap"):
            if outer_id:
                os.setgroups([])
            become(outer_id)
        if mode == "bubblewrap":
            bubblewrap.execute(
                sys.argv[3], seen, limits, program, (stdin, stdout, stderr), (payload, answers, claim, status)
            )
        if mode != "nothing":
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            if mode == "landlock":
                landlock.restrict(rules)
            kernel.install_filter(program)
        os.close(up)
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not begin
        os.write(up, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if mode != "namespaces":
        become_job(stdin, stdout, stderr, payload, answers, claim)
    reap((stdin, stdout, stderr, payload, answers, claim), status)


def enter_root(root: str, limits: dict, outer_id: int) -> None:
    """Scratch space of this job, the prepared tree as root, and nothing else. Raises OSError."""
    kernel.unshare(kernel.CLONE_NEWNS)
    options = f"size={limits['disk_bytes']},nr_inodes=4096,mode=700,uid={outer_id},gid={outer_id}"
    kernel.mount("tmpfs", f"{root}/work", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/work")
    socket.sethostname("sandbox")
    if outer_id:
        os.setgroups([])


def make_scratch(outer_id: int) -> str:
    """Real path of a directory on this machine, for backends without a root of their own. Raises OSError."""
    path = os.path.realpath(tempfile.mkdtemp(prefix="rollbook-job-"))
    if outer_id:
        os.chown(path, outer_id, outer_id)
    return path


def bound(limits: dict, size: int, processes: int) -> None:
    """Limits per process, and of ``processes`` of its user (0: not here); those of the whole job are the watcher's."""
    seconds = max(1, int(limits["cpu_s"] + 1))
    for what, value in (
        (resource.RLIMIT_AS, size + limits["memory_bytes"]), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]), (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0), *(((resource.RLIMIT_NPROC, processes),) if processes else ()),
    ):  # fmt: skip
        resource.setrlimit(what, (value, value + (1 if what == resource.RLIMIT_CPU else 0)))


def become(uid: int) -> None:
    """Be that user and nothing more. Raises OSError."""
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
