"""A run recorded by an earlier version of the code is replayed to the same bits by this one.

When a change is meant to alter the arithmetic, record again: ``python tests/golden/record.py --reason "what and why"``,
which adds a row to the table in ``tests/golden/README.md``.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from golden.record import DIGESTS, FIRST_REVISION, HERE, LEDGER, MODEL, README, STEPS, STEPS_BEFORE, environment, replayed, unpack
from rollbook.core.idempotency import chain_digest, items_digest
from rollbook.ledger import migrate
from rollbook.ledger.ledger import Ledger

pytestmark = pytest.mark.timeout(600)  # a process of its own imports torch

NEXT_MIGRATION = '''
"""Add a remark to every run."""

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{head}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("remark", sa.Text()))


def downgrade() -> None:
    op.drop_column("run", "remark")
'''


def schema_of(run_dir: Path) -> str:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database:
        (found,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(found)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """The recorded ledger, upgraded to this version's schema and opened."""
    url = unpack(tmp_path)
    migrate.upgrade(url)
    opened = Ledger(url, holder="test")
    try:
        (run_id,) = opened.run_ids()
        opened.attach(run_id)
        yield opened
    finally:
        opened.close()


def test_the_recorded_run_replays_to_the_recorded_digests_at_every_step(tmp_path: Path) -> None:
    url = unpack(tmp_path)
    assert schema_of(tmp_path) == FIRST_REVISION
    assert migrate.upgrade(url) == migrate.head_revision()
    recorded = json.loads(DIGESTS.read_text())
    found = replayed(tmp_path)
    assert [step["step"] for step in found] == list(range(STEPS + 1))
    pairs = zip(recorded["steps"], found, strict=True)
    differing = [(was["step"], name) for was, now in pairs for name in was if was[name] != now[name]]
    assert not differing, (
        f"step and digest: {differing[:3]}; recorded with {recorded['recorded_with']}. This version computes something else from "
        "the same recorded rollouts. If that is meant: python tests/golden/record.py --reason WHY"
    )
    assert len({step[name] for step in found for name in ("version_digest", "state_digest", "chain_digest")}) == 3 * (STEPS + 1)


def test_the_recorded_chain_follows_from_the_recorded_samples_and_the_audit_is_clean(ledger: Ledger) -> None:
    chain = ledger.resume_point().chain_digests[0]
    for step in range(1, STEPS + 1):
        plan = ledger.read_plan(0, step)
        chain = chain_digest(chain, step, items_digest(plan.items))
        assert plan.chain_digest == chain
        assert plan.revision == (0 if step <= STEPS_BEFORE else 1)
        samples = list(ledger.payloads(0, step))  # compares each payload's bytes with its digest
        assert [sample.key for sample in samples] == [item.key for item in plan.items] and len(samples) == 8
    assert ledger.audit() == []


def test_the_recorded_ledger_opens_after_one_more_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(migrate.script_location(), tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    text = NEXT_MIGRATION.format(head=migrate.head_revision())
    (tmp_path / "migrations" / "versions" / "9999_add_a_remark.py").write_text(text)
    monkeypatch.setattr(migrate, "script_location", lambda: tmp_path / "migrations")
    assert migrate.upgrade(unpack(tmp_path / "run")) == "9999" == schema_of(tmp_path / "run")
    opened = Ledger(f"sqlite:///{tmp_path}/run/ledger.sqlite", holder="test")
    try:
        opened.attach("golden")
        assert opened.resume_point().last_planned_step == STEPS and len(list(opened.payloads(0, STEPS))) == 8
    finally:
        opened.close()


def test_a_changed_rollout_is_noticed(tmp_path: Path) -> None:
    migrate.upgrade(unpack(tmp_path))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("UPDATE payload SET logprobs = zeroblob(length(logprobs)) WHERE ordinal = 4 AND sibling = 1")
        database.commit()
    done = subprocess.run(
        [sys.executable, str(HERE / "record.py"), "--replay", str(tmp_path)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode != 0 and "payload of slot 4.1 has digest" in done.stderr


def test_the_table_names_what_is_recorded_and_everything_is_small() -> None:
    rows = [line for line in README.read_text().splitlines() if line.startswith("| 20")]
    last = json.loads(DIGESTS.read_text())["steps"][-1]["state_digest"]
    assert rows and f"`{last[:12]}`" in rows[-1], "record.py adds a row whenever it records"
    files = [LEDGER, DIGESTS, README, *MODEL.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 300_000
