"""Migrations, schema revisions, storage checks, CHECK constraints."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable

from ledger_bench import Bench
from rollbook.core.errors import ConfigError, SchemaTooNew, SchemaTooOld, UnsafeStorage
from rollbook.core.host import Host
from rollbook.ledger import dialects, migrate
from rollbook.ledger import schema as t
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints


def test_the_migrations_make_exactly_the_tables_of_the_schema(bench: Bench) -> None:
    with bench.connect() as conn:

        def ours(_object: object, name: str | None, kind: str, *_: object) -> bool:
            return not (kind == "table" and "_p" in (name or "") and (name or "").rsplit("_", 1)[-1].isdigit())

        context = MigrationContext.configure(conn, opts={"include_object": ours, "compare_type": True})
        assert compare_metadata(context, t.metadata) == []
        found = {name: text for name, text in _checks(conn)}
    expected = {c.name for table in t.metadata.tables.values() for c in table.constraints if isinstance(c, sa.CheckConstraint)}
    assert {str(name) for name in expected} <= set(found), "CHECKs are not compared by alembic"


def _checks(conn: sa.Connection):
    inspector = sa.inspect(conn)
    for table in t.metadata.tables:
        for constraint in inspector.get_check_constraints(table):
            yield constraint["name"], constraint["sqltext"]


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=["sqlite", "postgresql"])
def test_every_primary_key_begins_with_the_run_and_then_the_slot(dialect: sa.Dialect) -> None:
    for table in t.metadata.tables.values():
        key = [c.name for c in table.primary_key.columns]
        assert key[0] == "run_id"
        if "sibling" in key:
            at = key.index("ordinal")
            assert key[at : at + 2] == ["ordinal", "sibling"]
        assert str(CreateTable(table).compile(dialect=dialect))
        if table.name in t.PARTITIONED:
            assert "ordinal" in key


def test_a_fresh_file_is_created_and_a_current_one_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'ledger.sqlite'}"
    Ledger(url, holder="a").close()
    assert migrate.check(url) == []
    assert migrate.upgrade(url) == migrate.head_revision()
    Ledger(url, holder="b").close()


def test_creating_a_file_that_is_broken_off_leaves_a_fresh_one_whatever_the_number_of_revisions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    failpoints.arm("ledger.migrate.before_commit=raise")
    try:
        with pytest.raises(failpoints.FailpointRaised):
            Ledger(url, holder="a")
    finally:
        failpoints.arm("")
    assert "holds no ledger" in migrate.check(url)[0]
    Ledger(url, holder="b").close()
    assert migrate.check(url) == []


def test_a_fresh_postgresql_database_is_created_by_the_first_server(postgres) -> None:
    engine = sa.create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        conn.exec_driver_sql("CREATE DATABASE ledger_fresh TEMPLATE template0")
    engine.dispose()
    assert "holds no ledger" in migrate.check(postgres.url("ledger_fresh"))[0]
    Ledger(postgres.url("ledger_fresh"), holder="a").close()
    assert migrate.check(postgres.url("ledger_fresh")) == []


def test_a_newer_schema_is_refused_and_says_to_upgrade(bench: Bench) -> None:
    bench.schema_is_changed()
    bench.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match="upgrade rollbook"):
        bench.open()
    with pytest.raises(SchemaTooNew):
        migrate.upgrade(bench.url)
    assert "9999" in migrate.check(bench.url)[0]


def test_an_older_schema_is_refused_and_says_to_migrate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "head_revision", lambda: "9999")
    with pytest.raises(SchemaTooOld, match="rollbook migrate"):
        bench.open()


def test_a_refused_ledger_lets_the_file_go(sqlite_bench: Bench) -> None:
    sqlite_bench.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew):
        sqlite_bench.open()
    sqlite_bench.execute(f"UPDATE alembic_version SET version_num = '{migrate.head_revision()}'")
    sqlite_bench.open()


def test_the_sqlite_library_has_the_wal_fix() -> None:
    assert dialects.sqlite_module().sqlite_version_info >= dialects.SQLITE_FIXED


def test_a_server_without_a_fixed_sqlite_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "SQLITE_FIXED", (99, 0, 0))
    with pytest.raises(UnsafeStorage, match=r"walresetbug.*pysqlite3>=0\.6\.1"):
        dialects.sqlite_module()


def test_the_pragmas_that_carry_durability_are_set(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()

    def pragma(name: str) -> object:
        return s.ledger._writer.run(lambda txn: txn.conn.exec_driver_sql(f"PRAGMA {name}").scalar())

    assert (pragma("journal_mode"), pragma("synchronous"), pragma("foreign_keys")) == ("wal", 2, 1)
    with s.ledger._database.reading() as conn:
        with pytest.raises(sa.exc.OperationalError, match="readonly"):
            conn.exec_driver_sql("DELETE FROM run")


def test_the_settings_that_carry_durability_are_set_on_postgresql(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()

    def show(name: str) -> str:
        return str(s.ledger._writer.run(lambda txn: txn.conn.exec_driver_sql(f"SHOW {name}").scalar()))

    assert show("synchronous_commit") == "on"
    assert show("fsync") == "on"
    assert show("transaction_isolation") == "read committed"
    assert show("idle_in_transaction_session_timeout") == show("statement_timeout") == "10s", "below the term of 15 s"
    bench.finish()


MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 21 0:40 / /data/nfs rw - nfs4 server:/x rw
31 21 0:41 / /data/sshfs rw - fuse.sshfs host:/ rw
32 21 0:42 / /data/nfs/local rw - xfs /dev/sdb rw
33 21 0:43 / /data/with\\040space rw - cifs //host/x rw
34 21 0:44 / /data/nine rw - 9p share rw
"""


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/data/nfs/run", "nfs4"), ("/data/sshfs", "fuse.sshfs"), ("/data/with space/run", "cifs"), ("/data/nine/a/b", "9p"),
    ],
)  # fmt: skip
def test_sqlite_on_a_network_file_system_is_refused_with_the_way_out(path: str, kind: str) -> None:
    with pytest.raises(UnsafeStorage, match=rf"{kind} file system.*run\.dir.*postgresql"):
        dialects.check_local_storage(Path(path), MOUNTS)


@pytest.mark.parametrize("path, kind", [("/home/run", "ext4"), ("/data/nfs/local/run", "xfs"), ("/data/nfs-like", "ext4")])
def test_sqlite_on_a_local_file_system_is_fine(path: str, kind: str) -> None:
    assert dialects.check_local_storage(Path(path), MOUNTS) == kind


def test_a_damaged_file_is_refused(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    s.feed(50)
    s.ledger.close()
    path = Path(sqlite_bench.url.removeprefix("sqlite:///"))
    data = bytearray(path.read_bytes())
    for page in range(3, len(data) // 8192):
        data[page * 8192 : page * 8192 + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    with pytest.raises(UnsafeStorage, match="damaged"):
        sqlite_bench.open()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db"])
def test_a_url_that_cannot_hold_a_ledger_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ledger\.url"):
        dialects.Database(url, Host(), role_ttl_s=15.0)


IMPOSSIBLE = [
    "UPDATE sample SET reward = NULL",
    "UPDATE sample SET reward_status = 'no_verdict'",
    "UPDATE sample SET reward_status = 'perhaps'",
    "UPDATE sample SET n_tokens = 0",
    "UPDATE sample SET version_min = 2, version_max = 1",
    "UPDATE sample SET version_min = -1",
    "UPDATE sample SET lease_token = 0",
    "UPDATE sample SET finish_reason = 'tired'",
    "UPDATE payload SET logprobs = token_ids || token_ids",
    "UPDATE lease SET token = 0",
    "UPDATE lease SET incarnation = 'nobody'",
    "DELETE FROM worker",
    "UPDATE fence SET epoch = 0 WHERE role = 'learner'",
    "UPDATE fence SET role = 'worker' WHERE role = 'learner'",
    "UPDATE plan SET base_version = 5",
    "UPDATE plan SET revision = 5",
    "UPDATE plan_item SET valid = FALSE",
    "UPDATE plan_outcome SET step = 9",
    "UPDATE plan_outcome SET outcome = 'skipped'",
    "UPDATE checkpoint SET state = 'lost'",
    "UPDATE prompt_group SET refills = ordinal",
    "UPDATE prompt_group SET n_siblings = 0",
    "INSERT INTO verdict (run_id, ordinal, sibling, kind, reason, decided_at_us) VALUES ('run', 0, 0, 'failed', '', 1)",
    "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us) VALUES ('run', 1, 0, NULL, 1)",
    "INSERT INTO lineage (run_id, lineage, parent, fork_step, created_at_us) VALUES ('run', 1, 2, 1, 1)",
]


@pytest.mark.parametrize("statement", IMPOSSIBLE)
def test_the_database_refuses_impossible_rows(bench: Bench, statement: str) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill(6)
    s.lease(1)
    s.train(1)
    s.checkpoint(1)
    with pytest.raises(sa.exc.IntegrityError):
        with bench.connect() as conn:
            if bench.url.startswith("sqlite"):
                conn.exec_driver_sql("PRAGMA foreign_keys = ON")
            conn.execute(sa.text(statement))


def test_the_caches_of_all_readers_together_are_no_larger_than_twice_the_writers(tmp_path: Path) -> None:
    """Each SQLite connection has one, and they filled to 64 MiB each as a run's database grew."""
    with Ledger(f"sqlite:///{tmp_path}/ledger.sqlite", holder="server") as ledger:
        with ledger._database.reader.connect() as reader, ledger._database.writer.connect() as writer:
            reading, writing = (-c.exec_driver_sql("PRAGMA cache_size").scalar() for c in (reader, writer))
    assert 0 < reading * dialects.READERS_MAX <= 2 * writing <= 128 * 1024
