"""Runs of the real learner on the real ledger for the thread tests, in lives that end at a named point."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from threads_support import outcome_of

from learner_support import make_config
from learner_worker import Worker, feed, steps_of
from rollbook.core.config import Config
from rollbook.core.records import RunRecord
from rollbook.learner import loop
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints

STEPS = 4


def fixed_config(model_dir: Path, run_dir: Path, every_steps: int = 2) -> Config:
    """Lag 1 exactly: what is sampled is a function of key and version, so two runs of it are the same run."""
    config = make_config(model_dir, run_dir, steps=STEPS, every_steps=every_steps)
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, kind="fixed", lag_versions=1))


@dataclasses.dataclass
class Service:
    """An open ledger with every group issued and a worker that fills what may be filled."""

    config: Config
    ledger: Ledger
    monkeypatch: pytest.MonkeyPatch
    lives: int = 0

    def live(self, armed: str = "", stop: threading.Event | None = None) -> Any:
        """One learner's life: True or False as it ended, or the class of its error."""
        self.monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life {self.lives}")
        self.monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life {self.lives - 1}" if self.lives else "")
        self.lives += 1
        failpoints.arm(armed)
        try:
            return outcome_of(lambda: loop.run_learner(self.config, self.ledger, stop or threading.Event()))
        finally:
            failpoints.arm("")

    @property
    def digests(self) -> list[str]:
        return [version.digest for version in self.ledger.versions(0)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Stored metrics of every step without what a clock gave and what saving a checkpoint cost."""

        def measured(name: str) -> bool:
            return "seconds" in name or name.startswith(("checkpoint_", "finished_"))

        return [{k: v for k, v in step.items() if not measured(k)} for step in self.ledger.step_metrics(0)]

    def rows(self, statement: str) -> list[tuple]:
        with self.ledger._read() as conn:
            return [tuple(row) for row in conn.exec_driver_sql(statement)]


@contextmanager
def service(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service on a SQLite file in the run's directory."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with Ledger(f"sqlite:///{run_dir / 'ledger.sqlite'}", holder="server", role_ttl_s=60.0) as ledger:
        ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
        feed(ledger, steps_of(config) + config.learner.groups_per_step)
        worker = Worker(ledger)
        worker.start()
        try:
            yield Service(config, ledger, monkeypatch)
        finally:
            worker.stop()
