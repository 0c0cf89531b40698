"""A secret is in its file and in the memory of who needs it, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from security_support import make_folder, whole
from test_tls import RUN

from postgres_server import NotObtainable, PostgresServer
from rollbook.cli.main import main
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, RollbookError
from rollbook.ledger import migrate
from rollbook.ledger.dialects import Database
from rollbook.ledger.ledger import Ledger
from run_support import TinyRun, wait_until

USER = "secretive"


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[PostgresServer, str]]:
    """A PostgreSQL that asks ``USER`` for its password, and the password."""
    password = f"pw-{secrets.token_hex(12)}"
    try:
        server = PostgresServer()
    except NotObtainable as error:
        pytest.skip(f"PostgreSQL: {error}")
    try:
        hba = server.data / "pg_hba.conf"
        hba.write_text(f"host all {USER} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        with _superuser(server) as connection:
            connection.execute(f"CREATE USER {USER} PASSWORD '{password}' SUPERUSER")
            connection.execute("SELECT pg_reload_conf()")
        yield server, password
    finally:
        server.close()


@contextmanager
def _superuser(server: PostgresServer, database: str = "postgres") -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.url(database).replace("+psycopg", ""), autocommit=True, connect_timeout=60) as connection:
        yield connection


def url_of(server: PostgresServer, database: str) -> str:
    """Without a password, as it may stand in a configuration."""
    return server.url(database).replace("rollbook@", f"{USER}@")


def private(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@pytest.mark.timeout(900)
def test_a_whole_run_with_tls_tokens_and_a_database_password_leaves_no_secret_anywhere(
    tmp_path: Path, guarded: tuple[PostgresServer, str]
) -> None:
    server, password = guarded
    url = url_of(server, server.create("whole_run"))
    kept = tmp_path / "kept"
    make_folder(kept)
    planted = {p.name: p.read_text().strip() for p in kept.glob("*.token")} | {"database password": password}
    planted |= {p.name: max(p.read_text().splitlines(), key=len) for p in kept.glob("*.key")}
    run = TinyRun(tmp_path / "tiny")
    try:
        section = "\n".join(f"{k} = {json.dumps(v)}" for k, v in _fields(whole(kept)).items())
        file = private(kept / "password", password + "\n")
        run.config.write_text(
            run.config.read_text() + f'[security]\n{section}\n[ledger]\nurl = "{url}"\npassword_file = "{file}"\n'
        )
        run.start("--no-report", "--set", "run.steps=2")
        seen: dict[str, bytes] = {}

        def ended() -> bool:
            for record in run.records().values():
                for pid in record.tree():
                    for kind in ("cmdline", "environ"):
                        with suppress(OSError):
                            seen[f"{record.name} {kind} {pid}"] = Path(f"/proc/{pid}/{kind}").read_bytes()
            return run.process is not None and run.process.poll() is not None

        wait_until("the run ends", ended, bound_s=600.0)
        assert run.code() == 0, f"{run.output()}\n{run.tails()}"
        assert {"ledger", "feeder", "learner", "worker-0"} <= {where.split()[0] for where in seen}
        for command in (["status"], ["audit"], ["why", "0.0"], ["migrate", "--check"]):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                assert main([command[0], str(run.config), *command[1:]]) == 0, said.getvalue()
            seen[f"output of {command}"] = said.getvalue().encode()
        seen |= {str(path): path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
        seen |= {f"table {name}": text for name, text in _tables(server, "whole_run").items()}
        assert {f"{run.dir}/config.json", f"{run.dir}/logs/ledger.log", "table run"} <= seen.keys()
        assert b"worker.token" in next(v for k, v in seen.items() if k.startswith("worker-0 environ")), "its name may be seen"
        found = [(where, what) for where, content in seen.items() for what, text in planted.items() if text.encode() in content]
        assert not found
    finally:
        run.end()


def _fields(security: object) -> dict[str, object]:
    import dataclasses

    return {k: v for k, v in dataclasses.asdict(security).items() if v and isinstance(v, str | bool)}  # type: ignore[call-overload]


def _tables(server: PostgresServer, database: str) -> dict[str, bytes]:
    """Every row of every table of a database, as text."""
    with _superuser(server, database) as connection:
        names = [r[0] for r in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()]
        return {n: repr(connection.execute(f'SELECT t::text FROM "{n}" t').fetchall()).encode() for n in names}


@pytest.mark.parametrize("url", [
    "postgresql+psycopg://me:geheim@h/db", "postgresql://me:ge/heim@h/db", "postgresql://:geheim@h/db",
    "postgresql://h/db?password=geheim", "postgresql://h/db?sslmode=require&PASSWORD=geheim", "postgresql://h/db?p%61ssword=geheim",
    "postgresql://h/db?sslpassword=geheim", "mysql://me:geheim@h/db",
])  # fmt: skip
def test_a_password_in_the_url_is_refused_without_showing_it(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{RUN}\n[ledger]\nurl = "{url}"\n')
    for command in ("run", "status", "doctor", "migrate"):
        assert main([command, str(file)]) in (1, 2)
        said = capsys.readouterr()
        text = said.out + said.err
        assert all(way in text for way in ("PGPASSWORD", "PGPASSFILE", "ledger.password_file")) and "heim" not in text
    for opened in (lambda: Ledger(url, holder="a"), lambda: migrate.upgrade(url), lambda: migrate.check(url)):
        with pytest.raises(ConfigError) as caught:
            opened()
        assert "heim" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", [
    "postgresql+psycopg://me@h/db", "postgresql://h:5432/db", "postgresql://me@h1:1,h2:2/db?target_session_attrs=read-write",
    "postgresql://h/db?passfile=/etc/pgpass", "postgresql://me:@h/db", "sqlite:////data/a:b@c/ledger.sqlite",
])  # fmt: skip
def test_a_url_without_a_password_is_taken(tmp_path: Path, url: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{RUN}\n[ledger]\nurl = "{url}"\n')
    assert load_config(file).ledger.url == url


def test_the_password_file_opens_the_database_and_is_read_again(tmp_path: Path, guarded: tuple[PostgresServer, str]) -> None:
    server, password = guarded
    url, file = url_of(server, server.create("rotated")), tmp_path / "password"
    private(file, password + "\n")
    database = Database(url, _Clock(), role_ttl_s=60.0, password_file=str(file))
    try:
        with database.writer.connect() as connection:
            assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
        file.write_text("wrong")
        with pytest.raises(sa.exc.OperationalError), database.writer.connect():
            pass
        file.write_text(password)
        with database.writer.connect():
            pass
        assert password not in repr(database.writer) + str(database.writer.url) + repr(vars(database))
    finally:
        database.close()


class _Clock:
    def time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


def test_a_database_error_shows_no_password(
    tmp_path: Path, guarded: tuple[PostgresServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, password = guarded
    wrong = f"{password}-but-wrong"
    url = url_of(server, "postgres")
    nowhere = "postgresql+psycopg://secretive@127.0.0.1:1/db"
    with caplog.at_level(logging.DEBUG):
        for target in (url, nowhere):
            with pytest.raises(RollbookError) as caught:
                migrate.check(target, private(tmp_path / "password", wrong))
            chain: BaseException | None = caught.value
            while chain is not None:
                assert wrong not in str(chain) + repr(chain)
                chain = chain.__cause__ or chain.__context__
    assert wrong not in caplog.text


@pytest.mark.parametrize(("mode", "content", "said"), [
    (0o644, "geheimnis", "chmod 600"), (0o600, "", "one line"), (0o600, "geheimnis\nmore", "one line"),
    (None, "", "No such file"),
])  # fmt: skip
def test_a_password_file_that_is_none_is_refused_by_name(
    tmp_path: Path, guarded: tuple[PostgresServer, str], mode: int | None, content: str, said: str
) -> None:
    file = tmp_path / "password"
    if mode is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        migrate.check(url_of(guarded[0], "postgres"), str(file))
    assert "ledger.password_file" in str(caught.value) and "geheimnis" not in str(caught.value)


@pytest.mark.timeout(300)
def test_a_run_whose_supervisor_is_turned_away_ends_and_says_why(tmp_path: Path) -> None:
    """Without an end it would wait for an answer that never comes."""
    kept, other = tmp_path / "kept", tmp_path / "other"
    make_folder(kept, "--no-certificates")
    make_folder(other, "--no-certificates")
    run = TinyRun(tmp_path / "tiny")
    try:
        run.config.write_text(run.config.read_text() + f'[security]\ntokens = "{kept}/tokens.sha256"\ntoken_dir = "{other}"\n')
        code, said = run.run()
        assert code == 2 and "does not know the token" in said and "security.tokens" in said
        assert not run.alive()
    finally:
        run.end()


def test_a_token_on_a_command_line_has_no_place() -> None:
    """No command takes a secret as an argument: ``ps`` would show it."""
    import argparse

    from rollbook.cli.main import build_parser

    def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, int | str | None]]:
        for action in parser._actions:
            yield from ((name, action.nargs) for name in action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    yield from options(child)

    named = [each for each in options(build_parser()) if any(word in each[0] for word in ("token", "password", "secret"))]
    assert named == [("--tokens", 0)]  # of ``export``: a flag, the policy's tokens
