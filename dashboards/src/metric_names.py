"""The names, types and labels that panels and alerts may use, as one table.

Owns what the dashboards expect a run to export; a test holds every expression against it. Never measures anything. Names are as
PromQL spells them without a histogram's suffix; every one has the label ``run`` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

RUN_STATES = ("starting", "running", "paused", "draining", "recovering", "failed", "completed")
POOLS = ("actor", "reward", "learner")
RESTART_POOLS = (*POOLS, "feeder", "ledger")
WORKER_STATES = ("starting", "ready", "draining", "lost")
RESTARTS = ("crash", "oom", "heartbeat_lost", "preempted", "drain")
OUTCOMES = ("ok", "failed", "stale_dropped", "filtered")
FAILURES = ("timeout", "invalid_reward", "sandbox_failure", "reward_timeout", "engine_error", "oom", "parse_error",
            "lease_expired", "cancelled", "worker_died")  # fmt: skip
STAGES = ("queue", "generate", "reward", "commit", "total")
TASK_STATES = ("queued", "leased", "ready", "consumed", "dead")
LEASE_EVENTS = ("granted", "renewed", "completed", "expired", "requeued", "fenced")
TRANSACTION_ERRORS = ("serialization", "deadlock", "connection", "constraint", "timeout")
MASKED = ("stale", "ratio_high", "ratio_low")
STEP_PHASES = ("data_wait", "reference_logprob", "forward_backward", "optimizer", "checkpoint", "publish")
SYNC_PHASES = ("gather", "transfer", "load", "verify")
SYNC_FAILURES = ("missing", "digest", "stale", "storage", "engine")
ACTIVITIES = ("generate", "train", "weight_sync", "checkpoint", "idle", "wasted")
CHECKPOINT_PHASES = ("snapshot", "write", "commit", "verify")
CHECKPOINT_FAILURES = ("storage", "ledger", "other")
DROPS = ("dropped_stale", "failed", "cancelled", "quarantined", "orphan_version", "skipped", "no_reward")
COMPONENTS = ("actor", "reward", "learner", "controller", "ledger")

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True)
class Metric:
    """One family: its type, its labels beyond ``run`` and, where they are closed, the values of those labels."""

    kind: str
    labels: dict[str, tuple[str, ...] | None]

    @property
    def samples(self) -> tuple[str, ...]:
        """Suffixes under which PromQL finds it."""
        return ("_bucket", "_sum", "_count") if self.kind == HISTOGRAM else ("",)


def _of(kind: str, /, **labels: tuple[str, ...] | None) -> Metric:
    return Metric(kind, labels)


OURS: dict[str, Metric] = {
    "rollbook_build_info": _of(GAUGE, version=None, python=None),
    "rollbook_config_info": _of(GAUGE, config_sha=None),
    "rollbook_run_state": _of(GAUGE, state=RUN_STATES),
    "rollbook_controller_leader": _of(GAUGE),
    "rollbook_controller_fencing_epoch": _of(GAUGE),
    "rollbook_workers": _of(GAUGE, pool=POOLS, state=WORKER_STATES),
    "rollbook_workers_desired": _of(GAUGE, pool=POOLS),
    "rollbook_worker_restarts_total": _of(COUNTER, pool=RESTART_POOLS, reason=RESTARTS),
    "rollbook_worker_heartbeat_timestamp_seconds": _of(GAUGE, pool=("actor",), worker=None),
    "rollbook_worker_policy_version": _of(GAUGE, pool=("actor",), worker=None),
    "rollbook_rollouts_total": _of(COUNTER, outcome=OUTCOMES),
    "rollbook_rollout_failures_total": _of(COUNTER, reason=FAILURES),
    "rollbook_rollouts_consumed_total": _of(COUNTER),
    "rollbook_rollout_attempts": _of(HISTOGRAM),
    "rollbook_rollout_duration_seconds": _of(HISTOGRAM, stage=STAGES),
    "rollbook_tokens_total": _of(COUNTER, kind=("prompt", "completion")),
    "rollbook_tokens_trained_total": _of(COUNTER),
    "rollbook_completion_tokens": _of(HISTOGRAM),
    "rollbook_rollout_policy_lag_versions": _of(HISTOGRAM),
    "rollbook_rollout_version_span_versions": _of(HISTOGRAM),
    "rollbook_policy_lag_bound_versions": _of(GAUGE),
    "rollbook_ledger_tasks": _of(GAUGE, state=TASK_STATES),
    "rollbook_ledger_oldest_task_age_seconds": _of(GAUGE, state=TASK_STATES[:3]),
    "rollbook_ledger_lease_events_total": _of(COUNTER, event=LEASE_EVENTS),
    "rollbook_ledger_duplicate_commits_total": _of(COUNTER),
    "rollbook_ledger_invariant_violations_total": _of(COUNTER, check=("submit_conflict", "tool_conflict")),
    "rollbook_ledger_transaction_duration_seconds": _of(HISTOGRAM, op=("write", "read")),
    "rollbook_ledger_transaction_errors_total": _of(COUNTER, **{"op": ("write", "read"), "class": TRANSACTION_ERRORS}),
    "rollbook_ledger_schema_version": _of(GAUGE),
    "rollbook_ledger_size_bytes": _of(GAUGE),
    "rollbook_ledger_writes_waiting": _of(GAUGE),
    "rollbook_ledger_commits_total": _of(COUNTER),
    "rollbook_breaker_state": _of(GAUGE, state=("closed", "open")),
    "rollbook_reward": _of(HISTOGRAM, env=None),
    "rollbook_reward_duration_seconds": _of(HISTOGRAM, env=None),
    "rollbook_reward_group_zero_variance_total": _of(COUNTER, env=None),
    "rollbook_reward_groups_total": _of(COUNTER, env=None),
    "rollbook_offpolicy_ess_ratio": _of(GAUGE),
    "rollbook_offpolicy_clip_ratio": _of(GAUGE),
    "rollbook_offpolicy_kl_nats": _of(GAUGE, estimator=("k1", "k2", "k3")),
    "rollbook_offpolicy_importance_ratio": _of(HISTOGRAM, level=("token",)),
    "rollbook_offpolicy_masked_tokens_total": _of(COUNTER, reason=MASKED),
    "rollbook_learner_steps_total": _of(COUNTER),
    "rollbook_learner_policy_version": _of(GAUGE),
    "rollbook_learner_last_step_timestamp_seconds": _of(GAUGE),
    "rollbook_learner_loss": _of(GAUGE),
    "rollbook_learner_gradient_norm": _of(GAUGE),
    "rollbook_learner_entropy_nats": _of(GAUGE),
    "rollbook_learner_learning_rate": _of(GAUGE),
    "rollbook_learner_nonfinite_steps_total": _of(COUNTER, action=("skipped",)),
    "rollbook_learner_step_phase_duration_seconds": _of(HISTOGRAM, phase=STEP_PHASES),
    "rollbook_weight_sync_duration_seconds": _of(HISTOGRAM, phase=SYNC_PHASES),
    "rollbook_weight_sync_bytes_total": _of(COUNTER, transport=("files",)),
    "rollbook_weight_sync_failures_total": _of(COUNTER, reason=SYNC_FAILURES),
    "rollbook_slots_dropped_total": _of(COUNTER, reason=DROPS),
    "rollbook_gpu_seconds_total": _of(COUNTER, pool=("actor", "learner"), activity=ACTIVITIES),
    "rollbook_gpu_wasted_seconds_total": _of(COUNTER, reason=("stale", "failed", "filtered", "skipped")),
    "rollbook_gpu_utilization_ratio": _of(GAUGE, pool=POOLS, device=None),
    "rollbook_gpu_memory_used_bytes": _of(GAUGE, pool=POOLS, device=None),
    "rollbook_gpu_memory_capacity_bytes": _of(GAUGE, pool=POOLS, device=None),
    "rollbook_checkpoint_last_success_timestamp_seconds": _of(GAUGE),
    "rollbook_checkpoint_interval_seconds": _of(GAUGE),
    "rollbook_checkpoint_size_bytes": _of(GAUGE),
    "rollbook_checkpoint_duration_seconds": _of(HISTOGRAM, phase=CHECKPOINT_PHASES),
    "rollbook_checkpoint_failures_total": _of(COUNTER, reason=CHECKPOINT_FAILURES),
    "rollbook_recovery_duration_seconds": _of(HISTOGRAM, component=COMPONENTS),
    "rollbook_recovery_lost_gpu_seconds_total": _of(COUNTER, component=COMPONENTS),
    "rollbook_telemetry_dropped_total": _of(COUNTER, signal=("traces", "metrics", "logs")),
}
"""What a run exports about itself."""

ENGINES: dict[str, Metric] = {
    "vllm:num_requests_running": _of(GAUGE),
    "vllm:num_requests_waiting": _of(GAUGE),
    "vllm:kv_cache_usage_perc": _of(GAUGE),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": _of(GAUGE),
    "DCGM_FI_DEV_XID_ERRORS": _of(GAUGE),
}
"""What engines and the GPU's own exporter show where they are there; their panels may be empty."""

PROMETHEUS = ("up", "ALERTS", "scrape_samples_scraped")
"""What Prometheus makes itself."""

_REPORT = "counted from the ledger over the whole run; `rollbook report` draws it with its bounds"
_BESIDE = "the same question has a panel that is closer to its cause"
UNUSED = {
    "rollbook_config_info": "compared between runs by hand: `count by (config_sha) (rollbook_config_info)`",
    "rollbook_learner_learning_rate": "follows the configuration; in the report",
    "rollbook_drop_bias_alarm": _REPORT, "rollbook_drop_kl_nats": _REPORT, "rollbook_ipw_effective_samples": _REPORT,
    "rollbook_ipw_unrepaired_slots": _REPORT, "rollbook_slots_opened_by_end": _REPORT,
    "rollbook_slots_opened_total": _REPORT, "rollbook_survival_ratio": _REPORT, "rollbook_survival_slots": _REPORT,
    "rollbook_trained_reward_mean": _REPORT, "rollbook_failures_total": _BESIDE, "rollbook_breaker_opened_total": _BESIDE,
    "rollbook_ledger_conflicts_total": _BESIDE, "rollbook_ledger_readable": _BESIDE, "rollbook_worker_tokens_total": _BESIDE,
    "rollbook_worker_submissions_total": _BESIDE, "rollbook_worker_slots_in_hand": _BESIDE,
    "rollbook_groups_expired_total": "retention, off by default", "rollbook_low_watermark": "retention, off by default",
    "rollbook_ledger_dead_tuples": "PostgreSQL only", "rollbook_ledger_oldest_xmin_age": "PostgreSQL only",
    "rollbook_rpc_seconds": "for a look at one method by hand", "rollbook_rpc_retries_total": "as rollbook_rpc_seconds",
    "rollbook_rpc_failures_total": "as rollbook_rpc_seconds; refusals that only tell a caller to wait are among them",
    "rollbook_sandbox_unsafe": "told at the start of a run and in its manifest",
}  # fmt: skip
"""Exported and on no panel, with the reason."""


def sample_names() -> set[str]:
    """Every name that an expression may use."""
    families = OURS | ENGINES
    return {name + suffix for name, metric in families.items() for suffix in metric.samples} | set(PROMETHEUS)
