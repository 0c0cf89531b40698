from rollbook.v1 import ledger_pb2 as _ledger_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "run", "accept")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run: _ledger_pb2.RunRecord
    accept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., run: _Optional[_Union[_ledger_pb2.RunRecord, _Mapping]] = ..., accept: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: _ledger_pb2.RunRecord
    def __init__(self, run: _Optional[_Union[_ledger_pb2.RunRecord, _Mapping]] = ...) -> None: ...

class AcquireRoleRequest(_message.Message):
    __slots__ = ("run_id", "role", "holder", "ttl_s", "supersede")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    role: _ledger_pb2.Role
    holder: str
    ttl_s: float
    supersede: str
    def __init__(self, run_id: _Optional[str] = ..., role: _Optional[_Union[_ledger_pb2.Role, str]] = ..., holder: _Optional[str] = ..., ttl_s: _Optional[float] = ..., supersede: _Optional[str] = ...) -> None: ...

class AcquireRoleResponse(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: _ledger_pb2.RoleTerm
    def __init__(self, term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ...) -> None: ...

class RenewRoleRequest(_message.Message):
    __slots__ = ("run_id", "term")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ...) -> None: ...

class RenewRoleResponse(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: _ledger_pb2.RoleTerm
    def __init__(self, term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ...) -> None: ...

class ReleaseRoleRequest(_message.Message):
    __slots__ = ("run_id", "term")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ...) -> None: ...

class ReleaseRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CursorRequest(_message.Message):
    __slots__ = ("run_id", "stream")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    stream: str
    def __init__(self, run_id: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class CursorResponse(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: _ledger_pb2.Cursor
    def __init__(self, cursor: _Optional[_Union[_ledger_pb2.Cursor, _Mapping]] = ...) -> None: ...

class AppendGroupsRequest(_message.Message):
    __slots__ = ("run_id", "term", "before", "after", "groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    before: _ledger_pb2.Cursor
    after: _ledger_pb2.Cursor
    groups: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.GroupSpec]
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., before: _Optional[_Union[_ledger_pb2.Cursor, _Mapping]] = ..., after: _Optional[_Union[_ledger_pb2.Cursor, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[_ledger_pb2.GroupSpec, _Mapping]]] = ...) -> None: ...

class AppendGroupsResponse(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: _ledger_pb2.Cursor
    def __init__(self, cursor: _Optional[_Union[_ledger_pb2.Cursor, _Mapping]] = ...) -> None: ...

class FeedDemandRequest(_message.Message):
    __slots__ = ("run_id", "lookahead_groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lookahead_groups: int
    def __init__(self, run_id: _Optional[str] = ..., lookahead_groups: _Optional[int] = ...) -> None: ...

class FeedDemandResponse(_message.Message):
    __slots__ = ("n_groups",)
    N_GROUPS_FIELD_NUMBER: _ClassVar[int]
    n_groups: int
    def __init__(self, n_groups: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "host", "engine", "labels_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LABELS_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    host: str
    engine: str
    labels_json: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., engine: _Optional[str] = ..., labels_json: _Optional[str] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "loaded", "leases", "wait_s", "known_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    loaded: _ledger_pb2.PolicyVersion
    leases: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.HeldLease]
    wait_s: float
    known_version: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., loaded: _Optional[_Union[_ledger_pb2.PolicyVersion, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[_ledger_pb2.HeldLease, _Mapping]]] = ..., wait_s: _Optional[float] = ..., known_version: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: _ledger_pb2.HeartbeatReply
    def __init__(self, reply: _Optional[_Union[_ledger_pb2.HeartbeatReply, _Mapping]] = ...) -> None: ...

class LeaseSlotsRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "loaded", "n_max", "wait_s", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    N_MAX_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    loaded: _ledger_pb2.PolicyVersion
    n_max: int
    wait_s: float
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., loaded: _Optional[_Union[_ledger_pb2.PolicyVersion, _Mapping]] = ..., n_max: _Optional[int] = ..., wait_s: _Optional[float] = ..., request_id: _Optional[str] = ...) -> None: ...

class LeaseSlotsResponse(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: _ledger_pb2.LeaseReply
    def __init__(self, reply: _Optional[_Union[_ledger_pb2.LeaseReply, _Mapping]] = ...) -> None: ...

class SubmitSamplesRequest(_message.Message):
    __slots__ = ("run_id", "submissions")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    submissions: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.Submission]
    def __init__(self, run_id: _Optional[str] = ..., submissions: _Optional[_Iterable[_Union[_ledger_pb2.Submission, _Mapping]]] = ...) -> None: ...

class SubmitSamplesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_ledger_pb2.SubmitResult, _Mapping]]] = ...) -> None: ...

class ReportFailuresRequest(_message.Message):
    __slots__ = ("run_id", "failures")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    failures: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.FailureReport]
    def __init__(self, run_id: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[_ledger_pb2.FailureReport, _Mapping]]] = ...) -> None: ...

class ReportFailuresResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_ledger_pb2.SubmitResult, _Mapping]]] = ...) -> None: ...

class RecordToolCallRequest(_message.Message):
    __slots__ = ("run_id", "call", "lease_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    call: _ledger_pb2.ToolCall
    lease_token: int
    def __init__(self, run_id: _Optional[str] = ..., call: _Optional[_Union[_ledger_pb2.ToolCall, _Mapping]] = ..., lease_token: _Optional[int] = ...) -> None: ...

class RecordToolCallResponse(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: _ledger_pb2.ToolCall
    def __init__(self, call: _Optional[_Union[_ledger_pb2.ToolCall, _Mapping]] = ...) -> None: ...

class ToolCallsRequest(_message.Message):
    __slots__ = ("run_id", "key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    key: _ledger_pb2.SlotKey
    def __init__(self, run_id: _Optional[str] = ..., key: _Optional[_Union[_ledger_pb2.SlotKey, _Mapping]] = ...) -> None: ...

class ToolCallsResponse(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.ToolCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[_ledger_pb2.ToolCall, _Mapping]]] = ...) -> None: ...

class PlanStepRequest(_message.Message):
    __slots__ = ("run_id", "term", "lineage", "step", "wait_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    lineage: int
    step: int
    wait_s: float
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PlanStepResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _ledger_pb2.Plan
    def __init__(self, plan: _Optional[_Union[_ledger_pb2.Plan, _Mapping]] = ...) -> None: ...

class ReadPlanRequest(_message.Message):
    __slots__ = ("run_id", "lineage", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lineage: int
    step: int
    def __init__(self, run_id: _Optional[str] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ReadPlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _ledger_pb2.Plan
    def __init__(self, plan: _Optional[_Union[_ledger_pb2.Plan, _Mapping]] = ...) -> None: ...

class PayloadsRequest(_message.Message):
    __slots__ = ("run_id", "lineage", "step", "first_pos")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_POS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lineage: int
    step: int
    first_pos: int
    def __init__(self, run_id: _Optional[str] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., first_pos: _Optional[int] = ...) -> None: ...

class PayloadsResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.SampleData]
    def __init__(self, samples: _Optional[_Iterable[_Union[_ledger_pb2.SampleData, _Mapping]]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("run_id", "key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    key: _ledger_pb2.SlotKey
    def __init__(self, run_id: _Optional[str] = ..., key: _Optional[_Union[_ledger_pb2.SlotKey, _Mapping]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("sample",)
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    sample: _ledger_pb2.SampleData
    def __init__(self, sample: _Optional[_Union[_ledger_pb2.SampleData, _Mapping]] = ...) -> None: ...

class FinishPlanRequest(_message.Message):
    __slots__ = ("run_id", "term", "lineage", "step", "outcome", "reason", "metrics_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    lineage: int
    step: int
    outcome: _ledger_pb2.PlanOutcome
    reason: str
    metrics_json: str
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., outcome: _Optional[_Union[_ledger_pb2.PlanOutcome, str]] = ..., reason: _Optional[str] = ..., metrics_json: _Optional[str] = ...) -> None: ...

class FinishPlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishVersionRequest(_message.Message):
    __slots__ = ("run_id", "term", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    version: _ledger_pb2.PolicyVersion
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., version: _Optional[_Union[_ledger_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _ledger_pb2.PolicyVersion
    def __init__(self, version: _Optional[_Union[_ledger_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class VersionsRequest(_message.Message):
    __slots__ = ("run_id", "lineage")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lineage: int
    def __init__(self, run_id: _Optional[str] = ..., lineage: _Optional[int] = ...) -> None: ...

class VersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.PolicyVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[_ledger_pb2.PolicyVersion, _Mapping]]] = ...) -> None: ...

class ForkLineageRequest(_message.Message):
    __slots__ = ("run_id", "term", "parent", "fork_step", "difference", "tolerance", "keep_orphans")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FORK_STEP_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_ORPHANS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    parent: int
    fork_step: int
    difference: float
    tolerance: float
    keep_orphans: bool
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., parent: _Optional[int] = ..., fork_step: _Optional[int] = ..., difference: _Optional[float] = ..., tolerance: _Optional[float] = ..., keep_orphans: bool = ...) -> None: ...

class ForkLineageResponse(_message.Message):
    __slots__ = ("lineage",)
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    lineage: _ledger_pb2.Lineage
    def __init__(self, lineage: _Optional[_Union[_ledger_pb2.Lineage, _Mapping]] = ...) -> None: ...

class CommitCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "term", "checkpoint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    checkpoint: _ledger_pb2.Checkpoint
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., checkpoint: _Optional[_Union[_ledger_pb2.Checkpoint, _Mapping]] = ...) -> None: ...

class CommitCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _ledger_pb2.Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[_ledger_pb2.Checkpoint, _Mapping]] = ...) -> None: ...

class MarkCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "term", "lineage", "step", "state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: _ledger_pb2.RoleTerm
    lineage: int
    step: int
    state: _ledger_pb2.CheckpointState
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[_Union[_ledger_pb2.RoleTerm, _Mapping]] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., state: _Optional[_Union[_ledger_pb2.CheckpointState, str]] = ...) -> None: ...

class MarkCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumePointRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ResumePointResponse(_message.Message):
    __slots__ = ("resume_point",)
    RESUME_POINT_FIELD_NUMBER: _ClassVar[int]
    resume_point: _ledger_pb2.ResumePoint
    def __init__(self, resume_point: _Optional[_Union[_ledger_pb2.ResumePoint, _Mapping]] = ...) -> None: ...

class RunStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RunStatusResponse(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class SurvivalRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class SurvivalResponse(_message.Message):
    __slots__ = ("survival_json",)
    SURVIVAL_JSON_FIELD_NUMBER: _ClassVar[int]
    survival_json: str
    def __init__(self, survival_json: _Optional[str] = ...) -> None: ...

class StepMetricsRequest(_message.Message):
    __slots__ = ("run_id", "lineage", "first_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lineage: int
    first_step: int
    def __init__(self, run_id: _Optional[str] = ..., lineage: _Optional[int] = ..., first_step: _Optional[int] = ...) -> None: ...

class StepMetricsResponse(_message.Message):
    __slots__ = ("metrics_json",)
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    metrics_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, metrics_json: _Optional[_Iterable[str]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("violations",)
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.Violation]
    def __init__(self, violations: _Optional[_Iterable[_Union[_ledger_pb2.Violation, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("run_id", "key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    key: _ledger_pb2.SlotKey
    def __init__(self, run_id: _Optional[str] = ..., key: _Optional[_Union[_ledger_pb2.SlotKey, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("story_json",)
    STORY_JSON_FIELD_NUMBER: _ClassVar[int]
    story_json: str
    def __init__(self, story_json: _Optional[str] = ...) -> None: ...

class QuarantineGroupRequest(_message.Message):
    __slots__ = ("run_id", "ordinal", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    ordinal: int
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class QuarantineGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetryGroupRequest(_message.Message):
    __slots__ = ("run_id", "ordinal", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    ordinal: int
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RetryGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
