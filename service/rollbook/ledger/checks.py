"""What an invariant of the audit is made of: a subject to look at, a list to stand in, queries used by several.

Owns ``CHECKS`` and how a check gets into it. Never knows an invariant: they stand in the modules ``audit*``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import Lineage, RunRecord
from rollbook.ledger.base import Kept


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check looks at: one snapshot of one run."""

    conn: sa.Connection
    run: RunRecord
    lines: tuple[Lineage, ...]
    """Oldest first."""
    along: Callable[[Any, Any, int], sa.ColumnElement[bool]]
    """(lineage column, step column, lineage) to the condition "in its ancestry"."""
    kept: Kept = Kept()
    """What retention has let go is looked at by its own check only."""

    @property
    def lineages(self) -> tuple[int, ...]:
        return tuple(line.number for line in self.lines)

    def rows(self, query: sa.Select) -> list[Any]:
        return list(self.conn.execute(query).all())

    def here(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Rows of the run in ``table`` that are kept."""
        mine, low = table.c.run_id == self.run.run_id, self.kept.low_watermark
        if low == 0 or "ordinal" not in table.c:
            return mine
        return sa.and_(mine, sa.or_(table.c.ordinal >= low, table.c.ordinal.is_(None)))


Finder = Callable[[Subject], Iterator[tuple[str, Sequence[str]]]]


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant. ``find`` yields (detail, ids) per violation class."""

    name: str
    promise: str
    sentence: str
    find: Finder


CHECKS: list[Check] = []


def check(name: str, promise: str, sentence: str) -> Callable[[Finder], Finder]:
    """Register a finder."""

    def register(find: Finder) -> Finder:
        CHECKS.append(Check(name, promise, sentence, find))
        return find

    return register


def slot_ids(rows: Sequence[Any]) -> list[str]:
    return [f"{r.ordinal}.{r.sibling}" for r in rows]


def same_slot(a: Any, b: Any) -> sa.ColumnElement[bool]:
    return sa.and_(a.run_id == b.run_id, a.ordinal == b.ordinal, a.sibling == b.sibling)


def missing(subject: Subject, table: sa.Table, other: sa.Table) -> list[str]:
    """Slots of ``table`` without a row in ``other``."""
    c = table.c
    return slot_ids(subject.rows(
        sa.select(c.ordinal, c.sibling).where(subject.here(table), ~sa.exists().where(same_slot(c, other.c)))
        .order_by(c.ordinal, c.sibling)
    ))  # fmt: skip


def both(subject: Subject, table: sa.Table, other: sa.Table) -> list[str]:
    """Slots with a row in both tables."""
    c = table.c
    return slot_ids(subject.rows(
        sa.select(c.ordinal, c.sibling).distinct().where(subject.here(table), sa.exists().where(same_slot(c, other.c)))
        .order_by(c.ordinal, c.sibling)
    ))  # fmt: skip
