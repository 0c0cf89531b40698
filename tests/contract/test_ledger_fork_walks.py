"""What the audit finds of forks, and runs that fork at random."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import sqlalchemy as sa
from forking_support import fill, fork, head, history, train

from ledger_bench import Bench
from rollbook.core.errors import NotReady
from rollbook.core.records import (
    ScheduleKind,
    SubmitOutcome,
)
from rollbook.ledger import schema as t

FORKED = {
    "a copied plan with other items": (
        "forked_plans",
        ["UPDATE plan_item SET reward = 1.0 WHERE lineage = 1 AND step = 99",
         "UPDATE plan SET items_digest = '0' WHERE lineage = 1 AND step = 3"],
    ),
    "a copied plan that is missing": (
        "forked_plans",
        ["DELETE FROM plan_item WHERE lineage = 1 AND step = 4", "DELETE FROM plan WHERE lineage = 1 AND step = 4"],
    ),
    "a sample used twice along the ancestry": (
        "trained_once",
        ["INSERT INTO plan_item SELECT run_id, 1, ordinal, sibling, 4, 90 + pos, payload_digest, reward, valid FROM plan_item "
         "WHERE lineage = 0 AND step = 1"],
    ),
    "an item left out of a copy": ("chain_digest", ["DELETE FROM plan_item WHERE lineage = 1 AND step = 2 AND pos = 3"]),
    "an orphan verdict that no fork gave": ("orphans", ["UPDATE lineage SET verdict = 'within' WHERE lineage = 1"]),
    "an orphan verdict that is lost": ("orphans", ["DELETE FROM verdict WHERE kind = 'orphan_version' AND sibling = 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORKED)
def test_the_audit_finds_what_a_fork_must_not_leave(damaged: Bench, name: str) -> None:
    s = history(damaged)
    fork(s, None)
    assert s.ledger.audit() == []
    check, statements = FORKED[name]
    for statement in statements:
        damaged.execute(statement)
    damaged.crash(s)
    assert check in {v.check for v in s.ledger.audit()}


def test_the_audit_finds_a_dropped_orphan_that_was_planned_after_all(damaged: Bench) -> None:
    s = history(damaged)
    fork(s, 0.0)
    train(s, 1, 2, 3, 4)
    fill(s)
    s.ledger.plan_step(s.learner, 1, 5)
    assert s.ledger.audit() == []
    damaged.execute(sa.update(t.lineage).where(t.lineage.c.lineage == 1).values(verdict="dropped"))
    damaged.crash(s)
    found = {v.check: v.ids for v in s.ledger.audit()}
    assert found["orphans"] == ("8.0", "8.1")


class Walk:
    """A run driven at random by a seed: leases, late submits, plans, crashes of the server, and forks at any step."""

    def __init__(self, bench: Bench, seed: int, schedule: ScheduleKind) -> None:
        self.draw, self.bench, self.fixed = random.Random(seed), bench, schedule is ScheduleKind.FIXED
        lag = {"fixed_lag_versions": 1, "max_lag_versions": 1} if self.fixed else {"max_lag_versions": 2}
        self.s = bench.scene(schedule=schedule, **lag)
        self.held = head(self.s)
        self.in_flight: list = []
        self.forks = 0

    def go(self, n: int) -> None:
        odds = {"feed": 2, "lease": 6, "submit": 8, "plan": 4, "finish": 4, "crash": 1, "fork": 2}
        for action in self.draw.choices(list(odds), list(odds.values()), k=n):
            getattr(self, action)()

    def feed(self) -> None:
        self.s.feed(3)

    def lease(self) -> None:
        reply = self.s.ledger.lease_slots(self.s.incarnation, self.held, self.draw.randint(1, 4))
        self.held = reply.wanted or self.held
        self.in_flight += reply.grants

    def submit(self) -> None:
        for _ in range(min(3, len(self.in_flight))):
            grant = self.in_flight.pop(self.draw.randrange(len(self.in_flight)))
            [outcome] = self.s.submit([grant])
            assert outcome in (SubmitOutcome.ACCEPTED, SubmitOutcome.REFUSED), (grant, outcome)

    def plan(self) -> None:
        point = self.s.ledger.resume_point()
        with suppress(NotReady):
            self.s.ledger.plan_step(self.s.learner, point.lineage, point.last_planned_step + 1)

    def finish(self) -> None:
        point = self.s.ledger.resume_point()
        step = point.head.version + 1
        if step <= point.last_planned_step:
            train(self.s, point.lineage, step)

    def crash(self) -> None:
        self.bench.crash(self.s)

    def fork(self) -> None:
        point = self.s.ledger.resume_point()
        if point.head.version > 0:
            self.forks += 1
            keep = not self.fixed and self.draw.random() < 0.5
            step = max(0, point.head.version - self.draw.randint(1, 3))
            line = fork(self.s, self.draw.choice([0.0, 1.0]), step, point.lineage, keep)
            assert line.number == point.lineage + 1 and self.s.ledger.audit() == []

    def check(self) -> None:
        ledger = self.s.ledger
        point, slots = ledger.resume_point(), ledger.run_status()["slots"]
        assert ledger.audit() == [] and point.lineage == self.forks
        assert slots["issued"] == sum(n for name, n in slots.items() if name != "issued")
        keys = [i.key for step in range(1, point.last_planned_step + 1) for i in ledger.read_plan(point.lineage, step).items]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("schedule", [ScheduleKind.BOUNDED, ScheduleKind.FIXED])
@pytest.mark.parametrize("seed", [1, 4])
def test_a_run_that_forks_at_random_conserves_every_slot_and_stays_clean(sqlite_bench: Bench, seed: int, schedule) -> None:
    walk = Walk(sqlite_bench, seed, schedule)
    walk.go(100)
    walk.check()
    assert walk.forks >= 3
    forks = walk.s.ledger.run_status()["forks"]
    assert sum(f["orphans_kept"] + f["orphans_dropped"] for f in forks) > 0
