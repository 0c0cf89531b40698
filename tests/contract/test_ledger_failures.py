"""Whose failure it was, what became of the members of planned groups, and that no sequence of verbs makes a reward of none."""

from __future__ import annotations

import random

import pytest
from failure_support import fail, report, verdicts
from ledger_support import Scene, sample_for

from ledger_bench import Bench
from rollbook.core.errors import RollbookError, RunPaused
from rollbook.core.records import (
    Blame,
    FinishReason,
    LeaseGrant,
    RewardStatus,
    SandboxStatus,
    ScheduleKind,
    SlotKey,
    SubmitOutcome,
)

UNREWARDED = [s for s in RewardStatus if s is not RewardStatus.GIVEN]


@pytest.mark.parametrize(
    "status, blame",
    [
        (SandboxStatus.OK, None),
        (SandboxStatus.NOT_USED, None),
        (SandboxStatus.OOM, "model"),
        (SandboxStatus.TIMEOUT_WALL, "unclear"),
        (SandboxStatus.INFRA_LOST, "infra"),
    ],
)
def test_a_sample_whose_worker_blames_nobody_gets_the_blame_its_sandbox_says(
    bench: Bench, status: SandboxStatus, blame: str | None
) -> None:
    s = bench.scene()
    s.feed(1)
    s.submit(s.lease(1), sandbox_status=status, reward=None, reward_status=RewardStatus.NO_VERDICT)
    assert bench.rows("SELECT blame FROM sample") == [(blame,)]


def test_a_report_that_differs_is_the_report_that_was_recorded(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grants = s.lease(1)
    fail(s, grants, reason="first")
    assert fail(s, grants, reason="second", final=True, n_tokens=9) == [SubmitOutcome.REPLAYED]
    assert bench.rows("SELECT reason, n_tokens FROM failure") == [("first", 5)]
    assert s.lease(1)[0].attempt == 2, "a repetition ends nothing"


def test_a_late_report_of_a_silent_worker_leaves_the_row_of_its_silence(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grants = s.lease(1)
    bench.let_time_pass(31.0)
    s.lease(1, incarnation=s.worker())
    assert fail(s, grants) == [SubmitOutcome.FENCED]
    assert bench.rows("SELECT lease_token, reason FROM failure") == [(1, "its worker fell silent")]


def test_numbers_that_are_none_are_stored_as_zero_and_end_no_batch(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    first, second = s.lease(2)
    reports = [
        report(first, s.incarnation, n_tokens=-1, generate_s=float("nan"), verify_s=float("inf")), report(second, s.incarnation),
    ]  # fmt: skip
    assert [r.outcome for r in s.ledger.report_failures(reports)] == [SubmitOutcome.ACCEPTED] * 2
    assert bench.rows("SELECT n_tokens, generate_s, verify_s FROM failure ORDER BY sibling")[0] == (0, 0.0, 0.0)


def test_members_of_planned_groups_are_counted_by_what_became_of_them(bench: Bench) -> None:
    s = bench.scene(group_size=4, survivors_min=2, attempts_max=1, groups_per_step=1, max_lag_versions=9)
    s.feed(2, 4)
    assert s.ledger.run_status()["members"] == {"usable": 0, "policy_failed": 0, "infra_failed": 0}
    a, b, c, d = s.lease(4)
    s.submit([a])
    s.submit([b], reward=0.0, sandbox_status=SandboxStatus.OOM, blame=Blame.MODEL)
    s.submit([c], reward=0.0, finish_reason=FinishReason.LENGTH)
    fail(s, (d,))
    s.train(1)
    members = {"usable": 3, "policy_failed": 2, "infra_failed": 1}
    assert s.ledger.run_status()["members"] == members == s.ledger.explain(a.key)["members"]
    grants = s.lease(4)
    s.submit(grants[:3])
    s.submit(grants[3:], reward=None, reward_status=RewardStatus.TIMEOUT, blame=Blame.UNCLEAR)
    s.plan(2)
    assert s.ledger.run_status()["members"] == {"usable": 6, "policy_failed": 2, "infra_failed": 2}
    assert s.ledger.explain(a.key)["members"] == members, "of its own group"


@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_of_verbs_makes_a_number_of_no_reward(bench: Bench, seed: int) -> None:
    """What was accepted first stands: a reward, a missing reward, or nothing at all (P6)."""
    rng = random.Random(f"rewards.{seed}")
    s = bench.scene(
        group_size=3, survivors_min=2, groups_per_step=1, attempts_max=rng.choice((1, 2, 4)), max_lag_versions=9,
        late_submit=rng.choice(("salvage", "strict")), infra_window=6,
    )  # fmt: skip
    s.feed(8, 3)
    workers = [s.incarnation, s.worker(), s.worker()]
    granted: list[tuple[LeaseGrant, str]] = []
    stored: dict[SlotKey, float | None] = {}
    step = 1
    for _ in range(60):
        verb = rng.choice(("lease", "lease", "give", "give", "withhold", "fail", "contradict", "time", "plan", "crash", "human"))
        if verb == "lease":
            worker = rng.choice(workers)
            granted += [(g, worker) for g in s.lease(rng.randint(1, 3), worker)]
        elif verb in ("give", "withhold", "contradict") and granted:
            grant, worker = rng.choice(granted)
            value = rng.choice((0.0, 0.5, 1.0)) if verb == "give" or (verb == "contradict" and rng.random() < 0.8) else None
            status = RewardStatus.GIVEN if verb == "give" else rng.choice(UNREWARDED)
            if verb == "contradict" and grant.key in stored:
                status = RewardStatus.GIVEN if value is not None else rng.choice(UNREWARDED)
            item = sample_for(grant, worker, reward=value, reward_status=status, blame=rng.choice((None, *Blame)))
            outcome = s.ledger.submit_samples([item])[0].outcome
            if (value is None) != (status is not RewardStatus.GIVEN):
                assert outcome is SubmitOutcome.INVALID
            elif outcome is SubmitOutcome.ACCEPTED:
                assert grant.key not in stored
                stored[grant.key] = value
        elif verb == "fail" and granted:
            grant, worker = rng.choice(granted)
            changes = {"status": rng.choice(list(RewardStatus)), "blame": rng.choice(list(Blame)), "final": rng.random() < 0.2}
            (outcome,) = fail(s, (grant,), worker, **changes)
            assert changes["status"] is not RewardStatus.GIVEN or outcome is SubmitOutcome.INVALID
        elif verb == "time":
            bench.let_time_pass(rng.choice((1.0, 31.0)))
        elif verb == "crash":
            bench.crash(s)
        elif verb in ("plan", "human"):
            step += _plan_or_intervene(s, rng, verb, step)
    kept = {SlotKey(o, k): reward for o, k, reward in bench.rows("SELECT ordinal, sibling, reward FROM sample")}
    assert kept == stored
    for ordinal, sibling, reward, valid in bench.rows("SELECT ordinal, sibling, reward, valid FROM plan_item"):
        assert (reward, bool(valid)) == (stored[SlotKey(ordinal, sibling)], reward is not None)
    assert s.ledger.audit() == []


def _plan_or_intervene(s: Scene, rng: random.Random, verb: str, step: int) -> int:
    """Plan and finish a step, or act as the operator; returns how many steps were trained."""
    try:
        if verb == "plan":
            s.train(step)
            return 1
        act = rng.choice((s.ledger.retry_group, s.ledger.quarantine_group))
        act(rng.randrange(8), "a human said so")
    except RollbookError:
        pass
    return 0


def test_a_failure_is_a_row_with_its_statuses_and_whose_it_was(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grant = s.lease(1)[0]
    assert fail(s, (grant,)) == [SubmitOutcome.ACCEPTED] and fail(s, (grant,)) == [SubmitOutcome.REPLAYED]
    assert bench.rows(
        "SELECT ordinal, sibling, lease_token, attempt, status, sandbox_status, blame, reason, n_tokens, generate_s, verify_s,"
        " evidence_json, final FROM failure"
    ) == [(0, 0, 1, 1, "infra_error", "infra_spawn", "infra", "no sandbox", 5, 0.5, 0.25, '{"attempts": 3}', 0)]
    assert s.ledger.run_status()["failed_attempts"] == [
        {"status": "infra_error", "sandbox_status": "infra_spawn", "blame": "infra", "n": 1}
    ]
    assert bench.rows("SELECT count(*) FROM sample") == [(0,)], "nothing is padded, nothing becomes 0 (P6)"


def test_a_worker_that_falls_silent_leaves_a_row_and_its_late_report_no_second_one(bench: Bench) -> None:
    s = bench.scene(lease_ttl_s=10.0)
    s.feed(1)
    grant = s.lease(1)[0]
    bench.let_time_pass(11.0)
    again = s.lease(1)[0]
    assert again.key == grant.key and fail(s, (grant,)) == [SubmitOutcome.FENCED]
    assert bench.rows("SELECT lease_token, status, blame, reason FROM failure") == [
        (1, "no_verdict", "unclear", "its worker fell silent")
    ]


def test_blame_is_stored_with_a_sample(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    first, second = s.lease(2)
    s.submit([first], reward=0.0, sandbox_status=SandboxStatus.TIMEOUT_CPU, blame=Blame.MODEL)
    s.submit([second])
    assert bench.rows("SELECT sandbox_status, blame FROM sample ORDER BY sibling") == [
        ("timeout_cpu", "model"), ("not_used", None),
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
def test_a_failure_that_is_final_ends_its_slot_at_once(bench: Bench, schedule: ScheduleKind) -> None:
    s = bench.scene(schedule=schedule, attempts_max=3, groups_per_step=1)
    s.feed(1)
    first, second = s.lease(2)
    s.submit([second])
    assert fail(s, (first,), final=True) == [SubmitOutcome.ACCEPTED]
    assert s.lease(1) == () or s.lease(1)[0].key != first.key
    if schedule is ScheduleKind.BOUNDED:
        assert verdicts(bench)["0.0"] == "failed"
    else:
        assert verdicts(bench) == {}, "the fixed schedule may lose no member"
        with pytest.raises(RunPaused, match=r"0\.0"):
            s.plan(1)


def test_survivors_are_trained_and_too_few_are_dropped_and_refilled(bench: Bench) -> None:
    s = bench.scene(group_size=4, survivors_min=2, attempts_max=1, groups_per_step=1, max_lag_versions=20)
    s.feed(2, 4)
    grants = s.lease(8)
    s.submit(grants[:2])
    fail(s, grants[2:4])
    assert [i.key for i in s.plan(1).items] == [g.key for g in grants[:2]], "n >= max(2, ceil(G/2))"
    s.submit(grants[4:5])
    fail(s, grants[5:])
    assert verdicts(bench)["1.0"] == "cancelled", "one survivor is no group: dropped with its sample"
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills = 1") == [(1,)], "and refilled (R5)"
    assert s.ledger.audit() == []


def test_a_group_whose_slots_are_all_spent_at_once_is_refilled_too(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, groups_per_step=1, max_lag_versions=20)
    s.feed(2)
    fail(s, s.lease(2))
    assert set(verdicts(bench).values()) == {"failed"}
    assert bench.rows("SELECT refills, count(*) FROM prompt_group WHERE refills IS NOT NULL GROUP BY refills") == [(0, 1)]
    fail(s, s.lease(2), blame=Blame.UNCLEAR)
    assert bench.rows("SELECT count(*) FROM event WHERE kind = 'group_refilled'") == [(2,)] and s.ledger.audit() == []
