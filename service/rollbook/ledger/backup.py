"""Copies of a ledger and their way back, and what a database does for itself.

Owns ``back_up``, ``restore`` and ``tidy``. Never decides which history counts: a ledger that was restored from an older copy is
found out when it is served (``learner.history``), and refused. Upholds P1: a copy is fsynced and complete before it has its name.
SQLite copies itself (``VACUUM INTO``, one read transaction, while the server goes on writing); PostgreSQL's own programs copy a
PostgreSQL database. Sources: sqlite.org/lang_vacuum.html, postgresql.org/docs/current/app-pgdump.html.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import ConfigError, RollbookError, StorageFull, UnsafeStorage
from rollbook.core.host import fsync_directory, host
from rollbook.core.security import read_secret
from rollbook.ledger.dialects import Database, sqlite_module
from rollbook.ledger.migrate import current_revision
from rollbook.observe.failpoints import failpoint

DEAD_TUPLES_MIN = 1000
DEAD_SHARE = 0.05
"""A table is vacuumed when it has more dead rows than both: this many, and this share of its rows."""
PROGRAM_S = 24 * 3600.0
"""Bound on a run of pg_dump or pg_restore."""


def back_up(url: str, target: Path, password_file: str = "") -> int:
    """Write a copy of the whole database at ``url`` to the new file ``target``; returns its bytes.

    The database may be in use. Raises ConfigError (no database, ``target`` exists, pg_dump is not installed), StorageFull.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; a backup never overwrites one, name another file")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory")
    copy = partial(_copy_sqlite, _file_of(url)) if _is_sqlite(url) else partial(_dump, url, password_file)
    return _named_when_whole(target, copy)


def restore(url: str, source: Path, password_file: str = "") -> Path | None:
    """Put the copy ``source`` in the place of the database at ``url``; returns where the one it replaces was moved (SQLite).

    Raises: LedgerLocked (a server holds it), UnsafeStorage (the copy is damaged), ConfigError (no copy; a PostgreSQL database
    that is not empty: nothing there is ever overwritten).
    """
    if not source.is_file():
        raise ConfigError(f"{source} is no file")
    if _is_sqlite(url):
        return _restore_sqlite(_file_of(url), source)
    _restore_postgresql(url, source, password_file)
    return None


def tidy(url: str, password_file: str = "") -> list[str]:
    """Let the database give space back where that is due; one line for each thing done. Changes no row, so it needs no role.

    PostgreSQL: VACUUM (ANALYZE) of tables with many dead rows; beside a running server. SQLite: its log is written back and
    emptied; raises LedgerLocked while a server has the file, which does the same as it goes.
    """
    database = Database(url, host(), role_ttl_s=60.0, password_file=password_file)
    try:
        return _tidy_sqlite(database) if database.is_sqlite else _tidy_postgresql(database)
    finally:
        database.close()


def _is_sqlite(url: str) -> bool:
    return sa.make_url(url).get_backend_name() == "sqlite"


def _file_of(url: str) -> Path:
    name = sa.make_url(url).database
    if not name:
        raise ConfigError(f"ledger.url {url!r} names no file")
    return Path(name)


def _named_when_whole(target: Path, write: Callable[[Path], None]) -> int:
    """Write beside ``target``, make it durable, then give it its name."""
    temporary = target.with_name(f"{target.name}.{host().token()[:8]}.tmp")
    try:
        write(temporary)
        fd = os.open(temporary, os.O_RDONLY)
        try:
            host().fsync(fd, temporary)
        finally:
            os.close(fd)
        failpoint("ledger.backup.before_rename")
        temporary.rename(target)
        fsync_directory(target.parent)
        return target.stat().st_size
    finally:
        temporary.unlink(missing_ok=True)


def _copy_sqlite(path: Path, target: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no ledger at {path}")
    module = sqlite_module()
    with contextlib.closing(module.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=60.0)) as conn:
        try:
            conn.execute("VACUUM INTO ?", (str(target),))
        except module.Error as error:
            if "full" in str(error):
                raise StorageFull(f"{target.parent} has no room for the backup ({error}); nothing was left there") from error
            raise UnsafeStorage(f"{path} cannot be copied ({error})") from error
    check_copy(target)


def check_copy(path: Path) -> None:
    """Raises UnsafeStorage unless ``path`` is a whole SQLite ledger."""
    module = sqlite_module()
    try:
        with contextlib.closing(module.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as conn:
            found = [row[0] for row in conn.execute("PRAGMA quick_check(3)")]
            revision = conn.execute("SELECT version_num FROM alembic_version").fetchone()
    except module.Error as error:
        raise UnsafeStorage(f"{path} is no ledger ({error})") from error
    if found != ["ok"] or revision is None:
        raise UnsafeStorage(f"{path} is damaged: {'; '.join(found)}")


def _restore_sqlite(path: Path, source: Path) -> Path | None:
    check_copy(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        temporary = path.with_name(f"{path.name}.{host().token()[:8]}.tmp")
        try:
            shutil.copyfile(source, temporary)
            fd = os.open(temporary, os.O_RDONLY)
            try:
                host().fsync(fd, temporary)
            finally:
                os.close(fd)
            check_copy(temporary)
            aside = _move_aside(path)
            failpoint("ledger.restore.before_rename")
            temporary.rename(path)
            fsync_directory(path.parent)
            return aside
        finally:
            temporary.unlink(missing_ok=True)


def _move_aside(path: Path) -> Path | None:
    """Keep the database that is replaced, with its log: moved together, so that the copy never meets a log of another file."""
    parts = [Path(f"{path}{suffix}") for suffix in ("-shm", "-wal", "")]
    if not any(part.exists() for part in parts):
        return None
    number = 1
    while path.with_name(f"{path.name}.replaced-{number}").exists():
        number += 1
    aside = path.with_name(f"{path.name}.replaced-{number}")
    # The database first: a crash in between leaves a log without its file, never a log beside another file.
    for part in reversed(parts):
        if part.exists():
            part.rename(Path(f"{aside}{str(part).removeprefix(str(path))}"))
    fsync_directory(path.parent)
    return aside


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    """No server has the file, and none gets it meanwhile. Raises LedgerLocked."""
    lock = Database.lock_file(path)
    try:
        yield
    finally:
        os.close(lock)


def _program(name: str, purpose: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            f"{name} is not installed here; install PostgreSQL's client programs, or {purpose} where they are, as the database's "
            "manual describes"
        )
    return found


def _connection_of(url: str, password_file: str = "") -> tuple[str, Mapping[str, str]]:
    """libpq's parameters without the password, and the environment that holds it: arguments are seen by everybody."""
    from psycopg.conninfo import make_conninfo

    parsed = sa.make_url(url).set(drivername="postgresql+psycopg")
    _, parameters = parsed.get_dialect()().create_connect_args(parsed)
    password = parameters.pop("password", "")
    if password_file:
        password = read_secret(password_file, "ledger.password_file")
    secret = {"PGPASSWORD": str(password)} if password else {}
    return make_conninfo(**parameters), dict(host().environ) | secret


def _dump(url: str, password_file: str, target: Path) -> None:
    connection, environment = _connection_of(url, password_file)
    arguments = ["--format=custom", "--no-owner", f"--file={target}", f"--dbname={connection}"]
    _run([_program("pg_dump", "run `pg_dump --format=custom`"), *arguments], environment)


def _restore_postgresql(url: str, source: Path, password_file: str) -> None:
    database = Database(url, host(), role_ttl_s=60.0, password_file=password_file)
    try:
        with database.reading() as conn:
            if (revision := current_revision(conn)) is not None:
                raise ConfigError(
                    f"the database of ledger.url holds a ledger (schema {revision}); restore into an empty one: CREATE DATABASE, "
                    "then set ledger.url to it"
                )
    finally:
        database.close()
    connection, environment = _connection_of(url, password_file)
    arguments = ["--exit-on-error", "--single-transaction", "--no-owner", f"--dbname={connection}", str(source)]
    _run([_program("pg_restore", "run `pg_restore --single-transaction`"), *arguments], environment)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RollbookError(f"{Path(command[0]).name} failed with {done.returncode}: {'; '.join(said[-3:])}")


def _tidy_sqlite(database: Database) -> list[str]:
    with database.reader.connect() as conn:
        pages, size = (int(conn.exec_driver_sql(f"PRAGMA {n}").scalar_one()) for n in ("freelist_count", "page_size"))
    raw = database.writer.raw_connection()
    try:
        _, in_log, written = raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        raw.close()
    return [
        f"log: {max(0, written)} of {max(0, in_log)} pages written back",
        f"file: {pages * size} bytes are free and will be used again; `rollbook ledger backup` writes a copy without them",
    ]


def _tidy_postgresql(database: Database) -> list[str]:
    with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("SET statement_timeout = 0")
        due = conn.exec_driver_sql(
            "SELECT relname, n_dead_tup FROM pg_stat_user_tables WHERE n_dead_tup > %s AND n_dead_tup > %s * n_live_tup "
            "ORDER BY relname",
            (DEAD_TUPLES_MIN, DEAD_SHARE),
        ).all()
        for row in due:
            conn.exec_driver_sql(f'VACUUM (ANALYZE) "{row.relname}"')
    return [f"{row.relname}: {row.n_dead_tup} dead rows vacuumed" for row in due] or ["no table has many dead rows"]
