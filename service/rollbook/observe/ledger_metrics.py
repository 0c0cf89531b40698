"""Metrics of a run that are counted in SQL when somebody looks, and the page that shows them.

Owns their names, labels and the time between two readings. Never counts anything itself (P7): what one server process has seen
would be wrong after a restart. Labels are closed sets: kinds of task are the user's words, so they get no series of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollbook.core.errors import ConfigError, RollbookError
from rollbook.core.host import host
from rollbook.core.records import Blame, RewardStatus
from rollbook.core.survival import DIMENSIONS, KL_DIMENSIONS, Dimension, assess

LOOPBACK = "127.0.0.1"
CACHE_S = 5.0
CACHE_SHARE = 0.05
"""Largest share of the time that reading the ledger may take."""
BREAKER_STATES = ("closed", "open")
FIXED_DIMENSIONS = tuple(name for name in DIMENSIONS if name != "task")

log = logging.getLogger(__name__)


class LedgerCollector:
    """Reads ``survival()`` and ``run_status()`` when scraped, at most every ``cache_s`` and a fixed share of the time.

    While the ledger does not answer, only ``rollbook_ledger_readable`` = 0 is shown: no value is better than an old one.
    """

    def __init__(
        self, survival: Callable[[], Mapping[str, Any]], run_status: Callable[[], Mapping[str, Any]], *, cache_s: float = CACHE_S
    ) -> None:
        self._survival, self._run_status = survival, run_status
        self._cache_s = cache_s
        self._lock = threading.Lock()
        self._shown: list[Metric] = []
        self._fresh_until_s = float("-inf")

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the ledger."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if host().monotonic() >= self._fresh_until_s:
                began = host().monotonic()
                self._shown = self._read()
                took_s = host().monotonic() - began
                self._fresh_until_s = host().monotonic() + max(self._cache_s, took_s / CACHE_SHARE)
            shown = self._shown
        yield from shown

    def _read(self) -> list[Metric]:
        readable = "Whether the ledger answered when its counts were read."
        try:
            counts, state = self._survival(), self._run_status()
        except RollbookError as error:
            log.warning("metrics were not read: %s", error, extra={"event": "metrics_unread"})
            return [_gauge("rollbook_ledger_readable", readable, (), [((), 0)])]
        dimensions = assess(counts)
        return [
            _gauge("rollbook_ledger_readable", readable, (), [((), 1)]),
            *survival_metrics(counts, dimensions),
            *failure_metrics(counts, state),
            *database_metrics(state),
        ]


def survival_metrics(counts: Mapping[str, Any], dimensions: Sequence[Dimension]) -> list[Metric]:
    """Slots, survival, distances, reward means and alarms."""
    buckets = [(d.name, b) for d in dimensions if d.name in FIXED_DIMENSIONS for b in d.buckets if b.opened]
    length = next((d.means for d in dimensions if d.name == "length"), None)
    means = {"naive": length.naive, "ipw": length.ipw, "ipw_capped": length.capped} if length else {}
    states = {"finished": "finished", "trained": "trained", "waiting": "waiting"}
    return [
        _counter("rollbook_slots_opened", "Slots a worker was given.", (), [((), counts["opened"])]),
        _gauge("rollbook_slots_opened_by_end", "Opened slots by what became of them; finished ones have a sample.", ("end",),
               [((end,), counts[name]) for end, name in states.items()]),
        _counter("rollbook_slots_dropped", "Slots that ended without being trained.", ("reason",),
                 [((kind,), n) for kind, n in counts["dropped"].items()]),
        _gauge("rollbook_survival_slots", "Slots that are trained or dropped, by bucket.", ("dimension", "bucket"),
               [((name, b.name), b.settled) for name, b in buckets]),
        _gauge("rollbook_survival_ratio", "Share of those slots that was trained.", ("dimension", "bucket"),
               [((name, b.name), b.survival) for name, b in buckets if b.survival is not None]),
        _gauge("rollbook_drop_kl_nats", "KL of dispatched from trained slots over buckets.", ("dimension",),
               [((d.name,), d.kl_nats) for d in dimensions if d.name in KL_DIMENSIONS and d.kl_nats is not None]),
        _gauge("rollbook_trained_reward_mean", "Mean reward of trained samples; ipw weighs them by 1 / survival of their length.",
               ("estimator",), [((name,), value) for name, value in means.items() if value is not None]),
        _gauge("rollbook_ipw_effective_samples", "Effective number of samples under the capped weights.", (),
               [((), length.ess)] if length else []),
        _gauge("rollbook_ipw_unrepaired_slots", "Slots in length buckets without a survivor, which no weight brings back.", (),
               [((), length.unrepaired_slots)] if length else []),
        _gauge("rollbook_drop_bias_alarm", "1 where what is trained differs from what was dispatched beyond its limits.",
               ("dimension",), [((d.name,), int(d.alarm)) for d in dimensions]),
    ]  # fmt: skip


def failure_metrics(counts: Mapping[str, Any], state: Mapping[str, Any]) -> list[Metric]:
    """Failed attempts by status and blame, the breaker's state, and whether code runs uncontained."""
    failures = {(s.value, b.value): 0 for s in RewardStatus if s is not RewardStatus.GIVEN for b in Blame}
    for row in counts["failures"]:
        key = (row["status"], row["blame"])
        failures[key] = failures.get(key, 0) + row["attempts"]
    made = [
        _counter("rollbook_failures", "Attempts that gave no sample.", ("status", "blame"), list(failures.items())),
        _gauge("rollbook_sandbox_unsafe", "1 where a worker of the run ran model-written code uncontained.", (),
               [((), int(counts["unsafe_workers"] > 0))]),
        _counter("rollbook_breaker_opened", "Times the circuit breaker opened.", (), [((), counts["breaker"]["opened"])]),
    ]  # fmt: skip
    if (breaker := state.get("breaker")) is not None:
        made.append(_gauge("rollbook_breaker_state", "1 for the state the circuit breaker is in.", ("state",),
                           [((name,), int(name == breaker["state"])) for name in BREAKER_STATES]))  # fmt: skip
    return made


def database_metrics(state: Mapping[str, Any]) -> list[Metric]:
    """What the database is asked to keep: dead rows and who holds them on PostgreSQL, groups let go, conflicts run again."""
    made = []
    if found := state.get("database"):
        made += [
            _gauge("rollbook_ledger_oldest_xmin_age", "Transactions begun since the oldest snapshot that somebody holds.", (),
                   [((), found["oldest_xmin_age"])]),
            _gauge("rollbook_ledger_dead_tuples", "Dead rows that no vacuum has removed yet.", (), [((), found["dead_tuples"])]),
        ]  # fmt: skip
    if retained := state.get("retention"):
        made.append(_counter("rollbook_groups_expired", "Groups let go under [retention].", (), [((), retained["groups"])]))
        low = [((), retained["low_watermark"])]
        made.append(_gauge("rollbook_low_watermark", "Groups with smaller ordinals are gone.", (), low))
    if writer := state.get("writer"):
        conflicts = "Transactions that a deadlock or serialization failure broke off and this server ran again."
        made.append(_counter("rollbook_ledger_conflicts", conflicts, (), [((), writer["conflicts"])]))
    return made


Samples = Sequence[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    made: Metric = family
    return made


class MetricsPage:
    """``http://127.0.0.1:PORT/metrics`` while it is open."""

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        """Start it; port 0 picks a free one. Raises ConfigError when the port is taken."""
        try:
            self._server, self._thread = start_http_server(port, LOOPBACK, registry)
        except OSError as error:
            raise ConfigError(
                f"ledger.metrics_port = {port}: {error.strerror or error}; choose another port, or 0 for no metrics"
            ) from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop answering and let the port go."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
