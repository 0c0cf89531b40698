"""Publishing policy versions: bytes, fsync, rename, then the row.

Owns the directories under ``versions/`` and the probe stored with each version. Never moves weights to a worker: the row
announces them and the bytes are on disk (R9). Upholds P11 and R18: the digest is over the tensors as published, and the
probe holds the trainer's log-probs under exactly those values.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from rollbook.core.config import Config
from rollbook.core.errors import DigestMismatch
from rollbook.core.host import fsync_directory, host
from rollbook.core.idempotency import digest
from rollbook.core.ports import LedgerPort
from rollbook.core.records import PolicyVersion, RoleTerm
from rollbook.core.weights import safetensors_digest
from rollbook.learner.durable import make_directory, promote, remove_directory, save_tensors
from rollbook.learner.model import Policy, dtype_of
from rollbook.learner.state import tensors_digest
from rollbook.observe.failpoints import failpoint
from rollbook.observe.metrics import WEIGHT_SYNC_BYTES_TOTAL, WEIGHT_SYNC_DURATION_SECONDS, failed_syncs

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
PROBE_TOKENS = 64
_NAME = re.compile(r"(\d+)\.(\d+)\.[0-9a-f]{12}")
_SCRATCH = re.compile(r"tmp\.\d+\.\d+\.(\d+)\.[0-9a-f]{8}")


def published_weights(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """The policy's weights on the CPU, floating ones cast to ``dtype``."""
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).to("cpu").contiguous()
        for name, tensor in policy.weights().items()
    }


def publish_dtype(config: Config) -> torch.dtype:
    """Dtype of published weights. Raises ConfigError."""
    return dtype_of(config.learner.publish_dtype or config.learner.dtype)


def published_digest(policy: Policy, dtype: torch.dtype) -> str:
    """Digest the policy's weights would be published under."""
    return tensors_digest(published_weights(policy, dtype))


def probe_token_ids(vocab_size: int, n_tokens: int) -> list[int]:
    """Fixed token ids spread over the vocabulary: the same for every version of a model."""
    return [int(digest("probe", position)[:12], 16) % vocab_size for position in range(n_tokens)]


class Publisher:
    """Writes and announces versions of one policy."""

    def __init__(self, config: Config, policy: Policy, client: LedgerPort, term: RoleTerm) -> None:
        """Use ``versions/`` of the run directory, and clear what a dead writer left there.

        Raises:
            ConfigError: unknown publish dtype.
        """
        self._run_dir = Path(config.run.dir)
        self._policy = policy
        self._client = client
        self._term = term
        self._dtype = publish_dtype(config)
        # An engine scores the probe as a prompt and must have room for one more token.
        room = min(worker.max_model_len for worker in config.workers) - 1
        self._probe_ids = probe_token_ids(policy.vocab_size, max(2, min(PROBE_TOKENS, room)))
        make_directory(self._run_dir / "versions")
        for leftover in (self._run_dir / "versions").glob("tmp.*"):
            written = _SCRATCH.fullmatch(leftover.name)
            if written is None or int(written[1]) <= term.epoch:  # else a successor is writing it
                remove_directory(leftover)
                failpoint("learner.publish.between_clears")

    def digest(self) -> str:
        """Digest of the weights as they would be published now."""
        return published_digest(self._policy, self._dtype)

    def publish(self, lineage: int, version: int) -> PolicyVersion:
        """Write the current weights as ``version``, durable before the row; doing it twice changes nothing.

        Raises:
            ReplayDiverged: the ledger holds another digest for this version.
            Fenced: another learner holds the role.
            OSError: naming the file that could not be written; nothing of this version is left then.
        """
        began = host().monotonic()
        weights = published_weights(self._policy, self._dtype)
        weights_digest = tensors_digest(weights)
        gathered = host().monotonic()
        with failed_syncs():
            path = self._write(lineage, version, weights, weights_digest)
        WEIGHT_SYNC_DURATION_SECONDS.labels("gather").observe(gathered - began)
        WEIGHT_SYNC_DURATION_SECONDS.labels("transfer").observe(host().monotonic() - gathered)
        record = PolicyVersion(
            lineage=lineage,
            version=version,
            digest=weights_digest,
            path=path,
            probe_json=self._probe(),
            n_bytes=(self._run_dir / path / WEIGHTS_FILE).stat().st_size,
        )
        failpoint("learner.before_publish_row")
        record = self._client.publish_version(self._term, record)
        WEIGHT_SYNC_BYTES_TOTAL.labels("files").inc(record.n_bytes)
        failpoint("learner.after_publish")
        return record

    def ensure_bytes(self, version: PolicyVersion) -> None:
        """Write the bytes of a recorded version again when they are missing; the policy must hold its weights."""
        if not self._is_whole(self._run_dir / version.path, version.digest):
            self._write(version.lineage, version.version, published_weights(self._policy, self._dtype), version.digest)
            failpoint("learner.publish.rewritten")

    def _write(self, lineage: int, version: int, weights: dict[str, Tensor], weights_digest: str) -> str:
        path = f"versions/{lineage}.{version}.{weights_digest[:12]}"
        target = self._run_dir / path
        if self._is_whole(target, weights_digest):
            fsync_directory(target.parent)  # whoever gave it its name may have died before flushing that name
            return path
        if target.exists():
            remove_directory(target)
        scratch = target.with_name(f"tmp.{lineage}.{version}.{self._term.epoch}.{host().token()[:8]}")
        try:
            scratch.mkdir()
            save_tensors(weights, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
            failpoint("learner.publish.after_file")
            fsync_directory(scratch)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)  # the space it takes is what is missing
            raise
        failpoint("learner.publish.before_rename")
        promote(scratch, target)
        return path

    def _is_whole(self, directory: Path, weights_digest: str) -> bool:
        try:
            return safetensors_digest(directory / WEIGHTS_FILE) == weights_digest
        except (FileNotFoundError, DigestMismatch):
            return False

    def _probe(self) -> str:
        if all(tensor.dtype == self._dtype for tensor in self._policy.weights().values() if tensor.is_floating_point()):
            logprobs = self._policy.score(self._probe_ids)
        else:
            with self._policy.rounded_to(self._dtype):
                logprobs = self._policy.score(self._probe_ids)
        return json.dumps({"token_ids": self._probe_ids, "logprobs": logprobs})

    def retain(self, lineage: int, head_version: int, max_lag_versions: int, checkpoint_steps: Collection[int]) -> list[str]:
        """Delete versions nobody can need: neither within ``max_lag_versions + 2`` of the head nor a kept checkpoint's.

        Version 0 stays, because evaluations compare with the start. Versions that a fork left behind in an older lineage
        go by the same rule: samples of them are used no longer than others.
        A slot is sampled under a version at most ``max_lag_versions`` behind the step that trains it, in both
        schedules, so the window covers live leases, unplanned samples and fixed-lag slots. Returns the deleted names.
        """
        deleted = []
        for directory in sorted((self._run_dir / "versions").iterdir()):
            match = _NAME.fullmatch(directory.name)
            if match is None or int(match[1]) > lineage:
                continue
            version = int(match[2])
            if 0 < version <= head_version - (max_lag_versions + 2) and version not in checkpoint_steps:
                remove_directory(directory)
                deleted.append(directory.name)
                failpoint("learner.versions.between_removals")
        return deleted
