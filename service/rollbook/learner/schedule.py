"""The learning rate as a pure function of the step.

Owns warm-up and decay. Holds no counter: the position is the step itself, so a resumed or replayed step has the learning
rate it had the first time.
"""

from __future__ import annotations

import math

from rollbook.core.config import LearnerConfig
from rollbook.core.errors import ConfigError

KINDS = ("constant", "linear", "cosine")


def learning_rate(settings: LearnerConfig, step: int, steps: int) -> float:
    """Learning rate of step ``step`` (from 1) of ``steps``: linear warm-up, then constant or a decay to the minimum.

    The last warm-up step has the peak; the last step of a decay has ``lr * lr_min_ratio``.

    Raises:
        ConfigError: unknown schedule.
    """
    if settings.lr_schedule not in KINDS:
        raise ConfigError(f"learner.lr_schedule = {settings.lr_schedule!r}: one of {', '.join(KINDS)}")
    warmup = max(0, settings.warmup_steps)
    if step <= warmup:
        return settings.lr * step / warmup
    if settings.lr_schedule == "constant":
        return settings.lr
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1.0 - share if settings.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return settings.lr * (settings.lr_min_ratio + (1.0 - settings.lr_min_ratio) * left)
