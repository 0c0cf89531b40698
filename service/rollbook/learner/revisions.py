"""Which configuration a planned step is trained under (R15).

Owns reading ``revisions/<number>.json`` of the run directory, which the ledger server writes when it opens a revision. A
plan names its revision, so a step replayed after an accepted change is trained under the configuration it was planned for.
"""

from __future__ import annotations

from pathlib import Path

from rollbook.core.changes import differences
from rollbook.core.config import Config, config_from_json
from rollbook.core.errors import ConfigMismatch
from rollbook.core.host import fsync_directory
from rollbook.learner.durable import make_directory, write_durably
from rollbook.observe.failpoints import failpoint


class Revisions:
    """Configurations by revision."""

    def __init__(self, directory: Path, current: Config) -> None:
        """``current`` is the configuration this process was started with."""
        self._directory = directory
        self._current = current
        self._known: dict[int, Config] = {}

    def config_of(self, revision: int, *, planned_now: bool) -> Config:
        """Configuration of a revision; one without a file is the current one, and its file is written.

        Raises:
            ConfigMismatch: a step planned now belongs to a revision with another configuration than the current one.
        """
        if revision not in self._known:
            self._known[revision] = self._load(revision) or self._store(revision)
        config = self._known[revision]
        if planned_now and config.digest() != self._current.digest():
            found = "; ".join(differences(config.to_json(), self._current.to_json()))
            raise ConfigMismatch(
                f"the run is at configuration revision {revision}, this learner was started with another: {found}; start it "
                "with the configuration the ledger server has, or have the change accepted there first"
            )
        return config

    def _path(self, revision: int) -> Path:
        return self._directory / f"{revision}.json"

    def _load(self, revision: int) -> Config | None:
        path = self._path(revision)
        return config_from_json(path.read_text()) if path.exists() else None

    def _store(self, revision: int) -> Config:
        make_directory(self._directory)
        scratch = self._directory / f"tmp.{revision}"
        scratch.unlink(missing_ok=True)
        write_durably(scratch, self._current.to_json().encode())
        failpoint("learner.revision.before_rename")
        scratch.rename(self._path(revision))
        failpoint("learner.revision.after_rename")
        fsync_directory(self._directory)
        return self._current


def read_revision(directory: Path, revision: int, current: Config) -> Config:
    """Configuration of a revision without storing anything; the current one where none is stored."""
    path = directory / f"{revision}.json"
    return config_from_json(path.read_text()) if path.exists() else current
