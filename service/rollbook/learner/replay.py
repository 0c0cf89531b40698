"""Oracle R: an uninterrupted learner over the stored plans gives the recorded digest at every step (R17).

Owns the comparison, along the ancestry of the newest lineage. Reads plans, payloads, versions and checkpoints; holds no
role, writes no row and no file. What a difference consists of is told by ``explain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.core.config import Config, config_from_json
from rollbook.core.errors import CheckpointDamaged, InvalidRequest
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Plan, PlanOutcome, PolicyVersion, ResumePoint
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.collate import collate
from rollbook.learner.explain import explain_difference
from rollbook.learner.model import load_policy
from rollbook.learner.publish import publish_dtype, published_digest
from rollbook.learner.resume import compare_with_ledger
from rollbook.learner.revisions import read_revision
from rollbook.learner.trainer import StepResult, Trainer


def replay(
    config: Config, client: LedgerPort, to_step: int, *, explain: bool = False, from_checkpoint: bool = False
) -> dict[str, Any]:
    """Train every stored plan up to ``to_step`` from the starting weights and compare each version's digest.

    Args:
        explain: at a difference, also find the first tensor and element that differ.
        from_checkpoint: begin at the newest checkpoint at or below ``to_step`` instead.

    Returns:
        JSON-able: ``equal`` (every recorded version and outcome was met), ``started_from`` (0, or the checkpoint's step),
        ``steps``, ``versions_compared``, ``versions_missing`` (trained but not recorded), ``first_difference`` (step,
        recorded, replayed) or None, ``version_digest`` and ``state_digest`` after the last step replayed, and with
        ``explain`` an ``explanation`` (None without a difference). It ends at the first difference.

    Raises:
        InvalidRequest: ``to_step`` is beyond the last planned step, or no checkpoint lies at or below it.
        ChainMismatch: the checkpoint begun from is not of the ledger's history.
    """
    point = client.resume_point()
    if not 0 <= to_step <= point.last_planned_step:
        raise InvalidRequest(f"step {to_step} cannot be replayed: steps 0 to {point.last_planned_step} are planned")
    recorded = {version.version: version for version in client.versions(point.lineage)}
    trainer = Trainer(load_policy(config), config)
    first = _restore(config, client, trainer, point, recorded, to_step) if from_checkpoint else 0
    trainer.note(lineage=point.lineage)
    dtype = publish_dtype(config)
    compared, missing, difference, explanation = 0, [], None, None
    for step in range(first, to_step + 1):
        plan, result, replayed = None, None, ""
        if step > first:
            plan = client.read_plan(point.lineage, step)
            result = _train(trainer, config, client, plan)
            replayed = _other_outcome(plan, result)
            trainer.note(chain_digest=plan.chain_digest)
        digest = published_digest(trainer.policy, dtype)
        trainer.note(version_digest=digest)
        if step not in recorded:
            missing.append(step)
            continue
        compared += 1
        replayed = replayed or f"weights {digest}"
        if replayed != f"weights {recorded[step].digest}":
            difference = {"step": step, "recorded": recorded[step].digest, "replayed": replayed}
            if explain:
                explanation = explain_difference(config, client, trainer, point, recorded, plan, result)
            break
    return {
        "equal": difference is None,
        "started_from": first,
        "steps": trainer.progress.step,
        "versions_compared": compared,
        "versions_missing": missing,
        "first_difference": difference,
        "version_digest": digest,
        "state_digest": trainer.state_dict().digest(),
    } | ({"explanation": explanation} if explain else {})  # fmt: skip


def _restore(
    config: Config, client: LedgerPort, trainer: Trainer, point: ResumePoint, recorded: dict[int, PolicyVersion], to_step: int
) -> int:
    """Load the newest checkpoint at or below ``to_step`` that verifies; returns its step."""
    files, damage = CheckpointFiles(Path(config.run.dir) / "checkpoints"), ""
    for checkpoint in point.checkpoints:
        if checkpoint.step > to_step:
            continue
        try:
            state = files.read(checkpoint)
        except CheckpointDamaged as error:
            damage = f" ({error})"
            continue
        trainer.use(config_from_json(state.values["config_json"]))
        trainer.load_state_dict(state)
        compare_with_ledger(trainer, checkpoint, client, point, recorded)
        return checkpoint.step
    raise InvalidRequest(
        f"no checkpoint at or below step {to_step} can be loaded{damage}; committed are those of steps "
        f"{_listed([c.step for c in point.checkpoints])}. Without --from-checkpoint the replay begins at the starting weights"
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "none"


def _train(trainer: Trainer, config: Config, client: LedgerPort, plan: Plan) -> StepResult | None:
    """Train one stored plan; None for a step that is skipped because it is recorded so."""
    used = read_revision(Path(config.run.dir) / "revisions", plan.revision, config)
    trainer.require_same_arithmetic(used)
    trainer.use(used)
    if PlanOutcome.SKIPPED in (plan.outcome, plan.obeys):
        trainer.skip_step()
        return None
    samples = list(client.payloads(plan.lineage, plan.step))
    lag_max = used.rules().max_lag_versions
    return trainer.train_step(collate(plan, samples, vocab_size=trainer.policy.vocab_size, max_lag_versions=lag_max))


def _other_outcome(plan: Plan, result: StepResult | None) -> str:
    """How a step ended that is recorded to have ended otherwise; empty when it is not."""
    if result is None or plan.outcome is None or plan.outcome is result.outcome:
        return ""
    return f"outcome {result.outcome.value}: {result.reason}"
