"""Invariants of rows that were let go: their ranges are gapless, every slot in them is accounted for, nothing is left of them.

Owns the one check that looks below the low watermark. Never repairs anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from rollbook.ledger import schema as t
from rollbook.ledger.checks import Subject, check
from rollbook.ledger.expired import OF_GROUPS, in_range, load_totals


@check("expired_ranges", "P7", "What was let go lies gapless below the low watermark, with an end for every slot it held.")
def _expired_ranges(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    ranges = s.rows(sa.select(t.expired_range).where(s.here(t.expired_range)).order_by(t.expired_range.c.first_ordinal))
    ends = [0, *(r.end_ordinal for r in ranges)]
    gaps = [str(r.first_ordinal) for r, end in zip(ranges, ends, strict=False) if r.first_ordinal != end]
    if gaps or ends[-1] != s.kept.low_watermark:
        yield f"expired ranges that do not join from 0 to {s.kept.low_watermark}", gaps or [str(ends[-1])]
    lost = [str(r.first_ordinal) for r in ranges if r.n_slots != r.n_applied + r.n_verdicts]
    if lost:
        yield "expired ranges with slots that were neither trained nor judged", lost
    if max((r.last_step for r in ranges), default=0) + 1 != s.kept.replayable_from:
        yield "the first replayable step is not the one behind the expired ranges", [str(s.kept.replayable_from)]
    verdicts = load_totals(s.conn, s.run.run_id).get("verdicts", {})
    if sum(verdicts.values()) != sum(r.n_verdicts for r in ranges):
        yield "verdicts by kind are not those of the expired ranges", sorted(verdicts) or ["none"]
    yield from _left(s, [r for r in ranges if r.state == "gone"])


def _left(s: Subject, gone: Sequence[sa.Row]) -> Iterator[tuple[str, Sequence[str]]]:
    """Rows that should be gone."""
    for table in OF_GROUPS:
        left = [
            str(r.first_ordinal) for r in gone
            if s.rows(
                sa.select(table.c.ordinal)
                .where(*in_range(table, s.run.run_id, r.first_ordinal, r.end_ordinal, s.lineages)).limit(1)
            )
        ]  # fmt: skip
        if left:
            yield f"{table.name} rows left of expired ranges", left
