"""Verdict by assertions: the tests run in one sandbox, the candidate in another, and every call goes through this process.

Owns the relay. The judge's sandbox holds trusted tests and plain values only; the candidate's holds its own program and the
arguments of the calls made so far. The judge says how many tests passed on a channel the candidate has no part in.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.host import host
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Job, Limits, Program, Sandbox
from rollbook.tasks.verdicts.candidate import Candidate
from rollbook.tasks.verdicts.values import Unreadable, setup_of
from rollbook.tasks.verdicts.verdict import Verdict, counted, line_wait_s, model_failed, no_more_answers, settled

CALLS_MAX = 100_000
JUDGE_CPU_S = 10.0
"""Processor time that the judge has beside the candidate's."""
JUDGE_WALL_S = 180.0
"""How much longer than the candidate the judge may live: it starts first and may wait for the candidate's slot."""
JUDGE_OUTPUT_BYTES = 16 << 20

_SETUP = setup_of("judge_side")
_LIMITED = (
    SandboxStatus.TIMEOUT_CPU, SandboxStatus.TIMEOUT_WALL, SandboxStatus.OOM, SandboxStatus.OUTPUT_LIMIT,
    SandboxStatus.DISK_LIMIT, SandboxStatus.PROCESS_LIMIT,
)  # fmt: skip
_gates: WeakKeyDictionary[Sandbox, threading.Condition] = WeakKeyDictionary()
_gates_lock = threading.Lock()


def names_called(tests: Sequence[str], imports: str = "", reference: str = "") -> list[str]:
    """Names in tests that are the candidate's: those nobody else defines, and functions of the reference program.

    Only a trusted reference may shadow a builtin: a candidate that defines ``set`` would answer for both sides of a comparison.
    Raises: SyntaxError.
    """
    tree = ast.parse("\n".join([imports, *tests]))
    loaded = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    known = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    known |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    known |= {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    defined = {n.name for n in ast.parse(reference).body if isinstance(n, ast.FunctionDef)}
    return sorted((loaded - known - set(dir(builtins))) | (loaded & defined))


def imports_of(reference: str) -> str:
    """Import statements of a trusted program: tests were written beside it and use what it imports. Raises SyntaxError."""
    lines = [ast.unparse(n) for n in ast.parse(reference).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join(lines)


def judge_asserts(
    sandbox: Sandbox, source: str, tests: Sequence[str], limits: Limits, *, imports: str = "", names: Sequence[str] = (),
    attempts_max: int = 3,
) -> Verdict:  # fmt: skip
    """How many of ``tests`` (statements that raise when they fail) pass with the functions of ``source``.

    Args:
        imports: trusted statements before the tests; what they define is the judge's, unless ``names`` has it.
        names: the candidate's functions; found in the tests where empty.

    Raises: ConfigError (one slot is too few), TaskError (the tests cannot run, whatever the candidate).
    """
    if getattr(sandbox, "slots", 2) < 2:
        raise ConfigError("sandbox.slots = 1: tests that assert run beside the candidate; give at least 2")
    try:
        called = list(names) or names_called(tests, imports)
    except SyntaxError as error:
        raise TaskError(f"the tests are no Python: {error}") from None
    if not tests or not called:
        raise TaskError("there are no tests, or they call nothing")
    asked = json.dumps({"names": called, "imports": imports, "tests": list(tests)}).encode() + b"\n"
    spare = dataclasses.replace(
        limits, cpu_s=limits.cpu_s + JUDGE_CPU_S, wall_s=limits.wall_s + JUDGE_WALL_S,
        output_bytes=max(limits.output_bytes, JUDGE_OUTPUT_BYTES),
    )  # fmt: skip

    def once() -> Verdict:
        # One at a time takes its two slots: were all slots held by halves of verdicts, each would wait for the others.
        with _gate(sandbox):
            judge = sandbox.start(Program("", _SETUP), spare)
            candidate = Candidate(sandbox, source, limits)
        try:
            judge.send(asked)
            verdict = _relay(judge, candidate, len(tests), line_wait_s(spare))
        except Unreadable as error:
            verdict = model_failed(SandboxStatus.INVALID_RESULT, 0, len(tests), str(error))
        finally:
            judge.kill()
            candidate.job.kill()
        return candidate.close(verdict)

    return settled(once, attempts_max)


def _gate(sandbox: Sandbox) -> threading.Condition:
    with _gates_lock:
        return _gates.setdefault(sandbox, host().condition())


def _relay(judge: Job, candidate: Candidate, total: int, wait_s: float) -> Verdict:
    """Carry calls and answers until the judge has counted. Raises Unreadable (the candidate's answer), TaskError."""
    for _ in range(CALLS_MAX):
        line = judge.read_line(wait_s)
        if line is None:
            return _judge_ended(judge.wait(), total)
        said: dict[str, Any] = json.loads(line)
        if "passed" in said:
            return counted(said["passed"], total, said["first"], raised=said["raised"])
        if "broken" in said:
            raise TaskError(f"the tests cannot run: {said['broken']}")
        if "invalid" in said:
            raise Unreadable(said["invalid"])
        answer = candidate.ask(said["name"], said["args"], said["kwargs"])
        if answer is None:
            return no_more_answers(candidate.job.wait(), 0, total)
        judge.send(json.dumps(answer).encode() + b"\n")
    raise TaskError(f"the tests make more than {CALLS_MAX} calls")


def _judge_ended(ended: Execution, total: int) -> Verdict:
    """No verdict: trusted tests do not end their own sandbox. Values of the candidate may have made them slow or large."""
    reason = f"the judge ended: {ended.status.value} {ended.reason}".strip()
    blame = Blame.UNCLEAR if ended.status in _LIMITED else Blame.INFRA
    return Verdict(0, total, SandboxStatus.INFRA_LOST, blame, reason[:500])
