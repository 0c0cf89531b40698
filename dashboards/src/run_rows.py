"""Rows of a run's learning: health, throughput, staleness, off-policy, learning, failures.

Owns which questions are asked first and how their answers are drawn. Never lays anything out.
"""

from __future__ import annotations

from panel_kit import COUNT, RATE, RATIO, SECONDS, Panel
from promql import age, increase, mean, newest, of, over, quantile, quantiles, rate, share, total

OK = rate("rollouts_total", 'outcome="ok"', window="5m")
ALL = rate("rollouts_total", 'outcome=~"ok|failed"', window="5m")
PAID = rate("gpu_seconds_total", window="5m")
READY = total("workers", 'state="ready"')

HEALTH = (
    Panel("State", ((f"{of('run_state')} == 1", "{{state}}"),), COUNT, "What the run says it does.",
          "failed or recovering for minutes.", "LearnerStalled", kind="stat", width=4, by_name=True),
    Panel("Leading ledger servers", ((total("controller_leader"), "leaders"), (newest("controller_fencing_epoch"), "epoch")),
          COUNT,
          "Servers that hold the ledger, and the term of the one that does.",
          "anything but 1 leader; an epoch that grows by itself.",
          "LeaderCountWrong", kind="stat", width=4),
    Panel("Policy version", ((newest("learner_policy_version"), "version"),), COUNT, "Newest published weights.",
          "it stands still.", "MetricsAbsent", kind="stat", width=4),
    Panel("Since the last step", ((age(newest("learner_last_step_timestamp_seconds")), "since"),), SECONDS,
          "Age of the newest finished step.", "15 minutes or more while the run is running.", "LearnerStalled",
          kind="stat", width=4, above=900),
    Panel("Ready of desired workers", ((READY, "ready"), (total("workers_desired"), "desired")), COUNT,
          "Processes that work, and those the configuration asks for.", "fewer than half.", "WorkersBelowQuorum", kind="stat",
          width=4),
    Panel("Rollouts that succeed", ((share(OK, ALL), "ok"),), RATIO, "Share of all rollouts that ended well, over 5 minutes.",
          "below 80 %.", "RolloutFailureRatioHigh", kind="stat", width=4, below=0.8),
    Panel("Age of the checkpoint", ((age(newest("checkpoint_last_success_timestamp_seconds")), "age"),), SECONDS,
          "What a crash would cost now.", "half an hour or three intervals.", "CheckpointTooOld", kind="stat", width=4,
          above=1800),
    Panel("Effective sample size", ((f"min ({of('offpolicy_ess_ratio')})", "ESS"),), RATIO,
          "Share of the samples that carry the update.", "below 30 %.", "EssCollapse", kind="stat", width=4, below=0.3),
    Panel("Alerts firing", (('count(ALERTS{alertstate="firing", run=~"$run"}) or vector(0)', "firing"),), COUNT,
          "Alerts of this run.", "any.", "TargetDown", kind="stat", width=4, above=1),
    Panel("GPU-seconds per applied sample", ((share(PAID, rate("rollouts_consumed_total", window="5m")), "GPU-s"),), SECONDS,
          "Everything paid for, over what was trained.", "it grows while the lengths do not.", "GpuIdleHigh", kind="stat",
          width=4),
    Panel("GPU-seconds per 1,000 tokens", ((share(f"1000 * {PAID}", rate("tokens_trained_total", window="5m")),
          "GPU-s"),),
          SECONDS, "Everything paid for, over the tokens that were trained.", "it grows.", "GpuIdleHigh", kind="stat", width=4),
    Panel("Invariant violations", ((total("ledger_invariant_violations_total"), "violations"),), COUNT,
          "Broken promises of the ledger that the server has found.", "anything but 0.", "LedgerInvariantViolated",
          kind="stat", width=4, above=1),
)  # fmt: skip

THROUGHPUT = (
    Panel("Rollouts by outcome", ((rate("rollouts_total", by="outcome"), "{{outcome}}"),), RATE,
          "Attempts that end, by how; some of the ok ones are dropped later.",
          "failed or stale_dropped is a visible share; all fall to 0.", "RolloutFailureRatioHigh"),
    Panel("Tokens", ((rate("tokens_total", by="kind"), "{{kind}}"),), RATE, "Tokens read and generated a second.",
          "it falls while workers are ready.", "WorkersBelowQuorum"),
    Panel("Produced and consumed", ((rate("rollouts_total", 'outcome="ok"'), "produced"), (rate("rollouts_consumed_total"),
          "consumed")),
          RATE, "Finished rollouts against trained ones.", "the lines part for long: a backlog or waste.", "LedgerBacklog"),
    Panel("Rollout duration", quantiles("rollout_duration_seconds", 'stage="total"'), SECONDS,
          "From lease to answer; points are traces.", "p99 runs away from p50.", "LearnerStarved", exemplars=True),
    Panel("Time by stage", ((mean("rollout_duration_seconds", 'stage!="total"', by="stage"), "{{stage}}"),), SECONDS,
          "Mean time of a rollout in each stage.", "queue or reward longer than generate.", "LearnerStarved", width=8,
          stacked=True),
    Panel("Completion length", quantiles("completion_tokens", qs=(0.5, 0.95)), COUNT, "Generated tokens of a rollout.",
          "it collapses, or sticks to the limit.", "RewardSaturated", width=8),
    Panel("Attempts per rollout", ((mean("rollout_attempts"), "mean"), (quantile(0.95, "rollout_attempts"), "p95")), COUNT,
          "How often a slot was tried until it had a sample.", "well above 1.", "RolloutFailureRatioHigh", width=8),
)  # fmt: skip

STALENESS = (
    Panel("Lag", ((increase("rollout_policy_lag_versions_bucket", by="le"), "{{le}}"),), COUNT,
          "Versions between the one that sampled and the one that trains, by rollouts.", "weight moves to the upper rows.",
          "PolicyLagHigh", kind="heatmap"),
    Panel("Lag against its bound", (*quantiles("rollout_policy_lag_versions", qs=(0.5, 0.95)),
          (newest("policy_lag_bound_versions"), "bound")), COUNT, "Lag and `schedule.max_lag_versions`.", "p95 at the bound.",
          "PolicyLagHigh"),
    Panel("Dropped as stale", ((share(rate("rollouts_total", 'outcome="stale_dropped"'), rate("rollouts_total",
          'outcome="ok"')), "share"),),
          RATIO,
          "Rollouts too old for any plan.", "above 10 %.", "StaleDropRatioHigh", above=0.1),
    Panel("Workers behind the learner", ((f"max by (worker) ({newest('learner_policy_version', by='run')} "
          f"- on (run) group_right () {of('worker_policy_version')})", "{{worker}}"),), COUNT,
          "Versions between the published weights and those each worker generates with.",
          "one line climbs: that worker loads nothing.",
          "WeightSyncFailing"),
)  # fmt: skip

OFF_POLICY = (
    Panel("Importance ratio", ((increase("offpolicy_importance_ratio_bucket", 'level="token"', by="le"), "{{le}}"),), COUNT,
          "Trained over sampled probability, by token.", "it widens away from 1.", "EssCollapse", kind="heatmap", width=8),
    Panel("Effective sample size", ((f"min ({of('offpolicy_ess_ratio')})", "ESS"),), RATIO,
          "Share of the samples that carry the update.", "below 0.3.", "EssCollapse", width=8, below=0.3),
    Panel("Clipped and masked", ((newest("offpolicy_clip_ratio"), "clipped"),
          (share(rate("offpolicy_masked_tokens_total", by="reason"), rate("tokens_trained_total")),
          "masked: {{reason}}")),
          RATIO, "Tokens whose gradient is cut.", "more than a few percent.", "KlBlowUp", width=8),
    Panel("KL", ((newest("offpolicy_kl_nats", by="estimator"), "{{estimator}}"),), COUNT,
          "Nats between the sampling and the trained policy.", "above 0.5.", "KlBlowUp", width=8, above=0.5, from_zero=False),
    Panel("Entropy", ((newest("learner_entropy_nats"), "nats"),), COUNT, "Entropy of the policy by token.",
          "it falls to 0 early.",
          "KlBlowUp", width=8),
    Panel("Versions within a rollout", quantiles("rollout_version_span_versions", qs=(0.5, 0.95)), COUNT,
          "Weight updates while one rollout was generated.", "it follows the lag: rollouts outlive versions.", "PolicyLagHigh",
          width=8),
)  # fmt: skip

LEARNING = (
    Panel("Reward", ((increase("reward_bucket", by="le"), "{{le}}"),), COUNT, "Distribution of rewards.",
          "all in one row.", "RewardSaturated", kind="heatmap", width=8),
    Panel("Mean reward", ((mean("reward", by="env"), "{{env}}"),), COUNT, "By environment.", "it falls, or jumps to the maximum.",
          "RewardSaturated", width=8, from_zero=False),
    Panel("Groups without variance", ((over(rate("reward_group_zero_variance_total", by="env"), rate("reward_groups_total",
          by="env")),
          "{{env}}"),), RATIO, "Groups whose members all have the same reward: they teach nothing.", "above 80 %.",
          "RewardSaturated",
          width=8, above=0.8),
    Panel("Loss", ((newest("learner_loss"), "loss"),), COUNT, "Of the newest step.", "it jumps, or is no number.",
          "NonFiniteLoss",
          width=8, from_zero=False),
    Panel("Gradient norm", ((newest("learner_gradient_norm"), "norm"),), COUNT, "Before clipping.",
          "spikes of ten times the usual.",
          "NonFiniteLoss", width=8),
    Panel("Steps without a finite loss", ((increase("learner_nonfinite_steps_total", by="action"), "{{action}}"),), COUNT,
          "Skipped, or the learner ended.", "any.", "NonFiniteLoss", width=8, above=1),
)  # fmt: skip

FAILURES = (
    Panel("Failures by reason", ((rate("rollout_failures_total", by="reason"), "{{reason}}"),), RATE,
          "Attempts that gave no sample.",
          "one reason grows.", "RolloutFailureRatioHigh", width=8, stacked=True),
    Panel("Rewards not given", ((share(rate("rollout_failures_total", 'reason=~"invalid_reward|sandbox_failure|reward_timeout"'),
          rate("rollouts_total", 'outcome=~"ok|failed"')), "share"),), RATIO,
          "Verifier or sandbox failed: never a reward of 0.", "above 5 %.",
          "RewardFailureRatioHigh", width=8, above=0.05),
    Panel("Reward latency", ((quantile(0.95, "reward_duration_seconds", by="env"), "p95 {{env}}"),), SECONDS,
          "Time of one judgement.", "near its limit.", "RewardFailureRatioHigh", width=8),
    Panel("Dead slots", ((newest("ledger_tasks", 'state="dead"'), "dead"),), COUNT,
          "Slots with a verdict: dropped as stale, failed, cancelled, quarantined.",
          "more than 10 beside the stale ones in half an hour.", "DeadLetterGrowing", width=8),
    Panel("Circuit breaker", ((newest("breaker_state", by="state"), "{{state}}"),), COUNT,
          "Open: nothing is planned and slots are tried one at a time.", "open.", "RewardFailureRatioHigh", width=8),
    Panel("Restarts", ((increase("worker_restarts_total", by="pool, reason"), "{{pool}}: {{reason}}"),), COUNT,
          "Processes started again.", "the same pool again and again.", "WorkerFlapping", width=8, stacked=True, bars=True),
)  # fmt: skip
