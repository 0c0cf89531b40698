"""Directory trees that somebody else may have made: as deep, as long-named and as full as they liked.

Owns looking through, measuring and removing them. Never recurses and never follows a link. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator

ENTRIES_MAX = 4096
"""Of a directory for scratch space with all below it: each takes room that its size does not show."""
DEPTH_MAX = 128
"""No program needs a directory that is deeper; below it paths soon become too long to name what is in them."""
REMOVE_S = 10.0
"""Longest removal of a tree: somebody may still be filling it."""
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
    """Remove a tree; what cannot be removed in ``REMOVE_S`` stays. However deep it is, no path gets long; no link is followed."""
    until = time.monotonic() + REMOVE_S
    token = os.urandom(8).hex()  # a name that nothing in the tree has
    names = (f".{token}.{number}" for number in itertools.count())
    with contextlib.suppress(OSError):
        fd = _opened(top)
        try:
            while _flatten(fd, names, until):
                pass
        finally:
            os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(top)


def _opened(name: str, parent: int | None = None) -> int:
    """Descriptor of a directory, whatever its mode was, in which we may do anything now. Raises OSError (it is a link)."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        # Through the descriptor: by its name it could be a link by now. One for reading cannot be had before.
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
    finally:
        os.close(place)


def _flatten(top: int, names: Iterator[str], until: float) -> bool:
    """Remove files, move what lies in a directory up to the top, remove empty directories; whether that may help once more."""
    progress = False
    for name in os.listdir(top):
        if time.monotonic() > until:
            return False
        if _unlinked(name, top):
            progress = True
            continue
        with contextlib.suppress(OSError):
            fd = _opened(name, top)
            try:
                for inner in os.listdir(fd):
                    if time.monotonic() > until:
                        return False
                    progress = _unlinked(inner, fd) or _moved(inner, fd, next(names), top) or progress
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=top)
            progress = True
    return progress


def _unlinked(name: str, parent: int) -> bool:
    try:
        os.unlink(name, dir_fd=parent)
    except OSError:
        return False
    return True


def _moved(name: str, parent: int, new: str, top: int) -> bool:
    try:
        os.close(_opened(name, parent))  # one that its owner may not write cannot be moved to another directory
        os.rename(name, new, src_dir_fd=parent, dst_dir_fd=top)
    except OSError:
        return False
    return True
