"""Which process started which, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def parent(pid: int) -> int | None:
    """Parent of a live process; None for one that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[1])


def descendants(pid: int) -> list[int]:
    """Live processes below a process, nearest first."""
    parents = {p: parent(p) for p in map(int, filter(str.isdigit, os.listdir("/proc")))}
    found, level = [], {pid}
    while level := {p for p, above in parents.items() if above in level and p not in found}:
        found += sorted(level)
    return found
