"""Five hundred simulated runs with everything going wrong, and the proof that they would notice.

Seeds are played in two processes, while the tests read the verdicts. A finding prints its seed and its complete options;
``python -m simulation.run --seed N --shrink`` (from ``tests/``) makes it small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from simulation.defects import DEFECTS
from simulation.options import STANDBY_WINDOWS, STRIKES, UNREACHED, WINDOWS, Options, draw
from simulation.run import RESULTS, Coverage, Verdict, catch, options_from_json, options_to_json, play, play_seed, pool, shrink

pytestmark = pytest.mark.timeout(1500)

SEEDS = 500
CHUNK = 50
DEFECT_SEEDS = 60
"""Seeds within which every planted defect must be caught."""
TESTS = Path(__file__).resolve().parents[1]
REGRESSIONS = sorted((TESTS / "simulation" / "regressions").glob("*.json"))


@pytest.fixture(scope="module")
def verdicts() -> Iterator[dict[int, Future[Verdict]]]:
    with pool() as workers:
        yield {seed: workers.submit(play_seed, seed) for seed in range(SEEDS)}
        workers.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_seed_ends_with_a_clean_run(first: int, verdicts: dict[int, Future[Verdict]]) -> None:
    found = [verdicts[seed].result() for seed in range(first, first + CHUNK)]
    assert not [f"seed {v.seed}: {v.findings}\n{v.options}" for v in found if v.findings]


def test_a_process_dies_in_every_crash_window(verdicts: dict[int, Future[Verdict]]) -> None:
    coverage = Coverage()
    for verdict in verdicts.values():
        coverage.add(verdict.result())
    print(coverage.table())
    assert [name for name in (*WINDOWS, *STANDBY_WINDOWS) if not coverage.crashed[name]] == sorted(UNREACHED), coverage.line()


def test_every_kind_of_fault_struck(verdicts: dict[int, Future[Verdict]]) -> None:
    coverage = Coverage()
    for verdict in verdicts.values():
        coverage.add(verdict.result())
    assert set(STRIKES) == set(coverage.struck)


def test_breakers_open_and_close_and_tasks_are_quarantined(verdicts: dict[int, Future[Verdict]]) -> None:
    happened = [verdict.result().happened for verdict in verdicts.values()]
    for kind in ("breaker_opened", "breaker_closed", "quarantined", "failed"):
        assert any(kind in one for one in happened), kind


def test_the_same_seed_gives_the_same_events_in_another_process() -> None:
    """Another process, another order of hashed sets: the hash over every event is the same."""
    for seed in (3, 8):
        mine = play_seed(seed)
        environment = os.environ | {"PYTHONHASHSEED": str(seed + 1), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "simulation.run", "--seed", str(seed)]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "service")])
        theirs = subprocess.run(
            command, env=environment | {"PYTHONPATH": path}, cwd=TESTS, capture_output=True, text=True, timeout=300, check=True
        )
        assert theirs.stdout.splitlines()[-1] == f"events {mine.n_events} {mine.event_hash}"
        assert theirs.stdout.splitlines()[0] == draw(seed).describe()


def test_another_seed_gives_other_events() -> None:
    assert play_seed(3).event_hash != play_seed(4).event_hash


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(name: str) -> None:
    """The seed that caught it last time comes first; where the code has moved on since, others may have to."""
    known = json.loads((RESULTS / "planted_defects.json").read_text())
    first = known[name]["seed"]
    seeds = [first, *(seed for seed in range(DEFECT_SEEDS) if seed != first)]
    assert catch(name, seeds) is not None, f"{DEFECTS[name].what} not caught within {DEFECT_SEEDS} seeds"


def test_at_least_fifteen_defects_are_planted_and_each_says_what_it_is() -> None:
    assert len(DEFECTS) >= 15
    assert all(defect.what and defect.like for defect in DEFECTS.values())


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_a_seed_once_found_stays_repaired(path: Path) -> None:
    kept = json.loads(path.read_text())
    verdict = play(options_from_json(kept["options"]))
    assert not verdict.findings, f"{kept['what']}\n{verdict.findings}"


def test_a_finding_is_shrunk_to_what_it_needs() -> None:
    options = draw(7)
    options.crash_at = {"learner.after_publish": 2, "worker.after_lease": 1}
    small = shrink(options, lambda o: "learner.after_publish" in o.crash_at)
    assert small.crash_at == {"learner.after_publish": 2} and not small.strikes and small.workers == 1


def test_options_survive_being_kept() -> None:
    for seed in range(20):
        assert options_from_json(json.loads(json.dumps(options_to_json(draw(seed))))) == draw(seed)


def test_an_unbroken_simulation_is_clean_and_nothing_dies() -> None:
    for schedule in ("bounded", "fixed"):
        verdict = play(Options(seed=0, schedule=schedule))
        assert (verdict.findings, verdict.deaths) == ([], 0)
