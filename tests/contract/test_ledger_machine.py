"""The ledger against its model on both databases: see ``ledger_machine`` for the rules."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_machine import LedgerMachine

from ledger_bench import create_database
from postgres_server import PostgresServer
from rollbook.core.records import ScheduleKind
from rollbook.ledger import migrate
from rollbook.ledger import schema as t

EXAMPLES = {"sqlite": 8, "postgresql": 4}
STEPS = 30
Place = tuple[Callable[[], str], Callable[[str], None]]


@pytest.fixture
def sqlite_place(sqlite_template: Path, tmp_path: Path) -> Place:
    """Every example gets a copy of a migrated file."""
    numbers = itertools.count()

    def take() -> str:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        shutil.copy(sqlite_template, folder / "ledger.sqlite")
        return f"sqlite:///{folder}/ledger.sqlite"

    return take, lambda url: shutil.rmtree(Path(url.removeprefix("sqlite:///")).parent)


@pytest.fixture(scope="module")
def machine_database(postgres: PostgresServer) -> str:
    """A database of this module's own: one wide partition holds a whole example."""
    create_database(postgres, "machine", "template0")
    migrate.upgrade(postgres.url("machine"))
    return postgres.url("machine")


@pytest.fixture
def postgresql_place(machine_database: str) -> Place:
    """Every example gets the same database, emptied."""
    engine = sa.create_engine(machine_database)

    def give_back(url: str) -> None:
        with engine.begin() as conn:
            for table in reversed(t.metadata.sorted_tables):
                conn.execute(sa.delete(table))

    return lambda: machine_database, give_back


@pytest.mark.parametrize("late_submit, schedule", [("salvage", ScheduleKind.BOUNDED), ("strict", ScheduleKind.BOUNDED),
                                                   ("strict", ScheduleKind.FIXED)])  # fmt: skip
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
@pytest.mark.timeout(600)
def test_the_ledger_behaves_like_its_model(
    request: pytest.FixtureRequest, engine: str, schedule: ScheduleKind, late_submit: str
) -> None:
    take, give_back = request.getfixturevalue(f"{engine}_place")
    machine = type(
        "Machine", (LedgerMachine,),
        {"take": staticmethod(take), "give_back": staticmethod(give_back), "kind": schedule, "late_submit": late_submit},
    )  # fmt: skip
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[engine], stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
