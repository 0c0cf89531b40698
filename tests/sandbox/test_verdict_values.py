"""Values on their way out of a sandbox: what survives, what is refused before it is built, and what equals what."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.tasks.verdicts.plain import DEPTH_MAX, ITEMS_MAX, Opaque, Unplain
from rollbook.tasks.verdicts.values import (
    BYTES_MAX,
    DIGITS_MAX,
    NESTING_MAX,
    SAME_HASH_MAX,
    Unreadable,
    checked,
    decode,
    encode,
    equal,
    is_plain,
    parse,
)

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    KEYS | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False, places=3) | st.fractions(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


def there_and_back(value: object) -> object:
    return decode(checked(parse(json.dumps(encode(value)).encode())))


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_a_plain_value_survives_the_way_and_equals_itself(value: object) -> None:
    back = there_and_back(value)
    assert back == value and type(back) is type(value)
    assert equal(value, back) and equal(value, back, numbers="loose", sequences="loose") and is_plain(encode(value))


@settings(max_examples=300, deadline=None)
@given(VALUES, VALUES)
def test_values_that_python_tells_apart_are_not_equal(a: object, b: object) -> None:
    if equal(a, b):
        assert a == b
    assert equal(a, b) is equal(b, a)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode) | VALUES.map(lambda v: json.dumps(encode(v)).encode()[:-1]))
def test_whatever_comes_is_a_value_or_unreadable(line: bytes) -> None:
    try:
        decode(checked(parse(line)))
    except Unreadable:
        pass


@pytest.mark.parametrize(
    ("expected", "given_value", "strict", "loose"),
    [
        (1, 1, True, True), (1, True, False, False), (True, True, True, True), (0, False, False, False), (1, 1.0, False, True),
        (10**30, 10**30, True, True), (10**30, 1e30, False, True), (0.1 + 0.2, 0.3, False, True), (0.0, -0.0, True, True),
        (1e300 * 10**10, float("inf"), True, True), (float("inf"), 1e308, False, False),
        (float("nan"), float("nan"), False, False), ([float("nan")], [float("nan")], False, False),
        (complex(float("nan"), 0), complex(float("nan"), 0), False, False), (1 + 0j, 1, False, False),
        ({float("nan")}, {float("nan")}, False, False), ({float("nan"): 1}, {float("nan"): 1}, False, False),
        ("nan", "nan", True, True), ({"nan"}, {"nan"}, True, True), ("1", 1, False, False), (None, 0, False, False),
        ((1,), [1], False, True), (((1,),), [[1]], False, True), ([1, 2], [2, 1], False, False), ([1], [1, 1], False, False),
        ({1: 2}, {1: 2}, True, True), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        ({"a": 1}, {"a": 1, "b": 2}, False, False),
        ({1: 2}, {True: 2}, False, False), ({1: 2}, {1.0: 2}, False, True), ({1: 2}, {"1": 2}, False, False),
        ({1}, {1}, True, True), ({1}, {True}, False, False), ({1}, {1.0}, False, True), ({1}, frozenset({1}), True, True),
        ({(1, 2)}, {(1, 2)}, True, True), ({1}, [1], False, False), (b"a", "a", False, False),
        (b"a", bytearray(b"a"), True, True),
        (Decimal("1.0"), 1.0, False, False), (Fraction(1, 2), Fraction(2, 4), True, True),
        (Decimal("NaN"), Decimal("NaN"), False, False),
        (Counter("aab"), {"a": 2, "b": 1}, True, True),
    ],
)  # fmt: skip
def test_comparison_is_strict_unless_asked_otherwise(expected: object, given_value: object, strict: bool, loose: bool) -> None:
    assert equal(expected, given_value) is strict
    assert equal(expected, given_value, numbers="loose", sequences="loose") is loose


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"\xff", b'"\xc3"', b"NaN", b"Infinity", b"-Infinity", b"1.5", b"1e5", b'{"a": 1, "a": 2}', b'{"z": 1}', b"{}",
        b'{"t": 5}', b'{"t": [], "s": []}', b'{"i": "0b1"}', b'{"i": " 0x1"}', b'{"i": "0x_1"}', b'{"i": 1}', b'{"f": "1.5"}',
        b'{"f": null}', b'{"c": ["nan"]}', b'{"b": "0"}', b'{"b": "zz"}', b'{"D": "1E+99999"}', b'{"D": "sNaN"}',
        b'{"q": ["0x1", "0x0"]}', b'{"q": ["0x1", "-0x1"]}', b'{"o": ["f", 1]}', b'{"o": "f"}', b'{"s": [[1]]}',
        b'{"s": [{"s": []}]}',
        b'{"s": [{"o": ["f", true]}]}', b'{"z": [{"t": [[1]]}]}', b'{"d": [[1]]}', b'{"d": [[[1], 1]]}', b'{"d": {"a": 1}}',
        b'{"x": []}', b'{"__class__": "int"}', b'{"py/object": "os"}',
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(line: bytes) -> None:
    with pytest.raises(Unreadable):
        checked(parse(line))


def test_each_bound_holds_on_both_of_its_sides() -> None:
    assert parse(b'"' + b"x" * (BYTES_MAX - 2) + b'"') and parse(b"9" * DIGITS_MAX)
    assert parse(b"[" * NESTING_MAX + b"]" * NESTING_MAX) and checked(nested(DEPTH_MAX)) and encode(nested(DEPTH_MAX))
    assert parse(b'"' + rb"\"" * 400_000 + b'"') and parse(b'"' + b"[" * 9000 + b'"'), "what stands in a text is no bracket"
    assert there_and_back(10**15 - 1) == 10**15 - 1 and there_and_back(-(10**15)) == -(10**15)
    for line in (b'"' + b"x" * (BYTES_MAX - 1) + b'"', b"9" * (DIGITS_MAX + 1), b"[" * 500_000, b'{"a":' * 100_000,
                 b"[" * (NESTING_MAX + 1) + b"]" * (NESTING_MAX + 1), b'"' + rb"\"" * 400_000):  # fmt: skip
        with pytest.raises(Unreadable):
            parse(line)
    for value in (nested(DEPTH_MAX + 1), 10**15, {"i": "0x" + "f" * 16385}):
        with pytest.raises(Unreadable):
            checked(value)
    with pytest.raises(Unplain):
        encode(nested(DEPTH_MAX + 1))
    assert checked({"i": "0x" + "f" * 16384}) and len(encode(iter(range(ITEMS_MAX)))["it"]) == ITEMS_MAX
    with pytest.raises(Unplain):
        encode(iter(range(ITEMS_MAX + 1)))


def test_members_chosen_to_share_a_hash_are_refused() -> None:
    def colliding(n: int) -> dict:
        return encode({i * (2**61 - 1) for i in range(n)})

    assert checked(colliding(SAME_HASH_MAX)) and checked(encode(set(range(100_000))))
    for value in (colliding(SAME_HASH_MAX + 1), encode({(i * (2**61 - 1),): 0 for i in range(SAME_HASH_MAX + 1)})):
        with pytest.raises(Unreadable, match="one hash"):
            checked(value)


@pytest.mark.parametrize(("width", "depth"), [(2, 11), (3, 7), (8, 4), (24, 2)])
def test_sets_in_sets_of_one_hash_are_refused_before_they_take_long(width: int, depth: int) -> None:
    def colliding(depth: int, number: int) -> dict:
        """Differs from the others of its depth in one member of one hash with it."""
        if depth == 0:
            return {"i": hex(1 + number * (2**61 - 1))}
        return {"z": [colliding(depth - 1, i if i < width - 1 else i + number) for i in range(width)]}

    line = json.dumps({"s": [colliding(depth, number) for number in range(width)]}).encode()
    before = time.process_time()
    with pytest.raises(Unreadable, match="one hash"):
        checked(parse(line))
    assert time.process_time() - before < 5


def test_points_that_share_a_hash_are_no_attack() -> None:
    assert hash(-1) == hash(-2)
    for dimensions in range(1, 7):
        points = set(itertools.product(range(-3, 2) if dimensions < 6 else (-2, -1, 0), repeat=dimensions))
        assert there_and_back(points) == points
    shapes = {frozenset(itertools.product((x, x + 1), (y, y + 1))) for x in range(-5, 5) for y in range(-5, 5)}
    assert there_and_back(shapes) == shapes


def test_an_opaque_object_says_only_whether_it_is_true() -> None:
    opaque = there_and_back(len)
    assert isinstance(opaque, Opaque) and opaque and not is_plain(encode(len)) and not is_plain([{"t": [encode(iter([]))]}])
    for use in (lambda: opaque == 3, lambda: opaque != 3, lambda: opaque < 3, lambda: {opaque}, lambda: opaque in [3]):
        with pytest.raises(TypeError, match="no plain value"):
            use()
    with pytest.raises(Unplain):
        encode([opaque])


def test_numbers_keep_every_bit() -> None:
    for value in (0.1, 5e-324, math.pi, -0.0, 1.7976931348623157e308):
        assert there_and_back(value).hex() == value.hex()  # type: ignore[attr-defined]


@settings(max_examples=200, deadline=None)
@given(st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1 << 1024]), st.integers() | st.floats())
def test_numbers_of_any_size_are_compared(a: float, b: float) -> None:
    for x, y in ((a, b), (b, a), (a, a)):
        assert equal(x, y, numbers="loose") in (True, False)
    assert not equal(10**400, 1.5, numbers="loose") and equal(10**400, 10**400, numbers="loose")


@pytest.mark.parametrize("leaf", [{"i": "0x1"}, {"q": ["0x1", "0x3"]}, {"D": "1E+9999"}, {"c": ["0x1.8p+1", "0x1.8p+1"]}])
@pytest.mark.parametrize("tag", ["z", "t"])
def test_checking_takes_time_by_the_size_of_a_value_and_not_by_its_depth_as_well(leaf: dict, tag: str) -> None:
    leaves = [leaf] * (500_000 // len(json.dumps(leaf)))
    deep: dict = {"t": leaves}
    for _ in range(DEPTH_MAX - 4 if tag == "z" else DEPTH_MAX // 2 - 2):
        deep = {"z": [deep if tag == "z" else {"t": [deep]}, *range(SAME_HASH_MAX + 6)]}
    flat = {"z": [{"t": leaves}, *range(SAME_HASH_MAX + 6)]}
    spent = []
    gc.freeze()  # a whole collection walks over all that other tests have left, which takes longer than this
    try:
        for value in (flat, deep):
            began = time.process_time()
            checked(value)
            spent.append(time.process_time() - began)
    finally:
        gc.unfreeze()
    assert spent[1] < 5 * spent[0] + 0.2, spent
