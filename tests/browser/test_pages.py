"""The status page and the report in a real browser: they show the run, a search works, and nothing is complained about."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from ledger_support import STREAM, Scene, group, run_record

from browser_support import Browser, browser, need_chromium
from rollbook.core.config import load_config
from rollbook.core.records import Blame, Cursor, FailureReport, GroupSpec, RewardStatus, Role
from rollbook.core.security import token_digest
from rollbook.core.settings import SecurityConfig
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.readonly import Reader
from rollbook.report import compare
from rollbook.report.heldout import keep
from rollbook.report.html import write
from rollbook.report.statuspage import Content, StatusPage
from run_support import CONFIG

pytestmark = pytest.mark.timeout(600)
SECTIONS = ("Curves", "Staleness", "Off-policy diagnostics", "Verdicts and failures", "Drop bias", "Time and cost", "Recoveries",
            "Manifest", "Configuration")  # fmt: skip
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three trained steps; a task, a failure, a worker, a role's holder and an engine whose texts are attacks."""
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
        scene.ledger.register_worker(HOSTILE[:64], HOSTILE, HOSTILE)
        scene.ledger.heartbeat(HOSTILE[:64], None, [])
        scene.learner = scene.ledger.acquire_role(Role.LEARNER, HOSTILE[:64], 600.0, supersede="learner-1")
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
        assert "Run run" in text and "3 / 5" in text and "Waits for" in text and "feeder" in text
        for place in ("workers", "roles", "events", "failures"):
            assert HOSTILE[:8] in page.evaluate(f"document.getElementById('{place}').innerText"), place
        assert page.evaluate("document.scripts.length") == 1, "and no text has become one"
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
        assert {urlsplit(url).netloc for url in page.asked} <= {urlsplit(shown.url).netloc, ""}, "nothing from elsewhere"
    finally:
        page.leave()
        shown.close()


def test_the_page_fits_a_phone_and_a_desktop_in_light_and_dark(page: Browser, scene: Scene) -> None:
    shown = StatusPage("127.0.0.1:0", Content(scene.ledger), run_id="run", security=SecurityConfig())
    try:
        for width, height, dark in ((360, 740, False), (390, 844, True), (1280, 900, False), (1280, 900, True)):
            page.resize(width, height, dark=dark)
            page.open(shown.url)
            page.until("!document.getElementById('main').hidden")
            page.evaluate("location.hash = '6.0'")
            page.until("document.getElementById('end').textContent.startsWith('6.0')")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing lies beside the screen"
            broken = "[...document.querySelectorAll('th')].filter(h => h.offsetParent && h.offsetHeight > 40).length"
            assert page.evaluate(broken) == 0, "no heading is broken into letters"
    finally:
        page.resize(1280, 900)
        page.leave()
        shown.close()


def test_where_there_are_tokens_the_page_asks_for_one_and_keeps_it_out_of_its_address(
    page: Browser, scene: Scene, tmp_path: Path
) -> None:
    token, tokens = "token-of-an-observer-that-is-long-enough", tmp_path / "tokens"
    tokens.write_text(f"{token_digest(token)} observer\n")
    shown = StatusPage("127.0.0.1:0", Content(scene.ledger), run_id="run", security=SecurityConfig(tokens=str(tokens)))
    give = "document.getElementById('token').value = '{}'; document.querySelector('#login button').click()"
    try:
        page.open(shown.url)
        page.until("!document.getElementById('login').hidden")
        assert page.evaluate("document.getElementById('main').hidden") and "3 / 5" not in page.text()
        page.evaluate(give.format("wrong"))
        page.until("document.getElementById('error').textContent.includes('token')")
        assert page.evaluate("document.getElementById('main').hidden")
        page.evaluate(give.format(token))
        page.until("!document.getElementById('main').hidden")
        assert "3 / 5" in page.text() and page.evaluate("document.getElementById('login').hidden")
        assert not any(token in url for url in page.asked) and page.evaluate("localStorage.length + sessionStorage.length") == 0
        page.evaluate("location.hash = '6.0'")
        page.until("document.getElementById('end').textContent.startsWith('6.0')")
    finally:
        page.leave()
        page.complaints.clear()
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
    with Reader(scene.ledger._database.url, "run") as rows:
        report = write(config, scene.ledger, metrics, tmp_path / "report", None, rows)
    names = ("one", "<b>two</b> " + "/long" * 30)
    compared = compare.write([compare.Side(name, config, state, metrics) for name in names], tmp_path / "compare")
    page.complaints.clear()
    page.asked.clear()
    for file, said in ((report, HOSTILE), (compared, "<b>two</b>")):
        page.open(file.as_uri())
        pictures = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth])")
        assert len(pictures) == 2 and all(complete and width > 100 for complete, width in pictures)
        assert said in page.text() and page.evaluate("document.title") != "owned"
        headings = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert set(SECTIONS if file == report else ()) <= set(headings)
        page.resize(390, 844)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "and a phone shows it"
        page.resize(1280, 900)
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith("data:")] == [report.as_uri(), compared.as_uri()], "nothing else"
