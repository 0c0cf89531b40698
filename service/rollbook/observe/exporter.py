"""The page that a process shows its metrics on, and what a ledger server adds to it: where the other processes show theirs.

Owns the HTTP: ``/metrics`` (Prometheus text, or OpenMetrics with exemplars for a scraper that asks) and, where there are targets,
``/sd`` (the JSON of Prometheus' ``http_sd_config``). Never computes a value. Read only, on loopback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rollbook.core.errors import ConfigError, RollbookError
from rollbook.observe.metrics import TELEMETRY_DROPPED_TOTAL
from rollbook.observe.pages import LOOPBACK, PageHandler, PageServer

Targets = Callable[[], Sequence[dict[str, Any]]]
_OPENMETRICS = "application/openmetrics-text"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger(__name__)


class MetricsPage:
    """``http://127.0.0.1:PORT/metrics`` while it is open."""

    def __init__(
        self, port: int, registry: CollectorRegistry, *, targets: Targets | None = None, setting: str = "ledger.metrics_port"
    ) -> None:
        """Start it; port 0 picks a free one. ``setting`` is what a port that is taken is blamed on. Raises ConfigError."""
        try:
            self._server = _Server((LOOPBACK, port), _Handler, "metrics")
        except OSError as error:
            raise ConfigError(
                f"{setting} = {port}: {error.strerror or error}; choose another port, or none for no metrics"
            ) from None
        self._server.registry, self._server.targets = registry, targets
        self.port = self._server.start()

    def close(self) -> None:
        """Stop answering and let the port go."""
        self._server.close()


def encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """What turns the registry into the answer to this ``Accept``, and its type: text, or OpenMetrics 1.0.0 for who asks for it.

    Names are sent as they are, whatever escaping is asked for. Ours and an engine's are legal in both formats, and the client
    library, where it escapes, writes the samples of ``vllm:x`` as ``vllm_x`` (prometheus/client_python#1177).
    """
    try:
        wants_openmetrics = choose_encoder(accept)[1].startswith(_OPENMETRICS)
    except (TypeError, ValueError):  # of a version that is none
        wants_openmetrics = False
    form = _OPENMETRICS if wants_openmetrics else "text/plain"
    encode, content_type = choose_encoder(f"{form};version=1.0.0;escaping=allow-utf-8")
    return encode, content_type if wants_openmetrics else _TEXT


class _Server(PageServer):
    registry: CollectorRegistry
    targets: Targets | None

    def turned_away(self) -> None:
        TELEMETRY_DROPPED_TOTAL.labels("metrics").inc()


class _Handler(PageHandler):
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = encoder(self.headers.get("Accept", ""))
            try:
                body = encode(self.server.registry)
            except Exception:  # boundary of the page: who looks is told, and the log says why
                log.exception("the metrics were not shown", extra={"event": "metrics_broken"})
                self.reply(500, "text/plain", b"the metrics could not be read; see the log of this process\n")
            else:
                self.reply(200, content_type, body)
        elif path == "/sd" and self.server.targets is not None:
            try:
                found = list(self.server.targets())
            except RollbookError as error:  # Prometheus then keeps the list it has
                self.reply(503, "text/plain", f"{error}\n".encode())
            else:
                self.reply(200, "application/json", json.dumps(found).encode())
        else:
            self.reply(404, "text/plain", b"there is /metrics, and /sd at the ledger server\n")

    do_HEAD = do_GET
