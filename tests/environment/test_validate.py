"""``rollbook tasks validate``: what is wrong with rows is said by line, and only then is the exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_files import data_file
from rollbook.cli.main import main
from rollbook.core.config import load_config
from rollbook.tasks.sources import load_source
from rollbook.tasks.validation import gold_completions, write_answer
from rollbook.tasks.verifier import make_verifier
from run_support import REPOSITORY
from task_fixtures import write_byte_tokenizer, write_jsonl

GSM8K_TOML = REPOSITORY / "service" / "rollbook" / "assets" / "gsm8k.toml"
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def validated(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["tasks", "validate", "--json", *map(str, arguments)])
    said = capsys.readouterr()
    assert said.out, said.err
    return code, json.loads(said.out)


def reasons(found: dict[str, Any], line: int) -> list[str]:
    rows = [(f"{each['row']}: " if each["row"] else "") + each["reason"] for each in found["broken"]]
    return [text for text in rows if f" line {line}: " in text]


def rows(n: int = 4) -> list[dict]:
    return [{"prompt": f"{i}+10=", "answer": str(i + 10)} for i in range(n)]


def test_good_rows_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = validated(capsys, write_jsonl(tmp_path / "t.jsonl", rows()))
    assert (code, found["rows"], found["passed"], found["broken"]) == (0, 4, 4, [])
    assert [(each["completion"], each["paid"]) for each in found["constants"]] == [("", 0), ("0", 0)]


def test_broken_lines_are_all_listed_and_the_clean_rows_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    good = {"prompt": "1+1=", "answer": "work\n#### 2", "meta": {"id": 1}}
    lines = [
        json.dumps(good), "{broken", json.dumps({"prompt": "p"}), "[1]", json.dumps({"question": "q", "answer": "#### 1"}), "",
        json.dumps({"prompt": "p", "answer": "no mark"}), json.dumps({"prompt": "q", "answer": "#### ten"}),
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    code, found = validated(
        capsys, path, "--answer-pattern", "#### (.*)", "--completion-pattern", "#### (.*)", "--reward",
        "rollbook.tasks.rewards:numeric_match", "--write-clean", tmp_path / "clean.jsonl",
    )  # fmt: skip
    assert (code, found["rows"], found["passed"]) == (1, 7, 1)
    for line, said in (
        (2, "not valid JSON"), (3, "no answer in field 'answer'"), (4, "expected a JSON object"), (5, "asks for 'prompt'"),
        (7, "task.answer_pattern = '#### (.*)' does not match"), (8, "'ten' is not a number"),
    ):  # fmt: skip
        assert any(said in text for text in reasons(found, line)), (line, found["broken"])
    assert [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text().splitlines()] == [good]


def test_a_reward_that_pays_a_constant_answer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def lenient(completion, task):\n    return float(completion in ('', task['answer']))\n")
    path = write_jsonl(tmp_path / "t.jsonl", rows(2))
    code, found = validated(capsys, path, "--reward", f"{tmp_path / 'reward.py'}:lenient")
    assert code == 1 and found["passed"] == 0
    assert reasons(found, 1) == [f"{path} line 1: the answer '' is paid 1"]


def test_the_most_common_answer_must_not_be_paid_where_it_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def seven(completion, task):\n    return float(completion in ('7', task['answer']))\n")
    given = [{"prompt": p, "answer": a} for p, a in (("a", "7"), ("b", "7"), ("c", "8"))]
    code, found = validated(capsys, write_jsonl(tmp_path / "t.jsonl", given), "--reward", f"{tmp_path / 'reward.py'}:seven")
    assert code == 1
    assert [each["reason"] for each in found["broken"]] == ["the answer '7' is paid 1"]
    assert found["constants"][-1] == {"completion": "7", "judged": 1, "paid": 1, "mean": 1.0}


def test_the_second_most_common_answer_is_tried_on_the_rows_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text("def no(completion, task):\n    return float(completion in ('no', task['answer']))\n")
    given = [{"prompt": str(i), "answer": "no" if i < 2 else "yes"} for i in range(5)]
    code, found = validated(capsys, write_jsonl(tmp_path / "t.jsonl", given), "--reward", f"{tmp_path / 'reward.py'}:no")
    assert (code, found["passed"]) == (1, 2)
    assert {each["reason"] for each in found["broken"]} == {"the answer 'no' is paid 1"}


def test_the_task_files_of_a_configuration_are_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held, path = (write_jsonl(tmp_path / name, rows(2)) for name in ("h.jsonl", "t.jsonl"))
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[run]\nid = "t"\ndir = "r"\nsteps = 1\n[model]\npath = "m"\n'
        '[task]\nsource = "jsonl"\npath = "t.jsonl"\nheldout_path = "h.jsonl"\n'
        '[learner]\ngroups_per_step = 1\ngroup_size = 2\n[[workers]]\nengine = "transformers"\n'
    )
    for file in (path, held):
        assert main(["tasks", "validate", str(toml), "--write-clean", str(file)]) == 2
        assert "is the file that is read" in capsys.readouterr().err
    assert path.read_text() == held.read_text() == "".join(json.dumps(row) + "\n" for row in rows(2))


@pytest.mark.parametrize(("gives", "said"), [("1", "gave a int, expected the text"), ("1 / 0", "raised ZeroDivisionError")])
def test_a_gold_that_is_no_completion_breaks_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gives: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(
        f"class Mine:\n    def gold(self, task):\n        return {gives}\n\n"
        "    def score(self, episode, context):\n        return 0\n"
    )
    path = write_jsonl(tmp_path / "t.jsonl", rows(1))
    code, found = validated(capsys, path, "--environment", f"{tmp_path / 'mine.py'}:Mine")
    assert code == 1 and said in reasons(found, 1)[0]


def test_a_constant_that_is_the_answer_is_no_junk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [{"prompt": "1-1=", "answer": "0"}, {"prompt": "2-2=", "answer": "0.0"}]
    path = write_jsonl(tmp_path / "t.jsonl", given)
    code, found = validated(capsys, path, "--reward", "rollbook.tasks.rewards:numeric_match")
    assert code == 0 and found["passed"] == 2


def test_a_judge_that_breaks_down_is_a_broken_row_not_a_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def breaks(completion, task):\n    return 1.0 if completion else 1 / 0\n")
    path = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "p", "answer": "0"}])
    code, found = validated(capsys, path, "--reward", f"{tmp_path / 'reward.py'}:breaks")
    assert code == 1 and "'' cannot be judged: verifier_error" in found["broken"][0]["reason"]


def test_repeats_are_counted_and_contradictions_break_both_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"},
             {"prompt": "b", "answer": "3"}]  # fmt: skip
    path = write_jsonl(tmp_path / "t.jsonl", given)
    code, found = validated(capsys, path)
    assert (code, found["repeats"], found["passed"]) == (1, 1, 2)
    assert found["duplicates"] == [[f"{path} line 3", f"{path} line 4"]]
    given[3]["answer"] = "2.0"  # another text, the same number: the judge pays one for the other
    write_jsonl(path, given)
    code, found = validated(capsys, path, "--reward", "rollbook.tasks.rewards:numeric_match")
    assert (code, found["passed"], len(found["duplicates"])) == (0, 4, 1)


def test_a_limit_looks_at_the_first_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", rows(3))
    path.write_text(path.read_text() + "{broken\n")
    assert validated(capsys, path, "--limit", 3)[0] == 0
    assert validated(capsys, path, "--limit", 4)[0] == 1


def test_parquet_rows_are_named_by_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([*rows(2), {"prompt": "p", "answer": None}]), tmp_path / "t.parquet")
    code, found = validated(capsys, tmp_path / "t.parquet")
    assert code == 1 and "t.parquet row 3: no answer" in found["broken"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: no such file"),
        (["nowhere.toml"], "no configuration file at nowhere.toml"),
        (["t.jsonl", "--completion-pattern", "("], "is not a regular expression"),
        (["t.jsonl", "--completion-template", "#### "], "write {answer} where the answer stands"),
        (["t.jsonl", "--write-clean", "t.jsonl"], "is the file that is read"),
        (["t.jsonl", "--split", "heldout"], "task.heldout_path is missing"),
        (["t.jsonl", "--environment", "trl:nowhere.py:f"], "there is no file"),
        (["empty.jsonl"], "empty.jsonl: no train tasks"),
    ],
)
def test_wrong_input_is_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "t.jsonl", rows())
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["tasks", "validate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_environment_judges_in_its_own_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "def right(completions, answer, **kwargs):\n"
        "    if completions[0] == '0':\n"
        "        os._exit(3)\n"
        "    return [1.0 if completions[0] == f'= {answer[0]}' else 0.0]\n"
    )
    path = write_jsonl(tmp_path / "t.jsonl", rows(1))
    name = f"trl:{tmp_path / 'reward.py'}:right"
    code, found = validated(capsys, path, "--environment", name, "--completion-template", "= {answer}")
    assert (code, found["passed"]) == (0, 1)
    code, found = validated(capsys, path, "--environment", name)
    assert code == 1
    said = " ".join(each["reason"] for each in found["broken"])
    assert "its right answer '10' is paid 0, not 1" in said and "'0' cannot be judged: verifier_error" in said


def test_programs_are_judged_in_the_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    double = "def double(n):\n    return 2 * n\n"
    given = [
        {"prompt": "Double it.", "function": "double", "cases": [[[2], 4], [[0], 0]], "answer": double},
        {"prompt": "Triple it.", "function": "triple", "cases": [[[2], 6]], "answer": "def triple(n):\n    return 2 * n\n"},
        {"prompt": "Anything.", "function": "any", "cases": [[[2], 6]]},
    ]
    path = write_jsonl(tmp_path / "t.jsonl", given)
    settings = "--set", 'environment.settings.kind="functions"', "--set", f'environment.settings.path="{path}"'
    code, found = validated(capsys, path, "--environment", "rollbook.tasks.code:CodeTasks", *settings)
    assert (code, found["passed"]) == (1, 1), found
    assert "its right answer" in reasons(found, 2)[0] and "brings no right program" in reasons(found, 3)[0]


def test_a_configuration_is_read_with_its_model_and_its_held_out_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_byte_tokenizer(tmp_path / "model", CHAT)
    system = [{"role": "system", "content": "Add."}, {"role": "user", "content": "9+9="}]
    write_jsonl(tmp_path / "train.jsonl", [*rows(2), {"prompt": "x" * 200, "answer": "1"}, {"messages": system, "answer": "18"}])
    write_jsonl(tmp_path / "heldout.jsonl", [rows(1)[0], {"prompt": "20+20=", "answer": "40"}])
    (tmp_path / "run.toml").write_text(
        '[run]\nid = "t"\ndir = "r"\nsteps = 1\n[model]\npath = "model"\nchat_template = true\n'
        '[task]\nsource = "jsonl"\npath = "train.jsonl"\nheldout_path = "heldout.jsonl"\n'
        "[learner]\ngroups_per_step = 1\ngroup_size = 2\n"
        '[[workers]]\nengine = "transformers"\nmax_model_len = 128\n'
    )
    code, found = validated(capsys, tmp_path / "run.toml")
    assert (code, found["passed"]) == (1, 3)
    assert "tokens, more than the 112" in reasons(found, 3)[0]
    assert found["heldout_overlap"] == [f"{tmp_path / 'heldout.jsonl'} line 1"]
    plain = ["--set", "model.chat_template=false"]
    assert "only a chat template renders" in reasons(validated(capsys, tmp_path / "run.toml", *plain)[1], 4)[0]
    code, found = validated(capsys, tmp_path / "run.toml", "--split", "heldout")
    assert (code, found["rows"]) == (0, 2)


def test_a_reasoning_gym_environment_validates_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "unused.jsonl", rows(1))
    brought = ["--set", 'task.source="environment"', "--set", "task.size=6", "--environment", "rg:leg_counting"]
    code, found = validated(capsys, path, *brought, "--limit", 5)
    assert (code, found["passed"]) == (0, 5)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"#### (.*)", "#### 42"), (r"<answer>(.*?)</answer>", "<answer>42</answer>"), (r"\\boxed\{([^}]*)\}", "\\boxed{42}"),
        (r"(?s)^\s*(.*)\s*$", "42"), (r"(?:answer|result):\s+(\d+)[.!]", "answer: 42."), (r"a{3}(x)", "aaa42"), (r".(x)", None),
        (r"(?<=:)(x)", None),
    ],
)  # fmt: skip
def test_an_answer_is_written_so_that_a_pattern_finds_it(pattern: str, written: str | None) -> None:
    assert write_answer(pattern, "42") == written


def test_a_right_completion_is_the_rows_own_text_where_the_pattern_finds_the_answer_there() -> None:
    task = {"answer": "42"}
    assert gold_completions(task, "6*7\n#### 42", r"#### (\d+)", "") == ["6*7\n#### 42", "#### 42"]
    assert gold_completions(task, "6*7\n#### 42", "", "") == ["42", "6*7\n#### 42"]
    assert gold_completions(task, "42", "", "= {answer}") == ["= 42"]


def test_every_row_of_gsm8k_passes_and_only_its_number_is_paid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = data_file("gsm8k", "train.jsonl")
    toml = ["--set", f'task.path="{train}"', "--set", 'task.heldout_path=""']
    code, found = validated(capsys, GSM8K_TOML, *toml)
    assert (code, found["rows"], found["passed"], found["duplicates"]) == (0, 7473, 7473, [])
    assert all(each["paid"] == 0 for each in found["constants"])
    config = load_config(GSM8K_TOML, [f'task.path="{train}"'])
    source, verify = load_source(config), make_verifier(config)
    first = source[0]
    assert first["answer"] == "72" and first["prompt"].startswith("Natalia sold clips")
    for completion, value in (("#### 72", 1.0), ("so\n#### $72.00", 1.0), ("#### 7", 0.0), ("72", 0.0), ("#### 1\n#### 72", 1.0)):
        assert verify(completion, first).value == value
