"""A simulated process and the host it finds itself on.

Owns clocks (monotonic time is the kernel's, the wall clock may be set), names, the random source, and the way of every
fsync and write through the run's disk. A host is one process's: killing the process leaves it unreachable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rollbook.core.host import Host, run_on
from simulation.disk import Disk
from simulation.kernel import Condition, Event, Future, Kernel, Queue, Task, Thread

MONOTONIC_BEGINS = 1000.0
"""What a monotonic clock shows when the simulation begins."""

EPOCH_S = 1_800_000_000.0
"""Wall time at the beginning of every simulation."""


class Process:
    """A role's process: it begins with ``main`` and ends when that returns, raises, or the process is killed."""

    _torch_owner: Process | None = None

    def __init__(
        self, kernel: Kernel, name: str, incarnation: str, supersedes: str, disk: Disk, on_end: Callable[[Process, object], None]
    ) -> None:
        self.kernel, self.name, self.incarnation = kernel, name, incarnation
        self.alive, self.paused = True, False
        self.deferred: list[Callable[[], None]] = []
        self.host = SimHost(kernel, self, disk, {"ROLLBOOK_INCARNATION": incarnation, "ROLLBOOK_SUPERSEDES": supersedes})
        self.stop = Event(kernel)
        self.resources: list[Any] = []
        """What the kernel of a real machine would take back: see ``World.bury``."""
        self._on_end = on_end
        self._main: Task | None = None
        self._torch_state: torch.Tensor | None = None

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    def start(self, main: Callable[[Process], None]) -> None:
        def run() -> None:
            main(self)
            self._end("done")

        self._main = self.kernel.spawn(self, run, "main")

    def enter(self) -> None:
        """Called in the context of each new task."""
        run_on(self.host)

    def running(self) -> None:
        """Called before a task runs: torch's generator belongs to the process that runs."""
        owner = Process._torch_owner
        if self.role == "learner" and owner is not self:
            if owner is not None:
                owner._torch_state = torch.get_rng_state()
            if self._torch_state is not None:
                torch.set_rng_state(self._torch_state)
            Process._torch_owner = self

    def on_error(self, task: Task, error: BaseException) -> None:
        if task is self._main:
            self._end(error)
        else:
            self.kernel.log(f"{self.name} thread {task.name} ended: {type(error).__name__}")

    def _end(self, how: object) -> None:
        if self.alive:
            self.alive = False
            self._on_end(self, how)

    def kill(self) -> None:
        """SIGKILL. A task that kills its own process must ``vanish`` next."""
        self.alive = False

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what fell due meanwhile happens now."""
        self.paused = False
        due, self.deferred = self.deferred, []
        for call in due:
            self.kernel.after(self.kernel.rng.random() * 1e-3, call)


class SimHost(Host):
    """The host of one simulated process."""

    def __init__(self, kernel: Kernel, process: Process, disk: Disk, environ: Mapping[str, str]) -> None:
        self._kernel, self._process, self._disk, self._environ = kernel, process, disk, environ
        self._rng = random.Random(f"host.{kernel.rng.random()}")
        self.wall_offset_s = 0.0

    def time(self) -> float:
        return EPOCH_S + self._kernel.now + self.wall_offset_s

    def monotonic(self) -> float:
        return MONOTONIC_BEGINS + self._kernel.now

    def sleep(self, seconds: float) -> None:
        self._kernel.block(seconds)

    def token(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def rng(self) -> random.Random:
        return random.Random(self._rng.random())

    @property
    def environ(self) -> Mapping[str, str]:
        return self._environ

    def event(self) -> Any:
        return Event(self._kernel)

    def condition(self) -> Any:
        return Condition(self._kernel)

    def queue(self, maxsize: int) -> Any:
        return Queue(self._kernel, maxsize)

    def future(self) -> Any:
        return Future(self._kernel)

    def thread(self, target: Callable[[], None], name: str) -> Any:
        return Thread(self._kernel, self._process, target, name)

    def writing(self, path: Path) -> None:
        self._disk.writing(path)

    def fsync(self, fd: int, path: Path) -> None:
        self._disk.fsync(fd, path)
