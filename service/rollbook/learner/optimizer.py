"""AdamW over named parameters, and its state as tensors and values that can be stored without pickle.

Owns parameter groups (weight decay on matrices only) and the exact round trip of moments and per-parameter steps.
Restored tensors are fresh copies: a step counter shared between parameters would advance twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from rollbook.core.config import LearnerConfig
from rollbook.core.errors import CheckpointDamaged

_SLOTS = ("exp_avg", "exp_avg_sq", "step")
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


def adamw(named_parameters: Iterable[tuple[str, Tensor]], settings: LearnerConfig) -> AdamW:
    """AdamW with one group of matrices, which decay, and one of everything else, which does not."""
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for _, p in named if (p.ndim >= 2) is decays], "names": [n for n, p in named if (p.ndim >= 2) is decays],
         "decays": decays}
        for decays in (True, False)
    ]  # fmt: skip
    optimizer = AdamW([group for group in groups if group["params"]], lr=settings.lr)
    set_hyperparameters(optimizer, settings)
    return optimizer


def set_hyperparameters(optimizer: AdamW, settings: LearnerConfig) -> None:
    """Take betas, eps and weight decay from the configuration; the learning rate is set step by step."""
    for group in optimizer.param_groups:
        group["betas"] = (settings.beta1, settings.beta2)
        group["eps"] = settings.eps
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0


def _named(optimizer: AdamW) -> dict[str, Tensor]:
    return {n: p for group in optimizer.param_groups for n, p in zip(group["names"], group["params"], strict=True)}


def optimizer_tensors(optimizer: AdamW) -> dict[str, Tensor]:
    """Copies of moments and steps, named ``exp_avg/PARAMETER`` and so on; empty before the first update."""
    return {
        f"{slot}/{name}": optimizer.state[parameter][slot].detach().to("cpu", copy=True)
        for name, parameter in _named(optimizer).items()
        if parameter in optimizer.state
        for slot in _SLOTS
    }


def optimizer_values(optimizer: AdamW) -> dict[str, Any]:
    """Hyperparameters and parameter names of every group in order, and which parameters have state; JSON-able."""
    groups = [
        {key: list(group[key]) if key == "betas" else group[key] for key in _HYPERPARAMETERS} | {"names": list(group["names"])}
        for group in optimizer.param_groups
    ]
    stateful = [name for name, parameter in _named(optimizer).items() if parameter in optimizer.state]
    return {"kind": "AdamW", "groups": groups, "stateful": stateful}


def load_optimizer(optimizer: AdamW, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restore what ``optimizer_tensors`` and ``optimizer_values`` gave.

    Raises:
        CheckpointDamaged: names, hyperparameters, shapes or the set of tensors do not fit this optimizer.
    """
    own = optimizer_values(optimizer)
    try:
        rates = [group["lr"] for group in values["groups"]]
        theirs = [group | {"lr": None} for group in values["groups"]]
        kind, stateful = values["kind"], values["stateful"]
    except (KeyError, TypeError) as error:
        raise CheckpointDamaged(f"optimizer values are incomplete: {error!r}") from error
    if kind != own["kind"] or theirs != [group | {"lr": None} for group in own["groups"]]:
        raise CheckpointDamaged("the optimizer's parameter names or hyperparameters are not those of the configuration")
    named = _named(optimizer)
    expected = {f"{slot}/{name}" for name in stateful for slot in _SLOTS}
    if not set(stateful) <= named.keys() or expected != tensors.keys():
        raise CheckpointDamaged(f"optimizer tensors are not those listed: {sorted(expected ^ tensors.keys())[:5]}")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.state.clear()
    for name in stateful:
        optimizer.state[named[name]] = _restored(name, named[name], tensors)


def _restored(name: str, parameter: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    moments = {slot: tensors[f"{slot}/{name}"] for slot in ("exp_avg", "exp_avg_sq")}
    step = tensors[f"step/{name}"]
    if step.ndim or any(m.shape != parameter.shape or m.dtype != parameter.dtype for m in moments.values()):
        raise CheckpointDamaged(f"optimizer state of {name!r} does not fit the parameter")
    # AdamW keeps step counters on the host.
    restored = {"step": step.to(torch.float32, copy=True)}
    return restored | {slot: moment.to(parameter.device, copy=True) for slot, moment in moments.items()}
