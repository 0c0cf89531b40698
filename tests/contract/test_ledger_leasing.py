"""Leases, heartbeats, capacity and the two schedules' gates, on both databases."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from ledger_support import Scene, key, version

from ledger_bench import Bench
from rollbook.core.errors import InvalidRequest, StaleWeights
from rollbook.core.records import PolicyVersion, ScheduleKind, SlotKey, SubmitOutcome


def keys(grants) -> list[str]:
    return [str(g.key) for g in grants]


def test_slots_are_granted_oldest_group_first(bench: Bench) -> None:
    s = bench.scene()
    s.feed(3)
    assert keys(s.lease(3)) == ["0.0", "0.1", "1.0"]
    assert keys(s.lease(2)) == ["1.1", "2.0"]
    grant = s.lease(1)[0]
    assert (str(grant.key), grant.token, grant.attempt, grant.ttl_s, grant.version) == ("2.1", 1, 1, 30.0, 0)
    assert grant.version_digest == s.head().digest
    assert grant.task_json == '{"prompt": "p2", "answer": "a"}'


def test_nothing_is_granted_before_a_version_is_published(bench: Bench) -> None:
    s = bench.scene(publish=False)
    s.feed(2)
    reply = s.ledger.lease_slots(s.incarnation, None, 4)
    assert (reply.grants, reply.wanted, reply.drain) == ((), None, False)
    assert reply.retry_after_s > 0


def test_a_worker_is_told_which_version_to_load_first(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    assert s.ledger.lease_slots(s.incarnation, None, 4).wanted == version(0)
    s.fill(4)
    s.train(1)
    reply = s.ledger.lease_slots(s.incarnation, version(0), 4)
    assert (reply.grants, reply.wanted) == ((), version(1))
    assert len(s.ledger.lease_slots(s.incarnation, version(1), 4).grants) == 4


def test_weights_with_another_digest_or_an_unpublished_version_are_refused(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    with pytest.raises(StaleWeights, match="load it again"):
        s.lease(loaded=dataclasses.replace(version(0), digest="f" * 64))
    with pytest.raises(StaleWeights, match="not published"):
        s.lease(loaded=version(1))
    assert len(s.lease(loaded=version(0))) == 4


def test_an_unknown_incarnation_gets_nothing(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    with pytest.raises(InvalidRequest, match="'nobody'"):
        s.lease(incarnation="nobody")
    with pytest.raises(InvalidRequest, match="'nobody'"):
        s.ledger.heartbeat("nobody", None, [])


@pytest.mark.parametrize("n, fine", [(0, False), (1, True), (4096, True), (4097, False)])
def test_the_number_of_slots_asked_for_is_bounded(bench: Bench, n: int, fine: bool) -> None:
    s = bench.scene()
    s.feed(1)
    if fine:
        assert s.lease(n)
    else:
        with pytest.raises(InvalidRequest, match="n_max"):
            s.lease(n)


def test_registering_a_worker_twice_keeps_the_first_row(bench: Bench) -> None:
    s = bench.scene()
    s.worker("w")
    s.ledger.register_worker("w", "elsewhere", "other")
    assert bench.rows("SELECT host FROM worker WHERE incarnation = 'w'") == [("host",)]


def test_a_lost_lease_reply_is_answered_again_with_the_same_grants(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    first = s.lease(2, request_id="r1")
    assert s.lease(2, request_id="r1") == first
    bench.crash(s)
    assert s.lease(2, request_id="r1") == first
    assert keys(s.lease(2, request_id="r2")) == ["1.0", "1.1"]


def test_an_empty_reply_is_not_remembered(bench: Bench) -> None:
    s = bench.scene()
    assert s.lease(2, request_id="r1") == ()
    s.feed(1)
    assert len(s.lease(2, request_id="r1")) == 2


def test_a_lease_expires_at_its_time_and_is_granted_again_with_a_larger_token(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    first = s.lease(2)
    bench.let_time_pass(29.0)
    assert s.lease(2) == ()
    bench.let_time_pass(2.0)
    again = s.lease(2, incarnation=s.worker())
    assert [(g.key, g.token, g.attempt, g.seed) for g in again] == [(g.key, 2, 2, g.seed) for g in first]


def test_a_retry_comes_before_any_new_group(bench: Bench) -> None:
    s = bench.scene()
    s.feed(3)
    s.lease(2)
    bench.let_time_pass(31.0)
    assert keys(s.lease(3)) == ["0.0", "0.1", "1.0"]


def test_a_heartbeat_renews_leases_and_names_the_lost_ones(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    a, b = s.lease(1)[0], s.lease(1)[0]
    bench.let_time_pass(20.0)
    reply = s.ledger.heartbeat(s.incarnation, version(0), [(a.key, a.token)])
    assert (reply.lost, reply.head, reply.drain) == ((), version(0), False)
    bench.let_time_pass(20.0)
    other = s.worker()
    assert [g.key for g in s.lease(1, incarnation=other)] == [b.key]
    reply = s.ledger.heartbeat(s.incarnation, version(0), [(a.key, a.token), (b.key, b.token), (SlotKey(99, 0), 1)])
    assert reply.lost == (b.key, SlotKey(99, 0))
    assert s.ledger.heartbeat(other, version(0), [(a.key, a.token)]).lost == (a.key,)


def test_a_heartbeat_does_not_call_a_delivered_sample_lost(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    grants = s.lease(1)
    s.submit(grants)
    assert s.ledger.heartbeat(s.incarnation, version(0), [(grants[0].key, grants[0].token)]).lost == ()


def test_a_waiting_heartbeat_returns_when_a_version_is_published(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.fill()
    s.plan(1)
    replies = []
    thread = threading.Thread(
        target=lambda: replies.append(s.ledger.heartbeat(s.incarnation, version(0), [], wait_s=30.0, known_version=0))
    )
    thread.start()
    s.finish(1)
    thread.join(timeout=60)
    assert [r.head.version for r in replies] == [1]
    assert s.ledger.heartbeat(s.incarnation, version(0), [], wait_s=30.0, known_version=0).head == version(1)


def test_a_waiting_lease_call_returns_when_groups_arrive(bench: Bench) -> None:
    s = bench.scene()
    replies = []
    thread = threading.Thread(target=lambda: replies.append(s.ledger.lease_slots(s.incarnation, version(0), 4, wait_s=30.0)))
    thread.start()
    s.feed(1)
    thread.join(timeout=60)
    assert keys(replies[0].grants) == ["0.0", "0.1"]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_capacity_opens_eta_plus_one_steps_of_groups_and_not_one_more(bench: Bench, bound: int) -> None:
    s = bench.scene(max_lag_versions=bound)
    s.feed(10)
    grants = s.lease(100)
    assert len({g.key.ordinal for g in grants}) == (bound + 1) * 2
    assert s.submit(grants) == [SubmitOutcome.ACCEPTED] * len(grants)
    assert s.lease(100) == ()
    s.plan(1)
    assert s.lease(100) == (), "planned groups count until their version is published"
    s.finish(1)
    assert len({g.key.ordinal for g in s.lease(100)}) == 2


def test_capacity_is_counted_from_rows_after_a_restart(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=0)
    s.feed(10)
    s.fill()
    bench.crash(s)
    assert s.lease(100) == ()
    s.train(1)
    bench.crash(s)
    assert len(s.lease(100)) == 4


def test_a_retry_inside_an_opened_group_needs_no_capacity(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=0)
    s.feed(10)
    assert len(s.lease(100)) == 4
    bench.let_time_pass(31.0)
    assert keys(s.lease(100)) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_closed_group_gives_its_capacity_back(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=0)
    s.feed(4)
    s.lease(100)
    s.ledger.quarantine_group(0, "broken")
    assert keys(s.lease(100)) == ["2.0", "2.1"]


def test_no_more_groups_are_opened_than_the_remaining_steps_need(bench: Bench) -> None:
    s = bench.scene(steps=1, max_lag_versions=3)
    s.feed(2)
    before = s.ledger.cursor("tasks")
    assert before.next_ordinal == 2
    s.feed(4)
    assert len(s.lease(100)) == 4
    assert s.lease(100) == ()


def test_workers_drain_when_the_last_step_is_planned_or_on_request(bench: Bench) -> None:
    s = bench.scene(steps=1)
    s.feed(2)
    assert not s.ledger.heartbeat(s.incarnation, version(0), []).drain
    s.fill()
    s.plan(1)
    assert s.ledger.lease_slots(s.incarnation, version(0), 1).drain
    assert s.ledger.heartbeat(s.incarnation, version(0), []).drain


def test_drain_stops_leasing_until_the_server_restarts(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    s.ledger.drain()
    assert s.ledger.lease_slots(s.incarnation, version(0), 1).drain
    assert s.ledger.run_status()["draining"]
    bench.crash(s)
    assert s.lease(1)


def fixed(bench: Bench, lag: int, **rules: object) -> Scene:
    return bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=lag, max_lag_versions=lag, **rules)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_fixed_lag_slots_are_granted_under_exactly_their_version(bench: Bench, lag: int) -> None:
    s = fixed(bench, lag, steps=5)
    s.feed(10)
    for step in range(1, 6):
        loaded = version(max(0, step - 1 - lag))
        while grants := s.lease(100, loaded=loaded):
            assert {g.version for g in grants} == {loaded.version}
            assert {max(0, g.key.ordinal // 2 - lag) for g in grants} == {loaded.version}
            s.submit(grants)
        s.train(step)
    assert s.ledger.lease_slots(s.incarnation, version(5), 4).drain


def test_fixed_lag_asks_for_the_older_version_when_an_older_slot_is_free_again(bench: Bench) -> None:
    s = fixed(bench, 1)
    s.feed(8)
    first = s.lease(4)
    assert s.submit(first) == [SubmitOutcome.ACCEPTED] * 4
    lost = s.lease(4)
    s.train(1)
    assert s.ledger.lease_slots(s.incarnation, version(0), 4).wanted == version(1)
    bench.let_time_pass(31.0)
    assert s.ledger.lease_slots(s.incarnation, version(1), 4).wanted == version(0)
    assert [g.key for g in s.lease(4, loaded=version(0))] == [g.key for g in lost]


def test_fixed_lag_waits_for_a_version_that_is_not_published(bench: Bench) -> None:
    s = fixed(bench, 0)
    s.feed(4)
    s.fill()
    reply = s.ledger.lease_slots(s.incarnation, version(0), 4)
    assert (reply.grants, reply.wanted, reply.drain) == ((), None, False)


def test_fixed_lag_grants_nothing_beyond_the_configured_steps(bench: Bench) -> None:
    s = fixed(bench, 1, steps=1)
    s.feed(4)
    assert keys(s.lease(100)) == ["0.0", "0.1", "1.0", "1.1"]
    assert s.lease(100) == ()


def test_leases_get_the_servers_downtime_back_once(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    held = s.lease(2)
    bench.crash(s, down_s=25.0)
    bench.let_time_pass(25.0)
    assert [g.key for g in s.lease(2)] == [key("1.0"), key("1.1")], "30 s + 25 s of downtime are not over after 50 s"
    bench.let_time_pass(6.0)
    assert {g.key for g in s.lease(2, incarnation=s.worker())} == {g.key for g in held}


def test_downtime_extends_a_lease_by_at_most_one_ttl_over_its_life(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    s.lease(2)
    bench.crash(s, down_s=29.0)
    bench.crash(s, down_s=29.0)
    assert s.lease(2) == ()
    bench.let_time_pass(3.0)
    assert len(s.lease(2)) == 2


def test_a_published_version_of_another_digest_cannot_be_claimed_through_a_heartbeat_reply(bench: Bench) -> None:
    s = bench.scene()
    head = s.ledger.heartbeat(s.incarnation, None, []).head
    assert isinstance(head, PolicyVersion)
    assert head == version(0)
