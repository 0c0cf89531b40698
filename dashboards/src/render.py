"""Draws the dashboards in a headless browser, from a running Prometheus or from the synthetic run: `make render`.

Owns the order of things and the size of the pictures, which Perses draws from the Grafana JSON; Grafana does not. Exit code 1 for
a panel without data, a refused query or an error on the console.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

import golden_run
from prometheus_server import load, prometheus

DASHBOARDS = Path(__file__).resolve().parents[1]
GOLDEN_END = 1_790_000_000
BYTES_MAX = 300_000
WIDTHS = (1600, 1280, 1024, 800)
RENDER_S = 1800


@contextlib.contextmanager
def golden() -> Iterator[str]:
    """A Prometheus that replays the synthetic run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded, config = folder / "run.om", folder / "prometheus.yml"
        with recorded.open("w") as file:
            file.writelines(golden_run.openmetrics(golden_run.record(GOLDEN_END)))
        load(recorded, folder / "data")
        config.write_text("{}\n")
        with prometheus(config, folder / "data") as url:
            yield url


def shrink(picture: Path) -> int:
    """Few colours, and narrower until it is small; returns its bytes."""
    with Image.open(picture) as opened:
        whole = opened.convert("RGB")
    for width in WIDTHS:
        width = min(width, whole.width)
        scaled = whole.resize((width, whole.height * width // whole.width), Image.Resampling.LANCZOS)
        scaled.quantize(48, dither=Image.Dither.NONE).save(picture, optimize=True)
        if picture.stat().st_size < BYTES_MAX:
            break
    return picture.stat().st_size


def main() -> int:
    """Render them all."""
    parser = argparse.ArgumentParser(description="PNGs of the dashboards, drawn by Perses from the Grafana JSON")
    parser.add_argument("--prometheus", metavar="URL", help="a running one; the synthetic run when left out")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back to look in a running one")
    parser.add_argument("--out", type=Path, default=DASHBOARDS / "render" / "out")
    parser.add_argument("boards", nargs="*", type=Path, help="dashboards; all when left out")
    args = parser.parse_args()
    boards = args.boards or sorted((DASHBOARDS / "grafana").glob("*.json"))
    now = time.time()
    end = now if args.prometheus else GOLDEN_END
    start = end - (60 * args.minutes if args.prometheus else golden_run.LENGTH_S - 60)
    with contextlib.nullcontext(args.prometheus) if args.prometheus else golden() as url:
        span = [str(int(start)), str(int(end))]
        command = ["node", "render.mjs", url, *span, str(args.out.resolve()), *(str(board.resolve()) for board in boards)]
        code = subprocess.run(command, cwd=DASHBOARDS / "render", timeout=RENDER_S).returncode
    for board in boards:
        picture = args.out / f"{board.stem}.png"
        print(f"{picture}: {shrink(picture)} bytes")
    return code


if __name__ == "__main__":
    sys.exit(main())
