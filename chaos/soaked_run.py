"""One run of the soak: started, killed at random and at failpoints, finished, judged; and the unbroken run it is compared with.

Kills only what this run itself has started: processes its supervisor recorded and that still are what was recorded, the
supervisor, and the database server made for it. Knows how a run went from its database, files and commands alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kept
import oracle
from acknowledgements import FILE as ACKS
from forked import Command, rollbook
from postgres_server import PostgresServer
from rollbook.observe.catalogue import CATALOGUE
from rollbook.supervise.process import ProcessRecord, ProcessTable

RUN_ID = "soak"
STILL_BOUND_S = 240.0
"""Longest that no step may be finished once nobody is killed any more; a run that stands still for longer hangs."""
END_BOUND_S = 1800.0
"""Longest a run may take to end once nobody is killed any more."""
COMMAND_BOUND_S = 300.0
KILLING_BOUND_S = 120.0
"""After this time no more kills are sent, however few there were."""
POLL_S = 0.05
TARGETS = {"worker": 9, "learner": 9, "ledger": 8, "feeder": 9, "supervisor": 3, "everything": 4}
"""Kills of one run; on PostgreSQL one of the database server besides."""
GAP_MEAN_S = 1.2
STOPPED_SHARE = 0.12
"""Share of the moments at which a role is stopped for a while instead of killed."""
STOP_MAX_S = 6.0
ROLES = ("worker", "learner", "ledger", "feeder")
FAILPOINTS_AT_ONCE = 5
FENCED = "exit code 3"
"""How a role ends that was stopped for longer than its term."""


@dataclass(frozen=True)
class Setting:
    """What distinguishes the runs of a soak."""

    schedule: str
    database: str
    workers: int
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.database}-{self.workers}w-{self.steps}s-{self.seed}"

    def overrides(self, directory: Path, url: str) -> list[str]:
        """For ``--set``: float64 makes a rollout independent of its batch, which equality of whole fixed-lag runs needs."""
        return [
            f"run.id={RUN_ID}", f"run.dir={directory}", f"run.steps={self.steps}", f"run.seed={self.seed}",
            f"schedule.kind={self.schedule}", f"workers.0.count={self.workers}",
            f"workers.0.dtype={'float64' if self.schedule == 'fixed' else 'float32'}", *([f"ledger.url={url}"] if url else []),
        ]  # fmt: skip


@dataclass
class Kill:
    """One death that was sent, or one stop."""

    role: str
    kind: str
    """``sigkill``, ``sigstop``, or the failpoint."""
    at: float
    new_rollout_s: float | None = None
    new_step_s: float | None = None


@dataclass
class SoakedRun:
    """One run directory and everything that happened to it."""

    root: Path
    config: Path
    setting: Setting
    server: PostgresServer | None = None
    chance: random.Random = field(default_factory=random.Random)
    fork_server: bool = True
    supervisor: Command | None = None
    kills: list[Kill] = field(default_factory=list)
    n_processes: int = 0
    findings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    _stopped: list[tuple[ProcessRecord, float]] = field(default_factory=list)
    _struck: int = 0

    def __post_init__(self) -> None:
        self.markers.mkdir(parents=True)
        self.url = self.server.url(self.server.create(self.root.name)) if self.server else ""

    @property
    def dir(self) -> Path:
        return self.root / "run"

    @property
    def markers(self) -> Path:
        return self.root / "fired"

    @property
    def ledger_url(self) -> str:
        return self.url or f"sqlite:///{self.dir / 'ledger.sqlite'}"

    def start(self, failpoints: str = "") -> None:
        """The supervisor, and through it everything else."""
        arguments = ["run", str(self.config), "--plain", "--no-report", *(["--fork-server"] if self.fork_server else [])]
        for override in self.setting.overrides(self.dir, self.url):
            arguments += ["--set", override]
        env = {"ROLLBOOK_FAILPOINTS": failpoints, "ROLLBOOK_FAILPOINTS_ONCE_DIR": str(self.markers)}
        self.supervisor = rollbook(arguments, self.root / "output.txt", env | {ACKS: str(self.root / "acks")})

    def undisturbed(self) -> None:
        """Run to the end without a kill."""
        self.start()
        self._end()

    def soak(self, kills_max: int = 0) -> None:
        """Run to the end with the kills of ``TARGETS`` (or so many of them) in random order, at random times, and failpoints."""
        targets = [role for role, n in TARGETS.items() for _ in range(n)] + ["postgresql"] * (self.server is not None)
        self.chance.shuffle(targets)
        targets = targets[: kills_max or None]
        self.start(self._armed())
        deadline = time.monotonic() + KILLING_BOUND_S
        while targets and time.monotonic() < deadline and self._goes_on(self._gap()):
            if self.chance.random() < STOPPED_SHARE:
                self._stop(self.chance.choice(ROLES))
            else:
                target = targets.pop()
                if not self._strike(target):
                    targets.insert(0, target)  # not alive at this moment
        self._end()
        for marker in self.markers.iterdir():
            name = marker.name.partition("@")[0]
            self.kills.append(Kill(name.partition(".")[0], name, marker.stat().st_mtime))
            self.n_processes += 1
        self.kills.sort(key=lambda kill: kill.at)

    def _armed(self) -> str:
        """Some failpoints of every role, each at one of its first crossings in a process."""
        names = {
            self.chance.choice([name for name, point in CATALOGUE.items() if point.role == role])
            for role in self.chance.choices(ROLES, k=FAILPOINTS_AT_ONCE)
        }
        return ",".join(f"{name}=crash@{self.chance.choice((1, 1, 1, 2, 3, 5))}" for name in sorted(names))

    def _gap(self) -> float:
        return self.chance.uniform(0.05, 0.3) if self.chance.random() < 0.2 else min(4.0, self.chance.expovariate(1 / GAP_MEAN_S))

    def _goes_on(self, seconds: float) -> bool:
        """Let the run be for a while; whether there is still something to kill after it."""
        until = time.monotonic() + seconds
        while True:
            self._wake(time.monotonic())
            if not self._keep_supervisor():
                return False
            if time.monotonic() >= until:
                return self._steps_ended() < self.setting.steps - 2
            time.sleep(POLL_S)

    def _wake(self, now: float) -> None:
        for record, at in list(self._stopped):
            if now >= at:
                record.signal(signal.SIGCONT)
                self._stopped.remove((record, at))

    def _keep_supervisor(self) -> bool:
        """Start the supervisor again when a failpoint has killed it; False once it has ended by itself."""
        assert self.supervisor is not None
        code = self.supervisor.poll()
        if code == -signal.SIGKILL:
            self.start(self._armed())
        return code in (None, -signal.SIGKILL)

    def _steps_ended(self) -> int:
        rows = query(self.ledger_url, "SELECT max(step) FROM plan_outcome")
        return (rows and rows[0][0]) or 0

    def records(self) -> list[ProcessRecord]:
        """Newest process of every role."""
        return list(ProcessTable(self.dir / "supervisor" / "processes.json").records().values())

    def _alive(self, role: str) -> list[ProcessRecord]:
        return [r for r in self.records() if r.name.partition("-")[0] == role and r.alive()]

    def _stop(self, role: str) -> None:
        """Stop a role for a while, some for longer than its term."""
        alive = [r for r in self._alive(role) if all(r != stopped for stopped, _ in self._stopped)]
        if alive and (record := self.chance.choice(alive)).signal(signal.SIGSTOP):
            self.kills.append(Kill(role, "sigstop", time.time()))
            self._stopped.append((record, time.monotonic() + self.chance.uniform(0.2, STOP_MAX_S)))

    def _strike(self, target: str) -> bool:
        """Kill it; False when none of it lives."""
        at = time.time()
        if target == "postgresql":
            assert self.server is not None
            self.n_processes += self.server.kill()
            self.server.start_again()
        elif target in ("supervisor", "everything"):
            self.n_processes += self.end_everything() if target == "everything" else self.supervisor.kill()  # type: ignore[union-attr]
            self.start(self._armed())
        else:
            alive = self._alive(target)
            if not alive or not self.chance.choice(alive).signal(signal.SIGKILL):
                return False
            self.n_processes += 1
        self.kills.append(Kill(target, "sigkill", at))
        return True

    def end_everything(self) -> int:
        """SIGKILL supervisor and roles, as a power cut would; returns how many processes."""
        alive = [record for record in self.records() if record.alive()]
        for record in alive:  # the supervisor is not given the time to notice
            with contextlib.suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
        return len(alive) + (self.supervisor.kill() if self.supervisor else 0)

    def _end(self) -> None:
        """Nobody is killed any more: the run has to go on and to end, and with exit code 0."""
        began = moved = time.monotonic()
        steps = -1
        while self._keep_supervisor():
            now = time.monotonic()
            self._wake(now)
            if (ended := self._steps_ended()) != steps:
                steps, moved = ended, now
            if now - moved > STILL_BOUND_S or now - began > END_BOUND_S:
                self._dump()
                self.findings.append(f"hangs: {steps} steps in {now - began:.0f} s without kills, none in {now - moved:.0f} s")
                self.end_everything()
                return
            time.sleep(0.3)
        assert self.supervisor is not None
        if self.supervisor.code != 0:
            tail = self.output()[-3000:]
            self.findings.append(f"ended with exit code {self.supervisor.code}\n{tail}")
            self.end_everything()

    def _dump(self) -> None:
        for record in self.records():
            if record.catches(signal.SIGUSR1):
                record.signal(signal.SIGUSR1)
        time.sleep(2.0)

    def output(self) -> str:
        return (self.root / "output.txt").read_text(errors="replace")

    def command(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of another ``rollbook`` command on this run."""
        out = self.root / f"{arguments[0]}.txt"
        out.unlink(missing_ok=True)
        code = rollbook([*arguments, str(self.dir)], out, {}).wait(COMMAND_BOUND_S)
        return code, out.read_text(errors="replace")


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """A query on a live database through a connection of its own; nothing while the database cannot answer."""
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return []
    try:
        with contextlib.closing(oracle.connect(url)) as connection:
            return connection.cursor().execute(statement).fetchall()
    except Exception as error:
        if type(error).__name__ not in ("OperationalError", "UndefinedTable", "DatabaseError"):
            raise
        return []


@dataclass
class Verdict:
    """What one run came to."""

    tables: dict[str, list[oracle.Row]]
    findings: list[str]
    counts: dict[str, int]


def judge(run: SoakedRun, reference: dict[str, Any] | None) -> Verdict:
    """Audit, replay, the independent oracle and, in fixed lag, equality with the unbroken run.

    Args:
        reference: ``oracle.identity`` of an unbroken run of the same seed; None for that run itself. Prompts must be its prompts
            in either schedule.
    """
    steps = run.setting.steps
    tables = oracle.read_ledger(run.ledger_url, RUN_ID)
    if not tables["run"]:
        return Verdict(tables, [*run.findings, "run: the ledger holds none"], {name: 0 for name in COUNTS})
    acks = read_acks(run.root / "acks")
    found = run.findings + oracle.findings(tables, run.dir, steps=steps, acks=acks) + _other_deaths(run)
    code, text = run.command("audit")
    if code != 0 or "audit: clean" not in text:
        found.append(f"audit: exit code {code}\n{text[-2000:]}")
    code, text = run.command("replay")
    replay = json.loads(text[text.index("{") :]) if code == 0 else {}
    if code != 0 or not replay["equal"] or replay["steps"] != steps or replay["versions_compared"] != steps + 1:
        found.append(f"replay: exit code {code}\n{text[-2000:]}")
    skipped = 0
    if reference is not None:
        skipped = _skipped(tables, reference["prompts"])
        found += [f"prompts: {skipped} were not fed in order"] if skipped else []
        if run.setting.schedule == "fixed":
            mine = oracle.identity(tables)
            found += [f"identity: {part} differ from the unbroken run's" for part in mine if mine[part] != reference[part]]
    tokens = {oracle.key_of(r): 0 for r in tables["slot"]}
    for event in tables["event"]:
        if event["kind"] == "lease_granted":
            tokens[oracle.key_of(event)] = max(tokens[oracle.key_of(event)], event["token"])
    counts = {
        "samples": len(tables["sample"]), "acknowledged": len({tuple(ack["key"]) for ack in acks if ack["outcome"] in DURABLE}),
        "acknowledged_lost": sum(finding.startswith("acknowledged: ") for finding in found),
        "trained_twice": sum(n > 1 for n in Counter(map(oracle.key_of, tables["plan_item"])).values()),
        "prompts": len(tables["prompt_group"]), "prompts_skipped": skipped,
        "generated_again": sum(max(0, token - 1) for token in tokens.values()),
    }  # fmt: skip
    return Verdict(tables, found, counts)


DURABLE = ("accepted", "replayed")
COUNTS = (
    "samples", "acknowledged", "acknowledged_lost", "trained_twice", "prompts", "prompts_skipped", "generated_again",
)  # fmt: skip


def read_acks(path: Path) -> list[oracle.Row]:
    """Answers to submissions as the workers received them; the last line may be torn by a kill."""
    out = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    return out


def _other_deaths(run: SoakedRun) -> list[str]:
    """Deaths that nobody sent. A role may be fenced after it was stopped, and a ledger server gives up where its database is away
    for longer than its patience; nothing else.
    """
    seen = Counter((name.partition("-")[0], how) for name, how in re.findall(r"(\S+) died \(([^)\n]*)\)", run.output()))
    sent, stops = kills_by_role(run.kills)
    at_once = sent.get("everything", 0)  # the supervisor may have seen some of these
    log = (run.dir / "logs" / "ledger.log").read_text(errors="replace")
    without_database = log.count("rollbook ledger: Unavailable: the ledger's database")
    allowed = {("ledger", "exit code 1"): without_database if sent.get("postgresql") else 0}
    allowed |= {(role, FENCED): n for role, n in stops.items()}
    allowed |= {(role, "killed by SIGKILL"): sent.get(role, 0) + at_once for role in ROLES}
    found = []
    for (role, how), n in seen.items():
        if (excess := n - allowed.get((role, how), 0)) > 0:
            found.append(f"deaths: {role}, {how}, {excess} times more than was sent")
    return found


def _skipped(tables: dict[str, list[oracle.Row]], prompts: dict[int, Any]) -> int:
    """Ordinals up to the newest that have no group, or another prompt than the unbroken run has there."""
    mine = {r["ordinal"]: (bytes(r["prompt_ids"]), json.loads(r["task_json"])["answer"]) for r in tables["prompt_group"]}
    wanted = range(max(mine, default=-1) + 1)
    return sum(o not in mine or (o in prompts and mine[o] != prompts[o]) for o in wanted)


def measure(run: SoakedRun, tables: dict[str, list[oracle.Row]]) -> None:
    """For every kill, the seconds to the next accepted sample and to the next finished step, by the ledger's clock."""
    for kill in run.kills:
        kill.new_rollout_s = _first_after(kill.at, (r["accepted_at_us"] for r in tables["sample"]))
        kill.new_step_s = _first_after(kill.at, (r["finished_at_us"] for r in tables["plan_outcome"]))


def _first_after(at: float, times_us: Any) -> float | None:
    later = [t / 1e6 - at for t in times_us if t / 1e6 > at]
    return round(min(later), 3) if later else None


def reference_for(setting: Setting, folder: Path, make: Callable[[Setting], SoakedRun]) -> dict[str, Any]:
    """Identity of an unbroken run of the setting, made once per soak. Raises AssertionError when that run is not clean."""
    file = folder / f"{setting.name}.json"
    if file.exists():
        return kept.loads(file.read_text())
    run = make(setting)
    try:
        run.undisturbed()
        verdict = judge(run, None)
    finally:
        run.end_everything()
    assert not verdict.findings, f"the unbroken run of {setting.name} in {run.root} is not clean: {verdict.findings}"
    identity = oracle.identity(verdict.tables)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(kept.dumps(identity))
    temporary.rename(file)
    remove(run)
    return identity


def remove(run: SoakedRun) -> None:
    """A run nobody needs to look at leaves nothing behind."""
    if run.server:
        run.server.drop(run.root.name)
    shutil.rmtree(run.root, ignore_errors=True)


def kills_by_role(kills: Sequence[Kill]) -> tuple[dict[str, int], dict[str, int]]:
    """Deaths and stops by what died."""
    deaths = Counter(kill.role for kill in kills if kill.kind != "sigstop")
    return dict(deaths), dict(Counter(kill.role for kill in kills if kill.kind == "sigstop"))
