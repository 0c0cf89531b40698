"""Oracle R: an uninterrupted learner over the stored plans gives the recorded digest at every step (R17).

Owns the comparison. Reads plans, payloads and versions; holds no role, writes no row and no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import InvalidRequest
from rollbook.core.ports import LedgerPort
from rollbook.core.records import PlanOutcome
from rollbook.learner.collate import collate
from rollbook.learner.model import load_policy
from rollbook.learner.publish import publish_dtype, published_digest
from rollbook.learner.revisions import read_revision
from rollbook.learner.trainer import Trainer


def replay(config: Config, client: LedgerPort, to_step: int) -> dict[str, Any]:
    """Train every stored plan up to ``to_step`` from the starting weights and compare each version's digest.

    Returns:
        JSON-able: ``equal`` (every recorded version and outcome was met), ``steps``, ``versions_compared``,
        ``versions_missing`` (trained but not recorded), ``first_difference`` (step, recorded, replayed) or None,
        ``version_digest`` and ``state_digest`` after the last step replayed. It ends at the first difference.

    Raises:
        InvalidRequest: ``to_step`` is beyond the last planned step.
    """
    point = client.resume_point()
    if not 0 <= to_step <= point.last_planned_step:
        raise InvalidRequest(f"step {to_step} cannot be replayed: steps 0 to {point.last_planned_step} are planned")
    recorded = {version.version: version.digest for version in client.versions(point.lineage)}
    trainer = Trainer(load_policy(config), config)
    trainer.note(lineage=point.lineage)
    dtype = publish_dtype(config)
    digest = published_digest(trainer.policy, dtype)
    compared, missing, difference = 0, [], None
    for step in range(to_step + 1):
        replayed = f"weights {digest}" if step == 0 else ""
        if step:
            outcome, chain = _step(trainer, config, client, point.lineage, step)
            digest = published_digest(trainer.policy, dtype)
            trainer.note(chain_digest=chain, version_digest=digest)
            replayed = outcome or f"weights {digest}"
        else:
            trainer.note(version_digest=digest)
        if step not in recorded:
            missing.append(step)
            continue
        compared += 1
        if replayed != f"weights {recorded[step]}":
            difference = {"step": step, "recorded": recorded[step], "replayed": replayed}
            break
    return {
        "equal": difference is None,
        "steps": trainer.progress.step,
        "versions_compared": compared,
        "versions_missing": missing,
        "first_difference": difference,
        "version_digest": digest,
        "state_digest": trainer.state_dict().digest(),
    }


def _step(trainer: Trainer, config: Config, client: LedgerPort, lineage: int, step: int) -> tuple[str, str]:
    """Train one stored plan; returns how its outcome differs from the recorded one (or nothing), and its chain digest."""
    plan = client.read_plan(lineage, step)
    used = read_revision(Path(config.run.dir) / "revisions", plan.revision, config)
    trainer.require_same_arithmetic(used)
    trainer.use(used)
    if plan.outcome is PlanOutcome.SKIPPED:
        trainer.skip_step()
        return "", plan.chain_digest
    samples = list(client.payloads(lineage, step))
    lag_max = used.rules().max_lag_versions
    result = trainer.train_step(collate(plan, samples, vocab_size=trainer.policy.vocab_size, max_lag_versions=lag_max))
    differs = plan.outcome is not None and plan.outcome is not result.outcome
    return (f"outcome {result.outcome.value}: {result.reason}" if differs else ""), plan.chain_digest
