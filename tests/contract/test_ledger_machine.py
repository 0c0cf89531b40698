"""A Hypothesis machine drives the ledger and a small model of dictionaries in step; the audit is its invariant.

Rules: feed, lease, submit (once, twice, with other content, late), fail, let time pass, crash, plan, finish, checkpoint,
quarantine. SQLite only: the same statements run on PostgreSQL in the other suites.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from ledger_support import STREAM, Scene, sample_for

from conftest import Bench, ManualClock
from rollbook.core.errors import InvalidRequest, NotReady, RunPaused
from rollbook.core.records import Blame, FailureReport, LeaseGrant, RewardStatus, ScheduleKind, SlotKey, SubmitOutcome

LAG = 1


class LedgerMachine(RuleBasedStateMachine):
    """What the model knows: acknowledged samples, planned slots, the highest token of each slot, the step."""

    template: Path
    kind = ScheduleKind.BOUNDED

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollbook-machine-"))
        shutil.copy(self.template, self.folder / "ledger.sqlite")
        self.bench = Bench(f"sqlite:///{self.folder}/ledger.sqlite", ManualClock())
        self.s: Scene = self.bench.scene(
            group_size=3,
            survivors_min=2,
            groups_per_step=2,
            max_lag_versions=LAG,
            fixed_lag_versions=LAG,
            schedule=self.kind,
            attempts_max=2,
            lease_ttl_s=30.0,
        )
        self.grants: list[LeaseGrant] = []
        self.acknowledged: dict[SlotKey, float] = {}
        self.tokens: dict[SlotKey, int] = {}
        self.planned: dict[SlotKey, int] = {}
        self.step = 0
        self.open_step = False

    @rule(n=st.integers(1, 3))
    def feed(self, n: int) -> None:
        before = self.s.ledger.cursor(STREAM)
        after = self.s.feed(n)
        assert after.next_ordinal == before.next_ordinal + n

    @rule(n=st.integers(1, 7), older=st.booleans())
    def lease(self, n: int, older: bool) -> None:
        versions = self.s.ledger.versions(0)
        loaded = versions[-2] if older and len(versions) > 1 else versions[-1]
        for g in self.s.lease(n, loaded=loaded):
            assert g.token > self.tokens.get(g.key, 0), "tokens of a slot grow"
            assert g.key not in self.acknowledged, "a filled slot is never leased"
            self.tokens[g.key] = g.token
            self.grants.append(g)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, None]))
    def submit(self, data: st.DataObject, reward: float | None) -> None:
        g = data.draw(st.sampled_from(self.grants))
        status = RewardStatus.GIVEN if reward is not None else RewardStatus.NO_VERDICT
        item = sample_for(g, self.s.incarnation, reward=reward, reward_status=status)
        first, second = (self.s.ledger.submit_samples([item])[0].outcome for _ in range(2))
        if first in (SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED):
            assert second is SubmitOutcome.REPLAYED
            assert self.acknowledged.setdefault(g.key, reward) == reward
        else:
            assert second is first
            assert first in (SubmitOutcome.CONFLICT, SubmitOutcome.REFUSED)
        if g.key in self.acknowledged and self.acknowledged[g.key] != reward:
            assert first is SubmitOutcome.CONFLICT

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        g = data.draw(st.sampled_from(self.grants))
        report = FailureReport(g.key, g.token, self.s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "machine")
        outcome = self.s.ledger.report_failures([report])[0].outcome
        if outcome is SubmitOutcome.ACCEPTED:
            assert g.key not in self.acknowledged
            assert g.token == self.tokens[g.key]

    @rule(seconds=st.sampled_from([5.0, 20.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.bench.let_time_pass(seconds)

    @rule(down_s=st.sampled_from([0.0, 10.0, 100.0]))
    def crash(self, down_s: float) -> None:
        self.bench.crash(self.s, down_s)

    @precondition(lambda self: not self.open_step)
    @rule()
    def plan(self) -> None:
        try:
            plan = self.s.plan(self.step + 1)
        except (NotReady, RunPaused):
            return
        self.step, self.open_step = plan.step, True
        for item in plan.items:
            assert item.key not in self.planned, "trained once"
            assert self.acknowledged[item.key] == item.reward
            self.planned[item.key] = plan.step
        assert self.s.plan(self.step) == plan

    @precondition(lambda self: self.open_step)
    @rule(checkpoint=st.booleans())
    def finish(self, checkpoint: bool) -> None:
        self.s.finish(self.step)
        self.open_step = False
        if checkpoint:
            self.s.checkpoint(self.step)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        issued = self.s.ledger.cursor(STREAM).next_ordinal
        if issued:
            ordinal = data.draw(st.integers(0, issued - 1))
            try:
                self.s.ledger.quarantine_group(ordinal, "machine")
            except InvalidRequest:
                assert ordinal in {k.ordinal for k in self.planned}

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        if not hasattr(self, "s"):
            return
        stored = {SlotKey(o, k): r for o, k, r in self.bench.rows("SELECT ordinal, sibling, reward FROM sample")}
        assert stored == self.acknowledged
        slots = self.s.ledger.run_status()["slots"]
        assert slots["planned"] + slots["applied"] == len(self.planned)
        parts = ("pending", "leased", "submitted", "planned", "applied", "verdicts")
        assert slots["issued"] == sum(slots[name] for name in parts)

    @invariant()
    def capacity_counts_are_those_of_the_definition(self) -> None:
        """The watermark arithmetic gives what R3 says in words."""
        if not hasattr(self, "s"):
            return
        ledger = self.s.ledger
        touched = {o for (o,) in self.bench.rows("SELECT ordinal FROM lease UNION SELECT ordinal FROM sample")}
        dead = {o for (o,) in self.bench.rows("SELECT ordinal FROM verdict GROUP BY ordinal HAVING count(*) = 3")}
        opened = touched - dead - {k.ordinal for k in self.planned}
        with ledger._read() as conn:
            assert ledger._opened_unplanned(conn, 0, ledger._frontier(conn)) == len(opened)

    @invariant()
    def the_audit_is_clean(self) -> None:
        if hasattr(self, "s"):
            assert self.s.ledger.audit() == []

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.finish()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("schedule", list(ScheduleKind))
def test_the_ledger_behaves_like_its_model(sqlite_template: Path, schedule: ScheduleKind) -> None:
    machine = type("Machine", (LedgerMachine,), {"template": sqlite_template, "kind": schedule})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
