"""Opening runs, configuration revisions, fenced roles and fenced servers, on both databases."""

from __future__ import annotations

import dataclasses

import pytest
from ledger_support import STREAM, Scene, group, run_record, version

from ledger_bench import Bench
from rollbook.core.errors import (
    ConfigMismatch,
    Fenced,
    InvalidRequest,
    LedgerLocked,
    NotFound,
    NotReady,
    RoleHeld,
    ServerFenced,
    Standby,
    WrongRun,
)
from rollbook.core.records import Cursor, PlanOutcome, Role
from rollbook.observe import failpoints


def test_opening_a_run_twice_changes_nothing(bench: Bench) -> None:
    ledger = bench.open()
    first = ledger.open_run(run_record())
    assert ledger.open_run(run_record()) == first
    assert len(bench.rows("SELECT * FROM run")) == len(bench.rows("SELECT * FROM config_revision")) == 1


def test_a_verb_before_open_run_says_what_comes_first(bench: Bench) -> None:
    with pytest.raises(NotReady, match="open_run"):
        bench.open().cursor(STREAM)


def test_another_run_on_the_same_server_is_refused(bench: Bench) -> None:
    ledger = bench.open()
    ledger.open_run(run_record())
    with pytest.raises(WrongRun, match="'run'"):
        ledger.open_run(run_record("other"))
    with pytest.raises(WrongRun):
        ledger.attach("other")


def test_one_database_holds_several_runs_that_do_not_see_each_other(bench: Bench) -> None:
    first = Scene(bench.open(), run_record("first"))
    first.feed(6)
    first.ledger.close()
    second = Scene(bench.open(), run_record("second"))
    assert second.ledger.cursor(STREAM).next_ordinal == 0
    second.feed(6)
    second.fill()
    second.train(1)
    assert second.ledger.run_ids() == ["first", "second"]
    assert second.ledger.run_status()["groups"]["issued"] == 6


def test_attaching_to_an_unknown_run_names_it(bench: Bench) -> None:
    with pytest.raises(NotFound, match="'nowhere'"):
        bench.open().attach("nowhere")


def test_a_changed_configuration_is_refused_and_names_the_difference(bench: Bench) -> None:
    ledger = bench.open()
    ledger.open_run(run_record(attempts_max=3))
    with pytest.raises(ConfigMismatch, match=r"rules\.attempts_max: 3 -> 4"):
        ledger.open_run(run_record(attempts_max=4))


def test_an_accepted_change_is_a_revision_from_the_first_unplanned_step(bench: Bench) -> None:
    s = bench.scene(max_lag_versions=1)
    s.feed(4)
    s.fill()
    s.train(1)
    changed = s.ledger.open_run(run_record(max_lag_versions=3), accept=["rules.max_lag_versions"])
    assert changed.revision == 1
    assert s.plan(2).revision == 1
    assert s.ledger.read_plan(0, 1).revision == 0
    assert bench.rows("SELECT revision, from_step FROM config_revision ORDER BY revision") == [(0, 1), (1, 2)]
    s.record = run_record(max_lag_versions=3)
    bench.crash(s)
    assert s.ledger.run.revision == 1
    assert s.ledger.run.rules.max_lag_versions == 3


@pytest.mark.parametrize("change", [{"group_size": 3}, {"groups_per_step": 3}, {"config_seed": 8}])
def test_a_change_that_existing_groups_depend_on_is_never_accepted(bench: Bench, change: dict) -> None:
    ledger = bench.open()
    ledger.open_run(run_record())
    with pytest.raises(ConfigMismatch, match=next(iter(change))):
        ledger.open_run(run_record(**change), accept=[f"rules.{name}" for name in change])


def test_the_holder_gets_its_own_term_again(bench: Bench) -> None:
    s = bench.scene()
    assert s.ledger.acquire_role(Role.LEARNER, "learner-1", 60.0) == s.learner


def test_a_role_is_held_until_its_term_ends_and_then_taken_with_a_larger_epoch(bench: Bench) -> None:
    s = bench.scene()
    bench.let_time_pass(59.0)
    with pytest.raises(RoleHeld, match="learner-1"):
        s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0)
    bench.let_time_pass(2.0)
    assert s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0).epoch == s.learner.epoch + 1


def test_renewing_extends_a_term(bench: Bench) -> None:
    s = bench.scene()
    bench.let_time_pass(59.0)
    assert s.ledger.renew_role(s.learner) == s.learner
    bench.let_time_pass(59.0)
    with pytest.raises(RoleHeld):
        s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0)


def test_a_dead_holder_is_superseded_at_once_but_only_by_its_name(bench: Bench) -> None:
    s = bench.scene()
    with pytest.raises(RoleHeld):
        s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="somebody-else")
    assert s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="learner-1").epoch == 2


def test_a_released_role_is_free_and_releasing_it_late_harms_nobody(bench: Bench) -> None:
    s = bench.scene()
    s.ledger.release_role(s.learner)
    newer = s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0)
    s.ledger.release_role(s.learner)
    assert s.ledger.renew_role(newer) == newer


@pytest.mark.parametrize("role", [Role.LEDGER, Role.WORKER, Role.SUPERVISOR])
def test_only_learner_and_feeder_are_taken_by_call(bench: Bench, role: Role) -> None:
    s = bench.scene()
    with pytest.raises(InvalidRequest, match=role.value):
        s.ledger.acquire_role(role, "me", 60.0)


def test_a_fenced_learner_changes_nothing(bench: Bench) -> None:
    s = bench.scene()
    s.feed(4)
    s.fill()
    s.train(1)
    made = s.checkpoint(0)
    s.checkpoint(1)
    zombie = s.learner
    s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="learner-1")
    ledger, before = s.ledger, bench.rows("SELECT * FROM plan")
    for call in (
        lambda: ledger.plan_step(zombie, 0, 2),
        lambda: ledger.plan_step(zombie, 0, 1),
        lambda: ledger.finish_plan(zombie, 0, 1, PlanOutcome.SKIPPED, "why", "{}"),
        lambda: ledger.publish_version(zombie, version(2)),
        lambda: ledger.commit_checkpoint(zombie, made),
        lambda: ledger.mark_checkpoint(zombie, 0, 1, "corrupt"),
        lambda: ledger.renew_role(zombie),
    ):
        with pytest.raises(Fenced, match="learner-2"):
            call()
    assert bench.rows("SELECT * FROM plan") == before
    assert len(ledger.versions(0)) == 2


def test_a_term_of_another_role_does_not_open_the_learners_verbs(bench: Bench) -> None:
    s = bench.scene()
    with pytest.raises(Fenced, match="learner role"):
        s.ledger.plan_step(s.feeder, 0, 1)
    with pytest.raises(Fenced, match="feeder role"):
        s.ledger.append_groups(s.learner, Cursor(STREAM, 0, "{}", False), Cursor(STREAM, 1, "{}", False), [group(0)])


def test_a_fenced_feeder_appends_nothing(bench: Bench) -> None:
    s = bench.scene()
    s.ledger.acquire_role(Role.FEEDER, "feeder-2", 60.0, supersede="feeder-1")
    with pytest.raises(Fenced, match="feeder-2"):
        s.feed(1)
    assert s.ledger.run_status()["slots"]["issued"] == 0


def test_an_invented_epoch_is_fenced(bench: Bench) -> None:
    s = bench.scene()
    with pytest.raises(Fenced):
        s.ledger.plan_step(dataclasses.replace(s.learner, epoch=99), 0, 1)


def test_a_server_whose_fence_row_moved_on_answers_nothing_any_more(damaged: Bench) -> None:
    s = damaged.scene()
    s.feed(2)
    damaged.execute("UPDATE fence SET epoch = epoch + 1, holder = 'successor' WHERE role = 'ledger'")
    with pytest.raises(ServerFenced, match="superseded"):
        s.lease()
    with pytest.raises(ServerFenced):
        s.ledger.run_status()
    assert not s.ledger.holds_role()
    assert damaged.rows("SELECT * FROM lease") == []


def test_a_server_past_its_own_term_renews_before_it_reads(damaged: Bench) -> None:
    s = damaged.scene()
    damaged.let_time_pass(20.0)
    assert s.ledger.run_status()["run_id"] == "run"
    assert s.ledger.holds_role()
    damaged.let_time_pass(20.0)
    damaged.execute("UPDATE fence SET epoch = epoch + 1 WHERE role = 'ledger'")
    with pytest.raises(ServerFenced):
        s.ledger.run_status()


def test_a_server_past_its_own_term_whose_database_is_silent_does_not_hold_the_role_for_now(bench: Bench) -> None:
    s = bench.scene()
    assert s.ledger.holds_role()
    bench.let_time_pass(20.0)
    failpoints.arm("ledger.before_commit=raise")
    try:
        with pytest.raises(Standby, match="was not renewed"):
            s.ledger.holds_role()
    finally:
        failpoints.arm("")
    with pytest.raises(Standby, match="could not be renewed"):
        s.ledger.holds_role()  # the database is not asked at once again
    bench.let_time_pass(2.0)
    assert s.ledger.holds_role() and not s.ledger.fenced


def test_a_sqlite_file_has_one_server(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    with pytest.raises(LedgerLocked, match=r"ledger\.sqlite"):
        sqlite_bench.open()
    s.ledger.close()
    sqlite_bench.open().attach("run")


def test_a_second_postgresql_server_waits_for_the_fence_and_then_fences_the_first(postgres_url: str, clock) -> None:
    bench = Bench(postgres_url, clock)
    s = bench.scene()
    s.feed(2)
    standby = bench.open("standby")
    with pytest.raises(RoleHeld, match="server-0"):
        standby.attach("run")
    standby = bench.open("replacement", supersede="server-0")
    assert standby.open_run(s.record).run_id == "run"
    with pytest.raises(ServerFenced):
        s.lease()
    with pytest.raises(ServerFenced):
        s.ledger.renew_self()
    s.ledger = standby
    assert len(s.lease()) == 4
    bench.finish()


def test_a_released_server_role_is_taken_over_without_waiting(bench: Bench) -> None:
    s = bench.scene()
    s.ledger.close()
    successor = bench.open("later")
    successor.attach("run")
    roles = {r["role"]: r for r in successor.run_status()["roles"]}
    assert (roles["ledger"]["holder"], roles["ledger"]["epoch"]) == ("later", 2)


def test_closing_a_fenced_server_lets_its_storage_go(damaged: Bench) -> None:
    s = damaged.scene()
    damaged.execute("UPDATE fence SET epoch = epoch + 1 WHERE role = 'ledger'")
    with pytest.raises(ServerFenced):
        s.feed(1)
    s.ledger.close()
    assert not s.ledger._writer._thread.is_alive()
    assert s.ledger._database.reader.pool.checkedin() == 0
    damaged.open("successor", supersede="server-0").attach("run")


def test_time_goes_on_from_the_newest_row_when_the_clock_of_a_successor_is_behind(sqlite_bench: Bench) -> None:
    """The last renewal of the dead server's term is older than what it wrote after it. PostgreSQL keeps the time itself."""
    s = sqlite_bench.scene(groups_per_step=1, group_size=2)
    s.feed(1)
    sqlite_bench.let_time_pass(2.0)
    s.submit(s.lease(2))
    s.plan(1)
    ((planned,),) = sqlite_bench.rows("SELECT planned_at_us FROM plan")
    sqlite_bench.crash(s, -600.0)
    s.finish(1)
    ((finished,),) = sqlite_bench.rows("SELECT finished_at_us FROM plan_outcome")
    assert finished >= planned
