"""What the adapters share: settings by name, tasks from the run's files, reading what a foreign function returned.

Owns the rule what counts as a number. Never calls a user's function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, TaskError, VerifierError
from rollbook.tasks.importing import near
from rollbook.tasks.sources import read_rows, shape_of
from rollbook.tasks.verifier import as_float

FIELD = "environment.name"


def settings_of(config: Config, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``environment.settings`` over an adapter's defaults. Raises ConfigError naming a key or a type that does not fit."""
    for key, value in config.environment.settings.items():
        if key not in defaults:
            hint = near(key, defaults) or f"; it takes {', '.join(defaults)}"
            raise ConfigError(f"{FIELD} = {config.environment.name!r} takes no setting environment.settings.{key}{hint}")
        default = defaults[key]
        if default is not None and type(value) is not type(default):
            shown = {bool: "true or false", list: "a list", dict: "a table", str: "a text"}[type(default)]
            raise ConfigError(f"environment.settings.{key} = {value!r}: expected {shown}")
    return dict(defaults) | config.environment.settings


def refuse_pattern(config: Config, who: str) -> None:
    """A pattern that nobody would apply must not stand there. Raises ConfigError."""
    if config.task.completion_pattern:
        raise ConfigError(
            f"task.completion_pattern is set, but {who} reads the whole completion and finds the answer itself; remove it"
        )


def tasks_in_files(config: Config, split: str) -> Iterator[dict[str, Any]]:
    """Tasks of ``task.path`` (train) or ``task.heldout_path`` (heldout, none where it is empty), not yet in a template.

    Raises: ConfigError (no file named), TaskError naming file and line.
    """
    path = config.task.path if split == "train" else config.task.heldout_path
    if not path:
        if split == "train":
            raise ConfigError(f"task.path is missing: the JSONL or Parquet file with the tasks of {config.environment.name}")
        return
    shape = shape_of(config)
    own = replace(shape, prompt_template="{prompt}")
    for name, row in read_rows(path):
        if isinstance(row, TaskError):
            raise row
        has_prompt = row.get("prompt") is not None or isinstance(row.get("messages"), list)
        # Without a prompt of its own a row has what the template makes of it; made twice, that is the same text.
        yield (own if has_prompt else shape).apply(row, name)


def number(value: Any, who: str) -> float:
    """A finite number that a foreign function returned. Raises VerifierError."""
    converted = as_float(value, who, "a number")
    if not math.isfinite(converted):
        raise VerifierError(f"{who} returned {converted}, which is no reward")
    return converted


def finite_parts(values: Mapping[Any, Any]) -> dict[str, float]:
    """The entries that are finite numbers, for the report."""
    numbers = {str(k): float(v) for k, v in values.items() if isinstance(v, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def weights_of(value: Sequence[Any], n: int, names: str) -> list[float]:
    """One finite weight for each of ``n`` functions, 1 where none are given. Raises ConfigError."""
    if not value:
        return [1.0] * n
    fits = [isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) for w in value]
    if len(value) != n or not all(fits):
        raise ConfigError(f"environment.settings.weights = {list(value)!r}: write {n} numbers, one for each of {names}")
    return [float(w) for w in value]
