"""Rollouts that give no sample: expiry, failure reports, verdicts, the group rule, refills, quarantine.

Owns every row of ``verdict`` and every refill. Never touches a sample: a dropped sample keeps its row and gets a verdict.
Upholds P6 (a failure leaves the group, it never becomes a reward), P7 (each terminal slot has one verdict with a reason) and
R5 (a closed group is never re-opened; its refill is a new group in the verdict's transaction).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.bounds import INT32_MAX
from rollbook.core.errors import InvalidRequest, UnknownSlot
from rollbook.core.records import (
    Blame,
    FailureReport,
    GroupSpec,
    RewardStatus,
    SlotKey,
    SubmitOutcome,
    SubmitResult,
    VerdictKind,
)
from rollbook.ledger import schema as t
from rollbook.ledger.base import storable
from rollbook.ledger.breaker import SILENT, is_silent, silent_failure
from rollbook.ledger.poison import Poison
from rollbook.ledger.writer import Txn
from rollbook.observe import tracing
from rollbook.observe.failpoints import failpoint

REPORTS_MAX = 4096
OUTAGES_MAX = 16
"""Groups of one prompt that outages may close; more than one of ``breaker_pause_s`` can."""
NOT_THE_PROMPT = {VerdictKind.DROPPED_STALE.value, VerdictKind.ORPHAN_VERSION.value}
"""Verdicts of groups that were dropped for their version: the prompt has not failed."""


class Failing(Poison):
    """Verbs and rules about slots that end without being trained."""

    def report_failures(self, failures: Sequence[FailureReport]) -> list[SubmitResult]:
        """Record rollouts without a reward; each frees its slot for another attempt or writes its verdict.

        What is not the model's failure costs no attempt while the breaker is open: an outage is no reason to lose a prompt. From
        a slot's ``attempts_max``-th lease on it does, in the bounded schedule, or tasks that always fail could keep it open.
        Transaction: failure rows, events, lease rows, breaker, verdicts, group rule, refills. Idempotent: by (slot, lease token).
        """
        if len(failures) > REPORTS_MAX:
            raise InvalidRequest(f"{len(failures)} failure reports in one call; at most {REPORTS_MAX}")
        return self._write(lambda txn: self._report(txn, failures))

    def _report(self, txn: Txn, failures: Sequence[FailureReport]) -> list[SubmitResult]:
        results: list[SubmitResult] = []
        exhausted: list[Any] = []
        recorded: list[tuple[FailureReport, int]] = []
        outage = self._breaker(txn.conn).is_open
        for f in failures:
            outcome, reason, row = self._judge_report(txn.conn, f)
            if outcome is SubmitOutcome.ACCEPTED:
                said = {"status": f.status.value, "blame": f.blame.value, "reason": storable(f.reason), "attempt": row.attempt}
                self._event(txn, "failure_reported", f.key, token=f.lease_token, incarnation=f.incarnation, **said)
                recorded.append((f, row.attempt))
                spared = outage and f.blame is not Blame.MODEL and (self._is_fixed or row.token < self.rules.attempts_max)
                counts = f.final or not spared
                self._free(txn, [row], counts=counts, spent=f.final)
                if f.final or (counts and row.attempt >= self.rules.attempts_max):
                    exhausted.append(row)
            results.append(SubmitResult(f.key, outcome, reason))
        self._record_failures(txn, recorded)
        if outage and recorded:
            self._recover(txn)
        if exhausted:
            self._exhaust(txn, [row for row in exhausted if self._is_spent(txn.conn, row)])
        txn.rings |= {"lease", "plan"}
        failpoint("ledger.report.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.report.after_commit"))
        return results

    def _is_spent(self, conn: sa.Connection, row: Any) -> bool:
        """Whether this slot still has no attempt left: a breaker that has just opened gives some back."""
        now = conn.execute(_LEASE, {"run_id": self.run.run_id, "ordinal": row.ordinal, "sibling": row.sibling}).one()
        return bool(now.attempt >= self.rules.attempts_max)

    def _judge_report(self, conn: sa.Connection, f: FailureReport) -> tuple[SubmitOutcome, str, Any]:
        if f.status is RewardStatus.GIVEN:
            return SubmitOutcome.INVALID, "status 'given' is a sample, submit it", None
        if not 0 <= f.key.sibling <= INT32_MAX:
            return SubmitOutcome.INVALID, f"the run has no slot {f.key}", None
        told = next((row for row in self._failures_of(conn, *f.key) if row.lease_token == f.lease_token), None)
        if told is not None and not is_silent(told):
            return SubmitOutcome.REPLAYED, "this failure is recorded already", None
        row = conn.execute(_LEASE, {"run_id": self.run.run_id, "ordinal": f.key.ordinal, "sibling": f.key.sibling}).first()
        if row is not None and row.token == f.lease_token and row.incarnation == f.incarnation:
            return SubmitOutcome.ACCEPTED, "", row
        if row is None and not self._slot_exists(conn, f.key):
            return SubmitOutcome.INVALID, f"the run has no slot {f.key}", None
        return SubmitOutcome.FENCED, f"lease token {f.lease_token} of slot {f.key} is no longer held", None

    def _slot_exists(self, conn: sa.Connection, key: SlotKey) -> bool:
        c = t.slot.c
        where = (c.run_id == self.run.run_id, c.ordinal == key.ordinal, c.sibling == key.sibling)
        return conn.execute(sa.select(c.ordinal).where(*where)).first() is not None

    def _free(self, txn: Txn, rows: Iterable[Any], *, counts: bool = True, spent: bool = False) -> None:
        """Let leases go; an attempt that does not count is given back to its slot, a ``spent`` slot has none left."""
        back, least = 0 if counts else 1, self.rules.attempts_max if spent else 0
        parameters = [
            {
                "b_run_id": self.run.run_id, "b_ordinal": r.ordinal, "b_sibling": r.sibling,
                "b_attempt": max(r.attempt - back, least),
            }
            for r in rows
        ]  # fmt: skip
        if parameters:
            txn.conn.execute(_FREE_LEASE, parameters)

    def _expire(self, txn: Txn) -> None:
        """Take back leases whose time is over; slots without attempts left get their verdict (bounded schedule)."""
        expired = txn.conn.execute(_EXPIRED, {"run_id": self.run.run_id, "now_us": txn.now_us}).all()
        if not expired:
            return
        self._events(txn, [
            self._event_row(txn, "lease_expired", SlotKey(r.ordinal, r.sibling), token=r.token, incarnation=r.incarnation,
                            attempt=r.attempt)
            for r in expired
        ])  # fmt: skip
        self._free(txn, expired)
        self._record_failures(txn, [(silent_failure(r), r.attempt) for r in expired])
        self._exhaust(txn, [r for r in expired if r.attempt >= self.rules.attempts_max])
        txn.rings |= {"lease", "plan"}

    def _exhaust(self, txn: Txn, rows: Sequence[Any]) -> None:
        """Verdicts for slots whose attempts are used up. The fixed schedule pauses instead: it may not lose a member (R14)."""
        if self._is_fixed or not rows:
            return
        closed: set[int] = set()
        for row in rows:
            if row.ordinal in closed:
                continue  # its group was just taken out, with all its slots
            told = self._failures_of(txn.conn, row.ordinal, row.sibling)
            broken = len({f.attempt for f in told if f.status == RewardStatus.VERIFIER_ERROR.value})
            killed = self._poisoned(txn.conn, txn.now_us, row.ordinal, told)
            taken_out = killed is not None or broken >= self.rules.attempts_max
            kind = VerdictKind.QUARANTINED if taken_out else VerdictKind.FAILED
            last = told[-1] if told else None
            why = SILENT if last is None or last.reason == SILENT else f"{last.status}: {last.reason}"
            reason = f"{row.attempt} attempts without a sample; last: {why}"
            self._give_verdicts(txn, {SlotKey(row.ordinal, row.sibling): (kind, reason)})
            if killed is not None:
                self._take_out(txn, SlotKey(row.ordinal, row.sibling), told, sorted(killed), why)
                closed.add(row.ordinal)
        self._settle_groups(txn, sorted({row.ordinal for row in rows} - closed))

    def _take_out(self, txn: Txn, key: SlotKey, told: Sequence[Any], killed: Sequence[str], why: str) -> None:
        """Quarantine the group of a slot whose task is poison. Nothing is refilled: the feeder issues another prompt."""
        workers = sorted({f.incarnation for f in told})
        did, named = "killed" if killed == workers else "failed on", ", ".join(incarnation[:12] for incarnation in workers)
        group, _, _ = self._group_counts(txn.conn, key.ordinal)
        self._close_group(
            txn, group, VerdictKind.QUARANTINED, f"slot {key} {did} workers {named}: {why}", refill=False,
            cause={"slot": str(key), "workers": workers, "killed": killed},
        )  # fmt: skip

    def _failures_of(self, conn: sa.Connection, ordinal: int, sibling: int) -> list[Any]:
        f = t.failure.c
        where = (f.run_id == self.run.run_id, f.ordinal == ordinal, f.sibling == sibling)
        return list(conn.execute(sa.select(t.failure).where(*where).order_by(f.lease_token)))

    def _give_verdicts(self, txn: Txn, verdicts: Mapping[SlotKey, tuple[VerdictKind, str]]) -> None:
        """Insert verdicts; length and duration of an existing sample go along, so that drop bias can be counted."""
        if not verdicts:
            return
        run_id, s = self.run.run_id, t.sample.c
        keys = [tuple(k) for k in verdicts]
        held = {
            (r.ordinal, r.sibling): r
            for r in txn.conn.execute(
                sa.select(s.ordinal, s.sibling, s.n_tokens, s.generate_s).where(
                    s.run_id == run_id, sa.tuple_(s.ordinal, s.sibling).in_(keys)
                )
            )
        }
        rows = []
        for key, (kind, reason) in verdicts.items():
            sample = held.get(key)
            rows.append(
                {
                    "run_id": run_id,
                    "ordinal": key.ordinal,
                    "sibling": key.sibling,
                    "kind": kind.value,
                    "reason": storable(reason) or kind.value,
                    "n_tokens": sample.n_tokens if sample else None,
                    "generate_s": sample.generate_s if sample else None,
                    "decided_at_us": txn.now_us,
                }
            )
        txn.conn.execute(sa.insert(t.verdict), rows)
        txn.conn.execute(
            sa.delete(t.lease).where(t.lease.c.run_id == run_id, sa.tuple_(t.lease.c.ordinal, t.lease.c.sibling).in_(keys))
        )
        txn.rings |= {"lease", "plan"}

    def _settle_groups(self, txn: Txn, ordinals: Sequence[int]) -> None:
        """Group rule: a group that can no longer have ``survivors_min`` members with a reward is closed and refilled (R5)."""
        if self._is_fixed:
            return
        for ordinal in ordinals:
            group, verdicts, unrewarded = self._group_counts(txn.conn, ordinal)
            if verdicts == group.n_siblings and self._closing(txn.conn, ordinal) is not None:
                continue
            usable = group.n_siblings - verdicts - unrewarded
            needed = min(self.rules.survivors_min, group.n_siblings)
            if usable >= needed:
                continue
            reason = f"group {ordinal} has {usable} of {group.n_siblings} usable members, needs {needed}"
            outage, (n_failed, n_outages) = self._breaker(txn.conn).is_open, self._failed_refills(txn.conn, group)
            refill = n_outages < OUTAGES_MAX if outage else n_failed < self.rules.attempts_max
            self._close_group(txn, group, VerdictKind.CANCELLED, reason, refill=refill, outage=outage)

    def _closing(self, conn: sa.Connection, ordinal: int) -> dict[str, Any] | None:
        """How a group was closed; None where nobody has decided yet what follows from its end."""
        e = t.event.c
        where = (e.run_id == self.run.run_id, e.ordinal == ordinal, e.sibling.is_(None), e.kind == "group_closed")
        detail = conn.execute(sa.select(e.detail_json).where(*where).limit(1)).scalar()
        return None if detail is None else json.loads(detail)

    def _group_counts(self, conn: sa.Connection, ordinal: int) -> tuple[Any, int, int]:
        """Group row, slots with a verdict, slots without one whose sample has no reward."""
        run_id, g, v, s = self.run.run_id, t.prompt_group.c, t.verdict.c, t.sample.c
        group = conn.execute(sa.select(t.prompt_group).where(g.run_id == run_id, g.ordinal == ordinal)).first()
        if group is None:
            self._refuse_expired(ordinal)
            raise UnknownSlot(f"the run has no group {ordinal}")
        verdicts = conn.execute(sa.select(sa.func.count()).where(v.run_id == run_id, v.ordinal == ordinal)).scalar_one()
        judged = sa.exists().where(v.run_id == s.run_id, v.ordinal == s.ordinal, v.sibling == s.sibling)
        unrewarded = conn.execute(
            sa.select(sa.func.count()).where(s.run_id == run_id, s.ordinal == ordinal, s.reward.is_(None), ~judged)
        ).scalar_one()
        return group, verdicts, unrewarded

    def _failed_refills(self, conn: sa.Connection, group: Any) -> tuple[int, int]:
        """How many groups of this prompt have failed before this one, and how many were closed in an outage.

        A prompt that keeps failing is not issued for ever (P9); what an outage took is not held against it, up to a bound.
        """
        run_id, g, v = self.run.run_id, t.prompt_group.c, t.verdict.c
        n_failed = n_outages = 0
        older, low = group.refills, self._kept.low_watermark
        while older is not None and older >= low and n_failed < self.rules.attempts_max and n_outages < OUTAGES_MAX:
            kinds = conn.execute(sa.select(v.kind).where(v.run_id == run_id, v.ordinal == older).distinct()).scalars().all()
            if (self._closing(conn, older) or {}).get("outage"):
                n_outages += 1
            elif not NOT_THE_PROMPT & set(kinds):
                n_failed += 1
            older = conn.execute(sa.select(g.refills).where(g.run_id == run_id, g.ordinal == older)).scalar_one_or_none()
        return n_failed, n_outages

    def _close_group(
        self, txn: Txn, group: Any, kind: VerdictKind, reason: str, *, refill: bool, outage: bool = False,
        cause: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Verdict for every slot that has none, and the refill, in the caller's transaction."""
        v = t.verdict.c
        have = set(
            txn.conn.execute(sa.select(v.sibling).where(v.run_id == self.run.run_id, v.ordinal == group.ordinal)).scalars()
        )
        missing = [SlotKey(group.ordinal, s) for s in range(group.n_siblings) if s not in have]
        if missing:  # none where all slots were spent in one transaction
            self._give_verdicts(txn, {key: (kind, reason) for key in missing})
        why: dict[str, Any] = {"verdict": kind.value, "reason": reason, "refilled": refill} | ({"outage": True} if outage else {})
        self._event(txn, "group_closed", SlotKey(group.ordinal, -1), **why, **(cause or {}))
        if refill:
            failpoint("ledger.verdict.before_refill")
            ordinal = self._next_ordinal(txn.conn, self.run.run_id)
            traces = tracing.issue(self.run.run_id, ordinal, group.n_siblings, refills=group.ordinal)
            spec = GroupSpec(ordinal, group.prompt_ids, group.task_json, group.n_siblings, refills=group.ordinal,
                             traceparents=tuple(trace.traceparent for trace in traces))  # fmt: skip
            self._insert_groups(txn, group.stream, [spec])
            txn.after_commit += [trace.end for trace in traces]
            self._advance_cursors(txn, ordinal + 1)
            self._event(txn, "group_refilled", SlotKey(ordinal, -1), refills=group.ordinal)
        self._raise_watermark(txn)

    def quarantine_group(self, ordinal: int, reason: str) -> None:
        """Take a group out for good, on an operator's word; a recorded input of the run (R14). Idempotent: by ordinal.

        The bounded schedule refills nothing (the prompt is the problem): the feeder issues another one.
        Raises: UnknownSlot, InvalidRequest (no reason, or the group is planned already).
        """
        if not reason:
            raise InvalidRequest("a quarantine needs a reason; it is stored with every slot of the group")

        def quarantine(txn: Txn) -> None:
            group, verdicts, _ = self._group_counts(txn.conn, ordinal)
            if verdicts == group.n_siblings:
                return
            i = t.plan_item.c
            step = txn.conn.execute(
                sa.select(i.step).where(i.run_id == self.run.run_id, i.ordinal == ordinal).limit(1)
            ).scalar_one_or_none()
            if step is not None:
                raise InvalidRequest(f"group {ordinal} is in the plan of step {step}; what is planned is trained")
            self._close_group(txn, group, VerdictKind.QUARANTINED, reason, refill=False)

        self._write(quarantine)

    def retry_group(self, ordinal: int, reason: str) -> None:
        """Give the slots of a group that ran out of attempts a fresh budget: the operator's way out of a repaired pause (R14).

        Lease tokens keep growing. Raises: UnknownSlot, InvalidRequest (no reason).
        """
        if not reason:
            raise InvalidRequest("a retry needs a reason; it is stored with the group")

        def retry(txn: Txn) -> None:
            self._group_counts(txn.conn, ordinal)
            c = t.lease.c
            here = (
                c.run_id == self.run.run_id,
                c.ordinal == ordinal,
                c.incarnation.is_(None),
                c.attempt >= self.rules.attempts_max,
            )
            if txn.conn.execute(sa.update(t.lease).where(*here).values(attempt=0)).rowcount:
                self._event(txn, "group_retried", SlotKey(ordinal, -1), reason=reason)
            txn.rings |= {"lease", "plan"}

        self._write(retry)

    def _raise_watermark(self, txn: Txn) -> None:
        """Recompute the watermark from this transaction's rows; remembered only after COMMIT."""
        found = self._find_watermark(txn.conn, self._watermark)
        txn.after_commit.append(lambda: setattr(self, "_watermark", max(self._watermark, found)))

    def _find_watermark(self, conn: sa.Connection, start: int, last_step: int | None = None) -> int:
        """First ordinal from ``start`` on that is neither planned (along the ancestry, up to ``last_step``) nor terminal."""
        run_id, g, v, i = self.run.run_id, t.prompt_group.c, t.verdict.c, t.plan_item.c
        lineage = self._newest_lineage()
        in_time = () if last_step is None else (i.step + 0 <= last_step,)  # by the plain step SQLite would walk through all plans
        planned = sa.exists().where(
            i.run_id == g.run_id, i.ordinal == g.ordinal, self._along(i.lineage, i.step, lineage), *in_time
        )
        judged = (
            sa.select(sa.func.count())
            .where(v.run_id == g.run_id, v.ordinal == g.ordinal)
            .correlate(t.prompt_group)
            .scalar_subquery()
        )
        query = sa.select(g.ordinal).where(g.run_id == run_id, g.ordinal >= start, ~planned, judged < g.n_siblings)
        found = conn.execute(query.order_by(g.ordinal).limit(1)).scalar_one_or_none()
        return self._next_ordinal(conn, run_id) if found is None else found


_L = t.lease.c
_LEASE = sa.select(t.lease).where(
    _L.run_id == sa.bindparam("run_id"), _L.ordinal == sa.bindparam("ordinal"), _L.sibling == sa.bindparam("sibling")
)
_EXPIRED = (
    sa.select(t.lease)
    .where(_L.run_id == sa.bindparam("run_id"), _L.incarnation.is_not(None), _L.expires_at_us <= sa.bindparam("now_us"))
    .order_by(_L.ordinal, _L.sibling)
)
_FREE_LEASE = (
    sa.update(t.lease)
    .where(
        _L.run_id == sa.bindparam("b_run_id"), _L.ordinal == sa.bindparam("b_ordinal"), _L.sibling == sa.bindparam("b_sibling")
    )
    .values(incarnation=None, attempt=sa.bindparam("b_attempt"))
)
