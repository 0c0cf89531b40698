"""What a protocol says about a program, and when it is asked again.

Owns the record and the rule of repetition. Never a value by itself: a verdict without a status that blames the model, or without
tests that ran, is no verdict (P6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.host import host
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Job, blame_of

PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tests passed of how many, or why that cannot be said."""

    passed: int
    total: int
    status: SandboxStatus
    """``ok``: every test was answered, rightly or not."""
    blame: Blame | None
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """False: infrastructure, or nobody knows; then there is no reward."""
        return self.blame in (None, Blame.MODEL)

    @property
    def right(self) -> bool:
        return self.given and self.total > 0 and self.passed == self.total


def ended_early(job: Job, total: int, passed: int) -> Verdict:
    """The verdict on a candidate that stopped answering: how it ended says why."""
    ended: Execution = job.wait()
    status, blame, reason = ended.status, ended.blame, ended.reason
    if status is SandboxStatus.OK:
        status, blame, reason = SandboxStatus.EARLY_EXIT, Blame.MODEL, "it ended before it had answered"
    elif status is SandboxStatus.CANCELLED:
        status, blame = SandboxStatus.INFRA_LOST, Blame.INFRA
    return Verdict(passed, total, status, blame, reason, usage(ended))


def usage(ended: Execution) -> dict[str, Any]:
    """What is kept of an execution."""
    return {
        "cpu_s": round(ended.cpu_s, 3), "wall_s": round(ended.wall_s, 3), "rss_bytes": ended.rss_bytes,
        "backend": ended.backend, "stderr": ended.stderr[-500:].decode("utf-8", "replace"),
    }  # fmt: skip


def model_failed(status: SandboxStatus, total: int, passed: int, reason: str) -> Verdict:
    """The program's own failure."""
    return Verdict(passed, total, status, blame_of(status) or Blame.MODEL, reason[:500])


def asked_again(attempt: Callable[[], Verdict], attempts_max: int) -> Verdict:
    """The first verdict that says something about the program: infrastructure's failures are repeated, unclear ones once."""
    n = unclear = 0
    while True:
        n += 1
        verdict = attempt()
        unclear += verdict.blame is Blame.UNCLEAR
        if verdict.blame is Blame.INFRA and n < attempts_max:
            host().sleep(PAUSE_S * 2 ** (n - 1))
        elif not (verdict.blame is Blame.UNCLEAR and unclear == 1):
            verdict.evidence["attempts"] = n
            return verdict
