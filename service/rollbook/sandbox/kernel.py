"""The system calls a sandbox is made of, through the C library; standard library only.

Owns constants and the error that names the call. Never decides what to isolate. Sources: unshare(2), mount(2), pivot_root(2),
prctl(2), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
ANY_NAMESPACE = NAMESPACES | CLONE_NEWUSER | CLONE_NEWCGROUP

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
SECCOMP_MODE_FILTER = 2
CAPS_LAST = 63
_CAPABILITY_VERSION_3 = 0x20080522
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces. Raises OSError."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount. Raises OSError."""
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    _check(_libc.mount(*encoded, flags, options.encode() if options else None), f"mount {source} on {target}")


def restrict_mounts(target: str, flags: int) -> None:
    """Give the mount at ``target`` and all mounts below it ``flags`` (read-only, no set-user-id, no devices). Raises OSError."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # MOUNT_ATTR_* equal MS_* for these
    arguments = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE), attributes, ctypes.c_size_t(32))
    _check(_libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")


def unmount(target: str) -> None:
    """Detach a mount lazily. Raises OSError."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make ``new_root`` the root of the mount namespace. Raises OSError."""
    number = _PIVOT_ROOT[platform.machine()]
    _check(_libc.syscall(ctypes.c_long(number), new_root.encode(), put_old.encode()), "pivot_root")


def prctl(option: int, *values: int) -> None:
    """Raises OSError."""
    _check(_libc.prctl(option, *values, *[0] * (4 - len(values))), f"prctl({option})")


def drop_capabilities() -> None:
    """Give up every capability, also those a program could get back. Raises OSError."""
    for capability in range(CAPS_LAST + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the first number this kernel does not know, or no right to: the sets below are what counts
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_filter(instructions: bytes) -> None:
    """Filter every later system call of this process and its children. Raises OSError."""
    program = _Program(len(instructions) // 8, instructions)
    _check(
        _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.cast(ctypes.pointer(program), ctypes.c_void_p).value or 0, 0, 0),
        "seccomp",
    )
