"""`replay` with an explanation of the first difference, and from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner_support import MemoryLedger, make_config, make_model_dir, rollouts
from rollbook.cli.main import main
from rollbook.core.errors import ChainMismatch, DigestMismatch, InvalidRequest
from rollbook.core.records import PlanOutcome
from rollbook.core.weights import safetensors_digest
from rollbook.learner.compare import first_difference, recorded_weights, relative_difference
from rollbook.learner.loop import run_learner
from rollbook.learner.publish import WEIGHTS_FILE
from rollbook.learner.replay import replay
from rollbook.learner.trainer import Trainer

STEPS = 6
"""With a checkpoint every two steps, two kept and a lag of two, bytes stay of versions 0, 3, 4, 5, 6; checkpoints of 4, 6."""
TENSOR = "model.layers.0.self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model_dir, tmp_path, monkeypatch):
    """A finished run: its configuration and its ledger."""
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    config = make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps=2)
    ledger = MemoryLedger(config)
    assert run_learner(config, ledger, threading.Event())
    return config, ledger


def directory(config, ledger, version: int) -> Path:
    return Path(config.run.dir) / ledger.published[version].path


def forge(config, ledger, version: int, change) -> None:
    """Change the recorded bytes of a version, with the digest that goes with them."""
    file = directory(config, ledger, version) / WEIGHTS_FILE
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    ledger.published[version] = dataclasses.replace(ledger.published[version], digest=safetensors_digest(file))


def perturb(monkeypatch, step: int, name: str = TENSOR) -> None:
    """Let every later training of ``step`` end with other values in one tensor."""
    train_step = Trainer.train_step

    def altered(trainer, batch):
        result = train_step(trainer, batch)
        if trainer.progress.step == step:
            with torch.no_grad():
                dict(trainer.policy.named_tensors())[name].add_(0.25)
        return result

    monkeypatch.setattr(Trainer, "train_step", altered)


def test_a_single_flipped_bit_is_found_by_step_tensor_and_index(run):
    config, ledger = run

    def flip(tensors):
        tensors[TENSOR].view(torch.int32)[5] ^= 1

    forge(config, ledger, 4, flip)
    result = replay(config, ledger, STEPS, explain=True)
    assert not result["equal"] and result["first_difference"]["step"] == 4
    told = result["explanation"]
    assert (told["step"], told["compared_with"]) == (4, ledger.published[4].path)
    tensor = told["tensor"]
    assert (tensor["name"], tensor["dtype"], tensor["elements_differing"], tensor["first_index"]) == (TENSOR, "float32", 1, (5,))
    assert (tensor["shape"], tensor["elements"], tensor["tensors_differing"]) == ((16,), 16, 1)
    assert 0 < tensor["max_abs_difference"] == abs(tensor["recorded"] - tensor["replayed"]) < 1e-6
    assert 0 < told["relative_difference"] < 1e-6
    assert told["metrics"] == {} and told["outcome"] is None and told["comparable_steps"] == []
    assert f"step 4 is the first that differs: {TENSOR} [16] (float32)" in told["summary"]
    assert "1 of 16 elements" in told["summary"]
    json.dumps(result)


def test_an_equal_replay_has_nothing_to_explain(run):
    config, ledger = run
    result = replay(config, ledger, STEPS, explain=True)
    assert result["equal"] and result["explanation"] is None
    assert "explanation" not in replay(config, ledger, STEPS)


def test_the_starting_weights_can_differ_too(run):
    config, ledger = run
    forge(config, ledger, 0, lambda tensors: tensors[TENSOR].add_(1.0))
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert told["step"] == 0 and told["tensor"]["elements_differing"] == 16 and told["tensor"]["max_abs_difference"] == 1.0


def test_where_the_bytes_are_gone_the_checkpoint_of_the_step_is_compared(run, monkeypatch):
    config, ledger = run
    shutil.rmtree(directory(config, ledger, 4))
    perturb(monkeypatch, 4)
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert (told["step"], told["compared_with"], told["tensor"]["name"]) == (4, "checkpoints/0.4.1", TENSOR)
    assert told["tensor"]["max_abs_difference"] == pytest.approx(0.25)


def test_damaged_bytes_are_not_compared_with(run, monkeypatch):
    config, ledger = run
    file = directory(config, ledger, 4) / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert recorded_weights(Path(config.run.dir), ledger.published[4]) is None
    perturb(monkeypatch, 4)
    assert replay(config, ledger, STEPS, explain=True)["explanation"]["compared_with"] == "checkpoints/0.4.1"


def test_a_wrong_digest_over_right_weights_is_told_apart(run):
    config, ledger = run
    ledger.published[4] = dataclasses.replace(ledger.published[4], digest="f" * 64)
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert told["tensor"] is None and told["relative_difference"] == 0.0
    assert "the weights in checkpoints/0.4.1 are the replayed ones, bit for bit" in told["summary"]


def test_where_nothing_is_left_the_steps_that_can_be_compared_are_named(run, monkeypatch):
    config, ledger = run
    perturb(monkeypatch, 1)
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert (told["step"], told["compared_with"], told["tensor"], told["relative_difference"]) == (1, None, None, None)
    assert told["comparable_steps"] == [0, 3, 4, 5, 6]
    assert "gone or damaged" in told["summary"] and "steps with bytes: 0, 3, 4, 5, 6" in told["summary"]


def test_other_metrics_and_another_outcome_are_told(run, monkeypatch):
    config, ledger = run
    perturb(monkeypatch, 3)
    recorded = json.loads(ledger.metrics[3])
    ledger.metrics[3] = json.dumps(recorded | {"loss": 0.125, "seconds_step": 99.0})
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert told["metrics"] == {"loss": {"recorded": 0.125, "replayed": recorded["loss"]}}
    assert told["tensor"]["name"] == TENSOR


def test_an_outcome_that_differs_is_told(model_dir, tmp_path):
    config = make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps=2)

    def unrewarded(step: int):
        return [dataclasses.replace(sample, reward=None) if step == 3 else sample for sample in rollouts(step)]

    ledger = MemoryLedger(config, unrewarded)
    assert run_learner(config, ledger, threading.Event())
    ledger.plans[3] = dataclasses.replace(ledger.plans[3], outcome=PlanOutcome.TRAINED)
    told = replay(config, ledger, STEPS, explain=True)["explanation"]
    assert told["step"] == 3 and told["outcome"] == {"recorded": "trained", "replayed": "skipped: no trainable token"}


def test_a_replay_from_a_checkpoint_gives_the_same_state(run):
    config, ledger = run
    whole, part = replay(config, ledger, 5), replay(config, ledger, 5, from_checkpoint=True)
    assert (whole["started_from"], part["started_from"]) == (0, 4)
    assert part["equal"] and (part["steps"], part["versions_compared"]) == (5, 2)
    assert (part["version_digest"], part["state_digest"]) == (whole["version_digest"], whole["state_digest"])
    assert replay(config, ledger, 6, from_checkpoint=True)["started_from"] == 6


def test_a_replay_from_a_checkpoint_needs_one_at_or_below_the_step(run):
    config, ledger = run
    with pytest.raises(InvalidRequest, match="at or below step 3 .*committed are those of steps 4, 6"):
        replay(config, ledger, 3, from_checkpoint=True)
    (Path(config.run.dir) / "checkpoints" / "0.6.1" / "state.json").unlink()
    assert replay(config, ledger, 6, from_checkpoint=True)["started_from"] == 4, "a damaged one is passed over"
    (Path(config.run.dir) / "checkpoints" / "0.4.1" / "state.json").unlink()
    with pytest.raises(InvalidRequest, match=r"0\.4\.1/state\.json is missing"):
        replay(config, ledger, 6, from_checkpoint=True)


def test_a_checkpoint_of_another_history_is_not_begun_from(run):
    config, ledger = run
    ledger.published[6] = dataclasses.replace(ledger.published[6], digest="f" * 64)
    with pytest.raises(ChainMismatch, match=r"0\.6\.1"):
        replay(config, ledger, 6, from_checkpoint=True)


def test_differences_are_of_bits_and_of_one_model():
    zeros = {"a": torch.zeros(2, 3), "b": torch.tensor(7)}
    assert first_difference(zeros, {name: tensor.clone() for name, tensor in zeros.items()}) is None
    found = first_difference(zeros, zeros | {"a": torch.tensor([[0.0, 0.0, 0.0], [0.0, -0.0, 0.0]])})
    assert found is not None and (found.first_index, found.elements_differing, found.max_abs_difference) == ((1, 1), 1, 0.0)
    found = first_difference(zeros, zeros | {"a": torch.full((2, 3), float("nan"))})
    assert found is not None and found.max_abs_difference is None and found.elements_differing == 6
    found = first_difference(zeros, zeros | {"b": torch.tensor(9)})
    assert found is not None and (found.name, found.shape, found.first_index, found.max_abs_difference) == ("b", (), (), 2.0)
    with pytest.raises(DigestMismatch, match="names"):
        first_difference(zeros, {"a": zeros["a"]})
    with pytest.raises(DigestMismatch, match="not of one model"):
        first_difference(zeros, zeros | {"a": torch.zeros(3, 2)})


def test_the_relative_difference_is_over_all_floating_tensors():
    recorded = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "n": torch.tensor(1)}
    assert relative_difference(recorded, recorded) == 0.0
    assert relative_difference(recorded | {"b": torch.tensor([4.5])}, recorded) == pytest.approx(0.1)
    assert relative_difference(recorded | {"n": torch.tensor(2)}, recorded) == 0.0
    for value in (torch.tensor([float("nan")]), torch.tensor([float("inf")]), torch.zeros(2)):
        assert relative_difference(recorded | {"b": value}, recorded) == float("inf")
    assert relative_difference(recorded | {"c": torch.zeros(1)}, recorded) == float("inf")
    nothing = {"a": torch.zeros(1)}
    assert relative_difference(nothing, nothing) == 0.0 and relative_difference({"a": torch.ones(1)}, nothing) == float("inf")


def test_the_command_offers_both(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--explain" in text and "--from-checkpoint" in text
