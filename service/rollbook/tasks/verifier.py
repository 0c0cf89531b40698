"""The verifier: from a completion's text to a reward, or to no reward with the reason why.

Owns loading the reward function, the extraction before it and the rule what a result means. Never turns a failure into a
value: reward functions that raise, return no number or return NaN give no reward (P6). A completion without the wanted
format is no failure but an outcome: reward 0, and the model is to blame.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.idempotency import digest
from rollbook.core.ports import Reward, RewardResult
from rollbook.core.records import RewardStatus
from rollbook.tasks.extract import check_pattern, extract
from rollbook.tasks.rewards import reasoning_gym_score

Verifier = Callable[[str, dict], RewardResult]


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
        return _normalised(result, spec)

    return verify


def _normalised(result: Any, spec: str) -> RewardResult:
    """A checked result. Raises VerifierError when it is neither a number nor a RewardResult."""
    evidence = ""
    if isinstance(result, RewardResult):
        if not isinstance(result.evidence, str) or not isinstance(result.status, RewardStatus):
            said = f"{result!r:.200}: status must be a RewardStatus, evidence a text"
            raise VerifierError(f"reward function {spec} returned {said}")
        if result.value is None:
            return result
        result, evidence = result.value, result.evidence
    if result is None:
        return RewardResult(None, RewardStatus.NO_VERDICT, f"reward function {spec} returned None")
    try:
        if isinstance(result, str | bytes):
            raise TypeError("text is not a reward")
        value = float(result)
    except (TypeError, ValueError, OverflowError) as error:
        raise VerifierError(f"reward function {spec} returned {result!r:.80}, expected a number or a RewardResult") from error
    if not math.isfinite(value):
        return RewardResult(None, RewardStatus.VERIFIER_ERROR, f"reward function {spec} returned {value}")
    return RewardResult(value, evidence=evidence)


def load_reward(spec: str) -> Reward:
    """The reward function named ``module:attribute`` or ``file.py:attribute``.

    Raises: ConfigError naming what is missing; an exception while importing the module is chained.
    """
    module = _module(spec)
    target: Any = module
    for part in _attribute(spec).split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"task.reward = {spec!r}: {module.__file__ or module.__name__} has no {part!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"task.reward = {spec!r} is a {type(target).__name__}, expected a function (completion, task)")
    return target


def reward_digest(spec: str) -> str:
    """sha256 hex over the name and the source file of a reward function, for the run's manifest (P12). Raises ConfigError."""
    file = _module(spec).__file__
    source = Path(file).read_bytes() if file else b""
    return digest("reward", _attribute(spec), source)


def _attribute(spec: str) -> str:
    return spec.rpartition(":")[2]


def _module(spec: str) -> ModuleType:
    place, colon, attribute = spec.rpartition(":")
    if not (place and colon and attribute):
        raise ConfigError(f"task.reward = {spec!r}: write module:attribute or file.py:attribute")
    if place.endswith(".py"):
        return _module_from_file(Path(place).resolve(), spec)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(f"task.reward = {spec!r}: there is no module {error.name!r} on the import path; "
                              "name a file as path/to/file.py:attribute") from None  # fmt: skip
        raise ConfigError(f"task.reward = {spec!r}: importing {place} failed: {error}") from error
    except Exception as error:  # user code at import; reported with its cause
        raise ConfigError(f"task.reward = {spec!r}: importing {place} raised {type(error).__name__}: {error}") from error


def _module_from_file(file: Path, spec: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"task.reward = {spec!r}: there is no file {file}")
    # The path is part of the name, so that two files called reward.py do not shadow each other.
    name = f"rollbook_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ConfigError(f"task.reward = {spec!r}: {file} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:  # user code at import; reported with its cause
        del sys.modules[name]
        raise ConfigError(f"task.reward = {spec!r}: importing {file} raised {type(error).__name__}: {error}") from error
    return module
