"""Ranks of the learner: what they share, that their sum is that of one process, and what is refused before they start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from learner_support import VOCAB_SIZE, make_config, make_model_dir, plan_of, rollouts
from rollbook.core.changes import differences
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, ConfigMismatch
from rollbook.core.records import PlanOutcome
from rollbook.learner import sharing
from rollbook.learner.channel import Channel, Closed, pack_batch, pair, unpack_batch
from rollbook.learner.collate import StepBatch, collate
from rollbook.learner.gang import learner_group
from rollbook.learner.model import load_policy
from rollbook.learner.sharing import Alone, InTurn, buckets, drop_absent, flat, give_back
from rollbook.learner.trainer import StepResult, Trainer, fingerprint, weights_held
from rollbook.supervise.backend import Needs
from rollbook.supervise.needs import learner_needs


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir: Path, tmp_path: Path) -> Config:
    return make_config(model_dir, tmp_path)


def with_learner(config: Config, **learner: object) -> Config:
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **learner))  # type: ignore[arg-type]


def batch_of(step: int) -> StepBatch:
    samples = rollouts(step)
    return collate(plan_of(step, samples, "0" * 64), samples, vocab_size=VOCAB_SIZE, max_lag_versions=2)


def trained(config: Config, steps: int = 2) -> tuple[Trainer, list[StepResult]]:
    trainer = Trainer(load_policy(config), config)
    return trainer, [trainer.train_step(batch_of(step)) for step in range(1, steps + 1)]


@pytest.mark.parametrize("objective", ["decoupled", "dapo", "gspo"])
@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("micro_batch_size", [0, 1])
def test_several_ranks_make_the_step_of_one_but_for_rounding(
    config: Config, minibatches: int, objective: str, micro_batch_size: int
) -> None:
    config = with_learner(
        config, minibatches=minibatches, objective=objective, micro_batch_size=micro_batch_size, dtype="float64"
    )  # fmt: skip
    one, steps_of_one = trained(config)
    two, steps_of_two = trained(with_learner(config, ranks=2))
    for name, tensor in one.policy.weights().items():
        torch.testing.assert_close(two.policy.weights()[name], tensor, rtol=1e-7, atol=1e-9)
    for a, b in zip(steps_of_one, steps_of_two, strict=True):
        assert a.metrics.keys() == b.metrics.keys()
        for name in a.metrics.keys() - {"seconds_step"}:
            assert b.metrics[name] == pytest.approx(a.metrics[name], rel=1e-7, abs=1e-9), name


def test_ranks_are_part_of_the_arithmetic_and_repeat_it(config: Config) -> None:
    digests = [weights_held(trained(with_learner(config, ranks=n, micro_batch_size=1))[0]) for n in (1, 2, 2, 3)]
    assert digests[1] == digests[2] and len(set(digests)) == 3


@pytest.mark.parametrize("sum_only", [False, True])
def test_a_rank_that_is_not_finite_makes_every_rank_skip_the_step(
    config: Config, monkeypatch: pytest.MonkeyPatch, sum_only: bool
) -> None:
    trainer = Trainer(load_policy(config), with_learner(config, ranks=2))
    before = weights_held(trainer)
    backward, calls = Trainer._backward, []

    def failing(self: Trainer, *args: object) -> float:
        loss = backward(self, *args)  # type: ignore[arg-type]
        calls.append(loss)
        gradient = next(self.policy.model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[0] = 3e38 if sum_only else float("inf") if len(calls) == 4 else 0.0
        return loss

    monkeypatch.setattr(Trainer, "_backward", failing)
    result = trainer.train_step(batch_of(1))
    assert result.outcome is PlanOutcome.SKIPPED and "gradient norm" in result.reason
    assert weights_held(trainer) == before and trainer.progress.steps_skipped == 1


def test_parameters_are_cut_into_buckets_that_hold_every_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "BUCKET_ELEMENTS", 6)
    parameters = [torch.zeros(n) for n in (2, 4, 1, 9, 3, 3)]
    found = [[tensor.numel() for tensor in bucket] for bucket in buckets(parameters)]
    assert found == [[2, 4], [1], [9], [3, 3]]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full(parameter.shape, float(index + 1))
    parameters[1].grad = None
    row = flat(parameters[:2], multiple_of=4)
    assert row.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    give_back(parameters[:2], row + 1)
    assert parameters[0].grad is not None and parameters[0].grad.tolist() == [2, 2]
    drop_absent(parameters[:2], [True, False])
    assert parameters[1].grad is None and parameters[0].grad is not None


def test_gradients_are_added_at_the_width_of_float32_and_given_back_in_their_own() -> None:
    narrow, wide = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64)
    assert flat([narrow]).dtype == torch.float32 and flat([narrow, wide]).dtype == torch.float64

    def share(rank: int) -> float:
        narrow.grad = torch.tensor([1.0, 2**-8, 2**-8][rank : rank + 1], dtype=torch.bfloat16)
        return float(rank)

    assert InTurn(3).sum([narrow], share) == 3.0
    assert narrow.grad is not None and narrow.grad.dtype == torch.bfloat16
    assert float(narrow.grad) == 1.0 + 2**-7  # each addition at this width would have been rounded away
    narrow.grad = None
    assert Alone().sum([narrow], share) == 0.0


def test_a_batch_arrives_as_it_was_sent() -> None:
    ours, theirs = pair(5.0)
    batch = batch_of(3)
    fields, body = pack_batch(batch)
    ours.send({"order": "step"} | fields, body)
    with theirs:
        other = Channel(theirs.dup(), 5.0)
        found = unpack_batch(*other.receive())
        other.close()
    for field in dataclasses.fields(StepBatch):
        sent, got = getattr(batch, field.name), getattr(found, field.name)
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(sent)) if isinstance(sent, torch.Tensor) else got == sent
    with pytest.raises(Closed):
        ours.receive()
    ours.close()


def test_a_fingerprint_tells_one_changed_bit(config: Config) -> None:
    trainer, _ = trained(config, steps=1)
    before = fingerprint(trainer), weights_held(trainer)
    moments = trainer.optimizer.state[next(trainer.policy.model.parameters())]["exp_avg"]
    moments.view(torch.int32).view(-1)[5] ^= 1
    assert fingerprint(trainer) != before[0] and weights_held(trainer) != before[1]
    moments.view(torch.int32).view(-1)[5] ^= 1
    assert (fingerprint(trainer), weights_held(trainer)) == before


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"ranks": 0}, "learner.ranks = 0: must be at least 1"),
        ({"ranks": 7}, "a minibatch of 6 samples has 6 micro-batches"),
        ({"ranks": 3, "micro_batch_size": 3}, "a minibatch of 6 samples has 2 micro-batches of at most 3"),
        ({"ranks": 4, "micro_batch_size": 0}, "a minibatch of 6 samples has 3 micro-batches of at most 2"),
        ({"rank_timeout_s": 0.0}, "learner.rank_timeout_s = 0.0: must exceed 0"),
        ({"ranks": 2, "rank_timeout_s": 900.0}, "below supervisor.busy_s = 900.0"),
    ],
)
def test_ranks_that_cannot_work_are_refused(config: Config, learner: dict, said: str) -> None:
    config = with_learner(config, micro_batch_size=1)
    with pytest.raises(ConfigError, match=said):
        with_learner(config, **learner)


def test_as_many_ranks_as_a_minibatch_has_micro_batches_are_taken(config: Config) -> None:
    assert with_learner(config, ranks=6, micro_batch_size=1).learner.ranks == 6
    assert with_learner(config, ranks=3, micro_batch_size=2).learner.ranks == 3
    assert with_learner(config, ranks=1, rank_timeout_s=900.0).learner.rank_timeout_s == 900.0


def test_another_number_of_ranks_is_another_configuration_and_another_patience_is_not(config: Config) -> None:
    assert with_learner(config, rank_timeout_s=7.0).digest() == with_learner(config, ranks=1).digest() == config.digest()
    two = with_learner(config, ranks=2)
    assert two.digest() != config.digest()
    assert differences(config.to_json(), with_learner(two, rank_timeout_s=7.0).to_json()) == ["learner.ranks: 1 -> 2"]


def test_planned_steps_are_not_trained_by_another_number_of_ranks(config: Config) -> None:
    trainer = Trainer(load_policy(config), config)
    with pytest.raises(ConfigMismatch, match=r"learner\.ranks changed while planned steps are not yet in a checkpoint"):
        trainer.require_same_arithmetic(with_learner(config, ranks=2))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has the devices")
def test_more_ranks_than_cuda_devices_are_refused_before_anything_is_started(config: Config) -> None:
    with (
        pytest.raises(ConfigError, match=r"learner\.ranks = 2, but this process sees \d CUDA devices: .*CUDA_VISIBLE_DEVICES"),
        learner_group(with_learner(config, ranks=2, device="cuda")),
    ):
        pytest.fail("the group was started")


def test_one_rank_starts_nothing(config: Config) -> None:
    with learner_group(config) as gang:
        assert gang is None
    assert not torch.distributed.is_initialized()
    assert not (Path(config.run.dir) / "learner").exists()


def test_the_learner_reserves_a_place_for_all_its_ranks_together(config: Config) -> None:
    assert learner_needs(config) == Needs(1.0, 0)
    assert learner_needs(with_learner(config, ranks=3, micro_batch_size=2, threads=2)) == Needs(6.0, 0)
    assert learner_needs(with_learner(config, ranks=2, device="cuda")) == Needs(2.0, 2.0)
    half = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, learner_gpus=0.5))
    assert learner_needs(with_learner(half, device="cuda")) == Needs(1.0, 0.5)


def _everything_behind(self: Trainer, rows: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    return self._micro_batches(rows)[rank:]


def _only_the_first_round(self: Trainer, rows: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    return self._micro_batches(rows)[rank : rank + 1]


def _the_last_rank_alone(self: InTurn, parameters: list[torch.Tensor], share: sharing.Share) -> float:
    losses = []
    for rank in self.here:
        for parameter in parameters:
            parameter.grad = None
        losses.append(share(rank))
    return sum(losses)


DEFECTS = {
    "micro-batches are counted by several ranks": (Trainer, "_share", _everything_behind),
    "micro-batches beyond the first round belong to nobody": (Trainer, "_share", _only_the_first_round),
    "gradients are not added": (InTurn, "sum", _the_last_rank_alone),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_in_how_a_step_is_shared_would_be_seen(config: Config, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    config = with_learner(config, micro_batch_size=1, dtype="float64", minibatches=1)
    _, (one,) = trained(config, steps=1)
    monkeypatch.setattr(*DEFECTS[defect])
    _, (two,) = trained(with_learner(config, ranks=2), steps=1)
    assert two.metrics["grad_norm"] != pytest.approx(one.metrics["grad_norm"], rel=1e-3)
