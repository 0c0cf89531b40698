"""What the supervisor needs of the place that roles run in: this machine's processes, or a Ray cluster.

Owns the words between the two: an order to start a role, the started role, where it was placed. Never decides anything: when a
role is started again and when the run ends is the supervisor's law, the same over every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

KILL_S = 10.0
"""How long a killed process may take to be gone."""

LEDGER, FEEDER, LEARNER, WORKER = "ledger", "feeder", "learner", "worker"
"""Kinds of roles; a role's name begins with its kind."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a role reserves where a backend keeps account of it."""

    cpus: float = 0.0
    gpus: float = 0.0


NOTHING = Needs()


@dataclass(frozen=True, slots=True)
class Order:
    """One role to be started: the command line of an ordinary role process, and what it needs."""

    name: str
    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables beside the ones every role of the backend has."""
    log: Path
    needs: Needs = NOTHING


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one process of a role runs."""

    role: str
    incarnation: str
    node: str
    """Name of the node: the machine's host name, or the address and the beginning of the id of a Ray node."""
    host: str
    pid: int
    start_time: int
    gpus: tuple[str, ...] = ()
    """Name and index of the devices it was given."""
    driver: str = ""
    """Version of the GPU driver; empty without GPUs."""
    node_id: str = ""
    """Ray's id of the node."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine that roles may be placed on."""

    name: str
    id: str
    is_leaving: bool = False
    """It is drained: nothing is placed there any more, and what runs there is to go."""
    total: Mapping[str, float] = field(default_factory=dict)


class Target(Protocol):
    """A process that can be asked for its stacks."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def is_here(self) -> bool:
        """Whether it is known to be a process of this machine, which then says more about it."""
        ...

    def signal(self, number: int) -> bool:
        """Signal the process alone; False when it is gone or cannot be reached."""
        ...

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for the signal by now."""
        ...


class Running(Protocol):
    """A role that was started and has not been seen to end."""

    @property
    def record(self) -> Target: ...

    def exit_code(self) -> int | None:
        """Exit code once the process is dead (negative: killed by that signal), and then its whole tree is; else None."""
        ...

    def cause(self) -> str:
        """How it ended, where the exit code alone does not say it; else empty."""
        ...

    def terminate(self) -> None:
        """Ask the role to stop."""
        ...

    def kill(self) -> None:
        """SIGKILL the whole tree."""
        ...

    def placement(self) -> Placement | None:
        """Where it runs; None while it waits for a place."""
        ...

    def waiting_s(self) -> float:
        """How long it has waited for a place; 0 once it has one."""
        ...

    def node_id(self) -> str:
        """Id of its node; empty while it waits for a place."""
        ...

    def waits_for(self) -> str:
        """What it waits for that no node has to spare, and why; empty when it does not wait for that."""
        ...


class Backend(Protocol):
    """Starts roles and knows the nodes they may run on."""

    def open(self, emit: Callable[[str], None]) -> Mapping[str, Running]:
        """Take over what an earlier supervisor of the run has left running, by role name, or end it.

        Raises: Unavailable when something neither can be taken over nor dies.
        """
        ...

    def start(self, order: Order) -> Running:
        """Start a role. Its predecessor is dead before it starts, or, where that cannot be known, is not named as superseded.

        Raises: OSError when no process can be started; Unavailable when the predecessor does not die.
        """
        ...

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        ...

    def room(self, needs: Needs) -> int:
        """How many further roles with these needs could be placed now."""
        ...

    def release(self, name: str) -> None:
        """A role has ended and its place is for others; a role that only starts again keeps its place without this."""
        ...

    def keep(self, names: Collection[str]) -> None:
        """Only these roles are wanted: whatever is held for any other one is given back."""
        ...

    def close(self) -> None:
        """Let go of what the backend holds beside the roles."""
        ...
