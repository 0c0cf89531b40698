"""Metrics of a run that are counted in SQL when somebody looks.

Owns what of a reading each family of the catalogue shows, and the time between two readings. Never counts anything itself (P7):
what one server process has seen would be wrong after a restart. Kinds of task are the user's words, so they get no series.
What the ledger cannot know (deaths the supervisor saw, processes that are wanted) comes from ``Surroundings``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollbook.core.errors import RollbookError
from rollbook.core.host import host
from rollbook.core.records import Blame, RewardStatus
from rollbook.core.survival import KL_DIMENSIONS, Dimension, assess
from rollbook.observe import failures as noted
from rollbook.observe import metric_table as table
from rollbook.observe.failures import Failure
from rollbook.observe.metrics import TELEMETRY_DROPPED_TOTAL

CACHE_S = 5.0
CACHE_SHARE = 0.02
"""Largest share of the time that reading the ledger may take."""
WAIT_S = 4.0
"""Longest a scrape waits for a reading that another one has begun; then it shows the one before, at first nothing."""

log = logging.getLogger(__name__)

Samples = Sequence[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a server knows of its run beside the ledger."""

    env: str = ""
    """Name of the run's environment or reward."""
    actor_devices: float = 1.0
    """Devices a worker's second stands for."""
    learner_devices: float = 1.0
    desired: Callable[[], Mapping[str, int]] = dict
    """Processes wanted, by pool."""
    restarts: Callable[[], Mapping[tuple[str, str], int]] = dict
    """Deaths so far, by (pool, reason)."""
    failures: Callable[[], Sequence[Failure]] = list
    """What the roles have noted of checkpoints and weight updates that failed."""
    beat_s: float = 30.0
    """A worker that was silent for longer is lost."""
    renewed: Callable[[], int] = int
    """Leases that this server has renewed."""


@dataclass(slots=True)
class _Shown:
    metrics: list[Metric] = field(default_factory=list)
    fresh_until_s: float = float("-inf")


class LedgerCollector:
    """Reads ``Ledger.reading()`` when scraped, at most every ``cache_s`` and a fixed share of the time.

    While the ledger does not answer, only ``rollbook_ledger_readable`` = 0 is shown: no value is better than an old one.
    """

    def __init__(
        self, reading: Callable[[], Mapping[str, Any]], surroundings: Surroundings | None = None, *, cache_s: float = CACHE_S
    ) -> None:
        self._reading, self._surroundings, self._cache_s = reading, surroundings or Surroundings(), cache_s
        self._lock = threading.Lock()
        self._shown = _Shown()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the ledger."""
        return []

    def warm(self) -> None:
        """Read once in a thread of its own: the first reading of a server goes over all of its run."""

        def read() -> None:
            for _ in self.collect():
                return

        host().thread(read, "metrics-warm").start()

    def collect(self) -> Iterator[Metric]:
        if self._lock.acquire(timeout=WAIT_S):
            try:
                if host().monotonic() >= self._shown.fresh_until_s:
                    began = host().monotonic()
                    metrics = self._read()
                    took_s = host().monotonic() - began
                    self._shown = _Shown(metrics, host().monotonic() + max(self._cache_s, took_s / CACHE_SHARE))
            finally:
                self._lock.release()
        else:
            TELEMETRY_DROPPED_TOTAL.labels("metrics").inc()
        yield from self._shown.metrics

    def _read(self) -> list[Metric]:
        try:
            reading = self._reading()
            restarts, desired = self._surroundings.restarts(), self._surroundings.desired()
        except RollbookError as error:
            log.warning("metrics were not read: %s", error, extra={"event": "metrics_unread"})
            return [family("ledger_readable", [((), 0)])]
        around = self._surroundings
        survival = reading["survival"]
        return [
            family("ledger_readable", [((), 1)]),
            *run_metrics(reading, around, restarts, desired),
            *rollout_metrics(reading, around.env),
            *ledger_metrics(reading, around.renewed()),
            *learner_metrics(reading, around),
            *noted_metrics(around.failures()),
            *survival_metrics(survival, assess(survival)),
            *failure_metrics(survival, reading.get("breaker")),
            *database_metrics(reading),
        ]


def run_metrics(
    reading: Mapping[str, Any], around: Surroundings, restarts: Mapping[tuple[str, str], int], desired: Mapping[str, int]
) -> list[Metric]:
    """The run's state, who is there, and who died."""
    counts = dict.fromkeys(((pool, state) for pool in table.POOLS for state in table.WORKER_STATES), 0)
    for worker in reading["workers"]:
        state = worker_state(worker, around.beat_s, reading["draining"])
        if state:
            counts["actor", state] += 1
    for role in reading["roles"]:
        if role["role"] == "learner":
            counts["learner", "ready" if role["expires_in_s"] > 0 else "lost"] += int(reading["run_state"] != "completed")
    return [
        family("run_state", [((state,), int(state == reading["run_state"])) for state in table.RUN_STATES]),
        family("controller_leader", [((), 1)]),
        family("controller_fencing_epoch", [((), reading["epoch"])]),
        family("policy_lag_bound_versions", [((), reading["lag_bound"])]),
        family("workers", list(counts.items())),
        family("workers_desired", [((pool,), desired.get(pool, 0)) for pool in table.POOLS]),
        family("worker_restarts_total", [
            ((pool, reason), restarts.get((pool, reason), 0)) for pool in table.RESTART_POOLS for reason in table.RESTART_REASONS
        ]),
    ]  # fmt: skip


def worker_state(worker: Mapping[str, Any], beat_s: float, draining: bool) -> str:
    """State of a worker as its row tells; empty for one that has ended with nothing in its hands."""
    if worker["beat_age_s"] > beat_s:
        return "lost" if worker["leases"] else ""
    if draining:
        return "draining"
    return "starting" if worker["version"] is None else "ready"


def rollout_metrics(reading: Mapping[str, Any], env: str) -> list[Metric]:
    """Rollouts by outcome, their failures, and distributions over accepted and trained samples."""
    f, steps = reading["figures"], reading["steps"]
    n_groups, n_signal = steps.get("groups", 0), steps.get("groups_with_signal", 0)
    outcomes = {"ok": "samples", "failed": "failed", "stale_dropped": "stale_dropped", "filtered": "filtered"}
    return [
        family("rollouts_total", [((name,), f.get(of, 0)) for name, of in outcomes.items()]),
        family("rollout_failures_total", [((reason,), f.get(f"failed.{reason}", 0)) for reason in table.FAILURES]),
        family("rollouts_consumed_total", [((), f.get("consumed", 0))]),
        family("tokens_total", [(("prompt",), f.get("prompt_bytes", 0) / 4), (("completion",), f.get("tokens", 0))]),
        family("tokens_trained_total", [((), f.get("tokens_trained", 0))]),
        family("reward_groups_total", [((env,), n_groups)]),
        family("reward_group_zero_variance_total", [((env,), n_groups - n_signal)]),
        *(distribution(name, f) for name in (
            "rollout_attempts", "completion_tokens", "rollout_policy_lag_versions", "rollout_version_span_versions")),
        *(distribution(name, f, (env,)) for name in ("reward", "reward_duration_seconds")),
        distribution("rollout_duration_seconds", f, ("queue",), key="queue"),
    ]  # fmt: skip


def ledger_metrics(reading: Mapping[str, Any], renewed: int) -> list[Metric]:
    """Slots and leases, repeated submissions, what the database holds."""
    f, events = reading["figures"], reading["events"]
    leases = {
        "granted": events.get("lease_granted", 0), "renewed": renewed, "completed": f.get("samples", 0),
        "expired": events.get("lease_expired", 0), "requeued": events.get("lease_granted_again", 0),
        "fenced": events.get("submit_fenced", 0),
    }  # fmt: skip
    made = [
        family("ledger_tasks", [((state,), reading["slots"][state]) for state in table.TASK_STATES]),
        family("ledger_oldest_task_age_seconds", [((state,), age) for state, age in reading["oldest_s"].items()]),
        family("ledger_lease_events_total", [((event,), n) for event, n in leases.items()]),
        family("ledger_duplicate_commits_total", [((), events.get("submit_replayed", 0))]),
        family("ledger_invariant_violations_total", [
            ((check,), events.get(check, 0)) for check in table.BY_NAME["ledger_invariant_violations_total"].labels["check"]
        ]),
        family("ledger_schema_version", [((), reading["schema"])]),
        family("ledger_size_bytes", [((), reading["size_bytes"])]),
    ]  # fmt: skip
    if (at_s := reading["checkpoint_at_s"]) is not None:
        made.append(family("checkpoint_last_success_timestamp_seconds", [((), at_s)]))
    return made


def learner_metrics(reading: Mapping[str, Any], around: Surroundings) -> list[Metric]:
    """Steps, the head, and device time as the rows tell it."""
    f, steps = reading["figures"], reading["steps"]
    wasted = {reason: f.get(f"wasted.{reason}", 0.0) * around.actor_devices for reason in table.WASTES[:4]}
    learner = {
        "train": ("seconds_step",), "idle": ("seconds_plan_wait", "seconds_fetch"), "weight_sync": ("seconds_publish_before",),
        "checkpoint": ("seconds_checkpoint_before",),
    }  # fmt: skip
    made = [
        family("learner_steps_total", [((), steps.get("trained", 0))]),
        family("learner_nonfinite_steps_total", [(("skipped",), steps.get("nonfinite", 0))]),
        family("gpu_wasted_seconds_total", [((reason,), s) for reason, s in wasted.items()]),
        family("gpu_seconds_total", [
            (("actor", "generate"), f.get("generated_s", 0.0) * around.actor_devices),
            (("actor", "wasted"), sum(wasted.values())),
            *((("learner", name), sum(steps.get(of, 0.0) for of in names) * around.learner_devices)
              for name, names in learner.items()),
        ]),
    ]  # fmt: skip
    if reading["head"] is not None:
        made.append(family("learner_policy_version", [((), reading["head"])]))
    if reading["last_step_at_s"] is not None:
        made.append(family("learner_last_step_timestamp_seconds", [((), reading["last_step_at_s"])]))
    return made


def noted_metrics(failures: Sequence[Failure]) -> list[Metric]:
    """Failures whose process often ends with them, over the whole run."""
    made = []
    for name, what in (("checkpoint_failures_total", noted.CHECKPOINT), ("weight_sync_failures_total", noted.WEIGHTS)):
        counts = noted.counts(failures, what)
        made.append(family(name, [((reason,), counts.get(reason, 0)) for reason in table.BY_NAME[name].labels["reason"]]))
    return made


def survival_metrics(counts: Mapping[str, Any], dimensions: Sequence[Dimension]) -> list[Metric]:
    """Slots, survival, distances, reward means and alarms."""
    buckets = [(d.name, b) for d in dimensions if d.name in table.FIXED_DIMENSIONS for b in d.buckets if b.opened]
    length = next((d.means for d in dimensions if d.name == "length"), None)
    means = {"naive": length.naive, "ipw": length.ipw, "ipw_capped": length.capped} if length else {}
    return [
        family("slots_opened_total", [((), counts["opened"])]),
        family("slots_opened_by_end", [((end,), counts[end]) for end in table.BY_NAME["slots_opened_by_end"].labels["end"]]),
        family("slots_dropped_total", [((kind,), n) for kind, n in counts["dropped"].items()]),
        family("survival_slots", [((name, b.name), b.settled) for name, b in buckets]),
        family("survival_ratio", [((name, b.name), b.survival) for name, b in buckets if b.survival is not None]),
        family("drop_kl_nats", [((d.name,), d.kl_nats) for d in dimensions if d.name in KL_DIMENSIONS and d.kl_nats is not None]),
        family("trained_reward_mean", [((name,), value) for name, value in means.items() if value is not None]),
        family("ipw_effective_samples", [((), length.ess)] if length else []),
        family("ipw_unrepaired_slots", [((), length.unrepaired_slots)] if length else []),
        family("drop_bias_alarm", [((d.name,), int(d.alarm)) for d in dimensions]),
    ]


def failure_metrics(counts: Mapping[str, Any], breaker: Mapping[str, Any] | None) -> list[Metric]:
    """Failed attempts by status and blame, the breaker's state, and whether code runs uncontained."""
    failures = {(s.value, b.value): 0 for s in RewardStatus if s is not RewardStatus.GIVEN for b in Blame}
    for row in counts["failures"]:
        key = (row["status"], row["blame"])
        failures[key] = failures.get(key, 0) + row["attempts"]
    made = [
        family("failures_total", list(failures.items())),
        family("sandbox_unsafe", [((), int(counts["unsafe_workers"] > 0))]),
        family("breaker_opened_total", [((), counts["breaker"]["opened"])]),
    ]
    if breaker is not None:
        states = table.BY_NAME["breaker_state"].labels["state"]
        made.append(family("breaker_state", [((name,), int(name == breaker["state"])) for name in states]))
    return made


def database_metrics(state: Mapping[str, Any]) -> list[Metric]:
    """What the database is asked to keep: dead rows and who holds them on PostgreSQL, groups let go, conflicts run again."""
    made = []
    if found := state.get("database"):
        made += [
            family("ledger_oldest_xmin_age", [((), found["oldest_xmin_age"])]),
            family("ledger_dead_tuples", [((), found["dead_tuples"])]),
        ]
    if retained := state.get("retention"):
        made.append(family("groups_expired_total", [((), retained["groups"])]))
        made.append(family("low_watermark", [((), retained["low_watermark"])]))
    if writer := state.get("writer"):
        made.append(family("ledger_conflicts_total", [((), writer["conflicts"])]))
        made.append(family("ledger_commits_total", [((), writer["commits"])]))
        made.append(family("ledger_writes_waiting", [((), writer["waiting"])]))
    return made


_FAMILIES = {table.Kind.GAUGE: GaugeMetricFamily, table.Kind.COUNTER: CounterMetricFamily}


def family(name: str, samples: Samples) -> Metric:
    """A family of the catalogue with these samples, each a tuple of label values and a value."""
    spec = table.BY_NAME[name]
    made: Any = _FAMILIES[spec.kind](spec.full_name, spec.help, labels=tuple(spec.labels))
    for labels, value in samples:
        made.add_metric(labels, _steady(value) if spec.kind is table.Kind.COUNTER else value)
    metric: Metric = made
    return metric


def distribution(name: str, figures: Mapping[str, float], labels: tuple[str, ...] = (), *, key: str = "") -> Metric:
    """A histogram of the catalogue from figures counted at or below each bound."""
    spec = table.BY_NAME[name]
    made = HistogramMetricFamily(spec.full_name, spec.help, labels=tuple(spec.labels))
    key = key or name
    buckets = [(str(float(bound)), figures.get(f"{key}.{bound:g}", 0)) for bound in spec.buckets]
    made.add_metric(labels, [*buckets, ("+Inf", figures.get(f"{key}.count", 0))], _steady(figures.get(f"{key}.sum", 0)))
    return made


def _steady(total: float) -> float:
    """A total without the last bits of its sum, which depend on the order of the rows: a counter that falls by one of them has
    begun anew for Prometheus."""
    return round(total, 6)
