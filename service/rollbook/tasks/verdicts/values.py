"""Values on their way between sandboxes: JSON with tags for what JSON lacks, parsed with every bound checked first.

Owns the encoding and the strict comparison. What comes out of a sandbox is untrusted: it is decoded to plain types only, so an
object of the candidate's own class, and its ``__eq__``, never leaves the candidate's sandbox.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

BYTES_MAX = 1 << 20
DEPTH_MAX = 60
DIGITS_MAX = 4000

ENCODING = '''
def _encode(value, depth=0):
    kind = type(value)
    if depth > 60:
        raise ValueError("nested too deeply")
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int):
        return int(value) if -(10**15) < value < 10**15 else {"i": hex(value)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return [_encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": [_encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {"s": [_encode(item, depth + 1) for item in list(value)]}
    if isinstance(value, dict):
        return {"d": [[_encode(k, depth + 1), _encode(v, depth + 1)] for k, v in dict.items(value)]}
    return {"o": [kind.__name__[:40], bool(value)]}


class _Opaque:
    """Something that is no plain value: it is true or false, and equal to nothing."""

    def __init__(self, kind, truth):
        self.kind, self.truth = kind, truth

    def __bool__(self):
        return self.truth

    def __eq__(self, other):
        return False

    __hash__ = None

    def __repr__(self):
        return f"<a {self.kind} of the candidate>"


def _decode(value):
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    (tag, content), = value.items()
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "o":
        return _Opaque(str(content[0]), content[1] is True)
    if tag == "t":
        return tuple(_decode(item) for item in content)
    if tag == "s":
        return {_decode(item) for item in content}
    if tag == "d":
        return {_decode(k): _decode(v) for k, v in content}
    raise ValueError(f"unknown tag {tag!r}")
'''
"""Both directions, as text: the same functions run in every sandbox and, below, here."""

_namespace: dict[str, Any] = {}
exec(ENCODING, _namespace)
encode = _namespace["_encode"]
"""A plain value to what ``json.dumps`` takes; anything else becomes opaque. Raises ValueError (too deep)."""


class Unreadable(ValueError):
    """What came out of a sandbox is not what the protocol allows."""


def parse(line: bytes) -> Any:
    """JSON of one line, bounds checked before anything is built. Raises Unreadable."""
    if len(line) > BYTES_MAX:
        raise Unreadable(f"{len(line)} bytes, at most {BYTES_MAX}")
    if (depth := _depth(line)) > 2 * DEPTH_MAX + 8:
        raise Unreadable(f"nested {depth} deep")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def integer(digits: str) -> int:
        if len(digits) > DIGITS_MAX:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise ValueError("a key twice")
        return found

    try:
        return json.loads(line.decode(), parse_constant=refuse, parse_int=integer, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from None


def decode(value: Any) -> Any:
    """A parsed value as plain Python. Raises Unreadable."""
    try:
        return _namespace["_decode"](value)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Unreadable(f"no value: {error}") from None


def _depth(line: bytes) -> int:
    """Deepest nesting of brackets outside strings."""
    depth = deepest = 0
    in_string = escaped = False
    for byte in line:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def equal(expected: Any, given: Any, *, numbers: str = "strict", sequences: str = "strict") -> bool:
    """Strict equality of plain values: types count, NaN equals nothing, order counts in sequences only.

    ``numbers = "loose"``: 1 equals 1.0 (never True), floats within 1e-9 relative. ``sequences = "loose"``: a tuple equals a list.
    """
    a, b = expected, given
    if sequences == "loose":
        a, b = (list(x) if isinstance(x, tuple) else x for x in (a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b) and a == b
    if numbers == "loose" and isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or (math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y, numbers=numbers, sequences=sequences) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k], numbers=numbers, sequences=sequences) for k in a)
    return bool(a == b)
