"""What the ranks of a learner exchange as tensors: gradients, diagnostics, and the state to train from.

Owns the process group: gloo for tensors of the host, NCCL for those of CUDA devices, found through a file in the run directory
and reachable on this machine alone. Upholds P4: each slice of a gradient is added up by one rank in the order of the ranks and
handed to the others, so the sum is the same on every rank and in every run, whatever route the library takes.

Every exchange ends within ``bound_s`` or raises RuntimeError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rollbook.learner.diagnostics import DiagnosticsAccumulator
from rollbook.learner.sharing import buckets, drop_absent, flat, give_back

_MARGIN_S = 30.0
"""What NCCL waits longer than gloo: at its bound it ends the process without a word, so rank 0's own watch comes first."""
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Collective:
    """One rank's membership in the group."""

    def __init__(self, rank: int, n: int, device: torch.device, rendezvous: Path, bound_s: float) -> None:
        """Meet the others at the file ``rendezvous``."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # nothing here is reduced on the way, so multicast gains nothing
        self.rank, self.n, self._device = rank, n, device
        dist.init_process_group(
            _BACKENDS[device.type], store=dist.FileStore(str(rendezvous), n), rank=rank, world_size=n,
            timeout=timedelta(seconds=bound_s + (_MARGIN_S if device.type == "cuda" else 0.0)),
        )  # fmt: skip

    def sum_gradients(self, parameters: Sequence[Tensor], loss: float) -> float:
        """Put the sum over all ranks into every ``.grad``; returns the sum of the losses."""
        mine = [loss, *(float(p.grad is not None) for p in parameters)]
        theirs = self._gather(torch.tensor(mine, dtype=torch.float64))
        for bucket in buckets(parameters):
            row = flat(bucket, self.n)
            self._sum(row)
            give_back(bucket, row)
        drop_absent(parameters, torch.stack(theirs).sum(0)[1:].tolist())
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a device that hangs is noticed here, where it is expected
        return sum(float(their[0]) for their in theirs)

    def _sum(self, row: Tensor) -> None:
        """Add up a row in place; its length is a multiple of the number of ranks."""
        parts = torch.empty_like(row)
        dist.all_to_all_single(parts, row)
        first, *others = parts.chunk(self.n)
        total = first.clone()
        for other in others:
            total += other
        dist.all_gather(list(row.chunk(self.n)), total)

    def merge(self, diagnostics: DiagnosticsAccumulator) -> DiagnosticsAccumulator:
        """What all ranks have seen, added up in their order."""
        own = (diagnostics.sums, diagnostics.counts, diagnostics.maxima)
        sums, counts, maxima = ([part.to(self._device) for part in self._gather(tensor.cpu())] for tensor in own)
        diagnostics.sums, diagnostics.counts = sums[0], counts[0]
        for more, many in zip(sums[1:], counts[1:], strict=True):
            diagnostics.sums += more
            diagnostics.counts += many
        diagnostics.maxima = torch.stack(maxima).amax(0)
        return diagnostics

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, on the host."""
        parts = [torch.empty_like(tensor) for _ in range(self.n)]
        dist.all_gather(parts, tensor)
        return parts

    def give(self, tensor: Tensor) -> None:
        """Rank 0: hand a tensor of the host to every other rank."""
        dist.broadcast(tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(self._device), src=0)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Another rank: the tensor that rank 0 gives, on the host."""
        kind = torch.empty((), dtype=dtype)
        n_bytes = torch.Size(shape).numel() * kind.element_size()
        data = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        dist.broadcast(data, src=0)
        return data.cpu().view(dtype).reshape(tuple(shape))

    def close(self) -> None:
        """Leave the group, which every rank does."""
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave a group whose other ranks are dead."""
        with suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group() if self._device.type == "cuda" else dist.destroy_process_group()
