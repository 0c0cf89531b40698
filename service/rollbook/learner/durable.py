"""Making files and directories durable: fsync, and the rename that turns a finished directory into a visible one.

Owns the order write, fsync file, fsync directory, rename, fsync parent. Never decides names or contents. Upholds the
file half of P4: what a ledger row names was complete on storage before the row was written.

Source: ALICE (OSDI 2014) on what a rename without these fsyncs may lose.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def fsync_file(path: Path) -> None:
    """Flush a file's data to storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directory(path: Path) -> None:
    """Flush a directory's entries to storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and flush its data; the directory entry is the caller's to flush."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Create a directory and its parents; existing ones are fine."""
    path.mkdir(parents=True, exist_ok=True)
    fsync_directory(path.parent)


def promote(finished: Path, target: Path) -> None:
    """Give a finished directory its final name. Raises OSError when the name is taken by a directory with content."""
    os.rename(finished, target)
    fsync_directory(target.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no half of it can pass for whole: it loses its name first."""
    doomed = path.with_name(f"tmp.removed.{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    fsync_directory(path.parent)
    shutil.rmtree(doomed)
