"""Verdict by assertions: the tests run in one sandbox, the candidate in another, and every call goes through this process.

Owns the relay. The judge's sandbox holds trusted tests and plain values only; the candidate's holds its own program and the
arguments of the calls made so far. The judge says how many tests passed on a channel the candidate has no part in.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Sequence
from typing import Any

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Job, Limits, Program, Sandbox
from rollbook.tasks.verdicts.candidate import Candidate
from rollbook.tasks.verdicts.values import ENCODING, Unreadable
from rollbook.tasks.verdicts.verdict import Verdict, asked_again, ended_early, model_failed

CALLS_MAX = 100_000
JUDGE_SPARE_S = 15.0
"""How much longer than the candidate the judge may live: it waits most of the time."""

_JUDGE = ENCODING + '''
import builtins as _builtins
import json as _json
import sys as _sys

def serve(namespace, answer):
    asked = _json.loads(_sys.stdin.readline())

    def remote(name):
        def call(*args, **kwargs):
            answer(_json.dumps({"name": name, "args": _encode(list(args)), "kwargs": _encode(kwargs)}).encode())
            said = _json.loads(_sys.stdin.readline())
            if "ok" in said:
                return _decode(said["ok"])
            kind = getattr(_builtins, said["error"], None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else RuntimeError)(said["text"])
        call.__name__ = name
        return call

    space = {"__name__": "__tests__"}
    exec(compile(asked["imports"], "<imports>", "exec"), space)
    space.update((name, remote(name)) for name in asked["names"])
    passed, first = 0, ""
    for test in asked["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), space)
            passed += 1
        except Exception as error:
            first = first or f"{type(error).__name__}: {str(error)[:300]}"
    answer(_json.dumps({"passed": passed, "first": first}).encode())
'''


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
        imports: trusted statements before the tests.
        names: the candidate's names; found in the tests where empty.
    """
    called = list(names) or names_called(tests, imports)
    asked = json.dumps({"names": called, "imports": imports, "tests": list(tests)}).encode() + b"\n"

    def once() -> Verdict:
        spare = Limits(
            limits.cpu_s + JUDGE_SPARE_S, limits.wall_s + JUDGE_SPARE_S, limits.memory_bytes, limits.processes,
            max(limits.output_bytes, 8 << 20), limits.disk_bytes,
        )  # fmt: skip
        candidate = Candidate(sandbox, source, limits)
        judge = sandbox.start(Program("", _JUDGE), spare)
        try:
            judge.send(asked)
            return _relay(judge, candidate, len(tests), spare.wall_s + 10.0)
        except Unreadable as error:
            return model_failed(SandboxStatus.INVALID_RESULT, len(tests), 0, str(error))
        finally:
            judge.kill()
            candidate.job.kill()

    return asked_again(once, attempts_max)


def _relay(judge: Job, candidate: Candidate, total: int, wait_s: float) -> Verdict:
    for _ in range(CALLS_MAX):
        line = judge.read_line(wait_s)
        if line is None:
            ended = judge.wait()
            return Verdict(0, total, SandboxStatus.INFRA_LOST, Blame.INFRA, f"the judge ended: {ended.status} {ended.reason}")
        said: dict[str, Any] = json.loads(line)
        if "passed" in said:
            return Verdict(said["passed"], total, SandboxStatus.OK, None, said["first"])
        answer = candidate.ask(said["name"], said["args"], said["kwargs"])
        if answer is None:
            return ended_early(candidate.job, total, 0)
        judge.send(json.dumps(answer).encode() + b"\n")
    return model_failed(SandboxStatus.TIMEOUT_CPU, total, 0, f"more than {CALLS_MAX} calls")
