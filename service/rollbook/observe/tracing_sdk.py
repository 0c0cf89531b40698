"""The OpenTelemetry SDK behind ``tracing``: spans, the batch that sends them, and the count of what was not sent.

Owns every import of the SDK; loaded only by a process that traces. Never waits for a collector: a span that finds the queue full
is dropped and counted, a batch that the collector does not take is too (the exporter repeats it within its own timeout first),
and ``close`` has a bound. Sampling is the SDK's, by its environment variables; what a parent has decided is obeyed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from rollbook.core.host import host
from rollbook.observe.metrics import TELEMETRY_DROPPED_TOTAL
from rollbook.observe.tracing import LINKS_MAX, Span, Value, is_sampled, is_traceparent, span_id, trace_id

log = logging.getLogger(__name__)

QUEUE_MAX = 2048
"""Spans that may wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise."""

_DROPPED = TELEMETRY_DROPPED_TOTAL.labels("traces")
_KINDS = {"internal": trace.SpanKind.INTERNAL, "client": trace.SpanKind.CLIENT, "server": trace.SpanKind.SERVER}


def exporter_named(name: str) -> SpanExporter:
    """``otlp`` (HTTP, configured by the standard variables) or ``console``. Raises ImportError naming the package."""
    if name == "console":
        return ConsoleSpanExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as missing:
        raise ImportError("install opentelemetry-exporter-otlp-proto-http to send traces") from missing
    with suppress(ImportError):  # it draws the wait between attempts from Python's global generator, before every attempt
        from opentelemetry.exporter.otlp.common import http

        setattr(http, "random", host().rng())  # noqa: B010  a module that is not declared to have it
    return OTLPSpanExporter()


class _Ids(IdGenerator):
    """Random ids, save for a span whose id others derive.

    The SDK's own draw from Python's global generator: the learner's is part of a checkpoint, and a seed would repeat them (P4).
    """

    def __init__(self) -> None:
        self.next = threading.local()
        self._rng = host().rng()

    def generate_span_id(self) -> int:
        given = getattr(self.next, "span_id", 0)
        self.next.span_id = 0
        return given or self._rng.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        given = getattr(self.next, "trace_id", 0)
        self.next.trace_id = 0
        return given or self._rng.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class _Counted(SpanExporter):
    """Sends through another exporter and counts the spans of batches it did not get rid of."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._n_batches_lost = 0
        self.waiting = 0

    def enters(self, n_max: int) -> bool:
        """Whether one more span may wait; counted as dropped when not."""
        with self._lock:
            room = self.waiting < n_max
            self.waiting += room
        if not room:
            _DROPPED.inc()
        return room

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # boundary to a library, in a thread that must go on
            result = SpanExportResult.FAILURE
            log.debug("exporter raised", exc_info=error)
        lost = result is not SpanExportResult.SUCCESS
        with self._lock:
            self.waiting -= len(spans)
            self._n_batches_lost += lost
            n_lost = self._n_batches_lost
        if lost:
            _DROPPED.inc(len(spans))
            if n_lost & (n_lost - 1) == 0:  # ever fewer of them
                log.warning("spans were not sent, the collector does not take them",
                            extra={"event": "spans_dropped", "spans": len(spans), "batches": n_lost})  # fmt: skip
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Bounded(SpanProcessor):
    """The SDK's batch processor, entered only while there is room: its own queue drops the oldest and tells nobody."""

    def __init__(self, exporter: _Counted) -> None:
        self._exporter = exporter
        self._inner = BatchSpanProcessor(exporter, max_queue_size=_queue_max())
        self._n_max = _queue_max()

    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled and self._exporter.enters(self._n_max):
            self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _queue_max() -> int:
    said = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return int(said) if said.isdigit() and int(said) > 0 else QUEUE_MAX


class Pipeline:
    """From a span's begin to the exporter."""

    def __init__(self, exporter: SpanExporter, component: str, run_id: str, name: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it repeats itself; what is lost is told by us
        self._ids = _Ids()
        self._exporter = _Counted(exporter)
        self._provider = TracerProvider(
            resource=_resource(component, run_id, name), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Bounded(self._exporter))
        self._tracer = self._provider.get_tracer("rollbook")

    def close(self, bound_s: float) -> None:
        """Send what waits; a collector that hangs is left to its own devices after ``bound_s``."""
        ending = host().thread(self._provider.shutdown, "tracing-close")
        ending.start()
        ending.join(timeout=bound_s)

    def flush(self) -> None:
        """Send what waits, now and in this thread (tests)."""
        self._provider.force_flush()

    def span(self, name: str, parent: str, kind: str, attributes: Mapping[str, Value]) -> Span:
        if not is_traceparent(parent):
            here = trace.get_current_span().get_span_context()
            if not here.is_valid:
                return self._begun(name, kind, attributes)
            if here.trace_flags.sampled:
                return _Live(self._tracer.start_span(name, None, _KINDS[kind], dict(attributes)))
            parent = _text(here)
        if not is_sampled(parent):
            return _Unkept(parent)
        return _Live(self._tracer.start_span(name, _around(parent), _KINDS[kind], dict(attributes)))

    def _begun(self, name: str, kind: str, attributes: Mapping[str, Value]) -> Span:
        """A span that nobody is the parent of; the sampler decides before anything is made for it."""
        drawn = self._ids.generate_trace_id()
        if not self._provider.sampler.should_sample(None, drawn, name).decision.is_sampled():
            return _Unkept(f"00-{drawn:032x}-{self._ids.generate_span_id():016x}-00")
        self._ids.next.trace_id = drawn
        return _Live(self._tracer.start_span(name, contexts.Context(), _KINDS[kind], dict(attributes)))

    def link(self, traceparents: Sequence[str]) -> None:
        here, sampled = trace.get_current_span(), [one for one in traceparents if is_sampled(one)]
        for one in sampled[:LINKS_MAX]:
            here.add_link(_context_of(one))
        counts = {"rollouts": len(traceparents), "rollouts_sampled": len(sampled), "links": min(len(sampled), LINKS_MAX)}
        here.set_attributes(counts)

    def root(self, name: str, attributes: Mapping[str, Value]) -> Span:
        return _Live(self._tracer.start_span(name, contexts.Context(), attributes=dict(attributes)))

    def within(self, parent: str) -> Span:
        return _Within(_around(parent)) if is_traceparent(parent) else Span()

    def record(
        self, name: str, parent: str, began: float, ended: float | None, failed: str, span_id: str,
        attributes: Mapping[str, Value],
    ) -> None:  # fmt: skip
        now, wall_ns = host().monotonic(), int(host().time() * 1e9)
        start_ns = wall_ns - int((now - began) * 1e9)
        end_ns = wall_ns if ended is None else wall_ns - int((now - ended) * 1e9)
        if span_id:
            self._ids.next.span_id = int(span_id, 16)
        made = self._tracer.start_span(name, _around(parent), attributes=dict(attributes), start_time=start_ns)
        if failed:
            made.set_status(trace.StatusCode.ERROR, failed)
        made.end(end_ns)

    def current(self) -> str:
        context = trace.get_current_span().get_span_context()
        return _text(context) if context.is_valid else ""


class _Live(Span):
    """A span of the SDK."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: object | None = None
        self._failed = False
        self.traceparent = _text(span.get_span_context())

    def __enter__(self) -> Span:
        self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: object = None, error: object = None, *_: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)  # type: ignore[arg-type]
            self._token = None
        if isinstance(error, BaseException) and not isinstance(error, GeneratorExit) and not self._failed:
            self.fail(type(error).__name__)
        self._span.end()

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(attributes)

    def fail(self, outcome: str) -> None:
        self._failed = True
        self._span.set_attribute("outcome", outcome)
        self._span.set_status(trace.StatusCode.ERROR, outcome)

    def end(self) -> None:
        self._span.end()


class _Unkept(Span):
    """A span of a trace that is not kept: nothing but the decision, for whoever is called."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent
        self._token: object | None = None

    def __enter__(self) -> Span:
        self._token = contexts.attach(_around(self.traceparent))
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)  # type: ignore[arg-type]
            self._token = None


class _Within(Span):
    """Another process's span as the current one."""

    def __init__(self, around: contexts.Context) -> None:
        self._around = around
        self._token: object | None = None

    def __enter__(self) -> Span:
        self._token = contexts.attach(self._around)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)  # type: ignore[arg-type]
            self._token = None


def _around(parent: str) -> contexts.Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(_context_of(parent)), contexts.Context())


def _context_of(traceparent: str) -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if is_sampled(traceparent) else trace.TraceFlags.DEFAULT)
    return trace.SpanContext(int(trace_id(traceparent), 16), int(span_id(traceparent), 16), True, flags)


def _text(context: trace.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _resource(component: str, run_id: str, name: str) -> Resource:
    own = {"service.namespace": "rollbook", "service.instance.id": name, "rollbook.run": run_id, "rollbook.component": component}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = f"rollbook-{component}"
    return Resource.create(own)
