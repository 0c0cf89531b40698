"""Which tasks are taken out because infrastructure fails on them wherever they are tried, and which are not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from failure_support import breaker, fail, verdicts
from ledger_support import Scene

from ledger_bench import Bench
from rollbook.core.records import (
    Blame,
    LeaseGrant,
    RewardStatus,
    SubmitOutcome,
)

RULES = {"attempts_max": 3, "groups_per_step": 1, "max_lag_versions": 20, "infra_failures_max": 1.1}


def workers_of(s: Scene, n: int) -> tuple[LeaseGrant, dict[str, LeaseGrant]]:
    """A slot to be poisoned, leased by the first of ``n`` workers, and a slot of another group that each of them holds."""
    workers = [s.worker() for _ in range(n)]
    poison = s.lease(1, workers[0])[0]
    return poison, {w: [g for g in s.lease(2, w) if g.key.ordinal != poison.key.ordinal][0] for w in workers}


def nothing() -> None:
    pass


def fail_everywhere(
    s: Scene, bench: Bench, grant: LeaseGrant, held: dict[str, LeaseGrant], n: int = 9, meanwhile: Callable[[], None] = nothing,
    **changes: object,
) -> None:  # fmt: skip
    """Every attempt of the slot fails, on the first ``n`` workers in turn, each of which brings a sample of another group."""
    workers = list(held)[:n]
    for attempt in range(s.record.rules.attempts_max):
        worker = workers[attempt % len(workers)]
        if attempt:
            grant = next(g for g in s.lease(1, worker) if g.key == grant.key)
        fail(s, (grant,), worker, reason=f"sandbox of {worker} died", **changes)
        if attempt == 0:
            bench.let_time_pass(1.0)
            for other, mine in held.items():
                s.submit([mine], other)
            meanwhile()


def refills(bench: Bench, ordinal: int) -> int:
    return bench.rows(f"SELECT count(*) FROM prompt_group WHERE refills = {ordinal}")[0][0]


def test_where_fewer_workers_live_than_attempts_it_takes_all_of_them(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 2)
    fail_everywhere(s, bench, poison, workers)
    assert verdicts(bench)[str(poison.key)] == "quarantined" and refills(bench, poison.key.ordinal) == 0
    told = json.dumps(s.ledger.explain(poison.key))
    assert all(f"sandbox of {w} died" in told for w in workers), "the evidence of every attempt"


def test_a_healthy_worker_that_lives_and_has_not_tried_it_speaks_for_the_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 3)
    fail_everywhere(s, bench, poison, workers, 2)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_a_worker_that_is_gone_is_not_waited_for(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 3)

    def the_last_one_dies() -> None:
        for _ in range(3):
            bench.let_time_pass(25.0)
            for worker in list(workers)[:2]:
                s.ledger.heartbeat(worker, s.head(), [])

    fail_everywhere(s, bench, poison, workers, 2, the_last_one_dies)
    assert verdicts(bench)[str(poison.key)] == "quarantined"


def test_a_worker_that_starts_again_is_still_one_worker(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    for incarnation in ("first", "second"):
        s.ledger.register_worker(incarnation, "host", "engine", json.dumps({"name": "worker-0"}))
    poison = s.lease(1, "first")[0]
    others = [g for g in s.lease(5, "first") if g.key.ordinal != poison.key.ordinal]
    fail_everywhere(s, bench, poison, {"first": others[0], "second": others[1]})
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_while_nothing_else_succeeds_no_task_is_poison(bench: Bench) -> None:
    """Samples of before say nothing: an outage that the breaker has not seen yet fails every task on every worker."""
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 2)
    for worker, grant in workers.items():
        s.submit([grant], worker)
    bench.let_time_pass(1.0)
    fail_everywhere(s, bench, poison, workers)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


@pytest.mark.parametrize("expire", [False, True])
def test_siblings_that_are_spent_together_are_taken_out_together(bench: Bench, expire: bool) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    workers = [s.worker() for _ in range(2)]
    poison = s.lease(2, workers[0])
    held = {w: s.lease(1, w)[0] for w in workers}
    for attempt in range(3):
        worker = workers[attempt % 2]
        if attempt:
            poison = s.lease(2, worker)
        assert [str(g.key) for g in poison] == ["0.0", "0.1"]
        if expire and attempt == 2:
            bench.let_time_pass(31.0)
            s.lease(1, worker)
        else:
            fail(s, poison, worker)
        if attempt == 0:
            bench.let_time_pass(1.0)
            for other, mine in held.items():
                s.submit([mine], other)
    assert {verdicts(bench)[k] for k in ("0.0", "0.1")} == {"quarantined"} and s.ledger.audit() == []


def test_one_worker_alone_cannot_tell_a_poisonous_task_from_its_own_sickness(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 1)
    fail_everywhere(s, bench, poison, workers)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_workers_that_only_fall_silent_say_nothing_against_a_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 3)
    fail_everywhere(s, bench, poison, workers, status=RewardStatus.NO_VERDICT)
    assert verdicts(bench)[str(poison.key)] == "failed"


def test_what_is_unclear_may_be_the_models_doing_and_says_nothing_against_a_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_of(s, 3)
    fail_everywhere(s, bench, poison, workers, status=RewardStatus.TIMEOUT, blame=Blame.UNCLEAR)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_nothing_is_quarantined_for_infrastructure_while_the_breaker_is_open(bench: Bench) -> None:
    s = bench.scene(**RULES | {"infra_window": 4, "infra_failures_max": 0.5})
    s.feed(12)
    poison, (first, second) = s.lease(1)[0], (s.worker(), s.worker())
    s.submit(s.lease(2, second), second)
    bench.let_time_pass(1.0)
    fail(s, (poison, *s.lease(1)))
    assert breaker(s) == "open"
    grant = next(g for g in s.lease(9, first) if g.key == poison.key)
    fail(s, (grant,), first, final=True)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_a_task_that_fails_on_every_healthy_worker_is_quarantined_with_its_evidence(bench: Bench) -> None:
    s = bench.scene(attempts_max=3, groups_per_step=1, max_lag_versions=20, survivors_min=1)
    s.feed(6)
    workers = [s.worker(f"healthy-{i}") for i in range(3)]
    grant = poison = s.lease(1, workers[0])[0]
    held = {worker: s.lease(2, worker) for worker in workers}
    for number, worker in enumerate(workers):
        assert fail(s, (grant,), worker, reason=f"the sandbox of {worker} died") == [SubmitOutcome.ACCEPTED]
        if number == 0:
            bench.let_time_pass(1.0)
            for other, grants in held.items():
                s.submit(grants, other)
        if number < 2:
            grant = next(g for g in s.lease(1, workers[number + 1]) if g.key == poison.key)
    assert {v for k, v in verdicts(bench).items() if k.startswith("0.")} == {"quarantined"}
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills = 0") == [(0,)], "the prompt is the problem"
    story = json.dumps(s.ledger.explain(poison.key))
    assert all(f"the sandbox of {w} died" in story for w in workers) and s.ledger.audit() == []


def test_a_task_that_fails_on_one_worker_only_or_on_workers_that_never_succeed_is_not_poison(bench: Bench) -> None:
    s = bench.scene(attempts_max=3, groups_per_step=1, max_lag_versions=20)
    s.feed(6)
    s.submit(s.lease(2))
    grants = s.lease(1)
    for _ in range(3):
        fail(s, grants)
        grants = s.lease(1)
    sick = bench.rows("SELECT DISTINCT kind FROM verdict WHERE ordinal = 1")
    assert set(sick) == {("failed",), ("cancelled",)} or set(sick) == {("failed",)}
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills = 1") == [(1,)], "refilled (R5)"
