"""Checkpoints: a crash at every line, damage, adoption, retention, and states that do not belong to the ledger."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from learner_support import MemoryLedger, make_config, make_model_dir
from rollbook.core.errors import ChainMismatch, CheckpointDamaged, Fenced
from rollbook.core.records import CheckpointState, Cursor, PolicyVersion, Role
from rollbook.learner.checkpoint import MANIFEST, CheckpointFiles, Checkpoints
from rollbook.learner.model import load_policy
from rollbook.learner.publish import published_digest
from rollbook.learner.resume import compare_cursor, compare_with_ledger, restore_newest
from rollbook.learner.state import Progress, TrainingState
from rollbook.learner.trainer import Trainer
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

POINTS = ("mid_files", "before_rename", "after_rename", "after_row")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir, tmp_path):
    return make_config(model_dir, tmp_path)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


@pytest.fixture
def ledger(config):
    """A ledger with eight published steps, held by a learner."""
    ledger = MemoryLedger(config)
    term = ledger.acquire_role(Role.LEARNER, "one", 3.0)
    for step in range(9):
        if step:
            ledger.plan_step(term, 0, step)
        ledger.publish_version(term, PolicyVersion(0, step, f"{step}" * 64, "", "{}"))
    return ledger


@pytest.fixture
def trainer(config):
    return Trainer(load_policy(config), config)


def open_checkpoints(config, ledger, tmp_path, keep=2) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", ledger, ledger.term, keep)
    checkpoints.open(ledger.resume_point(), config.run.id, config.run.seed)
    return checkpoints


def state_at(trainer: Trainer, ledger: MemoryLedger, step: int) -> TrainingState:
    chain = ledger.plans[step].chain_digest if step else ledger.genesis
    trainer.note(step=step, version=step, chain_digest=chain, cursor=ledger.cursor("train"))
    return trainer.state_dict()


def directories(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_saved_state_is_loaded_bit_for_bit(config, ledger, trainer, tmp_path):
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    state = state_at(trainer, ledger, 2)
    row = checkpoints.save(state)
    assert row.dir_name == "0.2.1" and ledger.checkpoints[2] == row
    loaded = checkpoints.files.read(row)
    assert loaded.digest() == state.digest() and loaded.values == state.values
    assert directories(tmp_path) == ["0.2.1"]


def test_a_manifest_says_what_it_holds_and_what_computed_it(config, ledger, trainer, tmp_path):
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    row = checkpoints.save(state_at(trainer, ledger, 2))
    manifest = checkpoints.files.manifest(row.dir_name)
    assert manifest["files"].keys() == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert all(entry.keys() == {"size", "sha256"} for entry in manifest["files"].values())
    assert (manifest["lineage"], manifest["step"], manifest["epoch"]) == (0, 2, 1)
    assert manifest["chain_digest"] == ledger.plans[2].chain_digest and manifest["config_digest"] == config.digest()
    assert manifest["cursor"]["next_ordinal"] == 24
    assert {"torch", "numpy", "transformers", "safetensors", "python"} <= manifest["libraries"].keys()
    assert manifest["generators_not_drawn_from"] == ["python", "numpy", "torch_cpu", "torch_cuda"]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_line_leaves_the_one_before_or_the_new_one(config, ledger, trainer, tmp_path, point):
    before = open_checkpoints(config, ledger, tmp_path).save(state_at(trainer, ledger, 2))
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    state = state_at(trainer, ledger, 4)
    failpoints.arm(f"learner.checkpoint.{point}=raise")
    with pytest.raises(FailpointRaised):
        checkpoints.save(state)
    failpoints.arm("")
    after = open_checkpoints(config, ledger, tmp_path)
    expected = [4, 2] if point in ("after_rename", "after_row") else [2]
    assert after.steps() == expected
    assert not [name for name in directories(tmp_path) if name.startswith("tmp.")]
    assert after.files.read(before).progress.step == 2
    again = after.save(state)
    assert after.files.read(again).digest() == state.digest()
    assert open_checkpoints(config, ledger, tmp_path).steps() == [4, 2]


def test_a_torn_manifest_is_never_taken_for_a_checkpoint(config, ledger, trainer, tmp_path):
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    checkpoints.files.write(state_at(trainer, ledger, 4), epoch=1)
    path = tmp_path / "checkpoints" / "0.4.1" / MANIFEST
    path.write_bytes(path.read_bytes()[:100])
    assert open_checkpoints(config, ledger, tmp_path).steps() == []
    assert directories(tmp_path) == []


def test_a_complete_directory_without_its_row_is_adopted_once(config, ledger, trainer, tmp_path):
    state = state_at(trainer, ledger, 4)
    row = open_checkpoints(config, ledger, tmp_path).files.write(state, epoch=1)
    adopted = open_checkpoints(config, ledger, tmp_path)
    assert adopted.committed == [row] and ledger.checkpoints[4] == row
    assert open_checkpoints(config, ledger, tmp_path).committed == [row]


def test_of_two_complete_directories_of_a_step_the_newer_epoch_is_adopted(config, ledger, trainer, tmp_path):
    files = CheckpointFiles(tmp_path / "checkpoints")
    state = state_at(trainer, ledger, 4)
    files.write(state, epoch=1)
    files.write(state, epoch=2)
    ledger.acquire_role(Role.LEARNER, "three", 3.0, supersede="one")
    assert [row.dir_name for row in open_checkpoints(config, ledger, tmp_path).committed] == ["0.4.2"]
    assert directories(tmp_path) == ["0.4.2"]


def test_a_directory_of_another_history_is_set_aside_and_not_adopted(config, ledger, trainer, tmp_path):
    files = CheckpointFiles(tmp_path / "checkpoints")
    trainer.note(step=4, version=4, chain_digest="f" * 64)
    files.write(trainer.state_dict(), epoch=1)
    state_at(trainer, ledger, 8)
    files.write(dataclasses.replace(trainer.state_dict()), epoch=1)
    del ledger.published[8]
    assert open_checkpoints(config, ledger, tmp_path).steps() == []
    assert directories(tmp_path) == ["foreign.0.4.1", "foreign.0.8.1"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_every_damaged_file_is_named(config, ledger, trainer, tmp_path, file, damage):
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    row = checkpoints.save(state_at(trainer, ledger, 2))
    path = tmp_path / "checkpoints" / row.dir_name / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointDamaged, match=file):
        checkpoints.files.read(row)


def test_a_manifest_replaced_as_a_whole_is_not_the_committed_one(config, ledger, trainer, tmp_path):
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    row = checkpoints.save(state_at(trainer, ledger, 2))
    path = tmp_path / "checkpoints" / row.dir_name / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config_digest": "0" * 64}))
    with pytest.raises(CheckpointDamaged, match="not the manifest that was committed"):
        checkpoints.files.read(row)


def make_loadable(trainer: Trainer, ledger: MemoryLedger, config, tmp_path, steps) -> Checkpoints:
    digest = published_digest(trainer.policy, trainer.policy.model.dtype)
    trainer.note(version_digest=digest)
    checkpoints = open_checkpoints(config, ledger, tmp_path)
    for step in steps:
        checkpoints.save(state_at(trainer, ledger, step))
    return checkpoints


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(config, ledger, trainer, tmp_path, caplog):
    checkpoints = make_loadable(trainer, ledger, config, tmp_path, (2, 4))
    (tmp_path / "checkpoints" / "0.4.1" / "model.safetensors").write_bytes(b"")
    other = Trainer(load_policy(config), config)
    assert restore_newest(other, checkpoints, ledger, ledger.resume_point(), {}) == 2
    assert ledger.checkpoints[4].state is CheckpointState.CORRUPT
    assert checkpoints.steps() == [2] and "corrupt.0.4.1" in directories(tmp_path)
    assert "0.4.1/model.safetensors" in caplog.text
    remade = checkpoints.save(state_at(trainer, ledger, 4))
    assert ledger.checkpoints[4] == remade and checkpoints.files.read(remade).progress.step == 4


def test_with_every_checkpoint_damaged_training_starts_over(config, ledger, trainer, tmp_path, caplog):
    checkpoints = make_loadable(trainer, ledger, config, tmp_path, (2, 4))
    for name in ("0.2.1", "0.4.1"):
        (tmp_path / "checkpoints" / name / MANIFEST).unlink()
    other = Trainer(load_policy(config), config)
    fresh = other.state_dict().digest()
    assert restore_newest(other, checkpoints, ledger, ledger.resume_point(), {}) is None
    assert other.state_dict().digest() == fresh and other.progress.step == 0
    assert "none of 2 checkpoints loads" in caplog.text


def test_only_the_configured_number_is_kept_and_never_fewer_than_two(config, ledger, trainer, tmp_path):
    for keep, expected in ((1, 2), (2, 2), (3, 3)):
        root = tmp_path / str(keep)
        ledger.checkpoints.clear()
        checkpoints = open_checkpoints(config, ledger, root, keep)
        for step in range(6):
            checkpoints.save(state_at(trainer, ledger, step))
        kept = list(range(6))[-expected:]
        assert sorted(checkpoints.steps()) == kept
        assert directories(root) == [f"0.{step}.1" for step in kept]
        assert [s for s, row in ledger.checkpoints.items() if row.state is CheckpointState.COMMITTED] == kept


def test_a_deletion_interrupted_by_a_crash_is_finished_at_the_next_start(config, ledger, trainer, tmp_path):
    checkpoints = open_checkpoints(config, ledger, tmp_path, keep=3)
    for step in (2, 4, 6):
        checkpoints.save(state_at(trainer, ledger, step))
    ledger.mark_checkpoint(ledger.term, 0, 2, "deleting")
    (tmp_path / "checkpoints" / "0.2.1" / MANIFEST).unlink()
    assert sorted(open_checkpoints(config, ledger, tmp_path, keep=3).steps()) == [4, 6]
    assert directories(tmp_path) == ["0.4.1", "0.6.1"]


def test_a_fenced_learner_commits_nothing_and_clobbers_nothing(config, ledger, trainer, tmp_path):
    zombie = open_checkpoints(config, ledger, tmp_path)
    ledger.acquire_role(Role.LEARNER, "two", 3.0, supersede="one")
    successor = open_checkpoints(config, ledger, tmp_path)
    state = state_at(trainer, ledger, 4)
    row = successor.save(state)
    with pytest.raises(Fenced):
        zombie.save(state)
    assert ledger.checkpoints[4] == row and successor.files.read(row).progress.step == 4
    assert open_checkpoints(config, ledger, tmp_path).committed == [row]
    assert directories(tmp_path) == ["0.4.2"]


def test_a_loaded_state_of_another_chain_version_or_step_is_refused(config, ledger, trainer, tmp_path):
    checkpoints = make_loadable(trainer, ledger, config, tmp_path, (4,))
    row, point = checkpoints.committed[0], ledger.resume_point()
    compare_with_ledger(trainer, row, ledger, point, {})
    good = copy.copy(trainer.progress)
    for changes in ({"chain_digest": "f" * 64}, {"version_digest": "f" * 64}, {"step": 2, "version": 2}, {"lineage": 1}):
        trainer.note(**changes)
        with pytest.raises(ChainMismatch):
            compare_with_ledger(trainer, row, ledger, point, {})
        trainer.progress = good
    with pytest.raises(ChainMismatch, match="different runs"):
        compare_with_ledger(trainer, row, ledger, dataclasses.replace(point, chain_digests={4: "f" * 64}), {})
    with pytest.raises(ChainMismatch, match="published were"):
        compare_with_ledger(trainer, row, ledger, point, {4: ledger.published[4]})


@pytest.mark.parametrize(
    ("ordinal", "state", "is_older"),
    [(11, "a", True), (12, "b", True), (12, "a", False), (13, "b", False)],
)
def test_a_ledger_older_than_the_checkpoint_is_refused(ordinal, state, is_older):
    progress = Progress(step=1, version=1, cursor=Cursor("train", 12, "a", False))
    ledger = Cursor("train", ordinal, state, False)
    if is_older:
        with pytest.raises(ChainMismatch, match="older copy"):
            compare_cursor(progress, ledger)
    else:
        compare_cursor(progress, ledger)


def test_a_learner_that_was_replaced_leaves_the_directories_of_its_successor_alone(config, ledger, trainer, tmp_path):
    """It wakes up while it opens: the successor's directory has no row yet, and its version was not there when it asked."""
    files, epoch = CheckpointFiles(tmp_path / "checkpoints"), ledger.term.epoch
    files.write(state_at(trainer, ledger, 4), epoch=epoch + 1)
    (tmp_path / "checkpoints" / f"tmp.0.6.{epoch + 1}.0123abcd").mkdir()
    (tmp_path / "checkpoints" / f"tmp.0.6.{epoch}.0123abcd").mkdir()
    before = dataclasses.replace(ledger.resume_point(), head=None)
    Checkpoints(tmp_path / "checkpoints", ledger, ledger.term, 2).open(before, config.run.id, config.run.seed)
    assert directories(tmp_path) == [f"0.4.{epoch + 1}", f"tmp.0.6.{epoch + 1}.0123abcd"]
