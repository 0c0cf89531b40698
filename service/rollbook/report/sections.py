"""Sections of the report that explain a run: curves, staleness, off-policy diagnostics, time and cost, recoveries, manifest.

Owns presentation only: numbers are those of the steps' metrics and of the ledger's rows; a bound is the configuration's or an
alert's.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rollbook.core.config import Config

ESS_MIN = 0.3
KL_MAX_NATS = 0.5
"""Bounds of the alerts EssCollapse and KlBlowUp."""

Metrics = Sequence[Mapping[str, Any]]
Panel = tuple[str, dict[str, tuple[Sequence[float], Sequence[float]]]]

CURVES = (
    ("mean reward of valid samples", ("reward_mean",)),
    ("age of the oldest token (versions)", ("lag_head_mean", "lag_head_max")),
    ("versions within one sample", ("lag_span_mean", "lag_span_max")),
    ("effective sample size of the importance weights", ("ess_token_raw_fraction", "ess_token_applied_fraction")),
    ("KL of behaviour from old policy (nats, k3)", ("kl_behaviour_old_k3",)),
    ("largest importance ratio, before truncation", ("rho_max", "rho_p99")),
    ("share of tokens clipped or rejected", ("clip_low_fraction", "clip_high_fraction", "rejected_fraction")),
    ("entropy (nats per token)", ("entropy_mean",)),
    ("gradient norm", ("grad_norm",)),
    ("seconds of a step", ("seconds_step", "seconds_plan_wait", "seconds_publish_before", "seconds_checkpoint_before")),
)
TIMES = (
    ("training", "seconds_step"), ("waiting for a plan", "seconds_plan_wait"), ("fetching samples", "seconds_fetch"),
    ("publishing weights", "seconds_publish_before"), ("writing checkpoints", "seconds_checkpoint_before"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """What a metric should not cross; ``upper``: it is a largest value."""

    name: str
    title: str
    value: float
    upper: bool
    source: str

    def crossed(self, value: float) -> bool:
        return value > self.value if self.upper else value < self.value


def bounds_of(config: Config) -> list[Bound]:
    """The bounds that hold for a run."""
    s, fixed = config.schedule, config.schedule.kind == "fixed"
    lag = s.lag_versions if fixed else s.max_lag_versions
    return [
        Bound("lag_head_max", "age of the oldest trained token (versions)", lag, True,
              "schedule.lag_versions" if fixed else "schedule.max_lag_versions, P5"),
        Bound("ess_token_raw_fraction", "effective sample size", ESS_MIN, False, "alert EssCollapse"),
        Bound("kl_behaviour_old_k3", "KL of behaviour from old policy (nats)", KL_MAX_NATS, True, "alert KlBlowUp"),
        Bound("rho_p99", "99 % quantile of the importance ratio", config.learner.rho_max, True, "learner.rho_max truncates"),
        Bound("grad_norm", "gradient norm", config.learner.grad_clip, True, "learner.grad_clip scales down"),
    ]  # fmt: skip


def finite(metrics: Metrics, name: str) -> list[tuple[int, float]]:
    """(step, value) where the step has a finite one."""
    rows = [(int(m["step"]), m.get(name)) for m in metrics]
    return [(step, float(v)) for step, v in rows if isinstance(v, (int, float)) and math.isfinite(v)]


def curves(config: Config, metrics: Metrics, heldout: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Panels of the report's figure: what the steps stored, each bound as a line, and the held-out accuracy by version."""
    bounds, panels = {b.name: b for b in bounds_of(config)}, []
    for title, names in CURVES:
        lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name in names:
            if points := finite(metrics, name):
                lines[name] = ([p[0] for p in points], [p[1] for p in points])
        if not lines:
            continue
        ends = [metrics[0]["step"], metrics[-1]["step"]]
        for name in names:
            if name in bounds and name != "grad_norm" and name != "rho_p99":
                lines[f"bound {bounds[name].value:g}"] = (ends, [bounds[name].value] * 2)
        panels.append((title, lines))
    accuracy: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for kind in ("greedy", "sampled"):
        points = [(int(r["version"]), float(r[kind])) for r in heldout if isinstance(r.get(kind), (int, float))]
        if points:
            accuracy[f"held-out, {kind}"] = ([p[0] for p in points], [p[1] for p in points])
    return panels[:1] + ([("held-out mean reward by version", accuracy)] if accuracy else []) + panels[1:]


def off_policy(config: Config, metrics: Metrics) -> str:
    """HTML: each bounded diagnostic with its extremes and the steps that crossed the bound."""
    rows = []
    for bound in bounds_of(config):
        points = finite(metrics, bound.name)
        if not points:
            continue
        values = [v for _, v in points]
        crossed = [step for step, v in points if bound.crossed(v)]
        steps = f"{len(crossed)} steps: {_listed(crossed)}" if crossed else "never"
        rows.append((bound.title, f"{values[-1]:.4g}", f"{min(values):.4g}", f"{max(values):.4g}",
                     f"{'at most' if bound.upper else 'at least'} {bound.value:g}", bound.source, steps))  # fmt: skip
    heads = ("diagnostic", "last", "least", "largest", "bound", "from", "crossed")
    return "<h2>Off-policy diagnostics</h2>" + (grid(heads, rows) if rows else "<p>no steps</p>")


def staleness(config: Config, metrics: Metrics) -> str:
    """HTML: trained tokens by lag over the whole run, and what weights they had."""
    tokens: dict[int, float] = {}
    ratio: dict[int, float] = {}
    for m in metrics:
        for name, value in m.items():
            if name.startswith("lag_") and name.endswith("_tokens") and name[4:-7].isdigit() and isinstance(value, (int, float)):
                lag = int(name[4:-7])
                tokens[lag] = tokens.get(lag, 0.0) + value
                ratio[lag] = ratio.get(lag, 0.0) + value * float(m.get(f"lag_{lag}_rho_mean") or 0.0)
    total = sum(tokens.values())
    rows = [
        (lag, f"{n:.0f}", f"{n / total:.1%}", f"{ratio[lag] / n:.4f}" if n else "-") for lag, n in sorted(tokens.items()) if total
    ]
    spans = [v for _, v in finite(metrics, "lag_span_max")]
    said = f"<p>Largest number of versions within one sample, less one: {max(spans):g}.</p>" if spans else ""
    heads = ("lag (versions)", "trained tokens", "share", "mean importance ratio")
    return "<h2>Staleness</h2>" + (grid(heads, rows) if rows else "<p>no steps</p>") + said


def time_and_cost(state: Mapping[str, Any], metrics: Metrics, seconds: Mapping[str, Any] | None, lost: Metrics | None) -> str:
    """HTML: where the learner's and the workers' seconds went, and what an applied sample cost."""
    learner = [(name, sum(v for _, v in finite(metrics, key))) for name, key in TIMES]
    rows: list[tuple[str, str, float]] = [("learner", name, value) for name, value in learner]
    if seconds is not None:
        rows += [("workers", "generating", seconds["generate_s"]), ("workers", "judging", seconds["verify_s"])]
    rows += [("workers", f"failed attempts, {r['status']} ({r['blame']})", r["seconds"]) for r in lost or ()]
    total = sum(value for *_, value in rows)
    shown = [(who, what, f"{value:.1f}", f"{value / total:.1%}" if total else "-") for who, what, value in rows]
    applied = state["slots"]["applied"] + state["slots"]["planned"]
    tokens = sum(v for _, v in finite(metrics, "tokens"))
    ends = [value for _, value in finite(metrics, "finished_at_s")]
    wall = max(ends) - min(ends) if ends else 0.0
    facts: list[tuple[object, ...]] = [("wall time between the first and the last step", f"{wall:.1f} s")]
    gone = state.get("retention", {}).get("groups", 0)
    if applied and not gone:
        facts.append(("process-seconds per trained sample", f"{total / applied:.4g}"))
    if tokens and not gone:
        facts.append(("process-seconds per 1,000 trained tokens", f"{1000 * total / tokens:.4g}"))
    wasted = sum(r["seconds"] for r in lost or ())
    facts.append(("wasted in failed attempts", f"{wasted:.1f} s ({wasted / total:.1%})" if total else "0 s"))
    note = (
        "<p>A worker's seconds are summed over samples, each with its share of its batch; seconds of processes, not of GPUs: "
        "how many GPUs a process has stands in the configuration.</p>"
    )
    if gone:
        note += f"<p>Rows of {gone} groups were let go (retention): workers' seconds are those of the groups that are kept.</p>"
    return "<h2>Time and cost</h2>" + grid(("process", "doing", "seconds", "share"), shown) + grid(("", ""), facts) + note


def recoveries(events: Metrics | None, metrics: Metrics, why_not: str = "") -> str:
    """HTML: restarts, take-overs, forks and repairs, and how long until a step was finished again."""
    if events is None:
        return f"<h2>Recoveries</h2><p>not read: {html.escape(why_not)}</p>"
    ends = sorted(value for _, value in finite(metrics, "finished_at_s"))
    rows = []
    for event in events:
        detail = event["detail"]
        if event["what"] in ("role_acquired", "server_attached") and detail.get("epoch", 1) <= 1:
            continue  # the first holder of a role recovers nothing
        after = next((end - event["at_s"] for end in ends if end > event["at_s"]), None)
        before = next((event["at_s"] - end for end in reversed(ends) if end <= event["at_s"]), None)
        said = "; ".join(f"{name} {value}" for name, value in detail.items() if name != "holder")
        rows.append((utc(event["at_s"]), event["what"], said, _seconds(before), _seconds(after)))
    heads = ("UTC", "what", "details", "since the step before", "until the next step")
    return "<h2>Recoveries</h2>" + (grid(heads, rows) if rows else "<p>none: no role was ever taken over</p>")


def manifest(record: Mapping[str, Any] | None, why_not: str = "") -> str:
    """HTML: what the run was opened with (P12)."""
    if record is None:
        return f"<h2>Manifest</h2><p>not read: {html.escape(why_not)}</p>"
    rows: list[tuple[object, ...]] = [("opened (UTC)", utc(record["opened_at_s"])), ("configuration", record["config_digest"])]
    for name, value in record.items():
        if name in ("opened_at_s", "config_digest", "revisions"):
            continue
        rows += [(f"{name}: {key}", one) for key, one in value.items()] if isinstance(value, dict) else [(name, value)]
    revisions = [(r["revision"], f"from step {r['from_step']}", utc(r["at_s"]), r["digest"][:16]) for r in record["revisions"]]
    return "<h2>Manifest</h2>" + grid(("", ""), rows) + "<h3>Revisions of the configuration</h3>" + grid(
        ("revision", "holds", "accepted (UTC)", "digest"), revisions)  # fmt: skip


def grid(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; every cell is text."""
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def utc(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _listed(steps: Sequence[int], n_max: int = 12) -> str:
    return ", ".join(map(str, steps[:n_max])) + (" …" if len(steps) > n_max else "")
