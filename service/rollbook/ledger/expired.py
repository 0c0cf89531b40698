"""What was counted in groups that were let go, and how it is added to what is counted in those that are kept.

Owns the content of ``retention.totals_json``. Never deletes anything. Upholds P7: a count over a run means the same before and
after rows were let go.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from rollbook.core.survival import UNKNOWN
from rollbook.ledger import schema as t

N = TypeVar("N", int, float)

OF_GROUPS = (t.plan_item, t.payload, t.sample, t.verdict, t.slot, t.prompt_group, t.tool_call, t.failure, t.lease)
"""Tables whose rows go with their group. ``event`` has its own age."""
SUMMED = ("verdicts", "events", "members", "figures")
"""Totals by name; the other ones are lists of rows, of which the last number counts or numbers add up by their key."""
TASKS_SHOWN = 16
UNNAMED, OTHER = "unnamed", "other"


def in_range(table: sa.Table, run_id: str, first: int, end: int, lineages: Sequence[int]) -> tuple[Any, ...]:
    """Rows of a run's groups from ``first`` to ``end``, so that a key that begins with the lineage is of use too."""
    c = table.c
    here = (c.run_id == run_id, c.ordinal >= first, c.ordinal < end)
    return (*here, c.lineage.in_(lineages)) if table is t.plan_item else here


def load_totals(conn: sa.Connection, run_id: str) -> dict[str, Any]:
    """What was counted in the groups of a run that are gone; empty when none is."""
    text = conn.execute(sa.select(t.retention.c.totals_json).where(t.retention.c.run_id == run_id)).scalar_one_or_none()
    return {} if text is None else dict(json.loads(text))


def range_sums(conn: sa.Connection, run_id: str) -> dict[str, int]:
    """Sums over the columns of ``expired_range``: ``groups``, ``closed``, ``refills``, ``slots``, ``samples``, ..."""
    c = t.expired_range.c
    names = [column.name for column in t.expired_range.columns if column.name.startswith("n_")]
    row = conn.execute(sa.select(*(sa.func.coalesce(sa.func.sum(c[name]), 0) for name in names)).where(c.run_id == run_id)).one()
    return {name.removeprefix("n_"): int(value) for name, value in zip(names, row, strict=True)}


def add_totals(a: Mapping[str, Any], b: Mapping[str, Any], buckets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The sum of two totals. ``buckets`` names those of each fixed dimension, in order."""
    out: dict[str, Any] = {name: sum_by_name(a.get(name, {}), b.get(name, {})) for name in SUMMED}
    out["failures"] = add_rows(a.get("failures", []), b.get("failures", []), ("status", "sandbox_status", "blame"))
    out["outcomes"] = add_rows(a.get("outcomes", []), b.get("outcomes", []), ("status", "sandbox_status", "blame"))
    one, other = a.get("dimensions", {}), b.get("dimensions", {})
    out["dimensions"] = {
        name: add_buckets(one.get(name, []), other.get(name, []), buckets.get(name)) for name in sorted({*one, *other})
    }
    return out


def sum_by_name(a: Mapping[str, N], b: Mapping[str, N]) -> dict[str, N]:
    """Numbers of the same name added up."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}


def add_rows(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with the same key become one; their other values are numbers and add up."""
    out: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (*a, *b):
        at = tuple(str(row[name]) for name in key)
        if at not in out:
            out[at] = dict(row)
            continue
        for name, value in row.items():
            if name not in key:
                out[at][name] += value
    return [out[at] for at in sorted(out)]


def add_buckets(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Two lists of survival rows as one; ``names`` None: kinds of tasks, of which the largest are shown."""
    made: dict[str, dict[str, Any]] = {}
    for row in (*a, *b):
        made[row["bucket"]] = _added(made.get(row["bucket"]), row)
    if names is None:
        kinds = sorted((k for k in made if k not in (UNNAMED, OTHER, UNKNOWN)), key=lambda k: (-made[k]["opened"], k))
        for kind in kinds[TASKS_SHOWN:]:
            made[OTHER] = _added(made.get(OTHER), made.pop(kind) | {"bucket": OTHER})
        return [made[k] for k in (*kinds[:TASKS_SHOWN], UNNAMED, OTHER, UNKNOWN) if k in made]
    known = [i for i, name in enumerate(names) if name in made]
    shown = list(names[known[0] : known[-1] + 1]) if known else []
    like = next(iter(made.values()), {})
    return [made.get(name) or _zero(like, name) for name in shown] + ([made[UNKNOWN]] if UNKNOWN in made else [])


def _added(a: Mapping[str, Any] | None, b: Mapping[str, Any]) -> dict[str, Any]:
    if a is None:
        return dict(b)
    return {
        name: value if name == "bucket" else sum_by_name(a[name], value) if isinstance(value, dict) else a[name] + value
        for name, value in b.items()
    }


def _zero(like: Mapping[str, Any], bucket: str) -> dict[str, Any]:
    return {
        name: bucket if name == "bucket" else {} if isinstance(value, dict) else type(value)(0) for name, value in like.items()
    }
