"""Schema revisions: what this package knows, what a database has, and how to get from one to the other.

Owns the calls into alembic. Never changes a table by itself. A fresh database is created by the migrations at first open; an
older one is refused until ``rollbook migrate`` has run, a newer one until the package is upgraded.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import rollbook
from rollbook.core.errors import SchemaTooNew, SchemaTooOld
from rollbook.core.host import host
from rollbook.ledger.dialects import Database
from rollbook.observe.failpoints import failpoint

MIGRATION_LOCK = 7205759403792794


def script_location() -> Path:
    """Folder of the migrations: inside the installed package, else in the checkout."""
    package = Path(rollbook.__file__).resolve().parent
    shipped = package / "_migrations"
    return shipped if shipped.is_dir() else package.parent.parent / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    return config


def head_revision() -> str:
    """Newest revision this package knows."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise SchemaTooOld(f"no migrations in {script_location()}; the installation is incomplete")
    return head


def current_revision(conn: sa.Connection) -> str | None:
    """Revision of a database; None when it is fresh."""
    return MigrationContext.configure(conn).get_current_revision()


def _upgrade(database: Database) -> None:
    config = _config()
    with database.writer.connect() as conn:
        if not database.is_sqlite:
            conn.exec_driver_sql("SET statement_timeout = 0")
            conn.exec_driver_sql(f"SELECT pg_advisory_lock({MIGRATION_LOCK})")
            conn.commit()
        try:
            # One transaction for all revisions: left to itself, alembic commits each where it takes DDL for not transactional,
            # and a fresh database killed in between would be taken for an old one.
            conn.begin()
            config.attributes["connection"] = conn
            command.upgrade(config, "head")
            failpoint("ledger.migrate.before_commit")
            conn.commit()
        finally:
            if not database.is_sqlite:
                conn.rollback()
                conn.exec_driver_sql(f"SELECT pg_advisory_unlock({MIGRATION_LOCK})")
                conn.commit()


def _compare(current: str | None) -> None:
    known = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
    if current not in known:
        raise SchemaTooNew(
            f"the ledger has schema revision {current}, this package knows up to {head_revision()}; upgrade rollbook"
        )
    if current != head_revision():
        raise SchemaTooOld(
            f"the ledger has schema revision {current}, this package needs {head_revision()}; run `rollbook migrate`"
        )


def require_current(conn: sa.Connection) -> None:
    """Refuse a database of another revision than this package's, and an empty one. Raises SchemaTooNew, SchemaTooOld."""
    current = current_revision(conn)
    if current is None:
        raise SchemaTooOld("the database holds no ledger yet; start the run, or run `rollbook migrate`")
    _compare(current)


def prepare(database: Database) -> None:
    """Create the tables of a fresh database; refuse another revision. Raises SchemaTooNew, SchemaTooOld."""
    with database.reading() as conn:
        current = current_revision(conn)
    if current is None:
        _upgrade(database)
    else:
        _compare(current)
    failpoint("ledger.start.after_migration")


def upgrade(url: str, password_file: str = "") -> str:
    """Bring the database at ``url`` to the newest revision and return it. Raises SchemaTooNew, LedgerLocked."""
    database = Database(url, host(), role_ttl_s=60.0, password_file=password_file)
    try:
        with database.reading() as conn:
            current = current_revision(conn)
        if current is not None and current not in [s.revision for s in ScriptDirectory.from_config(_config()).walk_revisions()]:
            _compare(current)
        _upgrade(database)
        return head_revision()
    finally:
        database.close()


def check(url: str, password_file: str = "") -> list[str]:
    """What is wrong with the schema of the database at ``url``; empty when it is the one this package needs."""
    database = Database(url, host(), role_ttl_s=60.0, password_file=password_file)
    try:
        with database.reading() as conn:
            current = current_revision(conn)
        if current is None:
            return [f"{sa.make_url(url).render_as_string()} holds no ledger yet; run `rollbook migrate`"]
        _compare(current)
    except (SchemaTooNew, SchemaTooOld) as error:
        return [str(error)]
    finally:
        database.close()
    return []
