"""The learner against the real ledger on SQLite, with rollouts arriving while it trains and dies."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from learner_support import make_config, make_model_dir
from learner_worker import service
from rollbook.core.records import PlanOutcome
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.loop import run_learner
from rollbook.learner.replay import replay
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

STEPS = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


def fixed_config(model_dir, run_dir, lag: int = 1):
    config = make_config(model_dir, run_dir, steps=STEPS, every_steps=2)
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, kind="fixed", lag_versions=lag))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    yield
    failpoints.arm("")


def live(config, ledger, monkeypatch, armed: list[str]) -> None:
    """One life per entry; every entry but the last crashes the learner."""
    for number, points in enumerate(armed):
        monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life {number}")
        monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life {number - 1}" if number else "")
        failpoints.arm(points)
        if points:
            with pytest.raises(FailpointRaised):
                run_learner(config, ledger, threading.Event())
        else:
            assert run_learner(config, ledger, threading.Event())


def final_digest(config) -> str:
    files = CheckpointFiles(Path(config.run.dir) / "checkpoints")
    name = files.names()[0]
    return files.read(files.verify(name)).digest()


def digests(ledger) -> list[str]:
    return [version.digest for version in ledger.versions(0)]


CRASHES = [
    "learner.after_publish=raise@1",
    "learner.after_plan=raise@2",
    "learner.before_publish_row=raise@2",
    "learner.checkpoint.after_rename=raise@1",
    "learner.mid_step=raise@1",
]


def test_a_killed_run_in_fixed_lag_is_the_same_run(model_dir, tmp_path, monkeypatch):
    """Oracle W: with rollouts a function of key and version, crashes change nothing at all."""
    quiet = fixed_config(model_dir, tmp_path / "quiet")
    with service(quiet) as (ledger, _):
        live(quiet, ledger, monkeypatch, [""])
        expected = digests(ledger)
        assert ledger.audit() == []
    killed = fixed_config(model_dir, tmp_path / "killed")
    with service(killed) as (ledger, _):
        live(killed, ledger, monkeypatch, [*CRASHES, ""])
        assert digests(ledger) == expected
        assert ledger.audit() == []
        assert replay(killed, ledger, STEPS)["equal"]
    assert final_digest(killed) == final_digest(quiet)


@pytest.mark.parametrize("over_rpc", [False, True], ids=["in process", "over rpc"])
def test_a_killed_run_in_bounded_lag_agrees_with_oracle_r(model_dir, tmp_path, monkeypatch, over_rpc):
    config = make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps=2)
    with service(config, over_rpc=over_rpc) as (ledger, _):
        live(config, ledger, monkeypatch, [*CRASHES, ""])
        result = replay(config, ledger, STEPS)
        assert result["equal"] and result["versions_compared"] == STEPS + 1
        assert result["state_digest"] == final_digest(config)
        assert ledger.audit() == []
        plans = [ledger.read_plan(0, step) for step in range(1, STEPS + 1)]
        assert all(plan.outcome is PlanOutcome.TRAINED for plan in plans)
        keys = [item.key for plan in plans for item in plan.items]
        assert len(keys) == len(set(keys))
        metrics = ledger.step_metrics(0)
        assert [entry["step"] for entry in metrics] == list(range(1, STEPS + 1))
        assert all(entry["lag_head_max"] <= config.schedule.max_lag_versions for entry in metrics)


def test_a_run_goes_on_over_a_restart_of_the_ledger(model_dir, tmp_path, monkeypatch):
    config = fixed_config(model_dir, tmp_path / "run", lag=0)
    with service(config) as (ledger, _):
        live(config, ledger, monkeypatch, ["learner.before_plan=raise@4"])
    with service(config) as (ledger, _):
        monkeypatch.setenv("ROLLBOOK_INCARNATION", "after")
        monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "life 0")
        failpoints.arm("")
        assert run_learner(config, ledger, threading.Event())
        assert replay(config, ledger, STEPS)["equal"] and ledger.audit() == []
        manifest = json.loads((Path(config.run.dir) / "checkpoints" / f"0.{STEPS}.2" / "MANIFEST.json").read_text())
        assert manifest["epoch"] == 2
