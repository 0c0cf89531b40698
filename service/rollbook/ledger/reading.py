"""What a scrape shows of the run: totals that grow with its rows, and how things stand now.

Owns the verb ``reading``. Never writes. A group that is finished at the newest checkpoint changes no more, so what its rows add
up to is remembered; a reading looks at the groups after it, at events, steps and failures that are new, and at nothing twice. The
first reading of a server walks over everything, a range at a time, each in a snapshot of its own. Upholds P7: every total is
counted from rows (``retention`` keeps those of rows that are gone), so it is the same after any restart, and never falls: a
sample's device time is counted once its fate is known, and for a slot that a fork plans again its first plan counts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import CheckpointState, PlanOutcome, Role
from rollbook.ledger import schema as t
from rollbook.ledger.base import Kept, again_on_conflict, load_kept
from rollbook.ledger.expired import add_totals, load_totals, sum_by_name
from rollbook.ledger.figures import figures_between
from rollbook.ledger.survival import Survival, named_buckets, survival_of

RANGE_GROUPS = 4000
"""Groups of one snapshot while a server catches up with what it has not counted yet."""
STEPS_PER_READ = 500
AGAIN = "lease_granted_again"
"""Grants beyond a slot's first, counted beside the kinds of events."""
SECONDS = ("seconds_step", "seconds_plan_wait", "seconds_fetch", "seconds_publish_before", "seconds_checkpoint_before")
SUMMED_METRICS = (*SECONDS, "groups", "groups_with_signal")


@dataclass(slots=True)
class _Remembered:
    """What this server has added up so far, and how far it has looked."""

    lineages: int
    end: int
    """Groups before it are finished and counted."""
    totals: dict[str, Any]
    seq: int = 0
    events: dict[str, float] = field(default_factory=dict)
    step: dict[int, int] = field(default_factory=dict)
    """Last step counted, by lineage."""
    steps: dict[str, float] = field(default_factory=dict)


class Reading(Survival):
    """The verb of the metrics page."""

    _remembered: _Remembered | None = None
    _reading_lock: threading.Lock

    def reading(self) -> dict[str, Any]:
        """Totals and states as the metrics page shows them; see ``observe.ledger_metrics``. One caller at a time."""
        with self._reading_lock:
            while self._catch_up():
                pass
            return self._look()

    def present(self, silence_s: float) -> set[str]:
        """Incarnations that live: workers that were heard within ``silence_s``, and holders of roles whose terms run."""
        w, f = t.worker.c, t.fence.c
        with self._read() as conn:
            now_us = self._database.now_us(conn)
            heard = sa.select(w.incarnation).where(w.run_id == self.run.run_id, w.seen_at_us >= now_us - int(silence_s * 1e6))
            holders = sa.select(f.holder).where(f.run_id == self.run.run_id, f.expires_at_us > now_us)
            return {*conn.execute(heard).scalars(), *conn.execute(holders).scalars()}

    def _totals_of(self, conn: sa.Connection, first: int, end: int | None) -> dict[str, Any]:
        figures = figures_between(conn, self.run.run_id, first, end, [line.number for line in self._lineages])
        return super()._totals_of(conn, first, end) | {"figures": figures}

    @again_on_conflict
    def _catch_up(self) -> bool:
        """Count one more range of finished groups; False when there is none of a whole range."""
        with self._read() as conn:
            known = self._begin(conn, load_kept(conn, self.run.run_id))
            behind = self._finished_before(conn, known.end) - known.end
            if behind <= 0:
                return False
            n = min(behind, RANGE_GROUPS)
            more = self._totals_of(conn, known.end, known.end + n)
            known.totals = add_totals(known.totals, more, named_buckets())
            known.end += n
            return behind > n

    def _begin(self, conn: sa.Connection, kept: Kept) -> _Remembered:
        """What is remembered, begun anew where a fork has changed what is finished or rows went that were not counted."""
        known = self._remembered
        if known is None or known.lineages != len(self._lineages) or known.end < kept.low_watermark:
            totals = load_totals(conn, self.run.run_id)
            known = _Remembered(len(self._lineages), kept.low_watermark, add_totals(totals, {}, named_buckets()))
            known.events = {**totals.get("events", {}), AGAIN: totals.get("figures", {}).get(AGAIN, 0)}
            self._remembered = known
        return known

    def _finished_before(self, conn: sa.Connection, start: int) -> int:
        committed = self._committed(conn)
        return self._find_watermark(conn, start, committed[0].step if committed else 0)

    @again_on_conflict
    def _look(self) -> dict[str, Any]:
        with self._read() as conn:
            run_id, lineage = self.run.run_id, self._newest_lineage()
            kept = load_kept(conn, run_id)
            known = self._begin(conn, kept)
            now_us = self._database.now_us(conn)
            totals = add_totals(known.totals, self._totals_of(conn, known.end, None), named_buckets())
            self._count_events(conn, known)
            self._count_steps(conn, known)
            head, committed = self._head(conn), self._committed(conn)
            planned = self._last_planned(conn, lineage)
            roles = self._roles(conn, now_us)
            slots = self._slots_by_state(conn, totals["figures"])
            reading = {
                "survival": survival_of(totals)
                | {"breaker": self._breaker_events(conn), "unsafe_workers": self._unsafe_workers(conn)},
                "figures": totals["figures"], "slots": slots,
                "oldest_s": self._oldest_s(conn, known.end, now_us),
                "events": dict(known.events), "steps": dict(known.steps),
                "head": head.version if head else None, "roles": roles, "epoch": self._term.epoch if self._term else 0,
                "last_step_at_s": self._last_step_at_s(conn, lineage), "checkpoint_at_s": self._checkpoint_at_s(conn),
                "run_state": self._run_state(conn, planned, committed[0].step if committed else 0, roles),
                "workers": self._workers(conn, now_us), "lag_bound": self.rules.max_lag_versions, "draining": self._draining,
                "breaker": self._breaker_shown(conn, now_us), "database": self._database.condition(conn),
                "retention": {"groups": kept.low_watermark, "low_watermark": kept.low_watermark},
                "size_bytes": self._database.size_bytes(conn), "schema": self._schema_number(conn),
            }  # fmt: skip
        return reading | {"writer": {
            "commits": self._writer.commits, "operations": self._writer.operations, "waiting": self._writer.queue_depth(),
            "conflicts": self._writer.conflicts,
        }}  # fmt: skip

    def _count_events(self, conn: sa.Connection, known: _Remembered) -> None:
        """Add the events since the last look, by kind; one writer numbers them in the order of its commits."""
        e = t.event.c
        again = sa.func.sum(sa.case((e.token > 1, 1), else_=0))
        kinds = e.kind.concat("")  # by the plain kind SQLite would walk through all events in the order of their index
        query = sa.select(kinds, sa.func.count(), again, sa.func.max(e.seq))
        query = query.where(e.run_id == self.run.run_id, e.seq > known.seq).group_by(kinds)
        for kind, n, n_again, seq in conn.execute(query).all():
            more = {kind: int(n)} | ({AGAIN: int(n_again or 0)} if kind == "lease_granted" else {})
            known.events = sum_by_name(known.events, more)
            known.seq = max(known.seq, int(seq))

    def _count_steps(self, conn: sa.Connection, known: _Remembered) -> None:
        """Add up the steps that were finished since the last look."""
        o = t.plan_outcome.c
        for lineage in self._lineages:
            last = known.step.get(lineage.number, 0)
            query = (
                sa.select(o.step, o.outcome, o.reason, o.metrics_json)
                .where(o.run_id == self.run.run_id, o.lineage == lineage.number, o.step > last).order_by(o.step)
            )  # fmt: skip
            for row in conn.execute(query.execution_options(yield_per=STEPS_PER_READ)):
                known.steps = sum_by_name(known.steps, _of_step(row.outcome, row.reason, row.metrics_json))
                known.step[lineage.number] = row.step

    def _slots_by_state(self, conn: sa.Connection, figures: Mapping[str, float]) -> dict[str, int]:
        """Every issued slot in one state (P7)."""
        c = t.lease.c
        leased = self._count(conn, t.lease, c.incarnation.is_not(None))
        consumed, dead = int(figures.get("planned", 0)), int(figures.get("verdicts", 0))
        ready = int(figures.get("samples", 0) - figures.get("planned", 0) - figures.get("verdicts_with_sample", 0))
        issued = int(figures.get("slots", 0))
        queued = issued - leased - consumed - dead - ready
        return {"queued": max(0, queued), "leased": leased, "ready": max(0, ready), "consumed": consumed, "dead": dead}

    def _oldest_s(self, conn: sa.Connection, first: int, now_us: int) -> dict[str, float]:
        run_id, g, c, s, v, i = self.run.run_id, t.prompt_group.c, t.lease.c, t.sample.c, t.verdict.c, t.plan_item.c
        unopened = (
            sa.select(g.issued_at_us).where(g.run_id == run_id, g.ordinal > self._frontier(conn).ordinal)
            .order_by(g.ordinal).limit(1)
        )  # fmt: skip

        def same(o: Any) -> Any:
            return sa.and_(o.run_id == s.run_id, o.ordinal == s.ordinal, o.sibling == s.sibling)

        held = sa.select(sa.func.min(c.granted_at_us)).where(c.run_id == run_id, c.incarnation.is_not(None))
        ready = sa.select(sa.func.min(s.accepted_at_us)).where(
            s.run_id == run_id, s.ordinal >= first, ~sa.exists().where(same(v)),
            ~sa.exists().where(same(i), i.lineage.in_([line.number for line in self._lineages])),
        )
        at = {name: conn.execute(query).scalar() for name, query in (("queued", unopened), ("leased", held), ("ready", ready))}
        return {name: 0.0 if us is None else max(0.0, (now_us - us) / 1e6) for name, us in at.items()}

    def _last_step_at_s(self, conn: sa.Connection, lineage: int) -> float | None:
        o = t.plan_outcome.c
        query = sa.select(o.finished_at_us).where(o.run_id == self.run.run_id, self._along(o.lineage, o.step, lineage))
        at_us = conn.execute(query.order_by(o.step.desc()).limit(1)).scalar()
        return None if at_us is None else at_us / 1e6

    def _checkpoint_at_s(self, conn: sa.Connection) -> float | None:
        c = t.checkpoint.c
        here = (c.run_id == self.run.run_id, c.state == CheckpointState.COMMITTED.value)
        at_us = conn.execute(sa.select(sa.func.max(c.committed_at_us)).where(*here)).scalar()
        return None if at_us is None else at_us / 1e6

    def _run_state(self, conn: sa.Connection, planned: int, checkpoint: int, roles: Sequence[Mapping[str, Any]]) -> str:
        steps = self.rules.steps
        if steps and checkpoint >= steps:
            return "completed"
        if self._pause_reason(conn, planned + 1) or self._breaker(conn).is_open:
            return "paused"
        if self._draining:
            return "draining"
        learner = next((role for role in roles if role["role"] == Role.LEARNER.value), None)
        if planned == 0 and (learner is None or learner["epoch"] <= 1):
            return "starting"
        return "running" if learner is not None and learner["expires_in_s"] > 0 else "recovering"

    def _schema_number(self, conn: sa.Connection) -> int:
        revision = str(conn.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())
        return int(revision) if revision.isdigit() else 0


def _of_step(outcome: str, reason: str, metrics_json: str) -> dict[str, float]:
    metrics = json.loads(metrics_json)
    found = {name: float(metrics[name]) for name in SUMMED_METRICS if isinstance(metrics.get(name), (int, float))}
    n_nonfinite = int(outcome == PlanOutcome.SKIPPED.value and "gradient norm" in reason)
    return found | {outcome: 1, "nonfinite": n_nonfinite}
