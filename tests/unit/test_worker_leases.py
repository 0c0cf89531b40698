"""What a worker does with its leases: renewed while it works, given up in time, counted, and lost only once."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from worker_runs import ANSWERS, spooled, work

from rollbook.core.errors import (
    ConfigError,
    Fenced,
    Unavailable,
)
from rollbook.core.records import LeaseGrant, SlotKey, SubmitOutcome
from rollbook.observe import failpoints
from rollbook.observe.metrics import GPU_SECONDS_TOTAL
from rollbook.rollout import delivery
from rollbook.rollout.delivery import repeat_call
from rollbook.rollout.heartbeat import TRUSTED_SHARE, Heartbeat
from rollbook.rollout.worker import worker_kind
from rollout_doubles import MemoryLedger, ScriptedEngine, publish, worker_config


def wasted_s() -> float:
    """Device time of this process that came to nothing."""
    samples = (s for family in GPU_SECONDS_TOTAL.collect() for s in family.samples)
    return sum(s.value for s in samples if s.labels == {"pool": "actor", "activity": "wasted"})


@pytest.mark.parametrize(("late_submit", "kept"), [("salvage", 4), ("strict", 3)])
def test_a_lease_lost_while_generating_is_submitted_only_where_it_can_be_salvaged(
    tmp_path: Path, late_submit: str, kept: int
) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    engine = ScriptedEngine(ledger)

    def lose_one(requests: object) -> None:
        ledger.lost.add(SlotKey(0, 1))
        seen = len(ledger.beats)
        until = time.monotonic() + 10
        while len(ledger.beats) < seen + 2 and time.monotonic() < until:
            time.sleep(0.01)

    engine.on_generate = lose_one
    work(worker_config(tmp_path, ledger={"heartbeat_s": 0.05, "late_submit": late_submit}), ledger, engine)
    assert len(ledger.submitted) == kept


def test_leases_are_renewed_while_generating_and_released_afterwards(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4], drain_when_done=False)
    engine, stop = ScriptedEngine(ledger), threading.Event()

    def await_beats(wanted: bool) -> None:
        seen, until = len(ledger.beats), time.monotonic() + 10
        while not any(bool(b) == wanted for b in ledger.beats[seen + 1 :]) and time.monotonic() < until:
            time.sleep(0.01)

    engine.on_generate = lambda requests: await_beats(True)
    thread = threading.Thread(target=work, args=(worker_config(tmp_path), ledger, engine, stop))
    thread.start()
    until = time.monotonic() + 20
    while len(ledger.submitted) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    await_beats(False)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    assert [(key, 5) for key in sorted(ledger.submitted)] in [sorted(b) for b in ledger.beats]
    assert ledger.beats[-1] == []


def grant(ttl_s: float = 30.0) -> LeaseGrant:
    return LeaseGrant(SlotKey(0, 0), 1, 1, ttl_s, 0, b"", "{}", 0, 0, "")


@pytest.mark.parametrize(("share", "usable"), [(TRUSTED_SHARE - 0.05, True), (TRUSTED_SHARE + 0.001, False)])
def test_an_unconfirmed_lease_is_used_for_four_fifths_of_its_ttl(share: float, usable: bool) -> None:
    beat = Heartbeat(MemoryLedger([]), "a", 1.0, 600.0)
    beat.hold([grant()], asked_at=time.monotonic() - share * 30.0)
    assert beat.usable(grant()) is usable


def test_a_beat_confirms_a_lease_and_a_failed_beat_does_not() -> None:
    ledger = MemoryLedger([])
    beat = Heartbeat(ledger, "a", 1.0, 600.0)
    beat.hold([grant()], asked_at=time.monotonic() - 29.0)
    ledger.fail("heartbeat", Unavailable("down"))
    with pytest.raises(Unavailable):
        beat.beat(0.0)
    assert not beat.usable(grant())
    beat.beat(0.0)
    assert beat.usable(grant())


@pytest.mark.parametrize(("held_s", "renewed"), [(599.0, True), (601.0, False)])
def test_a_lease_is_not_renewed_for_ever(held_s: float, renewed: bool) -> None:
    ledger = MemoryLedger([])
    beat = Heartbeat(ledger, "a", 1.0, 600.0)
    beat.hold([grant()], asked_at=time.monotonic() - held_s)
    beat.beat(0.0)
    assert ledger.beats == [[(SlotKey(0, 0), 1)] if renewed else []]
    assert beat.usable(grant()) is renewed


def test_a_lost_lease_stays_lost_and_another_token_is_another_lease() -> None:
    ledger = MemoryLedger([])
    beat = Heartbeat(ledger, "a", 1.0, 600.0)
    beat.hold([grant()], asked_at=time.monotonic())
    assert not beat.usable(dataclasses.replace(grant(), token=2))
    ledger.lost.add(SlotKey(0, 0))
    beat.beat(0.0)
    ledger.lost.clear()
    beat.beat(0.0)
    assert not beat.usable(grant())


def test_leases_not_confirmed_in_time_are_not_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    monkeypatch.setattr(Heartbeat, "usable", lambda self, grant: grant.key.sibling == 0)
    engine = work(worker_config(tmp_path), ledger)
    assert sorted(engine.generated) == [SlotKey(0, 0), SlotKey(1, 0)] == sorted(ledger.submitted)


def test_a_keyed_call_is_given_up_when_its_time_is_over_and_other_errors_at_once() -> None:
    calls: list[int] = []

    def down() -> None:
        calls.append(1)
        raise Unavailable("down")

    with pytest.raises(Unavailable):
        repeat_call(down, threading.Event(), unreachable_max_s=0.0)
    assert len(calls) == 1

    def fenced() -> None:
        calls.append(1)
        raise Fenced()

    with pytest.raises(Fenced):
        repeat_call(fenced, threading.Event())
    assert len(calls) == 2


def test_worker_processes_are_counted_over_all_kinds(tmp_path: Path) -> None:
    kinds = [{"engine": "transformers", "count": 2}, {"engine": "vllm", "count": 1}]
    config = worker_config(tmp_path, workers=kinds)
    assert [worker_kind(config, i).engine for i in range(3)] == ["transformers", "transformers", "vllm"]
    for outside in (-1, 3):
        with pytest.raises(ConfigError, match="3 workers"):
            worker_kind(config, outside)


def test_an_outcome_that_is_not_durable_is_counted_and_ends_the_submission(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    config = worker_config(tmp_path)
    failpoints.arm("worker.before_submit=raise")
    with pytest.raises(failpoints.FailpointRaised):
        work(config, ledger)
    failpoints.arm("")
    first = next(iter(ledger.granted)).key
    left = delivery.Delivery(ledger, delivery.Spool(tmp_path / "spool" / "worker-0", "test"), threading.Event())
    other = left._spool.load()[0]
    ledger.submitted[first] = dataclasses.replace(other, reward=0.25)
    before_s = wasted_s()
    assert left.send_spooled() == 2
    assert left.outcomes == {SubmitOutcome.CONFLICT: 1, SubmitOutcome.ACCEPTED: 1}
    assert wasted_s() - before_s == pytest.approx(other.generate_s), "no row tells of it, so its device time is counted here"
    assert spooled(tmp_path) == []
