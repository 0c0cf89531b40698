"""What differs between a run as it was opened and as it is offered again, and which of it may be accepted.

Owns the names of fields as a person types them after ``--accept``, the fields that may change at any time, and the ones
that never may, each with its reason. Never decides by itself: the ledger asks, in the transaction that would store the
revision. Upholds P12 (checked at resume) and R15 (a change is accepted field by field).

A record is a table with the resolved configuration under ``config`` and digests of its inputs under ``inputs``, or a
resolved configuration alone. Names are paths in the configuration (``learner.lr``, ``workers[0].slots``) and the names of
inputs (``task.dataset_sha256``).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from rollbook.core.config import FREE, config_from_table, portable_code
from rollbook.core.errors import ConfigError
from rollbook.core.idempotency import digest
from rollbook.core.tables import join

WEIGHTS, ARCHITECTURE, TOKENIZER = "model.weights_sha256", "model.config_sha256", "model.tokenizer_sha256"
CHAT_TEMPLATE, DATASET, HELDOUT = "model.chat_template_sha256", "task.dataset_sha256", "task.heldout_sha256"
REWARD, ENVIRONMENT = "task.reward_sha256", "environment.source_sha256"
"""Names of inputs: what a run reads beside its configuration."""

_BY_FILE = "model/"
"""Beginning of the names that the first release gave to the files of the model directory."""

NEVER = {
    "learner.group_size": "every issued group has that many slots, and advantages are taken over them",
    "learner.groups_per_step": "the fixed schedule derives a group's step from its ordinal by it",
    "schedule.kind": "recorded rollouts were leased and planned under it",
    "schedule.lag_versions": "every issued slot has a version to be sampled under, which follows from it",
    "run.seed": "the order of tasks, the seed of every sample and the chain of plans begin with it",
    "learner.dtype": "checkpoints hold the weights and the optimizer's moments in it",
    ARCHITECTURE: "checkpoints and published versions have that architecture",
    WEIGHTS: "version 0 and every replay start from these weights",
    TOKENIZER: "recorded prompts and completions are token ids of it",
}
"""Fields that no revision may change, and why."""

ONCE_ISSUED, ONCE_PUBLISHED = (TOKENIZER,), (ARCHITECTURE, WEIGHTS, "learner.dtype")
"""Of these, the ones that may still change while no group is issued, and while no version is published."""


def changed_fields(stored_json: str, offered_json: str) -> dict[str, str]:
    """``{name: "stored -> offered"}`` for every field that changes what is computed and differs between two records.

    A field the stored record lacks, because an older release wrote it, has its default there; an input it could not name is
    not compared. Digests are abbreviated.
    """
    stored, offered = _resolved(json.loads(stored_json)), _resolved(json.loads(offered_json))
    out: dict[str, str] = {}

    def walk(path: str, a: object, b: object) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                walk(join(path, key), a.get(key), b.get(key))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, (one, other) in enumerate(zip(a, b, strict=True)):
                walk(f"{path}[{index}]", one, other)
        elif a != b and not path.startswith(FREE):
            out[path] = f"{_shown(a)} -> {_shown(b)}"

    walk("", stored, offered)
    before, now = json.loads(stored_json).get("inputs", {}), json.loads(offered_json).get("inputs", {})
    if _is_by_file(before) and not _is_by_file(now):
        before = _renamed(before)
        now = {name: value for name, value in now.items() if name in before or name == HELDOUT}
    for name in sorted(before.keys() | now.keys()):
        walk(name, before.get(name), now.get(name))
    return out


def _is_by_file(inputs: Collection[str]) -> bool:
    return any(name.startswith(_BY_FILE) for name in inputs)


def _renamed(inputs: Mapping[str, str]) -> dict[str, str]:
    """Inputs as the first release recorded them, file by file, under the names and digests of today.

    Tokenizer and template cannot be told from its digests of files, and it had none of a procedural dataset.
    """
    files = {name.removeprefix(_BY_FILE): value for name, value in inputs.items() if name.startswith(_BY_FILE)}

    def of(names: Collection[str]) -> str:
        return digest("files", *(field for name in sorted(names) if name in files for field in (name, files[name])))

    weights = [name for name in files if name.endswith(".safetensors")]
    places = {"task.path": DATASET, "task.heldout_path": HELDOUT, "task.reward": REWARD}
    out = {WEIGHTS: of(weights), ARCHITECTURE: of(["config.json", "generation_config.json"])}
    return out | {places[name]: value for name, value in inputs.items() if name in places}


def differences(stored_json: str, offered_json: str) -> list[str]:
    """``name: stored -> offered`` for every one of ``changed_fields``."""
    return [f"{name}: {how}" for name, how in changed_fields(stored_json, offered_json).items()]


def refusal(run_id: str, changed: Mapping[str, str], fixed: Collection[str], accepted: Collection[str]) -> str:
    """Why a run may not go on with these changes, naming every one; empty when each is accepted by name.

    Args:
        fixed: the changed fields that may not change any more.
        accepted: names the caller accepts; names that did not change mean nothing.
    """
    listing = "; ".join(f"{name}: {how}" for name, how in changed.items())
    if fixed:
        reasons = "; ".join(f"{name} cannot change within a run: {NEVER.get(name, 'the ledger enforces it')}" for name in fixed)
        return (
            f"run {run_id!r} was opened with another configuration ({listing}). {reasons}. Restore it, or start a new run under "
            "another run.id and run.dir"
        )
    missing = [name for name in changed if name not in accepted]
    if not missing:
        return ""
    flags = " ".join(f"--accept {_quoted(name)}" for name in changed)
    return (
        f"run {run_id!r} was opened with another configuration ({listing}); not accepted: {', '.join(missing)}. Restore it, or "
        f"accept each change by its name: {flags}. What is accepted holds from the first unplanned step on"
    )


def check_names(record_json: str, names: Collection[str]) -> None:
    """Refuse names that no field of the record has, with the nearest one. Raises ConfigError."""
    table = json.loads(record_json)
    known = {*_leaves("", _resolved(table)), *table.get("inputs", {}), DATASET, HELDOUT, ENVIRONMENT}
    for name in names:
        if name in known or name.startswith("task.settings.") or any(k.startswith((f"{name}.", f"{name}[")) for k in known):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; names look like learner.lr or task.dataset_sha256"
        raise ConfigError(f"--accept {name}: the run has no such field{hint}")


def _resolved(table: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a record with every field, and without the places of its inputs, whose digests are recorded."""
    config = table["config"] if isinstance(table.get("config"), dict) else table
    try:
        config = json.loads(config_from_table(config).to_json())
        for section, name in (("task", "reward"), ("environment", "name")):
            config[section][name] = portable_code(config[section][name])
    except ConfigError:
        pass  # of another release, or no configuration: its fields are compared as they are
    return config


def _leaves(path: str, value: object) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(join(path, key), inner)]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in _leaves(f"{path}[{index}]", inner)]
    return [path]


def _shown(value: object) -> str:
    is_digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"{value[:12]}…" if isinstance(value, str) and is_digest else repr(value)


def _quoted(name: str) -> str:
    return f"'{name}'" if "[" in name else name
