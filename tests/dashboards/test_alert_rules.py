"""Alerts, held against what they should say: `promtool test rules`, the lint, and the page that every one leads to."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, HEALTHY, Case
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from rollbook.cli.main import build_parser
from rollbook.core import settings
from rollbook.core.config import Config
from rollbook.ledger.schema import metadata
from run_support import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
RULES = DASHBOARDS / "prometheus" / "rules"
RUNBOOKS = DASHBOARDS / "runbooks"
PROMETHEUS_URL = "http://prometheus.test"
SECTIONS = ("## What it means", "## How to confirm", "## What to do", "## When to escalate")


def alerts() -> dict[str, dict[str, Any]]:
    """Alert to its rule."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it, or skip where Prometheus is not installed."""
    if shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed")
    return subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=100)


def _expected(case: Case) -> list[dict[str, Any]]:
    if not case.summary:
        return []
    rule = alerts()[case.alert]
    dashboard = rule["annotations"]["dashboard_url"].replace("{{ $labels.run }}", case.labels.get("run", ""))
    annotations = {
        "summary": case.summary, "description": rule["annotations"]["description"], "dashboard_url": dashboard,
        "runbook_url": f"{PROMETHEUS_URL}/user/{case.alert}.md",
    }  # fmt: skip
    return [{"exp_labels": case.labels | rule["labels"], "exp_annotations": annotations}]


def _rule_files(folder: Path) -> list[str]:
    """The rules as a server at PROMETHEUS_URL reads them: promtool 2.42 cannot expand `externalURL` itself."""
    for path in RULES.glob("*.yml"):
        (folder / path.name).write_text(path.read_text().replace("{{ externalURL }}", PROMETHEUS_URL))
    return sorted(path.name for path in RULES.glob("*.yml"))


def _group(series: dict[str, str], looks: list[tuple[str, str, list[dict[str, Any]]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected} for at, alert, expected in looks],
    }  # fmt: skip


def test_every_alert_fires_and_keeps_quiet_where_it_should(tmp_path: Path) -> None:
    fires, quiet = Counter(c.alert for c in CASES if c.summary), Counter(c.alert for c in CASES if not c.summary)
    assert set(fires) == set(quiet) == set(alerts())
    file = tmp_path / "alerts.test.yml"
    groups = [_group(case.series, [(case.at, case.alert, _expected(case))]) for case in CASES]
    file.write_text(yaml.safe_dump({"rule_files": _rule_files(tmp_path), "tests": groups}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_healthy_run_raises_no_alert(tmp_path: Path) -> None:
    file = tmp_path / "healthy.test.yml"
    looks = [(at, alert, []) for at in ("10m", "45m", "90m") for alert in alerts()]
    file.write_text(yaml.safe_dump({"rule_files": _rule_files(tmp_path), "tests": [_group(HEALTHY, looks)]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_configuration_pass_the_lint_of_prometheus() -> None:
    rules = sorted(RULES.glob("*.yml"))
    for args in (("rules", "--lint=all", "--lint-fatal", *rules), ("config", DASHBOARDS / "prometheus.yml")):
        done = promtool("check", *args)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_severity_and_says_what_where_and_what_then() -> None:
    boards = {p.stem for p in (DASHBOARDS / "grafana").glob("*.json")}
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url", "dashboard_url"}, name
        assert rule["annotations"]["runbook_url"] == f"{{{{ externalURL }}}}/user/{name}.md", name
        board = re.search(r"/d/([a-z-]+)", rule["annotations"]["dashboard_url"])
        assert board and board[1] in boards, name


@pytest.mark.parametrize("name", sorted(alerts()))
def test_a_runbook_says_how_to_confirm_what_to_do_and_when_to_escalate(name: str) -> None:
    page = (RUNBOOKS / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    places = [page.find(section) for section in SECTIONS]
    assert -1 not in places and places == sorted(places), [s for s, at in zip(SECTIONS, places, strict=True) if at < 0]
    assert re.search(r"rollbook (status|why|audit)\b", page) and "```sql" in page


def test_there_is_no_runbook_without_an_alert() -> None:
    assert {p.stem for p in RUNBOOKS.glob("*.md")} - {"README"} == set(alerts())


@pytest.fixture(scope="module")
def ledger() -> Iterator[sqlite3.Connection]:
    """An empty ledger with the schema of this version."""
    connection = sqlite3.connect(":memory:")
    for ddl in (CreateTable(table).compile(dialect=sqlite.dialect()) for table in metadata.sorted_tables):
        connection.execute(str(ddl))
    yield connection
    connection.close()


@pytest.mark.parametrize("name", sorted(alerts()))
def test_the_queries_of_a_runbook_run_on_the_schema(name: str, ledger: sqlite3.Connection) -> None:
    blocks = re.findall(r"```sql\n(.*?)```", (RUNBOOKS / f"{name}.md").read_text(), re.DOTALL)
    queries = [query for block in blocks for query in block.split(";") if query.strip()]
    assert queries
    for query in queries:
        assert query.split()[0] == "SELECT"
        ledger.execute(query).fetchall()


def _settings(section: str) -> type:
    return getattr(settings, {"workers": "Worker"}.get(section, section.capitalize()) + "Config")


@pytest.mark.parametrize("name", sorted(alerts()))
def test_what_a_runbook_links_to_and_sets_exists(name: str) -> None:
    page = (RUNBOOKS / f"{name}.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (RUNBOOKS / link).is_file(), link
    sections = {f.name for f in dataclasses.fields(Config)}
    for section, field in re.findall(r"`([a-z]+)\.([a-z_]+)\b", page):
        if section in sections:
            assert field in {f.name for f in dataclasses.fields(_settings(section))}, (section, field)
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert set(re.findall(r"`rollbook ([a-z]+)", page)) <= set(commands)  # type: ignore[arg-type]
