"""The restart policy: when a death is forgiven, how long it is waited, and which cause is named."""

from __future__ import annotations

from rollbook.core.config import SupervisorConfig
from rollbook.supervise.policy import RestartPolicy


def policy(**changes: float) -> RestartPolicy:
    values = {"restarts_max": 3, "restarts_window_s": 100.0, "backoff_s": 1.0, "backoff_max_s": 5.0} | changes
    return RestartPolicy(SupervisorConfig(**values))  # type: ignore[arg-type]


def test_as_many_restarts_as_configured_are_allowed_and_no_more() -> None:
    p = policy(restarts_max=2)
    assert [p.on_death(t, "x") is None for t in (0.0, 1.0, 2.0)] == [False, False, True]
    assert policy(restarts_max=0).on_death(0.0, "x") is None


def test_the_wait_doubles_up_to_its_limit() -> None:
    p = policy(restarts_max=10)
    assert [p.on_death(float(t), "x") for t in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_huge_budget_does_not_overflow_the_wait() -> None:
    p = policy(restarts_max=5000)
    assert [p.on_death(t / 1000, "x") for t in range(3000)][-1] == 5.0


def test_deaths_outside_the_window_are_forgotten_and_those_inside_are_not() -> None:
    p = policy(restarts_max=1)
    assert p.on_death(0.0, "old") is not None
    assert p.on_death(100.0, "new") is not None, "a death exactly as old as the window is outside of it"
    assert policy_after(p, 199.9) is None
    q = policy(restarts_max=1)
    q.on_death(0.0, "old")
    assert q.on_death(99.9, "new") is None


def policy_after(p: RestartPolicy, now: float) -> float | None:
    return p.on_death(now, "again")


def test_deaths_outside_the_window_count_while_no_step_was_finished_after_them() -> None:
    stuck, moving = policy(restarts_max=2), policy(restarts_max=2)
    assert [stuck.on_death(t, "x", progress_at=-1.0) is None for t in (0.0, 150.0, 300.0)] == [False, False, True]
    assert [moving.on_death(t, "x", progress_at=t - 1.0) is None for t in (0.0, 150.0, 300.0)] == [False, False, False]


def test_a_finished_step_starts_the_backoff_again_but_not_the_budget() -> None:
    p = policy(restarts_max=3)
    assert [p.on_death(0.0, "x", -1.0), p.on_death(10.0, "x", -1.0)] == [1.0, 2.0]
    assert p.on_death(20.0, "x", progress_at=15.0) == 1.0
    assert p.on_death(30.0, "x", progress_at=25.0) is None


def test_the_first_cause_is_that_of_the_oldest_death_that_counts() -> None:
    p = policy()
    p.on_death(0.0, "disk full")
    p.on_death(10.0, "no ledger")
    assert p.first_cause == "disk full"
    p.on_death(105.0, "killed")
    assert p.first_cause == "no ledger"
    assert p.n_deaths == 3
