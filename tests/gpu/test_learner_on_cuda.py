"""The learner on one CUDA device: bitwise resume with deterministic kernels, and agreement with the CPU."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from learner_support import VOCAB_SIZE, MemoryLedger, make_config, make_model_dir, plan_of, rollouts
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.collate import StepBatch, collate
from rollbook.learner.loop import run_learner
from rollbook.learner.model import load_policy
from rollbook.learner.replay import replay
from rollbook.learner.trainer import Trainer
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VARIANTS = {
    "float32": {},
    "float32, one minibatch": {"minibatches": 1, "micro_batch_size": 0},
    "bfloat16 autocast": {"autocast": "bfloat16", "publish_dtype": "bfloat16"},
    "bfloat16 weights": {"dtype": "bfloat16"},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"), layers=2)


def batch_of(step: int) -> StepBatch:
    samples = rollouts(step)
    return collate(plan_of(step, samples, "0" * 64), samples, vocab_size=VOCAB_SIZE, max_lag_versions=2)


def trained(config, steps: range, state=None) -> Trainer:
    trainer = Trainer(load_policy(config), config)
    if state is not None:
        trainer.load_state_dict(state)
    for step in steps:
        trainer.train_step(batch_of(step))
    return trainer


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_on_the_device_is_the_straight_run_bit_for_bit(model_dir, tmp_path, variant):
    config = make_config(model_dir, tmp_path, device="cuda", **VARIANTS[variant])
    straight = trained(config, range(1, 7)).state_dict()
    assert straight.values["rng"]["torch_cuda"]
    half = trained(config, range(1, 4)).state_dict()
    resumed = trained(config, range(4, 7), half).state_dict()
    assert all(torch.equal(resumed.tensors["model"][name], tensor) for name, tensor in straight.tensors["model"].items())
    assert resumed.digest() == straight.digest()


def test_the_device_computes_the_log_probs_of_the_cpu(model_dir, tmp_path):
    batch = batch_of(1)
    results = []
    for device in ("cpu", "cuda"):
        policy = load_policy(make_config(model_dir, tmp_path, device=device))
        logprobs, entropy = policy.completion_logprobs(batch.token_ids, batch.prompt_lengths, batch.mask, with_entropy=True)
        results.append((logprobs.detach().cpu(), entropy.cpu(), torch.tensor(policy.score(list(range(20))))))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5)


def test_the_micro_batch_size_does_not_change_the_step_on_the_device(model_dir, tmp_path):
    weights = []
    for size in (0, 1, 5):
        config = make_config(model_dir, tmp_path, device="cuda", micro_batch_size=size, dtype="float64")
        weights.append(trained(config, range(1, 3)).state_dict().tensors["model"])
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("point", ["learner.mid_step=raise@3", "learner.checkpoint.after_rename=raise@2"])
def test_a_killed_learner_on_the_device_ends_in_the_same_weights(model_dir, tmp_path, monkeypatch, point):
    ends = []
    for name, armed in (("quiet", ""), ("killed", point)):
        config = make_config(model_dir, tmp_path / name, device="cuda")
        ledger = MemoryLedger(config)
        monkeypatch.setenv("ROLLBOOK_INCARNATION", "one")
        monkeypatch.delenv("ROLLBOOK_SUPERSEDES", raising=False)
        failpoints.arm(armed)
        if armed:
            with pytest.raises(FailpointRaised):
                run_learner(config, ledger, threading.Event())
            failpoints.arm("")
            monkeypatch.setenv("ROLLBOOK_INCARNATION", "two")
            monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "one")
        assert run_learner(config, ledger, threading.Event())
        files = CheckpointFiles(Path(config.run.dir) / "checkpoints")
        ends.append(files.read(files.verify(files.names()[0])).digest())
        assert replay(dataclasses.replace(config), ledger, 6)["equal"]
    assert ends[0] == ends[1]
