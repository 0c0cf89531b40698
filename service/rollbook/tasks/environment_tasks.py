"""What an environment brings before anything is judged: its tasks, read once, and the word that it can be made.

Owns the bound on the process of its own in which either is asked. Never runs the author's code here: what it does to its
process ends with it. Each row was checked there (``tasks.child``); what arrives is a list that does not change any more.
"""

from __future__ import annotations

import json
import select
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, TaskError, Unavailable
from rollbook.core.host import host
from rollbook.tasks.child_process import ChildProcess, killed_by_others

LOAD_S = 600.0
"""Longest ``load`` of a split, its imports included."""
BYTES_MAX = 4 << 30
"""Most text of a split."""

_READ_S = 1.0


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
            n_bytes += sum(map(len, message["rows"]))
            if n_bytes > BYTES_MAX:
                raise TaskError(f"{shown} gives more than {BYTES_MAX} bytes of tasks")
            rows += map(json.loads, message["rows"])
    raise TaskError(f"{shown} has no end")


def check_environment(config: Config, within_s: float = LOAD_S) -> dict[str, bool]:
    """Make the run's environment, or its reward function, once and without a sandbox; returns its tools and whether each is pure.

    Raises: ConfigError (it cannot be made); TaskError (its process died or took too long); Unavailable (it was killed or could
        not be started, or asks to be tried again).
    """
    name = config.environment.name
    shown = f"environment.name = {name!r}" if name else f"task.reward = {config.task.reward!r}"
    with closing(_said(config, "", shown, within_s)) as messages:
        return dict(next(messages)["loaded"])


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
        for message in process.received():
            if "refused" in message:
                final = ConfigError if message["kind"] == ConfigError.__name__ else TaskError
                raise (Unavailable if message["again"] else final)(message["refused"])
            yield message
        if how is not None:
            kind = Unavailable if killed_by_others(how) else TaskError
            raise kind(f"{shown}: its process ended: {how}; it said last: {process.last_lines() or 'nothing'}")
        left = until - host().monotonic()
        if left <= 0:
            raise TaskError(f"{shown} did not end within {within_s:g} s")
        poll = select.poll()
        for fd, events in process.watched():
            poll.register(fd, events)
        poll.poll(min(left, _READ_S) * 1000)
