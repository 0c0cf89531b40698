"""Control groups for memory, processes and processor time of a whole job, where this machine lets us make them.

Owns one group per zygote and slot, in version 1 or 2. Never fails a job: without groups the watcher's own polling bounds it, and
what bounded it is said (``enforced``). Standard library only. Source: cgroups(7).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "rollbook-sandbox"


class Groups:
    """The groups of one slot of one zygote."""

    def __init__(self, slot: int) -> None:
        self._memory = self._pids = self._cpu = None
        name = f"{os.getpid()}-{slot}"
        if (ROOT / "cgroup.controllers").is_file():
            self._version = 2
            self._memory = self._pids = self._cpu = _make(ROOT / NAME / name, ROOT)
        else:
            self._version = 1
            self._memory, self._pids = _make(ROOT / "memory" / NAME / name), _make(ROOT / "pids" / NAME / name)
            self._cpu = _make(ROOT / "cpuacct" / NAME / name)

    @property
    def enforced(self) -> tuple[str, ...]:
        """What the groups bound."""
        kinds = (("memory:cgroup", self._memory), ("pids:cgroup", self._pids), ("cpu:cgroup", self._cpu))
        return tuple(kind for kind, group in kinds if group)

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set both limits; what cannot be set is not enforced from then on."""
        try:
            if self._memory:
                name = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
                swap = "memory.swap.max" if self._version == 2 else "memory.memsw.limit_in_bytes"
                with contextlib.suppress(OSError):  # the last job's may be below what this one is to have
                    (self._memory / swap).write_text("max" if self._version == 2 else "-1")
                (self._memory / name).write_text(str(memory_bytes))
                with contextlib.suppress(OSError):  # absent where swap is not accounted
                    (self._memory / swap).write_text("0" if self._version == 2 else str(memory_bytes))
        except OSError:
            self._memory = None
        try:
            if self._pids:
                (self._pids / "pids.max").write_text(str(processes))
        except OSError:
            self._pids = None

    def join(self, pid: int) -> None:
        """Put a process, and what it will start, into the groups."""
        for group in {self._memory, self._pids, self._cpu} - {None}:
            try:
                (group / "cgroup.procs").write_text(str(pid))  # type: ignore[operator]
            except OSError:
                self._memory = None if group is self._memory else self._memory
                self._pids = None if group is self._pids else self._pids
                self._cpu = None if group is self._cpu else self._cpu

    def counts(self) -> tuple[int, int]:
        """(kills for memory, refused forks) since the groups exist."""
        oom_file = "memory.events" if self._version == 2 else "memory.oom_control"
        return _count(self._memory, oom_file, "oom_kill"), _count(self._pids, "pids.events", "max")

    def cpu_s(self) -> float:
        """Processor time of all that was in the group since it exists; 0 where it is not counted."""
        if self._version == 2:
            return _count(self._cpu, "cpu.stat", "usage_usec") / 1e6
        try:
            return int((self._cpu / "cpuacct.usage").read_text()) / 1e9 if self._cpu else 0.0
        except (OSError, ValueError):
            return 0.0

    def remove(self) -> None:
        """Remove the groups; harmless when they are gone."""
        for group in {self._memory, self._pids, self._cpu} - {None}:
            with contextlib.suppress(OSError):
                group.rmdir()  # type: ignore[union-attr]


def _make(group: Path, needs_controllers_of: Path | None = None) -> Path | None:
    """The group, or None where it cannot be made."""
    try:
        if needs_controllers_of is not None:
            enabled = (needs_controllers_of / "cgroup.subtree_control").read_text().split()
            if not {"memory", "pids"} <= set(enabled):
                return None
            group.parent.mkdir(exist_ok=True)
            (group.parent / "cgroup.subtree_control").write_text("+memory +pids")
        elif not group.parent.parent.is_dir():
            return None
        group.parent.mkdir(exist_ok=True)
        _sweep(group.parent)
        group.mkdir(exist_ok=True)
        return group
    except OSError:
        return None


def _sweep(parent: Path) -> None:
    """Remove groups of zygotes that are gone."""
    for group in parent.iterdir():
        pid = group.name.partition("-")[0]
        if group.is_dir() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _count(group: Path | None, file: str, name: str) -> int:
    if group is None:
        return 0
    try:
        words = dict(line.split() for line in (group / file).read_text().splitlines() if len(line.split()) == 2)
        return int(words.get(name, 0))
    except (OSError, ValueError):
        return 0
