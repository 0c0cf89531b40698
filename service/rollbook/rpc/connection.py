"""The client's side of one gRPC connection: dial, share between threads, replace after a failure, retry with a bound.

Owns channels and the retry law. Never knows a verb. Upholds P10: every call has a deadline and every retry a budget.
Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so
that workers do not return in step after a server restart.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from rollbook.core.errors import DeadlineExceeded, Overloaded, RollbookError, Standby, Unavailable
from rollbook.core.ports import Clock
from rollbook.observe import progress
from rollbook.observe.metrics import RPC_RETRIES_TOTAL
from rollbook.rpc import status
from rollbook.rpc.credentials import STRANGER, Access, Dial
from rollbook.rpc.tracing import called
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

_CLOSED = "this ledger client is closed; open another one"
LOOK_S = 1.0
"""How often a call that is not answered looks whether the run's address file names another holder by now."""
STANDBY_WAIT_S = 1.0
"""Longest wait between two rounds while some server says that it is a standby: it may take the role at any moment."""


class Link:
    """One channel in use by several threads; once retired it is closed by whoever leaves it last."""

    def __init__(self, address: str, first: str, max_message_bytes: int, access: Access, dial: Dial) -> None:
        self.address = address
        self.first = first
        """Address that was listed first when this link was made."""
        self._sent = access.sent_to(address)
        self._channel = dial(address, _options(max_message_bytes))
        self._stub = pb_grpc.LedgerServiceStub(self._channel)
        self._users = 0
        self._retired = False

    def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """One attempt of a method; the answer, or the stream of them."""
        return called(getattr(self._stub, method), method, request, timeout_s, self._sent)

    def future(self, method: str, request: Message, timeout_s: float) -> Any:
        """The same for a method with one answer, without waiting for it."""
        return called(getattr(self._stub, method).future, method, request, timeout_s, self._sent)

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._close_if_idle()

    def retire(self) -> None:
        self._retired = True
        self._close_if_idle()

    def close(self) -> None:
        """Close now; calls in flight end as cancelled."""
        self._channel.close()

    def _close_if_idle(self) -> None:
        if self._retired and self._users == 0:
            self._channel.close()


class Connection:
    """The current link to the ledger server. The addresses and the token are read again for every new link.

    A link is kept while its server answers. After a failure the next address is dialled that has not failed since the last
    answer; when all have, the round begins again with the one listed first. ``dial`` opens its channels; left out, ``access``
    does.
    """

    def __init__(
        self, address: Callable[[], str | Sequence[str]], max_message_bytes: int, access: Access = STRANGER,
        dial: Dial | None = None,
    ) -> None:  # fmt: skip
        self._address = address
        self._failed: list[str] = []
        self.n_addresses = 1
        """How many servers the newest link was chosen from."""
        self._access = access
        self._dial = dial or access.dial
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self.last_address = "an unknown address"

    @contextmanager
    def link(self) -> Iterator[Link]:
        """A link to call; a failed call leaves as the core error it means, after which the next call dials anew if need be."""
        with self._using() as link:
            yield link

    def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """One attempt at a call with one answer.

        Where several servers are listed, it is given up when another one has become the first of them: the one that was
        called may be stopped, and would not say so. Raises Standby in its name.
        """
        with self._using() as link:
            if self.n_addresses < 2:
                return link.call(method, request, timeout_s)
            answer = link.future(method, request, timeout_s)
            while True:
                try:
                    return answer.result(timeout=LOOK_S)
                except grpc.FutureTimeoutError:
                    if self._has_moved(link):
                        answer.cancel()
                        self._replace(link)
                        raise Standby(f"{method}: {link.address} did not answer, and another server is the holder now") from None
                except grpc.FutureCancelledError:
                    raise RollbookError(_CLOSED) from None

    @contextmanager
    def _using(self) -> Iterator[Link]:
        link = self._enter()
        try:
            yield link
            self._failed.clear()
        except grpc.RpcError as failure:
            error = status.error_of(failure)
            error.__cause__ = failure
            if status.is_elsewhere(error):
                self._replace(link)
            else:
                self._failed.clear()
            raise error from failure
        except ValueError as failure:  # how gRPC refuses a call on a channel that was closed meanwhile
            if not self._closed:
                raise
            raise RollbookError(_CLOSED) from failure
        finally:
            with self._lock:
                link.leave()

    def close(self) -> None:
        """Close for good; calls in flight in other threads end with an error."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _enter(self) -> Link:
        with self._lock:
            if self._closed:
                raise RollbookError(_CLOSED)
            if self._link is None:
                addresses = self._listed()
                self.n_addresses = len(addresses)
                left = [address for address in addresses if address not in self._failed]
                if not left:
                    self._failed.clear()
                self.last_address = (left or addresses)[0]
                self._link = Link(self.last_address, addresses[0], self._max_message_bytes, self._access, self._dial)
            self._link.enter()
            return self._link

    def _listed(self) -> Sequence[str]:
        given = self._address()
        addresses = [given] if isinstance(given, str) else given
        if not any(addresses):
            raise Unavailable("the ledger server's address is not known yet; is `rollbook ledger` running?")
        return addresses

    def _has_moved(self, link: Link) -> bool:
        """Whether another address than the link's has come first since the link was made."""
        try:
            first = self._listed()[0]
        except Unavailable:
            return False
        return first not in (link.first, link.address)

    def _replace(self, link: Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
                self._failed.append(link.address)
                link.retire()


class Retry:
    """Budget of one logical call: how often and how long it is repeated."""

    def __init__(
        self, connection: Connection, method: str, clock: Clock, rng: random.Random, *,
        budget_s: float, first_s: float, longest_s: float,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._method = method
        self._clock = clock
        self._rng = rng
        self._budget_s = budget_s
        self._first_s = first_s
        self._longest_s = longest_s
        self._failed_at: float | None = None
        self._n_failures = 0
        self._n_hops = 0
        self._met: list[RollbookError] = []

    def progressed(self) -> None:
        """Something arrived: a stream that moves gets its whole budget again."""
        self._failed_at, self._n_failures = None, 0

    def wait_or_raise(self, error: RollbookError) -> None:
        """Sleep before the next attempt, or raise what cannot or may no longer be repeated.

        Within a round of the listed servers the next one is tried at once, which costs nothing of the budget.
        """
        if not isinstance(error, Unavailable) or self._connection.closed:
            raise error
        self._met.append(error)
        if status.is_elsewhere(error) and self._n_hops + 1 < self._connection.n_addresses:
            self._n_hops += 1
            RPC_RETRIES_TOTAL.labels(type(error).__name__).inc()
            return
        # A server that hangs says more about the round than a standby that answered after it.
        error = next((one for one in self._met if isinstance(one, DeadlineExceeded)), error)
        cap_s = STANDBY_WAIT_S if any(isinstance(one, Standby) for one in self._met) else self._longest_s
        self._n_hops, self._met = 0, []
        progress.mark()  # an outage is waited out: the budget bounds it, and the loop that waits is no hung one
        now = self._clock.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            log.warning("%s: %s; repeating", self._method, error, extra={"event": "rpc_retry"})
        longest = min(self._longest_s, cap_s, self._first_s * 2 ** min(self._n_failures, 30))
        self._n_failures += 1
        wait_s = self._rng.uniform(0.0, longest)
        if isinstance(error, Overloaded):
            wait_s += error.retry_after_s  # not instead of it: who was sent away together would come back together
        spent_s = now - self._failed_at
        if spent_s + wait_s > self._budget_s:
            raise type(error)(
                f"{self._method} failed {self._n_failures} times over {spent_s:.0f} s at {self._connection.last_address}, "
                f"last with: {error}; check that `rollbook ledger` is running"
            ) from error
        RPC_RETRIES_TOTAL.labels(type(error).__name__).inc()
        self._clock.sleep(wait_s)


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A proxy from the environment must not come between processes of one run.
        ("grpc.enable_http_proxy", 0),
        # A silent connection (host gone, no reset) is found during a long poll instead of at its deadline.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Retries are ours, with our keys and our budget.
        ("grpc.enable_retries", 0),
        # A client is a connection: limits of the server hold for each, and a new link is a new connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
