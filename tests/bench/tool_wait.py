"""How long the engine stands still because tools take their time: share of the worker's time by the tool's latency.

    python tests/bench/tool_wait.py --out tests/bench/results/tool_wait.json

The calculator task on the tiny model, one worker, its tool slowed down by a sleep. ``generate`` and ``wait`` are seconds of the
worker's episodes; while some wait, the others are generated and further slots leased, so the wait is what nothing could fill.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ENVIRONMENT = '''
import asyncio
from rollbook.tasks.calculator import Calculator

class Slow(Calculator):
    needs_sandbox = False

    def __init__(self, seconds):
        super().__init__(sandbox=False)
        tool = self.tools[0]
        inner = tool.call

        class Sleeping:
            name, pure = tool.name, True
            async def call(self, arguments, earlier, context):
                await asyncio.sleep(seconds)
                return await inner(arguments, earlier, context)

        self.tools = (Sleeping(),)
'''
DONE = re.compile(r"event=episodes_done generate_s=([0-9.]+) waited_s=([0-9.]+)")


def measure(seconds: float, steps: int) -> dict:
    """One run with a tool of that latency."""
    import rollbook

    root = Path(tempfile.mkdtemp(prefix="tool-wait-"))
    (root / "slow.py").write_text(ENVIRONMENT)
    config = str(Path(rollbook.__file__).parent / "assets" / "calculator.toml")
    settings = [f"run.dir={root}/run", f"run.steps={steps}", f"environment.name={root}/slow.py:Slow",
                f"environment.settings={{seconds = {seconds}}}"]  # fmt: skip
    command = [sys.executable, "-m", "rollbook.cli.main", "run", config, "--plain", *(x for s in settings for x in ("--set", s))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = [tuple(map(float, m)) for m in DONE.findall((root / "run" / "logs" / "worker-0.log").read_text())]
    metrics = json.loads((root / "run" / "report" / "metrics.json").read_text())
    shutil.rmtree(root)
    generated, waited = sum(g for g, _ in found), sum(w for _, w in found)
    between = (metrics[-1]["finished_at_s"] - metrics[0]["finished_at_s"]) / (len(metrics) - 1)
    return {"tool_s": seconds, "generate_s": round(generated, 2), "wait_s": round(waited, 2),
            "idle_share": round(waited / (generated + waited), 3), "s_per_step": round(between, 3), "steps": steps}  # fmt: skip


def main() -> None:
    """Measure each latency and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    cells = [measure(seconds, args.steps) for seconds in (0.0, 0.1, 0.5)]
    Path(args.out).write_text(json.dumps({"cells": cells, "date": date.today().isoformat(), "command": " ".join(sys.argv)}))
    print("| tool takes | engine generates | waits | share | seconds a step |\n|---|---|---|---|---|")
    for c in cells:
        print(f"| {c['tool_s']} s | {c['generate_s']} s | {c['wait_s']} s | {c['idle_share']:.0%} | {c['s_per_step']} |")


if __name__ == "__main__":
    main()
