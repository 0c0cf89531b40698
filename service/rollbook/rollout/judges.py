"""The run's judge: its environment in this process where that is safe, else in processes that can be killed.

Owns the choice and the in-process judge. The service's own rewards are judged here, because they are bounded and nobody's code;
whatever a user brings runs in an environment process (``tasks.child``). Never invents a value: whatever goes wrong in a verifier
is a status, not a number (P6).
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from concurrent.futures import Future

from rollbook.core.config import Config
from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest
from rollbook.core.errors import VerifierError
from rollbook.core.host import host
from rollbook.core.records import Blame, RewardStatus
from rollbook.rollout.episodes import Judge
from rollbook.tasks.verifier import make_verifier

_REASON_CHARS_MAX = 2000


class RewardJudge:
    """Judges single-turn completions by ``task.reward``, at once, in the caller's thread."""

    pure_tools: dict[str, bool] = {}

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError (no such reward function, bad pattern)."""
        self._verify = make_verifier(config)

    def score(self, episode: Episode, *, key: str, seed: int) -> Future[RewardResult]:
        """The judgement, already there; never raises what a reward function raised."""
        try:
            result = self._verify(episode.completion, episode.task)
        except VerifierError as error:
            result = RewardResult(None, RewardStatus.VERIFIER_ERROR, _last_line(error), blame=Blame.UNCLEAR)
        future: Future[RewardResult] = host().future()
        future.set_result(dataclasses.replace(result, evidence=result.evidence[:_REASON_CHARS_MAX]))
        return future

    def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], *, key: str, call_index: int, seed: int
    ) -> Future[ToolReply]:
        raise LookupError(f"task.reward has no tools; {request.tool!r} was asked for")

    def parse(self, text: str) -> ToolRequest | None:
        """None: every turn is the last."""
        return None

    def render(self, reply: ToolReply) -> str:
        return reply.text

    def close(self) -> None:
        """Nothing to end."""


def open_judge(config: Config) -> Judge:
    """The judge of a run's episodes, ready to be asked. Raises ConfigError."""
    return RewardJudge(config)


def _last_line(error: VerifierError) -> str:
    cause = error.__cause__
    if cause is None:
        return str(error)[:_REASON_CHARS_MAX]
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{error}{place}"[:_REASON_CHARS_MAX]
