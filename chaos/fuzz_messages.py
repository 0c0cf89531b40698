"""Malformed and hostile messages, made from valid ones by walking their descriptors, and from raw bytes.

Owns what is wrong with a message and how sure it is that nobody may accept it (``Hostile.sure``). Never sends anything. Every
choice comes from the generator that is passed in, so a seed names its messages.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 3, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1)
DOUBLES = (float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 0.0, 1e-320, 1e9, 1e18, 1e300, -1e300)
NOT_FINITE = DOUBLES[:3]
DEEP = 5_000
"""Levels of nested JSON: more than a reader's stack holds, in a text of ordinary size."""
TEXTS = (
    "", "\x00", "a\x00b", "\ufffe\uffff", "\U0010ffff", "\u202e\u0301" * 40, "' OR 1=1; DROP TABLE sample; --", "%s%n%(x)s{0}",
    "../../../../etc/passwd", "/etc/passwd", "x" * 201, "y" * 5_000, "z" * 300_000, "é" * 3000, "\r\n\x1b[2J", "w.9999999999999",
    "w." + "9" * 5_000, "nan", "-1", "None",
)  # fmt: skip
BROKEN_JSON = (
    "", "{", "nul", "[]", '"text"', "7", "{}{}", '{"a": }', "\x00", "[" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * DEEP + "]" * DEEP, '{"a": ' + "9" * 5000 + "}", "z" * 300_000,
)  # fmt: skip
"""No JSON, no object, or nested deeper than any reader goes."""
ODD_JSON = (
    '{"a": NaN}', '{"a": "\\ud800"}', '{"a": "\\u0000"}', '{"a": 1, "a": 2}', '{"__proto__": {}}', '{"unsafe": 1}',
    '{"name": []}', '{"sandbox": {"backend": []}}', '{"config": 1}', '{"config": {"learner": []}, "inputs": 3}',
    '{"inputs": {"a": {}}}',
    '{"inputs": {"model/x.safetensors": 1}}', '{"learner": {"lr": [1]}}', '{"run": {"id": 5}, "task": null}', '{"a": "b"}',
)  # fmt: skip
JSON_OBJECTS = {"config_json", "manifest_json", "metrics_json", "probe_json", "labels_json", "state_json"}
"""Fields whose text the ledger or its callers read as an object."""
OPTIONAL = {"loaded"}
"""Message fields that may be absent."""
ANSWERED_ANYWAY = {"wait_s", "difference", "known_version"}
"""Numbers of which every value means something."""
ASKING = {"Heartbeat", "StepMetrics", "Payloads", "FeedDemand", "ReleaseRole"}
"""Calls that are answered with what there is, whatever they name."""
NUMBERED = {"ordinal", "sibling", "call_index", "step", "lineage", "parent", "fork_step", "version", "n_max"}
"""Numbers of things of which the run has few, counted from zero."""
TERM = "RoleTerm"
REPEATS = (2, 3, 50, 5_000)
TRIES_MAX = 80


MAYBE, NO_EFFECT, REFUSED = 0, 1, 2
"""It may mean something; it must change nothing; it must be refused whatever is stored."""
Change = tuple[str, int]


@dataclass(frozen=True)
class Hostile:
    """A message, what is wrong with it, and how sure that is."""

    method: str
    data: bytes
    what: str
    sure: int


def mutate(rng: random.Random, method: str, message: Message, *, live: bool) -> Hostile:
    """One to three fields of a copy of ``message`` made wrong; of a ``live`` one at last one that nobody may accept."""
    copy = type(message)()
    copy.CopyFrom(message)
    whats: list[str] = []
    used: set[str] = set()
    sure, left, tries = MAYBE, rng.choice((1, 1, 1, 2, 3)), 0
    while left > 0 or (live and sure == MAYBE):
        owner, field = rng.choice(list(_places(copy)))
        name = f"{owner.DESCRIPTOR.name}.{field.name}"
        tries += 1
        if tries > TRIES_MAX:  # a small message has nothing left to change
            copy.run_id = "another"  # type: ignore[attr-defined]
            whats.append("run_id = another")
            sure = REFUSED
            break
        if name in used or (live and field.is_repeated and method != "AppendGroups"):
            continue  # copies of a valid item would be valid
        used.add(name)
        what, sure = _change(rng, method, owner, field)
        whats.append(f"{name} {what}")
        left -= 1
    return Hostile(method, copy.SerializePartialToString(), "; ".join(whats), sure)


def raw(rng: random.Random, method: str, message: Message) -> Hostile:
    """Wire bytes that were cut, turned, repeated or made up."""
    data = bytearray(message.SerializeToString())
    kind = rng.choice(("random", "cut", "flip", "flip", "insert", "double", "varint", "group", "length", "foreign"))
    if kind == "random":
        data = bytearray(rng.randbytes(rng.choice((0, 1, 2, 7, 64, 1000, 20_000))))
    elif kind == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif kind == "flip":
        for _ in range(rng.choice((1, 1, 2, 8))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "insert":
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.randbytes(rng.randrange(1, 12))
    elif kind == "double":
        data *= rng.choice((2, 3, 20))
    elif kind == "varint":
        data += b"\xff" * rng.randrange(1, 40)
    elif kind == "group":
        data += b"\x0b" * rng.choice((1, 200, 20_000))  # groups that begin and never end
    elif kind == "length":
        data += b"\x0a" + b"\xff\xff\xff\xff\x0f" + rng.randbytes(8)  # a text of 4 GiB that is not there
    else:
        data = bytearray(b"\x0a\xf2\x01" + bytes(data))
    return Hostile(method, bytes(data), f"raw: {kind}", MAYBE)


def _change(rng: random.Random, method: str, owner: Message, field: FieldDescriptor) -> Change:
    """Make one field wrong. Returns (how, how sure it is that nobody may accept it)."""
    if field.is_repeated:
        return _repeated(rng, owner, field)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        owner.ClearField(field.name)
        return "is missing", MAYBE if field.name in OPTIONAL else REFUSED
    how, sure = _SCALARS[field.type](rng, owner, field)
    asks = method in ASKING or (owner.DESCRIPTOR.name == "PolicyVersion" and method != "PublishVersion")
    return how, MAYBE if asks and sure == NO_EFFECT else sure


def _places(message: Message) -> Any:
    """Every (message, field) that can be made wrong: set submessages are entered, the first items of repeated ones too."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            yield message, field
        elif field.is_repeated:
            yield message, field
            for item in value[:2]:
                yield from _places(item)
        elif message.HasField(field.name):
            yield message, field
            yield from _places(value)


def _repeated(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    values = getattr(owner, field.name)
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        values.extend([rng.choice(TEXTS) for _ in range(rng.choice((1, 3, 200)))])
        return f"has {len(values)} entries", MAYBE
    in_order = owner.DESCRIPTOR.name == "AppendGroupsRequest"
    if not values:
        values.add()
        return "has an empty entry", NO_EFFECT if in_order else REFUSED
    times = rng.choice(REPEATS)
    if values[0].ByteSize() > 2_000:
        times = 2  # what is large already is not also repeated
    for _ in range(times):
        values.add().CopyFrom(values[0])
    return f"has {times} entries more", NO_EFFECT if in_order else MAYBE


def _integer(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    kind, name, old = owner.DESCRIPTOR.name, field.name, getattr(owner, field.name)
    value = max(-(2**63), min(2**63 - 1, rng.choice((*INTEGERS, old - 1, old + 1, old + 2))))
    setattr(owner, name, value)
    outside = value < 0 or value >= 2**15
    wrong = (
        (name == "lease_token" and (value < 1 or value > old + 2))
        or (kind == TERM and name == "epoch" and value != old)
        or (name == "n_siblings" and (value < 1 or value > 2**31))
        or (kind == "GroupSpec" and name in ("ordinal", "refills") and (value != old or name == "refills"))
        or (name == "n_bytes" and value < 0)
        or (name in NUMBERED and outside)
        or (kind == "Cursor" and value != old)
    )
    return f"= {value}", NO_EFFECT if wrong else MAYBE


def _double(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    value, kind = rng.choice(DOUBLES), owner.DESCRIPTOR.name
    setattr(owner, field.name, value)
    finite = value == value and abs(value) != float("inf")
    if field.name in ANSWERED_ANYWAY or kind in ("FailureReport", "RunRules"):
        wrong = False
    elif field.name == "ttl_s":
        wrong = not (finite and 0 < value <= 86_400) and kind != TERM
    else:
        wrong = not finite or (field.name == "tolerance" and value < 0)
    return f"= {value}", NO_EFFECT if wrong else MAYBE


def _text(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    kind, name, old = owner.DESCRIPTOR.name, field.name, getattr(owner, field.name)
    if name.endswith("_json"):
        broken = rng.random() < 0.7
        value = rng.choice(BROKEN_JSON if broken else ODD_JSON)
        setattr(owner, name, value)
        return f"= {_short(value)}", NO_EFFECT if broken and name in JSON_OBJECTS and kind != "RunRecord" else MAYBE
    value = rng.choice(TEXTS)
    setattr(owner, name, value)
    if name == "run_id" and value != old:
        return f"= {_short(value)}", REFUSED
    wrong = (
        (kind == TERM and name == "holder" and value != old)
        or (name in ("path", "dir_name") and (".." in value or value.startswith("/") or "\x00" in value))
        or (name in ("incarnation", "stream", "request_digest", "digest", "manifest_digest") and "\x00" in value)
        or (name == "chain_digest" and value != old)
    )
    return f"= {_short(value)}", NO_EFFECT if wrong else MAYBE


def _bytes(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    old = getattr(owner, field.name)
    choices: dict[str, Callable[[], bytes]] = {
        "shorter": lambda: old[:-4],
        "not whole": lambda: old + b"\x01",
        "longer": lambda: old + b"\x01\x00\x00\x00",
        "empty": lambda: b"",
        "nan": lambda: struct.pack("<f", float("nan")) * (len(old) // 4),
        "infinite": lambda: struct.pack("<f", float("-inf")) * (len(old) // 4),
        "high": lambda: struct.pack("<f", 0.5) * (len(old) // 4),
        "negative": lambda: struct.pack("<i", -1) * (len(old) // 4),
        "future": lambda: struct.pack("<i", 2**31 - 1) * (len(old) // 4),
        "mixed": lambda: struct.pack("<i", -7) + old[4:],
        "random": lambda: rng.randbytes(len(old)),
        "large": lambda: old * (200_000 // max(1, len(old))),
    }
    how = rng.choice(list(choices))
    value = choices[how]()
    setattr(owner, field.name, value)
    wrong = {
        "token_ids": {"shorter", "not whole", "longer", "empty", "negative", "mixed", "large"},
        "logprobs": {"shorter", "not whole", "longer", "empty", "nan", "infinite", "high", "large"},
        "versions": {"shorter", "not whole", "longer", "empty", "negative", "future", "mixed", "large"},
        "loss_mask": {"not whole", "longer", "nan", "high", "negative", "future", "mixed", "large"},
        "prompt_ids": {"not whole", "empty", "negative", "mixed"},
    }
    certain = value != old and how in wrong[field.name] and (field.name != "loss_mask" or value != b"")
    return f"is {how} ({len(value)} bytes)", NO_EFFECT if certain else MAYBE


def _enum(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    known = [v.number for v in field.enum_type.values]
    value, old = rng.choice((0, 99, -1, 2**31 - 1, *known)), getattr(owner, field.name)
    setattr(owner, field.name, value)
    if value == 0 or value not in known:
        return f"= {value}", REFUSED
    return f"= {value}", NO_EFFECT if owner.DESCRIPTOR.name == TERM and value != old else MAYBE


def _bool(rng: random.Random, owner: Message, field: FieldDescriptor) -> Change:
    setattr(owner, field.name, not getattr(owner, field.name))
    return f"= {getattr(owner, field.name)}", MAYBE


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:24]}… ({len(text)} characters)")


_SCALARS: dict[int, Callable[[random.Random, Any, Any], Change]] = {
    FieldDescriptor.TYPE_INT64: _integer,
    FieldDescriptor.TYPE_DOUBLE: _double,
    FieldDescriptor.TYPE_STRING: _text,
    FieldDescriptor.TYPE_BYTES: _bytes,
    FieldDescriptor.TYPE_ENUM: _enum,
    FieldDescriptor.TYPE_BOOL: _bool,
}
