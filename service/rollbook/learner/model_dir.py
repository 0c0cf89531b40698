"""Model directories made on this machine: created whole or not at all, with a record of how and with what.

Owns the creation of a Hugging Face model directory by a converter or a warm start, and its `made.json`.
Never touches a directory that already has content, and never writes a policy version: those belong to publishing.

Upholds P12 (reproducible): `made.json` names the command, the package versions and the sha256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError

MADE_FILE = "made.json"
_READ_BYTES = 1 << 20


@contextmanager
def new_model_directory(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a scratch directory that becomes `out_dir` when the block ends, and vanishes when it raises.

    The scratch directory is a sibling of `out_dir`, so that the final rename stays on one file system.

    Raises:
        ConfigError: `out_dir` is a file or a directory with content; nothing in it is changed.
    """
    target = Path(out_dir).absolute()
    _refuse_occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        _give_default_modes(scratch)
        _refuse_occupied(target)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_occupied(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"model directory {target} already exists and is not an empty directory: "
            "name a new directory, or remove this one first"
        )


def _give_default_modes(scratch: Path) -> None:
    # mkdtemp makes the directory private to its owner, and some writers do the same with files; a model
    # directory is read by the workers too, possibly under another user.
    scratch.chmod(0o755)
    for path in scratch.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def sha256_of_files(directory: Path) -> dict[str, str]:
    """Return the hex sha256 of every file below `directory`, keyed by relative POSIX path, without `made.json`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MADE_FILE)
    return {path.relative_to(directory).as_posix(): sha256_of(path) for path in files}


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of one file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_made_record(directory: Path, record: dict[str, Any], packages: tuple[str, ...]) -> dict[str, Any]:
    """Write `made.json`: `record`, the versions of Python and `packages`, and the digest of every other file.

    Nothing in it depends on the clock or on the place of the directory, so that the same making gives the same file.
    """
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    made = record | {"versions": versions, "sha256": sha256_of_files(directory)}
    (directory / MADE_FILE).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made
