"""Backups and their way back, vacuum, and the commands around them, on both databases (P1)."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record
from test_commands import CONFIG, MODEL, Recorded, said

from postgres_server import PostgresServer
from rollbook.cli.keeping import spelled
from rollbook.core.errors import ConfigError, Expired, LedgerLocked, UnsafeStorage
from rollbook.core.records import SlotKey
from rollbook.core.settings import RetentionConfig
from rollbook.ledger import backup
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.rpc.address import write_address
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import serve

KEEP = RetentionConfig(enabled=True, every_s=0.05, groups=2, events_s=0, receipts_s=600.0)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture
def recorded(tmp_path: Path, ledger_url: str) -> Iterator[Recorded]:
    run = Recorded(tmp_path, ledger_url)
    yield run
    run.ledger.close()


def needs_programs(url: str) -> None:
    if url.startswith("postgresql") and not (shutil.which("pg_dump") and shutil.which("pg_restore")):
        pytest.skip("PG_DUMP NOT RUN: PostgreSQL's client programs are not installed")


def samples_of(url: str, holder: str = "") -> list[tuple]:
    """``holder``: whose term the copy still holds."""
    ledger = Ledger(url, holder="looks", supersede=holder)
    try:
        ledger.attach("run")
        assert ledger.audit() == []
        with ledger._database.reading() as conn:
            return [tuple(r) for r in conn.exec_driver_sql("SELECT ordinal, sibling, payload_digest FROM sample ORDER BY 1, 2")]
    finally:
        ledger.close()


@pytest.fixture
def empty_url(ledger_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where nothing is yet: a database of the same kind."""
    if ledger_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path}/elsewhere/ledger.sqlite"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    server.drop("restored")
    yield server.url(server.create("restored"))
    server.drop("restored")


def test_a_copy_of_a_ledger_in_use_is_whole_and_the_original_goes_on(recorded: Recorded, ledger_url: str, empty_url: str) -> None:
    needs_programs(ledger_url)
    over, written = threading.Event(), []
    scene = Scene(recorded.ledger, run_record(steps=2))

    def write() -> None:
        while not over.is_set():
            scene.feed(1)
            written.append(1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not written:
            over.wait(0.01)
        target = recorded.dir.parent / "copy"
        assert backup.back_up(ledger_url, target) == target.stat().st_size > 0
    finally:
        over.set()
        writer.join(60)
    assert backup.restore(empty_url, target) is None
    recorded.ledger.close()
    assert samples_of(empty_url, recorded.ledger._holder) == samples_of(ledger_url)
    assert [p.name for p in target.parent.iterdir() if p.name.endswith(".tmp")] == []


def test_backup_restore_and_vacuum_are_commands_of_the_ledger(
    recorded: Recorded, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_programs(ledger_url)
    server = recorded.serve()
    copy = recorded.dir.parent / "copy"
    code, out, _ = said(capsys, "ledger", "backup", recorded.config, copy)
    assert code == 0 and str(copy) in out and "bytes" in out
    assert said(capsys, "backup", recorded.config, copy)[0] == 2, "a backup never overwrites one"
    code, out, err = said(capsys, "ledger", "restore", recorded.config, copy)
    assert code == 2 and "running ledger server" in err
    code, out, _ = said(capsys, "ledger", "vacuum", recorded.config)
    assert code == 0 and "retention is off" in out
    server.stop(0.0)
    recorded.ledger.close()
    code, out, err = said(capsys, "ledger", "restore", recorded.config, copy)
    if ledger_url.startswith("sqlite"):
        assert code == 0 and "goes on from here" in out and "ledger.sqlite.replaced-1" in out
        assert len(samples_of(ledger_url)) == 4
    else:
        assert code == 2 and "CREATE DATABASE" in err


@pytest.mark.parametrize(
    ("argv", "means"),
    [
        (["ledger", "vacuum", "run.toml"], ["vacuum", "run.toml"]),
        (["ledger", "restore", "run.toml", "f"], ["restore", "run.toml", "f"]),
        (["ledger", "vacuum"], ["ledger", "vacuum"]),
        (["ledger", "vacuum", "--set", "a.b=1"], ["ledger", "vacuum", "--set", "a.b=1"]),
        (["ledger", "run.toml"], ["ledger", "run.toml"]),
        (["worker", "backup", "x"], ["worker", "backup", "x"]),
    ],
)
def test_the_role_and_the_commands_share_a_word(argv: list[str], means: list[str]) -> None:
    assert spelled(argv) == means


def test_a_restored_older_copy_is_refused_when_the_run_directory_is_ahead(
    tmp_path: Path, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = Recorded(tmp_path, sqlite_url), tmp_path / "copy"
    backup.back_up(sqlite_url, copy)
    run.ledger.close()
    versions = run.dir / "versions"
    (versions / "0.9.0123456789ab").mkdir(parents=True)
    (versions / "0.9.0123456789ab" / "model.safetensors").write_bytes(b"newer")
    code, out, err = said(capsys, "ledger", "restore", run.config, copy)
    assert code == 4 and "restored from" in out
    assert "is ahead of it" in err and "rollbook repair" in err


def test_a_copy_that_is_broken_off_has_no_name(recorded: Recorded, ledger_url: str) -> None:
    needs_programs(ledger_url)
    target = recorded.dir.parent / "copies" / "copy"
    target.parent.mkdir()
    failpoints.arm("ledger.backup.before_rename=raise")
    with pytest.raises(failpoints.FailpointRaised):
        backup.back_up(ledger_url, target)
    assert list(target.parent.iterdir()) == []


def test_a_restore_that_is_broken_off_leaves_the_replaced_database_aside_and_can_be_given_again(
    tmp_path: Path, sqlite_url: str
) -> None:
    run = Recorded(tmp_path, sqlite_url)
    backup.back_up(sqlite_url, tmp_path / "copy")
    run.ledger.close()
    failpoints.arm("ledger.restore.before_rename=raise")
    with pytest.raises(failpoints.FailpointRaised):
        backup.restore(sqlite_url, tmp_path / "copy")
    failpoints.arm("")
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    assert not path.exists() and path.with_name(f"{path.name}.replaced-1").exists()
    assert backup.restore(sqlite_url, tmp_path / "copy") is None
    assert len(samples_of(sqlite_url)) == 4


def test_only_a_whole_ledger_is_restored_and_none_that_is_served(tmp_path: Path, sqlite_url: str) -> None:
    run = Recorded(tmp_path, sqlite_url)
    copy = tmp_path / "copy"
    backup.back_up(sqlite_url, copy)
    with pytest.raises(LedgerLocked):
        backup.restore(sqlite_url, copy)
    with pytest.raises(LedgerLocked):
        backup.tidy(sqlite_url)
    run.ledger.close()
    (tmp_path / "text").write_text("no database")
    with pytest.raises(UnsafeStorage, match="is no ledger"):
        backup.restore(sqlite_url, tmp_path / "text")
    damaged = tmp_path / "damaged"
    content = bytearray(copy.read_bytes())
    content[3 * 8192 : 5 * 8192] = b"\xff" * (2 * 8192)
    damaged.write_bytes(content)
    with pytest.raises(UnsafeStorage):
        backup.restore(sqlite_url, damaged)
    with pytest.raises(ConfigError, match="is no file"):
        backup.restore(sqlite_url, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no ledger at"):
        backup.back_up(f"sqlite:///{tmp_path}/none.sqlite", tmp_path / "none")
    assert len(samples_of(sqlite_url)) == 4
    assert any(line.startswith("log:") for line in backup.tidy(sqlite_url))


def test_without_the_programs_the_refusal_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pg_dump is not installed.*pg_dump --format=custom"):
        backup.back_up("postgresql+psycopg://u@h/db", tmp_path / "copy")


def test_a_password_is_no_argument_of_a_program() -> None:
    connection, environment = backup._connection_of("postgresql+psycopg://u:secret@/db?host=a:1&host=b:2")
    assert "secret" not in connection and environment["PGPASSWORD"] == "secret"
    assert "host=a,b" in connection and "port=1,2" in connection


def seven_steps(ledger: Ledger) -> None:
    """Steps of two groups each, with a checkpoint at every one."""
    scene = Scene(ledger, run_record(max_lag_versions=1000, infra_window=2))
    for step in range(1, 8):
        scene.feed(2)
        scene.fill()
        scene.train(step)
        scene.checkpoint(step)


def test_vacuum_lets_groups_go_now_and_every_command_says_what_is_gone(
    tmp_path: Path, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    (tmp_path / "run").mkdir()
    config.write_text(CONFIG.format(dir=tmp_path / "run", model=MODEL, url=ledger_url, ttl=60.0))
    ledger = Ledger(ledger_url, holder="server", role_ttl_s=60.0, ordinals_per_partition=4)
    seven_steps(ledger)
    ledger.close()
    switched = ["--set", "retention.enabled=true", "--set", "retention.groups=4"]
    code, out, _ = said(capsys, "ledger", "vacuum", config, *switched)
    assert code == 0 and "retention is off" not in out
    assert "freed groups      8" in out and "low watermark 8; steps from 5 on can be replayed" in out
    assert "groups let go 0, since the run began 8" in said(capsys, "vacuum", config, *switched)[1]
    for command in (("why", config, "0.0"), ("regenerate", config, "0.0")):
        code, _, err = said(capsys, *command)
        assert code == 1 and "Expired" in err and "low watermark 8" in err
    assert said(capsys, "audit", config)[:2] == (0, "audit: clean\n")
    assert "retention  8 groups let go  low watermark 8  replayable from step 5" in said(capsys, "status", config)[1]


def test_a_client_is_answered_expired_by_its_own_name(sqlite_url: str) -> None:
    ledger = Ledger(sqlite_url, holder="server", retention=dataclasses.replace(KEEP, every_s=3600.0, groups=4))
    seven_steps(ledger)
    assert ledger.expire()["groups"] == 8
    server = serve(ledger, "127.0.0.1:0", run_id="run")
    try:
        with LedgerClient(server.address, "run", retry_total_s=5.0) as client:
            for asked in (
                lambda: client.sample(SlotKey(0, 0)), lambda: client.explain(SlotKey(0, 0)), lambda: client.read_plan(0, 1),
                lambda: list(client.payloads(0, 1)),
            ):  # fmt: skip
                with pytest.raises(Expired, match="let go"):
                    asked()
            assert client.sample(SlotKey(8, 0)).key == SlotKey(8, 0)
            assert client.run_status()["retention"]["low_watermark"] == 8
    finally:
        server.stop(0.0)
        ledger.close()


def test_vacuum_waits_for_a_round_of_the_running_server(
    tmp_path: Path, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recorded(tmp_path, sqlite_url)
    run.ledger.close()
    run.ledger = Ledger(sqlite_url, holder="next", retention=KEEP)
    run.ledger.open_run(run_record(steps=2))
    server = serve(run.ledger, "127.0.0.1:0", run_id="run")
    write_address(run.dir, server.address)
    code, out, _ = said(capsys, "ledger", "vacuum", run.config, "--set", "retention.every_s=0.05")
    assert code == 0 and "groups let go" in out and "log:" not in out
    assert run.ledger.run_status()["retention"]["rounds"] >= 2
    server.stop(0.0)
    run.ledger.close()


def test_tables_with_many_dead_rows_are_vacuumed_beside_a_running_server(tmp_path: Path, postgres_url: str) -> None:
    run = Recorded(tmp_path, postgres_url)
    engine = sa.create_engine(postgres_url)
    with engine.begin() as conn:
        rows = "SELECT 'x', 's', n, 'd', n, '', false, 0 FROM generate_series(1, 5000) n"
        conn.exec_driver_sql(f"INSERT INTO append_receipt {rows}")
        conn.exec_driver_sql("DELETE FROM append_receipt WHERE run_id = 'x'")
    engine.dispose()
    for _ in range(600):  # statistics arrive when the session that made them is over
        lines = backup.tidy(postgres_url)
        if any(line.startswith("append_receipt: ") for line in lines):
            break
        time.sleep(0.05)
    assert any(line.startswith("append_receipt: ") for line in lines)
    assert set(run.ledger.run_status()["database"]) == {"oldest_xmin_age", "dead_tuples"}
    run.ledger.close()
