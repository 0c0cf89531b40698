"""What a role's loop says of itself: what it is doing, that it still moves, and what it last finished.

Owns the state words, how long a role may be silent in each, and the record that a supervisor reads. Only the loop's own thread
is heard: a helper thread that lives proves nothing about a loop that hangs. Never judges and never ends anything (the
supervisor and ``health`` do). Upholds P10.

A process that has not opened a reporter (tests, simulations, commands) says nothing, at no cost.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.host import host, incarnation

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.25
RECORD_BYTES = 1024
"""Size of a record, padded: a reader never finds the end of a longer one behind it."""
_TEXT_MAX = 120


class State(StrEnum):
    """What a loop is doing."""

    STARTING = "starting"
    """Imports, an engine that loads and compiles, a checkpoint that is restored."""
    LOADING = "loading"
    WAITING = "waiting_for_ledger"
    GENERATING = "generating"
    JUDGING = "waiting_for_tools"
    TRAINING = "training"
    SAVING = "saving"
    FEEDING = "feeding"
    SERVING = "serving"
    ENDING = "ending"


_IDLE = (State.WAITING, State.JUDGING, State.SERVING)
"""States in which a loop turns by itself, whatever it waits for."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a role may be silent, by what it does, and how long it may finish nothing."""

    startup_s: float
    busy_s: float
    idle_s: float
    stall_s: float

    @classmethod
    def of(cls, config: Config) -> Bounds:
        """The bounds of a run; a longer pause that a loop takes by its configuration is part of ``idle_s``."""
        s = config.supervisor
        pause_s = max(config.ledger.role_ttl_s / 3, config.ledger.heartbeat_s)
        return cls(s.startup_s, s.busy_s, s.idle_s + pause_s, s.stall_s)

    def silence_s(self, state: str) -> float:
        """Longest silence in ``state``; one that is not known counts as work."""
        if state == State.STARTING:
            return self.startup_s
        return self.idle_s if state in _IDLE else self.busy_s


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a reporter from inside its process; ages in seconds."""

    role: str
    state: str
    silent_s: float
    in_state_s: float
    finished: str
    """What was finished last; empty while nothing was."""
    finished_s: float
    """Since then, or since the start."""
    ready: bool
    reason: str
    """Why it is not ready."""
    beats: int


class Reporter:
    """The voice of one process's loop; belongs to the thread that makes it."""

    def __init__(self, role: str, file: Path | None) -> None:
        """``file``: where the record is kept for the supervisor; None keeps it in this process."""
        self._role, self._file, self._incarnation = role, file, incarnation()
        self._thread = threading.get_ident()
        self._fd = -1
        self._failed = False
        now = host().monotonic()
        self._state, self._state_at, self._marked_at, self._written_at = State.STARTING, now, now, float("-inf")
        self._finished, self._finished_at = "", now
        self._ready, self._reason = False, "it is starting"
        self._beats = 0
        self.check: Callable[[], str] | None = None
        """Asked before the role is said to be ready: what is wrong with what it depends on, or nothing."""
        self._write(now)

    def mark(self, state: State | None = None) -> None:
        """The loop moves; a new state is written at once, anything else now and then."""
        if threading.get_ident() != self._thread:
            return
        now = host().monotonic()
        self._beats += 1
        self._marked_at = now
        if state is not None and state is not self._state:
            self._state, self._state_at = state, now
        elif now - self._written_at < WRITE_EVERY_S:
            return
        self._write(now)

    def finished(self, what: str) -> None:
        """Something is done that the run needed."""
        self._finished, self._finished_at = what[:_TEXT_MAX], host().monotonic()
        self.mark()

    def set_ready(self, ready: bool, reason: str = "", check: Callable[[], str] | None = None) -> None:
        """Whether the role can do its job now, and why not."""
        self.check = check or self.check
        self._ready, self._reason = ready, "" if ready else reason[:_TEXT_MAX]

    def seen(self) -> Seen:
        """How it stands, for another thread of this process."""
        now = host().monotonic()
        return Seen(
            self._role, self._state.value, now - self._marked_at, now - self._state_at, self._finished, now - self._finished_at,
            self._ready, self._reason, self._beats,
        )  # fmt: skip

    def close(self) -> None:
        """Let the file go; what was written stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._file = None

    def _write(self, now: float) -> None:
        if self._file is None:
            return
        self._written_at = now
        record = {"incarnation": self._incarnation, "beats": self._beats, "state": self._state.value, "finished": self._finished}
        try:
            if self._fd < 0:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, json.dumps(record).encode()[:RECORD_BYTES].ljust(RECORD_BYTES), 0)
            self._failed = False
        except OSError as error:  # the role's work must not end with the word about it; tried again at the next mark
            if not self._failed:
                log.warning("progress not written: %s", error, extra={"event": "progress_unwritten"})
            self._failed = True


def progress_file(run_dir: str | Path, role: str) -> Path:
    """Where the role process ``role`` (``learner``, ``worker-0``, …) keeps its record."""
    return Path(run_dir) / "supervisor" / "progress" / role


@dataclass(frozen=True, slots=True)
class Record:
    """What a role wrote last."""

    incarnation: str
    beats: int
    state: str
    finished: str


def read_record(file: Path) -> Record | None:
    """The record, or None while there is none that can be read."""
    try:
        content = json.loads(file.read_bytes())
        return Record(str(content["incarnation"]), int(content["beats"]), str(content["state"]), str(content["finished"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


_reporter: Reporter | None = None


def open_reporter(role: str, file: Path | None) -> Reporter:
    """Let the calling thread speak for this process from now on."""
    global _reporter
    close_reporter()
    _reporter = Reporter(role, file)
    return _reporter


def close_reporter() -> None:
    """Nobody speaks for this process any more."""
    global _reporter
    if _reporter is not None:
        _reporter.close()
    _reporter = None


def is_open() -> bool:
    """Whether somebody speaks for this process."""
    return _reporter is not None


def mark(state: State | None = None) -> None:
    """The loop of this process moves; with a state, it now does something else."""
    if _reporter is not None:
        _reporter.mark(state)


def finished(what: str) -> None:
    """The loop of this process has done something that the run needed."""
    if _reporter is not None:
        _reporter.finished(what)


def ready(is_ready: bool, reason: str = "", check: Callable[[], str] | None = None) -> None:
    """Whether this process can do its job now, and why not; ``check`` asks what it depends on, from then on."""
    if _reporter is not None:
        _reporter.set_ready(is_ready, reason, check)
