"""A reward function as verl takes it: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, plain or ``async``.

Owns what it is given and what its answer means. Tasks are verl's rows: ``data_source``, ``prompt`` (messages),
``reward_model.ground_truth`` and ``extra_info``, of a Parquet or JSONL file. The convention has no word for "cannot say": only
an exception gives no reward, and a ``None`` is refused as no number (P6).
Source: verl's ``custom_reward_function`` and its naive reward manager.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.tasks.adapters.common import FIELD, finite_parts, number, refuse_pattern, settings_of, tasks_in_files
from rollbook.tasks.importing import load_attribute
from rollbook.tasks.sources import field_of


def make(rest: str, config: Config) -> VerlScore:
    """``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. Raises ConfigError."""
    refuse_pattern(config, "verl's compute_score")
    settings = settings_of(config, {"reward_kwargs": {}})
    function = load_attribute(rest, FIELD)
    if not callable(function):
        raise ConfigError(f"{FIELD}: {rest} is a {type(function).__name__}, expected a function "
                          "(data_source, solution_str, ground_truth, extra_info)")  # fmt: skip
    kind = AsyncVerlScore if inspect.iscoroutinefunction(function) else VerlScore
    return kind(config, function, settings["reward_kwargs"])


class VerlScore:
    """verl's ``compute_score`` as an environment.

    Args:
        reward_kwargs: further keyword arguments, as ``custom_reward_function.reward_kwargs`` gives them in verl.
    """

    tools = ()
    needs_sandbox = False

    def __init__(self, config: Config, function: Callable[..., Any], reward_kwargs: dict[str, Any]) -> None:
        self._config, self._function, self._further = config, function, reward_kwargs

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks of ``task.path`` or ``task.heldout_path``. Raises TaskError naming file and row."""
        return tasks_in_files(self._config, split)

    def score(self, episode: Episode, context: Context) -> RewardResult | Awaitable[RewardResult]:
        """The judgement, or what to await for it where the function is ``async``.

        Raises: VerifierError (the row is not verl's, or the answer is no score), whatever the function raises.
        """
        task = episode.task
        truth = field_of(task, "reward_model.ground_truth")
        if task.get("data_source") is None or truth is None:
            raise VerifierError("verl's compute_score needs rows with data_source and reward_model.ground_truth; this one has "
                                f"{', '.join(sorted(task))}")  # fmt: skip
        answer = self._function(
            data_source=task["data_source"], solution_str=episode.completion, ground_truth=truth,
            extra_info=task.get("extra_info") or {}, **self._further,
        )  # fmt: skip
        return _awaited(answer) if inspect.isawaitable(answer) else _result(answer)


class AsyncVerlScore(VerlScore):
    """An ``async`` function: many completions may be judged at once."""

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """See ``VerlScore.score``."""
        judged = super().score(episode, context)
        return judged if isinstance(judged, RewardResult) else await judged


async def _awaited(answer: Awaitable[Any]) -> RewardResult:
    return _result(await answer)


def _result(answer: Any) -> RewardResult:
    who = "verl's compute_score"
    if isinstance(answer, dict):
        if "score" not in answer:
            raise VerifierError(f"{who} returned a dict without 'score': {', '.join(map(str, answer)) or 'an empty one'}")
        return RewardResult(number(answer["score"], who), parts=finite_parts({k: v for k, v in answer.items() if k != "score"}))
    if isinstance(answer, list | tuple) and answer:  # verl takes the first of several
        answer = answer[0]
    return RewardResult(number(answer, who))
