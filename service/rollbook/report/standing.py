"""What a run does now and what it waits for, in one line: read off ``run_status``, the same for the page and the terminal.

Owns the order in which causes are looked for: the one that a person can do something about comes first. Never reads a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

COMPLETE = "complete"
SILENT_S = 60.0
"""A worker that has not been heard of for this long does no work, where ``run_status`` does not say after how long its leases go
back."""


@dataclass(frozen=True, slots=True)
class Standing:
    """``state``: complete, paused, broken, draining, stuck or running; ``waits_for``: what the next step needs."""

    state: str
    waits_for: str
    since_step_s: float | None
    """Seconds since a step was finished; None before the first."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def standing(state: Mapping[str, Any], now_s: float) -> Standing:
    """``state``: an answer of ``run_status``; ``now_s``: the ledger's time, seconds since the epoch."""
    last = state.get("last_step") or {}
    since = max(0.0, now_s - last["finished_at_s"]) if last else None
    kind, why = _cause(state)
    return Standing(kind, why, since)


def _cause(state: Mapping[str, Any]) -> tuple[str, str]:
    steps, breaker = state["steps"], state.get("breaker") or {}
    finished = steps["trained"] + steps["skipped"]
    if steps["configured"] and finished >= steps["configured"] and steps["checkpoint"] >= steps["configured"]:
        return COMPLETE, "nothing: every step is made and checkpointed"
    if state.get("paused"):
        return "paused", f"an operator: {state['paused']}"
    if breaker.get("state") == "open":
        last = f"; last: {breaker['last']}" if breaker.get("last") else ""
        return "broken", f"infrastructure to work again: the circuit breaker is open, only probes are leased{last}"
    if state.get("draining"):
        return "draining", "a restart: workers were told to stop leasing"
    return _who(state, finished)


def _who(state: Mapping[str, Any], finished: int) -> tuple[str, str]:
    steps, slots = state["steps"], state["slots"]
    held = {role["role"]: role["expires_in_s"] for role in state["roles"]}
    if held.get("learner", -1.0) <= 0:
        return "stuck", "a learner: nobody holds its role" + _ago(held.get("learner"))
    if steps["planned"] > finished:
        return "running", f"the learner: step {steps['planned']} is planned and not finished"
    silent_s = (state.get("limits") or {}).get("silent_s", SILENT_S)
    live = [worker for worker in state["workers"] if worker["beat_age_s"] <= silent_s]
    if not live:
        silent = len(state["workers"])
        said = f"rollout workers: none was heard of in the last {silent_s:.0f} s"
        return "stuck", said + (f" ({silent} silent)" if silent else "")
    if state.get("head") and not slots["leased"] and slots["pending"] and all(worker["version"] is None for worker in live):
        return "running", f"rollout workers to load version {state['head']['version']}: none of {len(live)} has any"
    if slots["leased"]:
        head = (state.get("head") or {}).get("version", 0)
        behind = [head - w["version"] for w in live if w["version"] is not None]
        late = f"; the freshest worker is {min(behind)} versions behind version {head}" if min(behind, default=0) > 1 else ""
        n_slots, n_workers = slots["leased"], max(1, sum(1 for worker in live if worker["leases"]))
        return "running", f"rollouts: {_n(n_slots, 'slot')} with {_n(n_workers, 'worker')}{late}"
    if slots["pending"]:
        head = (state.get("head") or {}).get("version", 0)
        newest = max((w["version"] for w in live if w["version"] is not None), default=head)
        late = f"; the newest weights that a worker has are those of version {newest} of {head}" if newest < head else ""
        return "running", f"a worker to lease one of {_n(slots['pending'], 'waiting slot')}{late}"
    if held.get("feeder", -1.0) <= 0:
        return "stuck", "a feeder: no slot waits and nobody holds its role" + _ago(held.get("feeder"))
    return "running", "the feeder: no slot waits"


def _n(n: int, name: str) -> str:
    return f"{n} {name}" if n == 1 else f"{n} {name}s"


def _ago(expires_in_s: float | None) -> str:
    return "" if expires_in_s is None else f" since {-expires_in_s:.0f} s"
