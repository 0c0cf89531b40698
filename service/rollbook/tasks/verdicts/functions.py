"""Verdict by calls: inputs go in one at a time, values come back, and the strict comparison stands here.

Owns the protocol. Expected values never enter a sandbox, and an input enters only after the answer to the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.errors import TaskError
from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.tasks.verdicts.candidate import Candidate
from rollbook.tasks.verdicts.plain import Unplain
from rollbook.tasks.verdicts.values import Unreadable, encode, is_plain, same
from rollbook.tasks.verdicts.verdict import Verdict, counted, model_failed, no_more_answers, settled


@dataclass(frozen=True, slots=True)
class Case:
    """One call and what it must return: plain values."""

    args: Sequence[Any]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def judge_functions(
    sandbox: Sandbox, source: str, function: str, cases: Sequence[Case], limits: Limits, *, attempts_max: int = 3,
    numbers: str = "strict", sequences: str = "strict",
) -> Verdict:  # fmt: skip
    """How many cases ``function`` of ``source`` answers rightly; ``numbers`` and ``sequences`` as ``values.same`` has them.

    Raises: TaskError (no cases, or one that holds something that is no plain value).
    """
    try:
        coded = [(encode(list(case.args)), encode(dict(case.kwargs)), encode(case.expected)) for case in cases]
    except Unplain as error:
        raise TaskError(f"a case of {function}: {error}") from None
    if not coded or not all(is_plain(list(case)) for case in coded):
        raise TaskError(f"{function} has no cases, or one that holds something that is no plain value")

    def once() -> Verdict:
        candidate = Candidate(sandbox, source, limits)
        passed, first, raised = 0, "", False
        try:
            for args, kwargs, expected in coded:
                said = candidate.ask(function, args, kwargs)
                if said is None:
                    return candidate.close(no_more_answers(candidate.job.wait(), passed, len(coded)))
                if "ok" in said and not is_plain(said["ok"]):
                    raise Unreadable("its answer holds an object or an iterator, which is no plain value")
                if "ok" in said and same(expected, said["ok"], numbers=numbers, sequences=sequences):
                    passed += 1
                elif not first:
                    raised = "error" in said
                    first = f"{said['error']}: {said['text']}" if raised else f"a wrong value for {args!r:.200}"
        except Unreadable as error:
            return candidate.close(model_failed(SandboxStatus.INVALID_RESULT, passed, len(coded), str(error)))
        finally:
            candidate.job.kill()
        return candidate.close(counted(passed, len(coded), first, raised=raised))

    return settled(once, attempts_max)
