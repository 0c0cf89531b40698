"""Numbers of a range of groups that add up: what its rows say of rollouts, failures, waste and distributions.

Owns the names in ``figures`` and how each is counted. Never looks outside the range. A number of a range is final once
every group in it is, so sums over ranges are kept (``reading``, ``retention``). Upholds P7.

Histograms are counted at or below each bound: ``<metric>.<bound>``, ``<metric>.count``, ``<metric>.sum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import PlanOutcome, RewardStatus, SandboxStatus, VerdictKind
from rollbook.core.statuses import ENGINE_FAILED, WORKER_DIED
from rollbook.ledger import schema as t
from rollbook.ledger.breaker import SILENT
from rollbook.observe.metric_table import BY_NAME

STALE = (VerdictKind.DROPPED_STALE.value, VerdictKind.ORPHAN_VERSION.value)
INFRA_SANDBOX = tuple(status.value for status in SandboxStatus if status.value.startswith("infra_"))


def bounds(metric: str) -> Sequence[float]:
    """Bounds of a metric's buckets."""
    return BY_NAME[metric].buckets


def figures_between(
    conn: sa.Connection, run_id: str, first: int, end: int | None, lineages: Sequence[int]
) -> dict[str, float]:
    """All figures of the groups from ``first`` to ``end`` (None: the newest). ``lineages``: every one of the run."""

    where = {"run_id": run_id, "first": first} | ({} if end is None else {"end": end})
    out: dict[str, float] = {}
    *single, by_reason = _statements(end is not None, tuple(lineages))
    for query in single:
        row = conn.execute(query, where).one()._mapping
        out |= {str(k): int(v) if v == int(v) else float(v) for k, v in row.items() if v is not None}
    for name, n, generate_s in conn.execute(by_reason, where):
        out[f"failed.{name}"] = int(n)
        out["failed"] = out.get("failed", 0) + int(n)
        out["wasted.failed"] = out.get("wasted.failed", 0.0) + float(generate_s or 0.0)
    return out


@lru_cache(maxsize=8)
def _statements(has_end: bool, lineages: tuple[int, ...]) -> tuple[sa.Select, ...]:
    """What is asked, built once: writing the several hundred expressions costs more than a small run's answers. Failures last."""

    def here(c: Any) -> tuple[Any, ...]:
        below = (c.ordinal < sa.bindparam("end"),) if has_end else ()
        return (c.run_id == sa.bindparam("run_id"), c.ordinal >= sa.bindparam("first"), *below)

    f = t.failure.c
    return (
        _samples(here), _issued(here), _prompt_tokens(here), _planned(here, lineages), _verdicts(here, lineages), _queue(here),
        sa.select(_failure_reason(f), sa.func.count(), sa.func.sum(f.generate_s)).where(*here(f)).group_by(sa.text("1")),
    )  # fmt: skip


def _count_where(condition: Any, name: str) -> Any:
    return sa.func.sum(sa.case((condition, 1), else_=0)).label(name)


def _sum_where(condition: Any, value: Any, name: str) -> Any:
    return sa.func.sum(sa.case((condition, value), else_=0)).label(name)


def _distribution(metric: str, value: Any, condition: Any = None, key: str = "") -> list[Any]:
    """Columns of a histogram of ``value``; a NULL is in none of them."""
    key = key or metric
    there = value.is_not(None) if condition is None else condition
    return [
        *(_count_where(sa.and_(there, value <= bound), f"{key}.{bound:g}") for bound in bounds(metric)),
        _count_where(there, f"{key}.count"),
        _sum_where(there, value, f"{key}.sum"),
    ]


def _samples(here: Any) -> sa.Select:
    s = t.sample.c
    judged = s.reward_status == RewardStatus.GIVEN.value
    return sa.select(
        sa.func.count().label("samples"), sa.func.sum(s.n_tokens).label("tokens"),
        *_distribution("completion_tokens", s.n_tokens), *_distribution("reward", s.reward),
        *_distribution("rollout_version_span_versions", s.version_max - s.version_min),
        *_distribution("rollout_attempts", s.attempt), *_distribution("reward_duration_seconds", s.verify_s, judged),
    ).where(*here(s))  # fmt: skip


def _issued(here: Any) -> sa.Select:
    return sa.select(sa.func.count().label("slots")).where(*here(t.slot.c))


def _prompt_tokens(here: Any) -> sa.Select:
    s, g = t.sample.c, t.prompt_group.c
    each = (
        sa.select(s.ordinal, sa.func.count().label("n")).where(*here(s)).group_by(s.ordinal).subquery("accepted")
    )  # fmt: skip
    n_bytes = sa.func.sum(each.c.n * sa.func.length(g.prompt_ids))
    both = sa.join(each, t.prompt_group, g.ordinal == each.c.ordinal)
    return sa.select(n_bytes.label("prompt_bytes")).select_from(both).where(*here(g))


def _planned(here: Any, lineages: Sequence[int]) -> sa.Select:
    """Slots in a plan, and what the first plan of each that had an outcome says of their device time.

    All lineages are named here and below: the key of ``plan_item`` begins with them, and without them SQLite would walk through
    the plans of the whole run for each slot.
    """
    i, s, o = t.plan_item.c, t.sample.c, t.plan_outcome.c
    first, decides = (_first_plans(lineages) if len(lineages) > 1 else (sa.true(), sa.true()))
    trained = sa.and_(o.outcome == PlanOutcome.TRAINED.value, i.valid, decides)
    wasted = sa.and_(o.outcome.is_not(None), ~sa.and_(o.outcome == PlanOutcome.TRAINED.value, i.valid), decides)
    lag = i.step - 1 - s.version_min
    return (
        sa.select(
            _count_where(first, "planned"), _count_where(trained, "consumed"),
            _sum_where(trained, s.n_tokens, "tokens_trained"), _sum_where(trained, s.generate_s, "generated_s"),
            _sum_where(wasted, s.generate_s, "wasted.skipped"),
            *_distribution("rollout_policy_lag_versions", lag, trained),
        )
        .select_from(t.plan_item)
        .join(t.sample, sa.and_(s.run_id == i.run_id, s.ordinal == i.ordinal, s.sibling == i.sibling))
        .outerjoin(t.plan_outcome, sa.and_(o.run_id == i.run_id, o.lineage == i.lineage, o.step == i.step))
        .where(*here(i), i.lineage.in_(lineages))
    )  # fmt: skip


def _first_plans(lineages: Sequence[int]) -> tuple[Any, Any]:
    """That no lineage before has the slot in a plan, and that none has it in a plan with an outcome."""
    i, older, ended = t.plan_item.c, t.plan_item.alias("older"), t.plan_outcome.alias("ended")
    same = (
        older.c.run_id == i.run_id, older.c.ordinal == i.ordinal, older.c.sibling == i.sibling,
        older.c.lineage.in_(lineages), older.c.lineage + 0 < i.lineage,
    )  # fmt: skip
    outcome = (ended.c.run_id == older.c.run_id, ended.c.lineage == older.c.lineage, ended.c.step == older.c.step)
    planned = sa.select(sa.literal(1)).select_from(older).where(*same).correlate(t.plan_item)
    decided = sa.select(sa.literal(1)).select_from(older.join(ended, sa.and_(*outcome))).where(*same).correlate(t.plan_item)
    return ~planned.exists(), ~decided.exists()


def _verdicts(here: Any, lineages: Sequence[int]) -> sa.Select:
    """Verdicts, and of slots with a sample that no plan has: what it had cost."""
    v, i = t.verdict.c, t.plan_item.c
    sampled: Any = v.generate_s.is_not(None)
    if len(lineages) > 1:
        same = (i.run_id == v.run_id, i.ordinal == v.ordinal, i.sibling == v.sibling)
        planned = sa.exists().where(*same, i.lineage.in_(lineages))
        sampled = sa.and_(sampled, ~planned)
    stale, other = sa.and_(sampled, v.kind.in_(STALE)), sa.and_(sampled, v.kind.not_in(STALE))
    return sa.select(
        sa.func.count().label("verdicts"), _count_where(sampled, "verdicts_with_sample"),
        _count_where(stale, "stale_dropped"), _count_where(other, "filtered"),
        _sum_where(stale, v.generate_s, "wasted.stale"), _sum_where(other, v.generate_s, "wasted.filtered"),
    ).where(*here(v))  # fmt: skip


def _queue(here: Any) -> sa.Select:
    """How long slots waited from issue to their first lease."""
    e, g = t.event.c, t.prompt_group.c
    waited_s = (e.at_us - g.issued_at_us) / 1e6
    return (
        sa.select(*_distribution("rollout_duration_seconds", waited_s, e.at_us >= g.issued_at_us, key="queue"))
        .select_from(t.prompt_group).join(t.event, sa.and_(e.run_id == g.run_id, e.ordinal == g.ordinal))
        .where(*here(g), e.kind.concat("") == "lease_granted", e.token == 1)
    )  # fmt: skip


def _failure_reason(f: Any) -> Any:
    """The word of the catalogue for a failed attempt; the first that fits."""
    return sa.case(
        (f.reason == SILENT, "lease_expired"),
        (f.reason == WORKER_DIED, "worker_died"),
        (sa.or_(f.sandbox_status == SandboxStatus.OOM.value, f.reason.contains("out of memory")), "oom"),
        (f.reason.startswith(ENGINE_FAILED, autoescape=True), "engine_error"),
        (f.sandbox_status == SandboxStatus.CANCELLED.value, "cancelled"),
        (f.sandbox_status.in_(INFRA_SANDBOX), "sandbox_failure"),
        (f.sandbox_status.in_((SandboxStatus.TIMEOUT_CPU.value, SandboxStatus.TIMEOUT_WALL.value)), "timeout"),
        (f.sandbox_status.in_((SandboxStatus.NO_CODE.value, SandboxStatus.SYNTAX_ERROR.value)), "parse_error"),
        (f.status == RewardStatus.TIMEOUT.value, "reward_timeout"),
        (f.status == RewardStatus.INFRA_ERROR.value, "sandbox_failure"),
        else_="invalid_reward",
    )
