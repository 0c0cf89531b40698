"""Where lease calls stand in line: one thread answers all of them, oldest first, many in one transaction.

Owns the line and the time for which a call is held. Never touches the database and never decides who gets what: that is
``Leasing``, which is shown the whole line. What looking costs hardly depends on how many wait: the workers that wait wake when
they are answered, not whenever something has changed. Upholds P10: the line and every wait in it are bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.errors import DeadlineExceeded, Overloaded, RollbookError
from rollbook.core.host import host
from rollbook.core.records import LeaseReply, PolicyVersion
from rollbook.ledger import base
from rollbook.ledger.bell import Bell
from rollbook.ledger.writer import ANSWER_WAIT_S

LINE_MAX = 8192
"""Most calls that stand in line."""
NEW_MAX = 64
"""Most calls that are looked at for the first time in one transaction."""
RETRY_AFTER_S = 0.5
NOTHING = LeaseReply((), None, RETRY_AFTER_S)
"""There is nothing to lease."""
TOPIC = "lease"

Answer = LeaseReply | RollbookError


@dataclass(slots=True, eq=False)
class LeaseCall:
    """One call in the line."""

    incarnation: str
    loaded: PolicyVersion | None
    n_max: int
    request_id: str = ""
    wait_s: float = 0.0
    admitted: bool = False
    """Its worker is known, and no receipt was there."""
    looked: bool = False
    """Whether there is something for it was looked at."""
    ends_s: float = 0.0
    """Monotonic time up to which it is held."""
    answer: Future[LeaseReply] = field(default_factory=lambda: host().future())


Look = Callable[[Sequence[LeaseCall]], tuple[dict[LeaseCall, Answer], bool]]
"""Looks at the line: the answers there are, and whether it ended before everybody's turn, so that another one is due at once."""


class Desk:
    """The line. Its thread lives while there is one."""

    def __init__(self, bell: Bell, look: Look) -> None:
        self._bell = bell
        self._look = look
        self._lock = threading.Lock()
        self._line: list[LeaseCall] = []
        self._staffed = False

    def ask(self, call: LeaseCall) -> LeaseReply:
        """Stand in line until there is an answer or ``call.wait_s`` (at most WAIT_MAX_S) is over. Raises Overloaded."""
        wait_s = min(max(0.0, call.wait_s), base.WAIT_MAX_S)  # this order makes 0 of NaN
        call.ends_s = host().monotonic() + wait_s
        with self._lock:
            if len(self._line) >= LINE_MAX:
                full = Overloaded(f"the ledger server is overloaded: {LINE_MAX} lease calls stand in line; ask again later")
                full.retry_after_s = RETRY_AFTER_S
                raise full
            self._line.append(call)
            begin, self._staffed = not self._staffed, True
        if begin:
            host().thread(self._run, "lease-desk").start()
        self._bell.ring((TOPIC,))
        try:
            return call.answer.result(timeout=wait_s + ANSWER_WAIT_S)
        except FutureTimeout:
            self._leave([call])
            raise DeadlineExceeded(
                f"the ledger's storage did not answer within {ANSWER_WAIT_S:.0f} s; repeat with the same key"
            ) from None

    def _run(self) -> None:
        while True:
            seen, began = self._bell.seen(TOPIC), host().monotonic()
            self._attend()
            now = host().monotonic()
            with self._lock:
                if not self._line:
                    self._staffed = False
                    return
                waiting = [call.ends_s for call in self._line if call.looked]
                is_new = len(waiting) < len(self._line)
            left_s = max(0.0, min(waiting, default=now + base.RECHECK_S) - now)
            if not is_new:
                self._bell.wait(TOPIC, seen, min(left_s, base.RECHECK_S))
            # Who came meanwhile is looked at together; for who only waits, a fifth of the time is spent looking.
            pace_s = min(max(base.SETTLE_S, (1 if is_new else 4) * (now - began)), base.RECHECK_S)
            self._bell.wait("", 0, min(pace_s, left_s))

    def _attend(self) -> None:
        """One look for everybody in line."""
        now = host().monotonic()
        with self._lock:
            new = [call for call in self._line if not call.admitted][:NEW_MAX]
            old = [call for call in self._line if call.admitted]
        answers: dict[LeaseCall, Any] = {call: NOTHING for call in old if call.looked and call.ends_s <= now}
        line, more = [call for call in old if call not in answers] + new, False
        if line:
            try:
                found, more = self._look(line)
            except Exception as error:  # noqa: BLE001  thread boundary: handed to everybody who asked
                found = dict.fromkeys(line, error)  # type: ignore[arg-type]
            answers |= found
        now = host().monotonic()
        for call in line:
            call.admitted, call.looked = True, call.looked or not more
            if call.looked and call.ends_s <= now:
                answers.setdefault(call, NOTHING)
        self._leave(answers)
        for call, answer in answers.items():
            if isinstance(answer, LeaseReply):
                call.answer.set_result(answer)
            else:
                call.answer.set_exception(answer)

    def _leave(self, calls: Iterable[LeaseCall]) -> None:
        gone = set(calls)
        with self._lock:
            self._line = [call for call in self._line if call not in gone]

