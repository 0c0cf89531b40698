"""The task that cheats are tried on, and a sandbox that says what it starts and ends what it is told to."""

from __future__ import annotations

import threading

from rollbook.core.sandboxing import Execution, Job, Limits, Program, Sandbox
from rollbook.tasks.verdicts import Case

HONEST = "def add(a, b):\n    return a + b\n"
CASES = [Case([1, 2], 3), Case([2, 2], 4), Case([10, -4], 6)]
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(10, -4) == 6"]


class Interrupted:
    """Runs jobs in a real sandbox and ends those whose number, in order of starting, is among ``ended``."""

    def __init__(self, inner: Sandbox, ended: set[int] | None = None) -> None:
        self.name, self.slots, self._inner = inner.name, 4, inner
        self._ended = ended or set()
        self._lock = threading.Lock()
        self.programs: list[Program] = []
        self.started = threading.Event()
        """Set once a program that is not empty has been started."""

    def start(self, program: Program, limits: Limits) -> Job:
        job = self._inner.start(program, limits)
        with self._lock:
            number = len(self.programs)
            self.programs.append(program)
        if number in self._ended:
            job.kill()
        if program.source:
            self.started.set()
        return job

    def run(self, program: Program, limits: Limits, data: bytes = b"") -> Execution:
        job = self.start(program, limits)
        job.send(data)
        return job.wait()

    def close(self) -> None:
        self._inner.close()
