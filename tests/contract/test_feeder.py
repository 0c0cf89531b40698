"""The feeder: whatever stops it and wherever, the run gets every task of the order once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from feeder_ledger import FeederLedger

from rollbook.core.config import Config
from rollbook.core.errors import Fenced, NotReady, RoleHeld, TaskError, Unavailable
from rollbook.core.packing import unpack_i32
from rollbook.core.records import Cursor
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.tasks.feeder import run_feeder
from rollbook.tasks.stream import task_order
from rollbook.tasks.tokenizer import load_tokenizer
from task_fixtures import make_config, numbered_tasks, write_byte_tokenizer

TASKS, STEPS, GROUPS_PER_STEP, SEED = 5, 4, 3, 7
WANTED = STEPS * GROUPS_PER_STEP
SCHEDULES = ["bounded", "fixed"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model directory with a tokenizer, and a file of five tasks: the twelve groups of a run take two and a half epochs."""
    directory = tmp_path_factory.mktemp("feeder")
    return write_byte_tokenizer(directory / "model"), numbered_tasks(directory / "tasks.jsonl", TASKS)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def config_of(files: tuple[Path, Path], schedule: str = "bounded", **overlays: Any) -> Config:
    model, tasks = files
    overlays["task"] = {"path": str(tasks), "lookahead_groups": 2} | overlays.get("task", {})
    run = {"steps": STEPS, "seed": SEED}
    return make_config(model, run=run, learner={"groups_per_step": GROUPS_PER_STEP}, schedule={"kind": schedule}, **overlays)


def ledger_of(config: Config) -> FeederLedger:
    return FeederLedger(config.run.steps * config.learner.groups_per_step, config.run.steps)


def feed(config: Config, ledger: FeederLedger) -> None:
    """Run a feeder to its end; it must end by itself."""
    guard = threading.Event()
    timer = threading.Timer(60, guard.set)
    timer.start()
    try:
        run_feeder(config, ledger, guard)  # type: ignore[arg-type]
    finally:
        timer.cancel()
    assert not guard.is_set(), "the feeder did not end within a minute"


def prompts(ledger: FeederLedger) -> list[str]:
    """Prompts of the groups fed, without refills, in order of their ordinals."""
    return [json.loads(group.task_json)["prompt"] for group in ledger.groups if group.refills is None]


def expected(count: int = WANTED, size: int = TASKS) -> list[str]:
    return [f"task {task_order(SEED, number // size, size)[number % size]}" for number in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_gets_exactly_the_tasks_of_its_steps_in_order(files: tuple[Path, Path], schedule: str) -> None:
    config = config_of(files, schedule)
    ledger = ledger_of(config)
    feed(config, ledger)
    assert prompts(ledger) == expected()
    assert ledger.holder is None and not ledger.cursor_row.exhausted


def test_a_group_carries_the_token_ids_and_what_its_verifier_needs(files: tuple[Path, Path]) -> None:
    config = config_of(files)
    ledger = ledger_of(config)
    feed(config, ledger)
    tokenizer = load_tokenizer(files[0])
    for number, group in enumerate(ledger.groups):
        task = json.loads(group.task_json)
        index = task["task_origin"]["task_index"]
        assert task == {
            "prompt": f"task {index}", "answer": str(index),
            "task_origin": {"epoch": number // TASKS, "task_index": index, "name": f"{files[1]} line {index + 1}"},
        }  # fmt: skip
        assert tokenizer.decode(unpack_i32(group.prompt_ids).tolist()) == task["prompt"]
        assert group.n_siblings == config.learner.group_size


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("point", ["feeder.before_append", "feeder.after_append"])
@pytest.mark.parametrize("crossing", range(1, 7))
def test_dying_at_any_append_skips_and_repeats_no_task(
    files: tuple[Path, Path], schedule: str, point: str, crossing: int
) -> None:
    config = config_of(files, schedule)
    ledger = ledger_of(config)
    failpoints.arm(f"{point}=raise@{crossing}")
    with pytest.raises(FailpointRaised):
        feed(config, ledger)
    failpoints.arm("")
    feed(config, ledger)
    assert prompts(ledger) == expected()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("point", "fed"), [("feeder.after_role", 0), ("feeder.before_release", WANTED)])
def test_dying_with_the_role_in_hand_skips_and_repeats_no_task(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, schedule: str, point: str, fed: int
) -> None:
    config = config_of(files, schedule)
    ledger = ledger_of(config)
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "the dead one")
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        feed(config, ledger)
    failpoints.arm("")
    assert len(prompts(ledger)) == fed
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "its successor")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "the dead one")
    feed(config, ledger)
    assert prompts(ledger) == expected()


@pytest.mark.parametrize("point", ["feeder.before_append", "feeder.after_append"])
def test_dying_at_every_append_skips_and_repeats_no_task(files: tuple[Path, Path], point: str) -> None:
    config = config_of(files, task={"lookahead_groups": 1})
    ledger = ledger_of(config)
    for _ in range(WANTED):
        failpoints.arm(f"{point}=raise@{1 if point == 'feeder.after_append' else 2}")
        with pytest.raises(FailpointRaised):
            feed(config, ledger)
        if len(ledger.groups) == WANTED - 1:
            break
    failpoints.arm("")
    feed(config, ledger)
    assert prompts(ledger) == expected()


@pytest.mark.parametrize("call", range(4))
def test_a_refill_between_reading_and_appending_costs_no_task(files: tuple[Path, Path], call: int) -> None:
    config = config_of(files)
    ledger = ledger_of(config)

    def refill_once(current: int) -> None:
        if current == call and ledger.groups:
            ledger.refill(0)

    ledger.before_append = refill_once
    feed(config, ledger)
    assert prompts(ledger) == expected()
    assert [group.ordinal for group in ledger.groups] == list(range(WANTED + (call > 0)))


def test_a_dropped_group_without_refill_is_replaced_by_the_next_task(files: tuple[Path, Path]) -> None:
    config = config_of(files)
    ledger = ledger_of(config)

    def drop(call: int) -> None:
        ledger.dropped += call in (1, 3)

    ledger.after_append = drop
    feed(config, ledger)
    assert prompts(ledger) == expected(WANTED + 2)


def failing_once(error: Exception, at: int) -> Callable[[int], None]:
    def fail(call: int) -> None:
        if call == at:
            raise error

    return fail


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("when", ["before_append", "after_append"])
def test_a_lost_request_or_reply_skips_and_repeats_no_task(files: tuple[Path, Path], when: str, at: int) -> None:
    config = config_of(files)
    ledger = ledger_of(config)
    setattr(ledger, when, failing_once(Unavailable(), at))
    feed(config, ledger)
    assert prompts(ledger) == expected()


@pytest.mark.parametrize("error", [Unavailable("no ledger"), NotReady("no run is open")])
def test_an_outage_beyond_the_bound_ends_the_feeder_with_its_cause(files: tuple[Path, Path], error: Exception) -> None:
    config = config_of(files, supervisor={"stall_s": 0.3})
    ledger = ledger_of(config)

    def fail(call: int = 0) -> None:
        raise error

    ledger.before_append = fail
    with pytest.raises(type(error), match=str(error)):
        feed(config, ledger)
    ledger.on_acquire = fail
    with pytest.raises(type(error), match=str(error)):
        feed(config, ledger)
    assert ledger.groups == []


def test_a_held_role_is_waited_for_until_its_term_ends(files: tuple[Path, Path]) -> None:
    config = config_of(files)
    ledger = ledger_of(config)
    ledger.holder, looks = "the one before", []

    def expire_later() -> None:
        looks.append(1)
        if len(looks) == 3:
            ledger.holder = None

    ledger.on_acquire = expire_later
    feed(config, ledger)
    assert prompts(ledger) == expected()


def test_a_role_that_stays_held_is_an_error_and_nothing_is_fed(files: tuple[Path, Path]) -> None:
    config = config_of(files, ledger={"role_ttl_s": 0.1})
    ledger = ledger_of(config)
    ledger.holder = "somebody alive"
    with pytest.raises(RoleHeld, match="somebody alive"):
        feed(config, ledger)
    assert ledger.groups == [] and ledger.holder == "somebody alive"


def test_a_replacement_takes_over_from_the_process_it_supersedes(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(files)
    ledger = ledger_of(config)
    ledger.holder = "dead"
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "alive")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "dead")
    feed(config, ledger)
    assert prompts(ledger) == expected() and ledger.superseded == ["dead"]


def test_a_feeder_that_was_replaced_stops_and_adds_nothing(files: tuple[Path, Path]) -> None:
    config = config_of(files)
    ledger = ledger_of(config)

    def take_over(call: int) -> None:
        if call == 2:
            ledger.epoch, ledger.holder = ledger.epoch + 1, "the new one"

    ledger.before_append = take_over
    with pytest.raises(Fenced):
        feed(config, ledger)
    assert prompts(ledger) == expected(4) and ledger.holder == "the new one"


def test_a_stop_ends_the_feeder_and_frees_its_role(files: tuple[Path, Path]) -> None:
    config = config_of(files)
    ledger, stop = ledger_of(config), threading.Event()
    ledger.after_append = lambda call: stop.set() if call == 1 else None
    run_feeder(config, ledger, stop)  # type: ignore[arg-type]
    assert prompts(ledger) == expected(4) and ledger.holder is None
    run_feeder(config, ledger, stop)  # type: ignore[arg-type]
    assert len(ledger.groups) == 4
    ledger.after_append = lambda call: None
    feed(config, ledger)
    assert prompts(ledger) == expected()


def test_the_role_is_renewed_while_nothing_is_wanted(files: tuple[Path, Path]) -> None:
    config = config_of(files, ledger={"role_ttl_s": 0.03})
    ledger, stop = ledger_of(config), threading.Event()

    def demand(lookahead_groups: int) -> int:
        if ledger.renewals >= 2:
            stop.set()
        return 0

    ledger.feed_demand = demand  # type: ignore[method-assign]
    run_feeder(config, ledger, stop)  # type: ignore[arg-type]
    assert ledger.renewals == 2


def test_the_last_task_of_the_last_epoch_stores_that_the_stream_is_exhausted(files: tuple[Path, Path]) -> None:
    config = config_of(files, task={"epochs": 3})
    ledger = ledger_of(config)
    ledger.groups_wanted = 100
    feed(config, ledger)
    assert prompts(ledger) == expected(3 * TASKS) and ledger.cursor_row.exhausted
    feed(config, ledger)
    assert len(ledger.groups) == 3 * TASKS


def test_a_stream_that_is_still_exhausted_after_a_revision_is_said_to_be_so_again(files: tuple[Path, Path]) -> None:
    config = config_of(files, task={"epochs": 3})
    ledger = ledger_of(config)
    ledger.groups_wanted = 100
    feed(config, ledger)
    stood = ledger.cursor_row
    ledger.cursor_row = replace(stood, exhausted=False)
    feed(config, ledger)
    assert ledger.cursor_row == stood and len(ledger.groups) == 3 * TASKS


def test_a_fixed_schedule_asks_for_no_task_beyond_its_steps(files: tuple[Path, Path]) -> None:
    config = config_of(files, "fixed", task={"lookahead_groups": 100})
    ledger = ledger_of(config)
    ledger.groups_wanted = 100
    feed(config, ledger)
    assert prompts(ledger) == expected() and not ledger.cursor_row.exhausted


def test_epochs_that_cannot_cover_the_steps_are_refused_at_start(files: tuple[Path, Path]) -> None:
    config = config_of(files, task={"epochs": 2})
    ledger = ledger_of(config)
    with pytest.raises(TaskError, match="needs 12 tasks .* gives 10"):
        feed(config, ledger)
    assert ledger.epoch == 0


def test_a_run_with_more_steps_goes_on_where_it_ended(files: tuple[Path, Path]) -> None:
    config = config_of(files, "fixed")
    ledger = ledger_of(config)
    feed(config, ledger)
    longer = make_config(
        files[0], task={"path": str(files[1]), "lookahead_groups": 2}, run={"steps": STEPS + 2, "seed": SEED},
        learner={"groups_per_step": GROUPS_PER_STEP}, schedule={"kind": "fixed"},
    )  # fmt: skip
    ledger.groups_wanted = 6 * GROUPS_PER_STEP
    feed(longer, ledger)
    assert prompts(ledger) == expected(6 * GROUPS_PER_STEP)


def test_one_prompt_that_does_not_fit_is_named_before_anything_is_fed(files: tuple[Path, Path], tmp_path: Path) -> None:
    tasks = numbered_tasks(tmp_path / "long.jsonl", 40)
    tasks.write_text(tasks.read_text() + json.dumps({"prompt": "x" * 113, "answer": ""}) + "\n")
    config = config_of(files, task={"path": str(tasks)})
    ledger = ledger_of(config)
    with pytest.raises(TaskError, match="long.jsonl line 41: its prompt has 113 tokens, more than the 112"):
        feed(config, ledger)
    assert ledger.groups == [] and ledger.holder is None


def test_a_cursor_of_other_tasks_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(files)
    ledger = ledger_of(config)
    feed(config, ledger)
    other = config_of(files, task={"path": str(numbered_tasks(tmp_path / "other.jsonl", TASKS + 1))})
    with pytest.raises(TaskError, match="begun with other tasks"):
        feed(other, ledger)
    ledger.cursor_row = Cursor("train", 12, "not json", False)
    with pytest.raises(TaskError, match="is not a task stream's state"):
        feed(config, ledger)
