"""Public threads about positions in a data set: epoch edges, restored streams, ends that were none.

The real feeder on the real ledger; a life ends by an error at a named point, its successor takes over. Each test is named
after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_support import version
from threads_support import outcome_of

from rollbook.core.config import Config
from rollbook.core.errors import NotReady
from rollbook.core.records import TASK_STREAM, Role, RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.tasks import feeder
from rollbook.tasks.sources import load_source
from rollbook.tasks.stream import TaskStream, task_order
from task_fixtures import make_config, numbered_tasks, write_byte_tokenizer

TASKS, STEPS, GROUPS_PER_STEP, SEED = 5, 4, 3, 7
WANTED = STEPS * GROUPS_PER_STEP


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Twelve groups over five tasks; so long a lag lets every slot be leased under version 0."""
    return make_config(
        write_byte_tokenizer(tmp_path / "model"),
        run={"steps": STEPS, "seed": SEED, "dir": str(tmp_path)},
        task={"path": str(numbered_tasks(tmp_path / "tasks.jsonl", TASKS))},
        learner={"groups_per_step": GROUPS_PER_STEP},
        schedule={"kind": "fixed", "lag_versions": 10},
    )


@pytest.fixture
def ledger(config: Config, sqlite_url: str) -> Iterator[Ledger]:
    with Ledger(sqlite_url, holder="server") as opened:
        opened.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
        yield opened
        failpoints.arm("")
        assert opened.audit() == []


def live(config: Config, ledger: Ledger, lookahead: int, armed: str = "") -> object:
    """One feeder's life; returns None when it ended in order, else the class of its error."""
    failpoints.arm(armed)
    task = dataclasses.replace(config.task, lookahead_groups=lookahead)
    ended = outcome_of(lambda: feeder.run_feeder(dataclasses.replace(config, task=task), ledger, threading.Event()))
    failpoints.arm("")
    return ended


def issued(ledger: Ledger) -> list[str]:
    """Prompts in order of ordinal, as a worker gets them."""
    ledger.publish_version(ledger.acquire_role(Role.LEARNER, "learner", 60.0), version(0))
    ledger.register_worker("worker", "host", "engine")
    grants = ledger.lease_slots("worker", version(0), 1000).grants
    return [json.loads(g.task_json)["prompt"] for g in grants if g.key.sibling == 0]


def expected(count: int) -> list[str]:
    return [f"task {task_order(SEED, n // TASKS, TASKS)[n % TASKS]}" for n in range(count)]


def test_verl_7401_a_resume_at_the_edge_of_an_epoch_skips_nothing(config: Config, ledger: Ledger) -> None:
    """A run resumed exactly between two epochs left one out, and ended successfully."""
    assert live(config, ledger, TASKS, "feeder.after_append=raise") is FailpointRaised
    assert ledger.cursor(TASK_STREAM).next_ordinal == TASKS
    assert live(config, ledger, 2 * TASKS, "feeder.after_append=raise") is FailpointRaised
    assert ledger.cursor(TASK_STREAM).next_ordinal == 2 * TASKS
    assert live(config, ledger, WANTED) is None
    assert issued(ledger) == expected(WANTED)


def test_data_1437_a_state_taken_at_the_edge_of_an_epoch_is_not_the_end(config: Config) -> None:
    """A loader state saved at an epoch's edge resumed as about to end: one epoch vanished, or all later ones shrank."""
    source = load_source(config)
    first = TaskStream(source, SEED, epochs=2)
    taken = first.take(TASKS)
    resumed = TaskStream(source, SEED, epochs=2, state_json=first.state_json())
    assert not resumed.exhausted
    taken += resumed.take(100)
    assert [d.task["prompt"] for d in taken] == expected(2 * TASKS)
    assert resumed.exhausted
    assert TaskStream(source, SEED, epochs=2, state_json=resumed.state_json()).take(1) == []


@pytest.mark.parametrize("point", ["feeder.before_append", "feeder.after_append"])
def test_open_instruct_1523_a_restarted_feeder_issues_nothing_twice(config: Config, ledger: Ledger, point: str) -> None:
    """The state of the data actor was not restored, so a resumed run saw the same prompts again."""
    for lookahead in (1, 3, 4, 7):
        assert live(config, ledger, lookahead, f"{point}=raise") is FailpointRaised
    assert live(config, ledger, WANTED) is None
    assert issued(ledger) == expected(WANTED)


def test_verl_6387_a_feeder_that_dies_has_not_reached_the_end_of_the_data(config: Config, ledger: Ledger) -> None:
    """A crashing producer sent the mark of the end of data: the run was reported as finished."""
    assert live(config, ledger, 2, "feeder.before_append=raise") is FailpointRaised
    assert not ledger.cursor(TASK_STREAM).exhausted
    term = ledger.acquire_role(Role.LEARNER, "learner", 60.0)
    assert outcome_of(lambda: ledger.plan_step(term, 0, 1)) is NotReady
    assert live(config, ledger, WANTED) is None
    assert issued(ledger) == expected(WANTED)
