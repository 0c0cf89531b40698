"""What waiting callers listen for.

Owns the topics that are rung after commits, and who waits for which. Never looks at what has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rollbook.core.host import host

TURN_S = 0.001
"""Time for each of those who were woken together."""


class Bell:
    """Topics that are rung after commits; waiters wake when their own topic was rung since they looked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, threading.Condition] = {}
        self._rung: dict[str, int] = {}
        self._crowd: dict[str, int] = {}
        self._rng = host().rng()
        self._closed = False

    def ring(self, topics: Iterable[str]) -> None:
        for topic in sorted(topics):  # a set's own order differs from process to process
            condition = self._of(topic)
            with condition:
                self._rung[topic] = self._rung.get(topic, 0) + 1
                condition.notify_all()

    def seen(self, topic: str) -> int:
        return self._rung.get(topic, 0)

    def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        """Return when ``topic`` was rung since ``seen``, the ledger closes, or the time is over."""
        condition = self._of(topic)
        with condition:
            self._crowd[topic] = self._crowd.get(topic, 0) + 1
            condition.wait_for(lambda: self._closed or self._rung.get(topic, 0) != seen, timeout=timeout_s)
            self._crowd[topic] -= 1

    def turn_s(self, topic: str) -> float:
        """A wait at random for one of many who were woken together, or all of them would run at once and nobody else."""
        return self._rng.random() * TURN_S * self._crowd.get(topic, 0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            topics = list(self._topics.values())
        for condition in topics:
            with condition:
                condition.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _of(self, topic: str) -> threading.Condition:
        """Its own condition for each topic, so that a ring wakes nobody whom it does not concern."""
        with self._lock:
            if topic not in self._topics:
                self._topics[topic] = host().condition()
            return self._topics[topic]
