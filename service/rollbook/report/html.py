"""The run report: one self-contained HTML file, its plot as PNG and its numbers as JSON.

Owns these three files. Every number is read from the ledger; nothing is recomputed from process memory.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.core.config import Config
from rollbook.core.ports import LedgerPort
from rollbook.report.bias import bias_section, survival_panels, unsafe_banner
from rollbook.report.plots import png, survival_png
from rollbook.report.progress import shown_url

PANELS = (
    ("mean reward of valid samples", ("reward_mean",)),
    ("effective sample size of the importance weights", ("ess_token_raw_fraction", "ess_token_applied_fraction")),
    ("entropy (nats per token)", ("entropy_mean",)),
    ("lag (versions)", ("lag_head_mean", "lag_head_max")),
    ("gradient norm", ("grad_norm",)),
)
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left}"
    ".alarm{color:#fff;background:#b00020;padding:.4rem .6rem;font-weight:600}"
    "img{max-width:100%}pre{background:#f6f6f6;padding:.6rem;overflow:auto}"
)


def _table(rows: Sequence[tuple[str, object]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>"


def _configuration(config: Config) -> str:
    """The resolved configuration without the database's password."""
    content = json.loads(config.to_json())
    content["ledger"]["url"] = shown_url(content["ledger"]["url"])
    return json.dumps(content, indent=1)


def _panels(metrics: Sequence[dict]) -> list:
    panels = []
    for title, names in PANELS:
        lines = {}
        for name in names:
            points = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
            if points:
                lines[name] = ([p[0] for p in points], [p[1] for p in points])
        if lines:
            panels.append((title, lines))
    return panels


def _image(title: str, png_bytes: bytes) -> str:
    return f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(png_bytes).decode()}">'


def write(
    config: Config, ledger: LedgerPort, metrics: Sequence[dict], out_dir: Path, counts: Mapping[str, Any] | None = None
) -> Path:
    """Write ``report.html``, ``reward.png`` and ``metrics.json``; returns the path of the HTML file.

    ``counts``: ``ledger.survival()`` where it was read already; it is the longest reading of a large run.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "metrics.json").write_text(json.dumps(list(metrics), indent=1))
    state = ledger.run_status()
    violations = ledger.audit()
    panels = _panels(metrics)
    plot = png(panels, out_dir / "reward.png") if panels else b""
    image = _image("curves by step", plot) if plot else "<p>no steps</p>"
    counts = ledger.survival() if counts is None else counts
    bars = survival_panels(counts)
    audit = (
        "clean" if not violations else f"{len(violations)} violations: " + "; ".join(f"{v.promise} {v.check}" for v in violations)
    )
    body = [
        f"<h1>Run {html.escape(config.run.id)}</h1>", unsafe_banner(counts),
        _table([("audit", audit), *state["steps"].items(), ("head", state["head"])]),
        "<h2>Curves</h2>", image,
        "<h2>Slots</h2>", _table(list(state["slots"].items())),
        "<h2>Submissions</h2>", _table(list(state["submits"].items())),
        "<h2>Verdicts and failures</h2>", _table([*state["verdicts"].items(), *state["failures"].items()] or [("none", "")]),
        bias_section(counts, state), _image("survival by bucket", survival_png(bars)) if bars else "",
        "<h2>Configuration</h2>", f"<pre>{html.escape(_configuration(config))}</pre>",
    ]  # fmt: skip
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(config.run.id)}</title>'
    file = out_dir / "report.html"
    file.write_text(f"{page}<style>{_STYLE}</style>{''.join(body)}</html>")
    return file
