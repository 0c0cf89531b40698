"""Malformed and hostile messages to every RPC of a real server, and what came of it.

Claim: whatever arrives, the server answers with a defined result or a typed error, never with an internal one; it lives, its
ledger audits clean, its memory and threads do not grow; and no row changes by a message that nobody may accept. Messages are
valid ones of a real run with one to three fields made wrong (``fuzz_messages.mutate``), and bytes (``fuzz_messages.raw``).

Two arms on each database. ``closed``: a finished scene (``fuzz_stage``) whose every protected row must stay as it is, byte for
byte. ``open``: a run that goes on meanwhile, where a changed message may be a valid one; what is judged are the answers and, by
the audit, what was stored. Prints its seed; exit code 1 when something was found. ``--json`` adds the record to
``chaos/results/fuzz.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from fuzz_messages import MAYBE, REFUSED, Hostile, mutate, raw
from fuzz_stage import ANSWERS, RECORD, RUN_ID, Base, Remote, ServerProcess, Stage, protected_rows
from postgres_server import NotObtainable, PostgresServer
from rollbook.rpc import convert
from rollbook.v1 import ledger_pb2 as records_pb
from rollbook.v1 import ledger_service_pb2 as pb

RESULTS = Path(__file__).resolve().parent / "results" / "fuzz.json"
BATCH = 250
"""Messages between two looks at the rows, the server's health and its memory."""
TIMEOUT_S, POLL_S = 30.0, 0.3
POLLS = ("Heartbeat", "LeaseSlots", "PlanStep")
RSS_GROWTH_KIB_MAX = 48 * 1024
"""Growth of the second half of an arm over the end of its first; caches of statements and connections fill before."""
THREADS_GROWTH_MAX = 24
"""Pool threads start as they are needed, sixteen at most; and those of gRPC."""
RARE = {"Audit": 0.1, "Survival": 0.2, "RunStatus": 0.2, "ResumePoint": 0.3}
"""Calls with nothing to change but their run, which read much."""
UNDUE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.CANCELLED,
         grpc.StatusCode.DATA_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # fmt: skip
"""Statuses that no message may cause."""
STOP_AFTER = 40
"""Findings after which an arm ends."""


_stopping = threading.Event()
"""Set by SIGTERM: arms end after their batch, so that every process that was started is ended too."""


@dataclass
class Arm:
    """What one arm sent and found."""

    name: str
    sent: int = 0
    by_rpc: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    memory_kib: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def found(self, text: str) -> None:
        if text not in self.findings:
            self.findings.append(text)
            print(f"FOUND [{self.name}] {text}", file=sys.stderr, flush=True)

    def growth_kib(self) -> int:
        """Memory at the end over the most in the first half; 0 where it is less."""
        half = max(1, len(self.memory_kib) // 2)
        return max(0, self.memory_kib[-1] - max(self.memory_kib[:half])) if self.memory_kib else 0


def judge(arm: Arm, server: Remote, hostile: Hostile, live: bool) -> None:
    """Deliver one message and say what is wrong with the answer."""
    code, kind, text, parts = server.deliver(hostile.method, hostile.data, _timeout(hostile))
    arm.sent += 1
    arm.by_rpc.setdefault(hostile.method, Counter())[kind or code.name] += 1
    said = f"{hostile.method}: {hostile.what[:300]} -> {code.name} {kind} {text[:200]}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and _timeout(hostile) == POLL_S:
        return  # held, as it asked to be, until its deadline
    if code in UNDUE:
        arm.found(said)
    elif code is not grpc.StatusCode.OK and not kind and code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        arm.found(f"no class: {said}")
    elif code is grpc.StatusCode.OK:
        accepted = _accepted(hostile.method, parts)
        if accepted is None:
            arm.found(f"undefined answer: {said}")
        elif accepted and (hostile.sure == REFUSED or (live and hostile.sure > MAYBE)):
            arm.found(f"accepted: {said}")


def _timeout(hostile: Hostile) -> float:
    """Polls are cut short, or most of the time would go into waiting."""
    return POLL_S if hostile.method in POLLS else TIMEOUT_S


def _accepted(method: str, parts: list[bytes]) -> bool | None:
    """Whether an OK answer says that something was taken; None when the answer itself is not defined."""
    for part in parts:
        answer = ANSWERS[method].FromString(part)
        if method in ("SubmitSamples", "ReportFailures"):
            outcomes = [result.outcome for result in answer.results]  # type: ignore[attr-defined]
            if 0 in outcomes:
                return None
            return records_pb.SUBMIT_OUTCOME_ACCEPTED in outcomes
    return True


def bases_by_method(bases: list[Base]) -> dict[str, list[Base]]:
    out: dict[str, list[Base]] = {}
    for base in bases:
        out.setdefault(base.method, []).append(base)
    return out


def choose(rng: random.Random, bases: dict[str, list[Base]], *, raw_share: float, closed: bool) -> tuple[Hostile, bool]:
    """One hostile message, and whether its original would have been accepted."""
    while True:
        method = rng.choice(list(bases))
        if rng.random() > RARE.get(method, 1.0):
            continue
        base = rng.choice(bases[method])
        if rng.random() >= raw_share:
            return mutate(rng, method, base.message, live=base.live and closed), base.live and not base.repeated
        if not (base.live and closed):
            return raw(rng, method, base.message), base.live


def look(arm: Arm, server: ServerProcess, url: str, rows: dict[str, Any] | None) -> None:
    """After a batch: health, rows, memory."""
    if not server.healthy():
        arm.found("the server does not answer a health check any more")
        return
    status = server.status_of()
    arm.memory_kib.append(status["VmRSS"])
    arm.threads.append(status["Threads"])
    if rows is not None:
        now = protected_rows(url)
        for table in rows:
            if now[table] != rows[table]:
                gone = [r for r in rows[table] if r not in now[table]]
                new = [r for r in now[table] if r not in rows[table]]
                arm.found(f"rows of {table} changed in a batch: gone {str(gone)[:300]}, new {str(new)[:300]}")
                rows[table] = now[table]


def run_closed(arm: Arm, url: str, log: Path, rng: random.Random, n: int) -> None:
    """Messages to a run in which nothing may change."""
    server = ServerProcess(url, log)
    try:
        stage = Stage(server)
        stage.play()
        rows = protected_rows(url)
        bases = bases_by_method(stage.bases)
        _send(arm, server, n, lambda: look(arm, server, url, rows), lambda: choose(rng, bases, raw_share=0.3, closed=True))
        _end(arm, stage)
    finally:
        server.close()


def run_open(arm: Arm, url: str, log: Path, rng: random.Random, n: int) -> None:
    """Messages to a run that goes on between two batches."""
    server = ServerProcess(url, log)
    try:
        _before_the_run(arm, server, rng, min(BATCH, n // 20))
        stage = Stage(server)
        stage.play()
        bases = bases_by_method([b for b in stage.bases if b.method not in ("ReleaseRole", "Drain")])

        def between() -> None:
            look(arm, server, url, None)
            fresh = stage.go_on()
            for base in fresh:
                kept = [b for b in bases[base.method] if not b.live][:8]
                bases[base.method] = [*kept, base]

        _send(arm, server, n - arm.sent, between, lambda: choose(rng, bases, raw_share=0.3, closed=False))
        _end(arm, stage)
    finally:
        server.close()


def _before_the_run(arm: Arm, server: ServerProcess, rng: random.Random, n: int) -> None:
    """Hostile ways to open a run that is not open yet: none may create it."""
    request = pb.OpenRunRequest(run_id=RUN_ID, run=convert.run_message(RECORD))
    for _ in range(n):
        hostile = mutate(rng, "OpenRun", request, live=True)
        judge(arm, server, hostile, True)


def _send(
    arm: Arm, server: ServerProcess, n: int, between: Callable[[], None], next_message: Callable[[], tuple[Hostile, bool]]
) -> None:
    end = arm.sent + n
    between()
    while arm.sent < end and len(arm.findings) < STOP_AFTER and not _stopping.is_set():
        for _ in range(min(BATCH, end - arm.sent)):
            hostile, live = next_message()
            judge(arm, server, hostile, live and arm.name.startswith("closed"))
        between()


def _end(arm: Arm, stage: Stage) -> None:
    """The audit, and what the memory did."""
    for violation in stage.client.audit():
        arm.found(f"audit: {violation.promise} {violation.check}: {violation.detail} {violation.ids[:5]}")
    for verb in (stage.client.run_status, stage.client.survival, stage.client.resume_point):
        verb()
    if arm.growth_kib() > RSS_GROWTH_KIB_MAX:
        shown = arm.memory_kib[:: max(1, len(arm.memory_kib) // 12)]
        arm.found(f"memory grew by {arm.growth_kib()} KiB in the second half: {shown}")
    if arm.threads and max(arm.threads) - arm.threads[0] > THREADS_GROWTH_MAX:
        arm.found(f"threads grew: {arm.threads[0]} to {max(arm.threads)}")


def fuzz(messages: int, seed: int, directory: Path, postgres: PostgresServer | None) -> list[Arm]:
    """Every arm; a quarter of the messages goes to PostgreSQL where there is one."""
    shares = [("closed-sqlite", 0.5), ("open-sqlite", 0.5)]
    if postgres is not None:
        shares = [("closed-sqlite", 0.5), ("open-sqlite", 0.25), ("closed-postgresql", 0.15), ("open-postgresql", 0.1)]
    with ThreadPoolExecutor(len(shares)) as pool:  # each arm has a server and a generator of its own

        def run(number: int) -> Arm:
            name, share = shares[number]
            return _run_arm(name, directory / name, postgres, random.Random(f"{seed}.{number}"), round(messages * share))

        return list(pool.map(run, range(len(shares))))


def _run_arm(name: str, place: Path, postgres: PostgresServer | None, rng: random.Random, n: int) -> Arm:
    arm, started = Arm(name), time.monotonic()
    place.mkdir(parents=True)
    if name.endswith("sqlite"):
        url = f"sqlite:///{place}/ledger.sqlite"
    else:
        assert postgres is not None
        url = postgres.url(postgres.create(name.replace("-", "_")))
    run = run_closed if name.startswith("closed") else run_open
    run(arm, url, place / "server.log", rng, n)
    print(f"{name}: {arm.sent} messages in {time.monotonic() - started:.0f} s, {len(arm.findings)} findings, memory "
          f"{arm.memory_kib[:1]} to {arm.memory_kib[-1:]} KiB, threads {arm.threads[:1]} to {arm.threads[-1:]}",
          flush=True)  # fmt: skip
    return arm


def record_of(arms: list[Arm], seed: int, wall_s: float) -> dict[str, Any]:
    """What is kept of a whole run."""
    by_rpc: dict[str, Counter[str]] = {}
    for arm in arms:
        for method, counts in arm.by_rpc.items():
            by_rpc.setdefault(method, Counter()).update(counts)
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "seed": seed, "messages": sum(arm.sent for arm in arms),
        "wall_s": round(wall_s, 1), "findings": [f"{arm.name}: {text}" for arm in arms for text in arm.findings],
        "machine": {"cores": os.cpu_count(), "cpu": cpu, "python": platform.python_version(), "grpcio": grpc.__version__},
        "arms": [
            {"name": arm.name, "messages": arm.sent, "memory_first_kib": arm.memory_kib[0], "memory_half_kib":
             arm.memory_kib[len(arm.memory_kib) // 2], "memory_last_kib": arm.memory_kib[-1], "threads_first": arm.threads[0],
             "threads_last": arm.threads[-1]}
            for arm in arms
        ],
        "by_status": dict(sum((c for c in by_rpc.values()), Counter()).most_common()),
        "by_rpc": {method: dict(counts.most_common()) for method, counts in sorted(by_rpc.items())},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="default: made up and printed")
    parser.add_argument("--sqlite-only", action="store_true", help="no PostgreSQL arms")
    parser.add_argument("--json", action="store_true", help="write the record to chaos/results/fuzz.json")
    options = parser.parse_args()
    seed = options.seed or random.SystemRandom().randrange(1, 2**31)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    started = time.monotonic()
    postgres = None
    directory = Path(tempfile.mkdtemp(prefix="rollbook-fuzz-"))
    try:
        if not options.sqlite_only:
            try:
                postgres = PostgresServer()
            except NotObtainable as error:
                print(f"POSTGRESQL NOT RUN: {error}", file=sys.stderr)
        arms = fuzz(options.messages, seed, directory, postgres)
    finally:
        if postgres is not None:
            postgres.close()
        shutil.rmtree(directory, ignore_errors=True)
    record = record_of(arms, seed, time.monotonic() - started)
    if options.json:
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: record[name] for name in ("seed", "messages", "wall_s", "findings", "by_status")}, indent=1))
    return 1 if record["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
