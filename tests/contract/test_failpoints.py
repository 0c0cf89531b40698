"""The catalogue of failpoints and the table of crash points: neither may lack what the other, the code or the tests have."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from rollbook.observe.catalogue import CATALOGUE, ROLES
from run_support import REPOSITORY, environment

SCRIPT = REPOSITORY / "chaos" / "crash_points.py"


@pytest.fixture(scope="module")
def crash_points() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crash_points", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_failpoint_of_the_code_is_in_the_catalogue_and_the_other_way_round(crash_points: ModuleType) -> None:
    sites = crash_points.call_sites()
    assert sorted(sites) == sorted(CATALOGUE)
    package = REPOSITORY / "service" / "rollbook"
    for name, places in sites.items():
        for place in places:
            file, line = place.split(":")
            assert f'failpoint("{name}")' in (package / file).read_text().splitlines()[int(line) - 1]


def test_every_entry_names_its_role_and_says_in_one_sentence_what_recovery_does() -> None:
    for name, point in CATALOGUE.items():
        assert point.name == name and point.role in ROLES and name.startswith(f"{point.role}.")
        assert point.recovery.endswith(".") and ". " not in point.recovery and point.recovery[0].isupper()
        assert len(set(point.crash_points)) == len(point.crash_points)


def test_every_crash_point_has_a_failpoint_or_a_reason_and_every_failpoint_a_test(crash_points: ModuleType) -> None:
    assert list(crash_points.problems()) == []


def test_what_is_missing_is_found(crash_points: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    less = {name: point for name, point in CATALOGUE.items() if name != "feeder.after_append"}
    monkeypatch.setattr(crash_points, "CATALOGUE", less)
    monkeypatch.setattr(crash_points, "CRASH_POINTS", crash_points.CRASH_POINTS | {"X1": "Something new."})
    monkeypatch.setattr(crash_points, "IMPOSSIBLE", {"L16": ("because", "tests/unit/test_checkpoint.py::test_nothing")})
    monkeypatch.setattr(crash_points, "tests_by_failpoint", lambda: dict.fromkeys(CATALOGUE, []))
    found = list(crash_points.problems())
    for expected in (
        "feeder.after_append is not in the catalogue", "learner.after_plan: no test crashes there",
        "X1 has neither a failpoint nor a reason", "L16: there is no test tests/unit/test_checkpoint.py::test_nothing",
    ):  # fmt: skip
        assert any(expected in line for line in found), expected
    monkeypatch.setattr(crash_points, "CATALOGUE", CATALOGUE)
    monkeypatch.setattr(crash_points, "call_sites", dict)
    assert "worker.after_lease is in the catalogue and nothing crosses it" in list(crash_points.problems())


def test_tests_are_found_through_the_tables_and_helpers_they_use(crash_points: ModuleType) -> None:
    found = crash_points.tests_by_failpoint()
    kills = "tests/integration/kills/test_kills.py::test_a_bounded_run_survives_the_learner_dying_at"
    assert kills in found["learner.checkpoint.after_rename"] and kills not in found["worker.after_lease"]
    assert not any(test.startswith(crash_points.NAMES_ONLY) for tests in found.values() for test in tests)
    watches = "tests/unit/test_worker_crash_points.py::test_a_run_crosses_every_point_of_a_batch"
    assert not any(watches in tests for tests in found.values()), "watching a point is no crash"


def test_the_table_has_a_row_for_every_crash_point_and_every_failpoint() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment(), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| # | crash point | failpoint")
    assert all(line.count("|") == 5 for line in lines)
    numbers = [f"{letter}{i}" for letter, last in (("W", 7), ("S", 5), ("L", 16), ("D", 2)) for i in range(1, last + 1)]
    for number in numbers:
        assert sum(line.startswith(f"| {number} |") for line in lines) == 1
    assert all(f"`{name}`" in done.stdout for name in CATALOGUE)
