"""Invariants of failures: a row per attempt that was dropped, blame where something failed, a breaker that is obeyed, poison.

Owns the checks of failures, of the circuit breaker and of tasks that were taken out as the cause. Never repairs anything. What
came first is told by the ``seq`` of events: clocks may have been set.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import RewardStatus, SlotKey, VerdictKind
from rollbook.ledger import schema as t
from rollbook.ledger.breaker import CLOSED, OPENED
from rollbook.ledger.checks import Subject, check, same_slot, slot_ids

WITHOUT_BLAME = ("ok", "not_used")


@check("blame", "P6", "Whatever went wrong in a sandbox says whose failure it was.")
def _blame(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c = t.sample.c
    # Ledgers of older releases blame nobody before the first that is blamed here.
    first = sa.select(sa.func.min(c.accepted_at_us)).where(s.here(t.sample), c.blame.is_not(None)).scalar_subquery()
    failed = (c.sandbox_status.not_in(WITHOUT_BLAME), c.blame.is_(None), c.accepted_at_us > first)
    rows = s.rows(sa.select(c.ordinal, c.sibling).where(s.here(t.sample), *failed))
    if rows:
        yield "samples whose sandbox failed without anybody to blame", slot_ids(rows)


@check("failure_rows", "P7", "Every failed slot has rows of its failed attempts, of leases that were granted.")
def _failure_rows(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    f, v, e = t.failure.c, t.verdict.c, t.event.c
    granted = sa.exists().where(same_slot(e, f), e.kind == "lease_granted", e.token == f.lease_token)
    rows = s.rows(sa.select(f.ordinal, f.sibling).where(s.here(t.failure), ~granted))
    if rows:
        yield "failures under a lease token that was never granted", slot_ids(rows)
    # Ledgers of older releases have no rows of what failed before the first one here.
    first = sa.select(sa.func.min(f.reported_at_us)).where(s.here(t.failure)).scalar_subquery()
    rows = s.rows(
        sa.select(v.ordinal, v.sibling).where(
            s.here(t.verdict), v.kind == VerdictKind.FAILED.value, v.decided_at_us > first, ~sa.exists().where(same_slot(f, v))
        )
    )
    if rows:
        yield "failed slots without a row of a failed attempt", slot_ids(rows)


@check("poison", "P9", "What was taken out as the cause failed on every worker it names; on those it killed, no other task did.")
def _poison(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    e, f = t.event.c, t.failure.c
    closed = s.rows(
        sa.select(e.ordinal, e.detail_json)
        .where(s.here(t.event), e.kind == "group_closed", e.detail_json.contains('"killed":'))
        .order_by(e.seq)
    )
    unfounded, shared = [], []
    for ordinal, detail_json in closed:
        said = json.loads(detail_json)
        key, workers, killed = SlotKey.parse(said["slot"]), set(said["workers"]), set(said["killed"])
        on_it = sa.select(f.incarnation).where(s.here(t.failure), f.ordinal == key.ordinal, f.sibling == key.sibling)
        if key.ordinal != ordinal or len(workers) < 2 or not killed <= workers <= {row.incarnation for row in s.rows(on_it)}:
            unfounded.append(key)
        others = sa.select(f.ordinal, f.sibling, f.incarnation).where(
            s.here(t.failure), f.ordinal != ordinal, f.incarnation.in_(killed), f.status == RewardStatus.NO_VERDICT.value
        )
        there: dict[tuple[int, int], set[str]] = defaultdict(set)
        for row in s.rows(others) if killed else ():
            there[row.ordinal, row.sibling].add(row.incarnation)
        shared += [SlotKey(*other) for other, dead in there.items() if dead >= killed]
    if unfounded:
        yield "slots taken out as the cause without a failure on each of the workers named", slot_ids(unfounded)
    if shared:
        yield "slots whose worker died each time that a task taken out for it killed one", slot_ids(shared)


@check("breaker", "P6", "The breaker opens and closes in turn; open, nothing is planned and slots are leased one at a time.")
def _breaker(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    e = t.event.c
    turns = s.rows(sa.select(e.seq, e.kind).where(s.here(t.event), e.kind.in_((OPENED, CLOSED))).order_by(e.seq))
    wrong = [str(turn.seq) for n, turn in enumerate(turns) if turn.kind != (OPENED, CLOSED)[n % 2]]
    if wrong:
        yield "the breaker opened twice, or closed without having opened (event numbers)", wrong
        return
    planned: list[str] = []
    together: list[Any] = []
    for n in range(0, len(turns), 2):
        span = [e.seq > turns[n].seq] + ([e.seq < turns[n + 1].seq] if n + 1 < len(turns) else [])
        inside = s.rows(
            sa.select(t.event).where(s.here(t.event), e.kind.in_(("step_planned", "lease_granted")), *span).order_by(e.seq)
        )
        planned += [str(row.seq) for row in inside if row.kind == "step_planned"]
        probes = [row for row in inside if row.kind == "lease_granted"]
        together += [old for old, new in zip(probes, probes[1:], strict=False) if not _over(s, old, new.seq)]
    if planned:
        yield "steps planned while the breaker was open (event numbers)", planned
    if together:
        yield "probes that were not over when the next one was leased", slot_ids(together)


def _over(s: Subject, probe: Any, seq: int) -> bool:
    """Whether the lease of this event had ended by then, as far as rows can tell: that a sample came in time they cannot."""
    e, c, v = t.event.c, t.sample.c, t.verdict.c
    ended = e.kind.in_(("failure_reported", "lease_expired", "lease_orphaned", "submit_refused"))
    own = sa.and_(ended, e.token == probe.token)
    for columns, where in (
        (e, (sa.or_(own, e.kind == "sample_salvaged"), e.seq < seq)), (c, (c.lease_token == probe.token,)), (v, ()),
    ):  # fmt: skip
        here = (columns.run_id == s.run.run_id, columns.ordinal == probe.ordinal, columns.sibling == probe.sibling)
        if s.conn.execute(sa.select(columns.ordinal).where(*here, *where).limit(1)).first() is not None:
            return True
    return False
