"""The whole learner against a ledger: crash anywhere, resume, and end with the weights of the unbroken run (P4, oracle R)."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

import pytest

from learner_support import MemoryLedger, make_config, make_model_dir, rollouts
from rollbook.core.errors import ChainMismatch, ConfigMismatch, Fenced, InvalidRequest, ReplayDiverged, RoleHeld, Unavailable
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import CheckpointState, PlanOutcome, Role
from rollbook.learner import loop
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.loop import run_learner
from rollbook.learner.publish import WEIGHTS_FILE
from rollbook.learner.replay import replay
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

STEPS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir, tmp_path):
    return make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps=2)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    yield
    failpoints.arm("")


def start(config, ledger, monkeypatch, name="one", supersedes="", stop=None) -> bool:
    """One learner process' life."""
    monkeypatch.setenv("ROLLBOOK_INCARNATION", name)
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", supersedes)
    return run_learner(config, ledger, stop or threading.Event())


def final_state(config):
    """State of the newest checkpoint on disk."""
    files = CheckpointFiles(config_dir(config) / "checkpoints")
    name = files.names()[0]
    return files.read(files.verify(name))


def config_dir(config):
    from pathlib import Path

    return Path(config.run.dir)


@pytest.fixture(scope="module")
def unbroken(model_dir, tmp_path_factory):
    """Digests of every version and of the final state of a run nobody disturbed."""
    config = make_config(model_dir, tmp_path_factory.mktemp("unbroken"), steps=STEPS, every_steps=2)
    ledger = MemoryLedger(config)
    assert run_learner(config, ledger, threading.Event())
    return {v: p.digest for v, p in ledger.published.items()}, final_state(config).digest()


def digests(ledger) -> dict[int, str]:
    return {v: p.digest for v, p in ledger.published.items()}


def test_a_run_publishes_every_version_and_commits_checkpoints(config, monkeypatch):
    ledger = MemoryLedger(config)
    assert start(config, ledger, monkeypatch)
    assert sorted(ledger.published) == list(range(STEPS + 1))
    assert len(set(digests(ledger).values())) == STEPS + 1
    assert [s for s, c in ledger.checkpoints.items() if c.state is CheckpointState.COMMITTED] == [4, 6]
    assert all(plan.outcome is PlanOutcome.TRAINED for plan in ledger.plans.values())
    assert ledger.term is None
    metrics = json.loads(ledger.metrics[3])
    assert metrics["reward_mean"] is not None and metrics["seconds_plan_wait"] >= 0
    kept = sorted(int(path.name.split(".")[1]) for path in (config_dir(config) / "versions").iterdir())
    assert kept == [0, 3, 4, 5, 6]


def test_oracle_r_agrees_with_the_run_and_writes_nothing(config, monkeypatch):
    ledger = MemoryLedger(config)
    start(config, ledger, monkeypatch)
    before = sorted(str(path) for path in config_dir(config).rglob("*"))
    result = replay(config, ledger, STEPS)
    assert result["equal"] and result["versions_compared"] == STEPS + 1 and result["versions_missing"] == []
    assert result["version_digest"] == ledger.published[STEPS].digest
    assert result["state_digest"] == final_state(config).digest()
    assert sorted(str(path) for path in config_dir(config).rglob("*")) == before and ledger.term is None
    with pytest.raises(InvalidRequest, match="steps 0 to 6"):
        replay(config, ledger, STEPS + 1)


def test_oracle_r_finds_a_planted_difference(config, monkeypatch):
    ledger = MemoryLedger(config)
    start(config, ledger, monkeypatch)
    ledger.published[4] = dataclasses.replace(ledger.published[4], digest="f" * 64)
    result = replay(config, ledger, STEPS)
    assert not result["equal"] and result["first_difference"]["step"] == 4


POINTS = {
    "learner.before_plan": (1, 4),
    "learner.after_plan": (1, 4),
    "learner.mid_step": (1, 3),
    "learner.after_step": (1, 4),
    "learner.after_finish_plan": (1, 5),
    "learner.before_publish_row": (1, 2, 5),
    "learner.after_publish": (1, 2, 5),
    "learner.checkpoint.mid_files": (1, 2, 3, 5),
    "learner.checkpoint.before_rename": (1, 2, 4),
    "learner.checkpoint.after_rename": (1, 2, 4),
    "learner.checkpoint.after_row": (1, 2, 4),
}
"""Crossings at which each point fires; together they hit start-up, steps with and without a checkpoint, and the end."""


@pytest.mark.parametrize(("point", "crossing"), [(p, c) for p, crossings in POINTS.items() for c in crossings])
def test_a_crash_at_any_point_ends_in_the_same_weights(config, monkeypatch, unbroken, point, crossing):
    versions, state = unbroken
    ledger = MemoryLedger(config)
    failpoints.arm(f"{point}=raise@{crossing}")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    planned = dict(ledger.plans)
    failpoints.arm("")
    assert start(config, ledger, monkeypatch, "two", supersedes="one")
    assert digests(ledger) == versions
    assert final_state(config).digest() == state
    for step, plan in planned.items():
        assert ledger.plans[step].items == plan.items
    assert not list(config_dir(config).rglob("tmp.*"))


def test_crashes_one_after_another_also_during_replay_end_in_the_same_weights(config, monkeypatch, unbroken):
    versions, state = unbroken
    ledger = MemoryLedger(config)
    lives = ["learner.after_finish_plan=raise@4", "learner.mid_step=raise@1", "learner.checkpoint.after_rename=raise@1", ""]
    for life, armed in enumerate(lives):
        failpoints.arm(armed)
        previous = f"life {life - 1}" if life else ""
        if armed:
            with pytest.raises(FailpointRaised):
                start(config, ledger, monkeypatch, f"life {life}", previous)
        else:
            assert start(config, ledger, monkeypatch, f"life {life}", previous)
    assert digests(ledger) == versions and final_state(config).digest() == state


def test_a_finished_run_started_again_changes_nothing(config, monkeypatch, unbroken):
    ledger = MemoryLedger(config)
    start(config, ledger, monkeypatch)
    calls = ledger.plan_calls
    assert start(config, ledger, monkeypatch, "two")
    assert ledger.plan_calls == calls and final_state(config).digest() == unbroken[1]


def test_a_stop_finishes_the_step_commits_and_gives_the_role_up(config, monkeypatch, unbroken):
    ledger, stop = MemoryLedger(config), threading.Event()
    finish = ledger.finish_plan

    def stopping(term, lineage, step, *rest):
        if step == 3:
            stop.set()
        finish(term, lineage, step, *rest)

    monkeypatch.setattr(ledger, "finish_plan", stopping)
    assert not start(config, ledger, monkeypatch, stop=stop)
    assert max(ledger.published) == 3 and 3 in ledger.checkpoints and ledger.term is None
    assert start(config, ledger, monkeypatch, "two")
    assert digests(ledger) == unbroken[0] and final_state(config).digest() == unbroken[1]


def test_a_learner_without_a_plan_says_what_is_missing_and_obeys_a_stop(config, monkeypatch, caplog):
    monkeypatch.setattr(loop, "REPORT_EVERY_S", 0.0)
    ledger, stop = MemoryLedger(config), threading.Event()
    ledger.steps_ready = 1
    plan_step = ledger.plan_step

    def counting(*args, **kwargs):
        if ledger.plan_calls > 5:
            stop.set()
        return plan_step(*args, **kwargs)

    monkeypatch.setattr(ledger, "plan_step", counting)
    assert not start(config, ledger, monkeypatch, stop=stop)
    assert "step 2 has no plan" in caplog.text and "1 of 3 groups is complete" in caplog.text
    assert 1 in ledger.checkpoints


def test_a_damaged_newest_checkpoint_is_replayed_from_the_one_before(config, monkeypatch, unbroken, caplog):
    ledger = MemoryLedger(config)
    failpoints.arm("learner.before_plan=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    path = config_dir(config) / "checkpoints" / "0.4.1" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert start(config, ledger, monkeypatch, "two", supersedes="one")
    assert digests(ledger) == unbroken[0] and final_state(config).digest() == unbroken[1]
    assert "0.4.1/optimizer.safetensors" in caplog.text
    assert ledger.checkpoints[4].state is CheckpointState.COMMITTED


def test_with_no_readable_checkpoint_every_plan_is_replayed(config, monkeypatch, unbroken):
    ledger = MemoryLedger(config)
    failpoints.arm("learner.before_plan=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    for path in (config_dir(config) / "checkpoints").glob("*/state.json"):
        path.unlink()
    assert start(config, ledger, monkeypatch, "two", supersedes="one")
    assert digests(ledger) == unbroken[0] and final_state(config).digest() == unbroken[1]


def test_a_replay_that_gives_other_weights_stops_the_run_and_names_both(config, monkeypatch):
    ledger = MemoryLedger(config)
    failpoints.arm("learner.after_publish=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    recorded = ledger.published[5].digest
    ledger.published[5] = dataclasses.replace(ledger.published[5], digest="f" * 64)
    with pytest.raises(ReplayDiverged, match=f"step 5: recorded weights {'f' * 16}, replayed weights {recorded[:16]}"):
        start(config, ledger, monkeypatch, "two", supersedes="one")
    assert max(ledger.published) == 5


def poisoned(step: int):
    """Rollouts whose third step has no reward at all."""
    samples = rollouts(step)
    return [dataclasses.replace(sample, reward=None) for sample in samples] if step == 3 else samples


@pytest.mark.parametrize("point", ["", "learner.before_publish_row=raise@4", "learner.after_plan=raise@5"])
def test_a_skipped_step_is_published_recorded_and_obeyed_by_replay(config, monkeypatch, point):
    ledger = MemoryLedger(config, poisoned)
    failpoints.arm(point)
    if point:
        with pytest.raises(FailpointRaised):
            start(config, ledger, monkeypatch)
        failpoints.arm("")
    assert start(config, ledger, monkeypatch, "two", supersedes="one" if point else "")
    assert ledger.plans[3].outcome is PlanOutcome.SKIPPED and ledger.plans[3].reason == "no trainable token"
    assert ledger.published[3].digest == ledger.published[2].digest != ledger.published[4].digest
    assert final_state(config).progress.steps_skipped == 1
    assert replay(config, ledger, STEPS)["state_digest"] == final_state(config).digest()


def test_an_outcome_that_replay_does_not_meet_stops_the_run(config, monkeypatch):
    ledger = MemoryLedger(config, poisoned)
    failpoints.arm("learner.after_finish_plan=raise@3")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    ledger.plans[3] = dataclasses.replace(ledger.plans[3], outcome=PlanOutcome.TRAINED)
    with pytest.raises(ReplayDiverged, match="recorded as trained, its replay was skipped"):
        start(config, ledger, monkeypatch, "two", supersedes="one")


def test_a_learner_that_was_replaced_writes_nothing_more(config, monkeypatch):
    ledger = MemoryLedger(config)
    finish = ledger.finish_plan

    def replaced(term, lineage, step, *rest):
        if step == 3:
            ledger.acquire_role(Role.LEARNER, "two", 3.0, supersede="one")
        finish(term, lineage, step, *rest)

    monkeypatch.setattr(ledger, "finish_plan", replaced)
    with pytest.raises(Fenced):
        start(config, ledger, monkeypatch)
    assert ledger.plans[3].outcome is None and max(ledger.published) == 2
    assert ledger.term is not None and ledger.term.holder == "two"


def test_a_refused_renewal_stops_the_learner_before_its_next_write(config, monkeypatch):
    config = dataclasses.replace(config, ledger=dataclasses.replace(config.ledger, role_ttl_s=0.03))
    ledger, refused = MemoryLedger(config), threading.Event()

    def renew(term):
        refused.set()
        raise Fenced("a newer epoch holds the role")

    plan_step = ledger.plan_step

    def waiting(*args, **kwargs):
        assert refused.wait(10.0)
        return plan_step(*args, **kwargs)

    monkeypatch.setattr(ledger, "renew_role", renew)
    monkeypatch.setattr(ledger, "plan_step", waiting)
    with pytest.raises(Fenced, match="newer epoch"):
        start(config, ledger, monkeypatch)
    assert all(plan.outcome is None for plan in ledger.plans.values())


def test_a_held_role_is_waited_for_and_then_refused(config, monkeypatch):
    ledger = MemoryLedger(config)
    ledger.acquire_role(Role.LEARNER, "other", 3.0)
    with pytest.raises(RoleHeld, match="other"):
        loop.acquire(ledger, Role.LEARNER, "one", 3.0, "", threading.Event(), wait_s=0.0)
    ledger.term = None
    assert loop.acquire(ledger, Role.LEARNER, "one", 3.0, "", threading.Event(), wait_s=0.0).holder == "one"
    stopped = threading.Event()
    stopped.set()
    assert loop.acquire(ledger, Role.LEARNER, "two", 3.0, "", stopped, wait_s=60.0) is None


def test_a_plan_that_does_not_continue_the_chain_is_refused(config, monkeypatch):
    ledger = MemoryLedger(config)
    plan_step = ledger.plan_step

    def forged(term, lineage, step, wait_s=0.0):
        plan = plan_step(term, lineage, step, wait_s)
        return dataclasses.replace(plan, chain_digest="f" * 64) if step == 2 else plan

    monkeypatch.setattr(ledger, "plan_step", forged)
    with pytest.raises(ChainMismatch, match="step 2"):
        start(config, ledger, monkeypatch)


def stale(step: int):
    samples = rollouts(step)
    if step == 5:
        old = dataclasses.replace(samples[0].trajectory, versions=pack_i32([1] * samples[0].trajectory.n_tokens))
        samples[0] = dataclasses.replace(samples[0], trajectory=old)
    return samples


def test_a_plan_that_breaks_the_staleness_bound_is_refused(config, monkeypatch):
    with pytest.raises(InvalidRequest, match="lag bound 2"):
        start(config, MemoryLedger(config, stale), monkeypatch)


def test_payloads_that_are_not_the_planned_ones_are_refused(config, monkeypatch):
    ledger = MemoryLedger(config)
    monkeypatch.setattr(ledger, "payloads", lambda lineage, step: iter(reversed(ledger.samples[step])))
    with pytest.raises(Exception, match="plan item 0 is sample 0.0"):
        start(config, ledger, monkeypatch)


def test_a_changed_configuration_needs_a_revision_and_old_plans_keep_theirs(config, monkeypatch):
    ledger = MemoryLedger(config)
    failpoints.arm("learner.after_publish=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    changed = dataclasses.replace(config, learner=dataclasses.replace(config.learner, lr=1e-3))
    recorded = ledger.published[5].digest
    with pytest.raises(ConfigMismatch, match="learner.lr: 0.003 -> 0.001"):
        start(changed, ledger, monkeypatch, "two", supersedes="one")
    assert ledger.published[5].digest == recorded and max(ledger.published) == 5
    plan_step = ledger.plan_step

    def revised(term, lineage, step, wait_s=0.0):
        plan = plan_step(term, lineage, step, wait_s)
        return dataclasses.replace(plan, revision=1) if step == 6 else plan

    monkeypatch.setattr(ledger, "plan_step", revised)
    assert start(changed, ledger, monkeypatch, "three", supersedes="two")
    assert json.loads(ledger.metrics[6])["lr"] == pytest.approx(1e-4)
    ledger.plans[6] = dataclasses.replace(ledger.plans[6], revision=1)
    assert replay(changed, ledger, STEPS)["equal"]


def test_what_ended_a_learner_is_told_even_when_its_role_cannot_be_given_up(config, monkeypatch):
    ledger = MemoryLedger(config, stale)

    def unreachable(term):
        raise Unavailable("the ledger is gone")

    monkeypatch.setattr(ledger, "release_role", unreachable)
    with pytest.raises(InvalidRequest, match="lag bound 2"):
        start(config, ledger, monkeypatch)


def test_a_step_without_any_group_is_skipped_and_the_run_goes_on(config, monkeypatch):
    ledger = MemoryLedger(config, lambda step: [] if step == 2 else rollouts(step))
    assert start(config, ledger, monkeypatch)
    assert ledger.plans[2].outcome is PlanOutcome.SKIPPED and ledger.plans[3].outcome is PlanOutcome.TRAINED
    assert ledger.published[2].digest == ledger.published[1].digest


def test_a_plan_is_replayed_under_the_staleness_bound_it_was_planned_for(config, monkeypatch):
    ledger = MemoryLedger(config, lambda step: rollouts(step, lag=2 if step < STEPS else 1))
    failpoints.arm("learner.after_publish=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    changed = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, max_lag_versions=1))
    plan_step = ledger.plan_step

    def revised(term, lineage, step, wait_s=0.0):
        plan = plan_step(term, lineage, step, wait_s)
        return dataclasses.replace(plan, revision=1) if step == STEPS else plan

    monkeypatch.setattr(ledger, "plan_step", revised)
    assert start(changed, ledger, monkeypatch, "two", supersedes="one")


def test_lost_bytes_of_the_head_version_are_written_again(config, monkeypatch):
    ledger = MemoryLedger(config)
    failpoints.arm("learner.after_publish=raise@6")
    with pytest.raises(FailpointRaised):
        start(config, ledger, monkeypatch)
    failpoints.arm("")
    file = config_dir(config) / ledger.published[5].path / WEIGHTS_FILE
    data = file.read_bytes()
    file.unlink()
    assert start(config, ledger, monkeypatch, "two", supersedes="one")
    assert file.read_bytes() == data


def test_the_log_says_where_a_learner_starts(config, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    ledger = MemoryLedger(config)
    start(config, ledger, monkeypatch)
    assert "learner starts from step 0 of 6" in caplog.text and "committed a checkpoint" in caplog.text


def missing_behaviour(step: int):
    samples = rollouts(step)
    nothing = dataclasses.replace(samples[0].trajectory, logprobs=pack_f32([float("nan")] * samples[0].trajectory.n_tokens))
    return [dataclasses.replace(samples[0], trajectory=nothing), *samples[1:]]


def test_tokens_without_behaviour_log_probs_are_counted_in_the_metrics(config, monkeypatch):
    ledger = MemoryLedger(config, missing_behaviour)
    start(config, ledger, monkeypatch)
    assert json.loads(ledger.metrics[2])["behaviour_missing_tokens"] == rollouts(2)[0].trajectory.n_tokens
