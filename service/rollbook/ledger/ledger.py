"""``Ledger``: the ``LedgerPort`` in SQL. One method = one verb = one transaction.

Owns construction and closing; the verbs stand in one file per noun (roles, feeding, failing, leasing, submitting, planning,
publishing, forking, tools, status, survival, reading), each a class on top of the one before. Never speaks gRPC. Upholds P1-P8
through them.
"""

from __future__ import annotations

import logging
import threading

from rollbook.core.errors import RollbookError
from rollbook.core.host import host
from rollbook.core.ports import Clock
from rollbook.core.records import Violation
from rollbook.core.settings import RetentionConfig
from rollbook.ledger.audit import Subject, run_audit
from rollbook.ledger.base import again_on_conflict, load_kept
from rollbook.ledger.bell import Bell
from rollbook.ledger.desk import Desk
from rollbook.ledger.dialects import Database
from rollbook.ledger.migrate import current_revision, prepare
from rollbook.ledger.partitions import Partitions
from rollbook.ledger.retention import Retaining
from rollbook.ledger.roles import Roles, expire_term
from rollbook.ledger.writer import ANSWER_WAIT_S, Writer
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)


class Ledger(Roles, Retaining):
    """The ledger of one run, in the one process that may write it.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql+psycopg://…``; a fresh database gets its tables.
        clock: time of the server; PostgreSQL's own clock is used where there is one.
        holder: incarnation id of this server, in the fence row.
        role_ttl_s: term of the ``ledger`` role; call ``renew_self`` at least three times within it.
        group_commit_max: operations that share one durable COMMIT.
        ordinals_per_partition: width of a PostgreSQL partition.
        payload_bytes_max: largest sample.
        retention: what may go and when; nothing goes without it.
        supersede: holder known to be dead, whose unexpired term is taken over at once.
        password_file: holds the password of a PostgreSQL database; the URL must not.

    Raises: LedgerLocked, UnsafeStorage, SchemaTooNew, SchemaTooOld, Unavailable.
    """

    def __init__(
        self, url: str, *, clock: Clock | None = None, holder: str, role_ttl_s: float = 15.0, group_commit_max: int = 128,
        ordinals_per_partition: int = 100_000, payload_bytes_max: int = 33_554_432, supersede: str = "",
        password_file: str = "", retention: RetentionConfig | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock or host()
        self._holder = holder
        self._role_ttl_s = role_ttl_s
        self._supersede = supersede
        self._retention = retention or RetentionConfig()
        self._payload_bytes_max = payload_bytes_max
        self._attach_lock = threading.Lock()
        self._news_lock = host().condition()
        self._reading_lock = threading.Lock()
        self._bell = Bell()
        self._desk = Desk(self._bell, self._look_at_line)
        self._newest_asked = {}
        self._closed = False
        self._database = Database(url, self._clock, role_ttl_s=role_ttl_s, password_file=password_file)
        try:
            prepare(self._database)
            self._partitions = Partitions(self._database, ordinals_per_partition)
            self._writer = Writer(
                self._database, group_commit_max=group_commit_max, on_commit=self._bell.ring, on_fenced=self._on_fenced
            )
        except BaseException:
            self._database.close()
            raise
        self._writer.guard = self._guard
        self._expiring = host().thread(self._keep_expiring, "ledger-retention") if self._retention.enabled else None
        if self._expiring is not None:
            self._expiring.start()

    @property
    def exclusive(self) -> bool:
        """True when having this database open proves that no other server lives (SQLite)."""
        return self._database.exclusive

    def schema_revision(self) -> str | None:
        """Revision the database has now: another one than at the start after somebody has migrated it. Raises Unavailable."""
        with self._database.reading() as conn:
            return current_revision(conn)

    @again_on_conflict
    def audit(self) -> list[Violation]:
        """Run every invariant in one snapshot; an empty list means clean."""
        with self._read() as conn:
            return run_audit(Subject(conn, self.run, self._lineages, self._along, load_kept(conn, self.run.run_id)))

    def close(self, *, release: bool = True) -> None:
        """Finish what is queued and let the storage go.

        With ``release`` the server's own term ends, so that a successor need not wait for it.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if release:
                self._release()
        finally:
            self._bell.close()
            if self._expiring is not None:
                self._expiring.join(timeout=ANSWER_WAIT_S)
            self._writer.close()
            self._database.close()

    def _release(self) -> None:
        term = self._term
        if term is None or self._fenced is not None:
            return
        try:
            self._write(lambda txn: expire_term(txn, self.run.run_id, term))
            failpoint("ledger.close.after_release")
        except RollbookError as error:
            log.warning("the ledger role was not released: %s", error, extra={"event": "release_failed"})

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
