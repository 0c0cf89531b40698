"""The page that a process shows its metrics on, and what a ledger server adds to it: where the other processes show theirs.

Owns the HTTP: ``/metrics`` (Prometheus text, or OpenMetrics with exemplars for a scraper that asks) and, where there are targets,
``/sd`` (the JSON of Prometheus' ``http_sd_config``). Never computes a value. Read only, on loopback, a bounded number of
requests at once.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rollbook.core.errors import ConfigError, RollbookError
from rollbook.observe.metrics import TELEMETRY_DROPPED_TOTAL

LOOPBACK = "127.0.0.1"
OPEN_MAX = 16
"""Requests answered at once; further ones are closed unanswered, and counted."""
REQUEST_S = 10.0

Targets = Callable[[], Sequence[dict[str, Any]]]

log = logging.getLogger(__name__)


class MetricsPage:
    """``http://127.0.0.1:PORT/metrics`` while it is open."""

    def __init__(
        self, port: int, registry: CollectorRegistry, *, targets: Targets | None = None, setting: str = "ledger.metrics_port"
    ) -> None:
        """Start it; port 0 picks a free one. ``setting`` is what a port that is taken is blamed on. Raises ConfigError."""
        try:
            self._server = _Server((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"{setting} = {port}: {error.strerror or error}; choose another port, or none for no metrics"
            ) from None
        self._server.registry, self._server.targets = registry, targets
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and let the port go."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    registry: CollectorRegistry
    targets: Targets | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.Semaphore(OPEN_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            TELEMETRY_DROPPED_TOTAL.labels("metrics").inc()
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape was not answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "rollbook"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            try:
                body = encode(self.server.registry)
            except Exception:  # boundary of the page: who looks is told, and the log says why
                log.exception("the metrics were not shown", extra={"event": "metrics_broken"})
                self._reply(500, "text/plain", b"the metrics could not be read; see the log of this process\n")
            else:
                self._reply(200, content_type, body)
        elif path == "/sd" and self.server.targets is not None:
            try:
                found = list(self.server.targets())
            except RollbookError as error:  # Prometheus then keeps the list it has
                self._reply(503, "text/plain", f"{error}\n".encode())
            else:
                self._reply(200, "application/json", json.dumps(found).encode())
        else:
            self._reply(404, "text/plain", b"there is /metrics, and /sd at the ledger server\n")

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every few seconds is no news."""
