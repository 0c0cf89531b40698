"""What a ledger must do, in dictionaries: the oracle of ``ledger_machine``. It knows no SQL and calls no ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollbook.core.errors import RollbookError
from rollbook.core.records import Checkpoint, LeaseGrant, Plan, SlotKey, SubmitOutcome

LAG, SIBLINGS, PER_STEP = 1, 3, 2
TTL_S = 3000.0
"""So long that the seconds which really pass, and count on PostgreSQL, end nothing: an example can be repeated."""
ORDINALS_MAX = 60
"""Groups one example issues at most."""
DURABLE = (SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED)


def error_of(call: Callable[[], Any]) -> type[RollbookError] | None:
    """Class of the refusal, None when the call went through."""
    try:
        call()
    except RollbookError as refused:
        return type(refused)
    return None


class Model:
    """What must be true, in dictionaries; it knows no SQL."""

    def __init__(self) -> None:
        self.grants: list[tuple[LeaseGrant, str]] = []
        self.stored: dict[SlotKey, tuple[int, float | None]] = {}
        """Acknowledged samples: version and reward."""
        self.tokens: dict[SlotKey, int] = {}
        """Highest token granted per slot."""
        self.held: dict[SlotKey, tuple[str, int, float]] = {}
        """Leases that certainly stand until a time: worker, token, the time."""
        self.planned: dict[SlotKey, int] = {}
        self.plans: dict[int, Plan] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.issued = 0
        self.step = 0
        self.open_step = False

    def granted(self, g: LeaseGrant, worker: str, now: float) -> None:
        assert g.token > self.tokens.get(g.key, 0), "tokens of a slot grow"
        assert g.key not in self.stored, "a filled slot is never leased"
        holder = self.held.get(g.key)
        assert holder is None or holder[2] <= now, f"slot {g.key} is granted while {holder} holds it"
        self.tokens[g.key] = g.token
        self.held[g.key] = (worker, g.token, now + TTL_S)
        self.grants.append((g, worker))

    def holds(self, g: LeaseGrant, worker: str, now: float) -> bool:
        """Whether the lease certainly stands."""
        owner = self.held.get(g.key)
        return owner is not None and owner[:2] == (worker, g.token) and now < owner[2]

    def expected(self, g: LeaseGrant, worker: str, reward: float | None, now: float, *, ended: bool, strict: bool,
                 bounded: bool) -> set[SubmitOutcome]:  # fmt: skip
        """Answers a submission may get; one unless the lease may or may not have run out."""
        if g.key in self.stored:
            return {SubmitOutcome.REPLAYED if self.stored[g.key] == (g.version, reward) else SubmitOutcome.CONFLICT}
        if ended or (bounded and self.step - g.version > LAG):
            return {SubmitOutcome.REFUSED}
        if not strict or self.holds(g, worker, now):
            return {SubmitOutcome.ACCEPTED}
        if g.token < self.tokens[g.key] or g.key not in self.held:
            return {SubmitOutcome.FENCED}
        return {SubmitOutcome.ACCEPTED, SubmitOutcome.FENCED}
