"""How often the kernel has killed a process here for want of memory: what a bare SIGKILL does not say.

Owns where that is counted. Never frees anything. Sandboxes have control groups of their own, in which such kills belong to the
day's work; so this group's own count goes first, and those that hold the groups below as well only where it is missing.
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
    """Where groups may count, the narrowest first. In a container the path of a group may begin above what is mounted."""
    parts = [line.split(":", 2) for line in _lines(OWN_CGROUP)]
    own = {part[1]: part[2].lstrip("/") for part in parts if len(part) == 3}
    v1 = next((path for controllers, path in own.items() if "memory" in controllers.split(",")), None)
    if v1 is not None:
        yield from (CGROUPS / "memory" / at / "memory.oom_control" for at in (v1, ""))
    for name in ("memory.events.local", "memory.events"):
        yield from (CGROUPS / at / name for at in (own.get("", ""), ""))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
