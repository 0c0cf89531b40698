"""Several Ray nodes on one machine: a head and raylets on loopback, added, drained, killed with all they run, joined again.

Owns the ``ray start`` processes it has made and what descends from them; kills nothing else. A node's processes are those below
its ``ray start --block``, and those with a mark in their environment that its children inherit: Ray's workers overwrite theirs
with their title. Ray's own files go to a directory of this cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from drills.proc import descendants
from rollbook.supervise.process import processes_with, start_time

MARK = "ROLLBOOK_RAY_NODE"
"""Environment variable of every process of a node: the node's own id."""
START_S = 120.0
ATTEMPTS = 4
"""How often a raylet is started before that is an error: Ray gives one 30 s, and a busy machine may need more."""
DRAIN_S = 300.0
"""What a drained node is told it has left."""
DIE_S = 15.0
ASK_S = 5.0
POLL_S = 0.1
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""The head's address; on Linux every node has one of its own."""
STORE_BYTES = 80_000_000
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command ``ray`` of the Python that runs this, wherever that has put it."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "5000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "5", "RAY_worker_niceness": "0", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
"""No statistics, no idle workers, and roles run no nicer than others (Ray: nice 15). A dead node refuses to be asked and is
noticed within seconds; one that only answers late, while everything starts on two cores, has time to."""


class NotStarted(Exception):
    """A raylet did not come up; the message holds the end of its log."""


@dataclass
class RayNode:
    """One raylet (and, on the head, the GCS) with everything it has started."""

    name: str
    cluster: RayCluster
    address: str
    cpus: float = 0
    gpus: float = 0
    prefix: tuple[str, ...] = ()
    """What its command is run by, for example in the network of another host."""
    process: subprocess.Popen[bytes] | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    id: str = ""
    """Ray's id of the newest raylet of this name."""

    def pids(self) -> list[int]:
        """Every live process of the node."""
        below = [self.process.pid, *descendants(self.process.pid)] if self.process and self.process.poll() is None else []
        return sorted({*below, *processes_with(MARK, self.mark)})

    def start(self) -> None:
        """``ray start``; returns when the node has joined. Raises NotStarted."""
        self.cluster.join([self])

    def launch(self) -> None:
        """``ray start``, as a node with a mark of its own."""
        self.mark = uuid.uuid4().hex
        self.process = self.cluster.launch(self)

    def kill(self) -> int:
        """Stop the whole tree, so that none reacts to another's death, SIGKILL it, see it gone; how many processes there were."""
        found = {pid: start_time(pid) for pid in self.pids()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        found |= {pid: start_time(pid) for pid in self.pids() if pid not in found}
        deadline = time.monotonic() + DIE_S
        while left := [pid for pid, began in found.items() if began is not None and start_time(pid) == began]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {self.name} does not die: {left}")
            time.sleep(0.02)
            found |= {pid: start_time(pid) for pid in self.pids() if pid not in found}
        if self.process is not None:
            self.process.wait(DIE_S)
        return len(found)

    def drain(self) -> None:
        """Announce that the node leaves, whatever runs there. Raises AssertionError when Ray refuses."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        deadline_ms = int((time.time() + DRAIN_S) * 1000)
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        told = GcsClient(address=self.cluster.address).drain_node(self.id, reason, "it leaves", deadline_ms)
        assert told[0], f"node {self.name} is not drained: {told}"

    def rejoin(self) -> None:
        """A new raylet under the same name and resources; to Ray it is another node."""
        self.start()


class RayCluster:
    """A head and ``workers`` further raylets; a context manager.

    Args:
        cpus: of each node but the head, which has none. Each has a resource ``node_NAME: 1`` besides, so that a placement can
            ask for a node by name.
        env: of every process of the cluster; default: this one's.
        address: of the head; default: one on loopback.
    """

    def __init__(
        self, workers: int = 2, cpus: float = 3, env: Mapping[str, str] | None = None, address: str = LOOPBACK
    ) -> None:
        # A socket's path holds 107 bytes, and Ray appends sixty of its own.
        self.root = Path(tempfile.mkdtemp(prefix="rr", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"))
        self._env = dict(os.environ if env is None else env)
        self.cpus = cpus
        self.head = RayNode("head", self, address)
        self.port = _free_port(self.head.address)
        self.workers: list[RayNode] = []
        for _ in range(workers):
            self.prepare(cpus, 0)

    def join(self, nodes: Sequence[RayNode]) -> None:
        """Start nodes together; by the calling thread, as what a drill starts dies with the thread that started it. Raises
        NotStarted."""
        before = self.alive() if self.head not in nodes else {}
        for node in nodes:
            node.launch()
        for node in nodes:
            for attempts_left in reversed(range(ATTEMPTS)):
                try:
                    self.wait_alive(node, before)
                    break
                except NotStarted:
                    node.kill()
                    if not attempts_left:
                        raise
                    node.launch()

    def prepare(self, cpus: float, gpus: float = 0, address: str = "", prefix: Sequence[str] = ()) -> RayNode:
        """A node that ``join`` is to start."""
        n = len(self.workers)
        own = f"127.0.{n // 200}.{3 + n % 200}" if LOOPBACK != "127.0.0.1" else LOOPBACK
        self.workers.append(RayNode(f"node{n}", self, address or own, cpus, gpus, tuple(prefix)))
        return self.workers[-1]

    def add(self, cpus: float | None = None, gpus: float = 0, address: str = "", prefix: Sequence[str] = ()) -> RayNode:
        """One more node, which has joined. Raises NotStarted."""
        node = self.prepare(self.cpus if cpus is None else cpus, gpus, address, prefix)
        node.start()
        return node

    @property
    def address(self) -> str:
        """What ``ray.init`` and ``rollbook up --ray`` take."""
        return f"{self.head.address}:{self.port}"

    @property
    def nodes(self) -> list[RayNode]:
        return [self.head, *self.workers]

    def start(self) -> None:
        """Head first. Raises NotStarted; then nothing is left running."""
        try:
            self.head.start()
            self.join(self.workers)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayCluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill every node, the head last, and remove what Ray wrote."""
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    def launch(self, node: RayNode) -> subprocess.Popen[bytes]:
        """The ``ray start`` of one node, in a session of its own."""
        arguments = [*node.prefix, *RAY, "start", "--block", "--disable-usage-stats", f"--num-cpus={node.cpus:g}",
                     f"--num-gpus={node.gpus:g}", f"--object-store-memory={STORE_BYTES}",
                     f'--resources={{"node_{node.name}": 1}}', f"--node-name={node.name}",
                     f"--node-ip-address={node.address}"]  # fmt: skip
        if node is self.head:
            arguments += ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.root}",
                          f"--ray-client-server-port={_free_port(node.address)}"]  # fmt: skip
        else:
            arguments += [f"--address={self.address}"]
        env = self._env | QUIET | {MARK: node.mark}
        with self.log(node).open("ab") as out:
            return subprocess.Popen(
                arguments, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def log(self, node: RayNode) -> Path:
        return self.root / f"{node.name}.out"

    def wait_alive(self, node: RayNode, before: Collection[str]) -> None:
        """Until Ray counts a node of this name that is none of ``before`` among the living; bounded. Raises NotStarted."""
        deadline = time.monotonic() + START_S
        while not (new := [i for i, name in self.alive().items() if name == node.name and i not in before]):
            assert node.process is not None
            if node.process.poll() is not None or time.monotonic() > deadline:
                said = self.log(node).read_text(errors="replace")[-1500:]
                raise NotStarted(f"{node.name} did not join {self.address}: {said}")
            time.sleep(POLL_S)
        node.id = new[0]

    def groups(self) -> list[dict]:
        """Every placement group that is not removed: ``id``, ``name``, ``state``, ``node_id`` (empty while it waits for one)."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        state = GlobalState()
        state._initialize_global_state(
            GcsClientOptions.create(self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        try:
            return [
                {"id": group["placement_group_id"], "name": group["name"], "state": group["state"],
                 "node_id": next(iter(group["bundles_to_node_id"].values()))}
                for group in state.placement_group_table().values()
                if group["state"] != "REMOVED"
            ]  # fmt: skip
        finally:
            state.disconnect()

    def alive(self) -> dict[str, str]:
        """Nodes that Ray counts as alive, id to name; a dead one is among them until Ray has noticed. Empty without a head."""
        from ray._raylet import GcsClient
        from ray.core.generated.gcs_pb2 import GcsNodeInfo

        try:
            nodes = GcsClient(address=self.address).get_all_node_info(timeout=ASK_S).values()
        except Exception:  # noqa: BLE001 - Ray's errors have no common class; whatever it is, the head does not answer
            return {}
        alive = [node for node in nodes if node.state == GcsNodeInfo.ALIVE]
        return {node.node_id.hex(): node.node_name for node in alive}


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Start a cluster, kill and rejoin one node after the other, and say how long each took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hold", action="store_true", help="print the address and wait for an end of input; kill nothing")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    with RayCluster(args.workers) as cluster:
        print(f"address {cluster.address}", flush=True)
        for node in cluster.nodes:
            print(f"{node.name}: {len(node.pids())} processes", flush=True)
        if args.hold:
            sys.stdin.read()
            return 0
        for node in cluster.workers:
            n = node.kill()
            began = time.monotonic()
            node.rejoin()
            print(f"{node.name}: {n} processes killed, joined again after {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
