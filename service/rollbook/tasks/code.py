"""Code tasks: programs that the model writes, judged by calls or by assertions in sandboxes.

Owns finding the program in a completion, task files of calls, and what a verdict is worth. Never runs a program itself
(``verdicts`` does, in the run's sandbox). A program that fails is an outcome, reward 0, the model's own; where infrastructure
failed or nobody can tell there is no reward (P6).
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.core.environments import Context, Episode, RewardResult, Tool
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks import humaneval, mbpp
from rollbook.tasks.verdicts import Case, Verdict, judge_asserts, judge_functions

PROGRAM_CHARS_MAX = 200_000
"""A longer completion without a fence is not looked through for Python."""
FILE_BYTES_MAX = 1 << 30
_EVIDENCE_CHARS_MAX = 2000
_FENCE = re.compile(r" {0,3}(`{3,}+|~{3,}+)[ \t]*+([\w+.-]*+)[^`]*+")  # possessive: no text makes it try again
_PYTHON = ("python", "python3", "py", "py3")

Row = dict[str, Any]


def find_program(completion: str) -> str | None:
    """The program in a completion: its last block fenced as Python, else its last bare block, else all of it where it is Python.

    A block that nothing closes, because the completion was cut off, counts. None where there is no program.
    """
    blocks = _blocks(completion)
    for languages in (_PYTHON, ("",)):
        found = [text for language, text in blocks if language.lower() in languages]
        if found:
            return found[-1] if found[-1].strip() else None
    if blocks or not completion.strip() or not is_python(completion):
        return None
    return completion


def is_python(text: str) -> bool:
    """Whether ``text`` is Python and more than expressions, which prose and numbers are as well."""
    if len(text) > PROGRAM_CHARS_MAX:
        return False
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) for node in body)


def _blocks(completion: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    blocks: list[tuple[str, str]] = []
    fence, language = "", ""
    lines: list[str] = []
    for line in completion.splitlines(keepends=True):
        found = _FENCE.fullmatch(line.rstrip())
        if not fence and found:
            fence, language, lines = found[1], found[2], []
        elif fence and found and found[1].startswith(fence) and not found[2]:
            blocks.append((language, "".join(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    return [*blocks, (language, "".join(lines))] if fence else blocks


@dataclass(frozen=True, slots=True)
class _Kind:
    """How rows of one kind become tasks."""

    splits: tuple[str, ...]
    split_of: Callable[[Row], str]
    task_of: Callable[[Row], Row]


def _calls_task(row: Row) -> Row:
    """A row of calls, checked. Raises ValueError."""
    cases = row["cases"]
    if not isinstance(row["prompt"], str) or not str(row["function"]).isidentifier():
        raise ValueError("prompt must be a text and function the name of one")
    if not isinstance(cases, list) or not cases or not all(
        isinstance(case, list) and len(case) == 2 and isinstance(case[0], list) for case in cases
    ):  # fmt: skip
        raise ValueError("cases must be a list of [[argument, …], expected]")
    return row


KINDS = {
    "mbpp": _Kind(("train", "heldout", "valid", "prompt"), mbpp.split_of, mbpp.task_of),
    "humaneval": _Kind(("train", "heldout"), lambda row: "heldout", humaneval.task_of),
    "functions": _Kind(("train", "heldout"), lambda row: row.get("split", "train"), _calls_task),
}


class CodeTasks:
    """An environment of programming tasks.

    Args:
        kind: ``mbpp`` (rows as published), ``humaneval`` (the installed package's data where ``path`` is empty) or ``functions``
            (rows of prompt, function and cases ``[[[argument, …], expected], …]``, with answer, a right program, and split,
            ``train`` or ``heldout``, where there are such).
        path: the task file: JSON lines, which may be gzipped, or one JSON list.
        partial: pay the share of tests passed instead of all or nothing.
        attempts_max: fresh sandboxes after infrastructure failures.
        numbers: ``loose``: 1 is 1.0, and floats need not agree to the last digit (``functions`` only).
        sequences: ``strict``: a tuple is no list, which a task file of calls cannot ask for (``functions`` only).
    """

    tools: Sequence[Tool] = ()
    needs_sandbox = True

    def __init__(
        self, kind: str, path: str = "", partial: bool = False, attempts_max: int = 3, numbers: str = "strict",
        sequences: str = "loose",
    ) -> None:  # fmt: skip
        """Raises: ConfigError (a setting that cannot be meant, no data)."""
        if kind not in KINDS:
            raise ConfigError(f"environment.settings.kind = {kind!r}: one of {', '.join(KINDS)}")
        if not path and kind != "humaneval":
            raise ConfigError(f"environment.settings.path is missing: the {kind} task file")
        for name, value in (("numbers", numbers), ("sequences", sequences)):
            if value not in ("strict", "loose"):
                raise ConfigError(f"environment.settings.{name} = {value!r}: strict or loose")
        self._kind, self._partial, self._attempts = kind, partial, attempts_max
        self._numbers, self._sequences = numbers, sequences
        self._path = Path(path) if path else humaneval.data_file()

    def load(self, split: str) -> Iterable[Row]:
        """Tasks of a split: ``train`` or ``heldout``, of MBPP ``valid`` and ``prompt`` (few-shot) as well.

        Raises: ConfigError (no such split), TaskError naming file and row.
        """
        kind = KINDS[self._kind]
        if split not in kind.splits:
            raise ConfigError(f"split {split!r}: {self._kind} has {', '.join(kind.splits)}")
        tasks = []
        for number, row in enumerate(read_rows(self._path), start=1):
            try:
                if kind.split_of(row) == split:
                    tasks.append(kind.task_of(row))
            except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
                said = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise TaskError(f"{self._path} row {number}: not a task of kind {self._kind!r}: {said}") from None
        return tasks

    def gold(self, task: Row) -> str:
        """A completion that must pass: the reference program. Raises TaskError (the task has none)."""
        if not task.get("answer"):
            raise TaskError(f"the task {task['prompt'][:60]!r} brings no right program")
        return f"```python\n{task['answer']}\n```"

    def program_of(self, completion: str, task: Row) -> str | None:
        """The program to judge; None where the completion holds none."""
        found = find_program(completion)
        return humaneval.program_of(found, completion, task, is_python) if self._kind == "humaneval" else found

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """1 for a program that passes every test, else 0 or the share passed; no value where nobody can tell.

        Raises: TaskError (the task cannot be judged, whatever the program), ConfigError (the sandbox is too small).
        """
        program = self.program_of(episode.completion, episode.task)
        if program is None:
            return RewardResult(
                0.0, evidence="no program in the completion", sandbox_status=SandboxStatus.NO_CODE, blame=Blame.MODEL
            )  # fmt: skip
        verdict = await asyncio.to_thread(self.judge, program, episode.task, context)
        parts = {"passed": float(verdict.passed), "total": float(verdict.total)}
        evidence = json.dumps({"reason": verdict.reason, **verdict.evidence})[:_EVIDENCE_CHARS_MAX]
        if not verdict.given:
            return RewardResult(None, RewardStatus.INFRA_ERROR, evidence, parts, verdict.status, verdict.blame)
        value = verdict.passed / verdict.total if self._partial else float(verdict.right)
        return RewardResult(value, RewardStatus.GIVEN, evidence, parts, verdict.status, verdict.blame)

    def judge(self, program: str, task: Row, context: Context) -> Verdict:
        """The verdict on a program. Raises TaskError, ConfigError (see ``score``)."""
        if context.sandbox is None:
            raise ConfigError("code tasks need a sandbox, and there is none")
        if self._kind == "functions":
            cases = [Case(args, expected) for args, expected in task["cases"]]
            return judge_functions(
                context.sandbox, program, task["function"], cases, context.limits, attempts_max=self._attempts,
                numbers=self._numbers, sequences=self._sequences,
            )  # fmt: skip
        return judge_asserts(
            context.sandbox, program, task["tests"], context.limits, imports=task["imports"], names=task["names"],
            attempts_max=self._attempts,
        )  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON list, or of JSON lines, gzipped or not. Raises TaskError naming file and line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TaskError(f"task file {path} cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        try:
            rows = list(json.loads(text))
        except ValueError as error:
            raise TaskError(f"{path}: not valid JSON: {error}") from None
    else:
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise TaskError(f"{path} line {number}: not valid JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise TaskError(f"{path} row {number}: expected a JSON object, found {type(row).__name__}")
    return rows
