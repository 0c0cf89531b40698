"""Task streams: cursor, groups, slots, demand.

Owns ``cursor``, ``append_groups``, ``feed_demand`` and the insertion of groups (refills included, R5). Never reads a task's
content. Upholds R10: the cursor moves by compare-and-swap in the transaction that inserts the slots it covers, so no prompt is
skipped or issued twice. Ordinals are gapless over the whole run; every stream's cursor carries the run's next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from rollbook.core.bounds import SIBLINGS_MAX, json_object
from rollbook.core.errors import CursorMoved, InvalidRequest
from rollbook.core.idempotency import digest, sample_seed
from rollbook.core.packing import unpack_i32
from rollbook.core.records import Cursor, GroupSpec, Role, RoleTerm, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.base import LedgerBase, again_on_conflict, load_kept
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint
from rollbook.observe.tracing import is_traceparent

GROUPS_MAX = 10_000
"""Most groups of one append."""
SLOTS_MAX = 1_000_000
"""Most slots of one append, over all its groups."""


class Feeding(LedgerBase):
    """Verbs of the feeder."""

    @again_on_conflict
    def cursor(self, stream: str) -> Cursor:
        """Where the stream stands; a fresh stream starts at the run's next ordinal (0 in a new run) with state ``{}``."""
        run_id = self.run.run_id
        with self._read() as conn:
            return self._cursor(conn, run_id, stream)

    def _cursor(self, conn: sa.Connection, run_id: str, stream: str) -> Cursor:
        c = t.cursor.c
        row = conn.execute(sa.select(t.cursor).where(c.run_id == run_id, c.stream == stream)).first()
        if row is None:
            return Cursor(stream, self._next_ordinal(conn, run_id), "{}", False)
        return Cursor(stream, row.next_ordinal, row.state_json, bool(row.exhausted))

    def _next_ordinal(self, conn: sa.Connection, run_id: str) -> int:
        last = conn.execute(sa.select(sa.func.max(t.prompt_group.c.ordinal)).where(t.prompt_group.c.run_id == run_id)).scalar()
        return 0 if last is None else int(last) + 1

    def append_groups(self, term: RoleTerm, before: Cursor, after: Cursor, groups: Sequence[GroupSpec]) -> Cursor:
        """Insert groups with their slots and move the cursor.

        Transaction: groups, slots, partitions, cursor, receipt. Idempotent: by (stream, before.next_ordinal, content digest).
        Raises: CursorMoved, InvalidRequest, Fenced.
        """
        _check_append(before, after, groups)
        key = _append_digest(before, after, groups)

        def append(txn: Txn) -> Cursor:
            self._check_term(txn, term, Role.FEEDER)
            standing = self._cursor(txn.conn, self.run.run_id, before.stream)
            if (again := self._appended(txn.conn, before, key)) is not None:
                if standing == before:  # an append without groups, made again after a revision took its exhausted flag back
                    self._move_cursor(txn, after)
                return again
            if standing != before:
                raise CursorMoved(
                    f"stream {before.stream!r} stands at ordinal {standing.next_ordinal}, the call starts at "
                    f"{before.next_ordinal}; read the cursor again"
                )
            self._insert_groups(txn, before.stream, groups)
            failpoint("ledger.append.before_cursor")
            self._move_cursor(txn, after)
            txn.conn.execute(
                sa.insert(t.append_receipt).values(
                    run_id=self.run.run_id,
                    stream=before.stream,
                    next_ordinal=before.next_ordinal,
                    request_digest=key,
                    after_next_ordinal=after.next_ordinal,
                    after_state_json=after.state_json,
                    after_exhausted=after.exhausted,
                    appended_at_us=txn.now_us,
                )  # fmt: skip
            )
            txn.rings |= {"lease", "plan"}
            failpoint("ledger.append.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.append.after_commit"))
            return after

        return self._write(append)

    def _appended(self, conn: sa.Connection, before: Cursor, key: str) -> Cursor | None:
        c = t.append_receipt.c
        row = conn.execute(
            sa.select(t.append_receipt).where(
                c.run_id == self.run.run_id,
                c.stream == before.stream,
                c.next_ordinal == before.next_ordinal,
                c.request_digest == key,
            )  # fmt: skip
        ).first()
        if row is None:
            return None
        return Cursor(before.stream, row.after_next_ordinal, row.after_state_json, bool(row.after_exhausted))

    def _move_cursor(self, txn: Txn, after: Cursor) -> None:
        run_id, c = self.run.run_id, t.cursor.c
        values = {"state_json": after.state_json, "exhausted": after.exhausted, "moved_at_us": txn.now_us}
        moved = txn.conn.execute(
            sa.update(t.cursor)
            .where(c.run_id == run_id, c.stream == after.stream)
            .values(**values, next_ordinal=after.next_ordinal)
        )
        if moved.rowcount == 0:
            row = {"run_id": run_id, "stream": after.stream, "next_ordinal": after.next_ordinal, **values}
            txn.conn.execute(sa.insert(t.cursor).values(**row))
        self._advance_cursors(txn, after.next_ordinal)

    def _advance_cursors(self, txn: Txn, next_ordinal: int) -> None:
        """Every stream continues behind what any stream or refill has issued."""
        where = (t.cursor.c.run_id == self.run.run_id, t.cursor.c.next_ordinal < next_ordinal)
        txn.conn.execute(sa.update(t.cursor).where(*where).values(next_ordinal=next_ordinal))

    def _insert_groups(self, txn: Txn, stream: str, groups: Sequence[GroupSpec]) -> None:
        if not groups:
            return
        made = self._partitions.ensure(txn.conn, groups[-1].ordinal + 1, self._kept.low_watermark)
        txn.after_commit.append(lambda: self._partitions.remember(made))
        run_id, seed = self.run.run_id, self.rules.config_seed
        self._database.insert_rows(
            txn.conn,
            t.prompt_group,
            [
                {"run_id": run_id, "ordinal": g.ordinal, "stream": stream, "n_siblings": g.n_siblings,
                 "prompt_ids": g.prompt_ids, "task_json": g.task_json, "refills": g.refills, "issued_at_us": txn.now_us}
                for g in groups
            ],
        )  # fmt: skip
        self._database.insert_rows(
            txn.conn,
            t.slot,
            [
                {"run_id": run_id, "ordinal": g.ordinal, "sibling": s, "seed": sample_seed(seed, SlotKey(g.ordinal, s)),
                 "traceparent": g.traceparents[s] if g.traceparents else None}
                for g in groups
                for s in range(g.n_siblings)
            ],
        )  # fmt: skip

    @again_on_conflict
    def feed_demand(self, lookahead_groups: int) -> int:
        """How many further groups the feeder should append so that ``lookahead_groups`` unopened ones wait.

        Never more than the configured steps can train.
        """
        run_id, rules = self.run.run_id, self.rules
        with self._read() as conn:
            issued, low = self._next_ordinal(conn, run_id), load_kept(conn, run_id).low_watermark
            terminal = self._n_terminal(conn, low, issued) + self._n_closed_gone(conn)
            frontier = self._frontier(conn)
            opened = frontier.ordinal + 1
            unopened = issued - opened - self._n_terminal(conn, opened, issued)
        useful = issued if self._is_fixed else issued - terminal
        wanted = max(0, lookahead_groups - unopened)
        return wanted if rules.steps <= 0 else max(0, min(wanted, rules.steps * rules.groups_per_step - useful))

    def _n_closed_gone(self, conn: sa.Connection) -> int:
        """Groups of which every slot had a verdict when they were let go."""
        c = t.expired_range.c
        gone = sa.select(sa.func.coalesce(sa.func.sum(c.n_closed), 0)).where(c.run_id == self.run.run_id)
        return int(conn.execute(gone).scalar_one())

    def _frontier(self, conn: sa.Connection) -> SlotKey:
        """Largest slot ever granted; slots are granted in order, so everything behind it is new. (-1, -1) when none was."""
        best = SlotKey(-1, -1)
        for table in (t.lease, t.sample):
            row = conn.execute(_NEWEST_SLOT[table.name], {"run_id": self.run.run_id}).first()
            if row is not None:
                best = max(best, SlotKey(row.ordinal, row.sibling))
        return best

    def _n_terminal(self, conn: sa.Connection, first: int, end: int) -> int:
        """Number of groups in [first, end) of which every slot has a verdict."""

        def build() -> sa.Select:
            v, g = t.verdict.c, t.prompt_group.c
            closed = (
                sa.select(v.ordinal)
                .join(t.prompt_group, sa.and_(g.run_id == v.run_id, g.ordinal == v.ordinal))
                .where(v.run_id == self.run.run_id, v.ordinal >= sa.bindparam("first"), v.ordinal < sa.bindparam("end"))
                .group_by(v.ordinal, g.n_siblings)
                .having(sa.func.count() == g.n_siblings)
            )
            return sa.select(sa.func.count()).select_from(closed.subquery())

        return int(conn.execute(self._statement("terminal", build), {"first": first, "end": end}).scalar_one())


def _append_digest(before: Cursor, after: Cursor, groups: Sequence[GroupSpec]) -> str:
    fields: list[bytes | str | int] = ["append", before.stream, before.next_ordinal, before.state_json, int(before.exhausted)]
    fields += [after.next_ordinal, after.state_json, int(after.exhausted)]
    for g in groups:
        fields += [g.ordinal, g.prompt_ids, g.task_json, g.n_siblings, -1 if g.refills is None else g.refills]
    return digest(*fields)


def _check_append(before: Cursor, after: Cursor, groups: Sequence[GroupSpec]) -> None:
    if before.stream != after.stream:
        raise InvalidRequest(f"one append moves one stream, not {before.stream!r} to {after.stream!r}")
    json_object(after.state_json, "state_json")
    if len(groups) > GROUPS_MAX:
        raise InvalidRequest(f"{len(groups)} groups in one append; at most {GROUPS_MAX}")
    if after.next_ordinal != before.next_ordinal + len(groups):
        raise InvalidRequest(
            f"{len(groups)} groups from ordinal {before.next_ordinal} end at {before.next_ordinal + len(groups)}, "
            f"the cursor would move to {after.next_ordinal}"
        )
    for i, g in enumerate(groups):
        if g.ordinal != before.next_ordinal + i:
            raise InvalidRequest(f"group {i} of the append has ordinal {g.ordinal}, expected {before.next_ordinal + i}: no gaps")
        if not 1 <= g.n_siblings <= SIBLINGS_MAX:
            raise InvalidRequest(f"group {g.ordinal}: n_siblings = {g.n_siblings}: must be between 1 and {SIBLINGS_MAX}")
        if not g.prompt_ids or len(g.prompt_ids) % 4 or min(unpack_i32(g.prompt_ids)) < 0:
            raise InvalidRequest(f"group {g.ordinal}: needs a prompt of whole int32 token ids, none of them negative")
        if g.traceparents and (len(g.traceparents) != g.n_siblings or not all(map(is_traceparent, g.traceparents))):
            raise InvalidRequest(f"group {g.ordinal}: give a W3C traceparent of version 00 for every slot, or none at all")
        if g.refills is not None:
            raise InvalidRequest(f"group {g.ordinal}: refills are issued by the ledger, not by the feeder")
    if (n_slots := sum(g.n_siblings for g in groups)) > SLOTS_MAX:
        raise InvalidRequest(f"{n_slots} slots in one append; at most {SLOTS_MAX}")


_NEWEST_SLOT = {
    table.name: sa.select(table.c.ordinal, table.c.sibling)
    .where(table.c.run_id == sa.bindparam("run_id"))
    .order_by(table.c.run_id.desc(), table.c.ordinal.desc(), table.c.sibling.desc())
    .limit(1)
    for table in (t.lease, t.sample)
}
