"""What a checkpoint holds: tensors by section, everything else as JSON, and one digest over all of it.

Owns the shape of training state and its digest. Never touches a file or a model. The digest is what crash equivalence
(P4) is measured by: equal digests mean equal weights, optimizer, random generators, schedule position, chain and cursor.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollbook.core.errors import CheckpointDamaged, ConfigError
from rollbook.core.idempotency import GENESIS, digest
from rollbook.core.records import ROOT_LINEAGE, Cursor
from rollbook.core.weights import weights_digest

SECTIONS = ("model", "optimizer")
"""Sections of tensors; each is one safetensors file of a checkpoint."""

_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far training has come; replaced as a whole at the end of each step.

    ``step`` steps are finished and ``version`` holds their weights (the two are equal); ``chain_digest`` is that of the
    plan of ``step``. ``cursor`` is a copy of the task stream's position, compared at resume and never restored (R10).
    ``ordinal_max`` is the largest group ordinal trained, -1 before the first.
    """

    lineage: int = ROOT_LINEAGE
    step: int = 0
    version: int = 0
    version_digest: str = ""
    chain_digest: str = GENESIS
    cursor: Cursor | None = None
    ordinal_max: int = -1
    samples_trained: int = 0
    tokens_trained: int = 0
    steps_skipped: int = 0

    def to_values(self) -> dict[str, Any]:
        """JSON-able form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Progress:
        """Inverse of ``to_values``. Raises CheckpointDamaged when a field is missing or unknown."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            raise CheckpointDamaged(f"progress holds {sorted(values)}, expected {sorted(names)}")
        cursor = values["cursor"]
        return cls(**values | {"cursor": None if cursor is None else Cursor(**cursor)})


@dataclass(frozen=True)
class TrainingState:
    """All state of a learner at the end of a step: CPU tensors by section and name, and JSON-able values."""

    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress.from_values(self.values["progress"])

    def digest(self) -> str:
        """sha256 hex over every tensor and value except two.

        Left out are the cursor copy, because how far the feeder is ahead depends on time, and the text of the
        configuration, because its digest is in and the text names directories.
        """
        sections = [tensors_digest(self.tensors[name]) for name in SECTIONS]
        values = {name: value for name, value in self.values.items() if name != "config_json"}
        values["progress"] = {name: value for name, value in values["progress"].items() if name != "cursor"}
        return digest("training-state", *sections, json.dumps(values, sort_keys=True))


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """``core.weights.weights_digest`` of tensors, without writing them to a file.

    Raises:
        ConfigError: a dtype that safetensors cannot hold.
    """
    views = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    items = []
    for name, tensor in views.items():
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise ConfigError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        items.append((name, _SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), data))
    return weights_digest(items)
