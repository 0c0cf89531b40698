"""Group advantages: how much better a sample is than its siblings.

Owns the estimators that turn outcome rewards into advantages. Never sees a log-prob, never fills in a reward: a member
without a verdict is marked invalid, contributes to no statistic and gets advantage 0 (P6).

Edge rules, the same for every estimator: members that all hold the same reward get exactly 0, a group with one valid
member gets 0, and a spread of at most ``std_floor`` is never divided by, because the residue of rounding would be
amplified into a signal.

Source: Shao et al. 2024 (arXiv:2402.03300), Liu et al. 2025 (arXiv:2503.20783), Ahmadian et al. 2024
(arXiv:2402.14740), ScaleRL (arXiv:2510.13786).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.core.errors import ConfigError, InvalidRequest

STD_FLOOR = 1e-3
"""Rewards of order one whose spread is below this differ by rounding, not by merit."""


@dataclass(frozen=True)
class GroupStatistics:
    """What every estimator needs, per sample; float64, shape [N] each.

    ``centred`` is 0 for invalid samples, for singletons and for groups whose valid rewards are all equal;
    ``count`` is the number of valid members in the sample's group; ``std`` uses ddof=1 and is 0 for a singleton.
    """

    rewards: Tensor
    valid: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    centred: Tensor


def group_statistics(rewards: Tensor, valid: Tensor | None, group_ids: Tensor) -> GroupStatistics:
    """Compute per-group statistics over valid members only, in float64 and in a fixed order of summation.

    Args:
        rewards: [N] outcome rewards; whatever stands at invalid positions, NaN included, is never read.
        valid: [N] bool, or None when every member has a reward.
        group_ids: [N] integers, in any order.

    Raises:
        InvalidRequest: shapes differ, or a valid member's reward is not finite.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.to(torch.bool)
    if rewards.ndim != 1 or valid.shape != rewards.shape or group_ids.shape != rewards.shape:
        shapes = f"rewards {tuple(rewards.shape)}, valid {tuple(valid.shape)}, group_ids {tuple(group_ids.shape)}"
        raise InvalidRequest(f"advantages need three vectors of one length, got {shapes}")
    values = torch.where(valid, rewards.to(torch.float64), 0.0)
    if not bool(torch.isfinite(values).all()):
        raise InvalidRequest("a valid member has a reward that is not finite; mark members without a verdict invalid")
    _, index = torch.unique(group_ids, return_inverse=True)
    n_groups = int(index.max()) + 1 if index.numel() else 0
    member = (index[None, :] == torch.arange(n_groups, device=index.device)[:, None]) & valid[None, :]
    count = member.sum(1)
    mean = torch.where(member, values[None, :], 0.0).sum(1) / count.clamp(min=1)
    deviation = torch.where(member, values[None, :] - mean[:, None], 0.0)
    std = (deviation.square().sum(1) / (count - 1).clamp(min=1)).sqrt()
    highest = torch.where(member, values[None, :], -torch.inf).amax(1) if n_groups else mean
    lowest = torch.where(member, values[None, :], torch.inf).amin(1) if n_groups else mean
    has_signal = (highest > lowest)[index]
    centred = torch.where(valid & has_signal, values - mean[index], 0.0)
    std = torch.where(has_signal, std[index], 0.0)
    return GroupStatistics(values, valid, count[index], mean[index], std, centred)


def _divide_above_floor(numerator: Tensor, std: Tensor, *, std_floor: float, eps: float) -> Tensor:
    divisible = std > std_floor
    return torch.where(divisible, numerator / torch.where(divisible, std + eps, 1.0), numerator)


def _std_over(values: Tensor, valid: Tensor) -> Tensor:
    count = valid.sum()
    mean = torch.where(valid, values, 0.0).sum() / count.clamp(min=1)
    return (torch.where(valid, values - mean, 0.0).square().sum() / (count - 1).clamp(min=1)).sqrt()


def _group_mean_centred(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    return stats.centred


def _grpo(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    return _divide_above_floor(stats.centred, stats.std, std_floor=std_floor, eps=eps)


def _rloo(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    return stats.centred * stats.count / (stats.count - 1).clamp(min=1)


def _batch_std(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    std = _std_over(stats.rewards, stats.valid)
    return _divide_above_floor(stats.centred, std, std_floor=std_floor, eps=eps)


def _centre_then_batch_std(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    std = _std_over(stats.centred, stats.valid)
    return _divide_above_floor(stats.centred, std, std_floor=std_floor, eps=eps)


def _max_rl(stats: GroupStatistics, *, std_floor: float, eps: float) -> Tensor:
    nonzero = stats.mean != 0
    return torch.where(nonzero, stats.centred / torch.where(nonzero, stats.mean, 1.0), 0.0)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_mean_centred": _group_mean_centred,
    "grpo": _grpo,
    "rloo": _rloo,
    "batch_std": _batch_std,
    "centre_then_batch_std": _centre_then_batch_std,
    "max_rl": _max_rl,
}
"""Estimators by name. The ``batch_std`` pair needs every sample of the step in one call, not one micro-batch."""


def group_advantages(
    rewards: Tensor,
    valid: Tensor | None,
    group_ids: Tensor,
    *,
    estimator: str = "group_mean_centred",
    std_floor: float = STD_FLOOR,
    eps: float = 1e-6,
) -> Tensor:
    """Turn the rewards of one step into advantages.

    Args:
        rewards: [N] outcome rewards.
        valid: [N] bool; False for members without a verdict. None means all are valid.
        group_ids: [N] integers naming each sample's group.
        estimator: a key of ``ADVANTAGES``; the default is reward minus group mean (Dr. GRPO).
        std_floor: estimators that divide by a standard deviation do so only above this value, in reward units.
        eps: added to a standard deviation before dividing, in reward units.

    Returns:
        [N] detached, float32 or wider; 0 at invalid members.

    Raises:
        ConfigError: unknown estimator.
        InvalidRequest: shapes differ, or a valid member's reward is not finite.
    """
    if estimator not in ADVANTAGES:
        raise ConfigError(f"unknown advantage estimator {estimator!r}; choose one of {sorted(ADVANTAGES)}")
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    stats = group_statistics(rewards.detach(), valid, group_ids)
    return ADVANTAGES[estimator](stats, std_floor=std_floor, eps=eps).to(dtype)


def groups_with_signal(rewards: Tensor, valid: Tensor | None, group_ids: Tensor) -> Tensor:
    """Say per sample whether its group's valid members hold at least two different rewards.

    Returns:
        [N] bool. Dropping the others is a filter by difficulty: count what it drops.

    Source: dynamic sampling, DAPO (arXiv:2503.14476).
    """
    return group_statistics(rewards.detach(), valid, group_ids).std > 0
