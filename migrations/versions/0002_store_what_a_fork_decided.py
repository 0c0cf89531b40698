"""Store what a fork decided: its verdict on orphans, the difference it was judged by, and how many were kept and dropped."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("difference", sa.Double(), nullable=True),
        sa.Column("tolerance", sa.Double(), nullable=True),
        sa.Column("orphans_kept", sa.BigInteger(), nullable=True),
        sa.Column("orphans_dropped", sa.BigInteger(), nullable=True),
    ):
        op.add_column("lineage", column)
    # As SQL, because SQLite takes a named CHECK only together with a column that is added.
    verdict = "verdict VARCHAR(20) CONSTRAINT ck_lineage_verdict CHECK (verdict IN ('within', 'kept', 'dropped'))"
    epoch = "epoch BIGINT CONSTRAINT ck_lineage_fork_has_verdict CHECK ((parent IS NULL) = (verdict IS NULL))"
    op.execute(f"ALTER TABLE lineage ADD COLUMN {verdict}")
    op.execute(f"ALTER TABLE lineage ADD COLUMN {epoch}")
