"""The quickstart: `rollbook run` on the tiny model while one worker and the learner are killed; ends with proof.

Claim: with a worker SIGKILLed after step 10 and the learner SIGKILLed with at least five steps to replay, the run goes on
by itself, the audit is clean, and the held-out accuracy shows what was learned. Kills only processes that the run's own
supervisor recorded, and only in a run whose configuration allows it. Exit 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollbook.cli.common import client_for
from rollbook.core.config import Config, load_config
from rollbook.core.errors import ConfigError, RollbookError
from rollbook.supervise.process import ProcessRecord, ProcessTable

REPLAY_MIN = 5
WAIT_MAX_S = 1200.0
COMMAND_MAX_S = 300.0
POLL_S = 0.05
ROLLBOOK = [sys.executable, "-m", "rollbook.cli.main"]


class ClaimBroken(Exception):
    """What was claimed did not happen."""


class Drill:
    """One watched run: knows its ledger, its processes and what was killed."""

    def __init__(self, config: Config, config_args: list[str]) -> None:
        self.config = config
        self.run_dir = Path(config.run.dir)
        self.killed: list[ProcessRecord] = []
        self.deadline = time.monotonic() + WAIT_MAX_S
        self.run = subprocess.Popen([*ROLLBOOK, "run", *config_args])

    def wait_for(self, what: str, wanted: Callable[[dict], bool]) -> None:
        """Poll the run's status until ``wanted``; bounded. Raises ClaimBroken when time is up or the run ends first."""
        with client_for(self.config, retry_s=0.0) as client:
            while time.monotonic() < self.deadline:
                if self.run.poll() is not None:
                    raise ClaimBroken(f"the run ended (exit {self.run.returncode}) before {what}")
                try:
                    if wanted(client.run_status()):
                        return
                except RollbookError:
                    pass  # starting or restarting; asked again
                time.sleep(POLL_S)
        raise ClaimBroken(f"not within {WAIT_MAX_S:.0f} s: {what}")

    def kill(self, name: str) -> None:
        """SIGKILL one role while it lives, and see that it is gone."""
        while time.monotonic() < self.deadline and self.run.poll() is None:
            record = self._records().get(name)
            if record is not None and record.signal(signal.SIGKILL):
                print(f"== drill: SIGKILL {name} (pid {record.pid})", flush=True)
                self.killed.append(record)
                return
            time.sleep(POLL_S)
        raise ClaimBroken(f"{name} was not there to be killed")

    def finish(self) -> int:
        """Exit code of the run; bounded."""
        try:
            return self.run.wait(timeout=max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ClaimBroken(f"the run did not end within {WAIT_MAX_S:.0f} s") from None

    def check_survived(self) -> None:
        """Every killed process was replaced, and the learner had enough to replay."""
        for record in self.killed:
            if self._records()[record.name].incarnation == record.incarnation:
                raise ClaimBroken(f"{record.name} was killed and never started again")
        log = (self.run_dir / "logs" / "learner.log").read_text(errors="replace")
        replayed = max((int(n) for n in re.findall(r"plans_to_replay=(\d+)", log)), default=0)
        print(f"kills survived: {', '.join(r.name for r in self.killed)}; the learner trained {replayed} stored plans again")
        if replayed < REPLAY_MIN:
            raise ClaimBroken(f"the learner had {replayed} plans to replay, the claim is about {REPLAY_MIN} or more")

    def stop(self) -> None:
        """End the run if it still runs: gracefully, then not."""
        if self.run.poll() is None:
            self.run.terminate()
            try:
                self.run.wait(timeout=3 * self.config.supervisor.drain_s)
            except subprocess.TimeoutExpired:
                self.run.kill()
                self.run.wait(timeout=10.0)

    def _records(self) -> dict[str, ProcessRecord]:
        return ProcessTable(self.run_dir / "supervisor" / "processes.json").records()


def main() -> int:
    """Run, kill, wait, evaluate, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", required=True, help="run directory; must not hold a run")
    parser.add_argument("--config", default="", help="default: the quickstart's own")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--gain-min", type=float, default=0.25, help="last tenth of rewards minus first tenth")
    parser.add_argument("--accuracy-min", type=float, default=0.9, help="held-out greedy accuracy at the end")
    args = parser.parse_args()
    run_dir = Path(args.dir).resolve()
    if (run_dir / "ledger.sqlite").exists():
        print(f"{run_dir} already holds a run; remove it or name another --dir", file=sys.stderr)
        return 2
    logging.getLogger("rollbook").addHandler(logging.NullHandler())  # a client that asks too early is no news
    import rollbook

    file = args.config or str(Path(rollbook.__file__).parent / "assets" / "quickstart.toml")
    overrides = [f"run.dir={run_dir}", *args.overrides]
    try:
        config = load_config(file, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if config.checkpoint.every_steps < REPLAY_MIN + 3:
        print(f"checkpoint.every_steps must be at least {REPLAY_MIN + 3}, or there is nothing to replay", file=sys.stderr)
        return 2
    if not config.run.chaos_allowed:
        print(f"{file} does not say run.chaos_allowed = true: this drill kills processes of the run", file=sys.stderr)
        return 2
    try:
        return drill(config, [file, *(part for o in overrides for part in ("--set", o))], args.gain_min, args.accuracy_min)
    except ClaimBroken as broken:
        print(f"CLAIM DOES NOT HOLD: {broken}", file=sys.stderr)
        return 1


def drill(config: Config, config_args: list[str], gain_min: float, accuracy_min: float) -> int:
    """Kill a worker, then the learner far from its checkpoint; let the run finish and judge it. Raises ClaimBroken."""
    began = time.monotonic()
    run = Drill(config, config_args)
    try:
        run.wait_for("step 10", lambda s: s["steps"]["trained"] >= 10)
        run.kill("worker-0")
        run.wait_for(
            f"{REPLAY_MIN + 1} steps beyond a checkpoint",
            lambda s: s["steps"]["trained"] >= 15 and far_from_checkpoints(s["steps"], config.checkpoint.every_steps),
        )
        run.kill("learner")
        code = run.finish()
    finally:
        run.stop()
    wall_s = time.monotonic() - began
    every = config.checkpoint.every_steps
    print(f"== run finished with exit code {code} after {wall_s:.0f} s (a checkpoint every {every} steps)", flush=True)
    if code:
        return code
    run.check_survived()
    return judge(config, config_args, gain_min, accuracy_min)


def far_from_checkpoints(steps: dict[str, int], every: int) -> bool:
    """Enough steps after the last checkpoint to replay, and not about to make the next one."""
    return REPLAY_MIN < steps["trained"] - steps["checkpoint"] < every - 1


def evaluated(config_args: list[str], version: str) -> dict:
    """Held-out accuracy of one version, by the command a user types. Raises ClaimBroken."""
    out = subprocess.run(
        [*ROLLBOOK, "evaluate", *config_args, "--version", version], capture_output=True, text=True, check=False,
        timeout=COMMAND_MAX_S,
    )  # fmt: skip
    if out.returncode:
        raise ClaimBroken(f"version {version} could not be evaluated: {out.stderr}")
    return json.loads(out.stdout)


def judge(config: Config, config_args: list[str], gain_min: float, accuracy_min: float) -> int:
    """Compare the numbers with the claim."""
    accuracy = {"before": evaluated(config_args, "0"), "after": evaluated(config_args, "-1")}
    metrics = json.loads((Path(config.run.dir) / "report" / "metrics.json").read_text())
    rewards = [m["reward_mean"] for m in metrics if m.get("reward_mean") is not None]
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    print(f"reward: first tenth {first:.3f}, last tenth {last:.3f}, gain {last - first:+.3f}")
    for name, found in accuracy.items():
        numbers = f"greedy {found['greedy']:.3f}, sampled {found['sampled']:.3f}"
        print(f"held-out {name}: {numbers} on {found['n']} prompts never trained on")
    print("What it learned: mostly to prefer one of two habits its supervised start gave it (ascending over descending order),")
    print("then to do it more reliably. It is a demonstration of the service, not of reasoning.")
    ok = last - first >= gain_min and accuracy["after"]["greedy"] >= accuracy_min
    wanted = f"gain >= {gain_min}, held-out greedy >= {accuracy_min}, audit clean, kills survived"
    print(f"{'claim holds' if ok else 'CLAIM DOES NOT HOLD'}: {wanted}")
    return 0 if ok else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
