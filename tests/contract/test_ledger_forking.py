"""A lineage forks where a replay gave other weights: plans are copied, orphans kept or dropped, and everything is counted."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
from forking_support import fill, fork, head, history, train
from ledger_support import sample_for, trajectory, version

from ledger_bench import Bench
from rollbook.core.errors import Conflict, Fenced, InvalidRequest, NotFound
from rollbook.core.records import (
    CheckpointState,
    ForkVerdict,
    Lineage,
    PlanOutcome,
    Role,
    ScheduleKind,
    SlotKey,
    SubmitOutcome,
    ToolCall,
)


def test_a_fork_repeats_the_recorded_plans_and_goes_on_from_the_shared_version(bench: Bench) -> None:
    s = history(bench)
    before = {step: s.ledger.read_plan(0, step) for step in (1, 2, 3, 4)}
    line = fork(s)
    assert line == Lineage(1, 0, 1, ForkVerdict.WITHIN, 0.0, 1e-4, 2, 0)
    point = s.ledger.resume_point()
    assert (point.lineage, point.last_planned_step, [c.step for c in point.checkpoints]) == (1, 4, [1, 0])
    assert point.head is not None and (point.head.lineage, point.head.version) == (0, 1)
    for step, plan in before.items():
        copy = s.ledger.read_plan(1, step)
        assert copy.lineage == (0 if step == 1 else 1)
        assert (copy.items, copy.revision, copy.items_digest, copy.chain_digest) == (
            plan.items, plan.revision, plan.items_digest, plan.chain_digest,
        )  # fmt: skip
        assert s.ledger.plan_step(s.learner, 1, step) == copy
    assert [s.ledger.read_plan(1, step).outcome for step in (1, 2, 3, 4)] == [PlanOutcome.TRAINED, None, None, None]
    assert [s.ledger.read_plan(1, step).obeys for step in (1, 2, 3, 4)] == [None, PlanOutcome.TRAINED, PlanOutcome.TRAINED, None]
    assert [d.key for d in s.ledger.payloads(1, 3)] == [i.key for i in before[3].items]
    train(s, 1, 2, 3, 4)
    assert [(v.lineage, v.version) for v in s.ledger.versions(1)] == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]
    assert [m["loss"] for m in s.ledger.step_metrics(1)] == [0.5, 0.25, 0.25, 0.25]
    assert s.ledger.audit() == []


def test_a_fork_asked_for_again_is_the_same_fork_and_another_one_is_refused(bench: Bench) -> None:
    s = history(bench)
    line = fork(s, None)
    assert fork(s, 0.5) == line and len(s.ledger.run_status()["forks"]) == 1
    with pytest.raises(Conflict, match="closed"):
        fork(s, fork_step=0)
    bench.crash(s)
    assert fork(s) == line
    assert bench.rows("SELECT count(*) FROM event WHERE kind = 'lineage_forked'") == [(1,)]


def test_a_fork_needs_the_role_a_shared_version_and_something_to_differ_from(bench: Bench) -> None:
    s = history(bench)
    with pytest.raises(InvalidRequest, match="nothing to differ from"):
        fork(s, fork_step=3)
    with pytest.raises(InvalidRequest, match="not published"):
        fork(s, fork_step=4)
    with pytest.raises(InvalidRequest, match="not published"):
        fork(s, fork_step=-1)
    with pytest.raises(NotFound, match="lineage 7"):
        fork(s, parent=7)
    with pytest.raises(InvalidRequest, match="tolerance"):
        s.ledger.fork_lineage(s.learner, 0, 1, 0.0, float("nan"))
    with pytest.raises(Fenced):
        s.ledger.fork_lineage(dataclasses.replace(s.learner, epoch=9), 0, 1, 0.0, 1e-4)
    with pytest.raises(Fenced):
        s.ledger.fork_lineage(s.feeder, 0, 1, 0.0, 1e-4)
    assert s.ledger.run_status()["forks"] == [] and s.ledger.resume_point().lineage == 0


def test_the_closed_lineage_takes_no_version_and_no_plan(bench: Bench) -> None:
    s = history(bench)
    fork(s)
    with pytest.raises(InvalidRequest, match="closed"):
        s.ledger.publish_version(s.learner, version(4, 0))
    with pytest.raises(InvalidRequest, match="closed"):
        s.ledger.plan_step(s.learner, 0, 5)


@pytest.mark.parametrize(
    "difference, verdict",
    [
        (1e-4, ForkVerdict.WITHIN),
        (1.1e-4, ForkVerdict.DROPPED),
        (None, ForkVerdict.DROPPED),
        (float("inf"), ForkVerdict.DROPPED),
    ],
)
def test_orphans_are_kept_up_to_the_tolerance_and_dropped_beyond_it(bench: Bench, difference, verdict) -> None:
    s = history(bench)
    line = fork(s, difference)
    assert line.verdict is verdict
    kept = verdict is ForkVerdict.WITHIN
    assert (line.orphans_kept, line.orphans_dropped) == ((2, 0) if kept else (0, 2))
    status = s.ledger.run_status()
    assert [f["verdict"] for f in status["forks"]] == [verdict.value]
    assert status["verdicts"] == ({} if kept else {"orphan_version": 2})
    assert status["groups"]["refilled"] == (0 if kept else 1)
    story = s.ledger.explain(SlotKey(8, 0))
    assert story["state"] == ("submitted" if kept else "orphan_version")
    if not kept:
        assert "version 3 of lineage 0 lies behind the fork at step 1" in story["reason"] and story["refilled_by"] == 12
    train(s, 1, 2, 3, 4)
    fill(s)
    plan = s.ledger.plan_step(s.learner, 1, 5)
    assert [i.key.ordinal for i in plan.items] == ([8, 8, 10, 10] if kept else [9, 9, 10, 10]), "9.0 is still leased where kept"
    assert s.ledger.audit() == []


def test_a_sample_on_its_way_is_refused_behind_a_dropping_fork_and_its_slot_is_leased_again(bench: Bench) -> None:
    s = history(bench)
    [late] = s.lease(1)
    assert (late.key, late.lineage, late.version) == (SlotKey(9, 1), 0, 3)
    fork(s, None)
    [result] = s.ledger.submit_samples([sample_for(late, s.incarnation)])
    assert result.outcome is SubmitOutcome.REFUSED and "orphan_version" in result.reason
    assert bench.rows("SELECT count(*) FROM event WHERE kind = 'lease_orphaned'") == [(2,)]
    train(s, 1, 2, 3, 4)
    again = s.lease(100, loaded=head(s))
    assert {SlotKey(9, 0), SlotKey(9, 1)} <= {g.key for g in again}
    assert {(g.token, g.attempt) for g in again if g.key.ordinal == 9} == {(2, 1)}, "the attempt is given back"
    assert {g.lineage for g in again} == {1}
    assert set(s.submit(again)) == {SubmitOutcome.ACCEPTED}


def test_a_sample_on_its_way_is_taken_behind_a_fork_within_tolerance(bench: Bench) -> None:
    s = history(bench)
    [late] = s.lease(1)
    fork(s, 0.0)
    assert s.submit([late]) == [SubmitOutcome.ACCEPTED], "its version is newer than the head of the new lineage"
    assert s.ledger.explain(late.key)["state"] == "submitted"


@pytest.mark.parametrize("dropping", [True, False])
def test_recorded_turns_behind_a_dropping_fork_are_no_beginning_for_another_attempt(bench: Bench, dropping: bool) -> None:
    s = history(bench)
    old, young = s.lease(2)
    for grant, sampled_by in ((old, 1), (young, 3)):
        s.ledger.record_tool_call(tool_call(grant.key, sampled_by), grant.token)
    assert old.key.ordinal != young.key.ordinal and old.version == young.version == 3
    fork(s, 0.5 if dropping else 0.0)
    closed = bench.rows(f"SELECT DISTINCT kind, reason FROM verdict WHERE ordinal = {young.key.ordinal}")
    reason = "orphan_version: version 3 of lineage 0 lies behind the fork at step 1"
    assert closed == ([("orphan_version", reason)] if dropping else [])
    assert bench.rows(f"SELECT count(*) FROM verdict WHERE ordinal = {old.key.ordinal}") == [(0,)]
    train(s, 1, 2, 3, 4)  # from here on the new lineage has a version 3 as well
    s.feed(6)
    assert young.key not in [g.key for g in s.lease(100, loaded=head(s))]
    with pytest.raises(Fenced) if dropping else nullcontext():
        s.ledger.record_tool_call(tool_call(young.key, 3), young.token)
    assert s.ledger.audit() == []


@pytest.mark.parametrize("expired", [False, True])
def test_turns_of_a_lineage_that_is_left_behind_are_not_recorded_any_more(bench: Bench, expired: bool) -> None:
    """Its worker has not heard of the fork, and its lease token is still the newest."""
    s = history(bench)
    grant = s.lease(1)[0]
    if expired:
        bench.let_time_pass(31.0)
    fork(s, 0.5)
    with pytest.raises(Fenced, match="orphan_version: version 3 of lineage 0"):
        s.ledger.record_tool_call(tool_call(grant.key, 3), grant.token)
    assert s.ledger.tool_calls(grant.key) == [] and s.ledger.audit() == []


def tool_call(key: SlotKey, sampled_by: int) -> ToolCall:
    return ToolCall(key, 0, "digest", trajectory(policy_version=sampled_by), "counter", "{}")


def test_a_worker_is_told_the_head_of_the_new_lineage_and_gets_nothing_that_would_be_too_stale(bench: Bench) -> None:
    s = history(bench)
    old = s.head()
    fork(s, None)
    assert s.ledger.heartbeat(s.incarnation, old, [], known_version=old.version).head == head(s)
    reply = s.ledger.lease_slots(s.incarnation, old, 8)
    assert reply.grants == () and reply.wanted is None, "version 1 lags 3 at step 5, the bound is 2"
    train(s, 1, 2)
    reply = s.ledger.lease_slots(s.incarnation, old, 8)
    assert reply.wanted is not None and (reply.wanted.lineage, reply.wanted.version) == (1, 2)
    assert [g.key.ordinal for g in s.lease(8, loaded=reply.wanted)] == [9, 9, 10, 10], "two copied plans wait: one group more"


def test_kept_orphans_have_the_lag_of_the_path_through_the_fork(bench: Bench) -> None:
    s = history(bench)
    s.submit(s.lease(1))
    line = fork(s, 0.5, fork_step=2, keep=True)
    assert (line.verdict, line.orphans_kept) == (ForkVerdict.KEPT, 3)
    train(s, 1, 3, 4)
    fill(s)
    plan = s.ledger.plan_step(s.learner, 1, 5)
    assert [i.key.ordinal for i in plan.items] == [10, 10, 11, 11], "version 3 lags (4 - 2) + (3 - 2) = 3, the bound is 2"
    story = s.ledger.explain(SlotKey(8, 0))
    assert story["state"] == "dropped_stale" and "lags 3 at step 5" in story["reason"]


def test_a_kept_orphan_within_the_bound_of_the_path_is_trained(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=3)
    s.feed(8)
    for step in (1, 2):
        s.fill(4)
        s.train(step)
    s.fill(4)
    fork(s, None, keep=True)
    train(s, 1, 2)
    plan = s.ledger.plan_step(s.learner, 1, 3)
    assert [i.key.ordinal for i in plan.items] == [4, 4, 5, 5], "(2 - 1) + (2 - 1) = 2 is within the bound"
    assert s.ledger.audit() == []
    bench.expect_clean = False
    bench.execute("UPDATE config_revision SET max_lag_versions = 1")
    assert [(v.check, v.ids) for v in s.ledger.audit()] == [("head_lag", ("4.0", "4.1", "5.0", "5.1"))]


def test_a_second_fork_judges_what_the_first_one_kept(bench: Bench) -> None:
    s = history(bench)
    fork(s, 0.0)
    train(s, 1, 2, 3)
    line = fork(s, None, parent=1, fork_step=2)
    assert (line.number, line.parent, line.verdict, line.orphans_dropped) == (2, 1, ForkVerdict.DROPPED, 2)
    assert [s.ledger.read_plan(2, step).lineage for step in (1, 2, 3, 4)] == [0, 1, 2, 2]
    assert s.ledger.read_plan(2, 3).obeys is PlanOutcome.TRAINED
    train(s, 2, 3, 4)
    assert [(v.lineage, v.version) for v in s.ledger.versions(2)] == [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]
    fill(s)
    train(s, 2, 5)
    assert s.ledger.audit() == []
    states = s.ledger.run_status()["slots"]
    assert states["issued"] == sum(n for name, n in states.items() if name != "issued")


def test_a_fork_below_an_earlier_fork_takes_the_ancestry_back(bench: Bench) -> None:
    s = history(bench)
    fork(s, 0.0, fork_step=2)
    train(s, 1, 3)
    line = fork(s, 0.0, parent=1, fork_step=1)
    assert line.number == 2
    assert [s.ledger.read_plan(2, step).lineage for step in (1, 2, 3, 4)] == [0, 2, 2, 2]
    train(s, 2, 2, 3, 4)
    assert s.ledger.audit() == []


def test_a_skip_that_was_recorded_before_the_fork_is_to_be_obeyed_after_it(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=2)
    s.feed(6)
    s.fill(4)
    s.train(1)
    s.fill(4)
    s.plan(2)
    s.ledger.finish_plan(s.learner, 0, 2, PlanOutcome.SKIPPED, "loss nan", "{}")
    fork(s)
    plan = s.ledger.read_plan(1, 2)
    assert (plan.outcome, plan.obeys, plan.reason) == (None, PlanOutcome.SKIPPED, "loss nan")
    s.ledger.finish_plan(s.learner, 1, 2, plan.obeys, plan.reason, "{}")
    plan = s.ledger.read_plan(1, 2)
    assert (plan.outcome, plan.obeys, plan.reason) == (PlanOutcome.SKIPPED, None, "loss nan")


def test_the_fixed_schedule_samples_under_the_ancestry_and_drops_orphans_without_a_refill(bench: Bench) -> None:
    s = bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=1, max_lag_versions=1, steps=6)
    s.feed(12)
    s.fill()
    s.train(1)
    s.fill()
    s.train(2)
    [first, *_] = s.lease(3)
    s.submit([first])
    assert (first.key, first.version) == (SlotKey(6, 0), 2), "step 4 is sampled under version 2"
    s.plan(3)
    with pytest.raises(InvalidRequest, match="fixed schedule"):
        fork(s, None, keep=True)
    line = fork(s, None)
    assert line.orphans_dropped == 1
    status = s.ledger.run_status()
    assert status["verdicts"] == {"orphan_version": 2} and status["groups"]["refilled"] == 0
    assert s.ledger.lease_slots(s.incarnation, s.head(), 8).grants == ()
    train(s, 1, 2)
    grants = s.lease(100, loaded=head(s))
    assert [(str(g.key), g.lineage, g.version) for g in grants] == [("7.0", 1, 2), ("7.1", 1, 2)]
    s.submit(grants)
    train(s, 1, 3)
    plan = s.ledger.plan_step(s.learner, 1, 4)
    assert [i.key.ordinal for i in plan.items] == [7, 7]
    assert s.ledger.audit() == []


def test_checkpoints_follow_the_ancestry(bench: Bench) -> None:
    s = history(bench)
    s.checkpoint(3)
    fork(s, 0.0, fork_step=1)
    assert [(c.lineage, c.step) for c in s.ledger.resume_point().checkpoints] == [(0, 1), (0, 0)]
    train(s, 1, 2)
    chain = s.ledger.read_plan(1, 2).chain_digest
    made = dataclasses.replace(s.ledger.resume_point().checkpoints[0], lineage=1, step=2, dir_name="1.2.1", chain_digest=chain)
    s.ledger.commit_checkpoint(s.learner, made)
    assert [(c.lineage, c.step) for c in s.ledger.resume_point().checkpoints] == [(1, 2), (0, 1), (0, 0)]
    s.ledger.mark_checkpoint(s.learner, 0, 0, CheckpointState.DELETING.value)
    assert s.ledger.run_status()["steps"] == {
        "configured": 0, "planned": 4, "trained": 2, "skipped": 0, "checkpoint": 2, "published": 2,
    }  # fmt: skip


def test_the_story_of_a_sample_tells_both_lineages(bench: Bench) -> None:
    s = history(bench)
    key = s.ledger.read_plan(0, 3).items[0].key
    fork(s)
    train(s, 1, 2, 3)
    story = s.ledger.explain(key)
    assert (story["state"], story["step"]) == ("planned", 3)
    told = [(e["what"], e.get("lineage")) for e in story["history"]]
    for entry in (("planned", 0), ("trained", 0), ("lineage_forked", 1), ("planned", 1), ("trained", 1)):
        assert entry in told


def test_a_fork_of_a_successor_server_is_the_one_it_finds(bench: Bench) -> None:
    s = history(bench)
    fork(s, None)
    bench.crash(s)
    assert s.ledger.resume_point().lineage == 1
    assert s.ledger.run_status()["forks"][0]["orphans_dropped"] == 2
    s.learner = s.ledger.acquire_role(Role.LEARNER, "learner-1", 60.0)
    train(s, 1, 2, 3, 4)
    assert s.ledger.audit() == []
