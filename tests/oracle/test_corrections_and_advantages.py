"""Properties of corrections and advantages beyond the golden vectors: limits, masks and members without a verdict."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from golden_objectives import core3
from oracle_batches import random_batch, rows_of

from rollbook.learner.advantages import ADVANTAGES, group_advantages, groups_with_signal
from rollbook.learner.corrections import REJECTIONS, WEIGHTS, CorrectionSettings, behaviour_ratio, correct
from rollbook.learner.objectives import (
    policy_loss,
)


@pytest.mark.parametrize("weight", sorted(WEIGHTS))
@pytest.mark.parametrize("rejection", [(), *[(name,) for name in sorted(REJECTIONS)]])
def test_a_correction_depends_on_its_own_sequence_only(weight: str, rejection: tuple[str, ...]) -> None:
    batch = random_batch(8)
    limits = {"geometric_low": 0.9, "geometric_high": 1.1, "k3_max": 0.2, "veto_below": 0.3}
    settings = CorrectionSettings(weight=weight, rejections=rejection, **limits)
    whole = correct(batch.logp_old, batch.logp_mu, batch.mask, settings)
    for row in range(batch.mask.shape[0]):
        part = correct(batch.logp_old[[row]], batch.logp_mu[[row]], batch.mask[[row]], settings)
        assert torch.equal(part.weights[0], whole.weights[row]) and part.keep[0] == whole.keep[row]
    assert not whole.weights[~batch.mask].any()
    assert not whole.weights[~whole.keep].any()
    for name in rejection:
        assert whole.rejected_by[name].any() and not whole.rejected_by[name].all()
        assert not whole.rejected_by[name][3], "a sequence without trainable tokens is not rejected, it is absent"


@pytest.mark.parametrize(
    ("weight", "log_rho", "wanted"),
    [
        ("token_tis", math.log(1.99), 1.99),
        ("token_tis", math.log(2.01), 2.0),
        ("token_tis", 500.0, 2.0),
        ("token_tis", math.log(0.01), 0.01),
        ("token_mis", math.log(0.51), 0.51),
        ("token_mis", math.log(0.49), 0.0),
        ("token_mis", math.log(4.99), 4.99),
        ("token_mis", math.log(5.01), 0.0),
        ("token_mis", 500.0, 0.0),
        ("sequence_tis", math.log(1.41), 1.41**2),
        ("sequence_tis", math.log(1.42), 2.0),
        ("sequence_mis", math.log(1.73), 1.73**2),
        ("sequence_mis", math.log(1.74), 0.0),
        ("untruncated", math.log(7.0), 7.0),
        ("none", math.log(7.0), 1.0),
    ],
)
def test_weights_are_cut_exactly_at_their_limits(weight: str, log_rho: float, wanted: float) -> None:
    old, mu = torch.full((1, 2), log_rho), torch.zeros((1, 2))
    weights = correct(old, mu, torch.ones((1, 2)), CorrectionSettings(weight=weight)).weights
    torch.testing.assert_close(weights, torch.full((1, 2), wanted), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rejection", "log_rho", "kept"),
    [
        ("geometric", -0.0009, True),
        ("geometric", -0.0011, False),
        ("geometric", 0.0009, True),
        ("geometric", 0.0011, False),
        ("k3", 0.13, True),
        ("k3", 0.15, False),
        ("veto", math.log(1.1e-4), True),
        ("veto", math.log(0.9e-4), False),
    ],
)
def test_sequences_are_rejected_exactly_beyond_their_limits(rejection: str, log_rho: float, kept: bool) -> None:
    old, mu = torch.full((1, 3), log_rho), torch.zeros((1, 3))
    correction = correct(old, mu, torch.ones((1, 3)), CorrectionSettings(rejections=(rejection,)))
    assert bool(correction.keep[0]) is kept
    assert bool(correction.rejected_by[rejection][0]) is not kept


def test_rejection_shrinks_the_numerator_and_leaves_the_denominator() -> None:
    data = core3(torch.float64)
    correction = data.correction(rejections=("geometric",), geometric_low=0.98, geometric_high=1.02)
    assert correction.keep.tolist() == [False, False, True]
    assert torch.equal(correction.mask, data.mask)
    batch = data.batch(weights=correction.weights)
    alone = policy_loss(rows_of(batch, [2]), data.denominators())
    by_weight = policy_loss(batch, data.denominators())
    by_keep = policy_loss(replace(batch, weights=data.correction().weights, keep=correction.keep), data.denominators())
    assert torch.equal(by_weight.loss, by_keep.loss)
    torch.testing.assert_close(by_weight.loss, alone.loss, rtol=0, atol=1e-15)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_members_without_a_verdict_change_no_sibling_and_get_nothing(estimator: str) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    group = torch.tensor([9, 9, 9, 4, 4])
    alone = group_advantages(rewards, None, group, estimator=estimator)
    for junk in (float("nan"), float("inf"), -100.0, 0.0):
        with_failed = torch.cat([rewards[:2], torch.tensor([junk], dtype=torch.float64), rewards[2:]])
        valid = torch.tensor([True, True, False, True, True, True])
        got = group_advantages(with_failed, valid, torch.tensor([9, 9, 9, 9, 4, 4]), estimator=estimator)
        assert got[2] == 0
        assert torch.equal(got[valid], alone)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_rewards_and_singletons_give_exactly_zero(estimator: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1] * 3 + [0.7] + [0.3, 0.9, 0.8], dtype=dtype)
    group = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    advantages = group_advantages(rewards, None, group, estimator=estimator)
    assert advantages.dtype == torch.promote_types(dtype, torch.float32)
    assert not advantages[:4].any() and advantages[4:].all()


def test_a_spread_below_the_floor_is_centred_but_never_amplified() -> None:
    group = torch.zeros(2, dtype=torch.int64)
    for spread, divided in ((1e-3, False), (2e-3, True)):
        rewards = torch.tensor([0.5, 0.5 + spread], dtype=torch.float64)
        largest = float(group_advantages(rewards, None, group, estimator="grpo").abs().max())
        assert (largest > 0.5) is divided
        assert divided or largest == pytest.approx(spread / 2)


def test_the_geometric_band_bounds_mu_over_old_and_not_its_inverse() -> None:
    settings = CorrectionSettings(rejections=("geometric",), geometric_low=0.5, geometric_high=1.0)
    log_rho = torch.tensor([[0.6], [-0.6], [0.8]])
    assert correct(log_rho, torch.zeros((3, 1)), torch.ones((3, 1)), settings).keep.tolist() == [True, False, False]


def test_only_groups_with_two_different_valid_rewards_have_a_signal() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.9, 0.3, 0.4], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    valid = torch.tensor([True, True, True, True, False, True, True])
    assert groups_with_signal(rewards, valid, group).tolist() == [False] * 5 + [True] * 2


def test_group_order_does_not_matter() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.5, 0.25]), torch.tensor([5, 2, 5, 2])
    advantages = group_advantages(rewards, None, group)
    assert advantages.tolist() == [0.25, -0.125, -0.25, 0.125]
    order = torch.tensor([3, 0, 2, 1])
    assert torch.equal(group_advantages(rewards[order], None, group[order]), advantages[order])
    assert group_advantages(rewards[:0], None, group[:0]).shape == (0,)


def test_behaviour_ratio_is_one_where_masked_and_has_no_gradient() -> None:
    data = core3(torch.float64)
    ratio = behaviour_ratio(data.logp_old.clone().requires_grad_(True), data.logp_mu, data.mask)
    assert not ratio.log_rho.requires_grad
    assert (ratio.rho[~data.mask] == 1).all()
