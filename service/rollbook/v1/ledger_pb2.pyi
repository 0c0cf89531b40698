from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_LEDGER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_LEARNER: _ClassVar[Role]
    ROLE_FEEDER: _ClassVar[Role]
    ROLE_SUPERVISOR: _ClassVar[Role]

class ScheduleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_KIND_UNSPECIFIED: _ClassVar[ScheduleKind]
    SCHEDULE_KIND_BOUNDED: _ClassVar[ScheduleKind]
    SCHEDULE_KIND_FIXED: _ClassVar[ScheduleKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TURNS: _ClassVar[FinishReason]

class SandboxStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SANDBOX_STATUS_UNSPECIFIED: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_NOT_USED: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_OK: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_RUNTIME_ERROR: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_SYNTAX_ERROR: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_TIMEOUT_CPU: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_TIMEOUT_WALL: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_OOM: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_OUTPUT_LIMIT: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_DISK_LIMIT: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_PROCESS_LIMIT: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_EARLY_EXIT: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_CRASHED: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_INVALID_RESULT: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_NO_CODE: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_INFRA_SPAWN: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_INFRA_SETUP: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_INFRA_LOST: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_INFRA_OVERLOAD: _ClassVar[SandboxStatus]
    SANDBOX_STATUS_CANCELLED: _ClassVar[SandboxStatus]

class RewardStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REWARD_STATUS_UNSPECIFIED: _ClassVar[RewardStatus]
    REWARD_STATUS_GIVEN: _ClassVar[RewardStatus]
    REWARD_STATUS_NO_VERDICT: _ClassVar[RewardStatus]
    REWARD_STATUS_VERIFIER_ERROR: _ClassVar[RewardStatus]
    REWARD_STATUS_INFRA_ERROR: _ClassVar[RewardStatus]
    REWARD_STATUS_TIMEOUT: _ClassVar[RewardStatus]

class Blame(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLAME_UNSPECIFIED: _ClassVar[Blame]
    BLAME_MODEL: _ClassVar[Blame]
    BLAME_INFRA: _ClassVar[Blame]
    BLAME_UNCLEAR: _ClassVar[Blame]

class SubmitOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBMIT_OUTCOME_UNSPECIFIED: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_ACCEPTED: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_REPLAYED: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_CONFLICT: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_FENCED: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_REFUSED: _ClassVar[SubmitOutcome]
    SUBMIT_OUTCOME_INVALID: _ClassVar[SubmitOutcome]

class PlanOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_OUTCOME_UNSPECIFIED: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_TRAINED: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_SKIPPED: _ClassVar[PlanOutcome]

class ForkVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORK_VERDICT_UNSPECIFIED: _ClassVar[ForkVerdict]
    FORK_VERDICT_WITHIN: _ClassVar[ForkVerdict]
    FORK_VERDICT_KEPT: _ClassVar[ForkVerdict]
    FORK_VERDICT_DROPPED: _ClassVar[ForkVerdict]

class CheckpointState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATE_UNSPECIFIED: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_COMMITTED: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_DELETING: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_CORRUPT: _ClassVar[CheckpointState]
ROLE_UNSPECIFIED: Role
ROLE_LEDGER: Role
ROLE_WORKER: Role
ROLE_LEARNER: Role
ROLE_FEEDER: Role
ROLE_SUPERVISOR: Role
SCHEDULE_KIND_UNSPECIFIED: ScheduleKind
SCHEDULE_KIND_BOUNDED: ScheduleKind
SCHEDULE_KIND_FIXED: ScheduleKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TURNS: FinishReason
SANDBOX_STATUS_UNSPECIFIED: SandboxStatus
SANDBOX_STATUS_NOT_USED: SandboxStatus
SANDBOX_STATUS_OK: SandboxStatus
SANDBOX_STATUS_RUNTIME_ERROR: SandboxStatus
SANDBOX_STATUS_SYNTAX_ERROR: SandboxStatus
SANDBOX_STATUS_TIMEOUT_CPU: SandboxStatus
SANDBOX_STATUS_TIMEOUT_WALL: SandboxStatus
SANDBOX_STATUS_OOM: SandboxStatus
SANDBOX_STATUS_OUTPUT_LIMIT: SandboxStatus
SANDBOX_STATUS_DISK_LIMIT: SandboxStatus
SANDBOX_STATUS_PROCESS_LIMIT: SandboxStatus
SANDBOX_STATUS_EARLY_EXIT: SandboxStatus
SANDBOX_STATUS_CRASHED: SandboxStatus
SANDBOX_STATUS_INVALID_RESULT: SandboxStatus
SANDBOX_STATUS_NO_CODE: SandboxStatus
SANDBOX_STATUS_INFRA_SPAWN: SandboxStatus
SANDBOX_STATUS_INFRA_SETUP: SandboxStatus
SANDBOX_STATUS_INFRA_LOST: SandboxStatus
SANDBOX_STATUS_INFRA_OVERLOAD: SandboxStatus
SANDBOX_STATUS_CANCELLED: SandboxStatus
REWARD_STATUS_UNSPECIFIED: RewardStatus
REWARD_STATUS_GIVEN: RewardStatus
REWARD_STATUS_NO_VERDICT: RewardStatus
REWARD_STATUS_VERIFIER_ERROR: RewardStatus
REWARD_STATUS_INFRA_ERROR: RewardStatus
REWARD_STATUS_TIMEOUT: RewardStatus
BLAME_UNSPECIFIED: Blame
BLAME_MODEL: Blame
BLAME_INFRA: Blame
BLAME_UNCLEAR: Blame
SUBMIT_OUTCOME_UNSPECIFIED: SubmitOutcome
SUBMIT_OUTCOME_ACCEPTED: SubmitOutcome
SUBMIT_OUTCOME_REPLAYED: SubmitOutcome
SUBMIT_OUTCOME_CONFLICT: SubmitOutcome
SUBMIT_OUTCOME_FENCED: SubmitOutcome
SUBMIT_OUTCOME_REFUSED: SubmitOutcome
SUBMIT_OUTCOME_INVALID: SubmitOutcome
PLAN_OUTCOME_UNSPECIFIED: PlanOutcome
PLAN_OUTCOME_TRAINED: PlanOutcome
PLAN_OUTCOME_SKIPPED: PlanOutcome
FORK_VERDICT_UNSPECIFIED: ForkVerdict
FORK_VERDICT_WITHIN: ForkVerdict
FORK_VERDICT_KEPT: ForkVerdict
FORK_VERDICT_DROPPED: ForkVerdict
CHECKPOINT_STATE_UNSPECIFIED: CheckpointState
CHECKPOINT_STATE_COMMITTED: CheckpointState
CHECKPOINT_STATE_DELETING: CheckpointState
CHECKPOINT_STATE_CORRUPT: CheckpointState

class SlotKey(_message.Message):
    __slots__ = ("ordinal", "sibling")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SIBLING_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    sibling: int
    def __init__(self, ordinal: _Optional[int] = ..., sibling: _Optional[int] = ...) -> None: ...

class RunRules(_message.Message):
    __slots__ = ("group_size", "groups_per_step", "schedule", "max_lag_versions", "fixed_lag_versions", "config_seed", "lease_ttl_s", "attempts_max", "survivors_min", "late_submit", "straggler", "straggler_wait_s", "tokens_max", "steps", "infra_failures_max", "infra_window", "breaker_pause_s")
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FIXED_LAG_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SEED_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_MAX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_MIN_FIELD_NUMBER: _ClassVar[int]
    LATE_SUBMIT_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INFRA_FAILURES_MAX_FIELD_NUMBER: _ClassVar[int]
    INFRA_WINDOW_FIELD_NUMBER: _ClassVar[int]
    BREAKER_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    group_size: int
    groups_per_step: int
    schedule: ScheduleKind
    max_lag_versions: int
    fixed_lag_versions: int
    config_seed: int
    lease_ttl_s: float
    attempts_max: int
    survivors_min: int
    late_submit: str
    straggler: str
    straggler_wait_s: float
    tokens_max: int
    steps: int
    infra_failures_max: float
    infra_window: int
    breaker_pause_s: float
    def __init__(self, group_size: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., schedule: _Optional[_Union[ScheduleKind, str]] = ..., max_lag_versions: _Optional[int] = ..., fixed_lag_versions: _Optional[int] = ..., config_seed: _Optional[int] = ..., lease_ttl_s: _Optional[float] = ..., attempts_max: _Optional[int] = ..., survivors_min: _Optional[int] = ..., late_submit: _Optional[str] = ..., straggler: _Optional[str] = ..., straggler_wait_s: _Optional[float] = ..., tokens_max: _Optional[int] = ..., steps: _Optional[int] = ..., infra_failures_max: _Optional[float] = ..., infra_window: _Optional[int] = ..., breaker_pause_s: _Optional[float] = ...) -> None: ...

class RunRecord(_message.Message):
    __slots__ = ("run_id", "config_digest", "config_json", "revision", "rules", "manifest_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_digest: str
    config_json: str
    revision: int
    rules: RunRules
    manifest_json: str
    def __init__(self, run_id: _Optional[str] = ..., config_digest: _Optional[str] = ..., config_json: _Optional[str] = ..., revision: _Optional[int] = ..., rules: _Optional[_Union[RunRules, _Mapping]] = ..., manifest_json: _Optional[str] = ...) -> None: ...

class RoleTerm(_message.Message):
    __slots__ = ("role", "epoch", "holder", "ttl_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    role: Role
    epoch: int
    holder: str
    ttl_s: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., epoch: _Optional[int] = ..., holder: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("stream", "next_ordinal", "state_json", "exhausted")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NEXT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    stream: str
    next_ordinal: int
    state_json: str
    exhausted: bool
    def __init__(self, stream: _Optional[str] = ..., next_ordinal: _Optional[int] = ..., state_json: _Optional[str] = ..., exhausted: bool = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("ordinal", "prompt_ids", "task_json", "n_siblings", "refills", "traceparents")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    N_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    REFILLS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    prompt_ids: bytes
    task_json: str
    n_siblings: int
    refills: int
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ordinal: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., task_json: _Optional[str] = ..., n_siblings: _Optional[int] = ..., refills: _Optional[int] = ..., traceparents: _Optional[_Iterable[str]] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("lineage", "version", "digest", "path", "probe_json", "n_bytes")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROBE_JSON_FIELD_NUMBER: _ClassVar[int]
    N_BYTES_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    digest: str
    path: str
    probe_json: str
    n_bytes: int
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., probe_json: _Optional[str] = ..., n_bytes: _Optional[int] = ...) -> None: ...

class Lineage(_message.Message):
    __slots__ = ("number", "parent", "fork_step", "verdict", "difference", "tolerance", "orphans_kept", "orphans_dropped")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FORK_STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_KEPT_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    fork_step: int
    verdict: ForkVerdict
    difference: float
    tolerance: float
    orphans_kept: int
    orphans_dropped: int
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., fork_step: _Optional[int] = ..., verdict: _Optional[_Union[ForkVerdict, str]] = ..., difference: _Optional[float] = ..., tolerance: _Optional[float] = ..., orphans_kept: _Optional[int] = ..., orphans_dropped: _Optional[int] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("key", "token", "attempt", "ttl_s", "seed", "prompt_ids", "task_json", "lineage", "version", "version_digest", "traceparent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    token: int
    attempt: int
    ttl_s: float
    seed: int
    prompt_ids: bytes
    task_json: str
    lineage: int
    version: int
    version_digest: str
    traceparent: str
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., token: _Optional[int] = ..., attempt: _Optional[int] = ..., ttl_s: _Optional[float] = ..., seed: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., task_json: _Optional[str] = ..., lineage: _Optional[int] = ..., version: _Optional[int] = ..., version_digest: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("grants", "wanted", "retry_after_s", "drain")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[LeaseGrant]
    wanted: PolicyVersion
    retry_after_s: float
    drain: bool
    def __init__(self, grants: _Optional[_Iterable[_Union[LeaseGrant, _Mapping]]] = ..., wanted: _Optional[_Union[PolicyVersion, _Mapping]] = ..., retry_after_s: _Optional[float] = ..., drain: bool = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("token_ids", "logprobs", "versions", "loss_mask")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    loss_mask: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("key", "lease_token", "incarnation", "sequence", "lineage", "trajectory", "reward", "reward_status", "sandbox_status", "finish_reason", "generate_s", "verify_s", "evidence_json", "blame", "traceparent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_STATUS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_STATUS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    lease_token: int
    incarnation: str
    sequence: int
    lineage: int
    trajectory: Trajectory
    reward: float
    reward_status: RewardStatus
    sandbox_status: SandboxStatus
    finish_reason: FinishReason
    generate_s: float
    verify_s: float
    evidence_json: str
    blame: Blame
    traceparent: str
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., lease_token: _Optional[int] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., lineage: _Optional[int] = ..., trajectory: _Optional[_Union[Trajectory, _Mapping]] = ..., reward: _Optional[float] = ..., reward_status: _Optional[_Union[RewardStatus, str]] = ..., sandbox_status: _Optional[_Union[SandboxStatus, str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., generate_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., evidence_json: _Optional[str] = ..., blame: _Optional[_Union[Blame, str]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("key", "outcome", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    outcome: SubmitOutcome
    reason: str
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., outcome: _Optional[_Union[SubmitOutcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class FailureReport(_message.Message):
    __slots__ = ("key", "lease_token", "incarnation", "status", "blame", "reason", "sandbox_status", "n_tokens", "generate_s", "verify_s", "evidence_json", "final")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_STATUS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    lease_token: int
    incarnation: str
    status: RewardStatus
    blame: Blame
    reason: str
    sandbox_status: SandboxStatus
    n_tokens: int
    generate_s: float
    verify_s: float
    evidence_json: str
    final: bool
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., lease_token: _Optional[int] = ..., incarnation: _Optional[str] = ..., status: _Optional[_Union[RewardStatus, str]] = ..., blame: _Optional[_Union[Blame, str]] = ..., reason: _Optional[str] = ..., sandbox_status: _Optional[_Union[SandboxStatus, str]] = ..., n_tokens: _Optional[int] = ..., generate_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., evidence_json: _Optional[str] = ..., final: bool = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("key", "call_index", "request_digest", "prefix", "tool", "request_json", "response_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_JSON_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    call_index: int
    request_digest: str
    prefix: Trajectory
    tool: str
    request_json: str
    response_json: str
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., call_index: _Optional[int] = ..., request_digest: _Optional[str] = ..., prefix: _Optional[_Union[Trajectory, _Mapping]] = ..., tool: _Optional[str] = ..., request_json: _Optional[str] = ..., response_json: _Optional[str] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("key", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    token: int
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., token: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("head", "lost", "drain")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    head: PolicyVersion
    lost: _containers.RepeatedCompositeFieldContainer[SlotKey]
    drain: bool
    def __init__(self, head: _Optional[_Union[PolicyVersion, _Mapping]] = ..., lost: _Optional[_Iterable[_Union[SlotKey, _Mapping]]] = ..., drain: bool = ...) -> None: ...

class PlanItem(_message.Message):
    __slots__ = ("pos", "key", "payload_digest", "reward", "valid")
    POS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    pos: int
    key: SlotKey
    payload_digest: str
    reward: float
    valid: bool
    def __init__(self, pos: _Optional[int] = ..., key: _Optional[_Union[SlotKey, _Mapping]] = ..., payload_digest: _Optional[str] = ..., reward: _Optional[float] = ..., valid: bool = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("lineage", "step", "base_version", "revision", "items", "items_digest", "chain_digest", "outcome", "reason", "obeys")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OBEYS_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    base_version: int
    revision: int
    items: _containers.RepeatedCompositeFieldContainer[PlanItem]
    items_digest: str
    chain_digest: str
    outcome: PlanOutcome
    reason: str
    obeys: PlanOutcome
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., base_version: _Optional[int] = ..., revision: _Optional[int] = ..., items: _Optional[_Iterable[_Union[PlanItem, _Mapping]]] = ..., items_digest: _Optional[str] = ..., chain_digest: _Optional[str] = ..., outcome: _Optional[_Union[PlanOutcome, str]] = ..., reason: _Optional[str] = ..., obeys: _Optional[_Union[PlanOutcome, str]] = ...) -> None: ...

class SampleData(_message.Message):
    __slots__ = ("key", "prompt_ids", "trajectory", "reward", "payload_digest", "traceparent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: SlotKey
    prompt_ids: bytes
    trajectory: Trajectory
    reward: float
    payload_digest: str
    traceparent: str
    def __init__(self, key: _Optional[_Union[SlotKey, _Mapping]] = ..., prompt_ids: _Optional[bytes] = ..., trajectory: _Optional[_Union[Trajectory, _Mapping]] = ..., reward: _Optional[float] = ..., payload_digest: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("lineage", "step", "dir_name", "manifest_digest", "chain_digest", "state")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIR_NAME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    dir_name: str
    manifest_digest: str
    chain_digest: str
    state: CheckpointState
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., dir_name: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., chain_digest: _Optional[str] = ..., state: _Optional[_Union[CheckpointState, str]] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("lineage", "checkpoints", "last_planned_step", "head", "chain_digests")
    class ChainDigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHAIN_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    last_planned_step: int
    head: PolicyVersion
    chain_digests: _containers.ScalarMap[int, str]
    def __init__(self, lineage: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., last_planned_step: _Optional[int] = ..., head: _Optional[_Union[PolicyVersion, _Mapping]] = ..., chain_digests: _Optional[_Mapping[int, str]] = ...) -> None: ...

class Violation(_message.Message):
    __slots__ = ("promise", "check", "detail", "ids")
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    promise: str
    check: str
    detail: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, promise: _Optional[str] = ..., check: _Optional[str] = ..., detail: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ...) -> None: ...
