"""Rows that are let go: which, in what order, and what is left to tell of them (R16).

Owns ``expire`` and every row of ``retention`` and ``expired_range``. Off unless configured. A group may go when each of its slots
has a verdict or was trained at or below the second-newest committed checkpoint: no resume can need it. First the low watermark
is raised and what the groups held is counted, in one transaction; from then on they are answered EXPIRED. Then the rows go in
bounded transactions, and a crash in between is gone on from. Upholds P7 (what is gone stays counted) and P8 (every deletion is
a fenced write). Several runs may share PostgreSQL partitions: one that no run needs is detached and dropped; from one that
another run still needs, only this run's rows are deleted.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import RollbookError, ServerFenced
from rollbook.core.settings import RetentionConfig
from rollbook.ledger import schema as t
from rollbook.ledger.base import Kept, load_kept
from rollbook.ledger.expired import OF_GROUPS, add_totals, in_range, load_totals
from rollbook.ledger.reading import AGAIN, Reading
from rollbook.ledger.survival import named_buckets
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)

RANGES_MAX = 16
"""Ranges that one round lets go; the next round goes on."""
BATCHES_MAX = 10_000
"""Transactions of one round."""
DELETING, GONE = "deleting", "gone"


class Retaining(Reading):
    """What the server does about old rows."""

    def expire(self, retention: RetentionConfig | None = None) -> dict[str, int]:
        """One round: raise the low watermark where it may rise, delete what is below it, then old events and receipts.

        Returns the numbers of ``groups``, ``rows``, ``partitions``, ``bytes`` (of dropped partitions), ``events``, ``receipts``
        let go. A partition that readers hold is left to the next round. Does nothing unless retention is enabled; ``retention``
        replaces what the ledger was opened with.
        """
        self._retention = retention or self._retention
        freed = dict.fromkeys(("groups", "rows", "partitions", "bytes", "events", "receipts"), 0)
        if not self._retention.enabled:
            return freed
        for _ in range(RANGES_MAX):
            self._delete_marked(freed)
            n_groups = self._mark()
            freed["groups"] += n_groups
            if n_groups == 0:
                break
        self._delete_marked(freed)
        freed["events"] = self._repeat(self._delete_events)
        freed["receipts"] = self._repeat(self._delete_receipts)
        self._rounds += 1
        return freed

    def _keep_expiring(self) -> None:
        """Rounds at the configured interval until the ledger closes or is fenced; what fails is tried again."""
        while not self._bell.closed:
            self._bell.wait("closing", self._bell.seen("closing"), self._retention.every_s)
            if self._bell.closed or self._term is None:
                continue
            try:
                freed = self.expire()
            except ServerFenced:
                return
            except RollbookError as error:
                log.warning("old rows were not let go: %s", error, extra={"event": "retention_failed"})
            else:
                if any(freed.values()):
                    log.info("let old rows go", extra={"event": "retention", **freed})

    def _repeat(self, batch: Any) -> int:
        n = 0
        for _ in range(BATCHES_MAX):
            done = self._write(batch)
            n += done
            if done < self._retention.batch_rows:
                break
        return n

    def _mark(self) -> int:
        """Raise the low watermark over the next range that is finished; returns its number of groups, 0 where none is."""
        with self._read() as conn:
            kept, lineage = load_kept(conn, self.run.run_id), self._newest_lineage()
            committed = self._committed(conn)
            if len(committed) < 2:
                return 0
            checkpoint = committed[1]
            end = self._aligned(conn, kept.low_watermark, self._may_go_before(conn, kept.low_watermark, checkpoint.step))
            if end <= kept.low_watermark:
                return 0
            counts, totals = self._count_range(conn, kept.low_watermark, end)

        def mark(txn: Txn) -> int:
            now = self._committed(txn.conn)
            steps = [c.step for c in now[1:2]]
            if load_kept(txn.conn, self.run.run_id) != kept or self._newest_lineage() != lineage or steps < [checkpoint.step]:
                return 0  # something has changed since it was counted; the next round looks again
            moved = Kept(end, max(kept.replayable_from, counts["last_step"] + 1))
            self._move(txn, kept, moved, checkpoint.step, counts, totals)
            return end - kept.low_watermark

        return int(self._write(mark))

    def _move(
        self, txn: Txn, kept: Kept, moved: Kept, checkpoint_step: int, counts: dict[str, int], totals: dict[str, Any]
    ) -> None:
        run_id, first = self.run.run_id, kept.low_watermark
        txn.conn.execute(
            sa.insert(t.expired_range).values(
                run_id=run_id, first_ordinal=first, end_ordinal=moved.low_watermark, checkpoint_step=checkpoint_step,
                state=DELETING, expired_at_us=txn.now_us, **counts,
            )
        )  # fmt: skip
        everything = add_totals(load_totals(txn.conn, run_id), totals, named_buckets())
        values = {
            "low_watermark": moved.low_watermark, "replayable_from": moved.replayable_from, "moved_at_us": txn.now_us,
            "totals_json": json.dumps(everything, sort_keys=True),
        }  # fmt: skip
        here = t.retention.c.run_id == run_id
        if txn.conn.execute(sa.update(t.retention).where(here).values(**values)).rowcount == 0:
            txn.conn.execute(sa.insert(t.retention).values(run_id=run_id, **values))
        self._event(txn, "groups_expired", first=first, end=moved.low_watermark, checkpoint=checkpoint_step)
        txn.after_commit.append(lambda: setattr(self, "_kept", moved))
        failpoint("ledger.expire.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.expire.after_commit"))

    def _may_go_before(self, conn: sa.Connection, low: int, step: int) -> int:
        """First ordinal that must stay: unfinished at ``step``, or among those that planning and the breaker look at.

        The newest granted slot always stays: it is where leasing goes on.
        """
        rules = self.rules
        looked_at = math.ceil(rules.infra_window / rules.group_size) + rules.groups_per_step
        unfinished = self._find_watermark(conn, low, step)
        return min(unfinished, self._frontier(conn).ordinal, self._watermark - looked_at)

    def _aligned(self, conn: sa.Connection, low: int, end: int) -> int:
        """The end of the next range: one partition on PostgreSQL, whole multiples of ``retention.groups`` on SQLite."""
        if self._database.is_sqlite:
            return low + max(0, end - low) // self._retention.groups * self._retention.groups
        after = (low // self._partitions.width(conn) + 1) * self._partitions.width(conn)
        return after if after <= end else low

    def _count_range(self, conn: sa.Connection, first: int, end: int) -> tuple[dict[str, int], dict[str, Any]]:
        """What the groups hold, as columns of ``expired_range`` and as totals. All of it is final."""
        lineage = self._newest_lineage()
        g, i, s = t.prompt_group.c, t.plan_item.c, t.sample.c

        def count(table: sa.Table, *where: Any, of: Any = None) -> int:
            here = in_range(table, self.run.run_id, first, end, self._numbers())
            value = sa.func.count() if of is None else sa.func.coalesce(of, 0)
            return int(conn.execute(sa.select(value).select_from(table).where(*here, *where)).scalar_one())

        counts = {
            "last_step": count(t.plan_item, of=sa.func.max(i.step)),
            "n_groups": count(t.prompt_group),
            "n_closed": self._n_terminal(conn, first, end),
            "n_refills": count(t.prompt_group, g.refills.is_not(None)),
            "n_slots": count(t.slot),
            "n_samples": count(t.sample),
            "n_applied": count(t.plan_item, self._along(i.lineage, i.step, lineage)),
            "n_verdicts": count(t.verdict),
            "n_tokens": count(t.sample, of=sa.func.sum(s.n_tokens)),
        }
        return counts, self._totals_of(conn, first, end)

    def _delete_marked(self, freed: dict[str, int]) -> None:
        c = t.expired_range.c
        with self._read() as conn:
            ranges = conn.execute(
                sa.select(c.first_ordinal, c.end_ordinal)
                .where(c.run_id == self.run.run_id, c.state == DELETING).order_by(c.first_ordinal)
            ).all()  # fmt: skip
        for first, end in ranges:
            if not self._database.is_sqlite:
                for name, n in self._write(functools.partial(self._drop_partition, first=first)).items():
                    freed[name] += n
                if self._write(functools.partial(self._is_held, first=first)):
                    continue
            freed["rows"] += self._delete_range(first, end)
            self._write(functools.partial(self._finish, first=first, end=end))

    def _drop_partition(self, txn: Txn, first: int) -> dict[str, int]:
        n_bytes = self._partitions.drop(txn.conn, first)
        failpoint("ledger.expire.before_drop_commit")
        if n_bytes is None:
            return {}
        txn.after_commit.append(lambda: self._partitions.forget(first))
        return {"partitions": 1, "bytes": n_bytes}

    def _is_held(self, txn: Txn, first: int) -> bool:
        """Whether the partition may be dropped and still stands: readers hold it."""
        return self._partitions.exists(txn.conn, first) and not self._partitions.is_needed(txn.conn, first)

    def _delete_range(self, first: int, end: int) -> int:
        """Delete the run's rows of the groups in bounded transactions; returns how many there were."""
        per_batch = max(1, self._retention.batch_rows // (4 * self.rules.group_size + 1))
        n = 0
        for _ in range(BATCHES_MAX):
            done = self._write(lambda txn: self._delete_batch(txn, first, end, per_batch))
            if done == 0:
                break
            n += done
        return n

    def _delete_batch(self, txn: Txn, first: int, end: int, n_groups: int) -> int:
        run_id, lineages = self.run.run_id, self._numbers()
        lowest = [
            txn.conn.execute(
                sa.select(sa.func.min(table.c.ordinal)).where(*in_range(table, run_id, first, end, lineages))
            ).scalar() for table in OF_GROUPS
        ]  # fmt: skip
        found = [low for low in lowest if low is not None]
        if not found:
            return 0
        low = min(found)
        high = min(end, low + n_groups)
        n = 0
        for table in OF_GROUPS:
            n += txn.conn.execute(sa.delete(table).where(*in_range(table, run_id, low, high, lineages))).rowcount
        failpoint("ledger.expire.before_batch_commit")
        return n

    def _numbers(self) -> list[int]:
        return [line.number for line in self._lineages]

    def _finish(self, txn: Txn, first: int, end: int) -> None:
        c = t.expired_range.c
        here = (c.run_id == self.run.run_id, c.first_ordinal == first)
        txn.conn.execute(sa.update(t.expired_range).where(*here).values(state=GONE))
        self._event(txn, "groups_gone", first=first, end=end)

    def _delete_events(self, txn: Txn) -> int:
        """Old events of groups that are gone, counted by kind; events of the run itself stay."""
        e, run_id = t.event.c, self.run.run_id
        old = (e.ordinal < self._kept.low_watermark, e.at_us < txn.now_us - int(self._retention.events_s * 1e6))
        rows = txn.conn.execute(
            sa.select(e.seq, e.kind, e.token).where(e.run_id == run_id, *old)
            .order_by(e.ordinal).limit(self._retention.batch_rows)
        ).all()  # fmt: skip
        if not rows:
            return 0
        for part in _parts([row.seq for row in rows]):
            txn.conn.execute(sa.delete(t.event).where(e.run_id == run_id, e.seq.in_(part)))
        kinds: dict[str, int] = {}
        for row in rows:
            kinds[row.kind] = kinds.get(row.kind, 0) + 1
        again = sum(row.kind == "lease_granted" and row.token > 1 for row in rows)
        more = {"events": kinds, "figures": {AGAIN: again}}
        totals = add_totals(load_totals(txn.conn, run_id), more, named_buckets())
        here = t.retention.c.run_id == run_id
        txn.conn.execute(sa.update(t.retention).where(here).values(totals_json=json.dumps(totals, sort_keys=True)))
        return len(rows)

    def _delete_receipts(self, txn: Txn) -> int:
        """Receipts whose calls nobody repeats any more."""
        before_us, n = txn.now_us - int(self._retention.receipts_s * 1e6), 0
        for table, name in ((t.lease_receipt, "granted_at_us"), (t.append_receipt, "appended_at_us")):
            at = table.c[name]
            mine = (table.c.run_id == self.run.run_id, at < before_us)
            last = txn.conn.execute(
                sa.select(at).where(*mine).order_by(at).offset(self._retention.batch_rows - 1).limit(1)
            ).scalar()
            n += txn.conn.execute(sa.delete(table).where(*mine, *([] if last is None else [at <= last]))).rowcount
        return n


def _parts(numbers: Sequence[int], size: int = 500) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
