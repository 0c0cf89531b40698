"""The words for how things stand and how they ended, as Python, proto, metrics and SQL spell them.

Owns the enumerations, and the reasons that more than one layer has to recognise. Never holds a record (``records`` does, through
which everybody imports these words). Upholds P6: of a reward's statuses only ``given`` has a value.
"""

from __future__ import annotations

from enum import StrEnum

WORKER_DIED = "its worker process died"
"""Reason that others report for a worker that ended with slots in its hands."""
ENGINE_FAILED = "engine: "
"""Begins the reason of a worker that ends because its engine raised."""


class Role(StrEnum):
    """Roles of the service; the same words in metrics, proto and SQL. Fenced: ledger, learner, feeder."""

    LEDGER = "ledger"
    WORKER = "worker"
    LEARNER = "learner"
    FEEDER = "feeder"
    SUPERVISOR = "supervisor"


class ScheduleKind(StrEnum):
    """``bounded``: newest loaded version, lag at most the bound. ``fixed``: step s samples under version s - 1 - lag."""

    BOUNDED = "bounded"
    FIXED = "fixed"


class FinishReason(StrEnum):
    """Why generation of a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    """It called tools as often as it may."""


class SandboxStatus(StrEnum):
    """What happened to model-written code or tools; ``not_used`` where the task needs none.

    The ``infra_*`` ones and ``cancelled`` say nothing about the program: spawn (no sandbox could be made), setup (it failed
    before the program began), lost (the sandbox or its owner vanished), overload (no free slot in time).
    """

    NOT_USED = "not_used"
    OK = "ok"
    RUNTIME_ERROR = "runtime_error"
    SYNTAX_ERROR = "syntax_error"
    TIMEOUT_CPU = "timeout_cpu"
    TIMEOUT_WALL = "timeout_wall"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    EARLY_EXIT = "early_exit"
    """It ended itself before it had answered what was asked."""
    CRASHED = "crashed"
    """Ended by a signal that no limit sent."""
    INVALID_RESULT = "invalid_result"
    """Its answer is not what the protocol allows: no JSON, too deep, too large."""
    NO_CODE = "no_code"
    """The completion holds no program."""
    INFRA_SPAWN = "infra_spawn"
    INFRA_SETUP = "infra_setup"
    INFRA_LOST = "infra_lost"
    INFRA_OVERLOAD = "infra_overload"
    CANCELLED = "cancelled"


class RewardStatus(StrEnum):
    """``given`` is the only status with a reward value (P6)."""

    GIVEN = "given"
    NO_VERDICT = "no_verdict"
    VERIFIER_ERROR = "verifier_error"
    INFRA_ERROR = "infra_error"
    TIMEOUT = "timeout"
    """The environment did not answer in its time."""


class Blame(StrEnum):
    """Whose failure it was."""

    MODEL = "model"
    INFRA = "infra"
    UNCLEAR = "unclear"


class SubmitOutcome(StrEnum):
    """Answer for one submitted sample. ``accepted`` and ``replayed`` mean it is durable; the others changed nothing."""

    ACCEPTED = "accepted"
    REPLAYED = "replayed"
    CONFLICT = "conflict"
    FENCED = "fenced"
    REFUSED = "refused"
    INVALID = "invalid"


class VerdictKind(StrEnum):
    """Terminal side exits of a slot; each verdict carries a reason."""

    DROPPED_STALE = "dropped_stale"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    ORPHAN_VERSION = "orphan_version"


class PlanOutcome(StrEnum):
    """How a planned step ended (R8); written before its version is published and obeyed by replay."""

    TRAINED = "trained"
    SKIPPED = "skipped"


class ForkVerdict(StrEnum):
    """What a fork says of samples of versions behind it (R7): ``within`` tolerance they are kept, beyond it ``dropped``, or
    ``kept`` by configuration under the longer lag."""

    WITHIN = "within"
    KEPT = "kept"
    DROPPED = "dropped"


class CheckpointState(StrEnum):
    """State of a checkpoint row; ``committed`` is the only loadable one."""

    COMMITTED = "committed"
    DELETING = "deleting"
    CORRUPT = "corrupt"
