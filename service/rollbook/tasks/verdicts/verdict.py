"""What a protocol says about a program, and when it is asked again.

Owns the record and the rule of repetition. Never a value by itself: a verdict that blames anybody but the model is no verdict
(P6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Limits, blame_of
from rollbook.sandbox.retry import asked_again

END_S = 60.0
"""Longest beyond its wall time that a job's end is waited for, set-up included: its owner ends it before that."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tests passed of how many, or why that cannot be said."""

    passed: int
    """Of a program that failed half-way: those it passed until then."""
    total: int
    status: SandboxStatus
    """``ok``: every test was answered, rightly or not; ``runtime_error``: it raised in the first test it failed."""
    blame: Blame | None
    """None exactly where every test passed."""
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Usage of the candidate's sandbox, what bounded it, and the attempts made."""

    @property
    def given(self) -> bool:
        """False: infrastructure failed, or nobody can tell; then there is no reward."""
        return self.blame in (None, Blame.MODEL)

    @property
    def right(self) -> bool:
        return self.blame is None and self.status is SandboxStatus.OK and 0 < self.passed == self.total


def counted(passed: int, total: int, reason: str, *, raised: bool) -> Verdict:
    """The verdict on a program that was asked everything."""
    if passed == total:
        return Verdict(passed, total, SandboxStatus.OK, None)
    status = SandboxStatus.RUNTIME_ERROR if raised else SandboxStatus.OK
    return Verdict(passed, total, status, Blame.MODEL, reason[:500])


def model_failed(status: SandboxStatus, passed: int, total: int, reason: str) -> Verdict:
    """The program's own failure."""
    return Verdict(passed, total, status, Blame.MODEL, reason[:500])


def no_more_answers(ended: Execution, passed: int, total: int) -> Verdict:
    """The verdict on a candidate that stopped answering: how it ended says why."""
    if ended.status is SandboxStatus.OK:
        return model_failed(SandboxStatus.EARLY_EXIT, passed, total, "it ended before it had answered")
    if ended.status is SandboxStatus.CANCELLED:
        return Verdict(passed, total, SandboxStatus.INFRA_LOST, Blame.INFRA, "its sandbox was ended from outside")
    return Verdict(passed, total, ended.status, blame_of(ended.status, ended.cpu_s, ended.wall_s), ended.reason[:500])


def usage(ended: Execution) -> dict[str, Any]:
    """What is kept of an execution."""
    return {
        "cpu_s": round(ended.cpu_s, 3), "wall_s": round(ended.wall_s, 3), "rss_bytes": ended.rss_bytes,
        "backend": ended.backend, "enforced": list(ended.enforced), "stderr": ended.stderr[-500:].decode("utf-8", "replace"),
    }  # fmt: skip


def line_wait_s(limits: Limits) -> float:
    """Longest wait for a line: a job's end, for whatever reason, comes before."""
    return limits.wall_s + END_S


def settled(attempt: Callable[[], Verdict], attempts_max: int) -> Verdict:
    """The verdict that stands after failures that were not the program's were tried again."""
    verdict, n = asked_again(attempt, attempts_max)
    verdict.evidence["attempts"] = n
    return verdict
