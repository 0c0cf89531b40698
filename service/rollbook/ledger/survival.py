"""Who was dropped on the way to training: every opened slot, counted by what it was and by what became of it.

Owns the verb ``survival``. Never writes, and never moves rows to Python: dimensions are aggregates, in one snapshot, and
their answer has a bounded size. Upholds P7: over the buckets of each dimension every opened slot is counted exactly once, also
one that failed, expired, or was cancelled with its group. What the counts mean is ``core.survival``'s.

A slot's length and duration are its sample's; without a sample, the largest that one of its failed attempts reached; without
either they are unknown. Its difficulty is the pass rate (rewards of at least ``PASS``) of its group's other samples: the same
prompt at the same time, without the slot itself, so that a slot's own reward does not choose its bucket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import PlanOutcome, VerdictKind
from rollbook.core.survival import UNKNOWN, octave_names
from rollbook.ledger import schema as t
from rollbook.ledger.base import again_on_conflict, load_kept
from rollbook.ledger.breaker import CLOSED, OPENED
from rollbook.ledger.expired import OTHER, TASKS_SHOWN, UNNAMED, add_totals, load_totals
from rollbook.ledger.status import Status

WAITING = "waiting"
SKIPPED = "skipped"
NO_REWARD = "no_reward"
DROPS = (*(kind.value for kind in VerdictKind), SKIPPED, NO_REWARD)
"""Ways to leave without being trained: a verdict, a skipped step, a place in a plan without a reward."""

PASS = 0.5
TASK_CHARS_MAX = 64
TASK_KEYS = ("data_source", "environment", "task", "task_id")
"""Fields of a task that name its kind; the first that is there and is text counts."""
WORKERS_LOOKED_AT = 256
BREAKER_EVENTS_SHOWN = 32

LENGTHS = octave_names(0, 20)
DURATIONS = octave_names(-4, 12)
DIFFICULTIES = ("0", "0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1", "1")
"""Open below, closed above; the outer two are exactly 0 and 1."""
SPANS = ("0", *octave_names(0, 4))
BUCKETS = {"length": LENGTHS, "duration": DURATIONS, "difficulty": DIFFICULTIES, "version_span": SPANS}
"""Names of the known buckets of every dimension whose buckets are fixed."""


def _steps(value: Any, ends: Sequence[float]) -> Any:
    """Number of the bucket: the first ``i`` with value < ends[i], else len(ends)."""
    return sa.case(*[(value < sa.literal(end), i) for i, end in enumerate(ends)], else_=len(ends))


class Survival(Status):
    """The verb about drop bias."""

    @again_on_conflict
    def survival(self) -> dict[str, Any]:
        """Opened slots by dimension and bucket; keys as ``LedgerPort.survival`` lists them."""
        with self._read() as conn:
            run_id = self.run.run_id
            kept = Survival._totals_of(self, conn, load_kept(conn, run_id).low_watermark, None)
            all_of_it = add_totals(load_totals(conn, run_id), kept, named_buckets())
            return survival_of(all_of_it) | {
                "breaker": self._breaker_events(conn),
                "unsafe_workers": self._unsafe_workers(conn),
            }

    def _totals_of(self, conn: sa.Connection, first: int, end: int | None) -> dict[str, Any]:
        """What is counted in the groups from ``first`` to ``end`` (None: the newest), as ``retention.totals_json`` has it."""
        slots = self._slots_with_ends(first, end)
        i = t.plan_item.c
        return {
            "dimensions": self._fixed_rows(conn, slots, first, end) | {"task": self._task_rows(conn, slots)},
            "failures": self._failures_by_kind(conn, first, end),
            "outcomes": self._sample_outcomes(conn, first, end),
            "verdicts": self._counts(conn, t.verdict, t.verdict.c.kind, *_between(t.verdict.c, first, end)),
            "members": self._members(conn, self._newest_lineage(), *_between(i, first, end)),
        }

    def _slots_with_ends(self, first: int, end_ordinal: int | None) -> sa.CTE:
        """One row per opened slot: what is known of it, and what became of it along the newest ancestry.

        A statement that names it more than once has the database join it once.
        """
        run_id = self.run.run_id
        e, s, v, i, o = t.event.c, t.sample.c, t.verdict.c, t.plan_item.c, t.plan_outcome.c

        def same_slot(c: Any) -> Any:
            return sa.and_(c.run_id == run_id, c.ordinal == e.ordinal, c.sibling == e.sibling)

        f = (
            sa.select(
                t.failure.c.ordinal, t.failure.c.sibling, sa.func.max(t.failure.c.n_tokens).label("n_tokens"),
                sa.func.max(t.failure.c.generate_s + t.failure.c.verify_s).label("seconds"),
            ).where(t.failure.c.run_id == run_id, *_between(t.failure.c, first, end_ordinal))
            .group_by(t.failure.c.ordinal, t.failure.c.sibling).subquery("failed")
        )  # fmt: skip
        end = sa.case(
            (sa.and_(i.ordinal.is_not(None), ~i.valid), NO_REWARD),
            (o.outcome.is_not(None), o.outcome),
            (i.ordinal.is_not(None), WAITING),
            (v.kind.is_not(None), v.kind),
            else_=WAITING,
        )
        return (
            sa.select(
                e.ordinal, end.label("end"), s.reward, sa.case((s.ordinal.is_not(None), 1), else_=0).label("finished"),
                sa.func.coalesce(s.n_tokens, f.c.n_tokens, 0).label("n_tokens"),
                sa.func.coalesce(s.generate_s + s.verify_s, f.c.seconds, 0.0).label("seconds"),
                (s.version_max - s.version_min).label("span"),
            )
            .select_from(t.event)
            .outerjoin(t.sample, same_slot(s))
            .outerjoin(t.verdict, same_slot(v))
            .outerjoin(t.plan_item, sa.and_(same_slot(i), self._along(i.lineage, i.step, self._newest_lineage())))
            .outerjoin(t.plan_outcome, sa.and_(o.run_id == run_id, o.lineage == i.lineage, o.step == i.step))
            .outerjoin(f, sa.and_(f.c.ordinal == e.ordinal, f.c.sibling == e.sibling))
            # Every slot's first lease, and only that. By the plain kind SQLite would walk through the leases of all groups.
            .where(e.run_id == run_id, e.kind.concat("") == "lease_granted", e.token == 1, *_between(e, first, end_ordinal))
            .cte("opened")
        )  # fmt: skip

    def _fixed_rows(self, conn: sa.Connection, slots: sa.CTE, first: int, end: int | None) -> dict[str, list[dict[str, Any]]]:
        """The dimensions whose buckets are fixed, in one statement. A bucket is its number; NULL: unknown."""
        c = slots.c
        length = sa.case((c.n_tokens > 0, _steps(c.n_tokens, [2**i for i in range(1, 21)])))
        duration = sa.case((c.seconds > 0, _steps(c.seconds, [2.0**i for i in range(-3, 13)])))
        span = sa.case((c.span >= 0, _steps(c.span, (1, 2, 4, 8, 16))))
        sources = {
            "length": (slots, length), "duration": (slots, duration), "difficulty": self._with_difficulty(slots, first, end),
            "version_span": (slots, span),
        }  # fmt: skip
        assert sources.keys() == BUCKETS.keys()
        found: dict[str, list[Any]] = {name: [] for name in BUCKETS}
        for name, *row in conn.execute(sa.union_all(*(_counted(name, slots, *sources[name]) for name in BUCKETS))):
            found[name].append(row)
        return {name: _folded(found[name], names) for name, names in BUCKETS.items()}

    def _with_difficulty(self, slots: sa.CTE, first: int, end: int | None) -> tuple[Any, Any]:
        s, c = t.sample.c, slots.c
        rewarded = (s.run_id == self.run.run_id, s.reward.is_not(None), *_between(s, first, end))
        groups = (
            sa.select(s.ordinal, sa.func.count().label("n"), sa.func.sum(sa.case((s.reward >= PASS, 1), else_=0)).label("passed"))
            .where(*rewarded).group_by(s.ordinal).subquery("rewarded")
        )  # fmt: skip
        mine = sa.case((c.reward.is_not(None), 1), else_=0)
        others = groups.c.n - mine
        passed = groups.c.passed - sa.case((c.reward >= PASS, 1), else_=0)
        # Compared as whole numbers: 4 * passed <= k * others is passed / others <= k / 4 without rounding.
        bucket = sa.case(
            (sa.func.coalesce(others, 0) <= 0, sa.null()), (passed == 0, 0), (passed == others, 5),
            *[(4 * passed <= quarters * others, quarters) for quarters in (1, 2, 3)], else_=4,
        )  # fmt: skip
        return sa.outerjoin(slots, groups, groups.c.ordinal == c.ordinal), bucket

    def _task_rows(self, conn: sa.Connection, slots: sa.CTE) -> list[dict[str, Any]]:
        """The largest kinds of tasks, those without a name, and all others. Slots are added up before the task is read."""
        g, c = t.prompt_group.c, slots.c
        by_group = (
            sa.select(c.ordinal, c.end, *_sums_of_slots(c)).group_by(c.ordinal, c.end).cte("by_group")
        )  # fmt: skip
        b = by_group.c
        task = _task_name(g.task_json, is_sqlite=self._database.is_sqlite)
        by_task = (
            sa.select(task.label("task"), b.end, *_sums_of(b))
            .select_from(sa.join(by_group, t.prompt_group, sa.and_(g.run_id == self.run.run_id, g.ordinal == b.ordinal)))
            .group_by(sa.text("1"), b.end).cte("by_task")
        )  # fmt: skip
        k, size = by_task.c, sa.func.sum(by_task.c.n)
        largest = (
            sa.select(k.task, size.label("size")).where(k.task.is_not(None)).group_by(k.task)
            .order_by(size.desc(), k.task).limit(TASKS_SHOWN).cte("largest")
        )  # fmt: skip
        is_named, one = k.task.is_not(None), largest.c
        rows = conn.execute(
            sa.select(one.task, one.size, is_named, k.end, *_sums_of(k))
            .select_from(sa.outerjoin(by_task, largest, one.task == k.task))
            .group_by(one.task, one.size, is_named, k.end)
        ).all()
        shown = [name for _, name in sorted({(-int(row[1]), row[0]) for row in rows if row[0] is not None})]
        place = {name: i for i, name in enumerate(shown)}
        reserved = (UNNAMED, OTHER, UNKNOWN)
        texts = [name.decode(errors="replace") if isinstance(name, bytes) else name for name in shown]
        names = [f"{text} (task)" if text in reserved else text for text in texts]
        placed = [(place[name] if name is not None else len(shown) + bool(named), *row) for name, _, named, *row in rows]
        return [row for row in _folded(placed, [*names, UNNAMED, OTHER]) if row["opened"] or row["bucket"] in names]

    def _failures_by_kind(self, conn: sa.Connection, first: int, end: int | None) -> list[dict[str, Any]]:
        f = t.failure.c
        kind = (f.status, f.sandbox_status, f.blame)
        rows = conn.execute(
            sa.select(*kind, sa.func.count(), sa.func.coalesce(sa.func.sum(f.n_tokens), 0))
            .where(f.run_id == self.run.run_id, *_between(f, first, end)).group_by(*kind).order_by(*kind)
        )  # fmt: skip
        names = ("status", "sandbox_status", "blame", "attempts", "n_tokens")
        return [dict(zip(names, (*row[:3], int(row[3]), int(row[4])), strict=True)) for row in rows]

    def _sample_outcomes(self, conn: sa.Connection, first: int, end: int | None) -> list[dict[str, Any]]:
        """Accepted samples whose program or tools failed."""
        s = t.sample.c
        kind = (s.reward_status, s.sandbox_status, s.blame)
        rows = conn.execute(
            sa.select(*kind, sa.func.count())
            .where(s.run_id == self.run.run_id, s.blame.is_not(None), *_between(s, first, end)).group_by(*kind).order_by(*kind)
        )  # fmt: skip
        return [dict(zip(("status", "sandbox_status", "blame", "samples"), (*row[:3], int(row[3])), strict=True)) for row in rows]

    def _breaker_events(self, conn: sa.Connection) -> dict[str, Any]:
        """How often the circuit breaker opened, and its newest events, oldest first."""
        rows = self._newest_events(conn, (OPENED, CLOSED), BREAKER_EVENTS_SHOWN)
        events = [{"what": r.kind, "at_s": r.at_us / 1e6, **json.loads(r.detail_json)} for r in reversed(rows)]
        return {"opened": self._count(conn, t.event, t.event.c.kind == OPENED), "events": events}

    def _unsafe_workers(self, conn: sa.Connection) -> int:
        """Workers, past ones included, that ran model-written code where nothing is contained; counted up to a bound."""
        w = t.worker.c
        rows = conn.execute(
            sa.select(w.labels_json)
            .where(w.run_id == self.run.run_id, w.labels_json.contains('"unsafe"'))
            .limit(WORKERS_LOOKED_AT)
        )
        return sum(_is_unsafe(labels_json) for (labels_json,) in rows)


def survival_of(totals: Mapping[str, Any]) -> dict[str, Any]:
    """What ``survival`` says of totals."""
    rows = {name: totals[name] for name in ("dimensions", "failures", "outcomes")}
    return _totals(totals["dimensions"]["length"]) | rows


def named_buckets() -> dict[str, Sequence[str]]:
    """Names of the known buckets of every dimension whose buckets are fixed."""
    return dict(BUCKETS)


def _between(c: Any, first: int, end: int | None) -> tuple[Any, ...]:
    return (c.ordinal >= first,) if end is None else (c.ordinal >= first, c.ordinal < end)


def _is_unsafe(labels_json: str) -> bool:
    try:
        labels = json.loads(labels_json)
    except ValueError:
        return False
    sandbox = labels.get("sandbox") if isinstance(labels, dict) else None
    return (sandbox.get("backend") if isinstance(sandbox, dict) else sandbox) == "unsafe"


def _task_name(task_json: Any, *, is_sqlite: bool) -> Any:
    """Text of the first of ``TASK_KEYS`` in a task, else NULL. Whatever the task holds, reading it raises nothing.

    SQLite reads JSON, and answers with bytes: half of a surrogate pair, which JSON can write, is no text. PostgreSQL before 16
    cannot tell whether a text is JSON before it fails on it, so there the key is searched for in the text, where it may also
    stand deeper than at the top.
    """
    if not is_sqlite:
        found = [sa.func.substring(task_json, rf'"{key}":\s*"([^"\\]{{1,{TASK_CHARS_MAX}}})') for key in TASK_KEYS]
        return sa.func.coalesce(*found)
    read = [
        sa.case((sa.func.json_type(task_json, at) == "text", sa.func.nullif(sa.func.json_extract(task_json, at), "")))
        for at in (f"$.{key}" for key in TASK_KEYS)
    ]
    named = sa.func.substr(sa.func.coalesce(*read), 1, TASK_CHARS_MAX)
    return sa.cast(sa.case((sa.func.json_valid(task_json) == 1, named)), sa.LargeBinary)


def _sums(n: Any, finished: Any, rewarded: Any, reward: Any) -> tuple[Any, ...]:
    """Slots, finished ones, ones with a reward, their rewards' sum."""
    reward_sum = sa.func.coalesce(sa.func.sum(reward), 0.0)
    return n.label("n"), finished.label("finished"), rewarded.label("rewarded"), reward_sum.label("reward_sum")


def _sums_of_slots(c: Any) -> tuple[Any, ...]:
    return _sums(sa.func.count(), sa.func.sum(c.finished), sa.func.count(c.reward), c.reward)


def _sums_of(c: Any) -> tuple[Any, ...]:
    """Such sums added up."""
    return _sums(sa.func.sum(c.n), sa.func.sum(c.finished), sa.func.sum(c.rewarded), c.reward_sum)


def _counted(name: str, slots: sa.CTE, source: Any, bucket: Any) -> sa.Select:
    """(name, bucket, end) with the sums of its slots."""
    c = slots.c
    inner = sa.select(bucket.label("bucket"), c.end, c.finished, c.reward).select_from(source).subquery(f"by_{name}")
    return sa.select(sa.literal(name), inner.c.bucket, inner.c.end, *_sums_of_slots(inner.c)).group_by(
        inner.c.bucket, inner.c.end
    )


def _folded(rows: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """One entry per bucket in order, ``unknown`` last; buckets nobody is in are left out at both ends."""
    made = [_empty(name) for name in (*names, UNKNOWN)]
    for bucket, end, n, finished, rewarded, reward_sum in rows:
        entry = made[len(names) if bucket is None else int(bucket)]
        entry["opened"] += int(n)
        entry["finished"] += int(finished)
        entry["rewarded"] += int(rewarded)
        entry["rewarded_sum"] += float(reward_sum)
        if end == PlanOutcome.TRAINED.value:
            entry["trained"] += int(n)
            entry["reward_sum"] += float(reward_sum)
        elif end == WAITING:
            entry["waiting"] += int(n)
        else:
            entry["dropped"][end] = entry["dropped"].get(end, 0) + int(n)
    known = [i for i, entry in enumerate(made[:-1]) if entry["opened"]]
    shown = made[known[0] : known[-1] + 1] if known else []
    return shown + ([made[-1]] if made[-1]["opened"] else [])


def _empty(name: str) -> dict[str, Any]:
    return {
        "bucket": name, "opened": 0, "finished": 0, "trained": 0, "waiting": 0, "dropped": {}, "rewarded": 0, "rewarded_sum": 0.0,
        "reward_sum": 0.0,
    }  # fmt: skip


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the buckets of one dimension, which are those of every dimension."""
    dropped = {kind: sum(row["dropped"].get(kind, 0) for row in rows) for kind in DROPS}
    return {name: sum(row[name] for row in rows) for name in ("opened", "finished", "trained", "waiting")} | {"dropped": dropped}
