"""What goes wrong in a simulated run: one method per kind of fault, drawn by the seed.

Owns the faults that strike from outside. Crashes inside, at failpoints, are the world's (``World.cross``).
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rollbook.ledger.dialects import Database
from rollbook.supervise.policy import RestartPolicy
from simulation.disk import Disk
from simulation.faults import DatabaseFaults
from simulation.kernel import Kernel
from simulation.machine import Process
from simulation.network import Network
from simulation.options import Options


class OpenedDatabase(Database):
    """A database opened by a simulated process."""

    faults: DatabaseFaults | None = None
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


@dataclass
class Role:
    """One role under the supervisor."""

    name: str
    main: Callable[[Process], None]
    restarts: RestartPolicy
    process: Process | None = None
    zombies: int = 0
    finished: bool = False
    last_incarnation: str = ""
    wall_offset_s: float = 0.0


class Nemesis:
    """The faults; ``World`` is what they strike."""

    options: Options
    kernel: Kernel
    rng: random.Random
    disk: Disk
    network: Network
    processes: list[Process]
    roles: dict[str, Role]
    struck: Counter[str]
    faults_over: bool
    done: bool
    _n_strikes: int

    def start(self, role: Role, supersedes: str = "") -> None: ...

    def kill(self, process: Process, why: str) -> None: ...

    def kill_all(self, why: str) -> None: ...

    def power_loss(self, why: str) -> None: ...

    def strike(self) -> None:
        """One fault of the nemesis, and the appointment for the next."""
        if self.faults_over or self.done or self._n_strikes >= self.options.strikes_max:
            return
        self._n_strikes += 1
        kind = self.rng.choice(self.options.strikes)
        self.struck[kind] += 1
        self.kernel.log(f"strike {kind}")
        getattr(self, f"_strike_{kind}")()
        self.kernel.after(self.rng.expovariate(1.0 / self.options.strike_every_s), self.strike)

    def _victim(self, *roles: str) -> Process | None:
        alive = [p for p in self.processes if p.alive and (not roles or p.role in roles)]
        return self.rng.choice(alive) if alive else None

    def _strike_kill(self) -> None:
        if (victim := self._victim()) is not None:
            self.kill(victim, "nemesis")

    def _strike_kill_all(self) -> None:
        self.kill_all("nemesis")

    def _strike_power_loss(self) -> None:
        self.power_loss("nemesis")

    def _strike_pause(self) -> None:
        self._pause(self._victim(), self.rng.random() * 2.0)

    def _strike_pause_long(self) -> None:
        self._pause(self._victim(), 7.0 + self.rng.random() * 20.0)

    def _pause(self, victim: Process | None, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while. A server that holds the file lock is killed by its supervisor instead of left."""
        if victim is None or victim.paused:
            return
        self.kernel.log(f"pause {victim.incarnation} for {seconds:.2f} s")
        victim.pause()
        self.kernel.after(seconds, lambda: self._resume(victim))
        role = self.roles[victim.name]
        if seconds > 7.0 and role.process is victim:
            if victim.role == "ledger" and self.options.server_locked:
                self.kernel.after(6.0, lambda: self.kill(victim, "hung"))
            elif self.options.replaces_paused:
                self.kernel.after(1.0, lambda: self._replace(role, victim))

    def _resume(self, victim: Process) -> None:
        if victim.alive and victim.paused:
            self.kernel.log(f"resume {victim.incarnation}")
            victim.resume()

    def _replace(self, role: Role, lost: Process) -> None:
        """A second process beside one that is only paused: not known to be dead, so nothing is superseded."""
        if role.process is lost and lost.alive and not role.finished and not self.done:
            role.zombies += 1
            self.start(role)

    def _strike_second_learner(self) -> None:
        self._second("learner")

    def _strike_second_server(self) -> None:
        if not self.options.server_locked:
            self._second("ledger")

    def _second(self, name: str) -> None:
        """Somebody starts a role that runs already; whoever loses ends by itself."""
        role = self.roles[name]
        if role.process is not None and role.process.alive and not role.finished:
            self.start(role)

    def _strike_disk_error(self) -> None:
        self.disk.fail_next(self.rng.choice(("write", "fsync")), errno.EIO, "*")

    def _strike_disk_full(self) -> None:
        self.disk.full(True)
        self.kernel.after(self.rng.random() * 6.0, lambda: self.disk.full(False))

    def _strike_database_error(self) -> None:
        held = [r for p in self.processes if p.alive for r in p.resources if isinstance(r, OpenedDatabase)]
        ledgers = [database for database in held if hasattr(database, "reader")]
        for opened in ledgers[:1]:
            if opened.faults is None:
                opened.faults = DatabaseFaults(opened.writer)
            opened.faults.fail_next(self.rng.choice(("statement", "commit_before", "commit_after")),
                                    self.rng.choice(("io", "full")))  # fmt: skip

    def _strike_cut_off(self) -> None:
        if (victim := self._victim()) is not None:
            self.network.cut_off.add(victim.name)
            self.kernel.after(self.rng.random() * 15.0, lambda: self.network.cut_off.discard(victim.name))

    def _strike_clock_worker(self) -> None:
        self._set_clock(self._victim("worker", "learner", "feeder"), (-3600.0, 600.0, 3600.0))

    def _strike_clock_ledger(self) -> None:
        self._set_clock(self._victim("ledger"), (-600.0, 600.0))

    def _set_clock(self, victim: Process | None, steps_s: tuple[float, ...]) -> None:
        """Step the wall clock of a process's machine; its successors find it so."""
        if victim is not None:
            role = self.roles[victim.name]
            role.wall_offset_s += self.rng.choice(steps_s)
            victim.host.wall_offset_s = role.wall_offset_s
