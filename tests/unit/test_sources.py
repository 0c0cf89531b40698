"""Task sources: every row keeps its content, and everything wrong with a file is said by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollbook.core.errors import ConfigError, TaskError
from rollbook.tasks.extract import extract
from rollbook.tasks.procedural import (
    _EVALUATING_SCORERS,
    ProceduralTasks,
    from_jsonable,
    heldout_seed,
    score,
    to_jsonable,
    training_seed,
)
from rollbook.tasks.sources import TaskShape, load_heldout, load_source, read_jsonl, read_parquet
from task_fixtures import WORD_PROBLEMS, make_config, numbered_tasks, write_jsonl

PLAIN = TaskShape()


def test_word_problems_become_tasks_with_prompt_and_extracted_answer() -> None:
    source = read_jsonl(WORD_PROBLEMS, TaskShape("Q: {question}\nA:", "answer", "#### (.*)"))
    assert len(source) == 7
    assert [source[i]["answer"] for i in range(7)] == ["75", "80", "1,300", "82.5", "-7", "17", "76"]
    assert source[0]["prompt"] == f"Q: {source[0]['question']}\nA:"
    assert source.name(2) == f"{WORD_PROBLEMS} line 3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "p", "answer": ', "not valid JSON"),
        ('["p", "a"]', "expected a JSON object"),
        ('{"prompt": "p"}', "no answer in field 'answer'"),
        ('{"prompt": "p", "answer": null}', "no answer in field 'answer'"),
        ('{"prompt": "p", "answer": "a", "weight": NaN}', "NaN is not JSON"),
        ('{"prompt": "p", "answer": "\\ud800"}', "cannot be stored as JSON text"),
        ('{"question": "p", "answer": "a"}', "asks for 'prompt'"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(TaskError, match=re.escape(f"{path} line 3")) as caught:
        read_jsonl(path, PLAIN)
    assert said in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": "a"}\n{"prompt": "\xff", "answer": "a"}\n')
    with pytest.raises(TaskError, match="line 2: not UTF-8"):
        read_jsonl(path, PLAIN)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=re.escape(f"{path} holds no tasks")):
        read_jsonl(path, PLAIN)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nowhere.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "nowhere.jsonl", PLAIN)
    with pytest.raises(TaskError, match="nowhere.parquet cannot be read"):
        read_parquet(tmp_path / "nowhere.parquet", PLAIN)


def test_an_answer_the_pattern_does_not_match_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "p", "answer": "#### 1"}, {"prompt": "p", "answer": "two"}])
    with pytest.raises(TaskError, match="line 2: task.answer_pattern"):
        read_jsonl(path, TaskShape(answer_pattern="#### (.*)"))


def test_answers_that_are_not_text_become_text(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": value} for value in (42, 1.5, [1, 2], True)]
    source = read_jsonl(write_jsonl(tmp_path / "t.jsonl", rows), PLAIN)
    assert [source[i]["answer"] for i in range(4)] == ["42", "1.5", "[1, 2]", "true"]


def test_parquet_and_jsonl_of_the_same_rows_are_the_same_source(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"prompt": f"p{i}", "answer": str(i), "tests": ["a", "b"]} for i in range(5)]
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    one, other = read_jsonl(write_jsonl(tmp_path / "t.jsonl", rows), PLAIN), read_parquet(tmp_path / "t.parquet", PLAIN)
    assert [one[i] for i in range(5)] == [other[i] for i in range(5)]
    assert one.digest() == other.digest()


def test_a_broken_parquet_file_or_cell_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "no.parquet").write_bytes(b"this is no parquet file")
    with pytest.raises(TaskError, match="no.parquet is not a readable Parquet file"):
        read_parquet(tmp_path / "no.parquet", PLAIN)
    rows = [{"prompt": "p", "answer": "a", "raw": b"x"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "bytes.parquet")
    with pytest.raises(TaskError, match="bytes.parquet row 1: cannot be stored as JSON text"):
        read_parquet(tmp_path / "bytes.parquet", PLAIN)


def test_the_digest_changes_with_content_and_order_only(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(3)]
    base = read_jsonl(write_jsonl(tmp_path / "a.jsonl", rows), PLAIN).digest()
    assert read_jsonl(write_jsonl(tmp_path / "b.jsonl", rows), PLAIN).digest() == base
    assert read_jsonl(write_jsonl(tmp_path / "c.jsonl", rows[::-1]), PLAIN).digest() != base
    assert read_jsonl(write_jsonl(tmp_path / "d.jsonl", [*rows[:2], rows[2] | {"answer": "9"}]), PLAIN).digest() != base


def test_held_out_tasks_of_a_file_leave_training_prompts_out(tmp_path: Path) -> None:
    training = numbered_tasks(tmp_path / "train.jsonl", 5)
    heldout = numbered_tasks(tmp_path / "heldout.jsonl", 12)
    config = make_config(task={"path": str(training), "heldout_path": str(heldout), "heldout_size": 4})
    source = load_source(config)
    tasks = load_heldout(config, source)
    assert tasks is not None
    assert [tasks[i]["prompt"] for i in range(len(tasks))] == ["task 5", "task 6", "task 7", "task 8"]


def test_held_out_tasks_that_are_all_trained_on_are_refused(tmp_path: Path) -> None:
    training = numbered_tasks(tmp_path / "train.jsonl", 5)
    config = make_config(task={"path": str(training), "heldout_path": str(training)})
    with pytest.raises(TaskError, match="all 5 held-out candidates"):
        load_heldout(config, load_source(config))


def test_a_file_source_without_a_held_out_file_has_none() -> None:
    config = make_config(task={"prompt_template": "{question}"})
    assert load_heldout(config, load_source(config)) is None


def test_the_extraction_rule_takes_the_first_group_of_the_last_match() -> None:
    assert extract(r"<a>(.*?)</a>", "<a>1</a> no: <a>2</a>") == "2"
    assert extract(r"<a>(.*?)</a>", "nothing") is None
    assert extract(r"x|(y)", "y then x") is None
    assert extract(r"####(.*)", "####") == ""


@pytest.mark.parametrize(("pattern", "said"), [("(", "not a regular expression"), ("#### .*", "has no group")])
def test_an_unusable_pattern_names_its_configuration_key(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match="task.answer_pattern: pattern") as caught:
        load_source(make_config(task={"prompt_template": "{question}", "answer_pattern": pattern}))
    assert said in str(caught.value)


def test_procedural_tasks_are_a_function_of_their_seed() -> None:
    pytest.importorskip("reasoning_gym")
    one, same = (ProceduralTasks("chain_sum", {"max_terms": 3}, 5, 20, PLAIN) for _ in range(2))
    other = ProceduralTasks("chain_sum", {"max_terms": 3}, 500, 20, PLAIN)
    assert [one[i] for i in range(20)] == [same[i] for i in range(20)]
    assert one.digest() == same.digest() != other.digest()
    assert [one[i]["prompt"] for i in range(20)] != [other[i]["prompt"] for i in range(20)]
    with pytest.raises(IndexError):
        one[20]


def test_a_procedural_prompt_can_be_built_from_metadata() -> None:
    pytest.importorskip("reasoning_gym")
    source = ProceduralTasks("chain_sum", {}, 5, 3, TaskShape("{metadata[expression]}="))
    assert source[0]["prompt"] == source[0]["reasoning_gym"]["entry"]["metadata"]["expression"] + "="
    with pytest.raises(TaskError, match="asks for 'expresion'"):
        ProceduralTasks("chain_sum", {}, 5, 3, TaskShape("{metadata[expresion]}="))[0]


def test_held_out_procedural_tasks_share_no_prompt_with_training() -> None:
    pytest.importorskip("reasoning_gym")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = make_config(
        task={"source": "reasoning_gym", "name": "chain_sum", "settings": settings, "size": 60, "heldout_size": 20}
    )
    source = load_source(config)
    heldout = load_heldout(config, source)
    assert heldout is not None and len(heldout) == 20
    prompts = [heldout[i]["prompt"] for i in range(20)]
    assert len(set(prompts)) == 20
    assert not set(prompts) & {source[i]["prompt"] for i in range(len(source))}


def test_training_and_held_out_seeds_lie_in_disjoint_ranges() -> None:
    for seed in range(50):
        assert 0 <= training_seed(seed) < 2**30 <= heldout_seed(seed) < 2**31
    assert len({training_seed(seed) for seed in range(50)}) == 50


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"name": "chain_summ"}, "did you mean chain_sum"),
        ({"name": "chain_sum", "settings": {"min_term": 2}}, "its settings are min_terms"),
        ({"name": "chain_sum", "settings": {"min_terms": -2}}, "min_terms must be positive"),
        ({"name": "chain_sum", "settings": {"seed": 2}}, "set run.seed instead"),
        ({"name": "chain_sum", "size": 0}, "task.size = 0"),
        ({"name": "codeio"}, "runs the programs of its data"),
    ],
)
def test_an_unusable_procedural_source_says_why(task: dict, said: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError) as caught:
        load_source(make_config(task={"source": "reasoning_gym"} | task))
    assert said in str(caught.value)


def test_entries_of_every_dataset_survive_storage_and_their_own_answers_score_full() -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    unscored = _EVALUATING_SCORERS | {"codeio", "composite"}
    for name in sorted(DATASETS.keys() - unscored):
        source = ProceduralTasks(name, {}, 5, 1, PLAIN)
        task = json.loads(json.dumps(source[0]))
        original = source._entry(0, name)
        assert from_jsonable(task["reasoning_gym"]["entry"]) == {key: original[key] for key in ("question", "answer", "metadata")}
        if isinstance(original["answer"], str):
            assert score(original["answer"], task["reasoning_gym"]) == (1.0, ""), name


def test_the_list_of_scorers_that_execute_answers_is_complete_for_this_package() -> None:
    pytest.importorskip("reasoning_gym")
    import inspect

    from reasoning_gym.factory import DATASETS

    found = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(r"(eval|exec|parse_expr|sympify)\((answer|user|pred)", inspect.getsource(inspect.getmodule(dataset)))  # type: ignore[arg-type]
    }
    assert found == _EVALUATING_SCORERS


@pytest.mark.parametrize("value", [(1, (2,)), {1: "a", (2, 3): [4]}, {"__tuple__": 1}, {"__pairs__": []}, [None, 1.5, {"a": ()}]])
def test_the_stored_form_is_lossless(value: object) -> None:
    back = from_jsonable(json.loads(json.dumps(to_jsonable(value, "here"))))
    assert back == value and repr(back) == repr(value)


def test_a_value_without_stored_form_is_refused() -> None:
    with pytest.raises(TaskError, match="here: its metadata holds a set"):
        to_jsonable({"a": {1}}, "here")
