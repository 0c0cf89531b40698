"""Workers and their heartbeats.

Owns ``register_worker``, ``heartbeat``, ``drain`` and what is remembered of the head between two changes of it. Never trusts a
worker's clock: replies carry durations. Upholds P8: a heartbeat renews a lease under its own token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import InvalidRequest
from rollbook.core.records import HeartbeatReply, PolicyVersion, SlotKey
from rollbook.ledger import schema as t
from rollbook.ledger.failing import Failing
from rollbook.ledger.writer import Txn

HELD_MAX = 10_000
"""Most leases of one heartbeat; each takes two parameters of a statement."""
_LEASE_COLUMNS = ("ordinal", "sibling", "token", "incarnation")
_W = t.worker.c
_HERE = sa.update(t.worker).where(_W.run_id == sa.bindparam("this_run"), _W.incarnation == sa.bindparam("this_worker"))
_SEEN = _HERE.values(seen_at_us=sa.bindparam("seen_at_us"))
_SEEN_LOADED = _SEEN.values(loaded_lineage=sa.bindparam("loaded_lineage"), loaded_version=sa.bindparam("loaded_version"))
_L = t.lease.c
_RENEW = (
    sa.update(t.lease)
    .where(
        _L.run_id == sa.bindparam("this_run"), _L.incarnation == sa.bindparam("this_worker"),
        _L.expires_at_us < sa.bindparam("expires"),
        sa.tuple_(_L.ordinal, _L.sibling).in_(sa.bindparam("keys", expanding=True)),
    )
    .values(expires_at_us=sa.bindparam("expires"))
)  # fmt: skip


class Presence(Failing):
    """Verbs of the workers that say who is there."""

    _n_renewed: int = 0

    def renewals(self) -> int:
        """Leases that heartbeats have renewed since this server was started."""
        return self._n_renewed

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
        key: dict[str, object] = {"this_run": self.run.run_id, "this_worker": incarnation, "seen_at_us": txn.now_us}
        if loaded is not None:
            key |= {"loaded_lineage": loaded.lineage, "loaded_version": loaded.version}
        if txn.conn.execute(_SEEN if loaded is None else _SEEN_LOADED, key).rowcount == 0:
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
        self._refuse_when_fenced()
        lost: tuple[SlotKey, ...] = self._writer.run_merged(self._renew_all, (incarnation, loaded, leases))

        def look() -> HeartbeatReply:
            head, complete = self._news()
            return HeartbeatReply(head, lost, self._draining or complete)

        def news(reply: HeartbeatReply) -> bool:
            return bool(lost) or reply.drain or (reply.head is not None and reply.head.version != known_version)

        # Whatever changes the answer rings, so nobody looks without having heard: all workers wait here all the time.
        held_s = min(max(0.0, wait_s), self.rules.lease_ttl_s / 3)
        return self._await("head", held_s, look, news, recheck_s=held_s)

    def _news(self) -> tuple[PolicyVersion | None, bool]:
        """The head, and whether the run is complete: read once after each change for all who wait for it."""
        with self._news_lock:
            rung = self._bell.seen("head")
            if self._newest_news is None or self._newest_news[0] != rung:
                with self._read() as conn:
                    self._newest_news = (rung, self._head(conn), self._complete(conn))
            self._refuse_when_fenced()
            return self._newest_news[1:]

    def _complete(self, conn: sa.Connection) -> bool:
        """True when the last configured step is planned: nothing more will be trained."""
        steps = self.rules.steps
        return steps > 0 and self._last_planned(conn, self._newest_lineage()) >= steps

    def _renew_all(self, txn: Txn, beats: list[Any]) -> list[tuple[SlotKey, ...]]:
        """The heartbeats that wait together."""
        return [self._renew_leases(txn, *beat) for beat in beats]

    def _renew_leases(
        self, txn: Txn, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]]
    ) -> tuple[SlotKey, ...]:
        self._touch_worker(txn, incarnation, loaded)
        if not leases:
            return ()
        keys = [(key.ordinal, key.sibling) for key, _ in leases]
        rows = self._database.rows_by_slot(txn.conn, t.lease, _LEASE_COLUMNS, self.run.run_id, keys)
        mine = {(r.ordinal, r.sibling): r.token for r in rows if r.incarnation == incarnation}
        owned = [tuple(key) for key, token in leases if mine.get(key) == token]
        lost = [SlotKey(*key) for key, token in leases if mine.get(key) != token]
        if owned:
            expires_us = txn.now_us + int(self.rules.lease_ttl_s * 1_000_000)
            txn.conn.execute(_RENEW, {
                "this_run": self.run.run_id, "this_worker": incarnation, "keys": owned, "expires": expires_us,
            })  # fmt: skip
            self._n_renewed += len(owned)
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
