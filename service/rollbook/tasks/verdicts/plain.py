"""Plain values to and from JSON, with tags for what JSON lacks.

Owns the encoding. The text of this file is also what every sandbox gets, so it imports nothing of ours. ``encode`` meets objects
of the candidate, whose methods may lie or loop: whatever they do happens in the candidate's own sandbox. ``decode`` makes plain
types only, so no object of the candidate, and no ``__eq__`` of it, exists anywhere else.

Encoded: null, booleans, texts and small integers are themselves, a list is a list, and everything else is an object of one tag:
``i`` integer (hexadecimal), ``f`` float (hexadecimal), ``c`` complex, ``b`` bytes, ``D`` Decimal, ``q`` Fraction, ``t`` tuple,
``s`` set, ``z`` frozenset, ``d`` dict (pairs), ``it`` what an iterator gave, ``o`` opaque (name of its type, its truth).
"""

import collections.abc
import itertools
import sys

DEPTH_MAX = 60
ITEMS_MAX = 100_000
"""Items taken from an iterator, which may be endless."""
SMALL_INT = 10**15
"""Below it an integer is written as JSON's own number."""


class Unplain(Exception):
    """A value that has no encoding."""


class TooDeep(Unplain):
    """A value that is nested more deeply than ``DEPTH_MAX``."""


class OpaqueUsed(Unplain):
    """A stand-in for an object of the program, which cannot go back to it."""


class Opaque:
    """Stands for an object that is no plain value: true or false, and not to be compared."""

    def __init__(self, kind, truth):
        self.kind, self.truth = kind, truth

    def __bool__(self):
        return self.truth

    def __repr__(self):
        return f"<a {self.kind} of the program>"

    def _refuse(self, *others):
        raise TypeError(f"{self!r} is no plain value")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse


def encode(value, depth=0):
    """What ``json.dumps`` takes. Raises Unplain (nested too deeply, too many items), whatever an object's own methods raise."""
    kind = type(value)
    if depth > DEPTH_MAX:
        raise TooDeep(f"nested more than {DEPTH_MAX} deep")
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -SMALL_INT < number < SMALL_INT else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": [encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"s": [encode(item, depth + 1) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"z": [encode(item, depth + 1) for item in frozenset.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]}
    if (module := sys.modules.get("decimal")) and isinstance(value, module.Decimal):
        return {"D": module.Decimal.__str__(value)}
    if (module := sys.modules.get("fractions")) and isinstance(value, module.Fraction):
        return {"q": [hex(value.numerator), hex(value.denominator)]}
    if isinstance(value, collections.abc.Iterator):
        items = list(itertools.islice(value, ITEMS_MAX + 1))
        if len(items) > ITEMS_MAX:
            raise Unplain(f"an iterator of more than {ITEMS_MAX} items")
        return {"it": [encode(item, depth + 1) for item in items]}
    if isinstance(value, Opaque):
        raise OpaqueUsed(f"{value!r} is no plain value")
    return {"o": [kind.__name__[:40], bool(value)]}


def decode(value):
    """The plain value. Raises ValueError, TypeError (not encoded as above)."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(item) for item in content])
    if tag == "d":
        return {decode(key): decode(item) for key, item in content}
    return _SCALARS[tag](content)


def _decimal(text):
    import decimal

    return decimal.Decimal(text)


def _fraction(parts):
    import fractions

    return fractions.Fraction(int(parts[0], 16), int(parts[1], 16))


_SEQUENCES = {"t": tuple, "s": set, "z": frozenset, "it": iter}
_SCALARS = {
    "i": lambda text: int(text, 16), "f": float.fromhex, "c": lambda parts: complex(*map(float.fromhex, parts)),
    "b": bytes.fromhex, "D": _decimal, "q": _fraction, "o": lambda parts: Opaque(*parts),
}  # fmt: skip
