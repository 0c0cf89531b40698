"""What the tables of the ledger are made of: naming of constraints, keys, columns that many of them have.

Owns which tables PostgreSQL partitions. Never names a column of a single table: ``schema`` does.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, PrimaryKeyConstraint, String, Table, Text

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s", "ck": "ck_%(table_name)s_%(constraint_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)  # fmt: skip

PARTITIONED = ("prompt_group", "slot", "sample", "payload", "verdict", "plan_item")
"""Tables that PostgreSQL partitions by RANGE (ordinal); a partition is named ``<table>_p<first>_<end>``."""


def among(column: str, values: object) -> str:
    """CHECK that a column holds one of an enumeration's values."""
    return f"{column} IN ({', '.join(repr(v.value) for v in values)})"  # type: ignore[attr-defined]


def table(name: str, *parts: Any, key: tuple[str, ...], small: bool = False) -> Table:
    """A table whose primary key is (run_id, *key). ``small`` rows live in their key's B-tree on SQLite."""
    options: dict[str, Any] = {"sqlite_with_rowid": False} if small else {}
    if name in PARTITIONED:
        options["postgresql_partition_by"] = "RANGE (ordinal)"
    run_id = Column("run_id", String(200), nullable=False)
    return Table(name, metadata, run_id, *parts, PrimaryKeyConstraint("run_id", *key), **options)


def int_column(name: str, nullable: bool = False) -> Column[Any]:
    """A 64-bit integer."""
    return Column(name, BigInteger, nullable=nullable)


def text_column(name: str, nullable: bool = False) -> Column[Any]:
    """Text of any length."""
    return Column(name, Text, nullable=nullable)


def slot_columns() -> tuple[Column[Any], Column[Any]]:
    """The key of a slot."""
    return int_column("ordinal"), Column("sibling", Integer, nullable=False)
