"""Holding the learner role: bounded acquisition, renewal in the background, stopping at once when fenced.

Owns the role's term inside this process. Never writes anything after the role is lost (P8): ``check`` raises, and the
ledger refuses the old epoch anyway.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollbook.core.errors import Fenced, RoleHeld, RollbookError, Unavailable
from rollbook.core.host import host
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Role, RoleTerm
from rollbook.observe import progress
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)

_RENEWALS_PER_TERM = 3


class HeldRole:
    """A term being renewed; ``check`` before every write."""

    def __init__(self, client: LedgerPort, term: RoleTerm) -> None:
        """Begin to renew the term."""
        self.term = term
        self._client = client
        self._lost: Fenced | None = None
        self._renewed_at = host().monotonic()
        self._closed = host().event()
        self._thread = host().thread(self._renew, f"renew-{term.role}")
        self._thread.start()

    def check(self) -> None:
        """Raise Fenced when a renewal was refused."""
        if self._lost is not None:
            raise Fenced(str(self._lost))

    def wrong(self) -> str:
        """Why the holder could not write now; empty while the term runs."""
        if self._lost is not None:
            return f"the {self.term.role} role was taken over"
        past_s = host().monotonic() - self._renewed_at - self.term.ttl_s
        return f"the term of the {self.term.role} role ran out {past_s:.0f} s ago" if past_s > 0 else ""

    def close(self) -> None:
        """Stop renewing; the term runs out by itself."""
        self._closed.set()

    def _renew(self) -> None:
        while not self._closed.wait(self.term.ttl_s / _RENEWALS_PER_TERM):
            try:
                sent_at = host().monotonic()
                self._client.renew_role(self.term)
                self._renewed_at = sent_at
            except Fenced as fenced:
                self._lost = fenced
                log.error("the %s role was taken over: %s", self.term.role, fenced, extra={"event": "role_lost"})
                failpoint("learner.role_lost")
                return
            except RollbookError as error:
                log.warning("renewing the %s role failed: %s", self.term.role, error, extra={"event": "role_renewal_failed"})


def acquire(
    client: LedgerPort, role: Role, holder: str, ttl_s: float, supersede: str, stop: threading.Event, wait_s: float
) -> RoleTerm | None:
    """Take the role, waiting at most ``wait_s`` for a holder whose term runs out; None when told to stop.

    Raises:
        RoleHeld: it is still held after that time.
    """
    deadline = host().monotonic() + wait_s
    while not stop.is_set():
        progress.mark()
        try:
            return client.acquire_role(role, holder, ttl_s, supersede)
        except RoleHeld as held:
            if host().monotonic() >= deadline:
                raise
            log.info("waiting for the %s role: %s", role, held, extra={"event": "role_held"})
            stop.wait(min(1.0, ttl_s / 10))
    return None


@contextmanager
def holding(client: LedgerPort, term: RoleTerm) -> Iterator[HeldRole]:
    """Renew the term for the length of the block and give the role up afterwards.

    It is not given up when it is already lost, when the ledger cannot be reached, or when the block ends by an error
    that is none of Rollbook's own: whoever supersedes this process then knows it to be dead.
    """
    role = HeldRole(client, term)
    try:
        yield role
    except (Fenced, Unavailable):
        raise
    except RollbookError:
        with suppress(RollbookError):  # what ended the block is the cause to report; the term runs out by itself
            client.release_role(term)
        raise
    else:
        client.release_role(term)
    finally:
        role.close()
