"""Plots of a run: reward curve as PNG, and as a few lines of text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

_BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal_curve(values: Sequence[float], width: int = 72, height: int = 8) -> str:
    """The curve in block characters: means over equal spans of steps, axis labels on the left."""
    if not values:
        return "no finished steps"
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = (
        min(0.0, *means) if len(means) > 1 else min(0.0, means[0]),
        max(*means, 1e-9) if len(means) > 1 else max(means[0], 1e-9),
    )
    rows = []
    for row in range(height - 1, -1, -1):
        cells = [(m - low) / (high - low) * height - row for m in means]
        line = "".join(_BLOCKS[max(0, min(8, round(c * 8)))] for c in cells)
        label = high if row == height - 1 else low if row == 0 else None
        rows.append(f"{label:7.3f} |{line}" if label is not None else f"        |{line}")
    rows.append(f"        +{'-' * width}  steps 1 to {len(values)}, mean reward")
    return "\n".join(rows)


def png(
    panels: Sequence[tuple[str, dict[str, tuple[Sequence[float], Sequence[float]]]]], file: Path | None = None, x: str = "step"
) -> bytes:
    """One figure with a panel per (title, {label: (x, values)}); returns PNG bytes, also written to ``file``."""
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 2.4 * len(panels)), sharex=True, squeeze=False)
    for axis, (title, lines) in zip(axes[:, 0], panels, strict=True):
        for label, (steps, values) in lines.items():
            style = {"linestyle": "--", "color": "#888888"} if label.startswith("bound") else {}
            axis.plot(steps, values, label=label, linewidth=1.3, marker="." if len(steps) == 1 else "", **style)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=7)
    axes[-1, 0].set_xlabel(x)
    content = _drawn(figure)
    if file is not None:
        file.write_bytes(content)
    return content


def survival_png(panels: Sequence[tuple[str, Sequence[str], Sequence[float], Sequence[tuple[float, float]]]]) -> bytes:
    """One figure with a panel per (title, buckets, shares, (low, high) of each share); returns PNG bytes."""
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 2.4 * len(panels)), squeeze=False)
    for axis, (title, buckets, shares, intervals) in zip(axes[:, 0], panels, strict=True):
        places = range(len(buckets))
        axis.vlines(places, [low for low, _ in intervals], [high for _, high in intervals], linewidth=1.3)
        axis.plot(places, shares, "o", markersize=4)
        axis.set_xticks(places, buckets, fontsize=7)
        axis.set_ylim(-0.02, 1.02)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    return _drawn(figure)


def _drawn(figure: Figure) -> bytes:
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()
