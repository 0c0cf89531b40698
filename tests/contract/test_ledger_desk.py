"""Lease calls in line, on both databases: order, repetition, bounds; and what waiting callers are woken for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ledger_support import Scene, version

from ledger_bench import Bench
from rollbook.core.errors import InvalidRequest, NotReady, Overloaded, RollbookError, StaleWeights
from rollbook.core.records import LeaseReply, ScheduleKind
from rollbook.ledger import desk, leasing
from rollbook.ledger.desk import NOTHING, LeaseCall
from rollbook.ledger.writer import _merge, _Operation


def call_of(s: Scene, incarnation: str = "", request_id: str = "", n_max: int = 2, number: int = 0) -> LeaseCall:
    return LeaseCall(incarnation or s.incarnation, version(number), n_max, request_id)


def slots(answer: LeaseReply | RollbookError) -> list[str]:
    assert isinstance(answer, LeaseReply)
    return [str(grant.key) for grant in answer.grants]


def test_those_in_line_are_granted_the_oldest_slots_in_their_order(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    calls = [call_of(s, s.worker(), n_max=n) for n in (1, 2, 4, 1)]
    answers, more = s.ledger._look_at_line(calls)
    assert [slots(answers[call]) for call in calls[:3]] == [["0.0"], ["0.1", "1.0"], ["1.1"]]
    assert calls[3] not in answers and not more, "it goes on waiting"


def test_a_repetition_in_line_is_granted_nothing_of_its_own(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    first, other, again = call_of(s, request_id="w.1"), call_of(s, s.worker()), call_of(s, request_id="w.1")
    answers, _ = s.ledger._look_at_line([first, other, again])
    assert slots(answers[first]) == slots(answers[again]) == ["0.0", "0.1"] and slots(answers[other]) == ["1.0", "1.1"]
    late = call_of(s, request_id="w.1")
    assert slots(s.ledger._look_at_line([late])[0][late]) == ["0.0", "0.1"]


def test_a_call_that_its_worker_has_given_up_is_granted_nothing(bench: Bench) -> None:
    s = bench.scene()
    older, newer = call_of(s, request_id="w.1"), call_of(s, request_id="w.2")
    assert s.ledger._look_at_line([older, newer]) == ({}, False)
    older.admitted = newer.admitted = True
    s.feed(1)
    answers, _ = s.ledger._look_at_line([older, newer])
    assert answers[older] is NOTHING and slots(answers[newer]) == ["0.0", "0.1"]


def test_who_may_not_lease_does_not_hold_up_the_others(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    stranger, stale, behind, good = call_of(s, "nobody"), call_of(s, number=7), call_of(s, s.worker()), call_of(s)
    behind.loaded = None
    answers, _ = s.ledger._look_at_line([stranger, stale, behind, good])
    assert isinstance(answers[stranger], InvalidRequest) and isinstance(answers[stale], StaleWeights)
    assert answers[behind].wanted == version(0) and slots(answers[good]) == ["0.0", "0.1"]


def test_when_the_first_in_line_empties_a_step_the_next_is_told_the_next_version(bench: Bench) -> None:
    s = bench.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=1)
    s.feed(6)
    s.fill(4)
    s.train(1)
    first, second = call_of(s, n_max=9), call_of(s, s.worker(), n_max=9)
    answers, _ = s.ledger._look_at_line([first, second])
    assert slots(answers[first]) == ["2.0", "2.1", "3.0", "3.1"]
    assert answers[second].wanted == version(1)


def test_one_transaction_grants_to_so_many_and_the_next_one_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "GRANTS_MAX", 2)
    s = bench.scene(max_lag_versions=4)
    s.feed(5)
    calls = [call_of(s, s.worker()) for _ in range(5)]
    given: list[int] = []
    more = True
    while more:
        line = [call for call in calls if not call.answer.done()]
        answers, more = s.ledger._look_at_line(line)
        for call, answer in answers.items():
            call.answer.set_result(answer)  # type: ignore[arg-type]
        for call in line:
            call.admitted = True
        given.append(len(answers))
    assert given == [2, 2, 1]
    assert sorted(key for call in calls for key in slots(call.answer.result())) == [f"{o}.{i}" for o in range(5) for i in (0, 1)]


def test_many_workers_that_wait_at_once_share_what_there_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "GRANTS_MAX", 3)
    s = bench.scene(max_lag_versions=9)
    workers = [s.worker() for _ in range(12)]
    with ThreadPoolExecutor(len(workers)) as pool:
        asked = [pool.submit(s.ledger.lease_slots, w, version(0), 2, 60.0, f"{w}.1") for w in workers]
        s.feed(10)
        s.feed(2)
        granted = [str(grant.key) for one in asked for grant in one.result(timeout=120).grants]
    assert sorted(granted) == sorted(f"{o}.{i}" for o in range(12) for i in (0, 1))


def test_the_line_is_bounded_and_says_when_to_come_again(sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LINE_MAX", 1)
    s = sqlite_bench.scene()
    replies: list[LeaseReply] = []
    waiting = threading.Thread(target=lambda: replies.append(s.ledger.lease_slots(s.incarnation, version(0), 2, wait_s=60.0)))
    waiting.start()
    with pytest.raises(Overloaded) as full:
        for _ in range(10_000):
            s.ledger.lease_slots(s.worker(), version(0), 1)
    assert full.value.retry_after_s > 0
    s.feed(1)
    waiting.join(timeout=60)
    assert slots(replies[0]) == ["0.0", "0.1"]


def test_an_error_of_the_storage_reaches_everybody_in_line(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    workers = [s.worker() for _ in range(3)]
    with ThreadPoolExecutor(len(workers)) as pool:
        asked = [pool.submit(s.ledger.lease_slots, w, version(0), 2, 60.0) for w in workers]
        s.ledger.close()
        assert all(isinstance(one.exception(timeout=60), RollbookError) for one in asked)


def test_a_waiting_learner_is_woken_when_its_step_may_be_ready(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    grants = s.lease(4)
    with pytest.raises(NotReady, match="0 of 2 groups"):
        s.plan(1)
    rung = s.ledger._bell.seen("plan")
    s.submit(grants[:1])
    assert s.ledger._bell.seen("plan") == rung, "one group cannot be enough"
    s.submit(grants[1:])
    assert s.ledger._bell.seen("plan") > rung and len(s.plan(1).items) == 4


def test_what_shares_a_commit_is_merged_by_kind_in_its_own_order() -> None:
    def kind_a(txn: Any, arguments: list[Any]) -> list[Any]:
        return arguments

    def kind_b(txn: Any, arguments: list[Any]) -> list[Any]:
        return arguments

    queue = [(kind_a, 1, True), (kind_b, 2, True), (kind_a, 3, False), (kind_a, 4, True), (kind_b, 5, True)]
    batches = _merge([_Operation(call, argument, mergeable, None) for call, argument, mergeable in queue])  # type: ignore[arg-type]
    assert [[operation.argument for operation in batch] for batch in batches] == [[1, 4], [2, 5], [3]]


def test_heartbeats_that_share_a_commit_fail_alone(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    held = [(grant.key, grant.token) for grant in s.lease(2)]
    beats = [(s.incarnation, version(0), held), ("nobody", None, []), (s.worker(), None, held[:1])]
    with ThreadPoolExecutor(len(beats)) as pool:
        asked = [pool.submit(s.ledger.heartbeat, *beat) for beat in beats]
        good, unknown, other = (one.exception(timeout=60) or one.result() for one in asked)
    assert good.lost == () and isinstance(unknown, InvalidRequest) and [str(key) for key in other.lost] == ["0.0"]
