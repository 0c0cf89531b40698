"""Everything at once: kills of roles, nodes and the database, stops past a term, a bad network, a checkpoint store that is away,
clocks that are wrong; mixed by chance.

``--only kill`` with ``--interval 120`` and ``--ettr-min`` measures what a kill now and then costs.
"""

from __future__ import annotations

import argparse
import signal
import sys

from drills.drill import Drill, main
from drills.faults import FENCED, Fault, kill, possible, stop
from drills.network import CLIENTS, Network
from drills.proxy import TOXICS
from drills.runs import OwnRun, Refused

ROLES = ("worker", "learner", "ledger", "feeder")
KINDS = {"kill": 6, "stop": 2, "network": 3, "disk": 1, "clock": 1}
"""Kinds of fault and how often each, in proportion; a live run gets kills and stops alone."""
STORAGE = {"learner": {"error": "ENOSPC", "below": "/checkpoints/"}, "worker": {"fsync_s": 0.3, "below": "/spool/"}}
"""A checkpoint store that is full, a spool that is slow."""
RATES = (0.8, 1.25)
RARE = {"supervisor": 1, "node": 1}
"""Targets of a kill beside the roles, which count ``OFTEN`` each."""
OFTEN = 2
LASTING_S = (1.0, 8.0)


class Storm(Drill):
    name = "storm"
    claim = (
        "whatever mix of kills, stops and network faults is sent, the run goes on and ends by itself with a clean audit: nothing "
        "acknowledged is lost, nothing is trained twice or too stale, no prompt is skipped"
    )
    count = 50
    interval_s = 15.0
    allowed_deaths = (*((role, FENCED) for role in ROLES), ("learner", "exit code 1"))
    """The learner ends when its checkpoint store is full."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=tuple(KINDS), default="", help="one kind of fault alone")
        parser.add_argument("--roles-only", action="store_true", help="kill single roles, not the supervisor or the node")
        parser.add_argument("--ettr-min", type=float, default=0.0, help="the claim includes an ETTR of at least this")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.network: Network | None = None

    def prepare(self) -> None:
        self.network = Network(self.run)

    def would_do(self) -> list[str]:
        return [line for role in self._targets() for line in possible(self.run, role)]

    def _targets(self) -> dict[str, int]:
        rare = {} if self.args.roles_only else RARE | ({"database": 1} if self.run.server else {})
        return dict.fromkeys(ROLES, OFTEN) | rare

    def strike(self) -> Fault | None:
        kinds = {k: n for k, n in KINDS.items() if self.args.only in ("", k) and (self.run.own or k in ("kill", "stop"))}
        if not kinds:
            raise Refused(f"a live run gets kills and stops alone, not --only {self.args.only}")
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "kill":
            targets = self._targets()
            return kill(self.run, self.chance.choices(list(targets), list(targets.values()))[0], self.chance, True)
        seconds = self.chance.uniform(*LASTING_S)
        if kind == "stop":
            sent = stop(self.run, self.chance.choice(ROLES), self.chance, seconds)
            if sent is None:
                return None
            fault, record = sent
            self.later(seconds, lambda: record.signal(signal.SIGCONT))
            return fault
        if kind in ("disk", "clock"):
            return self._bend(kind, seconds)
        network = self.network
        assert network is not None
        toxic = self.chance.choice(sorted(TOXICS))
        fault = network.strike(self.chance, toxic, seconds, self.chance.choice(CLIENTS))
        self.later(0.0 if toxic == "reset" else seconds, lambda: network.heal(fault.role))
        return fault

    def _bend(self, kind: str, seconds: float) -> Fault:
        """Storage or clocks of a run of its own, for a while."""
        run = self.run
        assert isinstance(run, OwnRun)
        role = self.chance.choice(sorted(STORAGE if kind == "disk" else CLIENTS))
        change = STORAGE[role] if kind == "disk" else {"rate": self.chance.choice(RATES), "offset_s": 3600.0}
        subject = "storage" if kind == "disk" else "clock"
        fault = Fault(role, subject)
        fault.until = fault.at + seconds
        run.tell(subject, {role: change})
        self.later(seconds, lambda: run.tell(subject, {}))
        return fault

    def own_findings(self, result: object) -> list[str]:
        found = self.network.findings() if self.network is not None and any(f.kind in TOXICS for f in self.faults) else []
        ettr = result.numbers.get("ettr")  # type: ignore[attr-defined]
        if self.args.ettr_min and (ettr is None or ettr < self.args.ettr_min):
            found.append(f"ETTR: {ettr} is below {self.args.ettr_min}")
        return found

    def close(self) -> None:
        if self.network is not None:
            self.network.close()


if __name__ == "__main__":
    sys.exit(main(Storm))
