"""The report: one file that needs nothing else, a picture that is one, numbers that are the ledger's."""

from __future__ import annotations

import base64
import html
import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from run_support import CONFIG

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from ledger_support import Scene, run_record

from rollbook.core.config import Config, load_config
from rollbook.ledger.ledger import Ledger
from rollbook.report.bias import alarm_lines, bias_section
from rollbook.report.html import write
from rollbook.report.plots import png, terminal_curve


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run.toml").write_text(CONFIG)
    return load_config(tmp_path / "run.toml", ["ledger.url=postgresql+psycopg://me@db/x", "run.id=run"])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Three trained steps."""
    with Ledger(f"sqlite:///{tmp_path}/ledger.sqlite", holder="server") as ledger:
        scene = Scene(ledger, run_record(steps=3))
        for step in (1, 2, 3):
            scene.feed(2)
            scene.fill()
            scene.train(step)
        yield ledger


def chunks(image: bytes) -> list[tuple[bytes, bytes]]:
    """Chunks of a PNG with their checksums verified."""
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    at, out = 8, []
    while at < len(image):
        (size,) = struct.unpack_from(">I", image, at)
        kind, body = image[at + 4 : at + 8], image[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", image, at + 8 + size)[0] == zlib.crc32(kind + body)
        out.append((kind, body))
        at += 12 + size
    return out


class References(HTMLParser):
    """Everything a page asks a browser to load, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_loads_nothing_from_anywhere(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    page = write(config, ledger, ledger.step_metrics(0), tmp_path / "out").read_text()
    found = References()
    found.feed(page)
    assert {reference.partition(",")[0] for reference in found.loaded} == {"data:image/png;base64"}
    assert not {"script", "link", "iframe"} & set(found.tags)
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_picture_in_the_page_is_the_png_beside_it_and_is_whole(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    page = write(config, ledger, ledger.step_metrics(0), tmp_path / "out").read_text()
    image = (tmp_path / "out" / "reward.png").read_bytes()
    kinds = [kind for kind, _ in chunks(image)]
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"
    pixels = zlib.decompress(b"".join(body for kind, body in chunks(image) if kind == b"IDAT"))
    assert len(set(pixels)) > 10, "something is drawn"
    embedded = re.findall(r"base64,([A-Za-z0-9+/=]+)", page)
    curves, survival = [base64.b64decode(e) for e in embedded]
    assert curves == image and chunks(survival)[-1][0] == b"IEND"


def test_the_numbers_are_the_ledgers(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    metrics = ledger.step_metrics(0)
    page = html.unescape(write(config, ledger, metrics, tmp_path / "out").read_text())
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert [m["step"] for m in metrics] == [1, 2, 3]
    state = ledger.run_status()
    for name, value in [*state["slots"].items(), *state["submits"].items(), ("audit", "clean")]:
        assert f"<th>{name}</th><td>{value}</td>" in page
    assert '"steps": 3' in page


def test_a_run_without_steps_and_hostile_names_still_make_a_page(config: Config, tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path}/empty.sqlite", holder="server") as ledger:
        scene = Scene(ledger, run_record())
        scene.feed(1)
        ledger.quarantine_group(0, "<script>alert(1)</script>")
        page = write(config, ledger, [], tmp_path / "out").read_text()
    assert "no steps" in page and "<script>" not in page
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == []
    assert not (tmp_path / "out" / "reward.png").exists()


def test_a_skipped_step_leaves_a_gap_and_no_failure(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    metrics = [*ledger.step_metrics(0), {"step": 4, "outcome": "skipped", "reward_mean": None}]
    write(config, ledger, metrics, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())[-1]["reward_mean"] is None


def counts_of(*buckets: tuple[str, int, int], unsafe: int = 0) -> dict:
    """An answer of the ledger's ``survival`` with (name, settled, trained) of length."""
    rows = [
        {"bucket": name, "opened": n, "finished": n, "trained": k, "waiting": 0, "dropped": {"dropped_stale": n - k},
         "rewarded": k, "rewarded_sum": 0.5 * k, "reward_sum": 0.5 * k}
        for name, n, k in buckets
    ]  # fmt: skip
    totals = {name: sum(row[name] for row in rows) for name in ("opened", "finished", "trained", "waiting")}
    dropped = {"dropped_stale": totals["opened"] - totals["trained"], "failed": 0}
    failures = [{"status": "infra_error", "sandbox_status": "infra_lost", "blame": "infra", "attempts": 3, "n_tokens": 17}]
    outcomes = [{"status": "given", "sandbox_status": "oom", "blame": "model", "samples": 4}]
    breaker = {"opened": 1, "events": [{"what": "breaker_opened", "at_s": 1.7e9, "failed": 6, "last": "<no spawn>"}]}
    return totals | {"dropped": dropped, "dimensions": {"length": rows}, "failures": failures, "outcomes": outcomes,
                     "breaker": breaker, "unsafe_workers": unsafe}  # fmt: skip


def test_long_rollouts_that_are_missing_are_an_alarm_on_the_page_and_in_the_terminal() -> None:
    biased = counts_of(("1", 500, 490), ("2-3", 500, 200))
    page, lines = html.unescape(bias_section(biased, {})), alarm_lines(biased)
    assert any(line.startswith("DROP BIAS  length 2-3: 200 of 500") for line in lines)
    for line in lines:
        assert f'<p class="alarm">{line.removeprefix("DROP BIAS  ")}</p>' in page
    assert "nats" in page and "no alarm" not in page
    fair = counts_of(("1", 500, 400), ("2-3", 500, 400))
    assert alarm_lines(fair) == [] and "<p>no alarm</p>" in bias_section(fair, {})


def test_failures_say_who_is_to_blame_and_drops_why() -> None:
    page = bias_section(counts_of(("1", 5, 4), ("2-3", 3, 0)), {"breaker": {"state": "open", "share": 0.6}})
    assert "<td>infra_error</td><td>infra_lost</td><td>infra</td><td>3</td><td>17</td>" in page
    assert "<td>given</td><td>oom</td><td>model</td><td>4</td>" in page
    assert "<td>dropped_stale</td><td>4</td>" in page and "<td>failed</td>" not in page
    assert "open; opened 1 times" in page
    assert "<td>2023-11-14 22:13:20</td><td>opened</td><td>failed 6; last &lt;no spawn&gt;</td>" in page
    assert "beyond correction: 2-3 (3 slots)" in page


def test_an_unsafe_sandbox_is_the_first_thing_said(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    safe = write(config, ledger, [], tmp_path / "safe").read_text()
    assert 'class="alarm"' not in safe and alarm_lines(ledger.survival()) == []
    ledger.register_worker("unsafe", "host", "engine", json.dumps({"sandbox": {"backend": "unsafe"}}))
    page = write(config, ledger, [], tmp_path / "unsafe").read_text()
    heading = page.index("</h1>") + len("</h1>")
    assert page[heading:].startswith('<p class="alarm">UNSAFE: model-written code ran without a sandbox (1 ')
    assert alarm_lines(ledger.survival())[0].startswith("UNSAFE")


def test_the_page_has_a_table_of_every_dimension(config: Config, ledger: Ledger, tmp_path: Path) -> None:
    page = write(config, ledger, ledger.step_metrics(0), tmp_path / "out").read_text()
    for name in ("length", "duration", "task", "difficulty", "version span"):
        assert f"<h3>By {name} (" in page
    assert "mean reward as trained 1.000, corrected 1.000" in page


def test_a_panel_with_one_point_can_be_drawn() -> None:
    assert chunks(png([("one", {"a": ([1], [0.5])})]))[-1][0] == b"IEND"


def test_the_curve_in_the_terminal_rises_with_the_values() -> None:
    assert terminal_curve([]) == "no finished steps"
    rows = terminal_curve([0.0, 0.25, 0.5, 1.0], height=4).splitlines()
    assert [row.split("|")[1] for row in rows[:-1]] == ["   █", "   █", "  ██", " ███"]
    assert rows[0].startswith("  1.000") and rows[-1].endswith("steps 1 to 4, mean reward")


def test_the_curve_in_the_terminal_takes_negative_equal_and_many_values() -> None:
    for values in ([-1.0, -0.5], [0.0] * 5, [0.3], [float(i % 7) for i in range(1000)]):
        rows = terminal_curve(values, width=72).splitlines()
        assert len(rows) == 9 and max(map(len, rows[:-1])) <= 9 + 72
    assert "-1.000" in terminal_curve([-1.0, -0.5])
