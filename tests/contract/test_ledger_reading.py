"""What a scrape counts: the same over restarts and retention, counted once, never falling, every slot in one state."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from forking_support import fork, history, train
from ledger_support import Scene, run_record, sample_for, version
from test_ledger_metrics import READING

from ledger_bench import WIDTH, Bench
from rollbook.core.records import Blame, FailureReport, PlanOutcome, RewardStatus, SandboxStatus
from rollbook.core.settings import RetentionConfig
from rollbook.ledger import reading as reading_module
from rollbook.ledger import schema as t
from rollbook.observe.ledger_metrics import LedgerCollector, Surroundings, worker_state

RULES = {"max_lag_versions": 1000, "infra_window": 2, "lease_ttl_s": 10_000.0}
KEEP = RetentionConfig(enabled=True, every_s=3600.0, groups=WIDTH, events_s=50.0, receipts_s=50.0, batch_rows=8)


def step(s: Scene, number: int) -> None:
    """A step with two groups, one failed attempt and one repeated submission, and its checkpoint."""
    s.feed(2)
    first, *others = s.lease(4)
    failed = FailureReport(
        first.key, first.token, s.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow", generate_s=0.25, n_tokens=3
    )
    s.ledger.report_failures([failed])
    again = [sample_for(grant, s.incarnation, generate_s=0.5, verify_s=0.125) for grant in others]
    s.ledger.submit_samples(again)
    s.ledger.submit_samples(again[:1])
    s.submit(s.lease(4), generate_s=0.5, verify_s=0.125)
    plan = s.plan(number)
    metrics = json.dumps({"seconds_step": 2.0, "seconds_plan_wait": 1.0, "groups": 2, "groups_with_signal": 1})
    s.ledger.finish_plan(s.learner, plan.lineage, number, PlanOutcome.TRAINED, "", metrics)
    s.ledger.publish_version(s.learner, version(number))
    s.checkpoint(number)


def shown(s: Scene) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Counters and histograms of the page, less what only this server process counts."""
    own = ("rollbook_ledger_commits", "rollbook_ledger_conflicts")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in LedgerCollector(s.ledger.reading, Surroundings(env="e")).collect()
        if family.type in ("counter", "histogram") and family.name not in own
        for sample in family.samples
    }


def only(values: Mapping[Any, float], name: str, **labels: str) -> float:
    return values[f"rollbook_{name}", tuple(sorted(labels.items()))]


def test_what_a_scrape_counts_is_what_happened(bench: Bench) -> None:
    s = Scene(bench.open(), run_record(**RULES))
    for number in (1, 2, 3):
        step(s, number)
    seen = shown(s)
    assert only(seen, "rollouts_total", outcome="ok") == only(seen, "rollouts_consumed_total") == 12
    assert only(seen, "rollouts_total", outcome="failed") == only(seen, "rollout_failures_total", reason="reward_timeout") == 3
    assert only(seen, "ledger_duplicate_commits_total") == 3
    assert only(seen, "ledger_lease_events_total", event="granted") == 15
    assert only(seen, "ledger_lease_events_total", event="requeued") == 3
    assert only(seen, "learner_steps_total") == 3
    assert only(seen, "gpu_seconds_total", pool="actor", activity="generate") == pytest.approx(6.0)
    assert only(seen, "gpu_seconds_total", pool="actor", activity="wasted") == pytest.approx(0.75)
    assert only(seen, "gpu_wasted_seconds_total", reason="failed") == pytest.approx(0.75)
    assert only(seen, "gpu_seconds_total", pool="learner", activity="train") == pytest.approx(6.0)
    assert only(seen, "gpu_seconds_total", pool="learner", activity="idle") == pytest.approx(3.0)
    assert only(seen, "reward_groups_total", env="e") == 6
    assert only(seen, "reward_group_zero_variance_total", env="e") == 3
    assert only(seen, "rollout_policy_lag_versions_count") == only(seen, "rollout_policy_lag_versions_bucket", le="0.0") == 12
    assert only(seen, "reward_duration_seconds_sum", env="e") == pytest.approx(1.5)
    assert only(seen, "tokens_total", kind="completion") == only(seen, "tokens_trained_total") == 36
    assert only(seen, "tokens_total", kind="prompt") > 0


def test_a_new_server_counts_the_same_and_one_that_has_counted_before_counts_nothing_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "RANGE_GROUPS", 3)
    s = Scene(bench.open(), run_record(**RULES))
    shown(s)
    for number in (1, 2, 3):
        step(s, number)
        s.feed(1)
        before = shown(s)
        assert shown(s) == before
    bench.crash(s)
    s.learner = s.ledger.acquire_role(s.learner.role, "another", 1000.0, s.learner.holder)
    assert shown(s) == before


def test_no_counter_falls_when_old_rows_go_or_their_server_with_them(bench: Bench) -> None:
    s = Scene(bench.open(retention=KEEP), run_record(**RULES))
    for number in range(1, 8):
        step(s, number)
    before = shown(s)
    assert s.ledger.expire()["groups"] > 0
    bench.let_time_pass(60.0)
    assert s.ledger.expire()["events"] > 0
    gone = ("rollbook_groups_expired_total",)
    for _ in range(2):
        after = shown(s)
        assert {k: v for k, v in after.items() if k[0] not in gone} == {k: v for k, v in before.items() if k[0] not in gone}
        s.ledger.close(release=False)
        s.ledger = bench.open(supersede=f"server-{len(bench.ledgers) - 1}", retention=KEEP)
        s.ledger.open_run(s.record)


def test_every_slot_is_in_one_state(bench: Bench) -> None:
    s = Scene(bench.open(), run_record(attempts_max=1, **RULES))
    s.feed(5)
    first, second, *others = s.lease(8)
    s.submit([second, *others[:4]])
    s.ledger.report_failures([
        FailureReport(first.key, first.token, s.incarnation, RewardStatus.NO_VERDICT, Blame.MODEL, "x",
                      sandbox_status=SandboxStatus.NO_CODE)
    ])  # fmt: skip
    s.plan(1)
    slots = s.ledger.reading()["slots"]
    assert sum(slots.values()) == s.ledger.run_status()["slots"]["issued"]
    assert slots["consumed"] == 4 and slots["leased"] == 2 and slots["dead"] >= 2 and slots["ready"] == 0


def test_what_a_step_skips_or_a_verdict_drops_was_wasted(bench: Bench) -> None:
    s = Scene(bench.open(), run_record(attempts_max=1, **RULES))
    s.feed(3)
    grants = s.lease(6)
    s.submit(grants[:4], generate_s=0.5)
    plan = s.plan(1)
    s.ledger.finish_plan(s.learner, plan.lineage, 1, PlanOutcome.SKIPPED, "minibatch 1 of 1: loss nan, gradient norm 1", "{}")
    s.submit(grants[4:5], generate_s=2.0)
    last = grants[5]
    s.ledger.report_failures(
        [FailureReport(last.key, last.token, s.incarnation, RewardStatus.VERIFIER_ERROR, Blame.MODEL, "x", generate_s=4.0)]
    )
    seen = shown(s)
    assert only(seen, "gpu_wasted_seconds_total", reason="skipped") == pytest.approx(2.0)
    assert only(seen, "gpu_wasted_seconds_total", reason="filtered") == pytest.approx(2.0)
    assert only(seen, "gpu_wasted_seconds_total", reason="failed") == pytest.approx(4.0)
    assert only(seen, "gpu_seconds_total", pool="actor", activity="generate") == 0
    assert only(seen, "rollouts_total", outcome="filtered") == 1
    assert only(seen, "learner_nonfinite_steps_total", action="skipped") == 1
    assert only(seen, "rollouts_consumed_total") == 0


def test_a_fork_lets_no_counter_fall_and_counts_each_sample_once(bench: Bench) -> None:
    s = history(bench)
    before = shown(s)
    assert only(before, "rollouts_consumed_total") == 12
    fork(s)
    train(s, 1, 2, 3, 4)
    after = shown(s)
    assert {key: value for key, value in before.items() if value > after[key]} == {}
    assert only(after, "rollouts_consumed_total") == 16, "the fourth step was planned before the fork and trained after it"
    assert sum(s.ledger.reading()["slots"].values()) == s.ledger.run_status()["slots"]["issued"]


def test_the_living_are_present_and_the_silent_are_not(bench: Bench) -> None:
    s = Scene(bench.open(), run_record(**RULES))
    alive = s.ledger.present(30.0)
    assert s.incarnation in alive and s.learner.holder in alive
    bench.let_time_pass(31.0)
    assert s.incarnation not in s.ledger.present(30.0)
    s.ledger.heartbeat(s.incarnation, None, [])
    assert s.incarnation in s.ledger.present(30.0)


def test_a_worker_is_lost_only_with_slots_in_its_hands() -> None:
    silent = {"beat_age_s": 31.0, "leases": 2, "version": 3}
    assert worker_state(silent, 30.0, False) == "lost"
    assert worker_state(silent | {"leases": 0}, 30.0, False) == ""
    assert worker_state(silent | {"beat_age_s": 30.0}, 30.0, False) == "ready"
    assert worker_state(silent | {"beat_age_s": 1.0, "version": None}, 30.0, False) == "starting"
    assert worker_state(silent | {"beat_age_s": 1.0}, 30.0, True) == "draining"


NARROW = re.compile(r"SEARCH (\S+) (?:AS \S+ )?USING .*\(run_id=\?(?: AND lineage(?:=|<)\?)?(?: AND step[<>]\?)?\)")
"""A step of a query plan that goes through the rows of the whole run, or of a lineage, of a table."""


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_reading_walks_along_keys_and_through_no_whole_run(sqlite_bench: Bench, is_forked: bool) -> None:
    """What is finished is not looked at again: a later reading finds its rows by their group, each time it looks for one."""
    if is_forked:
        s = history(sqlite_bench)
        fork(s)
        train(s, 1, 2)
    else:
        s = Scene(sqlite_bench.open(), run_record(**RULES))
        step(s, 1)
    s.ledger.reading()
    large = {table.name for table in (t.event, t.sample, t.payload, t.slot, t.prompt_group, t.failure, t.verdict, t.plan_item)}
    seen: list[str] = []
    wide: list[tuple[str, str]] = []

    def noted(conn: sa.Connection, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if not statement.startswith("SELECT"):
            return
        rows = conn.connection.driver_connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[union-attr]
        lines = [str(row[3]) for row in rows.fetchall()]
        seen.extend(lines)
        for line in lines:
            found = NARROW.match(line)
            name = found[1] if found else line.split()[1] if line.startswith("SCAN") else ""
            newest = re.search(rf"FROM {name} +WHERE {name}.run_id = \?( ORDER BY .* LIMIT .*)?$", statement.replace("\n", " "))
            if name in {*large, "older"} and not newest:
                wide.append((line, statement))
            if "ix_event_kind" in line and ("lease_granted" in str(parameters) or "seq >" in statement):
                wide.append((line, statement))

    engine = s.ledger._database.reader
    sa.event.listen(engine, "before_cursor_execute", noted)
    try:
        s.ledger.reading()
    finally:
        sa.event.remove(engine, "before_cursor_execute", noted)
    assert seen and not wide, wide


def test_a_total_does_not_fall_by_the_rounding_of_its_sum() -> None:
    """Summed in another order, as by another server, the same rows give another last bit."""
    one, other = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
    assert one != other
    pages = []
    for total in (one, other):
        figures = {"queue.sum": total, "queue.count": 3, "wasted.stale": total, "generated_s": total}
        families = LedgerCollector(lambda f=figures: READING | {"figures": f}, Surroundings(env="e")).collect()  # type: ignore[misc]
        pages.append({(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples})
    assert pages[0] == pages[1] and 0.6 in pages[0].values()
