"""A task with a tool, with and without failing sandboxes: what failures cost, and that they do not teach the policy anything.

    python tests/bench/failures.py --out tests/bench/results/failures.json --jobs 2

For each seed one run of the service as it is and one in which a share of the sandboxes cannot be made (failpoint
``sandbox.before_spawn``, no retry in place and a single attempt per slot, the harshest case: the members are missing, survivors
are trained). Every run is `rollbook run` with real processes. Resumes: finished cells found in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

SHARES, SEEDS = (0.0, 0.2), (0, 1, 2)


def run_cell(base: Path, share: float, seed: int, steps: int, more: list[str]) -> dict:
    """One run: its curve, held-out reward, failures and what the report says of drops."""
    import rollbook

    run_dir = base / f"share{share}-seed{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [f"run.dir={run_dir}", f"run.id=failures-{share}-{seed}", f"run.steps={steps}", f"run.seed={seed}", *more]
    quiet = [f"run.dir={run_dir}", f"run.id=failures-{share}-{seed}", f"run.steps={steps}", f"run.seed={seed}", *more]
    if share:
        common = ["run.chaos_allowed=true", "environment.attempts_max=1", "ledger.attempts_max=1",
                  "ledger.infra_failures_max=0.9"]  # fmt: skip
        settings += [*common, "chaos.once=false", f"chaos.failpoints=sandbox.before_spawn=raise~{share}"]
        quiet += common
    config = str(Path(rollbook.__file__).parent / "assets" / "calculator.toml")

    def command(verb: str, given: list[str], *flags: str) -> list[str]:
        return [sys.executable, "-m", "rollbook.cli.main", verb, config, *(x for s in given for x in ("--set", s)), *flags]

    began = time.monotonic()
    subprocess.run(command("run", settings, "--plain"), check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - began
    metrics = json.loads((run_dir / "report" / "metrics.json").read_text())
    evaluated = subprocess.run(command("evaluate", quiet), check=True, capture_output=True, text=True).stdout
    status = subprocess.run(command("status", settings, "--json"), check=True, capture_output=True, text=True).stdout
    state = json.loads(status)
    return {
        "share": share, "seed": seed, "wall_s": round(wall_s, 1), "heldout": json.loads(evaluated),
        "reward_mean": [m["reward_mean"] for m in metrics], "slots": state["slots"], "verdicts": state["verdicts"],
        "failures": state["failures"], "groups": state["groups"], "steps": state["steps"],
    }  # fmt: skip


def main() -> None:
    """Run the missing cells, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dir", default="runs/failures")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--set", action="append", default=[], help="further settings of every run")
    args = parser.parse_args()
    file = Path(args.out)
    result = json.loads(file.read_text()) if file.exists() else {"cells": []}
    done = {(c["share"], c["seed"]) for c in result["cells"]}
    missing = [(share, seed) for seed in args.seeds for share in SHARES if (share, seed) not in done]
    with ThreadPoolExecutor(args.jobs) as pool:
        for cell in pool.map(lambda c: run_cell(Path(args.dir).resolve(), *c, args.steps, args.set), missing):
            result["cells"].append(cell)
            result |= {"steps": args.steps, "date": date.today().isoformat(), "command": " ".join(sys.argv)}
            file.write_text(json.dumps(result))
            print(f"share {cell['share']} seed {cell['seed']}: held-out {cell['heldout']}", flush=True)
    print("\n".join(table(result["cells"])))


def table(cells: list[dict]) -> list[str]:
    """Markdown rows: mean (smallest to largest) over seeds."""

    def spread(values: list[float]) -> str:
        return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    rows = ["| failing sandboxes | reward, first tenth | last tenth | held-out greedy | held-out at T | slots without a sample |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for share in SHARES:
        same = [c for c in cells if c["share"] == share]
        if not same:
            continue
        tenth = max(1, len(same[0]["reward_mean"]) // 10)
        first = [sum(c["reward_mean"][:tenth]) / tenth for c in same]
        last = [sum(c["reward_mean"][-tenth:]) / tenth for c in same]
        dropped = [sum(c["verdicts"].values()) / max(1, c["slots"]["issued"]) for c in same]
        greedy, sampled = ([c["heldout"][name] for c in same] for name in ("greedy", "sampled"))
        rows.append(
            f"| {share:.0%} | {spread(first)} | {spread(last)} | {spread(greedy)} | {spread(sampled)} | {spread(dropped)} |"
        )
    return rows


if __name__ == "__main__":
    main()
