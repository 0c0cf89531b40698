"""Heartbeats of one worker: leases kept alive, the loaded version reported, the head and a drain learned.

Owns the thread, its client, and the worker's trust in its leases: local time may only make a worker stop earlier than
the ledger would. Never decides what the worker does next. Upholds P8 and P10; source: rule R19 (new versions arrive in
the reply of a held heartbeat).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.core.errors import RollbookError
from rollbook.core.host import host
from rollbook.core.ports import LedgerPort
from rollbook.core.records import LeaseGrant, PolicyVersion, SlotKey
from rollbook.observe import metrics

log = logging.getLogger(__name__)

MISSED_MAX = 3
ANSWER_S = 10.0
"""A worker is of no use once so many heartbeats and the time of one answer have passed without one."""
TRUSTED_SHARE = 0.8
"""Share of a lease's TTL during which it is used without a further sign of the ledger."""


@dataclass(slots=True)
class _Held:
    token: int
    ttl_s: float
    since: float
    confirmed_at: float
    """Monotonic time at which the last confirming call was *sent*: earlier than the ledger's own clock reading."""
    lost: bool = False


class Heartbeat:
    """Beats every ``interval_s`` from its own thread until stopped."""

    def __init__(self, client: LedgerPort, incarnation: str, interval_s: float, renew_max_s: float) -> None:
        """``renew_max_s``: a lease is renewed no longer than this, so a hung engine cannot keep its slots for ever."""
        self._client, self._incarnation = client, incarnation
        self._interval_s, self._renew_max_s = interval_s, renew_max_s
        self._lock = threading.Lock()
        self._stopped = host().event()
        self._held: dict[SlotKey, _Held] = {}
        self._loaded: PolicyVersion | None = None
        self._head: PolicyVersion | None = None
        self._draining = False
        self._failure: BaseException | None = None
        self._answered_at = float("-inf")
        self._thread = host().thread(self._run, "heartbeat")

    def start(self) -> Heartbeat:
        """Begin to beat."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop beating; a held call is left to its own deadline."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def hold(self, grants: Sequence[LeaseGrant], asked_at: float) -> None:
        """Renew these leases from now on; ``asked_at`` is the monotonic time before the lease call."""
        with self._lock:
            for grant in grants:
                self._held[grant.key] = _Held(grant.token, grant.ttl_s, asked_at, asked_at)
            metrics.WORKER_SLOTS_IN_HAND.set(len(self._held))

    def release(self, grants: Sequence[LeaseGrant]) -> None:
        """Stop renewing these leases."""
        with self._lock:
            for grant in grants:
                self._held.pop(grant.key, None)
            metrics.WORKER_SLOTS_IN_HAND.set(len(self._held))

    def usable(self, grant: LeaseGrant) -> bool:
        """True while the lease may be worked under: not lost, and confirmed within 80 % of its TTL."""
        with self._lock:
            held = self._held.get(grant.key)
        return (
            held is not None and held.token == grant.token and not held.lost
            and host().monotonic() - held.confirmed_at < TRUSTED_SHARE * held.ttl_s
        )  # fmt: skip

    def set_loaded(self, version: PolicyVersion | None) -> None:
        """Report this version from the next beat on; None while a load is under way."""
        with self._lock:
            self._loaded = version

    def told(self, wanted: PolicyVersion) -> None:
        """Take what a lease call wanted for the head: after a fork it is older than the head of the last beat."""
        with self._lock:
            self._head = wanted

    @property
    def head(self) -> PolicyVersion | None:
        """Newest version the ledger has told of."""
        with self._lock:
            return self._head

    @property
    def draining(self) -> bool:
        """True once the ledger asked the worker to stop leasing."""
        with self._lock:
            return self._draining

    def wrong(self) -> str:
        """Why this worker is of no use to the ledger now; empty while its beats are answered."""
        if self._failure is not None:
            return f"heartbeats have ended: {self._failure}"
        silent_s = host().monotonic() - self._answered_at
        return f"no heartbeat was answered for {silent_s:.0f} s" if silent_s > MISSED_MAX * self._interval_s + ANSWER_S else ""

    def raise_failure(self) -> None:
        """Raise what ended the thread, if anything did: without renewals no lease may be taken."""
        if self._failure is not None:
            raise self._failure

    def beat(self, wait_s: float) -> None:
        """One heartbeat. Raises what the client raises; a retryable error leaves trust to run out by itself."""
        sent_at = host().monotonic()
        with self._lock:
            listed = [(key, h.token) for key, h in self._held.items() if sent_at - h.since < self._renew_max_s]
            loaded, known = self._loaded, self._head
        reply = self._client.heartbeat(
            self._incarnation, loaded, listed, wait_s=wait_s, known_version=known.version if known else -1
        )
        self._answered_at = sent_at
        metrics.WORKER_HEARTBEAT_TIMESTAMP_SECONDS.labels("actor").set(host().time())
        lost = set(reply.lost)
        with self._lock:
            self._head = reply.head or self._head
            self._draining = self._draining or reply.drain
            for key, token in listed:
                held = self._held.get(key)
                if held is None or held.token != token:
                    continue
                held.lost = held.lost or key in lost
                if not held.lost:
                    held.confirmed_at = max(held.confirmed_at, sent_at)
        if lost:
            log.warning("leases lost", extra={"event": "leases_lost", "slots": " ".join(map(str, sorted(lost)))})

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = host().monotonic()
            try:
                self.beat(wait_s=self._interval_s)
            except RollbookError as error:
                if not error.retryable:
                    self._failure = error
                    return
                log.warning("heartbeat failed", extra={"event": "heartbeat_failed", "reason": str(error)})
            except Exception as error:  # noqa: BLE001 - boundary of the thread: the worker loop raises it
                self._failure = error
                return
            self._stopped.wait(max(0.0, self._interval_s - (host().monotonic() - started)))
