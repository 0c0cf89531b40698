"""The task that cheats are tried on, and a sandbox that says what it starts and ends what it is told to."""

from __future__ import annotations

import threading

from cheats import WORD

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Job, Limits, Program, Sandbox
from rollbook.tasks.verdicts import Case, Verdict

HONEST = "def add(a, b):\n    return a + b\n"
CASES = [Case([1, 2], 3), Case([2, 2], 4), Case([10, -4], 6)]
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(10, -4) == 6"]


def check_not_paid(verdict: Verdict, status: SandboxStatus) -> None:
    """A cheat's verdict. One that waits cannot be told from a busy machine: it is asked twice, and then there is no verdict."""
    assert not verdict.right and verdict.status is status, verdict
    waited = verdict.status is SandboxStatus.TIMEOUT_WALL
    assert verdict.blame is (Blame.UNCLEAR if waited else Blame.MODEL) and verdict.given is not waited
    assert verdict.evidence["attempts"] == (2 if waited else 1) and verdict.reason


def source_that_writes(line: bytes) -> str:
    """A right program that first puts ``line`` on the answer channel, with the word of the question for ``%s``."""
    return f"{WORD}import os\ndef add(a, b):\n  os.write(3, {line!r}.replace(b'%s', word().encode()))\n  return a + b\n"


def check_invalid(verdict: Verdict) -> None:
    """The verdict on a line that the protocol does not allow."""
    assert verdict.status is SandboxStatus.INVALID_RESULT and verdict.blame is Blame.MODEL and not verdict.right, verdict


def check_paid(verdict: Verdict) -> None:
    """An honest program's verdict."""
    assert verdict.right and verdict.blame is None and (verdict.passed, verdict.total) == (3, 3), verdict
    assert verdict.evidence["backend"] == "zygote" and "seccomp" in verdict.evidence["enforced"]


class Interrupted(Sandbox):
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

    def close(self) -> None:
        self._inner.close()
