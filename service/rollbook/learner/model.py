"""The policy as the trainer computes it: loading, numerics, log-probs of completion tokens.

Owns the model, its device and dtype, and how logits become log-probs. Never sees a reward, a plan or a file of a run.
Upholds P4: every switch that changes a bit (threads, TF32, kernels, dropout) is set here, once.

Layout: a row holds the prompt, then the completion, then padding on the right. With causal attention nothing real ever
attends to padding, so no attention mask is needed and the fused causal kernels apply; position ids are 0, 1, 2, ... in
every row. The head and the log-softmax are float32 or wider, whatever the model's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollbook.core.config import Config, LearnerConfig
from rollbook.core.errors import ConfigError
from rollbook.learner.corrections import upcast
from rollbook.learner.diagnostics import entropy_from_logits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Dtypes of weights; float16 would need a loss scaler and is not offered."""

ATTENTION = "sdpa"
"""Attention implementation, explicit so that an installed extension package cannot change the arithmetic."""

LOGITS_MAX = {"cpu": 2**27, "cuda": 2**30}
"""Logits held at a time by device type; more are recomputed in the backward pass, piece by piece."""

_SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_HEAD_PROBE_TOKENS = 8


def dtype_of(name: str) -> torch.dtype:
    """Dtype by its configuration name. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported by the learner; choose one of {sorted(DTYPES)}")
    return DTYPES[name]


def prepare_torch(settings: LearnerConfig) -> torch.device:
    """Fix every process-wide switch that changes numbers, and return the training device.

    Raises:
        ConfigError: the device does not exist here.
    """
    if settings.deterministic:
        # Read by cuBLAS when CUDA starts; without it deterministic matrix products are refused.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device(settings.device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"learner.device = {settings.device!r}: 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"learner.device = {settings.device!r}, but torch {torch.__version__} sees no CUDA device here")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # cuDNN attention picks its algorithm by itself and promises no deterministic backward pass.
    torch.backends.cuda.enable_cudnn_sdp(not settings.deterministic)
    return device


def load_policy(config: Config) -> Policy:
    """Load the starting policy from its Hugging Face directory: safetensors only, no code from the directory.

    Raises:
        ConfigError: the directory holds no such model, or its head is more than a matrix.
    """
    settings = config.learner
    device = prepare_torch(settings)
    if settings.autocast not in ("", "bfloat16"):
        raise ConfigError(f"learner.autocast = {settings.autocast!r}: '' or 'bfloat16'")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=dtype_of(settings.dtype), attn_implementation=ATTENTION, trust_remote_code=False,
            use_safetensors=True, local_files_only=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: no loadable causal language model there: {error}") from error
    return Policy(
        model.to(device),  # type: ignore[arg-type]  # the library's wrapper hides torch's signature
        temperature=config.sampling.temperature,
        autocast=torch.bfloat16 if settings.autocast else None,
        gradient_checkpointing=settings.gradient_checkpointing,
    )


class Policy:
    """A causal language model and the conditions under which its log-probs are taken."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        autocast: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Take over a loaded model; dropout is switched off, because the sampled policy has none.

        Raises:
            ConfigError: the model computes its logits otherwise than as hidden states times the head.
        """
        self.model = model
        self.device = model.device
        self.temperature = temperature
        self.vocab_size = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
        self._autocast = autocast
        _switch_dropout_off(model)
        model.eval()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        self._refuse_scaled_head()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer once, under its first name; tied ones therefore appear once."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def weights(self) -> dict[str, Tensor]:
        """What a policy version consists of: parameters and persistent buffers, each once, detached, not copied."""
        stored = self.model.state_dict(keep_vars=True).keys()
        return {name: tensor.detach() for name, tensor in self.named_tensors() if name in stored}

    def completion_logprobs(
        self, token_ids: Tensor, prompt_lengths: Tensor, mask: Tensor, *, with_entropy: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Log-probs of the completion tokens marked in ``mask``, at the sampling temperature.

        Args:
            token_ids: [B, L] int64 on the CPU: prompt, completion, right padding.
            prompt_lengths: [B] int64 on the CPU, each at least 1.
            mask: [B, T] bool on the CPU; column t of row b stands for token ``prompt_lengths[b] + t``.
            with_entropy: also return the entropy of the distribution at each of those tokens.
            temperature: instead of the sampling temperature.

        Returns:
            [B, T] natural log-probs, float32 or wider, on the model's device, 0 where masked; and the entropy likewise
            in nats, without gradient, or None.
        """
        rows, columns = mask.nonzero(as_tuple=True)
        predicting = rows * token_ids.shape[1] + prompt_lengths[rows] + columns - 1
        targets = token_ids.reshape(-1)[predicting + 1].to(self.device)
        hidden = self._hidden(token_ids.to(self.device)).index_select(0, predicting.to(self.device))
        chosen, entropy = self._score(hidden, targets, self.temperature if temperature is None else temperature, with_entropy)
        places = (rows * mask.shape[1] + columns).to(self.device)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(mask.numel()).index_copy(0, places, values).reshape(mask.shape)

        return spread(chosen), None if entropy is None else spread(entropy)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob (T = 1) of each token after the first, given its prefix: length n - 1."""
        tokens = torch.tensor([list(token_ids)])
        mask = torch.ones(1, tokens.shape[1] - 1, dtype=torch.bool)
        logprobs, _ = self.completion_logprobs(tokens, torch.ones(1, dtype=torch.int64), mask, temperature=1.0)
        return logprobs[0].tolist()

    @contextmanager
    def rounded_to(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block the weights hold the values they have after a cast to ``dtype``; afterwards their own again."""
        kept = {name: tensor.clone() for name, tensor in self.weights().items()}
        try:
            for tensor in self.weights().values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(dtype))
            yield
        finally:
            for name, tensor in self.weights().items():
                tensor.copy_(kept[name])

    def _hidden(self, token_ids: Tensor) -> Tensor:
        """[B * L, H] last hidden states."""
        positions = torch.arange(token_ids.shape[1], device=self.device).expand_as(token_ids)
        context: AbstractContextManager[object] = nullcontext()
        if self._autocast is not None:
            context = torch.autocast(self.device.type, dtype=self._autocast)
        with context:
            output = self.model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        rows_max = max(1, LOGITS_MAX[self.device.type] // self.vocab_size)
        if len(targets) <= rows_max:
            return self._head(hidden, targets, temperature, with_entropy)
        pieces = [
            checkpoint(self._head, *piece, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(hidden.split(rows_max), targets.split(rows_max), strict=True)
        ]
        entropy = torch.cat([piece[1] for piece in pieces]) if with_entropy else None
        return torch.cat([piece[0] for piece in pieces]), entropy

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else upcast(head.bias)
        logits = F.linear(upcast(hidden), upcast(head.weight), bias)
        if temperature != 1.0:
            logits = logits / temperature
        entropy = entropy_from_logits(logits.detach()) if with_entropy else None
        # Cross entropy, because its backward pass is deterministic on every device; a gather's is not.
        return -F.cross_entropy(logits, targets, reduction="none"), entropy

    @torch.no_grad()
    def _refuse_scaled_head(self) -> None:
        scaled = [name for name in _SCALED_HEADS if getattr(self.model.config, name, None) not in (None, 1, 1.0)]
        tokens = torch.arange(_HEAD_PROBE_TOKENS) % self.vocab_size
        logits = upcast(self.model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0, :-1])
        theirs = -F.cross_entropy(logits, tokens[1:].to(self.device), reduction="none")
        ours = theirs.new_tensor(self.score(tokens.tolist()))
        tolerance = 1e-3 if self.model.dtype != torch.bfloat16 and self._autocast is None else 0.5
        gap = float((ours - theirs).abs().max())
        if scaled or not gap <= tolerance:
            raise ConfigError(
                f"{type(self.model).__name__} does not compute its logits as hidden states times the head "
                f"(settings {scaled}, log-prob gap {gap:.3g}); its log-probs would be wrong here, use another model"
            )


def _switch_dropout_off(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - modules declare their attributes as tensors

