"""How often the kernel has killed a process here for want of memory: what a bare SIGKILL does not say.

Owns where that is counted. Never frees anything. Sandboxes have control groups of their own, in which such kills belong to the
day's work; so this group's own count goes first, and one that holds the groups below as well only where it is missing.
Source: the kernel's admin-guide, cgroup-v1/memory (memory.oom_control) and cgroup-v2 (memory.events.local).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

VMSTAT, CGROUPS, OWN_CGROUP = Path("/proc/vmstat"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def oom_kills() -> int:
    """Kills in this control group where it counts them, else on the whole machine; 0 where nobody counts."""
    for file in (*_counters(), VMSTAT):
        for line in _lines(file):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


def _counters() -> Iterator[Path]:
    """Where groups may count: this process's first, then those above it, which count where it has no count of its own."""
    for line in _lines(OWN_CGROUP):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names: tuple[str, ...]
        if "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.oom_control",)
        elif not controllers:
            root, names = CGROUPS, ("memory.events.local", "memory.events")
        else:
            continue
        at = _group(root, path)
        for group in (at, *at.parents[: len(at.relative_to(root).parts)]):
            yield from (group / name for name in names)


def _group(root: Path, path: str) -> Path:
    """Directory of a group. In a container its path may begin above what is mounted at ``root``."""
    parts = Path(path.lstrip("/")).parts
    return next((found for i in range(len(parts)) if (found := root.joinpath(*parts[i:])).is_dir()), root)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
