"""A directory or file whose writer died between its rename and the flush of that name: whoever finds it flushes the name
before a row relies on it, since a power failure may still take it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner_support import MemoryLedger, make_config, make_model_dir
from rollbook.cli.serving import write_run_files
from rollbook.core.host import Host
from rollbook.core.records import PolicyVersion, Role, RunRecord
from rollbook.learner.checkpoint import CheckpointFiles, Checkpoints
from rollbook.learner.model import load_policy
from rollbook.learner.publish import Publisher
from rollbook.learner.trainer import Trainer
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised


@pytest.fixture
def config(tmp_path):
    return make_config(make_model_dir(tmp_path / "model"), tmp_path)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


@pytest.fixture
def flushed(monkeypatch) -> list[Path]:
    """Paths flushed so far."""
    paths: list[Path] = []
    monkeypatch.setattr(Host, "fsync", lambda self, fd, path: paths.append(path))
    return paths


class Watched(MemoryLedger):
    """Notes what was flushed when a row was written."""

    def __init__(self, config, flushed: list[Path]) -> None:
        super().__init__(config)
        self._flushed = flushed
        self.flushed_at_row: set[str] = set()

    def commit_checkpoint(self, *args):
        self.flushed_at_row = {path.name for path in self._flushed}
        return super().commit_checkpoint(*args)

    def publish_version(self, *args):
        self.flushed_at_row = {path.name for path in self._flushed}
        return super().publish_version(*args)


def test_an_adopted_checkpoint_has_a_durable_name_before_its_row(config, tmp_path, flushed):
    ledger = Watched(config, flushed)
    term = ledger.acquire_role(Role.LEARNER, "one", 3.0)
    ledger.publish_version(term, PolicyVersion(0, 0, "0" * 64, "", "{}"))
    trainer = Trainer(load_policy(config), config)
    trainer.note(step=0, version=0, chain_digest=ledger.genesis, cursor=ledger.cursor("train"))
    failpoints.arm("learner.durable.after_rename=raise")
    with pytest.raises(FailpointRaised):
        CheckpointFiles(tmp_path / "checkpoints").write(trainer.state_dict(), epoch=1)
    failpoints.arm("")
    checkpoints = Checkpoints(tmp_path / "checkpoints", ledger, term, 2)
    flushed.clear()
    checkpoints.open(ledger.resume_point(), config.run.id, config.run.seed)
    assert checkpoints.steps() == [0]
    assert "checkpoints" in ledger.flushed_at_row


def test_a_version_found_whole_has_a_durable_name_before_its_row(config, flushed):
    ledger = Watched(config, flushed)
    publisher = Publisher(config, load_policy(config), ledger, ledger.acquire_role(Role.LEARNER, "one", 3.0))
    failpoints.arm("learner.durable.after_rename=raise")
    with pytest.raises(FailpointRaised):
        publisher.publish(0, 0)
    failpoints.arm("")
    flushed.clear()
    publisher.publish(0, 0)
    assert "versions" in ledger.flushed_at_row


def test_a_revision_found_on_disk_has_a_durable_name_before_the_server_serves(config, tmp_path, flushed):
    record = RunRecord(config.run.id, config.digest(), json.dumps({"config": json.loads(config.to_json())}), 0, config.rules())
    failpoints.arm("ledger.files.after_rename=raise@2")
    with pytest.raises(FailpointRaised):
        write_run_files(config, record)
    failpoints.arm("")
    assert list((tmp_path / "revisions").glob("*.json"))
    flushed.clear()
    write_run_files(config, record)
    assert "revisions" in {path.name for path in flushed}
