"""A Hypothesis machine that drives a ledger and a small model of dictionaries in step; the audit is its invariant.

Rules: feed (also repeated, also from a moved cursor), lease (also repeated after a lost reply), heartbeat, submit (once, twice,
with other content, late), fail, outlive or lose a lease, let time pass, plan, finish, publish and commit (each twice), age a
group past the bound, quarantine, retry, worker restart, server crash and takeover, takeover of learner and feeder with the old
term tried afterwards.
"""

from __future__ import annotations

import time
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import DURABLE, LAG, ORDINALS_MAX, PER_STEP, SIBLINGS, TTL_S, Model, error_of
from ledger_support import STREAM, Scene, group, run_record, sample_for, version

from ledger_bench import Bench, ManualClock
from rollbook.core.errors import Conflict, CursorMoved, Fenced, InvalidRequest, NotReady, ReplayDiverged, RunPaused
from rollbook.core.records import (
    Blame,
    Checkpoint,
    Cursor,
    FailureReport,
    GroupSpec,
    LeaseGrant,
    PlanOutcome,
    RewardStatus,
    Role,
    RoleTerm,
    ScheduleKind,
    SlotKey,
    SubmitOutcome,
)


class LedgerMachine(RuleBasedStateMachine):
    """One example: a run on an empty database that ``take`` gives and ``give_back`` gets again."""

    kind = ScheduleKind.BOUNDED
    late_submit = "salvage"

    @staticmethod
    def take() -> str:
        """URL of an empty, migrated database."""
        raise NotImplementedError

    @staticmethod
    def give_back(url: str) -> None:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.url = self.take()
        self.bench = Bench(self.url, ManualClock())
        self.began, self.waited_s = time.monotonic(), 0.0
        self.record = run_record(
            group_size=SIBLINGS, survivors_min=2, groups_per_step=PER_STEP, max_lag_versions=LAG, fixed_lag_versions=LAG,
            schedule=self.kind, attempts_max=2, lease_ttl_s=TTL_S, late_submit=self.late_submit,
        )  # fmt: skip
        self.s = Scene(self.bench.open(ordinals_per_partition=1000), self.record)
        self.m = Model()
        self.names = self.looks = 1
        self.old_terms: list[RoleTerm] = []
        self.last_append: tuple[Cursor, Cursor, list[GroupSpec]] | None = None
        self.last_lease: tuple[str, str, tuple[LeaseGrant, ...], int] | None = None

    @property
    def now(self) -> float:
        """Time of the model: what was let pass, and on PostgreSQL, whose clock runs, also what really passed."""
        real = time.monotonic() - self.began if self.url.startswith("postgresql") else 0.0
        return self.waited_s + real

    def rows(self, statement: str) -> list[tuple]:
        with self.s.ledger._read() as conn:
            return [tuple(row) for row in conn.exec_driver_sql(statement)]

    def ended(self, key: SlotKey) -> bool:
        return self.rows(f"SELECT 1 FROM verdict WHERE ordinal = {key.ordinal} AND sibling = {key.sibling}") != []

    def new_name(self, role: str) -> str:
        self.names += 1
        return f"{role}-{self.names}"

    # Feeding

    @rule(n=st.integers(1, 3))
    def feed(self, n: int) -> None:
        before = self.s.ledger.cursor(STREAM)
        if before.next_ordinal + n > ORDINALS_MAX:
            return
        groups = [group(before.next_ordinal + i, SIBLINGS) for i in range(n)]
        after = Cursor(STREAM, before.next_ordinal + n, f'{{"at": {before.next_ordinal + n}}}', False)
        assert self.s.ledger.append_groups(self.s.feeder, before, after, groups) == after
        self.last_append = (before, after, groups)

    @precondition(lambda self: self.last_append)
    @rule()
    def feed_again(self) -> None:
        before, after, groups = self.last_append
        stands = self.s.ledger.cursor(STREAM)
        assert self.s.ledger.append_groups(self.s.feeder, before, after, groups) == after
        assert self.s.ledger.cursor(STREAM) == stands
        other = [*groups[:-1], GroupSpec(groups[-1].ordinal, b"\7\0\0\0", "{}", SIBLINGS)]
        assert error_of(lambda: self.s.ledger.append_groups(self.s.feeder, before, after, other)) is CursorMoved

    # Workers

    @rule(n=st.integers(1, 7), older=st.booleans())
    def lease(self, n: int, older: bool) -> None:
        versions = self.s.ledger.versions(0)
        loaded = versions[-2] if older and len(versions) > 1 else versions[-1]
        self._lease(n, loaded.version)

    def _lease(self, n: int, loaded: int) -> tuple[LeaseGrant, ...]:
        request_id, before = self.new_name("request"), self.now
        grants = self.s.lease(n, loaded=version(loaded), request_id=request_id)
        for g in grants:
            self.m.granted(g, self.s.incarnation, before)
        if grants:
            self.last_lease = (self.s.incarnation, request_id, grants, loaded)
        return grants

    @precondition(lambda self: self.last_lease)
    @rule()
    def lease_again_after_a_lost_reply(self) -> None:
        worker, request_id, grants, loaded = self.last_lease
        assert self.s.lease(len(grants), worker, version(loaded), request_id) == grants

    @precondition(lambda self: self.m.grants)
    @rule(data=st.data(), worker_of=st.booleans())
    def heartbeat(self, data: st.DataObject, worker_of: bool) -> None:
        picked = data.draw(st.lists(st.sampled_from(self.m.grants), min_size=1, max_size=5, unique_by=lambda p: p[0].key))
        self._beat(picked[0][1] if worker_of else self.s.incarnation, picked)

    def _beat(self, worker: str, picked: list[tuple[LeaseGrant, str]]) -> None:
        before = self.now
        lost = set(self.s.ledger.heartbeat(worker, None, [(g.key, g.token) for g, _ in picked]).lost)
        for g, owner in picked:
            filled = g.key in self.m.stored
            if worker == owner and self.m.holds(g, worker, self.now) and not filled and not self.ended(g.key):
                assert g.key not in lost
                self.m.held[g.key] = (worker, g.token, before + TTL_S)
            elif not filled and (g.token < self.m.tokens[g.key] or worker != owner):
                assert g.key in lost
            elif g.key not in lost and not filled and g.key in self.m.held:
                self.m.held[g.key] = (worker, g.token, before + TTL_S)

    @rule(n=st.integers(1, 3))
    def outlive_the_ttl_by_beating(self, n: int) -> None:
        held = [(g, self.s.incarnation) for g in self._lease(n, self.s.head().version)]
        for _ in range(2 if held else 0):
            self._let_pass(2000.0)
            self._beat(self.s.incarnation, held)
        self.restart_the_worker(False)
        self._lease(7, self.s.head().version)

    @rule()
    def come_back_after_the_ttl(self) -> None:
        """Every lease runs out and is given to another worker; then those who held them report, beat and submit."""
        late = [(g, w) for g, w in self.m.grants if g.key not in self.m.stored and g.token == self.m.tokens[g.key]][-4:]
        self._let_pass(3100.0)
        self.restart_the_worker(False)
        self._lease(7, self.s.head().version)
        for g, worker in late:
            self._fail(g, worker)
            self._beat(worker, [(g, worker)])
            self._submit(g, worker, 1.0)

    @precondition(lambda self: self.m.grants)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, None]))
    def submit(self, data: st.DataObject, reward: float | None) -> None:
        g, worker = data.draw(st.sampled_from(self.m.grants))
        self._submit(g, worker, reward)

    def _submit(self, g: LeaseGrant, worker: str, reward: float | None) -> None:
        status = RewardStatus.GIVEN if reward is not None else RewardStatus.NO_VERDICT
        item = sample_for(g, worker, reward=reward, reward_status=status)
        ended, strict = self.ended(g.key), self.late_submit == "strict"
        first = self.s.ledger.submit_samples([item])[0].outcome
        bounded = self.kind is ScheduleKind.BOUNDED
        assert first in self.m.expected(g, worker, reward, self.now, ended=ended, strict=strict, bounded=bounded), first
        if first is SubmitOutcome.ACCEPTED:
            self.m.stored[g.key] = (g.version, reward)
            self.m.held.pop(g.key, None)
        elif first is SubmitOutcome.REFUSED and g.token == self.m.tokens[g.key]:
            self.m.held.pop(g.key, None)
        second = self.s.ledger.submit_samples([item])[0].outcome
        assert second is (SubmitOutcome.REPLAYED if first in DURABLE else first)

    @precondition(lambda self: self.m.grants)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self._fail(*data.draw(st.sampled_from(self.m.grants)))

    def _fail(self, g: LeaseGrant, worker: str) -> None:
        report = FailureReport(g.key, g.token, worker, RewardStatus.INFRA_ERROR, Blame.INFRA, "machine")
        certainly = self.m.holds(g, worker, self.now) and g.key not in self.m.stored and not self.ended(g.key)
        outcome = self.s.ledger.report_failures([report])[0].outcome
        if outcome is SubmitOutcome.ACCEPTED:
            assert g.key not in self.m.stored
            assert g.token == self.m.tokens[g.key]
            self.m.held.pop(g.key, None)
            assert self.s.ledger.report_failures([report])[0].outcome is SubmitOutcome.REPLAYED
        assert not certainly or outcome is SubmitOutcome.ACCEPTED

    @rule(gives_back=st.booleans())
    def restart_the_worker(self, gives_back: bool) -> None:
        died, self.s.incarnation = self.s.incarnation, self.s.worker(self.new_name("worker"))
        if gives_back:
            for g, worker in [p for p in self.m.grants if p[1] == died and self.m.holds(p[0], died, self.now)]:
                self._fail(g, worker)

    # Time and servers

    @rule(seconds=st.sampled_from([500.0, 2000.0, 3100.0]))
    def wait(self, seconds: float) -> None:
        self._let_pass(seconds)

    def _let_pass(self, seconds: float) -> None:
        self.bench.let_time_pass(seconds)
        self.waited_s += seconds

    @rule(down_s=st.sampled_from([0.0, 1000.0, 10_000.0]))
    def crash_the_server(self, down_s: float) -> None:
        dead = self.s.ledger
        dead.close(release=False)
        self._let_pass(down_s)
        self._succeed(dead)

    @rule()
    def overtake_the_server(self) -> None:
        if self.url.startswith("sqlite"):
            return  # the lock on the file keeps a second server out; a test of its own shows that
        zombie = self.s.ledger
        self._succeed(zombie)
        assert error_of(lambda: zombie.register_worker("zombie", "h", "e")) is not None
        assert error_of(zombie.run_status) is not None
        zombie.close()

    def _succeed(self, dead: Any) -> None:
        self.s.ledger = self.bench.open(supersede=dead._holder, ordinals_per_partition=1000)
        assert self.s.ledger.open_run(self.record).config_digest == self.record.config_digest

    @rule(role=st.sampled_from([Role.LEARNER, Role.FEEDER]))
    def overtake_a_role(self, role: Role) -> None:
        old = self.s.learner if role is Role.LEARNER else self.s.feeder
        new = self.s.ledger.acquire_role(role, self.new_name(role.value), 60.0, supersede=old.holder)
        assert new.epoch > old.epoch
        setattr(self.s, role.value, new)
        self.old_terms.append(old)
        if role is Role.LEARNER and self.m.open_step:
            assert self.s.plan(self.m.step) == self.m.plans[self.m.step], "the successor trains what was planned"

    @precondition(lambda self: self.old_terms)
    @rule(data=st.data())
    def an_overtaken_holder_tries(self, data: st.DataObject) -> None:
        term = data.draw(st.sampled_from(self.old_terms))
        ledger, step = self.s.ledger, self.m.step + 1
        calls = [lambda: ledger.renew_role(term)]
        if term.role is Role.LEARNER:
            calls += [
                lambda: ledger.plan_step(term, 0, step),
                lambda: ledger.finish_plan(term, 0, max(1, self.m.step), PlanOutcome.SKIPPED, "late", "{}"),
                lambda: ledger.publish_version(term, version(step)),
                lambda: ledger.commit_checkpoint(term, Checkpoint(0, 0, "d", "m", ledger.resume_point().chain_digests[0])),
            ]
        else:
            before = ledger.cursor(STREAM)
            after = Cursor(STREAM, before.next_ordinal + 1, "{}", False)
            calls += [lambda: ledger.append_groups(term, before, after, [group(before.next_ordinal, SIBLINGS)])]
        assert {error_of(call) for call in calls} == {Fenced}
        ledger.release_role(term)

    # The learner

    @precondition(lambda self: not self.m.open_step)
    @rule()
    def plan(self) -> None:
        try:
            plan = self.s.plan(self.m.step + 1)
        except (NotReady, RunPaused):
            return
        self.m.step, self.m.open_step, self.m.plans[plan.step] = plan.step, True, plan
        for item in plan.items:
            assert item.key not in self.m.planned, "trained once"
            v, reward = self.m.stored[item.key]
            assert reward == item.reward
            assert plan.base_version - v <= LAG, "no token beyond the bound"
            self.m.planned[item.key] = plan.step
        assert self.s.plan(plan.step) == plan
        for key, (v, _) in self.m.stored.items():
            assert key in self.m.planned or plan.base_version - v <= LAG or self.ended(key), "what is too old has its verdict"

    @precondition(lambda self: self.m.open_step)
    @rule(checkpoint=st.booleans(), times=st.integers(1, 2))
    def finish(self, checkpoint: bool, times: int) -> None:
        for _ in range(times):
            self.s.finish(self.m.step)
        self.m.open_step = False
        if checkpoint:
            made = [self.s.checkpoint(self.m.step) for _ in range(times)]
            self.m.checkpoints[self.m.step] = made[0]
            assert made == [made[0]] * times

    @precondition(lambda self: self.m.step)
    @rule(data=st.data())
    def the_past_is_told_again(self, data: st.DataObject) -> None:
        ledger, learner = self.s.ledger, self.s.learner
        step = data.draw(st.integers(1, self.m.step))
        plan = self.s.plan(step)
        assert (plan.items, plan.chain_digest) == (self.m.plans[step].items, self.m.plans[step].chain_digest)
        if step < self.m.step or not self.m.open_step:
            ledger.finish_plan(learner, 0, step, PlanOutcome.SKIPPED, "another outcome", "{}")
            assert ledger.read_plan(0, step).outcome is PlanOutcome.TRAINED, "the first outcome stands"
            assert ledger.publish_version(learner, version(step)) == version(step)
            assert error_of(lambda: ledger.publish_version(learner, version(step, content="other"))) is ReplayDiverged
        if made := self.m.checkpoints.get(step):
            assert ledger.commit_checkpoint(learner, made) == made
            assert error_of(lambda: self.s.checkpoint(step, content="other")) is Conflict

    @rule()
    def run_ahead_of_one_group(self) -> None:
        """Everything but one unfinished group is trained, twice: in the bounded schedule that group is dropped and refilled."""
        for _ in range(2):
            self.feed(2)
            self._lease(20, self.s.head().version)
            waiting = [p for p in self.m.grants if p[0].key not in self.m.stored and p[0].token == self.m.tokens[p[0].key]]
            left_out = min((g.key.ordinal for g, _ in waiting), default=0)
            for g, worker in waiting:
                if (g.key.ordinal, g.key.sibling) != (left_out, 1):
                    self._submit(g, worker, 1.0)
            if not self.m.open_step:
                self.plan()
            if self.m.open_step:
                self.finish(False, 1)

    # The operator

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if issued := self.s.ledger.cursor(STREAM).next_ordinal:
            ordinal = data.draw(st.integers(0, issued - 1))
            refused = error_of(lambda: self.s.ledger.quarantine_group(ordinal, "machine"))
            assert refused is (InvalidRequest if ordinal in {k.ordinal for k in self.m.planned} else None)

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        if issued := self.s.ledger.cursor(STREAM).next_ordinal:
            self.s.ledger.retry_group(data.draw(st.integers(0, issued - 1)), "machine")

    # What always holds

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        if not hasattr(self, "m"):
            return
        stored = {SlotKey(o, k): (v, r) for o, k, v, r in self.rows("SELECT ordinal, sibling, version_min, reward FROM sample")}
        assert stored == self.m.stored
        issued = self.rows("SELECT count(*) FROM prompt_group")[0][0]
        assert issued >= self.m.issued and issued == self.s.ledger.cursor(STREAM).next_ordinal, "groups never vanish"
        self.m.issued = issued
        self.looks += 1
        if self.looks % 2:
            return
        slots = self.s.ledger.run_status()["slots"]
        assert slots["planned"] + slots["applied"] == len(self.m.planned)
        parts = ("pending", "leased", "submitted", "planned", "applied", "verdicts")
        assert slots["issued"] == sum(slots[name] for name in parts)

    @invariant()
    def capacity_counts_are_those_of_the_definition(self) -> None:
        """The watermark arithmetic gives what R3 says in words."""
        if not hasattr(self, "m"):
            return
        ledger = self.s.ledger
        touched = {o for (o,) in self.rows("SELECT ordinal FROM lease UNION SELECT ordinal FROM sample")}
        dead = {o for (o,) in self.rows(f"SELECT ordinal FROM verdict GROUP BY ordinal HAVING count(*) = {SIBLINGS}")}
        opened = touched - dead - {k.ordinal for k in self.m.planned}
        with ledger._read() as conn:
            assert ledger._opened_unplanned(conn, 0, ledger._frontier(conn)) == len(opened)

    @invariant()
    def every_stale_group_has_one_refill(self) -> None:
        if not hasattr(self, "m"):
            return
        stale = self.rows("SELECT DISTINCT ordinal FROM verdict WHERE kind = 'dropped_stale' ORDER BY ordinal")
        refilled = [o for (o,) in self.rows("SELECT refills FROM prompt_group WHERE refills IS NOT NULL")]
        assert len(refilled) == len(set(refilled)) and {o for (o,) in stale} <= set(refilled)

    @invariant()
    def the_audit_is_clean(self) -> None:
        """In turns with the counts of the run's status, which are as dear; the end of an example audits once more."""
        if hasattr(self, "m") and self.looks % 2:
            assert self.s.ledger.audit() == []

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.finish()
            self.give_back(self.url)
