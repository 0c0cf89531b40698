"""Every named crash point, crossed by real processes that die there: the run goes on to the same weights.

A case shares its run with others; it asserts that its own kill happened and what its restart did.
"""

from __future__ import annotations

import pytest
from harness import System, check_finished, check_nothing_else_died, check_replay
from scenarios import FEEDER_KILLS, LEARNER_KILLS, LEDGER_KILLS, OTHER_KILLS, POSTGRESQL_KILLS, RANDOM_TARGETS, WORKER_KILLS

import oracle

pytestmark = pytest.mark.timeout(1800)

NOTHING_TO_REPLAY = ("learner.checkpoint.after_rename", "learner.checkpoint.after_row")
"""At these two the dead step's checkpoint is whole: it is adopted or committed already, so no step is behind it."""


def _fired(system: System, point: str, kills: dict[str, str]) -> str:
    marker = f"{point}@{kills[point].partition('@')[2]}"
    assert marker in system.fired_at, f"nothing died at {marker}: {sorted(system.fired_at)}"
    return marker


def _assert_replay_after(system: System, point: str) -> None:
    replayed = system.replays_after(_fired(system, point, LEARNER_KILLS))
    assert replayed is not None, "the learner never started again"
    assert replayed == 0 if point in NOTHING_TO_REPLAY else replayed >= 1


@pytest.mark.parametrize("point", LEARNER_KILLS)
def test_a_bounded_run_survives_the_learner_dying_at(point: str, bounded_learner_kills: System) -> None:
    _assert_replay_after(bounded_learner_kills, point)
    check_finished(bounded_learner_kills)


@pytest.mark.parametrize("point", LEARNER_KILLS)
def test_a_fixed_lag_run_survives_the_learner_dying_at(point: str, fixed_learner_kills: System) -> None:
    _assert_replay_after(fixed_learner_kills, point)
    check_finished(fixed_learner_kills)


@pytest.mark.parametrize("point", WORKER_KILLS)
def test_a_bounded_run_survives_a_worker_dying_at(point: str, bounded_other_kills: System) -> None:
    _fired(bounded_other_kills, point, OTHER_KILLS)
    check_finished(bounded_other_kills)


@pytest.mark.parametrize("point", WORKER_KILLS)
def test_a_fixed_lag_run_survives_a_worker_dying_at(point: str, fixed_other_kills: System) -> None:
    _fired(fixed_other_kills, point, OTHER_KILLS)
    check_finished(fixed_other_kills)


@pytest.mark.parametrize("point", [*LEDGER_KILLS, *FEEDER_KILLS])
def test_a_bounded_run_survives_the_ledger_or_the_feeder_dying_at(point: str, bounded_other_kills: System) -> None:
    _fired(bounded_other_kills, point, OTHER_KILLS)
    check_finished(bounded_other_kills)


@pytest.mark.parametrize("point", [*LEDGER_KILLS, *FEEDER_KILLS])
def test_a_fixed_lag_run_survives_the_ledger_or_the_feeder_dying_at(point: str, fixed_other_kills: System) -> None:
    _fired(fixed_other_kills, point, OTHER_KILLS)
    check_finished(fixed_other_kills)


def test_a_checkpoint_that_lacked_only_its_row_was_adopted(bounded_learner_kills: System, fixed_learner_kills: System) -> None:
    for system in (bounded_learner_kills, fixed_learner_kills):
        adopted = [e for e in system.logged("learner") if e.event == "checkpoint_adopted"]
        assert len(adopted) == 1 and adopted[0].at > system.fired_at["learner.checkpoint.after_rename@2"]


def test_finished_work_of_a_dead_worker_was_sent_from_its_spool(bounded_other_kills: System, fixed_other_kills: System) -> None:
    for system in (bounded_other_kills, fixed_other_kills):
        assert any(e.event == "spool_sent" for name in ("worker-0", "worker-1") for e in system.logged(name))


def test_replaying_the_stored_plans_gives_every_version_of_a_bounded_run(
    bounded_learner_kills: System, bounded_other_kills: System
) -> None:
    check_replay(bounded_learner_kills)
    check_replay(bounded_other_kills)


def test_replaying_the_stored_plans_gives_every_version_of_a_fixed_lag_run(
    fixed_reference: System, fixed_learner_kills: System, fixed_other_kills: System
) -> None:
    check_replay(fixed_reference)
    check_replay(fixed_learner_kills)
    check_replay(fixed_other_kills)


def test_no_role_died_of_anything_but_its_kills(
    fixed_reference: System, bounded_learner_kills: System, fixed_learner_kills: System, bounded_other_kills: System,
    fixed_other_kills: System,
) -> None:  # fmt: skip
    for system in (fixed_reference, bounded_learner_kills, fixed_learner_kills, bounded_other_kills, fixed_other_kills):
        check_nothing_else_died(system)


def test_the_workers_saw_every_sample_of_an_unbroken_run_accepted(fixed_reference: System) -> None:
    acks = fixed_reference.acks()
    assert len(acks) == fixed_reference.steps * 16 and {ack["outcome"] for ack in acks} == {"accepted"}


def test_the_unbroken_reference_is_clean(fixed_reference: System) -> None:
    assert fixed_reference.fired_at == {}
    check_finished(fixed_reference)


def test_a_run_whose_learner_keeps_dying_is_the_unbroken_run(fixed_reference: System, fixed_learner_kills: System) -> None:
    """One worker instead of the reference's two, besides."""
    assert oracle.identity(fixed_learner_kills.tables()) == oracle.identity(fixed_reference.tables())


def test_a_run_whose_other_roles_keep_dying_is_the_unbroken_run(fixed_reference: System, fixed_other_kills: System) -> None:
    assert oracle.identity(fixed_other_kills.tables()) == oracle.identity(fixed_reference.tables())


def test_zombies_change_nothing(fixed_reference: System, fixed_stopped: System) -> None:
    """A worker, the learner and the server, stopped for longer than their terms, go on or are fenced; the run is the same."""
    expired = [e for e in fixed_stopped.tables()["event"] if e["kind"] == "lease_expired"]
    assert fixed_stopped.stopped["worker"] in {e["incarnation"] for e in expired}
    assert fixed_stopped.stopped.keys() == {"worker", "learner", "ledger"}
    check_finished(fixed_stopped)
    check_replay(fixed_stopped)
    assert oracle.identity(fixed_stopped.tables()) == oracle.identity(fixed_reference.tables())


def test_ten_deaths_at_random_times_leave_a_clean_run(random_kills: System) -> None:
    assert sorted(random_kills.killed) == sorted(RANDOM_TARGETS)
    check_finished(random_kills)
    check_replay(random_kills)


def test_a_run_on_postgresql_survives_its_roles_and_its_database_dying(fixed_reference: System, postgresql_kills: System) -> None:
    for point in POSTGRESQL_KILLS:
        _fired(postgresql_kills, point, POSTGRESQL_KILLS)
    assert postgresql_kills.killed == ["postgresql"]
    check_finished(postgresql_kills)
    check_replay(postgresql_kills)
    assert oracle.identity(postgresql_kills.tables()) == oracle.identity(fixed_reference.tables())


@pytest.mark.parametrize(
    "system", ["fixed_one_worker", "fixed_two_workers", "fixed_four_workers", "fixed_two_workers_on_postgresql"]
)
def test_a_fixed_lag_run_whose_every_role_dies_at_random_is_the_unbroken_run(
    system: str, fixed_reference: System, request: pytest.FixtureRequest
) -> None:
    killed: System = request.getfixturevalue(system)
    assert {target.partition("-")[0] for target in killed.killed} >= {"worker", "learner", "ledger", "feeder", "everything"}
    check_finished(killed)
    check_replay(killed)
    assert oracle.identity(killed.tables()) == oracle.identity(fixed_reference.tables())


def test_the_runs_of_this_folder_take_at_least_sixty_kills(
    bounded_learner_kills: System, fixed_learner_kills: System, bounded_other_kills: System, fixed_other_kills: System,
    random_kills: System, fixed_one_worker: System, fixed_two_workers: System, fixed_four_workers: System,
) -> None:  # fmt: skip
    """On SQLite alone, so that it holds where no PostgreSQL is to be had."""
    systems = (
        bounded_learner_kills, fixed_learner_kills, bounded_other_kills, fixed_other_kills, random_kills, fixed_one_worker,
        fixed_two_workers, fixed_four_workers,
    )  # fmt: skip
    assert sum(system.deaths() for system in systems) >= 60
