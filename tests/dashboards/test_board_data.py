"""Every query of every dashboard, asked of a real Prometheus that replays a recorded run."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import golden_run
from check_data import check
from prometheus_server import ask, is_installed, load, prometheus, recorded_lines
from run_support import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
BOARDS = sorted((DASHBOARDS / "grafana").glob("*.json"))
END = 1_790_000_000
START = END - golden_run.LENGTH_S + 120

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus that holds the synthetic run."""
    if not is_installed():
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("replayed")
    recorded = folder / "run.om"
    with recorded.open("w") as file:
        file.writelines(golden_run.openmetrics(golden_run.record(END)))
    load(recorded, folder / "data")
    config = folder / "prometheus.yml"
    config.write_text(f"rule_files: ['{DASHBOARDS}/prometheus/rules/*.yml']\n")
    with prometheus(config, folder / "data", runbooks=DASHBOARDS / "runbooks") as url:
        yield url


def test_every_query_of_every_dashboard_has_finite_data(replayed: str) -> None:
    found = check(replayed, BOARDS, START, END, may_be_empty=())
    assert found.bad == [] and found.unused == []
    assert found.queries > 100


def test_a_query_without_data_and_a_metric_without_a_panel_are_told(replayed: str, tmp_path: Path) -> None:
    board = json.loads(BOARDS[0].read_text())
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    expressions = ('rollbook_gone{run=~"$run"}', "0 / 0 * sum(rollbook_learner_loss)", "sum(", "rollbook_learner_loss")
    for panel, expression in zip(panels, expressions, strict=False):
        panel["title"] = expression
        panel["targets"] = [panel["targets"][0] | {"expr": expression}]
    board["panels"] = panels[: len(expressions)]
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps(board))
    found = check(replayed, [planted], START, END, may_be_empty=())
    assert [line.rpartition(" A: ")[2].split(":")[0] for line in found.bad] == ["no series", "no finite value", "query_range"]
    assert "rollbook_learner_entropy_nats" in found.unused and "rollbook_learner_loss" not in found.unused
    assert len(check(replayed, [planted], START, END, may_be_empty=expressions[:1]).bad) == 2


def test_the_three_faults_are_visible_on_the_recovery_dashboard(replayed: str) -> None:
    board = json.loads((DASHBOARDS / "grafana" / "rollbook-recovery-drill.json").read_text())
    notes = {note["name"]: note["expr"].replace("$run", golden_run.RUN) for note in board["annotations"]["list"]}

    def shown(name: str) -> set[str]:
        series = ask(replayed, "query_range", query=notes[name], start=START, end=END, step=10)["result"]
        return {label for one in series for key, label in one["metric"].items() if key in ("pool", "component")}

    assert shown("Restart") == {"actor", "ledger", "learner"}
    assert shown("Recovered") == {"actor", "ledger", "learner"}
    assert ask(replayed, "query_range", query=notes["New term"], start=START, end=END, step=10)["result"]


def test_prometheus_serves_the_page_that_an_alert_leads_to(replayed: str) -> None:
    rules = [rule for group in ask(replayed, "rules")["groups"] for rule in group["rules"] if rule["type"] == "alerting"]
    assert len(rules) == 26 and {rule["health"] for rule in rules} <= {"ok", "unknown"}
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"{{{{ externalURL }}}}/user/{rule['name']}.md"
        with urllib.request.urlopen(f"{replayed}/user/{rule['name']}.md", timeout=30) as page:
            assert page.read().startswith(f"# {rule['name']}\n".encode())


def test_what_a_prometheus_holds_can_be_kept_and_replayed(replayed: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.om"
    selectors = ('{__name__=~"rollbook_learner_.*"}', '{__name__=~"rollbook_ledger_tasks"}')
    lines = list(recorded_lines(replayed, selectors, 600, END))
    kept.write_text("".join(lines))
    load(kept, tmp_path / "data")
    config = tmp_path / "prometheus.yml"
    config.write_text("{}\n")
    query = {"query": 'sum by (state) (rollbook_ledger_tasks)', "start": END - 600, "end": END, "step": 60}
    with prometheus(config, tmp_path / "data") as url:
        again, first = (ask(where, "query_range", **query)["result"] for where in (url, replayed))
    assert again == first and len(again) == 5
    assert all(math.isfinite(float(value)) for series in again for _, value in series["values"])
