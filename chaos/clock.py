"""Sets clocks of roles wrong: wall clocks stepped by minutes and hours, monotonic clocks that run fast or slow.

The clocks are bent in the processes of a run that the drill has started (``drills/hooks``); the product has no switch for it.
The ledger server reads its wall clock when it starts, so a step there comes with a SIGKILL of the server. On PostgreSQL the
database's clock decides, which nothing here can set.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from drills.drill import Drill, main
from drills.faults import Fault, kill
from drills.runs import OwnRun

ROLES = ("ledger", "worker", "learner", "feeder")
STEPS_S = (-3600.0, -600.0, 600.0, 3600.0)
RATES = (0.7, 0.9, 1.1, 1.4)


class Clock(Drill):
    name = "clock"
    claim = (
        "clocks of workers count for nothing, and a ledger server whose clock was set, forward or back, or runs fast or slow, "
        "neither loses nor keeps leases and terms for it: nothing is lost, trained twice or too stale, and the run goes on"
    )
    needs_own_run = "its clocks can be bent only in processes that were started for it"
    clock_is_bent = True
    interval_s = 8.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--role", choices=(*ROLES, "any"), default="any")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._bent: dict[str, dict[str, float]] = {}

    def would_do(self) -> list[str]:
        return [f"{role}: its clocks" for role in ROLES]

    def strike(self) -> Fault | None:
        assert isinstance(self.run, OwnRun)
        role = self.chance.choice(ROLES) if self.args.role == "any" else self.args.role
        if not self.run.alive(role):
            return None
        change: dict[str, Any] = (
            {"offset_s": self.chance.choice(STEPS_S)} if self.chance.random() < 0.5 else {"rate": self.chance.choice(RATES)}
        )
        self._bent[role] = self._bent.get(role, {}) | change
        self.run.tell("clock", self._bent)
        (name, value), = change.items()
        kind = f"{name} {value:+g}" if name == "offset_s" else f"{name} {value:g}"
        if role == "ledger" and name == "offset_s" and (killed := kill(self.run, role, self.chance, True)) is not None:
            killed.kind = f"{kind}, sigkill"
            return killed
        return Fault(role, kind)


if __name__ == "__main__":
    sys.exit(main(Clock))
