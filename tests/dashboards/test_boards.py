"""The committed dashboards: generated from their source, whole in structure, and speaking only of metrics that exist."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

import metric_names
from generate import generated
from run_support import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DASHBOARDS / "grafana").glob("*.json"))}
NAME = re.compile(r"(?:rollbook_|vllm:|DCGM_)[A-Za-z0-9_]+|\bup\b|\bALERTS\b|\bscrape_samples_scraped\b")
SELECTOR = re.compile(r"((?:run:)?[A-Za-z_:][A-Za-z0-9_:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
UNITS = {value for name, value in vars(units).items() if not name.startswith("_") and isinstance(value, str)}
KINDS = {"row", "timeseries", "stat", "heatmap"}
PANEL_KEYS = {
    "collapsed", "datasource", "description", "fieldConfig", "gridPos", "id", "links", "options", "panels", "repeatDirection",
    "targets", "title", "transparent", "type",
}  # fmt: skip
TARGET_KEYS = {"datasource", "exemplar", "expr", "format", "instant", "legendFormat", "range", "refId"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that show something."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel, note and rule."""
    for uid, board in BOARDS.items():
        for panel in panels(board):
            yield from ((f"{uid}: {panel['title']}", target["expr"]) for target in panel["targets"])
        yield from ((f"{uid}: {note['name']}", note["expr"]) for note in board["annotations"].get("list", ()))
    for path in sorted((DASHBOARDS / "prometheus" / "rules").glob("*.yml")):
        for rule in itertools.chain.from_iterable(group["rules"] for group in yaml.safe_load(path.read_text())["groups"]):
            yield rule.get("alert") or rule["record"], rule["expr"]


def test_what_is_committed_is_what_the_source_generates() -> None:
    made = generated()
    stored = {name: (DASHBOARDS / name).read_text() for name in made}
    assert stored == made, "run: python dashboards/src/generate.py"
    assert {f"grafana/{uid}.json" for uid in BOARDS} == {name for name in made if name.startswith("grafana/")}


@pytest.mark.parametrize("uid", BOARDS)
def test_a_dashboard_survives_the_trip_through_the_sdk(uid: str) -> None:
    again = json.loads(JSONEncoder(sort_keys=True, indent=1).encode(Dashboard.from_json(BOARDS[uid])))
    assert again == BOARDS[uid]


@pytest.mark.parametrize("uid", BOARDS)
def test_the_structure_is_what_grafana_reads(uid: str) -> None:
    board = BOARDS[uid]
    assert board["uid"] == uid and board["schemaVersion"] >= 36 and board["title"].startswith("Rollbook")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {v["name"] for v in board["templating"]["list"]} >= {"datasource", "run", "runbooks"}
    for panel in board["panels"]:
        assert panel["type"] in KINDS and set(panel) <= PANEL_KEYS, panel["title"]
    for panel in panels(board):
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]
        assert all(set(t) <= TARGET_KEYS and t["expr"] and t["legendFormat"] for t in panel["targets"]), panel["title"]


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_fill_the_width_and_do_not_overlap(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARDS[uid]["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] and at["x"] + at["w"] <= 24, panel["title"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken[cell])
            taken[cell] = panel["title"]
    assert len(taken) == 24 * len({y for _, y in taken})


@pytest.mark.parametrize("uid", BOARDS)
def test_every_panel_says_what_bad_looks_like_and_leads_to_a_runbook(uid: str) -> None:
    for panel in panels(BOARDS[uid]):
        assert re.search(r"\. Bad: .+\.", panel["description"]), panel["title"]
        page = re.fullmatch(r"\$\{runbooks\}/(\w+\.md)", panel["links"][0]["url"])
        assert page and (DASHBOARDS / "runbooks" / page[1]).is_file(), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]


def test_no_dashboard_names_a_data_source() -> None:
    for board in BOARDS.values():
        users = [*panels(board), *(t for p in panels(board) for t in p["targets"]), *board["annotations"].get("list", ())]
        users += [v for v in board["templating"]["list"] if v["type"] == "query"]
        assert all(user["datasource"] == SOURCE for user in users)


def test_rates_and_shares_start_at_zero() -> None:
    for board in BOARDS.values():
        for panel in panels(board):
            defaults = panel["fieldConfig"]["defaults"]
            if panel["type"] == "timeseries" and defaults["unit"] in ("ops", "percentunit", "Bps"):
                assert defaults["min"] == 0, panel["title"]


def test_every_metric_in_a_panel_note_or_rule_exists() -> None:
    known = metric_names.sample_names()
    recorded = {where for where, _ in expressions() if where.startswith("run:")}
    for where, expression in expressions():
        for name in recorded:
            expression = expression.replace(name, "")
        assert not (set(NAME.findall(expression)) - known), where


def test_every_value_that_an_expression_compares_a_label_with_is_possible() -> None:
    families = metric_names.OURS
    for where, expression in expressions():
        for name, matchers in SELECTOR.findall(expression):
            family = families.get(name) or families.get(re.sub(r"_(bucket|sum|count)$", "", name))
            for label, _, values in MATCHER.findall(matchers) if family else ():
                if label in ("run", "le"):
                    continue
                assert label in family.labels, (where, label)
                closed = family.labels[label]
                assert closed is None or values.startswith("$") or set(values.split("|")) <= set(closed), (where, values)


def test_every_exported_metric_is_shown_or_listed_as_unused() -> None:
    shown = set(itertools.chain.from_iterable(NAME.findall(expression) for _, expression in expressions()))
    orphans = {name for name, metric in metric_names.OURS.items() if not shown & {name + suffix for suffix in metric.samples}}
    assert orphans <= set(metric_names.UNUSED)
    assert not {name for name in metric_names.UNUSED if re.search(rf"\b{name}\b", "\n".join(text for _, text in expressions()))}


def test_the_list_of_metrics_is_the_catalogue_of_the_service() -> None:
    table = pytest.importorskip("rollbook.observe.metric_table", reason="this version has no catalogue of metrics")
    catalogue = {spec.full_name + ("_info" if spec.kind == "info" else ""): spec for spec in table.SPECS}
    assert set(catalogue) - set(metric_names.OURS) <= set(metric_names.UNUSED)
    for name, metric in metric_names.OURS.items():
        spec = catalogue[name]
        assert metric.kind == ("gauge" if spec.kind == "info" else spec.kind), name
        labels = {label: tuple(values) or None for label, values in spec.labels.items()}
        assert {label: values for label, values in metric.labels.items() if label != "worker"} == labels, name
