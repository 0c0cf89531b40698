"""One thread, simulated time, an order that a seed decides: tasks are greenlets, processes are groups of them.

A task runs until it waits; whatever runs next is chosen by due time, and by the seed among what is due together. Killing a
process leaves its tasks where they are for ever: no ``finally`` and no ``except`` of theirs runs, as with SIGKILL. A paused
process keeps its timers; they fire, late, when it goes on, as after SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import contextvars
import hashlib
import heapq
import itertools
import queue
import random
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

JITTER_S = 2e-4
"""What is woken together runs within this time in an order drawn from the seed."""


class Stuck(AssertionError):
    """The run made no progress within its bound of simulated time, or nothing is left that could."""


@dataclass(eq=False)
class Task:
    """One thread of a simulated process."""

    name: str
    process: Any
    kernel: Kernel
    green: greenlet = field(init=False)
    token: int = 0
    """Changes whenever the task goes on, so that an older wake-up finds nothing to do."""
    woken: bool = False
    done: bool = False
    waiters: list[Task] = field(default_factory=list)

    @property
    def dead(self) -> bool:
        return self.done or not self.process.alive


class Kernel:
    """Time, the schedule and the event log of one simulated run."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(f"kernel.{seed}")
        self.over = False
        self.events: list[str] = []
        self.keep_events = False
        self.n_events = 0
        self._hash = hashlib.sha256()
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hub = getcurrent()
        self._tasks: list[Task] = []

    def log(self, text: str) -> None:
        """One line of the event log; its hash is the identity of the run."""
        line = f"{self.now:.6f} {text}"
        self.n_events += 1
        self._hash.update(line.encode() + b"\n")
        if self.keep_events:
            self.events.append(line)

    def event_hash(self) -> str:
        return self._hash.hexdigest()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call from the hub after ``delay_s`` simulated seconds; it must not wait."""
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self.rng.random(), next(self._order), call))

    @property
    def current(self) -> Task | None:
        """The running task; None in the hub."""
        return getattr(getcurrent(), "task", None)

    def spawn(self, process: Any, target: Callable[[], None], name: str) -> Task:
        """A task of ``process`` that begins at once, after what is due now."""
        task = Task(name, process, self)

        def body() -> None:
            try:
                target()
            except GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001  the end of a thread: its process decides
                task.done = True
                process.on_error(task, error)
            task.done = True
            for waiter in task.waiters:
                self.wake(waiter)

        task.green = greenlet(body, parent=self._hub)
        task.green.task = task  # type: ignore[attr-defined]
        context = contextvars.Context()
        context.run(process.enter)
        task.green.gr_context = context
        self._tasks.append(task)
        self.after(self.rng.random() * JITTER_S, lambda: self._resume(task, 0, woken=True))
        return task

    def block(self, timeout_s: float | None = None) -> bool:
        """Let others run until somebody wakes this task (True) or the time is over (False)."""
        task = self.current
        if self.over or task is None:
            raise GreenletExit
        task.woken = False
        if timeout_s is not None:
            token = task.token
            self.after(timeout_s, lambda: self._resume(task, token, woken=False))
        self._hub.switch()
        return task.woken

    def wake(self, task: Task) -> None:
        token = task.token
        self.after(self.rng.random() * JITTER_S, lambda: self._resume(task, token, woken=True))

    def vanish(self) -> None:
        """End the running task without another instruction of it: its process is dead."""
        self._hub.switch()
        raise GreenletExit

    def _resume(self, task: Task, token: int, *, woken: bool) -> None:
        if task.dead or task.token != token:
            return
        if task.process.paused:
            task.process.deferred.append(lambda: self._resume(task, token, woken=woken))
            return
        task.token += 1
        task.woken = woken
        task.process.running()
        task.green.switch()

    def run(self, finished: Callable[[], bool], until_s: float) -> None:
        """Advance until ``finished``. Raises Stuck past ``until_s`` or when nothing is scheduled any more."""
        while not finished():
            if not self._heap:
                raise Stuck(f"nothing is left to happen at {self.now:.1f} s\n{self.waiting()}")
            when, _, _, call = heapq.heappop(self._heap)
            if when > until_s:
                raise Stuck(f"no end by {until_s:.0f} s\n{self.waiting()}")
            self.now = max(self.now, when)
            call()

    def waiting(self) -> str:
        """Where every live task stands, for the message of a failure."""
        lines = []
        for task in self._tasks:
            frame = task.green.gr_frame
            if task.dead or frame is None:
                continue
            places = []
            while frame is not None and len(places) < 9:
                places.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
                frame = frame.f_back
            lines.append(f"{task.process.name}/{task.name}{' (paused)' if task.process.paused else ''}: " + " < ".join(places))
        return "\n".join(lines)

    def close(self) -> None:
        """Unwind every task that is left."""
        self.over = True
        for task in self._tasks:
            for _ in range(20):
                if task.green.dead or not task.green:
                    break
                try:
                    task.green.throw(GreenletExit)
                except BaseException:  # noqa: BLE001  whatever an unwinding dead process says concerns nobody
                    continue
        self._tasks.clear()
        self._heap.clear()


def _wait_in(waiters: list[Task | None], kernel: Kernel, timeout_s: float | None) -> None:
    """Wait to be woken by the owner of the list; a task that stops waiting leaves it."""
    task = kernel.current
    waiters.append(task)
    kernel.block(timeout_s)
    if task in waiters:
        waiters.remove(task)


class Event:
    """threading.Event."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._set = kernel, False
        self._waiters: list[Task | None] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._kernel.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            _wait_in(self._waiters, self._kernel, timeout)
        return self._set


class Condition:
    """threading.Condition; its lock is free by itself, because nobody runs between two waits of a task."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._waiters: list[Task | None] = []

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._kernel.wake(task)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        ends = None if timeout is None else self._kernel.now + timeout
        while not predicate():
            left = None if ends is None else ends - self._kernel.now
            if left is not None and left <= 0:
                return predicate()
            _wait_in(self._waiters, self._kernel, left)
        return True


class Queue:
    """queue.Queue as the writer uses it."""

    def __init__(self, kernel: Kernel, maxsize: int) -> None:
        self._kernel, self._maxsize, self._items = kernel, maxsize, []
        self._changed = Condition(kernel)

    def put(self, item: Any, timeout: float | None = None) -> None:
        if not self._changed.wait_for(lambda: len(self._items) < self._maxsize, timeout):
            raise queue.Full
        self._items.append(item)
        self._changed.notify_all()

    def get(self) -> Any:
        self._changed.wait_for(lambda: bool(self._items))
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        self._changed.notify_all()
        return self._items.pop(0)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Future:
    """concurrent.futures.Future."""

    def __init__(self, kernel: Kernel) -> None:
        self._ready = Event(kernel)
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._ready.is_set()

    def set_result(self, result: Any) -> None:
        self._result = result
        self._ready.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._ready.wait(timeout):
            raise FutureTimeout
        if self._error is not None:
            raise self._error
        return self._result


class Thread:
    """threading.Thread, as a task of the process that starts it."""

    def __init__(self, kernel: Kernel, process: Any, target: Callable[[], None], name: str) -> None:
        self._kernel, self._process, self._target, self._name = kernel, process, target, name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._kernel.spawn(self._process, self._target, self._name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.done and self._kernel.current is not None:
            self._task.waiters.append(self._kernel.current)
            self._kernel.block(timeout)
