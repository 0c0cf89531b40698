"""Where a process' device time goes, and what the driver says of its GPUs.

Owns the split of a worker's time: what is neither generation nor a weight update is idle. Generation itself is counted from the
ledger's rows, where its fate is known. Without GPUs the device is the process. NVML is asked where it is installed and there is a
GPU; otherwise there are no series, rather than zeros.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from rollbook.core.host import host
from rollbook.observe.metric_table import BY_NAME
from rollbook.observe.metrics import GPU_SECONDS_TOTAL

log = logging.getLogger(__name__)

SHOWN = ("gpu_memory_used_bytes", "gpu_memory_capacity_bytes", "gpu_utilization_ratio")


class DeviceClock:
    """Splits the time of one pool's process since it was made; several activities at once count as one."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.begin()

    def begin(self) -> None:
        """Split the time from now on; what was before is nobody's."""
        self._lock = threading.Lock()
        self._at = host().monotonic()
        self._busy = 0

    @contextmanager
    def busy(self, activity: str = "") -> Iterator[None]:
        """The device works; with an ``activity`` its time is counted here."""
        began = host().monotonic()
        with self._lock:
            self._settle(began)
            self._busy += 1
        try:
            yield
        finally:
            ended = host().monotonic()
            with self._lock:
                self._settle(ended)
                self._busy -= 1
            if activity:
                GPU_SECONDS_TOTAL.labels(self._pool, activity).inc(ended - began)

    def settle(self) -> None:
        """Count the idle time so far."""
        with self._lock:
            self._settle(host().monotonic())

    def _settle(self, now: float) -> None:
        if not self._busy:
            GPU_SECONDS_TOTAL.labels(self._pool, "idle").inc(max(0.0, now - self._at))
        self._at = now


class Settling:
    """A collector without families: a scrape finds the idle time up to now."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        self._clock.settle()
        return []


class GpuCollector:
    """Memory and use of the GPUs that this process may see, asked of NVML at each scrape."""

    def __init__(self, pool: str, nvml: Any) -> None:
        self._pool, self._nvml = pool, nvml

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families = [
            GaugeMetricFamily(spec.full_name, spec.help, labels=tuple(spec.labels)) for spec in (BY_NAME[name] for name in SHOWN)
        ]
        try:
            for index in visible(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                for family, value in zip(families, (memory.used, memory.total, used), strict=True):
                    family.add_metric((self._pool, str(index)), value)
        except self._nvml.NVMLError as error:  # a GPU that has gone costs its series and not the page
            log.warning("the GPUs were not read: %s", error, extra={"event": "gpu_unread"})
            return
        yield from families


def visible(n_devices: int) -> list[int]:
    """Indices of CUDA_VISIBLE_DEVICES; all where it is not set or names devices otherwise."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not named or not all(part.strip().isdecimal() for part in named.split(",")):
        return list(range(n_devices))
    return [index for index in map(int, named.split(",")) if index < n_devices]


def open_nvml() -> Any | None:
    """The NVML module (package nvidia-ml-py) where it is installed and finds a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError as error:
        log.info("no GPU is watched: %s", error, extra={"event": "gpu_unwatched"})
        return None


WORKER_CLOCK = DeviceClock("actor")
os.register_at_fork(after_in_child=WORKER_CLOCK.begin)  # the time since the forking process imported this is not the role's
