"""Two sets of weights of one model: how far apart they are, and where they begin to differ.

Owns the relative difference a fork is judged by (R7) and the search for the first differing element. Never trains and never
writes; recorded bytes are used only when their digest is the recorded one (P11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollbook.core.errors import DigestMismatch
from rollbook.core.records import PolicyVersion
from rollbook.core.weights import safetensors_digest
from rollbook.learner.publish import WEIGHTS_FILE

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor that differs, in the order of the model; ``max_abs_difference`` is None where a value is not finite."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    elements_differing: int
    max_abs_difference: float | None
    first_index: tuple[int, ...]
    """Of the first differing element, row by row."""
    recorded: float
    replayed: float
    """Both values there; equal numbers differ in sign of zero or in the bits of a NaN."""
    tensors: int
    tensors_differing: int


def recorded_weights(run_dir: Path, version: PolicyVersion) -> dict[str, Tensor] | None:
    """Weights of a published version on the CPU; None where its bytes are gone or not the recorded ones."""
    file = run_dir / version.path / WEIGHTS_FILE
    try:
        if safetensors_digest(file) != version.digest:
            return None
        return load_file(file)
    except (OSError, DigestMismatch):
        return None


def relative_difference(replayed: dict[str, Tensor], recorded: dict[str, Tensor]) -> float:
    """||replayed - recorded|| / ||recorded|| over all floating tensors, in float64; infinite where it has no finite value."""
    if replayed.keys() != recorded.keys():
        return math.inf
    apart = size = 0.0
    for name, tensor in recorded.items():
        if not tensor.is_floating_point():
            continue
        if replayed[name].shape != tensor.shape:
            return math.inf
        apart += float((replayed[name].double() - tensor.double()).square().sum())
        size += float(tensor.double().square().sum())
    if apart == 0.0:
        return 0.0
    return math.sqrt(apart / size) if size > 0 and math.isfinite(apart) and math.isfinite(size) else math.inf


def first_difference(replayed: dict[str, Tensor], recorded: dict[str, Tensor]) -> TensorDifference | None:
    """Where two sets of weights with the same names begin to differ in bits; None when they are equal.

    Raises:
        DigestMismatch: they have other names, shapes or dtypes: they are not of one model.
    """
    if replayed.keys() != recorded.keys():
        raise DigestMismatch(f"the weights differ in names: {sorted(replayed.keys() ^ recorded.keys())[:5]}")
    differing = []
    for name, tensor in replayed.items():
        other = recorded[name]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            sides = [f"{side.dtype} {tuple(side.shape)}" for side in (tensor, other)]
            raise DigestMismatch(f"tensor {name!r}: {sides[0]}, recorded {sides[1]}; the weights are not of one model")
        if not torch.equal(_bits(tensor), _bits(other)):
            differing.append(name)
    if not differing:
        return None
    name = differing[0]
    ours, theirs = replayed[name].contiguous().cpu(), recorded[name].contiguous().cpu()
    unequal = (_bits(ours) != _bits(theirs)).reshape(-1)
    position = int(unequal.nonzero()[0])
    largest = float((ours.double() - theirs.double()).abs().max())
    return TensorDifference(
        name=name,
        dtype=str(ours.dtype).removeprefix("torch."),
        shape=tuple(ours.shape),
        elements=ours.numel(),
        elements_differing=int(unequal.sum()),
        max_abs_difference=largest if math.isfinite(largest) else None,
        first_index=_index(position, ours.shape),
        recorded=float(theirs.reshape(-1)[position]),
        replayed=float(ours.reshape(-1)[position]),
        tensors=len(replayed),
        tensors_differing=len(differing),
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])


def _index(position: int, shape: torch.Size) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        position, here = divmod(position, size)
        out.append(here)
    return tuple(reversed(out))
