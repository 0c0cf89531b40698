"""What an attack is, and one trial of it.

Owns the frame around every attack's program and the rules by which it counts as contained. Never runs anything itself. Rules: a
secret that comes out, a mark that reaches a listener, a process that stays, or the program's own claim mean that it escaped. It
is contained only when it was tried and none of that was seen; anything else is "could not be tried", and no backend is chosen so.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from rollbook.core.host import host
from rollbook.core.sandboxing import Execution, Limits, Program, Sandbox
from rollbook.sandbox.attacks.bait import SECRET_PREFIX, Bait, Seen

LOOK = Limits(cpu_s=3.0, wall_s=8.0, memory_bytes=256 << 20, processes=8, output_bytes=64 << 10, disk_bytes=8 << 20)
"""For attacks that need no limit to stop them."""
LIFTED = Limits(cpu_s=120.0, wall_s=120.0, memory_bytes=11 << 30, processes=512, output_bytes=8 << 20, disk_bytes=512 << 20)
"""For controls: the attack is judged by its own limits and runs under these."""
SLACK_S = 5.0
"""How late a backend on a busy machine may be in ending a program."""
CONTROL_SLACK_S = 2.0

HOLD = """
import os
def serve(namespace, answer):
    answer(b"tried")
    while os.read(0, 4096):
        pass
"""
"""Says that the attack has come to its end, and stays until the suite has looked."""

_FRAME = f"""
import ctypes, errno, os, re, signal, socket, sys, time
B = __import__("json").loads({{bait!r}})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl(15, B["name"].encode(), 0, 0, 0)
def say(text):
    os.write(1, (str(text) + "\\n").encode("utf-8", "replace"))
def escaped(why):
    say("escaped: " + str(why).replace("\\n", " ")[:300])
def leak(data):
    for found in set(re.findall(rb"{SECRET_PREFIX}[a-z-]+-[0-9a-f]{{{{32}}}}", data)):
        os.write(1, found + b"\\n")
def read(path, size=65536):
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""
def call(name, *values):
    number = B["calls"].get(name)
    if number is None:
        return -1, errno.ENOSYS
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(number), *values)
    return result, ctypes.get_errno()
def refused(result, number):
    return result == -1 and number in (errno.EPERM, errno.EACCES, errno.ENOSYS)
say("tried")
"""

CALLS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "clone3": 435, "mount": 165, "fsopen": 430, "open_tree": 428, "setns": 308,
               "io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "keyctl": 250, "userfaultfd": 323, "unshare": 272,
               "memfd_create": 319, "capget": 125, "open_by_handle_at": 304, "pidfd_open": 434, "pidfd_getfd": 438,
               "shmget": 29, "shmat": 30, "msgget": 68},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "clone3": 435, "mount": 40, "fsopen": 430, "open_tree": 428, "setns": 268,
                "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "keyctl": 219, "userfaultfd": 282, "unshare": 97,
                "memfd_create": 279, "capget": 90, "open_by_handle_at": 265, "pidfd_open": 434, "pidfd_getfd": 438,
                "shmget": 194, "shmat": 196, "msgget": 186},
}  # fmt: skip


class Untried(Exception):
    """The attack did not come as far as to show anything; the message says why."""


@dataclass(slots=True)
class Trial:
    """One attack on one backend, with all that was seen of it."""

    attack: Attack
    sandbox: Sandbox
    bait: Bait
    lifted: bool = False
    """A control: it runs under ``LIFTED`` limits."""
    name: str = field(default_factory=lambda: f"rb{host().token()[:10]}")
    """Of the attack's processes."""
    mark: str = field(default_factory=lambda: host().token()[:16])
    """Of what it leaves or sends."""
    victim: subprocess.Popen[bytes] | None = None
    seen: tuple[Seen, ...] = ()
    """Its processes when it said that it was done, or when its time was over."""
    held: bool = False
    overdue: str = ""
    left: tuple[Seen, ...] = ()
    """Its processes after the backend said that it had ended."""
    execution: Execution | None = None
    noticed: list[str] = field(default_factory=list)
    """Effects seen from outside while it ran."""
    hostname: str = field(default_factory=socket.gethostname)

    @property
    def limits(self) -> Limits:
        return LIFTED if self.lifted else self.attack.limits

    def program(self, source: str | None = None, more: dict[str, object] | None = None, hold: bool = True) -> Program:
        """The attack's program (or another one of it), which knows where the bait lies but no secret."""
        facts = {
            "name": self.name,
            "mark": self.mark,
            "tcp": self.bait.tcp_port,
            "udp": self.bait.udp_port,
            "abstract": self.bait.abstract_name,
            "socket": str(self.bait.socket_path),
            "log": str(self.bait.log_path),
            "abstract_log": self.bait.abstract_log,
            "answers": str(self.bait.answers),
            "drop": str(self.bait.drop),
            "property": str(self.bait.property),
            "suite": os.getpid(),
            "address": self.bait.memory_address,
            "length": self.bait.memory_bytes,
            "victim": self.victim.pid if self.victim else 0,
            "calls": CALLS.get(platform.machine(), {}),
            "memory": self.attack.limits.memory_bytes,
            "disk": self.attack.limits.disk_bytes,
            "processes": self.attack.limits.processes,
            **(more or {}),
        }
        frame = _FRAME.format(bait=json.dumps(facts))
        return Program(source=frame + (self.attack.source if source is None else source), setup=HOLD if hold else "")

    def output(self) -> bytes:
        """What the program could bring out."""
        if self.execution is None:
            return b""
        return self.execution.stdout + self.execution.stderr + self.execution.answers + self.execution.reason.encode()

    def common_effects(self) -> list[str]:
        """Effects that every attack is looked through for."""
        output = self.output()
        found = [f"the {kind} secret came out" for kind, value in self.bait.secrets.items() if value.encode() in output]
        lines = output.decode("utf-8", "replace").splitlines()
        found += [line.removeprefix("escaped: ") for line in lines if line.startswith("escaped: ")]
        if self.mark.encode() in self.bait.reached:
            found.append("a listener outside was reached")
        if self.left and not self.lifted:
            found.append(f"{len(self.left)} of its processes outlived it")
        if self.overdue:
            found.append(self.overdue)
        return found + self.noticed

    @property
    def slack_s(self) -> float:
        """Nothing ends a control, so there is less to wait for."""
        return SLACK_S if not self.lifted else CONTROL_SLACK_S

    def victim_ended(self, within_s: float) -> bool:
        """Whether the process of the machine is gone, which a signal's delivery takes a moment to bring about."""
        if self.victim is None:
            return False
        try:
            self.victim.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing that a program tries."""

    name: str
    tries: str
    """A sentence for people."""
    source: str
    """Model-side program, after the frame."""
    stage: int = 0
    """0 only looks; 1 leaves something behind or uses much, where nothing stops it; 2 the same, and must run alone."""
    limits: Limits = LOOK
    while_held: Callable[[Trial], str] | None = None
    """Looks from outside while the program waits at its end; says how it escaped, or nothing."""
    afterwards: Callable[[Trial], str] | None = None
    """The same after it has ended."""
    drive: Callable[[Trial], None] | None = None
    """Runs it, where one job is not enough."""
    needs_victim: bool = False
    control_as_root: bool = False
    """Only root has what it tries to take: without a backend, an unprivileged user would not get it either."""
    required: bool = True
    """A backend that does not contain it is not taken."""
    infra_is_escape: bool = False
    """An end that looks like the service's own failure is what it is after."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an attack; ``contained`` is None where it could not be tried."""

    attack: str
    contained: bool | None
    reason: str
    """How it escaped or why it could not be tried; else how it ended."""
    seconds: float
    required: bool = True
