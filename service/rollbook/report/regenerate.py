"""Regenerate a stored rollout from its key and version, and compare tokens and log-probs (R2, oracle W's building block).

Owns the comparison and what it says about the engine. Never claims more than it knows: which engine made the sample is
told by the ledger where it is recorded, else by the configuration where that leaves only one.
"""

from __future__ import annotations

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError, NotFound
from rollbook.core.idempotency import sample_seed
from rollbook.core.packing import unpack_f32, unpack_i32
from rollbook.core.ports import Engine, LedgerPort, SamplingSettings
from rollbook.core.records import LeaseGrant, SampleData, SlotKey
from rollbook.report.evaluate import episodes_of, evaluation_worker, load_published
from rollbook.rollout.engines import make_engine
from rollbook.rollout.episodes import Finished, play
from rollbook.rollout.journal import RecordedCalls
from rollbook.rollout.judges import open_judge
from rollbook.tasks.turns import make_codec


def regenerate_sample(config: Config, ledger: LedgerPort, key: SlotKey, engine_name: str = "transformers") -> dict:
    """Generate ``key`` again, alone, under the version that made it.

    Equal tokens and zero log-prob difference are promised for engines whose result does not depend on the batch
    (``dtype = "float64"`` on CPU, batch-invariant kernels on CUDA); elsewhere small differences are normal. Another
    engine than the one that made the sample draws other tokens from the same seed: ``note`` says so.

    Raises: NotFound (no sample, or the version's bytes are gone), UnknownSlot, ConfigError (no worker has that engine).
    """
    stored = ledger.sample(key)
    versions = sorted(set(unpack_i32(stored.trajectory.versions)))
    if len(versions) != 1:
        raise NotFound(f"sample {key} spans versions {versions}; only single-version samples can be generated again")
    story = ledger.explain(key)
    made_by = engines_that_made(config, story)
    worker = _worker(config, engine_name)
    engine = make_engine(config, worker)
    try:
        load_published(config, ledger, engine, versions[0], story["lineage"])
        again = _played(config, ledger, engine, stored, versions[0]).trajectory
    finally:
        engine.close()
    old, new = unpack_f32(stored.trajectory.logprobs), unpack_f32(again.logprobs)
    return {
        "sample": str(key),
        "version": versions[0],
        "made_by": " or ".join(made_by),
        "generated_by": f"{worker.engine} ({worker.dtype} on {worker.device})",
        "note": _note(made_by, worker),
        "tokens_equal": stored.trajectory.token_ids == again.token_ids,
        "logprobs_equal": stored.trajectory.logprobs == again.logprobs,
        "logprob_gap_max": max((abs(a - b) for a, b in zip(old, new, strict=False)), default=0.0),
        "stored_tokens": list(unpack_i32(stored.trajectory.token_ids)),
        "generated_tokens": list(unpack_i32(again.token_ids)),
    }


def _played(config: Config, ledger: LedgerPort, engine: Engine, stored: SampleData, version: int) -> Finished:
    """The rollout once more; its tools are not run, they answer what is recorded. Raises NotFound (it calls another tool now)."""
    key, s = stored.key, config.sampling
    settings = SamplingSettings(s.temperature, s.max_new_tokens, s.ignore_eos)
    grant = LeaseGrant(key, 1, 1, 0.0, sample_seed(config.run.seed, key), stored.prompt_ids, "{}", 0, version, "")
    judge = open_judge(config).judge
    try:
        journal = RecordedCalls(ledger.tool_calls(key), closed=True)
        codec = make_codec(config)
        episodes = episodes_of(config, judge, codec, journal, version, lambda requests: engine.generate(requests, settings))
        episodes.judged = False
        return play(episodes, [grant])[0]
    finally:
        judge.close()


def engines_that_made(config: Config, story: dict) -> list[str]:
    """Engines that may have made a sample: the recorded one, else every engine the configuration has."""
    recorded = story.get("engine")
    return [str(recorded)] if recorded else sorted({worker.engine for worker in config.workers})


def _worker(config: Config, engine_name: str) -> WorkerConfig:
    if engine_name == "transformers":
        return evaluation_worker(config)
    for worker in config.workers:
        if worker.engine == engine_name:
            return worker
    raise ConfigError(f"engine {engine_name!r}: no worker of the configuration has it")


def _note(made_by: list[str], worker: WorkerConfig) -> str:
    if made_by == [worker.engine]:
        independent = worker.batch_invariant or (worker.dtype == "float64" and worker.device == "cpu")
        return (
            "same engine, independent of the batch: tokens and log-probs must be equal"
            if independent
            else "same engine, but its results depend on the batch a little: rarely, a token differs"
        )
    if worker.engine in made_by:
        return f"which of {', '.join(made_by)} made it is not recorded; if it was another than {worker.engine}, tokens may differ"
    return f"{worker.engine} draws otherwise than {made_by[0]} from the same seed: tokens may differ without anything being wrong"
