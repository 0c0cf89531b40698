"""A dataset of reasoning_gym as an environment: ``rg:leg_counting``, its configuration in ``environment.settings``.

Owns which part of a completion is the answer and the optional threshold; the dataset, its seeds and its scorer are
``tasks.procedural``'s, with its refusal of scorers that evaluate the answer. Two traps of those scorers are met here. Most pay a
part for an answer that merely contains the right one, so that one span is scored, not the whole completion, wherever
``task.completion_pattern`` or an ``<answer>`` tag names one. And many pay a little for anything: ``threshold`` makes everything
below it 0 and everything else 1. What a scorer cannot read is a wrong answer; a scorer that cannot read the task's own answer is
an exception, never a 0 (P6).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.records import Blame
from rollbook.tasks.adapters.common import FIELD
from rollbook.tasks.extract import check_pattern, extract
from rollbook.tasks.procedural import ProceduralTasks, check_scorer, heldout_seed, score, training_seed
from rollbook.tasks.sources import TaskShape

_TAG = r"(?s)<answer>(.*?)</answer>"
_FIELDS = (f"{FIELD} (rg:)", "environment.settings")
_TRIES_PER_TASK = 20


def make(rest: str, config: Config) -> ReasoningGym:
    """A dataset by its name. Raises ConfigError (unknown, unsafe to score, or settings that do not fit)."""
    return ReasoningGym(rest, config)


class ReasoningGym:
    """Tasks and scorer of one dataset."""

    tools = ()
    needs_sandbox = False

    def __init__(self, name: str, config: Config) -> None:
        settings = dict(config.environment.settings)
        threshold = settings.pop("threshold", None)
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and not (is_number and 0 < threshold <= 1):
            raise ConfigError(f"environment.settings.threshold = {threshold!r}: a number above 0 and at most 1")
        if config.task.completion_pattern:
            check_pattern(config.task.completion_pattern, "task.completion_pattern")
        self._name, self._settings, self._threshold, self._config = name, settings, threshold, config
        ProceduralTasks(name, settings, 0, 1, TaskShape(), _FIELDS)  # names what is wrong in this environment's words
        check_scorer(name, settings)

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """``task.size`` training tasks, or ``task.heldout_size`` others that are none of them. Raises TaskError."""
        seed, size = self._config.run.seed, self._config.task.size
        training = self._tasks(training_seed(seed), size)
        if split == "train":
            return (training[i] for i in range(size))
        return self._unseen(training, self._config.task.heldout_size, heldout_seed(seed))

    def _unseen(self, training: ProceduralTasks, wanted: int, seed: int) -> Iterable[dict[str, Any]]:
        seen = {training[i]["prompt"] for i in range(len(training))}
        tries = max(_TRIES_PER_TASK * wanted, 1000)
        candidates = self._tasks(seed, tries)
        for i in range(tries):
            if not wanted:
                return
            task = candidates[i]
            if task["prompt"] not in seen:
                seen.add(task["prompt"])
                wanted -= 1
                yield task

    def _tasks(self, seed: int, size: int) -> ProceduralTasks:
        return ProceduralTasks(self._name, self._settings, seed, size, TaskShape(), _FIELDS)

    def score(self, episode: Episode, context: Context) -> RewardResult:
        """The dataset's score of the answer, in [0, 1]. Raises VerifierError (not its task), whatever a broken entry raises."""
        stored = episode.task.get("reasoning_gym")
        if not isinstance(stored, dict) or stored.get("name") != self._name:
            raise VerifierError(f"rg:{self._name} judges its own tasks only: set task.source = 'environment'")
        pattern = self._config.task.completion_pattern
        answer = extract(pattern or _TAG, episode.completion)
        if answer is None and pattern:
            return RewardResult(0.0, evidence=f"no match of task.completion_pattern {pattern!r}: the model failed the format",
                                blame=Blame.MODEL)  # fmt: skip
        value, remark = score((episode.completion if answer is None else answer).strip(), stored)
        parts = {"score": value}
        if self._threshold is not None:
            value = float(value >= self._threshold)
        return RewardResult(value, evidence=remark, parts=parts)
