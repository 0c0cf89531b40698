"""The metrics that a process counts itself, made from the catalogue; what the ledger counts is in ``ledger_metrics``.

Owns the objects, and which of them a role shows. Never computes a value and never starts an HTTP server. A process that shows
nothing (tests, simulations, commands) counts all the same, at the cost of an addition.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

from rollbook.core.errors import DigestMismatch, NotReady, StaleWeights
from rollbook.core.host import host, superseded
from rollbook.observe import failures
from rollbook.observe.counted import CountedHistogram
from rollbook.observe.metric_table import BY_NAME, METHODS, SPECS, Kind, Spec

disable_created_metrics()  # a series more for each counter, of which a restart is seen as well without

REGISTRY = CollectorRegistry()
"""Registry of this process, apart from the default one that engines fill with their own metrics."""

_CLASSES: Mapping[Kind, Any] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.INFO: Info, Kind.HISTOGRAM: Histogram}


def _made(spec: Spec) -> Any:
    if spec.name == "offpolicy_importance_ratio":
        return CountedHistogram(spec, ("token",))
    more: dict[str, Any] = {"buckets": spec.buckets} if spec.kind is Kind.HISTOGRAM else {}
    labels = () if spec.kind is Kind.INFO else tuple(spec.labels)
    return _CLASSES[spec.kind](spec.full_name, spec.help, labels, registry=None, **more)


_OBJECTS: dict[str, Any] = {spec.name: _made(spec) for spec in SPECS if not (spec.sql or spec.of_run)}
_shown: set[str] = set()
_roles: set[str] = set()
_recovered = False
STARTED_S = host().monotonic()
"""When this process began, as good as; for one that was forked, when it was."""


def _begin() -> None:
    global STARTED_S
    STARTED_S = host().monotonic()


os.register_at_fork(after_in_child=_begin)  # a role may be forked from a process that has imported this hours before


def _histogram(name: str) -> Histogram:
    made: Histogram = _OBJECTS[name]
    return made


def _counter(name: str) -> Counter:
    made: Counter = _OBJECTS[name]
    return made


def _gauge(name: str) -> Gauge:
    made: Gauge = _OBJECTS[name]
    return made


RPC_SECONDS = _histogram("rpc_seconds")
RPC_FAILURES_TOTAL = _counter("rpc_failures_total")
RPC_RETRIES_TOTAL = _counter("rpc_retries_total")
ROLLOUT_DURATION_SECONDS = _histogram("rollout_duration_seconds")
TRANSACTION_DURATION_SECONDS = _histogram("ledger_transaction_duration_seconds")
TRANSACTION_ERRORS_TOTAL = _counter("ledger_transaction_errors_total")
WORKER_HEARTBEAT_TIMESTAMP_SECONDS = _gauge("worker_heartbeat_timestamp_seconds")
WORKER_POLICY_VERSION = _gauge("worker_policy_version")
WORKER_SLOTS_IN_HAND = _gauge("worker_slots_in_hand")
WORKER_TOKENS_TOTAL = _counter("worker_tokens_total")
WORKER_SUBMISSIONS_TOTAL = _counter("worker_submissions_total")
LEARNER_LOSS = _gauge("learner_loss")
LEARNER_GRADIENT_NORM = _gauge("learner_gradient_norm")
LEARNER_ENTROPY_NATS = _gauge("learner_entropy_nats")
LEARNER_LEARNING_RATE = _gauge("learner_learning_rate")
OFFPOLICY_ESS_RATIO = _gauge("offpolicy_ess_ratio")
OFFPOLICY_CLIP_RATIO = _gauge("offpolicy_clip_ratio")
OFFPOLICY_KL_NATS = _gauge("offpolicy_kl_nats")
OFFPOLICY_MASKED_TOKENS_TOTAL = _counter("offpolicy_masked_tokens_total")
OFFPOLICY_IMPORTANCE_RATIO: CountedHistogram = _OBJECTS["offpolicy_importance_ratio"]
STEP_PHASE_DURATION_SECONDS = _histogram("learner_step_phase_duration_seconds")
CHECKPOINT_INTERVAL_SECONDS = _gauge("checkpoint_interval_seconds")
CHECKPOINT_SIZE_BYTES = _gauge("checkpoint_size_bytes")
CHECKPOINT_DURATION_SECONDS = _histogram("checkpoint_duration_seconds")
WEIGHT_SYNC_DURATION_SECONDS = _histogram("weight_sync_duration_seconds")
WEIGHT_SYNC_BYTES_TOTAL = _counter("weight_sync_bytes_total")
GPU_SECONDS_TOTAL = _counter("gpu_seconds_total")
RECOVERY_DURATION_SECONDS = _histogram("recovery_duration_seconds")
RECOVERY_LOST_GPU_SECONDS_TOTAL = _counter("recovery_lost_gpu_seconds_total")
TELEMETRY_DROPPED_TOTAL = _counter("telemetry_dropped_total")

_OWN: Mapping[str, Mapping[tuple[str, str], tuple[str, ...]]] = {
    "rollout_duration_seconds": {("worker", "stage"): ("generate", "reward", "commit", "total")},
    "weight_sync_duration_seconds": {("worker", "phase"): ("load", "verify"), ("learner", "phase"): ("gather", "transfer")},
    "gpu_seconds_total": {
        ("worker", "pool"): ("actor",), ("worker", "activity"): ("weight_sync", "idle", "wasted"),
        ("learner", "pool"): ("learner",), ("learner", "activity"): ("wasted",),
    },
    "recovery_duration_seconds": {
        ("worker", "component"): ("actor",), ("learner", "component"): ("learner",), ("ledger", "component"): ("ledger",),
    },
    "recovery_lost_gpu_seconds_total": {("learner", "component"): ("learner",)},
}  # fmt: skip
"""Values of a label that a role shows, where another role shows the others."""

_FROM_READING = {("ledger", "rollout_duration_seconds"), ("ledger", "gpu_seconds_total")}
"""Shown by the ledger server from its rows, in a family of their own (``ledger_metrics``)."""
_WHERE_THERE_ARE_GPUS = ("gpu_memory_used_bytes", "gpu_memory_capacity_bytes", "gpu_utilization_ratio")

_ALWAYS = ("rpc_seconds", "rpc_failures_total", "rpc_retries_total", "telemetry_dropped_total")
"""Registered in every process, whoever it is."""
for _name in _ALWAYS:
    REGISTRY.register(_OBJECTS[_name])
    _shown.add(_name)


def expose(role: str, *, config_sha: str = "", version: str = "") -> None:
    """Show the metrics of ``role`` from now on, every series whose labels are a closed set at 0. Idempotent."""
    _roles.add(role)
    for spec in SPECS:
        if spec.name not in _OBJECTS or role not in spec.roles or (role, spec.name) in _FROM_READING:
            continue
        if spec.name in _WHERE_THERE_ARE_GPUS:
            continue
        if spec.name not in _shown:
            REGISTRY.register(_OBJECTS[spec.name])
            _shown.add(spec.name)
        _touch(spec, role)
    _OBJECTS["build"].info({"version": version, "python": platform.python_version()})
    _OBJECTS["config"].info({"config_sha": config_sha})


def _touch(spec: Spec, role: str) -> None:
    """Make every series of closed labels: a rate that begins with the first event misses it."""
    if spec.kind is Kind.INFO or not spec.labels or isinstance(_OBJECTS[spec.name], CountedHistogram):
        return
    own = _OWN.get(spec.name, {})
    values = [own.get((role, name), all_values) for name, all_values in spec.labels.items()]
    for combination in itertools.product(*values):  # none where one of the sets is open
        _OBJECTS[spec.name].labels(*combination)


def rpc_ended(method: str, seconds: float, code: str = "") -> None:
    """A call of the ledger server is over; ``code`` names the gRPC status of one that failed."""
    RPC_SECONDS.labels(method if method in METHODS else "other").observe(seconds)
    if code:
        RPC_FAILURES_TOTAL.labels(code).inc()


@contextmanager
def failed_syncs() -> Iterator[None]:
    """Note a weight update that ends with an error, by what it is (``failures``)."""
    try:
        yield
    except Exception as error:
        reasons = {NotReady: "missing", DigestMismatch: "digest", StaleWeights: "stale", OSError: "storage"}
        reason = next((word for kind, word in reasons.items() if isinstance(error, kind)), "engine")
        failures.note(failures.WEIGHTS, reason, f"{type(error).__name__}: {error}")
        raise


def recovered(component: str) -> None:
    """A process that replaces a dead one works again; only the first call counts."""
    global _recovered
    if not _recovered and superseded():
        RECOVERY_DURATION_SECONDS.labels(component).observe(host().monotonic() - STARTED_S)
    _recovered = True


def is_shown(role: str) -> bool:
    """Whether this process shows the metrics of ``role``."""
    return role in _roles


def hide_all() -> None:
    """Show only what every process shows; for tests."""
    _roles.clear()
    for name in sorted(_shown.difference(_ALWAYS)):
        REGISTRY.unregister(_OBJECTS[name])
        _shown.discard(name)


def spec_of(name: str) -> Spec:
    """The row of the catalogue."""
    return BY_NAME[name]
