"""Records of ``core`` to wire messages and back.

Owns the translation of every record and enum: the only place that builds record messages or reads them. Never decides
anything beyond presence: an absent message or an unspecified enum is ``InvalidRequest``, never a default (slot 0.0 must
not be what a forgotten key means). Per-token arrays pass through untouched, so digests hold on both sides (P2, P4).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from rollbook.core.errors import InvalidRequest
from rollbook.core.records import (
    Blame,
    Checkpoint,
    CheckpointState,
    Cursor,
    FailureReport,
    FinishReason,
    ForkVerdict,
    GroupSpec,
    HeartbeatReply,
    LeaseGrant,
    LeaseReply,
    Lineage,
    Plan,
    PlanItem,
    PlanOutcome,
    PolicyVersion,
    ResumePoint,
    RewardStatus,
    Role,
    RoleTerm,
    RunRecord,
    RunRules,
    SampleData,
    SandboxStatus,
    ScheduleKind,
    SlotKey,
    Submission,
    SubmitOutcome,
    SubmitResult,
    ToolCall,
    Trajectory,
    Violation,
)
from rollbook.v1 import ledger_pb2 as pb

E = TypeVar("E", bound=StrEnum)

ENUMS: dict[type[StrEnum], tuple[Any, str]] = {
    Role: (pb.Role, "ROLE"),
    ScheduleKind: (pb.ScheduleKind, "SCHEDULE_KIND"),
    FinishReason: (pb.FinishReason, "FINISH_REASON"),
    SandboxStatus: (pb.SandboxStatus, "SANDBOX_STATUS"),
    RewardStatus: (pb.RewardStatus, "REWARD_STATUS"),
    Blame: (pb.Blame, "BLAME"),
    SubmitOutcome: (pb.SubmitOutcome, "SUBMIT_OUTCOME"),
    PlanOutcome: (pb.PlanOutcome, "PLAN_OUTCOME"),
    ForkVerdict: (pb.ForkVerdict, "FORK_VERDICT"),
    CheckpointState: (pb.CheckpointState, "CHECKPOINT_STATE"),
}
"""Every enum that travels: core enum -> (wire enum, prefix of its value names)."""

# Per enum: members are strings, so equal words of two enums (`infra_error`) would be one key of a common table.
_NUMBER: dict[type[StrEnum], dict[StrEnum, int]] = {
    kind: {member: wire.Value(f"{prefix}_{member.name}") for member in kind} for kind, (wire, prefix) in ENUMS.items()
}
_MEMBER: dict[type[StrEnum], dict[int, StrEnum]] = {
    kind: {number: member for member, number in numbers.items()} for kind, numbers in _NUMBER.items()
}


def enum_number(member: StrEnum) -> Any:
    """Wire number of an enum member."""
    return _NUMBER[type(member)][member]


def enum_member(kind: type[E], number: int) -> E:
    """Enum member of a wire number. Raises InvalidRequest on unspecified or unknown ones."""
    member = _MEMBER[kind].get(number)
    if member is None:
        raise InvalidRequest(
            f"{kind.__name__} number {number} is unspecified or unknown; set the field, or upgrade the older side"
        )
    return member  # type: ignore[return-value]


def need(message: Message, field: str) -> Any:
    """The message in ``field``. Raises InvalidRequest when it is absent."""
    if not message.HasField(field):
        raise InvalidRequest(f"{type(message).__name__}.{field} is missing; set it")
    return getattr(message, field)


def _optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def printable(text: str) -> str:
    """Free text with what UTF-8 cannot carry (a lone surrogate from a broken file name, say) replaced."""
    return text.encode("utf-8", "replace").decode()


def slot_key_message(r: SlotKey) -> pb.SlotKey:
    return pb.SlotKey(ordinal=r.ordinal, sibling=r.sibling)


def slot_key(m: pb.SlotKey) -> SlotKey:
    return SlotKey(m.ordinal, m.sibling)


def run_message(r: RunRecord) -> pb.RunRecord:
    q = r.rules
    rules = pb.RunRules(
        group_size=q.group_size, groups_per_step=q.groups_per_step, schedule=enum_number(q.schedule),
        max_lag_versions=q.max_lag_versions, fixed_lag_versions=q.fixed_lag_versions, config_seed=q.config_seed,
        lease_ttl_s=q.lease_ttl_s, attempts_max=q.attempts_max, survivors_min=q.survivors_min, late_submit=q.late_submit,
        straggler=q.straggler, straggler_wait_s=q.straggler_wait_s, tokens_max=q.tokens_max, steps=q.steps,
        infra_failures_max=q.infra_failures_max, infra_window=q.infra_window, breaker_pause_s=q.breaker_pause_s,
    )  # fmt: skip
    return pb.RunRecord(
        run_id=r.run_id, config_digest=r.config_digest, config_json=r.config_json, revision=r.revision, rules=rules,
        manifest_json=r.manifest_json,
    )  # fmt: skip


def run_record(m: pb.RunRecord) -> RunRecord:
    q = need(m, "rules")
    rules = RunRules(
        group_size=q.group_size, groups_per_step=q.groups_per_step, schedule=enum_member(ScheduleKind, q.schedule),
        max_lag_versions=q.max_lag_versions, fixed_lag_versions=q.fixed_lag_versions, config_seed=q.config_seed,
        lease_ttl_s=q.lease_ttl_s, attempts_max=q.attempts_max, survivors_min=q.survivors_min, late_submit=q.late_submit,
        straggler=q.straggler, straggler_wait_s=q.straggler_wait_s, tokens_max=q.tokens_max, steps=q.steps,
        **{name: getattr(q, name) for name in ("infra_failures_max", "infra_window", "breaker_pause_s") if q.HasField(name)},
    )  # fmt: skip
    return RunRecord(m.run_id, m.config_digest, m.config_json, m.revision, rules, m.manifest_json)


def role_term_message(r: RoleTerm) -> pb.RoleTerm:
    return pb.RoleTerm(role=enum_number(r.role), epoch=r.epoch, holder=r.holder, ttl_s=r.ttl_s)


def role_term(m: pb.RoleTerm) -> RoleTerm:
    return RoleTerm(enum_member(Role, m.role), m.epoch, m.holder, m.ttl_s)


def cursor_message(r: Cursor) -> pb.Cursor:
    return pb.Cursor(stream=r.stream, next_ordinal=r.next_ordinal, state_json=r.state_json, exhausted=r.exhausted)


def cursor(m: pb.Cursor) -> Cursor:
    return Cursor(m.stream, m.next_ordinal, m.state_json, m.exhausted)


def group_spec_message(r: GroupSpec) -> pb.GroupSpec:
    return pb.GroupSpec(
        ordinal=r.ordinal, prompt_ids=r.prompt_ids, task_json=r.task_json, n_siblings=r.n_siblings, refills=r.refills,
        traceparents=r.traceparents,
    )  # fmt: skip


def group_spec(m: pb.GroupSpec) -> GroupSpec:
    return GroupSpec(m.ordinal, m.prompt_ids, m.task_json, m.n_siblings, _optional(m, "refills"), tuple(m.traceparents))


def policy_version_message(r: PolicyVersion) -> pb.PolicyVersion:
    return pb.PolicyVersion(
        lineage=r.lineage, version=r.version, digest=r.digest, path=r.path, probe_json=r.probe_json, n_bytes=r.n_bytes
    )


def policy_version(m: pb.PolicyVersion) -> PolicyVersion:
    return PolicyVersion(m.lineage, m.version, m.digest, m.path, m.probe_json, m.n_bytes)


def optional_version_message(r: PolicyVersion | None) -> pb.PolicyVersion | None:
    """None stays None, which leaves a message field absent."""
    return None if r is None else policy_version_message(r)


def optional_version(message: Message, field: str) -> PolicyVersion | None:
    """The version in ``field``, None when it is absent."""
    return policy_version(getattr(message, field)) if message.HasField(field) else None


def lineage_message(r: Lineage) -> pb.Lineage:
    return pb.Lineage(
        number=r.number, parent=r.parent, fork_step=r.fork_step, verdict=enum_number(r.verdict), difference=r.difference,
        tolerance=r.tolerance, orphans_kept=r.orphans_kept, orphans_dropped=r.orphans_dropped,
    )  # fmt: skip


def lineage(m: pb.Lineage) -> Lineage:
    return Lineage(
        m.number, _optional(m, "parent"), m.fork_step, enum_member(ForkVerdict, m.verdict), _optional(m, "difference"),
        m.tolerance, m.orphans_kept, m.orphans_dropped,
    )  # fmt: skip


def lease_grant_message(r: LeaseGrant) -> pb.LeaseGrant:
    return pb.LeaseGrant(
        key=slot_key_message(r.key), token=r.token, attempt=r.attempt, ttl_s=r.ttl_s, seed=r.seed, prompt_ids=r.prompt_ids,
        task_json=r.task_json, lineage=r.lineage, version=r.version, version_digest=r.version_digest,
        traceparent=r.traceparent,
    )  # fmt: skip


def lease_grant(m: pb.LeaseGrant) -> LeaseGrant:
    return LeaseGrant(
        slot_key(need(m, "key")), m.token, m.attempt, m.ttl_s, m.seed, m.prompt_ids, m.task_json, m.lineage, m.version,
        m.version_digest, m.traceparent,
    )  # fmt: skip


def lease_reply_message(r: LeaseReply) -> pb.LeaseReply:
    return pb.LeaseReply(
        grants=map(lease_grant_message, r.grants), wanted=optional_version_message(r.wanted),
        retry_after_s=r.retry_after_s, drain=r.drain,
    )  # fmt: skip


def lease_reply(m: pb.LeaseReply) -> LeaseReply:
    return LeaseReply(tuple(map(lease_grant, m.grants)), optional_version(m, "wanted"), m.retry_after_s, m.drain)


def trajectory_message(r: Trajectory) -> pb.Trajectory:
    return pb.Trajectory(token_ids=r.token_ids, logprobs=r.logprobs, versions=r.versions, loss_mask=r.loss_mask)


def trajectory(m: pb.Trajectory) -> Trajectory:
    return Trajectory(m.token_ids, m.logprobs, m.versions, m.loss_mask)


def submission_message(r: Submission) -> pb.Submission:
    return pb.Submission(
        key=slot_key_message(r.key), lease_token=r.lease_token, incarnation=r.incarnation, sequence=r.sequence,
        lineage=r.lineage, trajectory=trajectory_message(r.trajectory), reward=r.reward,
        reward_status=enum_number(r.reward_status), sandbox_status=enum_number(r.sandbox_status),
        finish_reason=enum_number(r.finish_reason), generate_s=r.generate_s, verify_s=r.verify_s,
        evidence_json=r.evidence_json, blame=None if r.blame is None else enum_number(r.blame),
        traceparent=r.traceparent,
    )  # fmt: skip


def submission(m: pb.Submission) -> Submission:
    return Submission(
        slot_key(need(m, "key")), m.lease_token, m.incarnation, m.sequence, m.lineage, trajectory(need(m, "trajectory")),
        _optional(m, "reward"), enum_member(RewardStatus, m.reward_status), enum_member(SandboxStatus, m.sandbox_status),
        enum_member(FinishReason, m.finish_reason), m.generate_s, m.verify_s, m.evidence_json,
        enum_member(Blame, m.blame) if m.HasField("blame") else None, m.traceparent,
    )  # fmt: skip


def submit_result_message(r: SubmitResult) -> pb.SubmitResult:
    return pb.SubmitResult(key=slot_key_message(r.key), outcome=enum_number(r.outcome), reason=printable(r.reason))


def submit_result(m: pb.SubmitResult) -> SubmitResult:
    return SubmitResult(slot_key(need(m, "key")), enum_member(SubmitOutcome, m.outcome), m.reason)


def failure_report_message(r: FailureReport) -> pb.FailureReport:
    return pb.FailureReport(
        key=slot_key_message(r.key), lease_token=r.lease_token, incarnation=r.incarnation, status=enum_number(r.status),
        blame=enum_number(r.blame), reason=printable(r.reason), sandbox_status=enum_number(r.sandbox_status),
        n_tokens=r.n_tokens, generate_s=r.generate_s, verify_s=r.verify_s, evidence_json=printable(r.evidence_json),
        final=r.final,
    )  # fmt: skip


def failure_report(m: pb.FailureReport) -> FailureReport:
    return FailureReport(
        slot_key(need(m, "key")), m.lease_token, m.incarnation, enum_member(RewardStatus, m.status),
        enum_member(Blame, m.blame), m.reason,
        enum_member(SandboxStatus, m.sandbox_status) if m.HasField("sandbox_status") else SandboxStatus.NOT_USED,
        m.n_tokens, m.generate_s, m.verify_s, m.evidence_json if m.HasField("evidence_json") else "{}", m.final,
    )  # fmt: skip


def tool_call_message(r: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(
        key=slot_key_message(r.key), call_index=r.call_index, request_digest=r.request_digest,
        prefix=trajectory_message(r.prefix), tool=r.tool, request_json=r.request_json, response_json=r.response_json,
    )  # fmt: skip


def tool_call(m: pb.ToolCall) -> ToolCall:
    return ToolCall(
        slot_key(need(m, "key")), m.call_index, m.request_digest, trajectory(need(m, "prefix")), m.tool, m.request_json,
        _optional(m, "response_json"),
    )  # fmt: skip


def held_lease_message(r: tuple[SlotKey, int]) -> pb.HeldLease:
    return pb.HeldLease(key=slot_key_message(r[0]), token=r[1])


def held_lease(m: pb.HeldLease) -> tuple[SlotKey, int]:
    return slot_key(need(m, "key")), m.token


def heartbeat_reply_message(r: HeartbeatReply) -> pb.HeartbeatReply:
    return pb.HeartbeatReply(head=optional_version_message(r.head), lost=map(slot_key_message, r.lost), drain=r.drain)


def heartbeat_reply(m: pb.HeartbeatReply) -> HeartbeatReply:
    return HeartbeatReply(optional_version(m, "head"), tuple(map(slot_key, m.lost)), m.drain)


def plan_item_message(r: PlanItem) -> pb.PlanItem:
    return pb.PlanItem(
        pos=r.pos, key=slot_key_message(r.key), payload_digest=r.payload_digest, reward=r.reward, valid=r.valid
    )


def plan_item(m: pb.PlanItem) -> PlanItem:
    return PlanItem(m.pos, slot_key(need(m, "key")), m.payload_digest, _optional(m, "reward"), m.valid)


def plan_message(r: Plan) -> pb.Plan:
    return pb.Plan(
        lineage=r.lineage, step=r.step, base_version=r.base_version, revision=r.revision,
        items=map(plan_item_message, r.items), items_digest=r.items_digest, chain_digest=r.chain_digest,
        outcome=None if r.outcome is None else enum_number(r.outcome), reason=r.reason,
        obeys=None if r.obeys is None else enum_number(r.obeys),
    )  # fmt: skip


def plan(m: pb.Plan) -> Plan:
    outcome, obeys = (
        None if number == pb.PLAN_OUTCOME_UNSPECIFIED else enum_member(PlanOutcome, number) for number in (m.outcome, m.obeys)
    )
    items = tuple(map(plan_item, m.items))
    return Plan(
        m.lineage, m.step, m.base_version, m.revision, items, m.items_digest, m.chain_digest, outcome, m.reason, obeys
    )


def sample_data_message(r: SampleData) -> pb.SampleData:
    return pb.SampleData(
        key=slot_key_message(r.key), prompt_ids=r.prompt_ids, trajectory=trajectory_message(r.trajectory),
        reward=r.reward, payload_digest=r.payload_digest, traceparent=r.traceparent,
    )  # fmt: skip


def sample_data(m: pb.SampleData) -> SampleData:
    return SampleData(
        slot_key(need(m, "key")), m.prompt_ids, trajectory(need(m, "trajectory")), _optional(m, "reward"), m.payload_digest,
        m.traceparent,
    )  # fmt: skip


def checkpoint_message(r: Checkpoint) -> pb.Checkpoint:
    return pb.Checkpoint(
        lineage=r.lineage, step=r.step, dir_name=r.dir_name, manifest_digest=r.manifest_digest,
        chain_digest=r.chain_digest, state=enum_number(r.state),
    )  # fmt: skip


def checkpoint(m: pb.Checkpoint) -> Checkpoint:
    return Checkpoint(
        m.lineage, m.step, m.dir_name, m.manifest_digest, m.chain_digest, enum_member(CheckpointState, m.state)
    )


def resume_point_message(r: ResumePoint) -> pb.ResumePoint:
    return pb.ResumePoint(
        lineage=r.lineage, checkpoints=map(checkpoint_message, r.checkpoints), last_planned_step=r.last_planned_step,
        head=optional_version_message(r.head), chain_digests=r.chain_digests,
    )  # fmt: skip


def resume_point(m: pb.ResumePoint) -> ResumePoint:
    checkpoints = tuple(map(checkpoint, m.checkpoints))
    return ResumePoint(m.lineage, checkpoints, m.last_planned_step, optional_version(m, "head"), dict(m.chain_digests))


def violation_message(r: Violation) -> pb.Violation:
    return pb.Violation(promise=r.promise, check=r.check, detail=printable(r.detail), ids=r.ids)


def violation(m: pb.Violation) -> Violation:
    return Violation(m.promise, m.check, m.detail, tuple(m.ids))
