"""Disturbs the network between the roles of a run and its ledger server: slow, narrow, cut into slices, reset, half-open, gone.

Every byte goes over a proxy on loopback (``drills/proxy.py``). What a partition has held back arrives when it is over, as late as
that: the server answers from its rows.
"""

from __future__ import annotations

import argparse
import signal
import sys

from drills.drill import Drill, main
from drills.faults import FENCED, Fault
from drills.network import CLIENTS, Network
from drills.proxy import TOXICS


class Partition(Drill):
    name = "partition"
    claim = (
        "however the network between a role and the ledger server behaves, calls are repeated under their keys and late ones "
        "change nothing: nothing is lost, trained twice or too stale, and the run goes on when the network does"
    )
    interval_s = 8.0
    allowed_deaths = tuple((role, FENCED) for role in CLIENTS)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--toxic", choices=(*TOXICS, "any"), default="any")
        parser.add_argument("--role", choices=(*CLIENTS, "any"), default="any", help="whose network; of a live run everybody's")
        parser.add_argument("--lasting", type=float, default=5.0, help="seconds of one disturbance")

    def prepare(self) -> None:
        self.network = Network(self.run)

    def would_do(self) -> list[str]:
        if self.run.own:
            return [f"{role}: its connections to the ledger server" for role in CLIENTS]
        servers = [f"ledger once: pid {record.pid}" for record in self.run.alive("ledger")]
        return ["every client's connections to the ledger server", *servers]

    def on_turn(self) -> None:
        if hasattr(self, "network"):
            self.network.look()

    def strike(self) -> Fault | None:
        if not hasattr(self, "network"):  # a live run: its clients find the proxy when they have lost their server
            self.network = Network(self.run)
            fault = Fault("ledger", "sigkill", n_processes=1, may_cost=(("ledger", "killed by SIGKILL"),))
            fault.victims = {record.name: record.incarnation for record in self.run.alive("ledger")}
            return fault if any(record.signal(signal.SIGKILL) for record in self.run.alive("ledger")) else None
        toxic = self.chance.choice(sorted(TOXICS)) if self.args.toxic == "any" else self.args.toxic
        fault = self.network.strike(self.chance, toxic, self.args.lasting, self.args.role)
        self.later(0.0 if toxic == "reset" else self.args.lasting, lambda: self.network.heal(fault.role))
        return fault

    def own_findings(self, result: object) -> list[str]:
        return self.network.findings()

    def own_numbers(self, result: object) -> dict[str, object]:
        return {"connections made through the proxies": self.network.n_connections}

    def close(self) -> None:
        if hasattr(self, "network"):
            self.network.close()


if __name__ == "__main__":
    sys.exit(main(Partition))
