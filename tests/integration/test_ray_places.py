"""Places of roles on a Ray cluster: held over restarts, given back when nobody wants them, waited for where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_nodes import RayCluster
from ray_support import ClusterRun, cluster, needs_ray
from run_support import BOUND_S, environment, wait_until

pytestmark = [pytest.mark.timeout(3 * BOUND_S + 300), needs_ray]

HOLDS = """
import sys, ray
from rollbook.supervise.ray_backend import connect
connect(sys.argv[1], "tiny")
for name, cpus in (("rollbook/tiny/dead/worker-7/1", 3), ("rollbook/tinier/dead/worker-7/1", 0.1)):
    ray.get(ray.util.placement_group([{"CPU": cpus}], name=name, lifetime="detached").ready(), timeout=120)
"""
"""Leaves places of attempts that are dead, of the run and of another one."""


@pytest.fixture(scope="module")
def one() -> Iterator[RayCluster]:
    with cluster(4) as (started, _):
        yield started


def test_a_role_that_finds_no_place_is_named_at_once_and_ends_the_run_after_its_patience(one: RayCluster, tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, one.address)
    try:
        code, output = run.run("--wait-for-resources", "1", "--set", "cluster.learner_cpus=64")
        lacks = "no node has that many, the largest has 4 CPUs on 127.0.0.3"
        assert f"no place for learner (64 CPUs): {lacks}" in output and "of 4 roles 3 fit now, of 1 workers 1" in output
        assert output.index("no place for learner") < output.index("a new run"), "before anything is started"
        assert code == 1 and f"nothing advances, and nodes were waited for 1 s: learner waits for 64 CPUs: {lacks}" in output
        assert "died" not in output and run.alive() == [] and run.places(one) == {}
    finally:
        run.end()


def test_places_are_held_over_restarts_given_back_and_found_on_nodes_that_join(one: RayCluster, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLDS, one.address], env=environment(), check=True, timeout=BOUND_S)
    run = ClusterRun(tmp_path, one.address)
    assert set(run.places(one)) == {"worker-7"}
    try:
        run.start("--set", "run.steps=100000", "--set", "supervisor.drain_s=10", "--set", "workers.0.count=2")
        run.wait_for("places of an earlier attempt removed: worker-7")
        run.wait_for("step ")
        wait_until("both workers run", lambda: {"worker-0", "worker-1"} <= set(run.alive()))
        assert "no place for" not in run.output(), "what a dead attempt holds is no shortage"
        assert any(group["name"].startswith("rollbook/tinier/") for group in one.groups()), "another run's are its own"
        held = run.places(one)
        assert set(held) == {"ledger", "feeder", "learner", "worker-0", "worker-1"}
        assert {attempt for _, attempt in held.values()} == {run.state()["attempt"]}

        for role in ("learner", "worker-0"):
            os.kill(run.records()[role].pid, signal.SIGKILL)
            run.wait_for(f"{role} started again (pid")
        assert run.places(one) == held, "nobody else could have taken them"

        run.command("scale", str(run.config), "workers=3")
        text = "worker-2 waits for 1 CPU: on every node that has them they are taken, the most that is free is 0."
        wait_until("what it waits for is shown", lambda: text in run.command("status", str(run.config))[1])
        joined = one.add(1)
        wait_until("it runs on the node that has joined", lambda: run.where("worker-2") == joined.id)
        assert text not in run.command("status", str(run.config))[1]

        joined.drain()
        run.wait_for(f"worker-2 leaves node {joined.address} ({joined.id[:8]}), which is drained")
        wait_until("it waits again", lambda: "worker-2" in run.state()["waiting"])
        assert "worker-2" not in run.alive() and "worker-2 died" not in run.output()
        run.command("scale", str(run.config), "workers=1")
        wait_until("what is wanted no more holds nothing", lambda: set(run.places(one)) == set(held) - {"worker-1"})

        code, text = run.command("down", str(run.config))
        assert code == 0 and "has ended as stopped" in text and run.code() == 130
        assert run.places(one) == {} and run.alive() == []
        assert "audit: clean" in run.command("audit", str(run.config))[1]
    finally:
        run.end()
