"""PostgreSQL partitions by ordinal range: made ahead of the rows, dropped when no run needs them (R1).

Owns names and widths of partitions and the lock under which they come and go. Never knows a verb, and never decides that a
partition may go. Source: postgresql.org/docs/current/ddl-partitioning.html.
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from rollbook.ledger.dialects import Database
from rollbook.ledger.schema import PARTITIONED

LOCK_WAIT_MS = 500
"""Longest wait for a partition to be free; below PostgreSQL's ``deadlock_timeout``."""
LOCKED = ("55P03", "40P01")


class Partitions:
    """PostgreSQL partitions by ordinal range, made ahead of the rows; does nothing on SQLite.

    The width stored in the existing partitions' names wins over the configured one, so that runs which share a database agree.
    """

    def __init__(self, database: Database, width: int) -> None:
        self._database = database
        self._width = width
        self._known: set[int] | None = None

    def ensure(self, conn: sa.Connection, end_ordinal: int, low: int = 0) -> set[int]:
        """Make every partition from ``low`` to ``end_ordinal`` and one more; returns the first ordinals to remember after COMMIT.

        Partitions below ``low`` hold nothing of the run any more.
        """
        if self._database.is_sqlite:
            return set()
        if self._known is None:
            self._lock(conn)  # what another run drops meanwhile must not be taken for there
            self._known = self._load(conn)
        last = max(end_ordinal - 1, 0) // self._width + 1
        wanted = {i * self._width for i in range(low // self._width, last + 1)} - self._known
        if not wanted:
            return set()
        # Another server of another run may have made some of them since.
        self._lock(conn)
        missing = wanted - self._load(conn)
        for first in sorted(missing):
            end = first + self._width
            for table in PARTITIONED:
                name = f"{table}_p{first}_{end}"
                # CREATE … PARTITION OF would lock the parent against readers; ATTACH does not.
                conn.exec_driver_sql(
                    f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)"
                )
                conn.exec_driver_sql(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({first}) TO ({end})")
        return wanted

    def remember(self, firsts: set[int]) -> None:
        """Call after the COMMIT of the transaction in which ``ensure`` returned them."""
        if firsts and self._known is not None:
            self._known |= firsts

    def forget(self, first: int) -> None:
        """Call after the COMMIT of the transaction in which ``drop`` dropped it."""
        if self._known is not None:
            self._known.discard(first)

    def width(self, conn: sa.Connection) -> int:
        """Ordinals of one partition."""
        if self._known is None:
            self._load(conn)
        return self._width

    def exists(self, conn: sa.Connection, first: int) -> bool:
        """Whether the partition that begins at ``first`` is there."""
        return first in self._load(conn)

    def is_needed(self, conn: sa.Connection, first: int) -> bool:
        """Whether a run has, or may still insert, rows of the partition: its low watermark is not behind it."""
        needed = conn.exec_driver_sql(
            "SELECT 1 FROM run LEFT JOIN retention USING (run_id) WHERE coalesce(low_watermark, 0) < %s LIMIT 1",
            (first + self._width,),
        ).first()
        return needed is not None

    def drop(self, conn: sa.Connection, first: int) -> int | None:
        """Detach and drop the partition that no run needs; returns its bytes, None where it stays.

        It stays when a run needs it, when it is gone already, and when a reader holds it for longer than a moment: everybody
        else would queue up behind this transaction, so it rather gives up.
        """
        self._lock(conn)
        if not self.exists(conn, first) or self.is_needed(conn, first):
            return None
        names = [(table, f"{table}_p{first}_{first + self._width}") for table in PARTITIONED]
        n_bytes = 0
        before = conn.exec_driver_sql("SHOW lock_timeout").scalar_one()
        conn.exec_driver_sql("SAVEPOINT dropping")
        try:
            conn.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT_MS}ms'")
            for table, name in names:
                n_bytes += int(conn.exec_driver_sql(f"SELECT pg_total_relation_size('{name}')").scalar_one())
                conn.exec_driver_sql(f"ALTER TABLE {table} DETACH PARTITION {name}")
                conn.exec_driver_sql(f"DROP TABLE {name}")
            conn.exec_driver_sql(f"SET LOCAL lock_timeout = '{before}'")
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in LOCKED:
                raise
            conn.exec_driver_sql("ROLLBACK TO SAVEPOINT dropping")
            n_bytes = -1
        conn.exec_driver_sql("RELEASE SAVEPOINT dropping")
        return None if n_bytes < 0 else n_bytes

    def _lock(self, conn: sa.Connection) -> None:
        conn.exec_driver_sql("SELECT pg_advisory_xact_lock(7205759403792793)")

    def _load(self, conn: sa.Connection) -> set[int]:
        names = conn.exec_driver_sql(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'prompt_group'::regclass"
        ).scalars()
        firsts = set()
        for name in names:
            if match := re.fullmatch(r"prompt_group_p(\d+)_(\d+)", name):
                first, end = int(match[1]), int(match[2])
                firsts.add(first)
                self._width = end - first
        return firsts
