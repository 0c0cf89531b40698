"""Versions, checkpoints, the resume point and tool calls, on both databases."""

from __future__ import annotations

import dataclasses

import pytest
from ledger_support import Scene, key, trajectory, version

from ledger_bench import Bench
from rollbook.core.errors import ChainMismatch, Conflict, Fenced, InvalidRequest, NotFound, ReplayDiverged, UnknownSlot
from rollbook.core.records import Checkpoint, CheckpointState, PlanOutcome, SlotKey, ToolCall, Trajectory


def trained(bench: Bench, steps: int) -> Scene:
    s = bench.scene()
    for step in range(1, steps + 1):
        s.feed(2)
        s.fill()
        s.train(step)
    return s


def test_publishing_a_version_twice_changes_nothing_and_another_digest_is_a_diverged_replay(bench: Bench) -> None:
    s = trained(bench, 1)
    assert s.ledger.publish_version(s.learner, version(1)) == version(1)
    moved = dataclasses.replace(version(1), path="elsewhere")
    assert s.ledger.publish_version(s.learner, moved) == version(1)
    with pytest.raises(ReplayDiverged, match="version 1"):
        s.ledger.publish_version(s.learner, version(1, content="other"))
    assert s.ledger.versions(0) == [version(0), version(1)]


def test_versions_leave_no_gap_and_come_after_their_steps_outcome(bench: Bench) -> None:
    s = bench.scene(publish=False)
    with pytest.raises(InvalidRequest, match="version 0 is not published"):
        s.ledger.publish_version(s.learner, version(1))
    s.ledger.publish_version(s.learner, version(0))
    s.feed(2)
    s.fill()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no outcome"):
            s.ledger.publish_version(s.learner, version(1))
        s.plan(1)
    s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.TRAINED, "", "{}")
    s.ledger.publish_version(s.learner, version(1))
    with pytest.raises(InvalidRequest):
        s.ledger.publish_version(s.learner, version(-1))
    with pytest.raises(NotFound, match="lineage 1"):
        s.ledger.publish_version(s.learner, version(2, lineage=1))


def test_committing_a_checkpoint_twice_changes_nothing(bench: Bench) -> None:
    s = trained(bench, 1)
    made = s.checkpoint(1)
    assert s.checkpoint(1) == made
    bench.crash(s)
    assert s.checkpoint(1) == made
    with pytest.raises(Conflict, match=r"0\.1"):
        s.checkpoint(1, content="other")


def test_a_checkpoint_of_another_history_is_refused(bench: Bench) -> None:
    s = trained(bench, 1)
    for step in (0, 1):
        with pytest.raises(ChainMismatch, match="another history"):
            s.ledger.commit_checkpoint(s.learner, Checkpoint(0, step, "d", "m", "f" * 64))


def test_a_checkpoint_needs_the_outcome_of_its_step(bench: Bench) -> None:
    s = trained(bench, 1)
    s.feed(2)
    s.fill()
    with pytest.raises(InvalidRequest, match="no plan"):
        s.ledger.commit_checkpoint(s.learner, Checkpoint(0, 2, "d", "m", "f" * 64))
    plan = s.plan(2)
    with pytest.raises(InvalidRequest, match="no outcome"):
        s.ledger.commit_checkpoint(s.learner, Checkpoint(0, 2, "d", "m", plan.chain_digest))
    marked = Checkpoint(0, 1, "d", "m", "c", CheckpointState.CORRUPT)
    with pytest.raises(InvalidRequest, match="'committed'"):
        s.ledger.commit_checkpoint(s.learner, marked)


def test_a_damaged_checkpoint_is_replaced_by_the_replayed_one(bench: Bench) -> None:
    s = trained(bench, 2)
    for step in (0, 1, 2):
        s.checkpoint(step)
    s.ledger.mark_checkpoint(s.learner, 0, 2, "corrupt")
    s.ledger.mark_checkpoint(s.learner, 0, 2, "corrupt")
    assert [c.step for c in s.ledger.resume_point().checkpoints] == [1, 0]
    replaced = s.checkpoint(2, content="replayed")
    assert s.ledger.resume_point().checkpoints[0] == replaced


def test_the_newest_two_checkpoints_are_never_deleted(bench: Bench) -> None:
    s = trained(bench, 3)
    for step in range(4):
        s.checkpoint(step)
    for step in (3, 2):
        with pytest.raises(InvalidRequest, match="newest 2"):
            s.ledger.mark_checkpoint(s.learner, 0, step, "deleting")
    s.ledger.mark_checkpoint(s.learner, 0, 1, "deleting")
    s.ledger.mark_checkpoint(s.learner, 0, 3, "corrupt")
    with pytest.raises(InvalidRequest, match="newest 2"):
        s.ledger.mark_checkpoint(s.learner, 0, 0, "deleting")
    with pytest.raises(NotFound):
        s.ledger.mark_checkpoint(s.learner, 0, 9, "deleting")
    with pytest.raises(InvalidRequest, match="'committed'"):
        s.ledger.mark_checkpoint(s.learner, 0, 0, "committed")


def test_the_resume_point_names_everything_a_learner_needs(bench: Bench) -> None:
    s = bench.scene()
    fresh = s.ledger.resume_point()
    assert (fresh.lineage, fresh.checkpoints, fresh.last_planned_step, fresh.head) == (0, (), 0, version(0))
    s.checkpoint(0)
    s.feed(4)
    s.fill()
    s.train(1)
    made = s.checkpoint(1)
    s.plan(2)
    point = s.ledger.resume_point()
    assert (point.checkpoints[0], point.last_planned_step, point.head) == (made, 2, version(1))
    assert point.chain_digests == {0: fresh.chain_digests[0], 1: s.ledger.read_plan(0, 1).chain_digest}
    bench.crash(s)
    assert s.ledger.resume_point() == point


def test_applied_is_what_the_newest_usable_checkpoint_covers(bench: Bench) -> None:
    s = trained(bench, 2)
    s.checkpoint(0)
    s.checkpoint(1)
    assert {k: s.ledger.run_status()["slots"][k] for k in ("planned", "applied")} == {"planned": 4, "applied": 4}
    s.checkpoint(2)
    assert s.ledger.run_status()["slots"]["applied"] == 8
    s.ledger.mark_checkpoint(s.learner, 0, 2, "corrupt")
    assert s.ledger.run_status()["slots"]["applied"] == 4
    assert s.ledger.explain(key("0.0"))["state"] == "applied"
    assert s.ledger.explain(key("2.0"))["state"] == "planned"


EMPTY = Trajectory(b"", b"", b"")


def call(index: int, prefix: Trajectory = EMPTY, request: str = "q", response: str | None = None) -> ToolCall:
    return ToolCall(key("0.0"), index, f"digest-{request}", prefix, "search", f'{{"q": "{request}"}}', response)


def test_a_tool_call_is_recorded_before_and_after_and_never_answered_anew(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    (grant,) = s.lease(1)
    prefix = trajectory(4, 0, 20, b"\1\1\0\0")
    pending = s.ledger.record_tool_call(call(0, prefix), grant.token)
    assert pending.response_json is None
    assert s.ledger.record_tool_call(call(0, prefix), grant.token) == pending
    answered = s.ledger.record_tool_call(call(0, prefix, response='{"a": 1}'), grant.token)
    assert answered.response_json == '{"a": 1}'
    assert s.ledger.record_tool_call(call(0, prefix, response='{"a": 2}'), grant.token) == answered
    s.ledger.record_tool_call(call(1), grant.token)
    bench.crash(s)
    assert s.ledger.tool_calls(key("0.0")) == [answered, call(1)]
    assert s.ledger.tool_calls(key("0.0"))[0].prefix == prefix
    history = [e["what"] for e in s.ledger.explain(key("0.0"))["history"]]
    assert history.count("tool_called") == 2
    assert history.count("tool_answered") == 1


def test_a_released_rollout_continues_from_the_recorded_calls_and_its_former_worker_is_fenced(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    (old,) = s.lease(1)
    s.ledger.record_tool_call(call(0), old.token)
    bench.let_time_pass(31.0)
    (new,) = s.lease(1, incarnation=s.worker())
    with pytest.raises(Fenced, match="not the newest"):
        s.ledger.record_tool_call(call(0, response="{}"), old.token)
    assert s.ledger.record_tool_call(call(0), new.token).call_index == 0
    s.ledger.record_tool_call(call(0, response="{}"), new.token)
    assert len(s.ledger.tool_calls(key("0.0"))) == 1


def test_a_tool_call_with_another_request_is_a_counted_conflict(bench: Bench) -> None:
    s = bench.scene()
    s.feed(1)
    (grant,) = s.lease(1)
    s.ledger.record_tool_call(call(0), grant.token)
    with pytest.raises(Conflict, match="another request"):
        s.ledger.record_tool_call(call(0, request="other"), grant.token)
    assert bench.rows("SELECT count(*) FROM event WHERE kind = 'tool_conflict'") == [(1,)]
    with pytest.raises(InvalidRequest, match="never recorded"):
        s.ledger.record_tool_call(call(1, response="{}"), grant.token)
    with pytest.raises(InvalidRequest, match="index 1"):
        s.ledger.record_tool_call(call(2), grant.token)
    for verb in (lambda: s.ledger.tool_calls(SlotKey(7, 7)),
                 lambda: s.ledger.record_tool_call(dataclasses.replace(call(0), key=SlotKey(7, 7)), 1)):  # fmt: skip
        with pytest.raises(UnknownSlot):
            verb()
