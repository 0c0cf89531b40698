"""The table between core errors and gRPC status codes, read in both directions.

Owns which status an error travels as and how it is raised again on the other side: same class, same message. The class
name goes in the trailing metadata, because several classes share a code; a status without it comes from gRPC itself or
from something between the two sides, and becomes ``Unavailable`` wherever repeating the call may help. Never retries.
"""

from __future__ import annotations

import math

import grpc

from rollbook.core import errors
from rollbook.core.errors import RollbookError

CLASS_KEY = "rollbook-error"
"""Trailing metadata key that carries the error's class name."""

RETRY_AFTER_KEY = "rollbook-retry-after-ms"
"""Trailing metadata key of an overloaded server: when to call again."""
RETRY_AFTER_S_MAX = 30.0
"""Longest wait that is asked for, and that is believed."""

UNVERIFIED_TEXT = "CERTIFICATE_VERIFY_FAILED"
"""How TLS words a server whose certificate the client's authority did not sign."""

MESSAGE_BYTES_MAX = 4096
"""Longest message that travels: headers are limited to 8 KiB in gRPC, and the status message is one of them."""

_CODE = grpc.StatusCode
TABLE: dict[type[RollbookError], grpc.StatusCode] = {
    errors.RollbookError: _CODE.INTERNAL,
    errors.ConfigError: _CODE.INVALID_ARGUMENT,
    errors.ConfigMismatch: _CODE.FAILED_PRECONDITION,
    errors.InvalidRequest: _CODE.INVALID_ARGUMENT,
    errors.NotFound: _CODE.NOT_FOUND,
    errors.UnknownSlot: _CODE.NOT_FOUND,
    errors.Expired: _CODE.NOT_FOUND,
    errors.WrongRun: _CODE.FAILED_PRECONDITION,
    errors.Conflict: _CODE.ALREADY_EXISTS,
    errors.CursorMoved: _CODE.ABORTED,
    errors.Fenced: _CODE.ABORTED,
    errors.RoleHeld: _CODE.FAILED_PRECONDITION,
    errors.TooLarge: _CODE.RESOURCE_EXHAUSTED,
    errors.NotReady: _CODE.FAILED_PRECONDITION,
    errors.RunPaused: _CODE.FAILED_PRECONDITION,
    errors.Unavailable: _CODE.UNAVAILABLE,
    errors.ServerFenced: _CODE.UNAVAILABLE,
    errors.Standby: _CODE.UNAVAILABLE,
    errors.StorageFull: _CODE.UNAVAILABLE,
    errors.DeadlineExceeded: _CODE.DEADLINE_EXCEEDED,
    errors.Overloaded: _CODE.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: _CODE.UNAUTHENTICATED,
    errors.PermissionDenied: _CODE.PERMISSION_DENIED,
    errors.SchemaTooNew: _CODE.FAILED_PRECONDITION,
    errors.SchemaTooOld: _CODE.FAILED_PRECONDITION,
    errors.LedgerLocked: _CODE.FAILED_PRECONDITION,
    errors.UnsafeStorage: _CODE.FAILED_PRECONDITION,
    errors.DigestMismatch: _CODE.DATA_LOSS,
    errors.StaleWeights: _CODE.FAILED_PRECONDITION,
    errors.CheckpointDamaged: _CODE.DATA_LOSS,
    errors.ReplayDiverged: _CODE.ABORTED,
    errors.ChainMismatch: _CODE.ABORTED,
    errors.LedgerBehind: _CODE.ABORTED,
    errors.UnsupportedSampling: _CODE.INVALID_ARGUMENT,
    errors.TaskError: _CODE.FAILED_PRECONDITION,
    errors.VerifierError: _CODE.FAILED_PRECONDITION,
    errors.RankLost: _CODE.ABORTED,
    errors.RanksDiffer: _CODE.DATA_LOSS,
    errors.RestartBudgetSpent: _CODE.FAILED_PRECONDITION,
}
"""Every error class and the status it travels as."""

_BY_NAME = {cls.__name__: cls for cls in TABLE}

_FOREIGN: dict[grpc.StatusCode, type[RollbookError]] = {
    _CODE.UNAVAILABLE: errors.Unavailable,
    _CODE.CANCELLED: errors.Unavailable,
    _CODE.RESOURCE_EXHAUSTED: errors.Unavailable,
    _CODE.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    _CODE.INVALID_ARGUMENT: errors.InvalidRequest,
    _CODE.UNAUTHENTICATED: errors.Unauthenticated,
    _CODE.PERMISSION_DENIED: errors.PermissionDenied,
}
"""Meaning of a status that carries no class name; any other is a RollbookError that names the code."""

_SIZE_LIMIT_TEXT = "larger than max"
"""How gRPC words its own size limits, which share RESOURCE_EXHAUSTED with its limit on concurrent calls."""


def code_of(error: RollbookError) -> grpc.StatusCode:
    """Status code of an error; a class outside the table travels as its nearest listed ancestor."""
    return TABLE[_listed(error)]


def metadata_of(error: RollbookError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that lets the other side raise the same class."""
    named = ((CLASS_KEY, _listed(error).__name__),)
    if not isinstance(error, errors.Overloaded):
        return named
    wait_s = min(max(error.retry_after_s, 0.001), RETRY_AFTER_S_MAX)
    return (*named, (RETRY_AFTER_KEY, str(math.ceil(wait_s * 1000))))


def end_with(context: grpc.ServicerContext, error: RollbookError) -> None:
    """End a call on the server's side with the status of an error; does not return."""
    context.set_trailing_metadata(metadata_of(error))
    context.abort(code_of(error), message_of(error))


def message_of(error: Exception) -> str:
    """The error's text, shortened to what a status can carry once it is percent-encoded."""
    text = str(error).encode("utf-8", "replace").decode()
    kept, size = 0, 0
    for character in text:
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > MESSAGE_BYTES_MAX:
            return text[:kept] + "…"
        kept += 1
    return text


def error_of(call: grpc.Call) -> RollbookError:
    """The error that a failed call means on this side; ``call`` is the grpc.RpcError as caught."""
    code, details = call.code(), call.details() or ""
    said = dict(call.trailing_metadata() or ())
    if said.get(CLASS_KEY) in _BY_NAME:
        error = _BY_NAME[said[CLASS_KEY]](details)
        if isinstance(error, errors.Overloaded):
            error.retry_after_s = _retry_after_s(said.get(RETRY_AFTER_KEY, ""))
        return error
    if code is _CODE.UNAVAILABLE and UNVERIFIED_TEXT in details:
        return errors.Unauthenticated(
            f"{details}: what listens there is not this run's ledger server, or security.ca is not the authority that signed its "
            "certificate for the name it is called by"
        )
    if code is _CODE.RESOURCE_EXHAUSTED and _SIZE_LIMIT_TEXT in details:
        return errors.TooLarge(f"{details}; send or ask for fewer items per call")
    cls = _FOREIGN.get(code, RollbookError)
    name = code.name if code is not None else "no status"
    return cls(f"{name}: {details}")


def is_transport(call: grpc.Call) -> bool:
    """True when the status did not come from a ledger server, so that the connection itself is in doubt."""
    return all(key != CLASS_KEY for key, _ in call.trailing_metadata() or ())


def _retry_after_s(text: str) -> float:
    """Seconds a server asks for, within the bound; a foreign word is none."""
    return min(int(text) / 1000, RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0.0


def is_elsewhere(error: RollbookError) -> bool:
    """True when a failed call is better repeated at another server: nobody answered there, or not the holder of the role.

    Args:
        error: as raised from the gRPC failure that it means.
    """
    if isinstance(error, errors.ServerFenced | errors.Standby):
        return True
    return isinstance(error, errors.Unavailable) and isinstance(error.__cause__, grpc.RpcError) and is_transport(error.__cause__)


def _listed(error: RollbookError) -> type[RollbookError]:
    return next(cls for cls in type(error).__mro__ if cls in TABLE)
