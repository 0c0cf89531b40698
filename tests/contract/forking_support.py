"""Runs that fork, for the contract tests."""

from __future__ import annotations

import json

from ledger_support import Scene, version

from ledger_bench import Bench
from rollbook.core.records import (
    Lineage,
    PlanOutcome,
    SlotKey,
    SubmitOutcome,
)


def history(bench: Bench, **rules: object) -> Scene:
    """Three steps trained, a checkpoint at 1, the fourth step planned; two samples of version 3 wait, one slot is leased.

    Groups are of two, steps of two groups: ordinals 0 to 7 are planned, 8 is sampled, 9.0 is leased.
    """
    s = bench.scene(max_lag_versions=2, **rules)
    s.feed(8)
    s.fill(4)
    s.checkpoint(0)
    s.train(1)
    s.checkpoint(1)
    for step in (2, 3):
        s.fill(4)
        s.train(step)
    s.fill(4)
    s.plan(4)
    s.feed(4)
    s.fill(2)
    s.lease(1)
    return s


def fork(s: Scene, difference: float | None = 0.0, fork_step: int = 1, parent: int = 0, keep: bool = False) -> Lineage:
    return s.ledger.fork_lineage(s.learner, parent, fork_step, difference, 1e-4, keep)


def train(s: Scene, lineage: int, *steps: int) -> None:
    """Plan where needed, finish and publish in a lineage."""
    for step in steps:
        s.ledger.plan_step(s.learner, lineage, step)
        s.ledger.finish_plan(s.learner, lineage, step, PlanOutcome.TRAINED, "", json.dumps({"loss": 0.25}))
        s.ledger.publish_version(s.learner, version(step, lineage))


def head(s: Scene):
    return s.ledger.versions(s.ledger.resume_point().lineage)[-1]


def fill(s: Scene, n: int = 100) -> list[SlotKey]:
    grants = s.lease(n, loaded=head(s))
    assert set(s.submit(grants)) <= {SubmitOutcome.ACCEPTED}
    return [g.key for g in grants]
