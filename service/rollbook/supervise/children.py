"""One supervised role and what is known of its process.

A record: what is done with a role is decided by ``supervisor`` and ``fleet``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.supervise.backend import NOTHING, Needs, Order, Running
from rollbook.supervise.policy import RestartPolicy

RETIRED, MOVED, YIELDED = "retired", "moved", "yielded"
"""Why a role was asked to go: it is wanted no more, its node is leaving, or another role needs its place."""


@dataclass(slots=True)
class Child:
    """One supervised role."""

    name: str
    kind: str
    argv: list[str]
    policy: RestartPolicy
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    needs: Needs = NOTHING
    process: Running | None = None
    log_offset: int = 0
    """Size of the log when the newest process was started."""
    oom_kills: int = 0
    """What the kernel of this machine had counted then."""
    restart_at: float | None = 0.0
    """Monotonic time of the next start; None while it runs or when it is finished."""
    finished: bool = False
    is_placed: bool = False
    """Its newest process has a place, and that is recorded."""
    leaving: str = ""
    """Why it was asked to go; empty while it is wanted where it is."""
    kill_at: float = 0.0
    """Monotonic time at which a role that was asked to go is killed."""
    retired: bool = False
    """It was finished because it was wanted no more, and may be wanted again."""
    wait_told: bool = False
    """A person knows that it waits for a place."""

    def order(self) -> Order:
        """What the backend is to start."""
        return Order(self.name, self.kind, tuple(self.argv), self.env, self.log, self.needs)

    def ask_to_go(self, why: str, drain_s: float) -> None:
        """SIGTERM now, SIGKILL after the grace; its end is then no death."""
        self.leaving, self.kill_at = why, time.monotonic() + drain_s
        if self.process is not None:
            self.process.terminate()

    def goes(self, wait_s: float = 2.0) -> bool:
        """Whether its end was asked for; then it is finished, or starts again elsewhere (a moment later where it has yielded)."""
        why, self.leaving = self.leaving, ""
        if why == RETIRED:
            self.finished, self.restart_at = True, None
        elif why:
            self.restart_at = time.monotonic() + (wait_s if why == YIELDED else 0.0)
        return bool(why)
