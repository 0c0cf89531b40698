"""What a model directory must hold, and what engines must agree on: end of sequence, names and shapes of weights, prompts.

Owns these checks, once for every engine. Never reads sampling defaults from the directory: what is not in
the configuration is off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.errors import ConfigError, DigestMismatch, InvalidRequest, StaleWeights, UnsupportedSampling
from rollbook.core.ports import GenerationRequest, SamplingSettings
from rollbook.core.weights import open_safetensors

HEAD = "lm_head.weight"
"""Name under which a checkpoint may repeat a tied embedding."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked Hugging Face model directory."""

    path: Path
    eos_ids: tuple[int, ...]
    """Ids that end a completion; the sampled one is the completion's last token."""
    vocab_size: int
    shapes: dict[str, tuple[int, ...]]
    """Shape of every stored tensor that a version's weights must hold, and no other; without a tied head."""
    tied_head: bool


def read_model_files(path: str) -> ModelFiles:
    """Check a model directory. Raises ConfigError naming everything that is missing."""
    place = Path(path)
    if not place.is_dir():
        raise ConfigError(f"model.path = {path}: no such directory")
    missing = [pattern for pattern in ("config.json", "*.safetensors") if not any(place.glob(pattern))]
    if missing:
        raise ConfigError(
            f"model.path = {path} is not a model directory: {', '.join(missing)} missing; "
            "name a local Hugging Face directory with configuration, safetensors and tokenizer"
        )
    config = _read_json(place / "config.json")
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not vocab_size:
        raise ConfigError(f"{place / 'config.json'} has no vocab_size")
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelFiles(place, _eos_ids(place, config), int(vocab_size), _shapes(place, tied), tied)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _eos_ids(place: Path, config: dict) -> tuple[int, ...]:
    generation = place / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        raise ConfigError(f"{place}: neither generation_config.json nor config.json names an eos_token_id; add it")
    return tuple(sorted(found)) if isinstance(found, list) else (int(found),)


def _shapes(place: Path, tied_head: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(place.glob("*.safetensors")):
        try:
            with open_safetensors(file) as tensors:
                shapes |= {tensor.name: tensor.shape for tensor in tensors}
        except DigestMismatch as error:
            raise ConfigError(f"model.path: {error}") from error
    return {name: shape for name, shape in shapes.items() if not (_is_table(name) or (tied_head and name == HEAD))}


def _is_table(name: str) -> bool:
    # Old checkpoints store these constants; nobody trains or publishes them.
    return name.endswith("rotary_emb.inv_freq")


def check_shapes(shapes: dict[str, tuple[int, ...]], files: ModelFiles, where: str) -> None:
    """Refuse weights that are not those of the model directory's architecture. Raises StaleWeights naming the first few."""
    given = {name: shape for name, shape in shapes.items() if not (files.tied_head and name == HEAD)}
    missing, unknown = sorted(files.shapes.keys() - given.keys()), sorted(given.keys() - files.shapes.keys())
    other = sorted(name for name in given.keys() & files.shapes.keys() if given[name] != files.shapes[name])
    if missing or unknown or other:
        raise StaleWeights(
            f"{where} does not fit the model in {files.path}: missing {missing[:3]}, unknown {unknown[:3]}, of other shape "
            f"{other[:3]} ({len(missing)}, {len(unknown)}, {len(other)} in all); was model.path changed?"
        )


def check_requests(
    requests: list[GenerationRequest], sampling: SamplingSettings, vocab_size: int, max_model_len: int
) -> None:
    """Refuse what an engine would truncate, clamp or sample from another distribution.

    Raises: UnsupportedSampling (greedy), InvalidRequest (naming the slot).
    """
    if not sampling.temperature > 0:
        raise UnsupportedSampling(f"temperature {sampling.temperature}: greedy rows are not samples of the policy; use > 0")
    if sampling.max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens = {sampling.max_new_tokens}: at least 1")
    for request in requests:
        if request.max_new_tokens is not None and not 1 <= request.max_new_tokens <= sampling.max_new_tokens:
            raise InvalidRequest(
                f"slot {request.key}: max_new_tokens = {request.max_new_tokens}; the settings say 1 to {sampling.max_new_tokens}"
            )
        if reason := prompt_error(request.prompt_ids, tokens_bound(request, sampling), vocab_size, max_model_len):
            raise InvalidRequest(f"slot {request.key}: {reason}")


def tokens_bound(request: GenerationRequest, sampling: SamplingSettings) -> int:
    """Most tokens this request may sample."""
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def prompt_error(prompt_ids: tuple[int, ...], max_new_tokens: int, vocab_size: int, max_model_len: int) -> str:
    """Why a prompt cannot be generated from; empty when it can."""
    if not prompt_ids:
        return "empty prompt"
    if len(prompt_ids) + max_new_tokens > max_model_len:
        return (
            f"prompt of {len(prompt_ids)} tokens + max_new_tokens {max_new_tokens} exceeds max_model_len {max_model_len}; "
            "raise workers.max_model_len or shorten the prompt"
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        return f"prompt has token id {max(prompt_ids)} outside the vocabulary of {vocab_size}"
    return ""
