"""A new lineage, when a replay gave other weights than the recorded ones.

Owns ``fork_lineage``. Never judges weights: the learner states the difference it measured. Upholds R6 and R7: the recorded
plans behind the fork are copied, so that along the new ancestry steps stay gapless and samples trained once (P3), and what
happens to samples of versions behind the fork is decided and counted in the same transaction (P7).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import Conflict, InvalidRequest, NotFound
from rollbook.core.packing import unpack_i32
from rollbook.core.records import ForkVerdict, Lineage, Role, RoleTerm, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.base import load_lineages
from rollbook.ledger.publishing import Publishing
from rollbook.ledger.submitting import orphan_reason
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint


class Forking(Publishing):
    """The verb that closes a lineage and opens the next."""

    def fork_lineage(
        self, term: RoleTerm, parent: int, fork_step: int, difference: float | None, tolerance: float, keep_orphans: bool = False
    ) -> Lineage:
        """Close ``parent`` and continue from its step ``fork_step`` in a new lineage, under the same plans.

        ``difference`` is the largest relative weight difference found; None, nothing could be compared, is beyond any
        tolerance. Beyond it, groups with a sample, or a recorded turn, of a version behind the fork that is in no plan are
        closed as ``orphan_version`` and refilled, unless ``keep_orphans``.
        Transaction: lineage, copied plans, verdicts, refills. Idempotent: by (parent, fork_step).
        Raises: Conflict (``parent`` forked elsewhere), InvalidRequest (nothing is recorded behind the step), NotFound, Fenced.
        """
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise InvalidRequest(f"tolerance {tolerance}: must be a finite number >= 0")
        if keep_orphans and self._is_fixed:
            raise InvalidRequest("the fixed schedule keeps no orphans: their lag is longer than the one it is fixed to")
        if difference is not None and not (math.isfinite(difference) and difference >= 0):
            difference = None
        if difference is not None and difference <= tolerance:
            verdict = ForkVerdict.WITHIN
        else:
            verdict = ForkVerdict.KEPT if keep_orphans else ForkVerdict.DROPPED

        def fork(txn: Txn) -> Lineage:
            self._check_term(txn, term, Role.LEARNER)
            lines = load_lineages(txn.conn, self.run.run_id)
            if (made := _child(lines, parent, fork_step)) is not None:
                txn.after_commit.append(lambda: setattr(self, "_lineages", lines))
                return made
            self._check_forkable(txn.conn, lines, parent, fork_step)
            line = Lineage(lines[-1].number + 1, parent, fork_step, verdict, difference, tolerance)
            return self._fork(txn, term, lines, line)

        return self._write(fork)

    def _check_forkable(self, conn: sa.Connection, lines: tuple[Lineage, ...], parent: int, fork_step: int) -> None:
        if parent not in {line.number for line in lines}:
            raise NotFound(f"the run has no lineage {parent}; known: {', '.join(str(line.number) for line in lines)}")
        o = t.plan_outcome.c
        ended = conn.execute(
            sa.select(sa.func.max(o.step)).where(o.run_id == self.run.run_id, self._along(o.lineage, o.step, parent))
        ).scalar()
        if fork_step < 0 or self._version(conn, parent, fork_step) is None:
            raise InvalidRequest(f"lineage {parent} cannot fork at step {fork_step}: version {fork_step} is not published")
        self._refuse_unreplayable(fork_step + 1)  # plans behind the fork are copied whole
        if ended is None or ended <= fork_step:
            raise InvalidRequest(f"lineage {parent} has no outcome behind step {fork_step}: there is nothing to differ from")

    def _fork(self, txn: Txn, term: RoleTerm, lines: tuple[Lineage, ...], line: Lineage) -> Lineage:
        run_id = self.run.run_id
        orphans = self._unplanned_behind(txn.conn, line)
        n = sum(orphan.n for orphan in orphans)
        dropping = line.verdict is ForkVerdict.DROPPED
        line = dataclasses.replace(line, orphans_kept=0 if dropping else n, orphans_dropped=n if dropping else 0)
        txn.conn.execute(
            sa.insert(t.lineage).values(
                run_id=run_id, lineage=line.number, parent=line.parent, fork_step=line.fork_step, created_at_us=txn.now_us,
                verdict=line.verdict.value, difference=line.difference, tolerance=line.tolerance, orphans_kept=line.orphans_kept,
                orphans_dropped=line.orphans_dropped, epoch=term.epoch,
            )  # fmt: skip
        )
        n_plans = self._copy_plans(txn, term, line)
        self._event(
            txn, "lineage_forked", lineage=line.number, parent=line.parent, fork_step=line.fork_step, verdict=line.verdict.value,
            difference=line.difference, tolerance=line.tolerance, plans_copied=n_plans, orphans_kept=line.orphans_kept,
            orphans_dropped=line.orphans_dropped,
        )  # fmt: skip
        if dropping:
            self._drop_behind(txn, line, orphans)
        failpoint("ledger.fork.before_commit")
        txn.after_commit.append(lambda: setattr(self, "_lineages", (*lines, line)))
        txn.after_commit.append(lambda: failpoint("ledger.fork.after_commit"))
        txn.rings |= {"head", "lease", "plan"}
        return line

    def _unplanned_behind(self, conn: sa.Connection, line: Lineage) -> Sequence[Any]:
        """Samples of versions behind the fork that no plan uses: group's ordinal, lineage, newest version, how many."""
        s, v, i = t.sample.c, t.verdict.c, t.plan_item.c
        judged = sa.exists().where(v.run_id == s.run_id, v.ordinal == s.ordinal, v.sibling == s.sibling)
        planned = sa.exists().where(
            i.run_id == s.run_id, i.ordinal == s.ordinal, self._along(i.lineage, i.step, line.parent or 0)
        )
        return conn.execute(
            sa.select(s.ordinal, s.lineage, sa.func.max(s.version_max).label("version"), sa.func.count().label("n"))
            .where(s.run_id == self.run.run_id, s.ordinal >= self._watermark, s.version_max > line.fork_step, ~judged, ~planned)
            .group_by(s.ordinal, s.lineage).order_by(s.ordinal, s.lineage)
        ).all()  # fmt: skip

    def _turns_behind(self, conn: sa.Connection, line: Lineage) -> Iterator[tuple[int, int]]:
        """Open slots whose recorded turns are of a version behind the fork: group's ordinal, that version.

        Another attempt would go on from these turns, and once the new lineage has that number, nothing would tell whose they are.
        """
        c, s, v = t.tool_call.c, t.sample.c, t.verdict.c
        ended = [sa.exists().where(e.run_id == c.run_id, e.ordinal == c.ordinal, e.sibling == c.sibling) for e in (s, v)]
        rows = conn.execute(
            sa.select(c.ordinal, c.versions)
            .where(c.run_id == self.run.run_id, c.ordinal >= self._watermark, *(~over for over in ended)).order_by(c.ordinal)
        )  # fmt: skip
        for row in rows:
            if row.versions and (version := max(unpack_i32(row.versions))) > line.fork_step:
                yield row.ordinal, version

    def _copy_plans(self, txn: Txn, term: RoleTerm, line: Lineage) -> int:
        """Plans and items of the parent's ancestry behind the fork, under the new lineage."""
        n = 0
        for table in (t.plan, t.plan_item):
            c = table.c
            new = {
                "lineage": sa.literal(line.number), "epoch": sa.literal(term.epoch, sa.BigInteger),
                "planned_at_us": sa.literal(txn.now_us, sa.BigInteger),
            }  # fmt: skip
            names = [column.name for column in table.columns]
            rows = sa.select(*(new[name].label(name) if name in new else c[name] for name in names)).where(
                c.run_id == self.run.run_id, self._along(c.lineage, c.step, line.parent or 0), c.step > line.fork_step
            )
            done = txn.conn.execute(sa.insert(table).from_select(names, rows, include_defaults=False))
            n = done.rowcount if table is t.plan else n
        return n

    def _drop_behind(self, txn: Txn, line: Lineage, orphans: Sequence[Any]) -> None:
        """Close the groups of orphans and take back leases under which only further orphans could be sampled."""
        reasons = {o.ordinal: orphan_reason(o.lineage, o.version, line.fork_step) for o in orphans}
        for ordinal, version in self._turns_behind(txn.conn, line):
            reasons.setdefault(ordinal, orphan_reason(line.parent or 0, version, line.fork_step))
        for ordinal, reason in reasons.items():
            self._drop_orphan(txn, ordinal, reason)
        lease = t.lease.c
        held = txn.conn.execute(
            sa.select(t.lease).where(
                lease.run_id == self.run.run_id, lease.incarnation.is_not(None), lease.version > line.fork_step
            )
        ).all()
        self._free(txn, held, counts=False)
        self._events(txn, [
            self._event_row(txn, "lease_orphaned", SlotKey(row.ordinal, row.sibling), token=row.token,
                            incarnation=row.incarnation, version=row.version)
            for row in held
        ])  # fmt: skip


def _child(lines: tuple[Lineage, ...], parent: int, fork_step: int) -> Lineage | None:
    """The fork of ``parent``, if it was made before. Raises Conflict when it was made at another step."""
    made = next((line for line in lines if line.parent == parent), None)
    if made is not None and made.fork_step != fork_step:
        raise Conflict(
            f"lineage {parent} forked at step {made.fork_step} into lineage {made.number} and is closed; it cannot fork at "
            f"step {fork_step}"
        )
    return made
