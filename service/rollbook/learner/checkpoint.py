"""Checkpoints: complete, hashed directories first, the ledger row last.

Owns the directories under ``checkpoints/`` and their life: written under a temporary name, renamed when whole, committed
by a row, adopted when only the row is missing, deleted when enough newer ones exist. Never uses pickle and never decides
when to save. Upholds P4: the newest committed checkpoint loads, or is found damaged and its predecessor loads.

Crash points and what a start finds: a temporary directory (removed); a complete directory without a row (verified
against hashes and the ledger's chain, then committed); rows being deleted (their directories are removed).
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
import transformers
from safetensors.torch import load_file

from rollbook.core.errors import CheckpointDamaged, Conflict, NotFound
from rollbook.core.host import fsync_directory, host
from rollbook.core.idempotency import genesis_digest
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Checkpoint, CheckpointState, ResumePoint, RoleTerm
from rollbook.learner import rng
from rollbook.learner.durable import (
    make_directory,
    promote,
    remove_directory,
    save_tensors,
    write_durably,
)
from rollbook.learner.model_dir import sha256_of
from rollbook.learner.showing import timed_checkpoint
from rollbook.learner.state import SECTIONS, TrainingState
from rollbook.observe import progress
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_VALUES = "state.json"
_FORMAT = 1
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_WRITTEN = re.compile(r"(?:tmp\.(?:removed\.)?)?\d+\.\d+\.(\d+)")


def library_versions() -> dict[str, str]:
    """Versions of what computes and stores, for the manifest (P12)."""
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": numpy.__version__,
        "device": device,
    }


class CheckpointFiles:
    """The directories, without the ledger."""

    def __init__(self, root: Path) -> None:
        """Use ``root``, created when absent."""
        self.root = root
        make_directory(root)

    def write(self, state: TrainingState, epoch: int) -> Checkpoint:
        """Make the state durable under ``<lineage>.<step>.<epoch>`` and return the row that would commit it.

        Raises:
            OSError: naming the file that could not be written; nothing of this checkpoint is left then.
        """
        progress = state.progress
        name = f"{progress.lineage}.{progress.step}.{epoch}"
        scratch = self.root / f"tmp.{name}.{host().token()[:8]}"
        try:
            manifest = _fill(scratch, state, epoch)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)  # the space it takes is what is missing
            raise
        failpoint("learner.checkpoint.before_rename")
        if (self.root / name).exists():
            remove_directory(self.root / name)
        promote(scratch, self.root / name)
        failpoint("learner.checkpoint.after_rename")
        return _row(name, manifest)

    def verify(self, name: str, manifest_digest: str | None = None) -> Checkpoint:
        """Check a directory against its manifest and return the row that would commit it.

        ``manifest_digest`` is what the manifest itself must hash to, where a row says so.

        Raises:
            CheckpointDamaged: naming the first file that is missing or differs.
        """
        directory = self.root / name
        try:
            data = (directory / MANIFEST).read_bytes()
            if manifest_digest not in (None, hashlib.sha256(data).hexdigest()):
                raise CheckpointDamaged(f"{directory / MANIFEST} is not the manifest that was committed ({manifest_digest})")
            manifest = json.loads(data)
            files: dict[str, dict[str, Any]] = manifest["files"]
            stated = f"{manifest['lineage']}.{manifest['step']}.{manifest['epoch']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{directory / MANIFEST} is missing or unreadable: {error!r}") from error
        if stated != name:
            raise CheckpointDamaged(f"{directory / MANIFEST} belongs to checkpoint {stated}")
        for file, expected in files.items():
            path = directory / file
            if not path.is_file():
                raise CheckpointDamaged(f"{path} is missing")
            if path.stat().st_size != expected["size"] or sha256_of(path) != expected["sha256"]:
                raise CheckpointDamaged(f"{path} does not have the size and sha256 its manifest states")
        return _row(name, data)

    def read(self, checkpoint: Checkpoint) -> TrainingState:
        """Load a committed checkpoint after checking its manifest against the row and every file against the manifest.

        Raises:
            CheckpointDamaged: naming the file.
        """
        self.verify(checkpoint.dir_name, checkpoint.manifest_digest)
        directory = self.root / checkpoint.dir_name
        tensors = {section: load_file(directory / f"{section}.safetensors") for section in SECTIONS}
        return TrainingState(tensors, json.loads((directory / _VALUES).read_bytes()))

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of a verified directory."""
        return json.loads((self.root / name / MANIFEST).read_bytes())

    def n_bytes(self, name: str) -> int:
        """Size of a finished directory's files."""
        return sum(path.stat().st_size for path in (self.root / name).iterdir())

    def names(self) -> list[str]:
        """Finished directories, newest step first."""
        found = [path.name for path in self.root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda name: tuple(int(part) for part in name.split(".")), reverse=True)

    def clear_unfinished(self, epoch: int) -> list[str]:
        """Remove what a writer of this or an older epoch left under a temporary name; returns the names."""
        removed = sorted(path.name for path in self.root.glob("tmp.*") if _epoch_of(path.name) <= epoch)
        for name in removed:
            shutil.rmtree(self.root / name)
            failpoint("learner.resume.between_clears")
        return removed

    def set_aside(self, name: str, why: str) -> None:
        """Rename a directory that must not be used to ``<why>.<name>``, for a person to look at."""
        if (self.root / name).exists():
            target = self.root / f"{why}.{name}"
            promote(self.root / name, target if not target.exists() else self.root / f"{why}.{name}.{host().token()[:8]}")
            failpoint("learner.resume.after_aside")

    def remove(self, name: str) -> None:
        """Delete a directory; an absent one is fine."""
        if (self.root / name).exists():
            remove_directory(self.root / name)
            failpoint("learner.checkpoint.after_removal")


def _fill(directory: Path, state: TrainingState, epoch: int) -> bytes:
    """Write every file of a checkpoint, the manifest last, and return the manifest."""
    directory.mkdir()
    for section in SECTIONS:
        tensors = {key: tensor.contiguous() for key, tensor in state.tensors[section].items()}
        save_tensors(tensors, directory / f"{section}.safetensors")
        progress.mark()
        failpoint("learner.checkpoint.mid_files")
    write_durably(directory / _VALUES, json.dumps(state.values, sort_keys=True).encode())
    failpoint("learner.checkpoint.before_manifest")
    manifest = json.dumps(_manifest(directory, state, epoch), sort_keys=True, indent=1).encode()
    write_durably(directory / MANIFEST, manifest)
    failpoint("learner.checkpoint.after_manifest")
    fsync_directory(directory)
    return manifest


def _manifest(directory: Path, state: TrainingState, epoch: int) -> dict[str, Any]:
    progress = state.progress
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(directory.iterdir())}
    return {
        "format": _FORMAT,
        "lineage": progress.lineage,
        "step": progress.step,
        "epoch": epoch,
        "chain_digest": progress.chain_digest,
        "version_digest": progress.version_digest,
        "cursor": state.values["progress"]["cursor"],
        "config_digest": state.values["config_digest"],
        "ranks": json.loads(state.values["config_json"])["learner"].get("ranks", 1),
        "generators_not_drawn_from": list(rng.NOT_DRAWN_FROM),
        "libraries": library_versions(),
        "files": files,
    }


def _epoch_of(name: str) -> int:
    """Epoch of the learner that made a directory, finished or not; 0 where the name says none."""
    found = _WRITTEN.match(name)
    return int(found[1]) if found else 0


def _row(name: str, manifest: bytes) -> Checkpoint:
    lineage, step, _ = (int(part) for part in name.split("."))
    return Checkpoint(lineage, step, name, hashlib.sha256(manifest).hexdigest(), json.loads(manifest)["chain_digest"])


class Checkpoints:
    """The directories together with their rows, as the holder of the learner role sees them."""

    def __init__(self, root: Path, client: LedgerPort, term: RoleTerm, keep: int) -> None:
        """Start from what ``resume_point`` and ``adopt`` find; ``keep`` committed checkpoints are kept, at least two."""
        self.files = CheckpointFiles(root)
        self._client = client
        self._term = term
        self._keep = max(2, keep)
        self.committed: list[Checkpoint] = []

    def open(self, point: ResumePoint, run_id: str, config_seed: int) -> None:
        """Clear leftovers, adopt complete directories that only lack their row, and know what is committed.

        Directories of a newer epoch are a successor's: whoever finds one has lost the role and will be told so.
        """
        for name in self.files.clear_unfinished(self._term.epoch):
            log.info("removed an unfinished checkpoint", extra={"event": "checkpoint_unfinished_removed", "dir": name})
        self.committed = list(point.checkpoints)
        newest = max((checkpoint.step for checkpoint in self.committed), default=-1)
        known = {checkpoint.dir_name for checkpoint in self.committed}
        for name in self.files.names():
            lineage, step, _ = (int(part) for part in name.split("."))
            if name in known or lineage > point.lineage or _epoch_of(name) > self._term.epoch:
                continue
            if lineage < point.lineage or step <= newest:  # a lineage that was forked from is closed
                self.files.remove(name)
            else:
                self._adopt_or_remove(name, point, run_id, config_seed)
        self.committed.sort(key=lambda checkpoint: checkpoint.step, reverse=True)

    def _adopt_or_remove(self, name: str, point: ResumePoint, run_id: str, config_seed: int) -> None:
        try:
            checkpoint = self.files.verify(name)
        except CheckpointDamaged as damage:
            log.warning("removed a damaged directory without a row: %s", damage, extra={"event": "checkpoint_orphan_removed"})
            self.files.remove(name)
            return
        if any(checkpoint.step == other.step for other in self.committed):
            self.files.remove(name)
        elif checkpoint.chain_digest != self._ledger_chain(checkpoint, run_id, config_seed) or not _published(checkpoint, point):
            log.warning("set aside a checkpoint of another history", extra={"event": "checkpoint_foreign", "dir": name})
            self.files.set_aside(name, "foreign")
        else:
            failpoint("learner.resume.before_adopt")
            fsync_directory(self.files.root)  # whoever gave it its name may have died before flushing that name
            self.committed.append(self._client.commit_checkpoint(self._term, checkpoint))
            failpoint("learner.resume.after_adopt")
            log.info("adopted a complete checkpoint", extra={"event": "checkpoint_adopted", "dir": name})

    def _ledger_chain(self, checkpoint: Checkpoint, run_id: str, config_seed: int) -> str:
        if checkpoint.step == 0:
            return genesis_digest(run_id, config_seed)
        try:
            return self._client.read_plan(checkpoint.lineage, checkpoint.step).chain_digest
        except NotFound:
            return ""

    def save(self, state: TrainingState) -> Checkpoint:
        """Write, rename, commit the row, then delete what is no longer kept; a step that has its row is left alone.

        Raises:
            Fenced: another learner holds the role; the directory stays without a row.
        """
        step = state.progress.step
        for existing in self.committed:
            if existing.step == step:
                return existing
        with timed_checkpoint("write"):
            checkpoint = self.files.write(state, self._term.epoch)
        try:
            with timed_checkpoint("commit"):
                checkpoint = self._client.commit_checkpoint(self._term, checkpoint)
        except Conflict:
            self.files.remove(checkpoint.dir_name)
            raise
        failpoint("learner.checkpoint.after_row")
        self.committed.insert(0, checkpoint)
        log.info("committed a checkpoint", extra={"event": "checkpoint_committed", "step": step, "dir": checkpoint.dir_name})
        self._retain()
        return checkpoint

    def _retain(self) -> None:
        for checkpoint in self.committed[self._keep :]:
            self._client.mark_checkpoint(self._term, checkpoint.lineage, checkpoint.step, CheckpointState.DELETING.value)
            failpoint("learner.checkpoint.after_mark")
            self.files.remove(checkpoint.dir_name)
        self.committed = self.committed[: self._keep]

    def mark_corrupt(self, checkpoint: Checkpoint, damage: CheckpointDamaged) -> None:
        """Record that a committed checkpoint does not load, loudly, and set its directory aside."""
        log.error(
            "checkpoint of step %d is damaged: %s; falling back to the one before it and replaying", checkpoint.step, damage,
            extra={"event": "checkpoint_corrupt", "dir": checkpoint.dir_name},
        )  # fmt: skip
        self._client.mark_checkpoint(self._term, checkpoint.lineage, checkpoint.step, CheckpointState.CORRUPT.value)
        failpoint("learner.resume.after_corrupt")
        self.files.set_aside(checkpoint.dir_name, "corrupt")
        self.committed.remove(checkpoint)

    def steps(self) -> Sequence[int]:
        """Steps of the committed checkpoints, newest first."""
        return [checkpoint.step for checkpoint in self.committed]


def _published(checkpoint: Checkpoint, point: ResumePoint) -> bool:
    """Whether the version of the checkpoint's step is in the ledger: checkpoints come after their version."""
    return point.head is not None and point.head.version >= checkpoint.step
