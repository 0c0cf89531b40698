"""The client's side of one gRPC connection: dial, share between threads, replace after a failure, retry with a bound.

Owns channels and the retry law. Never knows a verb. Upholds P10: every call has a deadline and every retry a budget.
Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so
that workers do not return in step after a server restart.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from rollbook.core.errors import RollbookError, ServerFenced, Unavailable
from rollbook.core.ports import Clock
from rollbook.observe import progress
from rollbook.observe.metrics import RPC_RETRIES_TOTAL
from rollbook.rpc import status
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

_CLOSED = "this ledger client is closed; open another one"


Dial = Callable[[str, list[tuple[str, int]]], grpc.Channel]
"""(address, channel options) to a channel; a simulator dials its own network."""


class Link:
    """One channel in use by several threads; once retired it is closed by whoever leaves it last."""

    def __init__(self, address: str, max_message_bytes: int, dial: Dial) -> None:
        self.address = address
        self._channel = dial(address, _options(max_message_bytes))
        self.stub = pb_grpc.LedgerServiceStub(self._channel)
        self._users = 0
        self._retired = False

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
    """The current link to the ledger server. The address is read again for every new link."""

    def __init__(self, address: Callable[[], str], max_message_bytes: int, dial: Dial = grpc.insecure_channel) -> None:
        self._address = address
        self._dial = dial
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self.last_address = "an unknown address"

    @contextmanager
    def stub(self) -> Iterator[pb_grpc.LedgerServiceStub]:
        """A stub to call; a failed call leaves as the core error it means, after which the next call dials anew if need be."""
        link = self._enter()
        try:
            yield link.stub
        except grpc.RpcError as failure:
            error = status.error_of(failure)
            if isinstance(error, Unavailable) and (status.is_transport(failure) or isinstance(error, ServerFenced)):
                self._replace(link)
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
                address = self._address()
                if not address:
                    raise Unavailable("the ledger server's address is not known yet; is `rollbook ledger` running?")
                self.last_address = address
                self._link = Link(self.last_address, self._max_message_bytes, self._dial)
            self._link.enter()
            return self._link

    def _replace(self, link: Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
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

    def progressed(self) -> None:
        """Something arrived: a stream that moves gets its whole budget again."""
        self._failed_at, self._n_failures = None, 0

    def wait_or_raise(self, error: RollbookError) -> None:
        """Sleep before the next attempt, or raise what cannot or may no longer be repeated."""
        if not isinstance(error, Unavailable) or self._connection.closed:
            raise error
        progress.mark()  # an outage is waited out: the budget bounds it, and the loop that waits is no hung one
        now = self._clock.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            log.warning("%s: %s; repeating", self._method, error, extra={"event": "rpc_retry"})
        longest = min(self._longest_s, self._first_s * 2 ** min(self._n_failures, 30))
        self._n_failures += 1
        wait_s = self._rng.uniform(0.0, longest)
        spent_s = now - self._failed_at
        if spent_s + wait_s > self._budget_s:
            raise type(error)(
                f"{self._method} failed {self._n_failures} times over {spent_s:.0f} s at {self._connection.last_address}, "
                f"last with: {error}; check that `rollbook ledger` is running"
            ) from error
        RPC_RETRIES_TOTAL.labels(self._method, type(error).__name__).inc()
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
    ]
