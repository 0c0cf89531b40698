"""Defects in leases, submissions and what a worker says about itself."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from mutants.registry import mutant
from rollbook.core.errors import Unavailable
from rollbook.core.records import SubmitOutcome, SubmitResult
from rollbook.ledger import schema as t


def at_attach(original: Any, change: Any) -> Any:
    """``_attach`` that runs ``change`` on the rows a predecessor left, before anything else."""

    def attach(self: Any, run_id: str) -> None:
        original(self, run_id)
        if self._term.epoch > 1:
            self._write(lambda txn: change(self, txn))

    return attach


@mutant("rollbook.ledger.roles", "Roles._attach")
def in_flight_rollouts_are_forgotten(original: Any) -> Any:
    """verl#4199: a restarted server knows nothing of what is being generated."""
    return at_attach(original, lambda self, txn: txn.conn.execute(sa.delete(t.lease)))


@mutant("rollbook.ledger.roles", "Roles._attach")
def the_buffer_is_not_restored(original: Any) -> Any:
    """OpenRLHF#1322: finished rollouts that wait to be trained are not in the checkpoint."""

    def drop(self: Any, txn: Any) -> None:
        i = t.plan_item.c
        for table in (t.payload, t.sample):
            planned = sa.exists().where(i.ordinal == table.c.ordinal, i.sibling == table.c.sibling)
            txn.conn.execute(sa.delete(table).where(~planned))

    return at_attach(original, drop)


@mutant("rollbook.ledger.roles", "Roles._attach")
def prompts_ahead_of_training_are_skipped(original: Any) -> Any:
    """trl#5911: a resumed run goes on at the position that was fetched, not at the one that was trained."""

    def drop(self: Any, txn: Any) -> None:
        s = t.sample.c
        for table in (t.slot, t.prompt_group):
            touched = sa.exists().where(s.run_id == table.c.run_id, s.ordinal == table.c.ordinal)
            txn.conn.execute(sa.delete(table).where(~touched))

    return at_attach(original, drop)


@mutant("rollbook.ledger.roles", "Roles._attach")
def every_restart_is_a_new_run(original: Any) -> Any:
    """torchforge#362: nothing is resumed, a restarted job begins at step 0."""

    def drop(self: Any, txn: Any) -> None:
        for table in (t.plan_outcome, t.plan_item, t.plan, t.policy_version, t.checkpoint):
            txn.conn.execute(sa.delete(table))

    return at_attach(original, drop)


@mutant("rollbook.ledger.roles", "Roles._attach")
def a_start_takes_over_what_was_granted_this_instant(original: Any) -> Any:
    """dbos-transact-java#493: start-up recovery adopts work that began in the same millisecond and runs it twice."""
    free = sa.update(t.lease).values(incarnation=None)
    return at_attach(original, lambda self, txn: txn.conn.execute(free.where(t.lease.c.granted_at_us <= txn.now_us)))


@mutant("rollbook.ledger.leasing", "Leasing._grant")
def issuing_again_wipes_fields(original: Any) -> Any:
    """verl#7037: putting a prompt in flight again writes its tags only and loses its fields."""

    def grant(self: Any, txn: Any, incarnation: str, version: Any, granted: Any, request_id: str) -> Any:
        again = [key.ordinal for key, token, _, _ in granted if token > 1]
        wiped = sa.update(t.prompt_group).where(t.prompt_group.c.ordinal.in_(again)).values(task_json="{}")
        txn.conn.execute(wiped)
        return original(self, txn, incarnation, version, granted, request_id)

    return grant


@mutant("rollbook.ledger.leasing", "Leasing._grant")
def a_rollout_begins_again_from_nothing(original: Any) -> Any:
    """NeMo-RL#3594: an interrupted rollout loses its finished turns."""

    def grant(self: Any, txn: Any, *rest: Any) -> Any:
        for key, token, _, _ in rest[2]:
            if token > 1:
                c = t.tool_call.c
                txn.conn.execute(sa.delete(t.tool_call).where(c.ordinal == key.ordinal, c.sibling == key.sibling))
        return original(self, txn, *rest)

    return grant


@mutant("rollbook.ledger.submitting", "Submitting._view")
def receipts_live_in_memory(original: Any) -> Any:
    """miles#2254: after a restart a late result fits no reservation and no receipt."""

    def view(self: Any, conn: sa.Connection, items: Any) -> Any:
        made = original(self, conn, items)
        here = self.__dict__.setdefault("_seen_here", set())
        made.samples = {key: row for key, row in made.samples.items() if key in here}
        here |= {tuple(c.item.key) for c in items}
        return made

    return view


@mutant("rollbook.ledger.submitting", "Submitting._judge")
def a_result_needs_no_reservation(original: Any) -> Any:
    """miles#2254: a result is taken for whatever slot its index names."""

    def judge(self: Any, view: Any, c: Any, now_us: int) -> Any:
        outcome, reason, lease = original(self, view, c, now_us)
        never = outcome is SubmitOutcome.INVALID and "never granted" in reason
        return (SubmitOutcome.REPLAYED, "", lease) if never else (outcome, reason, lease)

    return judge


@mutant("rollbook.ledger.failing", "Failing._expire")
def a_lost_sibling_restarts_its_group(original: Any) -> Any:
    """NeMo-RL#3923: a restart of an unfinished sibling throws the finished ones of its group away."""

    def expire(self: Any, txn: Any) -> None:
        c = t.lease.c
        late = sa.select(c.ordinal).where(c.incarnation.is_not(None), c.expires_at_us <= txn.now_us)
        ordinals = list(txn.conn.execute(late).scalars())
        for table in (t.payload, t.sample):
            txn.conn.execute(sa.delete(table).where(table.c.ordinal.in_(ordinals)))
        original(self, txn)

    return expire


@mutant("rollbook.ledger.submitting", "Submitting._judge")
def an_old_attempt_passes(original: Any) -> Any:
    """NeMo-RL#3923: an attempt from before the restart is taken beside the new one."""

    def judge(self: Any, view: Any, c: Any, now_us: int) -> Any:
        outcome, reason, lease = original(self, view, c, now_us)
        return (SubmitOutcome.ACCEPTED, "", lease) if outcome is SubmitOutcome.FENCED else (outcome, reason, lease)

    return judge


@mutant("rollbook.ledger.submitting", "Submitting._judge")
def a_result_after_its_turn_is_thrown_away(original: Any) -> Any:
    """prime-rl#2960: a long rollout is discarded because its turn is over, fresh or not."""

    def judge(self: Any, view: Any, c: Any, now_us: int) -> Any:
        outcome, reason, lease = original(self, view, c, now_us)
        late = outcome is SubmitOutcome.ACCEPTED and reason
        return (SubmitOutcome.FENCED, reason, lease) if late else (outcome, reason, lease)

    return judge


@mutant("rollbook.ledger.base", "LedgerBase._version")
def the_version_counter_begins_again(original: Any) -> Any:
    """miles#2835, cosmos-rl#503: the weight version is 0 after a restart."""

    def version(self: Any, conn: sa.Connection, lineage: int, number: int | None) -> Any:
        restarted = self._term is not None and self._term.epoch > 1
        return original(self, conn, lineage, 0 if number is None and restarted else number)

    return version


@mutant("rollbook.ledger.planning", "Planning._choose_bounded")
def starvation_is_silent(original: Any) -> Any:
    """cosmos-rl#503: a step that lacks samples says only that it waits."""

    def choose(self: Any, txn: Any, step: int) -> Any:
        chosen = original(self, txn, step)
        return "waiting" if isinstance(chosen, str) else chosen

    return choose


@mutant("rollbook.ledger.failing", "Failing._expire")
def the_rescuer_looks_at_an_old_picture(original: Any) -> Any:
    """river#1302: the rescuer frees a job that was finished since its list was made."""

    def expire(self: Any, txn: Any) -> None:
        s = t.sample.c
        late = txn.now_us - int(self.rules.lease_ttl_s * 1_000_000)
        unplanned = ~sa.exists().where(t.plan_item.c.ordinal == s.ordinal, t.plan_item.c.sibling == s.sibling)
        for row in txn.conn.execute(sa.select(t.sample).where(s.accepted_at_us <= late, unplanned)).all():
            lease = {"run_id": row.run_id, "ordinal": row.ordinal, "sibling": row.sibling, "token": row.lease_token,
                     "attempt": row.attempt, "lineage": 0, "version": 0, "extended_us": 0, "granted_at_us": late,
                     "expires_at_us": late}  # fmt: skip
            txn.conn.execute(self._database.insert_ignore(t.lease), lease)
        original(self, txn)

    return expire


@mutant("rollbook.ledger.failing", "Failing._expire")
def nobody_rescues_the_dead(original: Any) -> Any:
    """river#1258: jobs of dead workers stay running for weeks."""
    return lambda self, txn: None


@mutant("rollbook.ledger.leasing", "Leasing._renew_leases")
def a_worker_is_known_by_its_name(original: Any) -> Any:
    """procrastinate#1518: a restarted worker with the old name keeps the dead one's jobs alive."""

    def renew(self: Any, txn: Any, incarnation: str, loaded: Any, leases: Any) -> Any:
        lost = original(self, txn, incarnation, loaded, leases)
        expires_us = txn.now_us + int(self.rules.lease_ttl_s * 1_000_000)
        w, c = t.worker.c, t.lease.c
        host = sa.select(w.host).where(w.incarnation == incarnation).scalar_subquery()
        same = sa.select(w.incarnation).where(w.host == host)
        txn.conn.execute(sa.update(t.lease).where(c.incarnation.in_(same)).values(expires_at_us=expires_us))
        return () if lost else lost

    return renew


@mutant("rollbook.ledger.leasing", "Leasing._renew_leases")
def heartbeats_renew_nothing(original: Any) -> Any:
    """hexpm#1825, pg-boss#238: a fixed time limit takes long jobs away while they run."""
    return lambda self, txn, incarnation, loaded, leases: ()


@mutant("rollbook.ledger.leasing", "Leasing.register_worker")
def an_empty_id_passes(original: Any) -> Any:
    """dbos-transact-py#759: an empty id slips past a check for None and stands for everybody."""

    def register(self: Any, incarnation: str, *rest: Any) -> None:
        original(self, incarnation or " ", *rest)

    return register


@mutant("rollbook.ledger.failing", "Failing._judge_report")
def the_slower_attempt_has_the_last_word(original: Any) -> Any:
    """oban#532: of two attempts that run at once the slower one sets the job back."""

    def judge(self: Any, conn: sa.Connection, f: Any) -> Any:
        outcome, reason, row = original(self, conn, f)
        c = t.lease.c
        held = conn.execute(sa.select(t.lease).where(c.ordinal == f.key.ordinal, c.sibling == f.key.sibling)).first()
        return (SubmitOutcome.ACCEPTED, "", held) if outcome is SubmitOutcome.FENCED and held else (outcome, reason, row)

    return judge


@mutant("rollbook.ledger.submitting", "_holds")
def a_stale_end_releases_the_lock_of_another(original: Any) -> Any:
    """solid_queue#761: a worker that was given up ends its job late and frees the place its successor holds."""
    return lambda lease, item: lease is not None


@mutant("rollbook.rollout.leases", "LeaseNote.left_by")
def a_crash_waits_for_the_full_timeout(original: Any) -> Any:
    """pg-boss#436: jobs of a crashed process wait until their time is over although its successor knows better."""
    return lambda self, dead, *reason: []


@mutant("rollbook.ledger.dialects", "Database.now_us")
def leases_follow_the_wall_clock(original: Any) -> Any:
    """mlflow#25199, MailFathom#1989: a lease is judged by a clock that somebody can set."""

    def now_us(self: Any, conn: sa.Connection) -> int:
        return int(self.clock.time() * 1_000_000) if self.is_sqlite else original(self, conn)

    return now_us


@mutant("rollbook.ledger.dialects", "_prepare_sqlite")
def acknowledged_before_the_disk_has_it(original: Any) -> Any:
    """nats-server#7564: acknowledged minutes before fsync, a power failure takes the stream."""

    def prepare(engine: sa.Engine, begin: str, *, query_only: bool) -> None:
        original(engine, begin, query_only=query_only)
        if not query_only:
            sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=NORMAL"))

    return prepare


@mutant("rollbook.ledger.submitting", "Submitting.submit_samples")
def acknowledged_before_commit(original: Any) -> Any:
    """verl#7579: an answered write lives in memory and goes with the process."""

    def submit(self: Any, submissions: Any) -> Any:
        try:
            return original(self, submissions)
        except Unavailable:
            return [SubmitResult(item.key, SubmitOutcome.ACCEPTED) for item in submissions]

    return submit


@mutant("rollbook.ledger.leasing", "Leasing._granted")
def a_repeated_request_is_a_new_one(original: Any) -> Any:
    """temporal#459, W6: a request whose answer was lost is carried out again, its first tasks are held by nobody."""
    return lambda self, conn, incarnation, request_id: None




@mutant("rollbook.ledger.dialects", "_prepare_sqlite")
def worker_rows_are_pruned_first(original: Any) -> Any:
    """procrastinate#1518: the row of a dead worker goes before its jobs are looked for."""

    def prepare(engine: sa.Engine, begin: str, *, query_only: bool) -> None:
        original(engine, begin, query_only=query_only)
        sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys=OFF"))

    return prepare


@mutant("rollbook.ledger.failing", "Failing._judge_report")
def a_filled_slot_can_still_fail(original: Any) -> Any:
    """solid_queue#589: a job is finished and failed at once."""

    def judge(self: Any, conn: sa.Connection, f: Any) -> Any:
        outcome, reason, row = original(self, conn, f)
        return (SubmitOutcome.REPLAYED, reason, row) if outcome is SubmitOutcome.FENCED else (outcome, reason, row)

    return judge
