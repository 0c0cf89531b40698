"""A role on one node of a Ray cluster: a small actor that reserves what the role needs and is the parent of its process.

Owns the role process on its node: the same command as everywhere, in its own session, killed by the kernel when the actor's
process dies, as that is when its raylet does. Never restarts anything. Nothing of Ray is storage: replies are a few numbers.

A host that nobody asks any more ends its role and itself: its supervisor is gone for good, or its node is cut off and the role
has been started elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import ray

from rollbook.supervise.backend import KILL_S, Order, Placement
from rollbook.supervise.placements import devices
from rollbook.supervise.process import ProcessRecord, RoleProcess, identity, spawn, start_time

_POLL_S = 0.05


class RoleHost:
    """The actor. Its calls are short and come one at a time, on the thread that started the role.

    Args:
        incarnation: of the role process, and part of the actor's name.
        supersedes: incarnation of its predecessor where that is known to be dead.
        orphan_s: how long it may go unasked.
    """

    def __init__(self, order: Order, incarnation: str, supersedes: str, orphan_s: float) -> None:
        self._asked_at = time.monotonic()
        self._record = ProcessRecord(order.name, 0, 0, incarnation)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._address = ray.util.get_node_ip_address()
        env = inherited | {"ROLLBOOK_NODE_ADDRESS": self._address} | identity(order.env, incarnation, supersedes)
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("ab") as out:
            handle = spawn([sys.executable, *order.argv[1:]], env, out, self._known)
        self._process = RoleProcess(handle, self._record)
        self._placement = self._place(order)
        threading.Thread(target=self._watch, args=(orphan_s,), name="watch", daemon=True).start()

    def ask(self) -> tuple[int | None, Placement]:
        """Exit code of the role, None while it lives, and where it runs."""
        self._asked_at = time.monotonic()
        return self._process.exit_code(), self._placement

    def send(self, number: int) -> bool:
        """Signal the role's process; False when it is gone."""
        return self._record.signal(number)

    def catches(self, number: int) -> bool:
        """Whether the role has a handler for the signal by now."""
        return self._record.catches(number)

    def terminate(self) -> None:
        """Ask the role to stop."""
        self._process.terminate()

    def kill(self) -> int | None:
        """SIGKILL the role's tree and wait for its end: its exit code, None when it does not die."""
        self._process.kill()
        deadline = time.monotonic() + KILL_S
        while (code := self._process.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return code

    def _known(self, pid: int) -> None:
        self._record = ProcessRecord(self._record.name, pid, start_time(pid) or 0, self._record.incarnation)

    def _place(self, order: Order) -> Placement:
        context = ray.get_runtime_context()
        given = [str(index) for index in context.get_accelerator_ids().get("GPU", [])]
        gpus, driver = devices(given) if order.needs.gpus else ((), "")
        node = f"{self._address} ({context.get_node_id()[:8]})"
        return Placement(
            order.name, self._record.incarnation, node, socket.gethostname(), self._record.pid, self._record.start_time,
            gpus or tuple(f"GPU {index}" for index in given), driver, context.get_node_id(),
        )  # fmt: skip

    def _watch(self, orphan_s: float) -> None:
        while time.monotonic() - self._asked_at < orphan_s:
            time.sleep(min(1.0, orphan_s / 4))
        self._record.kill_tree()
        os.kill(os.getpid(), signal.SIGKILL)  # what is left of the role dies with its parent


def end_left(record: ProcessRecord) -> bool:
    """On the node of a host that died: end what is left of its role; True when nothing is."""
    record.end(KILL_S)
    return True
