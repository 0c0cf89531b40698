"""The two databases every ledger test runs on, a clock that tests turn, and the bench that opens ledgers on them.

A pytest plugin: its fixtures are there for every suite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record

from postgres_server import NotObtainable, PostgresServer
from rollbook.ledger import migrate
from rollbook.ledger import schema as t
from rollbook.ledger.ledger import Ledger

_databases = itertools.count()
WIDTH = 4
"""Ordinals per partition: small, so that every test crosses several."""


PARTITIONS_KEPT = 4
"""Partitions that stay from test to test; planning over very many of them is slow."""


class ManualClock:
    """Wall and monotonic time that stand still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except NotObtainable as error:
        pytest.skip(f"POSTGRESQL NOT RUN: {error}")
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres_pool(postgres: PostgresServer) -> PostgresPool:
    return PostgresPool(postgres)


class PostgresPool:
    """One migrated database that tests use in turn, emptied in between; a test that changed its schema gets it replaced."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._current = ""

    def take(self) -> str:
        if not self._current:
            name = f"ledger_{next(_databases)}"
            create_database(self._server, name, "template0")
            self._current = self._server.url(name)
            migrate.upgrade(self._current)
        return self._current

    def give_back(self, url: str) -> None:
        if url in _changed_schema:
            self._current = ""
            return
        with _Committing(url) as conn:
            names = conn.exec_driver_sql("SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'").scalars().all()
            for name in names:
                if int(name.rsplit("_", 1)[-1]) > PARTITIONS_KEPT * WIDTH:
                    conn.exec_driver_sql(f"DROP TABLE {name}")
            for table in reversed(t.metadata.sorted_tables):
                conn.execute(sa.delete(table))


_changed_schema: set[str] = set()


def create_database(server: PostgresServer, name: str, template: str) -> None:
    engine = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        conn.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    engine.dispose()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger.sqlite"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, sqlite_template: Path) -> str:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    pool = request.getfixturevalue("postgres_pool")
    url = pool.take()
    yield url
    pool.give_back(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty, migrated database, once per kind."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Bench:
    """Opens ledgers on one database, lets time pass, breaks rows; audits what is left when the test ends."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self.clock = clock
        self.ledgers: list[Ledger] = []
        self.expect_clean = True

    def open(self, holder: str = "", **options: object) -> Ledger:
        options = {"ordinals_per_partition": WIDTH, "role_ttl_s": 15.0, "clock": self.clock} | options
        ledger = Ledger(self.url, holder=holder or f"server-{len(self.ledgers)}", **options)  # type: ignore[arg-type]
        self.ledgers.append(ledger)
        return ledger

    def scene(self, *, publish: bool = True, **rules: object) -> Scene:
        return Scene(self.open(), run_record(**rules), publish=publish)

    def crash(self, scene: Scene, down_s: float = 0.0) -> None:
        """The server dies without releasing anything; a successor opens the same database after ``down_s``."""
        scene.ledger.close(release=False)
        if down_s:
            self.let_time_pass(down_s)
        dead = f"server-{len(self.ledgers) - 1}"
        scene.ledger = self.open(supersede=dead)
        scene.ledger.open_run(scene.record)

    def let_time_pass(self, seconds: float) -> None:
        """The server's clock on SQLite; on PostgreSQL, whose clock nobody turns, every stored time moves into the past."""
        self.clock.now += seconds
        if self.url.startswith("postgresql"):
            with self.connect() as conn:
                for table in t.metadata.sorted_tables:
                    columns = {c.name: c - int(seconds * 1_000_000) for c in table.c if c.name.endswith("at_us")}
                    if columns:
                        conn.execute(sa.update(table).values(columns))

    def connect(self) -> sa.Connection:
        """A writing connection beside the server's: for planting damage and for reading rows."""
        return _Committing(self.url)  # type: ignore[return-value]

    def execute(self, statement: str | sa.Executable) -> int:
        with self.connect() as conn:
            return conn.execute(sa.text(statement) if isinstance(statement, str) else statement).rowcount

    def rows(self, statement: str) -> list[tuple]:
        with self.connect() as conn:
            return [tuple(r) for r in conn.execute(sa.text(statement))]

    def schema_is_changed(self) -> None:
        """Say that this database can not be used by another test."""
        _changed_schema.add(self.url)

    def finish(self) -> None:
        for ledger in self.ledgers:
            if ledger._run is not None and ledger._fenced is None and not ledger._bell.closed:
                found = ledger.audit()
                assert not self.expect_clean or found == [], found
            ledger.close()


class _Committing:
    def __init__(self, url: str) -> None:
        from rollbook.ledger.dialects import sqlite_module

        options = {"module": sqlite_module(), "connect_args": {"timeout": 10}} if url.startswith("sqlite") else {}
        self._engine = sa.create_engine(url, **options)

    def __enter__(self) -> sa.Connection:
        self._conn = self._engine.connect()
        self._conn.begin()
        return self._conn

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._conn.commit()
        self._conn.close()
        self._engine.dispose()


@pytest.fixture
def bench(ledger_url: str, clock: ManualClock) -> Iterator[Bench]:
    made = Bench(ledger_url, clock)
    yield made
    made.finish()


@pytest.fixture
def damaged(bench: Bench) -> Bench:
    """A bench whose test plants damage: its audit is the test's own business."""
    bench.expect_clean = False
    return bench


@pytest.fixture
def sqlite_bench(sqlite_url: str, clock: ManualClock) -> Iterator[Bench]:
    made = Bench(sqlite_url, clock)
    yield made
    made.finish()
