"""Local supervisor: ledger server, feeder, workers and learner as processes of this machine.

Owns start order, restarts with budget and backoff, graceful drain and the end of a run. Never touches training state:
after any death the role is started again and finds its place through the ledger (P9). Before a successor of a fenced
role starts, its predecessor and all it had started are dead (R12).

Order: ledger first; when it has answered where the run stands, feeder, learner and workers together, unless nothing is
left to do. A run is over when the learner exits 0; then workers and feeder drain, then the ledger stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError, RestartBudgetSpent, RollbookError, RunPaused, Unavailable
from rollbook.core.records import ResumePoint
from rollbook.supervise import logs
from rollbook.supervise.guardian import Guardian
from rollbook.supervise.hangs import HangWatch
from rollbook.supervise.memory import oom_kills
from rollbook.supervise.policy import EXIT_CONFIG, EXIT_PAUSED, EXIT_STOPPED, RestartPolicy, is_complete
from rollbook.supervise.process import Launcher, ProcessTable, RoleProcess, role_command, spawn, start
from rollbook.supervise.watchdog import Watchdog, Watched

POLL_S = 0.05
KILL_S = 10.0
"""How long a killed process may take to be gone."""
HANG_S_MIN = 30.0
"""A ledger server that lives and answers nothing is killed after two of its terms, but not before this time."""
LOGS_EVERY_S = 10.0


def worker_list(config: Config) -> list[WorkerConfig]:
    """Workers of the configuration, one entry per process; the position is the worker's index."""
    return [kind for kind in config.workers for _ in range(kind.count)]


@dataclass(slots=True)
class _Child:
    """One supervised role and what is known of its process."""

    name: str
    argv: list[str]
    policy: RestartPolicy
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: RoleProcess | None = None
    log_offset: int = 0
    """Size of the log when the newest process was started."""
    oom_kills: int = 0
    """What the kernel had counted then."""
    restart_at: float | None = 0.0
    """Monotonic time of the next start; None while it runs or when it is finished."""
    finished: bool = False


class LocalSupervisor:
    """Runs every role of one configuration on this machine.

    Args:
        config_args: CONFIG and overrides as the role commands take them.
        on_event: told in one text what happened; from several threads.
        accept: names of changed fields, passed on to the ledger server.
        launch: how role processes are started.

    Raises: Unavailable (another supervisor has the run directory), ConfigError.
    """

    def __init__(
        self,
        config: Config,
        config_args: Sequence[str],
        on_event: Callable[[str], None] = print,
        accept: Sequence[str] = (),
        launch: Launcher = spawn,
    ) -> None:
        _check(config)
        self.config = config
        self.dir = Path(config.run.dir)
        self._on_event = on_event
        self._launch = launch
        self._stopping = threading.Event()
        self._at_once = threading.Event()
        (self.dir / "supervisor").mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(self.dir / "supervisor" / "lock", config.run.id)
        self.table = ProcessTable(self.dir / "supervisor" / "processes.json")
        self._ledger = self._child("ledger", "ledger", *config_args, *(f"--accept={name}" for name in accept))
        self._learner = self._child("learner", "learner", *config_args, threads=config.learner.threads)
        self._others = [self._child("feeder", "feeder", *config_args), self._learner]
        for index, worker in enumerate(worker_list(config)):
            self._others.append(
                self._child(f"worker-{index}", "worker", *config_args, "--index", str(index), threads=worker.threads)
            )
        self.children = [self._ledger, *self._others]
        self._log = self.dir / "logs" / "supervisor.log"
        self._watchdog = Watchdog(config, self._watched, self._emit)
        self._hangs = HangWatch(config, self._watched, self._emit)
        self._guardian = Guardian(self.dir / "supervisor")
        self._logs_checked_at = 0.0
        self._opened = False

    def _child(self, name: str, *args: str, threads: int = 1) -> _Child:
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        log = self.dir / "logs" / f"{name}.log"
        return _Child(name, role_command(*args), RestartPolicy(self.config.supervisor), log, env)

    def _emit(self, text: str) -> None:
        """Tell a person, and keep it for one who comes later."""
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("a") as out:
                out.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")
        self._on_event(text)

    def request_stop(self) -> None:
        """Begin a graceful drain; a second request ends it by killing every role (signal handlers call this)."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    def run(
        self, on_open: Callable[[ResumePoint], None] = lambda point: None, on_drained: Callable[[], None] = lambda: None
    ) -> bool:
        """Supervise until the run is complete (True) or a requested stop has drained it (False); once per instance.

        Args:
            on_open: called once with where the run stands, before any role but the ledger server is started.
            on_drained: called when every role but the ledger server has ended.

        Raises: RestartBudgetSpent with the role's first cause; ConfigError when a role refuses its configuration;
            RunPaused when the learner waits for an operator; Unavailable when processes of an earlier supervisor cannot be
            ended.
        """
        try:
            self._guardian.end_previous()
            self._end_leftovers()
            self._forget_address()
            self._guardian.start()
            self._watchdog.start()
            self._hangs.start()
            while not (self._learner.finished or self._stopping.is_set()):
                self._tend(self._ledger)
                if self._is_open(on_open):
                    for child in self._others:
                        self._tend(child)
                self._bound_logs()
                time.sleep(POLL_S)
        except RollbookError as error:
            self._emit(f"the run ends: {type(error).__name__}")
            raise
        finally:
            try:
                self._drain(on_drained)
            finally:
                self._watchdog.stop()
                self._hangs.stop()
                self._guardian.stop()
                os.close(self._lock_fd)
        return self._learner.finished

    def _is_open(self, on_open: Callable[[ResumePoint], None]) -> bool:
        """Whether the other roles are wanted: the ledger server has answered, and steps are left to make."""
        if not self._opened:
            point = self._watchdog.point
            if point is None:
                return False
            self._opened = True
            on_open(point)
            self._learner.finished = is_complete(point, self.config)
            if point.last_planned_step >= self.config.run.steps:  # only to be trained again: nobody generates for it
                for child in self._others:
                    child.finished = child.finished or child is not self._learner
        return not self._learner.finished

    def _end_leftovers(self) -> None:
        """End processes of an earlier supervisor of this run that are still alive."""
        for record in self.table.records().values():
            if left := record.tree():
                self._emit(f"ending {record.name} (pid {', '.join(map(str, left))}) left by an earlier supervisor")
                record.end(KILL_S)

    def _forget_address(self) -> None:
        """A dead server's port may be somebody else's by now."""
        (self.dir / "ledger.address").unlink(missing_ok=True)

    def _tend(self, child: _Child) -> None:
        """Start it when due; notice its end."""
        if child.finished:
            return
        if child.process is None:
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._start(child)
            return
        code = child.process.exit_code()
        if code is None:
            if child is self._ledger:
                self._end_hung_ledger(child.process)
            if self._hangs.verdict(child.process.record.incarnation):
                child.process.kill()
            return
        hung = self._hangs.verdict(child.process.record.incarnation)
        unasked = self._hangs.left_in(child.process.record) if code == 0 else ""
        child.process = None
        if child is self._ledger:
            self._forget_address()
        if code == 0 and child is not self._ledger and not unasked:
            child.finished = True
            return
        self._on_death(child, f"killed as hung: {hung}" if hung else _how(code) + unasked, code)

    def _start(self, child: _Child) -> None:
        previous = self.table.records().get(child.name)
        if previous is not None:
            previous.end(KILL_S)
        child.log_offset, child.oom_kills = logs.size(child.log), oom_kills()
        try:
            child.process = start(child.name, child.argv, child.log, child.env, self.table, self._launch)
        except OSError as error:
            self._on_death(child, f"not started: {error}")
            return
        child.restart_at = None
        if child.policy.n_deaths:
            self._emit(f"{child.name} started again (pid {child.process.record.pid})")

    def _end_hung_ledger(self, process: RoleProcess) -> None:
        bound_s = max(HANG_S_MIN, 2 * self.config.ledger.role_ttl_s)
        if self._watchdog.unanswered_s < bound_s:
            return
        self._emit(f"the ledger server lives but has answered nothing for {bound_s:.0f} s; killing it (its term is over)")
        process.record.signal(signal.SIGUSR1) if process.record.catches(signal.SIGUSR1) else None
        process.kill()
        self._watchdog.forgive()

    def _on_death(self, child: _Child, how: str, code: int | None = None) -> None:
        said = logs.last_lines(child.log, child.log_offset) or "(it wrote nothing)"
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name} refuses to start:\n{_refusal(said)}")
        if code == EXIT_PAUSED:
            raise RunPaused(_refusal(said).removeprefix(f"rollbook {child.name}: paused: "))
        if code == -signal.SIGKILL and oom_kills() > child.oom_kills:
            how += "; meanwhile the kernel has killed for want of memory, so it was probably that"
        now = time.monotonic()
        wait = child.policy.on_death(now, f"{how}\n{said}", self._watchdog.progress_at)
        if wait is None:
            child.restart_at = None
            deaths = child.policy.deaths
            raise RestartBudgetSpent(
                f"{child.name} died {len(deaths)} times within {now - deaths[0][0]:.0f} s, supervisor.restarts_max = "
                f"{self.config.supervisor.restarts_max} allows no further restart; first cause: {child.policy.first_cause}\n"
                f"(the whole log: {child.log}; the same command goes on from the last checkpoint)"
            )
        self._emit(f"{child.name} died ({how}); starting it again in {wait:.1f} s")
        child.restart_at = now + wait

    def _drain(self, on_drained: Callable[[], None]) -> None:
        """Workers and feeder finish their batch, the learner its step; the ledger stops last."""
        if self._stopping.is_set() and not self._learner.finished:
            self._emit("stopping: the step and the batches in hand are finished first; a second signal kills at once")
        try:
            self._stop_all(self._others)
            on_drained()
        finally:
            self._stop_all([self._ledger])

    def _stop_all(self, group: Sequence[_Child]) -> None:
        """Ask, wait for ``drain_s``, kill; while others drain, a ledger server that dies is started again."""
        for child in group:
            if child.process is not None and child.process.exit_code() is None:
                child.process.terminate()
        deadline = time.monotonic() + self.config.supervisor.drain_s
        while running := [c for c in group if c.process is not None and c.process.exit_code() is None]:
            if self._at_once.is_set() or time.monotonic() >= deadline:
                break
            if self._ledger not in group:
                self._keep_ledger()
            time.sleep(POLL_S)
        for child in running:
            late = "" if self._at_once.is_set() else f" did not stop within {self.config.supervisor.drain_s:.0f} s"
            self._emit(f"{child.name}{late}; killing it" if late else f"killing {child.name}")
        for child in running:
            if child.process is not None and not _killed(child.process):
                self._emit(f"{child.name} (pid {child.process.record.pid}) does not die; end it by hand")
        for child in group:
            child.process, child.restart_at = None, None

    def _keep_ledger(self) -> None:
        try:
            self._tend(self._ledger)
        except RollbookError as error:
            self._ledger.restart_at = None
            self._emit(f"the ledger server is gone while the others drain: {error}")

    def _bound_logs(self) -> None:
        if time.monotonic() - self._logs_checked_at < LOGS_EVERY_S:
            return
        self._logs_checked_at = time.monotonic()
        logs.keep_small(self._log)
        for child in self.children:
            if logs.keep_small(child.log):
                child.log_offset = 0

    def _watched(self) -> list[Watched]:
        running = [(c.process, c.log) for c in self.children]
        return [Watched(process.record, log) for process, log in running if process is not None]

    def deaths(self) -> dict[str, int]:
        """Deaths seen by role name."""
        return {c.name: c.policy.n_deaths for c in self.children if c.policy.n_deaths}


def _check(config: Config) -> None:
    s = config.supervisor
    for name in ("restarts_window_s", "drain_s", "stall_s"):
        if not getattr(s, name) > 0:
            raise ConfigError(f"supervisor.{name} = {getattr(s, name)}: must be > 0")
    for name in ("restarts_max", "backoff_s", "backoff_max_s"):
        if not getattr(s, name) >= 0:
            raise ConfigError(f"supervisor.{name} = {getattr(s, name)}: must be >= 0")


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


def _how(code: int) -> str:
    if code == EXIT_STOPPED:
        return f"told to stop by somebody else, exit code {code}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _refusal(said: str) -> str:
    """What the role itself printed as the reason, without the log lines around it."""
    lines = said.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("rollbook ")]
    return "\n".join(lines[starts[-1] :] if starts else lines)


def _killed(process: RoleProcess) -> bool:
    """Kill the tree; whether it is gone within the bound."""
    process.kill()
    deadline = time.monotonic() + KILL_S
    while process.exit_code() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
