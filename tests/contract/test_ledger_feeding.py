"""Task streams and demand, on both databases."""

from __future__ import annotations

import dataclasses

import pytest
from ledger_support import STREAM, Scene, group

from ledger_bench import WIDTH, Bench
from rollbook.core.errors import CursorMoved, InvalidRequest
from rollbook.core.idempotency import sample_seed
from rollbook.core.records import Cursor, GroupSpec, ScheduleKind, SlotKey


def after(before: Cursor, n: int, state: str = '{"n": 1}', exhausted: bool = False) -> Cursor:
    return Cursor(before.stream, before.next_ordinal + n, state, exhausted)


def append(s: Scene, before: Cursor, n: int, state: str = '{"n": 1}') -> Cursor:
    return s.ledger.append_groups(s.feeder, before, after(before, n, state), [group(before.next_ordinal + i) for i in range(n)])


def test_a_fresh_stream_starts_at_zero(bench: Bench) -> None:
    s = bench.scene()
    assert s.ledger.cursor(STREAM) == Cursor(STREAM, 0, "{}", False)


def test_groups_and_cursor_move_together_and_the_same_append_again_changes_nothing(bench: Bench) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    moved = append(s, before, 3)
    assert append(s, before, 3) == moved == s.ledger.cursor(STREAM)
    further = append(s, moved, 2)
    assert append(s, before, 3) == moved
    assert s.ledger.cursor(STREAM) == further
    assert s.ledger.run_status()["groups"]["issued"] == 5


@pytest.mark.parametrize("field, value", [("next_ordinal", 1), ("state_json", '{"n": 2}'), ("exhausted", True)])
def test_an_append_from_where_the_cursor_is_not_is_refused(bench: Bench, field: str, value: object) -> None:
    s = bench.scene()
    standing = append(s, s.ledger.cursor(STREAM), 2)
    with pytest.raises(CursorMoved, match="stands at ordinal 2"):
        append(s, dataclasses.replace(standing, **{field: value}), 1)
    assert s.ledger.cursor(STREAM) == standing


def test_the_same_start_with_other_groups_is_refused(bench: Bench) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    append(s, before, 2)
    with pytest.raises(CursorMoved):
        append(s, before, 3)


def test_an_empty_append_stores_the_end_of_the_stream(bench: Bench) -> None:
    s = bench.scene()
    standing = append(s, s.ledger.cursor(STREAM), 2)
    ended = s.ledger.append_groups(s.feeder, standing, after(standing, 0, standing.state_json, True), [])
    assert s.ledger.cursor(STREAM) == ended
    assert ended.exhausted


@pytest.mark.parametrize(
    "spec, message",
    [
        (dataclasses.replace(group(0), ordinal=1), "no gaps"),
        (dataclasses.replace(group(0), n_siblings=0), "n_siblings"),
        (dataclasses.replace(group(0), prompt_ids=b""), "prompt"),
        (dataclasses.replace(group(0), prompt_ids=b"\0\0\0"), "int32"),
        (dataclasses.replace(group(0), refills=0), "refills"),
    ],
)
def test_a_broken_group_is_refused(bench: Bench, spec: GroupSpec, message: str) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    with pytest.raises(InvalidRequest, match=message):
        s.ledger.append_groups(s.feeder, before, after(before, 1), [spec])


def test_a_cursor_that_moves_by_another_number_than_the_groups_is_refused(bench: Bench) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    with pytest.raises(InvalidRequest, match="end at 1"):
        s.ledger.append_groups(s.feeder, before, after(before, 2), [group(0)])
    with pytest.raises(InvalidRequest, match="one stream"):
        s.ledger.append_groups(s.feeder, before, Cursor("other", 1, "{}", False), [group(0)])


def test_two_streams_share_the_ordinals_of_a_run(bench: Bench) -> None:
    s = bench.scene()
    append(s, s.ledger.cursor("a"), 2)
    standing = s.ledger.cursor("b")
    assert standing.next_ordinal == 2
    append(s, standing, 1)
    assert s.ledger.cursor("a").next_ordinal == 3


def test_seeds_are_a_function_of_configuration_and_key_alone(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    assert {g.key: g.seed for g in s.lease()} == {
        SlotKey(o, k): sample_seed(s.record.rules.config_seed, SlotKey(o, k)) for o in range(2) for k in range(2)
    }


def test_demand_fills_up_to_the_lookahead(bench: Bench) -> None:
    s = bench.scene()
    assert s.ledger.feed_demand(3) == 3
    s.feed(3)
    assert s.ledger.feed_demand(3) == 0
    s.lease(3)
    assert s.ledger.feed_demand(3) == 2, "two groups are opened, one waits"


@pytest.mark.parametrize("kind", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
def test_demand_ends_with_what_the_configured_steps_can_train(bench: Bench, kind: ScheduleKind) -> None:
    s = bench.scene(steps=2, schedule=kind)
    assert s.ledger.feed_demand(3) == 3
    s.feed(3)
    assert s.ledger.feed_demand(100) == 1
    s.feed(1)
    assert s.ledger.feed_demand(100) == 0


def test_a_quarantined_group_is_replaced_through_demand(bench: Bench) -> None:
    s = bench.scene(steps=2)
    s.feed(4)
    s.ledger.quarantine_group(3, "broken task")
    assert s.ledger.feed_demand(100) == 1


def test_partitions_stand_ready_before_the_ordinals_that_need_them(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2 * WIDTH + 1)
    s.fill()
    if bench.url.startswith("postgresql"):
        names = {r[0] for r in bench.rows("SELECT relname FROM pg_class WHERE relispartition AND relname LIKE 'sample_p%'")}
        assert {f"sample_p{i * WIDTH}_{(i + 1) * WIDTH}" for i in range(4)} <= names
        assert bench.rows(f"SELECT count(*) FROM slot_p{WIDTH}_{2 * WIDTH}") == [(2 * WIDTH,)]
    bench.crash(s)
    s.feed(2 * WIDTH)
    assert s.ledger.cursor(STREAM).next_ordinal == 4 * WIDTH + 1


def test_the_width_of_existing_partitions_wins_over_the_configured_one(bench: Bench) -> None:
    s = bench.scene()
    s.feed(WIDTH + 1)
    s.ledger.close()
    s.ledger = bench.open(ordinals_per_partition=1000)
    s.ledger.open_run(s.record)
    s.feed(3 * WIDTH)
    assert s.ledger.cursor(STREAM).next_ordinal == 4 * WIDTH + 1
