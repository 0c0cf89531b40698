"""Public threads of job queues and durable execution: rescue, lease, fence, identity, late results, acknowledgement.

Each test is named after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import sqlalchemy as sa
from ledger_support import Scene, run_record, version
from threads_support import ACCEPTED, CONFLICT, REFUSED, REPLAYED, of_groups, ordinals_of, outcome_of

from ledger_bench import Bench, ManualClock
from rollbook.core.errors import Fenced, InvalidRequest, NotReady, RoleHeld, ServerFenced
from rollbook.core.records import Blame, FailureReport, LeaseGrant, PlanOutcome, RewardStatus, Role, SubmitOutcome
from rollbook.ledger import schema as t
from rollbook.ledger.ledger import Ledger
from rollbook.rollout.leases import LeaseNote


def report(g: LeaseGrant, incarnation: str) -> FailureReport:
    return FailureReport(g.key, g.token, incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "gone")


def test_river_1302_a_rescue_never_touches_a_slot_that_was_filled_meanwhile(bench: Bench) -> None:
    """The rescuer worked from a list made earlier and set a job back that had been completed since."""
    s = bench.scene()
    s.feed(2)
    grants = s.lease()
    assert s.submit(grants[:2]) == [ACCEPTED, ACCEPTED]
    bench.let_time_pass(100.0)
    again = s.lease()
    assert [g.key for g in again] == [g.key for g in grants[2:]]
    assert s.submit(grants[:2]) == [REPLAYED, REPLAYED]


def test_river_1258_everything_a_dead_worker_held_comes_back(bench: Bench) -> None:
    """Thousands of jobs stayed 'running' for up to 91 days."""
    s = bench.scene(attempts_max=5)
    s.feed(4)
    held = s.lease()
    bench.crash(s)
    s.incarnation = s.worker()
    assert s.lease() == ()
    bench.let_time_pass(100.0)
    assert [(g.key, g.token) for g in s.lease()] == [(g.key, 2) for g in held]


def test_procrastinate_1518_a_new_process_of_the_same_name_is_another_worker(bench: Bench) -> None:
    """A pod came back under its old name; the jobs of its dead predecessor looked alive and were never taken back."""
    s = bench.scene(attempts_max=5)
    s.feed(2)
    held = s.lease()
    reborn = s.worker()
    for _ in range(4):
        bench.let_time_pass(10.0)
        reply = s.ledger.heartbeat(reborn, s.head(), [(g.key, g.token) for g in held])
        assert sorted(reply.lost) == [g.key for g in held]
    assert [g.token for g in s.lease(incarnation=reborn)] == [2] * 4


def test_procrastinate_1518_a_worker_row_outlives_its_leases(bench: Bench) -> None:
    """The row of a dead worker was pruned before its jobs were looked for, so nobody found them any more."""
    s = bench.scene()
    s.feed(2)
    s.lease()
    prune = sa.delete(t.worker)
    assert outcome_of(lambda: s.ledger._writer.run(lambda txn: txn.conn.execute(prune).rowcount)) is sa.exc.IntegrityError


def test_oban_1488_a_server_that_lost_its_role_writes_and_answers_nothing(damaged: Bench) -> None:
    """A node went on believing that it led, for 19 days beside the real leader."""
    s = damaged.scene()
    s.feed(2)
    grants = s.lease()
    damaged.execute("UPDATE fence SET epoch = epoch + 1, holder = 'successor' WHERE role = 'ledger'")
    assert outcome_of(lambda: s.submit(grants)) is ServerFenced
    assert outcome_of(s.ledger.run_status) is ServerFenced
    assert damaged.rows("SELECT count(*) FROM sample") == [(0,)]


def test_oban_py_32_two_processes_of_one_host_are_two_holders(bench: Bench) -> None:
    """Leadership was matched by host name: the second process of a host led too, and every job was made twice."""
    s = bench.scene()
    s.ledger.release_role(s.feeder)
    first = s.ledger.acquire_role(Role.FEEDER, "host-a/1", 60.0)
    assert outcome_of(lambda: s.ledger.acquire_role(Role.FEEDER, "host-a/2", 60.0)) is RoleHeld
    assert outcome_of(lambda: s.ledger.renew_role(first)) == first


def test_oban_532_the_slower_of_two_attempts_changes_nothing(bench: Bench) -> None:
    """Two attempts ran at once; the slower one failed and set a job back that the other had settled."""
    s = bench.scene(attempts_max=5)
    s.feed(1)
    slow = s.lease(1)
    bench.let_time_pass(100.0)
    fast_worker = s.worker()
    (fast,) = s.lease(1, incarnation=fast_worker)
    assert (fast.key, fast.token) == (slow[0].key, 2)
    outcome = s.ledger.report_failures([report(slow[0], s.incarnation)])[0].outcome
    assert bench.rows("SELECT incarnation, token FROM lease WHERE sibling = 0") == [(fast_worker, 2)]
    assert outcome is SubmitOutcome.FENCED
    assert s.submit([fast], fast_worker) == [ACCEPTED]


def test_hexpm_1825_a_long_rollout_keeps_its_lease_as_long_as_its_worker_beats(bench: Bench) -> None:
    """Jobs were rescued after six minutes although they take up to 47: three full runs of each, every night."""
    s = bench.scene(lease_ttl_s=30.0)
    s.feed(1)
    held = s.lease()
    other = s.worker()
    for _ in range(8):
        bench.let_time_pass(20.0)
        assert s.ledger.heartbeat(s.incarnation, s.head(), [(g.key, g.token) for g in held]).lost == ()
        assert s.lease(incarnation=other) == ()
    assert s.submit(held) == [ACCEPTED, ACCEPTED]


def test_solid_queue_761_a_worker_given_up_frees_nothing_of_its_successor(bench: Bench) -> None:
    """A pruned worker that was alive ended its job late and released the place its successor held: a limit of 1 let 11 run."""
    s = bench.scene(groups_per_step=1, max_lag_versions=1, attempts_max=5)
    s.feed(6)
    old = of_groups(s.lease(), 0)
    s.submit(of_groups(s.lease(), 1))
    given_up = s.incarnation
    bench.let_time_pass(100.0)
    s.incarnation = s.worker()
    s.submit(of_groups(s.lease(4), 1))
    for step in (1, 2):
        s.train(step)
        s.submit(of_groups(s.lease(2), step + 1))
    successor = s.worker()
    bench.let_time_pass(100.0)
    held = of_groups(s.lease(incarnation=successor), 0)
    assert len(held) == 2
    assert s.submit(old, given_up) == [REFUSED, REFUSED], "two versions too old"
    assert bench.rows("SELECT DISTINCT incarnation FROM lease WHERE ordinal = 0") == [(successor,)]
    assert s.submit(held, successor) == [ACCEPTED, ACCEPTED]


def test_solid_queue_589_a_rollout_ends_once(bench: Bench) -> None:
    """A job was finished and failed at once."""
    s = bench.scene()
    s.feed(1)
    grants = s.lease()
    assert s.submit(grants) == [ACCEPTED, ACCEPTED]
    answers = [r.outcome for r in s.ledger.report_failures([report(g, s.incarnation) for g in grants])]
    assert answers == [SubmitOutcome.FENCED] * 2
    assert s.submit(grants, reward=0.0) == [CONFLICT, CONFLICT]
    assert bench.rows("SELECT count(*) FROM verdict") == [(0,)]


def test_dbos_759_an_empty_id_is_refused_and_never_a_key(bench: Bench) -> None:
    """An empty string slipped past a check for None; every recovery then forked a new run, 96 a day for a month."""
    s = bench.scene()
    s.feed(2)
    assert outcome_of(lambda: s.ledger.register_worker("", "host", "engine")) is InvalidRequest
    assert outcome_of(lambda: s.ledger.acquire_role(Role.LEARNER, "", 60.0)) is InvalidRequest
    first, second = s.lease(2, request_id=""), s.lease(2, request_id="")
    assert not {g.key for g in first} & {g.key for g in second}


def test_dbos_818_a_learner_that_was_overtaken_takes_no_further_step(bench: Bench) -> None:
    """The loser of a race for a checkpoint went on and executed the steps after it."""
    s = bench.scene()
    s.feed(4)
    s.fill()
    s.plan(1)
    zombie = s.learner
    s.learner = s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="learner-1")
    s.finish(1)
    made = s.checkpoint(1)
    for call in (
        lambda: s.ledger.plan_step(zombie, 0, 2),
        lambda: s.ledger.finish_plan(zombie, 0, 1, PlanOutcome.SKIPPED, "late", "{}"),
        lambda: s.ledger.publish_version(zombie, version(1)),
        lambda: s.ledger.commit_checkpoint(zombie, made),
        lambda: s.ledger.mark_checkpoint(zombie, 0, 1, "corrupt"),
        lambda: s.ledger.renew_role(zombie),
    ):
        assert outcome_of(call) is Fenced
    assert s.ledger.resume_point().last_planned_step == 1


def test_dbos_java_493_a_start_leaves_alone_what_was_granted_in_the_same_instant(bench: Bench) -> None:
    """Recovery at start adopted a workflow that had been inserted in the same millisecond, and ran it a second time."""
    s = bench.scene()
    s.feed(2)
    held = s.lease()
    bench.crash(s, down_s=0.0)
    assert s.lease(incarnation=s.worker()) == ()
    assert s.submit(held) == [ACCEPTED] * 4


def test_pg_boss_436_a_successor_gives_back_what_its_predecessor_held_at_once(bench: Bench, tmp_path) -> None:
    """Jobs of a crashed process waited for their full timeout."""
    s = bench.scene(attempts_max=5)
    s.feed(2)
    held = s.lease()
    note = LeaseNote(tmp_path / "leases.json", "run")
    note.write(s.incarnation, held)
    reborn = s.worker()
    s.ledger.report_failures(note.left_by(s.incarnation))
    assert [(g.key, g.token) for g in s.lease(incarnation=reborn)] == [(g.key, 2) for g in held]


class SetClock(ManualClock):
    """A machine whose wall clock somebody sets; monotonic time goes its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.set_by = 0.0

    def time(self) -> float:
        return self.now + self.set_by


def test_mlflow_25199_a_clock_that_is_set_neither_ends_a_lease_nor_keeps_one(sqlite_url: str) -> None:
    """Leases were judged by a clock of each replica's own; where it was wrong they ended early or never."""
    clock = SetClock()
    with Ledger(sqlite_url, holder="server", clock=clock) as ledger:
        s = Scene(ledger, run_record(lease_ttl_s=30.0, attempts_max=5))
        s.feed(2)
        held = s.lease()
        other = s.worker()
        clock.set_by = 3600.0
        assert s.lease(incarnation=other) == ()
        assert s.submit(held[:1]) == [ACCEPTED]
        assert ledger.run_status()["submits"]["salvaged"] == 0
        clock.set_by = -3600.0
        clock.now += 31.0
        assert [g.key for g in s.lease(incarnation=other)] == [g.key for g in held[1:]]
        assert ledger.audit() == []


def test_bufstream_a_delayed_commit_is_not_applied_to_the_next_step(bench: Bench) -> None:
    """A commit that was delayed on its way was applied to the transaction that was open when it arrived."""
    s = bench.scene()
    s.feed(4)
    s.fill()
    s.plan(1)

    def delayed() -> None:
        s.ledger.finish_plan(s.learner, 0, 1, PlanOutcome.SKIPPED, "no gradient", "{}")

    delayed()
    s.ledger.publish_version(s.learner, version(1))
    s.plan(2)
    delayed()
    assert [s.ledger.read_plan(0, step).outcome for step in (1, 2)] == [PlanOutcome.SKIPPED, None]
    assert outcome_of(lambda: s.ledger.publish_version(s.learner, version(2))) is InvalidRequest


def test_nats_7564_the_disk_has_what_was_acknowledged(bench: Bench) -> None:
    """Acknowledged before fsync, at two-minute intervals: a power failure took a whole stream."""
    s = bench.scene()
    if bench.url.startswith("sqlite"):
        found = s.ledger._writer.run(lambda txn: txn.conn.exec_driver_sql("PRAGMA synchronous").scalar_one())
        assert found == 2, "FULL: every commit is synced"
    else:
        assert s.ledger._writer.run(lambda txn: txn.conn.exec_driver_sql("SHOW synchronous_commit").scalar_one()) == "on"


def test_reverb_103_a_restored_limiter_lets_new_work_in(bench: Bench) -> None:
    """A rate limiter restored from its checkpoint stood at its limit; a fresh writer waited for ever."""
    s = bench.scene(max_lag_versions=1)
    for step in (1, 2):
        s.feed(4)
        s.fill(4)
        s.train(step)
    bench.crash(s)
    s.fill()
    plan = outcome_of(lambda: s.plan(3))
    assert plan is not NotReady and ordinals_of(plan) == [4, 5]


def test_temporal_459_a_request_whose_answer_was_lost_gets_the_same_grants_after_a_restart(bench: Bench) -> None:
    """Tasks handed out just before a restart were lost: their answer never arrived and nobody gave them out again."""
    s = bench.scene()
    s.feed(4)
    lost = s.lease(3, request_id="first")
    bench.crash(s)
    assert outcome_of(lambda: s.lease(3, request_id="first")) == lost
    assert bench.rows("SELECT count(*) FROM lease") == [(3,)]
