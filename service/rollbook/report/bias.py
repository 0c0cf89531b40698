"""Drop bias and failures of a run, for a page and for a terminal.

Owns presentation only: counts are the ledger's (``survival``), what they mean is ``core.survival``'s.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rollbook.core.survival import (
    KL_MAX_NATS,
    MARGIN,
    SETTLED_MIN,
    SMOOTHING,
    UNKNOWN_MAX,
    Dimension,
    assess,
)

UNITS = {
    "length": "completion tokens", "duration": "seconds of generating and judging", "task": "kind of task",
    "difficulty": "share of the group's other samples that passed", "version_span": "versions within one sample",
}  # fmt: skip
UNSAFE = "UNSAFE: model-written code ran without a sandbox ({n} worker registrations with sandbox backend 'unsafe')"


def alarm_lines(counts: Mapping[str, Any]) -> list[str]:
    """What a person must see, one line each; empty where nothing is wrong."""
    lines = [UNSAFE.format(n=counts["unsafe_workers"])] if counts["unsafe_workers"] else []
    return lines + [f"DROP BIAS  {alarm}" for dimension in assess(counts) for alarm in dimension.alarms]


def unsafe_banner(counts: Mapping[str, Any]) -> str:
    """A red line for the top of the page, or nothing."""
    if not counts["unsafe_workers"]:
        return ""
    return f'<p class="alarm">{html.escape(UNSAFE.format(n=counts["unsafe_workers"]))}</p>'


def bias_section(counts: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """HTML: alarms, drops by reason, a table per dimension, failures with who is to blame, the breaker."""
    dimensions = assess(counts)
    alarms = [alarm for dimension in dimensions for alarm in dimension.alarms]
    verdict = "".join(f'<p class="alarm">{html.escape(alarm)}</p>' for alarm in alarms) or "<p>no alarm</p>"
    limits = (
        f"<p>Ratios are over slots that are trained or dropped; {counts['waiting']} of {counts['opened']} opened ones are still "
        f"under way. An alarm: at least {SETTLED_MIN} slots, and the 95 % Wilson interval of a bucket ends more than {MARGIN:g} "
        f"below the survival of all known ones, or KL(dispatched || trained), with {SMOOTHING:g} added to each bucket, exceeds "
        f"{KL_MAX_NATS:g} nats plus what chance gives, or more than {UNKNOWN_MAX:.0%} have no known length.</p>"
    )
    dropped = [(kind, n) for kind, n in counts["dropped"].items() if n]
    parts = [
        "<h2>Drop bias</h2>", verdict, limits,
        "<h3>Dropped, by reason</h3>", _grid(("reason", "slots"), dropped or [("none", 0)]),
        *(_dimension(d) for d in dimensions),
        "<h3>Failed attempts</h3>", _failures(counts["failures"]),
        "<h3>Samples whose program or tools failed</h3>", _outcomes(counts["outcomes"]),
        "<h3>Circuit breaker</h3>", _breaker(counts["breaker"], state),
    ]  # fmt: skip
    return "".join(parts)


def survival_panels(counts: Mapping[str, Any]) -> list[tuple[str, list[str], list[float], list[tuple[float, float]]]]:
    """(title, buckets, survival, intervals) of length and duration, known buckets with settled slots."""
    panels = []
    for dimension in assess(counts):
        shown = [b for b in dimension.buckets if b.survival is not None and b.name != "unknown"]
        if dimension.name in ("length", "duration") and shown:
            title = f"survival by {dimension.name} ({UNITS[dimension.name]})"
            panels.append((title, [b.name for b in shown], [b.survival or 0.0 for b in shown], [(b.low, b.high) for b in shown]))
    return panels


def _dimension(d: Dimension) -> str:
    rows = [
        (b.name, b.opened, b.finished, b.trained, b.waiting, b.dropped, _number(b.survival),
         f"{b.low:.3f} to {b.high:.3f}" if b.settled else "-", _number(b.reward_sum / b.trained if b.trained else None))
        for b in d.buckets
    ]  # fmt: skip
    heads = ("bucket", "dispatched", "finished", "trained", "under way", "dropped", "survival", "95 % interval", "trained reward")
    m = d.means
    said = [f"mean reward as trained {_number(m.naive)}, corrected {_number(m.ipw)}, with weights up to {m.cap:g} "
            f"{_number(m.capped)} (effective samples {m.ess:.1f})"]  # fmt: skip
    if d.kl_nats is not None:
        said.append(f"KL(dispatched || trained) {d.kl_nats:.4f} nats")
    if m.unrepaired:
        said.append(f"without a survivor, so beyond correction: {', '.join(m.unrepaired)} ({m.unrepaired_slots} slots)")
    text = html.escape("; ".join(said))
    return f"<h3>By {html.escape(d.name.replace('_', ' '))} ({UNITS[d.name]})</h3>{_grid(heads, rows)}<p>{text}</p>"


def _failures(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [(r["status"], r["sandbox_status"], r["blame"], r["attempts"], r["n_tokens"]) for r in rows]
    return _grid(("status", "sandbox", "to blame", "attempts", "tokens lost"), shown) if shown else "<p>none</p>"


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [(r["status"], r["sandbox_status"], r["blame"], r["samples"]) for r in rows]
    return _grid(("reward status", "sandbox", "to blame", "samples"), shown) if shown else "<p>none</p>"


def _breaker(breaker: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    now = state.get("breaker", {}).get("state", "unknown")
    events = [
        (f"{datetime.fromtimestamp(e['at_s'], UTC):%Y-%m-%d %H:%M:%S}", e["what"].removeprefix("breaker_"),
         "; ".join(f"{name} {value}" for name, value in e.items() if name not in ("what", "at_s")))
        for e in breaker["events"]
    ]  # fmt: skip
    said = f"<p>{html.escape(now)}; opened {breaker['opened']} times</p>"
    return said + (_grid(("UTC", "event", "details"), events) if events else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _grid(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
