"""Making files and directories durable: fsync, and the rename that turns a finished directory into a visible one.

Owns the order write, fsync file, fsync directory, rename, fsync parent. Never decides names or contents. Upholds the
file half of P4: what a ledger row names was complete on storage before the row was written.

Source: ALICE (OSDI 2014) on what a rename without these fsyncs may lose.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollbook.core.host import fsync_directory, host
from rollbook.observe.failpoints import failpoint


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give an error of writing the name of the file: a full disk must say which one.

    Raises:
        OSError: with errno, text and file name.
    """
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def fsync_file(path: Path) -> None:
    """Flush a file's data to storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        host().fsync(fd, path)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and flush its data; the directory entry is the caller's to flush. Raises OSError naming the file."""
    with _named(path), open(path, "xb") as file:
        host().writing(path)
        middle = len(data) // 2
        file.write(data[:middle])
        file.flush()
        failpoint("learner.durable.mid_write")
        file.write(data[middle:])
        file.flush()
        host().fsync(file.fileno(), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and flush its data, as ``write_durably`` does."""
    with _named(path):
        host().writing(path)
        save_file(dict(tensors), path, metadata=metadata)
        fsync_file(path)


def make_directory(path: Path) -> None:
    """Create a directory and its parents; existing ones are fine."""
    path.mkdir(parents=True, exist_ok=True)
    fsync_directory(path.parent)


def promote(finished: Path, target: Path) -> None:
    """Give a finished directory its final name. Raises OSError when the name is taken by a directory with content."""
    os.rename(finished, target)
    failpoint("learner.durable.after_rename")
    fsync_directory(target.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no half of it can pass for whole: it loses its name first."""
    doomed = path.with_name(f"tmp.removed.{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    failpoint("learner.durable.after_doom")
    fsync_directory(path.parent)
    failpoint("learner.durable.before_unlink")
    shutil.rmtree(doomed)
