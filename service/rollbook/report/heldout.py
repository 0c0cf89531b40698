"""Held-out accuracies that `rollbook evaluate` found, kept beside the report so that the next one can draw their curve.

Owns ``report/heldout.jsonl``: one line a measurement; the newest of a version and size counts. Never in the ledger: it is no part
of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "heldout.jsonl"


def keep(run_dir: str | Path, result: Mapping[str, Any]) -> Path:
    """Append what ``evaluate_version`` returned."""
    file = Path(run_dir) / "report" / FILE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        handle.write(json.dumps(result) + "\n")
    return file


def kept(run_dir: str | Path) -> list[dict[str, Any]]:
    """Measurements in order of version; lines that are no measurement are passed over."""
    try:
        lines = (Path(run_dir) / "report" / FILE_NAME).read_text().splitlines()
    except OSError:
        return []
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            found[int(row["version"]), int(row["n"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return [found[key] for key in sorted(found)]
