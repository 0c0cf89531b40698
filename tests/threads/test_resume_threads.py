"""Public threads about samples that were lost or doubled and about runs that did not resume, against the ledger.

Each test is named after its thread; its docstring says in our words what went wrong there. ``mutants.threads`` names the
defect that each of them is shown to catch.
"""

from __future__ import annotations

import json

import pytest
from ledger_support import STREAM, sample_for, trajectory
from threads_support import (
    ACCEPTED,
    CONFLICT,
    FENCED,
    INVALID,
    REFUSED,
    REPLAYED,
    drop_stale_group,
    of_groups,
    ordinals_of,
    outcome_of,
)

from ledger_bench import Bench
from rollbook.core.errors import Fenced, NotReady
from rollbook.core.records import Role, ToolCall
from rollbook.observe import failpoints


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def test_verl_4199_in_flight_rollouts_survive_the_death_of_the_server(bench: Bench) -> None:
    """At resume every rollout that was being generated was lost and its prompt forgotten."""
    s = bench.scene()
    s.feed(2)
    grants = s.lease(4)
    assert s.submit(grants[:2]) == [ACCEPTED, ACCEPTED]
    bench.crash(s)
    assert s.submit(grants[2:]) == [ACCEPTED, ACCEPTED]
    assert [i.key for i in s.plan(1).items] == [g.key for g in grants]


def test_verl_7579_a_recycled_place_never_holds_the_bytes_of_another_sample(bench: Bench) -> None:
    """The buffer gave freed indexes to new prompts; after a crash a late write landed under an index that had moved on."""
    s = bench.scene(groups_per_step=1, lease_ttl_s=10_000.0)
    grants = drop_stale_group(s, bench)
    late = of_groups(grants, 0)[1:]
    bench.crash(s)
    assert s.submit(late) == [REFUSED]
    refill = bench.rows("SELECT ordinal FROM prompt_group WHERE refills = 0")
    assert refill == [(6,)], "the refill has a place nobody had before"
    assert bench.rows("SELECT count(*) FROM sample WHERE ordinal = 0") == [(1,)]


def test_verl_7579_a_writer_of_an_old_epoch_changes_nothing(bench: Bench) -> None:
    """Unless write identity is fenced, a process from before the crash writes into the state restored after it."""
    s = bench.scene()
    s.feed(2)
    s.ledger.acquire_role(Role.FEEDER, "feeder-2", 60.0, supersede="feeder-1")
    assert outcome_of(lambda: s.feed(2)) is Fenced
    assert s.ledger.cursor(STREAM).next_ordinal == 2


def test_verl_7759_prompts_issued_again_count_against_the_budget_they_had(bench: Bench) -> None:
    """A resumed run issued its in-flight prompts again and its warm-up prompts on top: too many, so later ones were skipped."""
    s = bench.scene(max_lag_versions=1, attempts_max=5)
    s.feed(12)
    first = s.lease()
    assert ordinals_of(first) == [0, 1, 2, 3]
    bench.crash(s, down_s=100.0)
    s.incarnation = s.worker()
    assert ordinals_of(s.lease()) == [0, 1, 2, 3]
    assert s.lease() == ()
    assert s.ledger.feed_demand(8) == 0


def test_verl_7037_a_prompt_issued_again_has_all_its_fields_however_often(bench: Bench) -> None:
    """Putting only a tag for a prompt in flight wiped its fields, so a second crash lost the prompt."""
    s = bench.scene(attempts_max=5)
    s.feed(2)
    seen = [[(g.key, g.prompt_ids, g.task_json, g.seed) for g in s.lease()]]
    for _ in range(2):
        bench.crash(s, down_s=100.0)
        s.incarnation = s.worker()
        seen.append([(g.key, g.prompt_ids, g.task_json, g.seed) for g in s.lease()])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 4


def test_openrlhf_1322_finished_rollouts_that_wait_are_trained_after_the_restart(bench: Bench) -> None:
    """An asynchronous checkpoint kept the advanced cursor but not the buffer: what was generated and not trained was gone."""
    s = bench.scene(max_lag_versions=1)
    s.feed(4)
    s.fill()
    s.checkpoint(0)
    s.train(1)
    waiting = bench.rows("SELECT ordinal, sibling, payload_digest FROM sample WHERE ordinal >= 2 ORDER BY 1, 2")
    assert len(waiting) == 4
    bench.crash(s, down_s=100.0)
    plan = outcome_of(lambda: s.plan(2))
    assert plan is not NotReady
    assert [(i.key.ordinal, i.key.sibling, i.payload_digest) for i in plan.items] == waiting


@pytest.mark.parametrize("crossing", [1, 2])
def test_nemo_rl_3599_the_cursor_never_stands_beyond_what_is_stored(bench: Bench, crossing: int) -> None:
    """The data loader's position was saved ahead of the buffer and the weights; a third of the data was skipped at resume."""
    s = bench.scene()
    s.feed(2)
    failpoints.arm(f"ledger.before_commit=raise@{crossing}")
    outcome_of(lambda: s.feed(3))
    failpoints.arm("")
    bench.crash(s)
    issued = bench.rows("SELECT count(*), max(ordinal) + 1 FROM prompt_group")[0]
    assert issued == (s.ledger.cursor(STREAM).next_ordinal,) * 2


def test_nemo_rl_3594_a_long_rollout_goes_on_from_its_finished_turns(bench: Bench) -> None:
    """Interrupted multi-turn rollouts began again, so the long ones were cut off again and again and the data grew shorter."""
    s = bench.scene(attempts_max=5)
    s.feed(1)
    (g, *_) = s.lease()
    call = ToolCall(g.key, 0, "9" * 64, trajectory(40), "python", "{}")
    s.ledger.record_tool_call(call, g.token)
    answered = ToolCall(g.key, 0, "9" * 64, trajectory(40), "python", "{}", "42")
    s.ledger.record_tool_call(answered, g.token)
    bench.crash(s, down_s=100.0)
    s.incarnation = s.worker()
    (again, *_) = s.lease()
    assert (again.key, again.token) == (g.key, g.token + 1)
    assert s.ledger.tool_calls(g.key) == [answered]
    second = ToolCall(g.key, 1, "8" * 64, trajectory(45), "python", "{}")
    assert s.ledger.record_tool_call(second, again.token) == second


def test_nemo_rl_3480_a_finished_group_that_is_not_trained_has_a_reason(bench: Bench) -> None:
    """With two samplers a resumed run threw away a finished batch and nothing said so."""
    s = bench.scene(groups_per_step=1, lease_ttl_s=10_000.0)
    s.feed(6)
    grants = s.lease()
    s.submit(of_groups(grants, 0)[:1] + of_groups(grants, 1))
    for step in (1, 2):
        s.train(step)
        s.fill(2)
    bench.crash(s)
    s.plan(3)
    told = bench.rows("SELECT ordinal, sibling, kind, reason FROM verdict ORDER BY 1, 2")
    assert [(o, k, kind) for o, k, kind, _ in told] == [(0, 0, "dropped_stale"), (0, 1, "dropped_stale")]
    assert all("lags 2 at step 3" in reason for *_, reason in told)
    story = s.ledger.explain(grants[0].key)
    assert (story["state"], story["refilled_by"]) == ("dropped_stale", 6)
    slots = s.ledger.run_status()["slots"]
    assert slots["issued"] == sum(n for name, n in slots.items() if name != "issued")


def test_trl_5911_prompts_issued_ahead_of_training_are_not_skipped_at_resume(bench: Bench) -> None:
    """The stored prompt index was the one fetched, about a thousand ahead of what was trained; a resumed run skipped them."""
    s = bench.scene(max_lag_versions=1)
    s.feed(8)
    s.fill(4)
    s.train(1)
    s.checkpoint(1)
    trained = {0, 1}
    bench.crash(s, down_s=100.0)
    assert s.ledger.cursor(STREAM).next_ordinal == 8
    for step in (2, 3, 4):
        s.fill(4)
        plan = outcome_of(lambda step=step: s.train(step))
        assert plan is not NotReady
        trained |= set(ordinals_of(plan))
    assert trained == set(range(8))


def test_trl_7274_a_dropped_group_holds_nothing_back(bench: Bench) -> None:
    """One group dropped as stale pinned the position to resume from: everything after it was generated and trained again."""
    s = bench.scene(groups_per_step=1, lease_ttl_s=10_000.0)
    drop_stale_group(s, bench)
    s.finish(3)
    bench.crash(s)
    assert s.ledger.resume_point().last_planned_step == 3
    planned = [ordinals_of(s.ledger.read_plan(0, step)) for step in (1, 2, 3)]
    assert planned == [[1], [2], [3]]
    assert ordinals_of(s.lease()) == [4, 5], "a dropped group takes no room: the bound opens two groups"
    s.feed(2)
    assert s.ledger.cursor(STREAM).next_ordinal == 9


def test_miles_2254_a_late_result_is_matched_with_its_reservation_after_the_restart(bench: Bench) -> None:
    """The cursor moved when a group left the source; after a restart the group was gone and its late result fitted nothing."""
    s = bench.scene()
    s.feed(2)
    grants = s.lease()
    assert s.submit(grants[:1]) == [ACCEPTED]
    bench.crash(s)
    assert s.submit(grants[:1]) == [REPLAYED], "the receipt is the sample row, not a memory of the dead server"
    assert s.submit(grants[1:]) == [ACCEPTED] * 3
    never_granted = sample_for(grants[0], s.incarnation, lease_token=9, reward=0.0)
    assert s.ledger.submit_samples([never_granted])[0].outcome is CONFLICT


def test_nemo_rl_3923_finished_siblings_stay_and_an_old_attempt_is_fenced(bench: Bench) -> None:
    """A restart lost the finished siblings of a group, or let an attempt from before the restart in as a second one."""
    s = bench.scene(group_size=4, late_submit="strict", attempts_max=5)
    s.feed(2)
    grants = of_groups(s.lease(), 0)
    assert s.submit(grants[:2]) == [ACCEPTED, ACCEPTED]
    old = s.incarnation
    bench.crash(s, down_s=100.0)
    s.incarnation = s.worker()
    again = of_groups(s.lease(), 0)
    assert [(g.key.sibling, g.token) for g in again] == [(2, 2), (3, 2)]
    assert s.submit(grants[2:], old) == [FENCED, FENCED]
    assert s.submit(again) == [ACCEPTED, ACCEPTED]
    assert s.submit(grants[:2], old) == [REPLAYED, REPLAYED]


def test_trl_6804_a_trained_sample_is_never_trained_again_when_new_ones_are_missing(bench: Bench) -> None:
    """A replay buffer that served old samples when new ones ran short degenerated into a few of them."""
    s = bench.scene(max_lag_versions=5)
    s.feed(3)
    s.fill()
    assert ordinals_of(s.train(1)) == [0, 1]
    bench.crash(s)
    assert outcome_of(lambda: s.plan(2)) is NotReady
    s.feed(1)
    s.fill()
    assert ordinals_of(s.train(2)) == [2, 3]


def test_torchforge_362_a_run_resumes_from_its_first_step_on(bench: Bench) -> None:
    """Resuming did not exist: a restarted job began at step 0."""
    s = bench.scene(max_lag_versions=1, steps=5)
    s.checkpoint(0)
    for step in (1, 2, 3):
        s.feed(2)
        s.fill(4)
        s.train(step)
        bench.crash(s, down_s=10.0)
        point = s.ledger.resume_point()
        assert (point.last_planned_step, point.head and point.head.version) == (step, step)
        assert [c.step for c in point.checkpoints] == [0]
    assert [m["step"] for m in s.ledger.step_metrics(0)] == [1, 2, 3]


def test_verl_7579_what_was_acknowledged_is_durable_before_the_answer(bench: Bench) -> None:
    """The buffer lived in memory: an answered write was gone with the process."""
    s = bench.scene()
    s.feed(2)
    grants = s.lease()
    failpoints.arm("ledger.before_commit=raise")
    answers = outcome_of(lambda: s.submit(grants))
    failpoints.arm("")
    bench.crash(s)
    stored = bench.rows("SELECT count(*) FROM sample")[0][0]
    acknowledged = answers.count(ACCEPTED) if isinstance(answers, list) else 0
    assert stored == acknowledged == 0
    assert s.submit(grants) == [ACCEPTED] * 4


def test_miles_2254_a_result_nobody_reserved_is_refused(bench: Bench) -> None:
    """Without a reservation a result was taken for whatever slot its index named."""
    s = bench.scene()
    s.feed(2)
    (g, *_) = s.lease(1)
    unreserved = sample_for(g, s.incarnation, key=g.key._replace(sibling=1))
    assert [r.outcome for r in s.ledger.submit_samples([unreserved])] == [INVALID]
    assert json.loads(bench.rows("SELECT detail_json FROM event WHERE kind = 'submit_invalid'")[0][0])["reason"]


