"""What grew in a long run, by how much, and whether the ledger's rows explain it; as a table and as a page with a plot.

Owns the fits and their limits. A quantity is fitted by least squares against the steps made, without the first fifth of the run
(imports, caches, first batches); what it grew by is the slope times the steps in between. A quantity of one process is fitted
within each of its lives, and the longest life counts: a successor begins small.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_SHARE = 0.2
SAMPLES_MIN = 8
"""Fewer say nothing about growth."""
KEPT_MAX = 400
MIB = 1 << 20

Sample = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One quantity: what it began with, what it grew by over the fitted part, and the most it may grow by."""

    name: str
    unit: str
    first: float
    grown: float
    limit: float
    n: int
    why: str

    @property
    def holds(self) -> bool:
        return self.n < SAMPLES_MIN or self.grown <= self.limit

    def to_values(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.word}

    @property
    def word(self) -> str:
        return "too few samples" if self.n < SAMPLES_MIN else "holds" if self.holds else "GROWS"


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (value at the first x, growth up to the last)."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y + slope * (xs[0] - mean_x), slope * (xs[-1] - xs[0])


def _verdict(
    name: str, unit: str, points: Sequence[tuple[float, float]], limit: Callable[[float], float], why: str
) -> Verdict:
    steady = list(points)[int(len(points) * WARM_SHARE) :]
    if len(steady) < SAMPLES_MIN:
        return Verdict(name, unit, points[0][1] if points else 0.0, 0.0, 0.0, len(steady), why)
    first, grown = fit(steady)
    return Verdict(name, unit, round(first, 2), round(grown, 2), round(limit(first), 2), len(steady), why)


def judge(samples: Sequence[Sample], restarts: Sequence[dict[str, float]], period: tuple[int, int]) -> list[Verdict]:
    """A verdict on every quantity; ``period``: steps between checkpoints, and how many of these are kept."""
    verdicts = []
    for name in sorted({role for s in samples for role in s["roles"]}):
        life = longest_life(samples, name)
        for what, unit, scale, limit, why in (
            ("rss", "MiB", MIB, lambda first: max(8.0, 0.05 * first), "5 %, at least 8 MiB: the allocator's own breathing"),
            ("fds", "", 1, lambda first: 3.0, "connections that are being replaced"),
            ("threads", "", 1, lambda first: 4.0, "a pool that fills to its size"),
        ):
            points = [(s["steps"], s["roles"][name][what] / scale) for s in life]
            verdicts.append(_verdict(f"{name} {what}", unit, points, limit, why))
    for what, scale, least in (("rss", MIB, 8.0), ("fds", 1, 3.0), ("threads", 1, 2.0)):
        points = [(s["steps"], s["supervisor"][what] / scale) for s in samples]
        verdicts.append(_verdict(f"supervisor {what}", "MiB" * (scale > 1), points, lambda first, least=least: least, "nothing"))
    verdicts += _of_storage(samples, period)
    series = [(s["steps"], s["series"]) for s in samples if "series" in s]
    verdicts.append(_verdict("metric series", "", series, lambda first: 0.1 * first, "methods and outcomes that are seen late"))
    times = [(r["steps"], r["seconds"]) for r in restarts]
    verdicts.append(_verdict("ledger restart", "s", times, lambda first: max(2.0, first), "the load of the machine"))
    return verdicts


def _of_storage(samples: Sequence[Sample], period: tuple[int, int]) -> list[Verdict]:
    other = [(at, size / MIB) for at, size in _period_means(samples, period)]
    rows = [s for s in samples if s.get("rows", {}).get("sample")]
    per_sample = [(s["steps"], s["bytes"]["database"] / s["rows"]["sample"] / 1024) for s in rows]
    logs = [(s["steps"], s["bytes"]["logs"] / MIB) for s in samples]
    made = samples[-1]["steps"] - samples[0]["steps"] if samples else 0
    out = [
        _verdict("run directory without database and logs", "MiB", other, lambda first: max(4.0, 0.2 * first),
                 "checkpoints and versions that are kept, a number of them that does not grow"),
        _verdict("logs", "MiB", logs, lambda first: max(2.0, 4096.0 * made / MIB),
                 "4 KiB of lines a step; each log is cut at 64 MiB"),
        _verdict("database per sample", "KiB", per_sample, lambda first: 0.1 * first, "samples and what belongs to them"),
    ]  # fmt: skip
    events = [(s["steps"], s["rows"]["event"] / s["steps"]) for s in rows if s["steps"] and "event" in s["rows"]]
    out.append(_verdict("event rows per step", "", events, lambda first: max(1.0, 0.1 * first), "events of the steps made"))
    for table in ("lease", "worker"):
        points = [(s["steps"], s["rows"][table]) for s in rows if table in s["rows"]]
        if points:
            out.append(_verdict(f"{table} rows", "", points, lambda first: max(16.0, 0.2 * first), "what is open, and restarts"))
    return out


def _period_means(samples: Sequence[Sample], period: tuple[int, int]) -> list[tuple[float, float]]:
    """Mean size of the files between two checkpoints, once as many of these exist as are kept; the last period is left out.

    Versions of the policy are kept until the checkpoint that needs none of them, so the size is a saw's edge.
    """
    every, kept = period
    means: dict[int, list[float]] = {}
    for s in samples:
        means.setdefault(s["steps"] // every, []).append(s["bytes"]["other"])
    whole = sorted(means)[:-1]
    return [(n * every, sum(means[n]) / len(means[n])) for n in whole if n > kept]


def overall(verdicts: Sequence[Verdict], fine: bool) -> str:
    """``holds``, ``broken``, or ``incomplete`` where the run was too short to judge everything, which is no success either."""
    if not fine or not all(v.holds for v in verdicts):
        return "broken"
    return "incomplete" if any(v.n < SAMPLES_MIN for v in verdicts) else "holds"


def longest_life(samples: Sequence[Sample], role: str) -> list[Sample]:
    """The samples of the process of a role that was seen most often."""
    lives: dict[str, list[Sample]] = {}
    for s in samples:
        if role in s["roles"] and s["roles"][role]["rss"]:
            lives.setdefault(s["roles"][role]["incarnation"], []).append(s)
    return max(lives.values(), key=len, default=[])


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most ``KEPT_MAX`` of them, evenly."""
    every = max(1, -(-len(samples) // KEPT_MAX))
    return list(samples[::every])


def table(verdicts: Sequence[Verdict]) -> str:
    """One line for each quantity."""
    lines = [f"{'quantity':44} {'first':>10} {'grown':>9} {'limit':>9}  verdict"]
    for v in verdicts:
        name = v.name + (f" ({v.unit})" if v.unit else "")
        lines.append(f"{name:44} {v.first:10.2f} {v.grown:9.2f} {v.limit:9.2f}  {v.word}")
    return "\n".join(lines)


def plot(samples: Sequence[Sample], restarts: Sequence[dict[str, float]]) -> bytes:
    """Every quantity against the steps made, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roles = sorted({role for s in samples for role in s["roles"]})
    of_roles = (("resident memory (MiB)", "rss", MIB), ("file descriptors", "fds", 1), ("threads", "threads", 1))
    panels: list[tuple[str, dict[str, list[tuple[float, float]]]]] = [
        (title, {r: [(s["steps"], s["roles"][r][what] / scale) for s in samples if r in s["roles"]] for r in roles})
        for title, what, scale in of_roles
    ]
    kinds = ("database", "logs", "other")
    panels.append(("run directory (MiB)", {k: [(s["steps"], s["bytes"][k] / MIB) for s in samples] for k in kinds}))
    tables = sorted({t for s in samples for t in s.get("rows", {})})
    panels.append(("rows", {t: [(s["steps"], s["rows"][t]) for s in samples if t in s.get("rows", {})] for t in tables}))
    panels.append(("metric series", {"series": [(s["steps"], s["series"]) for s in samples if "series" in s]}))
    panels.append(("restart of the ledger server (s)", {"restart": [(r["steps"], r["seconds"]) for r in restarts]}))
    panels.append(("steps made", {"steps": [(s["steps"], s["at_s"] / 60) for s in samples]}))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 2.2 * len(panels)), sharex=True)
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for label, points in lines.items():
            axis.plot([x for x, _ in points], [y for _, y in points], ".-", markersize=2, linewidth=1, label=label)
        axis.set_title(title if title != "steps made" else "minutes", fontsize=9)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=6, ncol=4)
    axes[-1].set_xlabel("steps made")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    pyplot.close(figure)
    return buffer.getvalue()


def page(
    kept: dict[str, Any], samples: Sequence[Sample], restarts: Sequence[dict[str, float]], verdicts: Sequence[Verdict], file: Path
) -> None:  # fmt: skip
    """One HTML file that needs nothing else."""
    cells = "".join(
        f"<tr><td>{html.escape(v.name)}</td><td>{v.first:g} {v.unit}</td><td>{v.grown:g}</td><td>{v.limit:g}</td>"
        f"<td>{v.word}</td><td>{html.escape(v.why)}</td></tr>"
        for v in verdicts
    )
    drawn = base64.b64encode(plot(samples, restarts)).decode() if samples else ""
    image = f'<img alt="growth" src="data:image/png;base64,{drawn}">' if drawn else ""
    head = (
        f"claim {kept['verdict']}: {kept['steps']} steps in {kept['minutes']:g} minutes, {len(restarts)} restarts of the ledger "
        f"server, audit: {kept['audit']}; {kept['date']}, {kept['machine']['cpu']}, {kept['machine']['cores']} cores"
    )
    style = (
        "body{font:14px sans-serif;max-width:64rem;margin:2rem auto}td,th{border:1px solid #ccc;padding:.2rem .5rem}"
        "table{border-collapse:collapse}img{max-width:100%}"
    )
    file.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>long run</title><style>{style}</style><h1>The long run</h1>'
        f"<p>{html.escape(head)}</p><p>{html.escape(kept['broken'])}</p><table><tr><th>quantity</th><th>first</th>"
        f"<th>grown by</th><th>may grow by</th><th>verdict</th><th>what explains growth</th></tr>{cells}</table>{image}</html>\n"
    )
