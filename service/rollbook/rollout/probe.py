"""Proof that an engine computes with the weights it was given: digest first, then log-probs on fixed tokens.

Owns the check behind P11 and R18. A matching digest says what was handed over; the probe says what the engine uses, and
fails where a stale copy of a tied head, a cached cast or a half-done update is left behind. Never loads anything itself
outside ``load_verified`` and never lets a sample be generated before both checks passed.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from rollbook.core.errors import DigestMismatch, NotReady, StaleWeights
from rollbook.core.host import host
from rollbook.core.ports import Engine
from rollbook.core.records import PolicyVersion
from rollbook.observe import metrics
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)


def check_probe(engine: Engine, probe_json: str, tolerance: float) -> float:
    """Compare the engine's log-probs with the trainer's on the version's probe; returns the mean absolute difference.

    Args:
        probe_json: {"token_ids": [n], "logprobs": [n - 1]}: natural log, T = 1.
        tolerance: largest mean absolute difference, in nats per token.

    Raises: StaleWeights (difference beyond the tolerance, or no usable probe).
    """
    try:
        probe = json.loads(probe_json)
        token_ids = [int(token) for token in probe["token_ids"]]
        expected = [float(value) for value in probe["logprobs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StaleWeights(f"the version carries no usable probe ({error!r}); publish it with one") from None
    if len(token_ids) < 2 or len(expected) != len(token_ids) - 1:
        raise StaleWeights(f"probe of {len(token_ids)} tokens with {len(expected)} log-probs: n >= 2 tokens and n - 1 log-probs")
    scored = engine.score(token_ids)
    gaps = [abs(a - b) for a, b in zip(scored, expected, strict=True)]
    mean = sum(gaps) / len(gaps)
    if not (math.isfinite(mean) and mean <= tolerance):
        raise StaleWeights(
            f"engine and trainer differ by {mean:.3g} nats per token on the version's probe (largest {max(gaps):.3g}, tolerance "
            f"{tolerance:g}): the engine does not compute with the weights it was given, or workers.probe_tolerance is below "
            "the noise of its dtype"
        )
    return mean


def load_verified(engine: Engine, version: PolicyVersion, run_dir: str, tolerance: float) -> None:
    """Load a published version and prove it.

    Raises: NotReady (its bytes are missing), DigestMismatch, StaleWeights.
    """
    with metrics.failed_syncs():
        _load_verified(engine, version, Path(run_dir) / version.path, tolerance)


def _load_verified(engine: Engine, version: PolicyVersion, directory: Path, tolerance: float) -> None:
    started = host().monotonic()
    try:
        digest = engine.load(str(directory), version.version)
    except (DigestMismatch, OSError) as error:
        if directory.is_dir():
            raise
        raise NotReady(f"{directory} was deleted while it was being read: a newer version is the head by now") from error
    if digest != version.digest:
        raise DigestMismatch(
            f"version {version.lineage}.{version.version} in {directory}: loaded digest {digest[:16]}, published "
            f"{version.digest[:16]}; the bytes changed after publishing"
        )
    failpoint("worker.load.before_proof")
    loaded = host().monotonic()
    gap = check_probe(engine, version.probe_json, tolerance)
    metrics.WEIGHT_SYNC_DURATION_SECONDS.labels("load").observe(loaded - started)
    metrics.WEIGHT_SYNC_DURATION_SECONDS.labels("verify").observe(host().monotonic() - loaded)
    metrics.WEIGHT_SYNC_BYTES_TOTAL.labels("files").inc(version.n_bytes)
    log.info(
        "loaded version",
        extra={"event": "version_loaded", "version": f"{version.lineage}.{version.version}", "digest": digest[:12],
               "probe_gap": f"{gap:.2g}", "load_s": round(host().monotonic() - started, 3)},
    )  # fmt: skip
