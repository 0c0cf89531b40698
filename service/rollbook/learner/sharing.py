"""How the micro-batches of a step are shared by ranks, and how their gradients become one.

Owns the arithmetic that ``learner.ranks`` stands for: micro-batch k of a minibatch belongs to rank k modulo the number of
ranks; each rank's gradients are flattened at the width of float32 or more and added in the order of the ranks. It is the same
whoever computes a share, so one process that takes the shares in turn (a replay, say) gives the bits of a whole group (P4).
Never starts a process; how ranks reach each other is ``gang``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollbook.learner.diagnostics import DiagnosticsAccumulator

Share = Callable[[int], float]
"""Adds the gradients of a rank's micro-batches to ``.grad`` and returns their part of the loss."""

BUCKET_ELEMENTS = 1 << 24
"""Gradients that travel together, in elements; one larger parameter travels alone."""


class Ranks(Protocol):
    """The ranks of a learner as one process sees them."""

    @property
    def n(self) -> int:
        """Ranks in all."""
        ...

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks whose share is computed by this process, in order."""
        ...

    def sum(self, parameters: Sequence[Tensor], share: Share) -> float:
        """Compute the shares of ``here``; then ``.grad`` holds the sum over all ranks, which is None where no rank has one.

        Returns the loss, summed likewise. Gradients are None when it is called.
        """
        ...

    def merge(self, diagnostics: Sequence[DiagnosticsAccumulator]) -> DiagnosticsAccumulator:
        """What all ranks have seen, from the accumulators of ``here``."""
        ...


class Alone:
    """One rank: nothing is shared."""

    n, here = 1, (0,)

    def sum(self, parameters: Sequence[Tensor], share: Share) -> float:
        """See ``Ranks``."""
        return share(0)

    def merge(self, diagnostics: Sequence[DiagnosticsAccumulator]) -> DiagnosticsAccumulator:
        """See ``Ranks``."""
        return diagnostics[0]


class InTurn:
    """Several ranks whose shares this one process computes one after the other, at the cost of one more gradient in memory."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.here = tuple(range(n))

    def sum(self, parameters: Sequence[Tensor], share: Share) -> float:
        """See ``Ranks``."""
        totals: list[Tensor] = []
        losses, present = [], [0] * len(parameters)
        for rank in self.here:
            losses.append(share(rank))
            present = [has or p.grad is not None for has, p in zip(present, parameters, strict=True)]
            for index, bucket in enumerate(buckets(parameters)):
                if rank:
                    totals[index] += flat(bucket)
                else:
                    totals.append(flat(bucket))
            for parameter in parameters:
                parameter.grad = None
        for bucket, total in zip(buckets(parameters), totals, strict=True):
            give_back(bucket, total)
        drop_absent(parameters, present)
        return sum(losses)

    def merge(self, diagnostics: Sequence[DiagnosticsAccumulator]) -> DiagnosticsAccumulator:
        """See ``Ranks``."""
        first, *others = diagnostics
        for other in others:
            first.merge(other)
        return first


def ranks_in_turn(n: int) -> Ranks:
    """``n`` ranks for a process that has no others beside it."""
    return Alone() if n == 1 else InTurn(n)


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in order, cut where ``BUCKET_ELEMENTS`` would be exceeded."""
    bucket: list[Tensor] = []
    n = 0
    for parameter in parameters:
        if bucket and n + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, n = [], 0
        bucket.append(parameter)
        n += parameter.numel()
    if bucket:
        yield bucket


def flat(bucket: Sequence[Tensor], multiple_of: int = 1) -> Tensor:
    """Gradients of a bucket in one row, float32 or wider, 0 where there is none; padded with zeros to a multiple."""
    dtype = torch.float32
    for parameter in bucket:
        dtype = torch.promote_types(dtype, parameter.dtype)
    n = sum(parameter.numel() for parameter in bucket)
    row = torch.zeros(-(-n // multiple_of) * multiple_of, dtype=dtype, device=bucket[0].device)
    start = 0
    for parameter in bucket:
        end = start + parameter.numel()
        if parameter.grad is not None:
            row[start:end].copy_(parameter.grad.reshape(-1))
        start = end
    return row


def give_back(bucket: Sequence[Tensor], row: Tensor) -> None:
    """Make the parts of a row the gradients of a bucket, in each parameter's own dtype."""
    start = 0
    for parameter in bucket:
        end = start + parameter.numel()
        parameter.grad = row[start:end].reshape(parameter.shape).to(parameter.dtype, copy=True)
        start = end


def drop_absent(parameters: Sequence[Tensor], present: Sequence[object]) -> None:
    """A parameter that took no part on any rank has no gradient, so that the optimizer leaves it alone."""
    for parameter, has in zip(parameters, present, strict=True):
        if not has:
            parameter.grad = None
