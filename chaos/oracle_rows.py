"""The rows of a run as the oracle reads them: whole tables by plain SQL, the documented digests, and a few look-ups.

Owns the connection, the list of tables and sha256 over length-prefixed fields. Judges nothing; ``oracle`` does, through which its
users reach what is here. Imports nothing of the product.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from typing import Any

Row = dict[str, Any]
Key = tuple[int, int]

TABLES = (
    "run", "config_revision", "lineage", "fence", "cursor", "prompt_group", "slot", "lease", "sample", "payload", "verdict",
    "failure", "tool_call", "plan", "plan_item", "plan_outcome", "policy_version", "checkpoint", "event",
)  # fmt: skip


def connect(url: str) -> Any:
    """A read-only connection of our own to the database of a ledger URL."""
    if url.startswith("postgresql"):
        import psycopg

        connection = psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://"), connect_timeout=5)
        connection.read_only = True
        return connection
    try:
        from pysqlite3 import dbapi2 as sqlite
    except ImportError:
        import sqlite3 as sqlite  # type: ignore[no-redef]
    return sqlite.connect(f"file:{url.removeprefix('sqlite:///')}?mode=ro", uri=True, timeout=10)


def read_ledger(url: str, run_id: str) -> dict[str, list[Row]]:
    """Every row of one run, by table, all as of one moment."""
    mark = "%s" if url.startswith("postgresql") else "?"
    connection = connect(url)
    try:
        connection.cursor().execute("BEGIN" if mark == "?" else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        tables = {}
        for table in TABLES:
            cursor = connection.cursor()
            cursor.execute(f"SELECT * FROM {table} WHERE run_id = {mark}", (run_id,))
            names = [column[0] for column in cursor.description]
            tables[table] = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        return tables
    finally:
        connection.close()


def sha(*fields: bytes | str | int) -> str:
    """The documented digest: sha256 over length-prefixed fields."""
    hasher = hashlib.sha256()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def key_of(row: Row) -> Key:
    return row["ordinal"], row["sibling"]


def all_versions(payload: Row) -> bytes:
    """Per-token versions; one stored int32 stands for all tokens."""
    stored, n = bytes(payload["versions"]), len(payload["token_ids"]) // 4
    return stored * n if len(stored) == 4 else stored


def digest_of_bytes(sample: Row, payload: Row) -> str:
    """A sample's digest from the bytes that are stored now."""
    reward = b"" if sample["reward"] is None else struct.pack("<d", sample["reward"])
    return sha(
        "payload", bytes(payload["token_ids"]), bytes(payload["logprobs"]), all_versions(payload), bytes(payload["loss_mask"]),
        reward, sample["reward_status"], sample["sandbox_status"], sample["finish_reason"], sample["lineage"],
    )  # fmt: skip


class Ledger:
    """The rows of a run, with the few look-ups every check needs."""

    def __init__(self, tables: dict[str, list[Row]]) -> None:
        self.tables = tables
        (self.run,) = tables["run"]
        self.rules = json.loads(self.run["rules_json"])
        self.samples = {key_of(r): r for r in tables["sample"]}
        self.payloads = {key_of(r): r for r in tables["payload"]}
        self.groups = {r["ordinal"]: r for r in tables["prompt_group"]}
        self.verdicts = {key_of(r) for r in tables["verdict"]}
        self.plans = {r["step"]: r for r in tables["plan"]}
        self.items: dict[int, list[Row]] = defaultdict(list)
        for item in sorted(tables["plan_item"], key=lambda r: (r["step"], r["pos"])):
            self.items[item["step"]].append(item)
        self.versions = {r["version"]: r for r in tables["policy_version"]}

    def __getitem__(self, table: str) -> list[Row]:
        return self.tables[table]
