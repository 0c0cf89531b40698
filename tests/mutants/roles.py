"""Defects in fenced roles: leaders, zombies, and who a holder is."""

from __future__ import annotations

from typing import Any

from mutants.registry import mutant


@mutant("rollbook.ledger.base", "LedgerBase._check_term")
def a_loser_goes_on(original: Any) -> Any:
    """dbos-transact-py#818: whoever lost the race for the next step goes on and runs the steps after it."""
    return lambda self, txn, term, role: None


@mutant("rollbook.ledger.base", "LedgerBase._guard")
def a_server_believes_it_still_leads(original: Any) -> Any:
    """oban#1488: a node believed for 19 days that it was the leader."""
    return lambda self, conn: self._database.now_us(conn)


@mutant("rollbook.ledger.roles", "Roles._take")
def leadership_by_host_name(original: Any) -> Any:
    """oban-py#32: the leader is matched by its host, so a second process there leads as well."""

    def take(self: Any, txn: Any, run_id: str, wanted: Any, supersede: str) -> Any:
        from rollbook.ledger.roles import _fence_row

        row = txn.conn.execute(_fence_row(run_id, wanted.role)).first()
        same_host = row is not None and row.holder.partition("/")[0] == wanted.holder.partition("/")[0]
        return original(self, txn, run_id, wanted, row.holder if same_host else supersede)

    return take
