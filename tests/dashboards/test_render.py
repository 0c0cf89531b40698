"""What pages are made of: converted boards, notes, kept runs, and the judgement of what a page showed. Needs no browser."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import golden_run
import render
from check_data import MAY_BE_EMPTY
from notes import happened, marks
from prometheus_server import ask, is_installed
from run_support import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
BOARDS = sorted((DASHBOARDS / "grafana").glob("*.json"))
END = 1_790_000_000
WHOLE = {"title": "Tokens", "isCut": False, "isLegendCut": False, "isDrawn": True, "words": ["0", "10"]}

pytestmark = pytest.mark.timeout(300)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="NODE NOT INSTALLED: drawing was not tested")
needs_prometheus = pytest.mark.skipif(not is_installed(), reason="Prometheus is not installed")


def judged(titles: list[str], seen: list[dict[str, Any]], may_be_empty: list[str]) -> tuple[list[str], list[str]]:
    """(wrong, told) by the page's own judge."""
    script = "import { judge } from './judge.mjs'; console.log(JSON.stringify(judge(...JSON.parse(process.argv[1]))))"
    command = ["node", "--input-type=module", "-e", script, json.dumps([titles, seen, may_be_empty])]
    done = subprocess.run(command, cwd=DASHBOARDS / "render", capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    return found["wrong"], found["told"]


@needs_node
@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_converted_dashboard_has_every_panel_query_and_place(path: Path) -> None:
    board, page = json.loads(path.read_text()), render.converted(path)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    spec = page["dashboard"]["spec"]
    assert page["titles"] == [panel["title"] for panel in panels] and spec["display"]["name"] == board["title"]
    items = [item for layout in spec["layouts"] for item in layout["spec"]["items"]]
    shown = [spec["panels"][item["content"]["$ref"].rpartition("/")[2]]["spec"] for item in items]
    for panel, item, made in zip(panels, items, shown, strict=True):
        assert made["display"]["name"] == panel["title"]
        assert (item["x"], item["width"], item["height"]) == tuple(panel["gridPos"][key] for key in "xwh")
        queries = [query["spec"]["plugin"]["spec"] for query in made["queries"]]
        wanted = [{"query": target["expr"], "seriesNameFormat": target["legendFormat"]} for target in panel["targets"]]
        assert queries == wanted, panel["title"]
    assert [layout["spec"]["display"]["title"] for layout in spec["layouts"]] == [
        panel["title"] for panel in board["panels"] if panel["type"] == "row"
    ]
    enabled = [note["name"] for note in board["annotations"].get("list", ()) if note["enable"]]
    assert [note["name"] for note in page["notes"]] == enabled


@needs_node
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda panel: panel.update(type="piechart"), "unknown panel: piechart"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(unit="furlongs"), "unknown unit: furlongs"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(
            thresholds={"steps": [{"color": "beige", "value": None}]}, custom={"thresholdsStyle": {"mode": "dashed"}}),
         "unknown colour: beige"),
    ],
    ids=["type", "unit", "colour"],
)  # fmt: skip
def test_a_board_with_something_unknown_is_refused(
    spoil: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = json.loads((DASHBOARDS / "grafana" / "rollbook-fleet.json").read_text())
    spoil(next(panel for panel in board["panels"] if panel["type"] == "timeseries"))
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps(board))
    assert render.main(["--out", str(tmp_path / "out"), str(planted)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_node
def test_a_page_that_shows_all_is_whole() -> None:
    assert judged(["Tokens"], [WHOLE], []) == ([], [])


@needs_node
@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([], "not shown: Tokens"),
        ([WHOLE | {"title": "Loss"}], "not shown: Tokens"),
        ([WHOLE | {"words": ["No data"]}], "without data: Tokens"),
        ([WHOLE | {"isDrawn": False}], "nothing drawn: Tokens"),
        ([WHOLE | {"words": []}], "nothing drawn: Tokens"),
        ([WHOLE | {"isCut": True}], "title cut: Tokens"),
        ([WHOLE, WHOLE], "2 panels instead of 1"),
    ],
)
def test_whatever_is_missing_on_a_page_is_a_fault(seen: list[dict[str, Any]], said: str) -> None:
    assert judged(["Tokens"], seen, [])[0] == [said]


@needs_node
def test_a_panel_that_may_be_empty_is_told_and_may_not_be_blank() -> None:
    assert judged(["Tokens"], [WHOLE | {"words": ["No data"]}], ["Tokens"]) == ([], ["without data: Tokens"])
    assert judged(["Tokens"], [WHOLE | {"words": []}], ["Tokens"])[0] == ["nothing drawn: Tokens"]


def test_panels_that_may_be_empty_are_panels() -> None:
    titles = {panel["title"] for path in BOARDS for panel in json.loads(path.read_text())["panels"]}
    assert set(MAY_BE_EMPTY) <= titles


@needs_prometheus
def test_a_kept_run_tells_its_faults_in_order_and_forgets_a_process_that_left(tmp_path: Path) -> None:
    kept = tmp_path / "kept.om.gz"
    with gzip.open(kept, "wt") as file:
        file.writelines(golden_run.openmetrics(golden_run.record(END)))
    board = json.loads((DASHBOARDS / "grafana" / "rollbook-recovery-drill.json").read_text())
    enabled = [note for note in board["annotations"]["list"] if note["enable"]]
    notes = [{"name": n["name"], "expr": n["expr"], "text": n["textFormat"], "colour": n["iconColor"]} for n in enabled]
    with render.recorded(kept) as source:
        assert (source.start, source.end, source.scrape_s) == (END - golden_run.LENGTH_S, END, golden_run.STEP_S)
        assert source.may_be_empty == MAY_BE_EMPTY
        found = happened(source.url, notes, {"run": golden_run.RUN}, (source.start, source.end), source.scrape_s)
        away = source.start + golden_run.WORKER_DIES_S + golden_run.WORKER_AWAY_S - golden_run.STEP_S
        left = ask(source.url, "query", query='rollbook_worker_policy_version{worker="worker-1"}', time=away)["result"]
    assert [(note["name"], note["text"]) for note in found] == [
        ("Restart", "actor: crash"), ("Recovered", "actor"), ("Restart", "ledger: crash"),
        ("New term", "another ledger server leads"), ("Recovered", "ledger"),
        ("Restart", "learner: oom"), ("Recovered", "learner"),
    ]  # fmt: skip
    seen = found[0]["at"] - source.start
    assert golden_run.WORKER_DIES_S < seen <= golden_run.WORKER_DIES_S + 2 * golden_run.STEP_S
    assert all(note["at"] <= note["until"] <= note["at"] + 30 for note in found)
    assert left == []


def test_a_recording_without_two_samples_of_a_series_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "kept.om"
    kept.write_text('up{run="a"} 1 1790000000\nup{run="b"} 1 1790000005\n# EOF\n')
    with pytest.raises(render.Refused, match="no series with two samples"), contextlib.ExitStack() as stack:
        stack.enter_context(render.recorded(kept))


def test_marks_are_notes_of_a_moment_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "marks.jsonl"
    path.write_text('{"at": 12.5, "text": "SIGKILL of the learner"}\n')
    (mark,) = marks(path)
    assert (mark["at"], mark["until"], mark["text"], mark["isMark"]) == (12.5, 12.5, "SIGKILL of the learner", True)
    path.write_text('{"at": 12.5, "text": "x"}\n{"when": 3}\n')
    with pytest.raises(ValueError, match=r"marks\.jsonl:2: not \{at, text\}"):
        marks(path)


def test_the_synthetic_run_has_the_buckets_of_the_catalogue() -> None:
    table = pytest.importorskip("rollbook.observe.metric_table", reason="this version has no catalogue of metrics")
    wanted = {spec.full_name.removeprefix("rollbook_"): spec.buckets for spec in table.SPECS if spec.kind == "histogram"}
    assert {name: tuple(golden_run.BUCKETS.get(name, golden_run.SHORT_S)) for name in wanted} == wanted
