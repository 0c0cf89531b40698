"""Let old rows go: how far back a run's rows are kept, and what was counted in every range of groups that was let go."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retention",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("low_watermark", sa.BigInteger(), nullable=False),
        sa.Column("replayable_from", sa.Integer(), nullable=False),
        sa.Column("totals_json", sa.Text(), nullable=False),
        sa.Column("moved_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("low_watermark >= 0 AND replayable_from >= 1", name=op.f("ck_retention_ranges")),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_retention_run"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_retention")),
    )
    counts = ("n_groups", "n_closed", "n_refills", "n_slots", "n_samples", "n_applied", "n_verdicts", "n_tokens")
    op.create_table(
        "expired_range",
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("first_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("end_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in counts),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("expired_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("first_ordinal >= 0 AND first_ordinal < end_ordinal", name=op.f("ck_expired_range_ranges")),
        sa.CheckConstraint("n_groups = end_ordinal - first_ordinal", name=op.f("ck_expired_range_whole")),
        sa.CheckConstraint("last_step <= checkpoint_step", name=op.f("ck_expired_range_behind_checkpoint")),
        sa.CheckConstraint("state IN ('deleting', 'gone')", name=op.f("ck_expired_range_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_expired_range_run"),
        sa.PrimaryKeyConstraint("run_id", "first_ordinal", name=op.f("pk_expired_range")),
    )


def downgrade() -> None:
    """Raises RuntimeError where rows are gone: an older release would take the run for damaged."""
    if op.get_bind().execute(sa.text("SELECT count(*) FROM expired_range")).scalar_one():
        raise RuntimeError("rows of this ledger have been expired; an older release cannot go on from it")
    op.drop_table("expired_range")
    op.drop_table("retention")
