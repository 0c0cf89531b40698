"""Workers, heartbeats and leases.

Owns ``register_worker``, ``heartbeat``, ``lease_slots``, ``drain`` and expiry. Never trusts a worker's clock: replies carry
durations. Upholds P5 together with planning (capacity R3 counts rows, never memory), P8 (a lease token grows with every grant
of its slot) and P11 (a lease is granted only for weights whose digest is the published one). Slots are granted in order of
(ordinal, sibling), retries first, so the groups opened so far are always the oldest ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import InvalidRequest, StaleWeights
from rollbook.core.records import HeartbeatReply, LeaseGrant, LeaseReply, PolicyVersion, SlotKey
from rollbook.core.staleness import fixed_step_of, fixed_version, head_lag, may_open_groups
from rollbook.ledger import schema as t
from rollbook.ledger.base import unavailable_when_closed
from rollbook.ledger.failing import Failing
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

LEASE_SLOTS_MAX = 4096
"""Most slots of one grant."""
HELD_MAX = 10_000
"""Most leases of one heartbeat; each takes two parameters of a statement."""
CALL_DIGITS_MAX = 18
RETRY_AFTER_S = 0.5


def _keys(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(name, expanding=True)


class Leasing(Failing):
    """Verbs of the workers before a sample exists."""

    _newest_asked: dict[str, int]
    """Number of each worker's newest lease call, as far as this server has seen it."""

    def register_worker(self, incarnation: str, host: str, engine: str, labels_json: str = "{}") -> None:
        """Make the incarnation known. Idempotent: by incarnation."""
        if not incarnation:
            raise InvalidRequest("a worker needs an incarnation id of its own, new at every start")

        def register(txn: Txn) -> None:
            row = {"run_id": self.run.run_id, "incarnation": incarnation, "host": host, "engine": engine,
                   "labels_json": labels_json, "registered_at_us": txn.now_us, "seen_at_us": txn.now_us}  # fmt: skip
            txn.conn.execute(self._database.insert_ignore(t.worker), row)

        self._write(register)

    def _touch_worker(self, txn: Txn, incarnation: str, loaded: PolicyVersion | None) -> None:
        values: dict[str, object] = {"seen_at_us": txn.now_us}
        if loaded is not None:
            values |= {"loaded_lineage": loaded.lineage, "loaded_version": loaded.version}
        c = t.worker.c
        where = (c.run_id == self.run.run_id, c.incarnation == incarnation)
        if txn.conn.execute(sa.update(t.worker).where(*where).values(**values)).rowcount == 0:
            raise InvalidRequest(
                f"worker incarnation {incarnation!r} is unknown to run {self.run.run_id!r}; register_worker first"
            )

    def _is_registered(self, conn: sa.Connection, incarnation: str) -> bool:
        here = (t.worker.c.run_id == self.run.run_id, t.worker.c.incarnation == incarnation)
        return conn.execute(sa.select(t.worker.c.host).where(*here)).first() is not None

    def heartbeat(
        self, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]], wait_s: float = 0.0,
        known_version: int = -1,
    ) -> HeartbeatReply:  # fmt: skip
        """Renew the listed (slot, token) leases; with ``wait_s`` the reply is held until the head is not ``known_version``.

        The hold is at most a third of the lease TTL, so that a waiting worker never loses what it holds.
        Raises: InvalidRequest (unknown incarnation).
        """
        if len(leases) > HELD_MAX:
            raise InvalidRequest(f"{len(leases)} leases in one heartbeat; at most {HELD_MAX}")
        lost = self._write(lambda txn: self._renew_leases(txn, incarnation, loaded, leases))

        def look() -> HeartbeatReply:
            with self._read() as conn:
                return HeartbeatReply(self._head(conn), lost, self._draining or self._complete(conn))

        def news(reply: HeartbeatReply) -> bool:
            return bool(lost) or reply.drain or (reply.head is not None and reply.head.version != known_version)

        return self._await("head", min(max(0.0, wait_s), self.rules.lease_ttl_s / 3), look, news)

    def _renew_leases(
        self, txn: Txn, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]]
    ) -> tuple[SlotKey, ...]:
        self._touch_worker(txn, incarnation, loaded)
        if not leases:
            return ()
        c = t.lease.c
        keys = [(key.ordinal, key.sibling) for key, _ in leases]
        rows = self._database.rows_by_slot(txn.conn, t.lease, _LEASE_COLUMNS, self.run.run_id, keys)
        mine = {(r.ordinal, r.sibling): r.token for r in rows if r.incarnation == incarnation}
        owned = [tuple(key) for key, token in leases if mine.get(key) == token]
        lost = [SlotKey(*key) for key, token in leases if mine.get(key) != token]
        if owned:
            expires_us = txn.now_us + int(self.rules.lease_ttl_s * 1_000_000)
            here = (c.run_id == self.run.run_id, c.incarnation == incarnation, c.expires_at_us < expires_us)
            txn.conn.execute(
                sa.update(t.lease).where(*here, sa.tuple_(c.ordinal, c.sibling).in_(owned)).values(expires_at_us=expires_us)
            )
        if lost:
            s = t.sample.c
            delivered = sa.select(s.ordinal, s.sibling).where(
                s.run_id == self.run.run_id,
                s.incarnation == incarnation,
                sa.tuple_(s.ordinal, s.sibling).in_([tuple(k) for k in lost]),
            )
            own = {SlotKey(r.ordinal, r.sibling) for r in txn.conn.execute(delivered)}
            lost = [key for key in lost if key not in own]
        return tuple(lost)

    def drain(self) -> None:
        """Ask every worker to stop leasing (kept until the server restarts)."""
        self._draining = True
        self._bell.ring(("head", "lease"))

    def lease_slots(
        self, incarnation: str, loaded: PolicyVersion | None, n_max: int, wait_s: float = 0.0, request_id: str = ""
    ) -> LeaseReply:
        """Grant up to ``n_max`` slots under the loaded version, oldest group first, inside the staleness law.

        Transaction: expiries, leases, receipt. Idempotent: by (incarnation, request_id) once something was granted; a call whose
        id ends in a smaller number than one of a later call (``ID.N``) is granted nothing any more.
        Raises: StaleWeights, InvalidRequest (unknown incarnation).
        """
        if not 1 <= n_max <= LEASE_SLOTS_MAX:
            raise InvalidRequest(f"n_max = {n_max}: lease between 1 and {LEASE_SLOTS_MAX} slots at a time")

        def attempt() -> LeaseReply:
            return self._write(lambda txn: self._lease(txn, incarnation, loaded, n_max, request_id))

        reply = self._await("lease", wait_s, attempt, lambda r: bool(r.grants or r.wanted or r.drain))
        unavailable_when_closed(self._bell)
        return reply

    def _lease(self, txn: Txn, incarnation: str, loaded: PolicyVersion | None, n_max: int, request_id: str) -> LeaseReply:
        again = self._answered(txn.conn, incarnation, request_id) if request_id else None
        self._touch_worker(txn, incarnation, loaded if again is None else None)
        if again is not None:
            return again
        if self._draining or self._complete(txn.conn):
            return LeaseReply((), None, RETRY_AFTER_S, drain=True)
        head = self._head(txn.conn)
        if head is None:
            return LeaseReply((), None, RETRY_AFTER_S)
        self._check_loaded(txn.conn, loaded)
        free = self._free_leases(txn)
        frontier = self._frontier(txn.conn)
        if self._is_fixed:
            wanted = self._wanted_fixed(txn.conn, free, frontier)
            if wanted is None:
                return LeaseReply((), None, RETRY_AFTER_S)
        else:
            wanted = head
            if head_lag(self._last_planned(txn.conn, self._newest_lineage()) + 1, head.version) > self.rules.max_lag_versions:
                return LeaseReply((), None, RETRY_AFTER_S)  # a fork's plans are trained again first; now all would be too stale
        if loaded is None or (loaded.lineage, loaded.version, loaded.digest) != (wanted.lineage, wanted.version, wanted.digest):
            return LeaseReply((), wanted, 0.0)
        breaker = self._breaker(txn.conn)
        room = self._probe_room(txn, breaker, n_max)
        granted = self._choose(txn, free, frontier, wanted, room, breaker.is_open, incarnation) if room else []
        if not granted:
            return LeaseReply((), None, RETRY_AFTER_S)
        return self._grant(txn, incarnation, wanted, granted, request_id)

    def _can_probe(self, txn: Txn) -> bool:
        """Whether a slot is held that may close an open breaker, or can be leased for it."""
        c = t.lease.c
        if txn.conn.execute(sa.select(c.ordinal).where(c.run_id == self.run.run_id, c.incarnation.is_not(None)).limit(1)).first():
            return True
        free, frontier = self._free_leases(txn), self._frontier(txn.conn)
        wanted = self._wanted_fixed(txn.conn, free, frontier) if self._is_fixed else self._head(txn.conn)
        return wanted is not None and bool(self._choose(txn, free, frontier, wanted, 1, True))

    def _complete(self, conn: sa.Connection) -> bool:
        """True when the last configured step is planned: nothing more will be trained."""
        steps = self.rules.steps
        return steps > 0 and self._last_planned(conn, self._newest_lineage()) >= steps

    def _check_loaded(self, conn: sa.Connection, loaded: PolicyVersion | None) -> None:
        if loaded is None:
            return
        published = next((v for v in [self._version_exactly(conn, loaded.lineage, loaded.version)] if v), None)
        if published is None:
            raise StaleWeights(
                f"version {loaded.version} of lineage {loaded.lineage} is not published; load the version a reply names"
            )
        if published.digest != loaded.digest:
            raise StaleWeights(
                f"the engine holds weights {loaded.digest[:12]}…, version {loaded.version} was published as "
                f"{published.digest[:12]}…; load it again"
            )

    def _version_exactly(self, conn: sa.Connection, lineage: int, version: int) -> PolicyVersion | None:
        row = conn.execute(_VERSION, {"run_id": self.run.run_id, "lineage": lineage, "version": version}).first()
        return None if row is None else PolicyVersion(lineage, version, row.digest, row.path, row.probe_json, row.n_bytes)

    def _free_leases(self, txn: Txn) -> list[Any]:
        """Opened slots nobody holds and that may be tried again, oldest first; expired ones are taken back first."""
        self._expire(txn)
        rows = txn.conn.execute(_FREE, {"run_id": self.run.run_id}).all()
        spent = [row for row in rows if row.attempt >= self.rules.attempts_max]
        if spent and not self._is_fixed:  # a revision has lowered the budget since
            self._exhaust(txn, spent)
            rows = txn.conn.execute(_FREE, {"run_id": self.run.run_id}).all()
        return [row for row in rows if row.attempt < self.rules.attempts_max]

    def _wanted_fixed(self, conn: sa.Connection, free: Sequence[Any], frontier: SlotKey) -> PolicyVersion | None:
        """Version of the oldest leasable slot's step; None while it is not published or nothing is left to lease."""
        rules = self.rules
        first = conn.execute(_NEW_SLOTS, {"run_id": self.run.run_id, **_after(frontier), "n": 1}).first()
        ordinals = [row.ordinal for row in (*free[:1], *([first] if first else []))]
        if not ordinals:
            return None
        step = fixed_step_of(min(ordinals), rules.groups_per_step)
        if rules.steps > 0 and step > rules.steps:
            return None
        return self._version(conn, self._newest_lineage(), fixed_version(step, rules.fixed_lag_versions))

    def _choose(
        self, txn: Txn, free: Sequence[Any], frontier: SlotKey, wanted: PolicyVersion, n_max: int, probing: bool,
        incarnation: str = "",
    ) -> list[tuple[SlotKey, int, int, bool]]:  # fmt: skip
        """(slot, token, attempt, is new) of what is granted: retries and opened groups always, new groups as the law allows.

        While the breaker is open (``probing``) the least tried slot comes first. In the bounded schedule, slots whose probes
        cost an attempt come when nothing else is left, the most tried first: once its group is closed, another may be opened.
        A suspect is leased alone, to a worker that holds nothing: at once where that has proven itself, else last (``poison``).
        """
        rules = self.rules

        def admissible(ordinal: int) -> bool:
            step = fixed_step_of(ordinal, rules.groups_per_step)
            inside = rules.steps <= 0 or step <= rules.steps
            return not self._is_fixed or (inside and fixed_version(step, rules.fixed_lag_versions) == wanted.version)

        again = [(SlotKey(r.ordinal, r.sibling), r.token + 1, r.attempt + 1, False) for r in free if admissible(r.ordinal)]
        again, suspects = self._set_apart(txn.conn, again)
        suspects = [] if suspects and self._holds(txn.conn, incarnation) else suspects[:1]
        if suspects and self._is_proven(txn.conn, incarnation):
            return suspects
        worn: list[tuple[SlotKey, int, int, bool]] = []
        if probing:
            again.sort(key=lambda slot: slot[1])
            worn = [slot for slot in again if slot[1] >= rules.attempts_max]
            again = again[: len(again) - len(worn)]
        chosen = again[:n_max]
        left = n_max - len(chosen)
        if left <= 0:
            return chosen
        may_open = sys.maxsize if self._is_fixed else self._may_open(txn.conn, frontier)
        opened: set[int] = set()
        for row in txn.conn.execute(_NEW_SLOTS, {"run_id": self.run.run_id, **_after(frontier), "n": left}):
            if row.ordinal != frontier.ordinal:
                opened.add(row.ordinal)
            if len(opened) > may_open or not admissible(row.ordinal):
                break
            chosen.append((SlotKey(row.ordinal, row.sibling), 1, 1, True))
        return chosen or suspects or (worn if self._is_fixed else worn[::-1])[:n_max]

    def _may_open(self, conn: sa.Connection, frontier: SlotKey) -> int:
        """Groups that may be opened now: capacity R3, and no more than the remaining steps can train."""
        rules, lineage = self.rules, self._newest_lineage()
        waiting = self._opened_unplanned(conn, lineage, frontier)
        head = self._head(conn)
        c = t.plan.c
        unpublished = conn.execute(
            sa.select(sa.func.coalesce(sa.func.sum(c.n_groups), 0)).where(
                c.run_id == self.run.run_id, self._along(c.lineage, c.step, lineage), c.step > (head.version if head else -1)
            )
        ).scalar_one()
        may = may_open_groups(waiting + int(unpublished), rules.groups_per_step, rules.max_lag_versions)
        if rules.steps > 0:
            needed = (rules.steps - self._last_planned(conn, lineage)) * rules.groups_per_step - waiting
            may = max(0, min(may, needed))
        return may

    def _opened_unplanned(self, conn: sa.Connection, lineage: int, frontier: SlotKey) -> int:
        """Opened groups that are neither terminal nor planned, counted from the watermark on."""
        first, end = self._watermark, frontier.ordinal + 1
        if end <= first:
            return 0
        i = t.plan_item.c
        planned = conn.execute(
            sa.select(sa.func.count(sa.distinct(i.ordinal))).where(
                i.run_id == self.run.run_id, self._along(i.lineage, i.step, lineage), i.ordinal >= first, i.ordinal < end
            )
        ).scalar_one()
        terminal = conn.execute(self._terminal_groups(first, end)).scalar_one()
        return int(end - first - planned - terminal)

    def _grant(
        self,
        txn: Txn,
        incarnation: str,
        version: PolicyVersion,
        granted: Sequence[tuple[SlotKey, int, int, bool]],
        request_id: str,
    ) -> LeaseReply:
        run_id, ttl_us = self.run.run_id, int(self.rules.lease_ttl_s * 1_000_000)
        common = {
            "run_id": run_id, "incarnation": incarnation, "lineage": version.lineage, "version": version.version,
            "granted_at_us": txn.now_us, "expires_at_us": txn.now_us + ttl_us, "extended_us": 0,
        }  # fmt: skip
        rows = [
            {**common, "ordinal": k.ordinal, "sibling": k.sibling, "token": token, "attempt": attempt}
            for k, token, attempt, _ in granted
        ]
        new = [row for row, (_, _, _, is_new) in zip(rows, granted, strict=True) if is_new]
        again = [row for row, (_, _, _, is_new) in zip(rows, granted, strict=True) if not is_new]
        self._database.insert_rows(txn.conn, t.lease, new)
        if again:
            txn.conn.execute(_GRANT_AGAIN, [{f"b_{name}": value for name, value in row.items()} for row in again])
        self._events(txn, [
            self._event_row(txn, "lease_granted", k, token=token, incarnation=incarnation, attempt=attempt,
                            lineage=version.lineage, version=version.version)
            for k, token, attempt, _ in granted
        ])  # fmt: skip
        if request_id:
            grants = json.dumps(
                [[k.ordinal, k.sibling, token, attempt, version.lineage, version.version] for k, token, attempt, _ in granted]
            )
            txn.conn.execute(
                sa.insert(t.lease_receipt).values(
                    run_id=run_id, incarnation=incarnation, request_id=request_id, grants_json=grants, granted_at_us=txn.now_us
                )
            )
        failpoint("ledger.lease.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.lease.after_commit"))
        entries = [(k, token, attempt) for k, token, attempt, _ in granted]
        return LeaseReply(self._grants(txn.conn, entries, version), None, 0.0)

    def _grants(
        self, conn: sa.Connection, entries: Iterable[tuple[SlotKey, int, int]], version: PolicyVersion
    ) -> tuple[LeaseGrant, ...]:
        entries = list(entries)
        where = {"run_id": self.run.run_id, "ordinals": sorted({k.ordinal for k, _, _ in entries})}
        groups = {r.ordinal: r for r in conn.execute(_GROUPS, where)}
        seeds = {
            (r.ordinal, r.sibling): r.seed
            for r in self._database.rows_by_slot(
                conn, t.slot, ("ordinal", "sibling", "seed"), self.run.run_id, [(k.ordinal, k.sibling) for k, _, _ in entries]
            )
        }
        return tuple(
            LeaseGrant(
                key=k, token=token, attempt=attempt, ttl_s=self.rules.lease_ttl_s, seed=seeds[k],
                prompt_ids=groups[k.ordinal].prompt_ids, task_json=groups[k.ordinal].task_json,
                lineage=version.lineage, version=version.version, version_digest=version.digest,
            )  # fmt: skip
            for k, token, attempt in entries
        )

    def _answered(self, conn: sa.Connection, incarnation: str, request_id: str) -> LeaseReply | None:
        """The answer of a call that came before: its grants, or nothing for one that a later call has overtaken.

        A worker has one lease call at a time and numbers them upwards, so whoever asked a call behind the newest has its answer
        or has given it up: what it were granted now nobody would hold, and an attempt would be lost with every TTL.
        """
        if (granted := self._granted(conn, incarnation, request_id)) is not None:
            return granted
        if (number := _number_of(request_id)) is None:
            return None
        if incarnation not in self._newest_asked:
            if not self._is_registered(conn, incarnation):
                return None  # nothing is remembered of somebody unknown
            c = t.lease_receipt.c
            where = (c.run_id == self.run.run_id, c.incarnation == incarnation)
            known = map(_number_of, conn.execute(sa.select(c.request_id).where(*where)).scalars())
            self._newest_asked[incarnation] = max((n for n in known if n is not None), default=number)
        self._newest_asked[incarnation] = max(number, self._newest_asked[incarnation])
        return LeaseReply((), None, RETRY_AFTER_S) if number < self._newest_asked[incarnation] else None

    def _granted(self, conn: sa.Connection, incarnation: str, request_id: str) -> LeaseReply | None:
        c = t.lease_receipt.c
        where = (c.run_id == self.run.run_id, c.incarnation == incarnation, c.request_id == request_id)
        stored = conn.execute(sa.select(c.grants_json).where(*where)).scalar_one_or_none()
        if stored is None:
            return None
        rows = json.loads(stored)
        version = self._version_exactly(conn, rows[0][4], rows[0][5])
        if version is None:
            return None
        return LeaseReply(self._grants(conn, [(SlotKey(r[0], r[1]), r[2], r[3]) for r in rows], version), None, 0.0)


def _number_of(request_id: str) -> int | None:
    """Number of a lease call, the digits behind the last dot of its request id; None where there are none."""
    digits = request_id.rpartition(".")[2]
    is_number = "." in request_id and len(digits) <= CALL_DIGITS_MAX and digits.isascii() and digits.isdigit()
    return int(digits) if is_number else None


def _after(frontier: SlotKey) -> dict[str, int]:
    return {"ordinal": frontier.ordinal, "sibling": frontier.sibling}


_L, _S, _V = t.lease.c, t.slot.c, t.verdict.c

_LEASE_COLUMNS = ("ordinal", "sibling", "token", "incarnation")
_FREE = (
    sa.select(_L.ordinal, _L.sibling, _L.token, _L.attempt)
    .where(_L.run_id == sa.bindparam("run_id"), _L.incarnation.is_(None))
    .order_by(_L.ordinal, _L.sibling)
    .limit(LEASE_SLOTS_MAX)
)
_NEW_SLOTS = (
    sa.select(_S.ordinal, _S.sibling)
    .where(
        _S.run_id == sa.bindparam("run_id"),
        _S.ordinal >= sa.bindparam("ordinal"),
        sa.or_(_S.ordinal > sa.bindparam("ordinal"), _S.sibling > sa.bindparam("sibling")),
        ~sa.exists().where(_V.run_id == _S.run_id, _V.ordinal == _S.ordinal, _V.sibling == _S.sibling),
    )
    .order_by(_S.ordinal, _S.sibling)
    .limit(sa.bindparam("n"))
)
_GROUPS = sa.select(t.prompt_group.c.ordinal, t.prompt_group.c.prompt_ids, t.prompt_group.c.task_json).where(
    t.prompt_group.c.run_id == sa.bindparam("run_id"), t.prompt_group.c.ordinal.in_(_keys("ordinals"))
)
_VERSION = sa.select(t.policy_version).where(
    t.policy_version.c.run_id == sa.bindparam("run_id"),
    t.policy_version.c.lineage == sa.bindparam("lineage"),
    t.policy_version.c.version == sa.bindparam("version"),
)
_GRANT_AGAIN = (
    sa.update(t.lease)
    .where(
        _L.run_id == sa.bindparam("b_run_id"),
        _L.ordinal == sa.bindparam("b_ordinal"),
        _L.sibling == sa.bindparam("b_sibling"),
        _L.token == sa.bindparam("b_token") - 1,
    )
    .values({
        name: sa.bindparam(f"b_{name}")
        for name in ("token", "attempt", "incarnation", "lineage", "version", "granted_at_us", "expires_at_us", "extended_us")
    })
)  # fmt: skip
