"""A histogram that is fed with counts instead of single values.

Owns nothing but the counts. For values that were counted elsewhere already, thousands at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rollbook.observe.metric_table import Spec


class CountedHistogram(Collector):
    """One histogram with one set of labels."""

    def __init__(self, spec: Spec, labels: Sequence[str]) -> None:
        self._spec, self._labels = spec, tuple(labels)
        self._lock = threading.Lock()
        self._counts = [0] * (len(spec.buckets) + 1)
        self._sum = 0.0

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add values by bucket: of each, those above the bound before and not above its own, at last those above all bounds."""
        with self._lock:
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
            self._sum += total

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        bounds = [*(str(float(bound)) for bound in self._spec.buckets), "+Inf"]
        cumulated = [sum(counts[: i + 1]) for i in range(len(counts))]
        made = HistogramMetricFamily(self._spec.full_name, self._spec.help, labels=tuple(self._spec.labels))
        made.add_metric(self._labels, list(zip(bounds, cumulated, strict=True)), total)
        yield made
