"""What a step trains on: order, staleness, stragglers, replay, digests, both schedules, on both databases."""

from __future__ import annotations

import threading

import pytest
from ledger_support import Scene, key, version

from ledger_bench import Bench
from rollbook.core.errors import DigestMismatch, InvalidRequest, NotFound, NotReady
from rollbook.core.idempotency import chain_digest, genesis_digest, items_digest
from rollbook.core.records import Plan, PlanOutcome, ScheduleKind, SubmitOutcome


def planned(plan: Plan) -> list[int]:
    return sorted({i.key.ordinal for i in plan.items})


def submit_group(s: Scene, grants, *ordinals: int) -> None:
    for ordinal in ordinals:
        chosen = [g for g in grants if g.key.ordinal == ordinal]
        assert s.submit(chosen) == [SubmitOutcome.ACCEPTED] * len(chosen)


def test_a_plan_waits_for_whole_groups(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    grants = s.lease(4)
    s.submit(grants[:3])
    with pytest.raises(NotReady, match="1 of 2 groups"):
        s.plan(1)
    s.submit(grants[3:])
    assert planned(s.plan(1)) == [0, 1]


def test_plans_take_the_oldest_complete_groups_and_never_the_order_of_completion(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=2)
    s.feed(6)
    grants = s.lease(100)
    submit_group(s, grants, 5, 3, 4, 2)
    plan = s.plan(1)
    assert [str(i.key) for i in plan.items] == ["2.0", "2.1", "3.0", "3.1"]
    submit_group(s, grants, 1, 0)
    s.finish(1)
    assert planned(s.plan(2)) == [0, 1]


def test_planning_a_step_twice_returns_the_stored_plan(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill()
    first = s.plan(1)
    assert s.plan(1) == first
    bench.crash(s)
    assert s.plan(1) == first == s.ledger.read_plan(0, 1)
    assert len(bench.rows("SELECT * FROM plan")) == 1


def test_a_plans_digests_are_those_of_its_content(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill()
    first, second = s.train(1), s.plan(2)
    genesis = genesis_digest("run", s.record.rules.config_seed)
    assert first.items_digest == items_digest(first.items)
    assert first.chain_digest == chain_digest(genesis, 1, first.items_digest)
    assert second.chain_digest == chain_digest(first.chain_digest, 2, second.items_digest)


def test_steps_are_planned_one_after_another(bench: Bench) -> None:
    s = bench.scene(steps=2)
    s.feed(4)
    s.fill()
    for step in (0, 2, 3):
        with pytest.raises(InvalidRequest, match="last planned step is 0"):
            s.plan(step)
    s.train(1)
    s.train(2)
    with pytest.raises(InvalidRequest, match=r"run\.steps"):
        s.plan(3)
    with pytest.raises(NotFound):
        s.ledger.read_plan(0, 3)
    with pytest.raises(NotFound, match="lineage 5"):
        s.ledger.plan_step(s.learner, 5, 1)


def stale_scene(bench: Bench, bound: int, **rules: object) -> tuple[Scene, tuple]:
    """Groups 0.. sampled under version 0; step ``bound + 1`` has been trained from other groups, group 1 is incomplete."""
    s = bench.scene(max_lag_versions=bound, lease_ttl_s=10_000.0, **rules)
    s.feed(20)
    grants = s.lease(100)
    return s, grants


@pytest.mark.parametrize("step, stale", [(2, False), (3, True)])
def test_head_lag_is_checked_in_the_planning_transaction_on_both_sides_of_the_bound(bench: Bench, step: int, stale: bool) -> None:
    s, grants = stale_scene(bench, 1)
    assert {g.key.ordinal for g in grants} == {0, 1, 2, 3}
    submit_group(s, grants, 1, 2)
    s.submit([g for g in grants if g.key == key("0.0")])
    s.train(1)
    if step == 3:
        submit_group(s, grants, 3)
        s.fill()
        s.train(2)
        s.fill()
    else:
        s.fill()
        submit_group(s, grants, 3)
        late = s.submit([g for g in grants if g.key == key("0.1")])
        assert late == [SubmitOutcome.ACCEPTED]
    plan = s.plan(step)
    if stale:
        assert bench.rows("SELECT DISTINCT ordinal, kind FROM verdict") == [(0, "dropped_stale")]
        assert bench.rows("SELECT refills FROM prompt_group WHERE refills IS NOT NULL") == [(0,)]
        assert 0 not in planned(plan)
        assert s.submit([g for g in grants if g.key == key("0.1")]) == [SubmitOutcome.REFUSED]
    else:
        assert planned(plan) == [0, 3]
        assert bench.rows("SELECT * FROM verdict") == []


def test_stale_groups_are_closed_even_when_no_plan_comes_of_it(bench: Bench) -> None:
    s, grants = stale_scene(bench, 0, groups_per_step=1)
    assert {g.key.ordinal for g in grants} == {0}
    s.submit(grants)
    s.train(1)
    more = s.lease(100)
    s.submit(more[:1])
    # Version 2 is published from step 2, which another complete group makes possible.
    bench.execute("UPDATE sample SET version_min = 0, version_max = 0 WHERE ordinal = 1")
    s.submit(more[1:])
    with pytest.raises(NotReady, match="0 of 1"):
        s.plan(2)
    assert bench.rows("SELECT DISTINCT ordinal, kind FROM verdict") == [(1, "dropped_stale")]
    assert s.lease(100)
    bench.execute("UPDATE sample SET version_min = 1, version_max = 1 WHERE ordinal = 1")


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_straggler_is_waited_for_within_its_bound_or_not_at_all(bench: Bench, policy: str) -> None:
    s, grants = stale_scene(bench, 1, straggler=policy, straggler_wait_s=60.0)
    submit_group(s, grants, 1, 2)
    s.train(1)
    s.fill(4)
    assert s.head() == version(1)
    # Group 0 is leased under version 0: at step 3 it would be two versions old.
    if policy == "wait":
        with pytest.raises(NotReady, match="group 0 would be too stale at step 3"):
            s.plan(2)
        bench.let_time_pass(59.0)
        with pytest.raises(NotReady, match="group 0"):
            s.plan(2)
        bench.let_time_pass(2.0)
    assert 0 not in planned(s.plan(2))


def test_a_straggler_that_arrives_in_time_is_planned_first(bench: Bench) -> None:
    s, grants = stale_scene(bench, 1, straggler="wait")
    submit_group(s, grants, 1, 2)
    s.train(1)
    s.fill(4)
    with pytest.raises(NotReady):
        s.plan(2)
    submit_group(s, grants, 0, 3)
    assert planned(s.plan(2)) == [0, 3]


def test_a_young_incomplete_group_holds_nothing_up(bench: Bench) -> None:
    s, grants = stale_scene(bench, 2, straggler="wait")
    submit_group(s, grants, 1, 2)
    assert planned(s.plan(1)) == [1, 2]


def test_a_waiting_learner_gets_its_plan_when_the_last_sample_arrives(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    grants = s.lease(4)
    s.submit(grants[:3])
    plans: list[Plan] = []
    thread = threading.Thread(target=lambda: plans.append(s.ledger.plan_step(s.learner, 0, 1, wait_s=30.0)))
    thread.start()
    s.submit(grants[3:])
    thread.join(timeout=60)
    assert [planned(p) for p in plans] == [[0, 1]]


def test_payloads_come_in_plan_order_and_damage_is_named(damaged: Bench) -> None:
    s = damaged.scene()
    s.feed(2)
    s.fill()
    plan = s.train(1)
    samples = list(s.ledger.payloads(0, 1))
    assert [d.key for d in samples] == [i.key for i in plan.items]
    assert [d.payload_digest for d in samples] == [i.payload_digest for i in plan.items]
    damaged.execute("UPDATE payload SET logprobs = token_ids WHERE ordinal = 1 AND sibling = 0")
    with pytest.raises(DigestMismatch, match=r"slot 1\.0"):
        list(s.ledger.payloads(0, 1))
    with pytest.raises(NotFound):
        list(s.ledger.payloads(0, 2))


def fixed(bench: Bench, **rules: object) -> Scene:
    return bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=1, max_lag_versions=1, **rules)


def test_a_fixed_step_is_exactly_its_ordinals(bench: Bench) -> None:
    s = fixed(bench)
    s.feed(3)
    grants = s.lease(100)
    submit_group(s, grants, 2)
    with pytest.raises(NotReady, match="group 0"):
        s.plan(1)
    submit_group(s, grants, 1, 0)
    assert planned(s.train(1)) == [0, 1]
    with pytest.raises(NotReady, match="group 3 of the step is not issued"):
        s.plan(2)


def test_an_outcome_is_written_once_and_stands(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill()
    s.plan(1)
    with pytest.raises(InvalidRequest, match="reason"):
        s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.SKIPPED, "", "{}")
    with pytest.raises(InvalidRequest, match="JSON"):
        s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.TRAINED, "", "[1]")
    s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.SKIPPED, "gradient is not finite", '{"loss": 1.5}')
    s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.TRAINED, "", '{"loss": 2.5}')
    plan = s.ledger.read_plan(0, 1)
    assert (plan.outcome, plan.reason) == (PlanOutcome.SKIPPED, "gradient is not finite")
    (metrics,) = s.ledger.step_metrics(0)
    assert (metrics["step"], metrics["loss"], metrics["outcome"]) == (1, 1.5, "skipped")
    assert s.ledger.step_metrics(0, 2) == []
    with pytest.raises(NotFound):
        s.ledger.finish_plan(s.learner, 0, 2, PlanOutcome.TRAINED, "", "{}")
    s.plan(2)
    s.ledger.finish_plan(s.learner, 0, 2, PlanOutcome.TRAINED, "", "{}")


def test_steps_end_in_order(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill()
    s.plan(1)
    s.plan(2)
    with pytest.raises(InvalidRequest, match="step 1 has no outcome"):
        s.ledger.finish_plan(s.learner, 0, 2, PlanOutcome.TRAINED, "", "{}")
