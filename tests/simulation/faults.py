"""Errors of the storage below the ledger's database, as its driver reports them.

Owns statements and COMMITs of one engine that fail on demand. Never changes a result. A failed COMMIT comes in both kinds:
rolled back, and done with the answer lost, which is what a failed flush of the WAL may turn out to be after a restart.

Source: sqlite.org/lang_transaction.html (after SQLITE_FULL and SQLITE_IOERR SQLite may have rolled back by itself).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from rollbook.ledger.dialects import sqlite_module

TEXTS = {"io": "disk I/O error", "full": "database or disk is full"}
"""What SQLite says."""

Kind = Literal["statement", "commit_before", "commit_after"]
Cause = Literal["io", "full"]


@dataclass(slots=True)
class _Armed:
    text: str
    times: int | None
    containing: str
    rolled_back: bool


class DatabaseFaults:
    """Makes statements and COMMITs of ``engine`` raise the driver's OperationalError."""

    def __init__(self, engine: sa.Engine) -> None:
        self.raised = 0
        self._engine = engine
        self._statements: list[_Armed] = []
        self._commits: list[_Armed] = []
        self._commit = engine.dialect.do_commit
        # No event stands inside the part of COMMIT whose errors SQLAlchemy wraps as the driver's.
        engine.dialect.do_commit = self._do_commit  # type: ignore[method-assign]
        for name in ("do_execute", "do_executemany"):
            sa.event.listen(engine, name, self._with_parameters)
        sa.event.listen(engine, "do_execute_no_params", self._without_parameters)

    def close(self) -> None:
        """Take the faults out of the engine."""
        self._engine.dialect.do_commit = self._commit  # type: ignore[method-assign]
        for name in ("do_execute", "do_executemany"):
            sa.event.remove(self._engine, name, self._with_parameters)
        sa.event.remove(self._engine, "do_execute_no_params", self._without_parameters)

    def fail_next(
        self, kind: Kind, cause: Cause = "io", *, containing: str = "", rolled_back: bool = True, times: int | None = 1
    ) -> None:
        """Fail the next ``times`` statements or COMMITs (None: all until ``clear``).

        ``commit_before``: the transaction is rolled back. ``commit_after``: it is committed, and reported as failed all the
        same. ``statement``: one that contains a text; with ``rolled_back`` SQLite has given the transaction up by itself,
        otherwise it is still open.
        """
        armed = _Armed(TEXTS[cause], times, containing, rolled_back if kind == "statement" else kind == "commit_before")
        (self._statements if kind == "statement" else self._commits).append(armed)

    def clear(self) -> None:
        """No faults any more."""
        self._statements, self._commits = [], []

    def _with_parameters(self, cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        self._without_parameters(cursor, statement, context)

    def _without_parameters(self, cursor: Any, statement: str, context: Any) -> None:
        fault = next((fault for fault in self._statements if fault.containing in statement), None)
        if fault is not None:
            if fault.rolled_back and cursor.connection.in_transaction:
                cursor.connection.rollback()
            self._raise(self._statements, fault)

    def _do_commit(self, connection: Any) -> None:
        if not self._commits:
            self._commit(connection)
            return
        fault = self._commits[0]
        if fault.rolled_back:
            connection.rollback()
        else:
            self._commit(connection)
        self._raise(self._commits, fault)

    def _raise(self, faults: list[_Armed], fault: _Armed) -> None:
        self.raised += 1
        if fault.times is not None:
            fault.times -= 1
            if fault.times == 0:
                faults.remove(fault)
        raise sqlite_module().OperationalError(fault.text)
