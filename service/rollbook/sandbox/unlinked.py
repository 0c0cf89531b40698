"""Files without a name that the processes of a job still hold: they occupy the disk, and no directory shows them.

Owns finding and measuring them through /proc: descriptors of every thread, since one may have a table of its own, and mappings,
which outlive their descriptor. Believes a thread that hides its descriptors to hold too much. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field

_VSIZE = 20
"""Place of the size of a thread's memory among the fields of proc_pid_stat(5) from the third on: 0 while it ends."""
_DELETED = b" (deleted)"


@dataclass(slots=True)
class Unlinked:
    """What is held of one directory for scratch space, look by look."""

    scratch: str
    """Its real path, which is what /proc shows."""
    _device: int = field(init=False)
    _suspect: set[int] = field(default_factory=set)
    """Files that were mapped at the last look, but that nobody had open."""

    def __post_init__(self) -> None:
        """Before the job begins: it could shut its directory. Raises OSError."""
        fd, path = tempfile.mkstemp(dir=self.scratch)
        try:
            os.unlink(path)
            self._device = os.fstat(fd).st_dev  # not the directory's: where layers are merged its files have another one
        finally:
            os.close(fd)

    def occupied(self, pids: Iterable[int]) -> int:
        """Bytes that files without a name occupy; more than any limit where some of them cannot be measured."""
        sizes: dict[int, int] = {}
        mapped: set[int] = set()
        for task in (f"/proc/{pid}/task/{name}" for pid in pids for name in _listed(f"/proc/{pid}/task")):
            mapped |= self._mapped(task)
            try:
                sizes.update(_open(task, self._device))
            except PermissionError:
                if os.geteuid() and _has_memory(task):
                    return sys.maxsize
        # Between two readings a file may have been opened, mapped and closed: what stays so was done on purpose.
        suspect, self._suspect = self._suspect, mapped - sizes.keys()
        return sys.maxsize if suspect & self._suspect else sum(sizes.values())

    def _mapped(self, task: str) -> set[int]:
        """Numbers of the files without a name that a thread has mapped."""
        try:
            with open(f"{task}/maps", "rb") as file:
                lines = file.read().split(b"\n")
        except OSError:
            return set()
        top = os.fsencode(self.scratch) + b"/"
        fields = [line.split(None, 5) for line in lines if line.endswith(_DELETED)]
        return {int(found[4]) for found in fields if len(found) == 6 and found[5].startswith(top)}


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _open(task: str, device: int) -> dict[int, int]:
    """Bytes of each file without a name that a thread has open, by its number. Raises PermissionError."""
    found = {}
    for fd in _listed(f"{task}/fd"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            known = os.stat(f"{task}/fd/{fd}")
            if stat.S_ISREG(known.st_mode) and not known.st_nlink and known.st_dev == device:
                found[known.st_ino] = known.st_blocks * 512
    return found


def _has_memory(task: str) -> bool:
    """Whether a thread is more than the remains of one that has ended."""
    try:
        with open(f"{task}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[_VSIZE] != b"0"
    except (OSError, IndexError):
        return False
