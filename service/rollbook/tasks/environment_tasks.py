"""What an environment brings before anything is judged: its tasks, read once, and the word that it can be made.

Owns the bound on the process of its own in which either is asked. Never runs the author's code here: what it does to its
process ends with it. Each row was checked there (``tasks.child``); what arrives is a list that does not change any more.
"""

from __future__ import annotations

import json
import select
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, RollbookError, TaskError, Unavailable
from rollbook.core.host import host
from rollbook.tasks.child_process import ChildProcess, killed_by_others
from rollbook.tasks.wire import text_in

LOAD_S = 600.0
"""Longest ``load`` of a split, its imports included."""
BYTES_MAX = 4 << 30
"""Most text of a split."""

_READ_S = 1.0
_TOLD_CHARACTERS = 200


def read_tasks(config: Config, split: str, within_s: float = LOAD_S) -> list[dict[str, Any]]:
    """The tasks of ``"train"`` or ``"heldout"``, in the environment's order.

    Raises: ConfigError (the environment cannot be made, or brings no tasks); TaskError (it raised, died, took too long, or
        gave a task that is none, by number); Unavailable (its process was killed or could not be started, or it says that
        what it needs cannot be had now).
    """
    shown = f"environment.name = {config.environment.name!r}: load({split!r})"
    rows: list[dict[str, Any]] = []
    n_bytes = 0
    with closing(_said(config, split, shown, within_s)) as messages:
        for message in messages:
            if "end" in message:
                return rows
            with _reading(shown):
                n_bytes += sum(map(len, message["rows"]))
                if n_bytes > BYTES_MAX:
                    raise TaskError(f"{shown} gives more than {BYTES_MAX} bytes of tasks")
                rows += map(_row, message["rows"])
    raise TaskError(f"{shown} has no end")


def check_environment(config: Config, within_s: float = LOAD_S) -> dict[str, bool]:
    """Make the run's environment, or its reward function, once and without a sandbox; returns its tools and whether each is pure.

    Raises: ConfigError (it cannot be made); TaskError (its process died or took too long); Unavailable (it was killed or could
        not be started, or asks to be tried again).
    """
    name = config.environment.name
    shown = f"environment.name = {name!r}" if name else f"task.reward = {config.task.reward!r}"
    with closing(_said(config, "", shown, within_s)) as messages:
        message = next(messages)
        with _reading(shown):
            loaded = dict(message["loaded"])
            if not all(isinstance(pure, bool) for pure in loaded.values()):
                raise ValueError("it does not say which tools are pure")
            return loaded


def _row(text: str) -> dict[str, Any]:
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError(f"a task is a {type(row).__name__}")
    return row


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    """Around whatever reads a message, which the author's code may have written: one that is none is a TaskError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}"[:_TOLD_CHARACTERS]
        raise TaskError(f"{shown}: what it sent is no message: {told}") from None


def _said(config: Config, split: str, shown: str, within_s: float) -> Generator[dict[str, Any], None, None]:
    """The messages of a process that lives as long as somebody wants more of them."""
    try:
        process = ChildProcess(None, {"config": config.to_json(), "split": split})
    except OSError as error:
        raise Unavailable(f"{shown}: no process can be started: {error}") from None
    try:
        yield from _messages(process, shown, within_s)
    finally:
        process.end()


def _messages(process: ChildProcess, shown: str, within_s: float) -> Iterator[dict[str, Any]]:
    until = host().monotonic() + within_s
    while True:
        how = process.ended()  # looked at first: what a dead process has said is all there
        with _reading(shown):
            messages = process.received()
        for message in messages:
            if "refused" in message:
                raise _refusal(message, shown)
            yield message
        if how is not None:
            kind = Unavailable if killed_by_others(how) else TaskError
            raise kind(f"{shown}: its process ended: {how}; it said last: {process.last_lines() or 'nothing'}")
        if (silent := process.silent()) is not None:
            raise TaskError(f"{shown}: {silent}; it said last: {process.last_lines() or 'nothing'}")
        left = until - host().monotonic()
        if left <= 0:
            raise TaskError(f"{shown} did not end within {within_s:g} s")
        poll = select.poll()
        for fd, events in process.watched():
            poll.register(fd, events)
        poll.poll(min(left, _READ_S) * 1000)


def _refusal(message: dict[str, Any], shown: str) -> RollbookError:
    with _reading(shown):
        final = ConfigError if message["kind"] == ConfigError.__name__ else TaskError
        return (Unavailable if message["again"] else final)(text_in(message["refused"]))
