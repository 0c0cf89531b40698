"""A whole run as real processes: configuration, start, kills, bounded waits, what was logged.

Reaches the system only as a user does: command line, environment, signals, files. Knows when something happened from marker
files, log lines and the database, never from a fixed delay.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import oracle

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "service" / "rollbook" / "assets" / "sort-digits"
_LIBC = ctypes.CDLL(None)
HOOKS = Path(__file__).resolve().parent / "hooks"
RUN_ID = "kills"
RUN_BOUND_S = 600.0
"""Longest any run may take; a run that takes longer hangs."""
COMMAND_BOUND_S = 300.0

_CONFIG = """
[run]
id = "{run_id}"
dir = "run"
steps = {steps}
seed = 11
chaos_allowed = true

[model]
path = "{model}"

[task]
source = "jsonl"
path = "{model}/train.jsonl"

[schedule]
kind = "{schedule}"
max_lag_versions = 2
lag_versions = 1

[sampling]
max_new_tokens = 12

[learner]
groups_per_step = 4
group_size = 4
minibatches = 2
lr_schedule = "cosine"
warmup_steps = 2

[checkpoint]
every_steps = 4

[ledger]
url = "{url}"
lease_ttl_s = {lease_ttl_s}
heartbeat_s = {heartbeat_s}
role_ttl_s = 3.0
attempts_max = 40

[supervisor]
restarts_max = 100
backoff_s = 0.1
backoff_max_s = 0.2

[[workers]]
engine = "transformers"
count = {workers}
slots = 4
max_model_len = 64
dtype = "{dtype}"
"""


class TookTooLong(AssertionError):
    """A bounded wait ended without what it waited for."""


def wait_until(what: str, happened: Callable[[], Any], bound_s: float = 240.0, poll_s: float = 0.02) -> Any:
    """Poll until ``happened`` returns something true, and return it."""
    deadline = time.monotonic() + bound_s
    while not (value := happened()):
        if time.monotonic() > deadline:
            raise TookTooLong(f"{what}: not within {bound_s:.0f} s")
        time.sleep(poll_s)
    return value


@dataclass(frozen=True)
class Process:
    """One role's newest process as the supervisor recorded it."""

    name: str
    pid: int
    start_time: int
    incarnation: str

    def alive(self) -> bool:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return fields[0] != "Z" and int(fields[19]) == self.start_time

    def send(self, number: int) -> bool:
        """Signal the process; False when it is gone already."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True)
class Logged:
    """One event of a role's log."""

    at: float
    event: str
    fields: dict[str, str]


@dataclass
class System:
    """One run directory under ``root`` and the ``rollbook run`` processes started on it."""

    root: Path
    schedule: str = "bounded"
    workers: int = 2
    steps: int = 32
    url: str = ""
    failpoints: Mapping[str, str] = field(default_factory=dict)
    lease_ttl_s: float = 6.0
    heartbeat_s: float = 1.0
    planted: str = ""
    fork_server: bool = True
    """Restarts without the imports; everything else is an ordinary start."""
    supervisor: subprocess.Popen[bytes] | None = None
    fired_at: dict[str, float] = field(default_factory=dict)
    replayed: tuple[int, str] = (-1, "not replayed")
    audited: tuple[int, str] = (-1, "not audited")
    killed: list[str] = field(default_factory=list)
    stopped: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, list[oracle.Row]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.markers.mkdir()
        dtype = "float64" if self.schedule == "fixed" else "float32"
        self.config.write_text(
            _CONFIG.format(
                run_id=RUN_ID, steps=self.steps, model=MODEL, schedule=self.schedule, url=self.url, workers=self.workers,
                dtype=dtype, lease_ttl_s=self.lease_ttl_s, heartbeat_s=self.heartbeat_s,
            )  # fmt: skip
        )

    @property
    def config(self) -> Path:
        return self.root / "run.toml"

    @property
    def dir(self) -> Path:
        return self.root / "run"

    @property
    def markers(self) -> Path:
        return self.root / "fired"

    @property
    def ledger_url(self) -> str:
        return self.url or f"sqlite:///{self.dir / 'ledger.sqlite'}"

    def start(self) -> None:
        """``rollbook run``, with the failpoints in the environment of every role."""
        armed = ",".join(f"{name}={action}" for name, action in self.failpoints.items())
        env = _environment(HOOKS) | {"KILLS_ACKS": str(self.root / "acks"), "KILLS_PLANTED": self.planted}
        env |= {"ROLLBOOK_FAILPOINTS": armed, "ROLLBOOK_FAILPOINTS_ONCE_DIR": str(self.markers)}
        switches = ["--plain", "--no-report", *(["--fork-server"] if self.fork_server else [])]
        with (self.root / "output.txt").open("ab") as out:
            self.supervisor = subprocess.Popen(
                [*_rollbook(), "run", str(self.config), *switches], env=env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_the_tests,
            )  # fmt: skip

    def wait(self, bound_s: float = RUN_BOUND_S) -> int:
        """Exit code of the supervisor; a run that does not end within the bound is ended and is an error."""
        assert self.supervisor is not None
        try:
            code = self.supervisor.wait(bound_s)
        except subprocess.TimeoutExpired:
            self.end_everything()
            raise TookTooLong(f"the run did not end within {bound_s:.0f} s\n{self.output()[-4000:]}") from None
        self.fired_at = {path.name: path.stat().st_mtime for path in self.markers.iterdir()}
        return code

    def run(self) -> System:
        """Start and finish."""
        self.start()
        return self.finish()

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """``wait_until`` while the run goes on; its early end is an error at once."""

        def look() -> Any:
            value = happened()
            if not value and self.supervisor is not None and self.supervisor.poll() is not None:
                raise AssertionError(f"the run ended before this: {what}\n{self.output()[-4000:]}")
            return value

        return wait_until(what, look)

    def finish(self) -> System:
        """Wait for the end, which must be exit code 0; then let the product audit and replay the run."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.output()[-6000:]}\n{self.tails()}"
        self._tables = oracle.read_ledger(self.ledger_url, RUN_ID)
        self.audited = self.command("audit", str(self.dir))
        self.replayed = self.command("replay", str(self.dir))
        return self

    def end_everything(self) -> None:
        """SIGKILL the supervisor and every role, as a power cut would; whatever is gone already is fine."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()
        for process in self.processes().values():
            if process.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def processes(self) -> dict[str, Process]:
        """Newest process of every role by its name."""
        table = self.dir / "supervisor" / "processes.json"
        return {r["name"]: Process(**r) for r in json.loads(table.read_text())} if table.exists() else {}

    def output(self) -> str:
        return (self.root / "output.txt").read_text(errors="replace")

    def tails(self) -> str:
        """End of every role's log, for the message of a failed assertion."""
        logs = sorted((self.dir / "logs").glob("*.log"))
        return "\n".join(f"--- {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-12:]) for p in logs)

    def logged(self, role: str) -> list[Logged]:
        """Events of one role's log, in order, over all its processes."""
        path = self.dir / "logs" / f"{role}.log"
        return [*_parse(path.read_text(errors="replace"))] if path.exists() else []

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """A query on the live database through a connection of its own; nothing while the database cannot answer."""
        if not self.url and not (self.dir / "ledger.sqlite").exists():
            return []
        try:
            with contextlib.closing(oracle.connect(self.ledger_url)) as connection:
                return connection.cursor().execute(statement).fetchall()
        except Exception as error:
            if type(error).__name__ not in ("OperationalError", "UndefinedTable", "DatabaseError"):
                raise
            return []

    def steps_ended(self) -> int:
        """Steps that have an outcome so far."""
        rows = self.rows("SELECT count(*) FROM plan_outcome")
        return rows[0][0] if rows else 0

    def tables(self) -> dict[str, list[oracle.Row]]:
        """Every row as it was when the run had finished."""
        return self._tables

    def deaths(self) -> int:
        """Kills sent, each counted once: at failpoints, of roles, of everything at once, of the database."""
        return len(self.fired_at) + len(self.killed)

    def command(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of another ``rollbook`` command on this run."""
        done = subprocess.run(
            [*_rollbook(), *arguments], env=_environment(), capture_output=True, text=True, timeout=COMMAND_BOUND_S, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def acks(self) -> list[oracle.Row]:
        """Every answer to a submission, as the workers received it."""
        path = self.root / "acks"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def replays_after(self, marker: str) -> int | None:
        """Plans that the learner replayed in its first start after ``marker`` was set; None when it never started again."""
        later = [e for e in self.logged("learner") if e.event == "learner_opened" and e.at > self.fired_at[marker]]
        return int(later[0].fields["plans_to_replay"]) if later else None


def _environment(*python_path: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, [*python_path, REPOSITORY / "service"]))
    return dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _die_with_the_tests() -> None:
    """A supervisor must not outlive the tests that were themselves killed (prctl PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGKILL)


def _rollbook() -> list[str]:
    return [sys.executable, "-m", "rollbook.cli.main"]


def _parse(text: str) -> Iterator[Logged]:
    for line in text.splitlines():
        found = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*?\bevent=(\w+)(.*)", line)
        if found:
            at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            yield Logged(at, found[2], dict(re.findall(r"(\w+)=(\S+)", found[3])))


def check_finished(system: System) -> None:
    """The verdicts that every finished run must get: the product's own audit, and the independent oracle."""
    assert system.audited[0] == 0 and "audit: clean" in system.audited[1], system.audited[1]
    found = oracle.findings(system.tables(), system.dir, steps=system.steps, acks=system.acks())
    assert not found, "\n".join(found)


def check_nothing_else_died(system: System) -> None:
    """Every death the supervisor saw is one of the armed kills: nothing failed by itself and was hidden by a restart."""
    deaths = Counter(re.findall(r"\b(ledger|feeder|learner|worker)(?:-\d+)? died \(killed by SIGKILL\)", system.output()))
    armed = Counter(marker.partition(".")[0] for marker in system.fired_at)
    assert (deaths, "exit code" in system.output()) == (armed, False), system.output()[-3000:]


def check_replay(system: System) -> None:
    """Oracle R: an uninterrupted learner over the stored plans gives the digest of every version."""
    code, text = system.replayed
    assert code == 0, text
    result = json.loads(text[text.index("{") :])
    assert (result["equal"], result["steps"], result["versions_compared"]) == (True, system.steps, system.steps + 1)
    assert result["versions_missing"] == []
