"""The system calls that model-written code does not get: a filter in classic BPF, assembled here.

Owns the list, for x86_64 and aarch64. Denied calls fail with EPERM, so that a program sees an error and not a death. ``clone3``
says ENOSYS: its flags lie in memory where no filter sees them, and the C library then uses ``clone``, whose namespace flags are
denied. Calls that name a process may name the caller only. Where a job sees the machine's own files, perhaps as their
owner (``shared``), it gives no file an owner or attribute, and a change of mode or time is said to be done and is not: ordinary
programs copy both. Never allows what is not this machine's own call table (x32 on x86_64). Source: seccomp(2).
"""

from __future__ import annotations

import errno
import platform
import struct

from rollbook.sandbox.kernel import ANY_NAMESPACE

_LD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 1, 5, 0xF
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PR_SET_DUMPABLE = 4
_OF_ITSELF = {
    "x86_64": {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "prlimit": 302, "sched_setattr": 314},
    "aarch64": {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "prlimit": 261, "sched_setattr": 274},
}
"""Calls whose first argument is a process; 0 is the caller."""
_OF_KIND = {
    "x86_64": {"setpriority": (141, 0), "ioprio_set": (251, 1)}, "aarch64": {"setpriority": (140, 0), "ioprio_set": (30, 1)},
}  # fmt: skip
"""Calls whose first argument says what the second is, and that number for a process: its group and its user are not its own."""

_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
    "statmount": 457, "listmount": 458, "lsm_get_self_attr": 459, "lsm_set_self_attr": 460, "open_tree_attr": 467,
}  # fmt: skip
DENIED = {
    "x86_64": _COMMON | {
        "shmget": 29, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "semget": 64, "msgget": 68,
        "ptrace": 101, "syslog": 103, "mknod": 133, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
        "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
        "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "mq_open": 240, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256, "mknodat": 259, "unshare": 272,
        "vmsplice": 278, "move_pages": 279, "accept4": 288, "perf_event_open": 298, "fanotify_init": 300,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "seccomp": 317, "memfd_create": 319,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_setup": 206, "io_submit": 209,
    },
    "aarch64": _COMMON | {
        "io_setup": 0, "io_submit": 2, "semget": 190, "lookup_dcookie": 18, "mknodat": 33, "umount2": 39, "mount": 40,
        "pivot_root": 41, "nfsservctl": 42, "chroot": 51, "quotactl": 60, "vmsplice": 75, "acct": 89, "personality": 92,
        "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116,
        "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
        "mq_open": 180, "msgget": 186, "shmget": 194, "socket": 198, "bind": 200, "listen": 201, "accept": 202,
        "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235,
        "get_mempolicy": 236, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241,
        "accept4": 242, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "seccomp": 277,
        "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
"""Numbers by machine and name. Memory that no resident size shows (memfd, System V) is among them."""
_FILES = {"setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
DENIED_SHARED = {
    "x86_64": _FILES | {
        "sendmsg": 46, "chown": 92, "fchown": 93, "lchown": 94, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "fchownat": 260, "sendmmsg": 307,
    },
    "aarch64": _FILES | {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "fchownat": 54, "fchown": 55, "sendmsg": 211, "sendmmsg": 269,
    },
}  # fmt: skip
"""Beside ``DENIED``: no rule of landlock holds for them. A file on its way in a message is one that nobody could count."""
IGNORED_SHARED = {
    "x86_64": {
        "chmod": 90, "fchmod": 91, "utime": 132, "utimes": 235, "futimesat": 261, "fchmodat": 268, "utimensat": 280,
        "fchmodat2": 452,
    },
    "aarch64": {"fchmod": 52, "fchmodat": 53, "utimensat": 88, "fchmodat2": 452},
}  # fmt: skip
"""Said to be done."""


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def filter_program(machine: str | None = None, shared: bool = False) -> bytes:
    """Instructions for ``kernel.install_filter``. Raises OSError (a machine whose calls are not known here)."""
    machine = machine or platform.machine()
    if machine not in DENIED:
        raise OSError(errno.ENOTSUP, f"no system call table for {machine}; known are {', '.join(DENIED)}")
    deny = _op(_RET, _ERRNO | errno.EPERM)
    program = [_op(_LD, _ARCH), _op(_JEQ, _AUDIT[machine], 1, 0), _op(_RET, _KILL), _op(_LD, _NR)]
    if machine == "x86_64":
        program += [_op(_JGE, _X32, 0, 1), deny]
    program += [_op(_JEQ, _CLONE3, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    for number in sorted([*DENIED[machine].values(), *(DENIED_SHARED[machine].values() if shared else ())]):
        program += [_op(_JEQ, number, 0, 1), deny]
    allow = _op(_RET, _ALLOW)
    if shared:
        for number in sorted(IGNORED_SHARED[machine].values()):
            program += [_op(_JEQ, number, 0, 1), _op(_RET, _ERRNO)]
        # Whoever makes itself unreadable hides the files that it holds from a watcher of the same user.
        program += [_op(_JEQ, _PRCTL[machine], 0, 4), _op(_LD, _ARG0), _op(_JEQ, _PR_SET_DUMPABLE, 0, 1), deny, allow]
    for number in sorted(_OF_ITSELF[machine].values()):
        program += [_op(_JEQ, number, 0, 4), _op(_LD, _ARG0), _op(_JEQ, 0, 0, 1), allow, deny]
    for number, process in sorted(_OF_KIND[machine].values()):
        program += [_op(_JEQ, number, 0, 6), _op(_LD, _ARG0), _op(_JEQ, process, 0, 3)]
        program += [_op(_LD, _ARG1), _op(_JEQ, 0, 0, 1), allow, deny]
    # A pair of datagram sockets would send to any socket that has a name; connected ones reach each other only.
    program += [_op(_JEQ, _SOCKETPAIR[machine], 0, 8), _op(_LD, _ARG0), _op(_JEQ, _AF_UNIX, 0, 5), _op(_LD, _ARG1)]
    program += [_op(_AND, _SOCK_TYPE_MASK), _op(_JEQ, _SOCK_STREAM, 1, 0), _op(_JEQ, _SOCK_SEQPACKET, 0, 1), allow, deny]
    program += [_op(_JEQ, _CLONE[machine], 0, 3), _op(_LD, _ARG0), _op(_JSET, ANY_NAMESPACE, 0, 1), deny]
    return b"".join([*program, allow])
