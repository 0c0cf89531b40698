"""What is kept of a drill: one table on the screen, one line of JSON, the summary over all drills."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soak import code_digest, commit, machine

if TYPE_CHECKING:
    from drills.drill import Drill
    from drills.verdict import Verdict

RESULTS = Path(__file__).resolve().parents[1] / "results" / "drills.jsonl"
NOT_IN_TABLE = ("ettr", "ettr_unbroken", "step_s_unbroken", "wall_s", "lost_share")


def entry(drill: Drill, result: Verdict, finished: bool) -> dict[str, Any]:
    """Everything about one drill as one JSON object."""
    run = drill.run
    engines = ", ".join(f"{w.count} {w.engine}" for w in run.config.workers)
    return {
        "drill": drill.name, "claim": drill.claim, "verdict": "broken" if result.findings else "holds",
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": shlex.join(["python", f"chaos/{drill.name}.py", *_shown(drill.args)]),
        "seed": drill.seed, "machine": machine(), "commit": drill.args.commit or commit(), "code": code_digest(),
        "run": "its own" if run.own else "a live one", "database": run.url.partition(":")[0].partition("+")[0],
        "workers": engines, "ended_by_itself": finished, "numbers": result.numbers,
        "findings": [finding[:1500] for finding in result.findings[:20]],
        "faults": [
            [f.role, f.kind, round(f.at, 3), f.until and round(f.until, 3), f.detected_s, f.new_rollout_s, f.new_step_s]
            for f in drill.faults
        ],
    }  # fmt: skip


def _shown(args: argparse.Namespace) -> list[str]:
    """The command without what only says where files go."""
    out, skip = [], False
    for part in args.argv:
        if skip or part.split("=")[0] in ("--dir", "--json", "--report", "--commit", "--record", "--seed"):
            skip = not skip and part in ("--dir", "--json", "--report", "--commit", "--seed")
            continue
        out.append(part)
    return out


def table(one: dict[str, Any]) -> str:
    """One drill as text, a line per number."""
    numbers = {name: value for name, value in one["numbers"].items() if name not in NOT_IN_TABLE}
    rows = [
        ("drill", f"{one['drill']}, seed {one['seed']}, {one['database']}, workers {one['workers']}"), *numbers.items(),
        ("run ended by itself", "yes" if one["ended_by_itself"] else "no"),
        ("verdict", "claim holds" if one["verdict"] == "holds" else f"CLAIM DOES NOT HOLD: {len(one['findings'])} findings"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"{name:<{width}}  {value}" for name, value in rows), ""])


def keep(args: argparse.Namespace, one: dict[str, Any]) -> None:
    """Where the caller wants it."""
    if args.json:
        Path(args.json).write_text(json.dumps(one, indent=1) + "\n")
    if args.record:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("a") as out:
            out.write(json.dumps(one, separators=(",", ":")) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Every recorded drill."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
