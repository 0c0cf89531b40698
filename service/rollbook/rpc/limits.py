"""How much of the server one client may take, and all of them together.

Owns counting and the time a refused caller is told to wait. Never queues anything itself. A refusal costs less than the call it
refuses: it is given on threads of its own, before the message is received, where all threads are busy (P10).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from rollbook.core.errors import Overloaded, RollbookError
from rollbook.core.host import host
from rollbook.rpc import status

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""Answered always and to everybody: probes of a cluster manager have no token. ``Watch``, which holds a call open, is not."""

OPEN_PER_THREAD = 4
"""Calls that may be open for each thread there is."""
PEERS_MAX = 4096
"""Clients whose rate is remembered; the one that was silent longest is forgotten."""
WAIT_S_FIRST, WAIT_S_MAX = 0.1, 5.0
"""What a caller is told to wait when every thread is busy, with a short and with an endless queue."""


class Rates:
    """A token bucket for each client: ``per_s`` calls a second, one second's worth at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, peer: str) -> None:
        """Count one call. Raises Overloaded with the time at which the next one will do."""
        now = host().monotonic()
        with self._lock:
            level, at = self._buckets.pop(peer, (self._burst, now))
            level = min(self._burst, level + (now - at) * self._per_s)
            refused = level < 1.0
            self._buckets[peer] = (level if refused else level - 1.0, now)
            if len(self._buckets) > PEERS_MAX:
                self._buckets.popitem(last=False)
        if refused:
            raise overloaded(
                f"more than {self._per_s:g} calls a second from this client (security.calls_per_s_max); send more per call",
                (1.0 - level) / self._per_s,
            )


class Clients:
    """What each client does now: its rate, and how many of its calls are open. A client is a connection."""

    def __init__(self, calls_per_s_max: float, calls_open_max: int) -> None:
        self._rates = Rates(calls_per_s_max)
        self._open_max = calls_open_max
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """One call of ``peer`` for as long as the block. Raises Overloaded."""
        self._rates.take(peer)
        with self._lock:
            n = self._open.get(peer, 0)
            if n < self._open_max:
                self._open[peer] = n + 1
        if n >= self._open_max:
            raise overloaded(f"{n} calls of this client are open (security.calls_open_max); let some end first", WAIT_S_FIRST)
        try:
            yield
        finally:
            with self._lock:
                self._open[peer] -= 1
                if not self._open[peer]:
                    del self._open[peer]


class Pool(ThreadPoolExecutor):
    """Threads that know how many calls they have, and how many of these wait for one of them."""

    def __init__(self, threads: int, name: str = "rpc") -> None:
        super().__init__(threads, thread_name_prefix=name)
        self.threads = threads
        self._count = threading.Lock()
        self.waiting = self.open = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._add(1, 1)
        try:
            return super().submit(self._begin, fn, *args, **kwargs)
        except BaseException:
            self._add(-1, -1)
            raise

    def _begin(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._add(-1, 0)
        try:
            return fn(*args, **kwargs)
        finally:
            self._add(0, -1)

    def _add(self, waiting: int, opened: int) -> None:
        with self._count:
            self.waiting += waiting
            self.open += opened


class Refusals:
    """Handlers that end a call with an error without receiving its message, on two threads of their own."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="rpc-refuse")

    def of(self, error: RollbookError) -> grpc.RpcMethodHandler:
        def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            status.end_with(context, error)

        # gRPC runs a behaviour on the pool that it carries, and receives the messages of a stream only when they are asked for.
        refuse.experimental_thread_pool = self.threads  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(refuse)

    def instead(self, handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler | None:
        """The handler, run on these threads: a busy server is a healthy one, and says so."""
        return run_on(self.threads, handler)

    def close(self) -> None:
        self.threads.shutdown(wait=False)


class Overload(grpc.ServerInterceptor):
    """Refuses what would only wait: outermost, so that an overloaded server does nothing for the call but say so.

    Args:
        polls: Threads for the methods whose answers are held, so that those never take one that another call needs.
        held: Paths of these methods.
        waiting_max: Calls that may wait for a thread of either pool; three times as many as it has threads at most.
    """

    def __init__(self, pool: Pool, polls: Pool, held: Collection[str], waiting_max: int, refusals: Refusals) -> None:
        self._pool = pool
        self._polls = polls
        self._held = frozenset(held)
        self._waiting_max = waiting_max
        self._refusals = refusals

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        pool = self._polls if method in self._held else self._pool
        waiting = pool.waiting
        if waiting < self._waiting_max and pool.open < OPEN_PER_THREAD * pool.threads:
            handler = continuation(handler_call_details)
            return run_on(pool, handler) if pool is self._polls else handler
        if method == HEALTH_CHECK:
            return self._refusals.instead(continuation(handler_call_details))
        text = f"{waiting} calls wait for one of {pool.threads} threads; call again later"
        return self._refusals.of(overloaded(text, WAIT_S_FIRST * (1 + waiting / pool.threads)))


def run_on(threads: ThreadPoolExecutor, handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler | None:
    """The handler of a method with one request and one answer, run on these threads; any other as it is."""
    if handler is None or handler.unary_unary is None:
        return handler
    inner = handler.unary_unary

    def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
        return inner(request, context)

    behaviour.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return grpc.unary_unary_rpc_method_handler(
        behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


def overloaded(text: str, wait_s: float) -> Overloaded:
    """The error of a server that wants to be called again after ``wait_s``."""
    error = Overloaded(f"the ledger server is overloaded: {text}")
    error.retry_after_s = min(wait_s, WAIT_S_MAX)
    return error
