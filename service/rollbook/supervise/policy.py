"""Restart policy: budget inside a window, exponential backoff, first cause kept. Pure; the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.core.config import SupervisorConfig

EXIT_CONFIG = 2
"""Exit code of a role whose configuration is wrong: restarting cannot help."""


@dataclass(slots=True)
class RestartPolicy:
    """Decides what to do about one role's deaths."""

    config: SupervisorConfig
    deaths_at: list[float] = field(default_factory=list)
    first_cause: str = ""
    n_deaths: int = 0

    def on_death(self, now: float, cause: str) -> float | None:
        """Seconds to wait before the restart, or None when the budget is spent.

        The first cause of a streak is kept: later deaths are often only its consequences.
        """
        window_start = now - self.config.restarts_window_s
        self.deaths_at = [t for t in self.deaths_at if t > window_start]
        if not self.deaths_at:
            self.first_cause = cause
        self.deaths_at.append(now)
        self.n_deaths += 1
        if len(self.deaths_at) > self.config.restarts_max:
            return None
        return min(self.config.backoff_max_s, self.config.backoff_s * 2 ** (len(self.deaths_at) - 1))
