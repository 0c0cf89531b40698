"""Simulated workers of the load test: real ledger clients with connections of their own, many workers to a process.

A worker registers, leases, waits until a sample is due, and submits; beside that it holds a heartbeat open all the time, on a
second connection, as the worker role does. What is acknowledged is written down in a file before anything else is done.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from rollbook.core.errors import RollbookError
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
from rollbook.rpc import status
from rollbook.rpc.client import LedgerClient

ACK = struct.Struct("<qq")
TOKEN_BYTES = 12
"""Bytes of one token as it travels: id, log-prob, version."""


class Counting(grpc.UnaryUnaryClientInterceptor):
    """Counts the status of every attempt, also of those that are repeated, and whether a refusal said when to come again."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def intercept_unary_unary(self, continuation: Any, details: grpc.ClientCallDetails, request: Any) -> Any:
        call = continuation(details, request)
        what = call.code().name
        if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            hinted = any(key == status.RETRY_AFTER_KEY for key, _ in call.trailing_metadata() or ())
            what += "" if hinted else " without a hint"
        self._counts[f"{details.method.rpartition('/')[2]} {what}"] += 1
        return call


class Worker:
    """One incarnation."""

    def __init__(self, number: int, plan: dict[str, Any], shared: Shared) -> None:
        self.name = f"worker-{number}"
        self._plan, self._shared = plan, shared
        self._client, self._beat_client = (
            LedgerClient(plan["address"], plan["run_id"], dial=self._dial, rng=random.Random(f"{who}-{number}"))
            for who in ("work", "beat")
        )
        self._over = threading.Event()
        self._head: PolicyVersion | None = None
        self._loaded: PolicyVersion | None = None
        self._grants: list[LeaseGrant] = []
        self._calls = self._sequence = 0
        self._rng = random.Random(f"pace-{number}")
        n = max(2, plan["payload_bytes"] // TOKEN_BYTES)
        self._n_tokens, self._tokens, self._logprobs = n, pack_i32(range(2, n)), pack_f32([-0.5] * n)

    def _dial(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        # Without this, all channels of a process would share one connection.
        channel = grpc.insecure_channel(address, [*options, ("grpc.use_local_subchannel_pool", 1)])
        return grpc.intercept_channel(channel, Counting(self._shared.statuses))

    def run(self) -> None:
        """Work until the end of the plan."""
        plan = self._plan
        self._attempt(lambda: self._client.register_worker(self.name, "host", "simulated", json.dumps({"name": self.name})))
        beats = threading.Thread(target=self._beat, daemon=True, name=f"{self.name}-beat")
        beats.start()
        every_s = plan["batch"] / plan["rate_per_worker"]
        due = max(plan["starts_s"], plan["flood_ends_s"]) + self._rng.random() * every_s
        while (now := time.monotonic()) < plan["ends_s"]:
            if len(self._grants) < plan["batch"]:
                self._attempt(self._lease)
            elif plan["starts_s"] <= now < plan["flood_ends_s"]:  # nobody waits for a sample to be due
                self._attempt(lambda now=now: self._submit(now))  # type: ignore[misc]
            elif due > now:
                time.sleep(min(due - now, 1.0))
            else:
                self._attempt(lambda due=due: self._submit(due))  # type: ignore[misc]
                due += every_s
        self._over.set()
        self._client.close()
        beats.join(plan["heartbeat_s"] + 15.0)

    def _attempt(self, call: Any) -> None:
        try:
            call()
        except RollbookError as error:
            self._shared.gave_up[type(error).__name__] += 1
            time.sleep(0.5)

    def _beat(self) -> None:
        every_s = self._plan["heartbeat_s"]
        while not self._over.is_set():
            began = time.monotonic()
            self._attempt(self._heartbeat)
            self._over.wait(max(0.0, every_s - (time.monotonic() - began)))
        self._beat_client.close()

    def _heartbeat(self) -> None:
        held, head = list(self._grants), self._head
        reply = self._beat_client.heartbeat(
            self.name, self._loaded, [(g.key, g.token) for g in held], self._plan["heartbeat_s"], head.version if head else -1
        )
        self._head = reply.head
        self._shared.lost(len(reply.lost))

    def _lease(self) -> None:
        self._calls += 1
        wanted = 2 * self._plan["batch"]
        reply = self._client.lease_slots(self.name, self._loaded, wanted, 2.0, f"{self.name}.{self._calls}")
        if reply.wanted is not None:
            self._loaded = reply.wanted
        self._grants += reply.grants
        if not reply.grants and reply.wanted is None:
            time.sleep(reply.retry_after_s)

    def _submit(self, due: float) -> None:
        batch, self._grants = self._grants[: self._plan["batch"]], self._grants[self._plan["batch"] :]
        items = [self._sample(g) for g in batch]
        began = time.monotonic()
        results = self._client.submit_samples(items)
        ended = time.monotonic()
        self._shared.acknowledged(results, ended - began, ended - due)

    def _sample(self, g: LeaseGrant) -> Submission:
        self._sequence += 1
        n = self._n_tokens
        tokens = pack_i32([g.key.ordinal, g.key.sibling]) + self._tokens
        t = Trajectory(tokens, self._logprobs, pack_i32([g.version]) * n)
        return Submission(
            g.key, g.token, self.name, self._sequence, g.lineage, t, float(g.key.sibling % 2), RewardStatus.GIVEN,
            SandboxStatus.NOT_USED, FinishReason.STOP, 1.0, 0.01, '{"parts": {"correct": 1.0}}',
        )  # fmt: skip


class Shared:
    """What the workers of one process have seen."""

    def __init__(self, acks: Path) -> None:
        self._lock = threading.Lock()
        self._acks = acks.open("wb", buffering=0)
        self.statuses: Counter[str] = Counter()
        self.gave_up: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.ack_s, self.late_s, self.at_s = array("d"), array("d"), array("d")

    def acknowledged(self, results: Any, ack_s: float, late_s: float) -> None:
        """Write down what is durable by the ledger's word."""
        good = [r.key for r in results if r.outcome in (SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED)]
        with self._lock:
            self._acks.write(b"".join(ACK.pack(*key) for key in good))
            for r in results:
                self.outcomes[r.outcome.value] += 1
                self.ack_s.append(ack_s)
                self.late_s.append(late_s)
                self.at_s.append(time.monotonic())

    def lost(self, n: int) -> None:
        """Leases that a heartbeat named and that were over."""
        if n:
            self.outcomes["lease lost"] += n

    def record(self) -> dict[str, Any]:
        return {
            "statuses": self.statuses, "gave_up": self.gave_up, "outcomes": self.outcomes, "ack_s": list(self.ack_s),
            "late_s": list(self.late_s), "at_s": list(self.at_s),
        }  # fmt: skip


def main() -> None:
    """Run the workers that the plan in the file names; leaves ``acks`` and ``seen.json`` beside it."""
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    shared = Shared(path.with_suffix(".acks"))
    threading.stack_size(512 * 1024)
    workers = [Worker(number, plan, shared) for number in plan["workers"]]
    threads = [threading.Thread(target=w.run, daemon=True, name=w.name) for w in workers]
    for thread in threads:
        thread.start()
    deadline = plan["ends_s"] + 150.0  # a call that is repeated may take its whole budget
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
    left = sum(thread.is_alive() for thread in threads)
    path.with_suffix(".seen").write_text(json.dumps({**shared.record(), "still_running": left}))


if __name__ == "__main__":
    main()
