"""The law of supervision: ledger server, feeder, workers and learner, kept running over any backend.

Owns start order, restarts with budget and backoff, graceful drain and the end of a run. Never touches training state:
after any death the role is started again and finds its place through the ledger (P9). Before a successor of a fenced
role starts, its predecessor and all it had started are dead, or it waits for the predecessor's term to end (R12).

Order: the ledger and its standbys first; when the run's position was answered, feeder, learner and workers together, unless
nothing is left to do. A run is over when the learner exits 0; then workers and feeder drain, then the standbys stop, and the
ledger server that holds the role last.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError, RestartBudgetSpent, RollbookError, RunPaused
from rollbook.core.records import ResumePoint
from rollbook.core.security import supervised_tokens
from rollbook.observe import failures
from rollbook.supervise import control, ledgers, logs, placements
from rollbook.supervise.backend import FEEDER, KILL_S, LEARNER, LEDGER, NOTHING, WORKER, Backend, Needs, Running
from rollbook.supervise.children import Child
from rollbook.supervise.fleet import Fleet
from rollbook.supervise.hangs import HangWatch
from rollbook.supervise.memory import oom_kills
from rollbook.supervise.needs import learner_needs, server_needs, worker_needs
from rollbook.supervise.policy import EXIT_CONFIG, EXIT_PAUSED, EXIT_STOPPED, RestartPolicy, is_complete
from rollbook.supervise.process import role_command
from rollbook.supervise.watchdog import Watchdog, Watched

POLL_S = 0.05
HANG_S_MIN = 30.0
"""A ledger server that lives and answers nothing is killed after two of its terms, but not before this time."""
LOGS_EVERY_S = 10.0
HUNG = "killed as hung"
POOL_OF = {WORKER: "actor"}
"""Pools of the metrics, where they are not called like the role."""


def worker_list(config: Config) -> list[WorkerConfig]:
    """Workers of the configuration, one entry per process; the position is the worker's index."""
    return [kind for kind in config.workers for _ in range(kind.count)]


class Supervisor:
    """Runs every role of one configuration.

    Args:
        config_args: CONFIG and overrides as the role commands take them.
        backend: where roles run.
        on_event: told in one text what happened; from several threads.
        accept: names of changed fields, passed on to the ledger server.
        attempt: what the supervisor and those that replace it after a crash have in common; kept in its state.

    Raises: Unavailable (another supervisor has the run directory), ConfigError.
    """

    def __init__(
        self,
        config: Config,
        config_args: Sequence[str],
        backend: Backend,
        on_event: Callable[[str], None] = print,
        accept: Sequence[str] = (),
        attempt: str = "",
    ) -> None:
        _check(config)
        self.config = config
        self.dir = Path(config.run.dir)
        self._backend = backend
        self._config_args = list(config_args)
        self._on_event = on_event
        self._stopping = threading.Event()
        self._at_once = threading.Event()
        (self.dir / "supervisor").mkdir(parents=True, exist_ok=True)
        self._control = control.Control(self.dir, config.run.id, attempt)
        accepted = [f"--accept={name}" for name in accept]
        self._ledgers = [
            self._child(name, LEDGER, *accepted, *which, needs=server_needs(config))
            for name, which in ledgers.server_arguments(config).items()
        ]
        self._learner = self._child("learner", LEARNER, threads=config.learner.threads, needs=learner_needs(config))
        self._others = [self._child("feeder", FEEDER, needs=server_needs(config)), self._learner]
        self._others += [self._worker(index) for index in range(len(worker_list(config)))]
        self._log = self.dir / "logs" / "supervisor.log"
        self._watchdog = Watchdog(config, self._watched, self._emit)
        self._hangs = HangWatch(config, self._watched, self._emit)
        self._fleet = Fleet(config, backend, self._emit)
        self._logs_checked_at = 0.0
        self._opened = False

    @property
    def children(self) -> list[Child]:
        """Every role that is or was wanted, the ledger servers first."""
        return [*self._ledgers, *self._others]

    def _child(self, name: str, kind: str, *args: str, threads: int = 1, needs: Needs = NOTHING) -> Child:
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        env |= supervised_tokens(self.config.security, kind)
        argv = role_command(kind, *self._config_args, *args)
        return Child(name, kind, argv, RestartPolicy(self.config.supervisor), self.dir / "logs" / f"{name}.log", env, needs)

    def _worker(self, index: int) -> Child:
        """The worker of an index; one beyond the configured workers is of the last configured kind."""
        kinds = worker_list(self.config)
        kind = kinds[min(index, len(kinds) - 1)]
        more = ["--more"] if index >= len(kinds) else []
        needs = worker_needs(self.config, kind)
        return self._child(f"worker-{index}", WORKER, "--index", str(index), *more, threads=kind.threads, needs=needs)

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
            Unauthenticated or PermissionDenied when the ledger server does not take the supervisor's token;
            RunPaused when the learner waits for an operator; Unavailable when processes of an earlier supervisor cannot be
            ended.
        """
        outcome: BaseException | None = None
        try:
            self._take_over()
            self._watchdog.start()
            self._hangs.start()
            while not (self._learner.finished or self._stopping.is_set()):
                for child in self._ledgers:
                    self._tend(child)
                if self._is_open(on_open):
                    for child in list(self._others):
                        self._tend(child)
                    self._fleet.tend(self._ledgers, self._others, self._worker, self._control.wanted_workers())
                self._control.show_waiting(self._fleet.waiting(self.children))
                self._look_around()
                time.sleep(POLL_S)
        except RollbookError as error:
            self._emit(f"the run ends: {type(error).__name__}")
            outcome = error
            raise
        except BaseException as error:
            outcome = error
            raise
        finally:
            try:
                self._drain(on_drained)
            finally:
                self._watchdog.stop()
                self._hangs.stop()
                self._backend.close()
                self._control.close(self._learner.finished, outcome, self.deaths())
        return self._learner.finished

    def _is_open(self, on_open: Callable[[ResumePoint], None]) -> bool:
        """Whether the other roles are wanted: the ledger server has answered, and steps are left to make."""
        if not self._opened:
            point = self._watchdog.point
            if point is None:
                if self._watchdog.turned_away is not None:
                    raise self._watchdog.turned_away
                return False
            self._opened = True
            on_open(point)
            self._learner.finished = is_complete(point, self.config)
            if point.last_planned_step >= self.config.run.steps:  # only to be trained again: nobody generates for it
                for child in self._others:
                    child.finished = child.finished or child is not self._learner
        return not self._learner.finished

    def _take_over(self) -> None:
        """Roles that an earlier supervisor has left running go on where the backend can hand them over; others are ended."""
        running = dict(self._backend.open(self._emit))
        for name in running:
            index = name.removeprefix("worker-")
            if index != name and index.isdigit() and all(child.name != name for child in self._others):
                self._others.append(self._worker(int(index)))
        for child in self.children:
            child.process = running.pop(child.name, None)
            if child.process is not None:
                child.restart_at, child.log_offset, child.oom_kills = None, logs.size(child.log), oom_kills()
        for name, process in running.items():
            self._emit(f"ending {name}, which the configuration does not name")
            process.kill()
        if not any(child.process for child in self._ledgers):
            ledgers.forget_servers(self.dir)

    def _tend(self, child: Child) -> None:
        """Start it when due; notice its end."""
        if child.finished:
            return
        if child.process is None:
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._start(child)
            return
        code = child.process.exit_code()
        self._note_place(child, child.process)
        if code is None:
            if child.kind == LEDGER:
                self._end_hung_ledger(child.name, child.process)
            if self._hangs.verdict(child.process.record.incarnation):
                child.process.kill()
            return
        record, cause = child.process.record, child.process.cause()
        hung = self._hangs.verdict(record.incarnation)
        unasked = self._hangs.left_in(record) if code == 0 else ""
        if code == -signal.SIGKILL and record.is_here and oom_kills() > child.oom_kills:
            unasked = "; meanwhile the kernel has killed for want of memory, perhaps this process"
        child.process = None
        if child.kind == LEDGER:
            ledgers.forget_server(self.dir, child.name)
        if code == 0 and child.kind != LEDGER and not unasked:
            child.finished = True
            return
        if child.goes():
            self._backend.release(child.name)
            return
        self._on_death(child, f"{HUNG}: {hung}" if hung else cause or how(code) + unasked, code)

    def _start(self, child: Child) -> None:
        child.log_offset, child.is_placed, child.oom_kills = logs.size(child.log), False, oom_kills()
        try:
            child.process = self._backend.start(child.order())
        except OSError as error:
            self._on_death(child, f"not started: {error}")
            return
        child.restart_at = None

    def _note_place(self, child: Child, process: Running) -> None:
        """Record once where a started role runs; tell a person when it is a restart."""
        if child.is_placed or (placement := process.placement()) is None:
            return
        child.is_placed = True
        placements.record(self.dir, placement)
        if child.policy.n_deaths:
            self._emit(f"{child.name} started again ({placements.where(placement)})")

    def _end_hung_ledger(self, name: str, process: Running) -> None:
        bound_s = max(HANG_S_MIN, 2 * self.config.ledger.role_ttl_s)
        if self._watchdog.unanswered_s < bound_s or name != ledgers.holder(self.dir):
            return
        self._emit(f"the ledger server lives but has answered nothing for {bound_s:.0f} s; killing it (its term is over)")
        process.record.signal(signal.SIGUSR1) if process.record.catches(signal.SIGUSR1) else None
        process.kill()
        self._watchdog.forgive()

    def _on_death(self, child: Child, how: str, code: int | None = None) -> None:
        said = logs.last_lines(child.log, child.log_offset) or "(it wrote nothing)"
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name} refuses to start:\n{_refusal(said)}")
        if code == EXIT_PAUSED:
            raise RunPaused(_refusal(said).removeprefix(f"rollbook {child.name}: paused: "))
        failures.note_death(self.dir, child.name, how, failures.last_word(said))
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
        control.note_restart(self.dir, POOL_OF.get(child.kind, child.kind), restart_reason(how, code))
        self._emit(f"{child.name} died ({how}); starting it again in {wait:.1f} s")
        child.restart_at = now + wait

    def _drain(self, on_drained: Callable[[], None]) -> None:
        """Workers and feeder finish their batch, the learner its step; then standbys stop, who holds the ledger's role last."""
        if self._stopping.is_set() and not self._learner.finished:
            self._emit("stopping: the step and the batches in hand are finished first; a second signal kills at once")
        try:
            self._stop_all(self._others)
            on_drained()
        finally:
            holder = ledgers.holder(self.dir)
            self._stop_all([child for child in self._ledgers if child.name != holder])
            self._stop_all([child for child in self._ledgers if child.name == holder])

    def _stop_all(self, group: Sequence[Child]) -> None:
        """Ask, wait for ``drain_s``, kill; while others drain, a ledger server that dies is started again."""
        for child in group:
            if child.process is not None and child.process.exit_code() is None:
                child.process.terminate()
        deadline = time.monotonic() + self.config.supervisor.drain_s
        while running := [c for c in group if c.process is not None and c.process.exit_code() is None]:
            if self._at_once.is_set() or time.monotonic() >= deadline:
                break
            if not any(child.kind == LEDGER for child in group):
                self._keep_ledgers()
            time.sleep(POLL_S)
        for child in running:
            late = "" if self._at_once.is_set() else f" did not stop within {self.config.supervisor.drain_s:.0f} s"
            self._emit(f"{child.name}{late}; killing it" if late else f"killing {child.name}")
        for child in running:
            if child.process is not None:
                child.process.kill()
        deadline = time.monotonic() + KILL_S
        for child in running:
            if child.process is not None and not _is_gone(child.process, deadline):
                self._emit(f"{child.name} (pid {child.process.record.pid}) does not die; end it by hand")
        for child in group:
            child.process, child.restart_at = None, None

    def _keep_ledgers(self) -> None:
        for child in self._ledgers:
            try:
                self._tend(child)
            except RollbookError as error:
                child.restart_at = None
                self._emit(f"{child.name}, a ledger server, is gone while the others drain: {error}")

    def _look_around(self) -> None:
        """What is done now and then: requests from outside, the size of logs."""
        if self._control.is_told_to_stop() and not self._stopping.is_set():
            self._emit("told to stop")
            self._stopping.set()
        if time.monotonic() - self._logs_checked_at < LOGS_EVERY_S:
            return
        self._logs_checked_at = time.monotonic()
        logs.keep_small(self._log)
        for child in self.children:
            if logs.keep_small(child.log):
                child.log_offset = 0

    def _watched(self) -> list[Watched]:
        """Roles that run; one that waits for a place is silent for good reason."""
        running = [(c.process, c.log) for c in self.children]
        return [Watched(process.record, log) for process, log in running if process is not None and process.placement()]

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


def how(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_STOPPED:
        return f"told to stop by somebody else, exit code {code}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def restart_reason(how: str, code: int | None) -> str:
    """The word of the metrics for a death: hung, out of memory, told to stop by somebody else, or anything else."""
    if how.startswith(HUNG):
        return "heartbeat_lost"
    if "want of memory" in how:
        return "oom"
    return "preempted" if code in (EXIT_STOPPED, -signal.SIGTERM) else "crash"


def _refusal(said: str) -> str:
    """What the role itself printed as the reason, without the log lines around it."""
    lines = said.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("rollbook ")]
    return "\n".join(lines[starts[-1] :] if starts else lines)


def _is_gone(process: Running, deadline: float) -> bool:
    """Wait until the role has ended; False when it has not by the deadline."""
    while process.exit_code() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
