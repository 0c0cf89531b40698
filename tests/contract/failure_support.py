"""Reports of failed attempts, and what a ledger makes of them, for the contract tests."""

from __future__ import annotations

import dataclasses

from ledger_support import Scene

from ledger_bench import Bench
from rollbook.core.records import (
    Blame,
    FailureReport,
    LeaseGrant,
    RewardStatus,
    SandboxStatus,
    SubmitOutcome,
)


def report(grant: LeaseGrant, worker: str, **changes: object) -> FailureReport:
    made = FailureReport(
        grant.key, grant.token, worker, RewardStatus.INFRA_ERROR, Blame.INFRA, "no sandbox", SandboxStatus.INFRA_SPAWN, 5, 0.5,
        0.25, '{"attempts": 3}',
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def fail(s: Scene, grants: tuple[LeaseGrant, ...], worker: str = "", **changes: object) -> list[SubmitOutcome]:
    return [r.outcome for r in s.ledger.report_failures([report(g, worker or s.incarnation, **changes) for g in grants])]


def verdicts(bench: Bench) -> dict[str, str]:
    return {f"{o}.{k}": kind for o, k, kind in bench.rows("SELECT ordinal, sibling, kind FROM verdict")}


def breaker(s: Scene) -> str:
    return str(s.ledger.run_status()["breaker"]["state"])
