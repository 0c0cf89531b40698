"""The story of a sample: every stage is told, in order, from rows; unknown and expired ids say what there is."""

from __future__ import annotations

import json

import pytest
from ledger_support import Scene, trajectory

from ledger_bench import Bench
from rollbook.cli.inspecting import story_lines
from rollbook.core.errors import UnknownSlot
from rollbook.core.idempotency import digest
from rollbook.core.records import Blame, FailureReport, PlanOutcome, RewardStatus, SlotKey, ToolCall


def history(s: Scene, key: SlotKey) -> list[dict]:
    return s.ledger.explain(key)["history"]


def test_a_sample_that_failed_once_called_a_tool_and_was_trained_is_told_in_order(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    first, *others = s.lease()
    s.ledger.report_failures(
        [FailureReport(first.key, first.token, s.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "verifier <silent>")]
    )
    again = s.lease()[0]
    assert again.key == first.key and again.token == first.token + 1
    call = ToolCall(again.key, 0, digest("call", "1+1"), trajectory(1, 0), "calculator", '{"expression": "1+1"}', None)
    s.ledger.record_tool_call(call, again.token)
    answered = ToolCall(again.key, 0, digest("call", "1+1"), trajectory(1, 0), "calculator", '{"expression": "1+1"}', '"2"')
    s.ledger.record_tool_call(answered, again.token)
    s.submit([again, *others], reward=0.25)
    s.train(1)
    s.checkpoint(1)
    story = s.ledger.explain(first.key)
    told = [entry["what"] for entry in story["history"]]
    assert told == [
        "issued", "lease_granted", "failure_reported", "lease_granted", "tool_called", "tool_answered", "sample_accepted",
        "planned", "trained", "checkpoint",
    ]  # fmt: skip
    issued, leased, failed, released, _, answer, accepted, planned, *_ = story["history"]
    assert issued["feeder"] == "feeder-1" and issued["feeder_epoch"] == 1
    assert (leased["token"], leased["attempt"], leased["version"], leased["engine"]) == (1, 1, 0, "engine")
    assert (failed["status"], failed["blame"], failed["reason"]) == ("timeout", "unclear", "verifier <silent>")
    assert (released["token"], released["attempt"]) == (2, 2)
    assert answer["tool"] == "calculator" and answer["took_s"] >= 0
    assert accepted["reward"] == 0.25 and accepted["logprob_mean"] == pytest.approx(-1.5)
    assert (planned["base_version"], planned["lag"], planned["valid"]) == (0, 0, True)
    assert story["state"] == "applied" and story["end"] == "applied: step 1 is part of checkpoint 0.1.1"
    assert story["logprob_min"] == pytest.approx(-2.5) and story["n_trained_tokens"] == 3
    assert story["group_reward_mean"] == 0.25 and story["reward_above_group"] == 0
    assert story["step_token_share"] == pytest.approx(1 / 4) and story["step_samples"] == 4
    times = [entry["at_s"] for entry in story["history"]]
    assert times == sorted(times)
    assert json.loads(json.dumps(story)) == story
    text = "\n".join(story_lines(story))
    assert "failure_reported" in text and "reason=verifier <silent>" in text and "lease_granted" in text


def test_a_dropped_sample_says_why_and_who_takes_its_place(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, survivors_min=2)
    s.feed(1)
    for grant in s.lease(2):
        report = FailureReport(grant.key, grant.token, s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "no spawn")
        s.ledger.report_failures([report])
    story = s.ledger.explain(SlotKey(0, 0))
    assert story["state"] == "failed" and "no spawn" in json.dumps(story["history"])
    assert story["end"].startswith("failed: ") and f"group {story['refilled_by']} takes its place" in story["end"]


def test_a_quarantined_sample_says_who_took_it_out_and_a_skipped_step_why(bench: Bench) -> None:
    s = bench.scene()
    s.feed(3)
    s.ledger.quarantine_group(2, "poison prompt")
    story = s.ledger.explain(SlotKey(2, 1))
    assert story["end"].startswith("quarantined: ") and "poison prompt" in story["end"]
    assert [entry["what"] for entry in story["history"]][-2:] in (["verdict", "group_closed"], ["group_closed", "verdict"])
    s.fill(4)
    s.plan(1)
    s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.SKIPPED, "loss is not finite", "{}")
    story = s.ledger.explain(SlotKey(0, 0))
    assert story["outcome"] == "skipped" and story["reason"] == "loss is not finite"


def test_where_a_sample_stands_is_said_at_every_stage(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    key = SlotKey(0, 0)
    story = s.ledger.explain(key)
    assert story["end"] == "pending: it waits for a worker" and (story["trace_id"], story["trace_sampled"]) == (None, None)
    assert "trace" not in "\n".join(story_lines(story))
    grants = s.lease()
    assert s.ledger.explain(key)["end"] == "leased: a worker has it"
    s.submit(grants)
    assert s.ledger.explain(key)["end"] == "submitted: it waits for a step to take it"
    s.plan(1)
    assert s.ledger.explain(key)["end"] == "planned: its step is not in a checkpoint yet"


def test_a_checkpoint_that_was_let_go_still_tells_when_the_step_became_durable(bench: Bench) -> None:
    s = bench.scene(steps=9)
    for step in (1, 2, 3):
        s.feed(2)
        s.fill()
        s.train(step)
        s.checkpoint(step)
    s.ledger.mark_checkpoint(s.learner, 0, 1, "deleting")
    story = s.ledger.explain(SlotKey(0, 0))
    assert story["end"] == "applied: step 1 is part of checkpoint 0.2.1", "one that can be loaded"
    last = story["history"][-1]
    assert (last["what"], last["step"], last["dir"], last["let_go"]) == ("checkpoint", 1, "0.1.1", True)
    s.ledger.mark_checkpoint(s.learner, 0, 1, "corrupt")
    assert s.ledger.explain(SlotKey(0, 0))["history"][-1]["step"] == 2, "what was corrupt may never have been durable"


def test_an_unknown_id_names_what_exists(bench: Bench) -> None:
    s = bench.scene()
    with pytest.raises(UnknownSlot, match="no group has been issued yet"):
        s.ledger.explain(SlotKey(0, 0))
    s.feed(2)
    with pytest.raises(UnknownSlot, match="ordinals go from 0 to 1"):
        s.ledger.explain(SlotKey(7, 0))
    with pytest.raises(UnknownSlot, match="group 1 has the siblings 0 to 1"):
        s.ledger.explain(SlotKey(1, 9))
