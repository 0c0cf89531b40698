"""A ledger server in a process of its own with a small real run in it, for messages that it must refuse.

Owns the server process (``serve_here``), what can be seen of it from outside (answers, health, memory, threads), the valid
messages of a run as they went over the wire, and a copy of the rows that no refused message may change. The run is left so that
nothing valid is open but what ``live`` messages would do: two steps are trained, two groups quarantined, one slot of the next
group holds a sample, and every other slot is leased for longer than anything here lasts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import sqlalchemy as sa
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollbook.core.idempotency import digest
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import (
    Blame,
    Checkpoint,
    Cursor,
    FailureReport,
    FinishReason,
    GroupSpec,
    LeaseGrant,
    PlanOutcome,
    PolicyVersion,
    RewardStatus,
    Role,
    RunRecord,
    RunRules,
    SandboxStatus,
    ScheduleKind,
    Submission,
    ToolCall,
    Trajectory,
)
from rollbook.ledger import schema as t
from rollbook.ledger.dialects import sqlite_module
from rollbook.ledger.ledger import Ledger
from rollbook.rpc import convert
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import serve
from rollbook.v1 import ledger_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["LedgerService"]
METHODS = {method.name: method for method in SERVICE.methods}
REQUESTS: dict[str, type[Message]] = {name: getattr(pb, method.input_type.name) for name, method in METHODS.items()}
ANSWERS: dict[str, type[Message]] = {name: getattr(pb, method.output_type.name) for name, method in METHODS.items()}
RUN_ID, STREAM, TTL_S, START_S, TOKENS_MAX = "fuzzed", "train", 80_000.0, 60.0, 64

RULES = RunRules(
    group_size=2, groups_per_step=2, schedule=ScheduleKind.BOUNDED, max_lag_versions=2, fixed_lag_versions=1, config_seed=7,
    lease_ttl_s=TTL_S, attempts_max=3, survivors_min=2, straggler="drop", tokens_max=TOKENS_MAX, steps=0,
)  # fmt: skip
RECORD = RunRecord(RUN_ID, "c" * 64, json.dumps({"learner": {"lr": 0.1}}), 0, RULES, '{"torch": "2.13.0"}')

ONLY_BROKEN = frozenset(
    "ForkLineage MarkCheckpoint Drain ReleaseRole QuarantineGroup ReportFailures RecordToolCall".split()
)
"""Calls whose repetitions are harmless, but not with another step, group, token or index."""
UNPROTECTED = {
    "fence": ("ttl_us", "renewed_at_us", "expires_at_us"), "lease": ("expires_at_us",), "worker": (), "event": (),
    "lease_receipt": (), "append_receipt": (),
}  # fmt: skip
"""Columns that a call without effect may touch; a table without columns here is left out as a whole."""


def serve_here(url: str) -> None:
    """Serve the ledger at ``url`` until standard input ends; the address is the first line of the output."""
    ledger = Ledger(url, holder="server", role_ttl_s=100_000.0)
    server = serve(ledger, "127.0.0.1:0", run_id=RUN_ID, threads=16)
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop(0.0)
    ledger.close()


class Remote:
    """A served ledger, as it can be seen from outside."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        grpc.channel_ready_future(self.channel).result(timeout=START_S)
        self._calls: dict[str, Any] = {}

    def deliver(self, method: str, request: bytes, timeout_s: float | None) -> tuple[grpc.StatusCode, str, str, list[bytes]]:
        """Send these bytes; (status, error class, message, parts of the answer)."""
        path = f"/{SERVICE.full_name}/{method}"
        streaming = METHODS[method].server_streaming
        if method not in self._calls:
            self._calls[method] = (self.channel.unary_stream if streaming else self.channel.unary_unary)(path)
        try:
            answer = self._calls[method](request, timeout=timeout_s)
            return grpc.StatusCode.OK, "", "", list(answer) if streaming else [answer]
        except grpc.RpcError as refused:
            call: Any = refused
            kind = dict(call.trailing_metadata() or ()).get("rollbook-error", "")
            return call.code(), str(kind), call.details() or "", []

    def healthy(self) -> bool:
        """Whether the ledger behind the server answers."""
        request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        try:
            answer = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=20)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class ServerProcess(Remote):
    """A server in a process of its own, with its memory and threads."""

    def __init__(self, url: str, log: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), url]
        with log.open("ab") as err:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)
        assert self._process.stdout is not None
        address = self._process.stdout.readline().decode().strip()
        if not address:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        super().__init__(address)

    def healthy(self) -> bool:
        return self._process.poll() is None and super().healthy()

    def status_of(self) -> dict[str, int]:
        """Resident memory in KiB and number of threads."""
        lines = (line.split(":") for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines())
        values = {name: value.split()[0] for name, value in lines if name in ("VmRSS", "Threads")}
        return {name: int(value) for name, value in values.items()}

    def close(self) -> None:
        self.channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Base:
    """A valid message; ``live`` where it, or one much like it, would change rows, so that only a broken one may be sent.

    A ``repeated`` one was carried out before: broken or not, what is stored may be its answer.
    """

    method: str
    message: Message
    live: bool
    repeated: bool = False


class Keeping(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Keeps requests as they went over the wire."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Message]] = []

    def _keep(self, details: grpc.ClientCallDetails, request: Message) -> None:
        copy = type(request)()
        copy.CopyFrom(request)
        self.kept.append((details.method.rpartition("/")[2], copy))

    def intercept_unary_unary(self, continuation: Any, details: grpc.ClientCallDetails, request: Message) -> Any:
        self._keep(details, request)
        return continuation(details, request)

    def intercept_unary_stream(self, continuation: Any, details: grpc.ClientCallDetails, request: Message) -> Any:
        self._keep(details, request)
        return continuation(details, request)


def trajectory(n: int, version: int) -> Trajectory:
    return Trajectory(pack_i32(range(5, 5 + n)), pack_f32([-0.5] * n), pack_i32([version] * n), b"\x01" * n)


def version(number: int) -> PolicyVersion:
    probe = json.dumps({"token_ids": [1, 2], "logprobs": [-0.5]})
    return PolicyVersion(0, number, digest("weights", number), f"versions/0.{number}.abc", probe, 10)


def sample_of(grant: LeaseGrant, worker: str, n: int = 4) -> Submission:
    return Submission(
        grant.key, grant.token, worker, grant.key.ordinal * 10 + grant.key.sibling, grant.lineage, trajectory(n, grant.version),
        1.0, RewardStatus.GIVEN, SandboxStatus.OK, FinishReason.STOP, 0.5, 0.1, '{"seen": "1"}', Blame.MODEL,
    )  # fmt: skip


class Stage:
    """A run on a served ledger; ``bases`` are its messages."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.keeping = Keeping()
        recording = grpc.intercept_channel(server.channel, self.keeping)
        self.client = LedgerClient(server.address, RUN_ID, timeout_s=120.0, dial=lambda address, options: recording)
        self.worker = "worker-1"
        self.bases: list[Base] = []
        self.n_published = 0

    def play(self) -> None:
        """Two trained steps, a checkpoint, failures, tool calls, quarantine, reads; then ``live`` messages, kept unsent."""
        c = self.client
        c.open_run(RECORD)
        self.feeder = c.acquire_role(Role.FEEDER, "feeder-1", TTL_S)
        self.learner = c.acquire_role(Role.LEARNER, "learner-1", TTL_S)
        c.renew_role(self.feeder)
        c.register_worker(self.worker, "host", "engine", '{"name": "w", "sandbox": {"backend": "zygote"}}')
        c.publish_version(self.learner, version(0))
        c.commit_checkpoint(self.learner, Checkpoint(0, 0, "0.0.1", "5" * 64, c.resume_point().chain_digests[0]))
        self.feed(8)
        for _ in range(2):
            self.train(self.lease(4))
        plan = c.read_plan(0, 2)
        c.commit_checkpoint(self.learner, Checkpoint(0, 2, "0.2.1", "6" * 64, plan.chain_digest))
        for ordinal in (4, 5):
            c.quarantine_group(ordinal, "kills its workers")
        grants = self.lease(4)
        c.submit_samples([sample_of(grants[0], self.worker)])
        self.keeping.kept.pop()  # under another key it would be one of the leased slots' sample
        c.report_failures([self.failure(grants[1])])
        again = self.lease(1)[0]
        self.held = [again, *grants[2:]]
        call = ToolCall(again.key, 0, "9" * 64, trajectory(2, again.version), "python", '{"code": "1+1"}')
        c.record_tool_call(call, again.token)
        c.record_tool_call(replace(call, response_json='{"out": 2}'), again.token)
        c.heartbeat(self.worker, version(2), [(g.key, g.token) for g in self.held], 0.0, 2)
        self.look(grants[0])
        dead, self.keeping.kept = self.keeping.kept, []
        self.bases = [Base(method, message, method in ONLY_BROKEN, True) for method, message in dead]
        self.bases += [Base(method, message, True) for method, message in self.live_messages()]
        self.keeping.kept = []

    def feed(self, n: int) -> None:
        before = self.client.cursor(STREAM)
        first = before.next_ordinal
        self.client.append_groups(self.feeder, before, self._after(first + n), [self.group(first + i) for i in range(n)])

    def group(self, ordinal: int) -> GroupSpec:
        task = json.dumps({"prompt": f"p{ordinal}", "answer": "a", "task": "digits"})
        return GroupSpec(ordinal, pack_i32([1, 2, ordinal]), task, RULES.group_size)

    def _after(self, ordinal: int) -> Cursor:
        return Cursor(STREAM, ordinal, json.dumps({"at": ordinal}), False)

    def lease(self, n: int) -> list[LeaseGrant]:
        number = len(self.keeping.kept)
        reply = self.client.lease_slots(self.worker, version(self.n_published), n, 0.0, f"{self.worker}.{number}")
        return list(reply.grants)

    def train(self, grants: Sequence[LeaseGrant]) -> None:
        self.client.submit_samples([sample_of(g, self.worker) for g in grants])
        step = self.n_published + 1
        plan = self.client.plan_step(self.learner, 0, step)
        list(self.client.payloads(0, plan.step))
        self.client.finish_plan(self.learner, 0, step, PlanOutcome.TRAINED, "", '{"loss": 0.5, "reward_mean": 0.25}')
        self.client.publish_version(self.learner, version(step))
        self.n_published = step

    def failure(self, grant: LeaseGrant) -> FailureReport:
        return FailureReport(
            grant.key, grant.token, self.worker, RewardStatus.INFRA_ERROR, Blame.INFRA, "gone", SandboxStatus.INFRA_LOST, 7, 0.5,
            0.25, '{"attempts": 3}',
        )  # fmt: skip

    def look(self, grant: LeaseGrant) -> None:
        """Every verb that only reads, and the ones that are harmless here."""
        c = self.client
        c.sample(grant.key)
        c.explain(grant.key)
        c.tool_calls(self.held[0].key)
        c.feed_demand(2)
        c.versions(0)
        c.step_metrics(0, 1)
        c.resume_point()
        c.run_status()
        c.survival()
        assert c.audit() == []
        c.retry_group(4, "the judge is back")
        with_none = pb.PlanStepRequest(run_id=RUN_ID, lineage=0, step=3)
        with_none.term.CopyFrom(next(m for name, m in self.keeping.kept if name == "PlanStep").term)
        self.keeping.kept.append(("PlanStep", with_none))

    def live_messages(self) -> list[tuple[str, Message]]:
        """Valid messages that nobody has sent: each would change rows."""
        c, kept = self.client, self.keeping.kept
        before = c.cursor(STREAM)
        first = before.next_ordinal
        spare = self.held[1:]
        fresh = ToolCall(spare[0].key, 0, "8" * 64, trajectory(2, spare[0].version), "python", '{"code": "2"}')
        holding = self.client._connection
        self.client._connection = _Nowhere(holding, kept)  # type: ignore[assignment]
        for call in (
            lambda: c.append_groups(self.feeder, before, self._after(first + 2), [self.group(first), self.group(first + 1)]),
            lambda: c.submit_samples([sample_of(spare[0], self.worker)]),
            lambda: c.submit_samples([sample_of(spare[1], self.worker)]),
            lambda: c.report_failures([self.failure(spare[-1])]),
            lambda: c.record_tool_call(fresh, spare[0].token),
            lambda: c.fork_lineage(self.learner, 0, 1, 0.5, 1e-4, False),
            lambda: c.mark_checkpoint(self.learner, 0, 2, "corrupt"),
            lambda: c.release_role(self.learner),
            lambda: c.drain(),
        ):
            try:
                call()
            except _Kept:
                continue
        self.client._connection = holding
        return [(name, message) for name, message in kept if name != "Cursor"]

    def go_on(self) -> list[Base]:
        """Let the run go on by what is possible now; returns messages that have become valid meanwhile, unsent."""
        c, fresh = self.client, self.keeping
        fresh.kept = []
        lineage = c.resume_point().lineage
        if c.feed_demand(2) > 0:
            self.feed(2)
        head = c.versions(lineage)[-1]
        grants = c.lease_slots(self.worker, head, 4, 0.0, "").grants
        c.submit_samples([sample_of(g, self.worker) for g in grants[:2]])
        if grants:
            c.heartbeat(self.worker, head, [(g.key, g.token) for g in grants])
        sent, fresh.kept = fresh.kept, []
        out = [Base(method, message, False) for method, message in sent]
        unsent = [m for m in (sample_of(g, self.worker) for g in grants[2:])]
        if unsent:
            request = pb.SubmitSamplesRequest(run_id=RUN_ID, submissions=map(convert.submission_message, unsent))
            out.append(Base("SubmitSamples", request, True))
        return out


class _Kept(Exception):
    """The message was kept instead of sent."""


class _Nowhere:
    """Stands for a connection: keeps what would be sent."""

    def __init__(self, connection: Any, kept: list[tuple[str, Message]]) -> None:
        self._connection, self._kept = connection, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def call(self, method: str, request: Message, timeout_s: float) -> Any:
        self._kept.append((method, request))
        raise _Kept


def protected_rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Rows that only an accepted message may change, read past the server."""
    options = {"module": sqlite_module(), "connect_args": {"timeout": 30}} if url.startswith("sqlite") else {}
    engine = sa.create_engine(url, **options)
    out = {}
    try:
        with engine.connect() as conn:
            for table in t.metadata.sorted_tables:
                hidden = UNPROTECTED.get(table.name)
                if hidden == ():
                    continue
                columns = [c for c in table.c if c.name not in (hidden or ())]
                out[table.name] = sorted((tuple(row) for row in conn.execute(sa.select(*columns))), key=repr)
    finally:
        engine.dispose()
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="serve the ledger at URL until standard input ends")
    parser.add_argument("url")
    serve_here(parser.parse_args().url)
