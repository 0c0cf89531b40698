"""Adds up the recorded runs of the soak, over invocations and machines, as a Markdown table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROLES = ("worker", "learner", "ledger", "feeder", "supervisor", "everything", "postgresql")


def read(path: Path) -> list[Row]:
    """Every recorded run."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def table(runs: list[Row]) -> str:
    """Markdown: what was killed, and what came of it. No run is left out, failed ones are counted as such."""
    if not runs:
        return "no run is recorded"
    kills, stops = Counter[str](), Counter[str]()
    for run in runs:
        kills.update(run["kills"])
        stops.update(run["stops"])
    total = sum(kills.values())
    at_failpoints = sum(kind not in ("sigkill", "sigstop") for run in runs for _, kind, *_ in run["each"])
    lines = [
        ("kills", f"{total:,} ({at_failpoints:,} of them at failpoints, the others at random times)"),
        *((f"— {role}", f"{kills[role]:,}") for role in ROLES),
        ("processes killed", f"{_sum(runs, 'processes_killed'):,}"),
        ("stops of up to 6 s (SIGSTOP, SIGCONT)", f"{sum(stops.values()):,}"),
        ("runs", f"{len(runs)} ({_by(runs, 'schedule')}; {_by(runs, 'database')}; {_by(runs, 'workers', ' workers')})"),
        ("clean runs", str(sum(run["verdict"] == "clean" for run in runs))),
        ("failed runs", str(sum(run["verdict"] != "clean" for run in runs))),
        *((("judged again (see the records)", str(n)),) if (n := sum("judged_again" in run for run in runs)) else ()),
        ("samples acknowledged", f"{_sum(runs, 'acknowledged'):,}"),
        ("acknowledged samples lost", str(_sum(runs, "acknowledged_lost"))),
        ("samples trained twice", str(_sum(runs, "trained_twice"))),
        ("prompts skipped", f"{_sum(runs, 'prompts_skipped')} of {_sum(runs, 'prompts'):,}"),
        ("rollouts leased again per kill", f"{_sum(runs, 'generated_again') / max(1, total):.2f}"),
        ("first new rollout after a kill, p50 / p95", _seconds(runs, 3)),
        ("first new step after a kill, p50 / p95", _seconds(runs, 4)),
        *((f"— of {role}: rollout; step", f"{_seconds(runs, 3, role)}; {_seconds(runs, 4, role)}") for role in sorted(kills)),
        ("wall time", f"{_sum(runs, 'wall_s') / 3600:.1f} h of runs, {len({r['soak'] for r in runs})} soaks"),
        ("restarts by fork server", "yes" if all(r["fork_server"] for r in runs) else "in some runs"),
        ("machines", "; ".join(sorted({f"{m['cores']} cores, {m['cpu']}, Python {m['python']}" for m in _machines(runs)}))),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)])


def _machines(runs: list[Row]) -> list[Row]:
    return [run["machine"] for run in runs]


def _sum(runs: list[Row], name: str) -> Any:
    return sum(run[name] for run in runs)


def _by(runs: list[Row], name: str, unit: str = "") -> str:
    return ", ".join(f"{key}{unit} {n}" for key, n in sorted(Counter(run[name] for run in runs).items()))


def _seconds(runs: list[Row], column: int, role: str = "") -> str:
    """Quantiles over the kills after which there was one; a burst of kills counts each from its own time."""
    values = sorted(
        each[column] for run in runs for each in run["each"]
        if each[1] != "sigstop" and each[column] is not None and role in ("", each[0])
    )  # fmt: skip
    if not values:
        return "—"
    return f"{values[len(values) // 2]:.2f} / {values[min(len(values) - 1, int(0.95 * len(values)))]:.2f} s"
