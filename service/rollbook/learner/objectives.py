"""Policy losses as pure functions of log-probs.

Owns the per-token losses and their registry. Never divides (``aggregation.py``) and never computes a behaviour weight
(``corrections.py``). All losses are minimised.

Two drifts, two tools: rho = pi_old / mu (collection to start of step) is met by a detached weight, r = pi_theta /
pi_old (inside the step) by clipping. Clipping the product and weighting by rho as well would count rho twice.

A row of every [B, T] tensor is one whole sequence. Values at masked positions are never read, and no gradient reaches
them. Only ``logp_theta`` receives a gradient.

Source: Schulman et al. 2017 (arXiv:1707.06347), Hilton et al. 2021 (arXiv:2110.00641, decoupled), DAPO
(arXiv:2503.14476), Dr. GRPO (arXiv:2503.20783), GSPO (arXiv:2507.18071), CISPO (arXiv:2506.13585), TOPR
(arXiv:2503.14286), DPPO (arXiv:2602.04879).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollbook.core.errors import ConfigError, InvalidRequest
from rollbook.learner.aggregation import AGGREGATIONS, Denominators, aggregate
from rollbook.learner.corrections import (
    keep_by_probability_change,
    kl_k3,
    masked_log_ratio,
    require_same_shape,
    trainable_mask,
    upcast,
)

LOG_RATIO_MAX = 20.0
"""Log ratios are clamped to plus or minus this before exp, so that a lost policy gives no inf times zero gradient."""


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """One micro-batch of the loss; a row is one sequence, log-probs are natural and taken at the sampling temperature.

    ``logp_theta`` [B, T] carries the gradient; ``logp_old`` and ``logp_mu`` [B, T] are constants (``logp_mu`` NaN where
    missing). ``advantages`` [B] or [B, T]. ``mask`` [B, T] is true for trainable policy tokens, before rejection.
    ``weights`` [B, T] come from ``corrections.correct``; None stands for 1 and is refused by the decoupled loss.
    ``keep`` [B] or [B, T] is False where a rejection applies. ``logp_ref`` is needed for a KL term only,
    ``group_tokens`` [B] for prompt-mean-token-mean only.
    """

    logp_theta: Tensor
    logp_old: Tensor
    logp_mu: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    keep: Tensor | None = None
    logp_ref: Tensor | None = None
    group_tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Where an objective clips and how it is aggregated; ratios are dimensionless.

    ``clip_low`` and ``clip_high`` are distances from 1. ``dual_clip`` bounds the loss of negative advantages at
    ``dual_clip * |A|``. ``ratio_max`` caps r inside the minimum (two-sided clipping). ``cap`` is an absolute cap on a
    coefficient. ``kl_beta`` scales KL(theta || ref): ``kl_form`` "k3" adds the bare estimate, "ratio_k3" multiplies it
    by r and the behaviour weight, which makes its gradient that of the reverse KL. ``change_low`` / ``change_high`` are
    probability differences and ``drift_penalty`` weighs (log theta - log mu)^2, all three for ``dppo_kl``.
    """

    name: str = "decoupled"
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    ratio_max: float | None = None
    cap: float = 2.0
    kl_beta: float = 0.0
    kl_form: str = "ratio_k3"
    length_max: float | None = None
    change_low: float = 0.2
    change_high: float = 0.2
    drift_penalty: float = 1e-3

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"unknown aggregation {self.aggregation!r}; choose one of {sorted(AGGREGATIONS)}")
        if self.kl_form not in ("k3", "ratio_k3"):
            raise ConfigError(f"kl_form is 'k3' or 'ratio_k3', got {self.kl_form!r}")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ConfigError(f"clip band 1-{self.clip_low}..1+{self.clip_high} must contain 1 and no negative ratio")
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ConfigError(f"dual_clip must exceed 1 + clip_high, got {self.dual_clip}")
        if self.ratio_max is not None and not self.ratio_max > 1 + self.clip_high:
            raise ConfigError(f"ratio_max must exceed 1 + clip_high, got {self.ratio_max}")


@dataclass(frozen=True)
class LossResult:
    """The scalar to call ``backward`` on, and detached per-token views of it.

    ``token_loss`` [B, T] is weighted and 0 where masked or rejected; ``ratio`` [B, T] is the ratio the objective used
    (1 where masked); ``coefficient`` [B, T] is the constant in front of log theta in the objectives that have one.
    """

    loss: Tensor
    token_loss: Tensor
    ratio: Tensor
    coefficient: Tensor | None = None


@dataclass(frozen=True)
class _Terms:
    """Inputs made safe: upcast, broadcast to [B, T], constants detached, masked positions zeroed."""

    logp_theta: Tensor
    log_r: Tensor
    log_total: Tensor
    logp_mu: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor


_TokenLoss = tuple[Tensor, Tensor, Tensor | None]


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def _clipped(ratio: Tensor, terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    advantages = terms.advantages
    bounded = ratio if settings.ratio_max is None else ratio.clamp(max=settings.ratio_max)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    objective = torch.minimum(bounded * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        floor = torch.where(advantages < 0, settings.dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    return -terms.weights * objective, ratio, None


def _token_clip(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    return _clipped(_ratio(terms.log_r), terms, settings)


def _sequence_clip(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(_sequence_mean(terms.log_r, terms.mask)).expand_as(terms.log_r)
    return _clipped(ratio, terms, settings)


def _scored(ratio: Tensor, coefficient: Tensor, terms: _Terms) -> _TokenLoss:
    coefficient = (coefficient * terms.weights).detach()
    return -coefficient * terms.advantages * terms.logp_theta, ratio, coefficient


def _cispo(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(terms.log_r)
    return _scored(ratio, ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high), terms)


def _cispo_cap(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(terms.log_r)
    return _scored(ratio, ratio.clamp(max=settings.cap), terms)


def _reinforce(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(terms.log_total)
    return _scored(ratio, ratio.clamp(max=settings.cap), terms)


def _topr(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(terms.log_total.sum(1, keepdim=True)).expand_as(terms.log_total)
    return _scored(ratio, torch.where(terms.advantages >= 0, 1.0, ratio.clamp(max=1.0)), terms)


def _dppo_kl(terms: _Terms, settings: ObjectiveSettings) -> _TokenLoss:
    ratio = _ratio(terms.log_total)
    limits = {"change_low": settings.change_low, "change_high": settings.change_high}
    keep = keep_by_probability_change(terms.logp_theta, terms.logp_mu, terms.advantages, terms.mask, **limits)
    gain = torch.where(keep, terms.advantages, 0.0) * ratio
    return settings.drift_penalty * terms.log_total.square() - gain, ratio, None


@dataclass(frozen=True)
class Objective:
    """A per-token loss, the settings it starts from, and what it does with behaviour weights."""

    token_loss: Callable[[_Terms, ObjectiveSettings], _TokenLoss]
    defaults: ObjectiveSettings
    takes_weights: bool = True
    needs_weights: bool = False


_PROMPT_MEAN = "prompt-mean-token-mean"
_SEQ_MEAN = "seq-mean-token-mean"
_SEQ_SUM = "seq-mean-token-sum"

OBJECTIVES: dict[str, Objective] = {
    entry.defaults.name: entry
    for entry in (
        Objective(_token_clip, ObjectiveSettings(name="decoupled"), needs_weights=True),
        Objective(_token_clip, ObjectiveSettings(name="ppo_clip", clip_high=0.2)),
        Objective(_token_clip, ObjectiveSettings(name="ppo_dual_clip", clip_high=0.2, dual_clip=3.0)),
        Objective(_token_clip, ObjectiveSettings(name="two_sided", clip_high=0.2, ratio_max=4.0)),
        Objective(_token_clip, ObjectiveSettings(name="grpo", clip_high=0.2, aggregation=_SEQ_MEAN)),
        Objective(_token_clip, ObjectiveSettings(name="dr_grpo", clip_high=0.2, aggregation=f"{_SEQ_SUM}-norm")),
        Objective(_token_clip, ObjectiveSettings(name="dapo")),
        Objective(_sequence_clip, ObjectiveSettings(name="gspo", clip_low=3e-4, clip_high=4e-4, aggregation=_SEQ_MEAN)),
        Objective(_cispo, ObjectiveSettings(name="cispo", clip_low=1.0)),
        Objective(_cispo_cap, ObjectiveSettings(name="cispo_cap", cap=5.0)),
        Objective(_reinforce, ObjectiveSettings(name="reinforce_is"), takes_weights=False),
        Objective(
            _reinforce, ObjectiveSettings(name="scalerl", cap=5.0, aggregation=_PROMPT_MEAN), takes_weights=False
        ),
        Objective(_topr, ObjectiveSettings(name="topr", aggregation=_SEQ_SUM), takes_weights=False),
        Objective(_dppo_kl, ObjectiveSettings(name="dppo_kl"), takes_weights=False),
    )
}
"""Objectives by name. Those with a ratio over mu refuse behaviour weights: they would count rho twice."""


def objective_settings(name: str = "decoupled", **overrides: object) -> ObjectiveSettings:
    """Return an objective's default settings with some of them replaced.

    Raises:
        ConfigError: unknown objective or setting, or a value out of range.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"unknown objective {name!r}; choose one of {sorted(OBJECTIVES)}")
    unknown = sorted(set(overrides) - set(ObjectiveSettings.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown objective settings {unknown}")
    return replace(OBJECTIVES[name].defaults, **overrides)  # type: ignore[arg-type]


def _rows(values: Tensor, like: Tensor, name: str) -> Tensor:
    expanded = values[:, None].expand_as(like) if values.ndim == 1 and values.shape[0] == like.shape[0] else values
    require_same_shape(logp_theta=like, **{name: expanded})
    return expanded


def _terms(batch: PolicyBatch, entry: Objective, name: str) -> _Terms:
    if batch.weights is None and entry.needs_weights:
        raise InvalidRequest(f"objective {name!r} needs behaviour weights; 'none' in corrections gives ones")
    if batch.weights is not None and not entry.takes_weights:
        raise InvalidRequest(f"objective {name!r} already uses pi_theta / mu; weights would count rho twice")
    mask = trainable_mask(batch.mask, batch.logp_mu)
    logp_theta = torch.where(mask, upcast(batch.logp_theta), 0.0)
    advantages = _rows(batch.advantages.detach(), batch.logp_theta, "advantages")
    weights = torch.ones_like(logp_theta) if batch.weights is None else batch.weights.detach()
    require_same_shape(logp_theta=logp_theta, weights=weights)
    return _Terms(
        logp_theta=logp_theta,
        log_r=masked_log_ratio(logp_theta, batch.logp_old.detach(), mask),
        log_total=masked_log_ratio(logp_theta, batch.logp_mu.detach(), mask),
        logp_mu=torch.where(mask, upcast(batch.logp_mu.detach()), 0.0),
        advantages=torch.where(mask, upcast(advantages), 0.0),
        weights=torch.where(mask, upcast(weights), 0.0),
        mask=mask,
    )


def _kl_term(batch: PolicyBatch, terms: _Terms, settings: ObjectiveSettings) -> Tensor:
    if batch.logp_ref is None:
        raise InvalidRequest("a KL term needs logp_ref")
    log_x = -masked_log_ratio(terms.logp_theta, batch.logp_ref.detach(), terms.mask)
    estimate = kl_k3(log_x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))
    if settings.kl_form == "ratio_k3":
        estimate = _ratio(terms.log_r) * estimate * terms.weights
    return settings.kl_beta * estimate


def policy_loss(
    batch: PolicyBatch, denominators: Denominators, settings: ObjectiveSettings | None = None
) -> LossResult:
    """Compute this micro-batch's share of the step's loss.

    Args:
        batch: log-probs, advantages, mask and behaviour weights of the micro-batch.
        denominators: counts of the whole step, over ``trainable_mask`` and before rejection.
        settings: from ``objective_settings``; decoupled PPO-clip 0.2 / 0.28 with token-mean when omitted.

    Raises:
        InvalidRequest: shapes differ, weights are missing or would count twice, or a needed count is zero.
    """
    settings = settings or ObjectiveSettings()
    entry = OBJECTIVES.get(settings.name)
    if entry is None:
        raise ConfigError(f"unknown objective {settings.name!r}; choose one of {sorted(OBJECTIVES)}")
    terms = _terms(batch, entry, settings.name)
    token_loss, ratio, coefficient = entry.token_loss(terms, settings)
    if settings.kl_beta:
        token_loss = token_loss + _kl_term(batch, terms, settings)
    kept = terms.mask
    if batch.keep is not None:
        kept = kept & _rows(batch.keep.to(torch.bool), batch.logp_theta, "keep")
    token_loss = torch.where(kept, token_loss, 0.0)
    loss = aggregate(
        token_loss,
        terms.mask,
        denominators,
        settings.aggregation,
        length_max=settings.length_max,
        group_tokens=batch.group_tokens,
    )
    coefficient = None if coefficient is None else torch.where(kept, coefficient, 0.0)
    return LossResult(loss, token_loss.detach(), ratio.detach(), coefficient)


def decoupled_ppo_clip(
    logp_theta: Tensor,
    logp_old: Tensor,
    logp_mu: Tensor,
    weights: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Denominators,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    keep: Tensor | None = None,
) -> LossResult:
    """Default objective on plain tensors: weights * min(r A, clip(r) A), token-mean; see ``policy_loss``."""
    tensors = {"logp_theta": logp_theta, "logp_old": logp_old, "logp_mu": logp_mu, "mask": mask}
    batch = PolicyBatch(**tensors, advantages=advantages, weights=weights, keep=keep)
    return policy_loss(batch, denominators, ObjectiveSettings(clip_low=clip_low, clip_high=clip_high))


def clip_indicators(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Say which ratios lost their gradient below, lost it above, and lie outside the band whatever the sign.

    Args:
        ratio: any shape.
        advantages: broadcastable to it.

    Returns:
        Three boolean tensors: clipped low (A < 0), clipped high (A > 0), outside.
    """
    below, above = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    return below & (advantages < 0), above & (advantages > 0), below | above
