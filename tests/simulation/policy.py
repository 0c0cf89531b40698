"""The policy of simulated runs: a table of successors, trained by the product's trainer, sampled by an engine of its own.

Each token's next-token logits are a row of ``embed @ head.T``, so a rollout is a function of (weights, prompt, seed) whatever
else is in its batch, and a whole optimizer step costs milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from rollbook.core.config import Config
from rollbook.core.host import host
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.ports import Generation, GenerationRequest, RewardResult, SamplingSettings
from rollbook.core.records import Blame, FinishReason, RewardStatus, SandboxStatus, Trajectory
from rollbook.core.weights import safetensors_digest
from rollbook.learner.model import Policy, prepare_torch
from rollbook.observe.failpoints import failpoint
from simulation.machine import MONOTONIC_BEGINS

VOCAB_SIZE = 272
"""That of the tokenizer in use."""
WIDTH = 6
EOS = 257


class Successors(torch.nn.Module):
    """Looks to the trainer like a causal language model."""

    config = SimpleNamespace()
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embed = torch.nn.Embedding(VOCAB_SIZE, WIDTH, _weight=torch.randn(VOCAB_SIZE, WIDTH, generator=generator))
        self.lm_head = torch.nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.randn(VOCAB_SIZE, WIDTH, generator=generator))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head

    def base_model(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.embed(input_ids))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.embed(input_ids)))


def load_policy(config: Config) -> Policy:
    """Stands in for ``learner.model.load_policy``: the same switches, another architecture."""
    prepare_torch(config.learner)
    return Policy(Successors(), temperature=config.sampling.temperature)  # type: ignore[arg-type]


class SimEngine:
    """Samples the table in float64 from uniforms that belong to the request's seed alone."""

    def __init__(self, config: Config, seconds: tuple[float, float], turns: bool = False) -> None:
        """``turns``: many tokens end a turn, so that episodes have several."""
        self._seconds, self._version = seconds, -1
        self._is_end = (lambda token: token % 4 == 1) if turns else (lambda token: token == EOS)
        self._rng = host().rng()

    def manifest(self) -> dict[str, object]:
        return {"engine": "simulation"}

    def load(self, weights_dir: str, version: int) -> str:
        file = Path(weights_dir) / "model.safetensors"
        digest = safetensors_digest(file)
        tensors = load_file(file)
        logits = tensors["embed.weight"].astype(np.float64) @ tensors["lm_head.weight"].astype(np.float64).T
        logits -= logits.max(axis=1, keepdims=True)
        self._logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._cumulated: dict[int, np.ndarray] = {}
        self._version = version
        return digest

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        seconds = self._rng.uniform(*self._seconds)
        host().sleep(seconds / 2)
        failpoint("worker.mid_generate")
        host().sleep(seconds / 2)
        return [self._one(request, sampling) for request in requests]

    def _one(self, request: GenerationRequest, sampling: SamplingSettings) -> Generation:
        n = sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        uniforms = np.random.Generator(np.random.Philox(key=[request.seed, 5])).random(n)
        token, tokens, logprobs = request.prompt_ids[-1], [], []
        for uniform in uniforms:
            if token not in self._cumulated:
                self._cumulated[token] = np.cumsum(np.exp(self._logprobs[token]))
            following = min(int(np.searchsorted(self._cumulated[token], uniform)), VOCAB_SIZE - 1)
            logprobs.append(float(self._logprobs[token, following]))
            tokens.append(following)
            token = following
            if self._is_end(token):
                break
        trajectory = Trajectory(pack_i32(tokens), pack_f32(logprobs), pack_i32([self._version] * len(tokens)))
        reason = FinishReason.STOP if self._is_end(token) else FinishReason.LENGTH
        return Generation(request.key, trajectory, reason)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return [float(self._logprobs[a, b]) for a, b in zip(token_ids, token_ids[1:], strict=False)]

    def close(self) -> None:
        pass


outage = (0.0, 0.0)
"""From when to when no sandbox can be made; set by the world for its run."""


def no_sandbox() -> bool:
    """Whether it is the time of the outage."""
    return outage[0] <= host().monotonic() - MONOTONIC_BEGINS < outage[1]


def reward(completion: str, task: dict) -> RewardResult | float:
    """A coin that completion and task decide; where the task says so, now and then no verdict at all."""
    if no_sandbox():
        return RewardResult(
            None, RewardStatus.INFRA_ERROR, "no sandbox could be made", sandbox_status=SandboxStatus.INFRA_SPAWN,
            blame=Blame.INFRA,
        )  # fmt: skip
    draw = hashlib.sha256(f"{completion}|{task['prompt']}".encode()).digest()
    if draw[1] < 256 * float(task.get("no_verdict", 0.0)):
        if draw[2] % 2:
            return RewardResult(None, RewardStatus.NO_VERDICT, "the coin stood on its edge")
        return RewardResult(
            None,
            RewardStatus.INFRA_ERROR,
            "nobody was there to throw it",
            sandbox_status=SandboxStatus.INFRA_SPAWN,
            blame=Blame.INFRA,
        )
    return float(draw[0] % 2)
