"""Restart policy: budget inside a window, exponential backoff, first cause kept. Pure; the clock is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollbook.core.config import Config, SupervisorConfig
from rollbook.core.records import ResumePoint

EXIT_DONE = 0
"""The work is done: every step is made and, for ``rollbook run``, the audit is clean."""

EXIT_FAILED = 1
"""The run or a check failed; what is printed names the first cause."""

EXIT_CONFIG = 2
"""The configuration or another input is wrong: restarting cannot help."""

EXIT_FENCED = 3
"""A newer holder has the role: this process changes nothing any more."""

EXIT_PAUSED = 4
"""Nothing can go on before an operator has decided: restarting cannot help either."""

EXIT_LATE = 5
"""A role was told to stop and had not ended when its grace (``supervisor.drain_s``) was over; it lost what a crash loses."""

EXIT_STOPPED = 130
"""A role or run was told to stop before its work was done, and ended in good order."""

EXIT_CODES = {
    EXIT_DONE: "done", EXIT_FAILED: "failed", EXIT_CONFIG: "the configuration or another input is wrong",
    EXIT_FENCED: "fenced by a newer holder", EXIT_PAUSED: "paused until an operator decides",
    EXIT_LATE: "told to stop, not ended within its grace", EXIT_STOPPED: "told to stop before the work was done",
}  # fmt: skip
"""Every exit code of a command or role; one that is killed has the signal's."""

_DOUBLINGS_MAX = 30


def is_complete(point: ResumePoint, config: Config) -> bool:
    """Whether every configured step is made and checkpointed, so that no role has anything to do."""
    return bool(point.checkpoints) and point.checkpoints[0].step >= config.run.steps


@dataclass(slots=True)
class RestartPolicy:
    """Decides what to do about one role's deaths.

    A death counts against the budget while it is inside the window, and beyond it until a step has finished after it: a
    role that needs minutes to die and never lets the run advance spends its budget too. A finished step starts the
    backoff again at its beginning.
    """

    config: SupervisorConfig
    deaths: list[tuple[float, str]] = field(default_factory=list)
    """Time and cause of the deaths that count, oldest first."""
    n_deaths: int = 0
    """All deaths seen."""

    @property
    def first_cause(self) -> str:
        """Cause of the oldest death that counts: later deaths are often only its consequences."""
        return self.deaths[0][1] if self.deaths else ""

    def on_death(self, now: float, cause: str, progress_at: float = math.inf) -> float | None:
        """Seconds to wait before the restart, or None when the budget is spent.

        Args:
            now: monotonic seconds.
            progress_at: when the run last finished a step, on the same clock; left out, the window alone decides.
        """
        window_start = now - self.config.restarts_window_s
        self.deaths = [(at, why) for at, why in self.deaths if at > window_start or at > progress_at]
        self.deaths.append((now, cause))
        self.n_deaths += 1
        if len(self.deaths) > self.config.restarts_max:
            return None
        in_a_row = sum(at > progress_at for at, _ in self.deaths) if math.isfinite(progress_at) else len(self.deaths)
        doublings = min(max(0, in_a_row - 1), _DOUBLINGS_MAX)
        return min(self.config.backoff_max_s, self.config.backoff_s * 2**doublings)
