"""Corrections for data that another policy sampled: detached weights and rejections on rho = pi_old / mu.

Owns every function of the behaviour ratio. Never clips the policy-update ratio pi_theta / pi_old (``objectives.py``)
and never touches a denominator: a rejected token leaves the numerator only, because shrinking the denominator would
enlarge the step of the tokens that stay.

A row of every [B, T] tensor is one whole sequence; a sequence is never split over rows. Values at masked positions are
never read. A token whose behaviour log-prob is missing (NaN or infinite) counts as masked, not as ratio 1.

Source: Yao et al. 2025 (truncated importance sampling for LLM RL), IcePop (arXiv:2510.18855), DeepSeek-V3.2
(arXiv:2512.02556), DPPO (arXiv:2602.04879).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.core.errors import ConfigError, InvalidRequest


def upcast(values: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged when it is float32 or float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)


def require_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would only fit each other by broadcasting.

    Raises:
        InvalidRequest: two shapes differ.
    """
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InvalidRequest(f"tensors must have one shape, got {shapes}")


def trainable_mask(mask: Tensor, logp_mu: Tensor) -> Tensor:
    """Mask of tokens that may enter numerators, denominators and metrics: [B, T] bool.

    Count denominators over this mask, before any rejection.
    """
    require_same_shape(mask=mask, logp_mu=logp_mu)
    return mask.to(torch.bool) & torch.isfinite(logp_mu)


def masked_log_ratio(logp_numerator: Tensor, logp_denominator: Tensor, mask: Tensor) -> Tensor:
    """Log of the ratio of two probabilities, 0 at masked positions whatever stands there; [B, T], float32 or wider."""
    require_same_shape(logp_numerator=logp_numerator, logp_denominator=logp_denominator, mask=mask)
    keep = mask.to(torch.bool)
    return torch.where(keep, upcast(logp_numerator), 0.0) - torch.where(keep, upcast(logp_denominator), 0.0)


def kl_k1(log_x: Tensor) -> Tensor:
    """Estimate -log x of KL(p || q) for x = q/p on samples of p: unbiased, high variance, may be negative."""
    return -log_x


def kl_k2(log_x: Tensor) -> Tensor:
    """Estimate (log x)^2 / 2 of KL(p || q): biased in value."""
    return 0.5 * log_x.square()


def kl_k3(log_x: Tensor) -> Tensor:
    """Estimate x - 1 - log x of KL(p || q): unbiased and never negative. Source: Schulman 2020."""
    return torch.expm1(log_x) - log_x


@dataclass(frozen=True)
class BehaviourRatio:
    """rho of one micro-batch: ``log_rho`` [B, T] (0 where masked) and the boolean ``mask`` it was taken over."""

    log_rho: Tensor
    mask: Tensor

    @property
    def rho(self) -> Tensor:
        """[B, T] token ratios; 1 where masked."""
        return self.log_rho.exp()

    @property
    def sequence_product(self) -> Tensor:
        """[B, 1] product of the token ratios of each sequence; inf where it exceeds the dtype."""
        return self.log_rho.sum(1, keepdim=True).exp()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[B] mean over each sequence's trainable tokens; 0 for a sequence without any."""
        return torch.where(self.mask, values, 0.0).sum(1) / self.mask.sum(1).clamp(min=1)


def behaviour_ratio(logp_old: Tensor, logp_mu: Tensor, mask: Tensor) -> BehaviourRatio:
    """Compute rho = pi_old / mu over the trainable tokens, without gradient.

    Args:
        logp_old: [B, T] natural log-probs under the weights at the start of the step.
        logp_mu: [B, T] natural log-probs recorded by the engine that sampled the tokens; NaN where missing.
        mask: [B, T] true for trainable policy tokens.
    """
    effective = trainable_mask(mask, logp_mu)
    return BehaviourRatio(masked_log_ratio(logp_old.detach(), logp_mu.detach(), effective), effective)


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Which correction applies and where it cuts; every limit is a dimensionless ratio unless it says otherwise.

    ``rejections`` are off by default. ``geometric_low`` and ``geometric_high`` bound mu / pi_old, the inverse of rho.
    ``k3_max`` is in nats per token.
    """

    weight: str = "token_tis"
    rejections: tuple[str, ...] = ()
    cap: float = 2.0
    band_low: float = 0.5
    band_high: float = 5.0
    sequence_low: float = 0.0
    sequence_high: float = 3.0
    geometric_low: float = 0.999
    geometric_high: float = 1.001
    k3_max: float = 0.01
    veto_below: float = 1e-4

    def __post_init__(self) -> None:
        if self.weight not in WEIGHTS:
            raise ConfigError(f"unknown correction weight {self.weight!r}; choose one of {sorted(WEIGHTS)}")
        unknown = sorted(set(self.rejections) - set(REJECTIONS))
        if unknown:
            raise ConfigError(f"unknown rejections {unknown}; choose from {sorted(REJECTIONS)}")
        if not self.cap > 0:
            raise ConfigError(f"cap must be above 0 or every weight is 0, got {self.cap}")
        for name in ("band", "sequence", "geometric"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 <= low <= high:
                raise ConfigError(f"{name}_low..{name}_high must be an interval of ratios, got {low}..{high}")


def _none(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return torch.ones_like(ratio.log_rho)


def _untruncated(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return ratio.rho


def _token_tis(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return ratio.rho.clamp(max=settings.cap)


def _sequence_tis(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return ratio.sequence_product.clamp(max=settings.cap).expand_as(ratio.log_rho)


def _zero_outside(values: Tensor, low: float, high: float) -> Tensor:
    return torch.where((values >= low) & (values <= high), values, 0.0)


def _token_mis(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return _zero_outside(ratio.rho, settings.band_low, settings.band_high)


def _sequence_mis(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    product = _zero_outside(ratio.sequence_product, settings.sequence_low, settings.sequence_high)
    return product.expand_as(ratio.log_rho)


WEIGHTS: dict[str, Callable[[BehaviourRatio, CorrectionSettings], Tensor]] = {
    "none": _none,
    "untruncated": _untruncated,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "token_mis": _token_mis,
    "sequence_mis": _sequence_mis,
}
"""Weight functions by name; ``token_mis`` with the default band is IcePop."""


def _keep_geometric(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    inverse = (-ratio.sequence_mean(ratio.log_rho)).exp()
    return (inverse >= settings.geometric_low) & (inverse <= settings.geometric_high)


def sequence_k3(ratio: BehaviourRatio) -> Tensor:
    """[B] mean k3 estimate of KL(mu || pi_old) over each sequence, in nats per token."""
    return ratio.sequence_mean(kl_k3(ratio.log_rho))


def _keep_k3(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return sequence_k3(ratio) <= settings.k3_max


def _keep_veto(ratio: BehaviourRatio, settings: CorrectionSettings) -> Tensor:
    return ~((ratio.rho < settings.veto_below) & ratio.mask).any(1)


REJECTIONS: dict[str, Callable[[BehaviourRatio, CorrectionSettings], Tensor]] = {
    "geometric": _keep_geometric,
    "k3": _keep_k3,
    "veto": _keep_veto,
}
"""Rules that say per sequence, [B] bool, whether it is kept."""


@dataclass(frozen=True)
class Correction:
    """What the loss multiplies by, and why.

    ``weights`` [B, T] are detached and 0 where masked or rejected; ``keep`` [B] is False for rejected sequences;
    ``mask`` [B, T] is the mask before rejection, the one denominators are counted over; ``rejected_by`` names per rule
    the sequences [B] it rejected.
    """

    weights: Tensor
    keep: Tensor
    mask: Tensor
    rejected_by: dict[str, Tensor]


@torch.no_grad()
def correct(logp_old: Tensor, logp_mu: Tensor, mask: Tensor, settings: CorrectionSettings | None = None) -> Correction:
    """Compute the weights and rejections of one micro-batch; it needs nothing but the micro-batch itself.

    Args:
        logp_old: [B, T] natural log-probs under the weights at the start of the step.
        logp_mu: [B, T] natural log-probs of the behaviour policy; NaN where missing.
        mask: [B, T] true for trainable policy tokens.
        settings: token TIS with cap 2 and no rejection when omitted.

    Raises:
        InvalidRequest: shapes differ.

    Truncation is biased: it bounds the variance of what the cap cuts off.
    """
    settings = settings or CorrectionSettings()
    ratio = behaviour_ratio(logp_old, logp_mu, mask)
    keep = torch.ones(ratio.mask.shape[0], dtype=torch.bool, device=ratio.mask.device)
    rejected_by: dict[str, Tensor] = {}
    for name in settings.rejections:
        kept = REJECTIONS[name](ratio, settings)
        rejected_by[name] = ~kept & ratio.mask.any(1)
        keep = keep & kept
    weights = WEIGHTS[settings.weight](ratio, settings)
    return Correction(torch.where(ratio.mask & keep[:, None], weights, 0.0), keep, ratio.mask, rejected_by)


def normalise_weights(weights: Tensor, *, weight_sum: Tensor | float, token_count: Tensor | float) -> Tensor:
    """Divide weights by their mean over the whole step.

    Args:
        weights: [B, T] of one micro-batch, after truncation.
        weight_sum: sum over every trainable token of the step, all micro-batches and ranks.
        token_count: number of those tokens, rejected ones included.
    """
    return weights * (token_count / weight_sum)


@torch.no_grad()
def keep_by_sign_and_drift(
    logp_theta: Tensor, logp_mu: Tensor, advantages: Tensor, mask: Tensor, *, drift_max: float
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence mask: drop sequences with negative advantage that the policy has moved away from.

    Args:
        logp_theta: [B, T] log-probs under the current weights.
        logp_mu: [B, T] log-probs of the behaviour policy.
        advantages: [B].
        mask: [B, T].
        drift_max: nats per token, on mean(log mu - log theta).

    Returns:
        ``keep`` [B] bool and the statistic [B] it was decided on.

    Source: DeepSeek-V3.2 (arXiv:2512.02556).
    """
    ratio = behaviour_ratio(logp_theta, logp_mu, mask)
    drift = -ratio.sequence_mean(ratio.log_rho)
    return (advantages >= 0) | (drift <= drift_max), drift


@torch.no_grad()
def keep_by_probability_change(
    logp_theta: Tensor, logp_mu: Tensor, advantages: Tensor, mask: Tensor, *, change_low: float, change_high: float
) -> Tensor:
    """Drop tokens whose probability already moved too far the way their advantage pushes it.

    Args:
        logp_theta: [B, T] log-probs under the current weights.
        logp_mu: [B, T] log-probs of the behaviour policy.
        advantages: [B, T].
        mask: [B, T].
        change_low: allowed fall of the probability where the advantage is not positive, absolute.
        change_high: allowed rise where the advantage is positive, absolute.

    Returns:
        [B, T] bool; False where masked.

    Source: DPPO total-variation mask (arXiv:2602.04879).
    """
    effective = trainable_mask(mask, logp_mu)
    change = torch.where(effective, upcast(logp_theta), 0.0).exp() - torch.where(effective, upcast(logp_mu), 0.0).exp()
    dropped = torch.where(advantages > 0, change > change_high, change < -change_low)
    return effective & ~dropped
