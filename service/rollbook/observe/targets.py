"""Where each process of a run shows its metrics: one file a process in the run directory, and the list for Prometheus.

Owns ``supervisor/metrics/NAME``, written by the process itself and removed when it ends. A file that a killed process has left
says nothing: only processes that the ledger knows to be alive are listed, so the dead leave by themselves. Pages are on loopback,
so the list of a server names the processes of its own machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollbook.core.host import host

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """One process that shows metrics."""

    name: str
    """``ledger``, ``learner``, ``worker-0``, …"""
    role: str
    host: str
    address: str
    """host:port, on that host's loopback."""
    incarnation: str


def announce(run_dir: str | Path, target: Target) -> None:
    """Say where this process shows its metrics; a directory that cannot be written costs the entry and not the role."""
    file = _file(run_dir, target.name)
    temporary = file.with_name(f".{file.name}.{host().token()[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(target)))
        os.replace(temporary, file)
    except OSError as error:
        log.warning("not announced: %s", error, extra={"event": "metrics_unannounced"})


def withdraw(run_dir: str | Path, target: Target) -> None:
    """Take the process out, unless another one has its name by now."""
    if _read(_file(run_dir, target.name)) == target:
        with contextlib.suppress(OSError):
            _file(run_dir, target.name).unlink()


def announced(run_dir: str | Path) -> list[Target]:
    """Every process that has said where it shows its metrics, dead ones included, by name."""
    found = [_read(file) for file in sorted(_file(run_dir, "x").parent.glob("[!.]*"))]
    return [target for target in found if target is not None]


def service_discovery(run_dir: str | Path, run_id: str, here: str, alive: Collection[str]) -> list[dict[str, Any]]:
    """The list of ``http_sd_config``: ``alive`` incarnations on the host ``here``, with labels ``run``, ``role``, ``worker``."""
    return [
        {
            "targets": [target.address],
            "labels": {"run": run_id, "role": target.role} | ({"worker": target.name} if target.role == "worker" else {}),
        }
        for target in announced(run_dir)
        if target.host == here and target.incarnation in alive
    ]


def _file(run_dir: str | Path, name: str) -> Path:
    return Path(run_dir) / "supervisor" / "metrics" / name


def _read(file: Path) -> Target | None:
    try:
        content = json.loads(file.read_bytes())
        return Target(*(str(content[name]) for name in ("name", "role", "host", "address", "incarnation")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
