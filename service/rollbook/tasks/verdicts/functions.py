"""Verdict by calls: inputs go in one at a time, values come back, and the strict comparison stands here.

Owns the protocol. Expected values never enter a sandbox, and a hidden input enters only after the answer to the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.tasks.verdicts.candidate import Candidate
from rollbook.tasks.verdicts.values import Unreadable, decode, equal
from rollbook.tasks.verdicts.verdict import Verdict, asked_again, ended_early, model_failed


@dataclass(frozen=True, slots=True)
class Case:
    """One call and what it must return."""

    args: Sequence[Any]
    expected: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


def judge_functions(
    sandbox: Sandbox, source: str, function: str, cases: Sequence[Case], limits: Limits, *, attempts_max: int = 3,
    numbers: str = "strict", sequences: str = "strict",
) -> Verdict:  # fmt: skip
    """How many cases ``function`` of ``source`` answers rightly; comparison as ``values.equal``."""

    def once() -> Verdict:
        candidate = Candidate(sandbox, source, limits)
        passed, first = 0, ""
        try:
            for case in cases:
                said = candidate.call(function, list(case.args), case.kwargs)
                if said is None:
                    return ended_early(candidate.job, len(cases), passed)
                right = "ok" in said and equal(case.expected, decode(said["ok"]), numbers=numbers, sequences=sequences)
                passed += right
                if not right and not first:
                    first = f"{said['error']}: {said.get('text', '')}" if "error" in said else "a wrong value"
        except Unreadable as error:
            return model_failed(SandboxStatus.INVALID_RESULT, len(cases), passed, str(error))
        finally:
            candidate.job.kill()
        return Verdict(passed, len(cases), SandboxStatus.OK, None, first[:500])

    return asked_again(once, attempts_max)
