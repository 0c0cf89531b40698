"""How many programs a sandbox runs in a second, and what one costs in processor time, for each backend that works here.

    python tests/bench/sandbox_rate.py --seconds 5 --out tests/bench/results/sandbox_rate.json

The program defines a function, calls it ten times and prints. Processor time is the whole machine's, so a figure is right only
while nothing else runs: ``busy_before`` says how busy the machine was just before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollbook.core.errors import ConfigError
from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Limits, Program, Sandbox
from rollbook.sandbox.backends import make_backend

SOURCE = "def f(x): return sum(range(x))\nprint([f(x) for x in range(10)])"


def machine_cpu_s() -> float:
    """Processor time that the machine has spent on anything, steal included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure(sandbox: Sandbox, at_once: int, seconds: float) -> dict:
    """Rate, cost and times of one backend at one concurrency."""

    def loop(until: float) -> list[float]:
        times = []
        while time.monotonic() < until:
            began = time.monotonic()
            ended = sandbox.run(Program(SOURCE), Limits())
            assert ended.status is SandboxStatus.OK, ended
            times.append(time.monotonic() - began)
        return times

    cpu, began = machine_cpu_s(), time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        times = sorted(t for some in pool.map(loop, [began + seconds] * at_once) for t in some)
    wall_s = time.monotonic() - began
    return {
        "at_once": at_once, "executions": len(times), "per_s": round(len(times) / wall_s, 1),
        "cpu_ms_each": round((machine_cpu_s() - cpu) / len(times) * 1000, 2), "p50_ms": round(times[len(times) // 2] * 1000, 2),
        "p99_ms": round(times[len(times) * 99 // 100] * 1000, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    busy = machine_cpu_s()
    time.sleep(1.0)
    result: dict = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
                    "busy_before": round((machine_cpu_s() - busy) / (os.cpu_count() or 1), 2), "backends": {}}  # fmt: skip
    for name in ("zygote", "landlock", "bubblewrap", "unsafe"):
        try:
            sandbox = make_backend(name, 4)
        except ConfigError as error:
            result["backends"][name] = {"unavailable": str(error)}
            continue
        measure(sandbox, 1, 0.5)
        result["backends"][name] = [measure(sandbox, at_once, args.seconds) for at_once in (1, 2, 4)]
        sandbox.close()
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
