"""A worker driven to its end over doubles of the ledger and the engine."""

from __future__ import annotations

import threading
from pathlib import Path

from rollbook.core.config import Config, WorkerConfig
from rollbook.rollout.worker import run_worker
from rollout_doubles import MemoryLedger, ScriptedEngine

ANSWERS = ("12", "13", "123", "1", "45", "6")


def work(
    config: Config, ledger: MemoryLedger, engine: ScriptedEngine | None = None, stop: threading.Event | None = None
) -> ScriptedEngine:
    """Run the worker to its end; returns the engine it used."""
    made = engine or ScriptedEngine(ledger)

    def factory(config: Config, kind: WorkerConfig) -> ScriptedEngine:
        ledger.events.append("engine")
        return made

    run_worker(config, 0, ledger, ledger, stop or threading.Event(), engine_factory=factory)
    return made


def spooled(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "spool" / "worker-0").iterdir() if p.name != "leases.json")
