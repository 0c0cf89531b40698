"""One law of supervision over two backends: the same suite for processes of this machine and for a Ray cluster."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_support import ClusterRun, cluster
from rollbook.supervise import placements
from run_support import TinyRun, wait_until

pytestmark = pytest.mark.timeout(600)
MakeRun = Callable[..., TinyRun]


@pytest.fixture(scope="module", params=["local", "ray"])
def make_run(request: pytest.FixtureRequest) -> Iterator[MakeRun]:
    """Makes a run of the backend under a directory, with failpoints."""
    if request.param == "local":
        yield TinyRun
        return
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    with cluster(4) as (started, _):
        yield lambda root, failpoints=None: ClusterRun(root, started.address, failpoints)


@pytest.fixture
def ending() -> Iterator[list[TinyRun]]:
    """Runs to be ended whatever a test finds."""
    runs: list[TinyRun] = []
    yield runs
    for run in runs:
        run.end()


def test_killed_roles_are_started_again_and_the_run_completes_with_a_clean_audit(
    make_run: MakeRun, ending: list[TinyRun], tmp_path: Path
) -> None:
    kills = {"learner.after_publish": "crash@2", "worker.after_generate": "crash", "ledger.after_commit": "crash@20"}
    ending.append(run := make_run(tmp_path, kills))
    code, output = run.run()
    assert code == 0, f"{output}\n{run.tails()}"
    for role in ("learner", "worker-0", "ledger"):
        assert f"{role} died (killed by SIGKILL); starting it again" in output
        assert f"{role} started again (pid" in output
    assert "restarts: ledger 1, learner 1, worker-0 1" in output and output.count("audit: clean") == 1
    assert run.alive() == []
    starts = [entry["role"] for entry in placements.history(run.dir)]
    assert sorted(starts) == ["feeder", *["learner"] * 2, *["ledger"] * 2, *["worker-0"] * 2]
    code, text = run.command("status", str(run.config))
    assert code == 0 and f"learner pid {run.records()['learner'].pid}" in text


def test_a_spent_budget_ends_the_run_with_its_first_cause(make_run: MakeRun, ending: list[TinyRun], tmp_path: Path) -> None:
    ending.append(run := make_run(tmp_path, {"ledger.before_commit": "crash"}))
    run.once = False
    code, output = run.run("--set", "supervisor.restarts_max=1")
    assert code == 1
    assert "RestartBudgetSpent: ledger died 2 times" in output
    assert "Create the ledger" in output.partition("first cause: killed by SIGKILL\n")[2]
    assert run.alive() == [] and "audit" not in output


def test_a_run_goes_on_where_it_was_after_a_drain_and_after_the_death_of_its_supervisor(
    make_run: MakeRun, ending: list[TinyRun], tmp_path: Path
) -> None:
    ending.append(run := make_run(tmp_path, {"learner.before_plan": "delay:600@2"}))
    run.start("--set", "supervisor.drain_s=3")
    run.wait_fired("learner.before_plan@2")
    assert sorted(run.alive()) == ["feeder", "learner", "ledger", "worker-0"]
    run.signal(signal.SIGTERM)
    assert run.code() == 130
    assert "stopped; the same command goes on from here" in run.output() and run.alive() == []
    run.failpoints = {"learner.after_publish": "delay:600"}
    run.start("--set", "ledger.role_ttl_s=3")
    run.wait_fired("learner.after_publish@1")
    run.signal(signal.SIGKILL)
    assert run.code() == -signal.SIGKILL
    wait_until("every role is gone", lambda: not run.alive())
    code, output = run.run("--no-report", "--set", "ledger.role_ttl_s=3")
    assert code == 0, f"{output}\n{run.tails()}"
    assert "audit: clean" in output and run.steps() == [1, 2, 3]


def test_a_refused_configuration_is_no_death(make_run: MakeRun, ending: list[TinyRun], tmp_path: Path) -> None:
    ending.append(run := make_run(tmp_path))
    run.start("--set", "learner.group_size=3")
    wait_until("the ledger is opened", lambda: (run.dir / "config.json").exists())
    run.signal(signal.SIGTERM)
    assert run.code() == 130
    code, output = run.run()
    assert code == 2
    assert "ledger refuses to start" in output and "learner.group_size: 3 -> 2" in output
    assert run.alive() == [] and "starting it again" not in output


def test_an_order_changes_the_number_of_workers_and_another_one_ends_the_run(
    make_run: MakeRun, ending: list[TinyRun], tmp_path: Path
) -> None:
    ending.append(run := make_run(tmp_path))
    run.start("--set", "run.steps=100000")
    run.wait_for("step    1/")
    assert run.command("scale", str(run.config), "workers=2") == (0, "workers = 2 ordered\n")
    run.wait_for("worker-1 is added")
    wait_until("the second worker runs", lambda: "worker-1" in run.alive())
    run.command("scale", str(run.config), "workers=1")
    run.wait_for("worker-1 is wanted no more")
    wait_until("it has gone", lambda: "worker-1" not in run.alive())
    assert "worker-1 died" not in run.output()
    code, text = run.command("down", str(run.config))
    assert code == 0 and "has ended as stopped" in text
    assert run.code() == 130 and run.alive() == []
    code, text = run.command("down", str(run.config))
    assert code == 0 and "is not running: its last supervisor ended as stopped" in text
