"""Leases: who gets which slot, and when.

Owns ``lease_slots``, for all workers that stand in line together (``desk``). Never trusts a worker's clock: replies carry
durations. Upholds P5 together with planning (capacity R3 counts rows, never memory), P8 (a lease token grows with every grant
of its slot) and P11 (a lease is granted only for weights whose digest is the published one). Slots are granted in order of
(ordinal, sibling), retries first, so the groups opened so far are always the oldest ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import InvalidRequest, RollbookError, StaleWeights
from rollbook.core.records import LeaseGrant, LeaseReply, PolicyVersion, SlotKey
from rollbook.core.staleness import fixed_step_of, fixed_version, head_lag, may_open_groups
from rollbook.ledger import schema as t
from rollbook.ledger.desk import NOTHING, Answer, Desk, LeaseCall
from rollbook.ledger.poison import Offer
from rollbook.ledger.presence import Presence
from rollbook.ledger.writer import Txn
from rollbook.observe import tracing
from rollbook.observe.failpoints import failpoint

LEASE_SLOTS_MAX = 4096
"""Most slots of one grant."""
GRANTS_MAX = 16
"""Most calls that are granted something in one transaction, which submissions wait for."""
CALL_DIGITS_MAX = 18


def _keys(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(name, expanding=True)


class Leasing(Presence):
    """The verb of the workers before a sample exists."""

    _desk: Desk
    _newest_asked: dict[str, int]
    """Number of each worker's newest lease call, as far as this server has seen it."""

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
        self._refuse_when_fenced()
        return self._desk.ask(LeaseCall(incarnation, loaded, n_max, request_id, wait_s))

    def _look_at_line(self, line: Sequence[LeaseCall]) -> tuple[dict[LeaseCall, Answer], bool]:
        """For the desk: the answers there are, and whether it ended before everybody's turn."""
        return self._write(lambda txn: self._serve_line(txn, line))

    def _serve_line(self, txn: Txn, line: Sequence[LeaseCall]) -> tuple[dict[LeaseCall, Answer], bool]:
        """Answer whoever can be answered, in their order, as if each had a transaction of its own."""
        drains, head = self._draining or self._complete(txn.conn), self._head(txn.conn)
        answers: dict[LeaseCall, Answer] = {}
        for call in line:
            if (answer := self._admit(txn, call, not drains and head is not None)) is not None:
                answers[call] = answer
        n_granted = 0
        while asking := [call for call in line if call not in answers]:
            if drains:
                answers.update(dict.fromkeys(asking, LeaseReply((), None, NOTHING.retry_after_s, drain=True)))
            elif n_granted >= GRANTS_MAX:
                return answers, True
            elif head is None or not (granted := self._hand_out(txn, head, asking, answers)):
                break
            else:
                n_granted += granted
        return answers, False

    def _admit(self, txn: Txn, call: LeaseCall, may_grant: bool) -> Answer | None:
        """The answer of a call that needs no slot; None for one that stands in line."""
        if call.admitted:
            return NOTHING if self._is_overtaken(call) else None
        again = self._answered(txn.conn, call.incarnation, call.request_id) if call.request_id else None
        try:
            if again is None and may_grant:
                self._check_loaded(txn.conn, call.loaded)
            self._touch_worker(txn, call.incarnation, call.loaded if again is None else None)
        except RollbookError as error:
            return error
        return again

    def _hand_out(
        self, txn: Txn, head: PolicyVersion, asking: Sequence[LeaseCall], answers: dict[LeaseCall, Answer]
    ) -> int:
        """One look at what there is, and what the first in line get of it; how many got something."""
        conn = txn.conn
        free, frontier = self._free_leases(txn), self._frontier(conn)
        wanted: PolicyVersion | None = head
        if self._is_fixed:
            wanted = self._wanted_fixed(conn, free, frontier)
        elif head_lag(self._last_planned(conn, self._newest_lineage()) + 1, head.version) > self.rules.max_lag_versions:
            wanted = None  # a fork's plans are trained again first; now all would be too stale
        if wanted is None:
            return 0
        answers.update({call: LeaseReply((), wanted, 0.0) for call in asking if not _has_loaded(call.loaded, wanted)})
        ready = [call for call in asking if call not in answers]
        breaker = self._breaker(conn)
        n_slots = min(LEASE_SLOTS_MAX, sum(call.n_max for call in ready[:GRANTS_MAX]))
        room = self._probe_room(txn, breaker, n_slots) if ready else 0
        if not room:
            return 0
        again, suspects = self._retries(conn, free, wanted)
        chosen, worn = self._choose(txn, again, frontier, wanted, room, breaker.is_open)
        n_granted = 0
        for call in ready:
            if call in answers:
                continue
            if suspects and room > 0 and self._may_try_alone(conn, call.incarnation, bool(chosen)):
                share, suspects = suspects[:1], suspects[1:]
            else:
                share, chosen = chosen[: call.n_max], chosen[call.n_max :]
            if share:
                self._answer(txn, wanted, share, call, ready, answers)
                n_granted, room = n_granted + 1, room - len(share)
            if n_granted >= GRANTS_MAX or not (chosen or suspects):
                break
        if worn and not n_granted:
            self._answer(txn, wanted, worn[: ready[0].n_max], ready[0], ready, answers)
            n_granted = 1
        return n_granted

    def _answer(
        self, txn: Txn, wanted: PolicyVersion, share: list[Offer], call: LeaseCall, ready: Sequence[LeaseCall],
        answers: dict[LeaseCall, Answer],
    ) -> None:  # fmt: skip
        answers[call] = reply = self._grant(txn, call.incarnation, wanted, share, call.request_id)
        # A repetition of the call stands in the same line.
        answers.update({other: reply for other in ready if call.request_id and _same(other, call)})

    def _can_probe(self, txn: Txn) -> bool:
        """Whether a slot is held that may close an open breaker, or can be leased for it."""
        c = t.lease.c
        if txn.conn.execute(sa.select(c.ordinal).where(c.run_id == self.run.run_id, c.incarnation.is_not(None)).limit(1)).first():
            return True
        free, frontier = self._free_leases(txn), self._frontier(txn.conn)
        wanted = self._wanted_fixed(txn.conn, free, frontier) if self._is_fixed else self._head(txn.conn)
        if wanted is None:
            return False
        again, suspects = self._retries(txn.conn, free, wanted)
        return bool(suspects or any(self._choose(txn, again, frontier, wanted, 1, True)))

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

    def _admits(self, ordinal: int, wanted: PolicyVersion) -> bool:
        """Whether a group's slots are sampled under this version; in the bounded schedule those of every group are."""
        step = fixed_step_of(ordinal, self.rules.groups_per_step)
        inside = self.rules.steps <= 0 or step <= self.rules.steps
        return not self._is_fixed or (inside and fixed_version(step, self.rules.fixed_lag_versions) == wanted.version)

    def _retries(self, conn: sa.Connection, free: Sequence[Any], wanted: PolicyVersion) -> tuple[list[Offer], list[Offer]]:
        """Slots that were opened before and may be leased again: those for anybody, and the suspects.

        A suspect is leased alone, to a worker that holds nothing: at once where that has proven itself, else last (``poison``).
        """
        admitted = [row for row in free if self._admits(row.ordinal, wanted)]
        return self._set_apart(conn, [(SlotKey(r.ordinal, r.sibling), r.token + 1, r.attempt + 1, False) for r in admitted])

    def _choose(
        self, txn: Txn, again: list[Offer], frontier: SlotKey, wanted: PolicyVersion, n_max: int, probing: bool
    ) -> tuple[list[Offer], list[Offer]]:
        """What is granted, and what when nothing else is left: retries and opened groups always, new groups as the law allows.

        While the breaker is open (``probing``) the least tried slot comes first. In the bounded schedule, slots whose probes
        cost an attempt come when nothing else is left, the most tried first: once its group is closed, another may be opened.
        """
        worn: list[Offer] = []
        if probing:
            again = sorted(again, key=lambda slot: slot[1])
            worn = [slot for slot in again if slot[1] >= self.rules.attempts_max]
            again = again[: len(again) - len(worn)]
        chosen = again[:n_max]
        left = n_max - len(chosen)
        if left <= 0:
            return chosen, []
        may_open = sys.maxsize if self._is_fixed else self._may_open(txn.conn, frontier)
        opened: set[int] = set()
        for row in txn.conn.execute(_NEW_SLOTS, {"run_id": self.run.run_id, **_after(frontier), "n": left}):
            if row.ordinal != frontier.ordinal:
                opened.add(row.ordinal)
            if len(opened) > may_open or not self._admits(row.ordinal, wanted):
                break
            chosen.append((SlotKey(row.ordinal, row.sibling), 1, 1, True))
        return chosen, [] if chosen else (worn if self._is_fixed else worn[::-1])[:n_max]

    def _may_open(self, conn: sa.Connection, frontier: SlotKey) -> int:
        """Groups that may be opened now: capacity R3, and no more than the remaining steps can train."""
        rules, lineage = self.rules, self._newest_lineage()
        waiting = self._opened_unplanned(conn, lineage, frontier)
        head = self._head(conn)
        unpublished = conn.execute(
            self._statement(("unpublished", lineage), lambda: self._unpublished(lineage)), {"head": head.version if head else -1}
        ).scalar_one()
        may = may_open_groups(waiting + int(unpublished), rules.groups_per_step, rules.max_lag_versions)
        if rules.steps > 0:
            needed = (rules.steps - self._last_planned(conn, lineage)) * rules.groups_per_step - waiting
            may = max(0, min(may, needed))
        return may

    def _unpublished(self, lineage: int) -> sa.Select:
        """Number of groups in plans of steps after ``head``."""
        c = t.plan.c
        here = (c.run_id == self.run.run_id, self._along(c.lineage, c.step, lineage), c.step > sa.bindparam("head"))
        return sa.select(sa.func.coalesce(sa.func.sum(c.n_groups), 0)).where(*here)

    def _opened_unplanned(self, conn: sa.Connection, lineage: int, frontier: SlotKey) -> int:
        """Opened groups that are neither terminal nor planned, counted from the watermark on."""
        first, end = self._watermark, frontier.ordinal + 1
        if end <= first:
            return 0

        def build() -> sa.Select:
            c = t.plan_item.c
            along = self._along(c.lineage, c.step, lineage)
            inside = (c.run_id == self.run.run_id, along, c.ordinal >= sa.bindparam("first"), c.ordinal < sa.bindparam("end"))
            return sa.select(sa.func.count(sa.distinct(c.ordinal))).where(*inside)

        planned = conn.execute(self._statement(("planned", lineage), build), {"first": first, "end": end}).scalar_one()
        terminal = self._n_terminal(conn, first, end)
        return int(end - first - planned - terminal)

    def _grant(
        self,
        txn: Txn,
        incarnation: str,
        version: PolicyVersion,
        granted: Sequence[Offer],
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
            self._database.insert_rows(txn.conn, t.lease_receipt, [
                {"run_id": run_id, "incarnation": incarnation, "request_id": request_id, "grants_json": grants,
                 "granted_at_us": txn.now_us}
            ])  # fmt: skip
        failpoint("ledger.lease.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.lease.after_commit"))
        entries = [(k, token, attempt) for k, token, attempt, _ in granted]
        slots = self._slots(txn.conn, entries)
        if tracing.enabled():
            traces: list[tuple[str, str, dict[str, tracing.Value]]] = [
                (slots[k].traceparent, tracing.of_attempt(slots[k].traceparent, token),
                 {"slot": str(k), "attempt": attempt, "token": token, "worker": incarnation, "version": version.version})
                for k, token, attempt in entries if tracing.is_sampled(slots[k].traceparent)
            ]  # fmt: skip
            txn.after_commit.append(lambda: tracing.record_attempts(traces))
        return LeaseReply(self._grants(txn.conn, entries, slots, version), None, 0.0)

    def _slots(self, conn: sa.Connection, entries: Sequence[tuple[SlotKey, int, int]]) -> dict[tuple[int, int], Any]:
        keys, columns = [(k.ordinal, k.sibling) for k, _, _ in entries], ("ordinal", "sibling", "seed", "traceparent")
        rows = self._database.rows_by_slot(conn, t.slot, columns, self.run.run_id, keys)
        return {(row.ordinal, row.sibling): row for row in rows}

    def _grants(
        self, conn: sa.Connection, entries: Sequence[tuple[SlotKey, int, int]], slots: dict[tuple[int, int], Any],
        version: PolicyVersion,
    ) -> tuple[LeaseGrant, ...]:  # fmt: skip
        where = {"run_id": self.run.run_id, "ordinals": sorted({k.ordinal for k, _, _ in entries})}
        groups = {r.ordinal: r for r in conn.execute(_GROUPS, where)}
        return tuple(
            LeaseGrant(
                key=k, token=token, attempt=attempt, ttl_s=self.rules.lease_ttl_s, seed=slots[k].seed,
                prompt_ids=groups[k.ordinal].prompt_ids, task_json=groups[k.ordinal].task_json,
                lineage=version.lineage, version=version.version, version_digest=version.digest,
                traceparent=tracing.of_attempt(slots[k].traceparent, token),
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
        return NOTHING if number < self._newest_asked[incarnation] else None

    def _is_overtaken(self, call: LeaseCall) -> bool:
        number = _number_of(call.request_id)
        return number is not None and number < self._newest_asked.get(call.incarnation, number)

    def _granted(self, conn: sa.Connection, incarnation: str, request_id: str) -> LeaseReply | None:
        key = {"run_id": self.run.run_id, "incarnation": incarnation, "request_id": request_id}
        stored = conn.execute(_RECEIPT, key).scalar_one_or_none()
        if stored is None:
            return None
        rows = json.loads(stored)
        version = self._version_exactly(conn, rows[0][4], rows[0][5])
        if version is None:
            return None
        entries = [(SlotKey(r[0], r[1]), r[2], r[3]) for r in rows]
        return LeaseReply(self._grants(conn, entries, self._slots(conn, entries), version), None, 0.0)


def _has_loaded(loaded: PolicyVersion | None, wanted: PolicyVersion) -> bool:
    """Whether a worker has loaded what it is to sample from, by its digest (P11)."""
    names = (wanted.lineage, wanted.version, wanted.digest)
    return loaded is not None and (loaded.lineage, loaded.version, loaded.digest) == names


def _same(call: LeaseCall, other: LeaseCall) -> bool:
    return (call.incarnation, call.request_id) == (other.incarnation, other.request_id)


def _number_of(request_id: str) -> int | None:
    """Number of a lease call, the digits behind the last dot of its request id; None where there are none."""
    digits = request_id.rpartition(".")[2]
    is_number = "." in request_id and len(digits) <= CALL_DIGITS_MAX and digits.isascii() and digits.isdigit()
    return int(digits) if is_number else None


def _after(frontier: SlotKey) -> dict[str, int]:
    return {"ordinal": frontier.ordinal, "sibling": frontier.sibling}


_L, _S, _V = t.lease.c, t.slot.c, t.verdict.c

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
_R = t.lease_receipt.c
_RECEIPT = sa.select(_R.grants_json).where(
    *(c == sa.bindparam(c.name) for c in (_R.run_id, _R.incarnation, _R.request_id))
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
