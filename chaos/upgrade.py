"""Upgrades a run in the middle: a release with another schema, a worker with the old protocol, a migration that dies.

The next release is a copy of this one with one migration more. The run is begun by this release with one worker that leaves
out what the newest protocol has added; it is drained, the next release refuses the old schema, ``rollbook migrate`` is killed
half-way and run again, this release refuses the new schema, and the next one goes on with the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from drills import verdict
from drills.drill import Broken, Drill, main
from drills.faults import Fault
from drills.runs import COMMAND_BOUND_S, REPOSITORY, ROLLBOOK, OwnRun, environment
from rollbook.ledger.migrate import head_revision

NEXT = '''"""Add a remark to every run."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{previous}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("remark", sa.Text()))


def downgrade() -> None:
    op.drop_column("run", "remark")
'''
OLD_WORKER = "0"


class Upgrade(Drill):
    name = "upgrade"
    claim = (
        "a run is begun by one release with a worker of the one before, migrated by the next although the migration is killed "
        "half-way, and goes on: each release refuses the other's schema, and nothing is lost, trained twice or skipped"
    )
    needs_own_run = "its schema belongs to the release that somebody else has installed"
    count = 1
    interval_s = 1.0

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.told: dict[str, str] = {}

    def would_do(self) -> list[str]:
        return ["the schema of its own run, by one migration more"]

    def prepare(self) -> None:
        assert isinstance(self.run, OwnRun)
        self.run.tell("old", {"workers": [OLD_WORKER]})

    def strike(self) -> Fault | None:
        run = self.run
        assert isinstance(run, OwnRun) and run.process is not None
        package = next_release(run.root / "next")
        fault = Fault("ledger", "upgrade", n_processes=1)
        run.process.send_signal(signal.SIGTERM)
        try:
            code = run.process.wait(run.config.supervisor.drain_s + 60.0)
        except subprocess.TimeoutExpired:
            raise Broken("the run does not drain for its upgrade") from None
        if code != 130:
            raise Broken(f"told to drain, the run ended with exit code {code}{self._tail()}")
        fault.at = time.time()  # the run has drained; what was in hand was finished and counts for nothing
        self._expect("the next release refuses the old schema", package, "run", 2, "rollbook migrate")
        dies = {"ROLLBOOK_FAILPOINTS": "ledger.migrate.before_commit=crash"}
        self._expect("a migration dies before its commit", package, "migrate", -signal.SIGKILL, "", dies)
        self._expect("the next release still refuses", package, "run", 2, "rollbook migrate")
        self._expect("the migration is run again", package, "migrate", 0, "")
        self._expect("this release refuses the new schema", REPOSITORY / "service", "run", 2, "upgrade rollbook")
        run.package = package
        run.start()
        return fault

    def _expect(self, what: str, package: Path, command: str, code: int, said: str, env: dict[str, str] | None = None) -> None:
        """Run a command of one release on the run; anything but this exit code and this text breaks the claim."""
        run = self.run
        assert isinstance(run, OwnRun)
        arguments = [*ROLLBOOK, command, str(run.file), *(part for o in run.overrides for part in ("--set", o))]
        done = subprocess.run(
            arguments, env=environment() | {"PYTHONPATH": str(package)} | (env or {}), capture_output=True, text=True,
            timeout=COMMAND_BOUND_S, check=False,
        )  # fmt: skip
        text = done.stdout + done.stderr
        if done.returncode != code or said not in text:
            raise Broken(f"{what}: exit code {done.returncode}, expected {code} and {said!r}\n{text[-1500:]}")
        self.told[what] = f"exit code {done.returncode}"
        print(f"  {what}: exit code {done.returncode}", flush=True)

    def own_findings(self, result: verdict.Verdict) -> list[str]:
        names = self._samples_by_worker(result)
        return [] if names.get(f"worker-{OLD_WORKER}") else [f"old worker: no sample came from worker-{OLD_WORKER}"]

    def _samples_by_worker(self, result: verdict.Verdict) -> Counter[str]:
        rows = self.run.query(f"SELECT incarnation, labels_json FROM worker WHERE run_id = '{self.run.id}'")
        names = {incarnation: labels.partition('"name": "')[2].partition('"')[0] for incarnation, labels in rows}
        return Counter(names.get(row["incarnation"], "?") for row in result.tables.get("sample", []))

    def own_numbers(self, result: verdict.Verdict) -> dict[str, object]:
        by = self._samples_by_worker(result)
        return {"samples of the worker with the old protocol": by[f"worker-{OLD_WORKER}"], **self.told}


def next_release(root: Path) -> Path:
    """The package as a later release would be: one migration further. Returns the folder for PYTHONPATH."""
    shutil.copytree(REPOSITORY / "service", root / "service", ignore=shutil.ignore_patterns("sort-digits", "__pycache__"))
    os.symlink(REPOSITORY / "service/rollbook/assets/sort-digits", root / "service/rollbook/assets/sort-digits")
    shutil.copytree(REPOSITORY / "migrations", root / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    previous = head_revision()
    name = f"{int(previous) + 1:04d}"
    (root / "migrations" / "versions" / f"{name}_add_a_remark.py").write_text(NEXT.format(revision=name, previous=previous))
    return root / "service"


if __name__ == "__main__":
    sys.exit(main(Upgrade))
