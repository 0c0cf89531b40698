"""Corners of failures and recorded calls in which a run must not stand still."""

from __future__ import annotations

import pytest
from failure_support import breaker, fail
from ledger_support import Scene, trajectory

from ledger_bench import Bench
from rollbook.core.errors import NotReady
from rollbook.core.records import ScheduleKind, SubmitOutcome, ToolCall

SMALL = {"infra_window": 4, "infra_failures_max": 0.75, "attempts_max": 3, "groups_per_step": 1, "breaker_pause_s": 100.0}


def open_breaker_and_fill_group(s: Scene, bench: Bench) -> None:
    """Three failures and one sample open the breaker; the first group is whole a little later."""
    first, second = s.lease(2)
    fail(s, (first, second))
    first, second = s.lease(2)
    s.submit([first])
    fail(s, (second,))
    assert breaker(s) == "open"
    bench.let_time_pass(1.0)
    s.submit(s.lease(2))
    bench.let_time_pass(1.0)


def test_an_open_breaker_does_not_wait_for_probes_that_no_slot_is_left_for(bench: Bench) -> None:
    s = bench.scene(**SMALL | {"max_lag_versions": 0, "steps": 1})
    s.feed(1)
    open_breaker_and_fill_group(s, bench)
    assert s.lease(2) == (), "the group is whole, and no other may be opened before it is trained"
    assert len(s.plan(1).items) == 2 and breaker(s) == "closed" and s.ledger.audit() == []


def test_an_open_breaker_of_the_fixed_schedule_does_not_wait_for_slots_of_the_next_step(bench: Bench) -> None:
    s = bench.scene(**SMALL | {"schedule": ScheduleKind.FIXED, "fixed_lag_versions": 0})
    s.feed(4)
    open_breaker_and_fill_group(s, bench)
    assert s.lease(2) == ()
    assert len(s.plan(1).items) == 2 and breaker(s) == "closed" and s.ledger.audit() == []


def test_an_open_breaker_waits_for_a_probe_that_is_held(bench: Bench) -> None:
    s = bench.scene(**SMALL | {"max_lag_versions": 0, "steps": 1})
    s.feed(1)
    fail(s, s.lease(2))
    fail(s, s.lease(2))
    bench.let_time_pass(1.0)
    with pytest.raises(NotReady, match="circuit breaker is open"):
        s.plan(1)
    assert len(s.lease(2)) == 1 and s.lease(2) == () and breaker(s) == "open"
    bench.let_time_pass(31.0)
    assert len(s.lease(2)) == 1, "the probe of a worker that died is given to another one"


def test_a_recorded_prefix_that_has_become_too_old_does_not_keep_its_group_open_for_ever(bench: Bench) -> None:
    s = bench.scene(groups_per_step=1, max_lag_versions=1, attempts_max=9)
    s.feed(8)
    grants = s.lease(2)
    for g in grants:
        s.ledger.record_tool_call(ToolCall(g.key, 0, "d", trajectory(3, 0), "add", "{}"), g.token)
    for step in (1, 2):
        s.submit([g for g in s.lease(4) if g.key.ordinal > 0])
        s.train(step)
        bench.let_time_pass(31.0)
    for _ in range(2):
        again = [g for g in s.lease(4) if g.key.ordinal == 0]
        assert s.submit(again, trajectory=trajectory(5, 0)) == [SubmitOutcome.REFUSED] * len(again)
    kinds = {k for (k,) in bench.rows("SELECT kind FROM verdict WHERE ordinal = 0")}
    assert kinds == {"dropped_stale"}
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills = 0") == [(1,)] and s.ledger.audit() == []
