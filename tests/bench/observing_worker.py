"""Workers of ``observing``: threads that lease and submit as fast as they are answered, observed as the worker role is.

    python observing_worker.py RUN_DIR THREADS

Reads a number of seconds from a line of standard input, works for so long, and answers with a line of JSON: acknowledged
samples and seconds. Between two lines nothing is called. What a real worker records of a rollout is recorded here by the same
calls: spans ``generate`` and ``reward`` (``rollout/episodes``), ``submit`` (``rollout/delivery``), the four stages
(``rollout/worker``).
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rollbook.cli.showing import shown_metrics
from rollbook.core.config import config_from_json
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import (
    FinishReason,
    LeaseGrant,
    PolicyVersion,
    RewardStatus,
    SandboxStatus,
    Submission,
    SubmitOutcome,
    Trajectory,
)
from rollbook.observe import metrics, tracing
from rollbook.rpc.client import LedgerClient

TOKENS = 680
BATCH = 4


class Worker:
    """One incarnation with a connection of its own."""

    def __init__(self, number: int, address: str) -> None:
        self.name = f"worker-{number}"
        self._client = LedgerClient(address, "observing", timeout_s=60.0)
        self._client.register_worker(self.name, "host", "simulated", json.dumps({"name": self.name}))
        self._loaded: PolicyVersion | None = None
        self._grants: list[LeaseGrant] = []
        self._numbers = itertools.count(1)
        self._tokens, self._logprobs = pack_i32(range(TOKENS)), pack_f32([-0.5] * TOKENS)
        self.n_samples = 0

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            if len(self._grants) < BATCH:
                self._lease(until)
            else:
                batch, self._grants = self._grants[:BATCH], self._grants[BATCH:]
                self._deliver(batch)

    def _lease(self, until: float) -> None:
        wait_s = max(0.0, min(0.5, until - time.monotonic()))
        reply = self._client.lease_slots(self.name, self._loaded, 2 * BATCH, wait_s, f"{self.name}.{next(self._numbers)}")
        self._loaded = reply.wanted or self._loaded
        self._grants += reply.grants

    def _deliver(self, batch: Sequence[LeaseGrant]) -> None:
        taken = time.monotonic()
        items = [self._sample(grant) for grant in batch]
        for grant in batch:
            if grant.traceparent:
                for name in ("generate", "reward"):
                    about = {"slot": str(grant.key), "attempt": grant.attempt}
                    tracing.record(name, grant.traceparent, taken, failed="", attributes=about)
        began = time.monotonic()
        results = self._client.submit_samples(items)
        for item, result in zip(items, results, strict=True):
            assert result.outcome is SubmitOutcome.ACCEPTED, result
            metrics.WORKER_SUBMISSIONS_TOTAL.labels(result.outcome.value).inc()
            tracing.record(
                "submit", item.traceparent, began,
                attributes={"slot": str(item.key), "worker": item.incarnation, "outcome": result.outcome.value},
            )  # fmt: skip
        self.n_samples += len(batch)
        now = time.monotonic()
        for grant in batch:
            metrics.WORKER_TOKENS_TOTAL.inc(TOKENS)
            exemplar = tracing.exemplar(grant.traceparent) if grant.traceparent else None
            for stage in ("generate", "reward", "commit", "total"):
                metrics.ROLLOUT_DURATION_SECONDS.labels(stage).observe(now - taken, exemplar)

    def _sample(self, g: LeaseGrant) -> Submission:
        trajectory = Trajectory(self._tokens, self._logprobs, pack_i32([g.version]) * TOKENS)
        return Submission(
            g.key, g.token, self.name, next(self._numbers), g.lineage, trajectory, float(g.key.sibling % 2), RewardStatus.GIVEN,
            SandboxStatus.NOT_USED, FinishReason.STOP, 1.0, 0.01, '{"parts": {"correct": 1.0}}', traceparent=g.traceparent,
        )  # fmt: skip


def main() -> None:
    run_dir, n_threads = Path(sys.argv[1]), int(sys.argv[2])
    config = config_from_json(json.dumps(json.loads((run_dir / "config.json").read_text())["config"]))
    tracing.configure("worker", "observing", "worker-0")
    with shown_metrics(config, "worker", "worker-0", 0):
        workers = [Worker(number, (run_dir / "ledger.address").read_text().strip()) for number in range(n_threads)]
        for line in sys.stdin:
            began, before = time.monotonic(), sum(worker.n_samples for worker in workers)
            threads = [threading.Thread(target=worker.work, args=(began + float(line),)) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            n = sum(worker.n_samples for worker in workers) - before
            print(json.dumps({"samples": n, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
