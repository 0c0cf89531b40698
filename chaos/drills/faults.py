"""Faults as they are sent, and what of a run may be killed or stopped: a role, its children, a whole node.

Owns the choice of victims. Never names a process that the run's table (or, for a node, that node) does not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drills.placed import placed_nodes
from drills.proc import descendants
from drills.runs import OwnRun, Run
from rollbook.supervise.process import ProcessRecord

ROLES = ("worker", "engine", "learner", "learner-rank", "ledger", "standby", "feeder", "supervisor", "database")
RANKS_FILE = "learner/ranks.json"
"""Where a learner of several ranks says which processes they are; below the run directory."""
DIES_BY_KILL = "killed by SIGKILL"
ENDS_ITSELF = "exit code 1"
FENCED = "exit code 3"
NODE_LOST = "node lost"


@dataclass
class Fault:
    """One disturbance that was sent."""

    role: str
    kind: str
    """``sigkill``, ``sigstop``, a failpoint, or what a proxy, a disk or a clock did."""
    at: float = field(default_factory=time.time)
    victims: dict[str, str] = field(default_factory=dict)
    """Name to incarnation of the recorded processes it hit."""
    n_processes: int = 0
    until: float | None = None
    """When it was over; None for what is over at once."""
    may_cost: tuple[tuple[str, str], ...] = ()
    """(role, how) of deaths that it may bring about."""
    detected_s: float | None = None
    new_rollout_s: float | None = None
    new_step_s: float | None = None

    def __str__(self) -> str:
        hit = ", ".join(self.victims) if self.role not in ("supervisor", "node") else ""
        return f"{self.kind} {self.role}" + (f" ({hit})" if hit else "")


class Node(Protocol):
    """A machine of the run, or what stands for one: killed and joined again as a whole."""

    name: str

    def pids(self) -> list[int]:
        """Every live process of it."""

    def kill(self) -> int:
        """SIGKILL all of it; returns how many processes there were."""

    def rejoin(self) -> None:
        """Bring it back."""


class LocalNode:
    """The one node of a local run: its supervisor and every role."""

    name = "local"

    def __init__(self, run: Run) -> None:
        self.run = run

    def pids(self) -> list[int]:
        supervisor = self.run.supervisor_pid()
        return ([supervisor] if supervisor else []) + [pid for record in self.run.alive() for pid in record.tree()]

    def kill(self) -> int:
        """As a power cut: the roles first, so that the supervisor is not given the time to tell."""
        supervisor = self.run.supervisor_pid()
        alive = self.run.alive()
        n = len(alive) + (supervisor is not None)
        for record in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
        if supervisor:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGKILL)
        for record in alive:
            record.kill_tree()
        return n

    def rejoin(self) -> None:
        self.run.supervise_again()


def nodes_of(run: Run) -> list[Node]:
    """The nodes the run is placed on: raylets, but never the head of a drill's own cluster; else this machine."""
    if isinstance(run, OwnRun) and run.cluster is not None:
        return [*run.cluster.workers]
    return [*placed_nodes(run.dir, run.rejoin)] or [LocalNode(run)]


def possible(run: Run, role: str) -> list[str]:
    """One line per process that a strike at ``role`` may kill now."""
    if role == "node":
        return [f"node {node.name}: pid {', '.join(map(str, node.pids()))}" for node in nodes_of(run)]
    if role == "supervisor":
        pid = run.supervisor_pid()
        return [f"supervisor: pid {pid}"] if pid else []
    if role == "database":
        return [f"database: the PostgreSQL server in {run.server.root}"] if run.server else []
    if role == "engine":
        return [f"{r.name}'s child: pid {pid}" for r in run.alive("worker") for pid in descendants(r.pid)]
    if role == "learner-rank":
        return [f"rank {rank} of the learner: pid {pid}" for rank, pid in sorted(other_ranks(run).items())]
    return [f"{r.name}: pid {r.pid}" for r in run.alive(role)]


def other_ranks(run: Run) -> dict[int, int]:
    """Rank to pid of the live learner's ranks but 0: those it has recorded and that are its children; none with one rank."""
    found: dict[int, int] = {}
    for record in run.alive("learner"):
        below = descendants(record.pid)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stated = json.loads((run.dir / RANKS_FILE).read_text())
            if stated["incarnation"] == record.incarnation:
                found |= {int(entry["rank"]): int(entry["pid"]) for entry in stated["ranks"] if entry["pid"] in below}
    return found


def kill(run: Run, role: str, chance: random.Random, one: bool) -> Fault | None:
    """SIGKILL every process of a role, or one of them by chance; None when none of it lives at this moment."""
    if role == "node":
        return _kill_node(run, chance.choice(nodes_of(run)))
    if role == "supervisor":
        return _kill_supervisor(run)
    if role == "database":
        return _kill_database(run)
    if role == "engine":
        return _kill_children(run, chance, one)
    if role == "learner-rank":
        return _kill_rank(run, chance)
    alive = run.alive(role)
    if one and alive:
        alive = [chance.choice(sorted(alive, key=lambda r: r.name))]
    fault = _fault(role, "sigkill", alive)
    for record in alive:
        if record.alive():
            fault.n_processes += len(record.tree())
            record.kill_tree()
    return fault if fault.n_processes else None


def _fault(role: str, kind: str, records: Sequence[ProcessRecord]) -> Fault:
    victims = {record.name: record.incarnation for record in records}
    cost = tuple((name.partition("-")[0], DIES_BY_KILL) for name in victims)
    return Fault(role, kind, victims=victims, may_cost=cost)


def _kill_supervisor(run: Run) -> Fault | None:
    pid = run.supervisor_pid()
    if pid is None:
        return None
    fault = _fault("supervisor", "sigkill", run.alive())
    os.kill(pid, signal.SIGKILL)
    fault.n_processes = 1
    run.supervise_again()
    return fault


def _kill_node(run: Run, node: Node) -> Fault | None:
    tree = set(node.pids())
    fault = _fault("node", "sigkill", [record for record in run.alive() if record.pid in tree])
    fault.may_cost += tuple((role, NODE_LOST) for role, _ in fault.may_cost)
    fault.n_processes = node.kill()
    if not fault.n_processes:
        return None
    node.rejoin()
    return fault


def _kill_database(run: Run) -> Fault | None:
    if run.server is None:
        return None
    cost: tuple[tuple[str, str], ...] = (("ledger", ENDS_ITSELF),)
    if run.config.ledger.standbys:  # one takes over when the database is away for longer than a term
        cost += (("ledger", FENCED),)
    fault = Fault("database", "sigkill", may_cost=cost)
    fault.n_processes = run.server.kill()
    run.server.start_again()
    return fault


def _kill_children(run: Run, chance: random.Random, one: bool) -> Fault | None:
    """Children of workers alone: the worker has to notice."""
    found = {record: descendants(record.pid) for record in run.alive("worker")}
    holders = [record for record, pids in found.items() if pids]
    if one and holders:
        holders = [chance.choice(sorted(holders, key=lambda r: r.name))]
    if not holders:
        return None
    fault = _fault("engine", "sigkill", holders)
    fault.may_cost = tuple(("worker", how) for _ in holders for how in (ENDS_ITSELF, DIES_BY_KILL))
    for record in holders:
        for pid in found[record]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                fault.n_processes += 1
    return fault


def _kill_rank(run: Run, chance: random.Random) -> Fault | None:
    """One rank of the learner but 0, by chance: rank 0 has to notice, and all of them start again."""
    ranks = other_ranks(run)
    holders = run.alive("learner")
    if not ranks or not holders:
        return None
    fault = _fault("learner-rank", "sigkill", holders)
    fault.may_cost = (("learner", ENDS_ITSELF),)
    fault.n_processes = 1
    try:
        os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return fault


def stop(run: Run, role: str, chance: random.Random, seconds: float) -> tuple[Fault, ProcessRecord] | None:
    """SIGSTOP one process of a role; the caller sends SIGCONT. None when none of it lives."""
    alive = sorted(run.alive(role), key=lambda r: r.name)
    if not alive:
        return None
    record = chance.choice(alive)
    fault = _fault(role, "sigstop", [record])
    fault.may_cost, fault.n_processes = ((role, FENCED),), 1
    fault.until = fault.at + seconds
    return (fault, record) if record.signal(signal.SIGSTOP) else None
