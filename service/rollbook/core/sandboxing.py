"""What a sandbox is asked to run and what it answers.

Owns the vocabulary between backends (``rollbook.sandbox``) and verdicts (``rollbook.tasks``): program, limits, execution.
Never runs anything. A *job* is one program in one fresh sandbox. Everything up to the ready byte is the service's own
doing and blamed on it; everything after it is the program's. Upholds P6: a status says who failed, never a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollbook.core.records import Blame, SandboxStatus

INFRA = frozenset(
    {SandboxStatus.INFRA_SPAWN, SandboxStatus.INFRA_SETUP, SandboxStatus.INFRA_LOST, SandboxStatus.INFRA_OVERLOAD,
     SandboxStatus.CANCELLED}
)  # fmt: skip
"""Statuses that say nothing about the program."""


def blame_of(status: SandboxStatus, cpu_s: float = 0.0, wall_s: float = 0.0) -> Blame | None:
    """Whose doing an execution's status is; None where nothing failed.

    A wall-clock timeout that used less than half of that time on the processor may be the busy host's: unclear.
    """
    if status in (SandboxStatus.OK, SandboxStatus.NOT_USED):
        return None
    if status in INFRA:
        return Blame.INFRA
    if status is SandboxStatus.TIMEOUT_WALL and cpu_s < wall_s / 2:
        return Blame.UNCLEAR
    return Blame.MODEL


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one job, over all its processes together unless said otherwise."""

    cpu_s: float = 4.0
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 8
    output_bytes: int = 1 << 20
    """Of standard output, standard error and the answer channel, each."""
    disk_bytes: int = 32 << 20
    """Of the private scratch directory, which is also its working directory."""


@dataclass(frozen=True, slots=True)
class Program:
    """Python to run in a sandbox of its own.

    ``setup`` is trusted and runs before the ready byte, in a namespace of its own; ``source`` is model-written and runs after
    it as ``__main__``. Where ``setup`` defines ``serve(namespace, answer)``, it is called after ``source``, with the
    program's namespace and a function that writes one line (bytes) to the answer channel. Standard input is what the caller
    sends. Nothing else enters the sandbox.
    """

    source: str
    setup: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative names in the scratch directory."""
    hash_seed: int = 0
    """PYTHONHASHSEED of the interpreter, 0 or 1: a second run under the other one shows dependence on hash order."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a job ended; statuses are data, the program's output is untrusted."""

    status: SandboxStatus
    blame: Blame | None
    reason: str
    """For a human; empty when ``ok``."""
    stdout: bytes = b""
    stderr: bytes = b""
    answers: bytes = b""
    """What was written to the answer channel and not read through ``Job.read_line``."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0
    """Largest resident size seen, all processes together."""
    exit_code: int | None = None
    signal: int | None = None
    truncated: bool = False
    backend: str = ""
    enforced: tuple[str, ...] = ()
    """What bounded it, for example ``("netns", "seccomp", "memory:cgroup")``."""
    attempts: int = 1
    """Sandboxes used for this result, infrastructure failures included."""


class Job(Protocol):
    """A program that runs; used by one thread, killed by any."""

    def send(self, data: bytes) -> None:
        """Write to its standard input; a program that has ended or does not read loses it silently. Bounded by the job's time."""
        ...

    def close_input(self) -> None:
        """End of its standard input."""
        ...

    def read_line(self, timeout_s: float) -> bytes | None:
        """Next line of the answer channel without its end; None when it ended, was cut off by a limit, or after the timeout."""
        ...

    def wait(self) -> Execution:
        """Close the input, wait for its end within its limits and return how it ended; the same again when asked again."""
        ...

    def kill(self) -> None:
        """End it with everything it started; ``wait`` then says ``cancelled`` unless it had ended by itself."""
        ...


class Sandbox(Protocol):
    """A backend: any number of threads may start jobs; at most ``slots`` run at a time, the others wait (bounded)."""

    name: str

    def start(self, program: Program, limits: Limits) -> Job:
        """Start a job. Never raises for a failing backend: the job then ends with an ``infra_*`` status."""
        ...

    def run(self, program: Program, limits: Limits, data: bytes = b"") -> Execution:
        """Start a job, send ``data``, wait."""
        job = self.start(program, limits)
        job.send(data)
        return job.wait()

    def close(self) -> None:
        """End every job and every process of the backend."""
        ...
