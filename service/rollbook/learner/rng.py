"""Random generators of the learner process: seeding, capturing, restoring.

Owns Python's, NumPy's and torch's global generators and those of every CUDA device in use. An optimizer step draws from
none of them (dropout is off, the order of minibatches has a generator of its own in the trainer); they are kept all the
same, so that code a user adds between steps resumes exactly (P4).
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from rollbook.core.errors import CheckpointDamaged

NOT_DRAWN_FROM = ("python", "numpy", "torch_cpu", "torch_cuda")
"""Generators that are saved and restored but that no optimizer step draws from."""


def seed_globals(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def encode(state: torch.Tensor) -> str:
    """A torch generator state as hex."""
    return bytes(state.numpy().tobytes()).hex()


def decode(text: str) -> torch.Tensor:
    """Inverse of ``encode``."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def capture_globals() -> dict[str, Any]:
    """State of every global generator, JSON-able; CUDA devices only once CUDA is in use in this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch_cpu": encode(torch.get_rng_state()),
        "torch_cuda": [encode(torch.cuda.get_rng_state(device)) for device in devices],
    }


def restore_globals(state: dict[str, Any]) -> None:
    """Put every global generator back.

    Raises:
        CheckpointDamaged: a generator's state is missing, malformed or for more CUDA devices than there are.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
        torch.set_rng_state(decode(state["torch_cpu"]))
        for device, text in enumerate(state["torch_cuda"]):
            torch.cuda.set_rng_state(decode(text), device)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise CheckpointDamaged(f"random generator state cannot be restored: {error!r}") from error
