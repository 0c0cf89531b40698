"""Ids and frozen records that cross layers; one sentence each says who writes and who reads it.

Owns the vocabulary: slot, group, sample, lease, plan, policy version, checkpoint; the words of ``statuses`` belong to it and are
imported from here. Never holds behaviour beyond derived fields. Relation fixed once, here: *committing step s produces policy
version s*; step s (s >= 1) trains from version s - 1; version 0 is the initial weights. Lag of a token at step s =
(s - 1) - the version that sampled it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from rollbook.core.statuses import (
    Blame,
    CheckpointState,
    FinishReason,
    ForkVerdict,
    PlanOutcome,
    RewardStatus,
    Role,
    SandboxStatus,
    ScheduleKind,
    SubmitOutcome,
)
from rollbook.core.statuses import VerdictKind as VerdictKind

ROOT_LINEAGE = 0
"""Lineage every run starts with; forks get larger ids and name their parent."""

ID_MAX = 2**63 - 1
"""Largest ordinal, sibling or step that storage and wire hold."""

TASK_STREAM = "train"
"""Name of the task stream a run is fed from; the cursor under this name is the one a checkpoint copies."""


class SlotKey(NamedTuple):
    """Identity of one rollout slot inside a run; printed ``ordinal.sibling``, which is also the sample id a user types."""

    ordinal: int
    sibling: int

    def __str__(self) -> str:
        return f"{self.ordinal}.{self.sibling}"

    @classmethod
    def parse(cls, text: str) -> SlotKey:
        """``"12.3"`` to ``SlotKey(12, 3)``. Raises ValueError with the expected form."""
        found = re.fullmatch(r"(\d{1,19})\.(\d{1,19})", text, re.ASCII)
        if found is None or max(map(int, found.groups())) > ID_MAX:
            raise ValueError(f"{text[:80]!r} is not a sample id; write ORDINAL.SIBLING, for example 12.3")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class RunRules:
    """Numbers the ledger needs to enforce a run's promises; derived from the configuration, stored with the run."""

    group_size: int
    groups_per_step: int
    schedule: ScheduleKind
    max_lag_versions: int
    """Bound on head lag (P5). In fixed schedule it equals ``fixed_lag_versions``."""
    fixed_lag_versions: int
    config_seed: int
    lease_ttl_s: float
    attempts_max: int
    """Attempts of one slot before its verdict (bounded) or the pause of the run (fixed)."""
    survivors_min: int
    """Fewest usable members with which a group is still trained: max(2, ceil(G / 2)) by default."""
    late_submit: str = "salvage"
    straggler: str = "wait"
    straggler_wait_s: float = 60.0
    tokens_max: int = 1_000_000
    """Largest number of completion tokens a sample may carry."""
    steps: int = 0
    """Optimizer steps the run is configured to make; the feeder and the fixed schedule stop there."""
    infra_failures_max: float = 0.5
    """Share of infrastructure failures at which the circuit breaker opens."""
    infra_window: int = 64
    """Outcomes it looks at."""
    breaker_pause_s: float = 600.0
    """An open breaker pauses the run after this long."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as opened; written once by whoever starts it, read by every role."""

    run_id: str
    config_digest: str
    config_json: str
    revision: int
    rules: RunRules
    manifest_json: str = "{}"
    """Versions of packages, tokenizer hash, dataset hash, engine flags (P12)."""


@dataclass(frozen=True, slots=True)
class RoleTerm:
    """A fenced role as held: every write of the holder carries ``epoch``."""

    role: Role
    epoch: int
    holder: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a task stream stands; the row is the only truth (R10)."""

    stream: str
    next_ordinal: int
    state_json: str
    exhausted: bool


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One task as issued by the feeder: ``n_siblings`` slots with the same prompt."""

    ordinal: int
    prompt_ids: bytes
    """int32 LE token ids of the prompt, exactly as the engine receives them."""
    task_json: str
    """What the verifier needs: at least {"prompt": str, "answer": str}; opaque to the ledger."""
    n_siblings: int
    refills: int | None = None
    """Ordinal of the dropped group this one replaces (R5)."""
    traceparents: tuple[str, ...] = ()
    """W3C trace context of each slot's rollout, by sibling; empty when tracing is off. No part of what an append means."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published policy version; identity is (lineage, version, digest) (P11)."""

    lineage: int
    version: int
    digest: str
    path: str
    """Directory with the weights, relative to the run directory."""
    probe_json: str
    """{"token_ids": [...], "logprobs": [...]}: fixed tokens and the trainer's log-probs (T = 1) on them (R18)."""
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lineage:
    """One line of versions; every lineage but the first forks from the one before it, which is closed then (R6)."""

    number: int
    parent: int | None
    """None for the lineage the run began with; the fields after it say nothing there."""
    fork_step: int
    """Last step shared with the parent: the new lineage's first own step is the one after it."""
    verdict: ForkVerdict
    difference: float | None
    """Largest relative weight difference between replayed and recorded versions; None where no bytes could be compared."""
    tolerance: float
    orphans_kept: int = 0
    """Samples of versions behind the fork that were in no plan when it was made, and stay usable."""
    orphans_dropped: int = 0
    """Such samples that got a verdict in the fork's transaction."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The right of one worker incarnation to fill one slot; written by the ledger, read by the worker."""

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
    traceparent: str = ""
    """W3C trace context of this lease: the trace of its rollout, the same for every attempt; empty where nothing is traced."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Answer to a lease call: grants, or which version to load first, or when to ask again."""

    grants: tuple[LeaseGrant, ...]
    wanted: PolicyVersion | None
    """Version the worker must have loaded before anything is granted; None when what it holds is right."""
    retry_after_s: float
    drain: bool = False
    """True when the run is complete or draining: stop asking."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Completion of one rollout as packed arrays of equal length n (P4: stored, never recomputed)."""

    token_ids: bytes
    """int32 LE [n]."""
    logprobs: bytes
    """float32 LE [n]: log-prob of each token under the distribution it was sampled from."""
    versions: bytes
    """int32 LE [n]: policy version that produced each token's logits."""
    loss_mask: bytes = b""
    """uint8 [n], 1 = sampled by the policy; empty means all ones."""

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Submission:
    """A finished rollout as the worker sends it; kept in its spool until acknowledged."""

    key: SlotKey
    lease_token: int
    incarnation: str
    sequence: int
    """Counts submissions of this incarnation; part of the submit key, so a retry repeats it."""
    lineage: int
    trajectory: Trajectory
    reward: float | None
    reward_status: RewardStatus
    sandbox_status: SandboxStatus
    finish_reason: FinishReason
    generate_s: float
    verify_s: float
    evidence_json: str = "{}"
    """What the verifier saw, the reward's parts, the sandbox's limits and usage."""
    blame: Blame | None = None
    """Whose failure the outcome was; None where nothing failed."""
    traceparent: str = ""
    """The lease's; no part of what the submission means."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """One outcome per submitted sample, in order."""

    key: SlotKey
    outcome: SubmitOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A rollout that gave no sample; idempotent by (slot, lease token)."""

    key: SlotKey
    lease_token: int
    incarnation: str
    status: RewardStatus
    blame: Blame
    reason: str
    sandbox_status: SandboxStatus = SandboxStatus.NOT_USED
    n_tokens: int = 0
    """Completion tokens that were generated for nothing; 0 where it failed before."""
    generate_s: float = 0.0
    verify_s: float = 0.0
    evidence_json: str = "{}"
    final: bool = False
    """True: another attempt cannot help (a call of an impure tool has no answer), so the slot gets its verdict at once."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a rollout, keyed by (slot, call index) (R13)."""

    key: SlotKey
    call_index: int
    request_digest: str
    prefix: Trajectory
    """Trajectory up to the call; a re-leased rollout continues from it."""
    tool: str
    request_json: str
    response_json: str | None = None
    """None while the call is pending."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to a worker's heartbeat: what the head is and what to do."""

    head: PolicyVersion | None
    lost: tuple[SlotKey, ...]
    """Leases the worker reported but no longer owns."""
    drain: bool


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One sample of a plan, in training order."""

    pos: int
    key: SlotKey
    payload_digest: str
    reward: float | None
    valid: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What step ``step`` trains on, stored before it is trained (the write-ahead record)."""

    lineage: int
    step: int
    base_version: int
    revision: int
    items: tuple[PlanItem, ...]
    items_digest: str
    chain_digest: str
    outcome: PlanOutcome | None = None
    reason: str = ""
    """Why ``outcome``, or while there is none why ``obeys``."""
    obeys: PlanOutcome | None = None
    """How the step ended in the lineage the plan was copied from, while it has no outcome of its own (R8)."""


@dataclass(frozen=True, slots=True)
class SampleData:
    """A stored sample with its payload, as streamed to the learner in plan order."""

    key: SlotKey
    prompt_ids: bytes
    trajectory: Trajectory
    reward: float | None
    payload_digest: str
    traceparent: str = ""
    """W3C trace context of its rollout; empty where that was not traced."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint; the row is the commit, the files came first."""

    lineage: int
    step: int
    dir_name: str
    manifest_digest: str
    chain_digest: str
    state: CheckpointState = CheckpointState.COMMITTED


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a learner goes on: try ``checkpoints`` newest first, then replay stored plans up to ``last_planned_step``."""

    lineage: int
    checkpoints: tuple[Checkpoint, ...]
    last_planned_step: int
    """0 when nothing was planned."""
    head: PolicyVersion | None
    chain_digests: dict[int, str] = field(default_factory=dict)
    """Chain digest at each checkpoint step (step 0: the run's genesis digest)."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding of an audit: which promise, what is wrong, which ids."""

    promise: str
    check: str
    detail: str
    ids: tuple[str, ...] = ()
