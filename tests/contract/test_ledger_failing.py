"""Attempts, verdicts, the group rule, refills, quarantine and the pause of the fixed schedule, on both databases."""

from __future__ import annotations

import json

import pytest
from ledger_support import STREAM, Scene, key, run_record, sample_for, version

from ledger_bench import Bench
from rollbook.core.errors import CursorMoved, InvalidRequest, NotReady, RunPaused, UnknownSlot
from rollbook.core.records import (
    Blame,
    FailureReport,
    LeaseGrant,
    RewardStatus,
    ScheduleKind,
    SlotKey,
    SubmitOutcome,
    VerdictKind,
)

ACCEPTED, REPLAYED, FENCED, REFUSED = (
    SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED, SubmitOutcome.FENCED, SubmitOutcome.REFUSED,
)  # fmt: skip


def fail(
    s: Scene, grant: LeaseGrant, status: RewardStatus = RewardStatus.INFRA_ERROR, reason: str = "sandbox gone"
) -> SubmitOutcome:
    report = FailureReport(grant.key, grant.token, s.incarnation, status, Blame.INFRA, reason)
    return s.ledger.report_failures([report])[0].outcome


def verdicts(bench: Bench) -> dict[str, str]:
    return {f"{o}.{k}": kind for o, k, kind in bench.rows("SELECT ordinal, sibling, kind FROM verdict")}


def test_a_failure_frees_its_slot_for_another_attempt(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grant = s.lease(1)[0]
    assert fail(s, grant) is ACCEPTED
    again = s.lease(1)[0]
    assert (again.key, again.token, again.attempt) == (grant.key, 2, 2)


def test_reporting_a_failure_twice_counts_once(bench: Bench) -> None:
    s = bench.scene(attempts_max=2)
    s.feed(1)
    grant = s.lease(1)[0]
    assert [fail(s, grant), fail(s, grant)] == [ACCEPTED, REPLAYED]
    bench.crash(s)
    assert fail(s, grant) is REPLAYED
    assert s.lease(1)[0].attempt == 2
    assert verdicts(bench) == {}


def test_a_failure_under_a_lost_lease_is_fenced(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grant = s.lease(1)[0]
    bench.let_time_pass(31.0)
    s.lease(1, incarnation=s.worker())
    assert fail(s, grant) is FENCED
    given = FailureReport(grant.key, 2, s.incarnation, RewardStatus.GIVEN, Blame.MODEL, "")
    unknown = FailureReport(SlotKey(9, 9), 1, s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "")
    assert [r.outcome for r in s.ledger.report_failures([given, unknown])] == [SubmitOutcome.INVALID] * 2


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_slot_gets_its_verdict_with_the_last_attempt_and_not_before(bench: Bench, attempts: int) -> None:
    s = bench.scene(attempts_max=attempts, group_size=4, survivors_min=2)
    s.feed(1)
    for attempt in range(1, attempts + 1):
        assert verdicts(bench) == {}
        grant = s.lease(1)[0]
        assert grant.attempt == attempt
        fail(s, grant)
    assert verdicts(bench) == {"0.0": "failed"}
    assert keys(s) == ["0.1", "0.2", "0.3"]


def keys(s: Scene) -> list[str]:
    return [str(g.key) for g in s.lease(100)]


def test_expiry_counts_as_an_attempt(bench: Bench) -> None:
    s = bench.scene(attempts_max=2, group_size=4, survivors_min=2)
    s.feed(1)
    s.lease(1)
    bench.let_time_pass(31.0)
    s.fill(3)
    assert keys(s) == ["0.0"]
    bench.let_time_pass(31.0)
    s.lease(1)
    assert verdicts(bench) == {"0.0": "failed"}


def test_a_verifier_that_keeps_failing_quarantines_the_slot(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, group_size=4, survivors_min=2)
    s.feed(1)
    fail(s, s.lease(1)[0], RewardStatus.VERIFIER_ERROR, "no such module")
    assert verdicts(bench) == {"0.0": "quarantined"}
    assert s.ledger.run_status()["failures"] == {"verifier_error: no such module": 1}


@pytest.mark.parametrize("n_failed, closed", [(2, False), (3, True)])
def test_a_group_is_trained_with_its_survivors_or_closed_and_refilled(bench: Bench, n_failed: int, closed: bool) -> None:
    s = bench.scene(attempts_max=1, group_size=4, survivors_min=2, groups_per_step=1)
    before = s.feed(1)
    grants = s.lease(4)
    assert s.submit(grants[:1]) == [ACCEPTED]
    for grant in grants[1 : 1 + n_failed]:
        fail(s, grant)
    if closed:
        kinds = verdicts(bench)
        assert kinds == {"0.0": "cancelled", "0.1": "failed", "0.2": "failed", "0.3": "failed"}
        assert bench.rows("SELECT ordinal, refills FROM prompt_group ORDER BY ordinal") == [(0, None), (1, 0)]
        assert s.ledger.cursor(STREAM).next_ordinal == before.next_ordinal + 1
        again = s.lease(100)
        assert {g.key.ordinal for g in again} == {1}
        assert again[0].prompt_ids == grants[0].prompt_ids
        s.submit(again)
    else:
        s.submit(grants[3:])
    plan = s.train(1)
    assert [str(i.key) for i in plan.items] == (["1.0", "1.1", "1.2", "1.3"] if closed else ["0.0", "0.3"])


def test_a_refill_moves_the_cursor_so_that_the_feeder_reads_it_again(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    s.feed(2)
    before = s.ledger.cursor(STREAM)
    fail(s, s.lease(1)[0])
    after = s.ledger.cursor(STREAM)
    assert (after.next_ordinal, after.state_json) == (before.next_ordinal + 1, before.state_json)
    with pytest.raises(CursorMoved):
        s.ledger.append_groups(s.feeder, before, before, [])
    s.feed(1)
    assert s.ledger.run_status()["groups"] == {"issued": 4, "opened": 1, "planned": 0, "refilled": 1}


def test_a_refused_slot_of_a_closed_group_accepts_nothing_any_more(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    s.feed(1)
    a, b = s.lease(2)
    fail(s, a)
    result = s.ledger.submit_samples([sample_for(b, s.incarnation)])[0]
    assert (result.outcome, "usable members" in result.reason) == (REFUSED, True)
    assert s.ledger.heartbeat(s.incarnation, version(0), [(b.key, b.token)]).lost == (b.key,)


def test_members_without_a_reward_do_not_survive(bench: Bench) -> None:
    s = bench.scene(group_size=4, survivors_min=2, groups_per_step=1)
    s.feed(1)
    grants = s.lease(4)
    nothing = {"reward": None, "reward_status": RewardStatus.NO_VERDICT}
    s.submit(grants[:2], **nothing)
    s.submit(grants[2:3])
    assert verdicts(bench) == {}
    s.submit(grants[3:])
    plan = s.train(1)
    assert [(str(i.key), i.valid, i.reward) for i in plan.items] == [
        ("0.0", False, None), ("0.1", False, None), ("0.2", True, 1.0), ("0.3", True, 1.0),
    ]  # fmt: skip


def test_too_many_members_without_a_reward_close_the_group(bench: Bench) -> None:
    s = bench.scene(group_size=4, survivors_min=2)
    s.feed(1)
    s.submit(s.lease(3), reward=None, reward_status=RewardStatus.INFRA_ERROR)
    assert set(verdicts(bench).values()) == {"cancelled"}
    assert s.ledger.run_status()["groups"]["refilled"] == 1


def test_a_prompt_that_keeps_failing_is_not_issued_for_ever(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, steps=50)
    s.feed(1)
    for _ in range(20):
        grants = s.lease(1)
        if not grants:
            break
        fail(s, grants[0])
    assert s.ledger.run_status()["groups"]["issued"] == 2
    assert s.ledger.feed_demand(1) == 1, "another prompt takes its place"


def test_infrastructure_failures_beside_a_verifier_error_are_not_a_quarantine(bench: Bench) -> None:
    s = bench.scene(attempts_max=2, group_size=4, survivors_min=2)
    s.feed(1)
    fail(s, s.lease(1)[0])
    fail(s, s.lease(1)[0], RewardStatus.VERIFIER_ERROR, "no such module")
    assert verdicts(bench) == {"0.0": "failed"}


def test_a_lowered_attempt_budget_closes_the_slots_that_are_beyond_it(bench: Bench) -> None:
    s = bench.scene(attempts_max=3, group_size=4, survivors_min=2)
    s.feed(1)
    fail(s, s.lease(1)[0])
    s.ledger.open_run(run_record(attempts_max=1, group_size=4, survivors_min=2), accept=["rules.attempts_max"])
    assert keys(s) == ["0.1", "0.2", "0.3"]
    assert verdicts(bench) == {"0.0": "failed"}


def test_a_reason_with_a_character_a_database_cannot_hold_is_kept_without_it(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, group_size=4, survivors_min=2)
    s.feed(1)
    fail(s, s.lease(1)[0], reason="bad\x00byte")
    assert "bad\ufffdbyte" in s.ledger.explain(key("0.0"))["reason"]


def test_an_operator_quarantines_a_group_once_and_with_a_reason(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.submit(s.lease(1))
    with pytest.raises(InvalidRequest, match="reason"):
        s.ledger.quarantine_group(0, "")
    with pytest.raises(UnknownSlot):
        s.ledger.quarantine_group(9, "why")
    s.ledger.quarantine_group(0, "answer is wrong")
    s.ledger.quarantine_group(0, "answer is wrong")
    assert verdicts(bench) == {"0.0": "quarantined", "0.1": "quarantined"}
    assert {g.key.ordinal for g in s.lease(100)} == {1}
    assert s.ledger.run_status()["groups"]["refilled"] == 0


def test_a_planned_group_is_not_quarantined(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.fill()
    s.plan(1)
    with pytest.raises(InvalidRequest, match="step 1"):
        s.ledger.quarantine_group(0, "too late")


def test_dropped_samples_leave_their_length_with_the_verdict(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    s.submit(s.lease(1), generate_s=2.5)
    s.ledger.quarantine_group(0, "why")
    assert bench.rows("SELECT n_tokens, generate_s FROM verdict ORDER BY sibling") == [(3, 2.5), (None, None)]


def fixed(bench: Bench, **rules: object) -> Scene:
    return bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=0, max_lag_versions=0, **rules)


def test_the_fixed_schedule_pauses_when_a_slot_is_out_of_attempts(bench: Bench) -> None:
    s = fixed(bench, attempts_max=2)
    s.feed(2)
    grants = s.lease(4)
    s.submit(grants[1:])
    fail(s, grants[0])
    with pytest.raises(NotReady):
        s.plan(1)
    fail(s, s.lease(1)[0], reason="disk of host a is broken")
    assert s.lease(1) == ()
    assert verdicts(bench) == {}
    with pytest.raises(RunPaused, match=r"slot 0\.0 .*2 attempts.*disk of host a is broken.*quarantine"):
        s.plan(1)
    bench.crash(s)
    with pytest.raises(RunPaused):
        s.plan(1)
    assert "slot 0.0" in s.ledger.run_status()["paused"]


def test_a_late_sample_ends_the_pause(bench: Bench) -> None:
    s = fixed(bench, attempts_max=1)
    s.feed(2)
    grants = s.lease(4)
    s.submit(grants[1:])
    bench.let_time_pass(31.0)
    with pytest.raises(RunPaused):
        s.plan(1)
    assert s.submit(grants[:1]) == [ACCEPTED]
    assert len(s.plan(1).items) == 4


def test_quarantine_ends_the_pause_and_the_step_goes_without_the_group(bench: Bench) -> None:
    s = fixed(bench, attempts_max=1)
    s.feed(4)
    grants = s.lease(4)
    s.submit(grants[1:])
    fail(s, grants[0])
    s.ledger.quarantine_group(0, "poison")
    assert [str(i.key) for i in s.train(1).items] == ["1.0", "1.1"]
    assert s.ledger.run_status()["groups"]["refilled"] == 0
    s.fill()
    assert [i.key.ordinal for i in s.plan(2).items] == [2, 2, 3, 3]


def test_retry_ends_the_pause_with_fresh_attempts(bench: Bench) -> None:
    s = fixed(bench, attempts_max=1)
    s.feed(2)
    grants = s.lease(4)
    s.submit(grants[1:])
    fail(s, grants[0])
    assert s.lease(1) == ()
    s.ledger.retry_group(0, "the disk was replaced")
    again = s.lease(1)
    assert [(g.key, g.token, g.attempt) for g in again] == [(key("0.0"), 2, 1)]
    s.submit(again)
    assert len(s.plan(1).items) == 4


def test_a_fixed_step_of_which_every_group_is_quarantined_is_an_empty_plan(bench: Bench) -> None:
    s = fixed(bench)
    s.feed(2)
    s.ledger.quarantine_group(0, "poison")
    s.ledger.quarantine_group(1, "poison")
    assert s.train(1).items == ()


def test_every_verdict_kind_is_known_to_the_schema(bench: Bench) -> None:
    s = bench.scene()
    bench.expect_clean = False  # an orphan without a fork
    s.feed(5)
    for ordinal, kind in enumerate(VerdictKind):
        rows = ", ".join(f"('run', {ordinal}, {k}, '{kind.value}', 'r', 1)" for k in range(2))
        bench.execute(f"INSERT INTO verdict (run_id, ordinal, sibling, kind, reason, decided_at_us) VALUES {rows}")
    assert set(s.ledger.run_status()["verdicts"]) == {k.value for k in VerdictKind}


def test_the_story_of_a_failed_slot_is_told_in_order(bench: Bench) -> None:
    s = bench.scene(attempts_max=2)
    s.feed(1)
    fail(s, s.lease(1)[0], reason="first")
    fail(s, s.lease(1)[0], reason="second")
    story = s.ledger.explain(key("0.0"))
    assert [e["what"] for e in story["history"]] == [
        "issued", "lease_granted", "failure_reported", "lease_granted", "failure_reported", "group_closed", "verdict",
    ]  # fmt: skip
    assert (story["state"], story["refilled_by"]) == ("failed", 1)
    assert "second" in story["reason"]
    json.dumps(story)
    with pytest.raises(UnknownSlot, match=r"9\.9.*0 to 1"):
        s.ledger.explain(key("9.9"))
