"""How many workers there are, and which role has to give its place: what changes while a run goes on.

Owns scaling to an ordered number or to what fits, workers that are not placed in time, roles on nodes that are leaving, and the
place that a role without which nothing advances takes from a worker. Never starts or judges a role: it changes what the
supervisor wants, and asks roles to go, which is no death.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollbook.core.config import Config
from rollbook.core.errors import Unavailable
from rollbook.supervise.backend import LEDGER, WORKER, Backend
from rollbook.supervise.children import MOVED, RETIRED, YIELDED, Child
from rollbook.supervise.control import CONFIGURED, FILL, WORKERS_MAX

LOOK_S = 1.0
"""How often nodes and orders are looked at."""


class Fleet:
    """The supervisor's view of the nodes and of how many workers are wanted."""

    def __init__(self, config: Config, backend: Backend, emit: Callable[[str], None]) -> None:
        self._config, self._backend, self._emit = config, backend, emit
        self._looked_at = 0.0
        self._waiting_at = 0.0
        self._waiting: dict[str, str] = {}
        self._standbys = {f"{LEDGER}-{i}" for i in range(1, config.ledger.standbys + 1)}
        self._configured = sum(kind.count for kind in config.workers)
        self._wanted: int | str = CONFIGURED

    def tend(self, ledgers: list[Child], children: list[Child], worker: Callable[[int], Child], wanted: int | str) -> None:
        """Look around, at most every ``LOOK_S``: adds workers to ``children`` and asks others to go, ledger servers too."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if wanted == CONFIGURED:
            wanted = self._config.cluster.workers if self._config.cluster.workers == FILL else self._configured
        self._scale(children, worker, wanted)
        everybody = [*ledgers, *children]
        self._leave(everybody)
        self._yield(everybody)
        for child in everybody:
            if child.leaving and child.process is not None and now >= child.kill_at:
                self._emit(f"{child.name} did not stop within {self._config.supervisor.drain_s:.0f} s; killing it")
                child.kill_at = now + self._config.supervisor.drain_s
                child.process.kill()

        self._backend.keep({child.name for child in everybody if not child.finished})

    def waiting(self, children: list[Child]) -> dict[str, str]:
        """What each role waits for that no node has to spare, by name, as known at most ``LOOK_S`` ago.

        Raises: Unavailable when a role without which nothing advances has waited longer than ``cluster.wait_for_resources_s``.
        """
        if time.monotonic() - self._waiting_at < LOOK_S:
            return self._waiting
        self._waiting_at = time.monotonic()
        waits = {c.name: (c, c.process.waiting_s(), c.process.waits_for()) for c in children if c.process is not None}
        self._waiting = {name: why for name, (_, _, why) in waits.items() if why}
        bound_s = self._config.cluster.wait_for_resources_s
        late = {name for name, (_, waited_s, why) in waits.items() if why and waited_s > bound_s > 0}
        workers = [c for c in children if c.kind == WORKER and not c.finished]
        is_vital = [c.name in late and c.kind != WORKER and c.name not in self._standbys for c in children]
        if any(is_vital) or (workers and all(c.name in late for c in workers)):
            reasons = "; ".join(f"{name} {self._waiting[name]}" for name in sorted(late))
            raise Unavailable(f"nothing advances, and nodes were waited for {bound_s:g} s: {reasons}; add nodes, or ask for less")
        return self._waiting

    def _scale(self, children: list[Child], worker: Callable[[int], Child], wanted: int | str) -> None:
        workers = {_index(c): c for c in children if c.kind == WORKER}
        if any(c.finished and not c.retired for c in workers.values()):
            return  # there is nothing left to generate
        active = [c for c in workers.values() if not c.retired]
        n = self._fitting(active, worker) if isinstance(wanted, str) else wanted
        if wanted != self._wanted and (self._wanted != CONFIGURED or n != len(active)):
            self._emit(f"workers wanted: {'as many as fit' if isinstance(wanted, str) else n}")
        self._wanted = wanted
        free = (i for i in range(WORKERS_MAX) if i not in workers or (workers[i].retired and workers[i].finished))
        for index in [next(free) for _ in range(n - len(active))]:
            if index in workers:
                workers[index].finished, workers[index].retired, workers[index].restart_at = False, False, 0.0
            else:
                children.append(worker(index))
            self._emit(f"worker-{index} is added")
        for child in sorted(active, key=lambda c: (not c.is_placed, _index(c)), reverse=True)[: max(0, len(active) - n)]:
            self._emit(f"{child.name} is wanted no more")
            _retire(child, self._config.supervisor.drain_s)

    def _fitting(self, active: list[Child], worker: Callable[[int], Child]) -> int:
        """Workers that have a place, and as many as there is room for; one that found none in time is wanted no more."""
        waits = [c.process.waiting_s() if c.process is not None else 0.0 for c in active]
        patient = [c for c in active if _lacks_s(c) < self._config.cluster.place_s]
        settling = any(waits) or any(c.process is None for c in active)
        room = 0 if settling else self._backend.room(worker(len(active)).needs)
        return min(max(1, len(patient) + room), WORKERS_MAX)

    def _leave(self, children: list[Child]) -> None:
        leaving = {node.id: node.name for node in self._backend.nodes() if node.is_leaving}
        for child in children:
            if child.process is not None and not child.leaving and child.process.node_id() in leaving:
                self._emit(f"{child.name} leaves node {leaving[child.process.node_id()]}, which is drained")
                child.ask_to_go(MOVED, self._config.supervisor.drain_s)

    def _yield(self, children: list[Child]) -> None:
        """A role that finds no place gets one from a worker; a worker that finds none is only told of."""
        for child in children:
            waits_s = child.process.waiting_s() if child.process is not None else 0.0
            if waits_s < self._config.cluster.place_s:
                child.wait_told = child.wait_told and waits_s > 0
                continue
            lacks = child.process.waits_for() if child.process is not None else ""
            if not child.wait_told:
                child.wait_told = True
                self._emit(f"{child.name} {lacks or 'is slow to start where it was placed'}")
            if not lacks:
                continue
            if child.kind == WORKER or any(c.leaving == YIELDED for c in children):
                continue
            able = [c for c in children if c.kind == WORKER and c.is_placed and not c.leaving and c.process is not None]
            if child.needs.gpus:
                able = [c for c in able if c.needs.gpus]
            if able and not self._backend.room(child.needs):
                giver = max(able, key=_index)
                self._emit(f"{giver.name} gives its place to {child.name}, without which nothing advances")
                giver.ask_to_go(YIELDED, self._config.supervisor.drain_s)


def _index(child: Child) -> int:
    return int(child.name.rpartition("-")[2])


def _lacks_s(child: Child) -> float:
    """How long it has found no place; 0 for one whose host is slow to start in the place it has."""
    return child.process.waiting_s() if child.process is not None and child.process.waits_for() else 0.0


def _retire(child: Child, drain_s: float) -> None:
    child.retired = True
    if child.process is None:
        child.finished, child.restart_at = True, None
    else:
        child.ask_to_go(RETIRED, drain_s)
