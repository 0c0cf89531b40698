"""The run at a glance, and the story of one rollout.

Owns ``run_status``, ``step_metrics``, ``explain``. Never writes. Every number is counted from rows (P7), in one snapshot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import UnknownSlot
from rollbook.core.records import Blame, FinishReason, PlanOutcome, SlotKey
from rollbook.core.settings import RetentionConfig
from rollbook.core.staleness import fixed_ordinals
from rollbook.ledger import schema as t
from rollbook.ledger.base import Kept, again_on_conflict, load_kept, pairs
from rollbook.ledger.expired import add_rows, load_totals, range_sums, sum_by_name
from rollbook.ledger.tools import Tools
from rollbook.observe.tracing import is_sampled, trace_id

RATE_WINDOW_S = 60
WORKERS_SHOWN = 256
HISTORY_ROWS = 1000
SUBMIT_OUTCOMES = ("replayed", "conflict", "fenced", "refused", "invalid")
SILENT_EVENTS = ("lease_expired",)
SLOTS_GONE = {"issued": "slots", "applied": "applied", "verdicts": "verdicts"}
GROUPS_GONE = {"issued": "groups", "refilled": "refills"}
"""Counts that go on counting what was let go, and the sums over ``expired_range`` that they take it from."""


class Status(Tools):
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
            "conflicts": self._writer.conflicts,
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
        ratio = round(sum(bool(outcome.failed) for outcome in outcomes) / len(outcomes), 4) if outcomes else 0.0
        shown = {"state": "open" if state.is_open else "closed", "since_s": since, "ratio": ratio, "window": len(outcomes)}
        return shown | (state.detail if state.is_open else {})

    def _members(self, conn: sa.Connection, lineage: int, *where: Any) -> dict[str, int]:
        """Slots of planned groups by what became of them: ``usable``, of those ``policy_failed``, and ``infra_failed``.

        ``policy_failed`` has its reward, and the model was to blame or ran out of tokens or turns; ``infra_failed`` has none.
        """
        i, s, g = t.plan_item.c, t.sample.c, t.prompt_group.c
        here = (i.run_id == self.run.run_id, self._along(i.lineage, i.step, lineage), *where)
        blamed = sa.or_(s.blame == Blame.MODEL.value, s.finish_reason != FinishReason.STOP.value)
        usable, failed = conn.execute(
            sa.select(
                sa.func.coalesce(sa.func.sum(sa.case((i.valid, 1), else_=0)), 0),
                sa.func.coalesce(sa.func.sum(sa.case((sa.and_(i.valid, blamed), 1), else_=0)), 0),
            ).join(t.sample, sa.and_(s.run_id == i.run_id, s.ordinal == i.ordinal, s.sibling == i.sibling)).where(*here)
        ).one()  # fmt: skip
        planned = sa.select(i.ordinal).where(*here).distinct()
        slots = conn.execute(
            sa.select(sa.func.coalesce(sa.func.sum(g.n_siblings), 0)).where(g.run_id == self.run.run_id, g.ordinal.in_(planned))
        ).scalar_one()
        return {"usable": int(usable), "policy_failed": int(failed), "infra_failed": int(slots) - int(usable)}

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

    @again_on_conflict
    def explain(self, key: SlotKey) -> dict[str, Any]:
        """The whole story of one rollout in order: issue, leases, failures, tool calls, sample, plan, step, checkpoint.

        Returns scalars for a summary and ``history``: entries with ``at_s``, ``what`` and the ids that matter.
        Raises: UnknownSlot, Expired.
        """
        run_id, g = self.run.run_id, t.prompt_group.c
        self._refuse_expired(key.ordinal)
        with self._read() as conn:
            slot = self._row(conn, t.slot, key)
            if slot is None:
                last = self._next_ordinal(conn, run_id) - 1
                raise UnknownSlot(f"run {run_id!r} has no sample {key}; ordinals go from 0 to {last}")
            group = conn.execute(sa.select(t.prompt_group).where(g.run_id == run_id, g.ordinal == key.ordinal)).one()
            refilled_by = conn.execute(
                sa.select(g.ordinal).where(g.run_id == run_id, g.refills == key.ordinal)
            ).scalar_one_or_none()
            story: dict[str, Any] = {
                "sample_id": str(key), "run_id": run_id, "state": "pending", "seed": slot.seed, "stream": group.stream,
                "task": group.task_json, "siblings": group.n_siblings, "refills": group.refills, "refilled_by": refilled_by,
                "trace_id": trace_id(slot.traceparent) or None, "trace_sampled": is_sampled(slot.traceparent),
            }  # fmt: skip
            history = [(group.issued_at_us, {"what": "issued", "ordinal": key.ordinal})]
            history += self._event_history(conn, key)
            history += self._tool_history(conn, key)
            self._tell_lease(conn, key, story)
            self._tell_sample(conn, key, story, history)
            self._tell_verdict(conn, key, story, history)
            self._tell_training(conn, key, story, history)
        history.sort(key=lambda entry: entry[0])
        story["history"] = [{"at_s": at_us / 1e6} | entry for at_us, entry in history]
        return story

    def _row(self, conn: sa.Connection, table: sa.Table, key: SlotKey) -> Any:
        c = table.c
        where = (c.run_id == self.run.run_id, c.ordinal == key.ordinal, c.sibling == key.sibling)
        return conn.execute(sa.select(table).where(*where)).first()

    def _event_history(self, conn: sa.Connection, key: SlotKey) -> list[tuple[int, dict[str, Any]]]:
        e = t.event.c
        here = sa.or_(e.sibling == key.sibling, e.sibling.is_(None))
        rows = conn.execute(
            sa.select(t.event)
            .where(e.run_id == self.run.run_id, e.ordinal == key.ordinal, here)
            .order_by(e.seq)
            .limit(HISTORY_ROWS)
        )
        out = []
        for r in rows:
            ids = {"token": r.token, "worker": r.incarnation}
            entry = (
                {"what": r.kind} | {name: value for name, value in ids.items() if value is not None} | json.loads(r.detail_json)
            )
            out.append((r.at_us, entry))
        return out

    def _tool_history(self, conn: sa.Connection, key: SlotKey) -> list[tuple[int, dict[str, Any]]]:
        out = []
        for r in self._tool_rows(conn, key):
            out.append((r.requested_at_us, {"what": "tool_called", "call": r.call_index, "tool": r.tool, "token": r.lease_token}))
            if r.answered_at_us is not None:
                out.append((r.answered_at_us, {"what": "tool_answered", "call": r.call_index}))
        return out

    def _tell_lease(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any]) -> None:
        lease = self._row(conn, t.lease, key)
        if lease is not None:
            story["state"] = "leased" if lease.incarnation else "pending"
            story |= {"lease_token": lease.token, "attempt": lease.attempt, "worker": lease.incarnation}

    def _tell_sample(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: list[Any]) -> None:
        s = self._row(conn, t.sample, key)
        if s is None:
            return
        story |= {
            "state": "submitted", "worker": s.incarnation, "attempt": s.attempt, "lease_token": s.lease_token,
            "lineage": s.lineage, "n_tokens": s.n_tokens, "versions": f"{s.version_min}..{s.version_max}", "reward": s.reward,
            "reward_status": s.reward_status, "sandbox_status": s.sandbox_status, "finish_reason": s.finish_reason,
            "generate_s": s.generate_s, "verify_s": s.verify_s, "payload_digest": s.payload_digest,
        }  # fmt: skip
        history.append((s.accepted_at_us, {"what": "sample_accepted", "token": s.lease_token, "worker": s.incarnation,
                                           "reward": s.reward, "reward_status": s.reward_status}))  # fmt: skip

    def _tell_verdict(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: list[Any]) -> None:
        verdict = self._row(conn, t.verdict, key)
        if verdict is not None:
            story |= {"state": verdict.kind, "reason": verdict.reason}
            history.append((verdict.decided_at_us, {"what": "verdict", "verdict": verdict.kind, "reason": verdict.reason}))

    def _tell_training(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: list[Any]) -> None:
        run_id, i, p, o, c = self.run.run_id, t.plan_item.c, t.plan.c, t.plan_outcome.c, t.checkpoint.c
        lineage = self._newest_lineage()
        self._tell_closed_lineages(conn, key, history)
        item = conn.execute(
            sa.select(t.plan_item).where(
                i.run_id == run_id, i.ordinal == key.ordinal, i.sibling == key.sibling, self._along(i.lineage, i.step, lineage)
            )
        ).first()
        if item is None:
            return
        here = {"lineage": item.lineage, "step": item.step}
        plan = conn.execute(sa.select(t.plan).where(p.run_id == run_id, p.lineage == item.lineage, p.step == item.step)).one()
        story["members"] = self._members(conn, lineage, i.ordinal == key.ordinal)
        story |= {"state": "planned", "step": item.step, "position": item.pos, "lag": plan.base_version - int(
            self._row(conn, t.sample, key).version_min)}  # fmt: skip
        history.append((plan.planned_at_us, {"what": "planned", **here, "position": item.pos}))
        end = conn.execute(
            sa.select(t.plan_outcome).where(o.run_id == run_id, o.lineage == item.lineage, o.step == item.step)
        ).first()
        if end is not None:
            history.append((end.finished_at_us, {"what": end.outcome, **here, "reason": end.reason}))
        covering = conn.execute(
            sa.select(t.checkpoint).where(
                c.run_id == run_id, self._along(c.lineage, c.step, lineage), c.step >= item.step, c.state == "committed"
            ).order_by(c.step).limit(1)
        ).first()  # fmt: skip
        if covering is not None:
            story |= {"state": "applied", "checkpoint": covering.dir_name}
            history.append((covering.committed_at_us, {"what": "checkpoint", "step": covering.step, "dir": covering.dir_name}))

    def _tell_closed_lineages(self, conn: sa.Connection, key: SlotKey, history: list[Any]) -> None:
        """Plans of the slot that a fork has left behind; the new lineage repeats them (R7)."""
        run_id, i, p, o = self.run.run_id, t.plan_item.c, t.plan.c, t.plan_outcome.c
        if len(self._lineages) == 1:
            return
        rows = conn.execute(
            sa.select(i.lineage, i.step, i.pos, p.planned_at_us, o.outcome, o.reason, o.finished_at_us)
            .join(t.plan, sa.and_(p.run_id == i.run_id, p.lineage == i.lineage, p.step == i.step))
            .outerjoin(t.plan_outcome, sa.and_(o.run_id == i.run_id, o.lineage == i.lineage, o.step == i.step))
            .where(
                i.run_id == run_id, i.ordinal == key.ordinal, i.sibling == key.sibling,
                ~self._along(i.lineage, i.step, self._newest_lineage()),
            )
        ).all()  # fmt: skip
        for r in rows:
            here = {"lineage": r.lineage, "step": r.step}
            history.append((r.planned_at_us, {"what": "planned", **here, "position": r.pos}))
            if r.outcome is not None:
                history.append((r.finished_at_us, {"what": r.outcome, **here, "reason": r.reason}))
        if rows:
            c, first = t.lineage.c, min(r.lineage for r in rows)
            for fork in conn.execute(sa.select(t.lineage).where(c.run_id == run_id, c.lineage > first)):
                history.append((fork.created_at_us, {"what": "lineage_forked", "lineage": fork.lineage, "step": fork.fork_step}))


def _kept(table: sa.Table, kept: Kept) -> tuple[Any, ...]:
    """Condition on the rows of a table that are not in a group that is gone, or going."""
    return () if kept.low_watermark == 0 else (table.c.ordinal >= kept.low_watermark,)


def _and_gone(counts: dict[str, int], gone: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    return counts | {name: counts[name] + gone[of] for name, of in names.items()}
