"""The quickstart: `rollbook run` on the tiny model while one worker and the learner are killed; ends with proof.

Claim: with a worker SIGKILLed after step 10 and the learner SIGKILLed with at least five steps to replay, the run goes on
by itself, the audit is clean, and the held-out accuracy shows what was learned. Kills only processes whose ids the run's
own supervisor recorded. Exit 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rollbook.cli.common import client_for
from rollbook.core.config import load_config
from rollbook.core.errors import RollbookError
from rollbook.supervise.process import ProcessTable

REPLAY_MIN = 5
WAIT_MAX_S = 1200.0


class Drill:
    """One watched run: knows its ledger, its processes and what was killed."""

    def __init__(self, config_args: list[str], run_dir: Path) -> None:
        self.config = load_config(config_args[0], [a for a in config_args[1:] if a != "--set"])
        self.table_file = run_dir / "supervisor" / "processes.json"
        self.run = subprocess.Popen([sys.executable, "-m", "rollbook.cli.main", "run", *config_args])
        self.deadline = time.monotonic() + WAIT_MAX_S

    def wait_for_step(self, wanted) -> dict:
        """Poll the run's status until ``wanted(status)``; bounded; raises when the run ends first."""
        client = client_for(self.config, retry_s=1.0)
        try:
            while time.monotonic() < self.deadline:
                if self.run.poll() is not None:
                    raise SystemExit(f"the run ended (exit {self.run.returncode}) before the kill")
                try:
                    status = client.run_status()
                except RollbookError:
                    status = {}
                if status and wanted(status):
                    return status
                time.sleep(0.05)
        finally:
            client.close()
        self.run.terminate()
        raise SystemExit(f"no progress within {WAIT_MAX_S:.0f} s")

    def kill(self, name: str) -> None:
        """SIGKILL the process group of one role."""
        record = ProcessTable(self.table_file).records()[name]
        print(f"== drill: SIGKILL {name} (pid {record.pid})", flush=True)
        record.kill_group(signal.SIGKILL)


def main() -> int:
    """Run, kill, wait, evaluate, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", required=True, help="run directory; must not hold a finished run")
    parser.add_argument("--config", default="")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--gain-min", type=float, default=0.25, help="last tenth of rewards minus first tenth")
    parser.add_argument("--accuracy-min", type=float, default=0.9, help="held-out greedy accuracy at the end")
    args = parser.parse_args()
    run_dir = Path(args.dir).resolve()
    if (run_dir / "ledger.sqlite").exists():
        print(f"{run_dir} already holds a run; remove it or name another --dir", file=sys.stderr)
        return 2
    import rollbook

    config = args.config or str(Path(rollbook.__file__).parent / "assets" / "quickstart.toml")
    config_args = [config]
    for override in [f"run.dir={run_dir}", *args.overrides]:
        config_args += ["--set", override]
    began = time.monotonic()
    drill = Drill(config_args, run_dir)
    every = drill.config.checkpoint.every_steps
    drill.wait_for_step(lambda s: s["steps"]["trained"] >= 10)
    drill.kill("worker-0")
    drill.wait_for_step(
        lambda s: s["steps"]["trained"] >= 15 and s["steps"]["trained"] - s["steps"]["checkpoint"] >= REPLAY_MIN + 1
    )
    drill.kill("learner")
    code = drill.run.wait(timeout=WAIT_MAX_S)
    print(
        f"== run finished with exit code {code} after {time.monotonic() - began:.0f} s (a checkpoint every {every} steps)",
        flush=True,
    )
    return code or judge(config_args, args.gain_min, args.accuracy_min, time.monotonic() - began)


def judge(config_args: list[str], gain_min: float, accuracy_min: float, wall_s: float) -> int:
    """Compare the numbers with the claim."""
    command = [sys.executable, "-m", "rollbook.cli.main"]
    accuracy = {}
    for name, version in (("before", "0"), ("after", "-1")):
        out = subprocess.run(
            [*command, "evaluate", *config_args, "--version", version], capture_output=True, text=True, check=False
        )
        if out.returncode:
            print(out.stderr, file=sys.stderr)
            return 1
        accuracy[name] = json.loads(out.stdout)
    run_dir = Path(load_config(config_args[0], [a for a in config_args[1:] if a != "--set"]).run.dir)
    rewards = [m["reward_mean"] for m in json.loads((run_dir / "report" / "metrics.json").read_text())]
    tenth = max(1, len(rewards) // 10)
    gain = sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth
    print(
        f"reward: first tenth {sum(rewards[:tenth]) / tenth:.3f}, last tenth {sum(rewards[-tenth:]) / tenth:.3f}, gain {gain:+.3f}"
    )
    for name, result in accuracy.items():
        print(
            f"held-out {name}: greedy {result['greedy']:.3f}, sampled {result['sampled']:.3f} on {result['n']} prompts never trained on"
        )
    print(f"wall time {wall_s:.0f} s")
    print("What it learned: mostly to prefer one of two habits its supervised start gave it (ascending over descending order),")
    print("then to do it more reliably. It is a demonstration of the service, not of reasoning.")
    ok = gain >= gain_min and accuracy["after"]["greedy"] >= accuracy_min
    print(
        f"{'claim holds' if ok else 'CLAIM DOES NOT HOLD'}: gain >= {gain_min}, held-out greedy >= {accuracy_min}, audit clean, kills survived"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
