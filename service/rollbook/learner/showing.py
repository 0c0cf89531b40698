"""What the learner shows of its steps: gauges of the newest one, times of phases, tokens it left out, time it spent again.

Owns which of a step's metrics goes where. Never computes one (``trainer``, ``diagnostics``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.core.host import host
from rollbook.learner.diagnostics import DiagnosticsAccumulator
from rollbook.learner.interval import Interval
from rollbook.observe import failures
from rollbook.observe import metrics as shown

_GAUGES = {
    "loss": shown.LEARNER_LOSS,
    "grad_norm": shown.LEARNER_GRADIENT_NORM,
    "entropy_mean": shown.LEARNER_ENTROPY_NATS,
    "lr": shown.LEARNER_LEARNING_RATE,
    "ess_token_applied_fraction": shown.OFFPOLICY_ESS_RATIO,
}


def show_step(metrics: Mapping[str, Any]) -> None:
    """Set the gauges from a step's metrics; one that is missing or not finite keeps its value of the step before."""
    for name, gauge in _GAUGES.items():
        if (value := metrics.get(name)) is not None:
            gauge.set(value)
    for estimator in ("k1", "k2", "k3"):
        if (value := metrics.get(f"kl_behaviour_old_{estimator}")) is not None:
            shown.OFFPOLICY_KL_NATS.labels(estimator).set(value)
    low, high = (metrics.get(f"clip_{side}_fraction") for side in ("low", "high"))
    if low is not None and high is not None:
        shown.OFFPOLICY_CLIP_RATIO.set(low + high)
    if (rejected := metrics.get("rejected_fraction")) and metrics.get("tokens"):
        shown.OFFPOLICY_MASKED_TOKENS_TOTAL.labels("ratio_high").inc(rejected * metrics["tokens"])


def show_phases(seconds: Mapping[str, float]) -> None:
    """Observe how long a step spent in each phase; one it did not have is left out."""
    for phase, value in seconds.items():
        if value > 0:
            shown.STEP_PHASE_DURATION_SECONDS.labels(phase).observe(value)


def show_ratios(diagnostics: DiagnosticsAccumulator, metrics: Mapping[str, Any]) -> None:
    """Add a step's importance ratios to their histogram."""
    bounds = shown.spec_of("offpolicy_importance_ratio").buckets
    shown.OFFPOLICY_IMPORTANCE_RATIO.add(diagnostics.ratio_counts(bounds), metrics["rho_mean"] * metrics["tokens"])


def show_replayed(config: Config, seconds: float) -> None:
    """Device time that went into a step the ledger knows already."""
    devices = config.learner.ranks if config.learner.device == "cuda" else 1
    shown.GPU_SECONDS_TOTAL.labels("learner", "wasted").inc(seconds * devices)
    shown.RECOVERY_LOST_GPU_SECONDS_TOTAL.labels("learner").inc(seconds * devices)


def show_checkpoint(n_bytes: int, interval: Interval) -> None:
    """The newest checkpoint's size, and the time until the next one where steps have been timed."""
    shown.CHECKPOINT_SIZE_BYTES.set(n_bytes)
    if interval.step_s is not None:
        shown.CHECKPOINT_INTERVAL_SECONDS.set(interval.steps * interval.step_s)


@contextmanager
def timed_checkpoint(phase: str) -> Iterator[None]:
    """Observe one phase of a checkpoint; one that fails is noted by its reason."""
    began = host().monotonic()
    try:
        yield
    except Exception as error:
        reason = "storage" if isinstance(error, OSError) else "ledger" if isinstance(error, RollbookError) else "other"
        failures.note(failures.CHECKPOINT, reason, f"{type(error).__name__}: {error}")
        raise
    shown.CHECKPOINT_DURATION_SECONDS.labels(phase).observe(host().monotonic() - began)
