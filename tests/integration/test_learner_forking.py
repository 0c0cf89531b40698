"""A learner whose replay computes other weights than the recorded ones, against the real ledger."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch

from learner_support import GROUP_SIZE, make_config, make_model_dir
from learner_worker import service
from rollbook.core.errors import ReplayDiverged, Unavailable
from rollbook.core.records import PlanOutcome
from rollbook.learner.loop import run_learner
from rollbook.learner.replay import replay
from rollbook.learner.trainer import StepResult, Trainer
from rollbook.ledger import schema as t
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

STEPS = 8
CRASH = "learner.after_publish=raise@6"
"""After version 5 of a run that began with version 0; checkpoints stand at 0, 2 and 4."""
WITHIN, BEYOND = 1e-6, 1e-2
"""Relative perturbations on both sides of the tolerance of 1e-4."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir, tmp_path):
    return make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps=2, on_divergence="fork", fork_tolerance=1e-4)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    yield
    failpoints.arm("")


class Lives:
    """Starts one learner after another, and lets chosen steps of a life end otherwise, once each."""

    def __init__(self, config, client, monkeypatch) -> None:
        self.config, self.client, self.monkeypatch = config, client, monkeypatch
        self.n = 0
        self.perturb: dict[int, float] = {}
        self.skip: set[int] = set()
        train_step = Trainer.train_step

        def altered(trainer, batch):
            step = trainer.progress.step + 1
            if step in self.skip:
                self.skip.remove(step)
                trainer.skip_step()
                return StepResult(PlanOutcome.SKIPPED, "a loss that was not finite", {"reward_mean": None, "seconds_step": 0.0})
            result = train_step(trainer, batch)
            if step in self.perturb:
                share = self.perturb.pop(step)
                with torch.no_grad():
                    for parameter in trainer.policy.model.parameters():
                        parameter.mul_(1 + share)
            return result

        monkeypatch.setattr(Trainer, "train_step", altered)

    def live(self, points="", *, perturb: dict[int, float] | None = None, skip: tuple[int, ...] = (), dies=FailpointRaised):
        """One life; with ``points`` it dies of them. Returns how it ended."""
        self.monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life {self.n}")
        self.monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life {self.n - 1}" if self.n else "")
        self.n += 1
        self.perturb, self.skip = dict(perturb or {}), set(skip)
        failpoints.arm(points)
        try:
            if not points:
                assert run_learner(self.config, self.client, threading.Event())
                return None
            with pytest.raises(dies) as ended:
                run_learner(self.config, self.client, threading.Event())
            return ended
        finally:
            failpoints.arm("")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "nothing changed for a minute"
        time.sleep(0.02)


def sampled_under(ledger, version: int, lineage: int = 0) -> set[tuple[int, int]]:
    c = t.sample.c
    with ledger._read() as conn:
        rows = conn.execute(sa.select(c.ordinal, c.sibling).where(c.version_max == version, c.lineage == lineage))
        return {tuple(row) for row in rows}


def keys_of(ledger, lineage: int, steps) -> set[tuple[int, int]]:
    return {tuple(item.key) for step in steps for item in ledger.read_plan(lineage, step).items}


def check_end(config, ledger, lineage: int) -> None:
    """The run is complete, clean, and the oracle meets every version along the ancestry."""
    assert ledger.audit() == []
    point = ledger.resume_point()
    assert (point.lineage, point.head.version, point.last_planned_step) == (lineage, STEPS, STEPS)
    result = replay(config, ledger, STEPS)
    assert result["equal"] and result["versions_compared"] == STEPS + 1
    assert replay(config, ledger, STEPS, from_checkpoint=True)["started_from"] == STEPS
    keys = [item.key for step in range(1, STEPS + 1) for item in ledger.read_plan(lineage, step).items]
    assert len(keys) == len(set(keys)) == STEPS * config.learner.groups_per_step * GROUP_SIZE


def lineages_of(ledger, lineage: int) -> list[int]:
    return [version.lineage for version in ledger.versions(lineage)]


@pytest.mark.parametrize("over_rpc", [False, True], ids=["in process", "over rpc"])
def test_within_tolerance_the_same_samples_continue_under_a_new_lineage(config, monkeypatch, over_rpc):
    with service(config, over_rpc=over_rpc) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: sampled_under(ledger, 5))
        recorded = {step: ledger.read_plan(0, step).items for step in range(1, 6)}
        lives.live(perturb={5: WITHIN})
        [fork] = ledger.run_status()["forks"]
        assert (fork["number"], fork["parent"], fork["fork_step"], fork["verdict"]) == (1, 0, 4, "within")
        assert fork["difference"] == pytest.approx(WITHIN, rel=0.2)
        assert fork["orphans_kept"] > 0 and fork["orphans_dropped"] == 0
        assert {step: ledger.read_plan(1, step).items for step in range(1, 6)} == recorded
        assert "orphan_version" not in ledger.run_status()["verdicts"]
        assert keys_of(ledger, 1, range(6, STEPS + 1)) & sampled_under(ledger, 5)
        assert lineages_of(ledger, 1) == [0] * 5 + [1] * 4
        check_end(config, ledger, 1)


def test_beyond_tolerance_orphans_are_dropped_counted_and_refilled(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: sampled_under(ledger, 5))
        lives.live(perturb={5: BEYOND})
        status = ledger.run_status()
        [fork] = status["forks"]
        assert fork["verdict"] == "dropped" and fork["orphans_dropped"] > 0 and fork["orphans_kept"] == 0
        assert fork["difference"] > 1e-4
        assert status["verdicts"]["orphan_version"] >= fork["orphans_dropped"]
        assert status["groups"]["refilled"] == status["verdicts"]["orphan_version"] / GROUP_SIZE
        planned_before = keys_of(ledger, 1, [5])
        assert not (keys_of(ledger, 1, range(6, STEPS + 1)) & sampled_under(ledger, 5)) - planned_before
        check_end(config, ledger, 1)


def test_kept_by_configuration_orphans_stay_within_the_lag_of_the_path(config, monkeypatch):
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, keep_orphans=True))
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: sampled_under(ledger, 5))
        lives.live(perturb={5: BEYOND})
        [fork] = ledger.run_status()["forks"]
        assert fork["verdict"] == "kept" and fork["orphans_kept"] > 0
        assert "orphan_version" not in ledger.run_status()["verdicts"]
        check_end(config, ledger, 1)


def test_without_leave_to_fork_the_run_stops_and_names_the_setting(config, monkeypatch):
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, on_divergence="stop"))
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        ended = lives.live("learner.never=raise", perturb={5: WITHIN}, dies=ReplayDiverged)
        assert 'learner.on_divergence = "fork"' in str(ended.value) and "step 5" in str(ended.value)
        assert ledger.run_status()["forks"] == [] and ledger.resume_point().head.version == 5
        lives.live()
        check_end(config, ledger, 0)


def test_the_difference_is_the_largest_over_all_recorded_versions(config, monkeypatch):
    """The replay leaves the recorded weights a little at step 5 and far at step 6; both are recorded."""
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live("learner.checkpoint.mid_files=raise@7")
        assert ledger.resume_point().head.version == 6
        lives.live(perturb={5: WITHIN, 6: BEYOND})
        [fork] = ledger.run_status()["forks"]
        assert (fork["fork_step"], fork["verdict"]) == (4, "dropped") and fork["difference"] == pytest.approx(BEYOND, rel=0.2)
        check_end(config, ledger, 1)


def test_recorded_bytes_that_are_gone_count_as_beyond_tolerance(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: sampled_under(ledger, 5))
        shutil.rmtree(Path(config.run.dir) / ledger.versions(0)[5].path)
        lives.live(perturb={5: WITHIN})
        [fork] = ledger.run_status()["forks"]
        assert fork["verdict"] == "dropped" and fork["difference"] is None
        check_end(config, ledger, 1)


def test_a_second_divergence_forks_again(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: sampled_under(ledger, 5))
        lives.live("learner.after_publish=raise@3", perturb={5: WITHIN})
        assert (ledger.resume_point().lineage, ledger.resume_point().head.version) == (1, 7)
        lives.live(perturb={7: BEYOND})
        forks = ledger.run_status()["forks"]
        assert [(f["number"], f["parent"], f["fork_step"]) for f in forks] == [(1, 0, 4), (2, 1, 6)]
        assert [f["verdict"] for f in forks] == ["within", "dropped"]
        assert lineages_of(ledger, 2) == [0] * 5 + [1, 1, 2, 2]
        check_end(config, ledger, 2)


def test_a_second_divergence_among_the_copied_plans_forks_again(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live("learner.checkpoint.mid_files=raise@7")
        lives.live("learner.after_publish=raise@1", perturb={5: WITHIN})
        assert (ledger.resume_point().lineage, ledger.resume_point().head.version) == (1, 5)
        lives.live(perturb={5: BEYOND})
        forks = ledger.run_status()["forks"]
        assert [(f["fork_step"], f["verdict"]) for f in forks] == [(4, "within"), (4, "dropped")]
        assert lineages_of(ledger, 2) == [0] * 5 + [2] * 4
        check_end(config, ledger, 2)


BETWEEN = [
    ("learner.before_fork=raise", 0),
    ("learner.after_fork=raise", 1),
    ("learner.after_finish_plan=raise@2", 1),
    ("learner.before_publish_row=raise@1", 1),
    ("learner.after_publish=raise@1", 1),
    ("learner.checkpoint.after_rename=raise@1", 1),
    ("learner.checkpoint.after_row=raise@1", 1),
]


@pytest.mark.parametrize(("point", "lineage"), BETWEEN)
def test_a_crash_at_any_point_of_a_fork_is_recovered(config, monkeypatch, point, lineage):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        lives.live(point, perturb={5: BEYOND})
        assert ledger.resume_point().lineage == lineage and ledger.audit() == []
        lives.live()
        check_end(config, ledger, lineage)


def test_a_fork_that_the_ledger_could_not_store_is_made_by_the_next_life(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        lives.live("ledger.fork.before_commit=raise", perturb={5: BEYOND}, dies=Unavailable)
        assert ledger.resume_point().lineage == 0 and ledger.audit() == []
        lives.live(perturb={5: BEYOND})
        check_end(config, ledger, 1)


def test_a_step_skipped_before_the_fork_is_skipped_after_it(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live("learner.checkpoint.mid_files=raise@7", skip=(5,))
        assert ledger.read_plan(0, 5).outcome is PlanOutcome.SKIPPED
        lives.live(perturb={6: BEYOND})
        plan = ledger.read_plan(1, 5)
        assert (plan.lineage, plan.outcome, plan.reason) == (1, PlanOutcome.SKIPPED, "a loss that was not finite")
        versions = {v.version: v.digest for v in ledger.versions(1)}
        assert versions[5] == versions[4] != versions[6]
        assert ledger.read_plan(1, 6).outcome is PlanOutcome.TRAINED
        check_end(config, ledger, 1)


def test_a_step_that_ended_otherwise_is_a_divergence_too(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        lives.live(skip=(5,))
        [fork] = ledger.run_status()["forks"]
        assert fork["verdict"] == "dropped" and fork["fork_step"] == 4
        assert ledger.read_plan(1, 5).outcome is PlanOutcome.TRAINED
        check_end(config, ledger, 1)


def test_the_fixed_schedule_goes_on_across_a_fork(config, monkeypatch):
    config = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, kind="fixed", lag_versions=1))
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        until(lambda: len(sampled_under(ledger, 5)) == 3 * GROUP_SIZE)
        lives.live(perturb={5: BEYOND})
        [fork] = ledger.run_status()["forks"]
        assert fork["verdict"] == "dropped" and fork["orphans_dropped"] == 3 * GROUP_SIZE, "step 7 is sampled under version 5"
        assert ledger.read_plan(1, 7).outcome is PlanOutcome.SKIPPED
        assert ledger.audit() == [] and ledger.resume_point().head.version == STEPS
        assert replay(config, ledger, STEPS)["equal"]


def test_version_directories_behind_the_fork_go_by_the_same_retention(config, monkeypatch):
    with service(config) as (client, ledger):
        lives = Lives(config, client, monkeypatch)
        lives.live(CRASH)
        lives.live(perturb={5: BEYOND})
        kept = sorted(path.name.rsplit(".", 1)[0] for path in (Path(config.run.dir) / "versions").iterdir())
        assert kept == ["0.0", "0.5", "1.5", "1.6", "1.7", "1.8"]
        assert not [name for name in (Path(config.run.dir) / "checkpoints").iterdir() if name.name.startswith("0.")]
