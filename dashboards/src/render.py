"""Draws the dashboards in a headless browser: `make render`. From the synthetic run, a recorded one, or a running Prometheus.

Owns where the data come from, what a page is told, and the size of the pictures. Perses draws them from the Grafana JSON; Grafana
does not. A panel that a real run may leave empty is told; everything else that is wrong is a fault. Exit codes: 0 all is drawn,
1 a panel without data or not drawn, a refused query or an error on the console, 2 it could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gzip
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import golden_run
from check_data import MAY_BE_EMPTY, check
from notes import happened, marks
from prometheus_server import NotReady, ask, is_installed, load, prometheus

DASHBOARDS = Path(__file__).resolve().parents[1]
PAGES = DASHBOARDS / "render"
GOLDEN_END = 1_790_000_000
LIVE_S, LIVE_SCRAPE_S = 1800, 5
BYTES_MAX = 250_000
WIDTHS = (1600, 1000, 800)
COLOURS = (256, 128, 96, 64, 48)
RENDER_S = 600
GAPS_SEEN = 10_000


class Refused(Exception):
    """It cannot be tried as asked."""


@dataclass(frozen=True)
class Source:
    """Where the data are: a Prometheus, a span of time in seconds, and what to call it."""

    url: str
    start: float
    end: float
    scrape_s: int
    says: str
    may_be_empty: Collection[str] = ()
    is_replayed: bool = True


def converted(board: Path) -> dict[str, Any]:
    """What a page draws for a dashboard. Raises Refused with the converter's words for whatever it does not know."""
    done = subprocess.run(["node", "convert.mjs"], cwd=PAGES, input=board.read_bytes(), capture_output=True, timeout=60)
    if done.returncode:
        raise Refused(f"{board}: {done.stderr.decode().strip()}")
    grafana, made = json.loads(board.read_text()), json.loads(done.stdout)
    titles = [panel["title"] for panel in grafana["panels"] if panel["type"] != "row"]
    return {"uid": grafana["uid"], "titles": titles, **made}


@contextlib.contextmanager
def synthetic() -> Iterator[Source]:
    """A Prometheus that replays the synthetic run; every panel has data."""
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "run.om"
        with plain.open("w") as file:
            file.writelines(golden_run.openmetrics(golden_run.record(GOLDEN_END)))
        with _replayed(plain, golden_run.STEP_S) as url:
            start = GOLDEN_END - golden_run.LENGTH_S + 60
            yield Source(url, start, GOLDEN_END, golden_run.STEP_S, "data of a synthetic run")


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[Source]:
    """A Prometheus that replays a kept run, gzip or not. Raises Refused where it holds no samples."""
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "run.om"
        with (gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as kept, plain.open("wb") as file:
            shutil.copyfileobj(kept, file)
        start, end, scrape_s = _times(plain)
        with _replayed(plain, scrape_s) as url:
            yield Source(url, start, end, scrape_s, f"recorded run {path.name}", MAY_BE_EMPTY)


@contextlib.contextmanager
def _replayed(plain: Path, scrape_s: int) -> Iterator[str]:
    data, config = plain.parent / "data", plain.parent / "prometheus.yml"
    load(plain, data)
    config.write_text("{}\n")
    with prometheus(config, data, lookback_s=3 * scrape_s) as url:
        yield url


def _times(plain: Path) -> tuple[float, float, int]:
    """First and last second of a recording, and the usual gap between two samples of a series."""
    first, last, gaps, before = float("inf"), 0.0, [], ("", 0.0)
    with plain.open() as file:
        for line in file:
            if line.startswith("#"):
                continue
            series, _, moment = line.rpartition(" ")
            series, at = series.rpartition(" ")[0], float(moment)
            first, last = min(first, at), max(last, at)
            if series == before[0] and len(gaps) < GAPS_SEEN:
                gaps.append(at - before[1])
            before = (series, at)
    if not gaps:
        raise Refused(f"{plain.name}: no series with two samples")
    return first, last, max(round(statistics.median(gaps)), 1)


def draw(source: Source, pages: list[dict[str, Any]], boards: list[Path], args: argparse.Namespace) -> int:
    """Check the data, then draw each page; returns the exit code."""
    span = (source.start, source.end)
    runs = ask(source.url, "label/run/values", **{"match[]": "rollbook_run_state"}, start=source.start, end=source.end)
    if not runs or (args.run and args.run not in runs):
        raise Refused(f"no run {args.run or ''} between {_clock(source.start)} and {_clock(source.end)}; there are: {runs}")
    run = args.run or runs[-1]
    found = check(source.url, boards, *span, source.may_be_empty, run)
    for line in found.bad:
        print(f"EMPTY OR REFUSED: {line}")
    injected = marks(args.marks) if args.marks else []
    for page in pages:
        for variable in page["dashboard"]["spec"]["variables"]:
            if not variable["spec"]["allowMultiple"]:
                variable["spec"]["defaultValue"] = run
        notes = happened(source.url, page["notes"], {"run": run}, span, source.scrape_s)
        page["notes"] = sorted([*notes, *(injected if page["notes"] else [])], key=lambda note: note["at"])
        page["caption"] = _caption(source, run)
    plan = {
        "chromium": _chromium(), "out": str(args.out.resolve()), "prometheus": source.url, "scrape": f"{source.scrape_s}s",
        "start": int(source.start), "end": int(source.end), "mayBeEmpty": sorted(source.may_be_empty), "pages": pages,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    code = _node(plan)
    for picture in (args.out / f"{page['uid']}.png" for page in pages):
        print(f"{picture}: {shrink(picture)} bytes")
    return 1 if code or found.bad else 0


def _node(plan: dict[str, Any]) -> int:
    """Draw a plan; returns node's exit code. Raises Refused after RENDER_S; the browser ends with node where node is asked to."""
    with subprocess.Popen(["node", "render.mjs"], cwd=PAGES, stdin=subprocess.PIPE) as node:
        try:
            node.communicate(json.dumps(plan).encode(), timeout=RENDER_S)
        except subprocess.TimeoutExpired:
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
            node.kill()
            raise Refused(f"not drawn within {RENDER_S} s") from None
    return node.returncode


def _caption(source: Source, run: str) -> str:
    alerts = ask(source.url, "series", **{"match[]": "ALERTS"}, start=source.start, end=source.end)
    untold = "" if alerts or not source.is_replayed else " · no alerts among the data, so none is shown"
    when = f"{_clock(source.start)} to {_clock(source.end)} UTC"
    return f"{source.says} · run {run} · {when} · rendered with Perses from the Grafana JSON{untold}"


def _clock(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not found:
        raise Refused("Chromium is not installed")
    return found


def shrink(picture: Path) -> int:
    """Fewer colours, then narrower, until it is small; returns its bytes. Narrower is no gain before that: it blurs."""
    with Image.open(picture) as opened:
        whole = opened.convert("RGB")
    for width, colours in itertools.product(WIDTHS, COLOURS):
        width = min(width, whole.width)
        scaled = whole.resize((width, whole.height * width // whole.width), Image.Resampling.LANCZOS)
        # This method keeps the rare colours: those of lines.
        few = scaled.quantize(colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(picture, optimize=True)
        if picture.stat().st_size < BYTES_MAX:
            break
    return picture.stat().st_size


def _moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        when = datetime.datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


@contextlib.contextmanager
def _source(args: argparse.Namespace) -> Iterator[Source]:
    if args.prometheus:
        end = args.to or time.time()
        start = args.start or end - LIVE_S
        yield Source(args.prometheus, start, end, args.scrape or LIVE_SCRAPE_S, args.prometheus, MAY_BE_EMPTY, is_replayed=False)
        return
    with recorded(args.recorded) if args.recorded else synthetic() as source:
        start, end = args.start or source.start, args.to or source.end
        yield Source(source.url, start, end, args.scrape or source.scrape_s, source.says, source.may_be_empty)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="PNGs of the dashboards, drawn by Perses from the Grafana JSON")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--recorded", type=Path, metavar="FILE", help="a kept run: OpenMetrics text with time stamps, gzip or not")
    where.add_argument("--prometheus", metavar="URL", help="a running one; the synthetic run when neither is given")
    parser.add_argument("--from", dest="start", type=_moment, metavar="WHEN", help="seconds since the epoch, or ISO 8601 (UTC)")
    parser.add_argument("--to", type=_moment, metavar="WHEN", help="all of a recording, and the last half hour of a Prometheus")
    parser.add_argument("--scrape", type=int, metavar="SECONDS", help="between two samples; found in a recording, else 5")
    parser.add_argument("--run", help="the last by name when left out")
    parser.add_argument("--marks", type=Path, metavar="FILE", help='injected faults: lines of {"at": SECONDS, "text": …}')
    parser.add_argument("--out", type=Path, default=PAGES / "out")
    parser.add_argument("boards", nargs="*", type=Path, help="dashboards; all when left out")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Render them all."""
    args = _parser().parse_args(argv)
    try:
        if shutil.which("node") is None:
            raise Refused("node is not installed")
        boards = args.boards or sorted((DASHBOARDS / "grafana").glob("*.json"))
        pages = [converted(board) for board in boards]
        if not is_installed():
            raise Refused("Prometheus is not installed")
        if not (PAGES / "dist" / "index.html").is_file():
            raise Refused("the page is not built: make render")
        with _source(args) as source:
            return draw(source, pages, boards, args)
    except (Refused, NotReady, OSError, ValueError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
