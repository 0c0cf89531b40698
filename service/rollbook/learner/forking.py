"""What a replay that ends otherwise than recorded leads to: the run stops, or its lineage forks (R7).

Owns the decision, the measurement it rests on, and the way back to the checkpoint. Never publishes: the recorded plans are
trained again from the checkpoint under the new lineage, by the same loop that trains them after a crash, so a crash at any
point of a fork is recovered like any other.

The difference is measured by training on in memory through every recorded version, because samples behind the fork come
from the last ones, where two histories are farther apart than at the step that first differed.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.core.errors import CheckpointDamaged, ReplayDiverged
from rollbook.core.records import Plan
from rollbook.learner.compare import recorded_weights, relative_difference
from rollbook.learner.publish import publish_dtype, published_weights
from rollbook.learner.resume import restore_newest
from rollbook.observe.failpoints import failpoint

if TYPE_CHECKING:
    from rollbook.learner.loop import Learner

log = logging.getLogger(__name__)

WAY_OUT = (
    "the arithmetic is not bitwise the recorded one: check that machine, thread count, torch version and "
    "learner.deterministic are as before (the checkpoint's MANIFEST.json names them) and start again, or set "
    'learner.on_divergence = "fork" to train the recorded plans anew under a new lineage; `rollbook replay --explain` shows '
    "where the weights begin to differ"
)


class Divergence(Exception):
    """A recorded step was replayed and ended otherwise; never leaves the learner: ``fork`` makes of it what it means."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


def other_weights(step: int, recorded: str, replayed: str) -> str:
    """What to say of a step whose version has another digest."""
    return f"step {step}: recorded weights {recorded[:16]}, replayed weights {replayed[:16]}"


def stopped(message: str) -> ReplayDiverged:
    """The error of a run that may not fork."""
    return ReplayDiverged(f"{message}; {WAY_OUT}")


def fork(learner: Learner, found: Divergence) -> None:
    """Continue from the newest checkpoint in a new lineage, where the configuration says so.

    Raises:
        ReplayDiverged: ``learner.on_divergence`` is ``stop``.
        CheckpointDamaged: the checkpoint to go on from does not load; a new start replays from what does.
    """
    settings = learner.config.learner
    if settings.on_divergence != "fork":
        raise stopped(str(found)) from found
    fork_step = max(learner.checkpoints.steps())
    log.warning("replay differs; measuring by how much: %s", found, extra={"event": "replay_diverged", "step": found.plan.step})
    difference = _rehearse(learner, found.plan)
    failpoint("learner.before_fork")
    learner.role.check()
    line = learner.client.fork_lineage(
        learner.role.term, learner.lineage, fork_step, difference, settings.fork_tolerance, settings.keep_orphans
    )
    failpoint("learner.after_fork")
    log.warning(
        "lineage %d forks from lineage %d at step %d: relative weight difference %s, tolerance %g; %d orphans kept, %d dropped",
        line.number, learner.lineage, fork_step, "unknown" if difference is None else f"{difference:.3g}", line.tolerance,
        line.orphans_kept, line.orphans_dropped, extra={"event": "lineage_forked", "verdict": line.verdict.value},
    )  # fmt: skip
    point = learner.client.resume_point()
    learner.recorded = {version.version: version for version in learner.client.versions(point.lineage)}
    learner.last_planned_step = point.last_planned_step
    if restore_newest(learner.trainer, learner.checkpoints, learner.client, point, learner.recorded) is None:
        raise CheckpointDamaged(f"no checkpoint loads any more to continue lineage {point.lineage} from; start the learner again")
    learner.trainer.note(lineage=point.lineage)


def _rehearse(learner: Learner, plan: Plan) -> float | None:
    """Largest relative difference from the recorded versions, training on from ``plan``; None where no bytes are left.

    It ends early once the tolerance is exceeded. A step that ends otherwise than recorded is infinitely far.
    """
    run_dir, dtype = Path(learner.config.run.dir), publish_dtype(learner.config)
    last = max(learner.recorded)
    largest: float | None = None
    while True:
        version = learner.recorded.get(plan.step)
        weights = recorded_weights(run_dir, version) if version else None
        if weights is not None:
            found = relative_difference(published_weights(learner.trainer.policy, dtype), weights)
            largest = found if largest is None else max(found, largest)
        if plan.step >= last or (largest is not None and largest > learner.config.learner.fork_tolerance):
            return largest
        learner.trainer.note(chain_digest=plan.chain_digest)
        learner.role.check()
        plan = learner.client.read_plan(learner.lineage, plan.step + 1)
        result = learner.train(plan)
        if result is not None and plan.outcome is not None and result.outcome is not plan.outcome:
            return math.inf
