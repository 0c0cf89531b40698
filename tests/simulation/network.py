"""The network between simulated processes: gRPC's calls without gRPC's wire.

Owns delivery: delayed, lost, answered into the void, delivered twice, delivered an hour late, refused. The client above is
the product's ``LedgerClient`` and the server below is its ``Guard`` and ``LedgerServicer``; messages cross as bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from rollbook.rpc.guard import Guard, Standing
from rollbook.rpc.servicer import LedgerServicer
from rollbook.rpc.wrapping import SERVICE
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc
from simulation.kernel import Event, Kernel, Task
from simulation.machine import Process


@dataclass
class Weather:
    """Rates per message; all zero is a perfect network."""

    lost: float = 0.0
    reply_lost: float = 0.0
    duplicated: float = 0.0
    slow: float = 0.0
    """Share delayed by up to 15 s, past most deadlines."""
    very_late: float = 0.0
    """Share whose duplicate arrives when the run is over, an hour later and at another server."""


class CallFailed(grpc.RpcError):
    """A call's status as gRPC's own errors carry it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class _Aborted(Exception):
    pass


class Context:
    """grpc.ServicerContext of one delivery."""

    def __init__(self, kernel: Kernel, deadline: float) -> None:
        self._kernel, self._deadline = kernel, deadline
        self.failure: CallFailed | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float:
        return max(0.0, self._deadline - self._kernel.now)

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.failure = CallFailed(code, details, self._metadata)
        raise _Aborted


class SimServer:
    """What ``rpc.server.serve`` returns: the same guard and servicer, listening on the simulated network."""

    def __init__(self, network: Network, process: Process, ledger: Any, run_id: str, on_fenced: Callable[[], None]) -> None:
        self.process = process
        self.serves = True
        """What a watcher of this server's health is told."""
        self._standing = Standing(ledger.holds_role, on_fenced)
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        pb_grpc.add_LedgerServiceServicer_to_server(LedgerServicer(ledger, 96), self)
        guard = Guard(run_id, self._standing)
        for name, handler in list(self._methods.items()):
            details = _Details(f"/{SERVICE}/{name}")
            self._methods[name] = guard.intercept_service(lambda _, h=handler: h, details)  # type: ignore[arg-type,misc]
        self.address = network.listen(self)
        self._network = network

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._methods = dict(handlers)

    @property
    def fenced(self) -> bool:
        return self._standing.fenced

    def shows_serving(self, serves: bool) -> None:
        self.serves = serves

    def stop(self, grace_s: float) -> None:
        self._network.close(self)

    def handle(self, method: str, request: bytes, context: Context) -> list[bytes]:
        """Serve one delivery in the calling task."""
        handler = self._methods[method]
        message = handler.request_deserializer(request)
        if handler.response_streaming:
            return [handler.response_serializer(part) for part in handler.unary_stream(message, context)]
        return [handler.response_serializer(handler.unary_unary(message, context))]


@dataclass
class _Details:
    method: str
    invocation_metadata: tuple = ()


@dataclass
class _Call:
    """One attempt as the client sees it."""

    method: str
    deadline: float
    arrived: Event
    replies: list[bytes] | None = None
    failure: CallFailed | None = None


@dataclass
class Network:
    """All links of one simulation."""

    kernel: Kernel
    rng: random.Random
    weather: Weather = field(default_factory=Weather)
    listeners: dict[str, SimServer] = field(default_factory=dict)
    cut_off: set[str] = field(default_factory=set)
    """Names of processes that no message leaves or reaches."""
    on_reply: Callable[[str, bytes, list[bytes]], None] = lambda method, request, replies: None
    """Told of every answer that reached its caller."""
    late: list[Callable[[], None]] = field(default_factory=list)
    """Second copies of requests, held back until ``deliver_late``."""
    counts: dict[str, int] = field(default_factory=dict)
    _ports: int = 0
    _in_flight: int = 0
    _served: list[Task] = field(default_factory=list)

    def deliver_late(self) -> None:
        """Send what was held back, in any order."""
        late, self.late = self.late, []
        self.rng.shuffle(late)
        self._in_flight += len(late)
        for send in late:
            send()

    @property
    def quiet(self) -> bool:
        """Whether every late message was delivered and served."""
        return self._in_flight == 0 and all(task.dead for task in self._served)

    def listen(self, server: SimServer) -> str:
        self._ports += 1
        address = f"sim:{self._ports}"
        self.listeners[address] = server
        return address

    def close(self, server: SimServer) -> None:
        self.listeners.pop(server.address, None)

    def dialer(self, process: Process) -> Callable[[str, Any], Channel]:
        """How ``process`` opens a channel."""
        return lambda address, options: Channel(self, process, address)

    def call(self, caller: Process, address: str, method: str, request: bytes, timeout_s: float) -> list[bytes]:
        """One attempt. Raises CallFailed."""
        call = _Call(method, self.kernel.now + timeout_s, Event(self.kernel))
        weather, rng = self.weather, self.rng
        if rng.random() < weather.lost:
            self._count("lost", caller, method)
        else:
            self._send(caller, call, address, request, self._delay())
        if rng.random() < weather.duplicated:
            self._count("duplicated", caller, method)
            self._send(caller, call, address, request, self._delay() + rng.random())
        if rng.random() < weather.very_late:
            self._count("very_late", caller, method)
            self.late.append(lambda: self._send(caller, call, address, request, self._delay(), late=True))
        call.arrived.wait(max(0.0, call.deadline - self.kernel.now))
        if call.failure is not None:
            raise call.failure
        if call.replies is None:
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"{method}: no answer in {timeout_s:.0f} s")
        self.on_reply(method, request, call.replies)
        return call.replies

    def _delay(self) -> float:
        if self.rng.random() < self.weather.slow:
            return self.rng.random() * 15.0
        return 2e-4 + self.rng.random() * 4e-3

    def _count(self, what: str, caller: Process, method: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.kernel.log(f"{what} {caller.name} {method}")

    def _send(self, caller: Process, call: _Call, address: str, request: bytes, delay_s: float, *, late: bool = False) -> None:
        def deliver() -> None:
            self._in_flight -= late
            # A message that outlived its server reaches whoever serves the run now, as through a stable name.
            server = self.listeners.get(address) or (next(iter(self.listeners.values()), None) if late else None)
            if server is None or not server.process.alive:
                self._answer(call, None, CallFailed(grpc.StatusCode.UNAVAILABLE, f"nobody listens at {address}"))
                return
            if caller.name in self.cut_off or server.process.name in self.cut_off:
                return
            task = self.kernel.spawn(
                server.process, lambda: self._serve(server, caller, call, request, late), f"rpc {call.method}"
            )
            self._served = [*(other for other in self._served if not other.dead), task]

        self.kernel.after(delay_s, deliver)

    def _serve(self, server: SimServer, caller: Process, call: _Call, request: bytes, late: bool) -> None:
        deadline = self.kernel.now + 10.0 if late else call.deadline
        context = Context(self.kernel, deadline)
        replies: list[bytes] | None = None
        try:
            replies = server.handle(call.method, request, context)
        except _Aborted:
            pass
        outcome = context.failure.code().name if context.failure else "ok"
        self.kernel.log(f"{server.process.name} {call.method} {caller.name} {outcome}")
        if self.rng.random() < self.weather.reply_lost:
            self._count("reply_lost", caller, call.method)
            return
        if caller.name in self.cut_off or server.process.name in self.cut_off:
            return
        self.kernel.after(self._delay(), lambda: self._answer(call, replies, context.failure))

    def _answer(self, call: _Call, replies: list[bytes] | None, failure: CallFailed | None) -> None:
        if not call.arrived.is_set() and self.kernel.now < call.deadline:
            call.replies, call.failure = replies, failure
            call.arrived.set()


class Channel:
    """grpc.Channel as the generated stub uses it."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Callable[..., Any]:
        method = path.rpartition("/")[2]

        def call(request: Any, timeout: float) -> Any:
            (reply,) = self._network.call(self._process, self._address, method, request_serializer(request), timeout)
            return response_deserializer(reply)

        call.future = lambda request, timeout: Answer(lambda: call(request, timeout))  # type: ignore[attr-defined]
        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Callable[..., Any]:
        method = path.rpartition("/")[2]

        def call(request: Any, timeout: float) -> Stream:
            return Stream(
                lambda: self._network.call(self._process, self._address, method, request_serializer(request), timeout),
                response_deserializer, self._network,
            )  # fmt: skip

        return call

    def close(self) -> None:
        pass


class Answer:
    """grpc.Future of one call, which is made when somebody waits for it and is there within the deadline of the call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def result(self, timeout: float) -> Any:
        return self._call()


class Stream:
    """The parts of a streamed answer; the connection may break between two of them."""

    def __init__(self, call: Callable[[], list[bytes]], deserialize: Callable[[bytes], Any], network: Network) -> None:
        self._call, self._deserialize, self._network = call, deserialize, network

    def __iter__(self) -> Iterator[Any]:
        for part in self._call():
            if self._network.rng.random() < self._network.weather.reply_lost:
                raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            yield self._deserialize(part)

    def cancel(self) -> None:
        pass
