"""Raylets of the drills: several on one machine, one killed with its whole tree, and joined again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drills.runs import HOOKS, environment
from ray_nodes import RayCluster
from run_support import wait_until

pytestmark = pytest.mark.timeout(400)


def test_a_node_is_killed_with_its_whole_tree_and_joins_again(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="RAY NODES NOT TRIED: ray is not installed")
    env = environment(HOOKS) | {"DRILL_PID": str(os.getpid()), "DRILL_CONTROL": str(tmp_path)}
    with RayCluster(workers=2, env=env) as cluster:
        node, other = cluster.workers
        assert {cluster.head.id, node.id, other.id} == set(cluster.alive()) and cluster.head.id != node.id
        tree, others, first = node.pids(), cluster.head.pids(), node.id
        assert len(tree) >= 2 and not set(tree) & set(others)
        assert node.kill() >= len(tree) and node.pids() == []
        assert not [pid for pid in tree if _lives(pid)], "nothing of the node is left"
        assert [pid for pid in others if _lives(pid)] == others, "nothing else was touched"
        node.rejoin()
        assert node.id != first and node.id in cluster.alive()
        wait_until("Ray counts the killed raylet as dead", lambda: first not in cluster.alive())
        commands = [one.process.poll() for one in cluster.nodes if one.process is not None]
        assert commands == [None] * 3, "what dies with the drill has not died before it"
        everything = [pid for one in cluster.nodes for pid in one.pids()]
        root = cluster.root
    assert not [pid for pid in everything if _lives(pid)] and not root.exists()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}")
