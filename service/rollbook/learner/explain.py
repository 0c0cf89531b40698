"""What a difference between a replayed step and the recorded one consists of.

Owns the choice of what to compare with: the recorded version's bytes, or where retention has deleted them the checkpoint of
that step. Never trains, never writes, and never guesses: where nothing is left to compare it says which steps have bytes.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from rollbook.core.config import Config
from rollbook.core.errors import CheckpointDamaged
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Plan, PolicyVersion, ResumePoint
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.compare import TensorDifference, first_difference, recorded_weights, relative_difference
from rollbook.learner.publish import WEIGHTS_FILE, publish_dtype, published_weights
from rollbook.learner.trainer import StepResult, Trainer

_TIMED = ("seconds_", "checkpoint_interval_")
"""Beginnings of metrics that say how long something took, which no replay repeats."""


def explain_difference(
    config: Config, client: LedgerPort, trainer: Trainer, point: ResumePoint, recorded: dict[int, PolicyVersion],
    plan: Plan | None, result: StepResult | None,
) -> dict[str, Any]:  # fmt: skip
    """The first tensor and element in which the trainer's weights differ from the recorded ones of its step.

    Returns:
        JSON-able: ``step``; ``compared_with`` (a version's directory, a checkpoint's, or None); ``tensor`` (fields of
        ``TensorDifference``) or None; ``relative_difference`` over all weights; ``outcome`` and ``metrics`` ({name:
        {recorded, replayed}}) where they differ; ``comparable_steps``, from which a comparison is possible, where it is not
        possible here; ``summary``, one sentence.
    """
    step = trainer.progress.step
    run_dir = Path(config.run.dir)
    place, ours, theirs = _sides(config, trainer, point, recorded[step], run_dir)
    tensor = first_difference(ours, theirs) if theirs is not None else None
    apart = relative_difference(ours, theirs) if theirs is not None else math.inf
    comparable = [] if theirs is not None else _comparable_steps(run_dir, point, recorded)
    return {
        "step": step,
        "compared_with": place,
        "tensor": dataclasses.asdict(tensor) if tensor else None,
        "relative_difference": apart if math.isfinite(apart) else None,
        "outcome": _outcome(plan, result),
        "metrics": _metrics(client, point.lineage, step, result),
        "comparable_steps": comparable,
        "summary": _summary(step, place, tensor, comparable),
    }


def _sides(
    config: Config, trainer: Trainer, point: ResumePoint, version: PolicyVersion, run_dir: Path
) -> tuple[str | None, dict[str, Tensor], dict[str, Tensor] | None]:
    """(what is compared with, replayed weights, recorded weights or None)."""
    published = published_weights(trainer.policy, publish_dtype(config))
    if (stored := recorded_weights(run_dir, version)) is not None:
        return version.path, published, stored
    files = CheckpointFiles(run_dir / "checkpoints")
    for checkpoint in point.checkpoints:
        if checkpoint.step == version.version:
            try:
                state = files.read(checkpoint)
            except CheckpointDamaged:
                break
            own = {name: tensor.detach().cpu() for name, tensor in trainer.policy.named_tensors()}
            return f"checkpoints/{checkpoint.dir_name}", own, state.tensors["model"]
    return None, published, None


def _comparable_steps(run_dir: Path, point: ResumePoint, recorded: dict[int, PolicyVersion]) -> list[int]:
    there = {number for number, version in recorded.items() if (run_dir / version.path / WEIGHTS_FILE).is_file()}
    return sorted(there | {checkpoint.step for checkpoint in point.checkpoints})


def _outcome(plan: Plan | None, result: StepResult | None) -> dict[str, str] | None:
    if plan is None or result is None or plan.outcome is None or plan.outcome is result.outcome:
        return None
    return {"recorded": plan.outcome.value, "replayed": f"{result.outcome.value}: {result.reason}"}


def _metrics(client: LedgerPort, lineage: int, step: int, result: StepResult | None) -> dict[str, dict[str, Any]]:
    """Metrics both sides have and in which they differ."""
    if result is None:
        return {}
    stored = next((m for m in client.step_metrics(lineage, step) if m["step"] == step), {})
    return {
        name: {"recorded": stored[name], "replayed": value}
        for name, value in result.metrics.items()
        if name in stored and stored[name] != value and not name.startswith(_TIMED)
    }


def _summary(step: int, place: str | None, tensor: TensorDifference | None, comparable: list[int]) -> str:
    if place is None:
        steps = ", ".join(str(s) for s in comparable) or "none"
        return (
            f"step {step} is the first that differs; the bytes of its version are gone or damaged and it has no checkpoint, so "
            f"the tensors cannot be compared (steps with bytes: {steps})"
        )
    if tensor is None:
        return f"step {step} is the first that differs, yet the weights in {place} are the replayed ones, bit for bit"
    largest = "not finite" if tensor.max_abs_difference is None else f"{tensor.max_abs_difference:.6g}"
    return (
        f"step {step} is the first that differs: {tensor.name} {list(tensor.shape)} ({tensor.dtype}) differs from {place} in "
        f"{tensor.elements_differing} of {tensor.elements} elements, by at most {largest}, first at {list(tensor.first_index)}: "
        f"recorded {tensor.recorded!r}, replayed {tensor.replayed!r}; "
        f"{tensor.tensors_differing} of {tensor.tensors} tensors differ"
    )
