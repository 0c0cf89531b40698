"""The small HTTP server under every page that a process shows of itself: health, metrics, the status page.

Owns sockets and bounds: how many requests at once, how long a client may take to ask and to listen. Never knows what is shown; a
page gives its handler. One request a connection.
"""

from __future__ import annotations

import logging
import socketserver
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR
from typing import Any

from rollbook.core.host import host

OPEN_MAX = 32
"""Requests answered at once; further ones are closed unanswered."""
SILENT_S = 5.0
"""How long a client may send or take nothing."""
REQUEST_S = 30.0
"""How long one request may take in all, however little by little a client sends it."""
CLOSE_S = 2.0
TURN_S = 0.2

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


class PageServer(ThreadingHTTPServer):
    """Answers ``host, port`` (0: any free one; host ``::1`` or ``::``: IPv6) while it is open, over TLS with a ``context``.

    Raises: OSError (the port is taken, the address is not this machine's).
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], handler: type[PageHandler], name: str, context: ssl.SSLContext | None = None
    ) -> None:
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, handler)
        self._context, self._free = context, threading.Semaphore(OPEN_MAX)
        self._open: dict[int, tuple[float, Any]] = {}
        """Thread to the end of its time and its connection."""
        self._thread = threading.Thread(target=self.serve_forever, args=(TURN_S,), name=name, daemon=True)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name, which may hang where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self) -> int:
        """Answer from now on; returns the port."""
        self._thread.start()
        return self.server_port

    def close(self) -> None:
        """Stop answering and let the port go."""
        self.shutdown()
        self.server_close()
        self._thread.join(CLOSE_S)

    def turned_away(self) -> None:
        """A client found no place; for a page that counts them."""

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.turned_away()
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        me, end = threading.get_ident(), host().monotonic() + REQUEST_S
        self._open[me] = (end, request)
        try:
            if self._context is not None:  # here, so that a client that never shakes hands holds up nobody else
                request.settimeout(SILENT_S)
                request = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                self._open[me] = (end, request)
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            del self._open[me]
            self._free.release()

    def service_actions(self) -> None:
        """Cut off who has had its time; called every turn of the loop."""
        now = host().monotonic()
        for end, request in list(self._open.values()):
            if now >= end:
                try:
                    request.shutdown(SHUT_RDWR)
                except OSError:
                    pass  # it ended by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request of %s was not answered", self._thread.name, exc_info=True)


class PageHandler(BaseHTTPRequestHandler):
    """What all pages answer alike: how, with which headers, and what is no request at all."""

    timeout = SILENT_S
    server_version = "rollbook"
    sys_version = ""

    def headers_of(self, status: int) -> dict[str, str]:
        """Headers of every answer with that status, beside its kind and length."""
        return {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}

    def reply(self, status: int, kind: str, body: bytes) -> None:
        """Send the whole answer; without its body to who asked with HEAD."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        for name, value in self.headers_of(status).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, without repeating a word of it, and every method but the two that only read."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection, self.request_version = True, self.protocol_version  # who asks in no version gets headers too
        self.reply(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a look is no news."""
