"""Tables of the ledger, once for SQLite and PostgreSQL.

Owns columns, keys, CHECKs and indexes. Never executes anything. Every primary key begins with ``run_id``, then
(ordinal, sibling) where a slot is meant (R1); the primary key of ``sample`` is P2, the one of ``plan_item`` is P3.
Rows are inserted and never changed, except in ``lease``, ``fence``, ``cursor``, ``worker``, ``retention``, the answer columns
of ``tool_call``, the state of an ``expired_range`` and ``checkpoint`` (state, and the files of a damaged one). The accepted
sample is its own submit receipt: it holds (lease_token, incarnation, sequence), the parts of the submit key. Times are integer
microseconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    text,
)

from rollbook.core.records import (
    Blame,
    CheckpointState,
    FinishReason,
    ForkVerdict,
    PlanOutcome,
    RewardStatus,
    Role,
    SandboxStatus,
    VerdictKind,
)
from rollbook.ledger.columns import PARTITIONED, metadata
from rollbook.ledger.columns import among as _among
from rollbook.ledger.columns import int_column as _int
from rollbook.ledger.columns import slot_columns as _slot
from rollbook.ledger.columns import table as _table
from rollbook.ledger.columns import text_column as _text

__all__ = ["PARTITIONED", "metadata"]

run = _table(
    "run",
    _text("config_digest"),
    _text("config_json"),
    _text("rules_json"),
    _text("manifest_json"),
    _int("opened_at_us"),
    key=(),
)

config_revision = _table(
    "config_revision",
    Column("revision", Integer, nullable=False),
    _text("config_digest"),
    _text("config_json"),
    _text("rules_json"),
    Column("max_lag_versions", Integer, nullable=False),
    Column("from_step", Integer, nullable=False),
    _int("accepted_at_us"),
    CheckConstraint("revision >= 0 AND from_step >= 1 AND max_lag_versions >= 0", name="ranges"),
    ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_config_revision_run"),
    key=("revision",),
)

retention = _table(
    "retention",
    _int("low_watermark"),
    Column("replayable_from", Integer, nullable=False),
    _text("totals_json"),
    _int("moved_at_us"),
    CheckConstraint("low_watermark >= 0 AND replayable_from >= 1", name="ranges"),
    ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_retention_run"),
    key=(),
)
"""One row for a run whose rows expire: groups below ``low_watermark`` are gone or going, and with them every step before
``replayable_from``. ``totals_json`` holds what was counted in them."""

expired_range = _table(
    "expired_range",
    _int("first_ordinal"),
    _int("end_ordinal"),
    Column("checkpoint_step", Integer, nullable=False),
    Column("last_step", Integer, nullable=False),
    _int("n_groups"),
    _int("n_closed"),
    _int("n_refills"),
    _int("n_slots"),
    _int("n_samples"),
    _int("n_applied"),
    _int("n_verdicts"),
    _int("n_tokens"),
    Column("state", String(20), nullable=False),
    _int("expired_at_us"),
    CheckConstraint("first_ordinal >= 0 AND first_ordinal < end_ordinal", name="ranges"),
    CheckConstraint("n_groups = end_ordinal - first_ordinal", name="whole"),
    CheckConstraint("last_step <= checkpoint_step", name="behind_checkpoint"),
    CheckConstraint("state IN ('deleting', 'gone')", name="state"),
    ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_expired_range_run"),
    key=("first_ordinal",),
)
"""What a range of groups held when it was let go, under which checkpoint; the ranges are gapless from 0."""

lineage = _table(
    "lineage",
    Column("lineage", Integer, nullable=False),
    Column("parent", Integer),
    Column("fork_step", Integer),
    _int("created_at_us"),
    Column("verdict", String(20)),
    Column("difference", Double),
    Column("tolerance", Double),
    _int("orphans_kept", nullable=True),
    _int("orphans_dropped", nullable=True),
    _int("epoch", nullable=True),
    CheckConstraint("(parent IS NULL) = (fork_step IS NULL)", name="fork_has_parent"),
    CheckConstraint("parent IS NULL OR parent < lineage", name="parent_is_older"),
    CheckConstraint("(parent IS NULL) = (verdict IS NULL)", name="fork_has_verdict"),
    CheckConstraint(_among("verdict", ForkVerdict), name="verdict"),
    ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_lineage_run"),
    key=("lineage",),
)

fence = _table(
    "fence",
    Column("role", String(20), nullable=False),
    _int("epoch"),
    _text("holder"),
    _int("ttl_us"),
    _int("renewed_at_us"),
    _int("expires_at_us"),
    CheckConstraint(_among("role", (Role.LEDGER, Role.LEARNER, Role.FEEDER)), name="role_is_fenced"),
    CheckConstraint("epoch >= 1 AND ttl_us > 0", name="ranges"),
    key=("role",),
    small=True,
)

cursor = _table(
    "cursor",
    Column("stream", String(200), nullable=False),
    _int("next_ordinal"),
    _text("state_json"),
    Column("exhausted", Boolean(create_constraint=False), nullable=False),
    _int("moved_at_us"),
    CheckConstraint("next_ordinal >= 0", name="ranges"),
    key=("stream",),
)

append_receipt = _table(
    "append_receipt",
    Column("stream", String(200), nullable=False),
    _int("next_ordinal"),
    Column("request_digest", String(64), nullable=False),
    _int("after_next_ordinal"),
    _text("after_state_json"),
    Column("after_exhausted", Boolean(create_constraint=False), nullable=False),
    _int("appended_at_us"),
    CheckConstraint("after_next_ordinal >= next_ordinal", name="moves_forward"),
    key=("stream", "next_ordinal", "request_digest"),
)

prompt_group = _table(
    "prompt_group",
    _int("ordinal"),
    Column("stream", String(200), nullable=False),
    Column("n_siblings", Integer, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    _text("task_json"),
    _int("refills", nullable=True),
    _int("issued_at_us"),
    CheckConstraint("ordinal >= 0 AND n_siblings >= 1", name="ranges"),
    CheckConstraint("refills IS NULL OR (refills >= 0 AND refills < ordinal)", name="refills_is_older"),
    Index(
        "ix_prompt_group_refills",
        "run_id",
        "refills",
        sqlite_where=text("refills IS NOT NULL"),
        postgresql_where=text("refills IS NOT NULL"),
    ),  # fmt: skip
    key=("ordinal",),
)

slot = _table(
    "slot",
    *_slot(),
    _int("seed"),
    CheckConstraint("ordinal >= 0 AND sibling >= 0", name="ranges"),
    Column("traceparent", String(55)),
    key=("ordinal", "sibling"),
    small=True,
)

worker = _table(
    "worker",
    Column("incarnation", String(200), nullable=False),
    _text("host"),
    _text("engine"),
    _text("labels_json"),
    _int("registered_at_us"),
    _int("seen_at_us"),
    Column("loaded_lineage", Integer),
    Column("loaded_version", Integer),
    key=("incarnation",),
)

lease = _table(
    "lease",
    *_slot(),
    _int("token"),
    Column("attempt", Integer, nullable=False),
    Column("incarnation", String(200)),
    Column("lineage", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    _int("granted_at_us"),
    _int("expires_at_us"),
    _int("extended_us"),
    CheckConstraint("token >= 1 AND attempt >= 0 AND extended_us >= 0", name="ranges"),
    ForeignKeyConstraint(
        ["run_id", "incarnation"], ["worker.run_id", "worker.incarnation"], name="fk_lease_worker", ondelete="RESTRICT"
    ),
    key=("ordinal", "sibling"),
    small=True,
)
"""A row lives from a slot's first grant until its sample or verdict; ``incarnation`` is NULL while nobody holds it."""

lease_receipt = _table(
    "lease_receipt",
    Column("incarnation", String(200), nullable=False),
    Column("request_id", String(200), nullable=False),
    _text("grants_json"),
    _int("granted_at_us"),
    key=("incarnation", "request_id"),
)

sample = _table(
    "sample",
    *_slot(),
    Column("lineage", Integer, nullable=False),
    _int("lease_token"),
    Column("attempt", Integer, nullable=False),
    Column("incarnation", String(200), nullable=False),
    _int("sequence"),
    Column("payload_digest", String(64), nullable=False),
    Column("version_min", Integer, nullable=False),
    Column("version_max", Integer, nullable=False),
    Column("n_tokens", Integer, nullable=False),
    Column("reward", Double),
    Column("reward_status", String(20), nullable=False),
    Column("sandbox_status", String(20), nullable=False),
    Column("finish_reason", String(20), nullable=False),
    Column("generate_s", Double, nullable=False),
    Column("verify_s", Double, nullable=False),
    Column("salvaged", Boolean(create_constraint=False), nullable=False),
    _int("accepted_at_us"),
    Column("blame", String(20)),
    CheckConstraint("(reward IS NULL) = (reward_status <> 'given')", name="reward_only_when_given"),
    CheckConstraint("n_tokens > 0", name="has_tokens"),
    CheckConstraint("version_min >= 0 AND version_min <= version_max", name="versions_in_order"),
    CheckConstraint("lease_token >= 1", name="was_leased"),
    CheckConstraint(_among("reward_status", RewardStatus), name="reward_status"),
    CheckConstraint(_among("sandbox_status", SandboxStatus), name="sandbox_status"),
    CheckConstraint(_among("finish_reason", FinishReason), name="finish_reason"),
    CheckConstraint(_among("blame", Blame), name="blame"),
    key=("ordinal", "sibling"),
    small=True,
)

payload = _table(
    "payload",
    *_slot(),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("loss_mask", LargeBinary, nullable=False),
    _text("evidence_json"),
    CheckConstraint("length(token_ids) > 0 AND length(token_ids) = length(logprobs)", name="equal_lengths"),
    CheckConstraint("length(versions) = 4 OR length(versions) = length(token_ids)", name="versions_length"),
    key=("ordinal", "sibling"),
)
"""``versions`` holds one int32 when every token has the same version, else one per token."""

failure = _table(
    "failure",
    *_slot(),
    _int("lease_token"),
    Column("attempt", Integer, nullable=False),
    Column("incarnation", String(200), nullable=False),
    Column("status", String(20), nullable=False),
    Column("sandbox_status", String(20), nullable=False),
    Column("blame", String(20), nullable=False),
    _text("reason"),
    Column("n_tokens", Integer, nullable=False),
    Column("generate_s", Double, nullable=False),
    Column("verify_s", Double, nullable=False),
    _text("evidence_json"),
    Column("final", Boolean(create_constraint=False), nullable=False),
    _int("reported_at_us"),
    CheckConstraint("lease_token >= 1 AND attempt >= 0 AND n_tokens >= 0", name="ranges"),
    CheckConstraint("status <> 'given'", name="has_no_reward"),
    CheckConstraint(_among("status", RewardStatus), name="status"),
    CheckConstraint(_among("sandbox_status", SandboxStatus), name="sandbox_status"),
    CheckConstraint(_among("blame", Blame), name="blame"),
    Index("ix_failure_reported", "run_id", "reported_at_us"),
    key=("ordinal", "sibling", "lease_token"),
)
"""One attempt at a slot that gave no sample: reported by its worker, or expired with its lease."""

verdict = _table(
    "verdict",
    *_slot(),
    Column("kind", String(20), nullable=False),
    _text("reason"),
    Column("n_tokens", Integer),
    Column("generate_s", Double),
    _int("decided_at_us"),
    CheckConstraint(_among("kind", VerdictKind), name="kind"),
    CheckConstraint("length(reason) > 0", name="has_reason"),
    key=("ordinal", "sibling"),
    small=True,
)

plan = _table(
    "plan",
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("n_groups", Integer, nullable=False),
    Column("n_items", Integer, nullable=False),
    Column("items_digest", String(64), nullable=False),
    Column("chain_digest", String(64), nullable=False),
    _int("epoch"),
    _int("planned_at_us"),
    CheckConstraint("step >= 1 AND base_version = step - 1", name="trains_from_the_version_before"),
    CheckConstraint("n_items >= n_groups AND n_groups >= 0", name="ranges"),
    ForeignKeyConstraint(
        ["run_id", "revision"], ["config_revision.run_id", "config_revision.revision"], name="fk_plan_config_revision"
    ),
    key=("lineage", "step"),
)

plan_item = _table(
    "plan_item",
    Column("lineage", Integer, nullable=False),
    *_slot(),
    Column("step", Integer, nullable=False),
    Column("pos", Integer, nullable=False),
    Column("payload_digest", String(64), nullable=False),
    Column("reward", Double),
    Column("valid", Boolean(create_constraint=False), nullable=False),
    CheckConstraint("step >= 1 AND pos >= 0", name="ranges"),
    CheckConstraint("valid = (reward IS NOT NULL)", name="valid_has_reward"),
    Index("ix_plan_item_step", "run_id", "lineage", "step", "pos"),
    key=("lineage", "ordinal", "sibling"),
    small=True,
)

plan_outcome = _table(
    "plan_outcome",
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("outcome", String(20), nullable=False),
    _text("reason"),
    _text("metrics_json"),
    _int("epoch"),
    _int("finished_at_us"),
    CheckConstraint(_among("outcome", PlanOutcome), name="outcome"),
    CheckConstraint("outcome <> 'skipped' OR length(reason) > 0", name="skipped_has_reason"),
    ForeignKeyConstraint(
        ["run_id", "lineage", "step"], ["plan.run_id", "plan.lineage", "plan.step"], name="fk_plan_outcome_plan"
    ),
    key=("lineage", "step"),
)

policy_version = _table(
    "policy_version",
    Column("lineage", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", String(200), nullable=False),
    _text("path"),
    _text("probe_json"),
    _int("n_bytes"),
    _int("epoch"),
    _int("published_at_us"),
    CheckConstraint("version >= 0 AND length(digest) > 0 AND n_bytes >= 0", name="ranges"),
    key=("lineage", "version"),
)

checkpoint = _table(
    "checkpoint",
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    _text("dir_name"),
    Column("manifest_digest", String(200), nullable=False),
    Column("chain_digest", String(64), nullable=False),
    Column("state", String(20), nullable=False),
    _int("epoch"),
    _int("committed_at_us"),
    CheckConstraint("step >= 0", name="ranges"),
    CheckConstraint(_among("state", CheckpointState), name="state"),
    key=("lineage", "step"),
)

tool_call = _table(
    "tool_call",
    *_slot(),
    Column("call_index", Integer, nullable=False),
    Column("request_digest", String(200), nullable=False),
    _int("lease_token"),
    _text("tool"),
    _text("request_json"),
    _text("response_json", nullable=True),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("loss_mask", LargeBinary, nullable=False),
    _int("requested_at_us"),
    _int("answered_at_us", nullable=True),
    CheckConstraint("call_index >= 0", name="ranges"),
    CheckConstraint("(response_json IS NULL) = (answered_at_us IS NULL)", name="answered_when_answered"),
    key=("ordinal", "sibling", "call_index"),
)

event = _table(
    "event",
    _int("seq"),
    Column("kind", String(40), nullable=False),
    _int("ordinal", nullable=True),
    Column("sibling", Integer),
    _int("token", nullable=True),
    Column("incarnation", String(200)),
    _text("detail_json"),
    _int("at_us"),
    Index("ix_event_slot", "run_id", "ordinal", "sibling"),
    Index("ix_event_kind", "run_id", "kind"),
    key=("seq",),
)
