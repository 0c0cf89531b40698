"""Episodes: leased slots driven through turns of the model, calls of tools and a score.

Owns the state of each episode and the order generate → record call → run tool → record answer → go on → score. A tool call is
written to the ledger before it runs and its answer after (R13), with the trajectory up to it, so that another worker goes on
from there. Never leases or submits, and never shows the model an infrastructure failure. While tools run, the episodes that
wait for nothing are generated; everything happens in the caller's thread. Upholds P6, P4 (a turn's seed is a function of the
slot's) and R13.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.errors import Conflict, Fenced, VerifierError
from rollbook.core.host import host
from rollbook.core.idempotency import digest, turn_seed
from rollbook.core.packing import pack_f32, pack_i32, unpack_i32
from rollbook.core.ports import Generation, GenerationRequest
from rollbook.core.records import (
    Blame,
    FinishReason,
    LeaseGrant,
    RewardStatus,
    SandboxStatus,
    SlotKey,
    ToolCall,
    Trajectory,
)
from rollbook.observe import tracing
from rollbook.observe.failpoints import failpoint
from rollbook.observe.metrics import GPU_SECONDS_TOTAL
from rollbook.rollout.journal import Journal, reply_from_json, reply_to_json
from rollbook.tasks.turns import TurnCodec

log = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest wait for a tool or a score before leases are looked at again."""

Generate = Callable[[list[GenerationRequest]], list[Generation]]


class Judge(Protocol):
    """The run's environment, wherever it runs (``tasks.child_client``)."""

    pure_tools: dict[str, bool]
    """Name of each tool to whether its calls may run again."""

    def score(self, episode: Episode, *, key: str, seed: int) -> Future[RewardResult]: ...

    def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], *, key: str, call_index: int, seed: int
    ) -> Future[ToolReply]: ...

    def parse(self, text: str) -> ToolRequest | None: ...

    def render(self, reply: ToolReply) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode that is over: a result of the judge, or the reason why it never got that far."""

    grant: LeaseGrant
    trajectory: Trajectory
    finish_reason: FinishReason
    result: RewardResult | None
    """None where infrastructure ended the episode before it was judged."""
    reason: str
    """Why there is no result."""
    status: RewardStatus
    blame: Blame
    """The same, where there is no result."""
    sandbox_status: SandboxStatus
    final: bool
    """True: another attempt at this slot would end the same way."""
    generate_s: float
    verify_s: float
    evidence: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Live:
    """One episode in hand."""

    grant: LeaseGrant
    task: dict[str, Any]
    prompt: tuple[int, ...]
    key: str
    tokens: list[int] = field(default_factory=list)
    logprobs: bytes = b""
    versions: bytes = b""
    mask: bytearray = field(default_factory=bytearray)
    turns: list[Turn] = field(default_factory=list)
    future: Future[Any] | None = None
    call: ToolCall | None = None
    finish: FinishReason = FinishReason.STOP
    generate_s: float = 0.0
    tool_s: float = 0.0
    since: float = 0.0
    """When the tool or the score was asked for."""

    def trajectory(self) -> Trajectory:
        mask = b"" if all(self.mask) else bytes(self.mask)
        return Trajectory(pack_i32(self.tokens), self.logprobs, self.versions, mask)

    def extend(self, tokens: Sequence[int], logprobs: bytes, versions: bytes, sampled: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.mask += bytes([sampled]) * len(tokens)

    def asked(self, future: Future[Any]) -> None:
        self.future, self.since = future, host().monotonic()

    def traced(self, name: str, began: float, *, failed: str = "", **attributes: tracing.Value) -> None:
        """A span of this attempt that ends now."""
        grant = self.grant
        if grant.traceparent:
            attributes |= {"slot": str(grant.key), "attempt": grant.attempt}
            tracing.record(name, grant.traceparent, began, failed=failed, attributes=attributes)

    def earlier(self, tool: str) -> list[tuple[ToolRequest, ToolReply]]:
        return [(t.request, t.reply) for t in self.turns if t.request and t.reply and t.request.tool == tool]


@dataclass(slots=True)
class Episodes:
    """A set of episodes; feed it with ``add``, turn it with ``advance`` until it is empty."""

    run_id: str
    judge: Judge
    codec: TurnCodec
    journal: Journal
    generate: Generate
    tokens_max: int
    """Most tokens of a completion: sampled ones and a tool's together."""
    turns_max: int
    version: Callable[[], int]
    """Version the engine holds."""
    is_usable: Callable[[LeaseGrant], bool] = lambda grant: True
    may_salvage: bool = True
    """A late sample may still be accepted, so finished work of a lost lease is handed over as well."""
    judged: bool = True
    """False: an episode ends without being scored."""
    waited_s: float = 0.0
    """Time in which nothing could be generated because every episode waited for a tool or a score."""
    generated_s: float = 0.0
    _live: list[_Live] = field(default_factory=list)
    _done: list[Finished] = field(default_factory=list)

    def __len__(self) -> int:
        """Episodes in hand, those included that ended before they were handed over."""
        return len(self._live) + len(self._done)

    @property
    def waiting(self) -> bool:
        """True while episodes are in hand and none can be generated."""
        return bool(self._live) and not self._done and all(e.future is not None for e in self._live)

    def add(self, grants: Iterable[LeaseGrant]) -> None:
        """Take slots in hand; one with recorded calls goes on after the last of them."""
        for grant in grants:
            episode = _Live(
                grant, json.loads(grant.task_json), tuple(unpack_i32(grant.prompt_ids)), f"{self.run_id}/{grant.key}"
            )
            self._live.append(episode)
            # A slot's first lease has no calls to go on from; asking for each would cost a round trip a rollout.
            if self.judge.pure_tools and grant.token > 1 and (calls := self.journal.calls(grant)):
                self._continue(episode, calls)

    def advance(self) -> list[Finished]:
        """One turn: generate what can be, else wait a little for tools and scores; returns the episodes that are over."""
        self._give_up()
        ready = [e for e in self._live if e.future is None]
        if ready:
            self._generate(ready)
        elif self._live:
            started = host().monotonic()
            pending = [e.future for e in self._live if e.future is not None]
            if not any(future.done() for future in pending):
                wait(pending, timeout=WAIT_S, return_when=FIRST_COMPLETED)
            self.waited_s += host().monotonic() - started
        self._give_up()
        for episode in [e for e in self._live if e.future is not None and e.future.done()]:
            self._answered(episode)
        done, self._done = self._done, []
        return done

    def _give_up(self) -> None:
        """Leases that are no longer trusted are left to the ledger, which leases them again."""
        kept = [e for e in self._live if self.is_usable(e.grant) or (self.may_salvage and self._is_judged(e))]
        if len(kept) < len(self._live):
            log.warning("leases given up", extra={"event": "leases_given_up", "slots": len(self._live) - len(kept)})
            for episode in [e for e in self._live if e not in kept]:
                self._lose(episode)

    def _lose(self, episode: _Live) -> None:
        """Drop an episode of which no row will tell; what the device did for it is counted here."""
        self._live.remove(episode)
        GPU_SECONDS_TOTAL.labels("actor", "wasted").inc(episode.generate_s)

    def _is_judged(self, episode: _Live) -> bool:
        return episode.future is not None and episode.call is None

    def _generate(self, ready: list[_Live]) -> None:
        requests = [
            GenerationRequest(
                e.grant.key, (*e.prompt, *e.tokens), turn_seed(e.grant.seed, len(e.turns)), self.tokens_max - len(e.tokens)
            )
            for e in ready
        ]
        started = host().monotonic()
        generations = self.generate(requests)
        took = host().monotonic() - started
        self.generated_s += took
        failpoint("worker.after_generate")
        for episode, generation in zip(ready, generations, strict=True):
            episode.generate_s += took / len(ready)
            t = generation.trajectory
            episode.traced("generate", started, turn=len(episode.turns), tokens=t.n_tokens, version=episode.grant.version,
                           batch=len(ready), finish_reason=generation.finish_reason.value)  # fmt: skip
            episode.extend(list(unpack_i32(t.token_ids)), t.logprobs, t.versions, True)
            self._turn_over(episode, generation)

    def _turn_over(self, episode: _Live, generation: Generation) -> None:
        """After a turn of the model: a tool's turn, or the end."""
        text = self.codec.decode(unpack_i32(generation.trajectory.token_ids))
        episode.finish = generation.finish_reason
        request = None
        if self.judge.pure_tools and generation.finish_reason is FinishReason.STOP:
            try:
                request = self.judge.parse(text)
            except VerifierError as error:
                self._end(episode, _unjudged(error))
                return
        episode.turns.append(Turn(text, request))
        if request is None or generation.trajectory.n_tokens == 0:
            self._score(episode)
        elif len(episode.turns) >= self.turns_max:
            self._score(episode, FinishReason.TURNS)
        else:
            self._call(episode, request)

    def _call(self, episode: _Live, request: ToolRequest) -> None:
        """Record a call, then run it, unless its answer is recorded already."""
        text = request.to_json()
        index = len(episode.turns) - 1
        call = ToolCall(episode.grant.key, index, digest("tool", text), episode.trajectory(), request.tool, text)
        failpoint("worker.tool.before_record")
        try:
            with tracing.within(episode.grant.traceparent):
                stored = self.journal.record(call, episode.grant)
        except Fenced:
            self._lose(episode)  # somebody else has the slot
            return
        except Conflict as error:
            self._end(episode, None, f"tool call {index}: {error}", final=True)
            return
        failpoint("worker.tool.after_record")
        if stored.response_json is not None:
            self._go_on(episode, reply_from_json(stored.response_json))
        else:
            self._run(episode, stored)

    def _run(self, episode: _Live, call: ToolCall) -> None:
        request = ToolRequest.from_json(call.request_json)
        episode.call = call
        episode.asked(
            self.judge.call_tool(
                request, episode.earlier(request.tool), key=episode.key, call_index=call.call_index, seed=episode.grant.seed
            )
        )

    def _answered(self, episode: _Live) -> None:
        """A tool or the judge has answered."""
        assert episode.future is not None
        answer, call = episode.future.result(), episode.call
        spent = host().monotonic() - episode.since
        episode.future = episode.call = None
        if call is None:
            episode.traced("reward", episode.since, failed="" if answer.value is not None else answer.status.value)
            self._end(episode, answer, verify_s=spent)
            return
        episode.tool_s += spent
        episode.traced("tool_call", episode.since, tool=call.tool, call_index=call.call_index,
                       failed=answer.sandbox_status.value if answer.failed else "")  # fmt: skip
        failpoint("worker.tool.after_call")
        if answer.failed:
            # A repetition would run an impure call twice; its slot can never be filled.
            final = not self.judge.pure_tools.get(call.tool, False)
            reason = f"tool {call.tool}, call {call.call_index}: {answer.reason}"
            blame = answer.blame or Blame.INFRA
            self._end(
                episode, None, reason, answer.sandbox_status, final, status=_status_of(blame, answer.sandbox_status), blame=blame
            )
            return
        try:
            with tracing.within(episode.grant.traceparent):
                stored = self.journal.record(dataclasses.replace(call, response_json=reply_to_json(answer)), episode.grant)
        except Fenced:
            self._lose(episode)
            return
        failpoint("worker.tool.after_answer")
        assert stored.response_json is not None
        self._go_on(episode, reply_from_json(stored.response_json))

    def _go_on(self, episode: _Live, reply: ToolReply) -> None:
        """Put a tool's answer behind the turn, masked from the loss, and let the model go on; or end for want of room."""
        turn = episode.turns[-1]
        episode.turns[-1] = Turn(turn.text, turn.request, reply)
        try:
            ids = self.codec.reply_ids(self.judge.render(reply))
        except VerifierError as error:
            self._end(episode, _unjudged(error))
            return
        if len(episode.tokens) + len(ids) >= self.tokens_max:
            self._score(episode, FinishReason.LENGTH)
            return
        n = len(ids)
        episode.extend(ids, pack_f32([0.0] * n), pack_i32([self.version()] * n), False)

    def _continue(self, episode: _Live, calls: list[ToolCall]) -> None:
        """Rebuild an episode from its recorded calls (R13) and take up the last one."""
        last = calls[-1]
        prefix = last.prefix
        if prefix.n_tokens and max(unpack_i32(prefix.versions)) > episode.grant.version:
            self._end(episode, None, "its recorded turns were sampled in a lineage that is closed", final=True)
            return
        ids, begin = list(unpack_i32(prefix.token_ids)), 0
        mask = prefix.loss_mask or b"\x01" * len(ids)
        for call in calls:
            end = call.prefix.n_tokens
            begin += len(mask[begin:end]) - len(mask[begin:end].lstrip(b"\x00"))
            reply = reply_from_json(call.response_json) if call.response_json is not None else None
            request = ToolRequest.from_json(call.request_json)
            episode.turns.append(Turn(self.codec.decode(ids[begin:end]), request, reply))
            begin = end
        episode.tokens, episode.mask = ids, bytearray(mask)
        episode.logprobs, episode.versions = prefix.logprobs, prefix.versions
        if last.response_json is not None:
            self._go_on(episode, reply_from_json(last.response_json))
        elif self.judge.pure_tools.get(last.tool, False):
            self._run(episode, last)
        else:
            reason = f"tool {last.tool}, call {last.call_index}: its worker died before it answered, and the tool is not pure"
            self._end(episode, None, reason, final=True)

    def _score(self, episode: _Live, finish: FinishReason | None = None) -> None:
        episode.finish = finish or episode.finish
        if not episode.tokens:
            self._end(episode, None, "empty completion", blame=Blame.MODEL)
            return
        if not self.judged:
            self._end(episode, None, "not judged")
            return
        story = Episode(episode.task, tuple(episode.turns))
        episode.asked(self.judge.score(story, key=episode.key, seed=episode.grant.seed))

    def _end(
        self, episode: _Live, result: RewardResult | None, reason: str = "",
        sandbox_status: SandboxStatus = SandboxStatus.NOT_USED, final: bool = False, verify_s: float = 0.0,
        status: RewardStatus = RewardStatus.NO_VERDICT, blame: Blame = Blame.INFRA,
    ) -> None:  # fmt: skip
        """Hand an episode over; what ends one before it is judged, other than a tool, says nothing about sandboxes."""
        evidence: dict[str, Any] = {}
        if episode.tool_s or len(episode.turns) > 1:
            evidence |= {"turns": len(episode.turns), "tool_s": round(episode.tool_s, 6)}
        if result is not None:
            sandbox_status = result.sandbox_status
            evidence |= {k: v for k, v in (("evidence", result.evidence), ("parts", dict(result.parts))) if v}
        self._live.remove(episode)
        self._done.append(
            Finished(
                episode.grant, episode.trajectory(), episode.finish, result, reason, status, blame, sandbox_status, final,
                episode.generate_s, verify_s, evidence,
            )
        )  # fmt: skip


def _status_of(blame: Blame, sandbox_status: SandboxStatus) -> RewardStatus:
    """What a failed tool leaves instead of a reward."""
    if blame is Blame.INFRA:
        return RewardStatus.INFRA_ERROR
    if blame is Blame.MODEL:
        return RewardStatus.NO_VERDICT
    return RewardStatus.TIMEOUT if sandbox_status is SandboxStatus.TIMEOUT_WALL else RewardStatus.VERIFIER_ERROR


def _unjudged(error: VerifierError) -> RewardResult:
    """The environment cannot read or write a turn: no verdict."""
    return RewardResult(None, RewardStatus.VERIFIER_ERROR, str(error), blame=Blame.UNCLEAR)


def play(episodes: Episodes, grants: Sequence[LeaseGrant]) -> list[Finished]:
    """Play these slots to their ends, in their order; for looking at a policy, not for samples."""
    episodes.add(grants)
    finished: dict[SlotKey, Finished] = {}
    while len(episodes):
        finished |= {f.grant.key: f for f in episodes.advance()}
    return [finished[grant.key] for grant in grants]
