"""Stored samples to tensors.

Owns the layout of a step's batch: plan order, right padding to the batch's own maximum, what is masked and why. Never
draws a random number and never fills in a reward: a member without a verdict is invalid, takes part in no statistic and
has no trainable token (P6). Checks that every payload is the planned one before it is used.

A token is trainable when the policy sampled it, its member has a reward, and its behaviour log-prob is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollbook.core.errors import DigestMismatch, InvalidRequest
from rollbook.core.records import Plan, PlanItem, SampleData, SlotKey
from rollbook.core.staleness import base_version, head_lag


@dataclass(frozen=True)
class StepBatch:
    """The samples of one step, or of a part of it, as CPU tensors; N rows in plan order.

    ``token_ids`` [N, L] int64: prompt, completion, right padding with 0. ``attention_mask`` [N, L] bool marks what is not
    padding. ``prompt_lengths`` [N] int64. Column t of the [N, T] tensors stands for token ``prompt_lengths + t``:
    ``mask`` bool marks trainable tokens, ``behaviour_logprobs`` float32 (NaN where missing), ``versions`` int64.
    ``rewards`` [N] float64, NaN where there is none; ``valid`` [N] bool; ``group_ids`` [N] int64 are ordinals.
    ``version_train`` is the version the step starts from. ``behaviour_missing`` counts policy tokens without a finite
    behaviour log-prob in the whole step.
    """

    keys: tuple[SlotKey, ...]
    token_ids: Tensor
    attention_mask: Tensor
    prompt_lengths: Tensor
    mask: Tensor
    behaviour_logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    valid: Tensor
    group_ids: Tensor
    version_train: int
    behaviour_missing: int

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def n_tokens(self) -> int:
        """Trainable tokens."""
        return int(self.mask.sum())

    def select(self, rows: Tensor) -> StepBatch:
        """The given rows, trimmed to their own widths."""
        width = int(self.attention_mask[rows].sum(1).max())
        columns = int((self.attention_mask[rows].sum(1) - self.prompt_lengths[rows]).max())
        return StepBatch(
            keys=tuple(self.keys[i] for i in rows.tolist()),
            token_ids=self.token_ids[rows, :width],
            attention_mask=self.attention_mask[rows, :width],
            prompt_lengths=self.prompt_lengths[rows],
            mask=self.mask[rows, :columns],
            behaviour_logprobs=self.behaviour_logprobs[rows, :columns],
            versions=self.versions[rows, :columns],
            rewards=self.rewards[rows],
            valid=self.valid[rows],
            group_ids=self.group_ids[rows],
            version_train=self.version_train,
            behaviour_missing=self.behaviour_missing,
        )


def _check_item(item: PlanItem, sample: SampleData) -> None:
    if (item.key, item.payload_digest) != (sample.key, sample.payload_digest):
        raise DigestMismatch(
            f"plan item {item.pos} is sample {item.key} with payload {item.payload_digest[:12]}, but {sample.key} with "
            f"{sample.payload_digest[:12]} was delivered; run `rollbook audit`"
        )
    t = sample.trajectory
    lengths = {"token_ids": len(t.token_ids), "logprobs": len(t.logprobs), "versions": len(t.versions)}
    if len(set(lengths.values())) > 1 or (t.loss_mask and len(t.loss_mask) != t.n_tokens):
        raise InvalidRequest(f"sample {sample.key}: arrays of unequal length in bytes: {lengths}, mask {len(t.loss_mask)}")
    if not sample.prompt_ids or not t.n_tokens:
        raise InvalidRequest(f"sample {sample.key}: an empty prompt or completion has nothing to train on")


def collate(plan: Plan, samples: Sequence[SampleData], *, vocab_size: int, max_lag_versions: int) -> StepBatch:
    """Put the samples of a plan into one batch, in plan order.

    Args:
        plan: names the samples and which of them count.
        samples: as delivered, in plan order.
        vocab_size: of the policy.
        max_lag_versions: bound on the lag of the oldest token, checked once more where it matters (P5).

    Raises:
        DigestMismatch: a payload is not the planned one.
        InvalidRequest: a sample cannot be trained on: empty, ragged, outside the vocabulary, or too stale.
    """
    if len(samples) != len(plan.items):
        raise DigestMismatch(f"plan of step {plan.step} has {len(plan.items)} items, {len(samples)} payloads were delivered")
    for item, sample in zip(plan.items, samples, strict=True):
        _check_item(item, sample)
    n = len(samples)
    prompts = [np.frombuffer(s.prompt_ids, "<i4") for s in samples]
    completions = [np.frombuffer(s.trajectory.token_ids, "<i4") for s in samples]
    columns = max((len(c) for c in completions), default=0)
    width = max((len(p) + len(c) for p, c in zip(prompts, completions, strict=True)), default=0)
    token_ids, attention = np.zeros((n, width), np.int64), np.zeros((n, width), bool)
    sampled, versions = np.zeros((n, columns), bool), np.zeros((n, columns), np.int64)
    logprobs = np.full((n, columns), np.nan, np.float32)
    for row, (sample, prompt, completion) in enumerate(zip(samples, prompts, completions, strict=True)):
        end, t = len(prompt) + len(completion), len(completion)
        token_ids[row, :end] = np.concatenate([prompt, completion])
        attention[row, :end] = True
        trajectory = sample.trajectory
        sampled[row, :t] = np.frombuffer(trajectory.loss_mask, np.uint8) != 0 if trajectory.loss_mask else True
        versions[row, :t] = np.frombuffer(trajectory.versions, "<i4")
        logprobs[row, :t] = np.frombuffer(trajectory.logprobs, "<f4")
        _check_row(sample.key, token_ids[row, :end], versions[row, :t][sampled[row, :t]], vocab_size, plan.step, max_lag_versions)
    rewards = [math.nan if s.reward is None else s.reward for s in samples]
    valid = np.array([i.valid and math.isfinite(r) for i, r in zip(plan.items, rewards, strict=True)], bool)
    finite = np.isfinite(logprobs)
    return StepBatch(
        keys=tuple(sample.key for sample in samples),
        token_ids=torch.from_numpy(token_ids),
        attention_mask=torch.from_numpy(attention),
        prompt_lengths=torch.tensor([len(p) for p in prompts], dtype=torch.int64),
        mask=torch.from_numpy(sampled & finite & valid[:, None]),
        behaviour_logprobs=torch.from_numpy(np.where(finite, logprobs, np.float32("nan"))),
        versions=torch.from_numpy(versions),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        valid=torch.from_numpy(valid),
        group_ids=torch.tensor([sample.key.ordinal for sample in samples], dtype=torch.int64),
        version_train=base_version(plan.step),
        behaviour_missing=int((sampled & ~finite).sum()),
    )


def _check_row(key: SlotKey, tokens: np.ndarray, versions: np.ndarray, vocab_size: int, step: int, lag_max: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidRequest(f"sample {key}: a token id lies outside the model's vocabulary of {vocab_size}")
    if not versions.size:
        raise InvalidRequest(f"sample {key}: the loss mask marks no token as sampled by the policy")
    lag = head_lag(step, int(versions.min()))
    if lag > lag_max or int(versions.max()) > base_version(step):
        raise InvalidRequest(
            f"sample {key}: versions {versions.min()}..{versions.max()} at step {step}, lag bound {lag_max}: "
            "the plan breaks the staleness law; run `rollbook audit`"
        )
