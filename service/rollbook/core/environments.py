"""What an environment is: tasks, optional tools, and a score for a finished trajectory.

Owns the protocol that environment authors write against and the records that cross it. Never loads or runs user code
(``tasks.child`` does, in a process of its own). Upholds P6 (``RewardResult`` has no value without a verdict) and R13 (a tool
says whether it may run again).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A verifier's answer: a value, or no value with the reason why."""

    value: float | None
    status: RewardStatus = RewardStatus.GIVEN
    evidence: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the value, for the report; never used in training."""
    sandbox_status: SandboxStatus = SandboxStatus.NOT_USED
    blame: Blame | None = None
    """Whose failure it was; None where nothing failed."""

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.status is RewardStatus.GIVEN):
            raise ValueError(f"reward {self.value!r} with status {self.status.value!r}: a value goes with 'given' only")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call the model has written: name and JSON-able arguments."""

    tool: str
    arguments: dict[str, Any]

    def to_json(self) -> str:
        """Canonical JSON: what is recorded, and what the request digest is taken of."""
        # ASCII: a model can write half of a surrogate pair, which has no bytes otherwise.
        return json.dumps({"tool": self.tool, "arguments": self.arguments}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ToolRequest:
        content = json.loads(text)
        return cls(content["tool"], content["arguments"])


@dataclass(frozen=True, slots=True)
class ToolReply:
    """A tool's answer. ``failed`` means that there is none, for no fault of the model's: never shown to it, never trained on."""

    text: str
    """What the model reads; a program's own error is an answer like any other."""
    sandbox_status: SandboxStatus = SandboxStatus.NOT_USED
    failed: bool = False
    reason: str = ""
    blame: Blame | None = None
    """Whose failure it was; None where nothing failed, and a failed reply without one is infrastructure's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model and, where it called a tool, the answer to it."""

    text: str
    request: ToolRequest | None = None
    reply: ToolReply | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory as text, turn by turn; token ids never come from it."""

    task: dict[str, Any]
    turns: tuple[Turn, ...]

    @property
    def completion(self) -> str:
        """Text of the last turn: the answer of a single-turn task."""
        return self.turns[-1].text if self.turns else ""


@dataclass(frozen=True, slots=True)
class Context:
    """What an environment may use while it scores or runs a tool."""

    sandbox: Sandbox | None
    """None where the environment does not say ``needs_sandbox``."""
    limits: Limits
    seed: int
    """Seed of the rollout: the same in every attempt."""
    idempotency_key: str
    """``RUN/ORDINAL.SIBLING`` for a score, ``RUN/ORDINAL.SIBLING/CALL`` for a tool call: the same in every attempt."""
    deadline_s: float
    """Seconds left when the call began; the process is killed after them."""


class Tool(Protocol):
    """Something the model may call."""

    name: str
    pure: bool
    """True: running a call twice is the same as once, so a call without a recorded answer is run again after a crash."""

    async def call(
        self, arguments: dict[str, Any], earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        """Answer one call. ``earlier``: this tool's calls in this episode, from which a stateful tool rebuilds its state.

        What the model did wrong is an answer for it to read. An exception, a death and a call without an end are failures of
        which nobody can tell whether the tool, its service or what the model asked for is to blame (``unclear``): the call
        is repeated where the tool is pure, else the rollout fails.
        """
        ...


class Environment(Protocol):
    """Tasks with a way to judge them. Optional attributes: ``tools``, ``needs_sandbox`` (bool), ``parse``, ``render``."""

    tools: Sequence[Tool]
    needs_sandbox: bool

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks of ``"train"`` or ``"heldout"``: at least ``prompt`` (text); JSON-able; the same in every process."""
        ...

    def parse(self, text: str) -> ToolRequest | None:
        """The tool call a turn's text ends with, or None when the turn ends the episode."""
        ...

    def render(self, reply: ToolReply) -> str:
        """Text that stands between the call and the model's next turn; where the run uses a chat template, the template's
        text for a ``tool`` message is used instead."""
        ...

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """Judge a finished episode. An exception is ``verifier_error``; no code path makes it a value."""
        ...
