"""Runs the ledger's migrations on a given connection, or on ``-x url=URL`` / the config attribute ``url``."""

from __future__ import annotations

import re

from alembic import context

from rollbook.core.host import Host
from rollbook.ledger.dialects import Database
from rollbook.ledger.schema import PARTITIONED, metadata

PARTITION = re.compile(rf"^({'|'.join(PARTITIONED)})_p\d+_\d+$")


def include_object(_object: object, name: str | None, kind: str, reflected: bool, _compare_to: object) -> bool:
    """Partitions are made by the ledger, not by migrations."""
    return not (kind == "table" and reflected and PARTITION.match(name or ""))


def run(connection: object) -> None:
    context.configure(
        connection=connection, target_metadata=metadata, include_object=include_object, transaction_per_migration=False
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    url = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True).get("url")
    if not url:
        raise SystemExit("alembic: give the ledger's URL with -x url=sqlite:///FILE (or use `rollbook migrate CONFIG.toml`)")
    database = Database(str(url), Host(), role_ttl_s=60.0)
    try:
        with database.writer.connect() as conn:
            run(conn)
            conn.commit()
    finally:
        database.close()
