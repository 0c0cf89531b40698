"""Promises under messages that come late, values at the edge of their type, clocks that step and code that raises."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ledger_support import STREAM, group, run_record, sample_for, trajectory

from ledger_bench import Bench, ManualClock
from rollbook.core.errors import InvalidRequest, NotReady, RunPaused, Unavailable
from rollbook.core.records import Cursor, Role, SubmitOutcome
from rollbook.ledger.submitting import check_trajectory
from rollbook.ledger.writer import Txn


class SteppedClock(ManualClock):
    """A machine whose wall clock is set while its monotonic clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0

    def time(self) -> float:
        return self.now + self.step_s


@pytest.fixture
def stepped(sqlite_url: str) -> Iterator[Bench]:
    made = Bench(sqlite_url, SteppedClock())
    yield made
    made.finish()


def test_a_reward_of_minus_zero_is_read_back_as_what_was_acknowledged(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.submit(s.lease(), reward=-0.0)
    plan = s.plan(1)
    assert [d.reward for d in s.ledger.payloads(0, 1)] == [0.0] * len(plan.items)


def test_a_sample_with_plus_zero_repeats_one_with_minus_zero(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    grants = s.lease(1)
    assert s.submit(grants, reward=-0.0) == [SubmitOutcome.ACCEPTED]
    assert s.submit(grants, reward=0.0) == [SubmitOutcome.REPLAYED]


def test_a_late_refused_sample_leaves_the_newer_lease_of_its_own_worker_alone(bench: Bench) -> None:
    s = bench.scene(groups_per_step=1, late_submit="strict")
    s.feed(3)
    first = s.lease()
    s.submit(first[2:])
    s.train(1)
    s.fill()
    s.train(2)
    bench.let_time_pass(31)
    again = s.lease(2)
    assert [g.token for g in again] == [2, 2]
    late = s.ledger.submit_samples([sample_for(first[0], s.incarnation)])
    assert late[0].outcome is SubmitOutcome.REFUSED
    assert s.ledger.heartbeat(s.incarnation, s.head(), [(g.key, g.token) for g in again]).lost == ()
    assert s.submit(again) == [SubmitOutcome.ACCEPTED] * 2


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_lease_lives_for_its_ttl_when_the_servers_wall_clock_is_set(stepped: Bench, step_s: float) -> None:
    s = stepped.scene()
    s.feed(2)
    held = s.lease()
    other = s.worker()
    stepped.clock.step_s = step_s
    stepped.let_time_pass(29)
    assert s.lease(incarnation=other) == ()
    stepped.let_time_pass(2)
    assert [g.key for g in s.lease(incarnation=other)] == [g.key for g in held]


def test_a_lease_ends_in_time_when_the_clock_went_back_between_two_servers(stepped: Bench) -> None:
    s = stepped.scene()
    s.feed(2)
    held = s.lease()
    other = s.worker()
    stepped.clock.step_s = -3600.0
    stepped.crash(s)
    stepped.let_time_pass(61)
    assert [g.key for g in s.lease(incarnation=other)] == [g.key for g in held]


def test_a_role_changes_hands_in_time_when_the_clock_went_back_between_two_servers(stepped: Bench) -> None:
    s = stepped.scene()
    stepped.clock.step_s = -3600.0
    stepped.crash(s)
    stepped.let_time_pass(61)
    assert s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0).epoch == s.learner.epoch + 1


def test_the_writer_goes_on_after_what_follows_a_commit_has_raised(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()

    def broken(txn: Txn) -> None:
        def raises() -> None:
            raise ValueError("planted")

        txn.after_commit.append(raises)
        s.ledger._event(txn, "planted")

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(s.ledger._writer.run, broken)
        with pytest.raises(Unavailable, match="planted"):
            answer.result(timeout=10)
    s.feed(2)
    assert len(s.lease()) == 4


@pytest.mark.parametrize("token,ok", [(0, True), (2**31 - 1, True), (-1, False), (-(2**31), False)])
def test_a_negative_token_id_is_no_token(token: int, ok: bool) -> None:
    t = trajectory(3)
    reason, _, _ = check_trajectory(type(t)(struct.pack("<3i", 5, token, 6), t.logprobs, t.versions), 64, 10_000)
    assert (reason == "") is ok


def test_a_bounded_run_whose_tasks_are_used_up_pauses_instead_of_waiting_for_ever(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    before = s.ledger.cursor(STREAM)
    s.ledger.append_groups(s.feeder, before, Cursor(STREAM, 2, "{}", True), [group(0), group(1)])
    s.ledger.quarantine_group(0, "broken prompt")
    s.fill()
    with pytest.raises(RunPaused, match="task"):
        s.plan(1)


def test_a_bounded_run_waits_for_groups_in_flight_after_its_last_task_was_issued(bench: Bench) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    s.ledger.append_groups(s.feeder, before, Cursor(STREAM, 2, "{}", True), [group(0), group(1)])
    with pytest.raises(NotReady):
        s.plan(1)
    s.fill()
    assert len(s.plan(1).items) == 4


def test_an_accepted_revision_lets_the_feeder_say_again_whether_tasks_are_left(bench: Bench) -> None:
    s = bench.scene()
    before = s.ledger.cursor(STREAM)
    s.ledger.append_groups(s.feeder, before, Cursor(STREAM, 1, "{}", True), [group(0)])
    with pytest.raises(RunPaused, match="task"):
        s.plan(1)
    s.ledger.open_run(run_record(straggler_wait_s=1.0), accept=["rules.straggler_wait_s"])
    with pytest.raises(NotReady):
        s.plan(1)
    now = s.ledger.cursor(STREAM)
    assert not now.exhausted
    for wait_s in (2.0, 3.0):
        s.ledger.append_groups(s.feeder, now, dataclasses.replace(now, exhausted=True), [])
        with pytest.raises(RunPaused, match="task"):
            s.plan(1)
        s.ledger.open_run(run_record(straggler_wait_s=wait_s), accept=["rules.straggler_wait_s"])
        assert s.ledger.cursor(STREAM) == now


def test_a_wait_that_is_no_number_does_not_hold_a_thread_for_ever(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    nan = float("nan")
    with ThreadPoolExecutor(3) as pool:
        lease = pool.submit(s.ledger.lease_slots, s.incarnation, s.head(), 1, nan)
        beat = pool.submit(s.ledger.heartbeat, s.incarnation, None, [], nan, 0)
        plan = pool.submit(s.ledger.plan_step, s.learner, 0, 1, nan)
        try:
            assert lease.result(timeout=5).grants == () and beat.result(timeout=5).lost == ()
            with pytest.raises(NotReady):
                plan.result(timeout=5)
        finally:
            s.ledger._bell.ring(["lease", "head", "plan"])


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), 0.0, 86_400.1])
def test_a_term_without_a_sensible_end_is_refused(sqlite_bench: Bench, ttl_s: float) -> None:
    s = sqlite_bench.scene()
    with pytest.raises(InvalidRequest, match="ttl_s"):
        s.ledger.acquire_role(Role.FEEDER, "feeder-2", ttl_s)


def test_a_term_of_one_day_is_granted(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    assert s.ledger.acquire_role(Role.FEEDER, "feeder-2", 86_400.0, "feeder-1").epoch == s.feeder.epoch + 1
