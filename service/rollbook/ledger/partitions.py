"""PostgreSQL partitions by ordinal range: made ahead of the rows, dropped when no run needs them (R1).

Owns names and widths of partitions and the lock under which they come and go. Never knows a verb, and never decides that a
partition may go. Source: postgresql.org/docs/current/ddl-partitioning.html.
"""

from __future__ import annotations

import re

import sqlalchemy as sa

from rollbook.ledger.dialects import Database
from rollbook.ledger.schema import PARTITIONED


class Partitions:
    """PostgreSQL partitions by ordinal range, made ahead of the rows; does nothing on SQLite.

    The width stored in the existing partitions' names wins over the configured one, so that runs which share a database agree.
    """

    def __init__(self, database: Database, width: int) -> None:
        self._database = database
        self._width = width
        self._known: set[int] | None = None

    def ensure(self, conn: sa.Connection, end_ordinal: int) -> set[int]:
        """Make every partition below ``end_ordinal`` and one more; returns the first ordinals to remember after COMMIT."""
        if self._database.is_sqlite:
            return set()
        if self._known is None:
            self._known = self._load(conn)
        last = max(end_ordinal - 1, 0) // self._width + 1
        wanted = {i * self._width for i in range(last + 1)} - self._known
        if not wanted:
            return set()
        # Another server of another run may have made some of them since.
        conn.exec_driver_sql("SELECT pg_advisory_xact_lock(7205759403792793)")
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
