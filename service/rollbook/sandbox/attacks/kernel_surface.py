"""Attacks on privileges and on parts of the kernel that a program has no business with.

Owns sources and what is looked for. Calls are made with arguments that change nothing where they succeed, or only change what is
the program's own; "reachable" means that the kernel answered anything but a refusal. Source: syscalls(2), capabilities(7).
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from rollbook.sandbox.attacks.probe import Attack, Trial, Untried


def _privileged(trial: Trial) -> str:
    if not trial.seen:
        raise Untried("its process could not be seen from outside")
    for process in trial.seen:
        if process.uid == 0 and os.geteuid() == 0:
            return "its process is root outside"
        if process.capabilities:
            return f"its process has capabilities {process.capabilities:#x}"
        if not process.no_new_privs:
            return "its process may gain privileges from set-uid programs"
    return ""


def _mounted(trial: Trial) -> str:
    return "its mount is seen outside" if trial.mark in Path("/proc/self/mountinfo").read_text() else ""


def _renamed(trial: Trial) -> str:
    if socket.gethostname() == trial.hostname:
        return ""
    socket.sethostname(trial.hostname)
    return "it renamed the machine"


def _traced(trial: Trial) -> str:
    if trial.held or not trial.victim_ended(within_s=2.0):
        return ""
    return "it ended a process of the machine by tracing it"


def _limits_moved(trial: Trial) -> str:
    """The victim was started with the suite's own limits."""
    if trial.victim is None or trial.victim.poll() is not None:
        return ""
    now = resource.prlimit(trial.victim.pid, resource.RLIMIT_NOFILE)
    return "" if now == resource.getrlimit(resource.RLIMIT_NOFILE) else "it changed a limit of a process of the machine"


def _changed(trial: Trial) -> str:
    return "it changed a file of the machine" if trial.bait.property_changed() else ""


def _rescheduled(trial: Trial) -> str:
    """The victim was started with the suite's own schedule."""
    pid = trial.victim.pid if trial.victim and trial.victim.poll() is None else 0
    now, own = (
        (os.sched_getscheduler(each), os.getpriority(os.PRIO_PROCESS, each), os.sched_getaffinity(each)) for each in (pid, 0)
    )
    return "" if now == own else f"it changed the schedule of a process of the machine to {now}"


ATTACKS = (
    Attack(
        "privileges",
        "become root by setuid and capset, or run with what it was not stripped of",
        """
for change in (lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0), lambda: os.setresgid(0, 0, 0)):
    try:
        change()
    except OSError:
        pass
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
_libc.capset(header, (ctypes.c_uint32 * 6)(0xFFFFFFFF, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0))
""",
        while_held=_privileged,
    ),
    Attack(
        "ptrace_host",
        "trace a process of the machine, so that it dies with the program",
        """
victim = B["victim"]
if call("ptrace", ctypes.c_long(0x4206), ctypes.c_long(victim), ctypes.c_long(0), ctypes.c_long(0x100000))[0] == 0:
    os._exit(0)  # PTRACE_SEIZE with PTRACE_O_EXITKILL
""",
        stage=1,
        needs_victim=True,
        afterwards=_traced,
    ),
    Attack(
        "ptrace_any",
        "trace a process of its own",
        """
child = os.fork()
if child == 0:
    time.sleep(3)
    os._exit(0)
result, number = call("ptrace", ctypes.c_long(0x4206), ctypes.c_long(child), ctypes.c_long(0), ctypes.c_long(0))
if not refused(result, number):
    escaped(f"ptrace answered {result}, errno {number}")
os.kill(child, 9)
os.waitpid(child, 0)
""",
    ),
    Attack(
        "nested_namespace",
        "make a user namespace of its own by unshare, clone or clone3",
        """
def inside(how):
    child = os.fork()
    if child == 0:
        how()
        os._exit(0)
    os.waitpid(child, 0)
def by_unshare():
    if call("unshare", ctypes.c_long(0x10000000))[0] == 0:
        escaped("unshare(CLONE_NEWUSER)")
def by_clone():
    number = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
    if number is None:
        return
    got = _libc.syscall(ctypes.c_long(number), ctypes.c_long(0x10000000 | 17), ctypes.c_long(0), ctypes.c_long(0),
                        ctypes.c_long(0), ctypes.c_long(0))
    if got == 0:
        os._exit(0)
    if got > 0:
        escaped("clone(CLONE_NEWUSER)")
def by_clone3():
    arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
    got = call("clone3", ctypes.byref(arguments), ctypes.c_long(88))[0]
    if got == 0:
        os._exit(0)
    if got > 0:
        escaped("clone3(CLONE_NEWUSER)")
for how in (by_unshare, by_clone, by_clone3):
    inside(how)
""",
    ),
    Attack(
        "enter_namespace",
        "enter the namespaces of the machine through /proc",
        """
for pid in (B["suite"], os.getppid(), 1):
    for kind in ("user", "mnt", "net", "pid", "ipc"):
        try:
            if os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}") and kind != "pid":
                continue
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError:
            continue
        if call("setns", ctypes.c_long(fd), ctypes.c_long(0))[0] == 0:
            escaped(f"entered the {kind} namespace of process {pid}")
""",
        control_as_root=True,
    ),
    Attack(
        "mount",
        "mount a file system, by the old call and by the new ones",
        """
os.mkdir(B["mark"])
if _libc.mount(B["mark"].encode(), os.path.abspath(B["mark"]).encode(), b"tmpfs", 0, b"size=4096") == 0:
    escaped("mounted a tmpfs")
fd, number = call("fsopen", b"tmpfs", ctypes.c_long(0))
if fd >= 0:
    escaped("fsopen gave a file system")
fd, number = call("open_tree", ctypes.c_long(-100), b"/", ctypes.c_long(1))
if fd >= 0:
    escaped("open_tree cloned the root")
""",
        stage=1,
        while_held=_mounted,
        control_as_root=True,
    ),
    Attack(
        "hostname",
        "rename the machine",
        """
name = b"renamed-" + B["mark"].encode()
if _libc.sethostname(name, len(name)) == 0:
    say("renamed")
""",
        stage=1,
        while_held=_renamed,
        control_as_root=True,
    ),
    Attack(
        "sysctl",
        "open settings of the kernel for writing",
        """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
             "/sys/kernel/uevent_helper", "/sys/power/state", "/proc/sys/vm/overcommit_memory", "/sys/fs/cgroup/cgroup.procs"):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        continue
    escaped(f"{path} opens for writing")
""",
        control_as_root=True,
    ),
    Attack(
        "devices",
        "open devices of the machine",
        """
harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "stdin", "stdout", "stderr"}
names = {"mem", "kmsg", "kvm", "fuse", "port", "vda", "sda", "nvme0n1", "loop0", "loop-control", "net/tun", "nvidia0"}
try:
    names |= {name for name in os.listdir("/dev") if name not in harmless}
except OSError:
    pass
import stat
for name in sorted(names)[:400]:
    path = "/dev/" + name
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)) or name.startswith(("tty", "vcs", "watchdog", "console")):
            continue
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        continue
    escaped(f"{path} opens for reading")
""",
        control_as_root=True,
    ),
    Attack(
        "io_uring",
        "reach io_uring, which does calls that no filter sees",
        """
result, number = call("io_uring_setup", ctypes.c_long(1), ctypes.create_string_buffer(120))
if not refused(result, number):
    escaped(f"io_uring_setup answered {result}, errno {number}")
""",
    ),
    Attack(
        "bpf",
        "reach bpf",
        """
result, number = call("bpf", ctypes.c_long(11), ctypes.create_string_buffer(128), ctypes.c_long(128))
if not refused(result, number):
    escaped(f"bpf answered {result}, errno {number}")
""",
        control_as_root=True,
    ),
    Attack(
        "perf",
        "reach perf_event_open",
        """
attributes = ctypes.create_string_buffer(128)
attributes[0:8] = (1).to_bytes(4, sys.byteorder) + (128).to_bytes(4, sys.byteorder)
result, number = call("perf_event_open", attributes, ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(-1), ctypes.c_long(0))
if not refused(result, number):
    escaped(f"perf_event_open answered {result}, errno {number}")
""",
        control_as_root=True,
    ),
    Attack(
        "keyring",
        "reach the kernel's key rings",
        """
result, number = call("keyctl", ctypes.c_long(0), ctypes.c_long(-3), ctypes.c_long(1))
if not refused(result, number):
    escaped(f"keyctl answered {result}, errno {number}")
""",
    ),
    Attack(
        "raise_limits",
        "raise its own resource limits, or change those of a process of the machine",
        """
import resource as r
kinds = {"CPU": r.RLIMIT_CPU, "FSIZE": r.RLIMIT_FSIZE, "AS": r.RLIMIT_AS, "NPROC": r.RLIMIT_NPROC, "NOFILE": r.RLIMIT_NOFILE}
bounded = [kind for kind in ("CPU", "FSIZE", "AS") if r.getrlimit(kinds[kind])[1] != r.RLIM_INFINITY]
if not bounded:
    escaped("no limit is set")
for kind, number in kinds.items():
    hard = r.getrlimit(number)[1]
    if hard == r.RLIM_INFINITY:
        continue
    try:
        r.setrlimit(number, (hard + 1, hard + 1))
    except (ValueError, OSError):
        continue
    escaped(f"raised the limit {kind} above {hard}")
try:
    r.prlimit(B["victim"], r.RLIMIT_NOFILE, (16, 16))
except (OSError, ValueError):
    pass
""",
        stage=1,
        needs_victim=True,
        while_held=_limits_moved,
    ),
    Attack(
        "change_files",
        "change mode, times, owner and attributes of a file of the machine, which takes no right to open it",
        """
path = B["property"]
for change in (lambda: os.chmod(path, 0o666), lambda: os.utime(path, (5, 5)), lambda: os.setxattr(path, "user.mark", b"here"),
               lambda: os.chown(path, os.getuid(), os.getgid())):
    try:
        change()
    except OSError:
        pass
""",
        stage=1,
        while_held=_changed,
    ),
    Attack(
        "reschedule",
        "take the processor from a process of the machine",
        """
victim = B["victim"]
for change in (lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
               lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
               lambda: os.sched_setaffinity(victim, [min(os.sched_getaffinity(0))])):
    try:
        change()
    except OSError:
        pass
""",
        stage=1,
        needs_victim=True,
        while_held=_rescheduled,
    ),
    Attack(
        "realtime",
        "take the processors from everybody by real-time scheduling or a higher priority",
        """
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    escaped("SCHED_FIFO")
except OSError:
    pass
before = os.getpriority(os.PRIO_PROCESS, 0)
try:
    os.setpriority(os.PRIO_PROCESS, 0, before - 5)
    escaped(f"priority {before - 5}")
except OSError:
    pass
""",
        control_as_root=True,
    ),
)
