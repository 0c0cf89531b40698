"""The run report: one self-contained HTML file, its plot as PNG and its numbers as JSON.

Owns these three files. Every number is read from the ledger; nothing is recomputed from process memory.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollbook.core.config import Config
from rollbook.core.host import host
from rollbook.core.ports import LedgerPort
from rollbook.report import heldout, sections
from rollbook.report.bias import bias_section, survival_panels, unsafe_banner
from rollbook.report.plots import png, survival_png
from rollbook.report.progress import shown_url
from rollbook.report.standing import standing

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left;overflow-wrap:break-word}"
    ".alarm{color:#fff;background:#b00020;padding:.4rem .6rem;font-weight:600}"
    "h1,h2,p{overflow-wrap:anywhere}img{max-width:100%}pre{background:#f6f6f6;padding:.6rem;overflow:auto}"
)


STEPS = ("configured", "planned", "trained", "skipped")


class Records(Protocol):
    """What the report reads from rows that no verb gives; ``ledger.readonly.Reader`` has it."""

    def manifest(self) -> dict[str, Any]: ...

    def recoveries(self) -> list[dict[str, Any]]: ...

    def lost_seconds(self) -> list[dict[str, Any]]: ...

    def sample_seconds(self) -> dict[str, float]: ...


def _table(rows: Sequence[tuple[str, object]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>"


def _configuration(config: Config) -> str:
    """The resolved configuration without the database's password."""
    content = json.loads(config.to_json())
    content["ledger"]["url"] = shown_url(content["ledger"]["url"])
    return json.dumps(content, indent=1)


def _image(title: str, png_bytes: bytes) -> str:
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png_bytes).decode()}">'


def write(
    config: Config, ledger: LedgerPort, metrics: Sequence[dict], out_dir: Path, counts: Mapping[str, Any] | None = None,
    records: Records | None = None, why_not: str = "the rows of the database were not given",
) -> Path:  # fmt: skip
    """Write ``report.html``, ``reward.png`` and ``metrics.json``; returns the path of the HTML file.

    ``counts``: ``ledger.survival()`` where it was read already; it is the longest reading of a large run. ``records``: the run's
    rows, or ``why_not`` they could not be read.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "metrics.json").write_text(json.dumps(list(metrics), indent=1))
    state = ledger.run_status()
    violations = ledger.audit()
    panels = sections.curves(config, metrics, heldout.kept(config.run.dir)) if metrics else []
    plot = png(panels, out_dir / "reward.png") if panels else b""
    image = _image("curves by step", plot) if plot else "<p>no steps</p>"
    counts = ledger.survival() if counts is None else counts
    bars = survival_panels(counts)
    lost = records.lost_seconds() if records else None
    body = [
        f"<h1>Run {html.escape(config.run.id)}</h1>", unsafe_banner(counts),
        _table([("audit", _audited(violations)), *_summary(state, metrics)]),
        "<h2>Curves</h2>", image,
        sections.staleness(config, metrics), sections.off_policy(config, metrics),
        "<h2>Slots</h2>", _table(list(state["slots"].items())),
        "<h2>Submissions</h2>", _table(list(state["submits"].items())),
        "<h2>Verdicts and failures</h2>", _table([*state["verdicts"].items(), *state["failures"].items()] or [("none", "")]),
        bias_section(counts, state), _image("survival by bucket", survival_png(bars)) if bars else "",
        sections.time_and_cost(state, metrics, records.sample_seconds() if records else None, lost),
        sections.recoveries(records.recoveries() if records else None, metrics, why_not),
        sections.manifest(records.manifest() if records else None, why_not),
        "<h2>Configuration</h2>", f"<pre>{html.escape(_configuration(config))}</pre>",
    ]  # fmt: skip
    file = out_dir / "report.html"
    file.write_text(framed(config.run.id, "".join(body)))
    return file


def framed(title: str, body: str) -> str:
    """A whole page that loads nothing from anywhere."""
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f"{head}<title>{html.escape(title)}</title><style>{_STYLE}</style>{body}</html>"


def _audited(violations: Sequence[Any]) -> str:
    if not violations:
        return "clean"
    return f"{len(violations)} violations: " + "; ".join(f"{v.promise} {v.check}" for v in violations)


def _summary(state: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
    """The run in a few numbers."""
    rewards = [value for _, value in sections.finite(metrics, "reward_mean")]
    tenth = max(1, len(rewards) // 10)
    at, head, steps = standing(state, host().time()), state["head"], state["steps"]
    found: list[tuple[str, object]] = [
        ("state", at.state), ("waits for", at.waits_for), *((f"steps {name}", steps[name]) for name in STEPS if name in steps),
        ("step of the newest checkpoint", steps["checkpoint"]),
        ("policy version", f"{head['version']}, digest {head['digest']}" if head else "none"),
    ]  # fmt: skip
    if rewards:
        first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
        found.append(("mean reward, first and last tenth of the steps", f"{first:.3f} to {last:.3f}"))
    taken = len(state.get("quarantines", ()))
    return [*found, ("tokens accepted", state["tokens"]["accepted"]), ("groups quarantined by an operator", taken)]
