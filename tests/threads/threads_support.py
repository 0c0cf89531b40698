"""What the thread tests share: a call's result or the class of its error, and groups that step through their life."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ledger_support import Scene

from ledger_bench import Bench
from rollbook.core.records import LeaseGrant, Plan, SlotKey, SubmitOutcome

ACCEPTED, REPLAYED, CONFLICT = SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED, SubmitOutcome.CONFLICT
FENCED, REFUSED, INVALID = SubmitOutcome.FENCED, SubmitOutcome.REFUSED, SubmitOutcome.INVALID


def outcome_of(call: Callable[[], Any]) -> Any:
    """What the call returns, or the class of what it raises; the test says which of the two is right."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the test compares it
        return type(error)


def of_groups(grants: Iterable[LeaseGrant], *ordinals: int) -> list[LeaseGrant]:
    """The grants of these groups."""
    return [g for g in grants if g.key.ordinal in ordinals]


def ordinals_of(items: Iterable[LeaseGrant] | Plan) -> list[int]:
    """Groups of grants or of a plan, in order."""
    keys: Iterable[SlotKey] = (i.key for i in (items.items if isinstance(items, Plan) else items))
    return sorted({key.ordinal for key in keys})


def drop_stale_group(s: Scene, bench: Bench) -> tuple[LeaseGrant, ...]:
    """Let group 0 grow two versions old under a bound of one and be dropped; returns the grants of the start.

    Needs ``max_lag_versions=1`` and ``groups_per_step=1``. One sample of group 0 is stored, the other never came.
    """
    s.feed(6)
    grants = s.lease()
    assert ordinals_of(grants) == [0, 1]
    s.submit(of_groups(grants, 0)[:1] + of_groups(grants, 1))
    s.train(1)
    s.fill(2)
    s.train(2)
    s.fill(2)
    s.plan(3)
    assert bench.rows("SELECT DISTINCT ordinal, kind FROM verdict") == [(0, "dropped_stale")]
    return grants
