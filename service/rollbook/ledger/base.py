"""What every group of verbs shares: the attached run, transactions, events, waiting, and small queries used everywhere.

Owns the run context of one server (one run, R1) and its own fence term. Never implements a verb. Upholds P8: every write
transaction reads the server's fence row first, and reads stop when the server's own term has run out (R12).
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import sqlalchemy as sa

from rollbook.core.errors import Expired, Fenced, NotFound, NotReady, ServerFenced, Standby, Unavailable
from rollbook.core.host import host
from rollbook.core.ports import Clock
from rollbook.core.records import (
    ForkVerdict,
    Lineage,
    PolicyVersion,
    Role,
    RoleTerm,
    RunRecord,
    RunRules,
    ScheduleKind,
    SlotKey,
)
from rollbook.ledger import schema as t
from rollbook.ledger.bell import Bell
from rollbook.ledger.dialects import Database, is_conflict
from rollbook.ledger.partitions import Partitions
from rollbook.ledger.writer import CONFLICT_RETRIES_MAX, CONFLICT_WAIT_S, Txn, Writer
from rollbook.observe.failpoints import failpoint

T = TypeVar("T")
P = ParamSpec("P")
L = TypeVar("L", bound="LedgerBase")

WAIT_MAX_S = 60.0
"""Longest time a reply is held, whatever the caller asks for."""
RECHECK_S = 1.0
"""A waiting verb looks again at least this often: leases expire without anybody ringing."""
SETTLE_S = 0.02
"""A waiting verb looks again at most this often, and spends at most a fifth of its time looking."""
EVENT_ROWS_MAX = 500
DOUBT_S = 1.0
"""How long a term that could not be renewed is taken for lost before the database is asked again."""


def again_on_conflict(verb: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """A verb that only reads, read again a bounded number of times where PostgreSQL broke it off in favour of another."""

    @functools.wraps(verb)
    def read(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(CONFLICT_RETRIES_MAX):
            try:
                return verb(self, *args, **kwargs)
            except Unavailable as error:
                if not is_conflict(error):
                    raise
                self._writer.conflicts += 1
                host().sleep(CONFLICT_WAIT_S * 2**attempt)
        return verb(self, *args, **kwargs)

    return read


@dataclass(frozen=True, slots=True)
class Kept:
    """How far back a run's rows are kept (R16)."""

    low_watermark: int = 0
    """Groups with smaller ordinals are gone or going."""
    replayable_from: int = 1
    """First step of which every item is kept."""


class LedgerBase:
    """Context and helpers of ``Ledger``."""

    _database: Database
    _writer: Writer
    _partitions: Partitions
    _bell: Bell
    _clock: Clock
    _payload_bytes_max: int
    _run: RunRecord | None = None
    _term: RoleTerm | None = None
    _term_ends_s: float = 0.0
    _doubtful_until_s: float = float("-inf")
    _fenced: ServerFenced | None = None
    _draining: bool = False
    _watermark: int = 0
    """Every group below it is planned or has a terminal verdict; counts start here."""
    _kept: Kept = Kept()
    """What retention has let go, as of the last commit."""
    _lineages: tuple[Lineage, ...] = ()
    """Oldest first; every one but the first forks from the one before it."""
    _statements: tuple[tuple[Lineage, ...], dict[Hashable, Any]] | None = None
    """Those built for the lineages there are."""
    _sequence: itertools.count[int] = itertools.count()
    _news_lock: threading.Condition
    _newest_news: tuple[int, PolicyVersion | None, bool] | None = None
    """How often the head had changed when it was read, what it was, and whether the run was complete."""

    @property
    def run(self) -> RunRecord:
        """The run this server serves. Raises NotReady before ``open_run`` or ``attach``."""
        if self._run is None:
            raise NotReady("no run is open on this ledger yet; open_run comes first")
        return self._run

    @property
    def rules(self) -> RunRules:
        return self.run.rules

    @property
    def _is_fixed(self) -> bool:
        return self.rules.schedule is ScheduleKind.FIXED

    @property
    def fenced(self) -> bool:
        """True once another server has taken the run over; the RPC server then answers nothing any more (R12)."""
        return self._fenced is not None

    def renew_self(self) -> RoleTerm:
        """Extend the server's own term. Raises ServerFenced when another server has taken the run over."""
        term = self._term
        if term is None:
            raise NotReady("no run is open on this ledger yet; open_run comes first")

        def renew(txn: Txn) -> RoleTerm:
            store_term(txn, self.run.run_id, term, renewed=True)
            return term

        asked = self._clock.monotonic()
        self._write(renew)
        self._term_ends_s = asked + term.ttl_s
        return term

    def _guard(self, conn: sa.Connection) -> int:
        now_us = self._database.now_us(conn)
        term = self._term
        if term is not None:
            c, run_id = t.fence.c, self.run.run_id
            query = self._statement("guard", lambda: sa.select(c.epoch).where(
                c.run_id == run_id, c.role == Role.LEDGER.value).with_for_update(read=True))  # fmt: skip
            epoch = conn.execute(query).scalar_one_or_none()
            if epoch != term.epoch:
                raise ServerFenced(
                    f"ledger epoch {term.epoch} of {term.holder} was superseded by epoch {epoch}; this server stops"
                )
        return now_us

    def holds_role(self) -> bool:
        """Whether this server may answer now: not superseded, and its own term has not run out unrenewed (R12).

        Raises Standby when the term is over and the database does not say whether somebody else has taken the role.
        """
        if self._fenced is not None:
            return False
        if self._term is None or self._clock.monotonic() < self._term_ends_s:
            return True
        if self._clock.monotonic() < self._doubtful_until_s:
            raise Standby("this server's term is over and could not be renewed; another one may hold the role")
        try:
            self.renew_self()
        except ServerFenced:
            return False
        except Unavailable as error:
            self._doubtful_until_s = self._clock.monotonic() + DOUBT_S
            raise Standby(f"this server's term is over and was not renewed ({error}); another one may hold the role") from error
        return True

    def _on_fenced(self, error: ServerFenced) -> None:
        self._fenced = error
        self._bell.close()
        failpoint("ledger.fence_lost")

    def _write(self, operation: Callable[[Txn], T]) -> T:
        self._refuse_when_fenced()
        result: T = self._writer.run(operation)
        return result

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        """A consistent read-only snapshot; renews the server's own term first when it has run out."""
        self._refuse_when_fenced()
        if self._term is not None and self._clock.monotonic() >= self._term_ends_s:
            self.renew_self()
        with self._database.reading() as conn:
            yield conn

    def _refuse_when_fenced(self) -> None:
        if self._fenced is not None:
            raise ServerFenced(str(self._fenced))
        unavailable_when_closed(self._bell)

    def _await(
        self, topic: str, wait_s: float, attempt: Callable[[], T], satisfied: Callable[[T], bool],
        recheck_s: float | None = None,
    ) -> T:  # fmt: skip
        """Repeat ``attempt`` until ``satisfied`` or ``wait_s`` (at most WAIT_MAX_S) is over; returns the last result.

        ``recheck_s``: in place of RECHECK_S.
        """
        ends = host().monotonic() + min(max(0.0, wait_s), WAIT_MAX_S)  # this order makes 0 of NaN
        while True:
            seen = self._bell.seen(topic)
            began = host().monotonic()
            result = attempt()
            left = ends - host().monotonic()
            settle_s = min(max(SETTLE_S, 4 * (host().monotonic() - began)), RECHECK_S)
            if satisfied(result) or left <= 0 or self._bell.closed:
                return result
            turn_s = self._bell.turn_s(topic)
            self._bell.wait(topic, seen, min(left, RECHECK_S if recheck_s is None else recheck_s))
            self._bell.wait("", 0, min(left, settle_s + turn_s))

    def _check_term(self, txn: Txn, term: RoleTerm, role: Role) -> None:
        """Raises Fenced unless ``term`` is the newest epoch of ``role``."""
        if term.role is not role:
            raise Fenced(f"this verb needs the {role.value} role, the call carries a {term.role.value} term")
        query = sa.select(t.fence.c.epoch, t.fence.c.holder).where(
            t.fence.c.run_id == self.run.run_id, t.fence.c.role == role.value
        )
        row = txn.conn.execute(query.with_for_update(read=True)).first()
        if row is None or row.epoch != term.epoch or row.holder != term.holder:
            newest = f"epoch {row.epoch} of {row.holder}" if row else "nobody"
            raise Fenced(f"{role.value} epoch {term.epoch} of {term.holder} is not current ({newest} holds the role); stop")

    def _event(self, txn: Txn, kind: str, key: SlotKey | None = None, *, token: int | None = None,
               incarnation: str | None = None, **detail: object) -> None:  # fmt: skip
        self._events(txn, [self._event_row(txn, kind, key, token=token, incarnation=incarnation, **detail)])

    def _event_row(self, txn: Txn, kind: str, key: SlotKey | None = None, *, token: int | None = None,
                   incarnation: str | None = None, **detail: object) -> dict[str, object]:  # fmt: skip
        return {
            "run_id": self.run.run_id, "seq": next(self._sequence), "kind": kind, "ordinal": key.ordinal if key else None,
            "sibling": key.sibling if key and key.sibling >= 0 else None, "token": token, "incarnation": incarnation,
            "detail_json": json.dumps(detail, sort_keys=True), "at_us": txn.now_us,
        }  # fmt: skip

    def _events(self, txn: Txn, rows: Sequence[dict[str, object]]) -> None:
        self._database.insert_rows(txn.conn, t.event, rows)

    def _statement(self, name: Hashable, build: Callable[[], T]) -> T:
        """A statement that is built once: building one again costs more than running it. ``name`` holds what it is built from,
        beside the run and its lineages."""
        known = self._statements
        if known is None or known[0] is not self._lineages:
            known = self._statements = (self._lineages, {})
        found = known[1].get(name)
        if found is None:
            found = known[1][name] = build()
        return cast(T, found)

    def _newest_events(self, conn: sa.Connection, kinds: Sequence[str], n: int = 1, *where: Any) -> Sequence[Any]:
        """The newest ``n`` events of these kinds, newest first; for kinds of which a run has few."""
        e = t.event.c

        def build() -> sa.Select:
            rows = sa.select(t.event).where(e.run_id == self.run.run_id, e.kind.in_(kinds), *where)
            # By the plain number SQLite would walk through every event of the run instead of the index of kinds.
            return rows.order_by((e.seq + 0).desc()).limit(n)

        return conn.execute(build() if where else self._statement(("events", tuple(kinds), n), build)).all()

    def _refuse_expired(self, ordinal: int) -> None:
        """Raises Expired for a group that retention has let go."""
        if ordinal < (low := self._kept.low_watermark):
            raise Expired(
                f"group {ordinal} is below the low watermark {low} of run {self.run.run_id!r}: its rows were let go under "
                "[retention], only their counts are left (rollbook status)"
            )

    def _refuse_unreplayable(self, step: int) -> None:
        """Raises Expired for a step with items that retention has let go."""
        if step < (first := self._kept.replayable_from):
            raise Expired(
                f"step {step} of run {self.run.run_id!r} cannot be replayed any more: its rollouts were let go under "
                f"[retention]. Replayable are steps from {first} on, from the checkpoint of step {first - 1} or a later one"
            )

    def _newest_lineage(self) -> int:
        return self._lineages[-1].number

    def _ancestry(self, lineage: int) -> list[tuple[int, int | None]]:
        """(lineage, last step that counts; None = all) from ``lineage`` up to the root (R6)."""
        known = {line.number: line for line in self._lineages}
        if lineage not in known:
            raise NotFound(f"the run has no lineage {lineage}; known: {', '.join(map(str, known))}")
        out: list[tuple[int, int | None]] = [(lineage, None)]
        bound: int | None = None
        line = known[lineage]
        while line.parent is not None:
            bound = line.fork_step if bound is None else min(bound, line.fork_step)
            out.append((line.parent, bound))
            line = known[line.parent]
        return out

    def _fork_beyond(self, lineage: int) -> int | None:
        """Step of the earliest fork beyond tolerance between ``lineage`` and the newest one; None when there is none."""
        return earliest_fork(self._lineages, lineage, (ForkVerdict.KEPT, ForkVerdict.DROPPED))

    def _fork_dropping(self, lineage: int) -> int | None:
        """The same over forks that dropped what lies behind them: such versions of ``lineage`` are orphans."""
        return earliest_fork(self._lineages, lineage, (ForkVerdict.DROPPED,))

    def _along(self, lineage_column: Any, step_column: Any, lineage: int) -> sa.ColumnElement[bool]:
        """Rows of ``lineage``'s ancestry, each ancestor only up to its fork."""
        parts, numbers = [], []
        for number, last in self._ancestry(lineage):
            here = lineage_column == number
            parts.append(here if last is None else sa.and_(here, step_column <= last))
            numbers.append(number)
        # Keys begin with the lineage, and SQLite finds no row by one through an OR.
        return parts[0] if len(parts) == 1 else sa.and_(lineage_column.in_(numbers), sa.or_(*parts))

    def _last_planned(self, conn: sa.Connection, lineage: int) -> int:
        def build() -> sa.Select:
            c = t.plan.c
            return sa.select(sa.func.max(c.step)).where(c.run_id == self.run.run_id, self._along(c.lineage, c.step, lineage))

        return conn.execute(self._statement(("last planned", lineage), build)).scalar() or 0

    def _version(self, conn: sa.Connection, lineage: int, version: int | None) -> PolicyVersion | None:
        """Version ``version`` (None = newest) along the ancestry of ``lineage``; None when it is not published."""
        def build() -> sa.Select:
            c = t.policy_version.c
            query = sa.select(t.policy_version).where(c.run_id == self.run.run_id, self._along(c.lineage, c.version, lineage))
            if version is not None:
                query = query.where(c.version == sa.bindparam("number"))
            return query.order_by(c.version.desc(), c.lineage.desc()).limit(1)

        query = self._statement(("version", lineage, version is None), build)
        row = conn.execute(query, {} if version is None else {"number": version}).first()
        return None if row is None else policy_version_of(row)

    def _head(self, conn: sa.Connection) -> PolicyVersion | None:
        return self._version(conn, self._newest_lineage(), None)


def policy_version_of(row: Any) -> PolicyVersion:
    """``policy_version`` row to record."""
    return PolicyVersion(row.lineage, row.version, row.digest, row.path, row.probe_json, row.n_bytes)


def earliest_fork(lineages: Iterable[Lineage], lineage: int, verdicts: Collection[ForkVerdict]) -> int | None:
    """Smallest fork step among the forks made after ``lineage`` with one of these verdicts."""
    steps = [line.fork_step for line in lineages if line.number > lineage and line.verdict in verdicts]
    return min(steps, default=None)


def load_kept(conn: sa.Connection, run_id: str) -> Kept:
    """How far back a run's rows are kept in this snapshot."""
    c = t.retention.c
    row = conn.execute(sa.select(c.low_watermark, c.replayable_from).where(c.run_id == run_id)).first()
    return Kept() if row is None else Kept(row.low_watermark, row.replayable_from)


def load_lineages(conn: sa.Connection, run_id: str) -> tuple[Lineage, ...]:
    """Lineages of a run, oldest first."""
    c = t.lineage.c
    return tuple(
        Lineage(
            r.lineage, r.parent, r.fork_step or 0, ForkVerdict(r.verdict or ForkVerdict.WITHIN), r.difference,
            r.tolerance or 0.0, r.orphans_kept or 0, r.orphans_dropped or 0,
        )
        for r in conn.execute(sa.select(t.lineage).where(c.run_id == run_id).order_by(c.lineage))
    )  # fmt: skip


def store_term(txn: Txn, run_id: str, term: RoleTerm, *, renewed: bool) -> None:
    """Write or extend a fence row; the caller has checked that it may."""
    ttl_us = int(term.ttl_s * 1_000_000)
    values: dict[str, object] = {
        "holder": term.holder, "epoch": term.epoch, "ttl_us": ttl_us, "renewed_at_us": txn.now_us,
        "expires_at_us": txn.now_us + ttl_us,
    }  # fmt: skip
    key = {"run_id": run_id, "role": term.role.value}
    if renewed:
        txn.conn.execute(sa.update(t.fence).where(t.fence.c.run_id == run_id, t.fence.c.role == term.role.value).values(**values))
    else:
        txn.conn.execute(sa.insert(t.fence).values(**key, **values))


def unavailable_when_closed(bell: Bell) -> None:
    """Raises Unavailable when the ledger was closed while a caller waited."""
    if bell.closed:
        raise Unavailable("the ledger is closed; connect to its successor")


def storable(text: str) -> str:
    """Text without NUL characters, which PostgreSQL cannot hold."""
    return text.replace("\x00", "\ufffd")


def pairs(result: Iterable[Any]) -> dict[Any, Any]:
    """Two-column rows as a mapping."""
    return {row[0]: row[1] for row in result}
