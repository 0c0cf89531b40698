"""Deliberate mistakes must move the default loss far beyond the tolerance, or the golden vectors are blind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from golden_objectives import TOLERANCE, Core3, core3, expected, largest_error
from torch import Tensor

from rollbook.learner.aggregation import aggregate, step_denominators
from rollbook.learner.corrections import correct
from rollbook.learner.objectives import objective_settings, policy_loss

REFERENCE = float(expected("core3/decoupled_token_tis", "loss"))


def _loss(data: Core3, **changes: object) -> Tensor:
    settings = objective_settings("decoupled", clip_high=changes.pop("clip_high", 0.28))
    denominators = changes.pop("denominators", data.denominators())
    batch = data.batch(**({"weights": data.correction().weights} | changes))
    return policy_loss(batch, denominators, settings).loss


def _mask_leak(data: Core3) -> Tensor:
    full = torch.ones_like(data.mask)
    return _loss(replace(data, mask=full), weights=correct(data.logp_old, data.logp_mu, full).weights)


def _inverted_rho(data: Core3) -> Tensor:
    return _loss(data, weights=correct(data.logp_mu, data.logp_old, data.mask).weights)


def _double_counting(data: Core3) -> Tensor:
    return _loss(data, logp_old=data.logp_mu, weights=data.correction("untruncated").weights)


def _population_std(data: Core3) -> Tensor:
    return _loss(data, advantages=expected("core3/adv", "grpo_population_std"))


def _padded_denominator(data: Core3) -> Tensor:
    return _loss(data, denominators=step_denominators(torch.full((3,), 6)))


MUTANTS: dict[str, Callable[[Core3], Tensor]] = {
    "mask leak": _mask_leak,
    "symmetric clip": lambda data: _loss(data, clip_high=0.2),
    "no correction": lambda data: _loss(data, weights=data.correction("none").weights),
    "inverted rho": _inverted_rho,
    "no truncation": lambda data: _loss(data, weights=data.correction("untruncated").weights),
    "padded denominator": _padded_denominator,
    "population std": _population_std,
    "double counting": _double_counting,
    "flipped sign": lambda data: _loss(data, advantages=-data.advantages()),
}


def test_the_unmutated_loss_is_the_golden_one() -> None:
    assert abs(float(_loss(core3(torch.float64))) - REFERENCE) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_differs_from_golden_by_a_hundred_tolerances(name: str) -> None:
    difference = abs(float(MUTANTS[name](core3(torch.float64))) - REFERENCE)
    assert difference > 100 * TOLERANCE[torch.float32], f"{name} moves the loss by {difference} only"


def test_local_denominators_give_the_wrong_value_the_golden_file_lists() -> None:
    data = core3(torch.float64)
    token_loss = expected("core3/dapo", "token_loss")
    means = [
        aggregate(token_loss[rows], data.mask[rows], step_denominators(data.mask[rows].sum(1)), "token-mean")
        for rows in ([0], [1, 2])
    ]
    wrong = expected("core3/agg/micro_batches", "token_mean_local_denominator")
    assert largest_error(torch.stack(means).mean(), wrong) < TOLERANCE[torch.float64]
    assert abs(float(wrong - expected("core3/dapo", "loss"))) > 0.1


def test_a_coefficient_that_is_not_detached_keeps_the_loss_and_changes_the_gradient() -> None:
    data = core3(torch.float64)
    logp_theta = data.logp_theta.clone().requires_grad_(True)
    ratio = torch.where(data.mask, logp_theta - data.logp_old, 0.0).exp()
    leaking = -ratio.clamp(0.8, 1.28) * data.advantages()[:, None] * logp_theta
    loss = aggregate(leaking, data.mask, data.denominators(), "token-mean")
    loss.backward()
    assert largest_error(loss, expected("core3/cispo_band", "loss")) < TOLERANCE[torch.float64]
    gradient_error = largest_error(logp_theta.grad, expected("core3/cispo_band", "grad_logp_theta"))
    assert gradient_error > 100 * TOLERANCE[torch.float32]
