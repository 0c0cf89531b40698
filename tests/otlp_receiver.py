"""An OTLP/HTTP collector on loopback that remembers the spans it was sent, and three that are of no use."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Trace ids."""
    resource: dict[str, Any]
    failed: bool
    seconds: float


class Receiver:
    """Answers ``status`` to every request; what is OK is remembered."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests = 0
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            Received(
                span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), _plain(span.attributes),
                tuple(link.trace_id.hex() for link in span.links), _plain(resource.resource.attributes),
                span.status.code == 2, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            )
            for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]  # fmt: skip
        with self._lock:
            self.requests += 1
            if path == "/v1/traces" and self.status == 200:
                self._spans += found

    def spans(self, name: str = "") -> list[Received]:
        """The spans so far, or those of a name."""
        with self._lock:
            return [span for span in self._spans if name in ("", span.name)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def receiver(status: int = 200) -> Iterator[Receiver]:
    made = Receiver(status)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def hanging() -> Iterator[str]:
    """Endpoint that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def refusing() -> Iterator[str]:
    """Endpoint at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
