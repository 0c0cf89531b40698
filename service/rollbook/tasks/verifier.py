"""The verifier: from a completion's text to a reward, or to no reward with the reason why.

Owns loading the reward function, the extraction before it and the rule what a result means. Never turns a failure into a
value: reward functions that raise, return no number or return NaN give no reward (P6). A completion without the wanted
format is no failure but an outcome: reward 0, and the model is to blame.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import RewardResult
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.idempotency import digest
from rollbook.core.ports import Reward
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks.extract import check_pattern, extract
from rollbook.tasks.importing import attribute_of, load_attribute, load_module
from rollbook.tasks.rewards import reasoning_gym_score

Verifier = Callable[[str, dict], RewardResult]

_FIELD = "task.reward"


def make_verifier(config: Config) -> Verifier:
    """The verifier of a run: ``(completion text, task) -> RewardResult``.

    It raises VerifierError, with the original exception chained, when the reward function raises or returns no number.
    A None from the reward function is ``no_verdict``; NaN and infinities are ``verifier_error``.

    Raises: ConfigError naming the missing file, module or attribute, a bad pattern, or a scorer that may not be used.
    """
    spec, pattern = config.task.reward, config.task.completion_pattern
    reward = load_reward(spec)
    if pattern:
        check_pattern(pattern, "task.completion_pattern")
    if reward is reasoning_gym_score:
        if config.task.source != "reasoning_gym":
            raise ConfigError(f"task.reward = {spec!r} judges tasks of task.source = 'reasoning_gym' only; choose another reward")
        from rollbook.tasks.procedural import check_scorer

        check_scorer(config.task.name, config.task.settings)

    def verify(completion: str, task: dict) -> RewardResult:
        answer = extract(pattern, completion) if pattern else completion
        if answer is None:
            return RewardResult(0.0, evidence=f"no match of task.completion_pattern {pattern!r}: the model failed the format")
        try:
            result: Any = reward(answer, task)
        except (Exception, SystemExit) as error:  # user code: whatever it raises is reported, never a reward
            raise VerifierError(f"reward function {spec} raised {type(error).__name__}: {error}") from error
        return normalised(result, f"reward function {spec}")

    return verify


def normalised(result: Any, who: str) -> RewardResult:
    """What a judge called ``who`` returned, as a checked result.

    Raises: VerifierError (neither a number nor a RewardResult, or one with fields of other types).
    """
    if result is None:
        return RewardResult(None, RewardStatus.NO_VERDICT, f"{who} returned None")
    given = result if isinstance(result, RewardResult) else None
    if given is not None:
        _check_types(given, who)
        if given.value is None:
            return given
        result = given.value
    value = as_float(result, who, "a number or a RewardResult")
    if not math.isfinite(value):
        return RewardResult(None, RewardStatus.VERIFIER_ERROR, f"{who} returned {value}")
    return RewardResult(value) if given is None else dataclasses.replace(given, value=value)


def as_float(result: Any, who: str, expected: str) -> float:
    """What ``who`` returned as a number, which may be infinite or none. Raises VerifierError saying what was expected."""
    try:
        if isinstance(result, str | bytes):
            raise TypeError("text is not a number")
        return float(result)
    except (TypeError, ValueError, OverflowError) as error:
        raise VerifierError(f"{who} returned {result!r:.80}, expected {expected}") from error


def _check_types(result: RewardResult, who: str) -> None:
    if not isinstance(result.evidence, str) or not isinstance(result.status, RewardStatus):
        raise VerifierError(f"{who} returned {result!r:.200}: status must be a RewardStatus, evidence a text")
    if not isinstance(result.sandbox_status, SandboxStatus) or not isinstance(result.blame, Blame | None):
        raise VerifierError(f"{who} returned {result!r:.200}: sandbox_status must be a SandboxStatus, blame a Blame or None")
    try:
        parts = [value for name, value in result.parts.items() if isinstance(name, str) and math.isfinite(value)]
        if len(parts) < len(result.parts):
            raise ValueError("a part has no name or no finite value")
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VerifierError(f"{who} returned {result!r:.200}: parts must map names to finite numbers ({error})") from None


def load_reward(spec: str) -> Reward:
    """The reward function named ``module:attribute`` or ``file.py:attribute``.

    Raises: ConfigError naming what is missing; an exception while importing the module is chained.
    """
    target: Any = load_attribute(spec, _FIELD)
    if not callable(target):
        raise ConfigError(f"{_FIELD} = {spec!r} is a {type(target).__name__}, expected a function (completion, task)")
    return target


def reward_digest(spec: str) -> str:
    """sha256 hex over the name and the source file of a reward function, for the run's manifest (P12). Raises ConfigError."""
    file = load_module(spec, _FIELD).__file__
    source = Path(file).read_bytes() if file else b""
    return digest("reward", attribute_of(spec), source)
