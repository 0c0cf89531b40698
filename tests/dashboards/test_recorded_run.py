"""The recorded runs with six kills, replayed into a real Prometheus: every panel has data, the recovery board has every kill."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from check_data import MAY_BE_EMPTY, check
from prometheus_server import ask, is_installed, load, prometheus
from run_support import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
RESULTS = REPOSITORY / "chaos" / "results"
RECORDED = {
    "recovery.om.gz": MAY_BE_EMPTY - {"Recovery time"},
    "recovery_h200.om.gz": frozenset({"Tensor cores and device errors"}),  # DCGM's exporter was not there
}
"""Recordings, and the panels that have nothing to show of them."""
BYTES_MAX = 1_500_000
STEP_S = 5

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=RECORDED)
def recording(request: pytest.FixtureRequest) -> str:
    """Name of a recording."""
    return str(request.param)


@pytest.fixture(scope="module")
def replayed(recording: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float, float]]:
    """URL of a Prometheus that holds the run, its first and its last second."""
    if not is_installed():
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("recorded")
    text = gzip.decompress((RESULTS / recording).read_bytes()).decode()
    (folder / "run.om").write_text(text)
    load(folder / "run.om", folder / "data")
    times = [float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")]
    config = folder / "prometheus.yml"
    config.write_text("{}\n")
    with prometheus(config, folder / "data") as url:
        yield url, min(times), max(times)


def test_every_query_of_every_dashboard_has_data_of_the_recorded_run(
    recording: str, replayed: tuple[str, float, float]
) -> None:
    found = check(replayed[0], sorted((DASHBOARDS / "grafana").glob("*.json")), *replayed[1:], RECORDED[recording])
    assert found.bad == [] and found.unused == [] and found.queries > 100
    if recording == "recovery_h200.om.gz":
        assert len(found.empty) == 2, found.empty


def test_every_kill_is_a_note_on_the_recovery_dashboard_and_so_is_what_followed(replayed: tuple[str, float, float]) -> None:
    url, start, end = replayed
    board = json.loads((DASHBOARDS / "grafana" / "rollbook-recovery-drill.json").read_text())
    notes = {note["name"]: note["expr"].replace("$run", ".+") for note in board["annotations"]["list"]}

    def shown(name: str) -> dict[str, int]:
        """How often each pool or component has the note: moments that touch are one."""
        often: dict[str, int] = {}
        for one in ask(url, "query_range", query=notes[name], start=start, end=end, step=STEP_S)["result"]:
            moments = [float(at) for at, _ in one["values"]]
            starts = 1 + sum(after - before > STEP_S for before, after in pairwise(moments))
            who = one["metric"].get("pool") or one["metric"].get("component", "")
            often[who] = often.get(who, 0) + starts
        return often

    assert shown("Restart") == {"actor": 2, "ledger": 2, "learner": 2}
    assert shown("Recovered") == {"actor": 2, "ledger": 2, "learner": 2}
    assert sum(shown("New term").values()) == 2


@pytest.mark.parametrize("recording", RECORDED)
def test_the_recording_is_small(recording: str) -> None:
    assert 50_000 < (RESULTS / recording).stat().st_size <= BYTES_MAX
