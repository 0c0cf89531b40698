"""What is looked at before a run is opened, so that a wrong input leaves nothing behind that a repaired one would differ from.

Owns which checks are made; each belongs to the layer that will use the thing. Never writes to a ledger.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, UnsafeStorage
from rollbook.report.progress import shown_url


def check_inputs(config: Config) -> None:
    """Model directory, tokenizer, task files, and reward function or environment can be used.

    Raises: ConfigError, TaskError naming the thing and what it lacks.
    """
    from rollbook.rollout.model_files import read_model_files
    from rollbook.tasks.environment_tasks import check_environment
    from rollbook.tasks.sources import load_heldout, load_source
    from rollbook.tasks.tokenizer import tokenizer_digest
    from rollbook.tasks.verifier import make_verifier

    read_model_files(config.model.path)
    tokenizer_digest(config.model.path)
    source = load_source(config)
    if config.task.heldout_path:
        load_heldout(config, source)
    if config.environment.name:
        check_environment(config)
    else:
        make_verifier(config)


def check_run_dir(config: Config) -> None:
    """The run directory can be written and belongs to no other run. Raises ConfigError."""
    directory = Path(config.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.dir = {directory} cannot be written ({error.strerror}): name another directory, or make this one writable"
        ) from None
    held = _run_id_in(directory)
    if held not in (None, config.run.id):
        raise ConfigError(
            f"run.dir = {directory} holds the run {held!r}, and two runs in one directory would take each other's checkpoints "
            f"for damaged ones; choose another run.dir for {config.run.id!r}"
        )


def check_still_recorded(config: Config, recorded: Collection[str]) -> None:
    """A run that was opened here before is still in its ledger; one that is not would silently begin again.

    Raises: UnsafeStorage.
    """
    if _run_id_in(Path(config.run.dir)) == config.run.id and config.run.id not in recorded:
        raise UnsafeStorage(
            f"{config.run.dir} holds the run {config.run.id!r}, but its ledger {shown_url(config.ledger.url)} does not: the file "
            "was emptied, removed or replaced. Restore it from a backup (with its -wal file), or choose another run.dir for a "
            "new run"
        )


def _run_id_in(directory: Path) -> str | None:
    """Id of the run that was opened in the directory; None when there was none or its note cannot be read."""
    try:
        return str(json.loads((directory / "config.json").read_text())["config"]["run"]["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
