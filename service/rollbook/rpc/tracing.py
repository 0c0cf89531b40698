"""Spans of calls, on both sides: W3C ``traceparent`` as metadata, method, status and outcome as attributes.

Owns the span around a client's call and the server's interceptor; nothing where the process does not trace. Never touches a
message. The client has no interceptor: through one, gRPC makes the callable of a method anew for every call. Health checks,
reflection and heartbeats have no spans: they say the same every few seconds and would outnumber the work.
Source: OpenTelemetry semantic conventions for RPC spans (rpc.system, rpc.service, rpc.method, rpc.grpc.status_code).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from rollbook.observe import tracing
from rollbook.rpc.status import CLASS_KEY
from rollbook.rpc.wrapping import SERVICE, Stream, Unary, Wrapping

KEY = "traceparent"
QUIET = ("Heartbeat", "RenewRole")
"""Methods that keep something alive."""


def method_of(path: str) -> str:
    """Method of a call that gets a span; empty for one that gets none."""
    service, _, method = path.lstrip("/").partition("/")
    return method if service == SERVICE and method not in QUIET else ""


def _attributes(method: str) -> dict[str, tracing.Value]:
    return {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}


def called(start: Callable[..., Any], method: str, request: Any, timeout_s: float, sent: Mapping[str, Any]) -> Any:
    """One attempt at a call, in a span that ends with the answer, with the stream of them, or with the future.

    Args:
        start: The stub's method, or its ``future``.
        sent: Keywords of the call, metadata among them.
    """
    if method in QUIET or not tracing.enabled():
        return start(request, timeout=timeout_s, **sent)
    span = tracing.span(f"{SERVICE}/{method}", kind="client", attributes=_attributes(method))
    metadata = (*(sent.get("metadata") or ()), (KEY, span.traceparent))
    try:
        answer = start(request, timeout=timeout_s, **{**sent, "metadata": metadata})
    except Exception as failure:
        _end(span, failure)
        raise
    if isinstance(answer, grpc.Future):
        answer.add_done_callback(lambda ended: _end(span, ended))
    else:
        _end(span, None)
    return answer


def _end(span: tracing.Span, call: Any) -> None:
    """End the span of a call that is over; None stands for an answer."""
    code = grpc.StatusCode.OK if call is None else call.code() if isinstance(call, grpc.Call) else None
    name = code.name if code is not None else "UNKNOWN"
    span.set(**{"rpc.grpc.status_code": code.value[0] if code is not None else 2, "status": name})
    if code is grpc.StatusCode.OK:
        span.set(outcome="ok")
    else:
        said = dict((call.trailing_metadata() if code is not None else None) or ())
        span.fail(str(said.get(CLASS_KEY, name)))
    span.end()


class ServerSpans(Wrapping):
    """A span for each call, a part of the caller's trace where that sent one."""

    def method_of(self, path: str) -> str:
        return method_of(path)

    def around(self, method: str, handler: grpc.RpcMethodHandler) -> tuple[Unary, Stream]:
        attributes, name = _attributes(method), f"{SERVICE}/{method}"

        def span_of(context: grpc.ServicerContext) -> tracing.Span:
            sent = next((value for key, value in context.invocation_metadata() or () if key == KEY), "")
            parent = sent if isinstance(sent, str) and tracing.is_traceparent(sent) else ""
            return tracing.span(name, parent=parent, kind="server", attributes=attributes)

        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            with span_of(context) as span:
                try:
                    answer = handler.unary_unary(request, context)
                finally:
                    _outcome(span, context)
                return answer

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            # Every part may be asked for by another thread, so the span is never the current one.
            span = span_of(context)
            try:
                yield from handler.unary_stream(request, context)
            finally:
                _outcome(span, context)
                span.end()

        return unary, stream


def _outcome(span: tracing.Span, context: grpc.ServicerContext) -> None:
    """Status and error class, as the guard has set them on the call."""
    code = context.code()
    if code is None or code is grpc.StatusCode.OK or code == 0:
        fine: dict[str, tracing.Value] = {"rpc.grpc.status_code": 0, "outcome": "ok"}
        span.set(**fine)
        return
    said = dict(context.trailing_metadata() or ())
    name = str(getattr(code, "name", code))
    number = int(code.value[0]) if isinstance(code, grpc.StatusCode) else 2
    attributes: dict[str, tracing.Value] = {"rpc.grpc.status_code": number, "status": name}
    span.set(**attributes)
    span.fail(str(said.get(CLASS_KEY, name)))
