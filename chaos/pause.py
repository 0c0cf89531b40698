"""Stops processes of a run for longer than their terms, and wakes them up: nobody who comes late changes anything."""

from __future__ import annotations

import argparse
import signal
import sys

from drills.drill import Drill, main
from drills.faults import FENCED, Fault, possible, stop

ROLES = ("worker", "learner", "ledger", "feeder")
MARGIN_S = 2.0
"""How much longer than its term a role is stopped."""


class Pause(Drill):
    name = "pause"
    claim = (
        "a role that is stopped with SIGSTOP past its term and goes on later is fenced or takes its place again; it writes "
        "nothing that it may not, and nothing is lost, trained twice or too stale"
    )
    interval_s = 16.0
    allowed_deaths = tuple((role, FENCED) for role in ROLES)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--role", choices=(*ROLES, "any"), default="any")
        parser.add_argument("--for", dest="seconds", type=float, default=0.0, help="default: the role's term and two seconds")

    def would_do(self) -> list[str]:
        return [line for role in self._roles() for line in possible(self.run, role)]

    def _roles(self) -> list[str]:
        return [*ROLES] if self.args.role == "any" else [self.args.role]

    def strike(self) -> Fault | None:
        role = self.chance.choice(self._roles())
        ledger = self.run.config.ledger
        term = ledger.lease_ttl_s if role == "worker" else ledger.role_ttl_s
        seconds = self.args.seconds or term + MARGIN_S
        sent = stop(self.run, role, self.chance, seconds)
        if sent is None:
            return None
        fault, record = sent
        self.later(seconds, lambda: record.signal(signal.SIGCONT))
        return fault


if __name__ == "__main__":
    sys.exit(main(Pause))
