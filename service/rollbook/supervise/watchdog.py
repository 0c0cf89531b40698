"""Is the run getting on? Asks the ledger server for the run's position, and reports loudly when it stands still.

Owns the thread that asks, the time of the last finished step and the stall reports under ``supervisor/stalls``. Never
ends a process: the supervisor asks ``unanswered_s`` and decides. Upholds P10: no progress for T seconds is an alarm with
a stack dump of every role.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, DeadlineExceeded, PermissionDenied, RollbookError, Unauthenticated, Unavailable
from rollbook.core.records import ResumePoint
from rollbook.core.security import OBSERVER
from rollbook.rpc.address import addresses_in
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.credentials import client_access
from rollbook.supervise import logs
from rollbook.supervise.backend import Target

FIRST_LOOK_S = 0.1
LOOK_S = 1.0
ANSWER_S = 10.0
DUMP_S = 5.0
"""How long a role may take to write its stacks; one that is stopped never does."""
DUMP_BYTES_MAX = 1 << 20
REPORTS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Watched:
    """One live role process and the file it writes to."""

    record: Target
    log: Path


class Watchdog:
    """Follows one run from its own thread; ``start`` and ``stop`` bracket it."""

    def __init__(self, config: Config, watched: Callable[[], Sequence[Watched]], emit: Callable[[str], None]) -> None:
        """``watched`` lists the live roles, ``emit`` tells a person."""
        self._config, self._watched, self._emit = config, watched, emit
        self._client = LedgerClient(
            addresses_in(config.run.dir, config.ledger.addresses), config.run.id, timeout_s=ANSWER_S, retry_total_s=0.0,
            access=client_access(config.security, OBSERVER, os.environ),
        )  # fmt: skip
        self._stalls = Path(config.run.dir) / "supervisor" / "stalls"
        self._stop = threading.Event()
        self._unanswered_since: float | None = None
        self._reported_at = self.progress_at = time.monotonic()
        self.point: ResumePoint | None = None
        """Newest answer; None until the ledger server has answered once."""
        self.turned_away: RollbookError | None = None
        """Why the ledger server does not answer this run's own supervisor, which only a person can repair."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; a call in flight ends as cancelled."""
        self._stop.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join(2.0)

    @property
    def unanswered_s(self) -> float:
        """How long calls have run into their deadline without one answer in between: a server that lives and hangs."""
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def forgive(self) -> None:
        """Begin ``unanswered_s`` anew: the server was replaced."""
        self._unanswered_since = None

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S if self.point else FIRST_LOOK_S):
            try:
                self._look()
                quiet_s = time.monotonic() - max(self.progress_at, self._reported_at)
                if quiet_s >= self._config.supervisor.stall_s and not self._stop.is_set():
                    self._reported_at = time.monotonic()
                    self._report()
            except Exception as error:  # noqa: BLE001 - boundary of the thread: whatever fails here, the watch goes on
                self._emit(f"watchdog: {error!r}; no finished step for {self._still_s():.0f} s")

    def _look(self) -> None:
        asked_at = time.monotonic()
        try:
            point = self._client.resume_point()
        except DeadlineExceeded:
            self._unanswered_since = self._unanswered_since or asked_at
        except Unavailable:
            pass  # starting, restarting or without its database: neither an answer nor a sign of hanging
        except RollbookError as error:
            self._unanswered_since = None  # a refusal is an answer
            if isinstance(error, Unauthenticated | PermissionDenied | ConfigError):
                self.turned_away = error
        else:
            self._unanswered_since = None
            if self.point is None or _position(point) != _position(self.point):
                self.progress_at = time.monotonic()
            self.point = point

    def _still_s(self) -> float:
        return time.monotonic() - self.progress_at

    def _report(self) -> None:
        """Stacks of every role and the run's state into one file, and what matters of it to a person."""
        try:
            state = self._client.run_status()
        except RollbookError as error:
            state, text = {}, f"the ledger server does not answer: {error}"
        else:
            text = json.dumps(state, indent=1)
        watched = list(self._watched())
        stacks = dump_stacks(watched)
        self._stalls.mkdir(parents=True, exist_ok=True)
        file = self._stalls / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.txt"
        parts = [f"no finished step for {self._still_s():.0f} s", text]
        parts += [f"===== {name}\n{stack}" for name, stack in stacks.items()]
        file.write_text("\n".join(parts) + "\n")
        for old in sorted(self._stalls.glob("*.txt"))[:-REPORTS_KEPT]:
            old.unlink(missing_ok=True)
        self._emit(
            f"STALL: no finished step for {self._still_s():.0f} s; {_summary(state) or text}; "
            f"stacks of {', '.join(stacks) or 'no role: none is alive'} in {file}"
        )


def _position(point: ResumePoint) -> tuple[int, int]:
    """What moves when a step is finished."""
    return point.lineage, point.head.version if point.head else -1


def _summary(state: dict) -> str:
    if not state:
        return ""
    slots, steps = state["slots"], state["steps"]
    paused = f"paused: {state['paused']}; " if state.get("paused") else ""
    return (
        f"{paused}{steps['trained'] + steps['skipped']} steps finished, {steps['planned']} planned; slots: "
        + ", ".join(f"{slots[name]} {name}" for name in ("pending", "leased", "submitted", "planned"))
        + f"; {len(state['workers'])} workers heard of in the last minute"
    )


def dump_stacks(watched: Sequence[Watched], bound_s: float = DUMP_S) -> dict[str, str]:
    """Ask every role for the stacks of its threads (SIGUSR1) and read them from its log; by role name.

    A role that is still starting has no handler yet and would die of the signal: it is named instead.
    """
    asked: dict[str, tuple[Path, int]] = {}
    out: dict[str, str] = {}
    for one in watched:
        if one.record.catches(signal.SIGUSR1):
            asked[one.record.name] = (one.log, logs.size(one.log))
            one.record.signal(signal.SIGUSR1)
        else:
            out[one.record.name] = f"pid {one.record.pid} is starting or ending; no stacks"
    deadline = time.monotonic() + bound_s
    seen = {name: -1 for name in asked}
    while asked and time.monotonic() < deadline:
        time.sleep(0.2)
        now = {name: logs.size(log) for name, (log, _) in asked.items()}
        if now == seen and all(now[name] > offset for name, (_, offset) in asked.items()):
            break  # everybody has written, and nobody writes any more
        seen = now
    for name, (log, offset) in asked.items():
        out[name] = logs.since(log, offset, DUMP_BYTES_MAX) or "no stacks: it does not run (stopped, or stuck in the kernel)"
    return dict(sorted(out.items()))
