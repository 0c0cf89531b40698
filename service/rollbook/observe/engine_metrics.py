"""An engine's own metrics on our page: families of the default registry whose names begin with the engine's.

Owns which families those are. An engine that counts nothing shows nothing, rather than zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

ENGINES = ("vllm:",)


class EngineCollector(Collector):
    """Passes on what an engine in this process has registered for itself."""

    def __init__(self, registry: CollectorRegistry = DEFAULT_REGISTRY) -> None:
        self._registry = registry

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine comes later."""
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.name.startswith(ENGINES):
                yield family
