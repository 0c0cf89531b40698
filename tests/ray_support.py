"""Runs on a Ray cluster of several nodes on this machine: how a test has one, and sees what runs where."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ray_nodes import RayCluster, RayNode
from rollbook.supervise import control, placements
from rollbook.supervise.process import ProcessRecord
from run_support import BOUND_S, TinyRun, environment

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@contextmanager
def cluster(*cpus: int) -> Iterator[tuple[RayCluster, list[RayNode]]]:
    """A cluster with that many CPUs on its nodes, beside a head that takes no role that needs one."""
    with RayCluster(0, env=environment()) as started:
        nodes = [started.prepare(n) for n in cpus]
        started.join(nodes)
        yield started, nodes


class ClusterRun(TinyRun):
    """A tiny run on a cluster; its processes are known by their placements."""

    def __init__(self, root: Path, address: str, failpoints: dict[str, str] | None = None) -> None:
        super().__init__(root, failpoints)
        self.address = address
        self.verb = ("up", "--ray", address)
        with self.config.open("a") as out:
            out.write("\n[cluster]\nserver_cpus = 0.1\nworker_cpus = 1\nplace_s = 8.0\nunreachable_s = 20.0\norphan_s = 60.0\n")

    def code(self, bound_s: float = 2 * BOUND_S) -> int:
        """See ``TinyRun.code``; a role on a cluster needs a host as well, so everything begins later."""
        return super().code(bound_s)

    def records(self) -> dict[str, ProcessRecord]:
        """Newest process of every role."""
        newest = placements.newest(self.dir)
        return {name: ProcessRecord(name, e["pid"], e["start_time"], e["incarnation"]) for name, e in newest.items()}

    def where(self, role: str) -> str:
        """Id of the node that the role's newest process was started on; empty when there was none."""
        return str(placements.newest(self.dir).get(role, {}).get("node_id", ""))

    def places(self, cluster: RayCluster) -> dict[str, tuple[str, str]]:
        """The run's groups on the cluster: role to id of the group and attempt that made it; one role has one group."""
        parts = [(group["name"].split("/"), group["id"]) for group in cluster.groups()]
        mine = [(name[3], (group, name[2])) for name, group in parts if name[:2] == ["rollbook", "tiny"]]
        assert len(mine) == len(dict(mine)), mine
        return dict(mine)

    def state(self) -> dict:
        """What the supervisor shows of itself."""
        return control.read_state(self.dir)

    def told(self) -> str:
        """Everything supervisors of the run have said."""
        return self.log("supervisor")
