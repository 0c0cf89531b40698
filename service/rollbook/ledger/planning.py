"""What a step trains on, decided and stored before it is trained.

Owns ``plan_step``, ``read_plan``, ``payloads``. Never re-opens a plan: a stored one is returned as it is. Upholds P3 (the key of
``plan_item``; steps gapless), P5 (head lag is checked here, inside the planning transaction: this is the guarantee), R4 (oldest
complete groups first, never by order of completion), R5 (stale groups are closed and refilled in the same transaction) and R14.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import DigestMismatch, InvalidRequest, NotFound, NotReady, RunPaused, UnknownSlot
from rollbook.core.idempotency import chain_digest, genesis_digest, items_digest, payload_digest
from rollbook.core.records import (
    FinishReason,
    Plan,
    PlanItem,
    PlanOutcome,
    RewardStatus,
    Role,
    RoleTerm,
    SampleData,
    SandboxStatus,
    SlotKey,
    Submission,
    Trajectory,
    VerdictKind,
)
from rollbook.core.staleness import base_version, fixed_ordinals, head_lag, oldest_effective
from rollbook.ledger import schema as t
from rollbook.ledger.base import again_on_conflict, pairs, unavailable_when_closed
from rollbook.ledger.breaker import BreakerState
from rollbook.ledger.submitting import Submitting, orphan_reason, unpack_versions
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

SCAN_GROUPS = 1024
"""Groups looked at together while a step is chosen."""
PAYLOAD_ROWS = 64
"""Samples read together while a plan is streamed."""


@dataclass(slots=True)
class _Group:
    """State of one live group, from SQL."""

    ordinal: int
    n_siblings: int
    verdicts: int
    samples: int
    version_min: int
    """Oldest version of its samples, as ``staleness.effective_version`` counts it; so is the next one."""
    leased_version_min: int | None
    newest_us: int
    orphan: str = ""
    """Why the group cannot be trained after a fork; empty when it can."""

    @property
    def complete(self) -> bool:
        return self.verdicts + self.samples == self.n_siblings


class Planning(Submitting):
    """Verbs that decide what is trained, and hand it out."""

    def plan_step(self, term: RoleTerm, lineage: int, step: int, wait_s: float = 0.0) -> Plan:
        """The plan of ``step``: the stored one, or a new one when enough groups are ready.

        Transaction: stale groups' verdicts and refills, plan, items, chain digest. Idempotent: by (lineage, step).
        Raises: NotReady (after ``wait_s``), RunPaused (a slot cannot be filled, or the tasks are used up), InvalidRequest (a
        step beyond the next), Fenced.
        """

        def attempt() -> Plan | RunPaused | str:
            return self._write(lambda txn: self._plan(txn, term, lineage, step))

        result = self._await("plan", wait_s, attempt, lambda r: not isinstance(r, str))
        if isinstance(result, Plan):
            return result
        if isinstance(result, RunPaused):
            raise result  # after COMMIT: expiries found on the way are kept
        unavailable_when_closed(self._bell)
        raise NotReady(f"step {step}: {result}")

    def _plan(self, txn: Txn, term: RoleTerm, lineage: int, step: int) -> Plan | RunPaused | str:
        self._check_term(txn, term, Role.LEARNER)
        self._plan_due_at = 0
        if (stored := self._stored_plan(txn.conn, lineage, step)) is not None:
            self._refuse_unreplayable(step)
            return stored
        last = self._last_planned(txn.conn, lineage)
        if step != last + 1:
            raise InvalidRequest(f"step {step} cannot be planned: the last planned step is {last}, steps are gapless")
        if lineage != self._newest_lineage():
            raise InvalidRequest(f"lineage {lineage} is closed; new steps belong to lineage {self._newest_lineage()}")
        if self.rules.steps > 0 and step > self.rules.steps:
            raise InvalidRequest(f"step {step} is beyond run.steps = {self.rules.steps}")
        self._expire(txn)
        breaker = self._breaker(txn.conn)
        if breaker.is_open and self._can_probe(txn):
            return self._wait_for_breaker(txn, step, breaker)
        chosen = self._choose_fixed(txn, step) if self._is_fixed else self._choose_bounded(txn, step)
        if isinstance(chosen, list):
            if breaker.is_open:  # nothing can be sampled before this step is trained, so no probe would ever close it
                self._close_breaker(txn, breaker, unprobed=True)
            return self._write_plan(txn, term, lineage, step, chosen)
        return self._wait_for_breaker(txn, step, breaker) if breaker.is_open and isinstance(chosen, str) else chosen

    def _wait_for_breaker(self, txn: Txn, step: int, breaker: BreakerState) -> RunPaused | str:
        """Why the step is not planned yet, or after ``breaker_pause_s`` the pause of the run.

        A run that was started again has that time from the start of its learner: probes need some to show what was repaired.
        """
        why, learners = self._why_broken(txn, breaker), t.event.c.detail_json.contains('"role": "learner"')
        began = self._newest_events(txn.conn, ("role_acquired",), 1, learners)
        if txn.now_us - max([breaker.since_us, *(row.at_us for row in began)]) > self.rules.breaker_pause_s * 1e6:
            return RunPaused(f"step {step}: {why}; repair what failed and start the run again")
        return why

    def _write_plan(self, txn: Txn, term: RoleTerm, lineage: int, step: int, ordinals: Sequence[int]) -> Plan:
        run_id, s = self.run.run_id, t.sample.c
        rows = txn.conn.execute(
            sa.select(s.ordinal, s.sibling, s.payload_digest, s.reward)
            .where(s.run_id == run_id, s.ordinal.in_(ordinals), ~_judged(s))
            .order_by(s.ordinal, s.sibling)
        ).all()
        items = tuple(
            PlanItem(pos, SlotKey(r.ordinal, r.sibling), r.payload_digest, r.reward, r.reward is not None)
            for pos, r in enumerate(rows)
        )
        content = items_digest(items)
        chain = chain_digest(self._chain_at(txn.conn, lineage, step - 1), step, content)
        revision = self.run.revision
        txn.conn.execute(
            sa.insert(t.plan).values(
                run_id=run_id, lineage=lineage, step=step, base_version=base_version(step), revision=revision,
                n_groups=len(ordinals), n_items=len(items), items_digest=content, chain_digest=chain, epoch=term.epoch,
                planned_at_us=txn.now_us,
            )  # fmt: skip
        )
        failpoint("ledger.plan.before_items")
        self._database.insert_rows(
            txn.conn,
            t.plan_item,
            [
                {"run_id": run_id, "lineage": lineage, "ordinal": i.key.ordinal, "sibling": i.key.sibling, "step": step,
                 "pos": i.pos, "payload_digest": i.payload_digest, "reward": i.reward, "valid": i.valid}
                for i in items
            ],
        )  # fmt: skip
        self._event(txn, "step_planned", lineage=lineage, step=step, n_groups=len(ordinals), n_items=len(items))
        self._raise_watermark(txn)
        txn.rings |= {"lease", "head"} if 0 < self.rules.steps <= step else {"lease"}
        failpoint("ledger.plan.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.plan.after_commit"))
        return Plan(lineage, step, base_version(step), revision, items, content, chain)

    def _chain_at(self, conn: sa.Connection, lineage: int, step: int) -> str:
        """Chain digest after ``step`` along the ancestry; the run's genesis for step 0."""
        if step == 0:
            return genesis_digest(self.run.run_id, self.rules.config_seed)
        c = t.plan.c
        where = (c.run_id == self.run.run_id, self._along(c.lineage, c.step, lineage), c.step == step)
        found = conn.execute(sa.select(c.chain_digest).where(*where).order_by(c.lineage.desc()).limit(1)).scalar_one_or_none()
        if found is None:
            raise NotFound(f"lineage {lineage} has no plan of step {step}")
        return str(found)

    def _choose_bounded(self, txn: Txn, step: int) -> list[int] | RunPaused | str:
        """Ordinals of the step, oldest complete groups first; or why there is no plan yet. Closes stale groups on the way."""
        rules, needed = self.rules, self.rules.groups_per_step
        ready: list[_Group] = []
        waiting: list[_Group] = []
        n_complete = 0
        for group in self._live_groups(txn.conn):
            if group.orphan:
                self._drop_orphan(txn, group.ordinal, group.orphan)
            elif group.samples and head_lag(step, group.version_min) > rules.max_lag_versions:
                self._drop_stale(txn, group, step)
            elif group.complete:
                n_complete += 1
                if len(ready) < needed:
                    ready.append(group)
            else:
                waiting.append(group)
        if len(ready) < needed:
            self._plan_due_at = self._n_touched + needed - n_complete
            return self._used_up(txn.conn, step) or f"{n_complete} of {needed} groups are complete"
        if rules.straggler == "wait" and (held := self._stragglers(waiting, step)):
            since_us = max(g.newest_us for g in ready)
            left_s = rules.straggler_wait_s - (txn.now_us - since_us) / 1e6
            if left_s > 0:
                return (
                    f"group {held[0].ordinal} would be too stale at step {step + 1}; waiting for it at most {left_s:.1f} s more"
                )
        return [g.ordinal for g in ready]

    def _used_up(self, conn: sa.Connection, step: int) -> RunPaused | None:
        """The pause of a step that can never be planned: every stream has ended and too few groups are left."""
        ended = conn.execute(sa.select(t.cursor.c.exhausted).where(t.cursor.c.run_id == self.run.run_id)).scalars().all()
        if not ended or not all(ended):
            return None
        last = SlotKey(self._next_ordinal(conn, self.run.run_id) - 1, 0)
        left, needed = self._opened_unplanned(conn, self._newest_lineage(), last), self.rules.groups_per_step
        if left >= needed:
            return None
        return RunPaused(
            f"step {step} needs {needed} groups, but every task has been issued and only {left} groups are left (others "
            "failed or were quarantined). Raise task.epochs or lower run.steps, and start the run again with "
            "--accept task.epochs or --accept run.steps"
        )

    def _stragglers(self, waiting: Iterable[_Group], step: int) -> list[_Group]:
        """Opened, incomplete groups whose oldest tokens (stored or being sampled) would be too stale one step later."""
        bound = self.rules.max_lag_versions
        out = []
        for g in waiting:
            versions = ([g.version_min] if g.samples else []) + ([] if g.leased_version_min is None else [g.leased_version_min])
            if versions and head_lag(step, min(versions)) <= bound < head_lag(step + 1, min(versions)):
                out.append(g)
        return out

    def _drop_stale(self, txn: Txn, group: _Group, step: int) -> None:
        row, _, _ = self._group_counts(txn.conn, group.ordinal)
        lag = head_lag(step, group.version_min)
        reason = f"version {group.version_min} lags {lag} at step {step}, bound {self.rules.max_lag_versions}"
        self._close_group(txn, row, VerdictKind.DROPPED_STALE, reason, refill=True)

    def _drop_orphan(self, txn: Txn, ordinal: int, reason: str) -> None:
        """Close a group with samples of a version that a fork left behind; the fixed schedule has no place for a refill."""
        row, _, _ = self._group_counts(txn.conn, ordinal)
        self._close_group(txn, row, VerdictKind.ORPHAN_VERSION, reason, refill=not self._is_fixed)

    def _live_groups(self, conn: sa.Connection) -> Iterator[_Group]:
        """Opened groups that are neither planned nor terminal, oldest first."""
        frontier = self._frontier(conn)
        first = self._watermark
        while first <= frontier.ordinal:
            end = min(first + SCAN_GROUPS, frontier.ordinal + 1)
            yield from self._groups_between(conn, first, end)
            first = end

    def _groups_between(self, conn: sa.Connection, first: int, end: int) -> list[_Group]:
        run_id, lineage = self.run.run_id, self._newest_lineage()
        g, s, v, i, lease = t.prompt_group.c, t.sample.c, t.verdict.c, t.plan_item.c, t.lease.c

        def between(c: Any) -> tuple[Any, ...]:
            return (c.run_id == run_id, c.ordinal >= first, c.ordinal < end)

        planned = set(
            conn.execute(sa.select(i.ordinal).where(*between(i), self._along(i.lineage, i.step, lineage)).distinct()).scalars()
        )
        verdicts = pairs(conn.execute(sa.select(v.ordinal, sa.func.count()).where(*between(v)).group_by(v.ordinal)))
        groups = {
            row.ordinal: _Group(row.ordinal, row.n_siblings, judged, 0, 0, None, 0)
            for row in conn.execute(sa.select(g.ordinal, g.n_siblings).where(*between(g)).order_by(g.ordinal))
            if row.ordinal not in planned and (judged := verdicts.get(row.ordinal, 0)) < row.n_siblings
        }
        for r in conn.execute(
            sa.select(
                s.ordinal, s.lineage, sa.func.count().label("n"), sa.func.min(s.version_min).label("low"),
                sa.func.max(s.version_max).label("high"), sa.func.max(s.accepted_at_us).label("newest"),
            ).where(*between(s), ~_judged(s)).group_by(s.ordinal, s.lineage)
        ):  # fmt: skip
            if r.ordinal in groups:
                self._add_samples(groups[r.ordinal], r)
        for r in conn.execute(
            sa.select(
                lease.ordinal, lease.lineage, sa.func.min(lease.version).label("low"), sa.func.max(lease.version).label("high")
            ).where(*between(lease), lease.incarnation.is_not(None)).group_by(lease.ordinal, lease.lineage)
        ):  # fmt: skip
            if (group := groups.get(r.ordinal)) is not None:
                low = oldest_effective(r.low, r.high, self._fork_beyond(r.lineage))
                group.leased_version_min = low if group.leased_version_min is None else min(low, group.leased_version_min)
        return list(groups.values())

    def _add_samples(self, group: _Group, row: Any) -> None:
        """Count a group's samples of one lineage."""
        low = oldest_effective(row.low, row.high, self._fork_beyond(row.lineage))
        group.version_min = min(low, group.version_min) if group.samples else low
        group.samples += row.n
        group.newest_us = max(group.newest_us, row.newest)
        fork = self._fork_dropping(row.lineage)
        if fork is not None and row.high > fork:
            group.orphan = orphan_reason(row.lineage, row.high, fork)

    def _choose_fixed(self, txn: Txn, step: int) -> list[int] | RunPaused | str:
        """The step's ordinals without quarantined and orphaned groups; RunPaused when one of its slots is out of attempts."""
        conn, ordinals = txn.conn, fixed_ordinals(step, self.rules.groups_per_step)
        issued = self._next_ordinal(conn, self.run.run_id)
        if issued < ordinals.stop:
            return f"group {issued} of the step is not issued yet"
        groups = self._groups_between(conn, ordinals.start, ordinals.stop)
        for group in groups:
            if group.orphan:
                self._drop_orphan(txn, group.ordinal, group.orphan)
        groups = [g for g in groups if not g.orphan]
        open_groups = [g for g in groups if not g.complete]
        if open_groups:
            if (paused := self._paused(conn, ordinals)) is not None:
                return paused
            self._plan_due_at = self._n_touched + len(open_groups)
            return f"{len(groups) - len(open_groups)} of {len(groups)} groups are complete, group {open_groups[0].ordinal} is not"
        return [g.ordinal for g in groups]

    def _paused(self, conn: sa.Connection, ordinals: range) -> RunPaused | None:
        c, e = t.lease.c, t.event.c
        stuck = conn.execute(
            sa.select(c.ordinal, c.sibling, c.attempt).where(
                c.run_id == self.run.run_id, c.ordinal >= ordinals.start, c.ordinal < ordinals.stop, c.incarnation.is_(None),
                c.attempt >= self.rules.attempts_max,
            ).order_by(c.ordinal, c.sibling).limit(1)
        ).first()  # fmt: skip
        if stuck is None:
            return None
        key = SlotKey(stuck.ordinal, stuck.sibling)
        last = conn.execute(
            sa.select(e.kind, e.detail_json).where(
                e.run_id == self.run.run_id, e.ordinal == key.ordinal, e.sibling == key.sibling,
                e.kind.in_(("failure_reported", "lease_expired")),
            ).order_by(e.seq.desc()).limit(1)
        ).first()  # fmt: skip
        detail = json.loads(last.detail_json) if last else {}
        why = f"{detail['status']}: {detail['reason']}" if "status" in detail else "its worker fell silent"
        return RunPaused(
            f"slot {key} gave no sample in {stuck.attempt} attempts (last: {why}); the fixed schedule may not go on without it. "
            f"Repair the cause and give its group fresh attempts: `rollbook retry CONFIG {key.ordinal} --reason WHY`; or take "
            f"the group out: `rollbook quarantine CONFIG {key.ordinal} --reason WHY`. Then start the run again"
        )

    def _stored_plan(self, conn: sa.Connection, lineage: int, step: int) -> Plan | None:
        run_id, p, i, o = self.run.run_id, t.plan.c, t.plan_item.c, t.plan_outcome.c
        where = (p.run_id == run_id, self._along(p.lineage, p.step, lineage), p.step == step)
        row = conn.execute(sa.select(t.plan).where(*where).order_by(p.lineage.desc()).limit(1)).first()
        if row is None:
            return None
        items = tuple(
            PlanItem(r.pos, SlotKey(r.ordinal, r.sibling), r.payload_digest, r.reward, bool(r.valid))
            for r in conn.execute(
                sa.select(t.plan_item).where(i.run_id == run_id, i.lineage == row.lineage, i.step == step).order_by(i.pos)
            )
        )
        end = conn.execute(
            sa.select(o.outcome, o.reason).where(o.run_id == run_id, o.lineage == row.lineage, o.step == step)
        ).first()
        stored = Plan(row.lineage, step, row.base_version, row.revision, items, row.items_digest, row.chain_digest)
        if end is not None:
            return replace(stored, outcome=PlanOutcome(end.outcome), reason=end.reason)
        before = conn.execute(
            sa.select(o.outcome, o.reason).where(o.run_id == run_id, o.lineage < row.lineage, o.step == step)
            .order_by(o.lineage.desc()).limit(1)
        ).first()  # fmt: skip
        return stored if before is None else replace(stored, obeys=PlanOutcome(before.outcome), reason=before.reason)

    @again_on_conflict
    def read_plan(self, lineage: int, step: int) -> Plan:
        """A stored plan with its outcome, along the ancestry. Raises NotFound, Expired."""
        with self._read() as conn:
            plan = self._stored_plan(conn, lineage, step)
        if plan is None:
            raise NotFound(f"lineage {lineage} has no plan of step {step}")
        self._refuse_unreplayable(step)
        return plan

    def payloads(self, lineage: int, step: int) -> Iterator[SampleData]:
        """Samples of a plan in plan order, digests verified. Raises NotFound, Expired, DigestMismatch naming the slot."""
        plan = self.read_plan(lineage, step)
        for start in range(0, len(plan.items), PAYLOAD_ROWS):
            part = plan.items[start : start + PAYLOAD_ROWS]
            with self._read() as conn:
                rows = self._payload_rows(conn, [item.key for item in part])
            for item in part:
                row = rows.get(item.key)
                found = "nothing" if row is None else stored_digest(row)
                if row is None or found != item.payload_digest:
                    raise DigestMismatch(
                        f"payload of slot {item.key} has digest {found[:12]}, the plan of step {step} recorded "
                        f"{item.payload_digest[:12]}; the storage is damaged, restore the ledger from a backup"
                    )
                trace = row.traceparent or ""
                yield SampleData(item.key, row.prompt_ids, stored_trajectory(row), row.reward, item.payload_digest, trace)

    @again_on_conflict
    def sample(self, key: SlotKey) -> SampleData:
        """One stored sample with its payload, digest verified. Raises UnknownSlot, NotFound, Expired, DigestMismatch."""
        self._refuse_expired(key.ordinal)
        with self._read() as conn:
            row = self._payload_rows(conn, [key]).get(key)
            if row is None and not self._slot_exists(conn, key):
                raise UnknownSlot(f"the run has no slot {key}")
        if row is None:
            raise NotFound(f"slot {key} has no sample; `rollbook why {key}` tells what happened to it")
        if (found := stored_digest(row)) != row.payload_digest:
            raise DigestMismatch(f"payload of slot {key} has digest {found[:12]}, recorded was {row.payload_digest[:12]}")
        return SampleData(key, row.prompt_ids, stored_trajectory(row), row.reward, row.payload_digest)

    def _payload_rows(self, conn: sa.Connection, keys: Sequence[SlotKey]) -> dict[SlotKey, Any]:
        return {
            SlotKey(r.ordinal, r.sibling): r
            for r in conn.execute(PAYLOADS, {"run_id": self.run.run_id, "keys": [tuple(k) for k in keys]})
        }


def stored_trajectory(row: Any) -> Trajectory:
    """``payload`` row to record."""
    return Trajectory(row.token_ids, row.logprobs, unpack_versions(row.versions, len(row.token_ids) // 4), row.loss_mask)


def stored_digest(row: Any) -> str:
    """Digest recomputed from the stored bytes of a sample joined with its payload."""
    return payload_digest(
        Submission(
            SlotKey(row.ordinal, row.sibling),
            row.lease_token,
            row.incarnation,
            row.sequence,
            row.lineage,
            stored_trajectory(row),
            row.reward,
            RewardStatus(row.reward_status),
            SandboxStatus(row.sandbox_status),
            FinishReason(row.finish_reason),
            0.0,
            0.0,
        )  # fmt: skip
    )


def _judged(s: Any) -> sa.ColumnElement[bool]:
    v = t.verdict.c
    return sa.exists().where(v.run_id == s.run_id, v.ordinal == s.ordinal, v.sibling == s.sibling)


_S, _P, _G, _T = t.sample.c, t.payload.c, t.prompt_group.c, t.slot.c
STORED = (
    sa.select(t.sample, _P.token_ids, _P.logprobs, _P.versions, _P.loss_mask, _P.evidence_json, _G.prompt_ids, _T.traceparent)
    .join(t.payload, sa.and_(_P.run_id == _S.run_id, _P.ordinal == _S.ordinal, _P.sibling == _S.sibling))
    .join(t.prompt_group, sa.and_(_G.run_id == _S.run_id, _G.ordinal == _S.ordinal))
    .outerjoin(t.slot, sa.and_(_T.run_id == _S.run_id, _T.ordinal == _S.ordinal, _T.sibling == _S.sibling))
)
"""Samples with their bytes."""
PAYLOADS = STORED.where(
    _S.run_id == sa.bindparam("run_id"), sa.tuple_(_S.ordinal, _S.sibling).in_(sa.bindparam("keys", expanding=True))
)
