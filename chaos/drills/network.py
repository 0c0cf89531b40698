"""Proxies between the roles of a run and its ledger server: what ``partition`` and ``storm`` disturb.

In a run of the drill's own every role has a proxy to itself. The clients of a live run share one: its address file is made to
name the proxy, and the server is killed once so that they all look there again; at the end the file names the server.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from drills.faults import FENCED, Fault
from drills.proxy import GOOD, TOXICS, Proxy
from drills.runs import OwnRun, Run
from rollbook.rpc.address import FILE_NAME

CLIENTS = ("worker", "learner", "feeder")


class Network:
    """The proxies of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._file = run.dir / FILE_NAME
        self._server = ""
        if isinstance(run, OwnRun):
            self.proxies = {role: Proxy(lambda: _address(self._file)) for role in CLIENTS}
            run.tell("proxy", {role: proxy.address for role, proxy in self.proxies.items()})
        else:
            self.proxies = {"every client": Proxy(lambda: self._server)}
            self.look()

    def look(self) -> None:
        """In a live run: name the proxy again where a new server has named itself."""
        if isinstance(self.run, OwnRun):
            return
        (proxy,) = self.proxies.values()
        try:
            address = _address(self._file)
        except OSError:
            return
        if address != proxy.address:
            self._server = address
            self._write(proxy.address)

    def strike(self, chance: random.Random, toxic: str, seconds: float, role: str = "") -> Fault:
        """Disturb one client role, or ``role``; the caller ends it with ``heal`` after that time."""
        role = role if role in self.proxies else chance.choice(sorted(self.proxies))
        fault = Fault(role, toxic, n_processes=0)
        fault.until = fault.at + (0.0 if toxic == "reset" else seconds)
        fault.may_cost = tuple((r, FENCED) for r in CLIENTS if role in (r, "every client"))
        self.proxies[role].set(TOXICS[toxic])
        return fault

    def heal(self, role: str) -> None:
        """A good network again."""
        self.proxies[role].set(GOOD)

    @property
    def n_connections(self) -> int:
        return sum(proxy.n_connections for proxy in self.proxies.values())

    def findings(self) -> list[str]:
        """A disturbance that nobody could feel has shown nothing."""
        return [] if self.n_connections else ["network: nobody connected through the proxy"]

    def close(self) -> None:
        """Take the proxies out."""
        if not isinstance(self.run, OwnRun) and self._server:
            self._write(self._server)
        for proxy in self.proxies.values():
            proxy.close()

    def _write(self, address: str) -> None:
        temporary = self._file.with_suffix(f".{time.monotonic_ns()}.tmp")
        temporary.write_text(address + "\n")
        temporary.replace(self._file)


def _address(file: Path) -> str:
    """Of the server that holds the role: it is named first. Raises OSError while nobody is named."""
    named = file.read_text().split()
    if not named:
        raise FileNotFoundError(f"{file} names no server")
    return named[0]
