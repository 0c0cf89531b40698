"""What a disturbed run came to: judged from its database alone, by statements and digests the product has no part in.

Owns the numbers of the table and the list of what is wrong. Shares the checks of ``oracle``; adds what needs the task order, the
length of lags, and the times of faults. A run that still goes on is judged over the steps whose version is published.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle
from drills.faults import NODE_LOST, Fault
from drills.runs import Run

NEAR = 20
"""Steps before a fault that say what a step takes at that time."""
DURABLE = ("accepted", "replayed")
REPLAYED_MAX = 200
"""Longest run whose versions are all rebuilt; a longer one is compared digest by digest along its plans alone."""


@dataclass
class Verdict:
    """Numbers for the table, and sentences about what does not hold."""

    numbers: dict[str, Any]
    findings: list[str]
    tables: dict[str, list[oracle.Row]] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Window:
    """The part of a run in which faults were sent, seconds since the epoch."""

    calm_from: float
    """Since when steps were made at the run's own pace."""
    begin: float
    end: float


def judge(run: Run, faults: Sequence[Fault], window: Window, *, finished: bool, seen: dict[oracle.Key, str] | None = None,
          replay_max: int = REPLAYED_MAX, observed: Sequence[tuple[float, int, int]] | None = None) -> Verdict:  # fmt: skip
    """Every number and every finding.

    Args:
        finished: the run has ended by itself; else it is judged as far as its versions are published.
        observed: (time, steps, samples) to time by, where the ledger's own clock was part of the disturbance.
        seen: samples (to payload digests) that a live run's database showed to the drill: durable, so owed at the end.
    """
    if run.url.startswith("sqlite:///") and not Path(run.url.removeprefix("sqlite:///")).exists():
        return Verdict({}, ["run: there is no ledger"])
    tables = oracle.read_ledger(run.url, run.id)
    if not tables["run"]:
        return Verdict({}, ["run: the ledger holds none"])
    lineages = {row["lineage"] for row in tables["lineage"]}
    if len(lineages) > 1:
        return Verdict({}, [f"run: it has lineages {sorted(lineages)}; the drill's oracle judges a run of one"], tables)
    if not finished:
        tables = published_part(tables)
    steps = max((row["step"] for row in tables["plan_outcome"]), default=0)
    acks = run.acks()
    found = _findings(run, tables, steps, acks or [], finished)
    lost = [key for key, digest in (seen or {}).items() if _digest_of(tables, key) != digest]
    found += [f"acknowledged: sample {key} was in the database and is not as it was" for key in lost]
    skipped = skipped_prompts(tables)
    found += [f"prompts: {detail}" for detail in skipped[:5]]
    code, text = run.command("audit")
    if code != 0 or "audit: clean" not in text:
        found.append(f"audit: exit code {code}\n{text[-1500:]}")
    rebuilt = "not tried"
    if finished and steps <= replay_max:
        rebuilt, wrong = _rebuilt(run, steps)
        found += wrong
    numbers = _numbers(tables, run, faults, found, len(skipped)) | {"versions rebuilt": rebuilt}
    owed = {tuple(a["key"]) for a in acks if a["outcome"] in DURABLE} if acks is not None else set(seen or {})
    told = "as workers were told" if acks is not None else "as the database showed them"
    numbers["acknowledged samples"] = f"{len(owed)} ({told})"
    if observed is None:
        rollouts = sorted(r["accepted_at_us"] / 1e6 for r in tables["sample"])
        ended = sorted(r["finished_at_us"] / 1e6 for r in tables["plan_outcome"])
    else:
        rollouts = [b[0] for a, b in zip(observed, observed[1:], strict=False) if b[2] > a[2]]
        ended = [b[0] for a, b in zip(observed, observed[1:], strict=False) for _ in range(b[1] - a[1])]
    measure(faults, tables, rollouts, ended)
    return Verdict(numbers | timings(faults) | progress(ended, window) | lost_time(faults, ended, window), found, tables)


def published_part(tables: dict[str, list[oracle.Row]]) -> dict[str, list[oracle.Row]]:
    """Rows of a live run without the steps whose version is not published yet."""
    last = max((row["version"] for row in tables["policy_version"]), default=0)
    cut = {name: [r for r in tables[name] if r["step"] <= last] for name in ("plan", "plan_item", "plan_outcome")}
    return tables | cut


def _findings(run: Run, tables: dict[str, list[oracle.Row]], steps: int, acks: list[oracle.Row], finished: bool) -> list[str]:
    found = oracle.findings(tables, run.dir if finished else None, steps=steps, acks=acks)
    if not run.config.model.path.endswith("sort-digits"):  # the oracle judges rewards of the byte model alone
        found = [f for f in found if not f.startswith("rewards: ")]
    return found


def _digest_of(tables: dict[str, list[oracle.Row]], key: oracle.Key) -> str:
    return next((r["payload_digest"] for r in tables["sample"] if oracle.key_of(r) == key), "")


def skipped_prompts(tables: dict[str, list[oracle.Row]]) -> list[str]:
    """Groups that are not the next task of the stream: its order is a documented function of seed, epoch and size."""
    cursors = {row["stream"]: json.loads(row["state_json"]) for row in tables["cursor"]}
    state = cursors.get("train", {})
    if not state.get("size"):
        return []
    seed, size = state["seed"], state["size"]
    order: dict[int, list[int]] = {}
    fed = sorted((r for r in tables["prompt_group"] if r["refills"] is None), key=lambda r: r["ordinal"])
    wrong = []
    for number, row in enumerate(fed):
        origin = json.loads(row["task_json"]).get("task_origin", {})
        epoch, position = divmod(number, size)
        if epoch not in order:
            order[epoch] = _order(seed, epoch, size)
        if (origin.get("epoch"), origin.get("task_index")) != (epoch, order[epoch][position]):
            wrong.append(f"group {row['ordinal']} holds task {origin}, due was {order[epoch][position]} of epoch {epoch}")
    return wrong


def _order(seed: int, epoch: int, size: int) -> list[int]:
    key = oracle.sha("task order", seed, epoch).encode()
    return sorted(range(size), key=lambda i: hashlib.sha256(key + i.to_bytes(8, "little")).digest())


def _rebuilt(run: Run, steps: int) -> tuple[str, list[str]]:
    code, text = run.command("replay")
    result = json.loads(text[text.index("{") :]) if code == 0 and "{" in text else {}
    if code != 0 or not result.get("equal") or (result["steps"], result["versions_compared"]) != (steps, steps + 1):
        return "NO", [f"replay: exit code {code}\n{text[-1500:]}"]
    return f"all {steps + 1} from the stored plans, bit for bit", []


def _numbers(tables: dict[str, list[oracle.Row]], run: Run, faults: Sequence[Fault], found: Sequence[str], skipped: int) -> dict:
    kinds = Counter(fault.role if fault.kind in ("sigkill", "sigstop") else f"{fault.role} {fault.kind}" for fault in faults)
    granted: Counter[oracle.Key] = Counter()
    for event in tables["event"]:
        if event["kind"] == "lease_granted":
            granted[oracle.key_of(event)] += 1
    again = sum(n - 1 for n in granted.values())
    verdicts = Counter(row["kind"] for row in tables["verdict"])
    return {
        "faults injected": len(faults),
        "of these": ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())) or "none",
        "processes hit": sum(fault.n_processes for fault in faults),
        "acknowledged samples lost": sum(f.startswith("acknowledged: ") for f in found),
        "trained twice": sum(n > 1 for n in Counter((r["ordinal"], r["sibling"]) for r in tables["plan_item"]).values()),
        "prompts skipped": skipped,
        "stale tokens trained": stale_tokens(tables),
        "fenced writes": fenced_writes(tables, run),
        "samples": len(tables["sample"]),
        "rollouts without a sample": ", ".join(f"{kind} {n}" for kind, n in sorted(verdicts.items())) or "none",
        "generation work repeated": f"{again} of {sum(granted.values())} leases ({again / max(1, sum(granted.values())):.1%})",
    }


def stale_tokens(tables: dict[str, list[oracle.Row]]) -> int:
    """Trained tokens sampled by a version older than the bound allows at their step."""
    bound = {r["revision"]: r["max_lag_versions"] for r in tables["config_revision"]}
    payloads = {oracle.key_of(r): r for r in tables["payload"]}
    revision = {r["step"]: r["revision"] for r in tables["plan"]}
    stale = 0
    for item in tables["plan_item"]:
        payload = payloads.get(oracle.key_of(item))
        if payload is not None and item["step"] in revision:
            oldest = item["step"] - 1 - bound[revision[item["step"]]]
            data = oracle.all_versions(payload)
            stale += sum(v < oldest for v in struct.unpack(f"<{len(data) // 4}i", data))
    return stale


_NODE_LOST = re.compile(r"node lost: |its host on node ")
_LOST = re.compile(r"event=(role_lost|ledger_fenced)\b")


def fenced_writes(tables: dict[str, list[oracle.Row]], run: Run) -> str:
    """Refused, and got through: rows of an older epoch behind a newer one."""
    refused = sum(event["kind"] == "submit_fenced" for event in tables["event"])
    ended = sum(len(_LOST.findall(path.read_text(errors="replace"))) for path in sorted((run.dir / "logs").glob("*.log")))
    through = 0
    for table, column in (("plan", "step"), ("plan_outcome", "step"), ("policy_version", "version")):
        epochs = [row["epoch"] for row in sorted(tables[table], key=lambda r, c=column: r[c])]
        through += sum(b < a for a, b in zip(epochs, epochs[1:], strict=False))
    return f"{refused} submissions refused, {ended} terms lost, {through} got through"


def measure(
    faults: Sequence[Fault], tables: dict[str, list[oracle.Row]], rollouts: Sequence[float], steps: Sequence[float]
) -> None:
    """Seconds from each fault to the next accepted sample and to the next finished step."""
    reactions: dict[str, list[float]] = defaultdict(list)
    for event in tables["event"]:
        if event["kind"] == "lease_expired":
            reactions[event["incarnation"]].append(event["at_us"] / 1e6)
    for fault in faults:
        if fault.new_rollout_s is None:
            fault.new_rollout_s = _after(fault.at, rollouts)
        if fault.new_step_s is None:
            fault.new_step_s = _after(fault.at, steps)
        if fault.detected_s is None and fault.kind == "sigstop":
            known = [at for incarnation in fault.victims.values() for at in reactions.get(incarnation, [])]
            fault.detected_s = _after(fault.at, sorted(known))


def _after(at: float, times: Iterable[float]) -> float | None:
    return next((round(t - at, 3) for t in times if t > at), None)


def timings(faults: Sequence[Fault]) -> dict[str, str]:
    """p50 / p95 / max of what was measured of each fault."""
    return {
        "detection time": quantiles([f.detected_s for f in faults]),
        "time to first new rollout": quantiles([f.new_rollout_s for f in faults]),
        "time to first new step": quantiles([f.new_step_s for f in faults]),
    }


def quantiles(values: Sequence[float | None]) -> str:
    """``p50 / p95 / max s`` of those that are known."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return "—"
    p95 = known[min(len(known) - 1, int(0.95 * len(known)))]
    return f"{statistics.median(known):.2f} / {p95:.2f} / {known[-1]:.2f} s (p50 / p95 / max of {len(known)})"


def progress(times: Sequence[float], window: Window) -> dict[str, Any]:
    """ETTR (steps kept × median unbroken step time / wall time) of the disturbed part, the median from the part before it."""
    calm = [t for t in times if window.calm_from <= t <= window.begin]
    gaps = [b - a for a, b in zip(calm, calm[1:], strict=False)]
    kept = [t for t in times if window.begin < t <= window.end]
    wall = window.end - window.begin
    if len(gaps) < 3 or wall <= 0:
        return {"ETTR": "— (no unbroken stretch to compare with)", "ettr": None, "steps": len(times)}
    median = statistics.median(gaps)
    unbroken = len(gaps) * median / (calm[-1] - calm[0])
    ettr = len(kept) * median / wall
    return {
        "ETTR": f"{ettr:.3f} ({len(kept)} steps kept in {wall:.0f} s; median step {median:.3f} s of {len(gaps)} unbroken ones of "
        f"this run, whose own ETTR is {unbroken:.3f})",
        "ettr": round(ettr, 4), "ettr_unbroken": round(unbroken, 4), "steps": len(times), "step_s_unbroken": round(median, 4),
        "wall_s": round(wall, 1),
    }  # fmt: skip


def lost_time(faults: Sequence[Fault], times: Sequence[float], window: Window) -> dict[str, Any]:
    """Wall time that steps took longer around faults than the ``NEAR`` steps before did, as a share of the window.

    Where the machine is shared and its pace changes within the run, ETTR says how much slower it became; this says what the
    faults cost. Of each fault: from the last step before it to the first step after it, less the median of the steps before.
    """
    lost, until = 0.0, 0.0
    for fault in sorted(faults, key=lambda f: f.at):
        before = [t for t in times if t <= fault.at][-NEAR - 1 :]
        after = next((t for t in times if t > fault.at), window.end)
        if len(before) < 3 or after <= until or fault.at > window.end:
            continue
        usual = statistics.median(b - a for a, b in zip(before, before[1:], strict=False))
        lost += max(0.0, after - max(before[-1], until) - usual)
        until = after
    wall = window.end - window.begin
    if wall <= 0 or not faults:
        return {}
    share = lost / wall
    return {"time lost to faults": f"{lost:.1f} s of {wall:.0f} s ({share:.1%})", "lost_share": round(share, 4)}


def unexpected_deaths(text: str, faults: Sequence[Fault], allowed: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Deaths the supervisor told of that no fault may have cost. ``allowed`` ones may happen any number of times.

    What it guesses behind a semicolon, as that the kernel ran out of memory, is no part of how a process died.
    """
    told = re.findall(r"(\S+) died \((.*?)\); ", text)
    seen = Counter((name.partition("-")[0], NODE_LOST if _NODE_LOST.match(how) else how.partition("; ")[0]) for name, how in told)
    may = Counter(cost for fault in faults for cost in fault.may_cost)
    return [
        f"deaths: {role}, {how}, {n - may[(role, how)]} times more than was sent"
        for (role, how), n in seen.items()
        if n > may[(role, how)] and (role, how) not in allowed
    ]

