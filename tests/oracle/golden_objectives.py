"""Loads the golden vectors and builds micro-batches from their fixtures."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollbook.learner.advantages import group_advantages
from rollbook.learner.aggregation import Denominators, step_denominators
from rollbook.learner.corrections import Correction, CorrectionSettings, correct
from rollbook.learner.diagnostics import DiagnosticsBatch
from rollbook.learner.objectives import LossResult, PolicyBatch, objective_settings, policy_loss

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "objectives.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in GOLDEN["cases"]}
TOLERANCE = {torch.float64: GOLDEN["tolerance"]["float64"], torch.float32: GOLDEN["tolerance"]["float32"]}


def expected(case_id: str, name: str) -> Tensor:
    return torch.tensor(CASES[case_id]["expected"][name]["value"], dtype=torch.float64)


def largest_error(actual: Any, wanted: Tensor) -> float:
    """Largest absolute error, relative where the golden value exceeds 1; NaN and a wrong shape count as infinite."""
    got = torch.as_tensor(actual, dtype=torch.float64).detach()
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float(((got - wanted).abs() / wanted.abs().clamp(min=1.0)).max())


@dataclass(frozen=True)
class Core3:
    """The main fixture: 3 sequences, 6 positions, junk wherever the mask is 0."""

    logp_theta: Tensor
    logp_old: Tensor
    logp_mu: Tensor
    logp_ref: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor
    l_max: float

    def advantages(self, estimator: str = "grpo") -> Tensor:
        return group_advantages(self.rewards, None, self.group, estimator=estimator)

    def denominators(self) -> Denominators:
        return step_denominators(self.mask.sum(1), self.group)

    def correction(self, weight: str = "token_tis", **settings: Any) -> Correction:
        return correct(self.logp_old, self.logp_mu, self.mask, CorrectionSettings(weight=weight, **settings))

    def batch(self, **changes: Any) -> PolicyBatch:
        batch = PolicyBatch(
            logp_theta=self.logp_theta,
            logp_old=self.logp_old,
            logp_mu=self.logp_mu,
            advantages=self.advantages(),
            mask=self.mask,
        )
        return replace(batch, **changes)

    def diagnostics_batch(self, correction: Correction, **changes: Any) -> DiagnosticsBatch:
        batch = DiagnosticsBatch(
            logp_theta=self.logp_theta,
            logp_old=self.logp_old,
            logp_mu=self.logp_mu,
            weights=correction.weights,
            advantages=self.advantages(),
            mask=self.mask,
            keep=correction.keep,
        )
        return replace(batch, **changes)


def core3(dtype: torch.dtype) -> Core3:
    fixture = GOLDEN["fixtures"]["core3"]
    names = ("logp_theta", "logp_old", "logp_mu", "logp_ref", "rewards")
    tensors = {name: torch.tensor(fixture[name], dtype=dtype) for name in names}
    mask = torch.tensor(fixture["mask"]).to(torch.bool)
    return Core3(**tensors, mask=mask, group=torch.tensor(fixture["group"]), l_max=float(fixture["l_max"]))


def loss_and_gradient(
    name: str, batch: PolicyBatch, denominators: Denominators, **settings: Any
) -> tuple[LossResult, Tensor]:
    logp_theta = batch.logp_theta.clone().requires_grad_(True)
    result = policy_loss(replace(batch, logp_theta=logp_theta), denominators, objective_settings(name, **settings))
    result.loss.backward()
    assert logp_theta.grad is not None
    return result, logp_theta.grad
