"""One method per RPC: read the request, call the ledger once, build the response.

Owns request and response envelopes on the server side. Never holds a rule of the ledger; the only numbers here bound how
long a thread may be held by a long poll and how large a message of the payload stream grows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from rollbook.core.errors import WrongRun
from rollbook.core.ports import LedgerPort
from rollbook.core.records import CheckpointState, PlanOutcome, Role
from rollbook.rpc import convert
from rollbook.rpc.convert import enum_member, need
from rollbook.v1 import ledger_pb2 as records_pb
from rollbook.v1 import ledger_service_pb2 as pb
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc

WAIT_S_MAX = 60.0
"""Longest a long poll is held, whatever it asks for."""

REPLY_MARGIN_S = 0.25
"""A held answer leaves this long before the caller's deadline."""

CHUNK_BYTES_MAX = 1 << 20
"""Samples are packed into one message of the payload stream up to this size; a larger sample travels alone."""


class LedgerServicer(pb_grpc.LedgerServiceServicer):
    """The service over any ``LedgerPort``. ``n_polls_max`` answers may be held at once; further polls do not wait."""

    def __init__(self, ledger: LedgerPort, n_polls_max: int) -> None:
        self._ledger = ledger
        self._polls = threading.BoundedSemaphore(n_polls_max)

    @contextmanager
    def _poll(self, wait_s: float, context: grpc.ServicerContext) -> Iterator[float]:
        """Seconds this call may be held; 0 when too many are held already, so that further ones find a thread."""
        wait_s = _held_s(wait_s, context)
        held = wait_s > 0 and self._polls.acquire(blocking=False)
        try:
            yield wait_s if held else 0.0
        finally:
            if held:
                self._polls.release()

    def OpenRun(self, request: pb.OpenRunRequest, context: grpc.ServicerContext) -> pb.OpenRunResponse:
        run = convert.run_record(need(request, "run"))
        if run.run_id != request.run_id:
            raise WrongRun(f"the request names run {request.run_id!r} but opens {run.run_id!r}")
        stored = self._ledger.open_run(run, accept=tuple(request.accept))
        return pb.OpenRunResponse(run=convert.run_message(stored))

    def AcquireRole(self, request: pb.AcquireRoleRequest, context: grpc.ServicerContext) -> pb.AcquireRoleResponse:
        role = enum_member(Role, request.role)
        term = self._ledger.acquire_role(role, request.holder, request.ttl_s, request.supersede)
        return pb.AcquireRoleResponse(term=convert.role_term_message(term))

    def RenewRole(self, request: pb.RenewRoleRequest, context: grpc.ServicerContext) -> pb.RenewRoleResponse:
        term = self._ledger.renew_role(convert.role_term(need(request, "term")))
        return pb.RenewRoleResponse(term=convert.role_term_message(term))

    def ReleaseRole(self, request: pb.ReleaseRoleRequest, context: grpc.ServicerContext) -> pb.ReleaseRoleResponse:
        self._ledger.release_role(convert.role_term(need(request, "term")))
        return pb.ReleaseRoleResponse()

    def Cursor(self, request: pb.CursorRequest, context: grpc.ServicerContext) -> pb.CursorResponse:
        return pb.CursorResponse(cursor=convert.cursor_message(self._ledger.cursor(request.stream)))

    def AppendGroups(self, request: pb.AppendGroupsRequest, context: grpc.ServicerContext) -> pb.AppendGroupsResponse:
        before, after = convert.cursor(need(request, "before")), convert.cursor(need(request, "after"))
        groups = [convert.group_spec(m) for m in request.groups]
        stored = self._ledger.append_groups(convert.role_term(need(request, "term")), before, after, groups)
        return pb.AppendGroupsResponse(cursor=convert.cursor_message(stored))

    def FeedDemand(self, request: pb.FeedDemandRequest, context: grpc.ServicerContext) -> pb.FeedDemandResponse:
        return pb.FeedDemandResponse(n_groups=self._ledger.feed_demand(request.lookahead_groups))

    def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: grpc.ServicerContext) -> pb.RegisterWorkerResponse:
        self._ledger.register_worker(request.incarnation, request.host, request.engine, request.labels_json)
        return pb.RegisterWorkerResponse()

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatResponse:
        loaded = convert.optional_version(request, "loaded")
        leases = [convert.held_lease(m) for m in request.leases]
        with self._poll(request.wait_s, context) as wait_s:
            reply = self._ledger.heartbeat(request.incarnation, loaded, leases, wait_s, request.known_version)
        return pb.HeartbeatResponse(reply=convert.heartbeat_reply_message(reply))

    def LeaseSlots(self, request: pb.LeaseSlotsRequest, context: grpc.ServicerContext) -> pb.LeaseSlotsResponse:
        loaded = convert.optional_version(request, "loaded")
        with self._poll(request.wait_s, context) as wait_s:
            reply = self._ledger.lease_slots(request.incarnation, loaded, request.n_max, wait_s, request.request_id)
        return pb.LeaseSlotsResponse(reply=convert.lease_reply_message(reply))

    def SubmitSamples(self, request: pb.SubmitSamplesRequest, context: grpc.ServicerContext) -> pb.SubmitSamplesResponse:
        results = self._ledger.submit_samples([convert.submission(m) for m in request.submissions])
        return pb.SubmitSamplesResponse(results=map(convert.submit_result_message, results))

    def ReportFailures(self, request: pb.ReportFailuresRequest, context: grpc.ServicerContext) -> pb.ReportFailuresResponse:
        results = self._ledger.report_failures([convert.failure_report(m) for m in request.failures])
        return pb.ReportFailuresResponse(results=map(convert.submit_result_message, results))

    def RecordToolCall(self, request: pb.RecordToolCallRequest, context: grpc.ServicerContext) -> pb.RecordToolCallResponse:
        call = self._ledger.record_tool_call(convert.tool_call(need(request, "call")), request.lease_token)
        return pb.RecordToolCallResponse(call=convert.tool_call_message(call))

    def ToolCalls(self, request: pb.ToolCallsRequest, context: grpc.ServicerContext) -> pb.ToolCallsResponse:
        calls = self._ledger.tool_calls(convert.slot_key(need(request, "key")))
        return pb.ToolCallsResponse(calls=map(convert.tool_call_message, calls))

    def PlanStep(self, request: pb.PlanStepRequest, context: grpc.ServicerContext) -> pb.PlanStepResponse:
        # Not counted among the polls: there is one learner, and it must not be starved by workers that wait.
        term, wait_s = convert.role_term(need(request, "term")), _held_s(request.wait_s, context)
        plan = self._ledger.plan_step(term, request.lineage, request.step, wait_s)
        return pb.PlanStepResponse(plan=convert.plan_message(plan))

    def ReadPlan(self, request: pb.ReadPlanRequest, context: grpc.ServicerContext) -> pb.ReadPlanResponse:
        return pb.ReadPlanResponse(plan=convert.plan_message(self._ledger.read_plan(request.lineage, request.step)))

    def Payloads(self, request: pb.PayloadsRequest, context: grpc.ServicerContext) -> Iterator[pb.PayloadsResponse]:
        chunk: list[records_pb.SampleData] = []
        chunk_bytes = 0
        for pos, sample in enumerate(self._ledger.payloads(request.lineage, request.step)):
            if pos < request.first_pos:
                continue
            message = convert.sample_data_message(sample)
            n_bytes = message.ByteSize()
            if chunk and chunk_bytes + n_bytes > CHUNK_BYTES_MAX:
                yield pb.PayloadsResponse(samples=chunk)
                chunk, chunk_bytes = [], 0
            chunk.append(message)
            chunk_bytes += n_bytes
        if chunk:
            yield pb.PayloadsResponse(samples=chunk)

    def Sample(self, request: pb.SampleRequest, context: grpc.ServicerContext) -> pb.SampleResponse:
        sample = self._ledger.sample(convert.slot_key(need(request, "key")))
        return pb.SampleResponse(sample=convert.sample_data_message(sample))

    def FinishPlan(self, request: pb.FinishPlanRequest, context: grpc.ServicerContext) -> pb.FinishPlanResponse:
        term, outcome = convert.role_term(need(request, "term")), enum_member(PlanOutcome, request.outcome)
        self._ledger.finish_plan(term, request.lineage, request.step, outcome, request.reason, request.metrics_json)
        return pb.FinishPlanResponse()

    def PublishVersion(self, request: pb.PublishVersionRequest, context: grpc.ServicerContext) -> pb.PublishVersionResponse:
        version = convert.policy_version(need(request, "version"))
        stored = self._ledger.publish_version(convert.role_term(need(request, "term")), version)
        return pb.PublishVersionResponse(version=convert.policy_version_message(stored))

    def Versions(self, request: pb.VersionsRequest, context: grpc.ServicerContext) -> pb.VersionsResponse:
        versions = self._ledger.versions(request.lineage)
        return pb.VersionsResponse(versions=map(convert.policy_version_message, versions))

    def ForkLineage(self, request: pb.ForkLineageRequest, context: grpc.ServicerContext) -> pb.ForkLineageResponse:
        difference = request.difference if request.HasField("difference") else None
        line = self._ledger.fork_lineage(
            convert.role_term(need(request, "term")), request.parent, request.fork_step, difference, request.tolerance,
            request.keep_orphans,
        )  # fmt: skip
        return pb.ForkLineageResponse(lineage=convert.lineage_message(line))

    def CommitCheckpoint(self, request: pb.CommitCheckpointRequest, context: grpc.ServicerContext) -> pb.CommitCheckpointResponse:
        checkpoint = convert.checkpoint(need(request, "checkpoint"))
        stored = self._ledger.commit_checkpoint(convert.role_term(need(request, "term")), checkpoint)
        return pb.CommitCheckpointResponse(checkpoint=convert.checkpoint_message(stored))

    def MarkCheckpoint(self, request: pb.MarkCheckpointRequest, context: grpc.ServicerContext) -> pb.MarkCheckpointResponse:
        term, state = convert.role_term(need(request, "term")), enum_member(CheckpointState, request.state)
        self._ledger.mark_checkpoint(term, request.lineage, request.step, state.value)
        return pb.MarkCheckpointResponse()

    def ResumePoint(self, request: pb.ResumePointRequest, context: grpc.ServicerContext) -> pb.ResumePointResponse:
        return pb.ResumePointResponse(resume_point=convert.resume_point_message(self._ledger.resume_point()))

    def RunStatus(self, request: pb.RunStatusRequest, context: grpc.ServicerContext) -> pb.RunStatusResponse:
        return pb.RunStatusResponse(status_json=json.dumps(self._ledger.run_status()))

    def Survival(self, request: pb.SurvivalRequest, context: grpc.ServicerContext) -> pb.SurvivalResponse:
        return pb.SurvivalResponse(survival_json=json.dumps(self._ledger.survival()))

    def StepMetrics(self, request: pb.StepMetricsRequest, context: grpc.ServicerContext) -> pb.StepMetricsResponse:
        metrics = self._ledger.step_metrics(request.lineage, request.first_step)
        return pb.StepMetricsResponse(metrics_json=map(json.dumps, metrics))

    def Audit(self, request: pb.AuditRequest, context: grpc.ServicerContext) -> pb.AuditResponse:
        return pb.AuditResponse(violations=map(convert.violation_message, self._ledger.audit()))

    def Explain(self, request: pb.ExplainRequest, context: grpc.ServicerContext) -> pb.ExplainResponse:
        story = self._ledger.explain(convert.slot_key(need(request, "key")))
        return pb.ExplainResponse(story_json=json.dumps(story))

    def QuarantineGroup(
        self, request: pb.QuarantineGroupRequest, context: grpc.ServicerContext
    ) -> pb.QuarantineGroupResponse:
        self._ledger.quarantine_group(request.ordinal, request.reason)
        return pb.QuarantineGroupResponse()

    def RetryGroup(self, request: pb.RetryGroupRequest, context: grpc.ServicerContext) -> pb.RetryGroupResponse:
        self._ledger.retry_group(request.ordinal, request.reason)
        return pb.RetryGroupResponse()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        self._ledger.drain()
        return pb.DrainResponse()


def _held_s(wait_s: float, context: grpc.ServicerContext) -> float:
    """Seconds an answer may be held: what is asked for, within the bound and the caller's deadline."""
    return max(0.0, min(wait_s, WAIT_S_MAX, context.time_remaining() - REPLY_MARGIN_S))
