"""The feeder: turns the task stream into groups, at the place where the cursor stands.

Owns the loop and how long it waits. Never keeps a position of its own: every append starts from the cursor row and moves
it in the same transaction (R10), so a feeder killed anywhere skips no task and repeats none. Never re-tokenises: a group
carries the token ids its engine receives, and the task as JSON for its verifier.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from rollbook.core.config import Config
from rollbook.core.errors import CursorMoved, NotReady, RoleHeld, RollbookError, TaskError, Unavailable
from rollbook.core.host import host, incarnation, superseded
from rollbook.core.ports import LedgerPort
from rollbook.core.records import TASK_STREAM, Cursor, GroupSpec, Role, RoleTerm, ScheduleKind
from rollbook.observe import progress, tracing
from rollbook.observe.failpoints import failpoint
from rollbook.tasks.prompts import PromptEncoder, make_encoder, prompt_of
from rollbook.tasks.sources import TaskSource, load_source
from rollbook.tasks.stream import Drawn, TaskStream

log = logging.getLogger(__name__)


_POLL_S = 0.25
_GROUPS_PER_APPEND_MAX = 256
_CURSOR_MOVED_MAX = 100
_PROMPTS_CHECKED_MAX = 10_000


def run_feeder(config: Config, client: LedgerPort, stop: threading.Event) -> None:
    """Feed the run until its steps are covered, its tasks are exhausted or ``stop`` is set; then give the role up.

    Raises: TaskError, ConfigError (tasks or tokenizer unusable); RoleHeld (another feeder is alive); Fenced (it took
    over); Unavailable, NotReady (no answer, or no open run, for ``supervisor.stall_s``).
    """
    feeder = Feeder(config, client, stop)
    term = _acquire(config, client, stop)
    if term is None:
        return
    progress.ready(True)
    failpoint("feeder.after_role")
    try:
        feeder.run(term)
        failpoint("feeder.before_release")
    finally:
        with suppress(RollbookError):  # an expired term frees the role as well, only later
            client.release_role(term)


def _acquire(config: Config, client: LedgerPort, stop: threading.Event) -> RoleTerm | None:
    """The feeder's term; None when stopped first. A dead holder's term ends within one TTL, so two are waited for."""
    holder = incarnation()
    supersede = superseded()
    ttl_s = config.ledger.role_ttl_s
    held_until = host().monotonic() + 2 * ttl_s
    outage = _Outage(config.supervisor.stall_s)
    while not stop.is_set():
        progress.mark()
        try:
            return client.acquire_role(Role.FEEDER, holder, ttl_s, supersede)
        except RoleHeld:
            if host().monotonic() >= held_until:
                raise
        except (Unavailable, NotReady) as error:
            outage.note(error)
        stop.wait(_POLL_S)
    return None


class _Outage:
    """How long the ledger has not answered or has no open run, with a bound."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since: float | None = None

    def over(self) -> None:
        self._since = None

    def note(self, error: RollbookError) -> None:
        """Count one failed call. Raises ``error`` when the outage is longer than the bound."""
        now = host().monotonic()
        if self._since is None:
            self._since = now
            log.warning("the ledger cannot answer, trying again: %s", error, extra={"event": "ledger_unavailable"})
        if now - self._since >= self._longest_s:
            raise error


class Feeder:
    """One feeder process. Opens and checks everything it needs before it asks for the role."""

    def __init__(self, config: Config, client: LedgerPort, stop: threading.Event) -> None:
        self._config = config
        self._client = client
        self._stop = stop
        self._source: TaskSource = load_source(config)
        self._encoder: PromptEncoder = make_encoder(config)
        self._lookahead = config.task.lookahead_groups or 2 * config.learner.groups_per_step
        self._fixed = config.schedule.kind == ScheduleKind.FIXED
        self._groups_wanted = config.run.steps * config.learner.groups_per_step
        self._stream: TaskStream | None = None
        self._state_json = ""
        self._check_epochs()

    def run(self, term: RoleTerm) -> None:
        """Feed until there is nothing more to feed or stop is set. Raises Fenced when another feeder holds the role."""
        outage = _Outage(self._config.supervisor.stall_s)
        moved = 0
        renew_at = host().monotonic() + term.ttl_s / 3
        while not self._stop.is_set():
            progress.mark(progress.State.WAITING)
            try:
                if host().monotonic() >= renew_at:
                    term = self._client.renew_role(term)
                    renew_at = host().monotonic() + term.ttl_s / 3
                done, idle = self._feed(term)
                moved = 0
                outage.over()
                progress.finished("nothing is wanted" if idle else "appended groups")
            except CursorMoved:
                # A refill took the ordinal between our reading and our append; the tasks drawn are drawn again.
                moved += 1
                if moved > _CURSOR_MOVED_MAX:
                    raise
                continue
            except (Unavailable, NotReady) as error:
                # Whether the append was made is unknown; the cursor read next time says so.
                outage.note(error)
                done, idle = False, True
            if done:
                return
            if idle:
                self._stop.wait(_POLL_S)

    def _feed(self, term: RoleTerm) -> tuple[bool, bool]:
        """Append the groups wanted now, if any; returns (nothing will be wanted again, nothing was wanted now)."""
        cursor = self._client.cursor(TASK_STREAM)
        stream = self._stream_at(cursor)
        if stream.exhausted and not cursor.exhausted:  # a revision has asked again
            cursor = self._client.append_groups(term, cursor, replace(cursor, exhausted=True), [])
        if stream.exhausted or self._is_covered(cursor):
            self._log_end(cursor, stream)
            return True, False
        wanted = min(self._client.feed_demand(self._lookahead), _GROUPS_PER_APPEND_MAX)
        if self._fixed:
            wanted = min(wanted, self._groups_wanted - cursor.next_ordinal)
        if wanted <= 0:
            return False, True
        self._append(term, cursor, stream, wanted)
        return False, False

    def _is_covered(self, cursor: Cursor) -> bool:
        """True when no step needs a further task.

        In the fixed schedule an ordinal belongs to a step, so issuing the last one settles it. In the bounded schedule a
        dropped group may need a successor until the last step is planned.
        """
        if self._fixed:
            return cursor.next_ordinal >= self._groups_wanted
        return self._client.resume_point().last_planned_step >= self._config.run.steps

    def _append(self, term: RoleTerm, cursor: Cursor, stream: TaskStream, n_groups: int) -> None:
        self._stream = None  # drawing moves it off the cursor; only an acknowledged append makes it valid again
        progress.mark(progress.State.FEEDING)
        drawn = stream.take(n_groups)
        groups = [self._group(task, cursor.next_ordinal + i) for i, task in enumerate(drawn)]
        after = Cursor(cursor.stream, cursor.next_ordinal + len(groups), stream.state_json(), stream.exhausted)
        failpoint("feeder.before_append")
        traces = [tracing.issue(self._config.run.id, g.ordinal, g.n_siblings) for g in groups]
        if any(traces):
            groups = [replace(g, traceparents=tuple(t.traceparent for t in ts)) for g, ts in zip(groups, traces, strict=True)]
        self._client.append_groups(term, cursor, after, groups)
        for trace in chain.from_iterable(traces):
            trace.end()
        failpoint("feeder.after_append")
        self._stream, self._state_json = stream, after.state_json
        log.info("appended groups %d to %d", groups[0].ordinal, groups[-1].ordinal,
                 extra={"event": "groups_appended", "epoch": drawn[-1].epoch, "exhausted": after.exhausted})  # fmt: skip

    def _group(self, drawn: Drawn, ordinal: int) -> GroupSpec:
        where = self._source.name(drawn.task_index)
        prompt_ids = self._encoder.encode(prompt_of(drawn.task), where)
        origin = {"epoch": drawn.epoch, "task_index": drawn.task_index, "name": where}
        task_json = json.dumps(drawn.task | {"task_origin": origin}, ensure_ascii=False, sort_keys=True)
        return GroupSpec(ordinal, prompt_ids, task_json, self._config.learner.group_size)

    def _stream_at(self, cursor: Cursor) -> TaskStream:
        """The stream at the cursor: the one in memory when it stands there, else rebuilt from the cursor's state."""
        if self._stream is None or self._state_json != cursor.state_json:
            stream = TaskStream(self._source, self._config.run.seed, self._config.task.epochs, cursor.state_json)
            if stream.drawn == 0:
                self._check_prompts()
            self._stream, self._state_json = stream, cursor.state_json
        return self._stream

    def _check_prompts(self) -> None:
        """Refuse a task that does not fit before the first is handed out, not in the middle of the run."""
        for index in range(min(len(self._source), _PROMPTS_CHECKED_MAX)):
            progress.mark(progress.State.FEEDING)
            self._encoder.token_ids(prompt_of(self._source[index]), self._source.name(index))

    def _check_epochs(self) -> None:
        epochs, size = self._config.task.epochs, len(self._source)
        if epochs and epochs * size < self._groups_wanted:
            raise TaskError(
                f"the run needs {self._groups_wanted} tasks (run.steps x learner.groups_per_step), but task.epochs = {epochs} "
                f"over {size} tasks gives {epochs * size}: raise task.epochs, or set 0 for as many as the steps need"
            )

    def _log_end(self, cursor: Cursor, stream: TaskStream) -> None:
        reason = "the tasks are exhausted" if stream.exhausted else "every step has its groups"
        log.info("nothing more to feed after %d groups: %s", cursor.next_ordinal, reason, extra={"event": "feeder_done"})
