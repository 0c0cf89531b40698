"""Nodes of a run as its own record of placements knows them: ``supervisor/placements.jsonl``, a line per started process.

Owns the reading of that file for roles on this machine, and a node found by one of its roles: the raylet above it, and all that
descends from the raylet. Never imports Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

from drills.proc import descendants, parent
from rollbook.supervise.process import ProcessRecord, start_time

DIE_S = 15.0
REJOIN_S = 300.0


def placements(run_dir: Path) -> dict[str, dict]:
    """The newest placement of every role that was started on this machine; empty where the backend keeps none."""
    found: dict[str, dict] = {}
    with contextlib.suppress(OSError):
        for line in (run_dir / "supervisor" / "placements.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["host"] == socket.gethostname():
                    found[entry["role"]] = entry
    return found


def placed_records(run_dir: Path) -> dict[str, ProcessRecord]:
    """The same as process records: known by pid and start time, so a recycled pid is never signalled."""
    return {
        role: ProcessRecord(role, int(e["pid"]), int(e["start_time"]), e["incarnation"])
        for role, e in placements(run_dir).items()
        if e.get("pid")
    }


def raylet_above(pid: int) -> int | None:
    """The raylet that a process descends from."""
    above: int | None = pid
    while above is not None and above > 1:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{above}/comm").read_text().strip() == "raylet":
                return above
        above = parent(above)
    return None


class PlacedNode:
    """One raylet that runs roles of a run. ``rejoin`` is a command of the caller's; without one nobody brings it back."""

    def __init__(self, name: str, raylet: int, rejoin: str = "") -> None:
        self.name, self.raylet, self._rejoin = name, raylet, rejoin

    def pids(self) -> list[int]:
        """The raylet and everything below it."""
        return [self.raylet, *descendants(self.raylet)] if start_time(self.raylet) is not None else []

    def kill(self) -> int:
        """Stopped first, so that none reacts to another's death; then SIGKILL, and seen gone."""
        tree = {pid: start_time(pid) for pid in self.pids()}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + DIE_S
        while left := [pid for pid, began in tree.items() if began is not None and start_time(pid) == began]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {self.name} does not die: {left}")
            time.sleep(0.02)
        return len(tree)

    def rejoin(self) -> None:
        """Run the caller's command, for example a ``ray start``. Raises CalledProcessError."""
        if self._rejoin:
            subprocess.run(shlex.split(self._rejoin), check=True, timeout=REJOIN_S, stdin=subprocess.DEVNULL)


def placed_nodes(run_dir: Path, rejoin: str = "") -> list[PlacedNode]:
    """The nodes on this machine where live roles of the run were placed, by name; none for a local run."""
    found: dict[str, PlacedNode] = {}
    for entry in placements(run_dir).values():
        if entry.get("node_id") and start_time(int(entry["pid"])) == entry["start_time"]:
            raylet = raylet_above(int(entry["pid"]))
            if raylet is not None:
                found.setdefault(entry["node"], PlacedNode(entry["node"], raylet, rejoin))
    return [found[name] for name in sorted(found)]
