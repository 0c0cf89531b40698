"""Random micro-batches whose ratios lie on both sides of every limit, and ways to cut them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from rollbook.learner.advantages import group_advantages
from rollbook.learner.aggregation import Denominators, group_token_counts, step_denominators
from rollbook.learner.corrections import correct, trainable_mask
from rollbook.learner.objectives import (
    OBJECTIVES,
    PolicyBatch,
)


def random_batch(seed: int, *, n: int = 7, width: int = 9, dtype: torch.dtype = torch.float64) -> PolicyBatch:
    """Sequences of many lengths, one of them without a trainable token, ratios far outside every clip."""
    rng = torch.Generator().manual_seed(seed)
    logp_mu = -3.0 * torch.rand((n, width), generator=rng, dtype=torch.float64) - 0.01
    logp_old = logp_mu + 0.6 * torch.randn((n, width), generator=rng, dtype=torch.float64)
    logp_theta = logp_old + 0.4 * torch.randn((n, width), generator=rng, dtype=torch.float64)
    mask = torch.rand((n, width), generator=rng) < 0.7
    mask[3] = False
    mask[0, 0] = True
    rewards = torch.rand(n, generator=rng, dtype=torch.float64)
    group = torch.tensor([i // 3 for i in range(n)])
    counts = mask.sum(1)
    batch = PolicyBatch(
        logp_theta=logp_theta.to(dtype),
        logp_old=logp_old.to(dtype),
        logp_mu=logp_mu.to(dtype),
        advantages=group_advantages(rewards, counts > 0, group).to(dtype),
        mask=mask,
        logp_ref=(logp_theta + 0.2).to(dtype),
        group_tokens=group_token_counts(counts, group),
    )
    return replace(batch, weights=correct(batch.logp_old, batch.logp_mu, mask).weights)


def batch_for(name: str, batch: PolicyBatch) -> PolicyBatch:
    return batch if OBJECTIVES[name].takes_weights else replace(batch, weights=None)


def rows_of(batch: PolicyBatch, rows: list[int]) -> PolicyBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return PolicyBatch(**{name: None if value is None else value[rows] for name, value in values.items()})


def denominators_of(batch: PolicyBatch) -> Denominators:
    counts = trainable_mask(batch.mask, batch.logp_mu).sum(1)
    return step_denominators(counts, torch.tensor([i // 3 for i in range(counts.shape[0])]))
