"""The tests of the tests: damage done to a clean run, and bugs planted into the product, are reported."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RUN_ID, System, check_finished

import oracle

pytestmark = pytest.mark.timeout(1800)

DAMAGE = {
    "a plan item is lost": (["DELETE FROM plan_item WHERE step = 3 AND pos = 5"], {"plans", "chain"}),
    "a plan is lost": (
        ["DELETE FROM plan_outcome WHERE step = 5", "DELETE FROM plan WHERE step = 5"],
        {"steps", "plans", "chain"},
    ),
    "an older group was passed over": (
        [
            "UPDATE plan_item SET ordinal = 999 WHERE ordinal = 5", "UPDATE plan_item SET ordinal = 5 WHERE ordinal = 8",
            "UPDATE plan_item SET ordinal = 8 WHERE ordinal = 999",
        ],
        {"order", "plans", "chain"},
    ),
    "a sample is trained in two steps": (
        [
            "CREATE TABLE loose AS SELECT * FROM plan_item", "DROP TABLE plan_item", "ALTER TABLE loose RENAME TO plan_item",
            "UPDATE plan_item SET (ordinal, sibling, payload_digest, reward) = (SELECT ordinal, sibling, payload_digest, reward "
            "FROM plan_item WHERE step = 2 AND pos = 0) WHERE step = 3 AND pos = 0",
        ],
        {"plans", "chain"},
    ),
    "a version row is lost": (["DELETE FROM policy_version WHERE version = 4"], {"steps", "versions"}),
    "a payload is lost": (["DELETE FROM payload WHERE ordinal = 2 AND sibling = 1"], {"samples"}),
    "an acknowledged sample is lost": (
        ["DELETE FROM sample WHERE ordinal = 2 AND sibling = 1", "DELETE FROM payload WHERE ordinal = 2 AND sibling = 1"],
        {"plans", "conservation"},
    ),
    "a slot got two samples": (
        [
            "CREATE TABLE loose AS SELECT * FROM sample", "DROP TABLE sample", "ALTER TABLE loose RENAME TO sample",
            "INSERT INTO sample SELECT * FROM sample WHERE ordinal = 1 AND sibling = 0",
        ],
        {"samples"},
    ),
    "a slot got the bytes of another": (
        [
            "UPDATE payload SET (token_ids, logprobs, versions) = (SELECT token_ids, logprobs, versions FROM payload AS other "
            "WHERE other.ordinal = 9 AND other.sibling = 3) WHERE ordinal = 4 AND sibling = 0"
        ],
        {"samples"},
    ),
    "a reward was turned round": (
        ["UPDATE sample SET reward = 1 - reward WHERE ordinal = 3 AND sibling = 2"],
        {"rewards", "samples", "plans"},
    ),
    "a sample nobody was granted": (["UPDATE sample SET lease_token = 99 WHERE ordinal = 3 AND sibling = 2"], {"leases"}),
    "a seed is not the key's": (["UPDATE slot SET seed = seed + 1 WHERE ordinal = 6 AND sibling = 0"], {"leases"}),
    "a slot vanished": (["DELETE FROM slot WHERE ordinal = 6 AND sibling = 0"], {"conservation"}),
    "the cursor ran ahead": (["UPDATE cursor SET next_ordinal = next_ordinal + 1"], {"conservation"}),
    "a trained slot is leased": (
        ["INSERT INTO lease SELECT run_id, ordinal, sibling, 2, 2, incarnation, 0, 0, 0, 0, 0 FROM sample WHERE ordinal = 0"],
        {"conservation"},
    ),
    "a token is too old": (["UPDATE config_revision SET max_lag_versions = 0"], {"lag"}),
    "a deposed learner wrote": (["UPDATE plan SET epoch = epoch + 1 WHERE step = 7"], {"epochs"}),
    "a task was taken out for nothing": (
        [
            "UPDATE event SET kind = 'group_closed', ordinal = 3, detail_json = '{\"killed\": [\"a\", \"b\"], \"slot\": \"3.0\", "
            "\"workers\": [\"a\", \"b\"]}' WHERE seq = 5"
        ],
        {"poison"},
    ),
    "content was refused": (["UPDATE event SET kind = 'submit_conflict' WHERE seq = 5"], {"submissions"}),
    "a checkpoint is of another history": (["UPDATE checkpoint SET chain_digest = 'x' WHERE step = 8"], {"chain"}),
}  # fmt: skip


def _names(found: list[str]) -> set[str]:
    return {sentence.partition(":")[0] for sentence in found}


def _copy(system: System, folder: Path) -> Path:
    shutil.copytree(system.dir, folder / "run")
    return folder / "run"


def _damaged(system: System, folder: Path, statements: list[str]) -> list[str]:
    from pysqlite3 import dbapi2 as sqlite

    run_dir = _copy(system, folder)
    with sqlite.connect(run_dir / "ledger.sqlite") as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            assert connection.execute(statement).rowcount != 0
    connection.close()
    return oracle.findings(oracle.read_ledger(f"sqlite:///{run_dir / 'ledger.sqlite'}", RUN_ID), run_dir, steps=system.steps)


@pytest.mark.parametrize("what", DAMAGE)
def test_the_oracle_reports_that(what: str, fixed_reference: System, tmp_path: Path) -> None:
    statements, expected = DAMAGE[what]
    assert expected <= _names(_damaged(fixed_reference, tmp_path, statements))


def test_the_oracle_reports_one_altered_byte_of_a_log_prob(fixed_reference: System) -> None:
    tables = copy.deepcopy(fixed_reference.tables())
    row = tables["payload"][17]
    data = bytearray(row["logprobs"])
    data[0] ^= 1
    row["logprobs"] = bytes(data)
    assert _names(oracle.findings(tables, None, steps=fixed_reference.steps)) == {"samples"}
    assert oracle.identity(tables) != oracle.identity(fixed_reference.tables())


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "damaged weights": ("versions/0.32.*/model.safetensors", _flip_last_byte),
    "missing weights": ("versions/0.32.*/model.safetensors", Path.unlink),
    "a damaged checkpoint": ("checkpoints/0.32.*/optimizer.safetensors", _flip_last_byte),
    "a missing checkpoint": ("checkpoints/0.32.*", shutil.rmtree),
    "a rollout set aside": ("spool/worker-0", lambda folder: (folder / "x.00000001.sample.aside").touch()),
}


@pytest.mark.parametrize("what", FILES)
def test_the_oracle_reports_the_files(what: str, fixed_reference: System, tmp_path: Path) -> None:
    run_dir = _copy(fixed_reference, tmp_path)
    assert oracle.findings(fixed_reference.tables(), run_dir, steps=fixed_reference.steps) == []
    pattern, damage = FILES[what]
    (path,) = run_dir.glob(pattern)
    damage(path)
    assert _names(oracle.findings(fixed_reference.tables(), run_dir, steps=fixed_reference.steps)) == {"files"}


def test_a_seed_that_depends_on_the_attempt_is_found_only_by_the_unbroken_run(
    fixed_reference: System, planted_worker_seed: System
) -> None:
    """The planted run is clean in itself: nothing but a run without kills can tell that its samples are other ones."""
    assert planted_worker_seed.fired_at
    check_finished(planted_worker_seed)
    assert oracle.identity(planted_worker_seed.tables()) != oracle.identity(fixed_reference.tables())


def test_a_sample_acknowledged_before_it_is_durable_is_found_by_what_the_worker_was_told(planted_early_ack: System) -> None:
    """The slot was filled again, so the ledger is clean in itself."""
    assert planted_early_ack.fired_at and planted_early_ack.audited[0] == 0
    tables, steps = planted_early_ack.tables(), planted_early_ack.steps
    assert oracle.findings(tables, planted_early_ack.dir, steps=steps) == []
    assert _names(oracle.findings(tables, planted_early_ack.dir, steps=steps, acks=planted_early_ack.acks())) == {"acknowledged"}


def test_a_minibatch_order_that_is_not_restored_is_found_by_the_first_replay(planted_learner_rng: System) -> None:
    assert "learner.after_publish@8" in {path.name for path in planted_learner_rng.markers.iterdir()}
    assert "recorded weights" in (planted_learner_rng.dir / "logs" / "learner.log").read_text()
