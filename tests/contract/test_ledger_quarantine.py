"""Which tasks are taken out because infrastructure fails on them wherever they are tried, and which are not."""

from __future__ import annotations

import json

from ledger_support import Scene
from test_ledger_breaker import breaker, fail, verdicts

from ledger_bench import Bench
from rollbook.core.records import Blame, LeaseGrant, RewardStatus

RULES = {"attempts_max": 3, "groups_per_step": 1, "max_lag_versions": 20, "infra_failures_max": 1.1}


def workers_with_samples(s: Scene, n: int) -> tuple[LeaseGrant, list[str]]:
    """A slot to be poisoned, leased by the first of ``n`` workers which all have samples of other groups."""
    workers = [s.worker() for _ in range(n)]
    poison = s.lease(1, workers[0])[0]
    for worker in workers:
        s.submit([g for g in s.lease(3, worker) if g.key.ordinal != poison.key.ordinal], worker)
    return poison, workers


def fail_everywhere(s: Scene, grant: LeaseGrant, workers: list[str], **changes: object) -> None:
    """Every attempt of the slot fails, on the workers in turn."""
    for attempt in range(s.record.rules.attempts_max):
        worker = workers[attempt % len(workers)]
        if attempt:
            grant = next(g for g in s.lease(1, worker) if g.key == grant.key)
        fail(s, (grant,), worker, reason=f"sandbox of {worker} died", **changes)


def refills(bench: Bench, ordinal: int) -> int:
    return bench.rows(f"SELECT count(*) FROM prompt_group WHERE refills = {ordinal}")[0][0]


def test_where_fewer_workers_live_than_attempts_it_takes_all_of_them(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 2)
    fail_everywhere(s, poison, workers)
    assert verdicts(bench)[str(poison.key)] == "quarantined" and refills(bench, poison.key.ordinal) == 0
    told = json.dumps(s.ledger.explain(poison.key))
    assert all(f"sandbox of {w} died" in told for w in workers), "the evidence of every attempt"


def test_a_healthy_worker_that_lives_and_has_not_tried_it_speaks_for_the_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 3)
    fail_everywhere(s, poison, workers[:2])
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_a_worker_that_is_gone_is_not_waited_for(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 3)
    for _ in range(3):
        bench.let_time_pass(25.0)
        s.ledger.heartbeat(workers[0], s.head(), [(poison.key, poison.token)])
        s.ledger.heartbeat(workers[1], s.head(), [])
    fail_everywhere(s, poison, workers[:2])
    assert verdicts(bench)[str(poison.key)] == "quarantined"


def test_one_worker_alone_cannot_tell_a_poisonous_task_from_its_own_sickness(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 1)
    fail_everywhere(s, poison, workers)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_workers_that_only_fall_silent_say_nothing_against_a_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 3)
    fail_everywhere(s, poison, workers, status=RewardStatus.NO_VERDICT)
    assert verdicts(bench)[str(poison.key)] == "failed"


def test_what_is_unclear_may_be_the_models_doing_and_says_nothing_against_a_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(12)
    poison, workers = workers_with_samples(s, 3)
    fail_everywhere(s, poison, workers, status=RewardStatus.TIMEOUT, blame=Blame.UNCLEAR)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1


def test_nothing_is_quarantined_for_infrastructure_while_the_breaker_is_open(bench: Bench) -> None:
    s = bench.scene(**RULES | {"infra_window": 4, "infra_failures_max": 0.25})
    s.feed(12)
    poison, workers = workers_with_samples(s, 3)
    bench.let_time_pass(1.0)
    fail(s, (poison,), workers[0])
    assert breaker(s) == "open"
    grant = next(g for g in s.lease(9, workers[1]) if g.key == poison.key)
    fail(s, (grant,), workers[1], final=True)
    assert verdicts(bench)[str(poison.key)] == "failed" and refills(bench, poison.key.ordinal) == 1
