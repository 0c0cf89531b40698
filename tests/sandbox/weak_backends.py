"""Backends with a hole made on purpose, to show that the attack suite finds it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from rollbook.core.errors import Unavailable
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Job, Limits, Program, Sandbox
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


class FragileWatcher(Sandbox):
    """Contains like the zygote, but reads names of processes as text, and fails as infrastructure where they are none."""

    name = "zygote"

    def __init__(self, slots: int) -> None:
        self._inner: Sandbox = make_backend("zygote", slots)

    def start(self, program: Program, limits: Limits) -> Job:
        return FragileJob(self._inner.start(program, limits))

    def close(self) -> None:
        self._inner.close()


class FragileJob(Job):
    """A job of ``FragileWatcher``."""

    def __init__(self, inner: Job) -> None:
        self._inner, self._failed = inner, False
        self.send, self.close_input, self.kill = inner.send, inner.close_input, inner.kill

    def read_line(self, timeout_s: float) -> bytes | None:
        line = self._inner.read_line(timeout_s)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            except OSError:
                continue
            except UnicodeDecodeError:
                self._failed = True
        return line

    def wait(self) -> Execution:
        ended = self._inner.wait()
        return replace(ended, status=SandboxStatus.INFRA_SPAWN, blame=Blame.INFRA) if self._failed else ended


def leaky_network(slots: int) -> Sandbox:
    return LeakyNetwork(slots, "leaky-network")


def leaky_network_called_zygote(slots: int) -> Sandbox:
    return LeakyNetwork(slots, "zygote")


def leaky_descriptors(slots: int) -> Sandbox:
    return LeakyDescriptors(slots)


def fragile_watcher(slots: int) -> Sandbox:
    return FragileWatcher(slots)


def suite_killed(slots: int) -> Sandbox:
    """Whoever attacks it is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody comes here")


def trial_killed(slots: int) -> Sandbox:
    raise Unavailable("its trial was killed")
