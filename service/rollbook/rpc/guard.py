"""What every call passes before and after its verb: rate, deadline, run, role, error translation, metrics.

Owns the server interceptor. Never knows a verb. Upholds P8 (a server that lost its role answers nothing, R12: the role is
looked at before the verb and again before its answer leaves) and P10 (no call without a bound).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc

from rollbook.core.errors import InvalidRequest, RollbookError, ServerFenced, Unavailable, WrongRun
from rollbook.core.host import host
from rollbook.observe.metrics import rpc_ended
from rollbook.rpc import status
from rollbook.rpc.limits import Clients
from rollbook.rpc.wrapping import Stream, Unary, Wrapping

DEADLINE_S_MAX = 3600.0
"""Longest deadline accepted; gRPC shows a missing one as one centuries ahead."""

CheckOwn = Callable[[str, Any, grpc.ServicerContext], None]
"""(method, request, context): refuses by raising what a caller may not do with this request."""

log = logging.getLogger(__name__)


class Standing:
    """Whether this server may still answer; once fenced it never may again."""

    def __init__(self, holds_role: Callable[[], bool] | None, on_fenced: Callable[[], None] | None) -> None:
        self._holds_role = holds_role
        self._on_fenced = on_fenced
        self._lock = threading.Lock()
        self.fenced = False
        self.listeners: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raise ServerFenced when the role is lost, Standby while nobody can say whether it is."""
        if not self.fenced and self._holds_role is not None and not self._holds_role():
            self.fence()
        if self.fenced:
            raise ServerFenced()

    def instead_of(self, error: RollbookError) -> RollbookError:
        """What to answer for ``error``: a caller's own fencing goes through, a fenced server says that it is one."""
        if isinstance(error, ServerFenced):
            self.fence()
        try:
            self.check()
        except Unavailable as instead:
            return instead
        return error

    def fence(self) -> None:
        """Stop answering for good and tell the owner, once; its callback may stop the server, so it gets its own thread."""
        with self._lock:
            first, self.fenced = not self.fenced, True
        if first:
            log.error("this ledger server lost its role and answers nothing any more", extra={"event": "ledger_fenced"})
            for listener in self.listeners:
                listener()
            if self._on_fenced is not None:
                host().thread(self._on_fenced, "on-fenced").start()


class Guard(Wrapping):
    """Wraps every method of the ledger service; health and reflection pass untouched."""

    def __init__(
        self, run_id: str, standing: Standing, clients: Clients | None = None, check_own: CheckOwn | None = None
    ) -> None:
        super().__init__()
        self._run_id = run_id
        self._standing = standing
        self._clients = clients
        self._check_own = check_own

    def around(self, method: str, handler: grpc.RpcMethodHandler) -> tuple[Unary, Stream]:
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            with self._guarded(method, request, context):
                answer = handler.unary_unary(request, context)
                self._standing.check()
                return answer

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._guarded(method, request, context):
                for part in handler.unary_stream(request, context):
                    self._standing.check()
                    yield part

        return unary, stream

    @contextmanager
    def _guarded(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[None]:
        """Admit the call, time it, and end it with the status of whatever error leaves the block."""
        started, code = host().monotonic(), ""
        failure: RollbookError | None = None
        try:
            with nullcontext() if self._clients is None else self._clients.call(context.peer()):
                self._admit(method, request, context)
                yield
        except GeneratorExit:
            code = "CANCELLED"
            raise
        except RollbookError as error:
            failure = self._standing.instead_of(error)
        except Exception as error:  # process boundary: a bug must become a status the caller can read
            log.exception("internal error in %s: %s: %s", method, type(error).__name__, error, extra={"event": "rpc_internal"})
            text = f"internal error in {method} ({type(error).__name__}); see the ledger server's log"
            failure = self._standing.instead_of(RollbookError(text))
        finally:
            if failure is not None:
                code = status.code_of(failure).name
            rpc_ended(method, host().monotonic() - started, code)
        if failure is not None:
            status.end_with(context, failure)

    def _admit(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > DEADLINE_S_MAX:
            raise InvalidRequest(f"set a deadline of at most {DEADLINE_S_MAX:.0f} s on the call; a call without one may hang")
        if self._check_own is not None:
            self._check_own(method, request, context)
        self._standing.check()
        if request.run_id != self._run_id:
            raise WrongRun(
                f"the request names run {request.run_id!r}, this server serves {self._run_id!r}; "
                f"check run.id and the address"
            )
