"""Roles that live and do not move: noticed by their own record of progress, with the cause named and their stacks kept.

Owns the thread that reads the records, the time of silence and the reports under ``supervisor/hangs``. Never ends a process: the
supervisor asks ``verdict`` and does. Upholds P10, and P9 for what no exit code shows: a role that is stopped, deadlocked or
stuck in the kernel.

Silence is added up look by look. No look counts for more than ``LOOK_MAX_S``, so a supervisor that was itself stopped, or a
machine that slept, accuses nobody. Time in which a role's main thread was ready and got no processor is not its silence. While
the storage takes no bytes nobody can write a record, and no time is counted. Of a process that may run on another node only its
record is known.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollbook.core.config import Config
from rollbook.observe.progress import Bounds, Record, State, progress_file, read_record
from rollbook.supervise.backend import Target
from rollbook.supervise.watchdog import REPORTS_KEPT, Watched, dump_stacks

LOOK_S = 0.5
LOOK_MAX_S = 2.0
NO_STACKS_S = 1.0
"""How long a stopped role is given to write its stacks: it cannot."""


@dataclass(slots=True)
class _Followed:
    """What is known of one role process."""

    record: Record | None = None
    silent_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time it had used when it last moved."""
    queued_s: float = 0.0
    """How long its main thread had waited for a processor at the last look."""


class HangWatch:
    """Follows the roles of one run from its own thread; ``start`` and ``stop`` bracket it."""

    def __init__(self, config: Config, watched: Callable[[], Sequence[Watched]], emit: Callable[[str], None]) -> None:
        """``watched`` lists the live roles, ``emit`` tells a person."""
        self._run_dir, self._bounds = Path(config.run.dir), Bounds.of(config)
        self._watched, self._emit = watched, emit
        self._followed: dict[str, _Followed] = {}
        self._verdicts: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hangs", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def verdict(self, incarnation: str) -> str:
        """Why this process must be ended; empty while it need not."""
        return self._verdicts.get(incarnation, "")

    def left_in(self, record: Target) -> str:
        """What a process that ended with exit code 0 was in the middle of; empty when its work was done, or nobody knows.

        A library that ends the process of its own accord leaves the same code as a role that is done.
        """
        said = read_record(progress_file(self._run_dir, record.name))
        if said is None or said.incarnation != record.incarnation or said.state == State.ENDING:
            return ""
        return f" while {said.state}: something ended the process before its work was done"

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            try:
                self.look(min(now - looked_at, LOOK_MAX_S))
            except Exception as error:  # noqa: BLE001 - boundary of the thread: whatever fails here, the watch goes on
                self._emit(f"the watch for hung roles failed, and goes on: {error!r}")
            looked_at = now

    def look(self, passed_s: float) -> None:
        """Read every record; ``passed_s`` is the time that counts since the last look."""
        live = list(self._watched())
        if not live or not self._storage_works():
            return
        known = {one.record.incarnation for one in live}
        self._followed = {key: value for key, value in self._followed.items() if key in known}
        self._verdicts = {key: value for key, value in self._verdicts.items() if key in known}
        for one in live:
            followed = self._followed.setdefault(one.record.incarnation, _Followed())
            self._follow(one, followed, passed_s)
            bound_s = self._bound_s(one, followed)
            if followed.silent_s > bound_s and one.record.incarnation not in self._verdicts:
                self._judge(one, followed, bound_s)

    def _follow(self, one: Watched, followed: _Followed, passed_s: float) -> None:
        record = read_record(progress_file(self._run_dir, one.record.name))
        pid = _here(one.record)
        queued = queued_s(pid)
        if record is not None and record.incarnation == one.record.incarnation and record != followed.record:
            followed.record, followed.silent_s, followed.cpu_s = record, 0.0, cpu_s(pid)
        else:
            followed.silent_s += max(0.0, passed_s - (queued - followed.queued_s))
        followed.queued_s = queued

    def _bound_s(self, one: Watched, followed: _Followed) -> float:
        """A process that is stopped cannot be at work, whatever it did before."""
        bound_s = self._bounds.silence_s(followed.record.state if followed.record else State.STARTING)
        return min(bound_s, self._bounds.idle_s) if kernel_state(_here(one.record)) in ("T", "t") else bound_s

    def _storage_works(self) -> bool:
        probe = progress_file(self._run_dir, ".supervisor")
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text(f"{time.monotonic():.3f}\n")
        except OSError:
            return False
        return True

    def _judge(self, one: Watched, followed: _Followed, bound_s: float) -> None:
        pid = _here(one.record)
        cause = cause_of(pid, cpu_s(pid) - followed.cpu_s) if pid else "it runs on another node, which says no more of it"
        doing = followed.record.state if followed.record else State.STARTING
        last = f", last: {followed.record.finished}" if followed.record and followed.record.finished else ""
        text = f"no progress for {followed.silent_s:.0f} s (allowed: {bound_s:.0f} s) while {doing}{last}; {cause}"
        stopped = kernel_state(pid) in ("T", "t")
        stacks = dump_stacks([one], *([NO_STACKS_S] if stopped else []))
        file = self._keep(one, text, stacks)
        self._emit(f"HANG: {one.record.name} (pid {one.record.pid}): {text}; stacks in {file}")
        self._verdicts[one.record.incarnation] = text

    def _keep(self, one: Watched, text: str, stacks: dict[str, str]) -> Path:
        folder = self._run_dir / "supervisor" / "hangs"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{one.record.name}.txt"
        parts = [text, *(f"===== {name}\n{stack}" for name, stack in stacks.items()), kernel_stacks(_here(one.record))]
        file.write_text("\n".join(parts) + "\n")
        for old in sorted(folder.glob("*.txt"))[:-REPORTS_KEPT]:
            old.unlink(missing_ok=True)
        return file


def _here(record: Target) -> int:
    """The pid of a process of this machine; 0, which is nobody's, for one that may be elsewhere."""
    return record.pid if record.is_here else 0


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` behind the name; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def kernel_state(pid: int) -> str:
    """R running, S asleep, D in the kernel, T stopped, Z dead; empty when it is gone."""
    return next(iter(_stat(pid)), "")


def cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def queued_s(pid: int) -> float:
    """How long the main thread was ready to run and waited for a processor; 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def cause_of(pid: int, used_s: float) -> str:
    """What a silent process is doing as the kernel sees it, in words; ``used_s``: processor time used in the silence."""
    state = kernel_state(pid)
    if state in ("T", "t"):
        return "the process is stopped (SIGSTOP or a debugger)"
    if state == "D":
        return "the process is stuck in the kernel, waiting for a disk or a device"
    if used_s >= 1.0:
        return f"the process runs ({used_s:.0f} s of processor time meanwhile) without getting on"
    return "the process sleeps and uses no processor: a deadlock, or a wait without an end"


def kernel_stacks(pid: int) -> str:
    """Where each thread waits inside the kernel, which also a stopped process shows; what cannot be read is left out."""
    lines = ["===== threads in the kernel"]
    try:
        tasks = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return lines[0]
    for task in tasks:
        folder = Path(f"/proc/{pid}/task/{task}")
        try:
            lines.append(f"{task} {(folder / 'comm').read_text().strip()}: {(folder / 'wchan').read_text() or '?'}")
        except OSError:
            continue
    return "\n".join(lines)
