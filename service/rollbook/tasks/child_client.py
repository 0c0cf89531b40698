"""The environment as worker threads use it: asked in other processes, answered with records, never with an exception.

Owns what the end of a question means: a value, no value with a status, or a tool's failure, and who is to blame. Runs none of
the author's code. Upholds P6 (whatever a process does, what it did not say is no number) and R13 (a call of an impure tool
is made once).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest
from rollbook.core.errors import VerifierError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks import wire
from rollbook.tasks.child_pool import Pool
from rollbook.tasks.child_questions import Convert, NoAnswer, Question, Why

TEXT_S = 30.0
"""Longest parse or render."""

_OUTCOMES = {
    Why.RAISED: (RewardStatus.VERIFIER_ERROR, Blame.UNCLEAR),
    Why.TIMEOUT: (RewardStatus.TIMEOUT, Blame.UNCLEAR),
    Why.DIED: (RewardStatus.VERIFIER_ERROR, Blame.UNCLEAR),
    Why.INFRA: (RewardStatus.INFRA_ERROR, Blame.INFRA),
}


class EnvironmentPool:
    """The run's environment in ``environment.processes`` processes of its own; any thread may ask.

    Every call is bounded: by ``environment.score_s`` or ``tool_s`` an attempt, and by ``attempts_max`` attempts.
    """

    def __init__(
        self, config: Config, sandbox_backend: str | Callable[[], str] = "", log_path: Path | None = None, faults: bool = False
    ) -> None:
        """Open the environment; returns when every process is ready.

        Args:
            sandbox_backend: name for ``sandbox.backends.make_backend``, or what finds it, asked only when the environment
                needs a sandbox.
            faults: arm the failpoints of ``[chaos]`` there as well.
            log_path: file to which the processes' output is appended; None keeps only what an error message shows of it.

        Raises: ConfigError (it cannot be loaded, or its process cannot be started, with what it said last).
        """
        settings = config.environment
        self._score_s, self._tool_s = settings.score_s, settings.tool_s
        name = sandbox_backend
        backend = (lambda: name) if isinstance(name, str) else name
        opening = {"config": config.to_json(), "faults": faults}
        self._pool = Pool(opening, backend, log_path, settings.processes, settings.attempts_max)
        self.pure_tools: dict[str, bool] = self._pool.loaded["loaded"]
        """Name of each tool to whether its calls may run again."""
        self.needs_sandbox: bool = self._pool.loaded["needs_sandbox"]

    @property
    def restarts(self) -> int:
        """Processes started to replace one that ended."""
        return self._pool.restarts

    def score(self, episode: Episode, *, key: str, seed: int) -> Future[RewardResult]:
        """Judge a finished episode; the future never raises. Raises RestartBudgetSpent (the environment cannot be kept alive)."""
        message = {"verb": "score", "episode": wire.episode_out(episode), "key": key, "seed": seed}
        return self._pool.ask(Question(message, self._score_s, _to_result, again=_is_infra, error_stands=True))

    def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], *, key: str, call_index: int, seed: int
    ) -> Future[ToolReply]:
        """Run a tool; the future never raises: a tool that cannot answer gives a failed reply. Raises RestartBudgetSpent."""
        message = {
            "verb": "tool", "request": wire.request_out(request), "earlier": wire.earlier_out(earlier),
            "key": f"{key}/{call_index}", "seed": seed,
        }  # fmt: skip
        pure = self.pure_tools.get(request.tool, False)
        return self._pool.ask(Question(message, self._tool_s, _to_reply, again=_is_failed, repeatable=pure))

    def parse(self, text: str) -> ToolRequest | None:
        """The tool call a turn ends with, or None. Raises VerifierError (the environment cannot say), RestartBudgetSpent."""
        if not self.pure_tools:
            return None
        request: ToolRequest | None = self._text({"verb": "parse", "text": text}, wire.request_in)
        return request

    def render(self, reply: ToolReply) -> str:
        """What the model reads of a tool's answer. Raises VerifierError (the environment cannot say), RestartBudgetSpent."""
        text: str = self._text({"verb": "render", "reply": wire.reply_out(reply)}, wire.text_in)
        return text

    def close(self) -> None:
        """End every process and everything it has started; bounded, whatever they do."""
        self._pool.close()

    def _text(self, message: dict[str, Any], convert: Convert) -> Any:
        def to_text(answer: Any) -> Any:
            return answer if isinstance(answer, NoAnswer) else convert(answer)

        answer = self._pool.ask(Question(message, TEXT_S, to_text, light=True, error_stands=True)).result()
        if isinstance(answer, NoAnswer):
            raise VerifierError(f"{message['verb']}: {answer.reason}")
        return answer


def _to_result(answer: Mapping[str, Any] | NoAnswer) -> RewardResult:
    if isinstance(answer, NoAnswer):
        status, blame = _OUTCOMES[answer.why]
        return RewardResult(None, status, answer.reason, blame=blame)
    result = wire.result_in(answer)
    if result.blame is None and result.status is not RewardStatus.GIVEN:
        infra = result.status is RewardStatus.INFRA_ERROR
        return dataclasses.replace(result, blame=Blame.INFRA if infra else Blame.UNCLEAR)
    return result


def _is_infra(answer: Mapping[str, Any]) -> bool:
    return bool(answer["status"] == RewardStatus.INFRA_ERROR.value)


def _to_reply(answer: Mapping[str, Any] | NoAnswer) -> ToolReply:
    if isinstance(answer, NoAnswer):
        ended = SandboxStatus.TIMEOUT_WALL if answer.why is Why.TIMEOUT else SandboxStatus.NOT_USED
        return ToolReply("", ended, failed=True, reason=answer.reason, blame=_OUTCOMES[answer.why][1])
    reply = wire.reply_in(answer)
    if reply is None:
        raise ValueError("there is no reply in it")
    return reply


def _is_failed(answer: Mapping[str, Any]) -> bool:
    return bool(answer["failed"])
