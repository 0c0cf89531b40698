"""Rows of what keeps a run going: ledger, the learner's time, GPUs, durability and cost; and those of a recovery.

Owns which questions are asked and how their answers are drawn. Never lays anything out.
"""

from __future__ import annotations

from panel_kit import BYTES, BYTES_RATE, COUNT, RATE, RATIO, SECONDS, Note, Panel
from promql import age, increase, mean, newest, observed_once, of, over, quantile, rate, share, total

ALL_GPU = rate("gpu_seconds_total")
SYNC_BYTES = rate("weight_sync_bytes_total", by="transport")

LEDGER = (
    Panel("Slots by state", ((newest("ledger_tasks", 'state!="consumed"', by="state"), "{{state}}"),), COUNT, "Slots under way.",
          "ready grows without end, or queued is empty.", "LedgerBacklog", stacked=True),
    Panel("Oldest slot", ((newest("ledger_oldest_task_age_seconds", by="state"), "{{state}}"),), SECONDS,
          "Longest wait in each state.", "ready above 10 minutes.", "LedgerBacklog", above=600),
    Panel("Leases", ((rate("ledger_lease_events_total", by="event"), "{{event}}"),), RATE, "Leases granted, renewed and lost.",
          "expired or requeued: workers die or stall.", "WorkerFlapping"),
    Panel("Duplicates and fenced writes", ((rate("ledger_duplicate_commits_total"), "answered again"),
          (rate("ledger_lease_events_total", 'event="fenced"'), "fenced")), RATE,
          "Submissions that changed nothing.", "fenced without a fault: two writers.", "LeaderCountWrong"),
    Panel("Transaction time", ((quantile(0.95, "ledger_transaction_duration_seconds", by="op"), "p95 {{op}}"),), SECONDS,
          "By operation.", "seconds.", "LedgerTransactionErrors"),
    Panel("Transaction errors", ((rate("ledger_transaction_errors_total", by="op, class"), "{{op}}: {{class}}"),), RATE,
          "Failed transactions, before they are tried again.", "above 0.1 a second.", "LedgerTransactionErrors", above=0.1),
    Panel("Commits", ((rate("ledger_commits_total"), "commits"), (newest("ledger_writes_waiting"), "waiting")), RATE,
          "Durable commits a second, and calls that wait for the next one.", "waiting grows: the storage is slow.",
          "LedgerTransactionErrors"),
    Panel("Size", ((newest("ledger_size_bytes"), "size"),), BYTES, "Of the database.", "it nears the disk.",
          "CheckpointFailing"),
)  # fmt: skip

LEARNER_TIME = (
    Panel("Step by phase", ((mean("learner_step_phase_duration_seconds", by="phase"), "{{phase}}"),), SECONDS,
          "Where a step's time goes.", "data_wait or checkpoint above the work itself.", "LearnerStarved", stacked=True),
    Panel("Waiting for rollouts", ((share(rate("learner_step_phase_duration_seconds_sum", 'phase="data_wait"'),
          rate("learner_step_phase_duration_seconds_sum")), "share"),), RATIO, "Share of the learner's time.", "above 50 %.",
          "LearnerStarved", above=0.5),
    Panel("Slow phases", ((quantile(0.95, "learner_step_phase_duration_seconds", by="phase"), "p95 {{phase}}"),), SECONDS,
          "95th percentile by phase.", "one phase leaves the others.", "LearnerStalled"),
    Panel("Steps", ((f"60 * {rate('learner_steps_total')}", "steps a minute"),), COUNT, "Finished steps.", "0.",
          "LearnerStalled"),
    Panel("Weight update by phase", ((mean("weight_sync_duration_seconds", by="phase"), "{{phase}}"),), SECONDS,
          "From the learner's files to a worker's verified engine.", "longer than a step.", "WeightSyncFailing", width=8,
          stacked=True),
    Panel("Weights moved", ((SYNC_BYTES, "{{transport}}"),), BYTES_RATE, "Bytes a second.", "0 while versions are published.",
          "WeightSyncFailing", width=8),
    Panel("Weight updates that failed", ((increase("weight_sync_failures_total", by="reason"), "{{reason}}"),), COUNT,
          "Digest, probe, or time.", "more than 2 in 15 minutes.", "WeightSyncFailing", width=8, above=2),
)  # fmt: skip

GPU = (
    Panel("GPUs by activity", ((share(rate("gpu_seconds_total", by="activity"), ALL_GPU), "{{activity}}"),), RATIO,
          "What is paid for.", "idle or wasted is the largest.", "GpuIdleHigh", stacked=True),
    Panel("Busy share by pool", ((over(rate("gpu_seconds_total", 'activity!~"idle|wasted"', by="pool"),
          rate("gpu_seconds_total", by="pool")), "{{pool}}"),), RATIO, "Neither idle nor wasted.", "one pool starves.",
          "GpuIdleHigh"),
    Panel("Idle share", ((share(rate("gpu_seconds_total", 'activity="idle"'), ALL_GPU), "idle"),), RATIO, "Of all GPU time.",
          "above 50 % for half an hour.", "GpuIdleHigh", above=0.5),
    Panel("GPU memory", ((f"max by (pool, device) ({of('gpu_memory_used_bytes')} / {of('gpu_memory_capacity_bytes')})",
          "{{pool}} {{device}}"),), RATIO, "Used of capacity.", "it climbs to 100 % before an out-of-memory restart.",
          "WorkerFlapping"),
    Panel("Waste", ((rate("gpu_wasted_seconds_total", by="reason"), "{{reason}}"),), COUNT,
          "GPU-seconds a second spent on rollouts that no step trained on.", "one reason grows.", "StaleDropRatioHigh",
          stacked=True),
    Panel("Kernels running", ((f"max by (pool, device) ({of('gpu_utilization_ratio')})", "{{pool}} {{device}}"),), RATIO,
          "As the driver tells.", "near 0 while the run is running.", "GpuIdleHigh"),
    Panel("Engine requests", (("sum (vllm:num_requests_running)", "running"), ("sum (vllm:num_requests_waiting)", "waiting")),
          COUNT,
          "In the engines of every run that this Prometheus scrapes.", "waiting grows.", "PolicyLagHigh"),
    Panel("Engine cache", (("max (vllm:kv_cache_usage_perc)", "used"),), RATIO, "Fullest key-value cache.", "100 %: preemptions.",
          "PolicyLagHigh"),
    Panel("Tensor cores and device errors", (("avg (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", "tensor active"),
          ("max (DCGM_FI_DEV_XID_ERRORS)", "last XID")), COUNT, "From the GPU's own exporter, where it is scraped.",
          "an XID that is not 0.",
          "WorkersBelowQuorum", width=24),
)  # fmt: skip

DURABILITY = (
    Panel("Checkpoint age", ((age(newest("checkpoint_last_success_timestamp_seconds")), "age"),
          (f"3 * {newest('checkpoint_interval_seconds')}", "three intervals")), SECONDS, "Since the newest whole checkpoint.",
          "above half an hour and three intervals.", "CheckpointTooOld"),
    Panel("Checkpoint by phase", ((mean("checkpoint_duration_seconds", by="phase"), "{{phase}}"),), SECONDS,
          "Time of one checkpoint.",
          "write or verify grows: storage.", "CheckpointFailing", stacked=True),
    Panel("Checkpoint size", ((newest("checkpoint_size_bytes"), "size"),), BYTES, "Of the newest one.",
          "it changes with the same model.",
          "CheckpointFailing"),
    Panel("Checkpoints that failed", ((increase("checkpoint_failures_total", by="reason"), "{{reason}}"),), COUNT, "By reason.",
          "more than one in half an hour.", "CheckpointFailing", above=2),
    Panel("Recovery time", ((f"histogram_quantile(0.95, {total('recovery_duration_seconds_bucket', by='component, le')})",
          "p95 {{component}}"),), SECONDS,
          "From the start of a replacement until it works again; the processes that live now.", "above two minutes.",
          "RecoverySlow", above=120),
    Panel("Lost to faults", ((total("recovery_lost_gpu_seconds_total", by="component"), "{{component}}"),), SECONDS,
          "GPU-seconds since the start.", "it grows without drills.", "RecoverySlow"),
    Panel("Cost of a sample", ((share(ALL_GPU, rate("rollouts_consumed_total")), "GPU-s per applied sample"),
          (share(f"1000 * {ALL_GPU}", rate("tokens_trained_total")), "GPU-s per 1,000 tokens")), SECONDS,
          "Everything paid for, waste included.", "it grows.", "GpuIdleHigh"),
    Panel("Goodput", ((share(rate("gpu_seconds_total", 'activity=~"generate|train"'), ALL_GPU), "productive"),
          (share(rate("gpu_seconds_total", 'activity="wasted"'), ALL_GPU), "wasted")), RATIO,
          "Share of GPU time that generates or trains what is kept.", "below a half.", "GpuIdleHigh"),
    Panel("Telemetry dropped", ((increase("telemetry_dropped_total", by="signal"), "{{signal}}"),), COUNT,
          "Spans and logs that were not delivered.", "any: the traces have gaps.", "TelemetryDropping", width=12, above=1),
    Panel("Metrics read", (('sum by (role) (scrape_samples_scraped{job="rollbook", run=~"$run"})', "{{role}}"),), COUNT,
          "Series by role.", "a role is missing.", "TargetDown", width=12),
)  # fmt: skip

RECOVERY = (
    Panel("State of the run", ((newest("run_state", by="state"), "{{state}}"),), COUNT, "1 for the state it is in.",
          "recovering without an end.", "RecoverySlow", width=12, stacked=True),
    Panel("Faults seen", ((increase("worker_restarts_total", 'reason!="drain"', by="pool, reason"), "{{pool}}: {{reason}}"),),
          COUNT,
          "Processes that died or were killed, when it was noticed.", "more than was injected.", "WorkerFlapping", width=12,
          bars=True,
          stacked=True),
    Panel("Detection", ((increase("ledger_lease_events_total", 'event=~"expired|requeued|fenced"', by="event"), "{{event}}"),),
          COUNT,
          "Leases taken back and writes refused.", "expired without requeued.", "WorkerFlapping", width=8, bars=True,
          stacked=True),
    Panel("Recoveries ended", ((observed_once("recovery_duration_seconds", by="component"), "{{component}}"),), COUNT,
          "Works again, when it did.", "fewer than faults.", "RecoverySlow", width=8, bars=True, stacked=True),
    Panel("Workers", ((total("workers", by="state"), "{{state}}"), (total("workers_desired"), "desired")), COUNT, "By state.",
          "ready stays below desired.", "WorkersBelowQuorum", width=8),
    Panel("Work done", ((rate("rollouts_consumed_total"), "applied samples"), (rate("rollouts_total", 'outcome="ok"'),
          "rollouts")), RATE,
          "The dent that a fault leaves.", "it stays down.", "LearnerStalled", width=8),
    Panel("Terms", ((total("controller_leader"), "leaders"), (newest("controller_fencing_epoch"), "epoch")), COUNT,
          "Each takeover is one step of the epoch.", "leaders other than 1.", "LeaderCountWrong", width=8),
    Panel("Published versions", ((newest("learner_policy_version"), "version"),), COUNT, "A replay repeats none.", "it falls.",
          "LearnerStalled", width=8),
)  # fmt: skip

SEEN = increase("worker_restarts_total", 'reason!="drain"', by="pool, reason", window="30s") + " > 0"

NOTES = (
    Note("Restart", SEEN,
         "{{pool}}: {{reason}}", "red"),
    Note("New term", f"changes({newest('controller_fencing_epoch', by='run')}[30s:5s]) > 0", "another ledger server leads",
        "orange"),
    Note("Recovered", f"{observed_once('recovery_duration_seconds', by='component', window='30s')} > 0", "{{component}}",
        "green"),
    Note("Checkpoint", f"changes({newest('checkpoint_last_success_timestamp_seconds', by='run')}[30s:5s]) > 0", "committed",
        "blue", enabled=False),
    Note("Version", f"changes({newest('learner_policy_version', by='run')}[30s:5s]) > 0", "published", "purple",
        enabled=False),
)  # fmt: skip
