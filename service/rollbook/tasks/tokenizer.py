"""The tokenizer of a model directory: loading it without a network, and its identity.

Owns which files make a tokenizer. Never downloads and never runs code that comes with a model. Upholds P12: the digest
is part of the run's manifest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.core.errors import ConfigError
from rollbook.core.idempotency import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def _directory(model_dir: str | Path) -> Path:
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(f"model.path = {str(model_dir)!r} is not a directory: name a local Hugging Face model directory")
    if not any((directory / name).is_file() for name in _VOCABULARY):
        raise ConfigError(f"model.path = {str(model_dir)!r} holds no tokenizer: expected tokenizer.json or one of "
                          f"{', '.join(_VOCABULARY[1:])}")  # fmt: skip
    return directory


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model directory. Raises ConfigError (not a directory, no tokenizer in it, unreadable)."""
    directory = _directory(model_dir)
    from transformers import AutoTokenizer  # imported late: it takes seconds, and digests do not need it

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"the tokenizer in {directory} cannot be loaded: {error}") from error


def tokenizer_digests(model_dir: str | Path) -> tuple[str, str]:
    """(what turns text into token ids, what turns messages into text) of a model directory, each as sha256 hex.

    A template inside ``tokenizer_config.json`` counts as a template only. Raises ConfigError.
    """
    directory = _directory(model_dir)
    tokenizer: list[bytes | str | int] = ["tokenizer"]
    template: list[bytes | str | int] = ["chat template"]
    for file in (directory / name for name in _FILES):
        if not file.is_file():
            continue
        if file.name.startswith("chat_template"):
            template += [file.name, file.read_bytes()]
        elif file.name == "tokenizer_config.json":
            settings = _json_table(file)
            template += [file.name, json.dumps(settings.pop("chat_template", None), sort_keys=True)]
            tokenizer += [file.name, json.dumps(settings, sort_keys=True)]
        else:
            tokenizer += [file.name, file.read_bytes()]
    return digest(*tokenizer), digest(*template)


def _json_table(file: Path) -> dict:
    try:
        table = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} cannot be read: expected a JSON object")
    return table


def tokenizer_digest(model_dir: str | Path) -> str:
    """sha256 hex over names and bytes of the tokenizer's files, chat template included. Raises ConfigError."""
    directory = _directory(model_dir)
    fields: list[bytes | str | int] = ["tokenizer"]
    for name in _FILES:
        file = directory / name
        if file.is_file():
            fields += [name, file.read_bytes()]
    return digest(*fields)
