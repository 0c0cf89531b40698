"""Properties of the losses beyond the golden vectors: splits, masks, limits and a slow oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from golden_objectives import loss_and_gradient
from oracle_batches import batch_for, denominators_of, random_batch, rows_of
from torch import Tensor

from rollbook.core.errors import ConfigError, InvalidRequest
from rollbook.learner.advantages import group_advantages
from rollbook.learner.aggregation import AGGREGATIONS, Denominators, aggregate, step_denominators
from rollbook.learner.corrections import CorrectionSettings, correct
from rollbook.learner.objectives import (
    OBJECTIVES,
    ObjectiveSettings,
    PolicyBatch,
    decoupled_ppo_clip,
    objective_settings,
    policy_loss,
)

WEIGHTED = sorted(name for name, entry in OBJECTIVES.items() if entry.takes_weights)
LENGTH_MAX = 16.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_micro_batch_split_changes_neither_loss_nor_gradient(name: str, aggregation: str) -> None:
    batch = batch_for(name, random_batch(1))
    settings = {"aggregation": aggregation, "length_max": LENGTH_MAX, "kl_beta": 0.05}
    whole, gradient = loss_and_gradient(name, batch, denominators_of(batch), **settings)
    for split in ([[0], [1], [2], [3], [4], [5], [6]], [[0, 6], [3], [5, 1, 2, 4]]):
        total, pieces = 0.0, torch.zeros_like(gradient)
        for rows in split:
            part, part_gradient = loss_and_gradient(name, rows_of(batch, rows), denominators_of(batch), **settings)
            total += float(part.loss.detach())
            pieces[rows] = part_gradient
        assert abs(total - float(whole.loss.detach())) < 1e-12
        torch.testing.assert_close(pieces, gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30, -7.5])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_junk_at_masked_positions_reaches_neither_value_nor_gradient(name: str, junk: float) -> None:
    clean = batch_for(name, random_batch(2))
    off = ~clean.mask
    changes = {f: getattr(clean, f).masked_fill(off, junk) for f in ("logp_theta", "logp_old", "logp_mu", "logp_ref")}
    changes["advantages"] = clean.advantages[:, None].expand(off.shape).masked_fill(off, junk)
    if clean.weights is not None:
        changes["weights"] = clean.weights.masked_fill(off, junk)
        dirty_weights = correct(changes["logp_old"], changes["logp_mu"], clean.mask).weights
        assert torch.equal(dirty_weights, clean.weights)
    settings = {"length_max": LENGTH_MAX, "kl_beta": 0.05}
    wanted, wanted_gradient = loss_and_gradient(name, clean, denominators_of(clean), **settings)
    got, gradient = loss_and_gradient(name, replace(clean, **changes), denominators_of(clean), **settings)
    assert torch.equal(got.loss, wanted.loss)
    assert torch.equal(got.token_loss, wanted.token_loss)
    assert torch.equal(gradient, wanted_gradient)
    assert not gradient[off].any() and not got.token_loss[off].any()


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_token_without_behaviour_logprob_is_masked_not_ratio_one(name: str, missing: float) -> None:
    batch = batch_for(name, random_batch(3))
    hole = torch.zeros_like(batch.mask)
    hole[0, 0] = True
    masked = replace(batch, mask=batch.mask & ~hole)
    holed = replace(batch, logp_mu=batch.logp_mu.masked_fill(hole, missing))
    if batch.weights is not None:
        masked = replace(masked, weights=correct(masked.logp_old, masked.logp_mu, masked.mask).weights)
        holed = replace(holed, weights=correct(holed.logp_old, holed.logp_mu, holed.mask).weights)
    assert denominators_of(holed) == denominators_of(masked) != denominators_of(batch)
    wanted, wanted_gradient = loss_and_gradient(name, masked, denominators_of(masked), length_max=LENGTH_MAX)
    got, gradient = loss_and_gradient(name, holed, denominators_of(holed), length_max=LENGTH_MAX)
    assert torch.equal(got.loss, wanted.loss) and torch.equal(gradient, wanted_gradient)


def test_a_trainable_logprob_that_is_not_a_number_makes_the_loss_not_a_number() -> None:
    batch = random_batch(3)
    broken = batch.logp_theta.clone()
    broken[0, 0] = float("nan")
    result = policy_loss(replace(batch, logp_theta=broken), denominators_of(batch))
    assert torch.isnan(result.loss)


def test_padding_width_does_not_change_the_loss() -> None:
    batch = random_batch(4)

    def pad(values: Tensor) -> Tensor:
        fill = False if values.dtype == torch.bool else 5.0
        return torch.nn.functional.pad(values, (0, 11), value=fill)

    names = ("logp_theta", "logp_old", "logp_mu", "mask", "weights", "logp_ref")
    wide = replace(batch, **{name: pad(getattr(batch, name)) for name in names})
    for name in WEIGHTED:
        settings = objective_settings(name, length_max=LENGTH_MAX)
        narrow_loss = policy_loss(batch, denominators_of(batch), settings).loss
        wide_loss = policy_loss(wide, denominators_of(wide), settings).loss
        torch.testing.assert_close(wide_loss, narrow_loss, rtol=0, atol=1e-14)


def _slow_decoupled(batch: PolicyBatch, *, cap: float, low: float, high: float) -> tuple[float, list[list[float]]]:
    """The paper's notation, one token at a time: loss and its derivative with respect to log theta."""
    terms, gradient = [], [[0.0] * batch.mask.shape[1] for _ in range(batch.mask.shape[0])]
    count = int(batch.mask.sum())
    for i in range(batch.mask.shape[0]):
        for t in range(batch.mask.shape[1]):
            if not batch.mask[i, t]:
                continue
            theta, old, mu = (float(x[i, t]) for x in (batch.logp_theta, batch.logp_old, batch.logp_mu))
            advantage, r, w = float(batch.advantages[i]), math.exp(theta - old), min(math.exp(old - mu), cap)
            clipped = min(max(r, 1 - low), 1 + high)
            terms.append(-w * min(r * advantage, clipped * advantage))
            blocked = (advantage > 0 and r > 1 + high) or (advantage < 0 and r < 1 - low)
            gradient[i][t] = 0.0 if blocked else -w * advantage * r / count
    return math.fsum(terms) / count, gradient


@pytest.mark.parametrize("seed", range(5))
def test_the_default_objective_matches_a_scalar_loop_on_both_sides_of_every_limit(seed: int) -> None:
    batch = random_batch(100 + seed, n=12, width=20)
    r, rho = (batch.logp_theta - batch.logp_old).exp(), (batch.logp_old - batch.logp_mu).exp()
    sign = batch.advantages[:, None].expand_as(r)
    for side in (r > 1.28, (r < 1.28) & (r > 0.8), r < 0.8):
        assert (side & batch.mask & (sign > 0)).any() and (side & batch.mask & (sign < 0)).any()
    assert (batch.mask & (rho > 2)).any() and (batch.mask & (rho < 2)).any()
    wanted, wanted_gradient = _slow_decoupled(batch, cap=2.0, low=0.2, high=0.28)
    result, gradient = loss_and_gradient("decoupled", batch, denominators_of(batch))
    assert abs(float(result.loss.detach()) - wanted) < 1e-12
    torch.testing.assert_close(gradient, torch.tensor(wanted_gradient, dtype=torch.float64), rtol=0, atol=1e-13)
    tensors = (batch.logp_theta, batch.logp_old, batch.logp_mu, batch.weights, batch.advantages, batch.mask)
    assert torch.equal(decoupled_ppo_clip(*tensors, denominators_of(batch)).loss, result.loss.detach())


EDGES = [0.8, 1.28]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("step", [-1e-3, 1e-3])
def test_the_gradient_stops_only_outside_the_band_and_only_on_the_pessimistic_side(
    edge: float, advantage: float, step: float
) -> None:
    ratio = edge + step
    one = torch.ones((1, 1), dtype=torch.float64)
    batch = PolicyBatch(
        logp_theta=one * math.log(ratio),
        logp_old=0 * one,
        logp_mu=0 * one,
        advantages=advantage * one[0],
        mask=one.bool(),
        weights=one,
    )
    result, gradient = loss_and_gradient("decoupled", batch, step_denominators(torch.tensor([1])))
    blocked = ratio > 1.28 if advantage > 0 else ratio < 0.8
    assert float(gradient) == pytest.approx(0.0 if blocked else -advantage * ratio, abs=1e-12)
    assert float(result.loss.detach()) == pytest.approx(-advantage * (edge if blocked else ratio), abs=1e-12)


def _single(name: str, ratio: float, advantage: float, **settings: object) -> tuple[float, float]:
    one = torch.ones((1, 1), dtype=torch.float64)
    batch = PolicyBatch(
        logp_theta=one * math.log(ratio),
        logp_old=0 * one,
        logp_mu=0 * one,
        advantages=advantage * one[0],
        mask=one.bool(),
    )
    result, gradient = loss_and_gradient(name, batch, step_denominators(torch.tensor([1])), **settings)
    return float(result.loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("name", "settings", "limit"),
    [("ppo_dual_clip", {"dual_clip": 3.0}, 3.0), ("two_sided", {"ratio_max": 4.0}, 4.0)],
)
def test_a_second_bound_limits_the_loss_of_negative_advantages_only(
    name: str, settings: dict[str, float], limit: float
) -> None:
    assert _single(name, limit - 0.1, -1.0, **settings) == pytest.approx((limit - 0.1, limit - 0.1))
    assert _single(name, limit + 0.1, -1.0, **settings) == pytest.approx((limit, 0.0))
    assert _single(name, limit + 0.1, 1.0, **settings) == pytest.approx((-1.2, 0.0))


def test_coefficients_are_cut_on_both_sides_and_always_leave_a_gradient() -> None:
    assert _single("cispo", 1.27, 1.0)[1] == pytest.approx(-1.27)
    assert _single("cispo", 1.29, 1.0)[1] == pytest.approx(-1.28)
    assert _single("cispo", 0.1, -1.0)[1] == pytest.approx(0.1)
    assert _single("cispo", 0.1, -1.0, clip_low=0.2)[1] == pytest.approx(0.8)
    assert _single("cispo_cap", 4.9, 1.0)[1] == pytest.approx(-4.9)
    assert _single("cispo_cap", 5.1, 1.0)[1] == pytest.approx(-5.0)
    assert _single("reinforce_is", 1.9, -1.0)[1] == pytest.approx(1.9)
    assert _single("reinforce_is", 2.1, -1.0)[1] == pytest.approx(2.0)
    assert _single("topr", 0.5, -1.0)[1] == pytest.approx(0.5)
    assert _single("topr", 1.5, -1.0)[1] == pytest.approx(1.0)
    assert _single("topr", 0.5, 1.0)[1] == pytest.approx(-1.0)


def test_the_kl_term_is_weighted_by_both_ratios_unless_it_is_the_bare_estimate() -> None:
    batch = random_batch(10)
    base = policy_loss(batch, denominators_of(batch)).token_loss
    log_x = torch.where(batch.mask, batch.logp_ref - batch.logp_theta, 0.0)
    bare = 0.05 * (log_x.exp() - 1 - log_x)
    both = bare * torch.where(batch.mask, batch.logp_theta - batch.logp_old, 0.0).exp() * batch.weights
    for form, term in (("k3", bare), ("ratio_k3", both)):
        settings = objective_settings("decoupled", kl_beta=0.05, kl_form=form)
        got = policy_loss(batch, denominators_of(batch), settings).token_loss
        torch.testing.assert_close(got - base, term, rtol=0, atol=1e-14)


def test_ratios_beyond_the_number_range_give_finite_loss_and_gradient() -> None:
    for log_ratio in (500.0, -500.0):
        for advantage in (1.0, -1.0):
            one = torch.ones((1, 1))
            batch = PolicyBatch(
                logp_theta=one * log_ratio,
                logp_old=0 * one,
                logp_mu=0 * one,
                advantages=advantage * one[0],
                mask=one.bool(),
                weights=one,
            )
            for name in OBJECTIVES:
                denominators = step_denominators(torch.tensor([1]), torch.tensor([0]))
                settings = {"length_max": LENGTH_MAX, "aggregation": "token-mean"}
                result, gradient = loss_and_gradient(name, batch_for(name, batch), denominators, **settings)
                assert torch.isfinite(result.loss) and torch.isfinite(gradient).all(), (name, log_ratio, advantage)


def test_a_micro_batch_without_trainable_tokens_still_has_a_gradient_path() -> None:
    batch = rows_of(random_batch(5), [3])
    logp_theta = batch.logp_theta.clone().requires_grad_(True)
    result = policy_loss(replace(batch, logp_theta=logp_theta), Denominators(tokens=10, sequences=3))
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0 and not logp_theta.grad.any()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_lower_precision_is_upcast_before_any_arithmetic(name: str) -> None:
    low = batch_for(name, random_batch(6, dtype=torch.bfloat16))
    names = ("logp_theta", "logp_old", "logp_mu", "logp_ref", "advantages", "weights")
    high = replace(low, **{f: getattr(low, f).float() for f in names if getattr(low, f) is not None})
    settings = objective_settings(name, length_max=LENGTH_MAX, kl_beta=0.05)
    from_low, from_high = (policy_loss(batch, denominators_of(low), settings) for batch in (low, high))
    assert from_low.loss.dtype == from_low.token_loss.dtype == torch.float32
    assert torch.equal(from_low.loss, from_high.loss) and torch.equal(from_low.token_loss, from_high.token_loss)
    weights = correct(low.logp_old, low.logp_mu, low.mask).weights
    assert weights.dtype == torch.float32
    assert torch.equal(weights, correct(high.logp_old, high.logp_mu, low.mask).weights)


def test_only_the_current_policy_receives_a_gradient() -> None:
    batch = random_batch(7)
    constants = {
        f: getattr(batch, f).clone().requires_grad_(True) for f in ("logp_old", "logp_mu", "logp_ref", "advantages")
    }
    weights = correct(constants["logp_old"], constants["logp_mu"], batch.mask).weights
    assert not weights.requires_grad
    live = replace(
        batch, logp_theta=batch.logp_theta.clone().requires_grad_(True), weights=weights.requires_grad_(), **constants
    )
    for name in sorted(OBJECTIVES):
        settings = objective_settings(name, length_max=LENGTH_MAX, kl_beta=0.05)
        policy_loss(batch_for(name, live), denominators_of(batch), settings).loss.backward()
    assert live.logp_theta.grad is not None
    assert all(tensor.grad is None for tensor in [*constants.values(), weights])


def test_mistakes_are_refused_with_a_reason() -> None:
    batch = random_batch(9)
    counts = denominators_of(batch)
    with pytest.raises(InvalidRequest, match="needs behaviour weights"):
        policy_loss(replace(batch, weights=None), counts)
    with pytest.raises(InvalidRequest, match="count rho twice"):
        policy_loss(batch, counts, objective_settings("reinforce_is"))
    with pytest.raises(InvalidRequest, match="one shape"):
        policy_loss(replace(batch, logp_old=batch.logp_old[:, :1]), counts)
    with pytest.raises(InvalidRequest, match="one shape"):
        policy_loss(replace(batch, advantages=batch.advantages[:2]), counts)
    with pytest.raises(InvalidRequest, match="logp_ref"):
        policy_loss(replace(batch, logp_ref=None), counts, objective_settings("decoupled", kl_beta=0.1))
    with pytest.raises(InvalidRequest, match="tokens above 0"):
        policy_loss(batch, Denominators(tokens=0, sequences=0))
    with pytest.raises(InvalidRequest, match="length_max"):
        policy_loss(batch, counts, objective_settings("dr_grpo"))
    with pytest.raises(InvalidRequest, match="group_tokens"):
        aggregate(batch.logp_theta, batch.mask, counts, "prompt-mean-token-mean")
    with pytest.raises(InvalidRequest, match="not finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), None, torch.tensor([0, 0]))
    with pytest.raises(InvalidRequest, match="three vectors"):
        group_advantages(torch.ones(2), None, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    "make",
    [
        lambda: objective_settings("ppo"),
        lambda: objective_settings("dapo", clip_up=0.3),
        lambda: objective_settings("dapo", clip_low=-0.1),
        lambda: objective_settings("dapo", dual_clip=1.0),
        lambda: objective_settings("dapo", ratio_max=1.2),
        lambda: objective_settings("dapo", aggregation="mean"),
        lambda: objective_settings("dapo", kl_form="k1"),
        lambda: CorrectionSettings(weight="tis"),
        lambda: CorrectionSettings(rejections=("geo",)),
        lambda: CorrectionSettings(cap=0.0),
        lambda: CorrectionSettings(band_low=2.0, band_high=1.0),
        lambda: group_advantages(torch.ones(1), None, torch.zeros(1), estimator="gae"),
        lambda: policy_loss(random_batch(9), Denominators(tokens=1, sequences=1), ObjectiveSettings(name="ppo")),
    ],
)
def test_unknown_names_and_impossible_limits_are_configuration_errors(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
