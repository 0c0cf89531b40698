"""``LedgerPort`` over gRPC: how every process but the ledger server reaches the ledger.

Owns request envelopes, deadlines and repetition. Never holds a rule of the ledger. A call that was not answered
(``Unavailable`` and its kinds, a lost connection, a deadline) is repeated with the same key until it is answered or its
budget is spent, so a restarted server is survived and nothing happens twice (P2, P10). What the ledger did answer goes to
the caller at once: ``Fenced``, ``Conflict``, and also ``NotReady`` and ``RoleHeld``, whose loops belong to the caller.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from rollbook.core.errors import InvalidRequest, RollbookError, TooLarge
from rollbook.core.host import host
from rollbook.core.ports import Clock
from rollbook.core.records import (
    Checkpoint,
    CheckpointState,
    Cursor,
    FailureReport,
    GroupSpec,
    HeartbeatReply,
    LeaseReply,
    Lineage,
    Plan,
    PlanOutcome,
    PolicyVersion,
    ResumePoint,
    Role,
    RoleTerm,
    RunRecord,
    SampleData,
    SlotKey,
    Submission,
    SubmitOutcome,
    SubmitResult,
    ToolCall,
    Violation,
)
from rollbook.rpc import convert
from rollbook.rpc.connection import Connection, Retry
from rollbook.rpc.credentials import STRANGER, Access, Dial
from rollbook.v1 import ledger_service_pb2 as pb

MESSAGE_BYTES_MAX = 64 << 20
"""Largest message either side accepts."""

COUNTING_S = 120.0
"""Further time for an answer that looks at every slot of a run: seconds for some hundred thousand."""

_ENVELOPE_BYTES = 1024
"""Room in a message for run id and framing besides its items."""

_ITEM_FRAME_BYTES = 8
"""Tag and length of one item in a repeated field, at most."""


class LedgerClient:
    """The ledger's verbs, called over the network; safe to share between threads.

    Args:
        address: host:port, or a function that gives it or several (``rpc.address.addresses_in``); asked again for every new
            connection.
        run_id: Run the caller belongs to; a server of another run refuses it.
        timeout_s: Deadline of one attempt; a long poll gets its wait on top.
        stream_timeout_s: Deadline of one attempt at the payload stream, which goes on where it broke.
        retry_total_s: Time from the first failure of a call after which it is given up.
        backoff_s, backoff_max_s: Bounds of the jittered wait between attempts.
        access: Who the caller is, and how it knows the server.
        dial: Opens a channel in place of ``access``.
        max_message_bytes: Batches are split below it; a single item above it is refused here, before it is sent.
    """

    def __init__(
        self, address: str | Callable[[], str | Sequence[str]], run_id: str, *, timeout_s: float = 10.0,
        stream_timeout_s: float = 60.0, retry_total_s: float = 120.0, backoff_s: float = 0.1, backoff_max_s: float = 2.0,
        max_message_bytes: int = MESSAGE_BYTES_MAX, clock: Clock | None = None, rng: random.Random | None = None,
        access: Access = STRANGER, dial: Dial | None = None,
    ) -> None:  # fmt: skip
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._stream_timeout_s = stream_timeout_s
        self._retry_total_s = retry_total_s
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._max_message_bytes = max_message_bytes
        self._clock = clock or host()
        self._rng = rng or host().rng()
        provider: Callable[[], str | Sequence[str]] = (lambda: address) if isinstance(address, str) else address
        self._connection = Connection(provider, max_message_bytes, access, dial)

    def close(self) -> None:
        """Close the connection; further calls raise."""
        self._connection.close()

    def __enter__(self) -> LedgerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_run(self, run: RunRecord, *, accept: Collection[str] = ()) -> RunRecord:
        request = pb.OpenRunRequest(run_id=self._run_id, run=convert.run_message(run), accept=accept)
        return convert.run_record(self._call("OpenRun", request).run)

    def acquire_role(self, role: Role, holder: str, ttl_s: float, supersede: str = "") -> RoleTerm:
        request = pb.AcquireRoleRequest(
            run_id=self._run_id, role=convert.enum_number(role), holder=holder, ttl_s=ttl_s, supersede=supersede
        )
        return convert.role_term(self._call("AcquireRole", request).term)

    def renew_role(self, term: RoleTerm) -> RoleTerm:
        request = pb.RenewRoleRequest(run_id=self._run_id, term=convert.role_term_message(term))
        return convert.role_term(self._call("RenewRole", request).term)

    def release_role(self, term: RoleTerm) -> None:
        self._call("ReleaseRole", pb.ReleaseRoleRequest(run_id=self._run_id, term=convert.role_term_message(term)))

    def cursor(self, stream: str) -> Cursor:
        return convert.cursor(self._call("Cursor", pb.CursorRequest(run_id=self._run_id, stream=stream)).cursor)

    def append_groups(self, term: RoleTerm, before: Cursor, after: Cursor, groups: Sequence[GroupSpec]) -> Cursor:
        request = pb.AppendGroupsRequest(
            run_id=self._run_id, term=convert.role_term_message(term), before=convert.cursor_message(before),
            after=convert.cursor_message(after), groups=map(convert.group_spec_message, groups),
        )  # fmt: skip
        return convert.cursor(self._call("AppendGroups", request).cursor)

    def feed_demand(self, lookahead_groups: int) -> int:
        request = pb.FeedDemandRequest(run_id=self._run_id, lookahead_groups=lookahead_groups)
        return self._call("FeedDemand", request).n_groups

    def register_worker(self, incarnation: str, host: str, engine: str, labels_json: str = "{}") -> None:
        request = pb.RegisterWorkerRequest(
            run_id=self._run_id, incarnation=incarnation, host=host, engine=engine, labels_json=labels_json
        )
        self._call("RegisterWorker", request)

    def heartbeat(
        self, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]], wait_s: float = 0.0,
        known_version: int = -1,
    ) -> HeartbeatReply:  # fmt: skip
        request = pb.HeartbeatRequest(
            run_id=self._run_id, incarnation=incarnation, loaded=convert.optional_version_message(loaded),
            leases=map(convert.held_lease_message, leases), wait_s=wait_s, known_version=known_version,
        )  # fmt: skip
        return convert.heartbeat_reply(self._call("Heartbeat", request, wait_s).reply)

    def lease_slots(
        self, incarnation: str, loaded: PolicyVersion | None, n_max: int, wait_s: float = 0.0, request_id: str = ""
    ) -> LeaseReply:
        # Without the caller's key the call still gets one, or a lost reply would strand its grants until they expire.
        request = pb.LeaseSlotsRequest(
            run_id=self._run_id, incarnation=incarnation, loaded=convert.optional_version_message(loaded), n_max=n_max,
            wait_s=wait_s, request_id=request_id or host().token(),
        )  # fmt: skip
        return convert.lease_reply(self._call("LeaseSlots", request, wait_s).reply)

    def submit_samples(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        def send(part: list[Message]) -> Iterable[Any]:
            return self._call("SubmitSamples", pb.SubmitSamplesRequest(run_id=self._run_id, submissions=part)).results

        return self._in_parts([(s.key, convert.submission_message(s)) for s in submissions], send)

    def report_failures(self, failures: Sequence[FailureReport]) -> list[SubmitResult]:
        def send(part: list[Message]) -> Iterable[Any]:
            return self._call("ReportFailures", pb.ReportFailuresRequest(run_id=self._run_id, failures=part)).results

        return self._in_parts([(f.key, convert.failure_report_message(f)) for f in failures], send)

    def record_tool_call(self, call: ToolCall, lease_token: int) -> ToolCall:
        request = pb.RecordToolCallRequest(
            run_id=self._run_id, call=convert.tool_call_message(call), lease_token=lease_token
        )
        return convert.tool_call(self._call("RecordToolCall", request).call)

    def tool_calls(self, key: SlotKey) -> list[ToolCall]:
        request = pb.ToolCallsRequest(run_id=self._run_id, key=convert.slot_key_message(key))
        return [convert.tool_call(m) for m in self._call("ToolCalls", request).calls]

    def plan_step(self, term: RoleTerm, lineage: int, step: int, wait_s: float = 0.0) -> Plan:
        request = pb.PlanStepRequest(
            run_id=self._run_id, term=convert.role_term_message(term), lineage=lineage, step=step, wait_s=wait_s
        )
        return convert.plan(self._call("PlanStep", request, wait_s).plan)

    def read_plan(self, lineage: int, step: int) -> Plan:
        request = pb.ReadPlanRequest(run_id=self._run_id, lineage=lineage, step=step)
        return convert.plan(self._call("ReadPlan", request).plan)

    def payloads(self, lineage: int, step: int) -> Iterator[SampleData]:
        """As the port says; a broken stream goes on at the sample after the last one received."""
        n_received = 0
        retry = self._retry("Payloads")
        while True:
            request = pb.PayloadsRequest(run_id=self._run_id, lineage=lineage, step=step, first_pos=n_received)
            try:
                for chunk in self._chunks(request):
                    retry.progressed()
                    for message in chunk.samples:
                        n_received += 1
                        yield convert.sample_data(message)
                return
            except RollbookError as error:
                retry.wait_or_raise(error)

    def sample(self, key: SlotKey) -> SampleData:
        request = pb.SampleRequest(run_id=self._run_id, key=convert.slot_key_message(key))
        return convert.sample_data(self._call("Sample", request).sample)

    def finish_plan(
        self, term: RoleTerm, lineage: int, step: int, outcome: PlanOutcome, reason: str, metrics_json: str
    ) -> None:
        request = pb.FinishPlanRequest(
            run_id=self._run_id, term=convert.role_term_message(term), lineage=lineage, step=step,
            outcome=convert.enum_number(outcome), reason=convert.printable(reason), metrics_json=metrics_json,
        )  # fmt: skip
        self._call("FinishPlan", request)

    def publish_version(self, term: RoleTerm, version: PolicyVersion) -> PolicyVersion:
        request = pb.PublishVersionRequest(
            run_id=self._run_id, term=convert.role_term_message(term), version=convert.policy_version_message(version)
        )
        return convert.policy_version(self._call("PublishVersion", request).version)

    def versions(self, lineage: int) -> list[PolicyVersion]:
        request = pb.VersionsRequest(run_id=self._run_id, lineage=lineage)
        return [convert.policy_version(m) for m in self._call("Versions", request).versions]

    def fork_lineage(
        self, term: RoleTerm, parent: int, fork_step: int, difference: float | None, tolerance: float, keep_orphans: bool = False
    ) -> Lineage:
        request = pb.ForkLineageRequest(
            run_id=self._run_id, term=convert.role_term_message(term), parent=parent, fork_step=fork_step, difference=difference,
            tolerance=tolerance, keep_orphans=keep_orphans,
        )  # fmt: skip
        return convert.lineage(self._call("ForkLineage", request).lineage)

    def commit_checkpoint(self, term: RoleTerm, checkpoint: Checkpoint) -> Checkpoint:
        request = pb.CommitCheckpointRequest(
            run_id=self._run_id, term=convert.role_term_message(term), checkpoint=convert.checkpoint_message(checkpoint)
        )
        return convert.checkpoint(self._call("CommitCheckpoint", request).checkpoint)

    def mark_checkpoint(self, term: RoleTerm, lineage: int, step: int, state: str) -> None:
        try:
            wanted = CheckpointState(state)
        except ValueError:
            raise InvalidRequest(f"checkpoint state {state!r}: one of {', '.join(CheckpointState)}") from None
        request = pb.MarkCheckpointRequest(
            run_id=self._run_id, term=convert.role_term_message(term), lineage=lineage, step=step,
            state=convert.enum_number(wanted),
        )  # fmt: skip
        self._call("MarkCheckpoint", request)

    def resume_point(self) -> ResumePoint:
        return convert.resume_point(self._call("ResumePoint", pb.ResumePointRequest(run_id=self._run_id)).resume_point)

    def run_status(self) -> dict:
        return json.loads(self._call("RunStatus", pb.RunStatusRequest(run_id=self._run_id)).status_json)

    def survival(self) -> dict:
        return json.loads(self._call("Survival", pb.SurvivalRequest(run_id=self._run_id), COUNTING_S).survival_json)

    def step_metrics(self, lineage: int, first_step: int = 1) -> list[dict]:
        request = pb.StepMetricsRequest(run_id=self._run_id, lineage=lineage, first_step=first_step)
        return [json.loads(text) for text in self._call("StepMetrics", request).metrics_json]

    def audit(self) -> list[Violation]:
        return [convert.violation(m) for m in self._call("Audit", pb.AuditRequest(run_id=self._run_id)).violations]

    def explain(self, key: SlotKey) -> dict:
        request = pb.ExplainRequest(run_id=self._run_id, key=convert.slot_key_message(key))
        return json.loads(self._call("Explain", request).story_json)

    def quarantine_group(self, ordinal: int, reason: str) -> None:
        request = pb.QuarantineGroupRequest(run_id=self._run_id, ordinal=ordinal, reason=convert.printable(reason))
        self._call("QuarantineGroup", request)

    def retry_group(self, ordinal: int, reason: str) -> None:
        request = pb.RetryGroupRequest(run_id=self._run_id, ordinal=ordinal, reason=convert.printable(reason))
        self._call("RetryGroup", request)

    def drain(self) -> None:
        self._call("Drain", pb.DrainRequest(run_id=self._run_id))

    def _call(self, method: str, request: Message, wait_s: float = 0.0) -> Any:
        """One logical call: the same request, repeated until it is answered or its budget is spent."""
        n_bytes = request.ByteSize()
        if n_bytes > self._max_message_bytes:
            raise TooLarge(f"{method}: a request of {n_bytes} bytes, the limit is {self._max_message_bytes}; send less per call")
        retry = self._retry(method)
        while True:
            try:
                return self._connection.call(method, request, self._timeout_s + wait_s)
            except RollbookError as error:
                retry.wait_or_raise(error)

    def _chunks(self, request: pb.PayloadsRequest) -> Iterator[pb.PayloadsResponse]:
        with self._connection.link() as link:
            stream = link.call("Payloads", request, self._stream_timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()  # frees the server's thread when the caller stops half way

    def _retry(self, method: str) -> Retry:
        return Retry(
            self._connection, method, self._clock, self._rng,
            budget_s=self._retry_total_s, first_s=self._backoff_s, longest_s=self._backoff_max_s,
        )  # fmt: skip

    def _in_parts(
        self, items: list[tuple[SlotKey, Message]], send: Callable[[list[Message]], Iterable[Any]]
    ) -> list[SubmitResult]:
        """Send items in as many calls as the message limit asks for; an item above it is refused, the others go through."""
        limit = self._max_message_bytes - _ENVELOPE_BYTES
        results: list[SubmitResult | None] = [None] * len(items)
        part: list[int] = []
        part_bytes = 0

        def flush() -> None:
            if part:
                answers = send([items[i][1] for i in part])
                for i, answer in zip(part, answers, strict=True):
                    results[i] = convert.submit_result(answer)
                part.clear()

        for i, (key, message) in enumerate(items):
            n_bytes = message.ByteSize() + _ITEM_FRAME_BYTES
            if n_bytes > limit:
                reason = f"TooLarge: slot {key} has {n_bytes} bytes, a message may have {limit}; shorten the completion"
                results[i] = SubmitResult(key, SubmitOutcome.INVALID, reason)
                continue
            if part_bytes + n_bytes > limit:
                flush()
                part_bytes = 0
            part.append(i)
            part_bytes += n_bytes
        flush()
        return [r for r in results if r is not None]
