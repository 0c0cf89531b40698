"""What comes out of a candidate's sandbox: checked before it is believed to be a value, and compared here.

Owns the bounds on untrusted text and the strict comparison, which works on the encoding itself, so that comparing builds no
object. Every bound is checked before what it bounds is built. Never calls anything the candidate defined.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rollbook.tasks.verdicts.plain import DEPTH_MAX, SMALL_INT, decode, encode

__all__ = ["Unreadable", "checked", "decode", "encode", "equal", "parse", "setup_of"]

BYTES_MAX = 1 << 20
NESTING_MAX = 3 * DEPTH_MAX + 8
"""Brackets of an encoded value: at most an object, a list and a pair for each level."""
DIGITS_MAX = 17
"""Of a number of JSON's own; larger ones are hexadecimal."""
SAME_HASH_MAX = 64
"""Members of one set or dict with one hash: more are chosen to make whoever builds it slow."""
COMPARISONS_MAX = SAME_HASH_MAX
"""For each scalar in a set or dict, while it is built of members that share hashes: in nested ones their numbers multiply."""

_HEX = re.compile(r"-?0x[0-9a-f]{1,16384}")
_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p(?:-[0-9]{1,4}|\+(?:[0-9]{1,3}|10[01][0-9]|102[0-3]))|-?inf|nan")
_DECIMAL = re.compile(r"-?(?:[0-9]{1,4000}(?:\.[0-9]{1,4000})?(?:E[+-][0-9]{1,4})?|Infinity|NaN)")
_BYTES = re.compile(r"(?:[0-9a-f]{2})*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class Unreadable(ValueError):
    """What came out of a sandbox is not what the protocol allows."""


def setup_of(side: str) -> str:
    """Trusted text for ``Program.setup``: the encoding, then the named side of a protocol."""
    here = Path(__file__).parent
    own = (here / f"{side}.py").read_text(encoding="utf-8")
    return (here / "plain.py").read_text(encoding="utf-8") + re.sub(r"(?m)^from rollbook\..*$", "", own)


def parse(line: bytes) -> Any:
    """JSON of one line. Raises Unreadable."""
    if len(line) > BYTES_MAX:
        raise Unreadable(f"{len(line)} bytes, at most {BYTES_MAX}")
    _check_nesting(line)
    try:
        return json.loads(
            line.decode(), parse_constant=_refuse, parse_float=_refuse, parse_int=_integer, object_pairs_hook=_object
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not written as this protocol writes it")


def _integer(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("a key twice")
    return found


def _check_nesting(line: bytes) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", line)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > NESTING_MAX:
            raise Unreadable(f"nested more than {NESTING_MAX} deep")


def checked(value: Any) -> Any:
    """A parsed value, unchanged, when it is an encoding of a plain value. Raises Unreadable."""
    _check(value, 0, False)
    return value


class _Built(NamedTuple):
    value: Any
    """The value itself where it must be hashable: members are built once, from the inside."""
    scalars: int = 1
    comparisons: int = 1
    """Of scalars, at most, to tell it from another of the same hash."""


def _check(value: Any, depth: int, hashable: bool) -> _Built:
    """Raises Unreadable."""
    if depth > DEPTH_MAX:
        raise Unreadable(f"nested more than {DEPTH_MAX} deep")
    if isinstance(value, list):
        if hashable:
            raise Unreadable("a list where only a hashable value can stand")
        for item in value:
            _check(item, depth + 1, False)
    elif isinstance(value, dict):
        return _check_tagged(value, depth, hashable)
    elif type(value) is int and not -SMALL_INT < value < SMALL_INT:
        raise Unreadable("a large number that is not hexadecimal")
    return _Built(value)


def _check_tagged(value: dict[str, Any], depth: int, hashable: bool) -> _Built:
    if len(value) != 1:
        raise Unreadable(f"an object of {len(value)} tags")
    tag, content = next(iter(value.items()))
    if tag in _SCALARS:
        if not _SCALARS[tag](content):
            raise Unreadable(f"no value of tag {tag!r}")
        if tag == "o" and hashable:
            raise Unreadable("an object that is no plain value, where only a hashable value can stand")
        return _Built(decode(value) if hashable else value)
    if tag not in ("t", "s", "z", "it", "d") or not isinstance(content, list):
        raise Unreadable(f"no value of tag {tag[:20]!r}")
    if hashable and tag not in ("t", "z"):
        raise Unreadable(f"a value of tag {tag!r} where only a hashable value can stand")
    if tag == "d" and not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise Unreadable("a dict that is not of pairs")
    keys = [pair[0] for pair in content] if tag == "d" else content
    found = [_check(item, depth + 1, hashable or tag in ("s", "z", "d")) for item in keys]
    if tag == "d":
        for _, item in content:
            _check(item, depth + 1, False)
    more = _comparisons(found) if tag in ("s", "z", "d") else 0
    if not hashable:
        return _Built(value)
    kind = tuple if tag == "t" else frozenset
    return _Built(
        kind(member.value for member in found),
        1 + sum(member.scalars for member in found),
        1 + more + sum(member.comparisons for member in found),
    )


def _comparisons(found: list[_Built]) -> int:
    """How many more comparisons of scalars it takes, at most, that members share a hash. Raises Unreadable."""
    hashes = [hash(member.value) for member in found]
    sharing = Counter(hashes)
    most = max(sharing.values(), default=0)
    n = sum((sharing[code] - 1) * member.comparisons for code, member in zip(hashes, found, strict=True))
    if most > SAME_HASH_MAX or n > COMPARISONS_MAX * sum(member.scalars for member in found):
        raise Unreadable(f"{most} members of one hash")
    return n


def _is_text(pattern: re.Pattern[str], content: Any) -> bool:
    return isinstance(content, str) and pattern.fullmatch(content) is not None


def _is_pair(pattern: re.Pattern[str], content: Any) -> bool:
    return isinstance(content, list) and len(content) == 2 and all(_is_text(pattern, part) for part in content)


_SCALARS = {
    "i": lambda content: _is_text(_HEX, content), "f": lambda content: _is_text(_FLOAT, content),
    "c": lambda content: _is_pair(_FLOAT, content), "b": lambda content: _is_text(_BYTES, content),
    "D": lambda content: _is_text(_DECIMAL, content),
    "q": lambda content: _is_pair(_HEX, content) and int(content[1], 16) > 0,
    "o": lambda content: (
        isinstance(content, list) and len(content) == 2 and isinstance(content[0], str) and len(content[0]) <= 40
        and isinstance(content[1], bool)
    ),
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether a checked value holds no iterator and no opaque object, which only tests can make something of."""
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    if not isinstance(value, dict):
        return True
    return not value.keys() & {"it", "o"} and is_plain(list(value.values()))


def equal(expected: Any, given: Any, *, numbers: str = "strict", sequences: str = "strict") -> bool:
    """``same`` of plain values. Raises Unplain (``expected`` or ``given`` has no encoding)."""
    return same(encode(expected), encode(given), numbers=numbers, sequences=sequences)


def same(expected: Any, given: Any, *, numbers: str = "strict", sequences: str = "strict") -> bool:
    """Strict equality of encoded values: types count, NaN equals nothing, order counts in sequences only.

    ``numbers = "loose"``: 1 equals 1.0 (never True), floats equal within 1e-9 of their size, but not as keys and members of sets.
    ``sequences = "loose"``: a tuple equals a list.
    """
    a, b = (_untagged(value, numbers, sequences) for value in (expected, given))
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, int | float) or not isinstance(b, int | float):
        if type(a) is not type(b):
            return False
    elif numbers == "loose":
        return a == b or _close(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y, numbers=numbers, sequences=sequences) for x, y in zip(a, b, strict=True))
    if not isinstance(a, dict):
        return type(a) is type(b) and bool(a == b)
    (tag, x), (other, y) = next(iter(a.items())), next(iter(b.items()))
    if tag != other or a == {"D": "NaN"}:
        return False
    if tag == "t":
        return same(x, y, numbers=numbers, sequences=sequences)
    if tag == "d":
        left, right = ({_key(key, numbers, sequences): item for key, item in pairs} for pairs in (x, y))
        return _no_nan(left) and left.keys() == right.keys() and all(
            same(left[key], right[key], numbers=numbers, sequences=sequences) for key in left
        )  # fmt: skip
    if tag == "s":
        left_set, right_set = ({_key(item, numbers, sequences) for item in items} for items in (x, y))
        return _no_nan(left_set) and left_set == right_set
    return bool(x == y)


def _close(a: float, b: float) -> bool:
    """Whether two numbers are as good as equal; False where one is too large to be a float."""
    try:
        return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:
        return False


def _no_nan(keys: Iterable[str]) -> bool:
    return not any("nan" in key.lower() for key in keys)


def _untagged(value: Any, numbers: str, sequences: str) -> Any:
    """Numbers as numbers, sets of both kinds as one, and a tuple as a list where that is the same."""
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag == "t" and sequences == "loose":
        return content
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(*map(float.fromhex, content))
    return {"s": content} if tag == "z" else value


def _key(value: Any, numbers: str, sequences: str) -> str:
    """Text that two keys share exactly when they are the same; NaN says ``nan``, outside of the quotes of a text."""
    plain = _untagged(value, numbers, sequences)
    if isinstance(plain, bool) or plain is None:
        return str(plain)
    if isinstance(plain, str):
        return "'" + plain.encode("utf-8", "surrogatepass").hex()
    if isinstance(plain, float) and plain.is_integer() and numbers == "loose":
        plain = int(plain)
    if isinstance(plain, int):
        return f"i{plain:x}"
    if isinstance(plain, float):
        return "nan" if plain != plain else f"f{(plain + 0.0).hex()}"
    if isinstance(plain, complex):
        return f"c{plain.real + 0.0}:{plain.imag + 0.0}"
    if isinstance(plain, list):
        return "[" + ",".join(_key(item, numbers, sequences) for item in plain) + "]"
    tag, content = next(iter(plain.items()))
    if tag == "t":
        return "(" + ",".join(_key(item, numbers, sequences) for item in content) + ")"
    if tag == "s":
        return "{" + ",".join(sorted({_key(item, numbers, sequences) for item in content})) + "}"
    return json.dumps(plain)
