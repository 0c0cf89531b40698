"""Directory trees that somebody else may have made: as deep, as long-named and as full as they liked.

Owns looking through, measuring and removing them. Never recurses and never follows a link. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator

DEPTH_MAX = 128
"""No program needs a directory that is deeper; below it paths soon become too long to name what is in them."""


def directories(top: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Each directory with its entries, the upper ones first; what vanishes, or cannot be read, is left out."""
    pending = deque([top])
    while pending:
        directory = pending.popleft()
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError:
            continue
        yield directory, entries
        pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def size_of(top: str) -> int:
    """Bytes that the files below a directory occupy; more than any limit where it is deeper than ``DEPTH_MAX``."""
    total, depth_of_top = 0, top.count("/")
    for directory, entries in directories(top):
        if directory.count("/") - depth_of_top > DEPTH_MAX:
            return sys.maxsize
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def remove(top: str) -> None:
    """Remove a tree that nobody changes any more; what cannot be removed stays. However deep it is, no path gets long."""
    moved = 0
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
