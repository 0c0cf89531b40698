"""A small disk of the drill's own, seen by nobody else: a tmpfs in a mount namespace of this process and its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def private_namespace() -> str:
    """Leave the machine's mounts; empty when it worked, else why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return os.strerror(ctypes.get_errno())
    return ""


class SmallDisk:
    """A file system of a given size at ``place``. Raises OSError where none may be mounted."""

    def __init__(self, place: Path, size: str) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        self._mount("-t", "tmpfs", "-o", f"size={size}", "none", str(place))

    def fill(self) -> None:
        """Take every byte that is left."""
        left = os.statvfs(self.place)
        with (self.place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(left.f_bavail):
                file.write(b"\0" * left.f_frsize)

    def free(self) -> None:
        (self.place / "filler").unlink(missing_ok=True)

    def read_only(self, on: bool) -> None:
        """Refuse writes, or take them again; a file that is open for writing keeps a mount as it is. Raises OSError."""
        self._mount("-o", f"remount,{'ro' if on else 'rw'}", str(self.place))

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
