"""When each alert fires and when it keeps quiet: series as ``promtool test rules`` writes them, one value a minute.

The quiet case stands at the limit wherever there is one; summaries are written out as a person would read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RUNNING = {'rollbook_run_state{run="r",state="running"}': "1+0x90"}
RECOVERING = {'rollbook_run_state{run="r",state="running"}': "0+0x90",
              'rollbook_run_state{run="r",state="recovering"}': "1+0x90"}  # fmt: skip
"""Somebody has lost the learner's role: the more reason to page."""
ENDED = {'rollbook_run_state{run="r",state="completed"}': "0+0x4 1 stale"}
PAUSED = {'rollbook_run_state{run="r",state="running"}': "0+0x90"}
LABELS = {"run": "r"}


@dataclass(frozen=True)
class Case:
    """One look at one alert; a case without a summary is a quiet one."""

    alert: str
    at: str
    series: dict[str, str]
    summary: str = ""
    labels: dict[str, str] = field(default_factory=dict)


def _rollouts(reason: str = "", failures: int = 0, **per_minute: int) -> dict[str, str]:
    made = {f'rollbook_rollouts_total{{run="r",outcome="{name}"}}': f"0+{n}x90" for name, n in per_minute.items()}
    return made | ({f'rollbook_rollout_failures_total{{run="r",reason="{reason}"}}': f"0+{failures}x90"} if reason else {})


def _buckets(name: str, labels: str, **per_minute: int) -> dict[str, str]:
    les = {key.removeprefix("le").replace("Inf", "+Inf").replace("_", "."): n for key, n in per_minute.items()}
    return {f'{name}_bucket{{run="r",{labels}le="{le}"}}': f"0+{n}x90" for le, n in les.items()}


def _bound(versions: int) -> dict[str, str]:
    return {'rollbook_policy_lag_bound_versions{run="r"}': f"{versions}+0x90"}


def _phases(waiting: int, working: int) -> dict[str, str]:
    name = "rollbook_learner_step_phase_duration_seconds_sum"
    return {f'{name}{{run="r",phase="data_wait"}}': f"0+{waiting}x90",
            f'{name}{{run="r",phase="forward_backward"}}': f"0+{working}x90"}  # fmt: skip


def _recovered(at_min: str) -> dict[str, str]:
    """A ledger server that had recovered when it was scraped for the first time: its counts begin at 1."""
    return {f'{RECOVERY}_bucket{{run="r",component="ledger",le="{le}"}}': f"_x{at_min} {n}+0x90"
            for le, n in (("60", 0), ("300", 1), ("+Inf", 1))}  # fmt: skip


def _gpu(idle: int, busy: int) -> dict[str, str]:
    name = "rollbook_gpu_seconds_total"
    return {f'{name}{{run="r",pool="actor",activity="idle"}}': f"0+{idle}x90",
            f'{name}{{run="r",pool="actor",activity="generate"}}': f"0+{busy}x90"}  # fmt: skip


def _workers(ready: int) -> dict[str, str]:
    return RUNNING | {
        'rollbook_workers{run="r",pool="actor",state="ready"}': f"{ready}+0x90",
        'rollbook_workers{run="r",pool="actor",state="starting"}': f"{4 - ready}+0x90",
        'rollbook_workers_desired{run="r",pool="actor"}': "4+0x90",
    }


def _groups(flat: int) -> dict[str, str]:
    return {'rollbook_reward_group_zero_variance_total{run="r",env="sums"}': f"0+{flat}x90",
            'rollbook_reward_groups_total{run="r",env="sums"}': "0+10x90"}  # fmt: skip


def _checkpoints(interval_s: int) -> dict[str, str]:
    return {'rollbook_checkpoint_last_success_timestamp_seconds{run="r"}': "1+0x90",
            'rollbook_checkpoint_interval_seconds{run="r"}': f"{interval_s}+0x90"}  # fmt: skip


UP = 'up{job="rollbook",run="r",role="learner",instance="127.0.0.1:9000"}'
LEADER = 'rollbook_controller_leader{run="r",instance="%s"}'
STEPS = 'rollbook_learner_steps_total{run="r"}'
VIOLATIONS = 'rollbook_ledger_invariant_violations_total{run="r",check="submit_conflict"}'
NONFINITE = 'rollbook_learner_nonfinite_steps_total{run="r",action="skipped"}'
UNSAVED = 'rollbook_checkpoint_failures_total{run="r",reason="storage"}'
KL = 'rollbook_offpolicy_kl_nats{run="r",estimator="k3"}'
ESS = 'rollbook_offpolicy_ess_ratio{run="r"}'
LAG = "rollbook_rollout_policy_lag_versions"
BOUND = _bound(8)
AGE = 'rollbook_ledger_oldest_task_age_seconds{run="r",state="%s"}'
RESTARTS = 'rollbook_worker_restarts_total{run="r",pool="actor",reason="%s"}'
SERVERS = 'rollbook_worker_restarts_total{run="r",pool="ledger",reason="crash",instance="%s"}'
"""Each server counts what all of them did, at an address of its own."""
UNSYNCED = 'rollbook_weight_sync_failures_total{run="r",reason="digest"}'
CONFLICTS = 'rollbook_ledger_transaction_errors_total{run="r",op="write",class="deadlock"}'
DEAD = 'rollbook_slots_dropped_total{run="r",reason="%s"}'
WRITES = "rollbook_ledger_transaction_duration_seconds"
RECOVERY = "rollbook_recovery_duration_seconds"
DROPPED = 'rollbook_telemetry_dropped_total{run="r",signal="traces"}'

CASES = (
    Case("TargetDown", "10m", {UP: "1+0x5 0+0x9"}, "learner of run r at 127.0.0.1:9000 does not answer",
         {"job": "rollbook", "role": "learner", "instance": "127.0.0.1:9000"} | LABELS),
    Case("TargetDown", "9m", {UP: "1+0x7 0 0"}),
    Case("TargetDown", "20m", ENDED | {UP: "1+0x5 0+0x20"}),
    Case("MetricsAbsent", "6m", {UP: "1+0x9"}, "no learner exports its policy version"),
    Case("MetricsAbsent", "6m", {'rollbook_learner_policy_version{run="r"}': "3+0x9"}),
    Case("LeaderCountWrong", "5m", {LEADER % "a": "1+0x9", LEADER % "b": "1+0x9"}, "run r has 2 leading ledger servers", LABELS),
    Case("LeaderCountWrong", "5m", {LEADER % "a": "0+0x9", LEADER % "b": "0+0x9"}, "run r has 0 leading ledger servers", LABELS),
    Case("LeaderCountWrong", "5m", {LEADER % "a": "1+0x9", LEADER % "b": "0+0x9"}),
    Case("LeaderCountWrong", "5m", {LEADER % "a": "1 1 stale", UP: "1+0x9"}, "run r has 0 leading ledger servers", LABELS),
    Case("LeaderCountWrong", "20m", ENDED | {LEADER % "a": "1+0x5 stale", UP: "1+0x5 0+0x20"}),
    Case("LedgerInvariantViolated", "8m", {VIOLATIONS: "0+0x5 1+0x9"}, "run r violates submit_conflict",
         {"check": "submit_conflict"} | LABELS),
    Case("LedgerInvariantViolated", "8m", {VIOLATIONS: "_x5 1+0x9"}, "run r violates submit_conflict",
         {"check": "submit_conflict"} | LABELS),
    Case("LedgerInvariantViolated", "8m", {VIOLATIONS: "0+0x20"}),
    Case("LearnerStalled", "25m", RUNNING | {STEPS: "50+0x90"}, "run r has finished no step for 15 minutes", LABELS),
    Case("LearnerStalled", "25m", RECOVERING | {STEPS: "50+0x90"}, "run r has finished no step for 15 minutes", LABELS),
    Case("LearnerStalled", "25m", RUNNING | {STEPS: "50+1x90"}),
    Case("LearnerStalled", "14m", RUNNING | {STEPS: "50+0x90"}),
    Case("LearnerStalled", "25m", PAUSED | {STEPS: "50+0x90"}),
    Case("NonFiniteLoss", "12m", {NONFINITE: "0+0x9 1+0x9"}, "run r met a loss or gradient that is no number (skipped)",
         {"action": "skipped"} | LABELS),
    Case("NonFiniteLoss", "12m", {NONFINITE: "1+0x20"}),
    Case("CheckpointTooOld", "40m", RUNNING | _checkpoints(300), "the newest checkpoint of run r is 39m 59s old", LABELS),
    Case("CheckpointTooOld", "40m", RECOVERING | _checkpoints(300), "the newest checkpoint of run r is 39m 59s old", LABELS),
    Case("CheckpointTooOld", "40m", RUNNING | _checkpoints(900)),
    Case("CheckpointTooOld", "40m", PAUSED | _checkpoints(300)),
    Case("CheckpointFailing", "15m", {UNSAVED: "0+0x5 1 2+0x20"}, "checkpoints of run r fail: storage",
         {"reason": "storage"} | LABELS),
    Case("CheckpointFailing", "15m", {UNSAVED: "0+0x5 1+0x20"}),
    Case("WorkersBelowQuorum", "12m", _workers(1), "25% of the actor pool of run r is ready", {"pool": "actor"} | LABELS),
    Case("WorkersBelowQuorum", "12m", _workers(1) | RECOVERING, "25% of the actor pool of run r is ready",
         {"pool": "actor"} | LABELS),
    Case("WorkersBelowQuorum", "12m", _workers(2)),
    Case("EssCollapse", "12m", {ESS: "0.2+0x90"}, "effective sample size of run r is 20%", LABELS),
    Case("EssCollapse", "12m", {ESS: "0.3+0x90"}),
    Case("KlBlowUp", "7m", {KL: "0.8+0x90"}, "KL of run r is 0.80 nats (k3)", {"estimator": "k3"} | LABELS),
    Case("KlBlowUp", "7m", {KL: "0.5+0x90"}),
    Case("StaleDropRatioHigh", "40m", _rollouts(ok=8, stale_dropped=2), "25% of the rollouts of run r are dropped as stale",
        LABELS),
    Case("StaleDropRatioHigh", "40m", _rollouts(ok=10, stale_dropped=1)),
    Case("PolicyLagHigh", "40m", BOUND | _buckets(LAG, "", le8=80, le16=100, leInf=100),
         "lag of run r is 14.0 versions at the 95th percentile", LABELS),
    Case("PolicyLagHigh", "40m", BOUND | _buckets(LAG, "", le4=10, le8=100, leInf=100)),
    *(Case("PolicyLagHigh", "40m", _bound(bound) | _buckets(LAG, "", **{f"le{below}": 0, f"le{edge}": 100}, leInf=100))
      for bound, below, edge in ((1, 0, 1), (5, 4, 6), (7, 6, 8), (9, 8, 12), (13, 12, 16), (17, 16, 32))),
    Case("PolicyLagHigh", "40m", _bound(5) | _buckets(LAG, "", le6=0, le8=100, leInf=100),
         "lag of run r is 7.9 versions at the 95th percentile", LABELS),
    Case("LedgerBacklog", "12m", {AGE % "ready": "601+0x90"}, "the oldest finished rollout of run r has waited 10m 1s", LABELS),
    Case("LedgerBacklog", "12m", {AGE % "ready": "600+0x90", AGE % "leased": "900+0x90"}),
    Case("LearnerStarved", "25m", _phases(30, 20), "the learner of run r waits for rollouts 60% of the time", LABELS),
    Case("LearnerStarved", "25m", _phases(20, 21)),
    Case("RolloutFailureRatioHigh", "25m", _rollouts(ok=6, failed=4), "40% of the rollouts of run r fail", LABELS),
    Case("RolloutFailureRatioHigh", "25m", _rollouts(ok=9, failed=2)),
    Case("RewardFailureRatioHigh", "25m", _rollouts("reward_timeout", 1, ok=9, failed=1),
         "10% of the rewards of run r are not given", LABELS),
    Case("RewardFailureRatioHigh", "25m", _rollouts("engine_error", 1, ok=9, failed=1)),
    Case("RewardSaturated", "65m", _groups(9), "90% of the groups of sums in run r teach nothing", {"env": "sums"} | LABELS),
    Case("RewardSaturated", "65m", _groups(7)),
    Case("WorkerFlapping", "20m", {RESTARTS % "crash": "0 1 2 3 4 5 6+0x40"},
        "the actor pool of run r restarted 6 times in 30 minutes",
         {"pool": "actor"} | LABELS),
    Case("WorkerFlapping", "35m", {SERVERS % "a": "0+0x9 stale", SERVERS % "b": "_x10 6+0x40"},
         "the ledger pool of run r restarted 6 times in 30 minutes", {"pool": "ledger"} | LABELS),
    Case("WorkerFlapping", "20m", {RESTARTS % "crash": "0 1 2 3 4 5+0x40", RESTARTS % "drain": "0+1x40"}),
    Case("WeightSyncFailing", "10m", {UNSYNCED: "0 1 2 3+0x40"}, "workers of run r failed to load weights 3 times in 15 minutes",
         LABELS),
    Case("WeightSyncFailing", "10m", {UNSYNCED: "0 1 2+0x40"}),
    Case("LedgerTransactionErrors", "20m", {CONFLICTS: "0+12x90"}, "write of run r fails 0.20 times a second in the database",
         {"op": "write"} | LABELS),
    Case("LedgerTransactionErrors", "20m", {CONFLICTS: "0+5x90"}),
    Case("LedgerSlow", "15m", _buckets(WRITES, 'op="write",', le0_5=40, le2_5=100, leInf=100),
         "the database of run r takes 2.3 s for a commit at the 95th percentile", LABELS),
    Case("LedgerSlow", "15m", _buckets(WRITES, 'op="write",', le0_5=99, le2_5=100, leInf=100)),
    Case("DeadLetterGrowing", "35m", {DEAD % "failed": "4+0x9 15+0x40"}, "11 more slots of run r were given up in 30 minutes",
        LABELS),
    Case("DeadLetterGrowing", "35m", {DEAD % "failed": "4+0x9 14+0x40", DEAD % "dropped_stale": "0+9x50"}),
    Case("RecoverySlow", "60m", _buckets(RECOVERY, 'component="learner",', le60=0, le300=1, leInf=1),
         "recovery of the learner of run r takes 4m 48s", {"component": "learner"} | LABELS),
    Case("RecoverySlow", "60m", {f'{RECOVERY}_bucket{{run="r",component="learner",instance="b",le="{le}"}}': f"_x50 {n}+0x20"
                                 for le, n in (("60", 0), ("300", 1), ("+Inf", 1))},
         "recovery of the learner of run r takes 4m 48s", {"component": "learner"} | LABELS),
    Case("RecoverySlow", "60m", _buckets(RECOVERY, 'component="learner",', le60=1, le120=1, leInf=1)),
    Case("RecoverySlow", "60m", _recovered("20"), "recovery of the ledger of run r takes 4m 48s",
         {"component": "ledger"} | LABELS),
    Case("RecoverySlow", "85m", _recovered("20")),
    Case("GpuIdleHigh", "80m", _gpu(30, 20), "GPUs of run r idle 60% of the time", LABELS),
    Case("GpuIdleHigh", "80m", _gpu(20, 21)),
    Case("TelemetryDropping", "25m", {DROPPED: "0+1x90"}, "run r drops traces", {"signal": "traces"} | LABELS),
    Case("TelemetryDropping", "25m", {DROPPED: "7+0x90"}),
)  # fmt: skip

HEALTHY: dict[str, str] = (
    RUNNING | {LEADER % "a": "1+0x90", LEADER % "b": "0+0x90", UP: "1+0x90", STEPS: "0+2x90", VIOLATIONS: "0+0x90",
        NONFINITE: "0+0x90"}
    | {'rollbook_learner_policy_version{run="r"}': "0+2x90",
        'rollbook_checkpoint_last_success_timestamp_seconds{run="r"}': "1+60x90"}
    | {'rollbook_checkpoint_interval_seconds{run="r"}': "60+0x90", UNSAVED: "0+0x90", ESS: "0.9+0x90", KL: "0.01+0x90"}
    | _workers(4) | _rollouts("reward_timeout", 0, ok=50, failed=1, stale_dropped=1) | BOUND | _phases(5,
        50) | _groups(2) | _gpu(5, 50)
    | _buckets(LAG, "", le1=90, le2=100, leInf=100) | {AGE % "ready": "3+0x90", RESTARTS % "crash": "0+0x90", UNSYNCED: "0+0x90"}
    | _buckets(WRITES, 'op="write",', le0_025=90, le0_5=100, leInf=100)
    | {CONFLICTS: "0+0x90", DEAD % "failed": "0+0x90", DROPPED: "0+0x90"}
    | _buckets(RECOVERY, 'component="learner",', le60=0, le300=0, leInf=0)
)  # fmt: skip
"""A run without a fault: nothing may fire."""
