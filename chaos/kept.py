"""Values of the drills in files: JSON with tags for what JSON has no words for, read back equal.

Owns the tags. Never carries code: a file that was changed can give another value, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any) -> str:
    """Text of a value made of dicts with any such keys, lists, tuples, bytes, numbers, strings and None. Raises TypeError."""
    return json.dumps(_tagged(value))


def loads(text: str) -> Any:
    """The value. Raises ValueError for text that ``dumps`` did not write."""
    return _untagged(json.loads(text))


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    if isinstance(value, dict):
        return {"pairs": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be kept in a file")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"bytes": str(text)} if len(value) == 1:
            return bytes.fromhex(text)
        case {"tuple": list(items)} if len(value) == 1:
            return tuple(_untagged(item) for item in items)
        case {"pairs": list(pairs)} if len(value) == 1:
            return {_untagged(key): _untagged(item) for key, item in pairs}
    raise ValueError(f"no value has the tag {', '.join(map(repr, value))}")
