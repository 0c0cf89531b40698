"""The ledger under the load of many workers: acknowledgement latency, memory, processor time, and that nothing is lost.

    python tests/bench/load.py --workers 500 --rate 500 --seconds 600 --out tests/bench/results/load.json
    python tests/bench/load.py --overload --seconds 60 --out tests/bench/results/load.json

Real clients with connections of their own (``load_worker``), a real server, SQLite or PostgreSQL, and a learner that plans,
finishes and publishes every step under tiny files, so that capacity does not end the run. With ``--overload`` nobody waits for a
sample to be due during the first two thirds and the server has few threads: it has to refuse and say when to come again, its
memory has to stay, and in the last third, at the ordinary rate, the same clients have to be served again. In the end every
acknowledged sample is looked up by plain SQL and the ledger is audited. The record is printed as JSON and as a short table. Exit
code 1 when an acknowledged sample was lost, the audit finds something, or one of these claims is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from load_worker import ACK

from rollbook.core.errors import NotReady, RollbookError
from rollbook.core.idempotency import digest
from rollbook.core.packing import pack_i32
from rollbook.core.records import (
    Cursor,
    GroupSpec,
    PlanOutcome,
    PolicyVersion,
    Role,
    RoleTerm,
    RunRecord,
    RunRules,
    ScheduleKind,
)
from rollbook.ledger.dialects import sqlite_module
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import serve

HERE = Path(__file__).resolve().parent
RUN_ID, STREAM = "load", "train"
GROUP_SIZE, GROUPS_PER_STEP, MAX_LAG = 8, 128, 16
APPEND_GROUPS = 1000
Processes = list[subprocess.Popen[bytes]]
OVERLOAD_THREADS = 8
"""Threads of a server that is to be overloaded."""
SETTLED_S = 10.0
"""After a flood, its calls may still wait for so long."""
GROWTH_MAX, CACHE_MIB = 1.3, 64
"""Memory at the end against the most in the first third, beside the writing connection's page cache, which fills up."""


def serve_here(url: str, threads: int) -> None:
    """Serve the ledger at ``url`` until standard input ends; the address is the first line of the output."""
    ledger = Ledger(url, holder="server", role_ttl_s=100_000.0)
    server = serve(ledger, "127.0.0.1:0", run_id=RUN_ID, threads=threads)
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop(0.0)
    ledger.close()


class Server:
    """The server process: its memory and processor time."""

    def __init__(self, url: str, threads: int, log: Path) -> None:
        with log.open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--serve", url, "--threads", str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        if not self.address:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def open_run(client: LedgerClient, n_groups: int, tokens_max: int) -> RoleTerm:
    """Create the run with its first version and all its groups; returns the learner's term."""
    rules = RunRules(
        group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, schedule=ScheduleKind.BOUNDED, max_lag_versions=MAX_LAG,
        fixed_lag_versions=1, config_seed=7, lease_ttl_s=180.0, attempts_max=10, survivors_min=2, straggler="drop",
        tokens_max=tokens_max, steps=0,
    )  # fmt: skip
    client.open_run(RunRecord(RUN_ID, "c" * 64, "{}", 0, rules))
    feeder = client.acquire_role(Role.FEEDER, "feeder", 80_000.0)
    learner = client.acquire_role(Role.LEARNER, "learner", 80_000.0)
    before = client.cursor(STREAM)
    for first in range(0, n_groups, APPEND_GROUPS):
        end = min(n_groups, first + APPEND_GROUPS)
        groups = [GroupSpec(o, pack_i32([1, 2, 3]), '{"prompt": "p", "answer": "a"}', GROUP_SIZE) for o in range(first, end)]
        before = client.append_groups(feeder, before, Cursor(STREAM, end, json.dumps({"at": end}), False), groups)
    return learner


class Learner(threading.Thread):
    """Plans, finishes and publishes step after step until told to stop."""

    def __init__(self, client: LedgerClient, term: RoleTerm, directory: Path) -> None:
        super().__init__(daemon=True)
        self._client, self._term, self._directory = client, term, directory
        self.stopping = threading.Event()
        self.steps = self.n_planned = 0
        self.failed = ""

    def publish(self, number: int) -> None:
        path = f"versions/0.{number}"
        file = self._directory / path / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(pack_i32([number]))
        self._client.publish_version(self._term, PolicyVersion(0, number, digest("weights", number), path, "{}", 4))

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._step()
        except RollbookError as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _step(self) -> None:
        step = self.steps + 1
        try:
            plan = self._client.plan_step(self._term, 0, step, 2.0)
        except NotReady:
            return
        self._client.finish_plan(self._term, 0, step, PlanOutcome.TRAINED, "", '{"loss": 0.5}')
        self.publish(step)
        self.steps, self.n_planned = step, self.n_planned + len(plan.items)


def quantiles(values: list[float]) -> dict[str, float]:
    """Milliseconds at the usual places."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    out = {name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for name, q in at.items()}
    return out | {"max": round(1000 * ordered[-1], 2)}


def acknowledged(directory: Path) -> set[tuple[int, int]]:
    """Keys of every sample that some worker was told to be durable."""
    keys: set[tuple[int, int]] = set()
    for path in directory.glob("*.acks"):
        keys |= set(ACK.iter_unpack(path.read_bytes()))  # type: ignore[arg-type]
    return keys


def stored(url: str) -> set[tuple[int, int]]:
    """Keys of every stored sample that has its bytes, by plain SQL past the server."""
    query = (
        "SELECT s.ordinal, s.sibling FROM sample s JOIN payload p ON p.run_id = s.run_id AND p.ordinal = s.ordinal "
        "AND p.sibling = s.sibling WHERE length(p.token_ids) > 0"
    )
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite_module().connect(url.removeprefix("sqlite:///"))) as connection:
            return set(connection.execute(query))
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return set(connection.execute(query).fetchall())


@contextlib.contextmanager
def database(kind: str, directory: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{directory}/ledger.sqlite"
        return
    sys.path.insert(0, str(HERE.parent.parent / "chaos"))
    from postgres_server import PostgresServer

    server = PostgresServer()
    try:
        yield server.url(server.create("load"))
    finally:
        server.close()


def start_workers(options: argparse.Namespace, address: str, directory: Path) -> tuple[Processes, float, float]:
    """Worker processes; (processes, when samples begin to be due, when everything ends), both of the monotonic clock."""
    starts_s = time.monotonic() + 5.0 + options.workers * 0.02
    ends_s = starts_s + options.seconds
    flood_ends_s = starts_s + options.seconds * 2 / 3 if options.overload else 0.0
    processes = []
    for i in range(options.processes):
        plan = {
            "address": address, "run_id": RUN_ID, "workers": list(range(i, options.workers, options.processes)),
            "batch": options.batch, "rate_per_worker": options.rate / options.workers, "payload_bytes": options.payload_bytes,
            "starts_s": starts_s, "ends_s": ends_s, "flood_ends_s": flood_ends_s, "heartbeat_s": options.heartbeat_s,
        }  # fmt: skip
        path = directory / f"workers-{i}.json"
        path.write_text(json.dumps(plan))
        log = (directory / f"workers-{i}.log").open("wb")
        processes.append(subprocess.Popen([sys.executable, str(HERE / "load_worker.py"), str(path)], stdout=log, stderr=log))
    return processes, starts_s, ends_s


def watch(server: Server, processes: Processes, learner: Learner, starts_s: float, ends_s: float) -> dict[str, Any]:
    """Memory of the server while the workers work, and its processor time between begin and end."""
    memory: list[tuple[float, int]] = []
    cpu_from = steps_from = None
    cpu_to = 0.0
    while any(p.poll() is None for p in processes):
        now = time.monotonic()
        if cpu_from is None and now >= starts_s:
            cpu_from, steps_from = server.cpu_s(), learner.steps
        if now <= ends_s:
            cpu_to = server.cpu_s()
        memory.append((round(now - starts_s, 1), server.rss_kib()))
        if server.process.poll() is not None:
            raise RuntimeError("the server died")
        if now > ends_s + 200:
            raise RuntimeError("workers do not end")
        time.sleep(1.0)
    return {"memory": memory, "cpu_s": cpu_to - (cpu_from or 0.0), "steps": learner.steps - (steps_from or 0)}


def run(options: argparse.Namespace, directory: Path, url: str) -> dict[str, Any]:
    """One measurement."""
    threads = OVERLOAD_THREADS if options.overload else 128
    server = Server(url, threads, directory / "server.log")
    try:
        client = LedgerClient(server.address, RUN_ID, timeout_s=60.0)
        most = options.rate * options.seconds * (6 if options.overload else 1)
        n_groups = int(most / GROUP_SIZE) + 2 * (MAX_LAG + 1) * GROUPS_PER_STEP
        learner = Learner(client, open_run(client, n_groups, options.payload_bytes), directory)
        learner.publish(0)
        learner.start()
        processes, starts_s, ends_s = start_workers(options, server.address, directory)
        seen = watch(server, processes, learner, starts_s, ends_s)
        learner.stopping.set()
        learner.join(timeout=60)
        began = time.monotonic()
        audit = [f"{v.promise} {v.check}: {v.detail}" for v in LedgerClient(server.address, RUN_ID, timeout_s=900.0).audit()]
        audit_s = time.monotonic() - began
    finally:
        server.close()
    return judged(options, directory, url, seen, starts_s, learner, audit, audit_s)


def judged(
    options: argparse.Namespace, directory: Path, url: str, seen: dict[str, Any], starts_s: float, learner: Learner,
    audit: list[str], audit_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The record of a run."""
    parts = [json.loads(path.read_text()) for path in sorted(directory.glob("*.seen"))]
    rows = [row for p in parts for row in zip(p["at_s"], p["ack_s"], p["late_s"], strict=True)]
    within = [r for r in rows if starts_s <= r[0] <= starts_s + options.seconds]
    acked, there = acknowledged(directory), stored(url)
    flood_s = options.seconds * 2 / 3
    statuses = sum((Counter(p["statuses"]) for p in parts), Counter())
    calm = [r for r in within if r[0] > starts_s + flood_s + SETTLED_S]
    memory = seen["memory"]
    first = [kib for at, kib in memory if 0 <= at <= options.seconds * 0.3]
    record = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "mode": "overload" if options.overload else "steady",
        "machine": {"cores": os.cpu_count(), "load_before": options.load_before, "python": platform.python_version(),
                    "directory": "memory" if str(directory).startswith("/dev/shm") else "disk"},
        "workers": options.workers, "connections": 2 * options.workers, "heartbeat_s": options.heartbeat_s,
        "rate_asked_per_s": options.rate, "batch": options.batch,
        "payload_bytes": options.payload_bytes, "seconds": options.seconds, "database": options.database,
        "samples_per_s": round(len(within) / options.seconds, 1),
        "ack_ms": quantiles([r[1] for r in within]),
        "behind_schedule_ms": {} if options.overload else quantiles([max(0.0, r[2] - r[1]) for r in within]),
        "ledger_cpu_ms_per_sample": round(1000 * seen["cpu_s"] / max(1, len(within)), 3),
        "ledger_cores_used": round(seen["cpu_s"] / options.seconds, 2),
        "memory_mib": {"first_third_max": round(max(first, default=0) / 1024, 1), "last": round(memory[-1][1] / 1024, 1),
                       "every_minute": [round(kib / 1024, 1) for _, kib in memory[::60]]},
        "outcomes": dict(sum((Counter(p["outcomes"]) for p in parts), Counter())),
        "refused_attempts": {k: n for k, n in sorted(statuses.items()) if not k.endswith(" OK")},
        "calls": sum(statuses.values()), "gave_up": dict(sum((Counter(p["gave_up"]) for p in parts), Counter())),
        "workers_still_running": sum(p["still_running"] for p in parts),
        "steps": seen["steps"], "learner_failed": learner.failed,
        "acknowledged": len(acked), "stored": len(there), "acknowledged_lost": len(acked - there),
        "audit": audit, "audit_s": round(audit_s, 1),
    }  # fmt: skip
    if options.overload:
        record["calm_after"] = {"samples_per_s": round(len(calm) / max(1.0, options.seconds - flood_s - SETTLED_S), 1),
                                "ack_ms": quantiles([r[1] for r in calm])}  # fmt: skip
    record["broken"] = broken(record)
    return record


def broken(record: dict[str, Any]) -> list[str]:
    """Claims that a run did not keep."""
    memory, rate = record["memory_mib"], record["rate_asked_per_s"]
    refused = {k: n for k, n in record["refused_attempts"].items() if "RESOURCE_EXHAUSTED" in k}
    claims = {
        "every acknowledged sample is stored": not record["acknowledged_lost"],
        "the audit is clean": not record["audit"],
        "the learner went on": not record["learner_failed"],
        "every worker came to its end": not record["workers_still_running"],
        "every refusal says when to come again": not any("without a hint" in k for k in refused),
        "memory is bounded": memory["last"] <= GROWTH_MAX * memory["first_third_max"] + CACHE_MIB,
    }
    if record["mode"] == "overload":
        claims["a flood is refused"] = bool(refused)
        claims["the ordinary rate is served again"] = record["calm_after"]["samples_per_s"] >= 0.9 * rate
    else:
        claims["the rate is reached"] = record["samples_per_s"] >= 0.97 * rate
    return [claim for claim, kept in claims.items() if not kept]


def table(record: dict[str, Any]) -> str:
    """The record in a few lines."""
    ack, memory = record["ack_ms"], record["memory_mib"]
    rows = [
        ("workers, connections", f"{record['workers']}, {record['connections']}"),
        ("samples/s asked, acknowledged", f"{record['rate_asked_per_s']:g}, {record['samples_per_s']:g}"),
        ("ack p50, p95, p99, max [ms]", ", ".join(f"{ack.get(q, math.nan):.0f}" for q in ("p50", "p95", "p99", "max"))),
        ("acknowledged, stored, lost", f"{record['acknowledged']}, {record['stored']}, {record['acknowledged_lost']}"),
        ("refused attempts of all calls", f"{sum(record['refused_attempts'].values())} of {record['calls']}"),
        ("server: cores, ms a sample", f"{record['ledger_cores_used']}, {record['ledger_cpu_ms_per_sample']}"),
        ("server: MiB first third, last", f"{memory['first_third_max']}, {memory['last']}"),
    ]
    if "calm_after" in record:
        calm = record["calm_after"]
        p99 = calm["ack_ms"].get("p99", math.nan)
        rows.append(("after the flood: samples/s, p99 [ms]", f"{calm['samples_per_s']:g}, {p99:.0f}"))
    rows.append(("broken", "; ".join(record["broken"]) or "nothing"))
    return "\n".join(f"{name:36} {value}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=128, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--rate", type=float, default=500.0, help="samples per second, of all workers together")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--batch", type=int, default=4, help="samples of one call; a worker of that many slots submits them so")
    parser.add_argument("--payload-bytes", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)), help="of the workers")
    parser.add_argument("--heartbeat-s", type=float, default=5.0, help="each worker holds a heartbeat for so long, always")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--out", default="", help="JSON list to which the record is added")
    options = parser.parse_args()
    if options.serve:
        serve_here(options.serve, options.threads)
        return 0
    options.load_before = [round(x, 2) for x in os.getloadavg()]
    directory = Path(tempfile.mkdtemp(prefix="rollbook-load-"))
    try:
        with database(options.database, directory) as url:
            record = run(options, directory, url)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.out:
        path = Path(options.out)
        older = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*older, record], indent=1) + "\n")
    print(json.dumps(record, indent=1))
    print(table(record))
    return 1 if record["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
