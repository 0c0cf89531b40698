"""A rank of the learner other than 0: ``python -m rollbook.learner.rank RANK FD PARENT``, started by rank 0 alone.

Owns the loop that does what rank 0 does, on the same batch and in the same order, with its own share of the micro-batches.
Knows no ledger and no file of the run, decides nothing, and outlives rank 0 by nothing: the kernel ends it with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollbook.core.config import Config, config_from_json
from rollbook.learner.channel import Channel, Closed, unpack_batch
from rollbook.learner.collective import Collective
from rollbook.learner.diagnostics import DiagnosticsAccumulator
from rollbook.learner.model import load_policy
from rollbook.learner.sharing import Share
from rollbook.learner.state import SECTIONS, TrainingState
from rollbook.learner.trainer import Trainer, fingerprint, weights_held
from rollbook.observe import failpoints
from rollbook.observe import log as logs
from rollbook.observe.failpoints import failpoint

OWN_POINTS = "learner.rank."
"""Beginning of the failpoints that ranks other than 0 cross; all others belong to rank 0."""
_PR_SET_PDEATHSIG = 1


class _Follower:
    """This rank of the group (``sharing.Ranks``)."""

    def __init__(self, rank: int, n: int, channel: Channel, collective: Collective) -> None:
        self.n, self.here = n, (rank,)
        self._channel, self._collective = channel, collective

    def sum(self, parameters: Sequence[Tensor], share: Share) -> float:
        """See ``Ranks``."""
        loss = share(self.here[0])
        failpoint("learner.rank.before_sum")
        self._channel.send({"done": "share"})
        total = self._collective.sum_gradients(parameters, loss)
        failpoint("learner.rank.after_sum")
        return total

    def merge(self, diagnostics: Sequence[DiagnosticsAccumulator]) -> DiagnosticsAccumulator:
        """See ``Ranks``."""
        return self._collective.merge(diagnostics[0])


class Rank:
    """The loop."""

    def __init__(self, rank: int, channel: Channel) -> None:
        """Load the model and meet the others."""
        begin, _ = channel.receive()
        config = config_from_json(begin["config"])
        _arm(config)
        if config.learner.device == "cuda":
            torch.cuda.set_device(rank)
        policy = load_policy(config)
        channel.send({"done": "model"})
        channel.receive()
        n, bound_s = begin["n"], config.learner.rank_timeout_s
        self._collective = Collective(rank, n, policy.device, Path(begin["rendezvous"]), bound_s)
        self._channel = channel
        self._trainer = Trainer(policy, config, _Follower(rank, n, channel, self._collective))
        self._config_json = config.to_json()

    def run(self) -> None:
        """Obey until told to end. Raises Closed when rank 0 is gone."""
        while True:
            header, body = self._channel.receive()
            match header["order"]:
                case "state":
                    self._take_state(header)
                case "step":
                    self._use(header["config"])
                    result = self._trainer.train_step(unpack_batch(header, body))
                    self._channel.send({"outcome": result.outcome.value, "fingerprint": fingerprint(self._trainer)})
                case "skip":
                    self._use(header["config"])
                    self._trainer.skip_step()
                case "weights":
                    self._channel.send({"weights": weights_held(self._trainer)})
                case _:
                    self._collective.close()
                    return

    def _use(self, config_json: str) -> None:
        if config_json != self._config_json:
            self._trainer.use(config_from_json(config_json))
            self._config_json = config_json

    def _take_state(self, header: dict[str, Any]) -> None:
        tensors: dict[str, dict[str, Tensor]] = {section: {} for section in SECTIONS}
        for section, name, dtype, shape in header["tensors"]:
            tensors[section][name] = self._collective.take(shape, getattr(torch, dtype))
        self._use(header["values"]["config_json"])
        self._trainer.load_state_dict(TrainingState(tensors, header["values"]))
        failpoint("learner.rank.after_state")
        self._channel.send({"fingerprint": fingerprint(self._trainer)})


def _arm(config: Config) -> None:
    """Only the points of a rank: what is armed for rank 0 must not fire here."""
    failpoints.arm_configured(config.chaos.failpoints, Path(config.run.dir) / "chaos" if config.chaos.once else "")
    own = {name: action for name, action in failpoints.armed().items() if name.startswith(OWN_POINTS)}
    failpoints.arm(",".join(f"{name}={action}" for name, action in own.items()))


def main(rank: int, fd: int, parent: int) -> int:
    """The process of a rank; its exit code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 is told to stop, and ends the others after its step
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logs.configure(f"rank {rank}")
    try:
        Rank(rank, Channel(socket.socket(fileno=fd), bound_s=60.0)).run()
    except Closed:
        return 1  # rank 0 is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
