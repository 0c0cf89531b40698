"""Whose failure it was, what became of the members of planned groups, and that no sequence of verbs makes a reward of none."""

from __future__ import annotations

import random

import pytest
from ledger_support import Scene, sample_for
from test_ledger_breaker import fail, report

from ledger_bench import Bench
from rollbook.core.errors import RollbookError
from rollbook.core.records import (
    Blame,
    FinishReason,
    LeaseGrant,
    RewardStatus,
    SandboxStatus,
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
