"""Every RPC delivered twice acts once: the identical bytes again, at once and late, against a dump of every table.

The methods come from the service descriptor, so that a new RPC without a case fails here. Between two deliveries the ledger's
clock moves on by a second; what a repetition may change is listed in ``TOUCHED`` and ``TOLD``, what may differ in its answer in
``ANSWERED``. Everything else must be equal, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from google.protobuf.message import Message
from ledger_support import STREAM, Scene, group, run_record, trajectory

from ledger_bench import ManualClock
from rollbook.core.records import (
    Blame,
    Checkpoint,
    Cursor,
    FailureReport,
    PlanOutcome,
    RewardStatus,
    Role,
    SandboxStatus,
    SlotKey,
    ToolCall,
)
from rollbook.ledger import schema as t
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import serve
from rollbook.v1 import ledger_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["LedgerService"]
METHODS = {method.name: method for method in SERVICE.methods}
RECORD = run_record("run", max_lag_versions=2)
Rows = dict[str, set[tuple]]

TOUCHED: dict[str, set[str]] = {
    "AcquireRole": {"fence.renewed_at_us", "fence.expires_at_us"},
    "RenewRole": {"fence.renewed_at_us", "fence.expires_at_us"},
    "ReleaseRole": {"fence.renewed_at_us", "fence.expires_at_us"},
    "Heartbeat": {"worker.seen_at_us", "lease.expires_at_us"},
    "LeaseSlots": {"worker.seen_at_us"},
}
"""Columns that say when somebody was last heard of, and until when that lets them hold what they hold."""

TOLD: dict[str, set[str]] = {"SubmitSamples": {"submit_replayed", "submit_conflict", "submit_refused"}}
"""Kinds of events that say a message came again."""


def _outcomes(answer: Any) -> Any:
    for result in answer.results:
        result.outcome, result.reason = 0, ""
    return answer


def _without_clocks(answer: Any) -> Any:
    status = json.loads(answer.status_json)
    for ages in (*status.pop("roles"), *status.pop("workers")):
        ages.clear()
    for name in ("rates", "writer"):
        status.pop(name)
    answer.status_json = json.dumps(status)
    return answer


ANSWERED: dict[str, Callable[[Any], Any]] = {
    "SubmitSamples": _outcomes,  # accepted, then replayed
    "ReportFailures": _outcomes,
    "RunStatus": _without_clocks,  # ages, rates, commits of this server
}
"""What takes the fields that may differ out of an answer."""


class Stream:
    """A streamed answer that keeps what it hands out."""

    def __init__(self, call: Any, parts: list[Message]) -> None:
        self._call, self._parts = call, parts
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Message]:
        for part in self._call:
            self._parts.append(part)
            yield part


class Recorder(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Keeps the last request as it went over the wire, and its answer."""

    def __init__(self) -> None:
        self.method, self.request, self.parts = "", b"", []  # type: tuple[str, bytes, list[Message]]

    def _note(self, details: grpc.ClientCallDetails, request: Message) -> None:
        self.method, self.request, self.parts = details.method.rpartition("/")[2], request.SerializeToString(), []

    def intercept_unary_unary(self, continuation: Any, details: grpc.ClientCallDetails, request: Message) -> Any:
        self._note(details, request)
        call = continuation(details, request)
        if call.exception() is None:
            self.parts = [call.result()]
        return call

    def intercept_unary_stream(self, continuation: Any, details: grpc.ClientCallDetails, request: Message) -> Any:
        self._note(details, request)
        return Stream(continuation(details, request), self.parts)


class Stage:
    """A ledger on SQLite behind a real server, a recording client, and a channel for raw bytes."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.sqlite", holder="server", clock=self.clock, role_ttl_s=10_000.0)
        self.ledger.open_run(RECORD)
        self.server = serve(self.ledger, "127.0.0.1:0", run_id=RECORD.run_id, threads=8)
        self.recorder = Recorder()
        self.channel = grpc.insecure_channel(self.server.address)
        recording = grpc.intercept_channel(self.channel, self.recorder)
        self.client = LedgerClient(self.server.address, RECORD.run_id, retry_total_s=0.0, dial=lambda address, options: recording)
        self.s = Scene(self.client, RECORD)  # type: ignore[arg-type]
        self.s.feed(8)
        self.grants = self.s.lease(6)
        self.s.submit(self.grants[:4])

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self.server.stop(0.0)
        self.ledger.close()

    def send(self, call: Callable[[], Any]) -> tuple[str, bytes, list[bytes]]:
        """Make a call through the client; returns the last request it sent and the answer to it, as they were on the wire."""
        answer = call()
        if isinstance(answer, Iterator):
            list(answer)
        return self.recorder.method, self.recorder.request, [part.SerializeToString() for part in self.recorder.parts]

    def deliver(self, method: str, request: bytes) -> list[bytes] | grpc.StatusCode:
        """Deliver these bytes; returns the parts of the answer, or the status of a refusal."""
        path = f"/{SERVICE.full_name}/{method}"
        try:
            if METHODS[method].server_streaming:
                return list(self.channel.unary_stream(path)(request, timeout=30))
            return [self.channel.unary_unary(path)(request, timeout=30)]
        except grpc.RpcError as refused:
            return refused.code()

    def answer(self, method: str, parts: list[bytes] | grpc.StatusCode) -> list[bytes] | grpc.StatusCode:
        """An answer without the fields that may differ."""
        if isinstance(parts, grpc.StatusCode):
            return parts
        made = getattr(pb, METHODS[method].output_type.name)
        cleaned = [ANSWERED.get(method, lambda m: m)(made.FromString(part)) for part in parts]
        return [message.SerializeToString(deterministic=True) for message in cleaned]

    def dump(self, method: str = "") -> Rows:
        """Every row of every table, without what ``method`` may touch when it comes again."""
        out: Rows = {}
        with self.ledger._read() as conn:
            for table in t.metadata.sorted_tables:
                columns = [c for c in table.c if f"{table.name}.{c.name}" not in TOUCHED.get(method, ())]
                out[table.name] = {tuple(row) for row in conn.execute(sa.select(*columns))}
            kinds = sa.select(t.event).where(t.event.c.kind.not_in(TOLD.get(method, ())))
            out["event"] = {tuple(row) for row in conn.execute(kinds)}
        return out


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    assert made.ledger.audit() == []
    made.close()


TOOL = ToolCall(SlotKey(2, 0), 0, "9" * 64, trajectory(1), "python", "{}")


def report_of(x: Stage) -> FailureReport:
    g = x.grants[4]
    return FailureReport(
        g.key, g.token, x.s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "gone", SandboxStatus.INFRA_LOST, 7, 0.5, 0.25,
        '{"attempts": 3}', final=True,
    )  # fmt: skip


def append(x: Stage) -> Cursor:
    before = x.client.cursor(STREAM)
    after = Cursor(STREAM, before.next_ordinal + 2, '{"at": 10}', False)
    return x.client.append_groups(x.s.feeder, before, after, [group(before.next_ordinal), group(before.next_ordinal + 1)])


def planned(x: Stage) -> LedgerClient:
    x.s.plan(1)
    return x.client


def trained(x: Stage) -> LedgerClient:
    x.s.train(1)
    return x.client


def checkpoint_of(x: Stage) -> Checkpoint:
    return Checkpoint(0, 1, "0.1.1", "5" * 64, trained(x).read_plan(0, 1).chain_digest)


def committed(x: Stage) -> LedgerClient:
    trained(x)
    x.s.checkpoint(1)
    return x.client


def out_of_attempts(x: Stage) -> LedgerClient:
    """In the bounded schedule the slot then has its verdict; the call is the same."""
    x.client.report_failures([report_of(x)])
    return x.client


CASES: dict[str, Callable[[Stage], Any]] = {
    "OpenRun": lambda x: x.client.open_run(RECORD),
    "AcquireRole": lambda x: x.client.acquire_role(Role.LEARNER, "learner-2", 60.0, x.s.learner.holder),
    "RenewRole": lambda x: x.client.renew_role(x.s.learner),
    "ReleaseRole": lambda x: x.client.release_role(x.s.learner),
    "Cursor": lambda x: x.client.cursor(STREAM),
    "AppendGroups": append,
    "FeedDemand": lambda x: x.client.feed_demand(20),
    "RegisterWorker": lambda x: x.client.register_worker("worker-new", "host", "engine"),
    "Heartbeat": lambda x: x.client.heartbeat(x.s.incarnation, x.s.head(), [(g.key, g.token) for g in x.grants]),
    "LeaseSlots": lambda x: x.s.lease(2, request_id="w.1"),
    "SubmitSamples": lambda x: x.s.submit(x.grants[4:], sandbox_status=SandboxStatus.OOM, blame=Blame.MODEL),
    "ReportFailures": lambda x: x.client.report_failures([report_of(x)]),
    "RecordToolCall": lambda x: x.client.record_tool_call(TOOL, x.grants[4].token),
    "ToolCalls": lambda x: x.client.tool_calls(SlotKey(0, 0)),
    "PlanStep": lambda x: x.s.plan(1),
    "ReadPlan": lambda x: planned(x).read_plan(0, 1),
    "Payloads": lambda x: planned(x).payloads(0, 1),
    "Sample": lambda x: x.client.sample(SlotKey(0, 0)),
    "FinishPlan": lambda x: planned(x).finish_plan(x.s.learner, 0, 1, PlanOutcome.TRAINED, "", '{"loss": 0.5}'),
    "PublishVersion": lambda x: x.s.train(1),
    "Versions": lambda x: x.client.versions(0),
    "ForkLineage": lambda x: trained(x).fork_lineage(x.s.learner, 0, 0, None, 1e-4, False),
    "CommitCheckpoint": lambda x: x.client.commit_checkpoint(x.s.learner, checkpoint_of(x)),
    "MarkCheckpoint": lambda x: committed(x).mark_checkpoint(x.s.learner, 0, 1, "corrupt"),
    "ResumePoint": lambda x: committed(x).resume_point(),
    "RunStatus": lambda x: x.client.run_status(),
    "Survival": lambda x: x.client.survival(),
    "StepMetrics": lambda x: trained(x).step_metrics(0),
    "Audit": lambda x: x.client.audit(),
    "Explain": lambda x: x.client.explain(SlotKey(0, 0)),
    "QuarantineGroup": lambda x: x.client.quarantine_group(5, "kills its workers"),
    "RetryGroup": lambda x: out_of_attempts(x).retry_group(2, "the judge is back"),
    "Drain": lambda x: x.client.drain(),
}
"""One call per RPC on a run that has samples, leases and unopened groups; the last request it sends is the one repeated."""


def test_every_rpc_of_the_service_has_a_case() -> None:
    assert set(CASES) == set(METHODS)
    assert set(TOUCHED) | set(TOLD) | set(ANSWERED) <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_an_rpc_delivered_twice_is_delivered_once(stage: Stage, method: str) -> None:
    sent, request, first = stage.send(lambda: CASES[method](stage))
    assert sent == method
    before = stage.dump(method)
    for _ in range(2):
        stage.clock.now += 1.0
        assert stage.answer(method, stage.deliver(method, request)) == stage.answer(method, first)
        assert stage.dump(method) == before


def lease_refill_room(x: Stage) -> None:
    """Everything leased is submitted, a step is trained, and the worker has asked again."""
    x.s.submit(x.grants[4:])
    x.s.train(1)
    x.s.lease(2, request_id="w.2")


def newer_learner(x: Stage) -> None:
    x.s.learner = x.client.acquire_role(Role.LEARNER, "learner-2", 60.0, x.s.learner.holder)


def next_step(x: Stage) -> None:
    x.s.fill(100)
    x.s.train(2)


LATE: dict[str, tuple[str, Callable[[Stage], Any], Callable[[Stage], Any]]] = {
    "a lease request after its slots are filled and others leased": ("LeaseSlots", CASES["LeaseSlots"], lease_refill_room),
    "an append after a later append": ("AppendGroups", append, lambda x: x.s.feed(2)),
    "a submission after its step is trained": (
        "SubmitSamples", lambda x: x.s.submit(x.grants[:4]), lambda x: (x.s.train(1), x.s.checkpoint(1)),
    ),
    "a submission after its slot was quarantined": (
        "SubmitSamples", lambda x: x.s.submit(x.grants[4:]), lambda x: x.client.quarantine_group(2, "a human said so"),
    ),
    "an outcome after the next step is planned": ("FinishPlan", CASES["FinishPlan"], lambda x: (x.s.finish(1), next_step(x))),
    "a version after the next one": ("PublishVersion", CASES["PublishVersion"], next_step),
    "a checkpoint after a later one": (
        "CommitCheckpoint", CASES["CommitCheckpoint"], lambda x: (next_step(x), x.s.checkpoint(2)),
    ),
    "a failure report after the slot is leased again": ("ReportFailures", CASES["ReportFailures"], lambda x: x.s.lease(1)),
    "a plan request after the step after it is planned": ("PlanStep", CASES["PlanStep"], lambda x: (x.s.finish(1), next_step(x))),
    "a quarantine after others are leased": ("QuarantineGroup", CASES["QuarantineGroup"], lambda x: x.s.lease(2)),
}  # fmt: skip
"""(method, the call, what happens before its duplicate arrives)."""


@pytest.mark.parametrize("late", LATE)
def test_a_duplicate_that_arrives_late_changes_nothing(stage: Stage, late: str) -> None:
    method, call, meanwhile = LATE[late]
    sent, request, _ = stage.send(lambda: call(stage))
    assert sent == method
    stage.clock.now += 1.0
    meanwhile(stage)
    before = stage.dump(method)
    assert not isinstance(stage.deliver(method, request), grpc.StatusCode)
    assert stage.dump(method) == before


OF_AN_OLD_EPOCH = ["RenewRole", "AppendGroups", "PlanStep", "FinishPlan", "PublishVersion", "CommitCheckpoint", "MarkCheckpoint"]


@pytest.mark.parametrize("method", OF_AN_OLD_EPOCH)
def test_a_duplicate_of_an_old_epoch_is_refused_and_changes_nothing(stage: Stage, method: str) -> None:
    sent, request, _ = stage.send(lambda: CASES[method](stage))
    assert sent == method
    role = stage.s.feeder if method == "AppendGroups" else stage.s.learner
    stage.client.acquire_role(role.role, "successor", 60.0, role.holder)
    before = stage.dump()
    assert stage.deliver(method, request) is grpc.StatusCode.ABORTED
    assert stage.dump() == before


def test_a_release_of_an_old_epoch_takes_nothing_from_the_successor(stage: Stage) -> None:
    _, request, _ = stage.send(lambda: stage.client.release_role(stage.s.learner))
    stage.client.acquire_role(Role.LEARNER, "successor", 60.0)
    before = stage.dump()
    assert stage.deliver("ReleaseRole", request) == [b""]
    assert stage.dump() == before


def test_a_late_duplicate_of_a_lease_request_that_was_granted_nothing_grants_nothing(stage: Stage) -> None:
    """Nobody would hold such leases: they would block their slots for a TTL and use up an attempt."""
    s = stage.s
    s.lease(100, request_id="w.1")
    _, request, _ = stage.send(lambda: s.lease(100, request_id="w.2"))
    s.submit(stage.grants[4:])
    s.train(1)
    assert len(s.lease(1, request_id="w.3")) == 1
    before = stage.dump("LeaseSlots")
    answer = pb.LeaseSlotsResponse.FromString(stage.deliver("LeaseSlots", request)[0])
    assert list(answer.reply.grants) == []
    assert stage.dump("LeaseSlots") == before

