"""One writing connection, one thread, group commit.

Owns the only path by which anything is written: a bounded queue of operations of which up to ``group_commit_max`` share one
durable COMMIT. Never acknowledges before that COMMIT (P1) and never writes past a newer epoch (P8): the guard reads the
server's fence row inside each transaction (R12). Sources: sqlite.org/lang_savepoint.html; sqlite.org/lang_transaction.html
(after disk-full and I/O errors SQLite may already have rolled back, so ``in_transaction`` is looked at first);
postgresql.org/docs/current/mvcc-serialization-failure-handling.html (what may be run again).
"""

from __future__ import annotations

import errno
import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from rollbook.core.errors import DeadlineExceeded, RollbookError, ServerFenced, StorageFull, Unavailable
from rollbook.core.host import host
from rollbook.ledger.dialects import Database, error_class, is_conflict, translate
from rollbook.observe import metrics
from rollbook.observe.failpoints import FailpointRaised, failpoint

log = logging.getLogger(__name__)

QUEUE_MAX = 4096
ENQUEUE_WAIT_S = 5.0
ANSWER_WAIT_S = 120.0
SLOWEST_OF_S = 10.0
CONFLICT_RETRIES_MAX = 3
"""Further attempts of a group that PostgreSQL broke off in favour of another transaction."""
CONFLICT_WAIT_S = 0.05
"""Wait before the first of them; twice as long before each next one."""


@dataclass(slots=True)
class Txn:
    """What an operation sees of the transaction it runs in."""

    conn: sa.Connection
    now_us: int
    rings: set[str] = field(default_factory=set)
    """Topics whose waiters wake after COMMIT."""
    after_commit: list[Callable[[], None]] = field(default_factory=list)
    """Called after COMMIT, never after a rollback: the place to update what is kept in memory."""


Batch = Callable[[Txn, list[Any]], list[Any]]


@dataclass(slots=True)
class _Operation:
    call: Batch
    argument: Any
    mergeable: bool
    future: Future[Any]


@dataclass(slots=True)
class _Done:
    operations: Sequence[_Operation]
    results: Sequence[Any]
    txn: Txn


class _GroupFailed(Exception):
    def __init__(self, error: RollbookError) -> None:
        super().__init__(str(error))
        self.error = error


class Writer:
    """Runs operations one after another on one connection; callers wait for the COMMIT that covers theirs."""

    def __init__(
        self, database: Database, *, group_commit_max: int, on_commit: Callable[[set[str]], None],
        on_fenced: Callable[[ServerFenced], None],
    ) -> None:  # fmt: skip
        self._database = database
        self._group_commit_max = max(1, group_commit_max)
        self._on_commit = on_commit
        self._on_fenced = on_fenced
        self._queue: queue.Queue[_Operation | None] = host().queue(QUEUE_MAX)
        self._conn: sa.Connection | None = None
        self._closed = False
        self.guard: Callable[[sa.Connection], int] = database.now_us
        """Reads the fence row and the clock inside the transaction; raises ServerFenced."""
        self.commits = 0
        self.operations = 0
        self.conflicts = 0
        """Attempts broken off by a deadlock or a serialization failure and made again."""
        self._began_s: float | None = None
        self._slowest: tuple[float, float] = (0.0, float("-inf"))
        """Seconds that the slowest of the newest transactions took, and when it ended."""
        self._thread = host().thread(self._loop, "ledger-writer")
        self._thread.start()

    def run(self, operation: Callable[[Txn], Any]) -> Any:
        """Run one operation in a transaction and return its result after COMMIT."""
        return self._wait(self._enqueue(_Operation(lambda txn, _: [operation(txn)], None, False, host().future())))

    def run_merged(self, call: Batch, argument: Any) -> Any:
        """Like ``run``; those of a commit that have the same ``call`` are handed to it together."""
        return self._wait(self._enqueue(_Operation(call, argument, True, host().future())))

    def queue_depth(self) -> int:
        """Operations that wait."""
        return self._queue.qsize()

    def commit_s(self) -> float:
        """Seconds of the slowest transaction of the last ``SLOWEST_OF_S``, the one in hand so far included."""
        now, began = host().monotonic(), self._began_s
        took_s, ended_at = self._slowest
        return max(took_s if now - ended_at <= SLOWEST_OF_S else 0.0, 0.0 if began is None else now - began)

    def _note_end(self, began: float) -> None:
        now = host().monotonic()
        if now - began >= self._slowest[0] or now - self._slowest[1] > SLOWEST_OF_S:
            self._slowest = (now - began, now)
        self._began_s = None

    def close(self) -> None:
        """Finish what is queued, then stop."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout=ANSWER_WAIT_S)

    def _enqueue(self, operation: _Operation) -> Future[Any]:
        if self._closed:
            raise Unavailable("the ledger is closed; connect to its successor")
        try:
            self._queue.put(operation, timeout=ENQUEUE_WAIT_S)
        except queue.Full:
            raise Unavailable(f"{QUEUE_MAX} operations wait for the ledger's storage already; ask again later") from None
        return operation.future

    def _wait(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=ANSWER_WAIT_S)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"the ledger's storage did not answer within {ANSWER_WAIT_S:.0f} s; repeat with the same key"
            ) from None

    def _loop(self) -> None:
        stopping = False
        while not stopping:
            first = self._queue.get()
            if first is None:
                break
            group = [first]
            while len(group) < self._group_commit_max:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    stopping = True
                    break
                group.append(more)
            self._began_s = began = host().monotonic()
            try:
                self._commit_group(group)
            except Exception as error:  # thread boundary: a writer that ends here would leave every caller waiting
                log.exception("the writer goes on after an error behind a commit", extra={"event": "writer_error"})
                self._fail(group, Unavailable(f"committed or not, the answer was lost ({error}); repeat with the same key"))
            self._note_end(began)
        self._drop_connection()
        while not self._queue.empty():
            if (late := self._queue.get_nowait()) is not None:
                late.future.set_exception(Unavailable("the ledger is closed; connect to its successor"))

    def _commit_group(self, group: list[_Operation]) -> None:
        for attempt in range(CONFLICT_RETRIES_MAX + 1):
            failed: list[tuple[_Operation, BaseException]] = []
            try:
                done = self._transact(group, failed)
                break
            except Exception as error:  # noqa: BLE001  thread boundary: whatever happened, nobody is acknowledged
                if attempt == CONFLICT_RETRIES_MAX or not is_conflict(error):
                    self._fail(group, error)
                    return
                self.conflicts += 1
                metrics.TRANSACTION_ERRORS_TOTAL.labels("write", error_class(error)).inc()
                log.info("run again after a conflict: %s", error, extra={"event": "conflict_retried", "attempt": attempt + 1})
                self._drop_connection()
                host().sleep(CONFLICT_WAIT_S * 2**attempt)
        self._answer(done, failed)

    def _transact(self, group: list[_Operation], failed: list[tuple[_Operation, BaseException]]) -> list[_Done]:
        """One attempt at the whole group, COMMIT included; ``failed`` gets the operations that refused by themselves."""
        done: list[_Done] = []
        conn = self._connection()
        began = host().monotonic()
        conn.begin()
        now_us = self.guard(conn)
        for batch in _merge(group):
            done += self._apply(conn, now_us, batch, failed, alone=len(group) == 1)
        failpoint("ledger.before_commit")
        self._commit(conn, bool(done))
        failpoint("ledger.after_commit")
        metrics.TRANSACTION_DURATION_SECONDS.labels("write").observe(host().monotonic() - began)
        return done

    def _answer(self, done: list[_Done], failed: list[tuple[_Operation, BaseException]]) -> None:
        rings: set[str] = set()
        for part in done:
            self.operations += len(part.operations)
            rings |= part.txn.rings
            for callback in part.txn.after_commit:
                callback()
        failpoint("ledger.before_answers")
        for part in done:
            for operation, result in zip(part.operations, part.results, strict=True):
                operation.future.set_result(result)
                failpoint("ledger.mid_answers")
        for operation, reason in failed:
            operation.future.set_exception(reason)
        if rings:
            self._on_commit(rings)

    def _commit(self, conn: sa.Connection, anything: bool) -> None:
        if not anything:
            conn.rollback()
            return
        if not self._database.in_transaction(conn):
            raise Unavailable("the storage gave the transaction up before COMMIT; nothing was acknowledged")
        self._database.commit(conn)
        self.commits += 1

    def _apply(
        self, conn: sa.Connection, now_us: int, batch: list[_Operation], failed: list[tuple[_Operation, BaseException]], *,
        alone: bool,
    ) -> list[_Done]:  # fmt: skip
        """Run one batch, in a savepoint unless it is alone; a failing member is rolled back by itself."""
        txn = Txn(conn, now_us)
        if not alone:
            conn.exec_driver_sql("SAVEPOINT operation")
        try:
            results = batch[0].call(txn, [o.argument for o in batch])
        except Exception as error:  # thread boundary: handed to the caller that asked
            if (core := _of_the_storage(error)) is not None:
                raise _GroupFailed(core) from error
            if not self._database.in_transaction(conn):
                raise _GroupFailed(Unavailable(f"the storage gave the transaction up: {error}")) from error
            if alone:
                failed.append((batch[0], error))
                return []
            conn.exec_driver_sql("ROLLBACK TO SAVEPOINT operation")
            conn.exec_driver_sql("RELEASE SAVEPOINT operation")
            if len(batch) == 1:
                failed.append((batch[0], error))
                return []
            return [part for one in batch for part in self._apply(conn, now_us, [one], failed, alone=False)]
        if not alone:
            conn.exec_driver_sql("RELEASE SAVEPOINT operation")
        return [_Done(batch, results, txn)]

    def _fail(self, group: list[_Operation], error: Exception) -> None:
        if isinstance(error, _GroupFailed):
            core: BaseException = error.error
        elif isinstance(error, RollbookError):
            core = error
        else:
            core = _of_the_storage(error) or error
        metrics.TRANSACTION_ERRORS_TOTAL.labels("write", error_class(error)).inc()
        log.warning("a group of %d operations was not acknowledged: %s", len(group), core, extra={"event": "commit_failed"})
        self._drop_connection()
        if isinstance(core, ServerFenced):
            self._on_fenced(core)
        for operation in group:
            if not operation.future.done():
                operation.future.set_exception(core)

    def _connection(self) -> sa.Connection:
        if self._conn is None:
            self._conn = self._database.writer.connect()
        return self._conn

    def _drop_connection(self) -> None:
        """Roll back if there is anything to roll back and close; the next group probes the storage with a fresh connection."""
        conn, self._conn = self._conn, None
        if conn is None:
            return
        try:
            if not conn.invalidated and conn.in_transaction() and self._database.in_transaction(conn):
                conn.rollback()
            conn.close()
        except Exception as error:  # noqa: BLE001  thread boundary: whatever state the driver is in, the next group gets a new one
            log.debug("closing the writing connection: %s", error)
            with suppress(Exception):
                conn.invalidate()


def _of_the_storage(error: Exception) -> RollbookError | None:
    """The core error for what concerns the storage, and with it the whole group; None for one operation's own."""
    if isinstance(error, FailpointRaised):
        return Unavailable(f"failpoint {error}")
    if isinstance(error, OSError):
        kind = StorageFull if error.errno == errno.ENOSPC else Unavailable
        return kind(f"the ledger's storage refused ({error}); nothing was acknowledged, repeat with the same key")
    return translate(error) if isinstance(error, SQLAlchemyError) else None


def _merge(group: list[_Operation]) -> list[list[_Operation]]:
    """Batches of a group; what is in one group arrived at the same time, and has no order but among its own kind."""
    batches: list[list[_Operation]] = []
    merged: dict[Batch, list[_Operation]] = {}
    for operation in group:
        if operation.mergeable and operation.call in merged:
            merged[operation.call].append(operation)
            continue
        batches.append([operation])
        if operation.mergeable:
            merged[operation.call] = batches[-1]
    return batches
