"""The catalogue: every metric that a process of the service shows, declared once.

Owns names, types, labels with their values, buckets and help. Never holds a value: ``metrics`` makes objects of the rows, and
``ledger_metrics`` families of those that the ledger counts. Rules: base units, the unit last in the name, ``_total`` on counters,
no averages and no rates; labels are closed sets: no prompt, task or rollout, no step, version, address or text of an exception.
``run``, ``role`` and ``worker`` stand on every series of a target that service discovery names, so no metric has them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollbook.core.records import Blame, RewardStatus, VerdictKind
from rollbook.core.survival import DIMENSIONS, KL_DIMENSIONS

PREFIX = "rollbook_"
LEDGER, WORKER, LEARNER, FEEDER = ("ledger",), ("worker",), ("learner",), ("feeder",)
EVERY = ("ledger", "worker", "learner", "feeder")
UNITS = ("seconds", "bytes", "ratio", "nats", "versions", "tokens")
"""What may be measured; a name that ends otherwise counts things or says yes or no."""


class Kind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric."""

    name: str
    """As it is shown, without the prefix."""
    kind: Kind
    help: str
    roles: tuple[str, ...]
    """Processes that show it."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of each label; ``OPEN`` where code or configuration bounds them."""
    buckets: tuple[float, ...] = ()
    sql: bool = False
    """Counted by the ledger's rows when somebody looks, so that no restart changes it."""
    of_run: bool = False
    """Shown by the ledger server from the run's files or the server's own state, when somebody looks."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def unit(self) -> str:
        """The word of ``UNITS`` that the name ends in; empty for a number of things."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


OPEN: tuple[str, ...] = ()
"""Values of a label that are bounded elsewhere: buckets of survival, the environment, devices."""

POOLS = ("actor", "reward", "learner")
RESTART_POOLS = (*POOLS, "feeder", "ledger")
RESTART_REASONS = ("crash", "oom", "heartbeat_lost", "preempted", "drain")
RUN_STATES = ("starting", "running", "paused", "draining", "recovering", "failed", "completed")
WORKER_STATES = ("starting", "ready", "draining", "lost")
OUTCOMES = ("ok", "failed", "stale_dropped", "filtered")
FAILURES = (
    "timeout", "invalid_reward", "sandbox_failure", "reward_timeout", "engine_error", "oom", "parse_error", "lease_expired",
    "cancelled", "worker_died",
)  # fmt: skip
STAGES = ("queue", "generate", "reward", "commit", "total")
TASK_STATES = ("queued", "leased", "ready", "consumed", "dead")
LEASE_EVENTS = ("granted", "renewed", "completed", "expired", "requeued", "fenced")
ERROR_CLASSES = ("serialization", "deadlock", "connection", "constraint", "timeout")
PHASES = ("data_wait", "reference_logprob", "forward_backward", "optimizer", "checkpoint", "publish")
SYNC_PHASES = ("gather", "transfer", "load", "verify")
SYNC_FAILURES = ("missing", "digest", "stale", "storage", "engine")
ACTIVITIES = ("generate", "train", "weight_sync", "checkpoint", "idle", "wasted")
WASTES = ("stale", "failed", "filtered", "skipped", "replayed")
CHECKPOINT_PHASES = ("snapshot", "write", "commit", "verify")
CHECKPOINT_FAILURES = ("storage", "ledger", "other")
COMPONENTS = ("actor", "reward", "learner", "controller", "ledger")
SIGNALS = ("traces", "metrics", "logs")
TRANSPORTS = ("files",)
METHODS = (
    "LeaseSlots", "Heartbeat", "RecordToolCall", "SubmitSamples", "PlanStep", "Payloads", "FinishPlan", "PublishVersion",
    "CommitCheckpoint", "other",
)  # fmt: skip
"""Methods whose time says how the run goes; a series for each of the others would be half of a server's budget."""
CODES = (
    "INTERNAL", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "ALREADY_EXISTS", "ABORTED", "RESOURCE_EXHAUSTED",
    "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "PERMISSION_DENIED", "DATA_LOSS", "CANCELLED",
)  # fmt: skip
RETRIED = ("Unavailable", "ServerFenced", "Standby", "StorageFull", "DeadlineExceeded", "Overloaded")
FIXED_DIMENSIONS = tuple(name for name in DIMENSIONS if name != "task")

DURATIONS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
SHORT_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
RECOVERY_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TRANSACTION_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
ATTEMPTS = (1, 2, 3, 4, 6, 8)
REWARDS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
RATIOS = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0, 4.0, 10.0)


def _rows(kind: Kind, roles: tuple[str, ...], rows: tuple[tuple, ...], sql: bool = False, of_run: bool = False) -> list[Spec]:
    """Specs of one kind and place: (name, help[, labels[, buckets]])."""
    made = []
    for name, text, *more in rows:
        labels = more[0] if more else {}
        made.append(Spec(name, kind, text, roles, labels, more[1] if len(more) > 1 else (), sql, of_run))
    return made


_RUN = [
    *_rows(Kind.GAUGE, LEDGER, (
        ("run_state", "1 for the state the run is in.", {"state": RUN_STATES}),
        ("controller_leader", "1 where this ledger server holds the run's role."),
        ("controller_fencing_epoch", "Epoch of the ledger server's role; grows with each server."),
        ("workers", "Processes by pool and state, as their heartbeats and terms tell.", {"pool": POOLS, "state": WORKER_STATES}),
        ("policy_lag_bound_versions", "Largest lag that the configuration allows."),
        ("workers_desired", "Processes the configuration or an order asks for.", {"pool": POOLS}),
    ), of_run=True),
    *_rows(Kind.COUNTER, LEDGER, (
        ("worker_restarts_total", "Deaths of roles that the supervisor answered with a restart, over the life of the run.",
         {"pool": RESTART_POOLS, "reason": RESTART_REASONS}),
    ), of_run=True),
]  # fmt: skip

_ROLLOUTS = [
    *_rows(Kind.COUNTER, LEDGER, (
        ("rollouts_total", "Attempts by outcome: ok when a sample was accepted, failed without one. Of the ok ones, "
         "stale_dropped and filtered count those that a verdict took out later.", {"outcome": OUTCOMES}),
        ("rollout_failures_total", "Attempts that gave no sample.", {"reason": FAILURES}),
        ("rollouts_consumed_total", "Samples that a finished step trained on, each exactly once."),
        ("tokens_total", "Tokens of accepted samples.", {"kind": ("prompt", "completion")}),
        ("tokens_trained_total", "Completion tokens of samples that a finished step trained on."),
        ("reward_groups_total", "Groups that a finished step trained on.", {"env": OPEN}),
        ("reward_group_zero_variance_total", "Of those, groups with one and the same reward: nothing to learn.", {"env": OPEN}),
    ), sql=True),
    *_rows(Kind.HISTOGRAM, LEDGER, (
        ("rollout_attempts", "Attempts until a sample was accepted.", {}, ATTEMPTS),
        ("completion_tokens", "Length of accepted completions.", {}, LENGTHS),
        ("rollout_policy_lag_versions", "Version trained from minus the oldest version of the sample, when trained.", {}, LAGS),
        ("rollout_version_span_versions", "Newest minus oldest version within one sample.", {}, LAGS),
        ("reward", "Rewards of accepted samples; the sum falls where rewards are negative.", {"env": OPEN}, REWARDS),
        ("reward_duration_seconds", "Time the verifier took for an accepted sample.", {"env": OPEN}, SHORT_S),
    ), sql=True),
    Spec("rollout_duration_seconds", Kind.HISTOGRAM, "Time of a rollout by stage: queue (issued to first lease, from the "
         "ledger), generate, reward, commit (submit to answer) and total (lease to answer), from the worker.",
         ("ledger", "worker"), {"stage": STAGES}, DURATIONS_S),
]  # fmt: skip

_LEDGER = [
    *_rows(Kind.GAUGE, LEDGER, (
        ("ledger_readable", "1 where the ledger answered when its counts were read."),
        ("ledger_tasks", "Slots by state; together they are what was issued.", {"state": TASK_STATES}),
        ("ledger_oldest_task_age_seconds", "Age of the oldest slot in a state; 0 without one.", {"state": TASK_STATES[:3]}),
        ("ledger_schema_version", "Number of the newest migration of the database."),
        ("ledger_size_bytes", "Size of the database."),
        ("low_watermark", "Groups with smaller ordinals are gone."),
        ("ledger_oldest_xmin_age", "Transactions begun since the oldest snapshot that somebody holds (PostgreSQL)."),
        ("ledger_dead_tuples", "Dead rows that no vacuum has removed yet (PostgreSQL)."),
        ("breaker_state", "1 for the state the circuit breaker is in.", {"state": ("closed", "open")}),
        ("checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was committed."),
        ("ledger_writes_waiting", "Write operations that wait for the next commit."),
    ), sql=True),
    *_rows(Kind.COUNTER, LEDGER, (
        ("ledger_lease_events_total", "Leases by what happened; requeued ones were granted again, renewed ones are counted by "
         "this server.", {"event": LEASE_EVENTS}),
        ("ledger_duplicate_commits_total", "Submissions repeated with the same key and content, answered the same again."),
        ("ledger_invariant_violations_total", "Same key, other content: refused, and never expected.",
         {"check": ("submit_conflict", "tool_conflict")}),
        ("ledger_conflicts_total", "Transactions that a deadlock or serialization failure broke off and this server ran again."),
        ("ledger_commits_total", "Durable commits of this server."),
        ("groups_expired_total", "Groups let go under [retention]."),
        ("breaker_opened_total", "Times the circuit breaker opened."),
        ("gpu_wasted_seconds_total", "Device time of generations that no step trained on, by why; the replayed part is the "
         "learner's.", {"reason": WASTES[:4]}),
    ), sql=True),
    Spec("ledger_transaction_duration_seconds", Kind.HISTOGRAM, "Time of a transaction: write from BEGIN to COMMIT for all calls "
         "that share it, read for one snapshot.", LEDGER, {"op": ("write", "read")}, TRANSACTION_S),
    Spec("ledger_transaction_errors_total", Kind.COUNTER, "Transactions that failed.", LEDGER,
         {"op": ("write", "read"), "class": ERROR_CLASSES}),
]  # fmt: skip

_SURVIVAL = [
    *_rows(Kind.COUNTER, LEDGER, (
        ("slots_opened_total", "Slots a worker was given."),
        ("slots_dropped_total", "Slots that ended without being trained.",
         {"reason": (*(kind.value for kind in VerdictKind), "skipped", "no_reward")}),
        ("failures_total", "Attempts that gave no sample, by what the verifier or the infrastructure said.",
         {"status": tuple(s.value for s in RewardStatus if s is not RewardStatus.GIVEN), "blame": tuple(b.value for b in Blame)}),
    ), sql=True),
    *_rows(Kind.GAUGE, LEDGER, (
        ("slots_opened_by_end", "Opened slots by what became of them; finished ones have a sample.",
         {"end": ("finished", "trained", "waiting")}),
        ("survival_slots", "Slots that are trained or dropped, by bucket.", {"dimension": FIXED_DIMENSIONS, "bucket": OPEN}),
        ("survival_ratio", "Share of those slots that was trained.", {"dimension": FIXED_DIMENSIONS, "bucket": OPEN}),
        ("drop_kl_nats", "KL of dispatched from trained slots over buckets.", {"dimension": KL_DIMENSIONS}),
        ("trained_reward_mean", "Mean reward of trained samples; ipw weighs them by 1 / survival of their length.",
         {"estimator": ("naive", "ipw", "ipw_capped")}),
        ("ipw_effective_samples", "Effective number of samples under the capped weights."),
        ("ipw_unrepaired_slots", "Slots in length buckets without a survivor, which no weight brings back."),
        ("drop_bias_alarm", "1 where what is trained differs from what was dispatched beyond its limits.",
         {"dimension": tuple(DIMENSIONS)}),
        ("sandbox_unsafe", "1 where a worker of the run ran model-written code uncontained."),
    ), sql=True),
]  # fmt: skip

_WORKER = [
    *_rows(Kind.GAUGE, WORKER, (
        ("worker_heartbeat_timestamp_seconds", "When the ledger last answered a heartbeat of this worker.", {"pool": POOLS[:1]}),
        ("worker_policy_version", "Version this worker has loaded and proven; -1 while it has none.", {"pool": POOLS[:1]}),
        ("worker_slots_in_hand", "Slots this worker holds leases of."),
    )),
    *_rows(Kind.COUNTER, WORKER, (
        ("worker_tokens_total", "Tokens this worker has sampled, failed and refused ones included."),
        ("worker_submissions_total", "Samples this worker has sent, by the ledger's answer.",
         {"outcome": ("accepted", "replayed", "conflict", "fenced", "refused", "invalid")}),
    )),
]  # fmt: skip

_LEARNER = [
    *_rows(Kind.COUNTER, LEDGER, (
        ("learner_steps_total", "Steps that were trained, over all lineages."),
    ), sql=True),
    *_rows(Kind.COUNTER, LEDGER, (
        ("learner_nonfinite_steps_total", "Steps whose loss or gradient was not finite.", {"action": ("skipped",)}),
    ), sql=True),
    *_rows(Kind.GAUGE, LEDGER, (
        ("learner_policy_version", "Newest published version."),
        ("learner_last_step_timestamp_seconds", "When the newest step was finished."),
    ), sql=True),
    *_rows(Kind.GAUGE, LEARNER, (
        ("learner_loss", "Loss of the newest step."),
        ("learner_gradient_norm", "Gradient norm of the newest step, before clipping."),
        ("learner_entropy_nats", "Mean entropy of the policy at the trained tokens."),
        ("learner_learning_rate", "Learning rate of the newest step."),
        ("offpolicy_ess_ratio", "Effective sample size of the importance weights as applied, per token; 1 = on policy."),
        ("offpolicy_clip_ratio", "Share of trained tokens whose ratio was clipped."),
        ("offpolicy_kl_nats", "KL of the behaviour policy from the policy at the start of the step.",
         {"estimator": ("k1", "k2", "k3")}),
        ("checkpoint_interval_seconds", "Time between two checkpoints as it is planned now."),
        ("checkpoint_size_bytes", "Size of the newest checkpoint."),
    )),
    *_rows(Kind.COUNTER, LEARNER, (
        ("offpolicy_masked_tokens_total", "Tokens that the correction took out of the loss.",
         {"reason": ("stale", "ratio_high", "ratio_low")}),
    )),
    *_rows(Kind.HISTOGRAM, LEARNER, (
        ("offpolicy_importance_ratio", "Ratio of the policy at the start of the step over the behaviour policy.",
         {"level": ("token",)}, RATIOS),
        ("learner_step_phase_duration_seconds", "Time of a step by phase.", {"phase": PHASES}, SHORT_S),
        ("checkpoint_duration_seconds", "Time of a checkpoint by phase.", {"phase": CHECKPOINT_PHASES}, SHORT_S),
    )),
]  # fmt: skip

_SHARED = [
    Spec("weight_sync_duration_seconds", Kind.HISTOGRAM, "Time of a weight update by phase: gather and transfer at the learner, "
         "load and verify at the worker.", ("learner", "worker"), {"phase": SYNC_PHASES}, SHORT_S),
    Spec("weight_sync_bytes_total", Kind.COUNTER, "Bytes of published or loaded weights.", ("learner", "worker"),
         {"transport": TRANSPORTS}),
    Spec("checkpoint_failures_total", Kind.COUNTER, "Checkpoints that were not committed, over the whole run: the learner's "
         "note, since what fails often ends it.", LEDGER, {"reason": CHECKPOINT_FAILURES}, of_run=True),
    Spec("weight_sync_failures_total", Kind.COUNTER, "Weight updates that failed, over the whole run: notes of learner and "
         "workers, since what fails often ends them.", LEDGER, {"reason": SYNC_FAILURES}, of_run=True),
    Spec("gpu_seconds_total", Kind.COUNTER, "Device time by activity; on a machine without GPUs the device is the process. The "
         "ledger shows what its rows tell (generation that was trained or wasted; the learner's steps), worker and learner the "
         "rest, as rollouts that the ledger did not take. What a killed process had not handed in yet is in none.",
         ("ledger", "worker", "learner"), {"pool": ("actor", "learner"), "activity": ACTIVITIES}),
    Spec("gpu_memory_used_bytes", Kind.GAUGE, "Memory in use on a GPU of this machine.", ("worker", "learner"),
         {"pool": POOLS, "device": OPEN}),
    Spec("gpu_memory_capacity_bytes", Kind.GAUGE, "Memory of a GPU of this machine.", ("worker", "learner"),
         {"pool": POOLS, "device": OPEN}),
    Spec("gpu_utilization_ratio", Kind.GAUGE, "Share of the last sampling period in which a kernel ran.", ("worker", "learner"),
         {"pool": POOLS, "device": OPEN}),
    Spec("recovery_duration_seconds", Kind.HISTOGRAM, "From the start of a process that replaces another one until it works "
         "again: ledger until it answers, actor until a version is loaded, learner until replay is over.",
         ("ledger", "worker", "learner"), {"component": COMPONENTS}, RECOVERY_S),
    Spec("recovery_lost_gpu_seconds_total", Kind.COUNTER, "Device time spent again on what a dead process had done: replayed "
         "steps.", ("learner",), {"component": COMPONENTS}),
    Spec("telemetry_dropped_total", Kind.COUNTER, "Spans, readings or log lines given up rather than waited for.", EVERY,
         {"signal": SIGNALS}),
    Spec("build", Kind.INFO, "Versions of the package and of what it runs on.", EVERY,
         {"version": OPEN, "python": OPEN}),
    Spec("config", Kind.INFO, "Digest of the resolved configuration.", EVERY, {"config_sha": OPEN}),
    Spec("rpc_seconds", Kind.HISTOGRAM, "Time the ledger server took for a call, long polls and failures included; other: all "
         "methods that have no series of their own.", LEDGER, {"method": METHODS}, (0.005, 0.05, 0.5, 5.0)),
    Spec("rpc_failures_total", Kind.COUNTER, "Calls that the ledger server ended with an error, by its gRPC status; refusals "
         "that tell a caller to wait are among them.", LEDGER, {"code": CODES}),
    Spec("rpc_retries_total", Kind.COUNTER, "Calls a client repeated with the same key, by what they met (the error's class).",
         ("worker", "learner", "feeder"), {"reason": RETRIED}),
]  # fmt: skip

SPECS: tuple[Spec, ...] = (*_RUN, *_ROLLOUTS, *_LEDGER, *_SURVIVAL, *_WORKER, *_LEARNER, *_SHARED)
BY_NAME: Mapping[str, Spec] = {spec.name: spec for spec in SPECS}


def table_text() -> str:
    """The catalogue as a page."""
    lines = [
        "# Metrics", "",
        "Generated from `rollbook.observe.metric_table`; a test compares. Every series also has the labels `run`, `role` and, on",
        "a worker, `worker`, which come from service discovery (`/sd` of the ledger server).", "",
        "| metric | type | labels | shown by | what it says |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for spec in SPECS:
        shown = "_info" if spec.kind is Kind.INFO else ""
        labels = "; ".join(f"{name}={','.join(values)}" if values else name for name, values in spec.labels.items())
        counted = " (counted in SQL)" if spec.sql else ""
        cells = (f"`{spec.full_name}{shown}`", spec.kind.value, labels, ", ".join(spec.roles) + counted, spec.help)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table_text(), end="")
