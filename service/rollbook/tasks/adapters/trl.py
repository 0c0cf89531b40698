"""Reward functions as TRL takes them: ``f(prompts, completions, **columns) -> list[float | None]``, plain or ``async``.

Owns what such a function is given and what its answer means. A completion is judged as soon as it is there, so every list has
length 1: a function that compares the completions of a batch with each other sees none to compare with. Conversational tasks
(with ``messages``) give lists of messages, others text, as in TRL. None abstains: that function's part is left out of the
weighted sum, and where all abstain there is no verdict, never a 0 (P6).

Given beside the task's fields: ``log_metric`` (its numbers become parts of the reward) and ``log_extra`` (kept as evidence).
Token ids and the trainer's state do not exist where rewards are given; a function that needs them is refused.
Source: TRL 1.x, GRPOTrainer's ``reward_funcs`` and ``reward_weights``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.config import Config, code_names
from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.records import RewardStatus
from rollbook.tasks.adapters.common import FIELD, number, refuse_pattern, settings_of, tasks_in_files, weights_of
from rollbook.tasks.importing import load_attribute
from rollbook.tasks.prompts import prompt_of

_ABSENT = ("completion_ids", "trainer_state", "environments")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def make(rest: str, config: Config) -> TrlRewards:
    """``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``, several separated by commas. Raises ConfigError."""
    refuse_pattern(config, "a TRL reward function")
    settings = settings_of(config, {"weights": [], "conversational": False})
    names = code_names(f"trl:{rest}")
    functions = [_function(name) for name in names]
    weights = weights_of(settings["weights"], len(functions), ", ".join(names))
    kind = AsyncTrlRewards if all(map(inspect.iscoroutinefunction, functions)) else TrlRewards
    return kind(config, functions, _labels(functions), weights, settings["conversational"])


def _function(name: str) -> Callable[..., Any]:
    function = load_attribute(name, FIELD)
    shown = f"{FIELD}: {name}"
    if not callable(function):
        raise ConfigError(f"{shown} is a {type(function).__name__}, expected a function (prompts, completions, **columns)")
    if inspect.isclass(function) or hasattr(function, "state_dict"):
        raise ConfigError(f"{shown} is a class or a model; only functions give rewards here, so write one that asks it")
    for parameter in _parameters(function):
        if parameter.name in _ABSENT and parameter.default is parameter.empty:
            raise ConfigError(f"{shown} needs {parameter.name}, which exists in TRL's trainer only; give it a default")
    return function  # type: ignore[no-any-return]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        named = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C; calling it will tell
        return []
    return [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _takes_all(function: Callable[..., Any]) -> bool:
    try:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True


def _labels(functions: Sequence[Callable[..., Any]]) -> list[str]:
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


@dataclass(slots=True)
class _Logged:
    """What the functions log while they judge one completion."""

    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            self.metrics[str(name)] = float(value)

    def column(self, column: str, values: Any) -> None:
        self.extra[str(column)] = values


class TrlRewards:
    """The weighted sum of TRL reward functions as an environment.

    Args:
        weights: one for each function, 1 each where the list is empty.
        conversational: give prompts without ``messages`` as one user message.
    """

    tools = ()
    needs_sandbox = False

    def __init__(
        self, config: Config, functions: Sequence[Callable[..., Any]], labels: Sequence[str], weights: Sequence[float],
        conversational: bool,
    ) -> None:  # fmt: skip
        self._config, self._conversational = config, conversational
        self._functions = list(zip(functions, labels, weights, strict=True))

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks of ``task.path`` or ``task.heldout_path``. Raises TaskError naming file and line."""
        return tasks_in_files(self._config, split)

    def score(self, episode: Episode, context: Context) -> RewardResult | Awaitable[RewardResult]:
        """The judgement, or what to await for it where a function is ``async``.

        Raises: VerifierError (a function's answer has another length or type), whatever a function raises.
        """
        logged = _Logged()
        given = self._arguments(episode, logged)
        answers: list[Any] = [None] * len(self._functions)
        # Coroutines last: one that raises before they are awaited would leave them behind.
        for i in sorted(range(len(answers)), key=lambda i: inspect.iscoroutinefunction(self._functions[i][0])):
            answers[i] = _call(self._functions[i][0], given)
        if not any(inspect.isawaitable(answer) for answer in answers):
            return self._result(answers, logged)
        return self._awaited(answers, logged)

    async def _awaited(self, answers: Sequence[Any], logged: _Logged) -> RewardResult:
        waiting = [answer for answer in answers if inspect.isawaitable(answer)]
        got = iter(await asyncio.gather(*waiting))
        return self._result([next(got) if inspect.isawaitable(answer) else answer for answer in answers], logged)

    def _arguments(self, episode: Episode, logged: _Logged) -> dict[str, Any]:
        prompt: Any = prompt_of(episode.task)
        completion: Any = episode.completion
        if self._conversational and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": completion}]
        columns = {key: [value] for key, value in episode.task.items() if key not in _NOT_COLUMNS}
        logging = {"log_metric": logged.metric, "log_extra": logged.column}
        return columns | logging | {"prompts": [prompt], "completions": [completion]}

    def _result(self, answers: Sequence[Any], logged: _Logged) -> RewardResult:
        value, abstained = 0.0, 0
        parts = dict(logged.metrics)
        for answer, (_, label, weight) in zip(answers, self._functions, strict=True):
            one = _only(answer, f"TRL reward function {label}")
            if one is None:
                abstained += 1
                continue
            parts[label] = one
            value += weight * one
        evidence = json.dumps(logged.extra, default=str, ensure_ascii=False) if logged.extra else ""
        if abstained == len(self._functions):
            told = "every TRL reward function returned None" + (f"; {evidence}" if evidence else "")
            return RewardResult(None, RewardStatus.NO_VERDICT, told, parts)
        return RewardResult(value, evidence=evidence, parts=parts)


class AsyncTrlRewards(TrlRewards):
    """Functions that are all ``async``: many completions may be judged at once."""

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """See ``TrlRewards.score``."""
        judged = super().score(episode, context)
        return judged if isinstance(judged, RewardResult) else await judged


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    if _takes_all(function):
        return function(**given)
    names = {parameter.name for parameter in _parameters(function)}
    return function(**{name: value for name, value in given.items() if name in names})


def _only(answer: Any, who: str) -> float | None:
    """The one reward in a function's answer. Raises VerifierError (no list, or not of length 1, or no number in it)."""
    if hasattr(answer, "tolist"):  # an array or a tensor
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise VerifierError(f"{who} returned {answer!r:.80}, expected a list with one reward")
    if len(answer) != 1:
        raise VerifierError(f"{who} returned {len(answer)} rewards for 1 completion")
    return None if answer[0] is None else number(answer[0], who)
