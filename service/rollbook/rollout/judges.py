"""The run's judge: its environment in this process where that is safe, else in processes that can be killed.

Owns the choice and the in-process judge. The service's own rewards are judged here, because they are bounded and nobody's code;
whatever a user brings runs in an environment process (``tasks.child``). Never invents a value: whatever goes wrong in a verifier
is a status, not a number (P6).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest
from rollbook.core.errors import VerifierError
from rollbook.core.host import host
from rollbook.core.records import Blame, RewardStatus
from rollbook.rollout.episodes import Judge
from rollbook.sandbox.selection import Selection, select
from rollbook.tasks.child_client import EnvironmentPool
from rollbook.tasks.environment import judges_in_process, last_line
from rollbook.tasks.verifier import make_verifier

log = logging.getLogger(__name__)

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
            told = last_line(error) if error.__cause__ else str(error)
            result = RewardResult(None, RewardStatus.VERIFIER_ERROR, told, blame=Blame.UNCLEAR)
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


@dataclass(slots=True)
class Opened:
    """A judge and what is to be recorded of it."""

    judge: Judge
    selection: Selection | None = None
    """The sandbox it runs code in; None where it needs none."""

    def labels(self) -> dict[str, object]:
        """For the worker's row: a run whose sandbox contains nothing must say so wherever it is looked at."""
        if self.selection is None:
            return {}
        chosen = self.selection
        return {"sandbox": {"backend": chosen.backend, "contained": chosen.contained, "enforced": list(chosen.enforced)}}


def open_judge(config: Config, log_path: Path | None = None) -> Opened:
    """The judge of a run's episodes, ready to be asked.

    Code of the service itself judges in this process; whatever a user brings, in processes of its own. Where the environment
    runs model-written code, the sandbox is chosen now, by attack. A worker has a log; who only looks has none and no faults.
    Raises: ConfigError (no such reward or environment, it cannot be opened, or nothing here contains the attacks).
    """
    if judges_in_process(config):
        return Opened(RewardJudge(config))
    chosen: list[Selection] = []

    def backend() -> str:
        chosen.append(select(config.sandbox, Path(config.run.dir) / "sandbox"))
        if not chosen[0].contained:
            log.warning("sandbox.backend = 'unsafe': model-written code reaches this machine", extra={"event": "sandbox_unsafe"})
        return chosen[0].backend

    pool = EnvironmentPool(config, backend, log_path, faults=log_path is not None)
    return Opened(pool, chosen[0] if chosen else None)
