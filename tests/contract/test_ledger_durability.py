"""Group commit, crashes, lost replies, full disks, restarts of the database: nothing acknowledged is lost (P1)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record, sample_for, version

from ledger_bench import Bench
from postgres_server import PostgresServer
from rollbook.core.errors import Conflict, InvalidRequest, StorageFull, Unavailable
from rollbook.core.records import SubmitOutcome
from rollbook.ledger import schema as t
from rollbook.ledger.writer import Txn
from rollbook.observe import failpoints

ACCEPTED, REPLAYED = SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def held_together(s: Scene, operations) -> list[object]:
    """Run operations so that they share one commit: the writer is held inside a first one until all wait."""
    entered, go = threading.Event(), threading.Event()
    results: list[object] = [None] * len(operations)

    def hold(txn: Txn) -> None:
        entered.set()
        assert go.wait(timeout=60)

    def run(i: int) -> None:
        try:
            results[i] = operations[i]()
        except Exception as error:  # noqa: BLE001  the test looks at it
            results[i] = error

    holder = threading.Thread(target=lambda: s.ledger._write(hold))
    holder.start()
    assert entered.wait(timeout=60)
    threads = []
    for i in range(len(operations)):
        threads.append(threading.Thread(target=run, args=(i,)))
        threads[-1].start()
        for _ in range(6000):
            if s.ledger._writer.queue_depth() == i + 1:
                break
            s.ledger._bell.wait("nothing", 0, 0.01)
        assert s.ledger._writer.queue_depth() == i + 1
    go.set()
    for thread in [holder, *threads]:
        thread.join(timeout=60)
    return results


def test_operations_that_wait_together_share_one_commit(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    grants = s.lease(8)
    before = s.ledger._writer.commits
    results = held_together(s, [lambda g=g: s.submit([g]) for g in grants])
    assert results == [[ACCEPTED]] * 8
    assert s.ledger._writer.commits == before + 2, "the holder's commit and one for all eight"


def test_an_operation_that_fails_in_a_shared_commit_is_rolled_back_alone(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    grants = s.lease(4)

    def breaks_a_constraint(txn: Txn) -> None:
        txn.conn.execute(sa.update(t.worker).values(host="half done"))
        txn.conn.execute(
            sa.insert(t.verdict).values(run_id="run", ordinal=0, sibling=0, kind="nonsense", reason="r", decided_at_us=1)
        )

    def refuses(txn: Txn) -> None:
        txn.conn.execute(sa.update(t.worker).values(host="half done"))
        raise Conflict("on purpose")

    results = held_together(
        s,
        [
            lambda: s.submit(grants[:2]),
            lambda: s.ledger._write(breaks_a_constraint),
            lambda: s.ledger._write(refuses),
            lambda: s.submit(grants[2:]),
        ],
    )
    assert results[0] == results[3] == [ACCEPTED, ACCEPTED]
    assert isinstance(results[1], sa.exc.IntegrityError)
    assert isinstance(results[2], Conflict)
    assert bench.rows("SELECT host FROM worker") == [("host",)]


def test_a_lone_operation_that_fails_leaves_nothing_behind(bench: Bench) -> None:
    s = bench.scene()

    def refuses(txn: Txn) -> None:
        txn.conn.execute(sa.update(t.worker).values(host="half done"))
        raise InvalidRequest("on purpose")

    with pytest.raises(InvalidRequest, match="on purpose"):
        s.ledger._write(refuses)
    assert bench.rows("SELECT host FROM worker") == [("host",)]


def test_nothing_is_acknowledged_when_the_commit_does_not_happen(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grants = s.lease(2)
    failpoints.arm("ledger.before_commit=raise")
    with pytest.raises(Unavailable, match="before_commit"):
        s.submit(grants)
    assert bench.rows("SELECT * FROM sample") == []
    assert s.submit(grants) == [ACCEPTED, ACCEPTED]


def test_a_lost_acknowledgement_is_answered_again(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grants = s.lease(2)
    failpoints.arm("ledger.after_commit=raise")
    with pytest.raises(Unavailable, match="after_commit"):
        s.submit(grants)
    assert len(bench.rows("SELECT * FROM sample")) == 2
    assert s.submit(grants) == [REPLAYED, REPLAYED]


@pytest.mark.parametrize("point", ["ledger.before_commit", "ledger.after_commit"])
def test_every_verb_repeated_after_a_lost_commit_or_a_lost_reply_acts_once(bench: Bench, point: str) -> None:
    s = bench.scene(publish=False, steps=1)

    def twice(call):
        failpoints.arm(f"{point}=raise")
        with pytest.raises(Unavailable):
            call()
        failpoints.arm("")
        return call()

    ledger, before = s.ledger, s.ledger.cursor("tasks")
    twice(lambda: ledger.publish_version(s.learner, version(0)))
    twice(lambda: ledger.register_worker("w", "h", "e"))
    from ledger_support import group

    from rollbook.core.records import Cursor

    moved = Cursor("tasks", before.next_ordinal + 2, "{}", True)
    assert twice(lambda: ledger.append_groups(s.feeder, before, moved, [group(0), group(1)])) == moved
    grants = twice(lambda: ledger.lease_slots(s.incarnation, version(0), 4, request_id="r")).grants
    assert [g.token for g in grants] == [1, 1, 1, 1]
    results = twice(lambda: ledger.submit_samples([sample_for(g, s.incarnation) for g in grants]))
    assert {r.outcome for r in results} == {REPLAYED if point.endswith("after_commit") else ACCEPTED}
    assert len(twice(lambda: ledger.plan_step(s.learner, 0, 1)).items) == 4
    twice(lambda: s.finish(1))
    twice(lambda: s.checkpoint(1))
    status = ledger.run_status()
    assert status["slots"]["applied"] == status["slots"]["issued"] == 4
    assert (status["steps"]["trained"], status["submits"]["accepted"]) == (1, 4)


def test_a_server_that_dies_at_any_step_of_a_run_is_followed_by_one_that_goes_on(bench: Bench) -> None:
    s = bench.scene(steps=2)
    s.checkpoint(0)
    chains = []
    for step in (1, 2):
        s.feed(s.ledger.feed_demand(2))
        bench.crash(s)
        grants = s.lease(2)
        bench.crash(s)
        assert s.submit(grants) == [ACCEPTED, ACCEPTED]
        s.fill()
        bench.crash(s)
        plan = s.plan(step)
        bench.crash(s)
        assert s.plan(step) == plan
        s.finish(step)
        bench.crash(s)
        s.checkpoint(step)
        chains.append(plan.chain_digest)
    assert s.ledger.resume_point().chain_digests[2] == chains[1]


CHILD = """
import sys
sys.path[:0] = sys.argv[3:]
from ledger_support import Scene, run_record
from rollbook.ledger.ledger import Ledger
s = Scene(Ledger(sys.argv[1], holder="child", ordinals_per_partition=4), run_record(max_lag_versions=1000, lease_ttl_s=1000.0))
s.feed(200)
while True:
    grants = s.lease(3)
    s.submit(grants)
    print(" ".join(str(g.key) for g in grants), flush=True)
    if not grants:
        break
"""


def test_no_acknowledged_sample_is_lost_when_the_server_is_killed(ledger_url: str, clock, tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent.parent / "service")]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, ledger_url, str(tmp_path), *paths],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ROLLBOOK_FAILPOINTS": ""},
    )
    assert child.stdout is not None
    acknowledged: list[str] = []
    while len(acknowledged) < 60:
        acknowledged += child.stdout.readline().split()
    child.send_signal(signal.SIGKILL)
    acknowledged += " ".join(child.stdout.readlines()).split()
    child.wait(timeout=30)
    bench = Bench(ledger_url, clock)
    ledger = bench.open(supersede="child")
    ledger.open_run(run_record(max_lag_versions=1000, lease_ttl_s=1000.0))
    stored = {f"{o}.{k}" for o, k in bench.rows("SELECT ordinal, sibling FROM sample")}
    assert set(acknowledged) <= stored
    bench.finish()


def test_a_full_sqlite_disk_acknowledges_nothing_keeps_what_was_acknowledged_and_recovers(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    s = bench.scene(max_lag_versions=1000, tokens_max=100_000, lease_ttl_s=1000.0)
    s.feed(20)
    small, big = s.lease(2), s.lease(10)
    s.submit(small)
    limit_pages(s, extra=8)
    from ledger_support import trajectory

    huge = [sample_for(g, s.incarnation, trajectory=trajectory(20_000)) for g in big]
    for _ in range(2):
        with pytest.raises(StorageFull, match="nothing was acknowledged"):
            s.ledger.submit_samples(huge)
    assert s.ledger.run_status()["submits"]["accepted"] == 2, "reads go on"
    assert s.submit(small) == [REPLAYED, REPLAYED]
    results = held_together(s, [lambda: s.ledger.submit_samples(huge), lambda: s.submit(s_more(s))])
    assert all(isinstance(r, StorageFull) for r in results), results
    limit_pages(s, extra=None)
    assert {r.outcome for r in s.ledger.submit_samples(huge)} == {ACCEPTED}


def s_more(s: Scene):
    """Grants of the first call's slots again: a write small enough to fit, which still shares its neighbours' fate."""
    return s.ledger.lease_slots(s.incarnation, version(0), 1, request_id="never-granted").grants


def limit_pages(s: Scene, extra: int | None) -> None:
    """Let the file grow by ``extra`` pages only; every new writing connection gets the limit too."""
    engine = s.ledger._database.writer

    def pages(dbapi_connection, _record=None) -> None:
        count = dbapi_connection.execute("PRAGMA page_count").fetchone()[0]
        dbapi_connection.execute(f"PRAGMA max_page_count = {count + extra if extra is not None else 1_000_000_000}")

    if extra is not None:
        s.ledger._limit = pages  # type: ignore[attr-defined]
        sa.event.listen(engine, "connect", pages)
    else:
        sa.event.remove(engine, "connect", s.ledger._limit)  # type: ignore[attr-defined]
    s.ledger._writer.run(lambda txn: pages(txn.conn.connection.dbapi_connection))


def test_the_write_queue_is_bounded_and_a_closed_ledger_says_so(bench: Bench) -> None:
    s = bench.scene()
    s.ledger.close()
    with pytest.raises(Unavailable, match="closed"):
        s.feed(1)


def test_a_waiting_call_is_released_when_the_ledger_closes(bench: Bench) -> None:
    s = bench.scene()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            s.ledger.lease_slots(s.incarnation, version(0), 1, wait_s=60.0)
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    s.ledger.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(errors) == 1


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A server of this module's own: it is killed and started again."""
    from postgres_server import NotObtainable

    try:
        server = PostgresServer()
    except NotObtainable as error:
        pytest.skip(f"POSTGRESQL NOT RUN: {error}")
    yield server
    server.close()


def test_a_killed_and_restarted_postgresql_loses_nothing_acknowledged(own_postgres: PostgresServer, clock) -> None:
    bench = Bench(own_postgres.url(), clock)
    s = bench.scene(max_lag_versions=1000)
    s.feed(10)
    grants = s.lease(20)
    assert set(s.submit(grants[:10])) == {ACCEPTED}
    own_postgres.stop("immediate")
    with pytest.raises(Unavailable, match="same key"):
        s.submit(grants[10:])
    with pytest.raises(Unavailable):
        s.ledger.run_status()
    own_postgres.start()
    assert set(s.submit(grants)) == {ACCEPTED, REPLAYED}
    assert s.ledger.run_status()["submits"]["accepted"] == 20
    bench.finish()


def test_a_cut_postgresql_connection_is_replaced(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    s.feed(1)
    grants = s.lease(2)
    bench.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    with pytest.raises(Unavailable):
        s.submit(grants)
    assert s.submit(grants) == [ACCEPTED, ACCEPTED]
    bench.finish()
