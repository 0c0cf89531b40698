"""What a request must be before anything is done with it: bytes of its message, with texts, numbers and lists inside bounds.

Owns decoding and the bounds of single fields, by the kind of the field, so that a new message is bounded by how its fields are
named. Never looks at the ledger and never judges one field by another; what depends on what is stored is a verb's to refuse.
Bytes that are no message are the sender's error (INVALID_ARGUMENT), not an internal one, and leave no trace in the log. A call
whose deadline is over before a thread was free for it is not begun: a server that works for callers who are gone is too late
for all the others too.

Free text of workers (``reason``, ``evidence_json``) and numbers of single samples are not bounded here: they are cleaned, or
refused item by item, because one broken item must not hold up the others of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from rollbook.core import bounds
from rollbook.core.errors import DeadlineExceeded, InvalidRequest, RollbookError
from rollbook.observe.metrics import rpc_ended
from rollbook.rpc import status

PACKAGE = "rollbook.v1"
NAMES = frozenset(
    "run_id holder supersede incarnation stream request_id tool late_submit straggler digest config_digest manifest_digest "
    "chain_digest request_digest accept traceparents".split()
)
"""Ids and names, as wide as their columns."""
LABELS = frozenset("path dir_name host engine".split())
OBJECTS = frozenset("config_json manifest_json metrics_json probe_json labels_json state_json".split())
"""Texts that are read as JSON objects later."""
CLEANED = frozenset("reason evidence_json traceparent".split())
"""Texts that are cleaned where they are stored, or not looked at."""
ITEMS = frozenset(["Submission", "FailureReport"])
"""Messages that are answered one by one: only their names are bounded here."""
NUMBERS = {
    "PolicyVersion.lineage": (0, bounds.INT32_MAX), "PolicyVersion.version": (0, bounds.INT32_MAX),
    "PolicyVersion.n_bytes": (0, 2**63 - 1), "GroupSpec.n_siblings": (1, bounds.SIBLINGS_MAX),
    "RunRecord.revision": (0, bounds.INT32_MAX),
}  # fmt: skip
INT32 = frozenset("sibling call_index lineage parent step fork_step first_step version".split())
"""Numbers of rows whose column holds 32 bits: a larger one names no row, and PostgreSQL fails on the question."""
LISTS = {"HeartbeatRequest.leases": 10_000, "OpenRunRequest.accept": 10_000}
"""Most entries; the lists of other calls are bounded by their verbs."""

Check = Callable[[Message], None]
_checks: dict[str, list[Check]] = {}


def check(message: Message) -> None:
    """Raise InvalidRequest for the first field of ``message``, at any depth, that is out of bounds."""
    kind = message.DESCRIPTOR.full_name
    checks = _checks.get(kind)
    if checks is None:
        checks = _checks[kind] = list(_checks_of(message.DESCRIPTOR))
    for one in checks:
        one(message)


def _checks_of(descriptor: Descriptor) -> Iterator[Check]:
    for field in descriptor.fields:
        what = f"{descriptor.name}.{field.name}"
        repeated = field.is_repeated
        if repeated and what in LISTS:
            yield _count(field.name, what, LISTS[what])
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if descriptor.name not in ITEMS:
                yield _inner(field.name, repeated)
        elif field.type == FieldDescriptor.TYPE_STRING and field.name not in CLEANED:
            yield _text(field.name, what, repeated)
        elif what in NUMBERS:
            yield _number(field.name, what, *NUMBERS[what])
        elif field.name in INT32 and descriptor.name not in ITEMS:
            yield _number(field.name, what, -bounds.INT32_MAX, bounds.INT32_MAX)


def _inner(name: str, repeated: bool) -> Check:
    def inner(message: Message) -> None:
        if repeated:
            for item in getattr(message, name):
                check(item)
        elif message.HasField(name):
            check(getattr(message, name))

    return inner


def _count(name: str, what: str, most: int) -> Check:
    def count(message: Message) -> None:
        if len(getattr(message, name)) > most:
            raise InvalidRequest(f"{what}: {len(getattr(message, name))} entries in one call; at most {most}")

    return count


def _text(name: str, what: str, repeated: bool) -> Check:
    chars_max = bounds.NAME_CHARS_MAX if name in NAMES else bounds.LABEL_CHARS_MAX if name in LABELS else None

    def text(message: Message) -> None:
        value = getattr(message, name)
        for one in value if repeated else (value,):
            bounds.plain(one, what, chars_max)
        if name in OBJECTS and value:
            bounds.json_object(value, what)

    return text


def _number(name: str, what: str, low: int, high: int) -> Check:
    def number(message: Message) -> None:
        bounds.within(getattr(message, name), what, low, high)

    return number


class Intake(grpc.ServerInterceptor):
    """Decodes the requests of every method with one request, and refuses what is no message or out of bounds."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = continuation(handler_call_details)
            foreign = not method.startswith(f"/{PACKAGE}.")
            if handler is None or handler.request_streaming or (foreign and handler.response_streaming):
                return handler  # not remembered, since anybody can ask for methods that do not exist; gRPC's own streams differ
            self._wrapped[method] = _decoding(method.rpartition("/")[2], handler)
        return self._wrapped[method]


def _decoding(method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    decode = handler.request_deserializer

    def read(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            if context.time_remaining() == 0.0:
                raise DeadlineExceeded("the call waited longer for a thread than its caller for the answer; nothing was done")
            message = decode(data)
            if message.DESCRIPTOR.file.package == PACKAGE:
                check(message)
            return message
        except DecodeError:
            text = f"these {len(data)} bytes are no request of this method; check the release of both sides"
            refused: RollbookError = InvalidRequest(text)
        except (DeadlineExceeded, InvalidRequest) as error:
            refused = error
        rpc_ended(method, 0.0, status.code_of(refused).name)
        context.set_trailing_metadata(status.metadata_of(refused))
        context.abort(status.code_of(refused), status.message_of(refused))

    def unary(data: bytes, context: grpc.ServicerContext) -> Any:
        return handler.unary_unary(read(data, context), context)

    def stream(data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from handler.unary_stream(read(data, context), context)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(unary, response_serializer=handler.response_serializer)
