"""Questions to environment processes: who is asked, until when, and what happens to the questions of a process that dies.

Owns the processes of a pool, in one thread of its own: starts, deadlines, repetitions, the budget of restarts. Never reads
what is asked or answered (``child_client`` does). Rules:

- A question that is not answered in its time ends its process, with everything the process has started.
- Questions that were in flight when a process ended are asked again, each alone in a process, so that the one that is to
  blame takes no other with it twice. What may not be repeated fails instead, and holds up a kill until it is answered.
- A tool's question whose answer is an error is asked again in a process that was started after the error; a score is not.
- Each question is asked at most ``attempts_max`` times; one that ran out of time, once more at most.
- Every question ends. A process that sends what is no message is ended like one that died, and takes nothing with it but itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError, RestartBudgetSpent, RollbookError
from rollbook.core.host import host
from rollbook.tasks.child_process import ChildProcess, killed_by_others
from rollbook.tasks.child_questions import NoAnswer, Question, Why
from rollbook.tasks.wire import TEXT_CHARACTERS_MAX, text_in

log = logging.getLogger(__name__)

OPEN_S = 300.0
"""Longest start of a process: imports, the environment itself, its sandbox."""
QUESTIONS_MAX = 8192
"""Questions without an answer; whoever asks one more waits."""
RESTARTS_MAX = 20
"""Ends of processes without one answer in between, after which the pool gives up."""
OPENINGS_MAX = 5
"""Failed starts in a row, after which the pool gives up; those of processes that were started together are one."""

_IN_FLIGHT_CONCURRENT, _IN_FLIGHT_ORDINARY = 32, 4
_BACKOFF_S, _BACKOFF_S_MAX = 0.1, 10.0
_FINISH_S = 2.0
_JOIN_S = 60.0
_TICK_S = 1.0
_TOLD_CHARACTERS = 200


@dataclass(slots=True, eq=False)
class _Seat:
    """A process and what it has been asked."""

    process: ChildProcess
    number: int
    opens_until: float
    ready: bool = False
    retiring: bool = False
    exclusive: bool = False
    limit: int = _IN_FLIGHT_ORDINARY
    asked: dict[int, Question] = field(default_factory=dict)

    def heavy(self) -> int:
        return sum(not question.light for question in self.asked.values())


class Pool:
    """Environment processes of one worker; any thread asks."""

    def __init__(
        self, opening: Mapping[str, Any], backend: Callable[[], str], log_path: Path | None, processes: int, attempts_max: int
    ) -> None:
        """Start the processes and wait until they are open.

        Args:
            backend: gives the name of the sandbox backend; asked only when the environment needs one.

        Raises: ConfigError (the environment cannot be opened, with what it said last); RestartBudgetSpent (its processes were
            killed, or could not be started, in ``OPENINGS_MAX`` rounds before one was open).
        """
        self._opening, self._choose_backend, self._log_path = dict(opening), backend, log_path
        self._wanted, self._attempts_max = processes, attempts_max
        self._backend: str | None = None
        self._changed = host().condition()
        self._inbox: list[Question] = []
        self._unanswered = 0
        self._closing = False
        self._broken: RollbookError | None = None
        self._waiting: deque[Question] = deque()
        self._seats: list[_Seat] = []
        self._numbers = 0
        self._ids = 0
        self._ends = 0
        self._failed_openings = 0
        self._failed_round = 0  # number of the newest process when a failed start was last counted
        self._start_at = 0.0
        self.restarts = 0
        """Processes started to replace one that ended."""
        self.loaded: dict[str, Any] = {}
        """What the environment says of itself."""
        self._opened: Future[None] = host().future()
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = host().thread(self._run, "environment pool")
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise

    def ask(self, question: Question) -> Future[Any]:
        """Ask; waits while too many questions are unanswered. The future never raises.

        Raises: RestartBudgetSpent (the pool has given up), ConfigError (it is closed).
        """
        with self._changed:
            while self._unanswered >= QUESTIONS_MAX and self._broken is None and not self._closing:
                self._changed.wait()
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            if self._closing:
                raise ConfigError("the environment is closed and cannot be asked any more")
            self._unanswered += 1
            self._inbox.append(question)
        self._poke()
        return question.future

    def close(self) -> None:
        """End every process and answer what is unanswered with INFRA. Bounded, whatever the processes do."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._poke()
        self._thread.join(_JOIN_S)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")

    def _run(self) -> None:
        try:
            while not self._closing and self._broken is None:
                self._turn()
        except Exception as error:  # whoever waits for an answer must hear of any defect in here
            log.exception("the environment pool failed", extra={"event": "environment_pool_failed"})
            self._broken = RollbookError(f"the environment pool failed: {type(error).__name__}: {error}")
        finally:
            self._end_all()

    def _turn(self) -> None:
        with self._changed:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        now = host().monotonic()
        for seat in list(self._seats):
            self._check_time(seat, now)
        for seat in [s for s in self._seats if s.retiring and not s.asked]:
            self._seats.remove(seat)
            seat.process.finish()
            seat.process.end(_FINISH_S)
        self._start_missing(now)
        self._hand_out(now)
        self._wait(now)

    def _wait(self, now: float) -> None:
        poll, owner = select.poll(), {}
        poll.register(self._awake, select.POLLIN)
        until = now + _TICK_S
        for seat in self._seats:
            for fd, events in seat.process.watched():
                poll.register(fd, events)
                owner[fd] = seat
            opens = [] if seat.ready else [seat.opens_until]
            until = min([until, *opens, *(q.expires for q in seat.asked.values() if q.expires > now)])
        if len(self._accepting()) < self._wanted:
            until = min(until, self._start_at)
        until = min([until, *(q.not_before for q in self._waiting if q.not_before > now)])
        ready = poll.poll(max(0.0, until - host().monotonic()) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self._awake, 4096)
        for seat in {owner[fd] for fd, _ in ready if fd in owner}:
            self._listen(seat)

    def _accepting(self) -> list[_Seat]:
        return [seat for seat in self._seats if not seat.retiring]

    def _start_missing(self, now: float) -> None:
        while len(self._accepting()) < self._wanted and now >= self._start_at and self._broken is None:
            self._numbers += 1
            try:
                process = ChildProcess(self._log_path, self._opening)
            except OSError as error:
                self._opening_failed(f"no process can be started: {error}", self._numbers, again=True)
                return
            self._seats.append(_Seat(process, self._numbers, now + OPEN_S))
            self.restarts += self._numbers > self._wanted

    def _hand_out(self, now: float) -> None:
        """Ask what can be asked now. A question that must be alone has a process emptied for it."""
        left: deque[Question] = deque()
        seats = [seat for seat in self._accepting() if seat.ready and not seat.process.hung_up]
        reserved: set[int] = set()
        full = False
        for question in sorted(self._waiting, key=lambda q: not q.alone):
            plain = not (question.light or question.alone)
            seat = None
            if question.not_before <= now and not (plain and full):
                usable = [
                    s for s in seats
                    if s.number > question.after and not s.exclusive and (question.light or s.number not in reserved)
                ]  # fmt: skip
                seat = min(usable, key=lambda s: len(s.asked), default=None)
                if plain and (seat is None or seat.heavy() >= seat.limit):
                    full, seat = full or question.after == 0, None
            if seat is None:
                left.append(question)
            elif question.alone and seat.asked:
                reserved.add(seat.number)
                left.append(question)
            else:
                self._ask(seat, question, now)
        self._waiting = left

    def _ask(self, seat: _Seat, question: Question, now: float) -> None:
        self._ids += 1
        question.attempts += 1
        question.expires = now + question.limit_s
        seat.exclusive = question.alone
        seat.asked[self._ids] = question
        try:
            seat.process.send(question.message | {"id": self._ids, "limit_s": question.limit_s})
        except (TypeError, ValueError) as error:
            self._settle(seat, self._ids, NoAnswer(Why.RAISED, f"it cannot be asked: {error}"))

    def _listen(self, seat: _Seat) -> None:
        try:
            how = seat.process.ended()  # looked at first: what a dead process has said is all there
            for message in seat.process.received():
                self._heard(seat, message)
                if seat not in self._seats:
                    return
        except Exception as error:  # the author's code may have written it: whatever it is, it ends this process alone
            if seat not in self._seats:
                raise  # it is being ended already, and that has failed
            how = f"what it sent is no message: {type(error).__name__}: {error}"[:_TOLD_CHARACTERS]
        if how is not None:
            self._end(seat, how, killed_by_others(how))

    def _heard(self, seat: _Seat, message: dict[str, Any]) -> None:
        if seat.ready:
            self._answered(seat, message)
        elif "loaded" in message:
            self._loaded(seat, message)
        elif "refused" in message:
            self._refused(seat, text_in(message["refused"]), bool(message["again"]))
        elif "ready" in message and self.loaded:
            seat.ready = True
            self._failed_openings = 0
            if not self._opened.done() and sum(s.ready for s in self._seats) >= self._wanted:
                self._opened.set_result(None)
        else:
            raise ValueError(f"it has {', '.join(message) or 'nothing'} in it")

    def _loaded(self, seat: _Seat, message: dict[str, Any]) -> None:
        seat.limit = _IN_FLIGHT_CONCURRENT if message["concurrent"] else _IN_FLIGHT_ORDINARY
        needs_sandbox = message["needs_sandbox"]
        if not all(isinstance(pure, bool) for pure in [needs_sandbox, *message["loaded"].values()]):
            raise ValueError("it does not say which tools are pure, or whether a sandbox is needed")
        self.loaded = message
        try:
            if needs_sandbox and self._backend is None:
                self._backend = self._choose_backend()
        except RollbookError as error:
            self._refused(seat, str(error), error.retryable)
        except OSError as error:  # happened here: no message is to blame
            self._refused(seat, f"no sandbox backend can be chosen: {error}", again=True)
        else:
            seat.process.send({"backend": self._backend or ""})

    def _answered(self, seat: _Seat, message: dict[str, Any]) -> None:
        number = message["id"]
        question = seat.asked.get(number)
        if question is None:
            return
        # Read to its end before anything is changed: one that is no message must leave the question where it is.
        error = NoAnswer(Why.RAISED, text_in(message["error"])) if "error" in message else None
        again = error is None and question.again(message["answer"])
        if not question.light:
            self._ends = 0
        if error is not None and question.error_stands:  # it would raise again, and the ledger tries the rollout again
            self._settle(seat, number, error)
        elif error is not None:
            del seat.asked[number]
            seat.exclusive = False
            self._retire(seat)
            question.after = seat.number if seat.retiring else question.after
            self._again(question, error)
        elif again and question.repeatable and question.attempts < self._attempts_max:
            del seat.asked[number]
            seat.exclusive = False
            question.not_before = host().monotonic() + min(_BACKOFF_S * 2**question.attempts, _BACKOFF_S_MAX)
            self._waiting.append(question)
        else:
            self._settle(seat, number, message["answer"])

    def _retire(self, seat: _Seat) -> None:
        """Let it finish what it has been asked and start another; not while as many are finishing already."""
        if sum(s.retiring for s in self._seats) < self._wanted:
            seat.retiring = True

    def _again(self, question: Question, without: NoAnswer) -> None:
        """Ask once more, where that is allowed and may help."""
        if without.why is Why.TIMEOUT:
            question.timeouts += 1
        if not question.repeatable or question.attempts >= self._attempts_max or question.timeouts > 1:
            self._resolve(question, without)
        else:
            self._waiting.append(question)

    def _check_time(self, seat: _Seat, now: float) -> None:
        seat.process.bound_log()
        if (silent := seat.process.silent()) is not None:
            self._end(seat, silent, again=True)
            return
        if not seat.ready:
            if now >= seat.opens_until:
                self._end(seat, f"it was not open after {OPEN_S:.0f} s", again=True)
            return
        expired = [question for question in seat.asked.values() if now >= question.expires]
        if not expired:
            return
        seat.retiring = True
        if any(not q.repeatable and now < q.expires for q in seat.asked.values()):
            return  # that one cannot be asked again, and its own time is bounded
        self._end(seat, "it did not answer in time")

    def _end(self, seat: _Seat, how: str, again: bool = False) -> None:
        """A process that is dead, or shall be; ``again``: one that dies so while it opens may open next time."""
        now = host().monotonic()
        self._seats.remove(seat)
        last = ""
        try:
            last = seat.process.last_lines()
            seat.process.end()
        finally:  # whatever becomes of the process, its questions go on
            if seat.ready:
                self._ask_elsewhere(seat, how, last, now)
            else:
                self._opening_failed(f"{how}; it said last: {last}" if last else how, seat.number, again)

    def _ask_elsewhere(self, seat: _Seat, how: str, last: str, now: float) -> None:
        about = {"event": "environment_process_ended", "how": how, "in_flight": len(seat.asked), "last": last}
        log.warning("environment process ended: %s", how, extra=about)
        self._ends += 1
        alone = len(seat.asked) == 1
        for question in seat.asked.values():
            question.alone = True
            if now >= question.expires:
                reason = f"no answer within {question.limit_s:g} s"
                self._again(question, NoAnswer(Why.TIMEOUT, reason))
            else:
                why = Why.DIED if alone else Why.INFRA
                self._again(question, NoAnswer(why, f"the environment process ended before it answered: {how}; {last}"))
        if self._ends > RESTARTS_MAX:
            self._give_up(f"environment processes ended {self._ends} times without one answer, the last one: {how}; {last}")

    def _refused(self, seat: _Seat, reason: str, again: bool) -> None:
        self._seats.remove(seat)
        seat.process.end()
        self._opening_failed(reason, seat.number, again)

    def _opening_failed(self, reason: str, number: int, again: bool) -> None:
        """What cannot be opened at first is a wrong configuration; unless ``again``: the next process may do better."""
        if not again and not self._opened.done():
            self._broken = ConfigError(f"the environment cannot be opened: {reason}")
            return
        if number > self._failed_round:  # else it was started beside one that has been counted, and one cause may end them all
            self._failed_round = self._numbers
            self._failed_openings += 1
        log.warning("environment process not opened: %s", reason, extra={"event": "environment_not_opened"})
        self._start_at = host().monotonic() + min(_BACKOFF_S * 2**self._failed_openings, _BACKOFF_S_MAX)
        if self._failed_openings >= OPENINGS_MAX:
            self._give_up(f"environment processes cannot be started any more: {reason}")

    def _give_up(self, reason: str) -> None:
        log.error("the environment is given up: %s", reason, extra={"event": "environment_given_up"})
        self._broken = RestartBudgetSpent(reason)

    def _settle(self, seat: _Seat, number: int, answer: Any) -> None:
        question = seat.asked.pop(number)
        seat.exclusive = False
        self._resolve(question, answer)

    def _resolve(self, question: Question, answer: Any) -> None:
        if question.future.done():  # in a turn that a defect in here has cut short
            return
        if isinstance(answer, NoAnswer):
            answer = NoAnswer(answer.why, answer.reason[:TEXT_CHARACTERS_MAX])
        with self._changed:
            self._unanswered -= 1
            self._changed.notify_all()
        try:
            result = question.convert(answer)
        except Exception as error:  # noqa: BLE001 - an answer of the wrong shape, whichever it is, is no answer
            reason = f"its answer cannot be used: {error!r}"
            result = question.convert(NoAnswer(Why.RAISED, reason[:TEXT_CHARACTERS_MAX]))
        question.future.set_result(result)

    def _end_all(self) -> None:
        for seat in self._seats:
            seat.process.finish()
        for seat in self._seats:
            with contextlib.suppress(RollbookError):  # the others must still be ended
                seat.process.end(_FINISH_S)
        with self._changed:
            self._broken = self._broken or ConfigError("the environment is closed and cannot be asked any more")
            left = [*self._inbox, *self._waiting, *(q for seat in self._seats for q in seat.asked.values())]
            self._changed.notify_all()
        for question in left:
            self._resolve(question, NoAnswer(Why.INFRA, str(self._broken)))
        if not self._opened.done():
            self._opened.set_exception(self._broken)
        for fd in (self._awake, self._wake):
            os.close(fd)
