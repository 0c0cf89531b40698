"""The circuit breaker, and the rows of failed attempts it is judged by.

Owns every row of ``failure`` and the events ``breaker_opened`` and ``breaker_closed``, the last of which is the breaker's state.
Never touches a sample. When too many of the newest outcomes are infrastructure's failures, what still comes through is no fair
sample of the policy, and more of it is only wasted: nothing is planned, and slots are leased one at a time, at growing intervals,
until a few outcomes in a row are the policy's own. What counts is infrastructure's blame with another status than ``no_verdict``:
the death of a worker says nothing about sandboxes, and what is unclear opens nothing. Counts come from rows, so a restart
changes nothing. Upholds P6 (a failure has no reward).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import Blame, FailureReport, RewardStatus, SandboxStatus, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.base import storable
from rollbook.ledger.feeding import Feeding
from rollbook.ledger.writer import Txn

OPENED, CLOSED = "breaker_opened", "breaker_closed"
PROBES = 3
"""Samples since it opened that close it."""
PROBE_PAUSE_S, PROBE_PAUSE_MAX_S = 0.5, 10.0
"""Pause after a probe that failed; doubles with every further one, up to the second."""
SILENT = "its worker fell silent"
PROBES_LOOKED_AT = 16
COUNTED = tuple(s.value for s in RewardStatus if s not in (RewardStatus.GIVEN, RewardStatus.NO_VERDICT))
"""Statuses that count as infrastructure's failure where it is to blame."""


@dataclass(frozen=True, slots=True)
class BreakerState:
    """Where the breaker stands."""

    is_open: bool
    since_us: int
    """When it took this state; 0 for a breaker that never opened."""
    detail: dict[str, Any]


class Breaker(Feeding):
    """Rows of failed attempts and what follows from many of them."""

    def _record_failures(self, txn: Txn, failures: Iterable[tuple[FailureReport, int]]) -> None:
        """Insert (report, attempt) rows; an attempt has one at most."""
        rows = [
            {
                "run_id": self.run.run_id, "ordinal": f.key.ordinal, "sibling": f.key.sibling, "lease_token": f.lease_token,
                "attempt": attempt, "incarnation": f.incarnation, "status": f.status.value,
                "sandbox_status": f.sandbox_status.value, "blame": f.blame.value, "reason": storable(f.reason),
                "n_tokens": max(0, f.n_tokens), "generate_s": _finite(f.generate_s), "verify_s": _finite(f.verify_s),
                "evidence_json": storable(f.evidence_json), "final": f.final, "reported_at_us": txn.now_us,
            }
            for f, attempt in failures
        ]  # fmt: skip
        if rows:
            txn.conn.execute(self._database.insert_ignore(t.failure), rows)
            self._trip(txn)

    def _breaker(self, conn: sa.Connection) -> BreakerState:
        e = t.event.c
        row = conn.execute(
            sa.select(e.kind, e.at_us, e.detail_json)
            .where(e.run_id == self.run.run_id, e.kind.in_((OPENED, CLOSED)))
            .order_by(e.seq.desc())
            .limit(1)
        ).first()
        if row is None:
            return BreakerState(False, 0, {})
        return BreakerState(row.kind == OPENED, row.at_us, json.loads(row.detail_json))

    def _outcomes(self, conn: sa.Connection, since_us: int, n: int) -> list[tuple[int, str]]:
        """The newest ``n`` outcomes after ``since_us``, newest first: (when, reason of an infrastructure failure or "")."""
        run_id, f, s = self.run.run_id, t.failure.c, t.sample.c
        failed = conn.execute(
            sa.select(f.reported_at_us, f.reason)
            .where(
                f.run_id == run_id, f.reported_at_us > since_us, f.blame == Blame.INFRA.value, f.status.in_(COUNTED)
            )
            .order_by(f.reported_at_us.desc())
            .limit(n)
        ).all()  # fmt: skip
        # Samples come in nearly rising order of ordinal, so the newest ones stand at most a window before the watermark.
        low = max(0, self._watermark - math.ceil(n / self.rules.group_size) - self.rules.groups_per_step)
        given = conn.execute(
            sa.select(s.accepted_at_us, s.reward_status, s.blame)
            .where(s.run_id == run_id, s.ordinal >= low, s.accepted_at_us > since_us)
            .order_by(s.accepted_at_us.desc())
            .limit(n)
        )
        merged = [(at, reason or "failed") for at, reason in failed]
        merged += [(at, status if blame == Blame.INFRA.value and status in COUNTED else "") for at, status, blame in given]
        return sorted(merged, key=lambda outcome: outcome[0], reverse=True)[:n]

    def _trip(self, txn: Txn) -> None:
        """Open the breaker when the newest outcomes say so."""
        rules, state = self.rules, self._breaker(txn.conn)
        if state.is_open or rules.infra_failures_max > 1:
            return
        outcomes = self._outcomes(txn.conn, state.since_us, rules.infra_window)
        failed = [reason for _, reason in outcomes if reason]
        if len(outcomes) < rules.infra_window or len(failed) < rules.infra_failures_max * len(outcomes) or not failed:
            return
        self._event(txn, OPENED, failed=len(failed), outcomes=len(outcomes), last=failed[0][:500])
        txn.rings |= {"lease", "plan"}

    def _recover(self, txn: Txn) -> None:
        """Close an open breaker after enough samples."""
        state = self._breaker(txn.conn)
        if not state.is_open:
            return
        newest = self._outcomes(txn.conn, state.since_us, PROBES)
        if len(newest) == PROBES and not any(reason for _, reason in newest):
            self._close_breaker(txn, state)

    def _close_breaker(self, txn: Txn, state: BreakerState, **why: Any) -> None:
        self._event(txn, CLOSED, open_s=round((txn.now_us - state.since_us) / 1e6, 3), **why)
        txn.rings |= {"lease", "plan"}

    def _probe_room(self, txn: Txn, n_max: int) -> int:
        """How many slots may be leased: all while the breaker is closed, one at a time and then and when while it is open."""
        state = self._breaker(txn.conn)
        if not state.is_open:
            return n_max
        c = t.lease.c
        held = sa.select(sa.func.count()).where(
            c.run_id == self.run.run_id, c.incarnation.is_not(None), c.granted_at_us > state.since_us
        )
        if txn.conn.execute(held).scalar_one():
            return 0
        failed = [at for at, reason in self._outcomes(txn.conn, state.since_us, PROBES_LOOKED_AT) if reason]
        pause_s = min(PROBE_PAUSE_S * 2 ** (len(failed) - 1), PROBE_PAUSE_MAX_S) if failed else 0.0
        return 1 if not failed or txn.now_us - failed[0] >= pause_s * 1e6 else 0

    def _why_broken(self, txn: Txn, state: BreakerState) -> str:
        """Why nothing may be planned while the breaker is open."""
        d = state.detail
        return (
            f"the circuit breaker is open since {(txn.now_us - state.since_us) / 1e6:.0f} s: {d['failed']} of the newest "
            f"{d['outcomes']} rollouts had no verdict because infrastructure failed, the last one: {d['last']}. It closes when "
            f"{PROBES} probes in a row succeed"
        )


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
