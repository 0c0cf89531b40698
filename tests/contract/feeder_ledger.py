"""An in-memory ledger with the verbs a feeder uses: fenced role, compare-and-swap cursor, demand.

Workers are thought infinitely fast: whatever is issued counts as opened at once, so every look shows the full lookahead as
demand until the run's steps are covered. Hooks let a test put an event between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollbook.core.errors import CursorMoved, Fenced, RoleHeld
from rollbook.core.records import Cursor, GroupSpec, ResumePoint, Role, RoleTerm


class FeederLedger:
    """The feeder's half of LedgerPort."""

    def __init__(self, groups_wanted: int, steps: int) -> None:
        self.groups: list[GroupSpec] = []
        self.cursor_row = Cursor("train", 0, "{}", False)
        self.groups_wanted = groups_wanted
        self.steps = steps
        self.dropped = 0
        self.epoch = 0
        self.holder: str | None = None
        self.superseded: list[str] = []
        self.renewals = 0
        self.on_acquire: Callable[[], None] = lambda: None
        self.before_append: Callable[[int], None] = lambda call: None
        self.after_append: Callable[[int], None] = lambda call: None
        self._appends = 0

    def acquire_role(self, role: Role, holder: str, ttl_s: float, supersede: str = "") -> RoleTerm:
        assert role is Role.FEEDER
        self.on_acquire()
        if self.holder not in (None, holder, supersede):
            raise RoleHeld(f"role feeder is held by {self.holder}")
        if self.holder != holder:
            self.epoch += 1
        self.superseded.append(supersede)
        self.holder = holder
        return RoleTerm(role, self.epoch, holder, ttl_s)

    def renew_role(self, term: RoleTerm) -> RoleTerm:
        self._check(term)
        self.renewals += 1
        return term

    def release_role(self, term: RoleTerm) -> None:
        if term.epoch == self.epoch:
            self.holder = None

    def cursor(self, stream: str) -> Cursor:
        assert stream == self.cursor_row.stream
        return self.cursor_row

    def append_groups(self, term: RoleTerm, before: Cursor, after: Cursor, groups: Sequence[GroupSpec]) -> Cursor:
        call, self._appends = self._appends, self._appends + 1
        self.before_append(call)
        self._check(term)
        if before != self.cursor_row:
            raise CursorMoved("the cursor stands elsewhere")
        assert [g.ordinal for g in groups] == list(range(before.next_ordinal, after.next_ordinal))
        assert groups or after == replace(before, exhausted=True)
        self.groups += groups
        self.cursor_row = after
        self.after_append(call)
        return after

    def refill(self, ordinal: int) -> None:
        """Drop a group and issue its refill, as the transaction of a verdict does."""
        self.groups.append(replace(self.groups[ordinal], ordinal=len(self.groups), refills=ordinal))
        self.cursor_row = replace(self.cursor_row, next_ordinal=self.cursor_row.next_ordinal + 1)
        self.dropped += 1

    def feed_demand(self, lookahead_groups: int) -> int:
        return max(0, min(lookahead_groups, self.groups_wanted - (len(self.groups) - self.dropped)))

    def resume_point(self) -> ResumePoint:
        covered = len(self.groups) - self.dropped >= self.groups_wanted
        return ResumePoint(0, (), self.steps if covered else 0, None)

    def _check(self, term: RoleTerm) -> None:
        if (term.epoch, term.holder) != (self.epoch, self.holder):
            raise Fenced("a newer feeder holds the role")
