"""Tracing: the one door to OpenTelemetry, shut unless the standard environment variables ask for it.

Owns what a span is to the rest of the code, the W3C form in which a trace crosses processes and the ledger, and the decision
whether this process traces at all. Never imports the SDK while it is off (``tracing_sdk`` does), never blocks or fails a caller:
spans that cannot be sent are dropped and counted (``telemetry_dropped_total``). Uninstrumented time costs one comparison.

A rollout is one trace: the feeder begins it when it issues the slot and the ledger stores its ``traceparent`` there, so that
whoever works on the slot, also after a death, goes on in the same trace and obeys the same decision to sample it. A step of the
learner is a trace of its own with links to the rollouts it applied: hundreds of them have no common parent.

Variables: ``OTEL_TRACES_EXPORTER`` (``otlp``, ``console``, ``none``), or an ``OTEL_EXPORTER_OTLP_ENDPOINT`` alone;
``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_*``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SDK_DISABLED`` and the others the SDK reads.
Sources: w3.org/TR/trace-context (traceparent); OpenTelemetry environment variable specification.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollbook.core.host import host

if TYPE_CHECKING:
    from rollbook.observe.tracing_sdk import Pipeline

log = logging.getLogger(__name__)

TRACEPARENT_CHARS = 55
"""Length of a traceparent."""
LINKS_MAX = 128
"""Most links of one span; the SDK keeps no more unless it is told to (OTEL_SPAN_LINK_COUNT_LIMIT)."""

Value = str | int | float | bool
_FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SECRETS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""Variables that may hold a key of the collector."""

_active: Pipeline | None = None


class Span:
    """A unit of work; this one is what everybody gets while nothing is traced."""

    traceparent = ""
    """How another process continues from here; empty while nothing is traced."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the span; an error that leaves the block is its outcome."""

    def set(self, **attributes: Value) -> None:
        """Add attributes."""

    def fail(self, outcome: str) -> None:
        """Mark the span as failed; ``outcome`` names how."""

    def end(self) -> None:
        """End a span that was not entered."""


NOTHING = Span()


def configure(component: str, run_id: str, name: str) -> None:
    """Begin to trace this process when the environment asks for it; whatever is wrong with that is logged and traces nothing.

    Args:
        component: The role.
        name: The process among those of its role.
    """
    global _active
    exporter = wanted(host().environ)
    if exporter and _active is None:
        try:
            from rollbook.observe.tracing_sdk import Pipeline, exporter_named

            _active = Pipeline(exporter_named(exporter), component, run_id, name)
        except Exception as error:  # noqa: BLE001  boundary to a library: a run does not end for want of traces
            log.error("nothing is traced: %s", error, extra={"event": "tracing_failed", "reason": type(error).__name__})
        else:
            log.info("tracing", extra={"event": "tracing_on", "exporter": exporter})
    for variable in _SECRETS:  # read by now; what this process starts, user code included, need not know them
        os.environ.pop(variable, None)


def wanted(environ: Mapping[str, str]) -> str:
    """The exporter that the environment asks for; empty for none."""
    said = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = said or ("otlp" if endpoint else "none")
    if exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if exporter not in ("otlp", "console"):
        log.error(
            "nothing is traced: OTEL_TRACES_EXPORTER = %r; otlp, console and none are known", exporter,
            extra={"event": "tracing_failed"},
        )  # fmt: skip
        return ""
    if exporter == "otlp" and protocol != "http/protobuf":
        log.error(
            "nothing is traced: OTEL_EXPORTER_OTLP_PROTOCOL = %r; only http/protobuf is spoken (usually port 4318)", protocol,
            extra={"event": "tracing_failed"},
        )  # fmt: skip
        return ""
    return exporter


def close(bound_s: float = 2.0) -> None:
    """Send what waits, for at most ``bound_s``, and trace no more."""
    global _active
    pipeline, _active = _active, None
    if pipeline is not None:
        pipeline.close(bound_s)


def use(pipeline: Pipeline | None) -> None:
    """Trace through this pipeline from now on, or not at all (tests and benchmarks)."""
    global _active
    _active = pipeline


def enabled() -> bool:
    """Whether this process traces."""
    return _active is not None


def span(
    name: str, *, parent: str = "", kind: str = "internal", attributes: Mapping[str, Value] | None = None
) -> Span:
    """A span to enter: the current one of this thread until it is left.

    Args:
        parent: traceparent of the span it belongs to; left out, the current one, or none.
        kind: ``internal``, ``client`` or ``server``.
    """
    if _active is None:
        return NOTHING
    return _active.span(name, parent, kind, attributes or {})


def issue(run_id: str, ordinal: int, n_siblings: int, **attributes: Value) -> list[Span]:
    """The first span of the trace of each slot of a new group, to be ended once they are stored; none while nothing is traced.

    Their ``traceparent`` is what is stored with the slots. One that is not ended is never seen.
    """
    if _active is None:
        return []
    common = {"run": run_id, "ordinal": ordinal, **attributes}
    return [_active.root("issue", {**common, "slot": f"{ordinal}.{s}"}) for s in range(n_siblings)]


def of_attempt(traceparent: str | None, token: int) -> str:
    """Context of one lease of a slot: a span of the slot's trace whose id follows from the lease's token.

    So a repeated answer names the same span, and the spans of an attempt have their parent whatever became of its worker. Where
    this process traces nothing, or not this slot, nobody would make that span, and the slot's own context stands for it.
    """
    if not traceparent or _active is None or not is_sampled(traceparent):
        return traceparent or ""
    return _with_span(traceparent, hashlib.blake2b(f"{traceparent[:52]}/{token}".encode(), digest_size=8).hexdigest())


def record_attempts(leases: Sequence[tuple[str, str, dict[str, Value]]]) -> None:
    """The span ``lease`` of each (slot's context, context ``of_attempt``, attributes), as of now."""
    now = host().monotonic()
    for parent, own, attributes in leases:
        record("lease", parent, now, now, span_id=span_id(own), attributes=attributes)


def link(traceparents: Sequence[str]) -> None:
    """Link the current span to the sampled ones of these rollouts, ``LINKS_MAX`` at most; counts are its attributes."""
    if _active is not None:
        _active.link(traceparents)


def within(parent: str) -> Span:
    """Make another span the current one for a block, without a span of its own: what is called there belongs to it."""
    return NOTHING if _active is None or not parent else _active.within(parent)


def record(
    name: str, parent: str, began: float, ended: float | None = None, *, attributes: Mapping[str, Value] | None = None,
    failed: str = "", span_id: str = "",
) -> None:  # fmt: skip
    """A span that is over, from readings of ``host().monotonic()``. Nothing where ``parent`` is not sampled.

    Args:
        failed: Names how it failed; empty for a success.
        span_id: 16 hexadecimal digits, where the id must be known to others before.
    """
    if _active is not None and is_sampled(parent):
        _active.record(name, parent, began, ended, failed, span_id, attributes or {})


def current() -> str:
    """traceparent of the current span; empty when there is none."""
    return "" if _active is None else _active.current()


def exemplar(traceparent: str = "") -> dict[str, str] | None:
    """Labels of an exemplar for a histogram: the trace of ``traceparent``, or of the current span, where it is sampled."""
    if _active is None:
        return None
    context = traceparent or _active.current()
    return {"trace_id": trace_id(context)} if is_sampled(context) else None


def trace_id(traceparent: str | None) -> str:
    """The trace id of a traceparent; empty for what is none."""
    return match[1] if (match := _FORM.fullmatch(traceparent or "")) else ""


def span_id(traceparent: str | None) -> str:
    """The span id of a traceparent; empty for what is none."""
    return match[2] if (match := _FORM.fullmatch(traceparent or "")) else ""


def is_sampled(traceparent: str | None) -> bool:
    """Whether the spans of this trace are kept."""
    if not traceparent or traceparent[-1] not in "13579bdf":  # most are not, and are asked for each rollout
        return False
    return _FORM.fullmatch(traceparent) is not None


def is_traceparent(text: str) -> bool:
    """Whether this has the form of a traceparent of version 00."""
    return _FORM.fullmatch(text) is not None


def _with_span(traceparent: str, span_id: str) -> str:
    return f"{traceparent[:36]}{span_id}{traceparent[52:]}"
