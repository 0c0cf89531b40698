"""The soak as a user starts it: what it kills, what it records, and that it tells when a run did not survive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import soak_table
from run_support import MODEL, REPOSITORY, environment

pytestmark = pytest.mark.timeout(600)

CHAOS = REPOSITORY / "chaos"
STEPS = 8


def soak(folder: Path, *arguments: str, changed: dict[str, str] | None = None) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and records of a soak of small runs, one at a time."""
    config = (CHAOS / "soak.toml").read_text().replace("../service/rollbook/assets/sort-digits", str(MODEL))
    for old, new in {"steps = 40": f"steps = {STEPS}", **(changed or {})}.items():
        assert config.count(old) == 1
        config = config.replace(old, new)
    (folder / "soak.toml").write_text(config)
    done = subprocess.run(
        [sys.executable, str(CHAOS / "soak.py"), "--lanes", "1", "--runs", "1", "--config", str(folder / "soak.toml"),
         "--dir", str(folder / "runs"), "--results", str(folder / "soak.jsonl"), "--seed", "3", *arguments],
        env=environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, soak_table.read(folder / "soak.jsonl")


def test_a_soak_kills_a_run_judges_it_and_records_it(tmp_path: Path) -> None:
    code, output, (record,) = soak(tmp_path, "--kills", "4", "--only", "fixed-sqlite-1w")
    assert code == 0, output
    assert (record["verdict"], record["findings"], record["steps"], record["seed"]) == ("clean", [], STEPS, 3)
    assert record["schedule"] == "fixed" and record["database"] == "sqlite" and record["workers"] == 1
    assert record["samples"] == record["acknowledged"] == STEPS * 16
    deaths = [each for each in record["each"] if each[1] != "sigstop"]
    assert 1 <= len(deaths) == sum(record["kills"].values()) <= record["processes_killed"]
    assert {"acknowledged_lost": 0, "trained_twice": 0, "prompts_skipped": 0}.items() <= record.items()
    assert f"| kills | {len(deaths)} (" in output and "| clean runs | 1 |" in output
    assert not [*(tmp_path / "runs").glob("*/run_*")], "a clean run leaves no directory"


def test_a_run_that_did_not_survive_is_recorded_kept_and_told(tmp_path: Path) -> None:
    """No restart is allowed, so the first death of a role ends the run."""
    code, output, (record,) = soak(
        tmp_path, "--kills", "6", "--only", "bounded-sqlite-1w", changed={"restarts_max = 100000": "restarts_max = 0"}
    )  # fmt: skip
    assert code == 1
    assert record["verdict"] == "failed" and any("ended with exit code 1" in finding for finding in record["findings"])
    assert "RUN FAILED: seed 3, run 0" in output and "| failed runs | 1 |" in output
    (kept,) = (tmp_path / "runs").glob("*/run_0000")
    assert "restarts_max = 0 allows no further restart" in (kept / "output.txt").read_text()


def test_a_configuration_that_does_not_allow_kills_is_refused(tmp_path: Path) -> None:
    code, output, records = soak(tmp_path, changed={"chaos_allowed = true": "chaos_allowed = false"})
    assert code == 2 and "does not say run.chaos_allowed = true" in output
    assert records == [] and not (tmp_path / "runs").exists()


def test_the_table_adds_up_runs_and_hides_no_failed_one() -> None:
    run = {
        "soak": "a", "machine": {"cores": 2, "cpu": "x", "python": "3.11"}, "fork_server": True, "schedule": "fixed",
        "database": "sqlite", "workers": 1, "wall_s": 3600.0, "kills": {"worker": 2}, "stops": {"ledger": 1},
        "processes_killed": 2, "samples": 10, "acknowledged": 10, "acknowledged_lost": 0, "trained_twice": 0, "prompts": 3,
        "prompts_skipped": 0, "generated_again": 3, "verdict": "clean",
        "each": [
            ["worker", "sigkill", 1.0, 0.5, 1.5], ["worker", "worker.after_lease", 2.0, None, 2.5],
            ["ledger", "sigstop", 3.0, 9.0, 9.0],
        ],
    }  # fmt: skip
    failed = run | {"verdict": "failed", "acknowledged_lost": 1, "soak": "b"}
    rows = dict(line.strip("| ").split(" | ") for line in soak_table.table([run, failed]).splitlines()[2:])
    assert rows["kills"].startswith("4 (2 of them at failpoints")
    assert rows["— worker"] == "4" and rows["— feeder"] == "0" and rows["processes killed"] == "4"
    assert rows["clean runs"] == "1" and rows["failed runs"] == "1" and rows["acknowledged samples lost"] == "1"
    assert rows["rollouts leased again per kill"] == "1.50"
    assert rows["first new rollout after a kill, p50 / p95"] == "0.50 / 0.50 s", "stops are not kills; none after means none"
    assert rows["wall time"] == "2.0 h of runs, 2 soaks"
