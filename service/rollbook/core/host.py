"""What a process takes from the machine it runs on: time, randomness, threads, waiting, and the word that bytes are durable.

Owns the one door through which every layer reaches these. Never decides anything. Outside a simulation the host is the
standard library itself; a simulator gives each of its processes a host of its own, so that the product's own loops run
there unchanged, in one thread and in an order that a seed decides.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import Any


class Host:
    """This machine. A ``Clock`` (core.ports) and a maker of everything that waits."""

    def time(self) -> float:
        """Wall time in seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        """A name nobody else has: 32 hexadecimal digits."""
        return uuid.uuid4().hex

    def rng(self) -> random.Random:
        """A generator for jitter: its numbers may change when something happens, never what is computed."""
        return random.Random()

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables of this process."""
        return os.environ

    def event(self) -> threading.Event:
        return threading.Event()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def queue(self, maxsize: int) -> queue.Queue[Any]:
        return queue.Queue(maxsize)

    def future(self) -> Future[Any]:
        return Future()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread that is not started yet."""
        return threading.Thread(target=target, name=name, daemon=True)

    def writing(self, path: Path) -> None:
        """Called before bytes are written to ``path``. Raises OSError where the storage refuses."""

    def fsync(self, fd: int, path: Path) -> None:
        """Make the file or directory ``path``, open as ``fd``, durable. Raises OSError."""
        os.fsync(fd)


_THIS_MACHINE = Host()
_current: ContextVar[Host] = ContextVar("rollbook_host", default=_THIS_MACHINE)


def host() -> Host:
    """The host of the running process."""
    return _current.get()


def run_on(other: Host) -> None:
    """Make ``other`` the host of this context and of what it starts (simulators only)."""
    _current.set(other)


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        host().fsync(fd, path)
    finally:
        os.close(fd)


COMMAND_HOLDER = "command-"
"""Beginning of the holder's name where a command opens the database because no ledger server answers."""


def incarnation() -> str:
    """Id of this process: given by its supervisor, or made up."""
    return host().environ.get("ROLLBOOK_INCARNATION") or host().token()


def node_address() -> str:
    """Address at which other nodes reach this one, told by whoever has placed this process; empty when nobody has."""
    return host().environ.get("ROLLBOOK_NODE_ADDRESS", "")


def superseded() -> str:
    """Id of the dead process that this one replaces; empty when there is none."""
    return host().environ.get("ROLLBOOK_SUPERSEDES", "")
