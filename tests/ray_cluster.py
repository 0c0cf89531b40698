"""A Ray cluster of several nodes on this machine, on loopback addresses, as a process of its own.

Reads one JSON line per command from its standard input and answers with one: ``{"add": {…}}`` starts a node and names it,
``{"drain": ID}`` has a node leave. It ends its cluster when the input ends. ``RayCluster`` is the tests' side.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from run_support import environment

OBJECT_STORE_BYTES = 80 << 20
ATTEMPTS = 5
"""How often a node is started before that is an error."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5", "RAY_worker_niceness": "0",
}  # fmt: skip
"""No statistics, no idle workers, a dead node is noticed within seconds, and roles run no nicer than the tests (Ray: nice 15)."""


class Node:
    """One node as a test sees it."""

    def __init__(self, told: dict) -> None:
        self.address, self.id, self.raylet = told["address"], told["id"], int(told["raylet"])

    def tree(self) -> list[int]:
        """The raylet and all that descends from it: agents, hosts, roles."""
        import psutil

        try:
            raylet = psutil.Process(self.raylet)
            return [self.raylet, *(child.pid for child in raylet.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> int:
        """SIGKILL every process of the node at once; how many there were."""
        tree = self.tree()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none reacts to the death of another
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return len(tree)


class RayCluster:
    """Head without CPUs for roles, and nodes that are added; ended by ``close``."""

    def __init__(self, directory: Path) -> None:
        # Sockets of a session have long names, and a path of a socket may have 107 bytes.
        self._directory = directory
        env = environment(**QUIET, RAY_TMPDIR=str(directory))
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )  # fmt: skip
        self.head = Node(self._ask({"add": {"num_cpus": 0}}))
        self.address = self._told["gcs"]

    def add(self, cpus: int = 2) -> Node:
        """Start a node."""
        return Node(self._ask({"add": {"num_cpus": cpus}}))

    def drain(self, node: Node) -> None:
        """Announce that the node leaves."""
        assert self._ask({"drain": node.id})["accepted"]

    def close(self) -> None:
        """End every node."""
        import psutil

        assert self._process.stdin is not None
        left = psutil.Process(self._process.pid).children(recursive=True)
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait(10.0)

    def _ask(self, command: dict) -> dict:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                self._told = json.loads(line)
                return self._told
        raise AssertionError(f"the cluster process ended at {command}")


def serve() -> None:
    """The process: nodes by command until the input ends."""
    import ray
    from ray.cluster_utils import Cluster

    cluster, n_started = Cluster(), 0
    for line in sys.stdin:
        command = json.loads(line)
        if "add" in command:
            head = {"include_dashboard": False} if cluster.head_node is None else {}
            for attempt in range(1, ATTEMPTS + 1):
                n_started += 1
                address = f"127.0.0.{1 + n_started}"
                options = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": address, **head, **command["add"]}
                try:
                    node = cluster.add_node(**options)
                    break
                except Exception:  # Ray gives a node 30 s to start, and a busy machine may need more
                    if attempt == ATTEMPTS:
                        raise
            raylet = node.all_processes["raylet"][0].process.pid
            print(json.dumps({"address": address, "id": node.node_id, "raylet": raylet, "gcs": cluster.address}), flush=True)
        else:
            from ray._raylet import GcsClient

            reason, deadline_ms = 2, int((time.time() + 300) * 1000)  # preemption: the node is to go whatever runs on it
            told = GcsClient(address=cluster.address).drain_node(command["drain"], reason, "it leaves", deadline_ms)
            print(json.dumps({"accepted": bool(told[0])}), flush=True)
    cluster.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    serve()
