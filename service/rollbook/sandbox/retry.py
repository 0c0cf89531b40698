"""Trying again where it was not the program's doing.

Owns how often: infrastructure failures up to ``attempts_max`` times in fresh sandboxes, an unclear outcome once. Never turns a
failure into a verdict (P6). The idempotency key of what is asked stays the caller's: a job has no effect outside its sandbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

from rollbook.core.host import host
from rollbook.core.records import Blame
from rollbook.core.sandboxing import Execution

PAUSE_S = 0.1
"""Before the second attempt; doubles with each."""


class Blamed(Protocol):
    """What an attempt ends with."""

    @property
    def blame(self) -> Blame | None: ...


T = TypeVar("T", bound=Blamed)


def asked_again(attempt: Callable[[], T], attempts_max: int, pause_s: float = PAUSE_S) -> tuple[T, int]:
    """The first result that says something about the program, or the last one; and the number of attempts."""
    unclear = n = 0
    while True:
        n += 1
        result = attempt()
        unclear += result.blame is Blame.UNCLEAR
        if result.blame is Blame.INFRA and n < attempts_max:
            host().sleep(pause_s * 2 ** (n - 1))
        elif not (result.blame is Blame.UNCLEAR and unclear == 1):
            return result, n


def run_with_retries(attempt: Callable[[], Execution], attempts_max: int, pause_s: float = PAUSE_S) -> Execution:
    """An execution that was asked for again where that is right; its ``attempts`` counts all of them."""
    result, n = asked_again(attempt, attempts_max, pause_s)
    return dataclasses.replace(result, attempts=n)
