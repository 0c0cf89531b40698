"""Invariants across forks: which versions a planned sample may have, and that the plans behind a fork are the parent's.

Owns the checks of the staleness law, because it is the law of R7 where lineages fork. Never repairs anything. A plan is
judged in the lineage that made it: its copies behind a fork are trained as they are recorded (R7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from rollbook.core.records import ForkVerdict, Lineage
from rollbook.core.staleness import oldest_effective
from rollbook.ledger import schema as t
from rollbook.ledger.base import earliest_fork
from rollbook.ledger.checks import Subject, check, same_slot, slot_ids

BEYOND = (ForkVerdict.KEPT, ForkVerdict.DROPPED)
COPIED = ("base_version", "revision", "n_groups", "n_items", "items_digest", "chain_digest")
"""Columns of a plan that its copy repeats."""


@check("head_lag", "P5", "No planned token is older than the bound of its plan's revision at the step that trains it.")
def _head_lag(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    i, p, c, r = t.plan_item.c, t.plan.c, t.sample.c, t.config_revision.c
    rows = s.rows(
        sa.select(i.ordinal, i.sibling)
        .join(t.plan, sa.and_(p.run_id == i.run_id, p.lineage == i.lineage, p.step == i.step))
        .join(t.config_revision, sa.and_(r.run_id == p.run_id, r.revision == p.revision))
        .join(t.sample, same_slot(c, i))
        .where(s.here(t.plan_item), p.base_version - c.version_min > r.max_lag_versions)
        .distinct()
    )
    if rows:
        yield "planned samples beyond the staleness bound", slot_ids(rows)
    far = [
        row for line, row in _across_forks(s)
        if row.base_version - _oldest(s.lines, line, row) > row.max_lag_versions >= row.base_version - row.version_min
    ]  # fmt: skip
    if far:
        yield "samples planned across a fork beyond the staleness bound", slot_ids(far)


@check("orphans", "P5", "What a fork dropped is in no later plan, and a slot is judged an orphan only where a fork drops.")
def _orphans(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    used = []
    for line, row in _across_forks(s):
        fork = earliest_fork(s.lines[: s.lines.index(line) + 1], row.lineage, (ForkVerdict.DROPPED,))
        if fork is not None and row.version_max > fork:
            used.append(row)
    if used:
        yield "samples of versions that a fork left behind, planned after it", slot_ids(used)
    v, c = t.verdict.c, t.sample.c
    verdicts = s.rows(sa.select(v.ordinal, v.sibling).where(s.here(t.verdict), v.kind == "orphan_version"))
    if verdicts and not any(line.verdict is ForkVerdict.DROPPED for line in s.lines):
        yield "orphan verdicts without a fork that drops", slot_ids(verdicts)
    sampled = s.rows(
        sa.select(v.ordinal, v.sibling).join(t.sample, same_slot(c, v)).where(s.here(t.verdict), v.kind == "orphan_version")
    )
    counted = sum(line.orphans_dropped for line in s.lines)
    if len(sampled) < counted and s.kept.low_watermark == 0:  # of those let go only the verdicts are counted, not their samples
        yield f"forks counted {counted} dropped samples, {len(sampled)} have the verdict", [str(line.number) for line in s.lines]


@check("forked_plans", "P4", "A lineage forks from the one before it at a published version, and repeats its plans behind that.")
def _forked_plans(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    p, version = t.plan.c, t.policy_version.c
    for before, line in zip(s.lines, s.lines[1:], strict=False):
        if line.parent != before.number:
            yield "lineages that do not fork from the one before them", [str(line.number)]
            continue
        shared = s.rows(
            sa.select(version.version).where(
                s.here(t.policy_version), s.along(version.lineage, version.version, before.number),
                version.version == line.fork_step,
            )  # fmt: skip
        )
        if not shared:
            yield "lineages forked at a version that is not published", [str(line.number)]
        recorded = s.rows(
            sa.select(t.plan).where(s.here(t.plan), s.along(p.lineage, p.step, before.number), p.step > line.fork_step)
        )
        copies = {row.step: row for row in s.rows(sa.select(t.plan).where(s.here(t.plan), p.lineage == line.number))}
        wrong = [
            f"{line.number}.{plan.step}" for plan in recorded
            if (copy := copies.get(plan.step)) is None or any(getattr(copy, n) != getattr(plan, n) for n in COPIED)
        ]  # fmt: skip
        if wrong:
            yield f"plans of lineage {line.number} that are not those recorded before its fork", wrong


def _across_forks(s: Subject) -> Iterator[tuple[Lineage, sa.Row]]:
    """Items of plans made after a fork beyond tolerance whose sample has a version behind it, with what they are judged by."""
    i, p, c, r = t.plan_item.c, t.plan.c, t.sample.c, t.config_revision.c
    older = t.plan.alias("older")
    for line in s.lines:
        known = s.lines[: s.lines.index(line) + 1]
        steps = [k.fork_step for k in known if k.parent is not None and k.verdict in BEYOND]
        if not steps:
            continue
        copied = sa.exists().where(older.c.run_id == p.run_id, older.c.step == p.step, older.c.lineage < p.lineage)
        for row in s.rows(
            sa.select(
                i.ordinal, i.sibling, c.lineage, c.version_min, c.version_max, p.base_version, r.max_lag_versions
            )
            .join(t.plan, sa.and_(p.run_id == i.run_id, p.lineage == i.lineage, p.step == i.step))
            .join(t.config_revision, sa.and_(r.run_id == p.run_id, r.revision == p.revision))
            .join(t.sample, same_slot(c, i))
            .where(
                s.here(t.plan_item), i.lineage == line.number, c.lineage < line.number, c.version_max > min(steps), ~copied
            )
            .order_by(i.ordinal, i.sibling)
        ):  # fmt: skip
            yield line, row


def _oldest(lines: tuple[Lineage, ...], line: Lineage, row: sa.Row) -> int:
    fork = earliest_fork(lines[: lines.index(line) + 1], row.lineage, BEYOND)
    return oldest_effective(row.version_min, row.version_max, fork)
