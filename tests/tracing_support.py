"""A pipeline that keeps its spans in memory, for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollbook.observe import tracing
from rollbook.observe.tracing_sdk import Pipeline


class Kept:
    """The spans that ended so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.pipeline = Pipeline(self._exporter, "test", "demo", "test-0")

    def spans(self, name: str = "") -> list[ReadableSpan]:
        self.pipeline.flush()
        return [span for span in self._exporter.get_finished_spans() if name in ("", span.name)]

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@contextmanager
def traced() -> Iterator[Kept]:
    kept = Kept()
    tracing.use(kept.pipeline)
    try:
        yield kept
    finally:
        tracing.close()


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace id, span id, parent's span id (empty for a root)."""
    context, parent = span.context, span.parent
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", f"{parent.span_id:016x}" if parent else ""
