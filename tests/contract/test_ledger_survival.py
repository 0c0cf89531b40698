"""Drop bias from SQL: whatever happens to an opened slot, it is counted once in every dimension."""

from __future__ import annotations

import json
from dataclasses import replace
from struct import pack

import pytest
from ledger_support import Scene, group, sample_for, trajectory

from ledger_bench import Bench
from rollbook.core.records import (
    Blame,
    Cursor,
    FailureReport,
    GroupSpec,
    LeaseGrant,
    PlanOutcome,
    RewardStatus,
    SandboxStatus,
    SubmitOutcome,
)
from rollbook.core.survival import DIMENSIONS, UNKNOWN, assess
from rollbook.ledger.survival import DIFFICULTIES, DURATIONS, LENGTHS, SPANS, TASKS_SHOWN

STREAM = "tasks"


def opened_slots(bench: Bench) -> int:
    """Counted another way: distinct slots that ever had a lease."""
    rows = bench.rows("SELECT DISTINCT ordinal, sibling FROM event WHERE kind = 'lease_granted'")
    return len(rows)


def checked(bench: Bench, scene: Scene) -> dict:
    """The verb's answer, after what must hold for any of them."""
    counts = scene.ledger.survival()
    assert json.loads(json.dumps(counts)) == counts
    assert counts["opened"] == opened_slots(bench)
    assert counts["opened"] == counts["trained"] + counts["waiting"] + sum(counts["dropped"].values())
    assert set(counts["dimensions"]) == set(DIMENSIONS)
    for name, rows in counts["dimensions"].items():
        for total in ("opened", "finished", "trained", "waiting"):
            assert sum(row[total] for row in rows) == counts[total], (name, total)
        for kind, n in counts["dropped"].items():
            assert sum(row["dropped"].get(kind, 0) for row in rows) == n, (name, kind)
        for row in rows:
            assert row["opened"] == row["trained"] + row["waiting"] + sum(row["dropped"].values()), (name, row)
        assert len({row["bucket"] for row in rows}) == len(rows)
    sums = {name: round(sum(row["reward_sum"] for row in rows), 9) for name, rows in counts["dimensions"].items()}
    assert len(set(sums.values())) == 1, sums
    return counts


def by_bucket(counts: dict, dimension: str) -> dict[str, dict]:
    return {row["bucket"]: row for row in counts["dimensions"][dimension] if row["opened"]}


def fail(scene: Scene, grant: LeaseGrant, **changes: object) -> None:
    fields = {"status": RewardStatus.INFRA_ERROR, "blame": Blame.INFRA, "reason": "lost"} | changes
    (result,) = scene.ledger.report_failures([FailureReport(grant.key, grant.token, scene.incarnation, **fields)])  # type: ignore[arg-type]
    assert result.outcome is SubmitOutcome.ACCEPTED


def fail_for_good(scene: Scene, grant: LeaseGrant, **changes: object) -> None:
    """Every attempt of the slot fails."""
    for _ in range(scene.record.rules.attempts_max):
        fail(scene, grant, **changes)
        again = [g for g in scene.lease(1) if g.key == grant.key]
        if not again:
            return
        grant = again[0]


def test_a_run_without_slots_has_empty_dimensions(bench: Bench) -> None:
    counts = checked(bench, bench.scene())
    assert counts["opened"] == 0 and all(rows == [] for rows in counts["dimensions"].values())
    assert not any(d.alarm for d in assess(counts))


def test_trained_slots_stand_in_the_bucket_of_their_length_and_duration(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    for grant, (n, seconds) in zip(s.lease(), [(1, 0.05), (2, 0.9), (3, 1.0), (4, 5000.0)], strict=True):
        s.submit([grant], trajectory=trajectory(n), generate_s=seconds, verify_s=0.0)
    s.train(1)
    counts = checked(bench, s)
    assert counts["trained"] == 4
    assert {name: row["trained"] for name, row in by_bucket(counts, "length").items()} == {"1": 1, "2-3": 2, "4-7": 1}
    durations = {name: row["trained"] for name, row in by_bucket(counts, "duration").items()}
    assert durations == {"<0.125": 1, "0.5-1": 1, "1-2": 1, "4096+": 1}
    assert {name for name in durations} <= set(DURATIONS) and set(by_bucket(counts, "length")) <= set(LENGTHS)


def test_a_submitted_slot_waits_and_is_not_dropped(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.fill(3)
    s.lease(1)
    counts = checked(bench, s)
    assert (counts["opened"], counts["finished"], counts["waiting"]) == (4, 3, 4)
    assert by_bucket(counts, "length")[UNKNOWN]["waiting"] == 1
    s.feed(1)
    assert checked(bench, s)["opened"] == 4, "a slot nobody was given is not opened"


def test_a_planned_slot_waits_until_its_step_has_an_outcome(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.fill()
    s.plan(1)
    assert checked(bench, s)["waiting"] == 4
    s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.SKIPPED, "no signal", "{}")
    counts = checked(bench, s)
    assert counts["waiting"] == 0 and counts["dropped"]["skipped"] == 4 and counts["trained"] == 0


def test_a_failed_slot_has_its_attempts_largest_length_and_its_fine_sibling_is_counted_too(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    s.feed(1)
    first, second = s.lease(2)
    s.submit([second], trajectory=trajectory(9), generate_s=2.5, verify_s=0.0)
    fail_for_good(s, first, n_tokens=40, generate_s=7.0, verify_s=3.0, sandbox_status=SandboxStatus.INFRA_LOST)
    counts = checked(bench, s)
    assert counts["dropped"]["failed"] == 1 and counts["dropped"]["cancelled"] == 1 and counts["finished"] == 1
    assert by_bucket(counts, "length")["32-63"]["dropped"] == {"failed": 1}
    assert by_bucket(counts, "length")["8-15"]["dropped"] == {"cancelled": 1}
    assert by_bucket(counts, "duration")["8-16"]["dropped"] == {"failed": 1}
    assert by_bucket(counts, "version_span")[UNKNOWN]["dropped"] == {"failed": 1}
    (failed,) = counts["failures"]
    assert failed == {"status": "infra_error", "sandbox_status": "infra_lost", "blame": "infra", "attempts": 1, "n_tokens": 40}


def test_a_retried_slot_is_opened_once_and_keeps_its_samples_length(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    first, second = s.lease(2)
    fail(s, first, n_tokens=60)
    s.submit([second])
    s.fill()
    counts = checked(bench, s)
    assert counts["opened"] == 2 and counts["waiting"] == 2 and counts["failures"][0]["attempts"] == 1
    assert set(by_bucket(counts, "length")) == {"2-3"}


def test_an_expired_slot_has_an_unknown_length_and_a_row_of_its_own(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    s.feed(1)
    s.lease(2)
    bench.let_time_pass(31.0)
    s.lease(1)
    counts = checked(bench, s)
    assert by_bucket(counts, "length")[UNKNOWN]["opened"] >= 2
    assert sum(counts["dropped"].values()) == 2
    assert sum(row["attempts"] for row in counts["failures"]) == 2


def test_a_straggler_that_is_dropped_shows_in_the_tables_of_length_and_duration(bench: Bench) -> None:
    """R4 keeps the oldest group first; with ``drop``, what is too slow for the bound leaves with what its group has."""
    s = bench.scene(groups_per_step=1, max_lag_versions=1)
    s.feed(1)
    slow, done = s.lease(2)
    assert s.submit([done], trajectory=trajectory(50), generate_s=40.0, verify_s=0.0) == [SubmitOutcome.ACCEPTED]
    fail(s, slow, n_tokens=63, generate_s=100.0, status=RewardStatus.NO_VERDICT)
    (slow,) = s.lease(1)
    for step in (1, 2):
        s.feed(1)
        quick = s.fill()
        assert all(g.key.ordinal != 0 for g in quick)
        s.train(step)
    s.feed(1)
    s.fill()
    s.train(3)
    counts = checked(bench, s)
    assert counts["dropped"]["dropped_stale"] == 2
    assert by_bucket(counts, "length")["32-63"]["dropped"] == {"dropped_stale": 2}
    assert by_bucket(counts, "duration")["32-64"]["dropped"] == {"dropped_stale": 1}
    assert by_bucket(counts, "duration")["64-128"]["dropped"] == {"dropped_stale": 1}
    length = next(d for d in assess(counts) if d.name == "length")
    (hit,) = [b for b in length.buckets if b.name == "32-63"]
    assert hit.survival == 0.0 and length.means.unrepaired == ("32-63",) and length.kl_nats and length.kl_nats > 0


def test_a_quarantined_group_counts_only_the_slots_that_were_opened(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.lease(1)
    s.ledger.quarantine_group(0, "kills its workers")
    s.ledger.quarantine_group(1, "the same")
    counts = checked(bench, s)
    assert counts["opened"] == counts["dropped"]["quarantined"] == 1


def test_orphans_of_a_fork_and_what_its_copied_plans_train_are_counted_once(bench: Bench) -> None:
    s = bench.scene(groups_per_step=1, max_lag_versions=4)
    for step in (1, 2):
        s.feed(1)
        s.fill()
        s.train(step)
    s.feed(1)
    s.fill()
    line = s.ledger.fork_lineage(s.learner, 0, 1, 1.0, 0.0)
    counts = checked(bench, s)
    assert (counts["trained"], counts["waiting"], counts["dropped"]["orphan_version"]) == (2, 2, 2)
    s.ledger.finish_plan(s.learner, line.number, 2, PlanOutcome.TRAINED, "", "{}")
    assert checked(bench, s)["trained"] == 4


def test_a_member_without_a_reward_is_dropped_from_its_planned_group(bench: Bench) -> None:
    s = bench.scene(group_size=3, groups_per_step=1)
    s.feed(1, 3)
    first, *others = s.lease(3)
    s.submit(others)
    s.submit([first], reward=None, reward_status=RewardStatus.NO_VERDICT, blame=Blame.UNCLEAR)
    s.train(1)
    counts = checked(bench, s)
    assert counts["trained"] == 2 and counts["dropped"]["no_reward"] == 1
    assert counts["outcomes"] == [{"status": "no_verdict", "sandbox_status": "not_used", "blame": "unclear", "samples": 1}]


def test_difficulty_is_the_pass_rate_of_the_others_of_the_group(bench: Bench) -> None:
    s = bench.scene(group_size=5, groups_per_step=1)
    s.feed(1, 5)
    for grant, reward in zip(s.lease(5), (1.0, 0.5, 0.49, 0.0, -1.0), strict=True):
        s.submit([grant], reward=reward)
    counts = checked(bench, s)
    assert {name: row["opened"] for name, row in by_bucket(counts, "difficulty").items()} == {"0-0.25": 2, "0.25-0.5": 3}
    assert set(by_bucket(counts, "difficulty")) <= set(DIFFICULTIES)


@pytest.mark.parametrize(
    ("rewards", "expected"), [((1.0, 1.0), {"1": 2}), ((0.0, 0.0), {"0": 2}), ((1.0, 0.0), {"0": 1, "1": 1})]
)
def test_groups_that_all_pass_or_all_fail_have_buckets_of_their_own(
    bench: Bench, rewards: tuple[float, ...], expected: dict[str, int]
) -> None:
    s = bench.scene()
    s.feed(1)
    for grant, reward in zip(s.lease(2), rewards, strict=True):
        s.submit([grant], reward=reward)
    assert {name: row["opened"] for name, row in by_bucket(checked(bench, s), "difficulty").items()} == expected


def test_a_slot_alone_in_its_group_has_an_unknown_difficulty(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    s.fill(1)
    assert set(by_bucket(checked(bench, s), "difficulty")) == {UNKNOWN}


def test_samples_over_several_versions_are_counted_by_their_span(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=4, groups_per_step=1)
    s.feed(1)
    s.fill()
    s.train(1)
    s.feed(1)
    one, two = s.lease(2)
    mixed = trajectory(2, 0)
    s.ledger.submit_samples([
        sample_for(one, s.incarnation, trajectory=replace(mixed, versions=pack("<2i", 0, 1))),
        sample_for(two, s.incarnation, trajectory=trajectory(2, 1)),
    ])  # fmt: skip
    spans = by_bucket(checked(bench, s), "version_span")
    assert {name: row["opened"] for name, row in spans.items()} == {"0": 3, "1": 1} and set(spans) <= set(SPANS)


def feed_tasks(scene: Scene, *tasks: str) -> None:
    before = scene.ledger.cursor(STREAM)
    first = before.next_ordinal
    groups = [GroupSpec(first + i, group(first + i).prompt_ids, task, 2) for i, task in enumerate(tasks)]
    scene.ledger.append_groups(scene.feeder, before, Cursor(STREAM, first + len(tasks), "{}", False), groups)


def test_tasks_are_counted_by_kind_whatever_a_task_holds(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=20)
    hostile = ('{"data_source": "gsm8k", "task": "x"}', '{"task": "unknown"}', '{"environment": ""}', "not json", '{"task": 3}',
               '[1, 2]', '{"prompt": "\\"task\\": \\"y\\""}', '{"task": "a\\u0000b"}')  # fmt: skip
    feed_tasks(s, *hostile)
    s.fill()
    kinds = {name: row["opened"] for name, row in by_bucket(checked(bench, s), "task").items()}
    assert kinds["gsm8k"] == 2 and kinds["unknown (task)"] == 2 and kinds["unnamed"] == 10
    assert sum(kinds.values()) == 16


def test_a_task_name_that_is_no_text_is_counted_like_any_other(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=20)
    feed_tasks(s, '{"task": "\\ud800"}', '{"task": "\\udfff!"}', '{"task": "x"}')
    s.fill()
    kinds = {name: row["opened"] for name, row in by_bucket(checked(bench, s), "task").items()}
    assert kinds.pop("x") == 2 and sum(kinds.values()) == 4
    figures = s.ledger.reading()["figures"]
    assert figures["slots"] == 6


def test_the_number_of_kinds_of_tasks_is_bounded(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=40)
    feed_tasks(s, *[json.dumps({"task_id": f"t{i % 20}" + "x" * 100}) for i in range(TASKS_SHOWN + 8)])
    s.fill()
    rows = by_bucket(checked(bench, s), "task")
    assert len(rows) == TASKS_SHOWN + 1 and rows["other"]["opened"] == 8 and max(map(len, rows)) <= 64
    assert max(row["opened"] for row in rows.values()) >= 4


def test_the_breakers_events_are_told_in_order(bench: Bench) -> None:
    s = bench.scene(group_size=4, infra_window=2, infra_failures_max=0.5, attempts_max=9)
    s.feed(2, 4)
    assert s.ledger.survival()["breaker"] == {"opened": 0, "events": []}
    for grant in s.lease(2):
        fail(s, grant, reason="no spawn")
    (event,) = s.ledger.survival()["breaker"]["events"]
    assert (event["what"], event["last"]) == ("breaker_opened", "no spawn")
    bench.let_time_pass(1.0)
    for _ in range(3):
        s.fill(1)
    breaker = checked(bench, s)["breaker"]
    assert breaker["opened"] == 1 and [e["what"] for e in breaker["events"]] == ["breaker_opened", "breaker_closed"]


def test_workers_with_an_unsafe_sandbox_are_counted(bench: Bench) -> None:
    s = bench.scene()
    assert s.ledger.survival()["unsafe_workers"] == 0
    labels = ({"sandbox": {"backend": "unsafe"}}, {"sandbox": "unsafe"}, {"sandbox": {"backend": "zygote"}}, {"name": "unsafe"})
    for index, label in enumerate(labels):
        s.ledger.register_worker(f"w{index}", "host", "engine", json.dumps(label))
    s.ledger.register_worker("odd", "host", "engine", '"unsafe"')
    assert s.ledger.survival()["unsafe_workers"] == 2
