"""Defects in feeding, capacity and planning."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from mutants.registry import mutant
from rollbook.core.records import VerdictKind
from rollbook.ledger import schema as t


@mutant("rollbook.ledger.leasing", "Leasing._opened_unplanned")
def capacity_counts_from_the_restart_on(original: Any) -> Any:
    """AReaL#1388: the accepted-rollout counter begins at 0 after a recovery."""

    def opened(self: Any, conn: sa.Connection, lineage: int, frontier: Any) -> int:
        if not hasattr(self, "_opened_before"):
            self._opened_before = original(self, conn, lineage, frontier)
        return original(self, conn, lineage, frontier) - self._opened_before

    return opened


@mutant("rollbook.ledger.leasing", "Leasing._opened_unplanned")
def prompts_issued_again_are_not_counted(original: Any) -> Any:
    """verl#7759: what is re-issued after a crash takes no room, so the warm-up prompts come on top."""

    def opened(self: Any, conn: sa.Connection, lineage: int, frontier: Any) -> int:
        c = t.lease.c
        again = sa.select(sa.func.count(sa.distinct(c.ordinal))).where(c.run_id == self.run.run_id, c.attempt > 1)
        return original(self, conn, lineage, frontier) - conn.execute(again).scalar_one()

    return opened


@mutant("rollbook.ledger.leasing", "Leasing._opened_unplanned")
def finished_groups_are_counted_twice(original: Any) -> Any:
    """verl#7938: a finished task is counted as running and as done."""

    def opened(self: Any, conn: sa.Connection, lineage: int, frontier: Any) -> int:
        c = t.sample.c
        finished = sa.select(sa.func.count(sa.distinct(c.ordinal))).where(c.run_id == self.run.run_id)
        return original(self, conn, lineage, frontier) + conn.execute(finished).scalar_one()

    return opened


@mutant("rollbook.ledger.leasing", "Leasing._opened_unplanned")
def trained_groups_fill_the_restored_limiter(original: Any) -> Any:
    """reverb#103: a restored rate limiter still holds what was consumed and blocks fresh writers."""

    def opened(self: Any, conn: sa.Connection, lineage: int, frontier: Any) -> int:
        restored = self._term is not None and self._term.epoch > 1
        return frontier.ordinal + 1 if restored else original(self, conn, lineage, frontier)

    return opened


@mutant("rollbook.ledger.leasing", "may_open_groups")
def capacity_without_a_bound(original: Any) -> Any:
    """slime#1800: nothing limits how far rollouts run ahead."""
    return lambda opened, per_step, max_lag: 1000


@mutant("rollbook.core.staleness", "may_open_groups")
def capacity_one_step_too_large(original: Any) -> Any:
    """prime-rl#1902: the capacity allows one step more than the lag."""
    return lambda opened, per_step, max_lag: original(opened, per_step, max_lag + 1)


@mutant("rollbook.ledger.planning", "head_lag")
def lag_one_too_small(original: Any) -> Any:
    """prime-rl#1901: the check of the bound is off by one and lets the next older version in."""
    return lambda step, version_min: original(step, version_min) - 1


@mutant("rollbook.ledger.planning", "head_lag")
def lag_one_too_large(original: Any) -> Any:
    """prime-rl#1901: the check of the bound is off by one and refuses what is just allowed."""
    return lambda step, version_min: original(step, version_min) + 1


@mutant("rollbook.core.config", "Config.rules")
def lag_target_is_a_constant(original: Any) -> Any:
    """prime-rl#2812: the target lag is written in the code."""
    import dataclasses

    return lambda self: dataclasses.replace(original(self), max_lag_versions=1)


@mutant("rollbook.ledger.planning", "Planning._drop_stale")
def finished_groups_vanish_without_a_reason(original: Any) -> Any:
    """NeMo-RL#3480: a finished batch is passed over and nothing is written about it."""
    return lambda self, txn, group, step: None


@mutant("rollbook.ledger.leasing", "Leasing._opened_unplanned")
def a_dropped_group_is_not_an_end(original: Any) -> Any:
    """trl#7274: a dropped group counts as not done yet and holds its place for ever."""

    def opened(self: Any, conn: sa.Connection, lineage: int, frontier: Any) -> int:
        dropped = sa.select(sa.func.count(sa.distinct(t.verdict.c.ordinal))).where(t.verdict.c.run_id == self.run.run_id)
        return original(self, conn, lineage, frontier) + conn.execute(dropped).scalar_one()

    return opened


@mutant("rollbook.ledger.failing", "Failing._close_group")
def a_freed_index_is_used_again(original: Any) -> Any:
    """verl#7579: the place of a dropped sample is given to the next one, and a late write lands in it."""

    def close(self: Any, txn: Any, group: Any, kind: VerdictKind, reason: str, *, refill: bool) -> None:
        original(self, txn, group, kind, reason, refill=refill)
        if refill:
            here = {"run_id": self.run.run_id, "ordinal": group.ordinal}
            for table in (t.verdict, t.payload, t.sample):
                txn.conn.execute(sa.delete(table).where(*(table.c[name] == value for name, value in here.items())))
            row = txn.conn.execute(sa.select(t.worker.c.incarnation).limit(1)).scalar_one()
            free = {"token": 1, "attempt": 1, "incarnation": row, "lineage": 0, "version": 2, "extended_us": 0,
                    "granted_at_us": txn.now_us, "expires_at_us": txn.now_us + 10**12}  # fmt: skip
            txn.conn.execute(sa.insert(t.lease), [{**here, **free, "sibling": s} for s in range(group.n_siblings)])

    return close


@mutant("rollbook.ledger.failing", "Failing._give_verdicts")
def waste_is_not_recorded(original: Any) -> Any:
    """prime-rl#2957, tinker-cookbook#822: what a drop throws away leaves neither its length nor its time."""

    def give(self: Any, txn: Any, verdicts: Any) -> None:
        original(self, txn, verdicts)
        txn.conn.execute(sa.update(t.verdict).values(n_tokens=None, generate_s=None))

    return give


@mutant("rollbook.ledger.planning", "Planning._groups_between")
def trained_groups_are_served_again(original: Any) -> Any:
    """trl#6804: a buffer that runs short serves what it has served before."""

    def between(self: Any, conn: sa.Connection, first: int, end: int) -> Any:
        along, self._along = self._along, lambda a, b, lineage: sa.false()
        try:
            return original(self, conn, 0, end)
        finally:
            self._along = along

    return between


@mutant("rollbook.ledger.feeding", "Feeding.append_groups")
def the_cursor_moves_before_the_groups(original: Any) -> Any:
    """NeMo-RL#3599, OpenRLHF#1322: the position is saved by itself, ahead of the data it stands for."""

    def append(self: Any, term: Any, before: Any, after: Any, groups: Any) -> Any:
        self._write(lambda txn: self._move_cursor(txn, after))
        self._write(lambda txn: self._insert_groups(txn, before.stream, groups))
        return after

    return append


@mutant("rollbook.ledger.submitting", "check_trajectory")
def versions_stamped_at_completion(original: Any) -> Any:
    """rllm#622: a rollout has the version under which it ended, not the one under which it began."""

    def check(*args: Any) -> tuple[str, int, int]:
        reason, _, newest = original(*args)
        return reason, newest, newest

    return check


@mutant("rollbook.ledger.submitting", "pack_versions")
def one_version_for_a_whole_request(original: Any) -> Any:
    """vllm#54443: a request that ran while weights changed has one version."""
    return lambda trajectory: trajectory.versions[:4]


@mutant("rollbook.ledger.publishing", "Publishing.finish_plan")
def a_delayed_commit_ends_the_step_that_is_open(original: Any) -> Any:
    """jepsen Bufstream 0.1.0, KAFKA-17754: a delayed commit is applied to the transaction that is open when it arrives."""

    def finish(self: Any, term: Any, lineage: int, step: int, *rest: Any) -> None:
        original(self, term, lineage, self.resume_point().last_planned_step, *rest)

    return finish
