"""Who may call what: the table of roles, and the interceptor that asks every caller for its token.

Owns ``PERMISSIONS``, the one place where a method is given to a role; a method that is missing there may be called by nobody
but ``ledger``. A stranger costs a digest: its message is not received, let alone read. Never logs a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc

from rollbook.core.errors import PermissionDenied, RollbookError, Unauthenticated
from rollbook.core.records import Role
from rollbook.core.security import FEEDER, LEARNER, LEDGER, OBSERVER, OPERATOR, TOKEN_CHARS_MAX, WORKER, Grant, Grants
from rollbook.observe.metrics import rpc_ended
from rollbook.rpc import status
from rollbook.rpc.convert import enum_number
from rollbook.rpc.credentials import SCHEME, TOKEN_KEY
from rollbook.rpc.limits import HEALTH_CHECK, Refusals
from rollbook.rpc.wrapping import SERVICE

_READERS = (OBSERVER, OPERATOR)
_TERMS = (LEARNER, FEEDER)

PERMISSIONS: dict[str, tuple[str, ...]] = {
    "OpenRun": (),
    "AcquireRole": _TERMS,
    "RenewRole": _TERMS,
    "ReleaseRole": _TERMS,
    "Cursor": (FEEDER, LEARNER, *_READERS),
    "AppendGroups": (FEEDER,),
    "FeedDemand": (FEEDER,),
    "RegisterWorker": (WORKER,),
    "Heartbeat": (WORKER,),
    "LeaseSlots": (WORKER,),
    "SubmitSamples": (WORKER,),
    "ReportFailures": (WORKER,),
    "RecordToolCall": (WORKER,),
    "ToolCalls": (WORKER, *_READERS),
    "PlanStep": (LEARNER,),
    "ReadPlan": (LEARNER, *_READERS),
    "Payloads": (LEARNER, *_READERS),
    "Sample": _READERS,
    "FinishPlan": (LEARNER,),
    "PublishVersion": (LEARNER,),
    "Versions": (LEARNER, *_READERS),
    "ForkLineage": (LEARNER,),
    "CommitCheckpoint": (LEARNER,),
    "MarkCheckpoint": (LEARNER,),
    "ResumePoint": (LEARNER, FEEDER, *_READERS),
    "RunStatus": _READERS,
    "Survival": _READERS,
    "StepMetrics": _READERS,
    "Audit": _READERS,
    "Explain": _READERS,
    "QuarantineGroup": (OPERATOR,),
    "RetryGroup": (OPERATOR,),
    "Drain": (OPERATOR,),
}
"""Method -> roles that may call it beside ``ledger``, which may call every one."""

OWN_ROLE: dict[str, Callable[[Any], int]] = {
    "AcquireRole": lambda request: int(request.role),
    "RenewRole": lambda request: int(request.term.role),
    "ReleaseRole": lambda request: int(request.term.role),
}
"""Methods about a fenced role -> the role a request is about: a feeder's token is good for the feeder's term only."""

log = logging.getLogger(__name__)


class Gate(grpc.ServerInterceptor):
    """Knows every caller, or refuses it. Passes the health check."""

    def __init__(self, grants: Grants, run_id: str, refusals: Refusals) -> None:
        self._grants = grants
        self._run_id = run_id
        self._refusals = refusals
        self._n_refused = 0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        path = handler_call_details.method
        if path == HEALTH_CHECK:
            return continuation(handler_call_details)
        try:
            role = self._known(handler_call_details.invocation_metadata).role
            check_method(role, path)
        except (Unauthenticated, PermissionDenied) as error:
            self._note(path, error)
            return self._refusals.of(error)
        return continuation(handler_call_details)

    def check_own(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        """For the guard, which has read the request. Raises PermissionDenied when it is about another role than the caller's."""
        if method not in OWN_ROLE:
            return
        role = self._known(context.invocation_metadata()).role
        if role != LEDGER and OWN_ROLE[method](request) != enum_number(Role(role)):
            raise PermissionDenied(
                f"a token of role {role!r} may call {method} for the role {role!r} only; use that role's token, or ledger's"
            )

    def _known(self, metadata: Any) -> Grant:
        """The caller's grant. Raises Unauthenticated, or PermissionDenied for a token of another run."""
        shown = [value for key, value in metadata or () if key == TOKEN_KEY]
        if not shown:
            raise Unauthenticated(
                "this ledger server asks for a token: name a file with one in ROLLBOOK_TOKEN_FILE, put it into ROLLBOOK_TOKEN, "
                "or set security.token_dir"
            )
        text = shown[0]
        grant = None
        if len(shown) == 1 and isinstance(text, str) and text.startswith(SCHEME) and len(text) <= len(SCHEME) + TOKEN_CHARS_MAX:
            grant = self._grants.of(text.removeprefix(SCHEME))
        if grant is None:
            raise Unauthenticated(
                "this ledger server does not know the token: add its digest to security.tokens and start the server again, or "
                "use a token of this run"
            )
        if grant.run_id and grant.run_id != self._run_id:
            raise PermissionDenied(f"the token is for run {grant.run_id!r}, this server is of {self._run_id!r}; use its token")
        return grant

    def _note(self, path: str, error: RollbookError) -> None:
        """Count every refusal, log the first and then ever fewer: a stranger must not fill the log."""
        service, _, method = path.lstrip("/").partition("/")
        name = method if service == SERVICE and method in PERMISSIONS else "other"
        rpc_ended(name, 0.0, status.code_of(error).name)
        self._n_refused += 1
        if self._n_refused & (self._n_refused - 1) == 0:
            log.warning("%s refused: %s", name, error, extra={"event": "rpc_refused", "refused": self._n_refused})


def check_method(role: str, path: str) -> None:
    """Refuse a method of the ledger service that is not for ``role``. Raises PermissionDenied."""
    service, _, method = path.lstrip("/").partition("/")
    allowed = PERMISSIONS.get(method, ())
    if service == SERVICE and role != LEDGER and role not in allowed:
        others = " or ".join((*allowed, LEDGER))
        raise PermissionDenied(f"a token of role {role!r} may not call {method}; use one of role {others}")
