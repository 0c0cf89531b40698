"""`rollbook top`: the run on a terminal, redrawn while it goes on; plain text where there is no terminal.

Owns presentation only; every number comes from ``run_status`` and ``step_metrics``, what the run waits for from ``standing``.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.core.config import Config
from rollbook.report.progress import on_terminal, status_lines
from rollbook.report.standing import standing
from rollbook.report.trouble import troubles

SPARKS = "▁▂▃▄▅▆▇█"
STEPS_SHOWN = 400


def sparkline(values: Sequence[float], width: int) -> str:
    """Means over equal spans in one line of block characters, from the smallest to the largest of them."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(7, int((m - low) / span * 8))] for m in means)


def top_lines(
    state: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], config: Config, now_s: float, width: int
) -> list[str]:
    """The whole screen, no line longer than ``width`` columns."""
    at = standing(state, now_s)
    since = "no step yet" if at.since_step_s is None else f"{at.since_step_s:.0f} s since the last step"
    wrong = [f"TROUBLE  {line}" for line in troubles(state, now_s)]
    lines = [f"{at.state.upper()}  waits for {at.waits_for}", *wrong, since, *status_lines(dict(state), config)]
    for title, name in (("reward", "reward_mean"), ("lag", "lag_head_mean"), ("ESS", "ess_token_raw_fraction")):
        values = [float(m[name]) for m in metrics if isinstance(m.get(name), (int, float))]
        if values:
            ends = f"{min(values):.3g} to {max(values):.3g}, now {values[-1]:.3g}"
            lines.append(f"{title:<7} {sparkline(values, max(8, width - len(ends) - 11))}  {ends}")
    return [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: str, width: int) -> list[str]:
    """The line in at most three: what is cut off is a long reason, never a count."""
    return textwrap.wrap(
        on_terminal(line), max(width, 20), subsequent_indent="        ", max_lines=3, placeholder=" …", break_on_hyphens=False
    )  # fmt: skip


def screen_width(default: int = 100) -> int:
    """Columns of the terminal; ``default`` where there is none."""
    return shutil.get_terminal_size((default, 40)).columns
