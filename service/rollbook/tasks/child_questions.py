"""Something that an environment process is asked, and how it ends without an answer.

Owns the form of a question and of its end. Never asks: ``child_pool`` does, and counts what it has tried in the question itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from rollbook.core.host import host


class Why(Enum):
    """Why a question has no answer."""

    RAISED = auto()
    TIMEOUT = auto()
    DIED = auto()
    """Its process died of it: nothing else was asked there."""
    INFRA = auto()


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A question's end without an answer."""

    why: Why
    reason: str


Convert = Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Question:
    """Something to be asked."""

    message: dict[str, Any]
    limit_s: float
    convert: Convert
    """From an answer or a NoAnswer to what the future gives."""
    again: Callable[[Any], bool] = lambda answer: False
    """Whether an answer is infrastructure's failure, so that the question is worth repeating."""
    repeatable: bool = True
    light: bool = False
    """Asked at once, however many are in flight."""
    error_stands: bool = False
    """An exception is its end: a fresh process would cost seconds for each of a broken reward's rollouts."""
    future: Future[Any] = field(default_factory=lambda: host().future())
    attempts: int = 0
    timeouts: int = 0
    alone: bool = False
    after: int = 0
    """Number of the newest process that may not be asked."""
    not_before: float = 0.0
    expires: float = 0.0
