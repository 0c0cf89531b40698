"""Interfaces between layers: the verbs of the ledger, and what a worker needs from an engine and a verifier.

Owns signatures and their contract (idempotency key, errors). Never holds behaviour. ``LedgerPort`` has two
implementations: ``ledger.Ledger`` (SQL, in the server process) and ``rpc.client.LedgerClient`` (gRPC, everywhere else).
Fakes implement these Protocols and live in the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollbook.core.environments import RewardResult
from rollbook.core.records import (
    Checkpoint,
    Cursor,
    FailureReport,
    FinishReason,
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
    SubmitResult,
    ToolCall,
    Trajectory,
    Violation,
)


class Clock(Protocol):
    """Wall time in seconds since the epoch and a monotonic clock in seconds."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class LedgerPort(Protocol):
    """Verbs of the ledger. Each writing verb is one transaction; each is idempotent by the key its docstring names.

    Every verb may raise ``Unavailable`` (retry with the same key), ``Fenced`` (stop) and ``WrongRun``.
    """

    def open_run(self, run: RunRecord, *, accept: Collection[str] = ()) -> RunRecord:
        """Create the run, or attach to it; an equal record is success. Key: run id. Creates root lineage and stream state.

        ``accept`` names changed fields; when every change is named, the record becomes a revision (R15).
        Raises: ConfigMismatch (naming every changed field; some are never accepted).
        """
        ...

    def acquire_role(self, role: Role, holder: str, ttl_s: float, supersede: str = "") -> RoleTerm:
        """Take the role with a larger epoch. Key: (role, holder): the current holder gets its own term again.

        ``supersede`` names a holder the caller knows to be dead; its unexpired term is taken over at once.
        Raises: RoleHeld (message says by whom and for how long).
        """
        ...

    def renew_role(self, term: RoleTerm) -> RoleTerm:
        """Extend a held term. Raises Fenced when a newer epoch exists."""
        ...

    def release_role(self, term: RoleTerm) -> None:
        """Give the role up; harmless when already lost."""
        ...

    def cursor(self, stream: str) -> Cursor:
        """Where the stream stands; a fresh stream starts at ordinal 0 with state ``{}``."""
        ...

    def append_groups(
        self, term: RoleTerm, before: Cursor, after: Cursor, groups: Sequence[GroupSpec]
    ) -> Cursor:
        """Insert groups with their slots and move the cursor, in one transaction (R10).

        Key: (stream, before.next_ordinal, digest of content): the same call again answers the same cursor.
        Raises: CursorMoved (the stream stands elsewhere).
        """
        ...

    def feed_demand(self, lookahead_groups: int) -> int:
        """How many further groups the feeder should append so that ``lookahead_groups`` unopened ones wait."""
        ...

    def register_worker(self, incarnation: str, host: str, engine: str, labels_json: str = "{}") -> None:
        """Make the incarnation known. Key: incarnation."""
        ...

    def heartbeat(
        self, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]], wait_s: float = 0.0,
        known_version: int = -1,
    ) -> HeartbeatReply:  # fmt: skip
        """Renew the listed (slot, token) leases; with ``wait_s`` the reply is held until the head differs (R19)."""
        ...

    def lease_slots(
        self, incarnation: str, loaded: PolicyVersion | None, n_max: int, wait_s: float = 0.0, request_id: str = ""
    ) -> LeaseReply:
        """Grant up to ``n_max`` slots under the loaded version, oldest group first, inside the staleness law (R3).

        Key: (incarnation, request_id): a lost reply is answered again with the same grants. Ids that end in a number which
        grows with every call (``ID.N``) also keep a late duplicate from being granted what nobody waits for.
        Raises: StaleWeights (claimed version's digest is not the published one), InvalidRequest (unknown incarnation).
        """
        ...

    def submit_samples(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        """Store finished rollouts; one outcome per item; durable before it returns (P1).

        Key: the submit key (slot, lease token, incarnation, sequence), which the stored sample itself carries.

        Same key and content: ``replayed``. Same key, other content, or filled slot with other content: ``conflict``.
        """
        ...

    def report_failures(self, failures: Sequence[FailureReport]) -> list[SubmitResult]:
        """Record rollouts without a reward; frees the slot for another attempt or writes its verdict. Key: (slot, token)."""
        ...

    def record_tool_call(self, call: ToolCall, lease_token: int) -> ToolCall:
        """Record a call before it runs (response None) or its answer after. Key: (slot, call index).

        Returns what is stored: a recorded answer is returned instead of being run again. Raises Conflict (other request).
        """
        ...

    def tool_calls(self, key: SlotKey) -> list[ToolCall]:
        """Recorded calls of a slot in order of call index."""
        ...

    def plan_step(self, term: RoleTerm, lineage: int, step: int, wait_s: float = 0.0) -> Plan:
        """The plan of ``step``: the stored one, or a new one when enough groups are ready. Key: (lineage, step).

        Raises: NotReady (after ``wait_s``), RunPaused (fixed schedule and a slot cannot be filled; tasks used up).
        """
        ...

    def read_plan(self, lineage: int, step: int) -> Plan:
        """A stored plan with its outcome. Raises NotFound."""
        ...

    def payloads(self, lineage: int, step: int) -> Iterator[SampleData]:
        """Samples of a plan in plan order, digests verified on read (I6). Raises DigestMismatch naming the slot."""
        ...

    def sample(self, key: SlotKey) -> SampleData:
        """One stored sample with its payload, digest verified. Raises UnknownSlot, NotFound (no sample yet)."""
        ...

    def finish_plan(
        self, term: RoleTerm, lineage: int, step: int, outcome: PlanOutcome, reason: str, metrics_json: str
    ) -> None:
        """Write how the step ended (R8), before its version is published. Key: (lineage, step); first outcome stands."""
        ...

    def publish_version(self, term: RoleTerm, version: PolicyVersion) -> PolicyVersion:
        """Announce weights whose bytes are already durable. Key: (lineage, version).

        Raises: ReplayDiverged (another digest is recorded), InvalidRequest (a gap before it).
        """
        ...

    def versions(self, lineage: int) -> list[PolicyVersion]:
        """Published versions in order."""
        ...

    def fork_lineage(
        self, term: RoleTerm, parent: int, fork_step: int, difference: float | None, tolerance: float, keep_orphans: bool = False
    ) -> Lineage:
        """Close ``parent`` and go on from its step ``fork_step`` in a new lineage, under copies of the recorded plans (R7).

        Key: (parent, fork_step). ``difference``: largest relative weight difference found, None where nothing could be
        compared; up to ``tolerance`` unplanned samples of versions behind the fork are kept, beyond it dropped and refilled,
        unless ``keep_orphans``.
        Raises: Conflict (``parent`` forked at another step), InvalidRequest (nothing is recorded behind the step).
        """
        ...

    def commit_checkpoint(self, term: RoleTerm, checkpoint: Checkpoint) -> Checkpoint:
        """Insert the row that makes a checkpoint real. Key: (lineage, step); same manifest digest is success.

        Raises: ChainMismatch (its chain digest is not the ledger's at that step), Conflict.
        """
        ...

    def mark_checkpoint(self, term: RoleTerm, lineage: int, step: int, state: str) -> None:
        """Move a checkpoint to ``corrupt`` or ``deleting``. The newest two committed ones can not become ``deleting``."""
        ...

    def resume_point(self) -> ResumePoint:
        """Newest lineage, its usable checkpoints newest first, last planned step, head version."""
        ...

    def run_status(self) -> dict:
        """The run at a glance, every number from SQL. JSON-able, with these keys:

        ``run_id``, ``revision``, ``lineage``; ``steps``: {configured, planned, trained, skipped, published, checkpoint};
        ``head``: {version, digest} or None; ``slots``: {issued, pending, leased, submitted, planned, applied, verdicts};
        ``forks``: [fields of ``Lineage``]; ``groups``: {issued, opened, planned, refilled}; ``verdicts``: {kind: n};
        ``failures``: {reason: n};
        ``submits``: {accepted, replayed, conflict, fenced, refused}; ``tokens``: {accepted}; ``cursor``: {stream: next_ordinal};
        ``roles``: [{role, epoch, holder, expires_in_s}]; ``workers``: [{incarnation, host, engine, version, beat_age_s, leases}];
        ``rates``: {samples_per_s, tokens_per_s} over the last minute; ``last_step``: newest entry of ``step_metrics`` or None;
        ``draining``: bool; ``failed_attempts``: [{status, sandbox_status, blame, n}]; ``breaker``: {state: open or closed,
        since_s, ratio and window of the newest outcomes in this state, last and last_s (why the newest failed one did, and how
        long ago), and while it is open failed, outcomes}; ``limits``: {lag_versions, silent_s}: the lag's bound, and how long a
        worker may be silent before its leases go back;
        ``quarantines``: [{ordinal, at_s, reason}] of the newest groups taken out, newest first;
        ``members``: {usable, policy_failed, infra_failed} of the planned groups; ``retention``: {enabled, rounds,
        low_watermark, replayable_from, groups, slots, events} of what was let go; all other counts go on counting it;
        ``database``: {oldest_xmin_age, dead_tuples} on PostgreSQL; ``writer``: {commits, operations, waiting, conflicts,
        commit_s (seconds of the slowest transaction of the last ten seconds, the one in hand included)}.
        """
        ...

    def survival(self) -> dict:
        """What dropping does to what is trained: every slot opened by a first lease, counted by bucket. JSON-able:

        ``opened``, ``finished``, ``trained``, ``waiting``, ``dropped``: {kind: n}, a kind of verdict, ``skipped`` (its step was)
        or ``no_reward`` (planned without one);
        ``dimensions``: {length, duration, task, difficulty, version_span: [{bucket, opened, finished, trained, waiting, dropped,
        rewarded, rewarded_sum (of finished samples), reward_sum (of trained ones)}]}, where opened = trained + waiting + dropped
        and each dimension's buckets, ``unknown`` among them, add up to the totals;
        ``failures``: [{status, sandbox_status, blame, attempts, n_tokens}]; ``outcomes``: [{status, sandbox_status, blame,
        samples}] of accepted samples with a blame; ``breaker``: {opened: n, events: newest [{what, at_s, …}]};
        ``unsafe_workers``: how many ran code uncontained.
        """
        ...

    def step_metrics(self, lineage: int, first_step: int = 1) -> list[dict]:
        """Metrics stored with finished plans, one dict per step in order, with ``step`` and ``finished_at_s``."""
        ...

    def audit(self) -> list[Violation]:
        """Run every invariant; an empty list means clean."""
        ...

    def explain(self, key: SlotKey) -> dict:
        """The whole story of one rollout in order, from SQL alone. Raises UnknownSlot."""
        ...

    def quarantine_group(self, ordinal: int, reason: str) -> None:
        """Operator's verdict: every unplanned slot of the group is quarantined (R14). Key: ordinal; repeating is success."""
        ...

    def retry_group(self, ordinal: int, reason: str) -> None:
        """Operator's word that the cause is repaired: slots of the group that are out of attempts get fresh ones (R14)."""
        ...

    def drain(self) -> None:
        """Ask every worker to stop leasing (kept until the server restarts)."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are drawn; the only settings under which a recorded log-prob is the trainer's (algorithms page 3.1)."""

    temperature: float
    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One rollout to generate."""

    key: SlotKey
    prompt_ids: tuple[int, ...]
    """Everything before the first sampled token: in a later turn, the trajectory so far is part of it."""
    seed: int
    max_new_tokens: int | None = None
    """Bound of this request; None is the sampling settings'."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine returns for one request."""

    key: SlotKey
    trajectory: Trajectory
    finish_reason: FinishReason


class Engine(Protocol):
    """A sampler of one policy. Lock-step batches: the whole batch is sampled under the loaded version."""

    def manifest(self) -> dict[str, object]:
        """Every setting that changes numbers, with engine and library versions; JSON-able, stored with the run (P12)."""
        ...

    def load(self, weights_dir: str, version: int) -> str:
        """Load weights and return the digest recomputed from the tensors handed to the loader (P11, R18)."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        """Sample every request; result order = request order. Each token carries the loaded version."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob (T = 1, natural log) of each token after the first, given its prefix: length n - 1. Used by the probe."""
        ...

    def close(self) -> None: ...


class Reward(Protocol):
    """A reward function, named ``module:attribute`` in the configuration."""

    def __call__(self, completion: str, task: dict) -> RewardResult | float: ...
