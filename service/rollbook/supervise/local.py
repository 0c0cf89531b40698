"""Local supervisor: ledger server, feeder, workers and learner as processes of this machine.

Owns start order, restarts with budget and backoff, graceful drain and the end of a run. Never touches training state:
after any death the role is started again and finds its place through the ledger (P9). Before a successor of a fenced
role starts, its predecessor is dead: either reaped here or killed from the process table (R12).

Order: ledger first (everything waits for its address), then feeder, learner and workers together. A run is over when
the learner exits 0; then workers and feeder drain, then the ledger stops.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError, RestartBudgetSpent, Unavailable
from rollbook.supervise.policy import EXIT_CONFIG, RestartPolicy
from rollbook.supervise.process import ProcessRecord, ProcessTable, role_command, start

log = logging.getLogger(__name__)
POLL_S = 0.05


def worker_list(config: Config) -> list[WorkerConfig]:
    """Workers of the configuration, one entry per process; the position is the worker's index."""
    return [kind for kind in config.workers for _ in range(kind.count)]


@dataclass(slots=True)
class _Child:
    """One supervised role and what is known of its process."""

    name: str
    argv: list[str]
    policy: RestartPolicy
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    record: ProcessRecord | None = None
    restart_at: float | None = 0.0
    """Monotonic time of the next start; None while it runs or when it is finished."""
    finished: bool = False


class LocalSupervisor:
    """Runs every role of one configuration on this machine."""

    def __init__(
        self,
        config: Config,
        config_args: Sequence[str],
        on_event: Callable[[str], None] = print,
        accept_config_change: bool = False,
    ) -> None:
        self.config = config
        self.dir = Path(config.run.dir)
        self._emit = on_event
        self._stop_requested = threading.Event()
        (self.dir / "supervisor").mkdir(parents=True, exist_ok=True)
        self._lock = (self.dir / "supervisor" / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"another supervisor runs {config.run.id!r} in {self.dir}; stop it or choose another run.dir"
            ) from None
        self.table = ProcessTable(self.dir / "supervisor" / "processes.json")
        self.children = [
            self._child("ledger", "ledger", *config_args, *(["--accept-config-change"] if accept_config_change else []))
        ]
        self.children.append(self._child("feeder", "feeder", *config_args))
        self.children.append(self._child("learner", "learner", *config_args, threads=config.learner.threads))
        for index, worker in enumerate(worker_list(config)):
            self.children.append(
                self._child(f"worker-{index}", "worker", *config_args, "--index", str(index), threads=worker.threads)
            )

    def _child(self, name: str, *args: str, threads: int = 1) -> _Child:
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        return _Child(name, role_command(*args), RestartPolicy(self.config.supervisor), env)

    def request_stop(self) -> None:
        """Begin a graceful drain (signal handlers call this)."""
        self._stop_requested.set()

    def run(self, watch: Callable[[], None] = lambda: None) -> None:
        """Supervise until the run is complete or a stop is requested; ``watch`` is called at every poll.

        Raises: RestartBudgetSpent with the role's first cause, ConfigError when a role refuses its configuration.
        """
        self._kill_leftovers()
        (self.dir / "ledger.address").unlink(missing_ok=True)
        try:
            while not (self._by_name("learner").finished or self._stop_requested.is_set()):
                for child in self.children:
                    self._tend(child)
                watch()
                time.sleep(POLL_S)
        finally:
            self._drain()

    def _by_name(self, name: str) -> _Child:
        return next(c for c in self.children if c.name == name)

    def _kill_leftovers(self) -> None:
        """End processes of an earlier supervisor of this run that are still alive."""
        for record in self.table.records().values():
            if record.alive():
                self._emit(f"ending {record.name} (pid {record.pid}) left by an earlier supervisor")
                record.kill_group()
                _wait_gone(record, 10.0)

    def _tend(self, child: _Child) -> None:
        """Start it when due; notice its end."""
        if child.finished:
            return
        if child.process is None:
            ready = child.name == "ledger" or (self.dir / "ledger.address").exists()
            if ready and child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            return
        child.record.kill_group() if child.record else None
        child.process = None
        if code == 0 and child.name != "ledger":
            child.finished = True
            return
        self._on_death(child, code)

    def _start(self, child: _Child) -> None:
        previous = self.table.records().get(child.name)
        if previous is not None:
            previous.kill_group()
        child.process, child.record = start(
            child.name, child.argv, self._log(child), child.env, previous.incarnation if previous else ""
        )
        child.restart_at = None
        self.table.put(child.record)
        if previous is not None:
            self._emit(f"{child.name} started again (pid {child.record.pid})")

    def _log(self, child: _Child) -> Path:
        return self.dir / "logs" / f"{child.name}.log"

    def _on_death(self, child: _Child, code: int) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self.table.last_lines(self._log(child))
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name} refuses to start:\n{tail}")
        wait = child.policy.on_death(time.monotonic(), f"{how}\n{tail}")
        if wait is None:
            raise RestartBudgetSpent(
                f"{child.name} died {len(child.policy.deaths_at)} times within {self.config.supervisor.restarts_window_s:.0f} s; "
                f"first cause: {child.policy.first_cause}"
            )
        self._emit(f"{child.name} died ({how}); starting it again in {wait:.1f} s")
        child.restart_at = time.monotonic() + wait

    def _drain(self) -> None:
        """Workers and feeder finish their batch, the learner its step; the ledger stops last."""
        last = [c for c in self.children if c.name == "ledger"]
        for group in ([c for c in self.children if c.name != "ledger"], last):
            for child in group:
                if child.process is not None and child.process.poll() is None:
                    child.process.terminate()
            deadline = time.monotonic() + self.config.supervisor.drain_s
            for child in group:
                if child.process is None:
                    continue
                try:
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._emit(f"{child.name} did not stop within {self.config.supervisor.drain_s:.0f} s; killing it")
                    os.killpg(child.process.pid, signal.SIGKILL)
                    child.process.wait()
                child.process = None

    def deaths(self) -> dict[str, int]:
        """Deaths seen by role name."""
        return {c.name: c.policy.n_deaths for c in self.children if c.policy.n_deaths}


def _wait_gone(record: ProcessRecord, bound_s: float) -> None:
    deadline = time.monotonic() + bound_s
    while record.alive():
        if time.monotonic() > deadline:
            raise Unavailable(f"{record.name} (pid {record.pid}) does not die; end it by hand before starting the run again")
        time.sleep(POLL_S)
