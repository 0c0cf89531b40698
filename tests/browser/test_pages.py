"""The status page and the report in a real browser: they show the run, a search works, and nothing is complained about."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from ledger_support import STREAM, Scene, group, run_record

from browser_support import Browser, browser, need_chromium
from rollbook.core.config import load_config
from rollbook.core.records import Blame, Cursor, FailureReport, GroupSpec, RewardStatus
from rollbook.core.settings import SecurityConfig
from rollbook.ledger.ledger import Ledger
from rollbook.report import compare
from rollbook.report.heldout import keep
from rollbook.report.html import write
from rollbook.report.statuspage import Content, StatusPage
from run_support import CONFIG

pytestmark = pytest.mark.timeout(600)
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three trained steps, a failure with a hostile reason, and a task whose text is an attack."""
    need_chromium()
    with Ledger(f"sqlite:///{tmp_path_factory.mktemp('run')}/ledger.sqlite", holder="server") as ledger:
        scene = Scene(ledger, run_record(steps=5))
        for step in (1, 2, 3):
            scene.feed(2)
            scene.fill()
            scene.train(step)
        before = ledger.cursor(STREAM)
        attack = GroupSpec(before.next_ordinal, group(0).prompt_ids, json.dumps({"prompt": HOSTILE}), 2)
        ledger.append_groups(scene.feeder, before, Cursor(STREAM, before.next_ordinal + 1, "{}", False), [attack])
        grant = scene.lease(1)[0]
        ledger.report_failures(
            [FailureReport(grant.key, grant.token, scene.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, HOSTILE)]
        )
        yield scene


def test_the_status_page_shows_the_run_and_a_searched_story_and_runs_nobodys_text(page: Browser, scene: Scene) -> None:
    shown = StatusPage("127.0.0.1:0", Content(scene.ledger), run_id="run", security=SecurityConfig())
    try:
        page.complaints.clear()
        page.open(shown.url)
        page.until("!document.getElementById('main').hidden")
        text = page.text()
        assert "Run run" in text and "3 / 5" in text and "Waits for" in text and "learner-1" in text
        assert page.evaluate("document.querySelectorAll('svg polyline').length") >= 1
        assert HOSTILE in text, "shown as it is, in the failures"
        page.evaluate("document.getElementById('sample').value = '6.0'; document.querySelector('#search button').click()")
        page.until("document.getElementById('end').textContent.startsWith('6.0')")
        assert HOSTILE in page.evaluate("JSON.parse([...document.querySelectorAll('#facts tr')].find(r => "
                                        "r.cells[0].textContent === 'task').cells[1].textContent).prompt")  # fmt: skip
        assert "failure_reported" in page.text()
        page.evaluate("location.hash = '99.0'")
        page.until("document.getElementById('end').textContent.includes('has no sample 99.0')")
        assert page.evaluate("document.title") == "run · Rollbook" and page.evaluate("document.images.length") == 0
        assert [c for c in page.complaints if "404" not in c] == [], "the search that found nothing is the only one"
    finally:
        page.leave()
        shown.close()


def test_the_policy_of_the_page_stops_a_script_that_got_into_it(page: Browser, scene: Scene) -> None:
    shown = StatusPage("127.0.0.1:0", Content(scene.ledger), run_id="run", security=SecurityConfig())
    try:
        page.open(shown.url)
        page.until("!document.getElementById('main').hidden")
        refused = page.evaluate("(() => { try { document.body.innerHTML = '<b>'; return '' } catch (e) { return e.name } })()")
        assert refused == "TypeError"
        page.evaluate("(s => { s.textContent = 'body{}'; document.head.append(s) })(document.createElement('style'))")
        assert any("Content Security Policy" in c or "Trusted" in c for c in page.complaints)
        page.complaints.clear()
    finally:
        page.leave()
        shown.close()


def test_the_report_and_the_comparison_open_with_every_picture_and_without_a_complaint(
    page: Browser, scene: Scene, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml", ["run.id=run"])
    keep(config.run.dir, {"version": 0, "n": 4, "greedy": 0.25, "sampled": 0.2})
    state, metrics = scene.ledger.run_status(), scene.ledger.step_metrics(0)
    report = write(config, scene.ledger, metrics, tmp_path / "report")
    compared = compare.write([compare.Side(n, config, state, metrics) for n in ("one", "<b>two</b>")], tmp_path / "compare")
    page.complaints.clear()
    for file, said in ((report, HOSTILE), (compared, "<b>two</b>")):
        page.open(file.as_uri())
        pictures = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth])")
        assert len(pictures) == 2 and all(complete and width > 100 for complete, width in pictures)
        assert said in page.text() and page.evaluate("document.title") != "owned"
    assert page.complaints == []
