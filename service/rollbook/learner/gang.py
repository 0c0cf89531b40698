"""The learner's other ranks as rank 0 sees them: started together, given every step, and ended together.

Owns their processes, which are children of the learner, and the orders they get: the state to train from, each step's batch, a
step that is skipped, the question for their weights, the end. They know no ledger and no file of the run. Rank 0 is the role:
it plans, publishes and saves. Upholds P4 and P10: no rank goes on without the others. One that dies is noticed within a second
and one that hangs within ``learner.rank_timeout_s``; rank 0 then ends with the rank's name, and a successor resumes as always.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, RankLost, RanksDiffer
from rollbook.core.host import host, incarnation
from rollbook.learner.channel import Channel, Closed, pack_batch, pair
from rollbook.learner.collate import StepBatch
from rollbook.learner.diagnostics import DiagnosticsAccumulator
from rollbook.learner.durable import make_directory
from rollbook.learner.model import Policy
from rollbook.learner.sharing import Share
from rollbook.learner.state import SECTIONS, TrainingState
from rollbook.learner.trainer import StepResult, Trainer, fingerprint, weights_held
from rollbook.observe import progress

if TYPE_CHECKING:
    from rollbook.learner.collective import Collective

log = logging.getLogger(__name__)

RANKS_FILE = "learner/ranks.json"
"""Below the run directory: incarnation of the learner, and pid of each of its other ranks."""
WATCH_S = 0.2
"""How often it is looked whether every rank lives."""
GRACE_S = 1.0
"""How long the loop of rank 0 has to end by itself once a rank is lost, before its process is ended."""
SEEN_S = 5.0
"""How long it may take to see that a rank is dead once its connections are."""
END_S = 10.0
"""How long a rank may take to end when it is told to."""
_EXIT_FAILED = 1


@contextmanager
def learner_group(config: Config) -> Iterator[Gang | None]:
    """The other ranks for the length of the block; None where there is but one rank, which costs nothing.

    Raises:
        ConfigError: fewer CUDA devices are visible than ranks are configured.
    """
    if config.learner.ranks == 1:
        yield None
        return
    gang = Gang(config)
    try:
        yield gang
    except BaseException:
        gang.close(at_once=True)
        raise
    else:
        gang.close()


@dataclass(frozen=True)
class _Member:
    """Another rank."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


class Gang:
    """Every rank but 0, from their start to their end; belongs to the thread that makes it, whose death is theirs."""

    def __init__(self, config: Config) -> None:
        """Start them; they load the model while rank 0 does (``join``)."""
        settings = config.learner
        if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
            raise ConfigError(
                f"learner.ranks = {settings.ranks}, but this process sees {torch.cuda.device_count()} CUDA devices: each rank "
                "needs its own; lower learner.ranks, widen CUDA_VISIBLE_DEVICES, or place the learner on a node that has them"
            )
        self.n = settings.ranks
        self._config, self._bound_s = config, settings.rank_timeout_s
        self._directory = Path(config.run.dir) / "learner"
        make_directory(self._directory)
        for left in self._directory.glob("rendezvous.*"):
            left.unlink(missing_ok=True)
        self._rendezvous = self._directory / f"rendezvous.{host().token()[:8]}"
        self._collective: Collective | None = None
        self._lost = ""
        self._exchange_began: float | None = None
        self._members: list[_Member] = []
        self._closing = host().event()
        try:
            for rank in range(1, self.n):
                self._members.append(self._start(rank))
            self._record()
        except BaseException:
            self.close(at_once=True)
            raise
        host().thread(self._watch, "ranks").start()

    def _start(self, rank: int) -> _Member:
        ours, theirs = pair(self._bound_s)
        with theirs:
            argv = [sys.executable, "-m", "rollbook.learner.rank", str(rank), str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        member = _Member(rank, process, ours)
        ours.send({"config": self._config.to_json(), "n": self.n, "rendezvous": str(self._rendezvous)})
        return member

    def _record(self) -> None:
        ranks = [{"rank": member.rank, "pid": member.process.pid} for member in self._members]
        file = self._directory.parent / RANKS_FILE
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps({"incarnation": incarnation(), "ranks": ranks}))
        scratch.rename(file)

    def join(self, device: torch.device) -> None:
        """Wait until every rank has loaded the model, then meet. Raises RankLost."""
        from rollbook.learner.collective import Collective

        for member in self._members:
            self.hear(member, "loaded the model", self._config.supervisor.startup_s)
        self.tell({"order": "meet"})
        with self.exchange():
            self._collective = Collective(0, self.n, device, self._rendezvous, self._bound_s)
        log.info("all ranks are there", extra={"event": "ranks_joined", "ranks": self.n})

    @property
    def collective(self) -> Collective:
        """What ranks exchange; after ``join``."""
        assert self._collective is not None
        return self._collective

    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Give every rank an order. Raises RankLost."""
        self.check()
        for member in self._members:
            try:
                member.channel.send(header, body)
            except Closed as error:
                raise self._gone(member) from error

    def hear_all(self, what: str) -> list[dict[str, Any]]:
        """What every other rank says when it has done ``what``, in their order. Raises RankLost."""
        return [self.hear(member, what, self._bound_s) for member in self._members]

    def hear(self, member: _Member, what: str, bound_s: float) -> dict[str, Any]:
        """What a rank says next, waited for at most so long. Raises RankLost."""
        deadline = host().monotonic() + bound_s
        while not member.channel.has_come():
            self.check()
            progress.mark()
            if host().monotonic() > deadline:
                raise RankLost(f"{member} has not {what} within {bound_s:g} s (learner.rank_timeout_s): {_look(member)}")
        try:
            return member.channel.receive()[0]
        except Closed as error:
            raise self._gone(member) from error

    def check(self) -> None:
        """Raise RankLost when a rank is known to be dead."""
        if self._lost:
            raise RankLost(self._lost)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what no rank can do alone. Raises RankLost where it fails."""
        self._exchange_began = host().monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what torch.distributed raises, whatever happened
            raise self._broken(error) from error
        finally:
            self._exchange_began = None

    def _gone(self, member: _Member) -> RankLost:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(SEEN_S)
        return RankLost(f"{member} {_how(member.process.poll())}")

    def _broken(self, error: RuntimeError) -> RankLost:
        deadline = host().monotonic() + SEEN_S
        while host().monotonic() < deadline:
            if self._lost:
                return RankLost(self._lost)
            for member in self._members:
                if member.process.poll() is not None:
                    return self._gone(member)
            host().sleep(WATCH_S / 4)
        return RankLost(f"ranks could not exchange tensors: {self._looks()}; {str(error).splitlines()[0]}")

    def _looks(self) -> str:
        return ", ".join(f"{member}: {_look(member)}" for member in self._members)

    def _watch(self) -> None:
        """Notice what the loop cannot, because it computes or waits inside a library."""
        while not self._closing.wait(WATCH_S):
            for member in self._members:
                if member.process.poll() is not None and not self._lost:
                    self._lost = f"{member} {_how(member.process.poll())}"
                    log.error("a rank is lost: %s", self._lost, extra={"event": "rank_lost", "rank": member.rank})
            began = self._exchange_began
            if began is not None and host().monotonic() - began > self._bound_s and not self._lost:
                self._lost = f"ranks have exchanged tensors for {self._bound_s:g} s (learner.rank_timeout_s): {self._looks()}"
            if self._lost:
                if not self._closing.wait(GRACE_S):
                    print(f"rollbook learner: RankLost: {self._lost}", file=sys.stderr, flush=True)
                    os._exit(_EXIT_FAILED)
                return

    def close(self, *, at_once: bool = False) -> None:
        """End every rank: they finish nothing, since rank 0 gives them nothing more to do."""
        self._closing.set()
        for member in self._members:
            if at_once:
                member.process.kill()
            else:
                with suppress(Closed):
                    member.channel.send({"order": "end"})
        if self._collective is not None and not at_once:
            self._collective.close()
        for member in self._members:
            try:
                member.process.wait(END_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait(END_S)
            member.channel.close()
        if self._collective is not None and at_once:
            self._collective.abandon()
        for file in (self._rendezvous, self._directory.parent / RANKS_FILE):
            file.unlink(missing_ok=True)


class _Lead:
    """Rank 0 of the group (``sharing.Ranks``)."""

    here = (0,)

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self.n = gang.n

    def sum(self, parameters: Sequence[Tensor], share: Share) -> float:
        """See ``Ranks``."""
        loss = share(0)
        self._gang.hear_all("computed its share")
        with self._gang.exchange():
            return self._gang.collective.sum_gradients(parameters, loss)

    def merge(self, diagnostics: Sequence[DiagnosticsAccumulator]) -> DiagnosticsAccumulator:
        """See ``Ranks``."""
        with self._gang.exchange():
            return self._gang.collective.merge(diagnostics[0])


class GangTrainer(Trainer):
    """Rank 0's trainer: what it does, every rank does."""

    def __init__(self, policy: Policy, config: Config, gang: Gang) -> None:
        """As ``Trainer``; returns when every rank is there. Raises RankLost."""
        super().__init__(policy, config, _Lead(gang))
        self._gang = gang
        self._is_shared = False
        """Whether the other ranks stand where this one does."""
        gang.join(policy.device)

    def load_state_dict(self, state: TrainingState) -> None:
        """See ``Trainer``; the others get the state before the next step."""
        self._is_shared = False
        super().load_state_dict(state)

    def train_step(self, batch: StepBatch) -> StepResult:
        """See ``Trainer``.

        Raises:
            RankLost: a rank died or hangs; nothing of the step may be kept.
            RanksDiffer: a rank ended the step otherwise.
        """
        if not self._is_shared:
            self._share_state()
        fields, body = pack_batch(batch)
        self._gang.tell({"order": "step", "config": self.config.to_json()} | fields, body)
        result = super().train_step(batch)
        ours = {"outcome": result.outcome.value, "fingerprint": fingerprint(self)}
        self._compare(f"finished step {self.progress.step}", lambda: ours)
        return result

    def skip_step(self) -> None:
        """See ``Trainer``."""
        super().skip_step()
        if self._is_shared:
            self._gang.tell({"order": "skip", "config": self.config.to_json()})

    def state_dict(self) -> TrainingState:
        """See ``Trainer``; a state leaves the group only when every rank holds the same weights. Raises RanksDiffer."""
        if self._is_shared:
            self._gang.tell({"order": "weights"})
            self._compare(f"told its weights after step {self.progress.step}", lambda: {"weights": weights_held(self)})
        return super().state_dict()

    def _share_state(self) -> None:
        state = super().state_dict()
        tensors = [(section, name, tensor) for section in SECTIONS for name, tensor in state.tensors[section].items()]
        listed = [[section, name, str(t.dtype).removeprefix("torch."), list(t.shape)] for section, name, t in tensors]
        self._gang.tell({"order": "state", "values": state.values, "tensors": listed})
        for _, _, tensor in tensors:
            progress.mark()
            with self._gang.exchange():
                self._gang.collective.give(tensor)
        self._compare("taken the state", lambda: {"fingerprint": fingerprint(self)})
        self._is_shared = True

    def _compare(self, what: str, ours: Callable[[], dict[str, Any]]) -> None:
        own = ours()
        for rank, theirs in enumerate(self._gang.hear_all(what), start=1):
            if theirs != own:
                raise RanksDiffer(
                    f"rank {rank} has {what} with {theirs}, rank 0 with {own}: the same arithmetic gave other bits there; the "
                    "run goes on from the last checkpoint, and if it happens again that device or its memory is at fault"
                )


def trainer_of(policy: Policy, config: Config, gang: Gang | None) -> Trainer:
    """The trainer of a learner, alone or as rank 0 of a group."""
    return Trainer(policy, config) if gang is None else GangTrainer(policy, config, gang)


def _how(code: int | None) -> str:
    """How a rank ended, in words."""
    if code is None:
        return "has closed its channel and not ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}; the log has its words"


def _look(member: _Member) -> str:
    """What a silent rank does; one that can is asked for its stacks."""
    with suppress(OSError):
        state = Path(f"/proc/{member.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in ("T", "t"):
            return "the process is stopped (SIGSTOP or a debugger)"
        if state == "Z":
            return "the process is dead"
        member.process.send_signal(signal.SIGUSR1)
        host().sleep(WATCH_S)
    return "its stacks are in the log"
