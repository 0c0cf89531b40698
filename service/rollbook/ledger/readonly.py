"""A run's rows for who only reads them: in bounded pages, beside a running server or without one.

Owns the read-only way into the database: no lock, no fence, no migration, nothing written, so that looking never keeps a server
from starting and never ends one's term. Never decides what a row means. Each page is a transaction of its own and short: a long
snapshot would keep a SQLite log from being written back and dead PostgreSQL rows from being removed. Rows are only ever
inserted, so pages by primary key are gapless.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from rollbook.core.errors import ConfigError, NotFound
from rollbook.core.host import COMMAND_HOLDER, host
from rollbook.ledger import schema as t
from rollbook.ledger.dialects import SQLITE_BUSY_MS, Database, sqlite_module
from rollbook.ledger.migrate import require_current

PAGE_ROWS = 2000
EVENT_KINDS_OF_RECOVERY = (
    "server_attached", "role_acquired", "lineage_forked", "breaker_opened", "breaker_closed", "checkpoint_marked",
    "checkpoint_replaced", "config_revised", "group_retried",
)  # fmt: skip
NO_RECOVERY = ('"state": "deleting"', f'"holder": "{COMMAND_HOLDER}')
"""What the events say of a checkpoint that is let go of, and of a command that opened the database where no server answered."""
RECOVERIES_MAX = 2000


class _ReadOnly(Database):
    """The reading half of ``Database``."""

    def _open_sqlite(self, url: sa.URL) -> None:
        path = Path(url.database or "")
        if not path.is_file():
            raise ConfigError(f"there is no ledger at {path}: the run was never started here (rollbook run CONFIG)")
        module = sqlite_module()

        def connect() -> Any:
            conn = module.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=SQLITE_BUSY_MS / 1000)
            conn.isolation_level = None
            return conn

        self.reader = self.writer = sa.create_engine("sqlite://", module=module, creator=connect, poolclass=NullPool)

        @sa.event.listens_for(self.reader, "begin")
        def start(conn: sa.Connection) -> None:
            conn.exec_driver_sql("BEGIN")


class Reader:
    """The rows of one run; use as a context manager.

    Raises: ConfigError (no database there), NotFound (no such run in it), SchemaTooOld, SchemaTooNew, Unavailable.
    """

    def __init__(self, url: str, run_id: str, password_file: str = "") -> None:
        self.run_id = run_id
        self._database = _ReadOnly(url, host(), role_ttl_s=60.0, password_file=password_file)
        try:
            with self._database.reading() as conn:
                require_current(conn)
                found = conn.execute(sa.select(t.run.c.run_id)).scalars().all()
            if run_id not in found:
                raise NotFound(f"the ledger holds no run {run_id!r}; it holds {', '.join(sorted(found)) or 'none'}")
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def manifest(self) -> dict[str, Any]:
        """``opened_at_s``, ``config_digest``, the manifest's tables and ``revisions`` of the configuration, oldest first."""
        with self._database.reading() as conn:
            run = conn.execute(sa.select(t.run).where(t.run.c.run_id == self.run_id)).one()
            c = t.config_revision.c
            revisions = conn.execute(
                sa.select(c.revision, c.config_digest, c.from_step, c.accepted_at_us).where(c.run_id == self.run_id)
                .order_by(c.revision)
            ).all()  # fmt: skip
        return json.loads(run.manifest_json) | {
            "opened_at_s": run.opened_at_us / 1e6, "config_digest": run.config_digest,
            "revisions": [
                {"revision": r.revision, "digest": r.config_digest, "from_step": r.from_step, "at_s": r.accepted_at_us / 1e6}
                for r in revisions
            ],
        }  # fmt: skip

    def recoveries(self) -> list[dict[str, Any]]:
        """Newest events of restarts, take-overs, forks and repairs, oldest first: at_s, what, detail.

        A worker that was registered after the first step was finished is one of them: it takes the place of another, or is one
        more. That old checkpoints are let go of is none, nor is a command that looked at the database itself.
        """
        e, w, o = t.event.c, t.worker.c, t.plan_outcome.c
        here = [~e.detail_json.contains(said, autoescape=True) for said in NO_RECOVERY]
        with self._database.reading() as conn:
            rows = conn.execute(
                sa.select(e.kind, e.at_us, e.detail_json)
                .where(e.run_id == self.run_id, e.kind.in_(EVENT_KINDS_OF_RECOVERY), *here)
                .order_by((e.seq + 0).desc()).limit(RECOVERIES_MAX)
            ).all()  # fmt: skip
            first = sa.select(sa.func.min(o.finished_at_us)).where(o.run_id == self.run_id).scalar_subquery()
            workers = conn.execute(
                sa.select(w.registered_at_us, w.incarnation, w.host, w.engine)
                .where(w.run_id == self.run_id, w.registered_at_us > first)
                .order_by(w.registered_at_us.desc()).limit(RECOVERIES_MAX)
            ).all()  # fmt: skip
        found = [{"at_s": r.at_us / 1e6, "what": r.kind, "detail": json.loads(r.detail_json)} for r in rows]
        found += [
            {"at_s": r.registered_at_us / 1e6, "what": "worker_started",
             "detail": {"worker": r.incarnation, "host": r.host, "engine": r.engine}} for r in workers
        ]  # fmt: skip
        return sorted(found, key=lambda event: event["at_s"])[-RECOVERIES_MAX:]

    def lost_seconds(self) -> list[dict[str, Any]]:
        """Time that failed attempts took, and their tokens, by status and blame."""
        f = t.failure.c
        by = (f.status, f.blame)
        seconds = sa.func.coalesce(sa.func.sum(f.generate_s + f.verify_s), 0.0)
        with self._database.reading() as conn:
            rows = conn.execute(
                sa.select(*by, sa.func.count(), seconds, sa.func.coalesce(sa.func.sum(f.n_tokens), 0))
                .where(f.run_id == self.run_id).group_by(*by).order_by(*by)
            ).all()  # fmt: skip
        return [
            {"status": status, "blame": blame, "attempts": int(n), "seconds": float(s), "n_tokens": int(tokens)}
            for status, blame, n, s, tokens in rows
        ]

    def sample_seconds(self) -> dict[str, float]:
        """Sums over accepted samples: ``samples``, ``tokens``, ``generate_s``, ``verify_s``."""
        s = t.sample.c
        sums = (sa.func.sum(s.n_tokens), sa.func.sum(s.generate_s), sa.func.sum(s.verify_s))
        with self._database.reading() as conn:
            n, *rest = conn.execute(sa.select(sa.func.count(), *sums).where(s.run_id == self.run_id)).one()
        return {"samples": int(n)} | {k: float(v or 0) for k, v in zip(("tokens", "generate_s", "verify_s"), rest, strict=True)}

    def pages(self, table: sa.Table, columns: Sequence[str] = (), page_rows: int = PAGE_ROWS) -> Iterator[list[dict[str, Any]]]:
        """Every row of the run, ``page_rows`` at a time in the order of the primary key; ``columns``: all without it."""
        key = [column for column in table.primary_key.columns if column.name != "run_id"]
        chosen = [table.c[name] for name in columns] or [c for c in table.columns if c.name != "run_id"]
        after: tuple[Any, ...] = ()
        while True:
            query = sa.select(*chosen, *(k.label(f"_key_{k.name}") for k in key)).where(table.c.run_id == self.run_id)
            if after:
                query = query.where(sa.tuple_(*key) > after if len(key) > 1 else key[0] > after[0])
            with self._database.reading() as conn:
                rows = conn.execute(query.order_by(*key).limit(page_rows)).mappings().all()
            if rows:
                yield [{name: value for name, value in row.items() if not name.startswith("_key_")} for row in rows]
                after = tuple(rows[-1][f"_key_{k.name}"] for k in key)
            if len(rows) < page_rows:
                return

    def between(self, table: sa.Table, by: str, first: int, last: int) -> list[dict[str, Any]]:
        """Rows of the run whose column ``by`` (ordinal or step) lies in a range, in the order of the primary key: what goes with
        a page of another table."""
        c = table.c
        query = sa.select(table).where(c.run_id == self.run_id, c[by] >= first, c[by] <= last).order_by(*table.primary_key)
        with self._database.reading() as conn:
            return [dict(row) for row in conn.execute(query).mappings()]
