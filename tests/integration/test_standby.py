"""Two ledger servers of one run as real processes: killed, stopped inside a transaction, woken up, supervised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_support import Scene, sample_for

import oracle
from postgres_server import PostgresServer
from rollbook.cli.record import run_record
from rollbook.core.config import load_config
from rollbook.core.errors import DeadlineExceeded, RollbookError, Standby, Unavailable
from rollbook.core.records import LeaseGrant, SubmitOutcome
from rollbook.rpc.address import addresses_in, announced, holder_index
from rollbook.rpc.client import LedgerClient
from rollbook.supervise import local, watchdog
from rollbook.supervise import supervisor as supervisor_module
from run_support import CONFIG, ROLLBOOK, TinyRun, environment, wait_until

pytestmark = pytest.mark.timeout(400)

TTL_S = 5.0
FENCED = 3
"""Exit code of a server that another one has replaced."""


class Servers:
    """The ledger servers of one run, started by hand."""

    def __init__(self, root: Path, url: str) -> None:
        self.config_file = root / "run.toml"
        self.config_file.write_text(CONFIG + f'\n[ledger]\nurl = "{url}"\nrole_ttl_s = {TTL_S}\nstandbys = 1\n')
        self.config = load_config(self.config_file)
        self.dir, self.root = Path(self.config.run.dir), root
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, index: int, failpoints: str = "") -> subprocess.Popen[bytes]:
        """``rollbook ledger``; listens when this returns."""
        before = announced(self.dir).get(index)
        with (self.root / f"ledger-{index}.log").open("ab") as out:
            process = subprocess.Popen(
                [*ROLLBOOK, "ledger", str(self.config_file), "--index", str(index)], cwd=self.root,
                env=environment(ROLLBOOK_FAILPOINTS=failpoints), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        self.processes.append(process)
        wait_until(
            "the server listens", lambda: announced(self.dir).get(index) not in (None, before) or process.poll() is not None
        )
        assert process.poll() is None, self.logs()
        return process

    def both(self, failpoints: str = "") -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        """The holder, with these failpoints, and a standby."""
        holder = self.start(0, failpoints)
        self.held_by(0)
        return holder, self.start(1)

    def held_by(self, index: int) -> None:
        wait_until(f"server {index} holds the role", lambda: holder_index(self.dir) == index)

    def client(self, address: str = "", **options: Any) -> LedgerClient:
        return LedgerClient(address or addresses_in(self.dir), self.config.run.id, **options)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.root.glob("ledger-*.log")))

    def rows(self) -> dict[str, list[oracle.Row]]:
        """Every row of the run, but for the times at which the holder has renewed its own term."""
        tables = oracle.read_ledger(self.config.ledger.url, self.config.run.id)
        for row in tables["fence"]:
            if row["role"] == "ledger":
                del row["renewed_at_us"], row["expires_at_us"]
        return tables

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(30)


@pytest.fixture
def database(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    name = postgres.create(f"standby_{abs(hash(request.node.name))}")
    yield postgres.url(name)
    postgres.drop(name)


@pytest.fixture
def servers(tmp_path: Path, database: str) -> Iterator[Servers]:
    made = Servers(tmp_path, database)
    yield made
    made.end()


def submit(client: LedgerClient, scene: Scene, *grants: LeaseGrant) -> list[SubmitOutcome]:
    """Submit the sample of each slot, in one call, under a number of its own."""
    samples = [
        sample_for(grant, scene.incarnation, sequence=2 * grant.key.ordinal + grant.key.sibling + 1) for grant in grants
    ]
    return [result.outcome for result in client.submit_samples(samples)]


class Submitting:
    """A worker's calls in a thread of their own: samples go on one by one, each until it is answered."""

    def __init__(self, servers: Servers, scene: Scene, grants: tuple[LeaseGrant, ...]) -> None:
        self.outcomes: list[SubmitOutcome] = []
        self.failure: Exception | None = None
        self._client = servers.client()
        self._scene, self._grants = scene, grants
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for grant in self._grants:
                self.outcomes += submit(self._client, self._scene, grant)
        except Exception as error:  # noqa: BLE001  thread boundary: the test looks at it
            self.failure = error

    def finish(self) -> list[SubmitOutcome]:
        self._thread.join(150)
        assert not self._thread.is_alive() and self.failure is None, self.failure
        self._client.close()
        return self.outcomes


def opened(servers: Servers, client: LedgerClient) -> tuple[Scene, tuple[LeaseGrant, ...]]:
    """A run with six leased slots of eight."""
    scene = Scene(client, run_record(servers.config))  # type: ignore[arg-type]
    scene.feed(4)
    grants = scene.lease(8)
    assert len(grants) == 6, "the lag bound opens so many"
    return scene, grants


def stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process stands still."""
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until("the process is stopped", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def check(servers: Servers, client: LedgerClient, n_samples: int) -> None:
    """Every sample is there once, the ledger is clean, and epochs only grow."""
    assert client.run_status()["slots"]["submitted"] == n_samples
    assert client.audit() == []
    rows = servers.rows()
    assert len(rows["sample"]) == len({oracle.key_of(row) for row in rows["sample"]}) == n_samples
    ledger = oracle.Ledger(rows)
    for judge in (oracle.samples, oracle.submissions, oracle.leases, oracle.conservation, oracle.epochs):
        assert list(judge(ledger)) == [], judge.__name__
    attached = [(r["seq"], json.loads(r["detail_json"])["epoch"]) for r in rows["event"] if r["kind"] == "server_attached"]
    assert [epoch for _, epoch in sorted(attached)] == list(range(1, len(attached) + 1))


def test_a_standby_takes_the_place_of_a_holder_that_is_killed(servers: Servers) -> None:
    holder, _ = servers.both()
    with servers.client() as client:
        scene, grants = opened(servers, client)
        assert submit(client, scene, grants[0]) == [SubmitOutcome.ACCEPTED]
        with servers.client(announced(servers.dir)[1], retry_total_s=0.0) as direct, pytest.raises(Standby):
            direct.run_status()
        holder.kill()
        holder.wait(30)
        assert Submitting(servers, scene, grants).finish() == [SubmitOutcome.REPLAYED] + [SubmitOutcome.ACCEPTED] * 5
        assert holder_index(servers.dir) == 1
        check(servers, client, 6)
        servers.start(0)
        with servers.client(announced(servers.dir)[0], retry_total_s=0.0) as direct, pytest.raises(Standby):
            direct.run_status()


def test_a_holder_stopped_inside_a_transaction_is_replaced_and_changes_nothing_when_it_wakes_up(servers: Servers) -> None:
    holder, _ = servers.both("ledger.submit.before_commit=pause@2")
    old = announced(servers.dir)[0]
    with servers.client() as client:
        scene, grants = opened(servers, client)
        assert submit(client, scene, grants[0]) == [SubmitOutcome.ACCEPTED]
        late = Submitting(servers, scene, grants[1:])
        stopped(holder)
        asked = servers.client(old, retry_total_s=0.0, timeout_s=120.0)
        answers: list[Any] = []
        reading = threading.Thread(target=lambda: answers.append(answer_of(asked)), daemon=True)
        reading.start()
        assert late.finish() == [SubmitOutcome.ACCEPTED] * 5
        assert holder_index(servers.dir) == 1 and answers == []
        check(servers, client, 6)
        before = servers.rows()
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(60) == FENCED, servers.logs()
        reading.join(60)
        assert len(answers) == 1 and isinstance(answers[0], Unavailable), "a read is not answered either"
        asked.close()
        assert servers.rows() == before
        assert addresses_in(servers.dir)() == [announced(servers.dir)[1]]
        check(servers, client, 6)
        scene.finish(scene.plan(1).step)
        assert client.audit() == []


def answer_of(client: LedgerClient) -> Any:
    """What a read is answered with, or the error it ends with."""
    try:
        return client.resume_point()
    except RollbookError as error:
        return error


def test_a_standby_on_sqlite_waits_for_the_lock_and_outlives_a_stopped_holder_only_when_that_is_killed(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"sqlite:///{tmp_path}/ledger.sqlite")
    try:
        holder, _ = servers.both()
        with servers.client(timeout_s=2.0) as client:
            scene, grants = opened(servers, client)
            assert submit(client, scene, *grants[:2]) == [SubmitOutcome.ACCEPTED] * 2
            holder.send_signal(signal.SIGSTOP)
            stopped(holder)
            with servers.client(timeout_s=1.0, retry_total_s=0.0) as once, pytest.raises(DeadlineExceeded):
                once.resume_point()
            with servers.client(announced(servers.dir)[1], retry_total_s=0.0) as direct, pytest.raises(Standby):
                direct.resume_point()
            holder.kill()
            holder.wait(30)
            assert Submitting(servers, scene, grants).finish() == [SubmitOutcome.REPLAYED] * 2 + [SubmitOutcome.ACCEPTED] * 4
            check(servers, client, 6)
    finally:
        servers.end()


def test_a_supervised_holder_that_was_stopped_comes_back_as_the_standby_and_the_run_is_finished(
    tmp_path: Path, database: str
) -> None:
    run = TinyRun(tmp_path)
    run.config.write_text(CONFIG + f'\n[ledger]\nurl = "{database}"\nrole_ttl_s = {TTL_S}\nstandbys = 1\n')
    run.failpoints = {"ledger.plan.before_commit": "pause@2"}
    try:
        run.start("--no-report")
        run.wait_fired("ledger.plan.before_commit@2")
        first = run.records()["ledger"]
        wait_until("the standby takes over", lambda: holder_index(run.dir) == 1)
        os.kill(first.pid, signal.SIGCONT)
        told = run.wait_for("ledger died (exit code 3)")
        assert "ledger-1 died" not in told
        assert run.code() == 0, f"{run.output()}\n{run.tails()}"
        output = run.output()
        assert "audit: clean" in output and "restarts: ledger 1" in output
        assert run.alive() == [] and not list(run.dir.glob("*.address"))
        rows = oracle.read_ledger(database, "tiny")
        epochs = [json.loads(r["detail_json"])["epoch"] for r in rows["event"] if r["kind"] == "server_attached"]
        assert sorted(epochs) == list(range(1, len(epochs) + 1)) and len(epochs) >= 2
        assert oracle.findings(rows, run.dir, steps=3) == []
    finally:
        run.end()


def test_a_supervised_holder_that_hangs_is_killed_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite, where nobody else could take its place; in this process, so that the bound can be short."""
    monkeypatch.setattr(supervisor_module, "HANG_S_MIN", 6.0)
    monkeypatch.setattr(watchdog, "ANSWER_S", 2.0)
    for name, value in environment(ROLLBOOK_FAILPOINTS="learner.before_plan=delay:1.5").items():
        monkeypatch.setenv(name, value)
    run, events, stopped_pids = TinyRun(tmp_path), [], []
    overrides = ["ledger.role_ttl_s=3.0", "ledger.standbys=1"]
    arguments = [str(run.config), *(part for one in overrides for part in ("--set", one))]
    supervisor = local.LocalSupervisor(load_config(run.config, overrides), arguments, events.append)

    def stop_the_second_holder(point: object) -> None:
        os.kill(run.records()["ledger"].pid, signal.SIGKILL)
        wait_until("the standby has the lock", lambda: holder_index(run.dir) == 1)
        record = run.records()["ledger-1"]
        assert record.signal(signal.SIGSTOP)
        stopped_pids.append(record.pid)

    try:
        assert supervisor.run(stop_the_second_holder)
        assert any("the ledger server lives but has answered nothing" in event for event in events), events
        assert any(event.startswith("ledger-1 died (killed by SIGKILL)") for event in events), events
        assert run.alive() == [] and not Path(f"/proc/{stopped_pids[0]}").exists()
        assert run.command("audit", str(run.dir))[0] == 0
    finally:
        run.end()
