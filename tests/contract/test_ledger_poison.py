"""Tasks that kill their workers are taken out, those that stood beside them are not, and a storm of kills accuses nobody."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection

import pytest
from failure_support import fail, verdicts
from ledger_support import Scene, run_record, version

import oracle
from ledger_bench import Bench
from rollbook.core.errors import NotReady, RunPaused
from rollbook.core.records import LeaseGrant, RewardStatus, ScheduleKind
from rollbook.core.statuses import ENGINE_FAILED, WORKER_DIED
from rollbook.ledger.desk import LeaseCall

RULES = {"attempts_max": 3, "groups_per_step": 2, "max_lag_versions": 2, "lease_ttl_s": 30.0}
DEATHS = {"told by a successor": WORKER_DIED, "silent": "", "the engine raised": f"{ENGINE_FAILED}RuntimeError: CUDA"}


AHEAD = 8
"""Groups that are fed before anybody can lease them."""


class Fleet:
    """Workers that lease, die and come back under their name, and a learner that trains what is ready."""

    def __init__(self, s: Scene, bench: Bench, n: int, slots: int = 6, death: str = WORKER_DIED) -> None:
        self.s, self.bench, self.slots, self.death = s, bench, slots, death
        self.alive: dict[str, str] = {}
        self.died: list[tuple[str, tuple[LeaseGrant, ...]]] = []
        """Incarnations with what they held."""
        self.numbers = itertools.count()
        self.step = 0
        for i in range(n):
            self.start(f"worker-{i}")

    def start(self, name: str) -> None:
        self.alive[name] = f"{name}.{next(self.numbers)}"
        self.s.ledger.register_worker(self.alive[name], "host", "engine", json.dumps({"name": name}))

    def die(self, name: str, grants: tuple[LeaseGrant, ...]) -> None:
        dead = self.alive[name]
        self.died.append((dead, grants))
        if self.death:
            fail(self.s, grants, dead, status=RewardStatus.NO_VERDICT, reason=self.death)
        else:
            for _ in range(3):  # what the others hold is kept
                self.bench.let_time_pass(11.0)
                for other in set(self.alive.values()) - {dead}:
                    self.s.ledger.heartbeat(other, self.s.head(), [])
        self.start(name)

    def train(self) -> None:
        try:
            while True:
                self.s.train(self.step + 1)
                self.step += 1
        except (NotReady, RunPaused):
            return

    def turn(self, poison: Collection[int] = (), killed: Collection[str] = ()) -> None:
        """Every worker leases at once, then each brings what it holds, unless that or somebody kills it."""
        if n := self.s.ledger.feed_demand(AHEAD):
            self.s.feed(n)
        held = {name: self.s.lease(self.slots, self.alive[name]) for name in list(self.alive)}
        self.bench.let_time_pass(1.0)
        for name, grants in held.items():
            if name in killed or any(g.key.ordinal in poison for g in grants):
                self.die(name, grants)
            elif grants:
                self.s.submit(grants, self.alive[name])
        self.train()


def quarantined(bench: Bench) -> set[int]:
    return {int(k.partition(".")[0]) for k, kind in verdicts(bench).items() if kind == "quarantined"}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_kills_its_workers_is_taken_out_and_no_other_that_was_there(bench: Bench, workers: int, death: str) -> None:
    s = bench.scene(**RULES)
    fleet = Fleet(s, bench, workers, death=DEATHS[death])
    for _ in range(12):
        fleet.turn({1})
    assert verdicts(bench) == {"1.0": "quarantined", "1.1": "quarantined"}
    assert any(g.key.ordinal != 1 for _, grants in fleet.died for g in grants), "others were in the same hands"
    assert len(fleet.died) <= s.record.rules.attempts_max * workers and fleet.step >= 4
    assert bench.rows("SELECT count(*) FROM prompt_group WHERE refills IS NOT NULL")[0][0] == 0
    (taken,) = s.ledger.run_status()["quarantines"]
    assert taken["ordinal"] == 1 and "killed workers" in taken["reason"] and s.ledger.audit() == []
    ((told,),) = bench.rows("SELECT detail_json FROM event WHERE kind = 'group_closed'")
    assert len(json.loads(told)["killed"]) == 3
    told_by_rows = oracle.Ledger(oracle.read_ledger(bench.url, "run"))
    assert list(oracle.poison(told_by_rows)) == []
    told_by_rows.tables["failure"] = [
        {**row, "ordinal": ordinal} for row in told_by_rows["failure"] for ordinal in {row["ordinal"], 9}
    ]
    assert any("at each death" in found for found in oracle.poison(told_by_rows))
    told_by_rows.tables["failure"] = []
    assert any("lost []" in found for found in oracle.poison(told_by_rows))


def test_a_suspect_is_leased_alone_to_a_worker_that_has_proven_itself_or_last(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(6)
    fleet = Fleet(s, bench, 2)
    for _ in range(2):
        fleet.die("worker-0", s.lease(2, fleet.alive["worker-0"]))
    first, second = fleet.alive.values()
    assert [g.key.ordinal for g in s.lease(4, first)] == [1, 1, 2, 2], "it has brought nothing yet"
    held = s.lease(2, second)
    assert [g.key.ordinal for g in held] == [3, 3]
    s.submit(held[:1], second)
    assert [g.key.ordinal for g in s.lease(2, second)] == [4, 4], "it still holds something"
    third = s.worker()
    assert [g.key.ordinal for g in s.lease(8, third)] == [5, 5] and s.lease(8, third) == ()
    assert [str(g.key) for g in s.lease(8, s.worker())] == ["0.0"], "there is nothing else"


def test_of_those_who_stand_in_line_together_one_that_has_proven_itself_tries_the_suspect_alone(bench: Bench) -> None:
    s = bench.scene(**RULES)
    s.feed(6)
    fleet = Fleet(s, bench, 2)
    for _ in range(2):
        fleet.die("worker-0", s.lease(1, fleet.alive["worker-0"]))
    proven, new = fleet.alive["worker-1"], fleet.alive["worker-0"]
    s.submit(s.lease(1, proven), proven)
    line = [LeaseCall(incarnation, version(0), 2) for incarnation in (new, proven, s.worker())]
    answers, _ = s.ledger._look_at_line(line)
    held = [[str(grant.key) for grant in answers[call].grants] for call in line]
    assert held[1] == ["0.0"], "alone, although it asked for two"
    assert [len(keys) for keys in held] == [2, 1, 2] and len({key for keys in held for key in keys}) == 5


def test_two_tasks_that_kill_the_same_workers_are_both_taken_out(bench: Bench) -> None:
    s = bench.scene(**RULES)
    fleet = Fleet(s, bench, 2)
    for _ in range(20):
        fleet.turn({0, 2})
    assert quarantined(bench) == {0, 2} and set(verdicts(bench).values()) == {"quarantined"} and s.ledger.audit() == []


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_kills_makes_no_task_poison(bench: Bench, seed: int) -> None:
    s = bench.scene(**RULES)
    fleet, rng = Fleet(s, bench, 4, slots=4), random.Random(seed)
    for _ in range(30):
        fleet.turn(killed=[name for name in fleet.alive if rng.random() < 0.1])
    assert len(fleet.died) >= 5 and quarantined(bench) == set() and s.ledger.audit() == []


def test_a_task_that_kills_in_a_storm_is_refilled_and_found_when_it_is_over(bench: Bench) -> None:
    s = bench.scene(**RULES)
    fleet, rng, mine = Fleet(s, bench, 4, slots=4), random.Random(1), {5}
    for turn in range(24):
        if turn == 10:
            bench.let_time_pass(3600.0)
        fleet.turn(mine, [name for name in fleet.alive if turn < 10 and rng.random() < 0.2])
        mine |= {o for o, older in bench.rows("SELECT ordinal, refills FROM prompt_group WHERE refills > 0") if older in mine}
    assert len(mine) > 1 and max(mine) in quarantined(bench) and s.ledger.audit() == []


def test_workers_that_die_over_everything_accuse_no_task(bench: Bench) -> None:
    """A machine without memory: all of them die, nothing comes through."""
    s = bench.scene(**RULES)
    fleet = Fleet(s, bench, 2, slots=2)
    for _ in range(12):
        fleet.turn(killed=list(fleet.alive))
    assert quarantined(bench) == set() and "failed" in verdicts(bench).values()


def test_a_whole_machine_that_dies_again_and_again_accuses_no_task(bench: Bench) -> None:
    s = bench.scene(**RULES)
    fleet = Fleet(s, bench, 2, slots=2)
    for turn in range(24):
        fleet.turn(killed=list(fleet.alive) if turn % 2 else ())
    assert quarantined(bench) == set() and s.ledger.audit() == []


def test_a_worker_that_was_only_cut_off_has_not_died(bench: Bench) -> None:
    s = bench.scene(**RULES)
    fleet = Fleet(s, bench, 2, death="")
    for _ in range(12):
        cut_off = [(i, g) for i, g in fleet.died]
        fleet.turn({1})
        for dead, _ in fleet.died[len(cut_off) :]:
            s.lease(1, s.worker())  # its leases run out
            s.ledger.heartbeat(dead, s.head(), [])
    assert quarantined(bench) == set() and verdicts(bench)["1.0"] == "failed"


def test_slots_that_are_spent_together_accuse_nobody(bench: Bench) -> None:
    """A lowered budget ends all that stood beside each other at once; which of them killed is not known."""
    s = bench.scene(**RULES | {"attempts_max": 9})
    s.feed(14)
    fleet = Fleet(s, bench, 2)
    for _ in range(3):
        *again, other = s.lease(5, fleet.alive["worker-0"])
        assert [str(g.key) for g in again] == ["0.0", "0.1", "1.0", "1.1"]
        s.submit([other], fleet.alive["worker-0"])
        bench.let_time_pass(1.0)
        fleet.die("worker-0", tuple(again))
    s.ledger.open_run(run_record(**RULES), accept=["rules.attempts_max"])
    bench.let_time_pass(31.0)
    s.lease(1, s.worker())
    assert quarantined(bench) == set() and {"failed"} <= set(verdicts(bench).values())


def test_the_fixed_schedule_tries_suspects_alone_and_pauses_for_the_one_that_kills(bench: Bench) -> None:
    s = bench.scene(attempts_max=3, groups_per_step=2, schedule=ScheduleKind.FIXED, fixed_lag_versions=0, max_lag_versions=0)
    s.feed(2)
    fleet = Fleet(s, bench, 1)
    for _ in range(8):
        fleet.turn({0})
    assert bench.rows("SELECT ordinal, sibling FROM sample ORDER BY ordinal, sibling") == [(1, 0), (1, 1)]
    assert verdicts(bench) == {} and "slot 0.0" in s.ledger.run_status()["paused"]
