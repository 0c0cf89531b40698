"""A recorded run that was never run: half an hour with three faults, for every metric of the catalogue, as OpenMetrics text.

Owns the story and its numbers; the same end gives the same bytes. Never claims to be a measurement: it shows whether panels and
queries work, and what a fault, its detection and its recovery look like. A worker dies, then the ledger server is followed by its
standby, then the learner dies and replays.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import metric_names as names

LENGTH_S, STEP_S = 1800, 10
RUN = "golden"
WORKER_DIES_S, LEDGER_DIES_S, LEARNER_DIES_S = 600, 960, 1320
WORKER_AWAY_S, LEDGER_AWAY_S, LEARNER_AWAY_S = 60, 20, 90
WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")
INF = math.inf

Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]

BUCKETS: Mapping[str, Sequence[float]] = {
    "rollout_attempts": (1, 2, 3, 4, 6, 8),
    "rollout_duration_seconds": (0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280),
    "completion_tokens": (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "rollout_policy_lag_versions": (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
    "rollout_version_span_versions": (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
    "ledger_transaction_duration_seconds": (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10),
    "recovery_duration_seconds": (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300),
    "rpc_seconds": (0.005, 0.05, 0.5, 5),
    "reward": (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1),
    "offpolicy_importance_ratio": (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2, 4, 10),
}
SHORT_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
TYPICAL: Mapping[str, float] = {
    "rollout_attempts": 1, "completion_tokens": 300, "rollout_policy_lag_versions": 1, "rollout_version_span_versions": 0.5,
    "ledger_transaction_duration_seconds": 0.004, "reward": 0.5, "reward_duration_seconds": 0.3, "offpolicy_importance_ratio": 1,
    "queue": 1.5, "generate": 6, "total": 9, "commit": 0.6, "data_wait": 1.2, "forward_backward": 4, "optimizer": 0.4,
    "publish": 0.8,
    "checkpoint": 0.6, "load": 2, "verify": 0.9, "transfer": 1.1,
}  # fmt: skip
"""What an observation is about, by metric or by the value of its label; 0.5 where nothing is said."""
PER_S: Mapping[str, float] = {
    "ok": 4, "failed": 0.1, "stale_dropped": 0.08, "filtered": 0.04, "prompt": 400, "completion": 1200, "granted": 4.2,
    "renewed": 6,
    "completed": 4, "generate": 1.9, "train": 0.7, "weight_sync": 0.1, "idle": 0.9, "wasted": 0.15, "files": 40e6,
    "rollouts_consumed_total": 3.8, "tokens_trained_total": 1150, "learner_steps_total": 0.12, "ledger_commits_total": 30,
    "reward_groups_total": 0.5, "reward_group_zero_variance_total": 0.12, "ledger_duplicate_commits_total": 0.01,
}  # fmt: skip
"""How often something happens, by metric or by the value of its label; 0.02 where nothing is said."""
NEVER = {"rollbook_ledger_invariant_violations_total", "rollbook_learner_nonfinite_steps_total",
         "rollbook_telemetry_dropped_total",
         "rollbook_checkpoint_failures_total", "rollbook_weight_sync_failures_total", "rollbook_ledger_transaction_errors_total",
         "rollbook_worker_restarts_total", "rollbook_recovery_lost_gpu_seconds_total"}  # fmt: skip
"""Counters that only a fault moves."""


@dataclass(frozen=True)
class Moment:
    """How things stand ``at`` seconds after the start."""

    at: float

    def _within(self, began: float, length: float) -> bool:
        return began <= self.at < began + length

    @property
    def worker_away(self) -> bool:
        return self._within(WORKER_DIES_S, WORKER_AWAY_S)

    @property
    def ledger_away(self) -> bool:
        return self._within(LEDGER_DIES_S, LEDGER_AWAY_S)

    @property
    def learner_away(self) -> bool:
        return self._within(LEARNER_DIES_S, LEARNER_AWAY_S)

    @property
    def state(self) -> str:
        return "starting" if self.at < 30 else "recovering" if self.ledger_away or self.learner_away else "running"

    @property
    def version(self) -> int:
        """Published versions: one every 8 s, none while the learner is away."""
        lost = min(max(self.at - LEARNER_DIES_S, 0), LEARNER_AWAY_S)
        return int((self.at - lost) // 8)

    def pace(self, name: str) -> float:
        """Share of its usual speed at which something goes on."""
        if self.ledger_away:
            return 0.0
        if self.learner_away and name.startswith(("learner_", "rollouts_consumed", "tokens_trained", "offpolicy", "checkpoint")):
            return 0.0
        wave = 1 + 0.1 * math.sin(self.at / 90 + len(name))
        return wave * (0.75 if self.worker_away else 1.0)


@dataclass
class Recorder:
    """Series and their values so far."""

    began: int
    values: dict[Series, list[tuple[int, float]]] = field(default_factory=dict)
    counts: dict[Series, float] = field(default_factory=dict)

    def show(self, name: str, labels: Mapping[str, str], at: float, value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        self.values.setdefault(key, []).append((self.began + int(at), value))

    def add(self, name: str, labels: Mapping[str, str], at: float, more: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        self.counts[key] = self.counts.get(key, 0.0) + more
        self.show(name, labels, at, self.counts[key])


def record(end: int) -> Recorder:
    """The whole run, ending at ``end`` (seconds since the epoch)."""
    made = Recorder(end - LENGTH_S)
    for at in range(0, LENGTH_S + 1, STEP_S):
        moment = Moment(at)
        for full, metric in names.OURS.items():
            name = full.removeprefix("rollbook_")
            for own in _label_sets(full, metric):
                labels = {"run": RUN, "job": "rollbook", **_target(name, own)} | own
                if metric.kind == names.HISTOGRAM:
                    _histogram(made, full, labels, own, moment)
                elif metric.kind == names.COUNTER:
                    made.add(full, labels, at, _more(full, own, moment))
                elif (value := _gauge(name, own, moment, made.began)) is not None:
                    made.show(full, labels, at, value)
        _others(made, moment)
    return made


def _target(name: str, own: Mapping[str, str]) -> dict[str, str]:
    if "worker" in own:
        return {"role": "worker", "instance": f"127.0.0.1:91{own['worker'][-1]}0"}
    is_learner = name.startswith(("learner_", "offpolicy_", "checkpoint_")) and not re.search("timestamp|failures", name)
    return {"role": "learner", "instance": "127.0.0.1:9200"} if is_learner else {"role": "ledger", "instance": "127.0.0.1:9100"}


OPEN_VALUES = {"worker": WORKERS, "env": ("sums", "code"), "device": ("0", "1"), "version": ("0.1.0",), "python": ("3.11",),
               "config_sha": ("5f1d",)}  # fmt: skip


def _label_sets(full: str, metric: names.Metric) -> Iterator[dict[str, str]]:
    made: list[dict[str, str]] = [{}]
    for label, closed in metric.labels.items():
        values = closed if closed is not None else OPEN_VALUES[label]
        if label == "pool" and "worker" in metric.labels:
            values = ("actor",)
        made = [one | {label: value} for one in made for value in values]
    return iter(made)


def _about(table: Mapping[str, float], name: str, own: Mapping[str, str], otherwise: float) -> float:
    found = [table[key] for key in (name, *own.values()) if key in table]
    return found[0] if found else otherwise


def _more(full: str, own: Mapping[str, str], moment: Moment) -> float:
    name, at = full.removeprefix("rollbook_"), moment.at
    if full == "rollbook_worker_restarts_total":
        died = {WORKER_DIES_S: ("actor", "crash"), LEDGER_DIES_S: ("ledger", "crash"), LEARNER_DIES_S: ("learner", "oom")}
        return float(any(at == seen + STEP_S and died[seen] == (own["pool"], own["reason"]) for seen in died))
    if name == "ledger_lease_events_total" and own["event"] in ("expired", "requeued", "fenced"):
        return {"expired": 16.0, "requeued": 16.0, "fenced": 1.0}[own["event"]] if at == WORKER_DIES_S + 30 else 0.0
    if name == "recovery_lost_gpu_seconds_total":
        return 70.0 if own["component"] == "learner" and at == LEARNER_DIES_S + LEARNER_AWAY_S else 0.0
    if full in NEVER:
        return 0.0
    return STEP_S * _about(PER_S, name, own, 0.02) * moment.pace(name)


def _histogram(made: Recorder, full: str, labels: dict[str, str], own: Mapping[str, str], moment: Moment) -> None:
    name, at = full.removeprefix("rollbook_"), moment.at
    often, typical = 4.0 * STEP_S * moment.pace(name), _about(TYPICAL, name, own, 0.5)
    if name == "recovery_duration_seconds":
        took = {"actor": (WORKER_DIES_S, WORKER_AWAY_S), "ledger": (LEDGER_DIES_S, LEDGER_AWAY_S),
                "learner": (LEARNER_DIES_S, LEARNER_AWAY_S)}.get(own["component"], (-2, 1))  # fmt: skip
        often, typical = float(at == sum(took)), float(took[1])
    if name == "offpolicy_importance_ratio":
        typical *= 1 + 0.05 * math.sin(at / 200)
    reached = 0.0
    for le in (*BUCKETS.get(name, SHORT_S), INF):
        share = _share(name, le, typical)
        reached = max(reached, share)
        made.add(f"{full}_bucket", labels | {"le": "+Inf" if le == INF else f"{le:g}"}, at, often * reached)
    made.add(f"{full}_sum", labels, at, often * typical)
    made.add(f"{full}_count", labels, at, often)


def _share(name: str, le: float, typical: float) -> float:
    """Of the observations that are no larger than ``le``."""
    if le == INF or name == "recovery_duration_seconds":
        return float(le >= typical)
    if name == "offpolicy_importance_ratio":
        return 1 / (1 + (typical / le) ** 12)
    return 1 - math.exp(-((le / max(typical, 1e-9)) ** 2))


def _gauge(name: str, own: Mapping[str, str], moment: Moment, began: int) -> float | None:
    at, now = moment.at, began + moment.at
    if "worker" in own and own["worker"] == "worker-1" and moment.worker_away:
        return None
    away = int(moment.worker_away)
    lost = own.get("pool") == "actor" and own.get("state") in ("ready", "lost")
    table = {
        "build_info": 1, "config_info": 1, "run_state": own.get("state") == moment.state,
        "controller_leader": not moment.ledger_away,
        "controller_fencing_epoch": 1 + (at >= LEDGER_DIES_S + LEDGER_AWAY_S), "policy_lag_bound_versions": 4,
        "workers": {"ready": 4 - away, "lost": away}[own["state"]] if lost else own.get("state") == "ready",
        "workers_desired": 4 if own.get("pool") == "actor" else 1, "worker_heartbeat_timestamp_seconds": now - 1 - at % 4,
        "worker_policy_version": max(moment.version - (1 + int(at // 70) % 2), 0), "learner_policy_version": moment.version,
        "ledger_tasks": {"queued": 64, "leased": 32, "ready": 12 + 6 * math.sin(at / 60), "consumed": 3.8 * at,
                         "dead": 2 + at // 900}.get(own.get("state", "")),
        "ledger_oldest_task_age_seconds": {"queued": 20, "leased": 11, "ready": 5 + LEARNER_AWAY_S * moment.learner_away}.get(
            own.get("state", "")),
        "ledger_schema_version": 4, "ledger_size_bytes": 2e7 + 4e4 * at, "ledger_writes_waiting": 2 + at % 3,
        "breaker_state": own.get("state") == "closed", "offpolicy_ess_ratio": 0.8 + 0.1 * math.sin(at / 150),
        "offpolicy_clip_ratio": 0.02, "offpolicy_kl_nats": 0.01 + 0.004 * math.sin(at / 100),
        "learner_last_step_timestamp_seconds": now - (at - LEARNER_DIES_S if moment.learner_away else at % 8),
        "learner_loss": 0.1 * math.exp(-at / 900) + 0.01 * math.sin(at / 30),
        "learner_gradient_norm": 0.7 + 0.2 * math.sin(at / 45),
        "learner_entropy_nats": 1.2 - at / 4000, "learner_learning_rate": 1e-4, "gpu_utilization_ratio": 0.7,
        "gpu_memory_used_bytes": 6e10, "gpu_memory_capacity_bytes": 8e10, "checkpoint_interval_seconds": 120,
        "checkpoint_last_success_timestamp_seconds": began + max(at - at % 120, 1), "checkpoint_size_bytes": 3.1e9,
    }  # fmt: skip
    value = table.get(name)
    return None if value is None else float(value)


def _others(made: Recorder, moment: Moment) -> None:
    """What the engines and Prometheus itself show."""
    engine = {"job": "engine", "instance": "127.0.0.1:8000"}
    shown = {"vllm:num_requests_running": 30 * moment.pace("x"), "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 0.6,
             "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4, "DCGM_FI_DEV_XID_ERRORS": 0}  # fmt: skip
    for name, value in shown.items():
        made.show(name, engine, moment.at, float(value))
    for role, is_away in (("ledger", moment.ledger_away), ("learner", moment.learner_away), ("worker", False)):
        labels = {"job": "rollbook", "run": RUN, "role": role, "instance": f"127.0.0.1:9{len(role)}00"}
        made.show("up", labels, moment.at, float(not is_away))
        made.show("scrape_samples_scraped", labels, moment.at, 0.0 if is_away else 200.0)


def openmetrics(made: Recorder) -> Iterator[str]:
    """Lines that `promtool tsdb create-blocks-from openmetrics` reads; without types, so that series may stand in any order."""
    for (name, labels), values in sorted(made.values.items()):
        shown = ",".join(f'{label}="{value}"' for label, value in labels)
        yield from (f"{name}{{{shown}}} {value!r} {at}\n" for at, value in values)
    yield "# EOF\n"


def main() -> int:
    """Write one."""
    parser = argparse.ArgumentParser(description="a synthetic recorded run as OpenMetrics text")
    parser.add_argument("file", type=Path)
    parser.add_argument("--end", type=int, required=True, help="its last second, since the epoch")
    args = parser.parse_args()
    with args.file.open("w") as file:
        file.writelines(openmetrics(record(args.end)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
