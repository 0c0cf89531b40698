"""Several Ray nodes on one machine: a node is killed with all that runs there, others join and leave, terminals come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_nodes import RayCluster, RayNode
from ray_support import ClusterRun, cluster, needs_ray
from run_support import BOUND_S, wait_until

pytestmark = [pytest.mark.timeout(3 * BOUND_S + 300), needs_ray]


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[RayCluster, list[RayNode]]]:
    with cluster(4, 4) as started:
        yield started


def killed(run: ClusterRun, nodes: list[RayNode], role: str) -> RayNode:
    """The node that ran the role, after every process of it was killed."""
    node = next(node for node in nodes if node.id == run.where(role))
    assert node.kill() > 3
    nodes.remove(node)
    return node


def test_a_killed_node_costs_nothing_but_time(three: tuple[RayCluster, list[RayNode]], tmp_path: Path) -> None:
    started, nodes = three
    run = ClusterRun(tmp_path, started.address, {"learner.before_plan": "delay:600@3"})  # where it is when its node is killed
    try:
        settings = ("run.steps=8", "workers.0.count=2", "ledger.role_ttl_s=5", "ledger.standbys=1")
        run.start(*(part for setting in settings for part in ("--set", setting)))
        run.wait_fired("learner.before_plan@3")
        wait_until("both workers run", lambda: run.where("worker-0") and run.where("worker-1"))
        wait_until("a standby runs", lambda: run.where("ledger-1"))
        assert {run.where("worker-0"), run.where("worker-1")} == {node.id for node in nodes}, "workers are spread"
        assert {run.where("ledger"), run.where("ledger-1")} == {node.id for node in nodes}, "a node takes one server with it"
        killed(run, nodes, "learner")
        nodes.append(started.add(4))  # another node joins, and takes what the killed one cannot
        code = run.code(400.0)
        output = run.output()
        assert code == 0, f"{output}\n{run.tails()}"
        assert "learner died (node lost: 127.0.0." in output
        assert "learner started again (pid" in output and output.count("audit: clean") == 1
        assert run.steps() == [1, 2, 3, 4, 5, 6, 7, 8] and run.alive() == []
    finally:
        run.end()


def test_a_detached_run_outlives_its_terminal_its_supervisor_and_a_node_that_leaves(
    three: tuple[RayCluster, list[RayNode]], tmp_path: Path
) -> None:
    started, nodes = three
    run = ClusterRun(tmp_path, started.address)
    many = ("--set", "run.steps=100000", "--set", "supervisor.drain_s=10")
    try:
        code, output = run.run("--detach", *many)
        assert code == 0 and "it runs detached" in output, output
        wait_until("its roles run", lambda: len(run.alive()) == 4)

        places = run.places(started)
        assert set(places) == {"ledger", "feeder", "learner", "worker-0"}

        before, incarnations = run.state(), {r.incarnation for r in run.records().values()}
        os.kill(before["pid"], signal.SIGKILL)
        wait_until("another supervisor", lambda: run.state().get("supervisor") not in (None, before["supervisor"]))
        wait_until("it takes the roles over", lambda: run.told().count("goes on under this supervisor") == 4)

        run.start(*many)  # attaches
        run.wait_for("its supervisor runs on the cluster already")
        run.wait_for("step ")
        assert {r.incarnation for r in run.records().values()} == incarnations, "no role was started again"
        assert run.places(started) == places, "it has adopted the places, and no other process could take them meanwhile"
        run.signal(signal.SIGINT)
        assert run.code() == 130 and "detached from the run, which goes on" in run.output()

        assert run.command("scale", str(run.config), "workers=2")[0] == 0
        wait_until("the second worker runs", lambda: "worker-1" in run.alive())
        leaving = next(node for node in nodes if node.id == run.where("learner"))
        leaving.drain()
        wait_until("the learner is elsewhere", lambda: run.where("learner") not in ("", leaving.id))
        assert "learner leaves node" in run.told() and "learner died" not in run.told()

        code, text = run.command("down", str(run.config))
        assert code == 0 and "has ended as stopped" in text, text
        wait_until("every role is gone", lambda: not run.alive())
        wait_until("every place is free", lambda: not run.places(started))
        code, text = run.command("audit", str(run.config))
        assert code == 0 and "audit: clean" in text
    finally:
        run.end()
