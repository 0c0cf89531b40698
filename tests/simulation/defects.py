"""Known bugs, planted one at a time: what the simulator must find, or it proves nothing.

Each is a patch of the product that exists only here, and copies a bug that a comparable system had or nearly had. ``DEFECTS``
maps its name to what it is and how to switch it on; ``run.py --defects`` plays seeds until each is caught.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sqlalchemy as sa
import torch
from greenlet import getcurrent

from rollbook.core.environments import ToolReply
from rollbook.core.host import host
from rollbook.core.idempotency import digest as idempotency_digest
from rollbook.core.records import Cursor, SubmitOutcome, VerdictKind
from rollbook.learner import durable
from rollbook.learner.checkpoint import Checkpoints
from rollbook.learner.trainer import Trainer
from rollbook.ledger import leasing, planning, submitting
from rollbook.ledger import schema as t
from rollbook.ledger.base import LedgerBase
from rollbook.ledger.dialects import Database
from rollbook.ledger.feeding import Feeding
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.writer import Txn, Writer
from rollbook.observe.failpoints import failpoint
from rollbook.rollout import worker
from rollbook.rollout.episodes import Episodes
from rollbook.tasks.stream import TaskStream
from simulation.tools import ToolJudge

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Defect:
    """One planted bug."""

    what: str
    like: str
    """Where such a bug was seen."""
    install: Patch
    needs: tuple[str, ...]
    """Kinds of faults, crash windows, or ``tools``, without which it cannot show; they are in every seed that looks for it."""


DEFECTS: dict[str, Defect] = {}


def defect(like: str, *needs: str) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Register a generator function as a defect; its docstring says what it is."""

    def register(function: Callable[[], Iterator[None]]) -> Patch:
        install = contextmanager(function)
        DEFECTS[function.__name__] = Defect((function.__doc__ or "").strip(), like, install, needs)
        return install

    return register


@defect("nats-server 7564", "ledger.before_commit")
def acknowledged_before_commit() -> Iterator[None]:
    """Submissions are answered when their rows are written, before they are durable."""
    original = Writer._apply

    def apply(self: Any, conn: Any, now_us: int, batch: Any, failed: Any, *, alone: bool) -> Any:
        done = original(self, conn, now_us, batch, failed, alone=alone)
        if batch[0].mergeable:
            for part in done:
                for operation, result in zip(part.operations, part.results, strict=True):
                    operation.future.set_result(result)
            host().sleep(0.02)
        return done

    with mock.patch.object(Writer, "_apply", apply):
        yield


@defect("OpenRLHF 1322, trl 5911, NeMo-RL 3599")
def cursor_outside_the_transaction() -> Iterator[None]:
    """The task cursor moves first and the groups follow in a transaction of their own."""
    original = Feeding.append_groups

    def append(self: Any, term: Any, before: Cursor, after: Cursor, groups: Any) -> Cursor:
        self._write(lambda txn: self._move_cursor(txn, dataclasses.replace(after, next_ordinal=before.next_ordinal)))
        host().sleep(0.02)
        moved = dataclasses.replace(before, state_json=after.state_json, exhausted=after.exhausted)
        return original(self, term, moved, after, groups)

    with mock.patch.object(Feeding, "append_groups", append):
        yield


@defect("river 1302, oban 532", "kill")
def rescue_without_state_guard() -> Iterator[None]:
    """Whoever reports a lease as lost ends its slot, also when the slot was filled meanwhile."""
    original = Ledger._judge_report

    def judge(self: Any, conn: Any, failure: Any) -> Any:
        outcome, reason, row = original(self, conn, failure)
        if outcome is SubmitOutcome.FENCED:
            txn = Txn(conn, self._database.now_us(conn))
            with contextlib.suppress(sa.exc.IntegrityError):
                self._give_verdicts(txn, {failure.key: (VerdictKind.FAILED, "rescued")})
        return outcome, reason, row

    with mock.patch.object(Ledger, "_judge_report", judge):
        yield


@defect("AReaL 1388")
def staleness_counted_in_memory() -> Iterator[None]:
    """The lag is counted from the first step that this server planned, not from stored versions."""
    first: dict[int, int] = {}

    def head_lag(step: int, version_min: int) -> int:
        base = first.setdefault(id(getattr(host(), "_process", None)), step)
        return max(0, (step - 1) - max(version_min, base - 1))

    with mock.patch.object(planning, "head_lag", head_lag):
        yield


@defect("KempnerForge 102, pytorch-lightning 688", "kill")
def row_before_rename() -> Iterator[None]:
    """The checkpoint's row is committed before the directory has its name."""
    original, promote = Checkpoints.save, durable.promote
    saving: dict[Any, list[Callable[[], None]]] = {}
    """By task: a patch from within a task that is killed would stay for every run that follows in this process."""

    def promote_later(finished: Any, target: Any) -> None:
        if (waiting := saving.get(getcurrent())) is None:
            promote(finished, target)
        else:
            waiting.append(lambda: promote(finished, target))

    def save(self: Any, state: Any) -> Any:
        waiting = saving[getcurrent()] = []
        client, commit = self._client, self._client.commit_checkpoint

        def commit_first(term: Any, checkpoint: Any) -> Any:
            done = commit(term, checkpoint)
            host().sleep(0.5)
            failpoint("learner.checkpoint.after_row")
            for late in waiting:
                late()
            return done

        try:
            with mock.patch.object(client, "commit_checkpoint", commit_first):
                return original(self, state)
        finally:
            saving.pop(getcurrent(), None)

    with (
        mock.patch.object(Checkpoints, "save", save),
        mock.patch("rollbook.learner.checkpoint.promote", promote_later),
    ):  # fmt: skip
        yield


@defect("ALICE (OSDI 2014)", "power_loss")
def directory_not_flushed() -> Iterator[None]:
    """Files are flushed, the directories that name them are not."""
    names = ("rollbook.learner.durable", "rollbook.learner.checkpoint", "rollbook.learner.publish")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(f"{name}.fsync_directory", lambda path: None))
        yield


@defect("pytorch 183878", "power_loss")
def file_not_flushed() -> Iterator[None]:
    """Directories are flushed, the files in them are not."""
    with mock.patch.object(durable, "fsync_file", lambda path: None):
        yield


@defect("dbos-transact-py 818, oban 1488", "pause_long", "second_learner")
def no_epoch_guard() -> Iterator[None]:
    """A learner or feeder that was superseded may still write."""
    with mock.patch.object(LedgerBase, "_check_term", lambda self, txn, term, role: None):
        yield


@defect("procrastinate 1518", "kill", "pause_long")
def worker_known_by_its_name() -> Iterator[None]:
    """A worker's successor takes over its identity, leases and all."""
    with mock.patch.object(worker, "incarnation", lambda: host()._process.name):  # type: ignore[attr-defined]
        yield


@defect("MailFathom 1989, mlflow 25199", "clock_ledger")
def wall_clock_decides() -> Iterator[None]:
    """Leases and terms are judged by a wall clock that somebody may set."""
    with mock.patch.object(Database, "now_us", lambda self, conn: int(host().time() * 1_000_000)):
        yield


@defect("verl 7579")
def lease_token_used_again() -> Iterator[None]:
    """A freed slot begins to count its lease tokens from the start."""
    free = leasing.Leasing._free

    def free_and_forget(self: Any, txn: Txn, rows: Any, *, counts: bool = True) -> None:
        rows = list(rows)
        free(self, txn, rows, counts=counts)
        for row in rows:
            c = t.lease.c
            where = (c.run_id == self.run.run_id, c.ordinal == row.ordinal, c.sibling == row.sibling)
            txn.conn.execute(sa.update(t.lease).where(*where).values(token=0))

    with mock.patch.object(leasing.Leasing, "_free", free_and_forget):
        yield


@defect("DBOS 818, hexpm 1825", "cut_off")
def repetition_is_stored_again() -> Iterator[None]:
    """A late sample for a filled slot replaces what is stored instead of being compared with it."""
    judge, store = submitting.Submitting._judge, submitting.Submitting._store

    def judge_blindly(self: Any, view: Any, c: Any, now_us: int) -> Any:
        outcome, reason, lease = judge(self, view, c, now_us)
        if outcome is SubmitOutcome.CONFLICT:
            self._again = c
        return outcome, reason, lease

    def store_again(self: Any, txn: Txn, accepted: Any) -> None:
        store(self, txn, accepted)
        again = self.__dict__.pop("_again", None)
        if again is not None:
            p, tr = t.payload.c, again.item.trajectory
            where = (p.run_id == self.run.run_id, p.ordinal == again.item.key.ordinal, p.sibling == again.item.key.sibling)
            txn.conn.execute(sa.update(t.payload).where(*where).values(token_ids=tr.token_ids, logprobs=tr.logprobs))

    with (
        mock.patch.object(submitting.Submitting, "_judge", judge_blindly),
        mock.patch.object(submitting.Submitting, "_store", store_again),
    ):
        yield


@defect("NeMo-RL 3599 review")
def digest_over_text() -> Iterator[None]:
    """A sample's fingerprint is taken over its text, in which many token sequences look alike."""

    def digest(item: Any) -> str:
        text = bytes(b for b in item.trajectory.token_ids[::4] if 32 <= b < 127)
        return idempotency_digest("sample", text)

    with mock.patch.object(submitting, "payload_digest", digest):
        yield


@defect("NeMo-RL 3480", "kill")
def plans_made_again_instead_of_replayed() -> Iterator[None]:
    """A restarted learner's steps behind its checkpoint are thrown away and planned anew from what is ready by now."""
    original = planning.Planning._plan

    def plan(self: Any, txn: Txn, term: Any, lineage: int, step: int) -> Any:
        known = self.__dict__.setdefault("_replanned", set())
        if term.epoch not in known:
            known.add(term.epoch)
            for table in (t.plan_item, t.plan_outcome, t.plan):
                c = table.c
                txn.conn.execute(sa.delete(table).where(c.run_id == self.run.run_id, c.lineage == lineage, c.step >= step))
            self._watermark = 0
        return original(self, txn, term, lineage, step)

    with mock.patch.object(planning.Planning, "_plan", plan):
        yield


@defect("ms-swift 9935")
def minibatch_order_not_restored() -> Iterator[None]:
    """A restored learner shuffles its minibatches from the beginning again."""
    original = Trainer.load_state_dict

    def load(self: Any, state: Any) -> None:
        order = self._order.get_state()
        original(self, state)
        self._order.set_state(order)

    with mock.patch.object(Trainer, "load_state_dict", load):
        yield


@defect("vime 427")
def optimizer_steps_not_restored() -> Iterator[None]:
    """All parameters share one step counter, which a restored optimizer begins anew."""
    original = Trainer.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, state)
        shared = torch.zeros(())
        for entry in self.optimizer.state.values():
            entry["step"] = shared.clone()

    with mock.patch.object(Trainer, "load_state_dict", load):
        yield


@defect("meta-pytorch/data 1437, verl 7401", "kill")
def epoch_edge_forgotten() -> Iterator[None]:
    """A stream restored exactly at the end of an epoch begins that epoch again."""
    original = TaskStream.__init__

    def init(self: Any, source: Any, seed: int, epochs: int = 0, state_json: str = "{}") -> None:
        original(self, source, seed, epochs, state_json)
        if self.drawn and self.drawn % self._size == 0:
            self.drawn -= self._size
            self._open(None)

    with mock.patch.object(TaskStream, "__init__", init):
        yield


@defect("Kafka 17754", "second_server", "pause_long")
def server_writes_past_its_epoch() -> Iterator[None]:
    """A ledger server does not look at its own fence row."""
    with mock.patch.object(LedgerBase, "_guard", lambda self, conn: self._database.now_us(conn)):
        yield


@defect("the whole-run oracle")
def seed_from_the_attempt() -> Iterator[None]:
    """The seed of a rollout depends on which attempt makes it."""
    original = Episodes.add

    def add(self: Any, grants: Any) -> None:
        original(self, [dataclasses.replace(g, seed=(g.seed + g.token - 1) % 2**31) for g in grants])

    with mock.patch.object(Episodes, "add", add):
        yield


@defect("crewAI 5802", "kill", "tools")
def impure_call_made_again() -> Iterator[None]:
    """Whoever takes a rollout over makes a call without a recorded answer again, whatever the call did."""
    original = Episodes._continue

    def go_on(self: Any, episode: Any, calls: Any) -> None:
        with mock.patch.object(self.judge, "pure_tools", dict.fromkeys(self.judge.pure_tools, True)):
            original(self, episode, calls)

    with mock.patch.object(Episodes, "_continue", go_on):
        yield


@defect("verl 6978", "tools")
def tool_failure_shown_to_the_model() -> Iterator[None]:
    """What a tool's infrastructure failed with is recorded as its answer."""
    original = ToolJudge.call_tool

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        future = original(self, *args, **keywords)
        result = future.result

        def answered() -> Any:
            reply = result()
            return ToolReply(f"error: {reply.reason}") if reply.failed else reply

        future.result = answered
        return future

    with mock.patch.object(ToolJudge, "call_tool", call):
        yield
