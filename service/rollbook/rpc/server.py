"""The ledger server: a port, a pool of threads, health and reflection around one ``LedgerPort``.

Owns starting and stopping. Never opens the ledger and never holds a rule: a call is let in (``gate``, ``limits``), guarded
(``guard``), translated (``servicer``) and is one call of the ledger. Upholds P8: fenced, it answers nothing any more (R12).
Beyond loopback it speaks TLS and asks for tokens, or does not start.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollbook.core.errors import ConfigError, RollbookError, ServerFenced, Unavailable
from rollbook.core.host import node_address
from rollbook.core.ports import LedgerPort
from rollbook.core.security import check_reach, load_grants
from rollbook.core.settings import SecurityConfig
from rollbook.observe import tracing
from rollbook.rpc.credentials import server_credentials
from rollbook.rpc.gate import Gate
from rollbook.rpc.guard import Guard, Standing
from rollbook.rpc.intake import Intake
from rollbook.rpc.limits import OPEN_PER_THREAD, Clients, Overload, Pool, Refusals
from rollbook.rpc.servicer import LedgerServicer
from rollbook.rpc.tracing import ServerSpans
from rollbook.rpc.wrapping import SERVICE
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc

CLEAR = SecurityConfig()
"""No TLS and no tokens, which only loopback is good for."""

HELD = tuple(f"/{SERVICE}/{method}" for method in ("Heartbeat", "LeaseSlots"))
"""Methods of which every worker has a call open all the time."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class LedgerHealth(health.HealthServicer):
    """``""``: the process serves and is not fenced. ``rollbook.v1.LedgerService``: the ledger answers, asked on each check."""

    def __init__(self, ledger: LedgerPort, standing: Standing) -> None:
        super().__init__()
        self._ledger = ledger
        self._standing = standing
        self.set(SERVICE, _SERVING)

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        if self._stands() and request.service == SERVICE:
            self.set(SERVICE, _SERVING if self._answers() else _NOT_SERVING)
        return super().Check(request, context)

    def _stands(self) -> bool:
        try:
            self._standing.check()
        except ServerFenced:
            return False
        except Unavailable:
            return True  # not for good; whether the ledger answers is asked of it
        return True

    def _answers(self) -> bool:
        try:
            self._ledger.resume_point()
        except Unavailable:
            return False
        except RollbookError:
            return True  # a refusal, for example before the run is opened, is an answer
        except Exception:  # noqa: BLE001  process boundary: a ledger that raises anything else does not answer
            return False
        return True


class RunningServer:
    """A started server. ``address`` is what clients dial."""

    def __init__(
        self, server: grpc.Server, address: str, standing: Standing, checks: LedgerHealth, refusals: Refusals
    ) -> None:
        self.address = address
        self._server = server
        self._refusals = refusals
        self._standing = standing
        self._checks = checks

    @property
    def fenced(self) -> bool:
        """True when the server lost its role and answers nothing any more."""
        return self._standing.fenced

    def fence(self) -> None:
        """Stop answering for good, as when the ledger itself reports the loss; for the owner of the role's renewal."""
        self._standing.fence()

    def shows_serving(self, serves: bool) -> None:
        """What watchers of the service's health are told; a check asks the ledger itself."""
        self._checks.set(SERVICE, _SERVING if serves else _NOT_SERVING)

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let the running ones end within ``grace_s``, then cut them off. May be called twice."""
        self._checks.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._refusals.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has stopped; True when it has."""
        return not self._server.wait_for_termination(timeout_s)


def serve(
    ledger: LedgerPort,
    address: str,
    *,
    run_id: str,
    security: SecurityConfig = CLEAR,
    max_message_bytes: int = 0,
    threads: int = 128,
    polls: int = 2048,
    holds_role: Callable[[], bool] | None = None,
    on_fenced: Callable[[], None] | None = None,
    interceptors: tuple[grpc.ServerInterceptor, ...] = (),
) -> RunningServer:
    """Start serving ``ledger`` at ``address`` (host:port; port 0 picks a free one).

    Args:
        security: Certificates and token digests, read now, and the limits of a client and of all.
        max_message_bytes: In place of the one in ``security``.
        threads: Calls served at once beside the polls. Four times as many may be open, further ones are refused at once (the
            client repeats them).
        polls: Long polls of workers held at once, each on a thread that is started when it is needed: two a worker, one that
            waits for slots and one for news. Further ones are answered without waiting.
        holds_role: Asked before a verb and again before its answer leaves; False means the role is lost. Left out, a
            ledger that has a method of this name is asked.
        on_fenced: Called once, in its own thread, when the role is lost or the ledger raises ServerFenced.
        interceptors: Placed outside the guard.

    Raises:
        ConfigError: the address cannot be used or must not be, or a file of ``security`` is not what it should be.
    """
    check_reach(address, security)
    credentials = server_credentials(security)
    grants = load_grants(security.tokens) if security.tokens else None
    standing = Standing(holds_role or getattr(ledger, "holds_role", None), on_fenced)
    checks = LedgerHealth(ledger, standing)
    standing.listeners.append(checks.enter_graceful_shutdown)
    pool, held, refusals = Pool(threads), Pool(polls + max(1, threads // 4), "rpc-poll"), Refusals()
    gate = None if grants is None else Gate(grants, run_id, refusals)
    outer = (Overload(pool, held, HELD, security.calls_waiting_max, refusals), *((gate,) if gate else ()))
    server = grpc.server(
        pool,
        interceptors=(
            *outer, *interceptors, Intake(), *((ServerSpans(),) if tracing.enabled() else ()),
            Guard(
                run_id, standing, Clients(security.calls_per_s_max, security.calls_open_max), gate.check_own if gate else None
            ),
        ),
        options=_options(max_message_bytes or security.message_bytes_max, security.calls_open_max),
        maximum_concurrent_rpcs=2 * OPEN_PER_THREAD * (threads + held.threads),
    )  # fmt: skip
    pb_grpc.add_LedgerServiceServicer_to_server(LedgerServicer(ledger, polls), server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if security.reflection:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, address, credentials)
    server.start()
    return RunningServer(server, f"{reachable_host(address)}:{port}", standing, checks, refusals)


def _options(max_message_bytes: int, calls_open_max: int) -> list[tuple[str, int]]:
    return [
        # Beyond the limit of the guard, which says when to come again: for who does not use our client.
        ("grpc.max_concurrent_streams", 4 * calls_open_max),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # With port sharing, a second server on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
        # Clients probe a silent connection every 20 s; without this the server would drop them for it.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


def _bind(server: grpc.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigError(f"ledger.address = {address!r}: write host:port, for example 127.0.0.1:0")
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the host is not this machine's; stop the process that "
            f"holds the port, or set ledger.address to {host}:0 for a free one"
        )
    return bound


def reachable_host(address: str) -> str:
    """Host that clients dial; a wildcard is no destination, so the node's address or this machine's name stands for it."""
    host = address.rpartition(":")[0]
    return (node_address() or socket.gethostname()) if host in ("", "0.0.0.0", "[::]", "*") else host
