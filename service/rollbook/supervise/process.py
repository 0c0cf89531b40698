"""One child process of a role: start it in its own process group, know it again after a restart, end it as a tree.

Owns process identity: (pid, start time from /proc), so a recycled pid is never killed. Never decides when to restart.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none (or only a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent dies, so that no role outlives its supervisor."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What identifies a started process across supervisor restarts."""

    name: str
    pid: int
    start_time: int
    incarnation: str

    def alive(self) -> bool:
        return start_time(self.pid) == self.start_time

    def kill_group(self, signal_number: int = signal.SIGKILL) -> None:
        """Signal the whole process group, if its leader is still the process we started."""
        if self.alive():
            try:
                os.killpg(self.pid, signal_number)
            except ProcessLookupError:
                pass


def start(
    name: str, argv: Sequence[str], log: Path, env: dict[str, str], supersedes: str
) -> tuple[subprocess.Popen, ProcessRecord]:
    """Start a role in its own session with its output appended to ``log``."""
    incarnation = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **env, "ROLLBOOK_INCARNATION": incarnation, "ROLLBOOK_SUPERSEDES": supersedes,
                 "ROLLBOOK_SUPERVISED": "1"},
        )  # fmt: skip
    return child, ProcessRecord(name, child.pid, start_time(child.pid) or 0, incarnation)


def role_command(*args: str) -> list[str]:
    """Command line of a role of this installation."""
    return [sys.executable, "-m", "rollbook.cli.main", *args]


class ProcessTable:
    """The processes a run has started, durable on disk so that the next supervisor can end what is left of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, ProcessRecord] = {}
        if path.exists():
            self._records = {r["name"]: ProcessRecord(**r) for r in json.loads(path.read_text())}

    def records(self) -> dict[str, ProcessRecord]:
        return dict(self._records)

    def put(self, record: ProcessRecord) -> None:
        """Remember the newest process of a role; written before anything depends on it."""
        self._records[record.name] = record
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps([asdict(r) for r in self._records.values()]))
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.rename(self._path)

    def last_lines(self, log: Path, n: int = 20) -> str:
        """Tail of a role's log: the first cause shown to a human."""
        if not log.exists():
            return ""
        return "\n".join(log.read_text(errors="replace").splitlines()[-n:])
