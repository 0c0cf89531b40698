"""Tell failures apart: a row per failed attempt with its statuses and whose failure it was, and more statuses of samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

REWARD = "'given', 'no_verdict', 'verifier_error', 'infra_error', 'timeout'"
SANDBOX = (
    "'not_used', 'ok', 'runtime_error', 'syntax_error', 'timeout_cpu', 'timeout_wall', 'oom', 'output_limit', 'disk_limit', "
    "'process_limit', 'early_exit', 'crashed', 'invalid_result', 'no_code', 'infra_spawn', 'infra_setup', 'infra_lost', "
    "'infra_overload', 'cancelled'"
)
BLAME = "'model', 'infra', 'unclear'"
CHECKS = {
    "finish_reason": "finish_reason IN ('stop', 'length', 'turns')",
    "reward_status": f"reward_status IN ({REWARD})",
    "sandbox_status": f"sandbox_status IN ({SANDBOX})",
}


def upgrade() -> None:
    op.create_table(
        "failure",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("sibling", sa.Integer(), nullable=False),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.String(length=200), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("sandbox_status", sa.String(length=20), nullable=False),
        sa.Column("blame", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("generate_s", sa.Double(), nullable=False),
        sa.Column("verify_s", sa.Double(), nullable=False),
        sa.Column("evidence_json", sa.Text(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("reported_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("lease_token >= 1 AND attempt >= 0 AND n_tokens >= 0", name=op.f("ck_failure_ranges")),
        sa.CheckConstraint("status <> 'given'", name=op.f("ck_failure_has_no_reward")),
        sa.CheckConstraint(f"status IN ({REWARD})", name=op.f("ck_failure_status")),
        sa.CheckConstraint(f"sandbox_status IN ({SANDBOX})", name=op.f("ck_failure_sandbox_status")),
        sa.CheckConstraint(f"blame IN ({BLAME})", name=op.f("ck_failure_blame")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", "lease_token", name=op.f("pk_failure")),
    )
    op.create_index("ix_failure_reported", "failure", ["run_id", "reported_at_us"])
    if op.get_bind().dialect.name == "sqlite":
        _rebuild_sample()
        return
    op.add_column("sample", sa.Column("blame", sa.String(length=20), nullable=True))
    op.create_check_constraint(op.f("ck_sample_blame"), "sample", f"blame IN ({BLAME})")
    for name, check in CHECKS.items():
        op.drop_constraint(op.f(f"ck_sample_{name}"), "sample", type_="check")
        op.create_check_constraint(op.f(f"ck_sample_{name}"), "sample", check)


def _rebuild_sample() -> None:
    """SQLite cannot change a CHECK: the rows move to a new table under the old name. Payloads, the bulk, stay where they are."""
    columns = [
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
    ]
    names = ", ".join(column.name for column in columns)
    op.rename_table("sample", "sample_before")
    op.create_table(
        "sample",
        *columns,
        sa.Column("blame", sa.String(length=20), nullable=True),
        sa.CheckConstraint("(reward IS NULL) = (reward_status <> 'given')", name=op.f("ck_sample_reward_only_when_given")),
        *(sa.CheckConstraint(check, name=op.f(f"ck_sample_{name}")) for name, check in CHECKS.items()),
        sa.CheckConstraint(f"blame IN ({BLAME})", name=op.f("ck_sample_blame")),
        sa.CheckConstraint("lease_token >= 1", name=op.f("ck_sample_was_leased")),
        sa.CheckConstraint("n_tokens > 0", name=op.f("ck_sample_has_tokens")),
        sa.CheckConstraint("version_min >= 0 AND version_min <= version_max", name=op.f("ck_sample_versions_in_order")),
        sa.PrimaryKeyConstraint("run_id", "ordinal", "sibling", name=op.f("pk_sample")),
        sqlite_with_rowid=False,
    )
    op.execute(f"INSERT INTO sample ({names}) SELECT {names} FROM sample_before")
    op.drop_table("sample_before")
