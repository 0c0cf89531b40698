"""The run at a glance.

Owns ``run_status`` and ``step_metrics``. Never writes. Every number is counted from rows (P7), in one snapshot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import PlanOutcome
from rollbook.core.settings import RetentionConfig
from rollbook.core.staleness import fixed_ordinals
from rollbook.ledger import schema as t
from rollbook.ledger.base import Kept, again_on_conflict, load_kept, pairs
from rollbook.ledger.expired import add_rows, load_totals, range_sums, sum_by_name
from rollbook.ledger.story import Story

RATE_WINDOW_S = 60
WORKERS_SHOWN = 256
SUBMIT_OUTCOMES = ("replayed", "conflict", "fenced", "refused", "invalid")
SILENT_EVENTS = ("lease_expired",)
ROUTINE_EVENTS = ("lease_granted", "step_planned")
"""Kinds of events of which a healthy run writes very many."""
EVENTS_LOOKED_AT = 20_000
EVENTS_SHOWN_MAX = 1000
SLOTS_GONE = {"issued": "slots", "applied": "applied", "verdicts": "verdicts"}
GROUPS_GONE = {"issued": "groups", "refilled": "refills"}
"""Counts that go on counting what was let go, and the sums over ``expired_range`` that they take it from."""


class Status(Story):
    """Verbs that only look."""

    _retention: RetentionConfig
    _rounds: int = 0
    """Rounds of retention that this server has made."""

    @again_on_conflict
    def run_status(self) -> dict[str, Any]:
        """The run at a glance; keys as ``LedgerPort.run_status`` lists them."""
        run = self.run
        lineage = self._newest_lineage()
        with self._read() as conn:
            now_us = self._database.now_us(conn)
            head = self._head(conn)
            finished = self._step_rows(conn, lineage, 1, newest=True)
            gone, kept = range_sums(conn, run.run_id), load_kept(conn, run.run_id)
            totals = load_totals(conn, run.run_id)
            steps = self._steps(conn, lineage)
            state = {
                "run_id": run.run_id,
                "revision": run.revision,
                "lineage": lineage,
                "limits": {"lag_versions": self.rules.max_lag_versions, "silent_s": self.rules.lease_ttl_s},
                "schedule": run.rules.schedule.value,
                "steps": steps | {"published": head.version if head else 0},
                "head": {"version": head.version, "digest": head.digest} if head else None,
                "slots": _and_gone(self._slot_counts(conn, lineage, steps["checkpoint"], kept), gone, SLOTS_GONE),
                "groups": _and_gone(self._group_totals(conn, lineage, kept), gone, GROUPS_GONE),
                "forks": [dataclasses.asdict(line) for line in self._lineages if line.parent is not None],
                "verdicts": sum_by_name(
                    totals.get("verdicts", {}), self._counts(conn, t.verdict, t.verdict.c.kind, *_kept(t.verdict, kept))
                ),
                "failures": self._failures(conn, totals.get("events", {})),
                "submits": self._submits(conn, totals.get("events", {}), gone["samples"], kept),
                "tokens": {"accepted": gone["tokens"] + self._scalar(
                    conn, sa.func.coalesce(sa.func.sum(t.sample.c.n_tokens), 0), t.sample, *_kept(t.sample, kept))},
                "cursor": pairs(
                    conn.execute(sa.select(t.cursor.c.stream, t.cursor.c.next_ordinal).where(t.cursor.c.run_id == run.run_id))
                ),
                "roles": self._roles(conn, now_us),
                "workers": self._workers(conn, now_us),
                "rates": self._rates(conn, now_us),
                "last_step": finished[0] if finished else None,
                "draining": self._draining,
                "paused": self._pause_reason(conn, steps["planned"] + 1),
                "failed_attempts": self._failed_attempts(conn, totals.get("failures", []), kept),
                "quarantines": self._quarantines(conn),
                "breaker": self._breaker_shown(conn, now_us),
                "database": self._database.condition(conn),
                "members": sum_by_name(totals.get("members", {}), self._members(conn, lineage, *_kept(t.plan_item, kept))),
                "retention": {
                    "enabled": self._retention.enabled, "rounds": self._rounds, **dataclasses.asdict(kept),
                    "groups": gone["groups"], "slots": gone["slots"], "events": sum(totals.get("events", {}).values()),
                },
            }  # fmt: skip
        state["writer"] = {
            "commits": self._writer.commits, "operations": self._writer.operations, "waiting": self._writer.queue_depth(),
            "conflicts": self._writer.conflicts, "commit_s": round(self._writer.commit_s(), 3),
        }  # fmt: skip
        return state

    def _pause_reason(self, conn: sa.Connection, step: int) -> str:
        """Why the fixed schedule cannot go on with ``step``; empty when it can."""
        if not self._is_fixed:
            return ""
        return str(self._paused(conn, fixed_ordinals(step, self.rules.groups_per_step)) or "")

    def _scalar(self, conn: sa.Connection, expression: Any, table: sa.Table, *where: Any) -> int:
        query = sa.select(expression).select_from(table).where(table.c.run_id == self.run.run_id, *where)
        return int(conn.execute(query).scalar_one())

    def _count(self, conn: sa.Connection, table: sa.Table, *where: Any) -> int:
        return self._scalar(conn, sa.func.count(), table, *where)

    def _counts(self, conn: sa.Connection, table: sa.Table, column: Any, *where: Any) -> dict[str, int]:
        query = sa.select(column, sa.func.count()).where(table.c.run_id == self.run.run_id, *where)
        query = query.group_by(column).order_by(column)
        return {str(name): int(n) for name, n in conn.execute(query)}

    def _steps(self, conn: sa.Connection, lineage: int) -> dict[str, int]:
        o = t.plan_outcome.c
        along = self._along(o.lineage, o.step, lineage)
        outcomes = pairs(
            conn.execute(
                sa.select(o.outcome, sa.func.count()).where(o.run_id == self.run.run_id, along).group_by(o.outcome)
            )
        )  # fmt: skip
        committed = self._committed(conn)
        return {
            "configured": self.rules.steps,
            "planned": self._last_planned(conn, lineage),
            "trained": outcomes.get(PlanOutcome.TRAINED.value, 0),
            "skipped": outcomes.get(PlanOutcome.SKIPPED.value, 0),
            "checkpoint": committed[0].step if committed else 0,
        }

    def _slot_counts(self, conn: sa.Connection, lineage: int, checkpoint: int, kept: Kept) -> dict[str, int]:
        """Slots of kept groups by derived state; together they are what was issued (P7)."""
        s, v, i, lease, slot = t.sample.c, t.verdict.c, t.plan_item.c, t.lease.c, t.slot.c
        along = self._along(i.lineage, i.step, lineage)

        def other(c: Any, o: Any) -> Any:
            return sa.and_(o.run_id == c.run_id, o.ordinal == c.ordinal, o.sibling == c.sibling)

        untouched = [~sa.exists().where(other(slot, o)) for o in (s, v)]
        held = sa.exists().where(other(slot, lease), lease.incarnation.is_not(None))
        return {
            "issued": self._count(conn, t.slot, *_kept(t.slot, kept)),
            "pending": self._count(conn, t.slot, *untouched, ~held, *_kept(t.slot, kept)),
            "leased": self._count(conn, t.lease, lease.incarnation.is_not(None)),
            "submitted": self._count(
                conn, t.sample, ~sa.exists().where(other(s, v)), ~sa.exists().where(other(s, i), along), *_kept(t.sample, kept)
            ),
            "planned": self._count(conn, t.plan_item, along, i.step > checkpoint, *_kept(t.plan_item, kept)),
            "applied": self._count(conn, t.plan_item, along, i.step <= checkpoint, *_kept(t.plan_item, kept)),
            "verdicts": self._count(conn, t.verdict, *_kept(t.verdict, kept)),
        }  # fmt: skip

    def _group_totals(self, conn: sa.Connection, lineage: int, kept: Kept) -> dict[str, int]:
        p, here = t.plan.c, _kept(t.prompt_group, kept)
        return {
            "issued": self._count(conn, t.prompt_group, *here),
            "opened": max(self._frontier(conn).ordinal + 1, self._watermark),
            "planned": self._scalar(
                conn, sa.func.coalesce(sa.func.sum(p.n_groups), 0), t.plan, self._along(p.lineage, p.step, lineage)
            ),
            "refilled": self._count(conn, t.prompt_group, t.prompt_group.c.refills.is_not(None), *here),
        }

    def _failures(self, conn: sa.Connection, gone: Mapping[str, int]) -> dict[str, int]:
        """Failed attempts by reported reason; a silent worker's as ``lease_expired``, one let go without its reason."""
        e = t.event.c
        out: dict[str, int] = {}
        query = (
            sa.select(e.kind, e.detail_json, sa.func.count())
            .where(e.run_id == self.run.run_id, e.kind == "failure_reported")
            .group_by(e.kind, e.detail_json)
        )
        for _, detail_json, n in conn.execute(query):
            detail = json.loads(detail_json)
            name = f"{detail['status']}: {detail['reason']}"[:120]
            out[name] = out.get(name, 0) + int(n)
        for kind in SILENT_EVENTS:
            if n := self._count(conn, t.event, e.kind == kind) + gone.get(kind, 0):
                out[kind] = n
        if n := gone.get("failure_reported", 0):
            out["expired"] = n
        return dict(sorted(out.items()))

    def _failed_attempts(self, conn: sa.Connection, gone: Sequence[Mapping[str, Any]], kept: Kept) -> list[dict[str, Any]]:
        """Attempts without a sample by what happened and whose failure it was."""
        f = t.failure.c
        by = (f.status, f.sandbox_status, f.blame)
        here = (f.run_id == self.run.run_id, *_kept(t.failure, kept))
        query = sa.select(*by, sa.func.count()).where(*here).group_by(*by).order_by(*by)
        rows = [{"status": a, "sandbox_status": b, "blame": c, "n": int(n)} for a, b, c, n in conn.execute(query)]
        names = ("status", "sandbox_status", "blame")
        return add_rows([{**{n: row[n] for n in names}, "n": row["attempts"]} for row in gone], rows, names) if gone else rows

    def _breaker_shown(self, conn: sa.Connection, now_us: int) -> dict[str, Any]:
        state = self._breaker(conn)
        since = round((now_us - state.since_us) / 1e6, 3) if state.since_us else None
        outcomes = self._outcomes(conn, state.since_us, self._window()[0])
        failed = [outcome for outcome in outcomes if outcome.failed]
        ratio = round(len(failed) / len(outcomes), 4) if outcomes else 0.0
        shown = {"state": "open" if state.is_open else "closed", "since_s": since, "ratio": ratio, "window": len(outcomes)}
        last = {"last": failed[0].failed[:500], "last_s": round((now_us - failed[0].at_us) / 1e6, 3)} if failed else {}
        return shown | (state.detail if state.is_open else {}) | last

    def _submits(self, conn: sa.Connection, gone: Mapping[str, int], samples_gone: int, kept: Kept) -> dict[str, int]:
        e = t.event.c
        kinds = pairs(
            conn.execute(
                sa.select(e.kind, sa.func.count())
                .where(e.run_id == self.run.run_id, e.kind.in_([f"submit_{o}" for o in SUBMIT_OUTCOMES] + ["sample_salvaged"]))
                .group_by(e.kind)
            )
        )  # fmt: skip
        kinds = sum_by_name(kinds, gone)
        counts = {"accepted": samples_gone + self._count(conn, t.sample, *_kept(t.sample, kept))}
        counts |= {outcome: kinds.get(f"submit_{outcome}", 0) for outcome in SUBMIT_OUTCOMES}
        return counts | {"salvaged": kinds.get("sample_salvaged", 0)}

    def _roles(self, conn: sa.Connection, now_us: int) -> list[dict[str, Any]]:
        rows = conn.execute(sa.select(t.fence).where(t.fence.c.run_id == self.run.run_id).order_by(t.fence.c.role))
        return [
            {"role": r.role, "epoch": r.epoch, "holder": r.holder, "expires_in_s": round((r.expires_at_us - now_us) / 1e6, 3)}
            for r in rows
        ]

    def _workers(self, conn: sa.Connection, now_us: int) -> list[dict[str, Any]]:
        w, lease = t.worker.c, t.lease.c
        held = pairs(
            conn.execute(
                sa.select(lease.incarnation, sa.func.count())
                .where(lease.run_id == self.run.run_id, lease.incarnation.is_not(None)).group_by(lease.incarnation)
            )
        )  # fmt: skip
        recent = now_us - int(max(self.rules.lease_ttl_s, RATE_WINDOW_S) * 1_000_000)
        rows = conn.execute(
            sa.select(t.worker).where(w.run_id == self.run.run_id, w.seen_at_us >= recent)
            .order_by(w.seen_at_us.desc(), w.incarnation).limit(WORKERS_SHOWN)
        )  # fmt: skip
        return [
            {
                "incarnation": r.incarnation, "host": r.host, "engine": r.engine, "version": r.loaded_version,
                "beat_age_s": round((now_us - r.seen_at_us) / 1e6, 3), "leases": held.get(r.incarnation, 0),
            }
            for r in rows
        ]  # fmt: skip

    def _rates(self, conn: sa.Connection, now_us: int) -> dict[str, float]:
        """Over the last minute, or over the run where it is younger."""
        s = t.sample.c
        opened_us = self._scalar(conn, t.run.c.opened_at_us, t.run)
        window_s = max(1.0, min(RATE_WINDOW_S, (now_us - opened_us) / 1e6))
        since = now_us - int(window_s * 1_000_000)
        # Samples are accepted in (nearly) rising order of ordinal, so the newest ones are looked at from the end.
        newest = self._frontier(conn).ordinal
        first = max(0, newest - 100_000)
        n, tokens = conn.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(s.n_tokens), 0))
            .where(s.run_id == self.run.run_id, s.ordinal >= first, s.accepted_at_us >= since)
        ).one()  # fmt: skip
        return {"samples_per_s": round(n / window_s, 3), "tokens_per_s": round(int(tokens) / window_s, 3)}

    @again_on_conflict
    def recent_events(self, n_max: int = 100) -> list[dict[str, Any]]:
        """The newest events but those that every rollout and step writes, newest first; looks at a bounded number of rows."""
        e, run_id = t.event.c, self.run.run_id
        with self._read() as conn:
            newest = conn.execute(sa.select(sa.func.max(e.seq)).where(e.run_id == run_id)).scalar_one_or_none() or 0
            rows = conn.execute(
                sa.select(t.event)
                .where(e.run_id == run_id, e.seq > newest - EVENTS_LOOKED_AT, e.kind.not_in(ROUTINE_EVENTS))
                .order_by(e.seq.desc()).limit(min(n_max, EVENTS_SHOWN_MAX))
            ).all()  # fmt: skip
        return [event_shown(r) for r in rows]

    @again_on_conflict
    def step_metrics(self, lineage: int, first_step: int = 1) -> list[dict[str, Any]]:
        """Metrics stored with finished plans along the ancestry, one dict per step in order."""
        with self._read() as conn:
            return self._step_rows(conn, lineage, first_step)

    def _step_rows(self, conn: sa.Connection, lineage: int, first_step: int, *, newest: bool = False) -> list[dict[str, Any]]:
        o = t.plan_outcome.c
        query = sa.select(t.plan_outcome).where(
            o.run_id == self.run.run_id, self._along(o.lineage, o.step, lineage), o.step >= first_step
        )
        query = query.order_by(o.step.desc()).limit(1) if newest else query.order_by(o.step)
        return [
            json.loads(r.metrics_json)
            | {"step": r.step, "finished_at_s": r.finished_at_us / 1e6, "outcome": r.outcome, "reason": r.reason}
            for r in conn.execute(query)
        ]


def _kept(table: sa.Table, kept: Kept) -> tuple[Any, ...]:
    """Condition on the rows of a table that are not in a group that is gone, or going."""
    return () if kept.low_watermark == 0 else (table.c.ordinal >= kept.low_watermark,)


def _and_gone(counts: dict[str, int], gone: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    return counts | {name: counts[name] + gone[of] for name, of in names.items()}


def event_shown(r: Any) -> dict[str, Any]:
    """A row of ``event`` for a person: when, what, about whom, and its details."""
    slot = None if r.ordinal is None else str(r.ordinal) if r.sibling is None else f"{r.ordinal}.{r.sibling}"
    known = {"at_s": r.at_us / 1e6, "what": r.kind, "sample": slot, "token": r.token, "worker": r.incarnation}
    return {name: value for name, value in known.items() if value is not None} | {"detail": json.loads(r.detail_json)}
