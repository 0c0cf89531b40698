"""Everything in which SQLite and PostgreSQL differ.

Owns engines, pragmas and session settings, the storage checks, the file lock, server time and translation of driver errors.
Never knows a verb. Upholds P1 (WAL with ``synchronous=FULL``; ``synchronous_commit=on``) and, for a SQLite
file, P8 (one server at a time through an advisory file lock). Sources: sqlite.org/wal.html#walresetbug (stock libraries
before 3.51.3 may corrupt a WAL), sqlite.org/pragma.html,
postgresql.org/docs/current/libpq-connect.html (several hosts, ``target_session_attrs``).
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, DisconnectionError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool, QueuePool

from rollbook.core.errors import ConfigError, LedgerLocked, RollbookError, StorageFull, Unavailable, UnsafeStorage
from rollbook.core.host import host
from rollbook.core.ports import Clock
from rollbook.core.security import check_url, read_secret
from rollbook.observe import metrics
from rollbook.observe.failpoints import failpoint

SQLITE_FIXED = (3, 51, 3)
"""First SQLite release without the WAL-reset corruption bug."""
NETWORK_FILESYSTEMS = re.compile(
    r"^(nfs\d*|cifs|smb\d*|smbfs|9p|fuse(\..+)?|ceph|gluster.*|lustre|gpfs|beegfs|afs|ocfs2|gfs2|virtiofs|davfs|sshfs|pvfs2)$"
)
MOUNTINFO = Path("/proc/self/mountinfo")
QUICK_CHECK_BYTES_MAX = 256 * 2**20
"""Above this file size the payload table, whose rows carry their own digests, is left out of the check at open."""
READERS_MAX = 16
SQLITE_BUSY_MS = 10_000
WRITER_CACHE_KIB, READER_CACHE_KIB = 65_536, 8_192
SQLITE_PASSING = ("locked", "busy", "disk I/O error", "unable to open", "interrupted", "Cannot operate on a closed database")
"""Messages of SQLite errors that concern the storage and not the statement."""
POSTGRESQL_PASSING = ("08", "53", "57", "58", "40001", "40P01", "55P03", "25P03", "25006")
"""SQLSTATE classes and codes of the same kind: connection, resources, operator intervention, system, conflicts, timeouts, and a
server that has become a standby."""
CONFLICTS = ("40001", "40P01")
"""SQLSTATE codes of a transaction that PostgreSQL broke off in favour of another and that may be run again as it is."""
KEYS_MAX = 4000
"""Slots named in one statement: below SQLite's 32,766 and PostgreSQL's 65,535 parameters."""


def sqlite_module() -> ModuleType:
    """The SQLite driver to use: the stock one when its library is fixed, else ``pysqlite3``.

    Raises: UnsafeStorage when neither has a library without the WAL-reset bug.
    """
    if sqlite3.sqlite_version_info >= SQLITE_FIXED:
        return sqlite3
    found = f"the standard library has SQLite {sqlite3.sqlite_version}"
    try:
        from pysqlite3 import dbapi2  # type: ignore[import-untyped]
    except ImportError:
        found += " and pysqlite3 is not installed"
    else:
        if dbapi2.sqlite_version_info >= SQLITE_FIXED:
            return cast(ModuleType, dbapi2)
        found += f" and pysqlite3 has {dbapi2.sqlite_version}"
    raise UnsafeStorage(
        f"{found}: releases before 3.51.3 can corrupt a WAL file (sqlite.org/wal.html#walresetbug); "
        "install pysqlite3>=0.6.1 or use a postgresql+psycopg:// URL"
    )


def filesystem_of(path: Path, mountinfo: str | None = None) -> str:
    """Type of the file system that holds ``path``, from the kernel's mount table; empty where there is none to read."""
    try:
        table = MOUNTINFO.read_text() if mountinfo is None else mountinfo
    except OSError:
        return ""
    target, best, kind = str(path.resolve()), "", ""
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def check_local_storage(path: Path, mountinfo: str | None = None) -> str:
    """Type of the file system that holds ``path``. Raises UnsafeStorage when SQLite cannot trust its locks and fsync."""
    kind = filesystem_of(path, mountinfo)
    if NETWORK_FILESYSTEMS.match(kind):
        raise UnsafeStorage(
            f"{path} is on a {kind} file system, where SQLite's locks and fsync cannot be trusted; put the run directory "
            "on a local disk (run.dir) or set ledger.url to postgresql+psycopg://…"
        )
    return kind or "unknown"


def translate(error: SQLAlchemyError) -> RollbookError | None:
    """The core error for a driver error that concerns the storage, None for one that concerns a single statement."""
    if isinstance(error, DisconnectionError | PoolTimeout):
        return Unavailable(f"the ledger's database is not reachable: {error}")
    if not isinstance(error, DBAPIError):
        return None
    text = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    state = getattr(error.orig, "sqlstate", None) or ""
    if state == "53100" or "database or disk is full" in text:
        return StorageFull(f"the ledger's storage is full ({text}); nothing was acknowledged, writes resume when space is freed")
    if "disk image is malformed" in text or "file is not a database" in text:
        return UnsafeStorage(
            f"the ledger's file is damaged ({text}); stop writing and restore it from a backup (with its -wal file)"
        )
    if not hasattr(error.orig, "sqlstate"):
        passing = any(word in text for word in SQLITE_PASSING)
    else:
        gone = error.connection_invalidated or (isinstance(error, OperationalError | InterfaceError) and not state)
        passing = gone or state[:2] in POSTGRESQL_PASSING or state in POSTGRESQL_PASSING
    if passing:
        return Unavailable(f"the ledger's database cannot answer now ({text}); repeat with the same key")
    return None


def is_conflict(error: BaseException | None) -> bool:
    """Whether PostgreSQL broke a transaction off in favour of another one: nothing of it is left, it may be run again."""
    while error is not None:
        if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in CONFLICTS:
            return True
        error = error.__cause__
    return False


def error_class(error: BaseException | None) -> str:
    """The word of the metrics for what went wrong with a transaction; ``connection`` where it is nothing more special."""
    while error is not None:
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        if state in ("40001", "40P01"):
            return "serialization" if state == "40001" else "deadlock"
        if (state or "").startswith("23") or isinstance(error, IntegrityError):
            return "constraint"
        if state in ("57014", "25P03", "55P03") or "locked" in str(getattr(error, "orig", "")):
            return "timeout"
        error = error.__cause__
    return "connection"


class Database:
    """Engines of one ledger: a single writing connection's engine and a pool of read-only ones.

    ``exclusive`` is true for SQLite: holding the file lock proves that no other server lives.
    """

    def __init__(self, url: str, clock: Clock, *, role_ttl_s: float, password_file: str = "") -> None:
        """``password_file``: read for every new PostgreSQL connection, so that nothing that is ever shown holds the password."""
        check_url(url)
        self.url = url
        self._password_file = password_file
        self.clock = clock
        parsed = sa.make_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._epoch_s = clock.time() - clock.monotonic()
        self.exclusive = self.is_sqlite
        self._lock_fd = -1
        self._warnings: list[str] = []
        if self.is_sqlite:
            self._open_sqlite(parsed)
        elif parsed.get_backend_name() == "postgresql":
            self._open_postgresql(parsed, role_ttl_s)
        else:
            raise ConfigError(f"ledger.url {parsed.render_as_string()}: use sqlite:///FILE or postgresql+psycopg://…")

    def _open_sqlite(self, url: sa.URL) -> None:
        if not url.database or url.database == ":memory:":
            raise ConfigError("ledger.url: a ledger in memory survives nothing; write sqlite:///FILE")
        module = sqlite_module()
        path = Path(url.database)
        path.parent.mkdir(parents=True, exist_ok=True)
        check_local_storage(path.parent)
        self._lock(path)
        try:
            failpoint("ledger.start.after_lock")
            self.writer = sa.create_engine(url, module=module, poolclass=NullPool)
            self.reader = sa.create_engine(
                url, module=module, poolclass=QueuePool, pool_size=4, max_overflow=READERS_MAX - 4, pool_timeout=30
            )
            _prepare_sqlite(self.writer, "BEGIN IMMEDIATE", query_only=False)
            _prepare_sqlite(self.reader, "BEGIN", query_only=True)
            self._quick_check(path)
        except SQLAlchemyError as error:
            self._unlock()
            if (core := translate(error)) is not None:
                raise type(core)(f"{path}: {core}") from error
            raise
        except BaseException:
            self._unlock()
            raise

    def _lock(self, path: Path) -> None:
        self._lock_fd = self.lock_file(path)

    @staticmethod
    def lock_file(path: Path) -> int:
        """A descriptor that holds the lock of a SQLite file until it is closed. Raises LedgerLocked, UnsafeStorage."""
        lock = Path(f"{path}.lock")
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UnsafeStorage(
                f"{lock} cannot be written ({error.strerror}), and a ledger is written to even to look at it: make {path.parent} "
                "writable, or copy the run directory to where it is"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise LedgerLocked(
                f"another ledger server holds {path} (lock file {lock}); stop it first, or use its address"
            ) from None
        return fd

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _quick_check(self, path: Path) -> None:
        with self.writer.connect() as conn:
            conn.exec_driver_sql("PRAGMA journal_mode")
            tables = [""]
            if path.stat().st_size > QUICK_CHECK_BYTES_MAX:
                names = conn.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars()
                tables = [f"('{name}')" for name in names if name != "payload" and not name.startswith("sqlite_")]
            for table in tables:
                found = conn.exec_driver_sql(f"PRAGMA quick_check{table}").scalars().all()
                if found != ["ok"]:
                    raise UnsafeStorage(
                        f"{path} is damaged: {'; '.join(map(str, found[:3]))}; restore it from a backup "
                        "(copy the -wal file along) before anything is written to it"
                    )

    def _open_postgresql(self, url: sa.URL, role_ttl_s: float) -> None:
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        bound_ms = max(1000, int(role_ttl_s * 1000 * 2 / 3))
        # Below the term whatever the term (R12): a server stopped inside a transaction may not hold the fence row past it.
        idle_ms = max(1, int(role_ttl_s * 1000 * 2 / 3))
        shared = {
            "connect_timeout": 5, "keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
            "tcp_user_timeout": bound_ms,
        }  # fmt: skip
        _check_session_attrs(url)
        write = (
            f"-c synchronous_commit=on -c statement_timeout={bound_ms} -c lock_timeout={bound_ms} "
            f"-c idle_in_transaction_session_timeout={idle_ms}"
        )
        # The database gives up on a server that takes no answer in, as one that is stopped while a long one is sent: such a
        # session is not idle, and would keep its row of the fence past the term.
        write += f" -c tcp_user_timeout={bound_ms}"
        read = "-c default_transaction_read_only=on -c statement_timeout=600000 -c idle_in_transaction_session_timeout=600000"
        try:
            self.writer = sa.create_engine(
                url, poolclass=NullPool, isolation_level="READ COMMITTED",
                connect_args=shared | {"options": write, "target_session_attrs": "read-write"},
            )  # fmt: skip
            self.reader = sa.create_engine(
                url, pool_size=4, max_overflow=READERS_MAX - 4, pool_timeout=30, pool_pre_ping=True,
                isolation_level="REPEATABLE READ", connect_args=shared | {"options": read, "target_session_attrs": "primary"},
            )  # fmt: skip
            # "primary" and not "read-write": the readers' own sessions are read-only, which libpq would take for the server's.
        except ImportError as error:
            raise ConfigError(f"ledger.url {url.render_as_string()}: {error}; install rollbook[postgres]") from None
        if self._password_file:
            for engine in (self.writer, self.reader):
                sa.event.listen(engine, "do_connect", self._add_password)

        @sa.event.listens_for(self.writer, "connect")
        def connect(dbapi_connection: Any, _record: object) -> None:
            dbapi_connection.add_notice_handler(self._noticed)

    def _add_password(self, _dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
        """Give a new connection its password. Raises ConfigError."""
        parameters["password"] = read_secret(self._password_file, "ledger.password_file")

    def _noticed(self, diagnostic: Any) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            self._warnings.append(str(diagnostic.message_primary))

    def commit(self, conn: sa.Connection) -> None:
        """COMMIT. Raises Unavailable when it came with a warning: PostgreSQL says no more when a wait for a synchronous standby
        is broken off, and what the standby does not have is lost with this server
        (postgresql.org/docs/current/warm-standby.html).
        """
        self._warnings.clear()
        conn.commit()
        if self._warnings:
            raise Unavailable(f"the commit may be lost with its server ({'; '.join(self._warnings)}); repeat with the same key")

    def now_us(self, conn: sa.Connection) -> int:
        """Time of the ledger: the database's clock on PostgreSQL, the server's on SQLite. Workers' clocks never count.

        On SQLite it is the wall time of the start carried on by the monotonic clock: a wall clock that is set while the
        server runs neither ends a lease nor keeps it alive.
        """
        if self.is_sqlite:
            return int((self._epoch_s + self.clock.monotonic()) * 1_000_000)
        return int(conn.exec_driver_sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint").scalar_one())

    def not_before(self, at_us: int) -> None:
        """Let the time of a SQLite ledger go on from ``at_us``, a stored time, where the wall clock was set back since."""
        self._epoch_s = max(self._epoch_s, at_us / 1_000_000 - self.clock.monotonic())

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A read-only connection with one consistent snapshot. Raises Unavailable when the database does not answer."""
        began = host().monotonic()
        try:
            with self.reader.connect() as conn, conn.begin():
                yield conn
            metrics.TRANSACTION_DURATION_SECONDS.labels("read").observe(host().monotonic() - began)
        except SQLAlchemyError as error:
            metrics.TRANSACTION_ERRORS_TOTAL.labels("read", error_class(error)).inc()
            if (core := translate(error)) is not None:
                raise core from error
            raise

    def condition(self, conn: sa.Connection) -> dict[str, int]:
        """What to raise an alarm about: on PostgreSQL the age of the oldest snapshot that holds dead rows, and their number.

        ``oldest_xmin_age``: transactions begun since, over sessions, prepared transactions and replication slots.
        """
        if self.is_sqlite:
            return {}
        age = (
            "SELECT coalesce(max(age), 0) FROM (SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "UNION ALL SELECT age(transaction) FROM pg_prepared_xacts UNION ALL SELECT age(xmin) FROM pg_replication_slots) AS h"
        )
        dead = "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables"
        found = {"oldest_xmin_age": age, "dead_tuples": dead}
        return {name: int(conn.exec_driver_sql(query).scalar_one()) for name, query in found.items()}

    def size_bytes(self, conn: sa.Connection) -> int:
        """Pages of the SQLite file, or the PostgreSQL database, its log not included."""
        if not self.is_sqlite:
            return int(conn.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
        return int(conn.exec_driver_sql("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").scalar_one())

    def insert_rows(self, conn: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows with the same columns.

        Plain driver SQL: processing every row through a statement would cost as much as the row itself.
        """
        if not rows:
            return
        columns = tuple(rows[0])
        marks = ", ".join([self._mark] * len(columns))
        text = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({marks})"
        conn.exec_driver_sql(text, [tuple(row.values()) for row in rows])

    def rows_by_slot(
        self, conn: sa.Connection, table: sa.Table, columns: Sequence[str], run_id: str, keys: Sequence[tuple[int, int]]
    ) -> list[Any]:
        """``columns`` of the rows of ``table`` for many slots, by primary key."""
        rows: list[Any] = []
        for part in _parts(keys):
            text, values = self._slots_condition(part)
            rows += conn.exec_driver_sql(f"SELECT {', '.join(columns)} FROM {table.name} WHERE {text}", (run_id, *values)).all()
        return rows

    def delete_by_slot(self, conn: sa.Connection, table: sa.Table, run_id: str, keys: Sequence[tuple[int, int]]) -> None:
        """Delete the rows of many slots."""
        for part in _parts(keys):
            text, values = self._slots_condition(part)
            conn.exec_driver_sql(f"DELETE FROM {table.name} WHERE {text}", (run_id, *values))

    def _slots_condition(self, keys: Sequence[tuple[int, int]]) -> tuple[str, list[int]]:
        pair = f"({self._mark}, {self._mark})"
        listed = ", ".join([pair] * len(keys))
        values = "VALUES " if self.is_sqlite else ""
        return f"run_id = {self._mark} AND (ordinal, sibling) IN ({values}{listed})", [n for key in keys for n in key]

    @property
    def _mark(self) -> str:
        return "?" if self.is_sqlite else "%s"

    def insert_ignore(self, table: sa.Table) -> Any:
        """INSERT … ON CONFLICT DO NOTHING for this dialect."""
        module = sqlite if self.is_sqlite else postgresql
        return module.insert(table).on_conflict_do_nothing()

    def in_transaction(self, conn: sa.Connection) -> bool:
        """False when SQLite has already rolled the transaction back by itself (disk full, I/O error)."""
        if not self.is_sqlite:
            return True
        raw: Any = conn.connection.dbapi_connection
        return bool(raw.in_transaction)

    def close(self) -> None:
        """Close every connection and let the file go."""
        self.reader.dispose()
        self.writer.dispose()
        self._unlock()


def _check_session_attrs(url: sa.URL) -> None:
    """A standby may lag: what it answers is not what was acknowledged. So one value only, and it is also the default."""
    asked = url.query.get("target_session_attrs", "read-write")
    if asked not in ("read-write", "primary"):
        raise ConfigError(
            f"ledger.url asks for target_session_attrs={asked}; a ledger writes to and reads from the primary only: leave it "
            "out, or write read-write"
        )


def _parts(keys: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(keys), KEYS_MAX):
        yield keys[start : start + KEYS_MAX]


def _prepare_sqlite(engine: sa.Engine, begin: str, *, query_only: bool) -> None:
    @sa.event.listens_for(engine, "connect")
    def connect(dbapi_connection: Any, _record: object) -> None:
        # The driver must not begin transactions itself: its implicit BEGIN is deferred and clashes with SAVEPOINT.
        dbapi_connection.isolation_level = None
        # Each connection has a cache of its own; there are several readers, and they have the operating system's as well.
        cache_kib = READER_CACHE_KIB if query_only else WRITER_CACHE_KIB
        pragmas = [f"busy_timeout={SQLITE_BUSY_MS}", "foreign_keys=ON", f"cache_size=-{cache_kib}", "temp_store=MEMORY"]
        if query_only:
            pragmas.append("query_only=ON")
        else:
            pragmas += ["page_size=8192", "journal_mode=WAL", "synchronous=FULL", "journal_size_limit=67108864"]
        for pragma in pragmas:
            dbapi_connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def start(conn: sa.Connection) -> None:
        conn.exec_driver_sql(begin)
