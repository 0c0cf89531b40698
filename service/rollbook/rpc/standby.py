"""What a ledger server answers before it holds the run's role: that it is a standby, at once.

Owns the port a standby serves and the moment from which the ledger answers behind it. Never takes the role. Upholds P8: until
then no verb reaches a database.
"""

from __future__ import annotations

from typing import Any, Protocol

from rollbook.core.errors import Standby
from rollbook.core.ports import LedgerPort


class Held(LedgerPort, Protocol):
    """A ledger that knows whether its server still holds the role."""

    def holds_role(self) -> bool: ...


class StandbyPort:
    """A ``LedgerPort`` whose verbs raise Standby until ``promote``; from then on they are the ledger's."""

    def __init__(self) -> None:
        self._ledger: Held | None = None

    def promote(self, ledger: Held) -> None:
        """Answer from ``ledger``, whose server holds the role by now."""
        self._ledger = ledger

    def holds_role(self) -> bool:
        """Nothing can be lost before it is held."""
        return self._ledger is None or self._ledger.holds_role()

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_") or not hasattr(LedgerPort, verb):
            raise AttributeError(verb)
        return _refuse if self._ledger is None else getattr(self._ledger, verb)


def _refuse(*_: object, **__: object) -> Any:
    raise Standby("this ledger server is a standby and waits for the run's role; call the holder, found at the run's addresses")
