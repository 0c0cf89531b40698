"""How many steps lie between two checkpoints: as configured, or where saving and replaying together cost least.

Owns the arithmetic, what is measured for it, and the sentence that shows it. Never saves and never touches a weight: a
checkpoint decides how much is replayed after a crash, not what is computed (P4). A restart measures anew.

A crash loses no rollout, because stored plans are trained again over stored samples: what it costs is the learner's
devices for the time of the replay. With ``save_s`` for a checkpoint, ``replay_step_s`` to train a stored plan, ``step_s``
from one step to the next in the running service (waiting for rollouts included) and a mean time ``mtbf_s`` between
crashes, checkpoints every x seconds of training cost save_s / (x step_s / replay_step_s) of every second, and replays
x / (2 mtbf_s). That is the classical problem with a mean time between failures of mtbf_s x replay_step_s / step_s, counted
in seconds of training.

Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

AUTO = "auto"
FIRST_STEPS = 5
"""Interval until one checkpoint and three steps are measured: small, because what a crash costs is not known yet."""
STEPS_MAX = 1000
"""Longest interval chosen: more plans than that are not left to one replay."""
MEASURED_STEPS_MIN = 3
WEIGHT = 0.3
"""Of the newest measurement in a running mean."""


def young_daly_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least time to saving and to lost work together.

    Daly's higher-order estimate; its leading term is Young's sqrt(2 save_s mtbf_s). For save_s >= 2 mtbf_s it is mtbf_s:
    a checkpoint then hardly ever ends before the next failure.

    Args:
        save_s: seconds the work stands still for one checkpoint, >= 0.
        mtbf_s: mean seconds between failures, > 0.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - save_s


@dataclass(frozen=True)
class Interval:
    """A decision with every term it was made from; a time that was not measured yet is None."""

    steps: int
    """Steps between checkpoints."""
    rule: str
    """``configured``, ``first`` (nothing is measured yet) or ``young_daly``."""
    save_s: float | None
    checkpoint_bytes: int
    step_s: float | None
    replay_step_s: float | None
    mtbf_s: float
    devices: int
    """GPUs the learner trains on; 1 for a CPU process."""
    work_s: float | None = None
    """Young/Daly seconds of training between checkpoints, before it became whole steps within bounds."""

    @property
    def lost_device_s(self) -> float | None:
        """Device-seconds that a crash right before the next checkpoint costs in replay; on average it is half of it."""
        return None if self.replay_step_s is None else self.steps * self.replay_step_s * self.devices

    def to_values(self) -> dict[str, Any]:
        """Every term for a log line or step metrics; names begin with ``checkpoint_interval_``."""
        terms = asdict(self) | {"lost_device_s": self.lost_device_s}
        return {f"checkpoint_interval_{name}": value for name, value in terms.items()}

    def sentence(self) -> str:
        """The arithmetic for a person."""
        return interval_sentence(self.to_values())


def interval_sentence(values: Mapping[str, Any]) -> str:
    """The arithmetic of a stored decision (``Interval.to_values``) in one line; empty when there is none."""
    prefix = "checkpoint_interval_"
    v = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    if not v:
        return ""
    steps = v["steps"]
    parts = [f"every {steps} step{'s' if steps != 1 else ''} ({v['rule'].replace('_', '/')})"]
    if v["rule"] == "young_daly":
        parts.append(
            f"save {v['save_s']:.3g} s for {v['checkpoint_bytes'] / 2**20:.3g} MiB, step {v['step_s']:.3g} s, replayed in "
            f"{v['replay_step_s']:.3g} s, MTBF {v['mtbf_s']:.3g} s: {v['work_s']:.3g} s of training between checkpoints"
        )
    if v["lost_device_s"] is not None:
        parts.append(
            f"a crash costs at most {steps} x {v['replay_step_s']:.3g} s x {v['devices']} "
            f"device{'s' if v['devices'] > 1 else ''} = {v['lost_device_s']:.3g} "
            f"device-seconds of replay, {v['lost_device_s'] / 2:.3g} on average, and no generation"
        )
    return "; ".join(parts)


def decide(
    every_steps: int | str, *, save_s: float | None, checkpoint_bytes: int, step_s: float | None, replay_step_s: float | None,
    mtbf_s: float, devices: int,
) -> Interval:  # fmt: skip
    """The interval in force now; an integer stands as it is, ``"auto"`` becomes the nearest number of steps within bounds."""
    terms: dict[str, Any] = {
        "save_s": save_s, "checkpoint_bytes": checkpoint_bytes, "step_s": step_s, "replay_step_s": replay_step_s,
        "mtbf_s": mtbf_s, "devices": devices,
    }  # fmt: skip
    if isinstance(every_steps, int):
        return Interval(every_steps, "configured", **terms)
    if save_s is None or step_s is None or replay_step_s is None or replay_step_s <= 0:
        return Interval(FIRST_STEPS, "first", **terms)
    work_s = young_daly_s(save_s, mtbf_s * min(1.0, replay_step_s / step_s) if step_s > 0 else mtbf_s)
    return Interval(max(1, min(round(work_s / replay_step_s), STEPS_MAX)), "young_daly", **terms, work_s=work_s)


class Cadence:
    """When the next checkpoint is due, from what this process has measured so far."""

    def __init__(self, every_steps: int | str, mtbf_s: float, devices: int = 1) -> None:
        self._every_steps, self._mtbf_s, self._devices = every_steps, mtbf_s, devices
        self._save_s: float | None = None
        self._step_s: float | None = None
        self._replay_s: float | None = None
        self._bytes = 0
        self._n_steps = 0
        self.interval = self._decide()

    def due(self, step: int, newest: int) -> bool:
        """Whether ``step`` gets a checkpoint when ``newest`` has the last one.

        A configured interval saves at its multiples, so that a run interrupted anywhere saves at the same steps.
        """
        if self.interval.rule == "configured":
            return step % self.interval.steps == 0
        return step - newest >= self.interval.steps

    def stepped(self, step_s: float, replay_step_s: float) -> None:
        """A step took ``step_s`` seconds in all, of which a replay would take ``replay_step_s`` again."""
        self._n_steps += 1
        self._step_s, self._replay_s = _mean(self._step_s, step_s), _mean(self._replay_s, replay_step_s)

    def saved(self, step: int, seconds: float, n_bytes: int) -> None:
        """A checkpoint of ``n_bytes`` was committed in ``seconds``; the interval is decided anew and logged with its terms.

        The one of step 0 holds no moments of the optimizer and says nothing about the others.
        """
        if step > 0:
            self._save_s, self._bytes = _mean(self._save_s, seconds), n_bytes
        self.interval = self._decide()
        log.info("checkpoints %s", self.interval.sentence(), extra={"event": "checkpoint_interval"} | self.interval.to_values())

    def _decide(self) -> Interval:
        is_measured = self._n_steps >= MEASURED_STEPS_MIN
        return decide(
            self._every_steps, save_s=self._save_s, checkpoint_bytes=self._bytes, step_s=self._step_s if is_measured else None,
            replay_step_s=self._replay_s if is_measured else None, mtbf_s=self._mtbf_s, devices=self._devices,
        )  # fmt: skip


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
