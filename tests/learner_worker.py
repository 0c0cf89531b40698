"""A feeder and a worker in one thread, for tests that run the learner against the real ledger.

Completions are a function of (group, sibling, version), so that two runs of one schedule record the same rollouts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from learner_support import GROUP_SIZE, VOCAB_SIZE
from rollbook.core.config import Config
from rollbook.core.errors import CursorMoved, Unavailable
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.ports import LedgerPort
from rollbook.core.records import (
    TASK_STREAM,
    Cursor,
    FinishReason,
    GroupSpec,
    LeaseGrant,
    PolicyVersion,
    RewardStatus,
    Role,
    RunRecord,
    SandboxStatus,
    Submission,
    Trajectory,
)
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import serve


def feed(ledger: LedgerPort, n_groups: int) -> None:
    """Append ``n_groups`` groups, unless they are there."""
    term = ledger.acquire_role(Role.FEEDER, "feeder", 30.0)
    before = ledger.cursor(TASK_STREAM)
    groups = []
    for ordinal in range(before.next_ordinal, n_groups):
        draw = random.Random(f"prompt {ordinal}")
        prompt = pack_i32(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(2, 6)))
        groups.append(GroupSpec(ordinal, prompt, '{"prompt": "p", "answer": "a"}', GROUP_SIZE))
    if groups:
        with suppress(CursorMoved):
            ledger.append_groups(term, before, Cursor(TASK_STREAM, n_groups, '{"drawn": 1}', False), groups)


def submission(grant: LeaseGrant, incarnation: str, sequence: int) -> Submission:
    """What the worker sampled under a grant."""
    draw = random.Random(f"{grant.key} {grant.version}")
    n = draw.randint(1, 8)
    trajectory = Trajectory(
        token_ids=pack_i32(draw.randrange(VOCAB_SIZE) for _ in range(n)),
        logprobs=pack_f32(draw.uniform(-4.5, -2.5) for _ in range(n)),
        versions=pack_i32([grant.version] * n),
    )
    return Submission(
        grant.key, grant.token, incarnation, sequence, grant.lineage, trajectory, float(draw.random() < 0.5),
        RewardStatus.GIVEN, SandboxStatus.NOT_USED, FinishReason.STOP, 0.1, 0.1,
    )  # fmt: skip


class Worker(threading.Thread):
    """Leases and submits until told to stop; holds whatever version the ledger wants."""

    def __init__(self, ledger: LedgerPort, incarnation: str = "worker") -> None:
        super().__init__(daemon=True)
        self._ledger = ledger
        self._incarnation = incarnation
        self._stopping = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - shown by the test that joins the thread
            self.error = error

    def _work(self) -> None:
        loaded: PolicyVersion | None = None
        sequence = 0
        self._ledger.register_worker(self._incarnation, "here", "test")
        while not self._stopping.is_set():
            try:
                reply = self._ledger.lease_slots(self._incarnation, loaded, 64, wait_s=0.2)
            except Unavailable:  # a failpoint in the transaction that both share
                continue
            loaded = reply.wanted or loaded
            done = []
            for grant in reply.grants:
                sequence += 1
                done.append(submission(grant, self._incarnation, sequence))
            if done:
                self._ledger.submit_samples(done)

    def stop(self) -> None:
        """End the thread; raises what it died of."""
        self._stopping.set()
        self.join(20.0)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def steps_of(config: Config) -> int:
    """Groups the run needs."""
    return config.run.steps * config.learner.groups_per_step


@contextmanager
def service(config: Config, *, over_rpc: bool = False) -> Iterator[tuple[LedgerPort, Ledger]]:
    """An open ledger with its groups and a worker; yields what the learner talks to, and the ledger itself."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(f"sqlite:///{run_dir / 'ledger.sqlite'}", holder="server", role_ttl_s=60.0)
    try:
        ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
        feed(ledger, steps_of(config) + config.learner.groups_per_step)
        worker = Worker(ledger)
        worker.start()
        server = serve(ledger, "127.0.0.1:0", run_id=config.run.id) if over_rpc else None
        client = LedgerClient(server.address, config.run.id) if server else None
        try:
            yield client or ledger, ledger
        finally:
            worker.stop()
            if server and client:
                client.close()
                server.stop(1.0)
    finally:
        ledger.close()
