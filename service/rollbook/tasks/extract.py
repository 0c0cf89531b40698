"""The extraction rule: which part of a text is the answer.

Owns one rule for both sides, the task's answer field (``task.answer_pattern``) and the completion
(``task.completion_pattern``): the last match wins and its first group is the answer. Never judges what it extracts.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rollbook.core.errors import ConfigError


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups < 1:
        raise ConfigError(f"pattern {pattern!r} has no group: put parentheses around the part that is the answer")
    return compiled


def check_pattern(pattern: str, key: str) -> None:
    """Refuse a pattern that cannot be used. Raises ConfigError naming the configuration key."""
    try:
        _compiled(pattern)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def extract(pattern: str, text: str) -> str | None:
    """First group of the last match of ``pattern`` in ``text``; None where it does not match or the group took no part.

    The last match, because a completion may quote the format before it answers in it. Raises ConfigError (bad pattern).
    """
    found = None
    for match in _compiled(pattern).finditer(text):
        found = match
    return found.group(1) if found is not None else None
