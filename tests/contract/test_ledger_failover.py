"""Two PostgreSQL servers, stopped sessions, conflicts and killed backends: the ledger goes on by itself (P1, P8, R12)."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record

from ledger_bench import Bench
from postgres_server import NotObtainable, PostgresServer, StandbyServer, both
from rollbook.core.errors import ConfigError, DeadlineExceeded, RoleHeld, ServerFenced, Unavailable
from rollbook.core.host import Host, host
from rollbook.core.records import SlotKey, SubmitOutcome
from rollbook.ledger import schema as t
from rollbook.ledger.base import again_on_conflict
from rollbook.ledger.dialects import READERS_MAX, Database
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.writer import CONFLICT_RETRIES_MAX, Txn

ACCEPTED, REPLAYED = SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED
BOUND_S = 60.0


def until(answers: Callable[[], Any]) -> Any:
    """The first answer: asked again, within a bound, while the ledger is unavailable."""
    deadline = time.monotonic() + BOUND_S
    while True:
        try:
            return answers()
        except (Unavailable, RoleHeld):
            if time.monotonic() > deadline:
                raise
            host().sleep(0.1)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {BOUND_S} s"
        host().sleep(0.02)


def one_more(s: Scene) -> list[SlotKey]:
    """Keys of samples that were leased and acknowledged, however often that had to be asked."""
    request = host().token()
    grants = until(lambda: s.lease(2, request_id=request))
    assert set(until(lambda: s.submit(grants))) <= {ACCEPTED, REPLAYED}
    return [grant.key for grant in grants]


def plain(url: str) -> str:
    return url.replace("+psycopg", "")


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, StandbyServer]]:
    """A primary whose commits wait for its standby."""
    made: list[PostgresServer] = []
    try:
        made.append(PostgresServer())
        made.append(StandbyServer(made[0]))
    except NotObtainable as error:
        for server in made:
            server.close()
        pytest.skip(f"POSTGRESQL NOT RUN: {error}")
    primary, standby = made
    primary.commit_waits_for(StandbyServer.NAME)
    yield primary, standby  # type: ignore[misc]
    for server in made:
        server.close()


def test_a_killed_primary_is_followed_by_its_synchronous_standby_without_a_lost_acknowledgement(pair, clock) -> None:
    primary, standby = pair
    bench = Bench(both(primary, standby), clock)
    s = Scene(bench.open(ordinals_per_partition=1000), run_record(max_lag_versions=1000))
    s.feed(200)
    acknowledged: list[SlotKey] = []
    enough = threading.Event()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            acknowledged.extend(one_more(s))
            if len(acknowledged) >= 20:
                enough.set()

    worker = threading.Thread(target=work)
    worker.start()
    assert enough.wait(BOUND_S)
    assert primary.kill() > 3
    standby.promote()
    before = len(acknowledged)
    wait_for(lambda: len(acknowledged) >= before + 20, "work on the promoted server")
    over.set()
    worker.join(BOUND_S)
    assert not worker.is_alive()
    stored = {(row.ordinal, row.sibling) for row in standby_rows(standby, "SELECT ordinal, sibling FROM sample")}
    assert {tuple(key) for key in acknowledged} <= stored
    assert s.ledger.run_status()["submits"]["accepted"] == len(stored)
    until(s.ledger.renew_self)
    assert not s.ledger.fenced, "the same server, the same term"
    bench.finish()


def standby_rows(server: PostgresServer, query: str):
    engine = sa.create_engine(server.url())
    with engine.connect() as conn:
        rows = conn.exec_driver_sql(query).all()
    engine.dispose()
    return rows


def test_a_commit_whose_wait_for_the_standby_was_broken_off_is_not_acknowledged(pair, clock) -> None:
    primary, standby = pair
    bench = Bench(primary.url(), clock)
    s = bench.scene(max_lag_versions=1000)
    s.feed(4)
    grants = s.lease(4)
    primary.commit_waits_for("")
    primary._execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    primary._execute("SELECT pg_reload_conf()")
    outcome: list[object] = []

    def submit() -> None:
        try:
            outcome.append(s.submit(grants))
        except Unavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_for(lambda: primary.query(f"SELECT 1 {waiting}"), "the wait for a standby")
    primary.query(f"SELECT pg_cancel_backend(pid) {waiting}")
    thread.join(BOUND_S)
    assert isinstance(outcome[0], Unavailable) and "same key" in str(outcome[0])
    primary.commit_waits_for("")
    assert s.submit(grants) == [REPLAYED] * 4, "it was committed here; now it is acknowledged"
    bench.finish()


def test_a_standby_alone_serves_neither_writes_nor_reads(pair, clock) -> None:
    primary, standby = pair
    bench = Bench(primary.url(), clock)
    bench.scene().ledger.close()
    with pytest.raises(Unavailable):
        Ledger(standby.url(), holder="late")
    bench.finish()


@pytest.mark.parametrize("asked", ["any", "standby", "prefer-standby", "read-only"])
def test_a_url_that_would_read_from_a_standby_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="the primary only"):
        Database(f"postgresql+psycopg://u@/db?host=a:1&host=b:2&target_session_attrs={asked}", Host(), role_ttl_s=15.0)


def test_a_conflict_is_run_again_by_the_server_and_acts_once(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    inside, attempts = threading.Event(), []

    def rival() -> None:
        with psycopg.connect(plain(postgres_url)) as conn:
            conn.execute("SET deadlock_timeout = '60s'")  # the ledger's own session finds the deadlock first
            conn.execute("SELECT 1 FROM worker FOR UPDATE")
            assert inside.wait(BOUND_S)
            conn.execute("SELECT 1 FROM fence WHERE role = 'ledger' FOR UPDATE")

    def renames(txn: Txn) -> None:
        attempts.append(1)
        inside.set()
        if len(attempts) == 1:
            with psycopg.connect(plain(postgres_url), autocommit=True) as look:
                wait_for(
                    lambda: look.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone(),
                    "the rival's wait",
                )  # fmt: skip
        txn.conn.execute(sa.update(t.worker).values(host=t.worker.c.host + "!"))

    thread = threading.Thread(target=rival)
    thread.start()
    with psycopg.connect(plain(postgres_url), autocommit=True) as look:
        locked = "SELECT 1 FROM pg_locks WHERE relation = 'worker'::regclass AND mode = 'RowShareLock'"
        wait_for(lambda: look.execute(locked).fetchone(), "the rival's lock")
    s.ledger._write(renames)
    thread.join(BOUND_S)
    assert len(attempts) == 2
    assert bench.rows("SELECT host FROM worker") == [("host!",)]
    assert s.ledger.run_status()["writer"]["conflicts"] == 1
    bench.finish()


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_conflict_that_does_not_end_is_given_up_after_a_bounded_number_of_attempts(postgres_url: str, clock, code: str) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    s.feed(2)
    attempts = []

    def conflicts(txn: Txn) -> None:
        attempts.append(1)
        txn.conn.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = '{code}'; END $$")

    with pytest.raises(Unavailable, match="same key"):
        s.ledger._write(conflicts)
    assert len(attempts) == CONFLICT_RETRIES_MAX + 1
    assert s.ledger.run_status()["writer"]["conflicts"] == CONFLICT_RETRIES_MAX
    assert s.submit(s.lease(2)) == [ACCEPTED] * 2
    bench.finish()


def test_a_read_broken_off_by_a_deadlock_is_made_again(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    inside, attempts = threading.Event(), []

    def rival() -> None:
        with psycopg.connect(plain(postgres_url)) as conn:
            conn.execute("SET deadlock_timeout = '60s'")
            conn.execute("LOCK TABLE tool_call IN ACCESS EXCLUSIVE MODE")
            inside.set()
            conn.execute("LOCK TABLE failure IN ACCESS EXCLUSIVE MODE")

    thread = threading.Thread(target=rival)

    @again_on_conflict
    def look(ledger: Ledger) -> int:
        attempts.append(1)
        with ledger._read() as conn:
            conn.exec_driver_sql("SELECT count(*) FROM failure")
            if len(attempts) == 1:
                thread.start()
                assert inside.wait(BOUND_S)
            return int(conn.exec_driver_sql("SELECT count(*) FROM tool_call").scalar_one())

    assert look(s.ledger) == 0
    thread.join(BOUND_S)
    assert (len(attempts), s.ledger._writer.conflicts) == (2, 1)
    bench.finish()


def test_randomly_terminated_backends_lose_nothing_and_the_ledger_recovers(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = Scene(bench.open(ordinals_per_partition=1000), run_record(max_lag_versions=1000))
    s.feed(40)
    dice, go, over, killed = random.Random(5), threading.Semaphore(0), threading.Event(), []

    def killer() -> None:
        others = "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
        with psycopg.connect(plain(postgres_url), autocommit=True) as conn:
            while go.acquire(timeout=BOUND_S) and not over.wait(dice.random() / 50):
                if pids := [row[0] for row in conn.execute(others)]:
                    conn.execute("SELECT pg_terminate_backend(%s)", (dice.choice(pids),))
                    killed.append(1)

    thread = threading.Thread(target=killer)
    thread.start()
    acknowledged: list[SlotKey] = []
    for _ in range(40):
        go.release()  # one backend per round: more would be faster than a slow machine can come back
        acknowledged += one_more(s)
        until(s.ledger.resume_point)
    over.set()
    go.release()
    thread.join(BOUND_S)
    assert killed
    assert until(s.ledger.run_status)["submits"]["accepted"] == len(acknowledged) == 80
    until(s.ledger.audit)
    bench.finish()


def test_a_server_without_free_connections_answers_unavailable_and_recovers(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    s.feed(1)
    grants = s.lease(2)
    s.ledger._writer._drop_connection()
    s.ledger._database.reader.dispose()
    taken = []
    try:
        with pytest.raises(psycopg.OperationalError, match="too many clients|remaining connection"):
            while len(taken) < 200:
                taken.append(psycopg.connect(plain(postgres_url)))
        with pytest.raises(Unavailable):
            s.submit(grants)
        with pytest.raises(Unavailable):
            s.ledger.run_status()
    finally:
        for conn in taken:
            conn.close()
    assert until(lambda: s.submit(grants)) == [ACCEPTED, ACCEPTED]
    assert until(s.ledger.run_status)["submits"]["accepted"] == 2
    bench.finish()


def test_readers_that_take_every_connection_cost_an_answer_and_not_the_ledger(
    postgres_url: str, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    reader = s.ledger._database.reader
    monkeypatch.setattr(reader.pool, "_timeout", 0.1)
    held = [reader.connect() for _ in range(READERS_MAX)]
    with pytest.raises(Unavailable, match="not reachable"):
        s.ledger.resume_point()
    s.ledger.renew_self()
    for conn in held:
        conn.close()
    assert s.ledger.resume_point().lineage == 0
    bench.finish()


STOPPED = """
import sys
sys.path[:0] = sys.argv[2:]
from ledger_support import Scene, run_record
from rollbook.ledger.ledger import Ledger
s = Scene(Ledger(sys.argv[1], holder="stopped", role_ttl_s=3.0, ordinals_per_partition=4), run_record())

def inside(txn):
    txn.conn.exec_driver_sql("UPDATE worker SET host = 'written by the stopped one'")
    print("inside", flush=True)
    sys.stdin.readline()

for attempt in (lambda: s.ledger._write(inside), s.ledger.renew_self, lambda: s.feed(1), s.ledger.run_status):
    try:
        attempt()
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_a_server_stopped_inside_a_transaction_lets_its_successor_in_and_changes_nothing_when_it_wakes(
    postgres_url: str, clock
) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent / "service")]
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, postgres_url, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"ROLLBOOK_FAILPOINTS": ""},
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    try:
        assert child.stdout.readline() == "inside\n"
        child.send_signal(signal.SIGSTOP)
        bench = Bench(postgres_url, clock)
        with psycopg.connect(plain(postgres_url), autocommit=True) as conn:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                conn.execute("SELECT 1 FROM fence WHERE role = 'ledger' FOR UPDATE NOWAIT")
        successor = bench.open(holder="successor", role_ttl_s=3.0)
        until(lambda: successor.attach("run"))
        assert successor.cursor("tasks").next_ordinal == 0
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        answers = [child.stdout.readline().strip() for _ in range(4)]
        assert answers[0] in ("Unavailable", "ServerFenced")
        assert answers[1:] == ["ServerFenced"] * 3
        assert "written by the stopped one" not in {row[0] for row in bench.rows("SELECT host FROM worker")}
        assert bench.rows("SELECT count(*) FROM prompt_group") == [(0,)]
        bench.finish()
    finally:
        child.kill()
        child.wait(BOUND_S)


@pytest.mark.parametrize("ttl_s, bound", [(0.9, "600ms"), (3.0, "2s"), (15.0, "10s")])
def test_an_idle_transaction_ends_before_the_term_whatever_the_term(postgres_url: str, ttl_s: float, bound: str) -> None:
    database = Database(postgres_url, Host(), role_ttl_s=ttl_s)
    with database.writer.connect() as conn:
        assert conn.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == bound
    database.close()


def test_neither_end_waits_past_the_term_for_an_answer_that_is_not_taken_in(postgres_url: str) -> None:
    database = Database(postgres_url, Host(), role_ttl_s=3.0)
    with database.writer.connect() as conn:
        assert conn.exec_driver_sql("SHOW tcp_user_timeout").scalar() == "2000"
        assert conn.connection.driver_connection is not None
        with socket.socket(fileno=os.dup(conn.connection.driver_connection.fileno())) as mine:
            assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
    database.close()


def test_a_fenced_server_stays_fenced_after_the_database_came_back(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    other = bench.open(holder="other", supersede="server-0")
    other.attach("run")
    bench.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    for _ in range(3):
        try:
            s.feed(1)
        except ServerFenced:
            break
        except (Unavailable, DeadlineExceeded):
            continue
    with pytest.raises(ServerFenced):
        s.feed(1)
    assert until(lambda: other.cursor("tasks")).next_ordinal == 0
    bench.finish()
