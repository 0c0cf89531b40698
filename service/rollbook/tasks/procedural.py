"""Procedural tasks of reasoning_gym: made from a seed instead of read from a file.

Owns the seeds of training and held-out tasks, the lossless JSON form of an entry, and scoring by the dataset's own rule.
Never stores generated tasks: the same index is generated again. Never lets a scorer execute what a model wrote: datasets
whose scorer evaluates the answer as Python are refused for scoring. Source: reasoning-gym 0.1.25 (Apache-2.0).
"""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib import metadata
from typing import Any

from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.idempotency import digest
from rollbook.tasks.sources import TaskShape

_SEED_SPAN = 2**30
_DIGEST_ITEMS = 8

_EVALUATING_SCORERS = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Datasets whose ``score_answer`` hands the answer to ``eval`` or to sympy's ``parse_expr``, which is ``eval`` too."""


FIELDS = ("task.name", "task.settings")
"""Where a dataset's name and its settings stand in the configuration."""


def training_seed(config_seed: int) -> int:
    """Seed of the training tasks, in [0, 2**30)."""
    return int(digest("procedural tasks", config_seed)[:8], 16) % _SEED_SPAN


def heldout_seed(config_seed: int) -> int:
    """Seed of the held-out tasks, in [2**30, 2**31).

    Datasets draw item i from the seed plus i, so neighbouring seeds share nearly all items; this far apart, two ranges of
    fewer than 2**30 items share none.
    """
    return training_seed(config_seed) + _SEED_SPAN


class ProceduralTasks:
    """A reasoning_gym dataset as a task source.

    A task has ``prompt``, ``answer`` and ``reasoning_gym`` = {name, settings, entry}, all the dataset's scorer needs. The
    prompt template may use ``prompt`` or ``question`` (the same text), ``answer`` and ``metadata[...]``.
    """

    def __init__(
        self, dataset_name: str, settings: dict, seed: int, size: int, shape: TaskShape, fields: tuple[str, str] = FIELDS
    ) -> None:
        """Args: fields: names of the dataset and its settings in the configuration, for messages. Raises: ConfigError."""
        if size < 1:
            raise ConfigError(f"task.size = {size}: a procedural source needs at least one task")
        self._name = dataset_name
        self._settings = settings
        self._seed = seed
        self._size = size
        self._shape = shape
        self._dataset = _create(dataset_name, settings, seed, size, fields)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        where = self.name(index)
        entry = self._entry(index, where)
        answer = entry["answer"] if entry["answer"] is not None else ""
        fields = {"prompt": entry["question"], "question": entry["question"], "answer": answer, "metadata": entry["metadata"]}
        task = self._shape.apply(fields, where)
        kept = {key: to_jsonable(entry[key], where) for key in ("question", "answer", "metadata")}
        return {
            "prompt": task["prompt"],
            "answer": task["answer"],
            "reasoning_gym": {"name": self._name, "settings": self._settings, "entry": kept},
        }

    def name(self, index: int) -> str:
        return f"reasoning_gym {self._name} item {index} (seed {self._seed})"

    def digest(self) -> str:
        """Covers name, settings, seed, size, package version and the first items, not every item: making all may be slow."""
        indices = range(min(self._size, _DIGEST_ITEMS))
        entries = [to_jsonable(self._entry(i, self.name(i)), self.name(i)) for i in indices]
        items = [json.dumps(entry, sort_keys=True) for entry in entries]
        settings = json.dumps(self._settings, sort_keys=True)
        version = metadata.version("reasoning-gym")
        return digest("procedural", self._name, settings, self._seed, self._size, version, *items)

    def _entry(self, index: int, where: str) -> dict[str, Any]:
        try:
            return self._dataset[index]
        except Exception as error:  # the generator is foreign code; whatever it raises means a broken task
            raise TaskError(f"{where}: the generator raised {type(error).__name__}: {error}") from error


def _create(name: str, settings: dict, seed: int, size: int, fields: tuple[str, str] = FIELDS) -> Any:
    """The dataset object. Raises ConfigError: package absent, unknown name (with the nearest names), unfit settings."""
    named, set_in = fields
    try:
        import reasoning_gym  # type: ignore[import-untyped]
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("reasoning_gym is not installed: pip install 'rollbook[tasks]'") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(DATASETS)}, for example chain_sum, gcd, leg_counting"
        raise ConfigError(f"{named} = {name!r}: reasoning_gym has no such dataset; {hint}")
    if name == "codeio":
        raise ConfigError(f"{named} = 'codeio': this dataset runs the programs of its data inside the process that draws "
                          "from it and gives other items for the same seed; use another dataset")  # fmt: skip
    for key, instead in (("seed", "run.seed"), ("size", "task.size")):
        if key in settings:
            raise ConfigError(f"{set_in}.{key}: set {instead} instead, the held-out tasks are derived from it")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except Exception as error:  # foreign code checks its settings with assertions, type and value errors
        known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        raise ConfigError(
            f"{set_in} do not fit reasoning_gym {name!r}: {error}; its settings are {', '.join(known)}"
        ) from error


def check_scorer(name: str, settings: dict) -> None:
    """Make sure that answers of this dataset can be scored here. Raises ConfigError (unsafe scorer, dataset unusable)."""
    _scorer(name, json.dumps(settings, sort_keys=True))


@lru_cache(maxsize=64)
def _scorer(name: str, settings_json: str) -> Any:
    if name in _EVALUATING_SCORERS:
        raise ConfigError(
            f"the scorer of reasoning_gym {name!r} evaluates the answer as Python, so a completion could run "
            "code in the worker; use rollbook.tasks.rewards:exact_match, a reward of your own, or another dataset"
        )
    return _create(name, json.loads(settings_json), seed=0, size=1).score_answer


def score(answer: str, stored: dict) -> tuple[float, str]:
    """The dataset's own score of ``answer`` in [0, 1], and a remark where the answer was beyond its scorer.

    Some scorers raise on text they cannot parse. That is the answer's fault exactly when the scorer handles the task's own
    answer: then the score is 0. Otherwise the task or the scorer is broken and the exception passes through.

    Args:
        answer: the completion's answer.
        stored: the task's ``reasoning_gym`` field.
    """
    score_answer = _scorer(stored["name"], json.dumps(stored["settings"], sort_keys=True))
    entry = from_jsonable(stored["entry"])
    try:
        return float(score_answer(answer, entry)), ""
    except Exception as error:  # foreign code; told apart below
        if not isinstance(entry["answer"], str):
            raise
        score_answer(entry["answer"], entry)
        return 0.0, f"the scorer cannot read the answer: {type(error).__name__}: {error}"


_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def to_jsonable(value: object, where: str) -> object:
    """A JSON value that ``from_jsonable`` turns back into an equal one, tuples and non-string keys included.

    Plain JSON would make lists of tuples, and some datasets compare stored grids with parsed ones of tuples: the right
    answer would score as wrong. Raises TaskError for values without such a form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [to_jsonable(item, where) for item in value]}
    if isinstance(value, list):
        return [to_jsonable(item, where) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not value.keys() & {_TUPLE, _PAIRS}:
            return {key: to_jsonable(item, where) for key, item in value.items()}
        return {_PAIRS: [[to_jsonable(key, where), to_jsonable(item, where)] for key, item in value.items()]}
    raise TaskError(f"{where}: its metadata holds a {type(value).__name__}, which cannot be stored as JSON")


def from_jsonable(value: Any) -> Any:
    """Inverse of ``to_jsonable``."""
    if isinstance(value, list):
        return [from_jsonable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(from_jsonable(item) for item in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {from_jsonable(key): from_jsonable(item) for key, item in value[_PAIRS]}
    return {key: from_jsonable(item) for key, item in value.items()}
