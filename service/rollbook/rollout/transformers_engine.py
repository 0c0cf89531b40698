"""Engine on plain transformers: batched lock-step sampling whose result does not depend on the batch.

Owns the forward, the key-value cache and the draw. Each sample draws from its own counter-based uniforms by inverse
CDF in float64, so a token depends on weights, prompt, settings and seed. With dtype ``float64`` its float32 log-prob does
too: batching changes the 16th digit, and rounding hides it (measured with the tiny model: no difference in 51,200 samples
between groups of 8 and batches of 128; the chance left is about 1e-10 per value). Never masks, truncates or penalises logits.

Upholds P4 (generations of the fixed schedule), P11 (digest of the tensors handed over).
Source: Salmon et al. 2011 (Philox counter-based generator).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from rollbook.core.errors import ConfigError, NotReady, StaleWeights
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.ports import Generation, GenerationRequest, SamplingSettings
from rollbook.core.records import FinishReason, Trajectory
from rollbook.observe import progress
from rollbook.observe.failpoints import failpoint
from rollbook.rollout.model_files import ModelFiles, check_requests, check_shapes, tokens_bound
from rollbook.rollout.weights import read_weights, weights_digest

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

_UNIFORM_STREAM = 0x526F6C6C626F6F6B
# Finished rows ride along until this share of the batch is finished: dropping them copies the whole cache.
_DROP_SHARE = 0.125

Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(log-probs [n, V] float64, rows [n], position) to token ids [n]."""


def sample_uniforms(seed: int, n: int) -> np.ndarray:
    """The first ``n`` uniforms of a sample, float64 [n] in (0, 1]: value t depends on (seed, t) alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, _UNIFORM_STREAM]))
    # Half a step up: zero would select a token of probability zero.
    return generator.random(n) + 2.0**-54


@dataclass(slots=True)
class _Drawn:
    """Tokens and log-probs of a batch, right-padded: [B, max_new_tokens]; lengths and stop flags [B]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor


class TransformersEngine:
    """A sampler of one policy on CPU or CUDA."""

    def __init__(self, files: ModelFiles, *, device: str, dtype: str, max_model_len: int, threads: int) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"device = {device!r}: 'cpu' or 'cuda'")
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = 'cuda', but torch sees no CUDA device; use device = 'cpu' or check driver and build")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype!r}: the transformers engine computes in {', '.join(DTYPES)}")
        torch.set_num_threads(threads)
        self._files, self._max_model_len, self._threads = files, max_model_len, threads
        self._dtype, self._device = dtype, torch.device(device)
        transformers.utils.logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True, use_safetensors=True,
            trust_remote_code=False,
        )  # fmt: skip
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._version: int | None = None

    def manifest(self) -> dict[str, object]:
        """Settings and versions that change numbers."""
        return {
            "engine": "transformers", "device": self._device.type, "dtype": self._dtype, "threads": self._threads,
            "max_model_len": self._max_model_len, "attention": "sdpa",
            "sampling": "philox uniforms, inverse cdf in float64", "eos_ids": list(self._files.eos_ids),
            "device_name": torch.cuda.get_device_name() if self._device.type == "cuda" else platform.machine(),
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip

    def load(self, weights_dir: str, version: int) -> str:
        """Copy a version's tensors into the module and return the digest of exactly those tensors.

        Raises: StaleWeights (a name or shape does not fit; nothing was loaded), NotReady, DigestMismatch.
        """
        self._version = None
        tensors = dict(read_weights(weights_dir))
        targets = self._model.state_dict(keep_vars=True)
        check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, self._files, weights_dir)
        _check_twins(tensors, targets, weights_dir)
        with torch.no_grad():
            for name, tensor in tensors.items():
                targets[name].copy_(tensor)
        digest = weights_digest(tensors)
        self._version = version
        return digest

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        """Sample every request; the result of a request does not depend on the others (bitwise with float64)."""
        check_requests(list(requests), sampling, self._files.vocab_size, self._max_model_len)
        if not requests:
            return []
        bounds = [tokens_bound(request, sampling) for request in requests]
        n = max(bounds)
        uniforms = torch.from_numpy(np.stack([sample_uniforms(r.seed, n) for r in requests])).to(self._device)

        def draw(logp: torch.Tensor, rows: torch.Tensor, t: int) -> torch.Tensor:
            cdf = logp.exp().cumsum(-1)
            target = uniforms[rows, t].unsqueeze(1) * cdf[:, -1:]
            return torch.searchsorted(cdf, target).squeeze(1).clamp_max(cdf.shape[1] - 1)

        stop_ids = () if sampling.ignore_eos else self._files.eos_ids
        return self._generations(requests, self._decode(requests, bounds, sampling.temperature, stop_ids, draw))

    def greedy(self, requests: Sequence[GenerationRequest], max_new_tokens: int) -> list[Generation]:
        """Most likely token at each position, for evaluation; never a training sample. Log-probs are those at T = 1."""
        settings = SamplingSettings(temperature=1.0, max_new_tokens=max_new_tokens)
        check_requests(list(requests), settings, self._files.vocab_size, self._max_model_len)
        if not requests:
            return []
        bounds = [tokens_bound(request, settings) for request in requests]
        drawn = self._decode(requests, bounds, 1.0, self._files.eos_ids, lambda logp, rows, t: logp.argmax(-1))
        return self._generations(requests, drawn)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob at T = 1 of each token after the first."""
        self._loaded()
        ids = torch.tensor([list(token_ids)], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        logp = logits.double().log_softmax(-1)
        return logp.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def close(self) -> None:
        """Nothing to release beyond memory."""

    def _loaded(self) -> int:
        if self._version is None:
            raise NotReady("the engine holds no verified weights yet; load a version first")
        return self._version

    @torch.inference_mode()
    def _decode(
        self, requests: Sequence[GenerationRequest], bounds: list[int], temperature: float, stop_ids: tuple[int, ...],
        choose: Choose,
    ) -> _Drawn:  # fmt: skip
        """The lock-step loop: one token per row and turn, finished rows dropped in blocks."""
        self._loaded()
        device, batch, n = self._device, len(requests), max(bounds)
        last = torch.tensor(bounds, device=device) - 1
        drawn = _Drawn(
            torch.zeros(batch, n, dtype=torch.int32, device=device), torch.zeros(batch, n, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device), torch.zeros(batch, dtype=torch.bool, device=device),
        )  # fmt: skip
        stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        logits, mask, cache = self._prefill([r.prompt_ids for r in requests])
        rows = torch.arange(batch, device=device)
        live = torch.ones(batch, dtype=torch.bool, device=device)
        for t in range(n):
            failpoint("worker.mid_generate")
            progress.mark()
            logp = (logits.double() / temperature).log_softmax(-1)
            tokens = choose(logp, rows, t)
            now = rows[live]
            drawn.tokens[now, t] = tokens[live].int()
            drawn.logprobs[now, t] = logp.gather(1, tokens[:, None])[live, 0].float()
            drawn.lengths[now] = t + 1
            ended = live & torch.isin(tokens, stops)
            drawn.stopped[rows[ended]] = True
            live = live & ~ended & (t < last[rows])
            n_live = int(live.sum())
            if n_live == 0 or t + 1 == n:
                break
            if len(rows) - n_live >= _DROP_SHARE * len(rows):
                kept = live.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                rows, mask, tokens, live = rows[kept], mask[kept], tokens[kept], live[kept]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = self._forward(tokens[:, None], mask, mask.sum(1, keepdim=True) - 1, cache)
        return drawn

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor, DynamicCache]:
        """Next-token logits [B, V], mask [B, P] and cache; each distinct prompt is computed once for all its siblings."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, distinct))
        ids = torch.zeros(len(distinct), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for prompt, i in distinct.items():
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp_min(0), cache)
        source = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        cache.batch_select_indices(source)
        return logits[source], mask[source], cache

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        out = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1]

    def _generations(self, requests: Sequence[GenerationRequest], drawn: _Drawn) -> list[Generation]:
        version = self._loaded()
        tokens, logprobs = drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy()
        out = []
        for i, (request, n, stopped) in enumerate(zip(requests, drawn.lengths.tolist(), drawn.stopped.tolist(), strict=True)):
            trajectory = Trajectory(pack_i32(tokens[i, :n].tolist()), pack_f32(logprobs[i, :n].tolist()), pack_i32([version] * n))
            out.append(Generation(request.key, trajectory, FinishReason.STOP if stopped else FinishReason.LENGTH))
        return out


def _check_twins(tensors: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], where: str) -> None:
    """A tied tensor may be given twice, but not with two values."""
    given: dict[int, str] = {}
    for name in sorted(tensors):
        twin = given.setdefault(targets[name].data_ptr(), name)
        if twin != name and not torch.equal(tensors[twin], tensors[name]):
            raise StaleWeights(f"{where}: {twin} and {name} are tied in this model, but the file holds different values")
