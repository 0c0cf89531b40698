"""Which role ran on which node, GPU and driver: one JSON line per started process in ``supervisor/placements.jsonl``.

Owns the file and what is asked of ``nvidia-smi``. Never decides where anything runs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rollbook.supervise import logs
from rollbook.supervise.backend import Placement

FILE_NAME = "placements.jsonl"
ASK_S = 10.0
"""How long ``nvidia-smi`` may take; a driver that hangs must not hold up a role."""
BYTES_MAX = 8 << 20
"""The file is moved to ``placements.jsonl.1`` beyond it."""


def record(run_dir: Path, placement: Placement) -> None:
    """Append where a role was started. A run directory that cannot be written costs the line, not the run."""
    file = run_dir / "supervisor" / FILE_NAME
    line = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"} | asdict(placement)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        logs.keep_small(file, BYTES_MAX)
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def where(placement: Placement) -> str:
    """Process and node of a role, in words."""
    return f"pid {placement.pid}" + (f" on {placement.node}" if placement.node != placement.host else "")


def history(run_dir: Path) -> list[dict]:
    """Every recorded placement, oldest first; a line that was cut by a crash is left out."""
    out: list[dict] = []
    with contextlib.suppress(OSError):
        for line in (run_dir / "supervisor" / FILE_NAME).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and "role" in entry:
                    out.append(entry)
    return out


def newest(run_dir: Path) -> dict[str, dict]:
    """The newest placement of every role that ever ran, by role name."""
    return {entry["role"]: entry for entry in history(run_dir)}


def placement_lines(newest_by_role: dict[str, dict]) -> list[str]:
    """For a person: one line a node, with the roles whose newest process was started there."""
    by_node: dict[str, list[str]] = {}
    for role, entry in sorted(newest_by_role.items()):
        gpus = "".join(f" on {gpu}" for gpu in entry.get("gpus", ()))
        driver = f" (driver {entry['driver']})" if entry.get("driver") else ""
        by_node.setdefault(str(entry.get("node", "")), []).append(f"{role} pid {entry.get('pid')}{gpus}{driver}")
    return [f"node {node:<10} {', '.join(roles)}" for node, roles in sorted(by_node.items())]


def devices(indexes: Collection[str] | None) -> tuple[tuple[str, ...], str]:
    """Names of this machine's NVIDIA devices (only those of ``indexes``) and the driver's version; nothing without a driver."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return (), ""
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    found = [row for row in rows if indexes is None or row[0] in indexes]
    return tuple(f"GPU {index} {name}" for index, name, _ in found), found[0][2] if found else ""
