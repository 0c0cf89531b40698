"""Lag sweep through the whole service: why there is a staleness bound and why there are importance weights.

    python tests/bench/lag_sweep.py --out tests/bench/results/lag_sweep.json --plot tests/bench/results/lag_sweep.png

Fixed lag 0, 1, 2, 4, with truncated importance weights (cap 2) and without, three seeds, the tiny model on sorting digits.
Every run is `rollbook run` with real processes. Resumes: finished cells found in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

LAGS, WEIGHTS, SEEDS = (0, 1, 2, 4), ("token_tis", "none"), (0, 1, 2)


def run_cell(base: Path, lag: int, weights: str, seed: int, steps: int, lr: float) -> dict:
    """One run of the service; returns its curve and held-out accuracy."""
    import rollbook

    run_dir = base / f"lag{lag}-{weights}-seed{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = [str(Path(rollbook.__file__).parent / "assets" / "quickstart.toml")]
    for text in (
        f"run.dir={run_dir}", f"run.id={run_dir.name}", f"run.steps={steps}", f"run.seed={seed}", "schedule.kind=fixed",
        f"schedule.lag_versions={lag}", f"learner.correction={weights}", f"learner.lr={lr}", "checkpoint.every_steps=20",
        'workers=[{engine="transformers", slots=128, max_model_len=64}]',
    ):  # fmt: skip
        config += ["--set", text]
    command = [sys.executable, "-m", "rollbook.cli.main"]
    began = time.monotonic()
    subprocess.run([*command, "run", *config, "--plain"], check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - began
    metrics = json.loads((run_dir / "report" / "metrics.json").read_text())
    out = subprocess.run([*command, "evaluate", *config], check=True, capture_output=True, text=True).stdout
    shutil.rmtree(run_dir)
    return {
        "lag": lag, "weights": weights, "seed": seed, "wall_s": round(wall_s, 1), "heldout": json.loads(out),
        **{name: [m[name] for m in metrics] for name in ("reward_mean", "ess_token_raw_fraction", "entropy_mean")},
    }  # fmt: skip


def main() -> None:
    """Run the missing cells, then print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--plot", default="")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dir", default="runs/lag-sweep")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    args = parser.parse_args()
    file = Path(args.out)
    result = json.loads(file.read_text()) if file.exists() else {"cells": []}
    done = {(c["lag"], c["weights"], c["seed"]) for c in result["cells"]}
    for seed in args.seeds:
        for lag in LAGS:
            for weights in WEIGHTS:
                if (lag, weights, seed) in done:
                    continue
                cell = run_cell(Path(args.dir).resolve(), lag, weights, seed, args.steps, args.lr)
                result["cells"].append(cell)
                result |= {"steps": args.steps, "lr": args.lr, "date": date.today().isoformat(), "command": " ".join(sys.argv)}
                file.write_text(json.dumps(result))
                print(_row([cell]), flush=True)
    print("\n".join(table(result["cells"])))
    if args.plot:
        plot(result["cells"], Path(args.plot))


def _row(cells: list[dict]) -> str:
    tenth = max(1, len(cells[0]["reward_mean"]) // 10)

    def spread(values: list[float]) -> str:
        return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    return (
        f"| {cells[0]['lag']} | {cells[0]['weights']} | {spread([sum(c['reward_mean'][-tenth:]) / tenth for c in cells])} | "
        f"{spread([c['heldout']['greedy'] for c in cells])} | {spread([min(c['ess_token_raw_fraction']) for c in cells])} | "
        f"{spread([sum(c['entropy_mean'][-tenth:]) / tenth for c in cells])} |"
    )


def table(cells: list[dict]) -> list[str]:
    """Markdown rows: mean (smallest to largest) over seeds."""
    rows = [
        "| lag | weights | reward, last tenth | held-out greedy | minimum ESS | entropy, last tenth |",
        "|---|---|---|---|---|---|",
    ]
    for lag in LAGS:
        for weights in WEIGHTS:
            same = [c for c in cells if c["lag"] == lag and c["weights"] == weights]
            if same:
                rows.append(_row(same))
    return rows


def plot(cells: list[dict], file: Path) -> None:
    """Reward, minimum ESS so far and entropy by step; mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(10, 8), sharex=True, sharey="row")
    for column, weights in enumerate(WEIGHTS):
        for lag in LAGS:
            same = [c for c in cells if c["lag"] == lag and c["weights"] == weights]
            for row, name in enumerate(("reward_mean", "ess_token_raw_fraction", "entropy_mean")):
                curves = [c[name] for c in same]
                if name == "ess_token_raw_fraction":
                    curves = [[min(c[: i + 1]) for i in range(len(c))] for c in curves]
                if curves:
                    mean = [sum(v) / len(v) for v in zip(*curves, strict=True)]
                    axes[row, column].plot(range(1, len(mean) + 1), mean, label=f"lag {lag}")
        axes[0, column].set_title({"token_tis": "truncated importance weights, cap 2", "none": "no weights"}[weights])
    for row, label in enumerate(("mean reward", "minimum ESS so far", "entropy (nats)")):
        axes[row, 0].set_ylabel(label)
        for axis in axes[row]:
            axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
