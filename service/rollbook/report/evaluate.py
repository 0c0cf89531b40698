"""Held-out evaluation: greedy and sampled accuracy of one published version on tasks never trained on.

Owns nothing durable. Uses the transformers engine, the run's own prompts and verifier, so it measures what training
optimised; greedy rows are for measuring only and never become samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import NotFound, NotReady, TaskError
from rollbook.core.idempotency import sample_seed
from rollbook.core.packing import pack_i32
from rollbook.core.ports import Engine, LedgerPort, SamplingSettings
from rollbook.core.records import LeaseGrant, PolicyVersion, SlotKey
from rollbook.rollout.engines import make_engine
from rollbook.rollout.episodes import Episodes, Generate, Judge, play
from rollbook.rollout.journal import Journal, RecordedCalls
from rollbook.rollout.judges import open_judge
from rollbook.rollout.probe import load_verified
from rollbook.tasks.prompts import make_encoder, prompt_of
from rollbook.tasks.sources import load_heldout, load_source
from rollbook.tasks.turns import TurnCodec, make_codec

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
        prompts = [tuple(encoder.token_ids(prompt_of(task), heldout.name(i))) for i, task in enumerate(tasks)]
        grants = [
            LeaseGrant(
                SlotKey(i, 0), 1, 1, 0.0, sample_seed(config.run.seed + 1, SlotKey(i, 0)), pack_i32(prompt), json.dumps(task),
                chosen.lineage, chosen.version, chosen.digest,
            )
            for i, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
        ]  # fmt: skip
        codec, judge = make_codec(config), open_judge(config).judge
        try:
            settings = SamplingSettings(config.sampling.temperature, config.sampling.max_new_tokens, config.sampling.ignore_eos)
            greedy = _mean_reward(config, judge, codec, grants, lambda batch: engine.greedy(batch, settings.max_new_tokens))
            sampled = _mean_reward(config, judge, codec, grants, lambda batch: engine.generate(batch, settings))
        finally:
            judge.close()
    finally:
        engine.close()
    return {"version": chosen.version, "digest": chosen.digest, "n": len(tasks), "greedy": greedy, "sampled": sampled}


def episodes_of(
    config: Config, judge: Judge, codec: TurnCodec, journal: Journal, version: int, generate: Generate
) -> Episodes:  # fmt: skip
    """Episodes as the run's workers play them, recorded nowhere but in ``journal``."""
    return Episodes(
        run_id=config.run.id, judge=judge, codec=codec, journal=journal, generate=generate,
        tokens_max=config.sampling.max_new_tokens, turns_max=config.environment.turns_max, version=lambda: version,
    )  # fmt: skip


def _mean_reward(config: Config, judge: Judge, codec: TurnCodec, grants: Sequence[LeaseGrant], generate: Generate) -> float:
    """Mean over the tasks that got a verdict; NaN where none did."""
    values: list[float] = []
    for start in range(0, len(grants), BATCH):
        batch = grants[start : start + BATCH]
        finished = play(episodes_of(config, judge, codec, RecordedCalls(), batch[0].version, generate), batch)
        values += [f.result.value for f in finished if f.result is not None and f.result.value is not None]
    return sum(values) / len(values) if values else float("nan")
