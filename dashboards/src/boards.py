"""The four dashboards.

Owns which rows stand on which, and the panels that only one of them has.
"""

from __future__ import annotations

import run_rows as run
import service_rows as service
from panel_kit import BYTES, COUNT, RATE, RATIO, SECONDS, Board, Panel
from promql import age, increase, newest, of, over, rate, total

RUNS = (("run", "label_values(rollbook_run_state, run)", True),)
WORKERS = (
    ("run", "label_values(rollbook_run_state, run)", False),
    ("worker", 'label_values(rollbook_worker_policy_version{run=~"$run"}, worker)', True),
)
ONE = 'worker=~"$worker"'

_COMPARED = (
    Panel("Rollouts", ((rate("rollouts_total", 'outcome="ok"', by="run"), "{{run}}"),), RATE, "That end well.", "0.",
          "WorkersBelowQuorum", width=8),
    Panel("Applied samples", ((rate("rollouts_consumed_total", by="run"), "{{run}}"),), RATE, "Trained exactly once.", "0.",
          "LearnerStalled", width=8),
    Panel("GPU-seconds per applied sample", ((over(rate("gpu_seconds_total", by="run"), rate("rollouts_consumed_total",
          by="run")),
          "{{run}}"),), SECONDS, "Everything paid for.", "one run is dearer than its like.", "GpuIdleHigh", width=8),
    Panel("Policy version", ((newest("learner_policy_version", by="run"), "{{run}}"),), COUNT, "Newest weights.", "a flat line.",
          "LearnerStalled", width=8),
    Panel("Ready share", ((over(total("workers", 'state="ready"', by="run"), total("workers_desired", by="run")), "{{run}}"),),
          RATIO, "Of the desired workers.", "below a half.", "WorkersBelowQuorum", width=8, below=0.5),
    Panel("Age of the checkpoint", ((age(newest("checkpoint_last_success_timestamp_seconds", by="run")), "{{run}}"),), SECONDS,
          "What a crash would cost now.", "half an hour.", "CheckpointTooOld", width=8, above=1800),
)  # fmt: skip

_QUALITY = (
    Panel("Failed share", ((over(rate("rollouts_total", 'outcome="failed"', by="run"), rate("rollouts_total", by="run")),
          "{{run}}"),), RATIO, "Rollouts that failed.", "above 20 %.", "RolloutFailureRatioHigh", width=8, above=0.2),
    Panel("Stale share",
          ((over(rate("rollouts_total", 'outcome="stale_dropped"', by="run"), rate("rollouts_total", 'outcome="ok"', by="run")),
          "{{run}}"),), RATIO, "Too old for any plan.", "above 10 %.", "StaleDropRatioHigh", width=8, above=0.1),
    Panel("Effective sample size", ((f"min by (run) ({of('offpolicy_ess_ratio')})", "{{run}}"),), RATIO, "Of the newest step.",
          "below 0.3.", "EssCollapse", width=8, below=0.3),
    Panel("Waiting learner", ((over(rate("learner_step_phase_duration_seconds_sum", 'phase="data_wait"', by="run"),
          rate("learner_step_phase_duration_seconds_sum", by="run")), "{{run}}"),), RATIO, "Share of its time.", "above 50 %.",
          "LearnerStarved", width=8, above=0.5),
    Panel("Invariant violations", ((total("ledger_invariant_violations_total", by="run"), "{{run}}"),), COUNT,
          "Broken promises.", "any.",
          "LedgerInvariantViolated", width=8, above=1),
    Panel("Targets", (('sum by (run, role) (up{job="rollbook", run=~"$run"})', "{{run}} {{role}}"),), COUNT,
          "Processes that answer.",
          "a line falls.", "TargetDown", width=8),
)  # fmt: skip

_VERSIONS = (
    Panel("Code", ((f"count by (run, version) ({of('build_info')})", "{{run}}: {{version}}"),), COUNT,
          "Processes by version of the code.", "two versions of one run outside an upgrade.", "MetricsAbsent", width=12),
    Panel("Schema", ((newest("ledger_schema_version", by="run"), "{{run}}"),), COUNT, "Of each ledger.",
          "it differs within a fleet.",
          "LedgerTransactionErrors", width=12),
)  # fmt: skip

_WORKER = (
    Panel("Last heartbeat", ((f"time() - max by (worker) ({of('worker_heartbeat_timestamp_seconds', ONE)})", "{{worker}}"),),
          SECONDS,
          "Age of the newest sign of life.", "above `ledger.lease_ttl_s`: its leases are taken back.", "WorkersBelowQuorum",
          width=8),
    Panel("Loaded version", ((f"max by (worker) ({of('worker_policy_version', ONE)})", "{{worker}}"),
          (newest("learner_policy_version"), "published")), COUNT, "Weights each worker generates with.", "one stays behind.",
          "WeightSyncFailing", width=8),
    Panel("Versions behind", ((f"max by (worker) ({newest('learner_policy_version', by='run')} - on (run) group_right () "
          f"{of('worker_policy_version', ONE)})", "{{worker}}"),), COUNT, "Published less loaded.", "above the bound on the lag.",
          "PolicyLagHigh", width=8),
)  # fmt: skip

_POOL = (
    Panel("Memory used", ((f"max by (pool, device) ({of('gpu_memory_used_bytes')})", "{{pool}} {{device}}"),
          (f"max by (pool, device) ({of('gpu_memory_capacity_bytes')})", "capacity {{pool}} {{device}}")), BYTES, "By GPU.",
          "used meets capacity.", "WorkerFlapping", width=8),
    Panel("Workers by state", ((total("workers", by="pool, state"), "{{pool}} {{state}}"),), COUNT, "By pool.",
          "lost or starting stays.",
          "WorkersBelowQuorum", width=8, stacked=True),
    Panel("Restarts", ((increase("worker_restarts_total", by="pool, reason"), "{{pool}}: {{reason}}"),), COUNT, "By reason.",
          "the same one again and again.", "WorkerFlapping", width=8, bars=True, stacked=True),
)  # fmt: skip

BOARDS = (
    Board(
        "rollbook-run-overview", "Rollbook: run overview",
            "One run on one page: is it healthy, what does it cost, what is in its way.",
        (("Run health", run.HEALTH), ("Throughput", run.THROUGHPUT), ("Staleness", run.STALENESS), ("Off-policy", run.OFF_POLICY),
         ("Learning", run.LEARNING), ("Failures", run.FAILURES), ("Ledger", service.LEDGER), ("Learner time",
             service.LEARNER_TIME),
         ("GPUs", service.GPU), ("Durability and cost", service.DURABILITY)),
        service.NOTES,
    ),
    Board(
        "rollbook-recovery-drill", "Rollbook: recovery drill", "A fault, its detection, the recovery, and what they cost.",
        (("Fault, detection, recovery", service.RECOVERY), ("Ledger", service.LEDGER), ("Durability and cost",
            service.DURABILITY)),
        service.NOTES, since="now-30m",
    ),
    Board(
        "rollbook-fleet", "Rollbook: fleet", "Runs side by side.",
        (("Progress and cost", _COMPARED), ("Quality", _QUALITY), ("Versions", _VERSIONS)), variables=RUNS, since="now-6h",
    ),
    Board(
        "rollbook-worker-detail", "Rollbook: worker detail", "One worker, or the pool that it stands in.",
        (("Workers", _WORKER), ("Pools", _POOL)), service.NOTES[:1], variables=WORKERS,
    ),
)  # fmt: skip
