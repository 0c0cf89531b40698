"""The optimizer step: invariances, skipping, and that every piece of saved state is needed."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch

from learner_support import VOCAB_SIZE, make_config, make_model_dir, plan_of, rollouts
from rollbook.core.config import Config
from rollbook.core.errors import CheckpointDamaged, ConfigError, ConfigMismatch, InvalidRequest, RollbookError
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import Cursor, PlanOutcome, SampleData
from rollbook.learner.collate import StepBatch, collate
from rollbook.learner.model import LOGITS_MAX, load_policy
from rollbook.learner.publish import published_digest
from rollbook.learner.schedule import learning_rate
from rollbook.learner.state import TrainingState
from rollbook.learner.trainer import StepResult, Trainer

STEPS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir, tmp_path) -> Config:
    return make_config(model_dir, tmp_path, steps=STEPS)


def batch_of(step: int, samples: list[SampleData] | None = None) -> StepBatch:
    samples = rollouts(step) if samples is None else samples
    return collate(plan_of(step, samples, "0" * 64), samples, vocab_size=VOCAB_SIZE, max_lag_versions=2)


def new_trainer(config: Config) -> Trainer:
    return Trainer(load_policy(config), config)


def train(trainer: Trainer, steps: range) -> list[StepResult]:
    results = []
    for step in steps:
        results.append(trainer.train_step(batch_of(step)))
        draw_from_globals()
        trainer.note(chain_digest=f"chain {step}", version_digest=digest_of(trainer))
    return results


def draw_from_globals() -> None:
    """What a user's code between two steps might do; it makes every global generator part of the outcome."""
    random.random()
    np.random.rand()
    torch.rand(1)


def digest_of(trainer: Trainer) -> str:
    return published_digest(trainer.policy, torch.float32)


def with_learner(config: Config, **learner) -> Config:
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **learner))


def test_a_step_reports_everything_a_reader_of_the_run_needs(config):
    (result,) = train(new_trainer(config), range(1, 2))
    assert result.outcome is PlanOutcome.TRAINED
    wanted = {
        "reward_mean", "loss", "grad_norm", "lr", "entropy_mean", "rho_mean", "rho_p99", "rho_max", "kl_behaviour_old_k1",
        "kl_behaviour_old_k3", "ess_token_raw_fraction", "ess_token_applied_fraction", "clip_low_fraction", "clip_high_fraction",
        "lag_head_max", "lag_0_tokens", "samples_failed", "tokens", "seconds_step", "behaviour_missing_tokens",
    }  # fmt: skip
    assert wanted <= result.metrics.keys()
    assert all(value is not None for value in result.metrics.values())
    batch = batch_of(1)
    assert result.metrics["reward_mean"] == pytest.approx(float(batch.rewards[batch.valid].mean()))
    assert result.metrics["samples_failed"] == int((~batch.valid).sum()) == 1


@pytest.mark.parametrize("objective", ["decoupled", "grpo", "gspo", "dr_grpo"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_micro_batch_size_does_not_change_the_step(config, minibatches, objective):
    config = with_learner(config, minibatches=minibatches, objective=objective, dtype="float64")
    weights, losses = [], []
    for size in (0, 1, 5):
        trainer = new_trainer(with_learner(config, micro_batch_size=size))
        losses.append([result.metrics["loss"] for result in train(trainer, range(1, 3))])
        weights.append({name: tensor.clone() for name, tensor in trainer.policy.weights().items()})
    for other_weights, other_losses in zip(weights[1:], losses[1:], strict=True):
        assert other_losses == pytest.approx(losses[0], rel=1e-9, abs=1e-12)
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=1e-7, atol=1e-9)


def test_padding_does_not_change_a_log_prob(config):
    policy = load_policy(config)
    batch = batch_of(1)
    together, _ = policy.completion_logprobs(batch.token_ids, batch.prompt_lengths, batch.mask)
    for row in range(len(batch)):
        part = batch.select(torch.tensor([row]))
        if part.n_tokens:
            alone, _ = policy.completion_logprobs(part.token_ids, part.prompt_lengths, part.mask)
            torch.testing.assert_close(together[row, : alone.shape[1]], alone[0], rtol=0, atol=2e-6)


def test_log_probs_are_those_of_the_full_logits_at_the_temperature(config):
    policy = load_policy(dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, temperature=0.7)))
    batch = batch_of(1)
    with torch.no_grad():
        found, entropy = policy.completion_logprobs(batch.token_ids, batch.prompt_lengths, batch.mask, with_entropy=True)
    for row in range(len(batch)):
        n = int(batch.attention_mask[row].sum())
        logits = policy.model(input_ids=batch.token_ids[row : row + 1, :n]).logits[0].detach().double() / 0.7
        expected = logits.log_softmax(-1)
        for column in batch.mask[row].nonzero().flatten().tolist():
            position = int(batch.prompt_lengths[row]) + column
            line = expected[position - 1]
            assert float(found[row, column]) == pytest.approx(float(line[batch.token_ids[row, position]]), abs=1e-5)
            assert float(entropy[row, column]) == pytest.approx(float(-(line.exp() * line).sum()), abs=1e-5)
    assert torch.equal(found == 0, ~batch.mask)


def test_logits_held_in_pieces_give_the_same_gradient(config, monkeypatch):
    gradients = []
    for logits_max in (2**27, VOCAB_SIZE * 7):
        monkeypatch.setitem(LOGITS_MAX, "cpu", logits_max)
        policy, batch = load_policy(config), batch_of(1)
        policy.completion_logprobs(batch.token_ids, batch.prompt_lengths, batch.mask, with_entropy=True)[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_with_one_minibatch_the_training_pass_serves_as_pi_old(config, monkeypatch):
    config = with_learner(config, minibatches=1)
    shortcut = new_trainer(config)
    shortcut.train_step(batch_of(1))
    explicit = new_trainer(config)
    update = Trainer._update

    def with_explicit_old(self, batch, rows, advantages, old, diagnostics):
        return update(self, batch, rows, advantages, self._old_logprobs(batch, [rows]), diagnostics)

    monkeypatch.setattr(Trainer, "_update", with_explicit_old)
    explicit.train_step(batch_of(1))
    assert digest_of(explicit) == digest_of(shortcut)


def test_the_first_minibatch_starts_at_a_ratio_of_exactly_one(config, monkeypatch):
    ratios = []
    backward = Trainer._backward

    def recording(self, part, advantages, old, *rest):
        with torch.no_grad():
            theta, _ = self.policy.completion_logprobs(part.token_ids, part.prompt_lengths, part.mask)
        ratios.append(float((theta - old).abs().max()))
        return backward(self, part, advantages, old, *rest)

    monkeypatch.setattr(Trainer, "_backward", recording)
    new_trainer(config).train_step(batch_of(1))
    half = len(ratios) // 2
    assert ratios[:half] == [0.0] * half
    assert min(ratios[half:]) > 0.0


def missing_logprob(samples: list[SampleData], at: int) -> list[SampleData]:
    trajectory = samples[at].trajectory
    n = trajectory.n_tokens
    changed = dataclasses.replace(trajectory, logprobs=pack_f32([float("nan")] + [-3.0] * (n - 1)))
    return samples[:at] + [dataclasses.replace(samples[at], trajectory=changed)] + samples[at + 1 :]


def test_a_token_without_behaviour_log_prob_is_masked_and_counted(config):
    samples = missing_logprob(rollouts(1), 0)
    batch = batch_of(1, samples)
    assert not bool(batch.mask[0, 0]) and batch.behaviour_missing == 1
    assert batch.n_tokens == batch_of(1).n_tokens - 1
    result = new_trainer(config).train_step(batch)
    assert result.metrics["behaviour_missing_tokens"] == 1 and result.metrics["tokens"] == batch.n_tokens


def test_a_member_without_reward_has_no_trainable_token_and_no_advantage(config):
    samples = rollouts(1)
    batch = batch_of(1, samples)
    row = next(i for i, sample in enumerate(samples) if sample.reward is None)
    assert not bool(batch.valid[row]) and not bool(batch.mask[row].any())
    other = dataclasses.replace(samples[row].trajectory, token_ids=pack_i32([1] * samples[row].trajectory.n_tokens))
    changed = samples[:row] + [dataclasses.replace(samples[row], trajectory=other)] + samples[row + 1 :]
    one, two = new_trainer(config), new_trainer(config)
    one.train_step(batch)
    two.train_step(batch_of(1, changed))
    assert digest_of(one) == digest_of(two)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counter(config, monkeypatch, minibatches, steps_before):
    config = with_learner(config, minibatches=minibatches)
    trainer = new_trainer(config)
    train(trainer, range(1, steps_before + 1))
    before = trainer.state_dict()
    # The last minibatch of the step gets a gradient that is not finite.
    backward, calls = Trainer._backward, []

    def failing(self, part, *rest):
        loss = backward(self, part, *rest)
        calls.append(part)
        is_last = len(calls) == 3 * (2 if minibatches == 2 else 1)
        if is_last or minibatches == 1:
            next(self.policy.model.parameters()).grad.view(-1)[0] = float("inf")
        return loss

    monkeypatch.setattr(Trainer, "_backward", failing)
    monkeypatch.setattr(Trainer, "_micro_batches", lambda self, rows: rows.tensor_split(3))
    result = trainer.train_step(batch_of(steps_before + 1))
    assert result.outcome is PlanOutcome.SKIPPED and "gradient norm" in result.reason
    after = trainer.state_dict()
    for section in ("model", "optimizer"):
        assert after.tensors[section].keys() == before.tensors[section].keys()
        assert all(torch.equal(after.tensors[section][name], tensor) for name, tensor in before.tensors[section].items())
    assert after.values["rng"] == before.values["rng"]
    assert after.progress.step == steps_before + 1 and after.progress.steps_skipped == 1
    monkeypatch.undo()
    obeying = new_trainer(config)
    train(obeying, range(1, steps_before + 1))
    obeying.skip_step()
    assert obeying.state_dict().digest() == after.digest()
    trainer.train_step(batch_of(steps_before + 2))
    obeying.train_step(batch_of(steps_before + 2))
    assert obeying.state_dict().digest() == trainer.state_dict().digest()


def test_a_step_without_a_trainable_token_is_skipped(config):
    samples = [dataclasses.replace(sample, reward=None) for sample in rollouts(1)]
    trainer = new_trainer(config)
    result = trainer.train_step(batch_of(1, samples))
    assert (result.outcome, result.reason) == (PlanOutcome.SKIPPED, "no trainable token")
    assert trainer.progress.step == 1 and result.metrics["reward_mean"] is None


def test_a_batch_of_another_step_is_refused(config):
    with pytest.raises(InvalidRequest, match="trains from version 1"):
        new_trainer(config).train_step(batch_of(2))


def test_an_objective_over_mu_refuses_a_second_weight(config):
    with pytest.raises(ConfigError, match="count twice"):
        new_trainer(with_learner(config, objective="reinforce_is"))
    trainer = new_trainer(with_learner(config, objective="reinforce_is", correction="none"))
    assert trainer.train_step(batch_of(1)).outcome is PlanOutcome.TRAINED


@pytest.mark.parametrize(("kind", "last"), [("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)])
def test_the_learning_rate_rises_and_ends_where_it_should(config, kind, last):
    settings = dataclasses.replace(config.learner, lr=1.0, lr_schedule=kind, warmup_steps=2, lr_min_ratio=0.1)
    rates = [learning_rate(settings, step, 10) for step in range(1, 11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(last)
    assert all(a >= b for a, b in zip(rates[1:], rates[2:], strict=False))
    with pytest.raises(ConfigError, match="lr_schedule"):
        learning_rate(dataclasses.replace(settings, lr_schedule="step"), 1, 10)


def resumed(config: Config, state: TrainingState) -> Trainer:
    """A trainer in a process whose generators and weights are not those of the saved one."""
    trainer = new_trainer(config)
    train(trainer, range(1, 2))
    trainer.load_state_dict(state)
    return trainer


def saved_at(config: Config, step: int) -> TrainingState:
    trainer = new_trainer(config)
    train(trainer, range(1, step + 1))
    trainer.note(cursor=Cursor("train", step * 3, "{}", False))
    return trainer.state_dict()


def test_a_resumed_run_is_the_straight_run_bit_for_bit(config):
    straight = new_trainer(config)
    results = train(straight, range(1, STEPS + 1))
    digest = straight.state_dict().digest()
    for step in (0, 1, 3):
        trainer = resumed(config, saved_at(config, step))
        again = train(trainer, range(step + 1, STEPS + 1))
        assert trainer.state_dict().digest() == digest
        for one, two in zip(results[step:], again, strict=True):
            assert {k: v for k, v in one.metrics.items() if not k.startswith("seconds")} == {
                k: v for k, v in two.metrics.items() if not k.startswith("seconds")
            }


def test_loading_restores_every_global_generator(config):
    state = saved_at(config, 2)
    expected = new_trainer(config)
    expected.load_state_dict(state)
    numbers = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    expected.load_state_dict(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == numbers


def _progress(**changes):
    return lambda state, fresh: state.values["progress"].update(changes)


def _tensors(section: str, prefix: str, value=None):
    """Put the tensors of a section back to what a new learner has, or to a value."""

    def change(state: TrainingState, fresh: TrainingState) -> None:
        for name, tensor in state.tensors[section].items():
            if name.startswith(prefix):
                start = fresh.tensors[section].get(name, torch.zeros_like(tensor))
                tensor.copy_(start if value is None else torch.full_like(tensor, value))

    return change


def _values(*path: str):
    """Put one value back to what a new learner has."""

    def change(state: TrainingState, fresh: TrainingState) -> None:
        target, source = state.values, fresh.values
        for name in path[:-1]:
            target, source = target[name], source[name]
        target[path[-1]] = source[path[-1]]

    return change


def _group(name: str, value: float):
    return lambda state, fresh: state.values["optimizer"]["groups"][0].update({name: value})


FORGOTTEN = {
    "parameters": _tensors("model", "model.layers.0.mlp"),
    "buffers": _tensors("model", "model.rotary_emb.inv_freq", 0.5),
    "first moments": _tensors("optimizer", "exp_avg/"),
    "second moments": _tensors("optimizer", "exp_avg_sq/"),
    "steps per parameter": _tensors("optimizer", "step/"),
    "parameter group: weight decay": _group("weight_decay", 0.0),
    "parameter group: betas": _group("betas", [0.9, 0.999]),
    "parameter group: eps": _group("eps", 1e-6),
    "order of parameter names": lambda state, fresh: state.values["optimizer"]["groups"][0]["names"].reverse(),
    "which parameters have state": lambda state, fresh: state.values["optimizer"]["stateful"].pop(),
    "schedule position": _values("schedule"),
    "python generator": _values("rng", "python"),
    "numpy generator": _values("rng", "numpy"),
    "torch generator": _values("rng", "torch_cpu"),
    "minibatch generator": _values("rng", "minibatches"),
    "step": _progress(step=0),
    "version counter": _progress(version=0),
    "step and version": _progress(step=0, version=0),
    "cursor copy": _progress(cursor={"stream": "train", "next_ordinal": 0, "state_json": "{}", "exhausted": False}),
    "samples trained": _progress(samples_trained=0),
    "tokens trained": _progress(tokens_trained=0),
    "steps skipped": _progress(steps_skipped=1),
    "largest ordinal trained": _progress(ordinal_max=10**6),
    "configuration": lambda state, fresh: state.values.update(config_json=state.values["config_json"].replace("0.003", "0.001")),
}
"""One entry per state that exists: puts it back to a new learner's. Chain and version digest: see test_checkpoint."""


@pytest.mark.parametrize("name", FORGOTTEN)
def test_forgetting_one_state_is_refused_or_changes_the_run(config, name):
    straight = new_trainer(config)
    train(straight, range(1, STEPS + 1))
    digest = straight.state_dict().digest()
    state = saved_at(config, 3)
    fresh = new_trainer(config).state_dict()
    state = copy.deepcopy(state)
    FORGOTTEN[name](state, fresh)
    trainer = new_trainer(config)
    try:
        trainer.load_state_dict(state)
        train(trainer, range(4, STEPS + 1))
    except RollbookError:
        return
    assert trainer.state_dict().digest() != digest


def _leaves(values, path=()):
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict) and name in ("progress", "rng", "optimizer", "schedule"):
            yield from _leaves(value, (*path, name))


def test_a_state_that_lacks_any_one_entry_is_refused(config):
    state = saved_at(config, 2)
    for path in _leaves(state.values):
        changed = copy.deepcopy(state)
        target = changed.values
        for part in path[:-1]:
            target = target[part]
        del target[path[-1]]
        with pytest.raises((CheckpointDamaged, ConfigMismatch)):
            new_trainer(config).load_state_dict(changed)
    for section, tensors in state.tensors.items():
        for name in tensors:
            changed = copy.deepcopy(state)
            del changed.tensors[section][name]
            with pytest.raises(CheckpointDamaged):
                new_trainer(config).load_state_dict(changed)


def test_a_state_of_another_configuration_is_refused_with_the_difference(config):
    with pytest.raises(ConfigMismatch, match="clip_high"):
        new_trainer(with_learner(config, clip_high=0.5)).load_state_dict(saved_at(config, 1))


def test_a_restored_step_counter_belongs_to_one_parameter_only(config):
    trainer = resumed(config, saved_at(config, 2))
    counters = [state["step"] for state in trainer.optimizer.state.values()]
    assert len({counter.data_ptr() for counter in counters}) == len(counters)
    assert {float(counter) for counter in counters} == {4.0}
