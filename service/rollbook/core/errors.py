"""One exception per outcome a caller must tell apart; the docstring is the default message.

Owns the error tree and whether an outcome may be retried with the same key. Never translates: SQL errors become
these in ``ledger/``, gRPC statuses in ``rpc/status.py``, nowhere else.
"""

from __future__ import annotations


class RollbookError(Exception):
    """Rollbook refused the operation."""

    retryable = False
    """True when repeating the same call with the same key may succeed without anybody changing anything."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])


class ConfigError(RollbookError):
    """The configuration is wrong."""


class ConfigMismatch(ConfigError):
    """The configuration differs from the one stored with the run."""


class InvalidRequest(RollbookError):
    """The request cannot be meant as it is."""


class NotFound(RollbookError):
    """The ledger holds no such row."""


class UnknownSlot(NotFound):
    """The run has no such slot."""


class Expired(NotFound):
    """The rows asked for were let go under the run's retention; what is left of them are counts."""


class WrongRun(InvalidRequest):
    """The request names another run than the one this server serves."""


class Conflict(RollbookError):
    """The same key was used before with other content; the stored content stands."""


class CursorMoved(Conflict):
    """The task stream's cursor is not where the caller believes it to be."""


class Fenced(RollbookError):
    """A newer epoch holds this role; the caller must stop."""


class RoleHeld(RollbookError):
    """Another holder owns this role and its term has not expired."""

    retryable = True


class TooLarge(InvalidRequest):
    """The message exceeds the configured size."""


class NotReady(RollbookError):
    """What was asked for does not exist yet; ask again."""

    retryable = True


class RunPaused(RollbookError):
    """The run cannot go on without an operator's decision."""


class Unavailable(RollbookError):
    """The ledger cannot answer now."""

    retryable = True


class ServerFenced(Unavailable):
    """This ledger server lost its role and answers nothing any more; call its successor, found at the run's address."""


class Standby(Unavailable):
    """This ledger server does not hold the run's role; call the one that does, found at the run's addresses."""


class StorageFull(Unavailable):
    """The ledger's storage is full; nothing was acknowledged, writes resume when space is freed."""


class DeadlineExceeded(Unavailable):
    """No answer came within the call's deadline; the outcome is unknown, repeat with the same key."""


class Overloaded(Unavailable):
    """The ledger server has more to do than it may take on."""

    retry_after_s = 0.0
    """When the server asks to be called again; 0 = it did not say."""


class Unauthenticated(RollbookError):
    """The ledger server does not know who is calling."""


class PermissionDenied(RollbookError):
    """The caller's role may not do that."""


class SchemaTooNew(RollbookError):
    """The ledger file was written by a newer Rollbook; upgrade the package."""


class SchemaTooOld(RollbookError):
    """The ledger's schema is older than this Rollbook; run `rollbook migrate`."""


class LedgerLocked(RollbookError):
    """Another ledger server holds this SQLite file."""

    retryable = True


class UnsafeStorage(RollbookError):
    """This storage cannot keep the ledger's durability promise."""


class DigestMismatch(RollbookError):
    """Bytes differ from the digest recorded for them."""


class StaleWeights(RollbookError):
    """An engine does not compute with the weights it was given."""


class CheckpointDamaged(DigestMismatch):
    """A checkpoint's files do not match its manifest."""


class ReplayDiverged(RollbookError):
    """A replayed step produced other weights than the ones recorded."""


class ChainMismatch(RollbookError):
    """The checkpoint belongs to another history than the ledger's."""


class LedgerBehind(ChainMismatch):
    """The ledger is older than the checkpoints beside it: it was restored from an older copy."""


class UnsupportedSampling(ConfigError):
    """These sampling settings would make recorded log-probs wrong."""


class TaskError(RollbookError):
    """A task source or task file is broken."""


class VerifierError(RollbookError):
    """The reward function raised; no reward was given."""


class RankLost(RollbookError):
    """A rank of the learner group died or hangs."""


class RanksDiffer(RollbookError):
    """The ranks of the learner group no longer hold the same weights."""


class RestartBudgetSpent(RollbookError):
    """A role died more often than its restart budget allows."""
