"""Directory trees that somebody else may have made: as deep, as long-named and as full as they liked.

Owns looking through, measuring and removing them. Never recurses and never follows a link. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Iterator

ENTRIES_MAX = 4096
"""Of a directory for scratch space with all below it: each takes room that its size does not show."""
DEPTH_MAX = 128
"""No program needs a directory that is deeper; below it paths soon become too long to name what is in them."""
_HIDING = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def directories(top: str, strict: bool = False) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Each directory with its entries, the upper ones first; what vanishes, or cannot be read, is left out.

    Raises OSError where ``strict``: one that cannot be read, although it is there.
    """
    pending = deque([top])
    while pending:
        directory = pending.popleft()
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError as error:
            if strict and error.errno in _HIDING:
                raise
            continue
        yield directory, entries
        pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def size_of(top: str) -> int:
    """Bytes that the files below a directory occupy.

    More than any limit where it is deeper than ``DEPTH_MAX``, has more than ``ENTRIES_MAX`` entries, or hides some.
    """
    total, n, depth_of_top = 0, 0, top.count("/")
    try:
        for directory, entries in directories(top, strict=True):
            n += len(entries)
            if n > ENTRIES_MAX or directory.count("/") - depth_of_top > DEPTH_MAX:
                return sys.maxsize
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return sys.maxsize
    return total


def remove(top: str) -> None:
    """Remove a tree that nobody changes any more; what cannot be removed stays. However deep it is, no path gets long."""
    moved = 0
    with contextlib.suppress(OSError):
        os.chmod(top, 0o700)
    while True:
        try:
            with os.scandir(top) as found:
                entries = list(found)
        except OSError:
            return
        before = moved
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    moved += 1
                    continue
                os.chmod(entry.path, 0o700)
                for name in os.listdir(entry.path):
                    os.rename(f"{entry.path}/{name}", f"{top}/.{moved}.removed")
                    moved += 1
                os.rmdir(entry.path)
                moved += 1
        if moved == before:
            break
    with contextlib.suppress(OSError):
        os.rmdir(top)
