"""One simulated run: real roles on simulated machines, a supervisor that restarts them, a nemesis that breaks things.

Owns the run's directory, the processes and what each fault does to them. The roles are the product's own entry points
(``serve_ledger``, ``run_feeder``, ``run_learner``, ``run_worker``); restarts follow the product's ``RestartPolicy``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rollbook.cli.record import run_record
from rollbook.cli.serving import serve_ledger
from rollbook.cli.standby import serve_in_turn
from rollbook.core.config import Config, config_from_table
from rollbook.core.errors import Fenced, LedgerLocked, NotReady, RoleHeld, Unavailable
from rollbook.core.records import CheckpointState
from rollbook.learner.loop import run_learner
from rollbook.observe import failpoints
from rollbook.rollout.judges import Opened, open_judge
from rollbook.rollout.worker import run_worker
from rollbook.rpc import convert
from rollbook.rpc.address import addresses_in
from rollbook.rpc.client import LedgerClient
from rollbook.supervise.policy import RestartPolicy
from rollbook.tasks import tokenizer
from rollbook.tasks.feeder import run_feeder
from rollbook.v1 import ledger_service_pb2 as pb
from simulation import policy, tools
from simulation.disk import Disk
from simulation.images import DatabaseDisk
from simulation.kernel import Kernel
from simulation.machine import Process
from simulation.nemesis import Nemesis, OpenedDatabase, Role
from simulation.network import Network, SimServer
from simulation.options import Options

MODEL = Path(__file__).resolve().parents[2] / "service" / "rollbook" / "assets" / "sort-digits"
RUN_ID = "simulated"
SHARED_MEMORY = Path("/dev/shm")
CALM_S = 900.0
"""Simulated time within which a run must end once nothing is broken any more (P10)."""
FAULTS_END_S = 60.0
HOUR_S = 3600.0
EXPECTED = (Fenced, Unavailable, RoleHeld, LedgerLocked, NotReady, OSError)
"""What a process may end with when its machine, its network or a successor gives it reason to."""
ROLE_TTL_S = 5.0


def config_of(options: Options, directory: Path) -> Config:
    """The configuration of a simulated run."""
    tasks = directory.parent / "tasks.jsonl"
    n_tasks = options.steps * options.groups_per_step if options.one_epoch else 5
    tasks.write_text("".join(
        f'{{"prompt": "task {i}", "answer": "{i}", "no_verdict": {options.no_verdict}}}\n' for i in range(n_tasks)
    ))  # fmt: skip
    return config_from_table({
        "run": {"id": RUN_ID, "dir": str(directory), "steps": options.steps, "seed": options.config_seed, "chaos_allowed": True},
        "model": {"path": str(MODEL)},
        "task": {"source": "jsonl", "path": str(tasks), "reward": "simulation.policy:reward", "epochs": int(options.one_epoch)},
        "schedule": {"kind": options.schedule, "max_lag_versions": options.lag, "lag_versions": options.lag},
        "sampling": {"max_new_tokens": tools.TOKENS_MAX if options.tools else 4},
        "environment": {"turns_max": tools.TURNS_MAX},
        "workers": [{"engine": "transformers", "count": options.workers, "slots": options.slots, "max_model_len": 48}],
        "learner": {
            "groups_per_step": options.groups_per_step, "group_size": options.group_size, "minibatches": options.minibatches,
            "lr": 0.02, "lr_schedule": "cosine", "warmup_steps": 2,
        },
        "checkpoint": {"every_steps": options.checkpoint_every, "keep": 2},
        "ledger": {
            "status_address": "",
            "url": f"sqlite:///{directory}/ledger.sqlite", "lease_ttl_s": 7.0, "heartbeat_s": 2.0, "role_ttl_s": ROLE_TTL_S,
            "attempts_max": 1000 if options.schedule == "fixed" else 4,
            "late_submit": options.late_submit, "straggler": options.straggler,
            "straggler_wait_s": 20.0, "infra_window": 12,
            "breaker_pause_s": 1e5,  # clocks are set by 600 s here, and nobody starts a paused run again
        },
        "supervisor": {"restarts_max": 10_000, "backoff_s": 0.2, "backoff_max_s": 1.0, "stall_s": 120.0},
    })  # fmt: skip


def _ack(submission: Any, result: Any) -> dict[str, Any]:
    """One answer as the worker received it, in the terms of the oracle."""
    given = convert.submission(submission)
    answer = convert.submit_result(result)
    t = given.trajectory
    return {
        "outcome": answer.outcome.value, "key": list(given.key), "incarnation": given.incarnation, "sequence": given.sequence,
        "bytes": hashlib.sha256(t.token_ids + t.logprobs + t.versions).hexdigest(),
    }  # fmt: skip


@functools.cache
def tokenizer_of(path: str) -> Any:
    return tokenizer.load_tokenizer(path)


class World(Nemesis):
    """A run in the making."""

    def __init__(self, options: Options, template: Path) -> None:
        self.options = options
        self.root = Path(tempfile.mkdtemp(prefix="rollbook-sim-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        self.dir = self.root / "run"
        self.dir.mkdir()
        self.database = self.dir / "ledger.sqlite"
        shutil.copy(template, self.database)
        self.config = config_of(options, self.dir)
        self.record = run_record(self.config)
        self.rng = random.Random(f"world.{options.seed}")
        self.kernel = Kernel(options.seed)
        self.disk = Disk(self.root)
        for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite.lock"):
            self.disk.exclude(self.dir / name)
        self.database_disk = DatabaseDisk(self.database)
        self.network = Network(self.kernel, random.Random(f"network.{options.seed}"), options.weather, on_reply=self._note)
        self.processes: list[Process] = []
        self.acks: list[dict[str, Any]] = []
        self.told: dict[tuple[str, int, int], str] = {}
        self.effects: Counter[tools.Call] = Counter()
        """What the tools of this run did outside of it."""
        self.broken: list[str] = []
        """Answers that contradict earlier ones."""
        self.crossed: Counter[str] = Counter()
        self.crashed: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.faults_over = False
        self.done = False
        self.failure: BaseException | None = None
        self._killed_somebody = False
        self._n_strikes = 0
        self._chances = options.crashes_max
        self._incarnations = 0
        restarts = functools.partial(RestartPolicy, self.config.supervisor)
        mains: dict[str, Callable[[Process], None]] = {"ledger": functools.partial(self._ledger, 0)}
        if options.standby:
            mains["ledger-1"] = functools.partial(self._ledger, 1)
        mains |= {"feeder": self._feeder, "learner": self._learner}
        mains |= {f"worker-{i}": functools.partial(self._worker, i) for i in range(options.workers)}
        self.roles = {name: Role(name, main, restarts()) for name, main in mains.items()}

    # What the processes run.

    def _ledger(self, index: int, process: Process) -> None:
        def serve(ledger: Any, address: str, *, run_id: str, on_fenced: Callable[[], None], **_: object) -> SimServer:
            server = SimServer(self.network, process, ledger, run_id, on_fenced)
            process.resources.append(server)
            return server

        if self.options.standby:
            serve_in_turn(self.config, self.record, process.stop, index=index, serve=serve)  # type: ignore[arg-type]
        else:
            serve_ledger(self.config, self.record, process.stop, serve=serve)  # type: ignore[arg-type]

    def _feeder(self, process: Process) -> None:
        run_feeder(self.config, self._client(process), process.stop)  # type: ignore[arg-type]

    def _learner(self, process: Process) -> None:
        if run_learner(self.config, self._client(process), process.stop):  # type: ignore[arg-type]
            self.done = True

    def _worker(self, index: int, process: Process) -> None:
        run_worker(
            self.config, index, self._client(process), self._client(process), process.stop,  # type: ignore[arg-type]
            engine_factory=lambda config, kind: policy.SimEngine(config, self.options.generate_s, bool(self.options.tools)),
        )  # fmt: skip

    def _client(self, process: Process) -> LedgerClient:
        return LedgerClient(
            addresses_in(self.config.run.dir), RUN_ID, timeout_s=3.0, clock=process.host, rng=process.host.rng(),
            dial=self.network.dialer(process),
        )  # fmt: skip

    # The supervisor.

    def start(self, role: Role, supersedes: str = "") -> None:
        """A new process for the role, after whatever it replaces."""
        if self.done and not role.name.startswith("ledger"):
            return
        self._incarnations += 1
        incarnation = f"{role.name}.{self._incarnations}"
        role.process = Process(self.kernel, role.name, incarnation, supersedes, self.disk, self._ended)
        role.process.host.wall_offset_s = role.wall_offset_s
        role.last_incarnation = incarnation
        self.processes.append(role.process)
        self.kernel.log(f"start {incarnation} after {supersedes or 'nobody'}")
        role.process.start(role.main)

    def _ended(self, process: Process, how: object) -> None:
        """A process ended by itself."""
        self.kernel.log(f"end {process.incarnation}: {how if isinstance(how, str) else type(how).__name__}")
        if isinstance(how, BaseException) and not isinstance(how, EXPECTED):
            self.failure = how
        self.bury(process)
        role = self.roles[process.name]
        if role.process is not process:
            return
        if how == "done" and (process.role != "ledger" or self.done):
            role.finished = True
            return
        self._restart(role, str(how))

    def _restart(self, role: Role, cause: str) -> None:
        wait = role.restarts.on_death(self.kernel.now, cause)
        assert wait is not None, f"the restart budget of {role.name} is spent: {role.restarts.first_cause}"
        dead = role.last_incarnation
        self.kernel.after(wait + self.rng.random() * 0.3, lambda: role.finished or self.start(role, dead))

    # Faults.

    def kill(self, process: Process, why: str) -> None:
        """SIGKILL now; the supervisor will notice. Returns also when the caller is one of the victim's own tasks."""
        if not process.alive:
            return
        self.kernel.log(f"kill {process.incarnation}: {why}")
        process.kill()
        self.bury(process)
        role = self.roles[process.name]
        if role.process is process:
            self._restart(role, why)

    def bury(self, process: Process) -> None:
        """What the operating system does after a process: links, locks and database connections are gone."""
        for server in [s for s in self.network.listeners.values() if s.process is process]:
            self.network.close(server)
        ledgers = [r for r in process.resources if isinstance(r, OpenedDatabase)]
        process.resources.clear()
        if not ledgers:
            return
        living = [p for p in self.processes if p is not process and p.alive]
        others = any(isinstance(r, OpenedDatabase) for p in living for r in p.resources)
        for opened in ledgers:
            if opened.closed:
                continue
            if hasattr(opened, "reader"):
                self.database_disk.abandon(opened, shared=others)
            else:
                opened._unlock()

    def cross(self, name: str) -> None:
        """Called at every failpoint any simulated process crosses."""
        task = self.kernel.current
        if task is None or self.kernel.over:
            return
        process: Process = task.process
        if not process.alive:
            self.kernel.vanish()
        if name == "ledger.after_commit":
            self.database_disk.synced()
        self.crossed[name] += 1
        due = self.options.crash_at.get(name) == self.crossed[name]
        by_chance = self._chances > 0 and self.rng.random() < self.options.crash_rate
        if not due and (self.faults_over or not by_chance):
            return
        self.crashed[name] += 1
        self._chances -= by_chance
        try:
            if due and self.rng.random() < 0.2:
                self.power_loss(f"at {name}")
            else:
                self.kill(process, name)
        except Exception as error:  # noqa: BLE001  a fault of the simulator itself
            self.failure = error
        self.kernel.vanish()

    def power_loss(self, why: str) -> None:
        """Everything dies at once, and the disks keep only what they had to keep."""
        self.kernel.log(f"power loss {why}")
        self.kill_all(why)
        chosen = self.database_disk.power_loss(self.rng) + self.disk.power_loss(self.rng)
        for line in chosen:
            self.kernel.log(f"  {line}")

    def kill_all(self, why: str) -> None:
        for process in [p for p in self.processes if p.alive]:
            self.kill(process, why)

    def _end_of_faults(self) -> None:
        self.faults_over = True
        self.kernel.log("calm")
        weather = self.network.weather
        weather.lost = weather.reply_lost = weather.duplicated = weather.slow = weather.very_late = 0.0
        self.network.cut_off.clear()
        self.disk.clear()
        for process in self.processes:
            for opened in [r for r in process.resources if isinstance(r, OpenedDatabase)]:
                if opened.faults is not None:
                    opened.faults.clear()
            self._resume(process)

    # From beginning to end.

    def run(self) -> None:
        """Play the run to its end. Raises Stuck, or the failure of a process that no fault explains."""
        for role in self.roles.values():
            self.start(role)
        if self.options.strikes:
            self.kernel.after(self.rng.random() * 4.0, self.strike)
        self.kernel.after(FAULTS_END_S, self._end_of_faults)
        self.kernel.run(lambda: self.done or self.failure is not None, FAULTS_END_S + CALM_S)
        if not self.faults_over:
            self._end_of_faults()
        for role in self.roles.values():
            if role.process is not None and role.process.role != "ledger" and role.process.alive:
                role.process.stop.set()
        self._settle(lambda: not any(p.alive for p in self.processes if p.role != "ledger"), 300)
        self._stop_server()
        if self.network.late:
            self.kernel.now += HOUR_S
            self.roles["ledger"].finished = False
            self.start(self.roles["ledger"])
            self._settle(self._answering, 60)
            self.network.deliver_late()
            self._settle(lambda: self.network.quiet, 60)
            self._stop_server()
        if self.failure is not None:
            raise self.failure

    def _stop_server(self) -> None:
        """A graceful end of every server, one that was just being restarted included."""
        self._settle(self._answering, 120)
        for process in [p for p in self.processes if p.alive]:
            process.stop.set()
        self._settle(lambda: not any(p.alive for p in self.processes), 120)

    def _settle(self, finished: Callable[[], bool], bound_s: float) -> None:
        self.kernel.run(lambda: finished() or self.failure is not None, self.kernel.now + bound_s)

    def _answering(self) -> bool:
        return any(s.process.alive and s.serves for s in self.network.listeners.values())

    def _note(self, method: str, request: bytes, replies: list[bytes]) -> None:
        """Keep what a caller was told: it must stay true."""
        if method == "SubmitSamples":
            submissions = pb.SubmitSamplesRequest.FromString(request).submissions
            results = pb.SubmitSamplesResponse.FromString(replies[0]).results
            self.acks += [_ack(*pair) for pair in zip(submissions, results, strict=True)]
        elif method == "PlanStep":
            plan = pb.PlanStepResponse.FromString(replies[0]).plan
            self._told(("plan", plan.lineage, plan.step), plan.chain_digest)
        elif method == "PublishVersion":
            version = pb.PublishVersionResponse.FromString(replies[0]).version
            self._told(("version", version.lineage, version.version), version.digest)

        elif method == "MarkCheckpoint":
            marked = pb.MarkCheckpointRequest.FromString(request)
            if convert.enum_member(CheckpointState, marked.state) is CheckpointState.CORRUPT:
                # Nothing that was flushed is ever damaged here, so a committed checkpoint has no excuse.
                self.broken.append(f"checkpoint {marked.lineage}.{marked.step} was found damaged")

    def _told(self, what: tuple[str, int, int], answer: str) -> None:
        if self.told.setdefault(what, answer) != answer:
            self.broken.append(f"{what[0]} {what[1]}.{what[2]} was {self.told[what][:12]}, later {answer[:12]}")

    def close(self) -> None:
        self.kernel.close()
        for process in self.processes:
            process.kill()
            self.bury(process)
        self.database_disk.close()
        self.disk.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _open_judge(self, config: Config, log_path: Path) -> Opened:
        if not self.options.tools:
            return open_judge(config, log_path)
        return Opened(tools.ToolJudge(config, self.options.tools == "pure", self.effects, self.options.generate_s))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The seams that are no arguments: what stands in for heavy libraries, and who is told of failpoints and databases."""
        world = self

        class Opened(OpenedDatabase):
            def __init__(self, *args: Any, **keywords: Any) -> None:
                task = world.kernel.current
                if task is not None:
                    task.process.resources.append(self)
                self.faults = None
                super().__init__(*args, **keywords)
                if task is not None and not world.options.server_locked:
                    self.exclusive = False

            def _lock(self, path: Path) -> None:
                if world.options.server_locked:
                    super()._lock(path)

        quiet = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        failpoints.set_observer(self.cross)
        try:
            with (
                mock.patch("rollbook.ledger.ledger.Database", Opened),
                mock.patch("rollbook.ledger.dialects.SQLITE_BUSY_MS", 0),  # one thread: nobody would let the lock go meanwhile
                mock.patch("rollbook.ledger.base.RECHECK_S", 2.0),
                mock.patch("rollbook.tasks.feeder._POLL_S", 1.0),
                mock.patch("rollbook.cli.standby.POLL_S", 1.5),
                mock.patch("simulation.policy.outage", self.options.outage),
                mock.patch("rollbook.learner.loop.load_policy", policy.load_policy),
                mock.patch("rollbook.learner.replay.load_policy", policy.load_policy),
                mock.patch("rollbook.tasks.prompts.load_tokenizer", tokenizer_of),
                mock.patch("rollbook.tasks.turns.load_tokenizer", tokenizer_of),
                mock.patch("rollbook.rollout.judges.judges_in_process", lambda config: True),
                mock.patch("rollbook.rollout.worker.open_judge", self._open_judge),
                mock.patch("rollbook.rollout.episodes.wait", tools.wait),
            ):
                yield
        finally:
            failpoints.set_observer(None)
            logging.disable(quiet)
