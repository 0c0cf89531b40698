"""Held-out evaluation: greedy and sampled accuracy of one published version on tasks never trained on.

Owns nothing durable. Uses the transformers engine, the run's own prompts and verifier, so it measures what training
optimised; greedy rows are for measuring only and never become samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import NotFound, NotReady, TaskError
from rollbook.core.idempotency import sample_seed
from rollbook.core.packing import unpack_i32
from rollbook.core.ports import Engine, Generation, GenerationRequest, LedgerPort, SamplingSettings
from rollbook.core.records import PolicyVersion, SlotKey
from rollbook.rollout.engines import make_engine
from rollbook.rollout.probe import load_verified
from rollbook.rollout.verify import make_decoder
from rollbook.tasks.prompts import make_encoder
from rollbook.tasks.sources import load_heldout, load_source
from rollbook.tasks.verifier import make_verifier

if TYPE_CHECKING:
    from rollbook.rollout.transformers_engine import TransformersEngine

BATCH = 128
NEWEST_TRIES = 5
"""How often the newest version is looked up again because its bytes were deleted meanwhile."""


def published(ledger: LedgerPort, version: int, lineage: int | None = None) -> PolicyVersion:
    """The published version of a lineage (None: the current one); -1 is the newest. Raises NotFound listing what exists."""
    versions = ledger.versions(ledger.resume_point().lineage if lineage is None else lineage)
    for candidate in reversed(versions):
        if version in (-1, candidate.version):
            return candidate
    raise NotFound(f"version {version} is not published; the run has versions 0 to {len(versions) - 1}")


def load_published(
    config: Config, ledger: LedgerPort, engine: Engine, version: int, lineage: int | None = None
) -> PolicyVersion:
    """Load a published version (-1: the newest) of a lineage into an engine and prove it; returns what was loaded.

    A run that goes on deletes old versions meanwhile, so the newest one is looked up again when its bytes are gone.
    Raises: NotFound (not published, or its bytes were deleted; the message names the versions that are there).
    """
    tolerance = max(w.probe_tolerance for w in config.workers)
    for _ in range(NEWEST_TRIES if version == -1 else 1):
        chosen = published(ledger, version, lineage)
        try:
            load_verified(engine, chosen, config.run.dir, tolerance)
            return chosen
        except NotReady:
            continue
    place = Path(config.run.dir)
    there = [str(v.version) for v in ledger.versions(chosen.lineage) if any((place / v.path).glob("*.safetensors"))]
    raise NotFound(
        f"the weights of version {chosen.version} are not in {place} any more; versions there: {', '.join(there) or 'none'}"
    )


def evaluation_worker(config: Config) -> WorkerConfig:
    """Settings of a transformers engine for looking at versions: a worker's where there is one, else the learner's device."""
    kinds = [w for w in config.workers if w.engine == "transformers"]
    longest = max(w.max_model_len for w in config.workers)
    plain = WorkerConfig("transformers", device=config.learner.device, max_model_len=longest, threads=config.learner.threads)
    return kinds[0] if kinds else plain


def evaluate_version(config: Config, ledger: LedgerPort, version: int, size: int) -> dict:
    """Accuracy (mean reward) of a version on ``size`` held-out tasks, greedy and at the run's temperature."""
    source = load_source(config)
    heldout = load_heldout(config, source)
    if heldout is None or len(heldout) == 0:
        raise TaskError("the run has no held-out tasks: set task.heldout_path, or use a procedural source")
    published(ledger, version)  # refused before an engine is loaded for nothing
    engine = cast("TransformersEngine", make_engine(config, evaluation_worker(config)))  # it alone decodes greedily
    try:
        chosen = load_published(config, ledger, engine, version)
        tasks = [heldout[i] for i in range(min(size, len(heldout)))]
        encoder = make_encoder(config)
        prompts = [tuple(encoder.token_ids(task["prompt"], heldout.name(i))) for i, task in enumerate(tasks)]
        requests = [
            GenerationRequest(SlotKey(i, 0), prompt, sample_seed(config.run.seed + 1, SlotKey(i, 0)))
            for i, prompt in enumerate(prompts)
        ]
        settings = SamplingSettings(config.sampling.temperature, config.sampling.max_new_tokens, config.sampling.ignore_eos)
        greedy = _mean_reward(config, tasks, _batched(requests, lambda b: engine.greedy(b, settings.max_new_tokens)))
        sampled = _mean_reward(config, tasks, _batched(requests, lambda b: engine.generate(b, settings)))
    finally:
        engine.close()
    return {"version": chosen.version, "digest": chosen.digest, "n": len(tasks), "greedy": greedy, "sampled": sampled}


def _batched(
    requests: Sequence[GenerationRequest], run: Callable[[Sequence[GenerationRequest]], list[Generation]]
) -> list[Generation]:
    out: list[Generation] = []
    for start in range(0, len(requests), BATCH):
        out += run(requests[start : start + BATCH])
    return out


def _mean_reward(config: Config, tasks: Sequence[dict], generations: Sequence[Generation]) -> float:
    verify, decode = make_verifier(config), make_decoder(config.model.path)
    values = [verify(decode(unpack_i32(g.trajectory.token_ids)), task).value for task, g in zip(tasks, generations, strict=True)]
    given = [v for v in values if v is not None]
    return sum(given) / len(given) if given else float("nan")
