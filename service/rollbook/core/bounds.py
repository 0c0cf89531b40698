"""What a text, a path or a list may be at most, wherever it comes from.

Owns the checks that storage and readers rely on: a text that one database cannot hold, JSON deeper than a reader's stack, a path
that leaves the run directory. Never knows a verb or a message. Refuses with ``InvalidRequest`` that names the field.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

from rollbook.core.errors import InvalidRequest

NAME_CHARS_MAX = 200
"""Longest id, name or digest: the width of their columns."""
LABEL_CHARS_MAX = 1000
"""Longest path, host or engine."""
JSON_CHARS_MAX = 16 << 20
JSON_DEPTH_MAX = 100
"""Levels of nested JSON; a reader's stack is needed for each, and what is stored once is read for ever."""
INT32_MAX = 2**31 - 1
"""Largest number of a lineage, version, step or count: the width of their columns."""
SIBLINGS_MAX = 65_536
"""Most slots of one group."""

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def json_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises InvalidRequest for anything else, and for one too long or nested too deep."""
    if len(text) > JSON_CHARS_MAX:
        raise InvalidRequest(f"{what}: {len(text)} characters; at most {JSON_CHARS_MAX}")
    if _depth(text) > JSON_DEPTH_MAX:
        raise InvalidRequest(f"{what}: nested deeper than {JSON_DEPTH_MAX} levels")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{what}: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def _depth(text: str) -> int:
    """Levels of brackets outside of strings, counted without a stack; an upper bound where the text is no JSON."""
    if text.count("{") + text.count("[") <= JSON_DEPTH_MAX:
        return 0
    depth = deepest = 0
    for character in re.findall(r"[\[\]{}]", _STRINGS.sub("", text)):
        depth += 1 if character in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def plain(text: str, what: str, chars_max: int | None = None) -> None:
    """Refuse text that PostgreSQL cannot hold, or that is longer than ``chars_max``."""
    if "\x00" in text:
        raise InvalidRequest(f"{what}: holds a NUL character")
    if chars_max is not None and len(text) > chars_max:
        raise InvalidRequest(f"{what}: {len(text)} characters; at most {chars_max}")


def inside(path: str, what: str, *, single: bool = False) -> None:
    """Refuse a path that is not strictly below its directory; ``single``: that has more than one part."""
    plain(path, what, LABEL_CHARS_MAX)
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or (single and len(parts) != 1):
        where = "one name" if single else "a relative path below the run directory"
        raise InvalidRequest(f"{what} = {path[:80]!r}: must be {where}")


def within(value: int, what: str, low: int, high: int) -> None:
    """Refuse a number outside [low, high]."""
    if not low <= value <= high:
        raise InvalidRequest(f"{what} = {value}: must be between {low} and {high}")
