"""A drill as one HTML file: its table, and faults against throughput, reward and lag over time.

Owns the file; every number in it comes from the drill's entry and the rows of the ledger.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle

BIN_S = 5.0
_COLOURS = {
    "worker": "tab:blue", "engine": "tab:cyan", "learner": "tab:red", "learner-rank": "tab:pink", "ledger": "tab:purple",
    "feeder": "tab:green", "supervisor": "tab:orange", "node": "black", "database": "tab:brown",
}  # fmt: skip
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left}img{max-width:100%}"
    "pre{background:#f6f6f6;padding:.6rem;overflow:auto}.broken{color:#fff;background:#b00020;padding:.4rem .6rem}"
)


def write(file: Path, entry: dict[str, Any], tables: dict[str, list[oracle.Row]]) -> None:
    """Self-contained: nothing is loaded from elsewhere."""
    picture = base64.b64encode(timeline(entry, tables)).decode()
    rows = "".join(
        f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
        for k, v in [*((name, entry[name]) for name in ("verdict", "command", "seed", "date", "commit")),
                     ("machine", json.dumps(entry["machine"])), *entry["numbers"].items()]
    )  # fmt: skip
    wrong = "".join(f'<p class="broken">{html.escape(f)}</p>' for f in entry["findings"])
    each = "\n".join(json.dumps(fault) for fault in entry["faults"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>drill {entry["drill"]}</title><style>{_STYLE}</style>'
        f"<h1>Drill {entry['drill']}</h1><p>Claim: {html.escape(entry['claim'])}</p>{wrong}"
        f'<img alt="faults against throughput, reward and lag" src="data:image/png;base64,{picture}"><table>{rows}</table>'
        "<h2>Faults</h2><p>role, kind, at, until, detected, first new rollout, first new step</p>"
        f"<pre>{html.escape(each)}</pre></html>"
    )


def timeline(entry: dict[str, Any], tables: dict[str, list[oracle.Row]]) -> bytes:
    """Samples and steps per second, mean reward and lag over time, with a line per fault; PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    accepted = sorted(r["accepted_at_us"] / 1e6 for r in tables.get("sample", []))
    outcomes = sorted(tables.get("plan_outcome", []), key=lambda r: r["step"])
    ended = [r["finished_at_us"] / 1e6 for r in outcomes]
    start = min([*accepted[:1], *ended[:1], *(f[2] for f in entry["faults"])], default=0.0)
    figure, axes = plt.subplots(4, 1, figsize=(11, 9), sharex=True)
    for axis, title, times in ((axes[0], "samples/s", accepted), (axes[1], "steps/s", ended)):
        axis.step(*rate(times, start), where="post", linewidth=1.2)
        axis.set_ylabel(title)
    metrics = [json.loads(r["metrics_json"]) for r in outcomes]
    for axis, title, name in ((axes[2], "mean reward", "reward_mean"), (axes[3], "lag (versions)", "lag_head_max")):
        points = [(t - start, m[name]) for t, m in zip(ended, metrics, strict=True) if m.get(name) is not None]
        axis.plot([p[0] for p in points], [p[1] for p in points], linewidth=1.0)
        axis.set_ylabel(title)
    for axis in axes:
        axis.grid(alpha=0.3)
        for role, kind, at, until, *_ in entry["faults"]:
            colour = _COLOURS.get(role, "gray")
            axis.axvline(at - start, color=colour, alpha=0.6, linewidth=0.8, linestyle="--" if kind == "sigstop" else "-")
            if until:
                axis.axvspan(at - start, until - start, color=colour, alpha=0.12)
    for place, role in enumerate(sorted({f[0] for f in entry["faults"]})):
        axes[0].text(0.01 + 0.1 * place, 1.04, role, color=_COLOURS.get(role, "gray"), transform=axes[0].transAxes, fontsize=9)
    axes[-1].set_xlabel("seconds since the first sample")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    plt.close(figure)
    return buffer.getvalue()


def rate(times: Sequence[float], start: float) -> tuple[list[float], list[float]]:
    """Events per second in bins of ``BIN_S``: left edges (seconds since ``start``), rates."""
    if not times:
        return [0.0], [0.0]
    n = int((times[-1] - start) // BIN_S) + 1
    counts = [0] * n
    for t in times:
        counts[max(0, int((t - start) // BIN_S))] += 1
    return [i * BIN_S for i in range(n)], [c / BIN_S for c in counts]
