"""Failpoints armed by the configuration, in real processes: each role dies once where it is told to, and the run ends clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_support import TinyRun

KILLS = {
    "ledger.append.before_cursor": "crash",
    "worker.spool.between_renames": "crash",
    "learner.durable.after_rename": "crash@4",
    "learner.after_fetch": "crash@2",
}

pytestmark = pytest.mark.timeout(300)


def test_a_run_whose_configuration_kills_its_roles_ends_clean_and_each_point_fires_once(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.once = False  # where the markers stand is the configuration's
    armed = ",".join(f"{name}={action}" for name, action in KILLS.items())
    refused, told = run.command("run", str(run.config), "--set", f"chaos.failpoints={armed}")
    assert refused == 2 and "run.chaos_allowed = true" in told and not (run.dir / "logs").exists()
    code, output = run.run("--set", "run.chaos_allowed=true", "--set", f"chaos.failpoints={armed}", "--no-report")
    assert code == 0, f"{output}\n{run.tails()}"
    fired = {path.name.partition("@")[0] for path in (run.dir / "chaos").iterdir()}
    assert fired == set(KILLS)
    assert output.count("killed by SIGKILL") == len(KILLS) and "audit: clean" in output
