"""Finished rollouts: every outcome, every guard on both sides, on both databases."""

from __future__ import annotations

import dataclasses
import struct
import threading

import pytest
from ledger_support import Scene, sample_for, trajectory, version

from ledger_bench import Bench
from rollbook.core.errors import DigestMismatch, InvalidRequest, NotFound, UnknownSlot
from rollbook.core.records import (
    LeaseGrant,
    RewardStatus,
    ScheduleKind,
    SlotKey,
    Submission,
    SubmitOutcome,
    SubmitResult,
    Trajectory,
)

A, R, C, F, X, I = (  # noqa: E741
    SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED, SubmitOutcome.CONFLICT, SubmitOutcome.FENCED, SubmitOutcome.REFUSED,
    SubmitOutcome.INVALID,
)  # fmt: skip


def leased(bench: Bench, n: int = 1, **rules: object) -> tuple[Scene, tuple[LeaseGrant, ...]]:
    s = bench.scene(**rules)
    s.feed(2)
    return s, s.lease(n)


def one(s: Scene, item: Submission) -> SubmitResult:
    return s.ledger.submit_samples([item])[0]


def test_a_sample_is_stored_with_its_bytes(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    item = sample_for(grant, s.incarnation, trajectory=trajectory(5, 0, 9, b"\1\1\0\1\1"), reward=0.25)
    assert one(s, item).outcome is A
    stored = s.ledger.sample(grant.key)
    assert stored.trajectory == item.trajectory
    assert (stored.reward, stored.prompt_ids) == (0.25, grant.prompt_ids)


def test_recording_a_sample_twice_changes_nothing(bench: Bench) -> None:
    s, grants = leased(bench, 3)
    assert s.submit(grants) == [A, A, A]
    rows = bench.rows("SELECT * FROM sample ORDER BY ordinal, sibling")
    assert s.submit(grants) == [R, R, R]
    bench.crash(s)
    assert s.submit(grants) == [R, R, R]
    assert bench.rows("SELECT * FROM sample ORDER BY ordinal, sibling") == rows
    assert s.ledger.run_status()["submits"] | {"accepted": 3, "replayed": 6} == s.ledger.run_status()["submits"]


def test_the_same_key_with_other_content_is_a_counted_conflict(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    assert one(s, sample_for(grant, s.incarnation)).outcome is A
    again = one(s, sample_for(grant, s.incarnation, reward=0.0))
    assert again.outcome is C
    assert "same submit key" in again.reason
    assert s.ledger.sample(grant.key).reward == 1.0
    assert s.ledger.run_status()["submits"]["conflict"] == 1


def test_a_filled_slot_with_other_content_from_elsewhere_is_a_conflict(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    bench.let_time_pass(31.0)
    other = s.worker()
    (newer,) = s.lease(1, incarnation=other)
    assert one(s, sample_for(newer, other)).outcome is A
    late = one(s, sample_for(grant, s.incarnation, reward=0.0))
    assert late.outcome is C
    assert other in late.reason


def test_the_same_content_under_another_sequence_is_replayed(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    item = sample_for(grant, s.incarnation)
    assert one(s, item).outcome is A
    assert one(s, dataclasses.replace(item, sequence=99)).outcome is R


def test_one_call_may_name_a_slot_twice(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    item = sample_for(grant, s.incarnation)
    outcomes = [r.outcome for r in s.ledger.submit_samples([item, item, dataclasses.replace(item, reward=0.5)])]
    assert outcomes == [A, R, C]


def test_a_bad_item_does_not_hold_up_its_neighbours_and_order_is_kept(bench: Bench) -> None:
    s, grants = leased(bench, 3)
    items = [sample_for(g, s.incarnation) for g in grants]
    items[1] = dataclasses.replace(items[1], reward=None)
    unknown = dataclasses.replace(items[0], key=SlotKey(77, 0))
    results = s.ledger.submit_samples([items[0], items[1], unknown, items[2]])
    assert [r.outcome for r in results] == [A, I, I, A]
    assert [r.key for r in results] == [grants[0].key, grants[1].key, SlotKey(77, 0), grants[2].key]
    assert "no slot 77.0" in results[2].reason
    assert one(s, sample_for(grants[1], s.incarnation)).outcome is A, "a corrected retry is judged afresh"


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


GOOD = Trajectory(ints(1, 2), floats(-1, -2), ints(0, 0))


@pytest.mark.parametrize(
    "bad, message",
    [
        (dataclasses.replace(GOOD, token_ids=b"", logprobs=b"", versions=b""), "at least one"),
        (dataclasses.replace(GOOD, token_ids=b"\0\0\0"), "int32"),
        (dataclasses.replace(GOOD, logprobs=floats(-1)), "lengths differ"),
        (dataclasses.replace(GOOD, versions=ints(0)), "lengths differ"),
        (dataclasses.replace(GOOD, loss_mask=b"\1"), "lengths differ"),
        (dataclasses.replace(GOOD, loss_mask=b"\1\2"), "other than 0 and 1"),
        (dataclasses.replace(GOOD, loss_mask=b"\0\0"), "masked"),
        (dataclasses.replace(GOOD, logprobs=floats(-1, float("nan"))), "not finite"),
        (dataclasses.replace(GOOD, logprobs=floats(-1, float("-inf"))), "not finite"),
        (dataclasses.replace(GOOD, logprobs=floats(-1, float("inf"))), "not finite"),
        (dataclasses.replace(GOOD, logprobs=floats(-1, 0.0011)), "at most 1"),
        (dataclasses.replace(GOOD, versions=ints(0, -1)), "published"),
        (dataclasses.replace(GOOD, versions=ints(0, 1)), "published"),
    ],
)
def test_a_trajectory_that_cannot_be_right_is_invalid(bench: Bench, bad: Trajectory, message: str) -> None:
    s, (grant,) = leased(bench)
    result = one(s, sample_for(grant, s.incarnation, trajectory=bad))
    assert (result.outcome, message in result.reason) == (I, True), result
    assert bench.rows("SELECT * FROM sample") == []


@pytest.mark.parametrize(
    "good",
    [
        GOOD,
        dataclasses.replace(GOOD, logprobs=floats(-1, 0.0)),
        dataclasses.replace(GOOD, logprobs=floats(-1, 0.0009)),
        dataclasses.replace(GOOD, logprobs=floats(-3e38, -1e-40)),
        dataclasses.replace(GOOD, loss_mask=b"\0\1"),
    ],
)
def test_a_trajectory_at_the_edge_of_the_rules_is_accepted(bench: Bench, good: Trajectory) -> None:
    s, (grant,) = leased(bench)
    assert one(s, sample_for(grant, s.incarnation, trajectory=good)).outcome is A
    assert s.ledger.sample(grant.key).trajectory == good


@pytest.mark.parametrize("n, outcome", [(64, A), (65, I)])
def test_tokens_are_bounded(bench: Bench, n: int, outcome: SubmitOutcome) -> None:
    s, (grant,) = leased(bench)
    assert one(s, sample_for(grant, s.incarnation, trajectory=trajectory(n))).outcome is outcome


@pytest.mark.parametrize("n, outcome", [(10, A), (11, I)])
def test_payload_bytes_are_bounded(bench: Bench, n: int, outcome: SubmitOutcome) -> None:
    s, (grant,) = leased(bench)
    s.ledger.close()
    s.ledger = bench.open(payload_bytes_max=122)
    s.ledger.open_run(s.record)
    result = one(s, sample_for(grant, s.incarnation, trajectory=trajectory(n)))
    assert result.outcome is outcome, result


@pytest.mark.parametrize(
    "reward, status, fine",
    [
        (0.0, RewardStatus.GIVEN, True),
        (None, RewardStatus.NO_VERDICT, True),
        (None, RewardStatus.GIVEN, False),
        (0.0, RewardStatus.NO_VERDICT, False),
        (0.0, RewardStatus.INFRA_ERROR, False),
        (float("nan"), RewardStatus.GIVEN, False),
        (float("inf"), RewardStatus.GIVEN, False),
    ],
)
def test_a_reward_stands_only_where_a_verifier_gave_one(
    bench: Bench, reward: float | None, status: RewardStatus, fine: bool
) -> None:
    s, (grant,) = leased(bench, survivors_min=1)
    result = one(s, sample_for(grant, s.incarnation, reward=reward, reward_status=status))
    assert result.outcome is (A if fine else I)


def test_the_number_of_samples_in_a_call_is_bounded(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    with pytest.raises(InvalidRequest, match="4097"):
        s.ledger.submit_samples([sample_for(grant, s.incarnation)] * 4097)
    assert s.ledger.submit_samples([]) == []


def test_an_unknown_lineage_is_invalid(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    assert one(s, sample_for(grant, s.incarnation, lineage=1)).outcome is I


def test_a_token_that_was_never_granted_is_invalid(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    for token in (0, 2):
        result = one(s, sample_for(grant, s.incarnation, lease_token=token))
        assert (result.outcome, "never granted" in result.reason) == (I, True)
    ungranted = dataclasses.replace(sample_for(grant, s.incarnation), key=SlotKey(1, 1))
    assert one(s, ungranted).outcome is I


def test_another_workers_token_is_fenced(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    result = one(s, sample_for(grant, s.worker()))
    assert (result.outcome, s.incarnation in result.reason) == (F, True)


@pytest.mark.parametrize("policy, outcome", [("salvage", A), ("strict", F)])
def test_a_late_sample_for_an_empty_slot_is_salvaged_or_fenced_by_policy(
    bench: Bench, policy: str, outcome: SubmitOutcome
) -> None:
    s, (grant,) = leased(bench, late_submit=policy)
    bench.let_time_pass(29.0)
    bench.let_time_pass(2.0)
    other = s.worker()
    (newer,) = s.lease(1, incarnation=other)
    result = one(s, sample_for(grant, s.incarnation))
    assert result.outcome is outcome
    if outcome is A:
        assert s.ledger.heartbeat(other, version(0), [(newer.key, newer.token)]).lost == (grant.key,)
        assert one(s, sample_for(newer, other, reward=0.0)).outcome is C
        assert s.ledger.run_status()["submits"]["salvaged"] == 1
    else:
        assert one(s, sample_for(newer, other, reward=0.0)).outcome is A
        assert s.ledger.run_status()["submits"]["fenced"] == 1


@pytest.mark.parametrize("policy, outcome", [("salvage", A), ("strict", F)])
def test_a_sample_after_expiry_of_an_untouched_lease_follows_the_same_policy(
    bench: Bench, policy: str, outcome: SubmitOutcome
) -> None:
    s, (grant,) = leased(bench, late_submit=policy)
    bench.let_time_pass(31.0)
    assert one(s, sample_for(grant, s.incarnation)).outcome is outcome


def test_a_sample_in_time_is_accepted_under_strict(bench: Bench) -> None:
    s, (grant,) = leased(bench, late_submit="strict")
    bench.let_time_pass(29.0)
    assert one(s, sample_for(grant, s.incarnation)).outcome is A


def test_a_verdict_refuses_every_later_submit(bench: Bench) -> None:
    s, (grant,) = leased(bench)
    s.ledger.quarantine_group(0, "broken task")
    result = one(s, sample_for(grant, s.incarnation))
    assert (result.outcome, "broken task" in result.reason) == (X, True)


@pytest.mark.parametrize("step, outcome", [(2, A), (3, X)])
def test_a_sample_too_stale_for_the_next_step_is_refused_and_its_slot_generated_again(
    bench: Bench, step: int, outcome: SubmitOutcome
) -> None:
    s = bench.scene(max_lag_versions=1, lease_ttl_s=1000.0, attempts_max=1)
    s.feed(10)
    s.fill(4)
    (slow,) = s.lease(1)
    for done in range(1, step):
        s.train(done)
        for g in s.lease(4):
            if g.key.ordinal > slow.key.ordinal:
                s.submit([g])
        s.fill(100)
    assert one(s, sample_for(slow, s.incarnation)).outcome is outcome
    if outcome is X:
        again = next(g for g in s.lease(100) if g.key == slow.key)
        assert (again.token, again.version) == (2, step - 1)
        assert again.attempt == 1, "a refusal for staleness costs no attempt"
        assert s.submit([again]) == [A]


def test_fixed_lag_accepts_exactly_the_due_version(bench: Bench) -> None:
    s = bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=0, max_lag_versions=0)
    s.feed(4)
    s.fill()
    s.train(1)
    (grant,) = s.lease(1)
    wrong = one(s, sample_for(grant, s.incarnation, trajectory=trajectory(3, 0)))
    assert (wrong.outcome, "under version 1" in wrong.reason) == (I, True)
    assert one(s, sample_for(grant, s.incarnation)).outcome is A


def test_a_sample_of_several_versions_keeps_each_tokens_version(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill(4)
    s.train(1)
    (grant,) = s.lease(1)
    mixed = dataclasses.replace(trajectory(4, 1), versions=ints(0, 0, 1, 1))
    assert one(s, sample_for(grant, s.incarnation, trajectory=mixed)).outcome is A
    assert s.ledger.sample(grant.key).trajectory.versions == ints(0, 0, 1, 1)
    assert bench.rows(f"SELECT version_min, version_max FROM sample WHERE ordinal = {grant.key.ordinal}") == [(0, 1)]


def test_samples_are_read_one_by_one_with_clear_errors(damaged: Bench) -> None:
    s, (grant,) = leased(damaged)
    with pytest.raises(NotFound, match="rollbook why 0.0"):
        s.ledger.sample(grant.key)
    with pytest.raises(UnknownSlot):
        s.ledger.sample(SlotKey(9, 9))
    s.submit([grant])
    damaged.execute("UPDATE sample SET reward = 0.5")
    with pytest.raises(DigestMismatch, match=r"0\.0"):
        s.ledger.sample(grant.key)


def test_many_callers_share_commits_and_each_gets_its_own_answer(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=20)
    s.feed(30)
    grants = s.lease(60)
    before = s.ledger._writer.commits
    answers: dict[int, list[SubmitResult]] = {}
    start = threading.Barrier(20)

    def submit(i: int) -> None:
        start.wait(timeout=30)
        items = [sample_for(g, s.incarnation) for g in grants[3 * i : 3 * i + 3]]
        answers[i] = s.ledger.submit_samples([*items, items[0]])

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for i in range(20):
        assert [r.outcome for r in answers[i]] == [A, A, A, R]
        assert [r.key for r in answers[i]][:3] == [g.key for g in grants[3 * i : 3 * i + 3]]
    assert s.ledger._writer.commits - before <= 20
