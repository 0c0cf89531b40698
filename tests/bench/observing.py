"""What metrics and traces cost the ledger's throughput: the same load with them and without, window by window.

    python tests/bench/observing.py --out tests/bench/results/observing.json

Each stand is a real ``rollbook ledger`` on SQLite with its workers (``observing_worker``: real clients that lease and submit as
fast as they are answered) and a learner that plans, publishes and commits checkpoints. ``off`` shows no metrics and traces
nothing; ``metrics`` has the pages of ledger and workers scraped every five seconds of work (``dashboards/prometheus.yml``);
``sampled_N`` beside that sends the spans of N % of the rollouts to a collector on loopback. All stands are open from the start
and grow alike; one works at a time. Windows are short and go round and back (off, 1, 5, 5, 1, off, …), so that what the machine
does besides meets all of them. A loss is the ratio of the totals of a stand to those of ``off``, with a 95 % interval from
resampled rounds: not a median, which would forget the windows that a scrape falls into. Samples per second tell what a full
machine loses; processor time per sample tells the same with less noise. Prints a table; exit code 1 when the loss of throughput
at 1 % is over ``--loss-max``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "service"))
sys.path.insert(0, str(ROOT / "tests"))

from rollbook.core.errors import NotReady  # noqa: E402
from rollbook.core.idempotency import digest  # noqa: E402
from rollbook.core.packing import pack_i32  # noqa: E402
from rollbook.core.records import Checkpoint, Cursor, GroupSpec, PlanOutcome, PolicyVersion, Role  # noqa: E402
from rollbook.observe import targets  # noqa: E402
from rollbook.rpc.client import LedgerClient  # noqa: E402
from run_support import MODEL, environment, wait_until  # noqa: E402

HERE = Path(__file__).resolve().parent
SCRAPE_S = 5.0
STREAM, GROUP_SIZE, GROUPS_PER_STEP, CHECKPOINT_EVERY, APPEND = "train", 8, 32, 5, 500
STANDS: dict[str, tuple[bool, float | None]] = {
    "off": (False, None), "metrics": (True, None), "traces_5": (False, 0.05), "sampled_1": (True, 0.01),
    "sampled_5": (True, 0.05), "sampled_100": (True, 1.0),
}  # fmt: skip
"""Whether metrics are shown and scraped; share of the rollouts whose traces are kept, None where nothing is traced."""

CONFIG = f"""
[run]
id = "observing"
dir = "run"
steps = 1000000
seed = 5
metrics_port = {{metrics_port}}

[model]
path = "{MODEL}"

[task]
source = "jsonl"
path = "{MODEL}/train.jsonl"

[schedule]
max_lag_versions = 16

[sampling]
max_new_tokens = 1024

[learner]
groups_per_step = {GROUPS_PER_STEP}
group_size = {GROUP_SIZE}

[checkpoint]
every_steps = {CHECKPOINT_EVERY}

[ledger]
status_address = ""
lease_ttl_s = 600.0

[[workers]]
engine = "transformers"
slots = 8
max_model_len = 2048
"""

COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""Takes spans and forgets them: what a collector does with them is not the run's cost."""


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def traceparents(rng: random.Random, share: float | None) -> tuple[str, ...]:
    """Contexts as a feeder stores them, of which ``share`` are sampled; none where nothing is traced."""
    if share is None:
        return ()
    return tuple(
        f"00-{rng.getrandbits(128) | 1:032x}-{rng.getrandbits(64) | 1:016x}-{int(rng.random() < share):02x}"
        for _ in range(GROUP_SIZE)
    )


class Stand:
    """A ledger server, its workers and its learner; works only inside ``window``."""

    def __init__(self, name: str, directory: Path, endpoint: str, n_groups: int, threads: int) -> None:
        self.name, self.dir = name, directory / name
        self.is_shown, self.share = STANDS[name]
        self.dir.mkdir(parents=True)
        (self.dir / "run.toml").write_text(CONFIG.format(metrics_port=0 if self.is_shown else -1))
        variables = {} if self.share is None else {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(self.share),
        }  # fmt: skip
        env = {k: v for k, v in environment(**variables).items() if variables or not k.startswith("OTEL_")}
        self._log = (self.dir / "log.txt").open("wb")
        self.server = self._started(["-m", "rollbook.cli.main", "ledger", "run.toml"], env)
        address = self.dir / "run" / "ledger.address"
        wait_until(f"the ledger of {name} serves", address.exists, 60.0)
        self.client = LedgerClient(address.read_text().strip(), "observing", timeout_s=60.0)
        self._open(n_groups)
        self.worker = self._started([str(HERE / "observing_worker.py"), str(self.dir / "run"), str(threads)], env)
        self._pages = [f"http://{target.address}/metrics" for target in self._targets()]
        self.n_scrapes = 0
        self._until_scrape_s = 0.0
        self.scrape_s = 0.0

    def _started(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command], env=env, cwd=self.dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def _targets(self) -> list[targets.Target]:
        if not self.is_shown:
            return []
        wait_until("both pages are announced", lambda: len(targets.announced(self.dir / "run")) == 2, 60.0)
        return targets.announced(self.dir / "run")

    def _open(self, n_groups: int) -> None:
        """Feed every group, take the learner's role and publish the first version."""
        feeder = self.client.acquire_role(Role.FEEDER, "feeder", 80_000.0)
        self._term = self.client.acquire_role(Role.LEARNER, "learner", 80_000.0)
        before, rng = self.client.cursor(STREAM), random.Random(5)
        for first in range(0, n_groups, APPEND):
            end = min(n_groups, first + APPEND)
            groups = [
                GroupSpec(o, pack_i32([1, 2, 3]), '{"prompt": "p"}', GROUP_SIZE, traceparents=traceparents(rng, self.share))
                for o in range(first, end)
            ]
            before = self.client.append_groups(feeder, before, Cursor(STREAM, end, json.dumps({"at": end}), False), groups)
        self._step = 0
        self._publish(0)

    def _publish(self, number: int) -> None:
        path = f"versions/0.{number}"
        file = self.dir / "run" / path / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(pack_i32([number]))
        self.client.publish_version(self._term, PolicyVersion(0, number, digest("weights", number), path, "{}", 4))

    def _train(self, until: float) -> None:
        while time.monotonic() < until:
            step = self._step + 1
            try:
                plan = self.client.plan_step(self._term, 0, step, min(0.5, max(0.0, until - time.monotonic())))
            except NotReady:
                continue
            self.client.finish_plan(self._term, 0, step, PlanOutcome.TRAINED, "", '{"loss": 0.5}')
            self._publish(step)
            self._step = step
            if step % CHECKPOINT_EVERY == 0:
                made = Checkpoint(0, step, f"0.{step}.1", digest("manifest", step), plan.chain_digest)
                self.client.commit_checkpoint(self._term, made)

    def _scrape(self, ended: threading.Event) -> None:
        """Scrape whenever ``SCRAPE_S`` of work have passed since the last time."""
        began = time.monotonic()
        while self._pages:
            if ended.wait(max(0.0, self._until_scrape_s)):
                self._until_scrape_s -= time.monotonic() - began
                return
            began, self._until_scrape_s = time.monotonic(), SCRAPE_S
            for page in self._pages:
                with urllib.request.urlopen(page, timeout=30) as answer:
                    answer.read()
            self.n_scrapes += 1
            self.scrape_s += time.monotonic() - began

    def window(self, seconds: float) -> dict[str, float]:
        """Work for so long: acknowledged samples, seconds, and processor time of both processes."""
        ended, until = threading.Event(), time.monotonic() + seconds
        beside = [threading.Thread(target=self._train, args=(until,)), threading.Thread(target=self._scrape, args=(ended,))]
        before = (cpu_s(self.server.pid), cpu_s(self.worker.pid))
        for thread in beside:
            thread.start()
        assert self.worker.stdin and self.worker.stdout
        self.worker.stdin.write(f"{seconds}\n".encode())
        self.worker.stdin.flush()
        said = json.loads(self.worker.stdout.readline())
        ended.set()
        for thread in beside:
            thread.join(60.0)
        used = (cpu_s(self.server.pid) - before[0], cpu_s(self.worker.pid) - before[1])
        return {"samples": said["samples"], "seconds": said["seconds"], "ledger_s": used[0], "worker_s": used[1]}

    def dropped(self) -> float:
        """Telemetry that was given up, on all pages."""
        total = 0.0
        for page in self._pages:
            with urllib.request.urlopen(page, timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("rollbook_telemetry_dropped_total{"))
        return total

    def close(self) -> None:
        for process in (self.worker, self.server):
            process.kill()
            process.wait()
        self._log.close()


@contextmanager
def collector() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def compared(windows: dict[str, list[dict[str, float]]], name: str) -> dict[str, Any]:
    """What a stand loses against the one without telemetry, in percent: all rounds, and a 95 % interval from resampled ones."""
    rounds, rng = list(zip(windows["off"], windows[name], strict=True)), random.Random(5)

    def loss(key: str, drawn: Sequence[tuple[dict[str, float], dict[str, float]]]) -> float:
        off, on = (sum(w[key] for w in side) / sum(w["samples"] for w in side) for side in zip(*drawn, strict=True))
        return 100 * (1 - off / on if key == "seconds" else on / off - 1)

    out: dict[str, Any] = {}
    for key in ("seconds", "ledger_s", "worker_s"):
        resampled = sorted(loss(key, rng.choices(rounds, k=len(rounds))) for _ in range(2000))
        low, high = resampled[50], resampled[-51]
        out[key] = {"loss_percent": round(loss(key, rounds), 2), "low": round(low, 2), "high": round(high, 2)}
    return out


def measured(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Every window of every stand."""
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in options.stands}
    n_groups = int((options.pairs + 1) * options.seconds * options.rate_max / GROUP_SIZE) + 20 * GROUPS_PER_STEP
    with ExitStack() as stack:
        endpoint = stack.enter_context(collector())
        stands = {}
        for name in options.stands:
            stands[name] = Stand(name, directory, endpoint, n_groups, options.threads)
            stack.callback(stands[name].close)
        for stand in stands.values():
            stand.window(options.seconds)
        for i in range(options.pairs):
            for name in options.stands[:: 1 if i % 2 == 0 else -1]:
                windows[name].append(stands[name].window(options.seconds))
            rates = (f"{name} {totals(seen[-1:])['samples_per_s']:.0f}/s" for name, seen in windows.items())
            print(f"{i + 1:3} " + "  ".join(rates), file=sys.stderr)
        extra = {
            name: {"scrapes": s.n_scrapes, "scrape_ms": round(1000 * s.scrape_s / max(1, s.n_scrapes), 1), "dropped": s.dropped()}
            for name, s in stands.items() if s.is_shown
        }  # fmt: skip
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": options.load_before,
                    "directory": "memory" if str(directory).startswith("/dev/shm") else "disk"},
        "pairs": options.pairs, "seconds": options.seconds, "worker_threads": options.threads, "payload_tokens": 680, "batch": 4,
        "stands": {
            name: totals(seen) | extra.get(name, {}) for name, seen in windows.items()
        },
        "against_off": {name: compared(windows, name) for name in options.stands if name != "off"},
        "windows_samples_per_s": {name: [round(w["samples"] / w["seconds"], 1) for w in seen] for name, seen in windows.items()},
    }  # fmt: skip


def totals(seen: Sequence[dict[str, float]]) -> dict[str, float]:
    """Throughput and processor time of all windows of a stand."""
    n = sum(w["samples"] for w in seen)
    return {
        "samples": n, "samples_per_s": round(n / sum(w["seconds"] for w in seen), 1),
        "ledger_ms_per_sample": round(1000 * sum(w["ledger_s"] for w in seen) / n, 4),
        "worker_ms_per_sample": round(1000 * sum(w["worker_s"] for w in seen) / n, 4),
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [
        "| | samples/s | ledger ms/sample | workers ms/sample | loss of samples/s, % (95 %) | ledger CPU, % | workers CPU, % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, stand in record["stands"].items():
        against = record["against_off"].get(name, {})
        shown = [f"{s['loss_percent']:.1f} ({s['low']:.1f} to {s['high']:.1f})" for s in against.values()] or ["", "", ""]
        values = (stand["samples_per_s"], stand["ledger_ms_per_sample"], stand["worker_ms_per_sample"])
        lines.append(f"| {name} | " + " | ".join(f"{v:.4g}" for v in values) + " | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=90, help="rounds")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one window")
    parser.add_argument("--threads", type=int, default=6, help="workers of a stand")
    parser.add_argument("--rate-max", type=float, default=1500.0, help="samples per second that groups are fed for")
    parser.add_argument("--loss-max", type=float, default=3.0, help="percent of throughput at 1 %% sampling")
    parser.add_argument("--stands", nargs="+", choices=STANDS, default=["off", "sampled_1", "sampled_5"])
    parser.add_argument("--out", default="", help="JSON file for the record")
    options = parser.parse_args()
    options.load_before = [round(x, 2) for x in os.getloadavg()]
    directory = Path(tempfile.mkdtemp(prefix="rollbook-observing-"))
    try:
        record = measured(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    lost = record["against_off"].get("sampled_1", {}).get("seconds", {"loss_percent": 0.0})["loss_percent"]
    return int(lost > options.loss_max)


if __name__ == "__main__":
    sys.exit(main())
