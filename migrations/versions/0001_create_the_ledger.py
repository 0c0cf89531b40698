"""Create the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "append_receipt",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("stream", sa.String(length=200), nullable=False),
        sa.Column("next_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("after_next_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("after_state_json", sa.Text(), nullable=False),
        sa.Column("after_exhausted", sa.Boolean(), nullable=False),
        sa.Column("appended_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("after_next_ordinal >= next_ordinal", name=op.f("ck_append_receipt_moves_forward")),
        sa.PrimaryKeyConstraint("run_id", "stream", "next_ordinal", "request_digest", name=op.f("pk_append_receipt")),
    )
    op.create_table(
        "checkpoint",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("dir_name", sa.Text(), nullable=False),
        sa.Column("manifest_digest", sa.String(length=200), nullable=False),
        sa.Column("chain_digest", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("committed_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('committed', 'deleting', 'corrupt')", name=op.f("ck_checkpoint_state")),
        sa.CheckConstraint("step >= 0", name=op.f("ck_checkpoint_ranges")),
        sa.PrimaryKeyConstraint("run_id", "lineage", "step", name=op.f("pk_checkpoint")),
    )
    op.create_table(
        "cursor",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("stream", sa.String(length=200), nullable=False),
        sa.Column("next_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("state_json", sa.Text(), nullable=False),
        sa.Column("exhausted", sa.Boolean(), nullable=False),
        sa.Column("moved_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("next_ordinal >= 0", name=op.f("ck_cursor_ranges")),
        sa.PrimaryKeyConstraint("run_id", "stream", name=op.f("pk_cursor")),
    )
    op.create_table(
        "event",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=True),
        sa.Column("sibling", sa.Integer(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=True),
        sa.Column("incarnation", sa.String(length=200), nullable=True),
        sa.Column("detail_json", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_event")),
    )
    op.create_index("ix_event_kind", "event", ["run_id", "kind"], unique=False)
    op.create_index("ix_event_slot", "event", ["run_id", "ordinal", "sibling"], unique=False)
    op.create_table(
        "fence",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("ttl_us", sa.BigInteger(), nullable=False),
        sa.Column("renewed_at_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("role IN ('ledger', 'learner', 'feeder')", name=op.f("ck_fence_role_is_fenced")),
        sa.CheckConstraint("epoch >= 1 AND ttl_us > 0", name=op.f("ck_fence_ranges")),
        sa.PrimaryKeyConstraint("run_id", "role", name=op.f("pk_fence")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "lease_receipt",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("incarnation", sa.String(length=200), nullable=False),
        sa.Column("request_id", sa.String(length=200), nullable=False),
        sa.Column("grants_json", sa.Text(), nullable=False),
        sa.Column("granted_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "request_id", name=op.f("pk_lease_receipt")),
    )
    op.create_table(
        "payload",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("versions", sa.LargeBinary(), nullable=False),
        sa.Column("loss_mask", sa.LargeBinary(), nullable=False),
        sa.Column("evidence_json", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "length(token_ids) > 0 AND length(token_ids) = length(logprobs)", name=op.f("ck_payload_equal_lengths")
        ),
        sa.CheckConstraint(
            "length(versions) = 4 OR length(versions) = length(token_ids)", name=op.f("ck_payload_versions_length")
        ),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_payload")),
        postgresql_partition_by="RANGE (ordinal)",
    )
    op.create_table(
        "plan_item",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("pos", sa.Integer(), nullable=False),
        sa.Column("payload_digest", sa.String(length=64), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("valid", sa.Boolean(), nullable=False),
        sa.CheckConstraint("step >= 1 AND pos >= 0", name=op.f("ck_plan_item_ranges")),
        sa.CheckConstraint("valid = (reward IS NOT NULL)", name=op.f("ck_plan_item_valid_has_reward")),
        sa.PrimaryKeyConstraint("run_id", "lineage", "ordinal", "sibling", name=op.f("pk_plan_item")),
        postgresql_partition_by="RANGE (ordinal)",
        sqlite_with_rowid=False,
    )
    op.create_index("ix_plan_item_step", "plan_item", ["run_id", "lineage", "step", "pos"], unique=False)
    op.create_table(
        "policy_version",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("probe_json", sa.Text(), nullable=False),
        sa.Column("n_bytes", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("published_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("version >= 0 AND length(digest) > 0 AND n_bytes >= 0", name=op.f("ck_policy_version_ranges")),
        sa.PrimaryKeyConstraint("run_id", "lineage", "version", name=op.f("pk_policy_version")),
    )
    op.create_table(
        "prompt_group",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("stream", sa.String(length=200), nullable=False),
        sa.Column("n_siblings", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("task_json", sa.Text(), nullable=False),
        sa.Column("refills", sa.BigInteger(), nullable=True),
        sa.Column("issued_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("ordinal >= 0 AND n_siblings >= 1", name=op.f("ck_prompt_group_ranges")),
        sa.CheckConstraint(
            "refills IS NULL OR (refills >= 0 AND refills < ordinal)", name=op.f("ck_prompt_group_refills_is_older")
        ),
        sa.PrimaryKeyConstraint("run_id", "ordinal", name=op.f("pk_prompt_group")),
        postgresql_partition_by="RANGE (ordinal)",
    )
    op.create_index(
        "ix_prompt_group_refills",
        "prompt_group",
        ["run_id", "refills"],
        unique=False,
        sqlite_where=sa.text("refills IS NOT NULL"),
        postgresql_where=sa.text("refills IS NOT NULL"),
    )
    op.create_table(
        "run",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("config_digest", sa.Text(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("rules_json", sa.Text(), nullable=False),
        sa.Column("manifest_json", sa.Text(), nullable=False),
        sa.Column("opened_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run")),
    )
    op.create_table(
        "sample",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.String(length=200), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("payload_digest", sa.String(length=64), nullable=False),
        sa.Column("version_min", sa.Integer(), nullable=False),
        sa.Column("version_max", sa.Integer(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reward_status", sa.String(length=20), nullable=False),
        sa.Column("sandbox_status", sa.String(length=20), nullable=False),
        sa.Column("finish_reason", sa.String(length=20), nullable=False),
        sa.Column("generate_s", sa.Double(), nullable=False),
        sa.Column("verify_s", sa.Double(), nullable=False),
        sa.Column("salvaged", sa.Boolean(), nullable=False),
        sa.Column("accepted_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(reward IS NULL) = (reward_status <> 'given')", name=op.f("ck_sample_reward_only_when_given")),
        sa.CheckConstraint("finish_reason IN ('stop', 'length')", name=op.f("ck_sample_finish_reason")),
        sa.CheckConstraint(
            "reward_status IN ('given', 'no_verdict', 'verifier_error', 'infra_error')", name=op.f("ck_sample_reward_status")
        ),
        sa.CheckConstraint(
            "sandbox_status IN ('not_used', 'ok', 'program_error', 'timeout', 'infra_error')",
            name=op.f("ck_sample_sandbox_status"),
        ),
        sa.CheckConstraint("lease_token >= 1", name=op.f("ck_sample_was_leased")),
        sa.CheckConstraint("n_tokens > 0", name=op.f("ck_sample_has_tokens")),
        sa.CheckConstraint("version_min >= 0 AND version_min <= version_max", name=op.f("ck_sample_versions_in_order")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_sample")),
        postgresql_partition_by="RANGE (ordinal)",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "slot",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("ordinal >= 0 AND sibling >= 0", name=op.f("ck_slot_ranges")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_slot")),
        postgresql_partition_by="RANGE (ordinal)",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tool_call",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("request_digest", sa.String(length=200), nullable=False),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("request_json", sa.Text(), nullable=False),
        sa.Column("response_json", sa.Text(), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("versions", sa.LargeBinary(), nullable=False),
        sa.Column("loss_mask", sa.LargeBinary(), nullable=False),
        sa.Column("requested_at_us", sa.BigInteger(), nullable=False),
        sa.Column("answered_at_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(response_json IS NULL) = (answered_at_us IS NULL)", name=op.f("ck_tool_call_answered_when_answered")
        ),
        sa.CheckConstraint("call_index >= 0", name=op.f("ck_tool_call_ranges")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", "call_index", name=op.f("pk_tool_call")),
    )
    op.create_table(
        "verdict",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=True),
        sa.Column("generate_s", sa.Double(), nullable=True),
        sa.Column("decided_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('dropped_stale', 'failed', 'cancelled', 'quarantined', 'orphan_version')", name=op.f("ck_verdict_kind")
        ),
        sa.CheckConstraint("length(reason) > 0", name=op.f("ck_verdict_has_reason")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_verdict")),
        postgresql_partition_by="RANGE (ordinal)",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "worker",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("incarnation", sa.String(length=200), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("labels_json", sa.Text(), nullable=False),
        sa.Column("registered_at_us", sa.BigInteger(), nullable=False),
        sa.Column("seen_at_us", sa.BigInteger(), nullable=False),
        sa.Column("loaded_lineage", sa.Integer(), nullable=True),
        sa.Column("loaded_version", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "incarnation", name=op.f("pk_worker")),
    )
    op.create_table(
        "config_revision",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("config_digest", sa.Text(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("rules_json", sa.Text(), nullable=False),
        sa.Column("max_lag_versions", sa.Integer(), nullable=False),
        sa.Column("from_step", sa.Integer(), nullable=False),
        sa.Column("accepted_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("revision >= 0 AND from_step >= 1 AND max_lag_versions >= 0", name=op.f("ck_config_revision_ranges")),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_config_revision_run"),
        sa.PrimaryKeyConstraint("run_id", "revision", name=op.f("pk_config_revision")),
    )
    op.create_table(
        "lease",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.String(length=200), nullable=True),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("granted_at_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_us", sa.BigInteger(), nullable=False),
        sa.Column("extended_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("token >= 1 AND attempt >= 0 AND extended_us >= 0", name=op.f("ck_lease_ranges")),
        sa.ForeignKeyConstraint(
            ["run_id", "incarnation"], ["worker.run_id", "worker.incarnation"], name="fk_lease_worker", ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_lease")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "lineage",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("fork_step", sa.Integer(), nullable=True),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(parent IS NULL) = (fork_step IS NULL)", name=op.f("ck_lineage_fork_has_parent")),
        sa.CheckConstraint("parent IS NULL OR parent < lineage", name=op.f("ck_lineage_parent_is_older")),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_lineage_run"),
        sa.PrimaryKeyConstraint("run_id", "lineage", name=op.f("pk_lineage")),
    )
    op.create_table(
        "plan",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("n_groups", sa.Integer(), nullable=False),
        sa.Column("n_items", sa.Integer(), nullable=False),
        sa.Column("items_digest", sa.String(length=64), nullable=False),
        sa.Column("chain_digest", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("planned_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("n_items >= n_groups AND n_groups >= 0", name=op.f("ck_plan_ranges")),
        sa.CheckConstraint("step >= 1 AND base_version = step - 1", name=op.f("ck_plan_trains_from_the_version_before")),
        sa.ForeignKeyConstraint(
            ["run_id", "revision"], ["config_revision.run_id", "config_revision.revision"], name="fk_plan_config_revision"
        ),
        sa.PrimaryKeyConstraint("run_id", "lineage", "step", name=op.f("pk_plan")),
    )
    op.create_table(
        "plan_outcome",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("lineage", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("finished_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("outcome <> 'skipped' OR length(reason) > 0", name=op.f("ck_plan_outcome_skipped_has_reason")),
        sa.CheckConstraint("outcome IN ('trained', 'skipped')", name=op.f("ck_plan_outcome_outcome")),
        sa.ForeignKeyConstraint(
            ["run_id", "lineage", "step"], ["plan.run_id", "plan.lineage", "plan.step"], name="fk_plan_outcome_plan"
        ),
        sa.PrimaryKeyConstraint("run_id", "lineage", "step", name=op.f("pk_plan_outcome")),
    )


def downgrade() -> None:
    op.drop_table("plan_outcome")
    op.drop_table("plan")
    op.drop_table("lineage")
    op.drop_table("lease")
    op.drop_table("config_revision")
    op.drop_table("worker")
    op.drop_table("verdict")
    op.drop_table("tool_call")
    op.drop_table("slot")
    op.drop_table("sample")
    op.drop_table("run")
    op.drop_index(
        "ix_prompt_group_refills",
        table_name="prompt_group",
        sqlite_where=sa.text("refills IS NOT NULL"),
        postgresql_where=sa.text("refills IS NOT NULL"),
    )
    op.drop_table("prompt_group")
    op.drop_table("policy_version")
    op.drop_index("ix_plan_item_step", table_name="plan_item")
    op.drop_table("plan_item")
    op.drop_table("payload")
    op.drop_table("lease_receipt")
    op.drop_table("fence")
    op.drop_index("ix_event_slot", table_name="event")
    op.drop_index("ix_event_kind", table_name="event")
    op.drop_table("event")
    op.drop_table("cursor")
    op.drop_table("checkpoint")
    op.drop_table("append_receipt")
