"""The story of one rollout, from rows alone: who was asked for it, what happened to each attempt, and what it was good for.

Owns ``explain``. Never writes. Every entry comes from a row that the protocol needs anyway (P7), so the story is as true after a
restart as before it.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import UnknownSlot
from rollbook.core.packing import unpack_f32, unpack_i32
from rollbook.core.records import Blame, CheckpointState, FinishReason, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.base import again_on_conflict
from rollbook.ledger.submitting import unpack_versions
from rollbook.ledger.tools import Tools
from rollbook.observe.tracing import is_sampled, trace_id

HISTORY_ROWS = 1000
"""Most events of one slot in its story."""
WAITS = {
    "pending": "it waits for a worker", "leased": "a worker has it", "submitted": "it waits for a step to take it",
    "planned": "its step is not in a checkpoint yet",
}  # fmt: skip
History = list[tuple[int, dict[str, Any]]]


class Story(Tools):
    """The verb that tells everything about one slot."""

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

    @again_on_conflict
    def explain(self, key: SlotKey) -> dict[str, Any]:
        """The whole story of one rollout in order: issue, leases, failures, tool calls, sample, plan, step, checkpoint.

        Returns scalars for a summary, ``end`` (what became of it, in one sentence) and ``history``: entries with ``at_s``,
        ``what`` and the ids that matter. Raises: UnknownSlot, Expired.
        """
        run_id, g = self.run.run_id, t.prompt_group.c
        self._refuse_expired(key.ordinal)
        with self._read() as conn:
            slot = self._row(conn, t.slot, key)
            if slot is None:
                raise UnknownSlot(f"run {run_id!r} has no sample {key}; {self._what_exists(conn, key)}")
            group = conn.execute(sa.select(t.prompt_group).where(g.run_id == run_id, g.ordinal == key.ordinal)).one()
            refilled_by = conn.execute(
                sa.select(g.ordinal).where(g.run_id == run_id, g.refills == key.ordinal)
            ).scalar_one_or_none()
            story: dict[str, Any] = {
                "sample_id": str(key), "run_id": run_id, "state": "pending", "seed": slot.seed, "stream": group.stream,
                "task": group.task_json, "siblings": group.n_siblings, "refills": group.refills, "refilled_by": refilled_by,
                "trace_id": trace_id(slot.traceparent) or None,
                "trace_sampled": is_sampled(slot.traceparent) if slot.traceparent else None,
            }  # fmt: skip
            history = [self._issued(conn, key, group)]
            history += self._event_history(conn, key)
            history += self._tool_history(conn, key)
            self._tell_lease(conn, key, story)
            self._tell_sample(conn, key, story, history)
            self._tell_verdict(conn, key, story, history)
            self._tell_training(conn, key, story, history)
        story["end"] = _end(story)
        history.sort(key=lambda entry: entry[0])
        story["history"] = [{"at_s": at_us / 1e6} | entry for at_us, entry in history]
        return story

    def _what_exists(self, conn: sa.Connection, key: SlotKey) -> str:
        c, run_id = t.prompt_group.c, self.run.run_id
        last = self._next_ordinal(conn, run_id) - 1
        n = conn.execute(sa.select(c.n_siblings).where(c.run_id == run_id, c.ordinal == key.ordinal)).scalar_one_or_none()
        if n is not None:
            return f"group {key.ordinal} has the siblings 0 to {n - 1}"
        if last < 0:
            return "no group has been issued yet"
        return f"ordinals go from {self._kept.low_watermark} to {last}"

    def _issued(self, conn: sa.Connection, key: SlotKey, group: Any) -> tuple[int, dict[str, Any]]:
        """The first entry: which task of which pass it is, and whose feeder was at work."""
        try:
            task = json.loads(group.task_json)
        except ValueError:
            task = None
        origin = task.get("task_origin") if isinstance(task, dict) else None
        known = {name: origin.get(name) for name in ("epoch", "task_index", "name")} if isinstance(origin, dict) else {}
        feeders = t.event.c.detail_json.contains('"role": "feeder"')
        terms = self._newest_events(conn, ("role_acquired",), 1, feeders, t.event.c.at_us <= group.issued_at_us)
        term = json.loads(terms[0].detail_json) if terms else {}
        return group.issued_at_us, {
            "what": "issued", "ordinal": key.ordinal, "epoch": known.get("epoch"), "task_index": known.get("task_index"),
            "task": known.get("name"), "feeder": term.get("holder"), "feeder_epoch": term.get("epoch"), "refills": group.refills,
        }  # fmt: skip

    def _row(self, conn: sa.Connection, table: sa.Table, key: SlotKey) -> Any:
        c = table.c
        where = (c.run_id == self.run.run_id, c.ordinal == key.ordinal, c.sibling == key.sibling)
        return conn.execute(sa.select(table).where(*where)).first()

    def _event_history(self, conn: sa.Connection, key: SlotKey) -> History:
        e = t.event.c
        here = sa.or_(e.sibling == key.sibling, e.sibling.is_(None))
        rows = conn.execute(
            sa.select(t.event)
            .where(e.run_id == self.run.run_id, e.ordinal == key.ordinal, here)
            .order_by(e.seq)
            .limit(HISTORY_ROWS)
        ).all()
        workers, failures = self._workers_named(conn, [r.incarnation for r in rows]), self._failures_by_token(conn, key)
        out = []
        for r in rows:
            ids = {"token": r.token, "worker": r.incarnation}
            entry = {"what": r.kind} | {name: value for name, value in ids.items() if value is not None}
            entry |= json.loads(r.detail_json)
            if r.kind == "lease_granted":
                entry |= workers.get(r.incarnation, {})
            elif r.kind in ("failure_reported", "lease_expired") and r.token in failures:
                entry |= failures.pop(r.token)[1]
            out.append((r.at_us, entry))
        # Events may be let go before the rows of their group.
        return out + [(at_us, {"what": "attempt_failed", "token": token} | said) for token, (at_us, said) in failures.items()]

    def _workers_named(self, conn: sa.Connection, incarnations: list[Any]) -> dict[str, dict[str, Any]]:
        w = t.worker.c
        query = sa.select(w.incarnation, w.host, w.engine).where(
            w.run_id == self.run.run_id, w.incarnation.in_({name for name in incarnations if name})
        )
        return {r.incarnation: {"host": r.host, "engine": r.engine} for r in conn.execute(query)}

    def _failures_by_token(self, conn: sa.Connection, key: SlotKey) -> dict[int, tuple[int, dict[str, Any]]]:
        f = t.failure.c
        rows = conn.execute(
            sa.select(t.failure).where(f.run_id == self.run.run_id, f.ordinal == key.ordinal, f.sibling == key.sibling)
            .order_by(f.lease_token).limit(HISTORY_ROWS)
        )  # fmt: skip
        return {
            r.lease_token: (r.reported_at_us, {
                "status": r.status, "blame": r.blame, "reason": r.reason, "sandbox_status": r.sandbox_status,
                "attempt": r.attempt, "n_tokens": r.n_tokens, "generate_s": r.generate_s, "verify_s": r.verify_s,
                "final": r.final,
            })
            for r in rows
        }  # fmt: skip

    def _tool_history(self, conn: sa.Connection, key: SlotKey) -> History:
        out = []
        for r in self._tool_rows(conn, key):
            out.append((r.requested_at_us, {"what": "tool_called", "call": r.call_index, "tool": r.tool, "token": r.lease_token}))
            if r.answered_at_us is not None:
                took_s = round((r.answered_at_us - r.requested_at_us) / 1e6, 6)
                out.append((r.answered_at_us, {"what": "tool_answered", "call": r.call_index, "tool": r.tool, "took_s": took_s}))
        return out

    def _tell_lease(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any]) -> None:
        lease = self._row(conn, t.lease, key)
        if lease is not None:
            story["state"] = "leased" if lease.incarnation else "pending"
            story |= {"lease_token": lease.token, "attempt": lease.attempt, "worker": lease.incarnation}

    def _tell_sample(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: History) -> None:
        s = self._row(conn, t.sample, key)
        if s is None:
            return
        story |= {
            "state": "submitted", "worker": s.incarnation, "attempt": s.attempt, "lease_token": s.lease_token,
            "lineage": s.lineage, "n_tokens": s.n_tokens, "versions": f"{s.version_min}..{s.version_max}", "reward": s.reward,
            "reward_status": s.reward_status, "sandbox_status": s.sandbox_status, "finish_reason": s.finish_reason,
            "generate_s": s.generate_s, "verify_s": s.verify_s, "payload_digest": s.payload_digest, "blame": s.blame,
        }  # fmt: skip
        logprobs = self._logprobs(conn, key)
        story |= logprobs
        history.append((s.accepted_at_us, {
            "what": "sample_accepted", "token": s.lease_token, "worker": s.incarnation, "reward": s.reward,
            "reward_status": s.reward_status, "n_tokens": s.n_tokens, "salvaged": s.salvaged or None,
            "logprob_mean": logprobs.get("logprob_mean"),
        }))  # fmt: skip

    def _logprobs(self, conn: sa.Connection, key: SlotKey) -> dict[str, Any]:
        """The worker's log-probs of the tokens that are trained on, in nats."""
        row = self._row(conn, t.payload, key)
        if row is None:
            return {}
        values = unpack_f32(row.logprobs)
        kept = [v for v, m in zip(values, row.loss_mask or b"\1" * len(values), strict=False) if m]
        if not kept:
            return {"n_trained_tokens": 0}
        return {
            "n_trained_tokens": len(kept), "logprob_mean": round(sum(kept) / len(kept), 6), "logprob_min": round(min(kept), 6),
            "logprob_sum": round(sum(kept), 6),
        }  # fmt: skip

    def _tell_verdict(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: History) -> None:
        verdict = self._row(conn, t.verdict, key)
        if verdict is not None:
            story |= {"state": verdict.kind, "reason": verdict.reason}
            history.append((verdict.decided_at_us, {"what": "verdict", "verdict": verdict.kind, "reason": verdict.reason}))

    def _tell_training(self, conn: sa.Connection, key: SlotKey, story: dict[str, Any], history: History) -> None:
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
        weight = self._weight(conn, key, item, plan)
        story |= {"state": "planned", "step": item.step, "position": item.pos, **weight}
        history.append((plan.planned_at_us, {
            "what": "planned", **here, "position": item.pos, "base_version": plan.base_version, "revision": plan.revision,
            "lag": weight["lag"], "valid": bool(item.valid),
        }))  # fmt: skip
        end = conn.execute(
            sa.select(t.plan_outcome).where(o.run_id == run_id, o.lineage == item.lineage, o.step == item.step)
        ).first()
        if end is not None:
            story |= {"outcome": end.outcome} | ({"reason": end.reason} if end.reason else {})
            history.append((end.finished_at_us, {"what": end.outcome, **here, "reason": end.reason}))
        where = (c.run_id == run_id, self._along(c.lineage, c.step, lineage), c.step >= item.step)
        oldest = sa.select(t.checkpoint).where(*where).order_by(c.step).limit(1)
        kept = conn.execute(oldest.where(c.state == CheckpointState.COMMITTED.value)).first()
        if kept is not None:
            story |= {"state": "applied", "checkpoint": kept.dir_name}
            first = conn.execute(oldest.where(c.state != CheckpointState.CORRUPT.value)).one()
            history.append((first.committed_at_us, {
                "what": "checkpoint", "step": first.step, "dir": first.dir_name,
                "let_go": first.state == CheckpointState.DELETING.value or None,
            }))  # fmt: skip

    def _weight(self, conn: sa.Connection, key: SlotKey, item: Any, plan: Any) -> dict[str, Any]:
        """What the sample is within its step: its age, its reward beside its group's, its share of the step's tokens.

        ``lag`` is the age of its oldest token in versions, ``lag_tokens_mean`` that of all of them.
        """
        run_id, i, s = self.run.run_id, t.plan_item.c, t.sample.c
        sample = self._row(conn, t.sample, key)
        rewards = conn.execute(
            sa.select(i.reward).where(i.run_id == run_id, i.lineage == item.lineage, i.ordinal == key.ordinal, i.valid)
        ).scalars().all()  # fmt: skip
        tokens, items = conn.execute(
            sa.select(sa.func.coalesce(sa.func.sum(s.n_tokens), 0), sa.func.count())
            .join(t.sample, sa.and_(s.run_id == i.run_id, s.ordinal == i.ordinal, s.sibling == i.sibling))
            .where(i.run_id == run_id, i.lineage == item.lineage, i.step == item.step, i.valid)
        ).one()  # fmt: skip
        told: dict[str, Any] = {"lag": plan.base_version - int(sample.version_min), "lag_newest": plan.base_version - int(
            sample.version_max), "valid": bool(item.valid), "step_samples": int(items)}  # fmt: skip
        if (payload := self._row(conn, t.payload, key)) is not None:
            versions = unpack_i32(unpack_versions(payload.versions, sample.n_tokens))
            told["lag_tokens_mean"] = round(plan.base_version - sum(versions) / len(versions), 4)
        if item.valid and rewards:
            mean = sum(rewards) / len(rewards)
            told |= {"group_reward_mean": round(mean, 6), "reward_above_group": round(item.reward - mean, 6)}
            told["step_token_share"] = round(sample.n_tokens / int(tokens), 6) if tokens else None
        return told

    def _tell_closed_lineages(self, conn: sa.Connection, key: SlotKey, history: History) -> None:
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


def _end(story: dict[str, Any]) -> str:
    """What became of the slot, in one sentence."""
    state = story["state"]
    if state == "applied":
        if story.get("outcome") == "skipped":
            return f"planned for step {story['step']}, which was skipped: {story.get('reason', '')}"
        said = f"applied: step {story['step']} is part of checkpoint {story['checkpoint']}"
        return said + ("" if story.get("valid", True) else "; without a reward it trains nothing")
    if state in WAITS:
        return f"{state}: {WAITS[state]}"
    refilled = f"; group {story['refilled_by']} takes its place" if story.get("refilled_by") is not None else ""
    return f"{state}: {story.get('reason', 'no reason is recorded')}{refilled}"
