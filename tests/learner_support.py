"""A tiny policy, recorded rollouts and an in-memory ledger for tests of the learner."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollbook.core.config import Config, config_from_table
from rollbook.core.errors import (
    ChainMismatch,
    Conflict,
    Fenced,
    InvalidRequest,
    NotFound,
    NotReady,
    ReplayDiverged,
    RoleHeld,
)
from rollbook.core.idempotency import chain_digest, digest, genesis_digest, items_digest
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import (
    Checkpoint,
    CheckpointState,
    Cursor,
    Plan,
    PlanItem,
    PlanOutcome,
    PolicyVersion,
    ResumePoint,
    Role,
    RoleTerm,
    SampleData,
    SlotKey,
    Trajectory,
)

VOCAB_SIZE = 40
GROUP_SIZE = 4
GROUPS_PER_STEP = 3


def make_model_dir(directory: Path, *, layers: int = 1, seed: int = 0, tied: bool = True) -> Path:
    """A random Qwen2 of width 32 as a Hugging Face directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
            )
        )  # fmt: skip
    model.save_pretrained(directory)
    return directory


def make_config(model_dir: Path, run_dir: Path, *, steps: int = 6, every_steps: int = 2, seed: int = 3, **learner: Any) -> Config:
    """Two minibatches and a cosine schedule, so that order and position matter."""
    settings = {
        "groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "minibatches": 2, "micro_batch_size": 4, "lr": 3e-3,
        "lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01,
    } | learner  # fmt: skip
    return config_from_table({
        "run": {"id": "learner-test", "dir": str(run_dir), "steps": steps, "seed": seed},
        "model": {"path": str(model_dir)},
        "task": {"source": "jsonl", "path": "unused.jsonl"},
        "schedule": {"max_lag_versions": 2},
        "sampling": {"max_new_tokens": 8},
        "workers": [{"engine": "transformers", "max_model_len": 48}],
        "learner": settings,
        "checkpoint": {"every_steps": every_steps, "keep": 2},
        "ledger": {"role_ttl_s": 3.0, "lease_ttl_s": 30.0},
    })  # fmt: skip


def rollouts(step: int, *, seed: int = 0, lag: int = 1) -> list[SampleData]:
    """The samples of one step: a function of (seed, step), with one member per step that has no reward."""
    draw = random.Random(f"{seed}.{step}")
    samples = []
    for ordinal in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(2, 6))]
        for sibling in range(GROUP_SIZE):
            n = draw.randint(1, 8)
            trajectory = Trajectory(
                token_ids=pack_i32(draw.randrange(VOCAB_SIZE) for _ in range(n)),
                logprobs=pack_f32(draw.uniform(-4.5, -2.5) for _ in range(n)),
                versions=pack_i32([max(0, step - 1 - lag)] * n),
            )
            reward = None if (ordinal % GROUPS_PER_STEP, sibling) == (1, step % GROUP_SIZE) else float(draw.random() < 0.5)
            fingerprint = digest(trajectory.token_ids, trajectory.logprobs, str(reward))
            samples.append(SampleData(SlotKey(ordinal, sibling), pack_i32(prompt), trajectory, reward, fingerprint))
    return samples


def plan_of(step: int, samples: list[SampleData], previous_chain: str) -> Plan:
    """The plan a ledger would store for these samples."""
    items = tuple(PlanItem(pos, s.key, s.payload_digest, s.reward, s.reward is not None) for pos, s in enumerate(samples))
    items_hash = items_digest(items)
    return Plan(0, step, step - 1, 0, items, items_hash, chain_digest(previous_chain, step, items_hash))


class MemoryLedger:
    """The learner's half of the ledger's verbs with their refusals; rollouts come from a function of the step."""

    def __init__(self, config: Config, make_samples: Callable[[int], list[SampleData]] = rollouts) -> None:
        self.genesis = genesis_digest(config.run.id, config.run.seed)
        self.make_samples = make_samples
        self.samples: dict[int, list[SampleData]] = {}
        self.plans: dict[int, Plan] = {}
        self.metrics: dict[int, str] = {}
        self.published: dict[int, PolicyVersion] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.term: RoleTerm | None = None
        self.steps_ready = 10**9
        self.epochs = 0
        self.plan_calls = 0
        self._lock = threading.Lock()

    def _guard(self, term: RoleTerm) -> None:
        if self.term is None or term.epoch != self.term.epoch:
            raise Fenced(f"epoch {term.epoch} is not the current one")

    def acquire_role(self, role: Role, holder: str, ttl_s: float, supersede: str = "") -> RoleTerm:
        with self._lock:
            if self.term is not None and self.term.holder not in (holder, supersede):
                raise RoleHeld(f"held by {self.term.holder}")
            if self.term is None or self.term.holder != holder:
                self.epochs += 1
                self.term = RoleTerm(role, self.epochs, holder, ttl_s)
            return self.term

    def renew_role(self, term: RoleTerm) -> RoleTerm:
        self._guard(term)
        return term

    def release_role(self, term: RoleTerm) -> None:
        if self.term == term:
            self.term = None

    def cursor(self, stream: str) -> Cursor:
        n = len(self.plans) * GROUPS_PER_STEP
        return Cursor(stream, n, f'{{"drawn": {n}}}', False)

    def plan_step(self, term: RoleTerm, lineage: int, step: int, wait_s: float = 0.0) -> Plan:
        self._guard(term)
        self.plan_calls += 1
        if step not in self.plans:
            if step > self.steps_ready:
                raise NotReady("1 of 3 groups is complete")
            if step != len(self.plans) + 1:
                raise InvalidRequest("a gap in the plans")
            self.samples[step] = self.make_samples(step)
            before = self.plans[step - 1].chain_digest if step > 1 else self.genesis
            self.plans[step] = plan_of(step, self.samples[step], before)
        return self.plans[step]

    def read_plan(self, lineage: int, step: int) -> Plan:
        if step not in self.plans:
            raise NotFound(f"no plan of step {step}")
        return self.plans[step]

    def payloads(self, lineage: int, step: int) -> Iterator[SampleData]:
        yield from self.samples[step]

    def finish_plan(
        self, term: RoleTerm, lineage: int, step: int, outcome: PlanOutcome, reason: str, metrics_json: str
    ) -> None:
        self._guard(term)
        if self.plans[step].outcome is None:
            self.plans[step] = dataclasses.replace(self.plans[step], outcome=outcome, reason=reason)
            self.metrics[step] = metrics_json

    def step_metrics(self, lineage: int, first_step: int = 1) -> list[dict[str, Any]]:
        return [json.loads(self.metrics[step]) | {"step": step} for step in sorted(self.metrics) if step >= first_step]

    def publish_version(self, term: RoleTerm, version: PolicyVersion) -> PolicyVersion:
        self._guard(term)
        known = self.published.get(version.version)
        if known is not None and known.digest != version.digest:
            raise ReplayDiverged(f"version {version.version} is recorded with another digest")
        if version.version and version.version - 1 not in self.published:
            raise InvalidRequest("a gap in the versions")
        return self.published.setdefault(version.version, version)

    def versions(self, lineage: int) -> list[PolicyVersion]:
        return [self.published[v] for v in sorted(self.published)]

    def commit_checkpoint(self, term: RoleTerm, checkpoint: Checkpoint) -> Checkpoint:
        self._guard(term)
        chain = self.plans[checkpoint.step].chain_digest if checkpoint.step else self.genesis
        if checkpoint.chain_digest != chain:
            raise ChainMismatch(f"checkpoint of step {checkpoint.step} is of another chain")
        known = self.checkpoints.get(checkpoint.step)
        is_committed = known is not None and known.state is CheckpointState.COMMITTED
        if is_committed and known.manifest_digest != checkpoint.manifest_digest:
            raise Conflict(f"checkpoint of step {checkpoint.step} is recorded with other content")
        self.checkpoints[checkpoint.step] = checkpoint
        return checkpoint

    def mark_checkpoint(self, term: RoleTerm, lineage: int, step: int, state: str) -> None:
        self._guard(term)
        committed = sorted((c.step for c in self._committed()), reverse=True)
        if state == CheckpointState.DELETING and step in committed[:2]:
            raise InvalidRequest("the newest two are not deleted")
        self.checkpoints[step] = dataclasses.replace(self.checkpoints[step], state=CheckpointState(state))

    def _committed(self) -> list[Checkpoint]:
        return [c for c in self.checkpoints.values() if c.state is CheckpointState.COMMITTED]

    def resume_point(self) -> ResumePoint:
        checkpoints = tuple(sorted(self._committed(), key=lambda c: c.step, reverse=True))
        chains = {0: self.genesis} | {c.step: c.chain_digest for c in checkpoints}
        head = self.published[max(self.published)] if self.published else None
        return ResumePoint(0, checkpoints, max(self.plans, default=0), head, chains)
