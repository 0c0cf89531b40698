"""Copies of tensors in host memory, to put them back bit for bit.

Owns the buffers and reuses them from step to step; for CUDA tensors they are page-locked, so that taking a copy costs a
transfer and no allocation. Never decides what to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """The values of a list of tensors at the time of ``take``."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the current values; an earlier copy is overwritten."""
        reusable = len(self._copies) == len(tensors) and all(
            copy.shape == tensor.shape and copy.dtype == tensor.dtype
            for copy, tensor in zip(self._copies, tensors, strict=True)
        )
        if not reusable:
            self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]
        self._tensors = list(tensors)
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()

    def holds(self, tensor: Tensor) -> bool:
        """Whether this very tensor was copied."""
        return any(tensor is known for known in self._tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every copied tensor the value it had."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            tensor.copy_(copy)
