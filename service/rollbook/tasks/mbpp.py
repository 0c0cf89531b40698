"""MBPP: short programming problems with assertions, in the shape in which they are published.

Owns how a row of ``mbpp.jsonl`` or ``sanitized-mbpp.json`` becomes a task, and the published splits. Never brings the data, which
are a file of the user's. Source: Austin et al. 2021, arXiv:2108.07732; data under CC-BY-4.0.
"""

from __future__ import annotations

from typing import Any

from rollbook.tasks.verdicts.asserts import imports_of, names_called

SPLITS = {"prompt": (1, 10), "heldout": (11, 510), "valid": (511, 600), "train": (601, 974)}
"""First and last task number; ``heldout`` is the published test split, ``prompt`` the tasks for few-shot prompts."""


def split_of(row: dict[str, Any]) -> str:
    """The published split. Raises ValueError, KeyError (the row is not of MBPP)."""
    number = int(row["task_id"])
    for split, (first, last) in SPLITS.items():
        if first <= number <= last:
            return split
    raise ValueError(f"task_id {number} is not between 1 and 974")


def task_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a task: its prompt shows the first test, which says what the function is called.

    Raises: KeyError, TypeError, SyntaxError (the row is not of MBPP).
    """
    code, tests = row["code"], list(row["test_list"])
    given = row.get("test_imports") or ([row["test_setup_code"]] if row.get("test_setup_code") else [])
    imports = "\n".join([*given, imports_of(code)])
    text = row.get("prompt") or row["text"]
    return {
        "number": row["task_id"], "prompt": f"{text}\nYour code should pass this test:\n{tests[0]}\n", "answer": code,
        "tests": tests, "imports": imports, "names": names_called(tests, imports, code),
    }  # fmt: skip
