"""The worker loop against a ledger in memory: order of steps, faults of the ledger, of the verifier and of the engine."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_runs import ANSWERS, spooled, work

from rollbook.core.errors import (
    DigestMismatch,
    Fenced,
    InvalidRequest,
    NotReady,
    StaleWeights,
    Unavailable,
    WrongRun,
)
from rollbook.core.packing import pack_i32, unpack_i32
from rollbook.core.records import Blame, RewardStatus, SlotKey
from rollbook.observe import failpoints
from rollbook.rollout import delivery, worker
from rollout_doubles import MemoryLedger, ScriptedEngine, publish, worker_config


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_every_leased_slot_is_generated_verified_submitted_and_leaves_the_spool(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 3)], ANSWERS)
    engine = work(worker_config(tmp_path), ledger)
    assert sorted(ledger.submitted) == sorted(SlotKey(i // 2, i % 2) for i in range(6))
    for sample in ledger.submitted.values():
        assert sample.reward == 1.0 and sample.reward_status is RewardStatus.GIVEN
        assert set(unpack_i32(sample.trajectory.versions)) == {3}
        assert sample.lease_token == 5 and sample.verify_s >= 0
    assert len({s.sequence for s in ledger.submitted.values()}) == 6
    assert [len(call) for call in ledger.submit_calls] == [4, 2]
    assert spooled(tmp_path) == [] and ledger.failures == []
    assert engine.events[-1] == "closed"


def test_a_newer_head_is_loaded_before_the_next_lease(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS)
    engine = ScriptedEngine(ledger)

    def publish_during_first_batch(requests: object) -> None:
        if len(ledger.versions) == 1:
            ledger.versions.append(publish(tmp_path, 1))

    engine.on_generate = publish_during_first_batch
    work(worker_config(tmp_path), ledger, engine)
    versions = [unpack_i32(s.trajectory.versions)[0] for s in ledger.submitted.values()]
    assert sorted(versions) == [0, 0, 0, 0, 1, 1]


def test_a_fork_takes_the_worker_back_to_the_shared_version_and_on_into_the_new_lineage(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 5)], (*ANSWERS, "7", "8", "9", "10"))
    engine = ScriptedEngine(ledger)

    def fork(requests: object) -> None:
        if len(ledger.versions) == 1:
            ledger.versions.append(publish(tmp_path, 2))
        else:
            ledger.versions.append(dataclasses.replace(publish(tmp_path, 3), lineage=1))

    engine.on_generate = fork
    work(worker_config(tmp_path), ledger, engine)
    used = [(s.lineage, unpack_i32(s.trajectory.versions)[0]) for s in ledger.submitted.values()]
    assert used == [(0, 5)] * 4 + [(0, 2)] * 4 + [(1, 3)] * 2


def test_the_spool_of_a_dead_process_is_sent_before_an_engine_exists(tmp_path: Path) -> None:
    config = worker_config(tmp_path)
    dead = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    failpoints.arm("worker.before_submit=raise")
    with pytest.raises(failpoints.FailpointRaised):
        work(config, dead)
    assert dead.submitted == {} and len(spooled(tmp_path)) == 4

    failpoints.arm("")
    ledger = MemoryLedger(dead.versions)
    engine = work(config, ledger)
    assert ledger.events.index("submit_samples") < ledger.events.index("engine")
    assert len(ledger.submitted) == 4 and engine.generated == []
    assert spooled(tmp_path) == []


def test_a_death_after_the_acknowledgement_sends_nothing_again(tmp_path: Path) -> None:
    config = worker_config(tmp_path)
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    failpoints.arm("worker.after_submit=raise")
    with pytest.raises(failpoints.FailpointRaised):
        work(config, ledger)
    failpoints.arm("")
    work(config, ledger)
    assert len(ledger.submit_calls) == 1 and len(ledger.submitted) == 4


@pytest.mark.parametrize("point", ["worker.after_lease", "worker.after_generate"])
def test_a_death_before_the_spool_leaves_nothing_behind(tmp_path: Path, point: str) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    failpoints.arm(f"{point}=raise")
    with pytest.raises(failpoints.FailpointRaised):
        work(worker_config(tmp_path), ledger)
    assert ledger.submitted == {} and spooled(tmp_path) == []


@pytest.mark.parametrize(("dead", "freed"), [("first", 4), ("another", 0), ("", 0)])
def test_a_successor_gives_back_the_leases_of_the_process_it_replaces_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str, freed: int
) -> None:
    ledger, config = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4]), worker_config(tmp_path)
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "first")
    failpoints.arm("worker.after_generate=raise")
    with pytest.raises(failpoints.FailpointRaised):
        work(config, ledger)
    failpoints.arm("")
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "second")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", dead)
    work(config, ledger)
    assert len(ledger.failures) == freed
    assert {(f.incarnation, f.lease_token) for f in ledger.failures} <= {("first", 5)}


def test_a_worker_that_ends_in_order_leaves_no_note_of_leases(tmp_path: Path) -> None:
    work(worker_config(tmp_path), MemoryLedger([publish(tmp_path, 0)], ANSWERS))
    assert list((tmp_path / "spool" / "worker-0").iterdir()) == []


def test_an_unanswered_submission_is_repeated_with_the_same_content(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    ledger.fail("submit_samples", Unavailable("down"), Unavailable("still down"))
    work(worker_config(tmp_path), ledger)
    first, second, third = ledger.submit_calls
    assert first == second == third and len(ledger.submitted) == 4
    assert spooled(tmp_path) == []


def test_a_lease_call_is_repeated_under_its_request_id_and_new_calls_get_new_ones(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    ledger.fail("lease_slots", Unavailable("down"))
    work(worker_config(tmp_path), ledger)
    assert ledger.lease_requests[0] == ledger.lease_requests[1]
    assert len(set(ledger.lease_requests)) == len(ledger.lease_requests) - 1


def test_samples_stay_in_the_spool_when_the_ledger_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "STOPPING_MAX_S", 0.0)
    stop = threading.Event()
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    ledger.fail("submit_samples", *[Unavailable("gone")] * 50)
    engine = ScriptedEngine(ledger)
    engine.on_generate = lambda requests: stop.set()
    with pytest.raises(Unavailable):
        work(worker_config(tmp_path), ledger, engine, stop)
    assert len(spooled(tmp_path)) == 4 and ledger.submitted == {}


def test_one_refused_sample_does_not_block_the_others(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    ledger.fail("submit_samples", InvalidRequest("batch too large"), InvalidRequest("this one is too large"))
    work(worker_config(tmp_path), ledger)
    assert list(ledger.submitted) == [SlotKey(0, 1)]
    (failure,) = ledger.failures
    assert failure.key == SlotKey(0, 0) and "too large" in failure.reason
    assert [name.endswith(".aside") for name in spooled(tmp_path)] == [True]


def test_the_wrong_run_ends_the_worker_and_keeps_its_samples(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    ledger.fail("submit_samples", WrongRun())
    with pytest.raises(WrongRun):
        work(worker_config(tmp_path), ledger)
    assert len(spooled(tmp_path)) == 2


@pytest.mark.parametrize("reward", ["rollout_doubles:raising_reward", "rollout_doubles:nan_reward"])
def test_a_broken_verifier_gives_a_report_for_its_slot_and_a_reward_for_no_one(tmp_path: Path, reward: str) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    work(worker_config(tmp_path, reward=reward), ledger)
    (failure,) = ledger.failures
    assert failure.key == SlotKey(0, 1) and failure.lease_token == 5
    assert failure.status is RewardStatus.VERIFIER_ERROR and failure.blame is Blame.UNCLEAR
    assert ("LookupError: the verifier's table is gone" if "raising" in reward else "nan") in failure.reason
    assert len(ledger.submitted) == 3 and failure.key not in ledger.submitted


def test_a_wrong_answer_is_an_outcome_with_reward_zero(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    engine = ScriptedEngine(ledger)
    engine.answer = lambda request: [*b"99", 257]
    work(worker_config(tmp_path), ledger, engine)
    assert [s.reward for s in ledger.submitted.values()] == [0.0, 0.0] and ledger.failures == []


def test_an_answer_of_end_of_sequence_alone_is_a_sample_and_no_tokens_at_all_is_not(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    engine = ScriptedEngine(ledger)
    engine.answer = lambda request: [257] if request.key.sibling == 0 else []
    work(worker_config(tmp_path), ledger, engine)
    assert ledger.submitted[SlotKey(0, 0)].reward == 0.0
    assert [(f.key, f.reason) for f in ledger.failures] == [(SlotKey(0, 1), "empty completion")]


def test_a_prompt_that_does_not_fit_is_reported_and_the_batch_goes_on(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    room = 64 - 9
    lengths = {"sort 12:": room, "sort 13:": room + 1, "sort 123:": 0, "sort 1:": 5}
    ledger.prompt_of = lambda prompt: pack_i32(([49] * 64)[: lengths[prompt]])
    engine = ScriptedEngine(ledger)
    engine.answer = lambda request: [49, 257]
    work(worker_config(tmp_path), ledger, engine)
    assert {f.key: f.reason.split(";")[0] for f in ledger.failures} == {
        SlotKey(0, 1): "prompt of 56 tokens + max_new_tokens 9 exceeds max_model_len 64",
        SlotKey(1, 0): "empty prompt",
    }
    assert sorted(ledger.submitted) == [SlotKey(0, 0), SlotKey(1, 1)]


def test_an_engine_error_frees_its_slots_and_ends_the_process(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:4])
    engine = ScriptedEngine(ledger)

    def explode(requests: object) -> None:
        raise MemoryError("no room for the cache")

    engine.on_generate = explode
    with pytest.raises(MemoryError):
        work(worker_config(tmp_path), ledger, engine)
    assert len(ledger.failures) == 4 and {f.blame for f in ledger.failures} == {Blame.INFRA}
    assert "no room for the cache" in ledger.failures[0].reason
    assert engine.events[-1] == "closed"


def test_changed_bytes_are_refused_before_anything_is_leased(tmp_path: Path) -> None:
    version = publish(tmp_path, 0)
    publish(tmp_path, 0, value=7.0)
    ledger = MemoryLedger([version], ANSWERS)
    with pytest.raises(DigestMismatch, match="bytes changed"):
        work(worker_config(tmp_path), ledger)
    assert ledger.granted == []


@pytest.mark.parametrize(("gap", "refused"), [(0.0009, False), (0.0011, True), (float("nan"), True)])
def test_an_engine_that_computes_with_other_weights_is_refused(tmp_path: Path, gap: float, refused: bool) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS)
    engine = ScriptedEngine(ledger)
    engine.scores = [score + gap for score in engine.scores]
    if refused:
        with pytest.raises(StaleWeights, match="per token"):
            work(worker_config(tmp_path), ledger, engine)
        assert ledger.granted == []
    else:
        work(worker_config(tmp_path), ledger, engine)
        assert len(ledger.submitted) == 6


@pytest.mark.parametrize("probe", ["", "{}", '{"token_ids": [1], "logprobs": []}', '{"token_ids": [1, 2], "logprobs": []}'])
def test_a_version_without_a_usable_probe_is_refused(tmp_path: Path, probe: str) -> None:
    version = dataclasses.replace(publish(tmp_path, 0), probe_json=probe)
    with pytest.raises(StaleWeights):
        work(worker_config(tmp_path), MemoryLedger([version], ANSWERS))


def test_missing_bytes_are_asked_for_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = dataclasses.replace(publish(tmp_path, 0), path="versions/nowhere")
    ledger = MemoryLedger([version], ANSWERS)
    monkeypatch.setattr(worker, "VERSION_WAIT_S", 0.3)
    with pytest.raises(NotReady, match="versions/nowhere"):
        work(worker_config(tmp_path), ledger)
    assert ledger.events.count("lease_slots") >= 2


def test_a_version_deleted_while_it_is_read_gives_way_to_the_new_head(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS[:2])
    engine = ScriptedEngine(ledger)
    load = engine.load

    def overtaken(weights_dir: str, version: int) -> str:
        if version == 0:
            shutil.rmtree(weights_dir)
            ledger.versions.append(publish(tmp_path, 1))
            raise DigestMismatch(f"{weights_dir}/model.safetensors cannot be read: no such file")
        return load(weights_dir, version)

    engine.load = overtaken  # type: ignore[method-assign]
    work(worker_config(tmp_path), ledger, engine)
    assert len(ledger.submitted) == 2 and engine.version == 1


def test_a_version_republished_with_other_weights_is_loaded_again(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS)
    engine = ScriptedEngine(ledger)

    def fork(requests: object) -> None:
        if engine.generated == []:
            ledger.versions = [publish(tmp_path, 0, value=9.0)]
            ledger.fail("lease_slots", StaleWeights("version 0 has another digest"))

    engine.on_generate = fork
    work(worker_config(tmp_path), ledger, engine)
    assert len(ledger.submitted) == 6
    assert {g.version_digest for g in ledger.granted[4:]} == {ledger.versions[0].digest}


def test_a_stop_finishes_the_batch_in_hand_and_leases_no_more(tmp_path: Path) -> None:
    stop = threading.Event()
    ledger = MemoryLedger([publish(tmp_path, 0)], ANSWERS)
    engine = ScriptedEngine(ledger)
    engine.on_generate = lambda requests: stop.set()
    work(worker_config(tmp_path), ledger, engine, stop)
    assert len(ledger.submitted) == 4 and len(ledger.granted) == 4


def test_a_drain_learned_from_a_heartbeat_ends_the_worker(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], drain_when_done=False)
    ledger.draining = True
    work(worker_config(tmp_path), ledger)
    assert ledger.granted == []


def test_a_fenced_heartbeat_ends_the_worker(tmp_path: Path) -> None:
    ledger = MemoryLedger([publish(tmp_path, 0)], drain_when_done=False)
    ledger.fail("heartbeat", Unavailable("busy"), Fenced("a newer incarnation"))
    with pytest.raises(Fenced):
        work(worker_config(tmp_path), ledger)
