"""Retention: what goes, what is left to tell of it, and that a run goes on the same without it (R16, P7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record, sample_for

from ledger_bench import WIDTH, Bench
from rollbook.core.errors import Expired, Unavailable
from rollbook.core.records import Blame, FailureReport, RewardStatus, SlotKey, SubmitOutcome
from rollbook.core.settings import RetentionConfig
from rollbook.ledger.expired import OF_GROUPS
from rollbook.observe import failpoints

KEEP = RetentionConfig(enabled=True, every_s=3600.0, groups=WIDTH, events_s=50.0, receipts_s=50.0, batch_rows=8)
RULES = {"max_lag_versions": 1000, "infra_window": 2, "lease_ttl_s": 10_000.0}


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def scene(bench: Bench, run_id: str = "run", retention: RetentionConfig | None = KEEP, **rules: object) -> Scene:
    ledger = bench.open(**({"retention": retention} if retention else {}))
    return Scene(ledger, run_record(run_id, **(RULES | rules)))


def step(s: Scene, number: int, *, checkpoint: bool = True) -> None:
    """Feed, fill, train one step; two groups go into it."""
    s.feed(2)
    s.fill()
    s.train(number)
    if checkpoint:
        s.checkpoint(number)


def steps(s: Scene, first: int, last: int, **how: bool) -> None:
    for number in range(first, last + 1):
        step(s, number, **how)


def counted(s: Scene) -> dict:
    """Counts of the run that retention must not change."""
    state = s.ledger.run_status()
    names = ("steps", "slots", "groups", "verdicts", "submits", "tokens", "failed_attempts", "members", "cursor")
    return {name: state[name] for name in names} | {"survival": s.ledger.survival()}


def rows_of_groups(bench: Bench, below: int) -> int:
    return sum(bench.rows(f"SELECT count(*) FROM {table.name} WHERE ordinal < {below}")[0][0] for table in OF_GROUPS)


def test_finished_groups_go_and_every_count_stays(bench: Bench) -> None:
    s = scene(bench)
    steps(s, 1, 7)
    s.feed(2)
    grants = s.lease(3)
    failed = grants[0]
    lost = FailureReport(failed.key, failed.token, s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "lost")
    s.ledger.report_failures([lost])
    before = counted(s)
    freed = s.ledger.expire()
    # Step 6 is the second-newest checkpoint: of its 12 groups the breaker's and the planner's window of 3 stay.
    assert freed["groups"] == 8
    assert s.ledger.run_status()["retention"] == {
        "enabled": True, "rounds": 1, "low_watermark": 8, "replayable_from": 5, "groups": 8, "slots": 16, "events": 0,
    }  # fmt: skip
    assert rows_of_groups(bench, 8) == 0 and rows_of_groups(bench, 1000) > 0
    assert counted(s) == before
    assert s.ledger.audit() == []
    assert bench.rows("SELECT sum(n_slots), sum(n_applied) FROM expired_range WHERE state = 'gone'") == [(16, 16)]


def test_nothing_goes_unless_it_is_enabled(bench: Bench) -> None:
    s = scene(bench, retention=None)
    steps(s, 1, 7)
    assert not any(s.ledger.expire().values())
    assert s.ledger.run_status()["retention"]["low_watermark"] == 0
    assert len(bench.rows("SELECT * FROM prompt_group")) == 14


def test_nothing_goes_that_a_resume_from_the_second_newest_checkpoint_needs(bench: Bench) -> None:
    s = scene(bench)
    step(s, 1)
    steps(s, 2, 6, checkpoint=False)
    assert s.ledger.expire()["groups"] == 0, "one checkpoint only"
    step(s, 7)
    assert s.ledger.expire()["groups"] == 0, "the second-newest is of step 1, its two groups fill no range"
    step(s, 8)
    assert s.ledger.expire()["groups"] == 12
    point = s.ledger.resume_point()
    for number in range(point.checkpoints[1].step + 1, 9):
        assert len(list(s.ledger.payloads(0, number))) == 4, "every step behind the second-newest checkpoint can be replayed"


def test_an_unfinished_group_holds_back_all_behind_it(bench: Bench) -> None:
    s = scene(bench, straggler="drop")
    s.feed(8)
    grants = {g.key: g for g in s.lease(16)}
    held = [grants.pop(SlotKey(7, 0)), grants.pop(SlotKey(7, 1))]
    s.submit(list(grants.values()))
    for number in (1, 2, 3):
        s.train(number)
        s.checkpoint(number)
    steps(s, 4, 10)
    s.ledger.expire()
    assert s.ledger.run_status()["retention"]["low_watermark"] == WIDTH, "group 7 waits in the second range"
    assert s.submit(held) == [SubmitOutcome.ACCEPTED] * 2


def test_what_is_gone_is_answered_expired_and_what_is_kept_is_not(bench: Bench) -> None:
    s = scene(bench)
    s.feed(2)
    old = s.fill()
    s.train(1)
    s.checkpoint(1)
    steps(s, 2, 7)
    s.ledger.expire()
    ledger, gone, kept = s.ledger, SlotKey(7, 1), SlotKey(8, 0)
    for call in (ledger.sample, ledger.explain, ledger.tool_calls):
        with pytest.raises(Expired, match="low watermark 8"):
            call(gone)
        call(kept)
    for call in (ledger.read_plan, lambda lineage, n: list(ledger.payloads(lineage, n)), lambda _, n: s.plan(n)):
        with pytest.raises(Expired, match="steps from 5 on"):
            call(0, 4)
        call(0, 5)
    with pytest.raises(Expired):
        ledger.quarantine_group(3, "late")
    with pytest.raises(Expired):
        ledger.retry_group(3, "late")
    with pytest.raises(Expired):
        ledger.fork_lineage(s.learner, 0, 3, 0.0, 1.0)
    late = [sample_for(grant, s.incarnation) for grant in old]
    assert {r.outcome for r in ledger.submit_samples(late)} == {SubmitOutcome.REFUSED}
    assert "let go" in ledger.submit_samples(late)[0].reason
    assert len(ledger.versions(0)) == 8 and ledger.resume_point().checkpoints[-1].step == 1


def test_a_server_that_starts_after_rows_went_goes_on(bench: Bench) -> None:
    s = scene(bench)
    steps(s, 1, 7)
    s.ledger.expire()
    s.ledger.close(release=False)
    s.ledger = bench.open(supersede="server-0", retention=KEEP)
    s.ledger.open_run(s.record)
    with pytest.raises(Expired):
        s.ledger.sample(SlotKey(0, 0))
    steps(s, 8, 12)
    s.ledger.expire()
    assert s.ledger.run_status()["retention"]["low_watermark"] == 20
    assert s.ledger.run_status()["slots"]["applied"] == s.ledger.run_status()["slots"]["issued"] == 48
    assert s.ledger.cursor("tasks").next_ordinal == 24


@pytest.mark.parametrize(
    "point",
    [
        "ledger.expire.before_commit", "ledger.expire.after_commit", "ledger.expire.before_drop_commit",
        "ledger.expire.before_batch_commit",
    ],
)  # fmt: skip
def test_a_round_that_is_broken_off_anywhere_is_gone_on_from(bench: Bench, point: str) -> None:
    s = scene(bench)
    steps(s, 1, 7)
    before = counted(s)
    failpoints.arm(f"{point}=raise")
    crossed = point != "ledger.expire.before_drop_commit" or bench.url.startswith("postgresql")
    if crossed and not (point == "ledger.expire.before_batch_commit" and bench.url.startswith("postgresql")):
        with pytest.raises(Unavailable):
            s.ledger.expire()
    failpoints.arm("")
    assert counted(s) == before
    assert s.ledger.audit() == []
    s.ledger.close(release=False)
    s.ledger = bench.open(supersede="server-0", retention=KEEP)
    s.ledger.open_run(s.record)
    assert counted(s) == before
    s.ledger.expire()
    assert rows_of_groups(bench, 8) == 0
    assert counted(s) == before


def test_the_audit_finds_what_is_left_or_lost_of_expired_ranges(damaged: Bench) -> None:
    s = scene(damaged)
    steps(s, 1, 7)
    s.ledger.expire()

    def found() -> set[str]:
        return {v.detail for v in s.ledger.audit() if v.check == "expired_ranges"}

    assert found() == set()
    if damaged.url.startswith("sqlite"):
        damaged.execute("INSERT INTO slot (run_id, ordinal, sibling, seed) VALUES ('run', 3, 0, 1)")
        assert found() == {"slot rows left of expired ranges"}
        damaged.execute("DELETE FROM slot WHERE ordinal = 3")
    damaged.execute("UPDATE expired_range SET n_applied = n_applied - 1")
    assert found() == {"expired ranges with slots that were neither trained nor judged"}
    damaged.execute("UPDATE expired_range SET n_applied = n_applied + 1")
    damaged.execute("DELETE FROM expired_range WHERE first_ordinal = 0")
    assert any("do not join" in detail for detail in found())


def test_events_of_gone_groups_and_receipts_go_by_age_and_stay_counted(bench: Bench) -> None:
    s = scene(bench)
    steps(s, 1, 7)
    s.feed(1)
    assert len(s.lease(1, request_id="early")) == 1
    before = counted(s)
    assert s.ledger.expire()["events"] == 0, "too young"
    n_events = len(bench.rows("SELECT * FROM event WHERE ordinal < 8"))
    assert n_events > 0 and len(bench.rows("SELECT * FROM append_receipt")) == 8
    bench.let_time_pass(60.0)
    s.ledger.renew_self()
    freed = s.ledger.expire()
    assert freed["events"] == n_events
    assert freed["receipts"] == 9
    assert bench.rows("SELECT * FROM append_receipt") == bench.rows("SELECT * FROM lease_receipt") == []
    assert bench.rows("SELECT * FROM event WHERE ordinal < 8") == []
    assert len(bench.rows("SELECT * FROM event WHERE kind = 'step_planned'")) == 7, "the run's own events stay"
    assert counted(s) == before
    s.feed(1)


def test_a_partition_goes_whole_when_no_run_needs_it_and_row_by_row_otherwise(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    bench.schema_is_changed()

    def partitions() -> set[int]:
        names = bench.rows("SELECT relname FROM pg_class WHERE relispartition AND relname LIKE 'sample_p%' AND relkind = 'r'")
        return {int(name.split("_p")[1].split("_")[0]) for (name,) in names}

    first = scene(bench, "first")
    steps(first, 1, 7)
    second = scene(bench, "second", retention=None)
    second.feed(2)
    second.fill()
    freed = first.ledger.expire()
    assert (freed["partitions"], freed["groups"]) == (0, 8) and freed["rows"] > 0
    assert 0 in partitions() and len(bench.rows("SELECT * FROM sample WHERE ordinal < 8")) == 4, "the other run's"
    second.ledger.close()
    third = scene(bench, "second", retention=KEEP)
    steps(third, 1, 7)
    freed = third.ledger.expire()
    assert freed["partitions"] == 2 and freed["bytes"] > 0
    assert not {0, 4} & partitions() and 8 in partitions()
    assert first.ledger.audit() == third.ledger.audit() == []
    steps(first, 8, 9)
    assert not {0, 4} & partitions(), "partitions below the low watermark are not made again"
    fresh = scene(bench, "fresh")
    step(fresh, 1)
    assert 0 in partitions(), "a new run begins at ordinal 0"
    bench.finish()


def test_a_run_that_cached_a_partition_cannot_lose_it(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    bench.schema_is_changed()
    old = scene(bench, "old")
    steps(old, 1, 7)
    late = scene(bench, "late")
    late.ledger._write(lambda txn: late.ledger._partitions.ensure(txn.conn, 1))
    assert old.ledger.expire()["partitions"] == 0, "the late run stands at ordinal 0 and will need it"
    step(late, 1)
    bench.finish()


def test_a_partition_that_a_reader_holds_waits_and_nobody_waits_for_it(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    bench.schema_is_changed()
    s = scene(bench)
    steps(s, 1, 7)
    with s.ledger._read() as conn:
        conn.exec_driver_sql("SELECT count(*) FROM sample")
        freed = s.ledger.expire()
        assert (freed["partitions"], freed["groups"]) == (0, 8)
        step(s, 8)
    assert s.ledger.audit() == []
    assert s.ledger.expire()["partitions"] >= 2
    assert bench.rows("SELECT DISTINCT state FROM expired_range") == [("gone",)]
    bench.finish()


def test_a_run_that_lives_on_retention_keeps_a_bounded_number_of_rows(bench: Bench) -> None:
    s = scene(bench)
    most = 0
    for number in range(1, 31):
        step(s, number)
        s.ledger.expire()
        most = max(most, len(bench.rows("SELECT * FROM sample")))
    assert most <= 2 * 2 * 8
    assert s.ledger.run_status()["slots"]["applied"] == 120
    assert s.ledger.feed_demand(3) == 3


def test_the_server_expires_by_itself_and_stops_with_the_ledger(sqlite_bench: Bench) -> None:
    ledger = sqlite_bench.open(retention=RetentionConfig(enabled=True, every_s=0.02, groups=WIDTH, events_s=0, batch_rows=100))
    s = Scene(ledger, run_record(**RULES))
    steps(s, 1, 7)
    for _ in range(3000):
        if s.ledger.run_status()["retention"]["low_watermark"]:
            break
        s.ledger._bell.wait("nothing", 0, 0.02)
    assert s.ledger.run_status()["retention"]["low_watermark"] == 8
    s.ledger.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ledger-retention"]


def test_a_closed_group_counts_as_finished_and_its_verdicts_stay_counted(bench: Bench) -> None:
    s = scene(bench)
    s.feed(3)
    s.ledger.quarantine_group(0, "poison")
    s.fill()
    s.train(1)
    s.checkpoint(1)
    steps(s, 2, 8)
    before = counted(s)
    assert s.ledger.expire()["groups"] > 0
    assert counted(s) == before and before["verdicts"] == {"quarantined": 2}
    assert s.ledger.feed_demand(2) == 2


def test_the_migration_goes_up_and_down_and_refuses_to_forget_what_went(tmp_path: Path, ledger_url: str) -> None:
    from alembic import command

    from rollbook.core.host import Host
    from rollbook.ledger.dialects import Database
    from rollbook.ledger.migrate import _config, check

    def to(how, revision: str) -> None:
        database = Database(ledger_url, Host(), role_ttl_s=60.0)
        try:
            with database.writer.connect() as conn, conn.begin():
                config = _config()
                config.attributes["connection"] = conn
                how(config, revision)
        finally:
            database.close()

    to(command.downgrade, "0003")
    assert "0003" in check(ledger_url)[0]
    to(command.upgrade, "head")
    assert check(ledger_url) == []
    engine_row = (
        "INSERT INTO run VALUES ('r', '', '{}', '{}', '{}', 0)",
        "INSERT INTO expired_range VALUES ('r', 0, 4, 2, 2, 4, 0, 0, 8, 8, 8, 0, 24, 'gone', 1)",
    )
    to(lambda config, _: [config.attributes["connection"].execute(sa.text(sql)) for sql in engine_row], "")
    with pytest.raises(RuntimeError, match="have been expired"):
        to(command.downgrade, "0003")
    assert check(ledger_url) == []


