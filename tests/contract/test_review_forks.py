"""What a fork must not do to later failures, and that a database from before forks goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from ledger_support import Scene, run_record, version

from ledger_bench import Bench, ManualClock, create_database
from rollbook.core.host import host
from rollbook.core.records import Blame, FailureReport, ForkVerdict, LeaseGrant, PlanOutcome, RewardStatus, Role, SlotKey
from rollbook.ledger import migrate
from rollbook.ledger import schema as t
from rollbook.ledger.dialects import Database
from rollbook.ledger.roles import rules_to_json


def forked_with_an_orphan(bench: Bench, **rules: object) -> Scene:
    """Step 1 trained and published, group 2 sampled under version 1; the replay of step 1 forks from step 0."""
    s = bench.scene(max_lag_versions=2, **rules)
    s.feed(2)
    s.fill(4)
    s.checkpoint(0)
    s.train(1)
    s.feed(2)
    s.fill(2)
    line = s.ledger.fork_lineage(s.learner, 0, 0, None, 1e-4)
    assert (line.verdict, line.orphans_dropped) == (ForkVerdict.DROPPED, 2)
    s.ledger.finish_plan(s.learner, 1, 1, PlanOutcome.TRAINED, "", "{}")
    s.ledger.publish_version(s.learner, version(1, 1))
    return s


def fail(s: Scene, grants: list[LeaseGrant]) -> None:
    reports = [
        FailureReport(g.key, g.token, s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "out of memory") for g in grants
    ]
    s.ledger.report_failures(reports)


def refill_of(bench: Bench, ordinal: int) -> int | None:
    rows = bench.rows(f"SELECT ordinal FROM prompt_group WHERE refills = {ordinal}")
    return rows[0][0] if rows else None


def test_a_group_that_a_fork_dropped_does_not_count_as_a_failure_of_its_prompt(bench: Bench) -> None:
    s = forked_with_an_orphan(bench, attempts_max=1)
    refill = refill_of(bench, 2)
    assert refill == 4
    grants = s.lease(100, loaded=version(1, 1))
    mine = [g for g in grants if g.key.ordinal == refill]
    assert len(mine) == 2
    fail(s, mine[:1])
    again = refill_of(bench, refill)
    assert again is not None, "the first failure of the prompt itself is refilled, as without a fork"
    mine = [g for g in s.lease(100, loaded=version(1, 1)) if g.key.ordinal == again]
    fail(s, mine[:1])
    assert refill_of(bench, again) is None, "the second is not, with one attempt"


@pytest.fixture(params=["sqlite", "postgresql"])
def url_of_the_first_release(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of schema revision 0001 with one run in it."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/old.sqlite"
    else:
        server = request.getfixturevalue("postgres")
        create_database(server, "ledger_of_0001", "template0")
        url = server.url("ledger_of_0001")
    database = Database(url, host(), role_ttl_s=60.0)
    record = run_record("old", max_lag_versions=2)
    config = migrate._config()
    with database.writer.connect() as conn:
        conn.begin()
        config.attributes["connection"] = conn
        command.upgrade(config, "0001")
        content = {"run_id": "old", "config_digest": record.config_digest, "config_json": record.config_json,
                   "rules_json": rules_to_json(record.rules)}  # fmt: skip
        conn.execute(sa.insert(t.run).values(**content, manifest_json="{}", opened_at_us=1))
        revision = {"revision": 0, "from_step": 1, "accepted_at_us": 1, "max_lag_versions": 2}
        conn.execute(sa.insert(t.config_revision).values(**content, **revision))
        conn.exec_driver_sql("INSERT INTO lineage (run_id, lineage, created_at_us) VALUES ('old', 0, 1)")
        conn.commit()
    database.close()
    return url


def test_a_run_of_the_first_schema_goes_on_after_the_migration_and_can_fork(url_of_the_first_release: str) -> None:
    url = url_of_the_first_release
    assert "0001" in migrate.check(url)[0]
    assert migrate.upgrade(url) == migrate.head_revision() and migrate.check(url) == []
    bench = Bench(url, ManualClock())
    s = Scene(bench.open(), run_record("old", max_lag_versions=2))
    assert s.ledger.run.revision == 0
    s.feed(2)
    s.fill(4)
    s.checkpoint(0)
    s.train(1)
    s.ledger.fork_lineage(s.learner, 0, 0, None, 1e-4)
    bench.crash(s)
    s.learner = s.ledger.acquire_role(Role.LEARNER, "learner-1", 60.0)
    assert s.ledger.resume_point().lineage == 1 and s.ledger.read_plan(1, 1).items[0].key == SlotKey(0, 0)
    assert json.loads(json.dumps(s.ledger.run_status()["forks"]))[0]["fork_step"] == 0
    bench.finish()
