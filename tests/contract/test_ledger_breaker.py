"""The circuit breaker: what opens and closes it, its probes, and what an outage costs, on both databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from failure_support import breaker, fail, verdicts
from ledger_support import Scene

from ledger_bench import Bench
from rollbook.core.errors import NotReady, RunPaused
from rollbook.core.records import (
    Blame,
    LeaseGrant,
    RewardStatus,
    Role,
    SandboxStatus,
    ScheduleKind,
    SubmitOutcome,
)

WINDOW = {"infra_window": 8, "infra_failures_max": 0.5, "attempts_max": 9, "max_lag_versions": 20, "breaker_pause_s": 100.0}

OUTAGE = {"infra_window": 4, "infra_failures_max": 1.0, "attempts_max": 3, "max_lag_versions": 20, "breaker_pause_s": 1e6}


def probes_after_growing_pauses(s: Scene, bench: Bench) -> Iterator[tuple[LeaseGrant, ...]]:
    """The first probes of an open breaker, one after each pause and none before, while each of them fails."""
    for pause_s in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        if pause_s >= 4:
            bench.let_time_pass(pause_s - 3)
            assert s.lease(9) == ()
        bench.let_time_pass(pause_s)
        probe = s.lease(9)
        assert len(probe) == 1
        yield probe


def test_too_many_infrastructure_failures_stop_planning_and_all_but_probes(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    good = s.lease(5)
    s.submit(good)
    bench.let_time_pass(1.0)
    assert fail(s, s.lease(3)) == [SubmitOutcome.ACCEPTED] * 3 and breaker(s) == "closed", "3 of 8"
    bench.let_time_pass(1.0)
    assert fail(s, s.lease(1)) == [SubmitOutcome.ACCEPTED] and breaker(s) == "open", "4 of the newest 8"
    with pytest.raises(NotReady, match="circuit breaker is open .* 4 of the newest 8 .* no sandbox"):
        s.plan(1)
    bench.let_time_pass(1.0)
    probe = s.lease(10)
    assert len(probe) == 1 and s.lease(10) == (), "one at a time"
    bench.crash(s)
    assert breaker(s) == "open", "its state is in the rows"
    fail(s, probe)
    for _ in range(3):
        bench.let_time_pass(1.0)
        assert breaker(s) == "open"
        probe = s.lease(10)
        assert len(probe) == 1
        s.submit(probe)
    assert breaker(s) == "closed"
    assert len(s.plan(1).items) == 4 and len(s.lease(3)) == 3
    kinds = [k for (k,) in bench.rows("SELECT kind FROM event WHERE kind LIKE 'breaker%' ORDER BY seq")]
    assert kinds == ["breaker_opened", "breaker_closed"] and s.ledger.audit() == []


def test_a_stored_plan_is_handed_out_while_the_breaker_is_open(bench: Bench) -> None:
    s = bench.scene(**WINDOW | {"infra_window": 4, "infra_failures_max": 0.75})
    s.feed(20)
    s.fill(4)
    plan = s.plan(1)
    bench.let_time_pass(1.0)
    fail(s, s.lease(4))
    assert breaker(s) == "open" and s.plan(1) == plan and s.ledger.read_plan(0, 1) == plan


def test_a_breaker_that_stays_open_pauses_the_run_for_the_operator(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    fail(s, s.lease(8))
    assert breaker(s) == "open"
    bench.let_time_pass(99.0)
    with pytest.raises(NotReady):
        s.plan(1)
    bench.let_time_pass(2.0)
    with pytest.raises(RunPaused, match="circuit breaker .* repair what failed"):
        s.plan(1)
    s.ledger.release_role(s.learner)
    s.learner = s.ledger.acquire_role(Role.LEARNER, "started again", 30.0)
    with pytest.raises(NotReady):
        s.plan(1)
    for _ in range(3):
        s.submit(s.lease(2))
    assert breaker(s) == "closed"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": RewardStatus.NO_VERDICT, "reason": "its worker process died"},
        {"blame": Blame.UNCLEAR, "status": RewardStatus.TIMEOUT},
        {"blame": Blame.MODEL, "status": RewardStatus.NO_VERDICT},
        {"blame": Blame.UNCLEAR, "status": RewardStatus.INFRA_ERROR, "sandbox_status": SandboxStatus.TIMEOUT_WALL},
    ],
)
def test_what_is_not_infrastructures_own_failure_does_not_open_it(bench: Bench, changes: dict) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    fail(s, s.lease(16), **changes)
    assert breaker(s) == "closed"


def test_it_opens_when_no_samples_to_come_could_outweigh_what_failed(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    fail(s, s.lease(3))
    assert breaker(s) == "closed"
    fail(s, s.lease(1))
    assert breaker(s) == "open", "4 of 8, whatever the other 4 will be"


def test_where_few_slots_are_in_flight_it_opens_before_their_attempts_are_spent(bench: Bench) -> None:
    s = bench.scene(infra_window=64, infra_failures_max=0.5, attempts_max=3, groups_per_step=1, schedule=ScheduleKind.FIXED)
    s.feed(9)
    for _ in range(12):
        fail(s, s.lease(1))
    assert breaker(s) == "open"
    assert {attempt for (attempt,) in bench.rows("SELECT attempt FROM lease")} == {0}, "what the outage has cost is given back"
    for _ in range(3):
        bench.let_time_pass(10.0)
        s.submit(s.lease(1))
    s.submit(s.lease(9))
    assert len(s.plan(1).items) == 2 and s.ledger.audit() == []


def test_an_environment_that_raises_opens_it(bench: Bench) -> None:
    """A reward's own service may be down; without, every prompt in flight would be quarantined."""
    s = bench.scene(**WINDOW)
    s.feed(20)
    fail(s, s.lease(4), status=RewardStatus.VERIFIER_ERROR, blame=Blame.UNCLEAR)
    assert breaker(s) == "open"


@pytest.mark.parametrize("share", [0.0, 1e-308, 0.07])
def test_a_share_that_is_tiny_opens_it_with_the_first_failure_or_soon(bench: Bench, share: float) -> None:
    s = bench.scene(infra_failures_max=share, groups_per_step=1, max_lag_versions=1)
    s.feed(9)
    for _ in range(5):
        fail(s, s.lease(1))
    assert breaker(s) == "open" and s.ledger.audit() == []


def test_one_task_that_always_fails_is_given_up_though_it_opens_the_breaker(bench: Bench) -> None:
    """Its slots alone are enough to open it; while it is open nothing of theirs counts, so what was given back must end."""
    s = bench.scene(group_size=8, groups_per_step=2, max_lag_versions=1, infra_window=16, attempts_max=3, survivors_min=4)
    s.feed(6, 8)
    cycles = 0
    while "0.0" not in verdicts(bench) and cycles < 300:
        cycles += 1
        bench.let_time_pass(10.0)
        grants = s.lease(8)
        fail(s, tuple(g for g in grants if g.key.ordinal == 0), status=RewardStatus.VERIFIER_ERROR, blame=Blame.UNCLEAR)
        s.submit([g for g in grants if g.key.ordinal > 0])
    assert verdicts(bench)["0.0"] in ("quarantined", "cancelled", "failed") and s.ledger.audit() == []


def test_an_outage_seen_late_is_not_held_against_a_prompt(bench: Bench) -> None:
    s = bench.scene(**OUTAGE | {"infra_window": 2, "groups_per_step": 1, "max_lag_versions": 0})
    s.feed(1)
    fail(s, s.lease(2))
    while bench.rows("SELECT count(*) FROM prompt_group")[0][0] < 6:
        bench.let_time_pass(10.0)
        fail(s, s.lease(9))
    newest = bench.rows("SELECT max(ordinal) FROM prompt_group")[0][0]
    assert breaker(s) == "open" and newest == 5
    while len([k for k in verdicts(bench) if k.startswith("5.")]) < 2:
        grants = s.lease(9)
        fail(s, grants, blame=Blame.MODEL, status=RewardStatus.NO_VERDICT)
        bench.let_time_pass(10.0)
    assert bench.rows("SELECT refills FROM prompt_group WHERE ordinal = 6") == [(5,)], "its first failure that counts"


def test_a_slot_that_failed_for_good_is_not_given_back(bench: Bench) -> None:
    s = bench.scene(**OUTAGE | {"infra_window": 2}, schedule=ScheduleKind.FIXED)
    s.feed(2)
    fail(s, s.lease(1))
    fail(s, s.lease(1), final=True)
    assert breaker(s) == "open"
    assert bench.rows("SELECT attempt FROM lease WHERE ordinal = 0 AND sibling = 0") == [(3,)]
    with pytest.raises(NotReady, match="rollbook quarantine"):
        s.plan(1)


def test_what_was_leased_before_it_opened_does_not_close_it(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    old = s.lease(6)
    fail(s, s.lease(4))
    bench.let_time_pass(1.0)
    s.submit(old)
    assert breaker(s) == "open", "they were judged while all was well"
    for _ in range(3):
        assert breaker(s) == "open"
        s.submit(s.lease(9))
    assert breaker(s) == "closed" and s.ledger.audit() == []


def test_a_probe_whose_failure_is_unclear_costs_no_attempt_and_is_paused_for(bench: Bench) -> None:
    s = bench.scene(**OUTAGE, schedule=ScheduleKind.FIXED)
    s.feed(2)
    fail(s, s.lease(4))
    for probe in probes_after_growing_pauses(s, bench):
        fail(s, probe, status=RewardStatus.TIMEOUT, blame=Blame.UNCLEAR)
    assert {attempt for (attempt,) in bench.rows("SELECT attempt FROM lease")} == {0}


def test_samples_that_nobody_could_judge_do_not_close_it(bench: Bench) -> None:
    s = bench.scene(**OUTAGE | {"group_size": 4, "survivors_min": 1})
    s.feed(4, 4)
    fail(s, s.lease(4))
    unclear = {"reward": None, "reward_status": RewardStatus.TIMEOUT, "sandbox_status": SandboxStatus.TIMEOUT_WALL}
    for _ in range(3):
        bench.let_time_pass(20.0)
        s.submit(s.lease(9), **unclear)
    assert breaker(s) == "open"


def test_a_probe_whose_slot_an_older_attempt_fills_is_over(bench: Bench) -> None:
    s = bench.scene(**OUTAGE | {"infra_window": 3}, schedule=ScheduleKind.FIXED)
    s.feed(2)
    late = s.lease(1)[0]
    bench.let_time_pass(31.0)
    fail(s, s.lease(3))
    assert breaker(s) == "open"
    for _ in range(9):
        bench.let_time_pass(10.0)
        probe = s.lease(9)
        if probe[0].key == late.key:
            break
        fail(s, probe)
    assert probe[0].key == late.key and s.submit([late]) == [SubmitOutcome.ACCEPTED]
    bench.let_time_pass(10.0)
    assert len(s.lease(9)) == 1 and s.ledger.audit() == []


def test_groups_that_an_outage_closes_are_refilled_however_often(bench: Bench) -> None:
    s = bench.scene(**OUTAGE | {"infra_window": 2, "groups_per_step": 1, "max_lag_versions": 0})
    s.feed(1)
    fail(s, s.lease(2))
    for _ in range(60):
        bench.let_time_pass(10.0)
        fail(s, s.lease(9))
    chain = bench.rows("SELECT count(*) FROM prompt_group WHERE refills IS NOT NULL")[0][0]
    assert chain > s.record.rules.attempts_max and len(s.lease(9)) + len(s.lease(9)) <= 1
    assert s.ledger.audit() == []


def test_it_never_opens_where_it_is_switched_off(bench: Bench) -> None:
    s = bench.scene(**WINDOW | {"infra_failures_max": 1.1})
    s.feed(20)
    fail(s, s.lease(16))
    assert breaker(s) == "closed"


def test_probes_that_fail_are_repeated_ever_more_rarely(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(20)
    fail(s, s.lease(8))
    for probe in probes_after_growing_pauses(s, bench):
        fail(s, probe)
    for _ in range(8):
        bench.let_time_pass(10.0)
        fail(s, s.lease(9))
    bench.let_time_pass(7.0)
    assert s.lease(9) == ()
    bench.let_time_pass(3.0)
    assert len(s.lease(9)) == 1, "but not more rarely than every ten seconds"


@pytest.mark.parametrize("schedule", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
def test_an_outage_costs_no_attempt_and_no_prompt(bench: Bench, schedule: ScheduleKind) -> None:
    """In the fixed schedule, where no slot can be given up, however long it lasts."""
    s = bench.scene(**OUTAGE, schedule=schedule)
    s.feed(2)
    fail(s, s.lease(4))
    assert breaker(s) == "open"
    probed = []
    for _ in range(12 if schedule is ScheduleKind.FIXED else 4):
        bench.let_time_pass(30.0)
        probed += s.lease(9)
        fail(s, probed[-1:])
    assert [g.key for g in probed[:4]] == sorted(g.key for g in probed[:4]) and len({g.key for g in probed[:4]}) == 4
    assert verdicts(bench) == {} and {g.attempt for g in probed} == {1}, "those before it opened are given back"
    for _ in range(3):
        bench.let_time_pass(30.0)
        s.submit(s.lease(9))
    assert breaker(s) == "closed"
    s.submit(s.lease(9))
    assert [i.key.ordinal for i in s.plan(1).items] == [0, 0, 1, 1] and s.ledger.audit() == []


@pytest.mark.parametrize("schedule", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
def test_slots_that_were_never_tried_are_probed_before_those_that_always_fail(bench: Bench, schedule: ScheduleKind) -> None:
    s = bench.scene(**OUTAGE | {"infra_window": 2, "groups_per_step": 3}, schedule=schedule)
    s.feed(3)
    poison = s.lease(2)
    fail(s, poison)
    probed = []
    while breaker(s) == "open":
        bench.let_time_pass(30.0)
        probed += s.lease(9)
        (s.submit if probed[-1].key.ordinal else lambda grants: fail(s, grants))(probed[-1:])
    assert [str(g.key) for g in probed] == ["0.0", "0.1", "1.0", "1.1", "2.0"] and verdicts(bench) == {}


def test_tasks_that_always_fail_are_given_up_where_no_other_group_may_be_opened(bench: Bench) -> None:
    """Else the breaker would wait for samples that cannot come."""
    s = bench.scene(**OUTAGE | {"infra_window": 2, "groups_per_step": 1, "max_lag_versions": 0})
    s.feed(4)
    fail(s, s.lease(2))
    for _ in range(5):
        bench.let_time_pass(30.0)
        probe = s.lease(9)
        assert probe[0].key.ordinal == 0
        fail(s, probe)
    assert verdicts(bench)["0.1"] == "failed" and breaker(s) == "open"
    for _ in range(2):
        bench.let_time_pass(30.0)
        s.submit(s.lease(9))
    assert [i.key.ordinal for i in s.plan(1).items] == [1, 1] and breaker(s) == "closed"
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills = 0") == [(1,)] and s.ledger.audit() == []


def test_what_is_the_models_own_failure_spends_its_attempt_in_an_outage_too(bench: Bench) -> None:
    s = bench.scene(**OUTAGE)
    s.feed(2)
    fail(s, s.lease(4))
    assert breaker(s) == "open"
    for _ in range(2):
        fail(s, s.lease(9), blame=Blame.MODEL, status=RewardStatus.NO_VERDICT)
    assert bench.rows("SELECT attempt FROM lease ORDER BY ordinal, sibling") == [(1,), (1,), (0,), (0,)]


def test_samples_without_a_reward_that_infrastructure_is_to_blame_for_count_as_failures(bench: Bench) -> None:
    s = bench.scene(**WINDOW | {"group_size": 8, "survivors_min": 1})
    s.feed(20, 8)
    none = {"reward": None, "reward_status": RewardStatus.INFRA_ERROR, "blame": Blame.INFRA}
    s.submit(s.lease(3), **none)
    assert breaker(s) == "closed", "3 of 8"
    bench.let_time_pass(1.0)
    s.submit(s.lease(1), **none)
    assert breaker(s) == "open"
    bench.let_time_pass(1.0)
    for _ in range(3):
        bench.let_time_pass(5.0)
        s.submit(s.lease(1), **none)
    assert breaker(s) == "open", "they close nothing"


def test_a_failed_probe_between_samples_keeps_it_open_and_the_window_begins_anew_with_the_close(bench: Bench) -> None:
    s = bench.scene(**WINDOW)
    s.feed(30)
    fail(s, s.lease(8))
    for good in (True, True, False, True, True):
        bench.let_time_pass(5.0)
        (s.submit if good else lambda grants: fail(s, grants))(s.lease(9))
        assert breaker(s) == "open"
    bench.let_time_pass(5.0)
    s.submit(s.lease(9))
    shown = s.ledger.run_status()["breaker"]
    assert (shown["state"], shown["ratio"], shown["window"]) == ("closed", 0.0, 0)
    bench.let_time_pass(1.0)
    fail(s, s.lease(3))
    shown = s.ledger.run_status()["breaker"]
    assert (shown["state"], shown["ratio"], shown["window"]) == ("closed", 1.0, 3), "3 outcomes since it closed"
    bench.let_time_pass(1.0)
    fail(s, s.lease(1))
    assert breaker(s) == "open"


def test_its_state_is_read_from_an_index_of_few_rows(sqlite_bench: Bench) -> None:
    """Every verb of a rollout asks for it; walking through all events of a run would cost each of them ever more."""
    s = sqlite_bench.scene()
    asked: list[tuple[str, tuple]] = []
    with sqlite_bench.connect() as conn:
        sa.event.listen(conn, "before_cursor_execute", lambda c, cursor, text, values, *_: asked.append((text, values)))
        s.ledger._breaker(conn)
        [(text, values)] = asked
        plan = str(conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all())
    assert "ix_event_kind" in plan, plan


@pytest.mark.parametrize("schedule", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
def test_where_few_slots_are_in_flight_one_task_that_always_fails_is_no_outage(bench: Bench, schedule: ScheduleKind) -> None:
    s = bench.scene(groups_per_step=1, max_lag_versions=1, attempts_max=3, schedule=schedule)
    s.feed(2)
    for _ in range(3):
        fail(s, [g for g in s.lease(2) if g.key.ordinal == 0], status=RewardStatus.VERIFIER_ERROR, blame=Blame.UNCLEAR)
    assert breaker(s) == "closed"
    if schedule is ScheduleKind.FIXED:
        with pytest.raises(RunPaused, match=r"slot 0\.0 gave no sample in 3 attempts"):
            s.plan(1)
    else:
        assert verdicts(bench)["0.0"] == "quarantined"
