"""The one place where a sum of per-token losses is divided.

Owns the aggregation modes and the shape of their denominators. Never counts over a micro-batch: the counts of the whole
optimizer step (every micro-batch and rank, before rejection) are passed in, so the gradient does not depend on how the
step was split, packed or padded. Sequences without a trainable token are counted nowhere.

Source: DAPO (arXiv:2503.14476), Dr. GRPO (arXiv:2503.20783), ScaleRL (arXiv:2510.13786).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.core.errors import ConfigError, InvalidRequest
from rollbook.learner.corrections import require_same_shape, upcast

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
)
"""Aggregation modes by name."""


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over the whole optimizer step, taken before rejection.

    ``tokens`` trainable tokens; ``sequences`` sequences with at least one; ``groups`` groups with at least one.
    ``gradient_ranks`` is the number of ranks the gradients are averaged over afterwards, 1 when they are summed.
    """

    tokens: float
    sequences: float
    groups: float = 0.0
    gradient_ranks: int = 1


def step_denominators(
    token_counts: Tensor, group_ids: Tensor | None = None, *, gradient_ranks: int = 1
) -> Denominators:
    """Count the denominators of one optimizer step.

    Args:
        token_counts: [N] trainable tokens of every sequence of the step, over all ranks.
        group_ids: [N] integers; needed by prompt-mean-token-mean only.
        gradient_ranks: number of ranks gradients are averaged over.
    """
    used = token_counts > 0
    groups = 0 if group_ids is None else int(torch.unique(group_ids[used]).numel())
    tokens, sequences = float(token_counts.sum()), float(used.sum())
    return Denominators(tokens=tokens, sequences=sequences, groups=groups, gradient_ranks=gradient_ranks)


def group_token_counts(token_counts: Tensor, group_ids: Tensor) -> Tensor:
    """[N] trainable tokens of the whole group each sequence belongs to, over the whole step."""
    require_same_shape(token_counts=token_counts, group_ids=group_ids)
    same = group_ids[:, None] == group_ids[None, :]
    return torch.where(same, token_counts[None, :], 0).sum(1)


def _divisor(value: float | None, name: str, mode: str) -> float:
    if value is None or not value > 0:
        raise InvalidRequest(f"aggregation {mode!r} needs {name} above 0, got {value}; skip a step without tokens")
    return value


def token_weights(
    mask: Tensor,
    denominators: Denominators,
    mode: str,
    *,
    length_max: float | None = None,
    group_tokens: Tensor | None = None,
) -> Tensor:
    """Derivative of the scalar loss with respect to each per-token loss.

    Args:
        mask: [B, T] before rejection.
        denominators: counts of the whole step.
        mode: one of ``AGGREGATIONS``.
        length_max: tokens, a constant of the run (never the width of a batch); seq-mean-token-sum-norm only.
        group_tokens: [B] from ``group_token_counts``; prompt-mean-token-mean only.

    Returns:
        [B, T] float32; 0 where masked. Its sum over the step is 1 for the token-mean modes.

    Raises:
        ConfigError: unknown mode.
        InvalidRequest: the mode needs a count that is missing or zero.
    """
    trainable = mask.to(torch.bool)
    counts = trainable.sum(1, keepdim=True).clamp(min=1).to(torch.float64)
    ones = trainable.to(torch.float64)
    if mode == "token-mean":
        weight = ones / _divisor(denominators.tokens, "tokens", mode)
    elif mode == "token-sum":
        weight = ones
    elif mode == "seq-mean-token-mean":
        weight = ones / counts / _divisor(denominators.sequences, "sequences", mode)
    elif mode == "seq-mean-token-sum":
        weight = ones / _divisor(denominators.sequences, "sequences", mode)
    elif mode == "seq-mean-token-sum-norm":
        sequences = _divisor(denominators.sequences, "sequences", mode)
        weight = ones / (sequences * _divisor(length_max, "length_max", mode))
    elif mode == "prompt-mean-token-mean":
        if group_tokens is None:
            raise InvalidRequest(f"aggregation {mode!r} needs group_tokens; see group_token_counts")
        per_group = group_tokens.to(torch.float64).clamp(min=1)[:, None]
        weight = ones / per_group / _divisor(denominators.groups, "groups", mode)
    else:
        raise ConfigError(f"unknown aggregation {mode!r}; choose one of {sorted(AGGREGATIONS)}")
    return weight * denominators.gradient_ranks


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    denominators: Denominators,
    mode: str,
    *,
    length_max: float | None = None,
    group_tokens: Tensor | None = None,
) -> Tensor:
    """Sum per-token losses [B, T] into this micro-batch's share of the step's loss.

    Shares of all micro-batches add up to the step's loss (with ``gradient_ranks`` > 1: their mean over ranks does). A
    micro-batch without trainable tokens gives a zero that still has a gradient path, so collectives stay in step.
    Arguments and errors as for ``token_weights``.
    """
    require_same_shape(token_loss=token_loss, mask=mask)
    weights = token_weights(mask, denominators, mode, length_max=length_max, group_tokens=group_tokens)
    values = torch.where(mask.to(torch.bool), upcast(token_loss), 0.0)
    return (values * weights.to(values.dtype)).sum()
