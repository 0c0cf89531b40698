"""A worker dying at each of its failpoints: its successor has every slot sampled once, and nothing finished is made again."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_spool import sample

from rollbook.core.config import Config
from rollbook.core.packing import pack_i32
from rollbook.core.records import SlotKey
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.rollout.spool import Spool
from rollbook.rollout.worker import run_worker
from rollout_doubles import MemoryLedger, ScriptedEngine, publish, worker_config

ANSWERS = ("12", "13", "123", "1", "45", "6")
SLOTS = {SlotKey(i // 2, i % 2) for i in range(len(ANSWERS))}
IN_EVERY_RUN = (
    "worker.start.after_spool", "worker.start.after_note", "worker.start.after_register", "worker.load.before_proof",
    "worker.load.after_proof", "worker.before_note", "worker.note.before_rename", "worker.after_lease", "worker.after_generate",
    "worker.spool.before_sync", "worker.spool.after_sync", "worker.mid_spool", "worker.spool.between_renames",
    "worker.spool.before_directory_sync", "worker.before_submit", "worker.submit.after_answer", "worker.spool.between_discards",
    "worker.after_submit", "worker.before_note_removed",
)  # fmt: skip
SPOOLED_AT = {
    "worker.spool.before_sync": 1, "worker.spool.after_sync": 1, "worker.mid_spool": 4, "worker.spool.between_renames": 4,
    "worker.spool.before_directory_sync": 4, "worker.before_submit": 4, "worker.submit.after_answer": 4,
    "worker.spool.between_discards": 3,
}  # fmt: skip
"""Samples of the first batch of four that a death at the point's first crossing leaves in the spool."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.set_observer(None)
    failpoints.arm("")


class Ledger(MemoryLedger):
    """Slots of a dead worker that have no sample are granted again to whoever asks next."""

    def take_back(self) -> None:
        for grant in self.granted:
            if grant.key not in self.submitted and grant.key not in {key for key, _, _ in self.waiting}:
                task = json.loads(grant.task_json)
                self.waiting.appendleft((grant.key, task["prompt"], task["answer"]))


def life(config: Config, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch, number: int) -> ScriptedEngine:
    """One worker process."""
    engine = ScriptedEngine(ledger)
    monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life-{number}")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life-{number - 1}")
    run_worker(config, 0, ledger, ledger, threading.Event(), engine_factory=lambda *_: engine)
    return engine


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_run_crosses_every_point_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = Counter[str]()
    failpoints.set_observer(lambda name: crossed.update([name]))
    life(worker_config(tmp_path), MemoryLedger([publish(tmp_path, 0)], ANSWERS), monkeypatch, 1)
    assert set(crossed) == set(IN_EVERY_RUN)
    assert crossed["worker.spool.after_sync"] == crossed["worker.spool.between_discards"] == len(ANSWERS)


@pytest.mark.parametrize("point", IN_EVERY_RUN)
def test_a_worker_that_dies_at(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, ledger = worker_config(tmp_path), Ledger([publish(tmp_path, 0)], ANSWERS)
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised, match=point):
        life(config, ledger, monkeypatch, 1)
    failpoints.arm("")
    spooled = Spool(tmp_path / "spool" / "worker-0", config.run.id)
    kept = [s.key for s in spooled.load()]
    assert len(kept) == SPOOLED_AT.get(point, 0)
    acknowledged = set(ledger.submitted)
    ledger.submitted |= {s.key: s for s in spooled.load()}  # so that only what nobody has is granted again
    ledger.take_back()
    ledger.submitted = {key: s for key, s in ledger.submitted.items() if key in acknowledged}
    engine = life(config, ledger, monkeypatch, 2)
    assert set(ledger.submitted) == SLOTS
    assert not acknowledged.union(kept) & set(engine.generated), "what was finished was generated again"
    assert left_in(tmp_path / "spool" / "worker-0") == []


@pytest.mark.parametrize("named", [True, False], ids=["at the rename of the note", "behind the note"])
def test_a_note_that_is_not_whole_frees_nothing_and_a_whole_one_frees_its_slots(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ledger = worker_config(tmp_path), Ledger([publish(tmp_path, 0)], ANSWERS)
    failpoints.arm("worker.note.before_rename=raise" if named else "worker.after_lease=raise")
    with pytest.raises(FailpointRaised):
        life(config, ledger, monkeypatch, 1)
    failpoints.arm("")
    life(config, ledger, monkeypatch, 2)
    assert len(ledger.failures) == (0 if named else 4)


def test_a_worker_that_dies_before_its_report_leaves_the_note_that_frees_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ledger = worker_config(tmp_path), Ledger([publish(tmp_path, 0)], ANSWERS[:4])
    ledger.prompt_of = lambda prompt: pack_i32([]) if "13" in prompt else pack_i32(list(prompt.encode()))
    failpoints.arm("worker.before_report=raise")
    with pytest.raises(FailpointRaised):
        life(config, ledger, monkeypatch, 1)
    failpoints.arm("")
    assert len(ledger.submitted) == 3 and ledger.failures == []
    life(config, ledger, monkeypatch, 2)
    assert {f.key for f in ledger.failures} == {grant.key for grant in ledger.granted}


def test_a_worker_that_dies_behind_setting_a_file_aside_or_adopting_one_sends_the_rest(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run")
    spool.put([sample(0), sample(1), sample(2)])
    whole, damaged, torn = sorted(tmp_path.glob("*.sample"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    torn.rename(torn.with_suffix(".tmp"))  # whole, and its rename is missing
    for point in ("worker.spool.after_aside", "worker.spool.after_adopted"):
        failpoints.arm(f"{point}=raise")
        with pytest.raises(FailpointRaised, match=point):
            Spool(tmp_path, "run").load()
    failpoints.arm("")
    assert Spool(tmp_path, "run").load() == [sample(0), sample(2)]
    assert left_in(tmp_path) == sorted([whole.name, f"{damaged.name}.aside", torn.name])


@pytest.mark.parametrize("point", ["worker.spool.before_sync", "worker.spool.after_sync"])
def test_a_spool_on_a_full_disk_keeps_nothing_of_a_batch(tmp_path: Path, point: str) -> None:
    failpoints.arm(f"{point}=error:ENOSPC")
    with pytest.raises(OSError, match="No space left"):
        Spool(tmp_path, "run").put([sample(0), dataclasses.replace(sample(1), reward=None)])
    assert left_in(tmp_path) == []
