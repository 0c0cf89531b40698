"""From a resume point to a trainer that goes on: load, compare with the ledger, fall back.

Owns the order in which checkpoints are tried and every comparison between a loaded state and the ledger. Never trains
and never restores the cursor: the cursor row is the only truth, the checkpoint's copy is compared with it (R10).
"""

from __future__ import annotations

import logging

from rollbook.core.config import config_from_json
from rollbook.core.errors import ChainMismatch, CheckpointDamaged, LedgerBehind
from rollbook.core.ports import LedgerPort
from rollbook.core.records import TASK_STREAM, Checkpoint, Cursor, PolicyVersion, ResumePoint
from rollbook.learner.checkpoint import Checkpoints, library_versions
from rollbook.learner.history import is_behind
from rollbook.learner.publish import publish_dtype, published_digest
from rollbook.learner.state import Progress
from rollbook.learner.trainer import Trainer

log = logging.getLogger(__name__)


def restore_newest(
    trainer: Trainer, checkpoints: Checkpoints, client: LedgerPort, point: ResumePoint, versions: dict[int, PolicyVersion]
) -> int | None:
    """Load the newest committed checkpoint that verifies; returns its step, or None when there is none to load.

    A damaged one is marked corrupt and the one before it is tried. When none is left the trainer is as it was given, at
    step 0 with the starting weights, from which every stored plan can be replayed.

    Raises:
        ChainMismatch: a checkpoint loads but belongs to another history than the ledger's.
        CheckpointDamaged: its files are whole, but what they hold does not fit this model or contradicts itself.
    """
    for checkpoint in list(checkpoints.committed):
        try:
            state = checkpoints.files.read(checkpoint)
        except CheckpointDamaged as damage:
            checkpoints.mark_corrupt(checkpoint, damage)
            continue
        trainer.use(config_from_json(state.values["config_json"]))
        trainer.load_state_dict(state)
        compare_with_ledger(trainer, checkpoint, client, point, versions)
        _compare_libraries(checkpoints, checkpoint)
        return checkpoint.step
    if point.checkpoints:
        log.error(
            "none of %d checkpoints loads; starting from the model directory and replaying every plan", len(point.checkpoints),
            extra={"event": "checkpoints_all_corrupt"},
        )  # fmt: skip
    return None


def compare_with_ledger(
    trainer: Trainer, checkpoint: Checkpoint, client: LedgerPort, point: ResumePoint, versions: dict[int, PolicyVersion]
) -> None:
    """Refuse a loaded state that is not the ledger's own history.

    Raises:
        ChainMismatch: naming what differs.
    """
    progress = trainer.progress
    stated = (checkpoint.lineage, checkpoint.step, checkpoint.chain_digest)
    if (progress.lineage, progress.step, progress.chain_digest) != stated:
        raise ChainMismatch(f"checkpoint {checkpoint.dir_name} holds step {progress.step} of chain {progress.chain_digest[:12]}")
    chain = point.chain_digests.get(progress.step)
    if chain is not None and chain != progress.chain_digest:
        raise ChainMismatch(
            f"at step {progress.step} the checkpoint's chain is {progress.chain_digest[:12]}, the ledger's {chain[:12]}: the "
            "ledger and the checkpoints are of different runs; restore both from the same time"
        )
    digest = published_digest(trainer.policy, publish_dtype(trainer.config))
    if digest != progress.version_digest:
        raise ChainMismatch(f"checkpoint {checkpoint.dir_name}: weights {digest[:12]}, stated {progress.version_digest[:12]}")
    version = versions.get(progress.version)
    if version is not None and version.digest != digest:
        raise ChainMismatch(f"checkpoint {checkpoint.dir_name}: weights {digest[:12]}, published were {version.digest[:12]}")
    compare_cursor(progress, client.cursor(TASK_STREAM))


def compare_cursor(progress: Progress, ledger: Cursor) -> None:
    """Refuse a ledger whose task stream stands before the checkpoint's copy of it.

    Raises:
        LedgerBehind: the ledger is older than the checkpoint.
    """
    copy = progress.cursor
    if copy is not None and is_behind(ledger, copy):
        raise LedgerBehind(
            f"the task stream stands at ordinal {ledger.next_ordinal}, but the checkpoint of step {progress.step} saw it at "
            f"{copy.next_ordinal}: the ledger was restored from an older copy than the checkpoints; restore the newer one, or "
            "see what going on from here would mean: `rollbook repair RUN --discard-newer-checkpoints`"
        )


def _compare_libraries(checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
    then, now = checkpoints.files.manifest(checkpoint.dir_name)["libraries"], library_versions()
    changed = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if changed:
        log.warning(
            "resuming with other versions: %s; replayed steps may differ in bits", ", ".join(changed),
            extra={"event": "libraries_changed"},
        )  # fmt: skip

