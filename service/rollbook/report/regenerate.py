"""Regenerate a stored rollout from its key and version, and compare tokens and log-probs (R2, oracle W's building block)."""

from __future__ import annotations

from rollbook.core.config import Config
from rollbook.core.errors import NotFound
from rollbook.core.idempotency import sample_seed
from rollbook.core.packing import unpack_f32, unpack_i32
from rollbook.core.ports import GenerationRequest, LedgerPort, SamplingSettings
from rollbook.core.records import SlotKey
from rollbook.report.evaluate import evaluation_engine, published
from rollbook.rollout.probe import load_verified


def regenerate_sample(config: Config, ledger: LedgerPort, key: SlotKey) -> dict:
    """Generate ``key`` again, alone, under the version that made it.

    Equal tokens and zero log-prob difference are promised for engines whose result does not depend on the batch
    (``dtype = "float64"`` on CPU, batch-invariant kernels on CUDA); elsewhere small differences are normal.

    Raises: NotFound (no sample, or the version's bytes are gone), UnknownSlot.
    """
    stored = ledger.sample(key)
    versions = sorted(set(unpack_i32(stored.trajectory.versions)))
    if len(versions) != 1:
        raise NotFound(f"sample {key} spans versions {versions}; only single-version samples can be generated again")
    engine = evaluation_engine(config)
    try:
        load_verified(engine, published(ledger, versions[0]), config.run.dir, max(w.probe_tolerance for w in config.workers))
        request = GenerationRequest(key, tuple(unpack_i32(stored.prompt_ids)), sample_seed(config.run.seed, key))
        s = config.sampling
        again = engine.generate([request], SamplingSettings(s.temperature, s.max_new_tokens, s.ignore_eos))[0].trajectory
    finally:
        engine.close()
    old, new = unpack_f32(stored.trajectory.logprobs), unpack_f32(again.logprobs)
    tokens_equal = stored.trajectory.token_ids == again.token_ids
    return {
        "sample": str(key),
        "version": versions[0],
        "tokens_equal": tokens_equal,
        "logprobs_equal": stored.trajectory.logprobs == again.logprobs,
        "logprob_gap_max": max((abs(a - b) for a, b in zip(old, new, strict=False)), default=0.0),
        "stored_tokens": list(unpack_i32(stored.trajectory.token_ids)),
        "generated_tokens": list(unpack_i32(again.token_ids)),
    }
