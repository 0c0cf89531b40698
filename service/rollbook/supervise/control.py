"""How a supervisor is found and told things: its lock, its state and its orders, files of the run directory.

Owns ``supervisor/lock``, ``supervisor/state.json`` (written by the supervisor alone: who it is, that it lives, how it ended) and
``supervisor/orders.json`` (written by commands: how many workers, stop). Files and not calls, because every backend has the
run directory and none has to be reached for it. Never decides what an order means.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rollbook.core.errors import ConfigError, Unavailable

FILL = "fill"
"""As many workers as fit on the nodes."""
CONFIGURED = "config"
"""As many workers as the configuration names."""
WORKERS_MAX = 4096
BEAT_S = 1.0
"""How often a supervisor shows that it lives."""
RUNNING, COMPLETE, STOPPED, FAILED = "running", "complete", "stopped", "failed"


class Control:
    """A supervisor's side: the lock is held, and the state is kept fresh by a thread, until ``close``.

    Raises: Unavailable when another supervisor has the run directory.
    """

    def __init__(self, run_dir: Path, run_id: str, attempt: str = "") -> None:
        self._dir = run_dir / "supervisor"
        self._lock_fd = _lock(self._dir / "lock", run_id)
        self.id = uuid.uuid4().hex
        self._state: dict = {
            "supervisor": self.id, "attempt": attempt, "pid": os.getpid(), "host": socket.gethostname(), "beat": 0,
            "outcome": RUNNING, "waiting": {}, "started_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }  # fmt: skip
        self._closed = threading.Event()
        self._read_at = 0.0
        self._orders: dict = {}
        self._write()
        self._thread = threading.Thread(target=self._beat, name="control", daemon=True)
        self._thread.start()

    def wanted_workers(self) -> int | str:
        """What was ordered last: a number, ``fill``, or ``config`` while nothing was."""
        wanted = self._read().get("workers", CONFIGURED)
        return wanted if isinstance(wanted, int) or wanted == FILL else CONFIGURED

    def is_told_to_stop(self) -> bool:
        """Whether this supervisor, not an earlier one, was told to stop."""
        return self._read().get("stop") == self.id

    def show_waiting(self, waiting: Mapping[str, str]) -> None:
        """For whoever asks: what each role waits for that the nodes cannot give it now."""
        self._state["waiting"] = dict(waiting)

    def close(self, is_complete: bool, error: BaseException | None, deaths: Mapping[str, int]) -> None:
        """Leave the outcome for whoever asks, and let the run directory go."""
        self._closed.set()
        self._thread.join(2 * BEAT_S)
        outcome = FAILED if error is not None else COMPLETE if is_complete else STOPPED
        self._state |= {"outcome": outcome, "deaths": dict(deaths), "waiting": {}}
        if error is not None:
            self._state |= {"error": type(error).__name__, "message": str(error)}
        self._write()
        os.close(self._lock_fd)

    def _beat(self) -> None:
        while not self._closed.wait(max(BEAT_S, 0.01)):
            self._state["beat"] += 1
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the sign of life, not the run
            _replace(self._dir / "state.json", self._state)

    def _read(self) -> dict:
        if time.monotonic() - self._read_at >= BEAT_S:
            self._read_at = time.monotonic()
            self._orders = read_orders(self._dir.parent)
        return self._orders


def read_state(run_dir: Path) -> dict:
    """State of the newest supervisor of a run; empty when there was none."""
    return _table(run_dir / "supervisor" / "state.json")


def read_orders(run_dir: Path) -> dict:
    """What was ordered from outside."""
    return _table(run_dir / "supervisor" / "orders.json")


def note_restart(run_dir: Path, pool: str, reason: str) -> None:
    """Count a death that is answered with a restart; the counts go on over supervisors. One writer: who holds the lock."""
    counts = _table(run_dir / "supervisor" / "restarts.json")
    name = f"{pool}/{reason}"
    counts[name] = int(counts.get(name, 0)) + 1
    with contextlib.suppress(OSError):
        _replace(run_dir / "supervisor" / "restarts.json", counts)


def read_restarts(run_dir: Path) -> dict[tuple[str, str], int]:
    """Deaths that were answered with a restart, by pool and reason."""
    found = {tuple(name.split("/", 1)): n for name, n in _table(run_dir / "supervisor" / "restarts.json").items()}
    return {(key[0], key[1]): int(n) for key, n in found.items() if len(key) == 2 and isinstance(n, int)}


def waiting_lines(state: Mapping) -> list[str]:
    """For a person: which roles of a run that goes on have no place, and why; at most a second old."""
    waiting = state.get("waiting") if state.get("outcome") == RUNNING else None
    return [f"{role} {why}" for role, why in sorted(waiting.items())] if isinstance(waiting, dict) else []


def order_workers(run_dir: Path, wanted: int | str) -> None:
    """Have that many workers, now and whenever the run is started again, until another number is ordered. Raises ConfigError."""
    if not (wanted in (FILL, CONFIGURED) or (isinstance(wanted, int) and 0 <= wanted <= WORKERS_MAX)):
        raise ConfigError(f"workers = {wanted!r}: a number up to {WORKERS_MAX}, {FILL!r} or {CONFIGURED!r}")
    _order(run_dir, {"workers": wanted})


def order_stop(run_dir: Path, supervisor: str) -> None:
    """Have one supervisor drain its run and end."""
    _order(run_dir, {"stop": supervisor})


def _order(run_dir: Path, more: dict) -> None:
    (run_dir / "supervisor").mkdir(parents=True, exist_ok=True)
    _replace(run_dir / "supervisor" / "orders.json", read_orders(run_dir) | more)


def _table(file: Path) -> dict:
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _replace(file: Path, table: dict) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(table))
    os.replace(temporary, file)


def _lock(path: Path, run_id: str) -> int:
    """The run directory's supervisor lock, held until the descriptor is closed; the file names its holder."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise Unavailable(
            f"another supervisor (pid {holder or 'unknown'}) runs {run_id!r} in {path.parents[1]}; stop it or choose another "
            "run.dir"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
