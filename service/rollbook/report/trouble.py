"""What is wrong with a run although it goes on, one line a cause: read off ``run_status`` and the run's notes of failures.

Owns which figures count as trouble and how each is said. Never reads a ledger or a file; every line is about the present, so it
goes away by itself ``RECENT_S`` after its cause. The limits are those of the alerts of the same names, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rollbook.observe.failures import CHECKPOINT, DEATH, WEIGHTS, Failure
from rollbook.report.standing import COMPLETE, standing

RECENT_S = 60.0
"""A failure that is older has been got over, or is told in other words by now."""
ESS_MIN = 0.3
VERDICTS_MISSING_MAX = 0.05
COMMIT_S_MAX = 1.0
KINDS = {CHECKPOINT: "checkpoints fail", WEIGHTS: "weights cannot be published or loaded", DEATH: "died"}


def troubles(state: Mapping[str, Any], now_s: float, failures: Iterable[Failure] = ()) -> list[str]:
    """``state``: an answer of ``run_status``; ``now_s``: seconds since the epoch; ``failures``: newest first.

    A run that is complete has none: whatever it met, it got over.
    """
    if "steps" in state and standing(state, now_s).state == COMPLETE:
        return []
    found = _database(state.get("writer") or {}) + _rewards(state.get("breaker") or {}) + _training(state.get("last_step") or {})
    for failure in failures:
        if (age_s := max(0.0, now_s - failure.at_s)) <= RECENT_S:
            times = f"{failure.n} times, newest" if failure.n > 1 else "once,"
            said = f"; its last line: {failure.text}" if failure.what == DEATH else f": {failure.text}"
            found.append(f"{failure.who}: {KINDS[failure.what]} ({failure.reason}), {times} {age_s:.0f} s ago{said}")
    return found


def _database(writer: Mapping[str, Any]) -> list[str]:
    took_s = writer.get("commit_s", 0.0)
    if took_s <= COMMIT_S_MAX:
        return []
    return [f"database: slow, a commit takes up to {took_s:.1f} s and {writer['waiting']} writes wait for the next"]


def _rewards(breaker: Mapping[str, Any]) -> list[str]:
    ratio = breaker.get("ratio", 0.0)
    if ratio <= VERDICTS_MISSING_MAX or breaker.get("last_s", math.inf) > RECENT_S:
        return []
    return [
        f"rewards: {ratio:.0%} of the newest {breaker['window']} rollouts have no verdict, through no fault of the policy's; the "
        f"newest {breaker['last_s']:.0f} s ago: {breaker['last']}"
    ]


def _training(step: Mapping[str, Any]) -> list[str]:
    ess = step.get("ess_token_applied_fraction")
    if not isinstance(ess, (int, float)) or ess >= ESS_MIN:
        return []
    return [
        f"training: the effective sample size of step {step['step']} is {ess:.1%} of its tokens: a few of them carry the whole "
        f"update (learning rate {step.get('lr', math.nan):.2g}, KL {step.get('kl_behaviour_old_k3', math.nan):.2g} nats)"
    ]
