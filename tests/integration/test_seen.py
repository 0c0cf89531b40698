"""A real Prometheus on a real run: healthy, with kills, and with two faults that must be on every screen and go away again."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from check_data import MAY_BE_EMPTY, check
from drills.eight import EIGHT
from drills.faults import kill
from drills.recovery import thinned
from drills.screens import DASHBOARDS, is_installed
from drills.seen_table import table
from seen import Watched, watched

pytestmark = pytest.mark.timeout(900)

FACTOR = 45.0
CALM_S = 8.0
NAMED = {fault.name: fault for fault in EIGHT}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if not is_installed():
        pytest.skip("Prometheus is not installed (Debian package prometheus): no alert was seen on a real run")
    args = argparse.Namespace(dir=str(tmp_path_factory.mktemp("seen")), overrides=[], seed=7)
    with watched(args, FACTOR, small_disk=False) as run:
        run.until_forgotten = False
        yield run


def test_a_healthy_run_fires_no_page(made: Watched) -> None:
    made.calm(CALM_S)
    assert made.findings == []


def test_every_query_of_every_dashboard_has_data_of_a_run_whose_roles_are_killed(made: Watched) -> None:
    chance, began = random.Random(7), time.time() - CALM_S
    for role in ("worker", "ledger", "learner"):
        old = {record.name: record.pid for record in made.run.alive(role)}
        made.wait(f"a {role} is killed", lambda role=role: kill(made.run, role, chance, one=True) is not None, 60.0)  # type: ignore[misc]
        made.wait(
            f"a new {role} works",
            lambda role=role, old=old: any(record.pid not in old.values() for record in made.run.alive(role)), 120.0,
        )  # type: ignore[misc]  # fmt: skip
        steps = made.run.steps()
        made.wait("two more steps", lambda steps=steps: made.run.steps() >= steps + 2, 120.0)  # type: ignore[misc]
    boards = sorted((DASHBOARDS / "grafana").glob("*.json"))

    def complete() -> bool:
        found = check(made.screens.url, boards, began, time.time(), MAY_BE_EMPTY - {"Recovery time"})
        complete.found = found  # type: ignore[attr-defined]
        return not found.bad

    try:
        made.wait("every query has data", complete, 60.0)
    finally:
        found = complete.found  # type: ignore[attr-defined]
        assert found.bad == [] and found.unused == [] and found.queries > 100


@pytest.mark.parametrize("name", ["stuck learner", "dead pool"])
def test_a_fault_is_on_every_screen_and_goes_away_with_its_cause(made: Watched, name: str) -> None:
    row = made.show(NAMED[name])
    assert row["findings"] == []
    assert set(NAMED[name].alerts) <= set(row["alerts"]) and row["quiet_after_s"] is not None
    assert all(word in "\n".join(row[screen]["lines"]) for screen in ("status", "page") for word in NAMED[name].words)
    page = table([row | {"run": {"factor": FACTOR, "date": "2026-01-01", "commit": "0123456789"}}])
    assert row["status"]["lines"][0][:100] in page and "told |" in page and row["runbook"][NAMED[name].alerts[0]] in page


def test_a_recording_keeps_one_sample_of_a_series_in_five_seconds() -> None:
    lines = [f'a{{x="1"}} {n} {100 + n}.25\n' for n in range(11)] + ['b{x="1"} 0 101\n', "# EOF\n"]
    assert list(thinned(lines)) == [lines[0], lines[5], lines[10], *lines[11:]]


def test_each_of_the_eight_says_what_must_be_seen_and_its_alerts_have_pages() -> None:
    assert len(NAMED) == 8 and all(fault.words and fault.alerts and fault.how for fault in EIGHT)
    pages = {path.stem for path in (DASHBOARDS / "runbooks").glob("*.md")}
    assert all({*fault.alerts, *fault.may} <= pages for fault in EIGHT)
    assert Path(DASHBOARDS / "runbooks" / "LedgerSlow.md").is_file()
