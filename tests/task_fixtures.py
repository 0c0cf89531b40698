"""What tests of the task layer share: a byte tokenizer in a directory, and configurations made from a few settings."""

from __future__ import annotations

import json
from pathlib import Path

from rollbook.core.config import Config, config_from_table

WORD_PROBLEMS = Path(__file__).parent / "data" / "word_problems.jsonl"


def write_byte_tokenizer(directory: Path, chat_template: str = "") -> Path:
    """A tokenizer directory with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if chat_template:
        (directory / "chat_template.jinja").write_text(chat_template)
    return directory


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered_tasks(path: Path, count: int) -> Path:
    """A task file whose task i has the prompt ``task i`` and the answer ``i``."""
    return write_jsonl(path, [{"prompt": f"task {i}", "answer": str(i)} for i in range(count)])


def make_config(model_path: Path | str = "unused", **sections: dict) -> Config:
    """A small checked configuration; each keyword overlays one section."""
    table: dict = {
        "run": {"id": "t", "dir": "unused", "steps": 4, "seed": 7},
        "model": {"path": str(model_path)},
        "task": {"source": "jsonl", "path": str(WORD_PROBLEMS)},
        "learner": {"groups_per_step": 3, "group_size": 2},
        "workers": [{"engine": "transformers", "max_model_len": 128}],
    }
    for name, overlay in sections.items():
        table[name] = overlay if name == "workers" else table.get(name, {}) | overlay  # type: ignore[operator]
    return config_from_table(table)
