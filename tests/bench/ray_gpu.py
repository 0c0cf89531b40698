"""A run on a Ray node with one GPU that a vLLM worker and the learner share; the worker's host is killed once: table and JSON.

    python tests/bench/ray_gpu.py --device cuda --out tests/bench/results/ray_gpu.json
    python tests/bench/ray_gpu.py --device cpu --steps 12                                   # the tiny model, transformers engine

Not a test, but it judges what it measures and exits with 1 where something is wrong. It starts a cluster of one node (a head, as
`ray start --head` makes it), `rollbook up --ray` on it with shares of the GPU reserved by placement groups, kills the actor that
is the parent of the worker (so the engine dies with it) after ``--kill-at`` steps, and waits for the run's own end.
``first_rollout_s``: from the kill to the first sample of the next worker; ``first_step_s``: to the first step of such samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / part) for part in ("service", "chaos")]

from ray_nodes import RayCluster  # noqa: E402 - found by the line above, also where nothing of this is installed
from rollbook.supervise import placements  # noqa: E402
from rollbook.supervise.process import ProcessRecord  # noqa: E402

ROLLBOOK = [sys.executable, "-m", "rollbook.cli.main"]
MODEL = REPOSITORY / "service" / "rollbook" / "assets" / "sort-digits"
CONFIG = """
[run]
id = "ray-gpu"
dir = "run"
steps = {steps}
seed = 3
chaos_allowed = true

[model]
path = "{model}"

[task]
source = "jsonl"
path = "{model}/train.jsonl"

[sampling]
max_new_tokens = 13

[learner]
groups_per_step = 4
group_size = 4
lr = 2e-4
device = "{device}"

[checkpoint]
every_steps = 10

[supervisor]
backoff_s = 0.1
restarts_max = 5

[cluster]
server_cpus = 0.5
worker_cpus = 1
learner_cpus = 1
worker_gpus = {worker_gpus}
learner_gpus = {learner_gpus}

[[workers]]
engine = "{engine}"
device = "{device}"
slots = 32
max_model_len = 64
"""
ON_CUDA = ("workers.0.dtype=bfloat16", "workers.0.probe_tolerance=0.2", "learner.publish_dtype=bfloat16")
"""What vLLM needs on a GPU; the versions it is given are in the precision it computes in."""


class Bench:
    """One cluster of one node, one run on it."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.args, self.root, self.dir = args, root, root / "run"
        self.config, self.output_file = root / "run.toml", root / "output.txt"
        self.config.write_text(CONFIG.format(
            steps=args.steps, model=MODEL, device=args.device, engine=args.engine, worker_gpus=args.worker_gpus,
            learner_gpus=args.learner_gpus,
        ))  # fmt: skip
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("ROLLBOOK_")}
        self.env |= {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "service"), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
        self.settings = list(args.overrides)
        if args.device == "cuda" and args.engine == "vllm":
            self.settings[:0] = [*ON_CUDA, f"workers.0.gpu_memory_fraction={args.gpu_memory}"]
        self.cluster = RayCluster(0, env=self.env)
        self.cluster.head.cpus, self.cluster.head.gpus = max(4, os.cpu_count() or 4), int(args.device == "cuda")
        self.process: subprocess.Popen[bytes] | None = None
        self.deadline = time.monotonic() + args.limit_s

    def rollbook(self, verb: str, *more: str) -> list[str]:
        """A command of the product on this run."""
        return [*ROLLBOOK, verb, str(self.config), *(part for text in self.settings for part in ("--set", text)), *more]

    def start(self) -> None:
        """Cluster and run."""
        self.cluster.start()
        with self.output_file.open("wb") as out:
            command = self.rollbook("up", "--ray", self.cluster.address, "--plain", "--no-report", "--wait-for-resources", "60")
            self.process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def rows(self, statement: str) -> list[tuple]:
        """What the ledger holds; nothing while it does not answer."""
        try:
            with sqlite3.connect(f"file:{self.dir / 'ledger.sqlite'}?mode=ro", uri=True, timeout=5.0) as conn:
                return conn.execute(statement).fetchall()
        except sqlite3.Error:
            return []

    def output(self) -> str:
        """What ``up`` has said."""
        return self.output_file.read_text(errors="replace")

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """Poll within the limit; what it returned that is true. Raises TimeoutError."""
        assert self.process is not None
        while not (value := happened()):
            if self.process.poll() is not None or time.monotonic() > self.deadline:
                raise TimeoutError(f"{what}: the run has ended with {self.process.poll()}, or the limit is over")
            time.sleep(0.05)
        return value

    def kill_worker(self) -> float:
        """SIGKILL the actor above the worker; when."""
        self.until("steps", lambda: (self.rows("SELECT count(*) FROM plan_outcome") or [(0,)])[0][0] >= self.args.kill_at)
        entry = placements.newest(self.dir)["worker-0"]
        record = ProcessRecord("worker-0", entry["pid"], entry["start_time"], entry["incarnation"])
        host = int(Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[1])
        at = time.time()
        os.kill(host, signal.SIGKILL)
        self.until("the engine dies with its host", lambda: not record.tree())
        return at

    def run(self) -> dict[str, Any]:
        """The run to its end, and what is wrong with it."""
        self.start()
        began = time.monotonic()
        killed_at, groups = self.kill_worker(), [group["name"].split("/")[3] for group in self.cluster.groups()]
        assert self.process is not None
        code = self.process.wait(max(1.0, self.deadline - time.monotonic()))
        audit = subprocess.run(self.rollbook("audit"), env=self.env, capture_output=True, text=True, check=False)
        outcomes = self.rows("SELECT finished_at_us, metrics_json FROM plan_outcome ORDER BY step")
        steps = [(at / 1e6, json.loads(text)) for at, text in outcomes]
        samples = sorted(at / 1e6 for (at,) in self.rows("SELECT accepted_at_us FROM sample"))
        first_rollout = next((at for at in samples if at > self._restarted_at(killed_at)), None)
        found = {
            "exit_code": code, "wall_s": round(time.monotonic() - began, 1), "steps": len(steps),
            "audit": (audit.stdout + audit.stderr).strip().splitlines()[-1], "samples": len(samples),
            "restarts": dict(re.findall(r"(\S+) (\d+)", (re.findall(r"restarts: (.*)", self.output()) or [""])[0])),
            "reward_first": round(steps[0][1]["reward_mean"], 3) if steps else None,
            "reward_last": round(steps[-1][1]["reward_mean"], 3) if steps else None,
            "places": sorted(groups), "places_left": [group["name"] for group in self.cluster.groups()],
            "gpus": {role: entry["gpus"] for role, entry in placements.newest(self.dir).items() if entry["gpus"]},
            "driver": next((e["driver"] for e in placements.newest(self.dir).values() if e["driver"]), ""),
            "first_rollout_s": round(first_rollout - killed_at, 1) if first_rollout else None,
            "first_step_s": next((round(at - killed_at, 1) for at, _ in steps if first_rollout and at > first_rollout), None),
            "output": [line for line in self.output().splitlines() if "\x1b" not in line],  # Ray's own are coloured
        }  # fmt: skip
        return found | {"wrong": self._wrong(found)}

    def _restarted_at(self, killed_at: float) -> float:
        """When the next worker process was placed: samples before are of the one that died."""
        times = [e["at"] for e in placements.history(self.dir) if e["role"] == "worker-0"]
        return max(killed_at, datetime.fromisoformat(times[-1].replace("Z", "+00:00")).timestamp())

    def _wrong(self, found: dict[str, Any]) -> list[str]:
        expected = {
            "exit_code": 0, "steps": self.args.steps, "audit": "audit: clean", "places_left": [],
            "places": ["feeder", "learner", "ledger", "worker-0"],
        }  # fmt: skip
        wrong = [f"{name}: {found[name]}" for name, value in expected.items() if found[name] != value]
        if "worker-0" not in found["restarts"] or found["first_rollout_s"] is None:
            wrong.append(f"restarts {found['restarts']}, first rollout after {found['first_rollout_s']} s")
        if self.args.device == "cuda" and set(found["gpus"]) != {"learner", "worker-0"}:
            wrong.append(f"GPUs given to {found['gpus']}")
        return wrong

    def logs(self) -> dict[str, str]:
        """The end of every log, for who has to find out what went wrong."""
        return {p.name: p.read_text(errors="replace")[-6000:] for p in (self.dir / "logs").glob("*.log")}

    def close(self) -> None:
        """Everything that was started here."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        self.cluster.close()


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import ray
    import torch

    found = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
    return found | {"device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()}


def main() -> int:
    """One cluster, one run, one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="", help="default: vllm on cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill-at", type=int, default=8, help="steps after which the worker's host is killed")
    parser.add_argument("--worker-gpus", type=float, default=0.5, help="share of the GPU that the worker reserves")
    parser.add_argument("--learner-gpus", type=float, default=0.5)
    parser.add_argument("--gpu-memory", type=float, default=0.2, help="share of its memory that vLLM takes")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="further settings of the run")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: only the table is printed")
    args = parser.parse_args()
    args.engine = args.engine or ("vllm" if args.device == "cuda" else "transformers")
    root = Path(tempfile.mkdtemp(prefix="ray-gpu-"))
    bench = Bench(args, root)
    found: dict[str, Any] = {}
    try:
        found = bench.run()
    except (AssertionError, OSError, KeyError, TimeoutError, subprocess.TimeoutExpired) as error:
        said = bench.output().splitlines() if bench.output_file.exists() else []
        found = {"wrong": [f"{type(error).__name__}: {error}"], "output": said}
    finally:
        if found.get("wrong", ["interrupted"]):
            found["logs"] = bench.logs()
        bench.close()
        shutil.rmtree(root, ignore_errors=True)
    about = {"date": date.today().isoformat(), "command": "python tests/bench/ray_gpu.py " + " ".join(sys.argv[1:])}
    result = about | {"machine": machine(), "engine": args.engine, "device": args.device} | found
    text = json.dumps(result).replace(f"{root}/", "").replace(f"{REPOSITORY}/", "")
    if args.out is not None:
        args.out.write_text(text + "\n")
    for name, value in result.items():
        if name not in ("output", "logs"):
            print(f"| {name} | {value} |")
    if found["wrong"]:
        print("\n".join([*found["output"][-20:], *(f"--- {name}\n{text}" for name, text in found.get("logs", {}).items())]))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
