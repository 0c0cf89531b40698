"""The run a drill disturbs: one it starts itself, or one that lives already and allows it.

Owns starting, restarting and ending a run of the drill's own, and finding the processes of either. Reaches the product as a
user does: commands, files, the database through a connection of the oracle's. Never signals a process that the run's own table
does not name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle
from acknowledgements import FILE as ACKS
from drills.placed import placed_records
from drills.proc import parent
from postgres_server import PostgresServer
from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.errors import ConfigError
from rollbook.supervise.ledgers import holder
from rollbook.supervise.process import ProcessRecord, ProcessTable
from soaked_run import query, read_acks

REPOSITORY = Path(__file__).resolve().parents[2]
HOOKS = Path(__file__).resolve().parent / "hooks"
ROLLBOOK = [sys.executable, "-m", "rollbook.cli.main"]
COMMAND_BOUND_S = 900.0
END_BOUND_S = 600.0
STEPS_WITHOUT_END = 1_000_000


class Refused(Exception):
    """The drill will not touch this run; the message says why and what to do."""


class Run:
    """A run directory, its configuration and its processes."""

    own = False
    """Whether this drill has started it and will end it."""
    rejoin = ""
    """Command that brings back a node of a run that somebody else has placed; empty: nobody does."""
    server: PostgresServer | None = None
    package = REPOSITORY / "service"

    def __init__(self, config: Config, directory: Path, url: str) -> None:
        self.config, self.dir, self.url = config, directory, url
        self.id = config.run.id
        self.began = time.time()

    def records(self) -> dict[str, ProcessRecord]:
        """Newest process of every role that the run's supervisor has recorded, in its table or among its placements."""
        return placed_records(self.dir) | ProcessTable(self.dir / "supervisor" / "processes.json").records()

    def alive(self, role: str = "") -> list[ProcessRecord]:
        """Live processes of one role, or of all. Of several ledger servers one is ``ledger``, the others are ``standby``."""
        return [r for r in self.records().values() if role in ("", self._role_of(r.name)) and r.alive()]

    def _role_of(self, name: str) -> str:
        role = name.partition("-")[0]
        return "standby" if role == "ledger" and name != holder(self.dir) else role

    def supervisor_pid(self) -> int | None:
        """Whoever is named in the run directory's held lock, and is the parent of a recorded role or says so in the state."""
        lock = self.dir / "supervisor" / "lock"
        with contextlib.suppress(OSError, ValueError), lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = int(file.read().strip())
                if any(parent(record.pid) == pid for record in self.alive()) or self._stated_pid() == pid:
                    return pid
        return None

    def _stated_pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((self.dir / "supervisor" / "state.json").read_text())
            return int(state["pid"]) if state["host"] == socket.gethostname() else None
        return None

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Rows of the live database; none while it cannot answer."""
        return query(self.url, statement)

    def steps(self) -> int:
        """Newest step that has ended."""
        rows = self.query(f"SELECT max(step) FROM plan_outcome WHERE run_id = '{self.id}'")
        return (rows and rows[0][0]) or 0

    def samples(self) -> int:
        """Samples the ledger holds."""
        rows = self.query(f"SELECT count(*) FROM sample WHERE run_id = '{self.id}'")
        return rows[0][0] if rows else 0

    def events(self, after: int = 0) -> str:
        """What the supervisor has told, from a position on."""
        path = self.dir / "logs" / "supervisor.log"
        return path.read_text(errors="replace")[after:] if path.exists() else ""

    def log(self, role: str) -> str:
        """Log of one process name."""
        path = self.dir / "logs" / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def command(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of another ``rollbook`` command on this run."""
        done = subprocess.run(
            [*ROLLBOOK, arguments[0], str(self.dir), *arguments[1:]], env=environment(package=self.package), capture_output=True,
            text=True, timeout=COMMAND_BOUND_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def acks(self) -> list[oracle.Row] | None:
        """Answers to submissions as the workers received them; None where nobody wrote them down."""
        return None

    def ended(self) -> int | None:
        """Exit code once the run has ended; None while it goes on or nobody can know."""
        return None

    def keep_supervisor(self) -> bool:
        """Start the supervisor again where something has killed it; False once the run has ended by itself."""
        return True

    def supervise_again(self) -> None:
        """Start the command again whose process was killed."""
        raise NotImplementedError


class LiveRun(Run):
    """A run that somebody else has started, named by its directory."""

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()
        stored = directory / "config.json"
        try:
            config = config_from_json(json.dumps(json.loads(stored.read_text())["config"]))
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"{directory} is not the directory of a run ({error!r}); name a directory with config.json") from None
        if not config.run.chaos_allowed:
            raise Refused(
                f"the run {config.run.id!r} in {directory} was opened without run.chaos_allowed = true: drills leave it alone. "
                "Say so in its configuration before it is started, if it may be disturbed"
            )
        url = config.ledger.url
        if url in ("", f"sqlite:///{config.run.dir}/ledger.sqlite"):
            url = f"sqlite:///{directory / 'ledger.sqlite'}"
        super().__init__(config, directory, url)
        if not self.alive():
            raise Refused(f"no recorded process of the run {config.run.id!r} in {directory} is alive; start it first")
        self.events_from = len(self.events())

    def supervise_again(self) -> None:
        """As the person would who finds it dead: the directory is enough. It goes on after the drill has ended."""
        with (self.dir / "logs" / "supervisor.out").open("ab") as out:
            subprocess.Popen(
                [*ROLLBOOK, "run", str(self.dir), "--plain"], env=environment(), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


class OwnRun(Run):
    """A run of the tiny model (or of another configuration) under a directory of the drill's own.

    Args:
        root: a new directory: the run, the control files of the hooks, markers of failpoints, output.
        steps: steps to make; 0 = until told to ``wind_up``.
        raylets: run it on so many Ray nodes of this machine and a head; 0 = the local backend.
    """

    own = True

    def __init__(
        self, root: Path, config: Path, seed: int, overrides: Sequence[str] = (), *, steps: int = 0, database: str = "sqlite",
        fork_server: bool = False, failpoints: str = "", raylets: int = 0,
    ) -> None:  # fmt: skip
        self.root, self.file, self.fork_server, self.failpoints = root.resolve(), config.resolve(), fork_server, failpoints
        self.control, self.markers = self.root / "control", self.root / "fired"
        for folder in (self.control, self.markers):
            folder.mkdir(parents=True)
        self.raylets, self.cluster = raylets, None
        self.server = PostgresServer() if database == "postgresql" else None
        run_dir = self.root / "run"
        url = self.server.url(self.server.create("drill")) if self.server else ""
        self.overrides = [
            "run.id=drill", f"run.dir={run_dir}", f"run.seed={seed}", f"run.steps={steps or STEPS_WITHOUT_END}",
            *([f"ledger.url={url}"] if url else []), *overrides,
        ]  # fmt: skip
        self.open_end = not steps
        self.process: subprocess.Popen[bytes] | None = None
        self.package = REPOSITORY / "service"
        """The release whose commands are used from now on."""
        self.accept: list[str] = []
        try:
            loaded = load_config(self.file, self.overrides)
        except ConfigError as error:
            self.close()
            raise Refused(str(error)) from None
        if not loaded.run.chaos_allowed:
            self.close()
            raise Refused(f"{config} does not say run.chaos_allowed = true: a drill disturbs the run it starts")
        super().__init__(loaded, run_dir, url or f"sqlite:///{run_dir / 'ledger.sqlite'}")

    def start(self) -> None:
        """``rollbook run`` with the hooks of a drill in every process."""
        arguments = ["run", str(self.file), "--plain", "--no-report", *(["--fork-server"] if self.fork_server else [])]
        if self.raylets:
            arguments = ["up", str(self.file), "--ray", self._cluster_address(), "--plain", "--no-report"]
        for override in self.overrides:
            arguments += ["--set", override]
        arguments += [f"--accept={name}" for name in self.accept]
        with (self.root / "output.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [*ROLLBOOK, *arguments], env=self._environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return environment(HOOKS, package=self.package) | {
            "DRILL_CONTROL": str(self.control), "DRILL_PID": str(os.getpid()), ACKS: str(self.root / "acks"),
            "ROLLBOOK_FAILPOINTS": self.failpoints, "ROLLBOOK_FAILPOINTS_ONCE_DIR": str(self.markers),
        }  # fmt: skip

    def _cluster_address(self) -> str:
        """Of the head, which is started with the first command of the run; its nodes have the hooks as well."""
        from ray_nodes import RayCluster

        if self.cluster is None:
            self.cluster = RayCluster(self.raylets, env=self._environment())
            self.cluster.start()
        return self.cluster.address

    def tell(self, subject: str, content: Mapping[str, Any]) -> None:
        """Set what the hooks read from now on (``hooks/sitecustomize.py``); empty content ends it."""
        temporary = self.control / f"{subject}.tmp"
        temporary.write_text(json.dumps(content))
        temporary.rename(self.control / f"{subject}.json")

    def output(self) -> str:
        path = self.root / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def acks(self) -> list[oracle.Row] | None:
        return read_acks(self.root / "acks")

    def supervisor_pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def ended(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def keep_supervisor(self) -> bool:
        code = self.ended()
        if code == -signal.SIGKILL:
            self.start()
        return code in (None, -signal.SIGKILL)

    def supervise_again(self) -> None:
        if self.process is not None:
            self.process.wait(30.0)
        self.start()

    def wind_up(self, more: int = 2) -> None:
        """Let a run without end drain, and go on for a few steps more as an accepted revision, so that it ends by itself.

        Raises AssertionError when it does not drain in time or drains with another exit code than a stopped run's.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(self.config.supervisor.drain_s + 60.0)
        except subprocess.TimeoutExpired:
            raise AssertionError("the run does not drain") from None
        assert code == 130, f"the run was told to stop and ended with exit code {code}\n{self.output()[-2000:]}"
        rows = self.query(f"SELECT max(step) FROM plan WHERE run_id = '{self.id}'")
        last = ((rows and rows[0][0]) or 0) + more
        self.overrides = [o for o in self.overrides if not o.startswith("run.steps=")] + [f"run.steps={last}"]
        self.accept, self.open_end = ["run.steps"], False
        self.start()

    def end_everything(self) -> None:
        """SIGKILL the supervisor and every role; whatever is gone already is fine."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        for record in self.records().values():
            record.kill_tree()

    def close(self) -> None:
        """End what still lives, and the database server made for the run."""
        with contextlib.suppress(AttributeError):  # not opened: there is nothing to end
            self.end_everything()
        if self.cluster is not None:
            self.cluster.close()
        if self.server is not None:
            self.server.close()


def environment(*python_path: Path, package: Path = REPOSITORY / "service") -> dict[str, str]:
    """Environment of a command of this checkout, or of another release."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLBOOK_", "DRILL_"))}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return threads | kept | {"PYTHONPATH": os.pathsep.join(map(str, [*python_path, package]))}
