"""Runs on the same axes: curves by step and by wall time, numbers side by side, what their configurations differ in.

Owns ``compare.html`` and ``compare.json``. Reads ledgers only through what their runs were asked.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.core.changes import changed_fields
from rollbook.core.config import Config
from rollbook.report.html import framed
from rollbook.report.plots import png
from rollbook.report.sections import CURVES, Panel, finite, grid

NUMBERS = ("reward_mean", "lag_head_mean", "ess_token_raw_fraction", "kl_behaviour_old_k3", "entropy_mean", "grad_norm",
           "seconds_step", "seconds_plan_wait")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """One run: a name of its own, its configuration, ``run_status`` and ``step_metrics``."""

    name: str
    config: Config
    state: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]


def named_apart(configs: Sequence[Config]) -> list[str]:
    """The runs' ids; where two are the same with their directories, by name if those differ."""
    ids = [c.run.id for c in configs]
    short, whole = [Path(c.run.dir).name for c in configs], [c.run.dir for c in configs]
    apart = short if len(set(short)) == len(set(whole)) else whole
    return [name if ids.count(name) == 1 else f"{name} ({where})" for name, where in zip(ids, apart, strict=True)]


def panels_by_step(sides: Sequence[Side]) -> list[Panel]:
    """A panel for the first metric of each curve of the report, one line a run."""
    panels: list[Panel] = []
    for title, (name, *_) in CURVES:
        lines = {side.name: points for side in sides if (points := _points(side, name))}
        if lines:
            panels.append((title, {label: ([p[0] for p in points], [p[1] for p in points]) for label, points in lines.items()}))
    return panels


def panel_by_time(sides: Sequence[Side]) -> list[Panel]:
    """Mean reward over minutes since each run's first finished step."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for side in sides:
        at = {int(m["step"]): m["finished_at_s"] for m in side.metrics}
        if points := _points(side, "reward_mean"):
            began = min(at.values())
            lines[side.name] = ([(at[step] - began) / 60 for step, _ in points], [value for _, value in points])
    return [("mean reward by minutes since the first step", lines)] if lines else []


def _points(side: Side, name: str) -> list[tuple[int, float]]:
    return finite(side.metrics, name)


def numbers(sides: Sequence[Side]) -> dict[str, list[float | None]]:
    """Means over the last tenth of each run's steps, and a few counts."""
    out: dict[str, list[float | None]] = {
        "steps": [side.state["steps"]["trained"] for side in sides],
        "tokens accepted": [side.state["tokens"]["accepted"] for side in sides],
        "slots dropped or failed": [side.state["slots"]["verdicts"] for side in sides],
        "failed attempts": [sum(side.state["failures"].values()) for side in sides],
    }
    for name in NUMBERS:
        out[f"{name}, last tenth"] = [_last_tenth(side, name) for side in sides]
    return out


def _last_tenth(side: Side, name: str) -> float | None:
    values = [value for _, value in _points(side, name)]
    kept = values[-max(1, len(values) // 10) :]
    return sum(kept) / len(kept) if kept else None


def write(sides: Sequence[Side], out_dir: Path) -> Path:
    """Write both files; returns the HTML's path. The first run is what the others are compared with."""
    out_dir.mkdir(parents=True, exist_ok=True)
    found = numbers(sides)
    (out_dir / "compare.json").write_text(json.dumps({"runs": [s.name for s in sides], "numbers": found}, indent=1))
    pictures = [_image(title, panels, x) for title, panels, x in
                (("curves by step", panels_by_step(sides), "step"), ("reward by time", panel_by_time(sides), "minutes"))
                if panels]  # fmt: skip
    rows = [(name, *map(_shown, values), *(_difference(values[0], v) for v in values[1:])) for name, values in found.items()]
    heads = ("", *(s.name for s in sides), *(f"{s.name} less {sides[0].name}" for s in sides[1:]))
    title = html.escape(" and ".join(s.name for s in sides))
    parts = [f"<h1>{title}</h1>", grid(heads, rows), *(pictures or ["<p>no steps</p>"])]
    for side in sides[1:]:
        changed = changed_fields(sides[0].config.to_json(), side.config.to_json())
        parts.append(f"<h2>Configuration: {html.escape(sides[0].name)} to {html.escape(side.name)}</h2>")
        parts.append(grid(("field", "change"), list(changed.items())) if changed else "<p>the same computation</p>")
    file = out_dir / "compare.html"
    file.write_text(framed("comparison", "".join(parts)))
    return file


def _image(title: str, panels: Sequence[Panel], x: str) -> str:
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png(panels, x=x)).decode()}">'


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _difference(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{b - a:+.4g}"
