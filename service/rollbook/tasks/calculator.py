"""Calculator: an environment whose tasks are solved by calling a tool, easy enough for a model of 100,000 weights.

A task is an expression such as ``12+7*3``. The model may write a call, ``[12+7*3]``, reads the answer, ``33;``, and ends the
episode with ``=33``. Owns the tasks, the language of calls and answers, two tools and the score. Never starts a sandbox of
its own and never shows infrastructure's failures to the model (P6). Both tools are pure (R13): each call runs in a fresh
sandbox, and the session rebuilds its state from its earlier cells.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from rollbook.core.environments import Context, Episode, RewardResult, Tool, ToolReply, ToolRequest
from rollbook.core.errors import ConfigError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Program, Sandbox

SPLITS = {"heldout": (0, 10), "demonstration": (10, 50), "train": (50, 100)}
"""Percentiles of the prompt's hash, half-open: one prompt has one hash, so no two splits share a prompt."""
TEXT_MAX = 2000
"""Characters of a tool's answer that are kept."""

_ORDER_SEED = {"heldout": 7, "demonstration": 9, "train": 11}
_CALL = re.compile(r"\[(.+)\]", re.DOTALL)
_ANSWER = re.compile(r"=-?[0-9]+")
_INTEGER = re.compile(r"-?[0-9]{1,12}")

EXPRESSION_CHARACTERS_MAX = 64
NESTING_MAX = 16
INTEGER_MAX = 10**12


def split_of(prompt: str) -> str:
    """Return the one split that ``prompt`` belongs to: a function of its text alone."""
    percentile = zlib.crc32(prompt.encode()) % 100
    return next(split for split, (low, high) in SPLITS.items() if low <= percentile < high)


def tasks_of(split: str) -> list[dict[str, Any]]:
    """Return every task of a split in an order that is shuffled, but always the same.

    An expression is a two-digit number and two digits from 1 to 9, joined by two of ``+``, ``-`` and ``*``.

    Raises:
        ConfigError: there is no such split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: the calculator has {', '.join(SPLITS)}")
    tasks = []
    for first, op1, second, op2, third in itertools.product(range(10, 100), "+-*", range(1, 10), "+-*", range(1, 10)):
        expression = f"{first}{op1}{second}{op2}{third}"
        if split_of(f"{expression}:") == split:
            tasks.append({"prompt": f"{expression}:", "expression": expression, "answer": str(evaluate(expression))})
    random.Random(_ORDER_SEED[split]).shuffle(tasks)
    return tasks


def evaluate(expression: str) -> int:
    """Return the value of an integer expression of ``+``, ``-``, ``*`` and parentheses, with Python's grammar.

    Raises:
        ValueError: it is no such expression, or beyond the bounds on length, nesting and size.
    """
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ValueError(f"more than {EXPRESSION_CHARACTERS_MAX} characters")
    return _Parser(expression).whole()


class _Parser:
    """Recursive descent over one expression."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> int:
        value = self._sum()
        if self._at < len(self._text):
            raise ValueError(f"unexpected {self._text[self._at]!r}")
        return value

    def _next(self) -> str:
        while self._text[self._at : self._at + 1] == " ":
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _sum(self) -> int:
        value = self._product()
        while (sign := self._next()) in ("+", "-"):
            self._at += 1
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._factor()
        while self._next() == "*":
            self._at += 1
            value = _bounded(value * self._factor())
        return value

    def _factor(self) -> int:
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise ValueError(f"nested more than {NESTING_MAX} deep")
        sign = self._next()
        if sign in ("+", "-"):
            self._at += 1
            value = self._factor() * (-1 if sign == "-" else 1)
        elif sign == "(":
            self._at += 1
            value = self._sum()
            if self._next() != ")":
                raise ValueError("a parenthesis is not closed")
            self._at += 1
        else:
            value = self._number()
        self._depth -= 1
        return value

    def _number(self) -> int:
        begin = self._at
        while (character := self._text[self._at : self._at + 1]).isdigit() and character.isascii():
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits or (digits[0] == "0" and digits.strip("0")):  # as in Python, 07 is no number
            raise ValueError(f"no number at {self._text[begin:]!r}")
        return _bounded(int(digits))


def _bounded(value: int) -> int:
    if abs(value) > INTEGER_MAX:
        raise ValueError(f"beyond {INTEGER_MAX}")
    return value


class Arithmetic:
    """The tool ``python`` without a sandbox: integer arithmetic in the environment's own process."""

    name = "python"
    pure = True

    async def call(
        self, arguments: dict[str, Any], earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        """Answer with the value of ``code``."""
        try:
            return ToolReply(str(evaluate(_code(arguments))))
        except ValueError as error:
            return ToolReply(f"error: {error}")


class Python:
    """Evaluates a Python expression in a fresh sandbox and answers with what ``print`` shows of it."""

    name = "python"
    pure = True

    async def call(
        self, arguments: dict[str, Any], earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        """Answer with the value of ``code``, or with its error."""
        program = Program(source=f"print({_code(arguments)})\n")
        execution = await asyncio.to_thread(_sandbox(context).run, program, context.limits)
        if (failure := _infrastructure(execution)) is not None:
            return failure
        return ToolReply(_shown(execution), execution.status)


_SESSION_SETUP = f"""
import ast, contextlib, io, json, random, sys

def run_cell(code, namespace):
    out, status = io.StringIO(), "ok"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cell = compile(ast.Interactive(ast.parse(code).body), "<cell>", "single")
        except Exception as error:
            status = "syntax_error"
            print(f"error: {{type(error).__name__}}: {{error}}")
        else:
            try:
                exec(cell, namespace)
            except Exception as error:
                status = "runtime_error"
                print(f"error: {{type(error).__name__}}: {{error}}")
    return {{"text": out.getvalue().strip()[:{TEXT_MAX}], "status": status}}

def serve(namespace, answer):
    # All of the input is read first, so that no cell can read the next one.
    session = json.loads(sys.stdin.buffer.read())
    random.seed(session["seed"])
    for code in session["cells"]:
        answer(json.dumps(run_cell(code, namespace)).encode())
"""

_LIVES_ON = (SandboxStatus.OK, SandboxStatus.RUNTIME_ERROR, SandboxStatus.SYNTAX_ERROR)
"""How a cell may end without ending its session."""


class PythonSession:
    """An interpreter that keeps its variables from cell to cell, rebuilt from the cells at each call.

    A call runs every earlier cell again in a fresh sandbox, then the new one, and answers with the new one's output. A cell
    that ended the interpreter (a limit, an exit) ended the session: the next one starts with no variables. So does the call
    before which a cell, run again, showed something else than it had: its state cannot be rebuilt, which is the doing of the
    cell and so an error for the model to read. ``random`` is seeded with the rollout's seed. The limits hold for all the cells
    together.
    """

    name = "session"
    pure = True

    async def call(
        self, arguments: dict[str, Any], earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        """Answer with the output of the cell ``code``: what it prints and the values of its expression statements."""
        code = _code(arguments)
        replayed = _since_the_last_end(earlier)
        cells = [*(_code(request.arguments) for request, _ in replayed), code]
        data = json.dumps({"cells": cells, "seed": context.seed}).encode()
        program = Program(source="", setup=_SESSION_SETUP)
        execution = await asyncio.to_thread(_sandbox(context).run, program, context.limits, data)
        if (failure := _infrastructure(execution)) is not None:
            return failure
        answers = _answers(execution.answers)
        status = SandboxStatus.EARLY_EXIT if execution.status in _LIVES_ON else execution.status
        for index, (_, reply) in enumerate(replayed):
            if answers[index : index + 1] != [(reply.text, reply.sandbox_status)]:
                return ToolReply(f"error: the session is over, cell {index} does not run as it did", status)
        if len(answers) == len(cells):
            return ToolReply(*answers[-1])
        return ToolReply(f"error: {status.value}", status)


def _since_the_last_end(earlier: Sequence[tuple[ToolRequest, ToolReply]]) -> list[tuple[ToolRequest, ToolReply]]:
    """The cells whose state is alive: those behind the last one that ended the interpreter."""
    ends = [index for index, (_, reply) in enumerate(earlier) if reply.sandbox_status not in _LIVES_ON]
    return list(earlier[ends[-1] + 1 :] if ends else earlier)


def _answers(lines: bytes) -> list[tuple[str, SandboxStatus]]:
    """Output and status of each cell, up to the first line that is none: the cells may have written anything."""
    answers: list[tuple[str, SandboxStatus]] = []
    for line in lines.splitlines():
        try:
            answer = json.loads(line)
            text, status = answer["text"], SandboxStatus(answer["status"])
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not isinstance(text, str) or status not in _LIVES_ON:
            break
        answers.append((text[:TEXT_MAX], status))
    return answers


def _code(arguments: dict[str, Any]) -> str:
    code = arguments.get("code")
    if not isinstance(code, str):
        raise ValueError(f"a call of the calculator's tools has the argument 'code', a text; got {arguments!r}")
    return code


def _sandbox(context: Context) -> Sandbox:
    if context.sandbox is None:
        raise ConfigError("the calculator's tool needs a sandbox; use [environment] settings = {sandbox = false} to do without")
    return context.sandbox


def _infrastructure(execution: Execution) -> ToolReply | None:
    """The failed reply of an execution that ended for no fault of the program, or may have."""
    if execution.status is SandboxStatus.OK or execution.blame is Blame.MODEL:
        return None
    reason = f"sandbox: {execution.status.value}: {execution.reason}"
    return ToolReply("", execution.status, failed=True, reason=reason, blame=execution.blame)


def _shown(execution: Execution) -> str:
    if execution.status is SandboxStatus.OK:
        return execution.stdout.decode(errors="replace").strip()[:TEXT_MAX]
    return f"error: {execution.reason or execution.status.value}"[:TEXT_MAX]


class Calculator:
    """Expressions to be worked out with a tool; reward 1 for the exact answer, else 0.

    Args:
        sandbox: False works calls out in this process, integer arithmetic only.
        session: calls go to one interpreter per episode instead of a fresh one each.
        train_tasks: tasks of the split ``train``.
        heldout_tasks: tasks of the split ``heldout``.

    Raises:
        ConfigError: a session without a sandbox, or a number of tasks that the split does not hold.
    """

    def __init__(self, sandbox: bool = True, session: bool = False, train_tasks: int = 4096, heldout_tasks: int = 500) -> None:
        if session and not sandbox:
            raise ConfigError("calculator: session = true needs sandbox = true")
        self.needs_sandbox = sandbox
        tool: Tool = PythonSession() if session else Python() if sandbox else Arithmetic()
        self.tools: Sequence[Tool] = (tool,)
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks with ``prompt``, ``expression`` and ``answer``."""
        if split not in self._counts:
            raise ConfigError(f"split {split!r}: the calculator has train and heldout")
        tasks, count = tasks_of(split), self._counts[split]
        if not 1 <= count <= len(tasks):
            raise ConfigError(f"{split}_tasks = {count}: the calculator has 1 to {len(tasks)} tasks there")
        return tasks[:count]

    def parse(self, text: str) -> ToolRequest | None:
        """A call is a turn that is one bracketed text, ``[12+7*3]``."""
        call = _CALL.fullmatch(text)
        return ToolRequest(self.tools[0].name, {"code": call[1]}) if call else None

    def render(self, reply: ToolReply) -> str:
        """An integer and ``;``, or ``error;`` for anything else: all that the tiny model has read before."""
        return f"{reply.text if _INTEGER.fullmatch(reply.text) else 'error'};"

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """1 when the last turn is ``=`` and the answer; ``parts``: whether it has that form, and whether a tool was called."""
        parts = {
            "form": float(_ANSWER.fullmatch(episode.completion) is not None),
            "called": float(any(turn.request is not None for turn in episode.turns)),
        }
        return RewardResult(float(episode.completion == f"={episode.task['answer']}"), parts=parts)
