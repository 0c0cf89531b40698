"""Every audit check fires on the damage it is there for, and on nothing else; a sound run is clean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from ledger_support import Scene

from ledger_bench import Bench
from rollbook.core.records import ScheduleKind
from rollbook.ledger import schema as t
from rollbook.ledger.audit import CHECKS

TAKEN_OUT = '{"killed": ["w1", "w2"], "slot": "6.0", "workers": ["w1", "w2"]}'
FAILURE = ", ".join(column.name for column in t.failure.c)
PLANTED: dict[str, list[str | Callable[[], sa.Executable]]] = {
    "sample_has_payload": [
        "DELETE FROM payload WHERE ordinal = 0 AND sibling = 1",
        "INSERT INTO payload (run_id, ordinal, sibling, token_ids, logprobs, versions, loss_mask, evidence_json) "
        "SELECT run_id, 5, 1, token_ids, logprobs, versions, loss_mask, evidence_json FROM payload "
        "WHERE ordinal = 0 AND sibling = 0",
    ],
    "payload_digest": [
        "UPDATE payload SET logprobs = token_ids WHERE ordinal = 0 AND sibling = 1",
        "UPDATE sample SET finish_reason = 'length' WHERE ordinal = 4",
    ],
    "sample_in_slot": ["DELETE FROM slot WHERE ordinal = 4", "UPDATE lease SET sibling = 7 WHERE sibling = 1"],
    "trained_once": [
        "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us, verdict) VALUES ('run', 1, 0, 2, 1, 'within'); "
        "INSERT INTO plan_item SELECT run_id, 1, ordinal, sibling, 3, pos, payload_digest, reward, valid "
        "FROM plan_item WHERE ordinal = 0",
    ],
    "steps_gapless": [
        "DELETE FROM plan_outcome WHERE step = 1",
        "DELETE FROM plan_outcome WHERE step = 1; DELETE FROM plan_item WHERE step = 1; DELETE FROM plan WHERE step = 1",
    ],
    "chain_digest": [
        "UPDATE plan SET items_digest = '0' WHERE step = 2",
        "UPDATE plan SET chain_digest = '0' WHERE step = 1",
        "UPDATE plan_item SET pos = 1 - pos WHERE step = 1 AND pos < 2",
        "DELETE FROM plan_item WHERE step = 2 AND pos = 3",
        "UPDATE plan_item SET payload_digest = '0' WHERE step = 1 AND pos = 0",
    ],
    "item_matches_sample": [
        "UPDATE sample SET payload_digest = '0' WHERE ordinal = 1 AND sibling = 0",
        "UPDATE plan_item SET reward = 0.5 WHERE step = 1 AND pos = 0",
    ],
    "checkpoint_chain": [
        "UPDATE checkpoint SET chain_digest = '0' WHERE step = 0",
        "UPDATE checkpoint SET chain_digest = '0' WHERE step = 1",
    ],
    "head_lag": ["UPDATE config_revision SET max_lag_versions = 0"],
    "versions_possible": ["UPDATE sample SET version_max = 1 WHERE ordinal = 0 AND sibling = 0"],
    "orphans": [
        "INSERT INTO verdict (run_id, ordinal, sibling, kind, reason, decided_at_us) "
        "VALUES ('run', 5, 0, 'orphan_version', 'r', 1)",
        "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us, verdict, orphans_dropped) "
        "VALUES ('run', 1, 0, 2, 1, 'dropped', 3)",
    ],
    "forked_plans": [
        "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us, verdict) VALUES ('run', 1, 0, 1, 1, 'within')",
        "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us, verdict) VALUES ('run', 1, 0, 3, 1, 'within')",
    ],
    "reward_rule": [],
    "blame": [
        "UPDATE sample SET blame = 'model', accepted_at_us = 1 WHERE ordinal = 0 AND sibling = 0; "
        "UPDATE sample SET sandbox_status = 'oom' WHERE ordinal = 4 AND sibling = 0"
    ],
    "failure_rows": [
        f"INSERT INTO failure ({FAILURE}) VALUES ('run', 6, 0, 9, 1, 'w', 'timeout', 'oom', 'infra', '', 0, 0, 0, '', false, 1)",
        f"INSERT INTO failure ({FAILURE}) VALUES ('run', 4, 0, 1, 1, 'w', 'timeout', 'oom', 'infra', '', 0, 0, 0, '', false, 1); "
        "INSERT INTO verdict (run_id, ordinal, sibling, kind, reason, decided_at_us) VALUES ('run', 5, 1, 'failed', 'r', 2)",
    ],
    "poison": [
        "INSERT INTO event (run_id, seq, kind, ordinal, detail_json, at_us) VALUES ('run', 100000, 'group_closed', 6, "
        f"'{TAKEN_OUT}', 1)",
        "INSERT INTO event (run_id, seq, kind, ordinal, detail_json, at_us) VALUES ('run', 100000, 'group_closed', 6, "
        f"'{TAKEN_OUT}', 1); "
        + "; ".join(
            f"INSERT INTO failure ({FAILURE}) VALUES ('run', {ordinal}, 0, {n}, {n}, 'w{n}', 'no_verdict', 'not_used', 'infra', "
            "'', 0, 0, 0, '', false, 1)" for ordinal in (4, 6) for n in (1, 2)
        ),
    ],
    "breaker": [
        "INSERT INTO event (run_id, seq, kind, detail_json, at_us) VALUES ('run', 100000, 'breaker_closed', '{}', 1)",
        "INSERT INTO event (run_id, seq, kind, detail_json, at_us) VALUES ('run', -1, 'breaker_opened', '{}', 1); "
        "DELETE FROM event WHERE kind = 'step_planned'",
        "INSERT INTO event (run_id, seq, kind, detail_json, at_us) VALUES ('run', -1, 'breaker_opened', '{}', 1); "
        "DELETE FROM event WHERE kind = 'lease_granted'",
    ],
    "verdict_excludes_plan": [
        "INSERT INTO verdict (run_id, ordinal, sibling, kind, reason, decided_at_us) VALUES ('run', 0, 0, 'failed', 'r', 1)"
    ],
    "ordinals_gapless": [
        "DELETE FROM slot WHERE ordinal = 5 AND sibling = 1",
        "UPDATE cursor SET next_ordinal = next_ordinal + 1",
        "UPDATE prompt_group SET ordinal = 15 WHERE ordinal = 5; UPDATE slot SET ordinal = 15 WHERE ordinal = 5",
        "INSERT INTO slot (run_id, ordinal, sibling, seed) VALUES ('run', 5, 2, 1)",
    ],
    "conservation": [
        "INSERT INTO lease (run_id, ordinal, sibling, token, attempt, lineage, version, granted_at_us, expires_at_us, "
        "extended_us) VALUES ('run', 0, 0, 1, 1, 0, 0, 1, 1, 0)",
        "DELETE FROM sample WHERE ordinal = 0 AND sibling = 0",
    ],
    "groups_planned_whole": [
        "DELETE FROM plan_item WHERE step = 2 AND pos = 0",
        "UPDATE plan_item SET step = 1 WHERE step = 2 AND pos = 0",
        "UPDATE plan SET n_groups = 1 WHERE step = 1",
    ],
    "refills": [
        "UPDATE prompt_group SET refills = 0 WHERE ordinal = 5",
        "UPDATE prompt_group SET refills = 4 WHERE ordinal IN (5, 6)",
    ],
    "epochs": [
        "UPDATE plan SET epoch = 9 WHERE step = 2",
        "UPDATE policy_version SET epoch = 9 WHERE version = 0",
        "UPDATE fence SET epoch = 9 WHERE role = 'learner'; UPDATE plan SET epoch = 3 WHERE step = 1",
        "UPDATE checkpoint SET epoch = 9 WHERE step = 1",
    ],
    "lease_tokens": [
        "UPDATE sample SET lease_token = 5 WHERE ordinal = 4",
        "UPDATE event SET token = 7 WHERE kind = 'lease_granted' AND ordinal = 6",
        "UPDATE event SET sibling = 0 WHERE kind = 'lease_granted' AND ordinal = 4",
    ],
    "versions_gapless": [
        "DELETE FROM policy_version WHERE version = 1",
        "DELETE FROM plan_outcome WHERE step = 2",
    ],
    "expired_ranges": [
        "INSERT INTO retention VALUES ('run', 4, 1, '{}', 1)",
        "INSERT INTO expired_range VALUES ('run', 0, 4, 1, 0, 4, 0, 0, 8, 8, 7, 0, 24, 'gone', 1)",
    ],
    "seeds": ["UPDATE slot SET seed = seed + 1 WHERE ordinal = 5"],
}
CASES = [(name, i) for name, statements in PLANTED.items() for i in range(len(statements))]


def sound(bench: Bench) -> Scene:
    """Two steps trained (the second with lag 1), a checkpoint, submitted and leased slots, one group that waits."""
    s = bench.scene(max_lag_versions=2)
    s.feed(7)
    s.fill(8)
    s.checkpoint(0)
    s.train(1)
    s.checkpoint(1)
    s.fill(2)
    s.train(2)
    s.feed(3)
    s.lease(3)
    return s


def test_a_sound_run_is_clean(bench: Bench) -> None:
    assert sound(bench).ledger.audit() == []


@pytest.mark.parametrize("name, case", CASES)
def test_a_check_finds_the_damage_it_is_there_for(damaged: Bench, name: str, case: int) -> None:
    s = sound(damaged)
    assert s.ledger.audit() == []
    for statement in str(PLANTED[name][case]).split("; "):
        assert damaged.execute(statement) > 0, statement
    if "INSERT INTO lineage" in str(PLANTED[name][case]):
        damaged.crash(s)
    found = s.ledger.audit()
    assert name in {v.check for v in found}, found
    for v in found:
        assert v.ids, v
        assert v.promise in {f"P{i}" for i in range(1, 13)}


def test_the_reward_rule_is_found_even_where_the_database_let_it_through(damaged: Bench) -> None:
    damaged.schema_is_changed()
    s = sound(damaged)
    with damaged.connect() as conn:
        if damaged.url.startswith("sqlite"):
            conn.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        else:
            conn.exec_driver_sql("ALTER TABLE sample DROP CONSTRAINT ck_sample_reward_only_when_given")
            conn.exec_driver_sql("ALTER TABLE plan_item DROP CONSTRAINT ck_plan_item_valid_has_reward")
        conn.execute(sa.update(t.sample).where(t.sample.c.ordinal == 0).values(reward_status="infra_error"))
        conn.execute(sa.update(t.plan_item).where(t.plan_item.c.ordinal == 1).values(valid=False))
    found = {v.detail: v.ids for v in s.ledger.audit() if v.check == "reward_rule"}
    assert sorted(found.values()) == [("0.0", "0.1"), ("1.0", "1.1")]


def test_fixed_lag_samples_of_another_version_are_found(damaged: Bench) -> None:
    s = damaged.scene(schedule=ScheduleKind.FIXED, fixed_lag_versions=0, max_lag_versions=0)
    s.feed(4)
    s.fill()
    s.train(1)
    s.fill(1)
    assert s.ledger.audit() == []
    damaged.execute("UPDATE sample SET version_min = 0 WHERE ordinal = 2")
    assert [(v.check, v.ids) for v in s.ledger.audit()] == [("versions_possible", ("2.0",))]


def test_every_check_has_a_planted_damage_a_promise_and_a_sentence() -> None:
    assert {c.name for c in CHECKS} == set(PLANTED)
    assert all(c.sentence.endswith((".", ")")) and c.promise.startswith("P") for c in CHECKS)
    assert len({c.name for c in CHECKS}) == len(CHECKS)
