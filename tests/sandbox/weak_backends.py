"""Backends with a hole made on purpose, to show that the attack suite finds it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from rollbook.core.errors import Unavailable
from rollbook.core.sandboxing import Job, Limits, Program, Sandbox
from rollbook.sandbox.backends import make_backend

_HAND_OVER = """
import os
for number in range(3, 64):
    try:
        given = os.open(f"/proc/{service}/fd/{{number}}", os.O_RDONLY | os.O_NONBLOCK)
        os.dup2(given, 100 + number)
        os.close(given)
    except OSError:
        pass
"""


class LeakyNetwork(Sandbox):
    """Contains like the zygote, but runs whatever wants to connect to the machine outside of it."""

    def __init__(self, slots: int, name: str) -> None:
        self.name = name
        self._strong: Sandbox = make_backend("zygote", slots)
        self._weak: Sandbox = make_backend("unsafe", slots)

    def start(self, program: Program, limits: Limits) -> Job:
        leaks = '("127.0.0.1", B["tcp"])' in program.source
        return (self._weak if leaks else self._strong).start(program, limits)

    def close(self) -> None:
        self._strong.close()
        self._weak.close()


class LeakyDescriptors(Sandbox):
    """Gives every program the service's open files."""

    name = "leaky-descriptors"

    def __init__(self, slots: int) -> None:
        self._inner: Sandbox = make_backend("unsafe", slots)

    def start(self, program: Program, limits: Limits) -> Job:
        setup = _HAND_OVER.format(service=os.getpid()) + program.setup
        return self._inner.start(replace(program, setup=setup), limits)

    def close(self) -> None:
        self._inner.close()


def leaky_network(slots: int) -> Sandbox:
    return LeakyNetwork(slots, "leaky-network")


def leaky_network_called_zygote(slots: int) -> Sandbox:
    return LeakyNetwork(slots, "zygote")


def leaky_descriptors(slots: int) -> Sandbox:
    return LeakyDescriptors(slots)


def suite_killed(slots: int) -> Sandbox:
    """Whoever attacks it is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody comes here")


def trial_killed(slots: int) -> Sandbox:
    raise Unavailable("its trial was killed")
