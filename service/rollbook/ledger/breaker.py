"""The circuit breaker, and the rows of failed attempts it is judged by.

Owns every row of ``failure`` and the events ``breaker_opened`` and ``breaker_closed``, the last of which is the breaker's state.
Never touches a sample. When too many of the newest outcomes have no verdict, what still comes through is no fair sample of the
policy, and more of it is only wasted: nothing is planned, and slots are leased one at a time, at growing intervals, until a few
of these probes in a row are the policy's own. What counts is infrastructure's blame, and an environment that raised: neither the
death of a worker nor a program that did nothing until its time was over. Counts come from rows, so a restart changes nothing.
Upholds P6 (a failure has no reward).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollbook.core.bounds import INT32_MAX
from rollbook.core.records import Blame, FailureReport, RewardStatus, SandboxStatus, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.base import storable
from rollbook.ledger.feeding import Feeding
from rollbook.ledger.writer import Txn

OPENED, CLOSED = "breaker_opened", "breaker_closed"
PROBES = 3
"""Probes in a row that close it."""
PROBE_PAUSE_S, PROBE_PAUSE_MAX_S = 0.5, 10.0
"""Pause after a probe that failed; doubles with every further one, up to the second."""
SILENT = "its worker fell silent"
PROBES_LOOKED_AT = 16
COUNTED = {
    Blame.INFRA.value: (RewardStatus.INFRA_ERROR.value, RewardStatus.VERIFIER_ERROR.value, RewardStatus.TIMEOUT.value),
    Blame.UNCLEAR.value: (RewardStatus.VERIFIER_ERROR.value,),
}
"""Blame to the statuses that count with it."""


@dataclass(frozen=True, slots=True)
class BreakerState:
    """Where the breaker stands."""

    is_open: bool
    since_us: int
    """When it took this state; 0 for a breaker that never opened."""
    detail: dict[str, Any]
    seq: int = 0
    """Of the event that says so: what came after it, whatever clocks say."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How an attempt ended."""

    at_us: int
    ordinal: int
    failed: str
    """Why it failed, where it counts; empty for what counts as good."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A slot leased while the breaker was open."""

    held: bool
    failed_at_us: int = 0
    """When it failed, if it did."""
    good: bool = False
    """It brought a sample, or a failure that is the model's own."""


class Breaker(Feeding):
    """Rows of failed attempts and what follows from many of them."""

    def _record_failures(self, txn: Txn, failures: Iterable[tuple[FailureReport, int]]) -> None:
        """Insert (report, attempt) rows; an attempt has one at most."""
        rows = [
            {
                "run_id": self.run.run_id, "ordinal": f.key.ordinal, "sibling": f.key.sibling, "lease_token": f.lease_token,
                "attempt": attempt, "incarnation": f.incarnation, "status": f.status.value,
                "sandbox_status": f.sandbox_status.value, "blame": f.blame.value, "reason": storable(f.reason),
                "n_tokens": min(max(0, f.n_tokens), INT32_MAX),
                "generate_s": _finite(f.generate_s), "verify_s": _finite(f.verify_s),
                "evidence_json": storable(f.evidence_json), "final": f.final, "reported_at_us": txn.now_us,
            }
            for f, attempt in failures
        ]  # fmt: skip
        if rows:
            txn.conn.execute(self._database.insert_ignore(t.failure), rows)
            self._trip(txn)

    def _breaker(self, conn: sa.Connection) -> BreakerState:
        rows = self._newest_events(conn, (OPENED, CLOSED))
        if not rows:
            return BreakerState(False, 0, {})
        row = rows[0]
        return BreakerState(row.kind == OPENED, row.at_us, json.loads(row.detail_json), row.seq)

    def _outcomes(self, conn: sa.Connection, since_us: int, n: int) -> list[_Outcome]:
        """The newest ``n`` outcomes after ``since_us``, newest first."""
        run_id, f, s = self.run.run_id, t.failure.c, t.sample.c
        failed = conn.execute(
            sa.select(f.reported_at_us, f.ordinal, f.reason)
            .where(f.run_id == run_id, f.reported_at_us > since_us, _counted(f.status, f.blame))
            .order_by(f.reported_at_us.desc())
            .limit(n)
        ).all()
        # Samples come in nearly rising order of ordinal, so the newest ones stand at most a window before the watermark.
        low = max(0, self._watermark - math.ceil(n / self.rules.group_size) - self.rules.groups_per_step)
        given = conn.execute(
            sa.select(s.accepted_at_us, s.ordinal, s.reward_status, s.blame)
            .where(s.run_id == run_id, s.ordinal >= low, s.accepted_at_us > since_us)
            .order_by(s.accepted_at_us.desc())
            .limit(n)
        )
        merged = [_Outcome(at, ordinal, reason or "failed") for at, ordinal, reason in failed]
        merged += [_Outcome(at, ordinal, status if counts(status, blame) else "") for at, ordinal, status, blame in given]
        return sorted(merged, key=lambda outcome: outcome.at_us, reverse=True)[:n]

    def _window(self) -> tuple[int, float]:
        """How many outcomes are looked at, and how many of them open the breaker.

        No more than the slots in flight can fail before all their attempts are spent.
        """
        rules = self.rules
        steps = 1 if self._is_fixed else rules.max_lag_versions + 1  # the fixed schedule waits for each step's version
        most, share = rules.group_size * rules.groups_per_step * steps * rules.attempts_max, rules.infra_failures_max
        window = rules.infra_window if share * rules.infra_window <= most else math.ceil(most / share)
        return window, max(1.0, min(share * window, most))

    def _trip(self, txn: Txn) -> None:
        """Open the breaker when the newest outcomes say so; at once when even a window of samples could not outweigh them."""
        rules, state = self.rules, self._breaker(txn.conn)
        if state.is_open or rules.infra_failures_max > 1:
            return
        window, threshold = self._window()
        outcomes = self._outcomes(txn.conn, state.since_us, window)
        failed = [outcome for outcome in outcomes if outcome.failed]
        # Where few slots are in flight one group can fill their window; that is its task's failure, and ends or pauses with it.
        if len(failed) < threshold or (window < rules.infra_window and len({outcome.ordinal for outcome in failed}) < 2):
            return
        self._event(txn, OPENED, failed=len(failed), outcomes=len(outcomes), last=failed[0].failed[:500])
        self._give_back(txn, outcomes[-1].at_us)
        txn.rings |= {"lease", "plan"}

    def _give_back(self, txn: Txn, since_us: int) -> None:
        """Attempts that the outage has cost before it was seen as one.

        What failed for good stays so; and, in the bounded schedule, slots that have been leased ``attempts_max`` times, or one
        task that always fails could open the breaker for ever without being given up.
        """
        f, lease, ended = t.failure.c, t.lease.c, t.failure.alias().c
        rows = txn.conn.execute(
            sa.select(f.ordinal, f.sibling, sa.func.count().label("n"))
            .where(
                f.run_id == self.run.run_id, f.reported_at_us >= since_us, _counted(f.status, f.blame),
                ~sa.exists().where(ended.run_id == f.run_id, ended.ordinal == f.ordinal, ended.sibling == f.sibling, ended.final),
            )
            .group_by(f.ordinal, f.sibling)
        ).all()  # fmt: skip
        young = (sa.true(),) if self._is_fixed else (lease.token < self.rules.attempts_max,)
        for row in rows:
            here = (*young, lease.run_id == self.run.run_id, lease.ordinal == row.ordinal, lease.sibling == row.sibling)
            left = sa.case((lease.attempt > row.n, lease.attempt - row.n), else_=0)
            txn.conn.execute(sa.update(t.lease).where(*here).values(attempt=left))

    def _probes(self, conn: sa.Connection, state: BreakerState) -> list[_Probe]:
        """The newest slots that were leased since the breaker opened, newest first."""
        e, s, f, lease = t.event.c, t.sample.c, t.failure.c, t.lease.c

        def same(c: Any, token: Any) -> sa.ColumnElement[bool]:
            return sa.and_(c.run_id == e.run_id, c.ordinal == e.ordinal, c.sibling == e.sibling, token == e.token)

        rows = conn.execute(
            sa.select(
                lease.incarnation, s.reward_status, s.blame, f.status.label("failed"), f.blame.label("failed_blame"),
                sa.func.coalesce(f.reported_at_us, s.accepted_at_us, 0).label("at_us"),
            )
            .select_from(
                t.event.outerjoin(t.sample, same(s, s.lease_token)).outerjoin(t.failure, same(f, f.lease_token))
                .outerjoin(t.lease, same(lease, lease.token))
            )
            .where(e.run_id == self.run.run_id, e.seq > state.seq, e.kind == "lease_granted")
            .order_by(e.seq.desc())
            .limit(PROBES_LOOKED_AT)
        )  # fmt: skip
        probes = []
        for row in rows:
            if row.incarnation is not None:
                probes.append(_Probe(True))
            elif row.reward_status is not None:
                good = row.reward_status == RewardStatus.GIVEN.value or row.blame == Blame.MODEL.value
                probes.append(_Probe(False, 0 if good else row.at_us, good))
            elif row.failed is not None:
                models = row.failed_blame == Blame.MODEL.value
                if models or row.failed != RewardStatus.NO_VERDICT.value:  # the death of its worker says nothing
                    probes.append(_Probe(False, 0 if models else row.at_us, models))
        return probes

    def _recover(self, txn: Txn) -> None:
        """Close an open breaker when its newest probes were good; what was leased before it opened says nothing."""
        state = self._breaker(txn.conn)
        if not state.is_open:
            return
        ended = [probe for probe in self._probes(txn.conn, state) if not probe.held]
        if len(ended) >= PROBES and all(probe.good for probe in ended[:PROBES]):
            self._close_breaker(txn, state)

    def _close_breaker(self, txn: Txn, state: BreakerState, **why: Any) -> None:
        self._event(txn, CLOSED, open_s=round((txn.now_us - state.since_us) / 1e6, 3), **why)
        txn.rings |= {"lease", "plan"}

    def _probe_room(self, txn: Txn, state: BreakerState, n_max: int) -> int:
        """How many slots may be leased: all while the breaker is closed, one at a time and then and when while it is open."""
        if not state.is_open:
            return n_max
        probes = self._probes(txn.conn, state)
        if any(probe.held for probe in probes):
            return 0
        failed = list(itertools.takewhile(lambda at_us: at_us > 0, (probe.failed_at_us for probe in probes)))
        pause_s = min(PROBE_PAUSE_S * 2 ** (len(failed) - 1), PROBE_PAUSE_MAX_S) if failed else 0.0
        return 0 if failed and 0 <= txn.now_us - failed[0] < pause_s * 1e6 else 1

    def _why_broken(self, txn: Txn, state: BreakerState) -> str:
        """Why nothing may be planned while the breaker is open."""
        d = state.detail
        return (
            f"the circuit breaker is open since {(txn.now_us - state.since_us) / 1e6:.0f} s: {d['failed']} of the newest "
            f"{d['outcomes']} rollouts have no verdict, through no fault of the model's; the last one: {d['last']}. It closes "
            f"when {PROBES} probes in a row succeed; `rollbook quarantine` takes out a task that always fails"
        )


def counts(status: str, blame: str | None) -> bool:
    """Whether an outcome with these values is one that opens the breaker."""
    return status in COUNTED.get(blame or "", ())


def _counted(status: Any, blame: Any) -> sa.ColumnElement[bool]:
    return sa.or_(*(sa.and_(blame == value, status.in_(statuses)) for value, statuses in COUNTED.items()))


def silent_failure(row: Any) -> FailureReport:
    """What an expired lease says: nothing, and nobody knows whose doing it was."""
    return FailureReport(
        SlotKey(row.ordinal, row.sibling), row.token, row.incarnation, RewardStatus.NO_VERDICT, Blame.UNCLEAR, SILENT,
        SandboxStatus.NOT_USED,
    )  # fmt: skip


def is_silent(row: Any) -> bool:
    """Whether a row of ``failure`` was written for an expired lease, not reported by its worker."""
    return (row.status, row.reason, row.n_tokens) == (RewardStatus.NO_VERDICT.value, SILENT, 0)


def _finite(seconds: float) -> float:
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
