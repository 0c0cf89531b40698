"""The stream against its oracle: at every position, over epochs, with a restore at each point."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.core.errors import TaskError
from rollbook.tasks.sources import ListedTasks, TaskShape, read_jsonl
from rollbook.tasks.stream import TaskStream, task_order
from task_fixtures import numbered_tasks

SEED = 11


def listed(size: int, content: str = "same") -> ListedTasks:
    tasks = [{"prompt": f"task {i}", "answer": str(i)} for i in range(size)]
    return ListedTasks(tasks, [f"task {i}" for i in range(size)], f"{content} {size}")


def oracle(seed: int, size: int, count: int) -> list[tuple[int, int, int, str]]:
    """(number, epoch, task index, prompt) of the first ``count`` draws, from the order function alone."""
    out = []
    for number in range(count):
        epoch, position = divmod(number, size)
        index = task_order(seed, epoch, size)[position]
        out.append((number, epoch, index, f"task {index}"))
    return out


def drawn(stream: TaskStream, n: int) -> list[tuple[int, int, int, str]]:
    return [(d.number, d.epoch, d.task_index, d.task["prompt"]) for d in stream.take(n)]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_restore_at_every_point_of_three_epochs_continues_exactly(size: int) -> None:
    source, total = listed(size), 3 * size
    expected = oracle(SEED, size, total + 2)
    unbroken = TaskStream(source, SEED)
    for done in range(total + 1):
        state = unbroken.state_json()
        restored = TaskStream(source, SEED, state_json=state)
        assert restored.drawn == done
        assert restored.state_json() == state
        assert drawn(restored, total + 2 - done) == expected[done:]
        if done < total:
            assert drawn(unbroken, 1) == expected[done : done + 1]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_restore_before_every_single_draw_gives_the_unbroken_order(size: int) -> None:
    source, state, got = listed(size), "{}", []
    for _ in range(3 * size + 1):
        stream = TaskStream(source, SEED, state_json=state)
        got += drawn(stream, 1)
        state = stream.state_json()
    assert got == oracle(SEED, size, 3 * size + 1)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9), seed=st.integers(0, 2**31), chunks=st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_any_sequence_of_draws_and_restores_gives_the_unbroken_order(size: int, seed: int, chunks: list[int]) -> None:
    source, state, got = listed(size), "{}", []
    for chunk in chunks:
        stream = TaskStream(source, seed, state_json=state)
        got += drawn(stream, chunk)
        state = stream.state_json()
    assert got == oracle(seed, size, sum(chunks))


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_last_epoch_ends_the_stream_also_after_a_restore(epochs: int) -> None:
    source, size = listed(4), 4
    stream = TaskStream(source, SEED, epochs)
    assert drawn(stream, size * epochs - 1) == oracle(SEED, size, size * epochs)[:-1]
    assert not stream.exhausted
    assert drawn(stream, 5) == oracle(SEED, size, size * epochs)[-1:]
    assert stream.exhausted and stream.take(5) == []
    restored = TaskStream(source, SEED, epochs, stream.state_json())
    assert restored.exhausted and restored.take(1) == []
    assert restored.state_json() == stream.state_json()


def test_an_exhausted_stream_goes_on_when_more_epochs_are_allowed() -> None:
    stream = TaskStream(listed(4), SEED, 1)
    stream.take(4)
    longer = TaskStream(listed(4), SEED, 2, stream.state_json())
    assert not longer.exhausted
    assert drawn(longer, 9) == oracle(SEED, 4, 8)[4:]


def test_an_epoch_is_a_permutation_and_epochs_and_seeds_differ() -> None:
    orders = [tuple(task_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 9


def test_every_permutation_of_three_tasks_is_about_equally_frequent() -> None:
    counts = Counter(tuple(task_order(0, epoch, 3)) for epoch in range(3000))
    assert len(counts) == 6
    # Six standard deviations of a binomial(3000, 1/6) around its mean of 500.
    assert all(abs(count - 500) < 6 * 20.5 for count in counts.values())


def test_the_order_is_the_same_in_every_release() -> None:
    assert task_order(7, 0, 10) == [7, 8, 6, 9, 5, 3, 1, 0, 4, 2]
    assert task_order(7, 1, 10) == [5, 6, 8, 2, 3, 9, 0, 7, 1, 4]


def test_the_state_is_json_and_holds_the_loader_state() -> None:
    stream = TaskStream(listed(5), SEED)
    stream.take(3)
    state = json.loads(stream.state_json())
    assert state["drawn"] == 3
    assert state["loader"]["_num_yielded"] == 3


@pytest.mark.parametrize("damage", [
    lambda loader: {},
    lambda loader: {"_snapshot": 1},
    lambda loader: loader | {"_sampler_iter_state": {"drawn": 1}},
    lambda loader: loader | {"_sampler_iter_state": None},
    lambda loader: loader | {"_sampler_iter_state": {"drawn": "3"}},
    lambda loader: loader | {"_iterator_finished": True},
    lambda loader: [],
    lambda loader: None,
])  # fmt: skip
def test_a_wrong_loader_state_does_not_change_the_order(damage) -> None:  # type: ignore[no-untyped-def]
    stream = TaskStream(listed(5), SEED)
    stream.take(3)
    state = json.loads(stream.state_json())
    state["loader"] = damage(state["loader"])
    restored = TaskStream(listed(5), SEED, state_json=json.dumps(state))
    assert drawn(restored, 12) == oracle(SEED, 5, 15)[3:]
    again = TaskStream(listed(5), SEED, state_json=restored.state_json())
    assert drawn(again, 2) == oracle(SEED, 5, 17)[15:]


@pytest.mark.parametrize(
    ("source", "seed", "said"),
    [(listed(6), SEED, "size, digest"), (listed(5, "other"), SEED, "digest"), (listed(5), SEED + 1, "seed")],
)
def test_a_state_of_other_tasks_or_another_seed_is_refused(source: ListedTasks, seed: int, said: str) -> None:
    stream = TaskStream(listed(5), SEED)
    stream.take(2)
    with pytest.raises(TaskError, match=said):
        TaskStream(source, seed, state_json=stream.state_json())


@pytest.mark.parametrize("text", ["", "[]", "3", '{"loader": {}}', '{"drawn": -1}', '{"drawn": "x"}'])
def test_a_cursor_state_that_is_no_stream_state_is_refused(text: str) -> None:
    with pytest.raises(TaskError, match="is not a task stream's state"):
        TaskStream(listed(5), SEED, state_json=text)


def test_a_task_file_that_changed_under_a_run_is_refused(tmp_path: Path) -> None:
    path = numbered_tasks(tmp_path / "t.jsonl", 5)
    stream = TaskStream(read_jsonl(path, TaskShape()), SEED)
    stream.take(2)
    numbered_tasks(path, 6)
    with pytest.raises(TaskError, match="begun with other tasks"):
        TaskStream(read_jsonl(path, TaskShape()), SEED, state_json=stream.state_json())
