"""Other libraries' conventions as environments: what their functions are given, and what each answer means here."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.core.config import Config, load_config, portable_code
from rollbook.core.environments import Context, Episode, RewardResult, Turn
from rollbook.core.errors import ConfigError, TaskError, VerifierError
from rollbook.core.records import Blame, RewardStatus
from rollbook.core.sandboxing import Limits
from rollbook.tasks.child_client import EnvironmentPool
from rollbook.tasks.environment import environment_digest, load_environment
from rollbook.tasks.sources import load_heldout, load_source
from task_fixtures import make_config, write_jsonl

CONTEXT = Context(None, Limits(), 1, "r/0.0", 60.0)
TRL = """
def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def matches(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == 1
    return [1.0 if said == right else 0.0 for said, right in zip(completions, answer)]

async def abstains(completions, **kwargs):
    return [None]

async def half(completions, **kwargs):
    return [0.5]

def narrow(completions, answer):
    return [float(answer[0] in completions[0])]

def conversation(prompts, completions, **kwargs):
    assert [m["role"] for m in prompts[0]] == ["system", "user"], prompts
    assert [m["role"] for m in completions[0]] == ["assistant"]
    return [float(completions[0][0]["content"] == "4")]

def as_user(prompts, completions, **kwargs):
    assert prompts == [[{"role": "user", "content": "2+2"}]]
    return [1.0]

def logs(completions, log_metric=None, log_extra=None, **kwargs):
    log_metric("chars", len(completions[0]))
    log_metric("broken", float("nan"))
    log_extra("seen", completions)
    return [1.0]

def two(completions, **kwargs):
    return [1.0, 0.0]

def scalar(completions, **kwargs):
    return 1.0

def text(completions, **kwargs):
    return ["1.0"]

def not_a_number(completions, **kwargs):
    return [float("nan")]

def raises(completions, **kwargs):
    raise LookupError("the table is gone")

def needs_ids(completions, completion_ids, **kwargs):
    return [0.0]

class Model:
    def __call__(self, completions, **kwargs):
        return [0.25]
    __name__ = "model"

callable_object = Model()
number = 3
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    assert extra_info["index"] == 7
    return {"score": scale * float(solution_str == ground_truth), "length": len(solution_str), "source": data_source}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str == ground_truth["target"]

def tupled(data_source, solution_str, ground_truth, extra_info=None):
    return 0.75, "why"

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return None

def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}

def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise LookupError("the table is gone")
"""
TASK = {"prompt": "2+2", "answer": "4"}
CONVERSATION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]


def judged(config: Config, completion: str, task: dict) -> RewardResult:
    environment = load_environment(config)
    return asyncio.run(environment.score(Episode(task, (Turn(completion),)), CONTEXT))


def trl(tmp_path: Path, names: str, **settings: Any) -> Config:
    file = tmp_path / "rewards.py"
    file.write_text(TRL)
    name = "trl:" + ",".join(f"{file}:{one}" for one in names.split(","))
    return make_config(environment={"name": name, "settings": settings})


def verl(tmp_path: Path, function: str, settings: dict | None = None, **task: Any) -> Config:
    file = tmp_path / "scores.py"
    file.write_text(VERL)
    return make_config(environment={"name": f"verl:{file}:{function}", "settings": settings or {}}, task=task)


def verl_row(truth: Any = "4", **more: Any) -> dict:
    return {"data_source": "sums", "prompt": CONVERSATION, "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": 7}} | more  # fmt: skip


@pytest.mark.parametrize(
    ("names", "settings", "completion", "expected"),
    [
        ("matches", {}, "4", RewardResult(1.0, parts={"matches": 1.0})),
        ("matches", {}, "5", RewardResult(0.0, parts={"matches": 0.0})),
        ("matches,length", {"weights": [1.0, 0.25]}, "4", RewardResult(1.25, parts={"matches": 1.0, "length": 1.0})),
        ("half", {}, "4", RewardResult(0.5, parts={"half": 0.5})),
        ("half,matches", {"weights": [2, 1]}, "4", RewardResult(2.0, parts={"half": 0.5, "matches": 1.0})),
        ("matches,abstains", {}, "4", RewardResult(1.0, parts={"matches": 1.0})),
        ("narrow", {}, "= 4", RewardResult(1.0, parts={"narrow": 1.0})),
        ("half,half", {}, "4", RewardResult(1.0, parts={"half_1": 0.5, "half_2": 0.5})),
        ("callable_object", {}, "4", RewardResult(0.25, parts={"model": 0.25})),
        ("as_user", {"conversational": True}, "4", RewardResult(1.0, parts={"as_user": 1.0})),
    ],
)
def test_trl_functions_give_a_weighted_sum(
    tmp_path: Path, names: str, settings: dict, completion: str, expected: RewardResult
) -> None:
    assert judged(trl(tmp_path, names, **settings), completion, TASK) == expected


def test_trl_functions_that_all_abstain_give_no_verdict(tmp_path: Path) -> None:
    result = judged(trl(tmp_path, "abstains,abstains"), "4", TASK)
    assert (result.value, result.status) == (None, RewardStatus.NO_VERDICT)
    assert "returned None" in result.evidence


def test_trl_functions_get_conversations_as_messages(tmp_path: Path) -> None:
    task = {"prompt": "Add.\n\n2+2", "messages": CONVERSATION}
    assert judged(trl(tmp_path, "conversation"), "4", task).value == 1.0


def test_what_trl_functions_log_is_kept(tmp_path: Path) -> None:
    result = judged(trl(tmp_path, "logs"), "four", TASK)
    assert result.parts == {"chars": 4.0, "logs": 1.0} and json.loads(result.evidence) == {"seen": ["four"]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two", "two returned 2 rewards for 1 completion"),
        ("scalar", "scalar returned 1.0, expected a list"),
        ("text", "text returned '1.0', expected a number"),
        ("not_a_number", "returned nan"),
        ("raises", "LookupError: the table is gone"),
    ],
)
def test_a_trl_function_that_misbehaves_gives_no_reward(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(VerifierError, match=said):
        judged(trl(tmp_path, f"half,{name}"), "4", TASK)


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        ("needs_ids", {}, "needs completion_ids"),
        ("number", {}, "is a int, expected a function"),
        ("Model", {}, "is a class or a model"),
        ("halff", {}, "did you mean 'half'"),
        ("half,matches", {"weights": [1.0]}, "write 2 numbers, one for each of"),
        ("half", {"weights": ["1"]}, "write 1 numbers"),
        ("half", {"weight": [1.0]}, "environment.settings.weight; did you mean 'weights'"),
        ("half", {"conversational": 1}, "expected true or false"),
    ],
)
def test_a_trl_configuration_that_cannot_work_is_refused(tmp_path: Path, names: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_environment(trl(tmp_path, names, **settings))


def test_a_pattern_that_nobody_would_apply_is_refused(tmp_path: Path) -> None:
    name = trl(tmp_path, "half").environment.name
    with pytest.raises(ConfigError, match="task.completion_pattern is set, but a TRL reward function reads the whole completion"):
        load_environment(make_config(environment={"name": name}, task={"completion_pattern": "(x)"}))


def test_files_of_several_functions_are_found_beside_the_configuration_and_count_in_the_digest(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(TRL)
    (tmp_path / "run.toml").write_text(
        '[run]\nid = "t"\ndir = "r"\nsteps = 1\n[model]\npath = "m"\n[task]\nsource = "jsonl"\npath = "t.jsonl"\n'
        '[environment]\nname = "trl:one.py:half, two.py:matches"\n[learner]\ngroups_per_step = 1\ngroup_size = 2\n'
        '[[workers]]\nengine = "transformers"\n'
    )
    config = load_config(tmp_path / "run.toml")
    assert config.environment.name == f"trl:{tmp_path}/one.py:half,{tmp_path}/two.py:matches"
    assert portable_code(config.environment.name) == "trl:one.py:half,two.py:matches"
    assert judged(config, "4", TASK).value == 1.5
    before = environment_digest(config)
    (tmp_path / "two.py").write_text(TRL + "\n")
    assert environment_digest(config) != before


def test_trl_tasks_come_from_the_files_of_the_run(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+1", "answer": "2"}, {"messages": CONVERSATION, "tests": ["t"]}])
    heldout = write_jsonl(tmp_path / "heldout.jsonl", [{"prompt": "3+3", "answer": "6"}])
    name = trl(tmp_path, "half").environment.name
    task = {"source": "environment", "path": str(train), "heldout_path": str(heldout), "prompt_template": "Q: {prompt}"}
    config = make_config(environment={"name": name}, task=task)
    source = load_source(config)
    assert [source[i]["prompt"] for i in range(2)] == ["Q: 1+1", "Q: Add.\n\n2+2"]
    assert source[1]["messages"] == CONVERSATION and source[1]["tests"] == ["t"]
    held = load_heldout(config, source)
    assert held is not None and held[0]["prompt"] == "Q: 3+3"
    write_jsonl(train, [{"prompt": "1+1"}, {"messages": [{"role": "robot", "content": "x"}]}])
    with pytest.raises(TaskError, match="train.jsonl line 2: message 1 is"):
        load_source(config)


def test_a_trl_function_that_raises_in_its_process_is_a_verifier_error(tmp_path: Path) -> None:
    pool = EnvironmentPool(trl(tmp_path, "raises"))
    try:
        result = pool.score(Episode(TASK, (Turn("4"),)), key="r/0.0", seed=1).result(timeout=60)
    finally:
        pool.close()
    assert (result.value, result.status, result.blame) == (None, RewardStatus.VERIFIER_ERROR, Blame.UNCLEAR)
    assert "the table is gone" in result.evidence


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_verl_are_tasks_and_its_score_judges_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([verl_row()]), path)
    else:
        write_jsonl(path, [verl_row()])
    config = verl(tmp_path, "compute_score", {"reward_kwargs": {"scale": 2.0}}, source=suffix, path=str(path))
    task = load_source(config)[0]
    assert task["messages"] == CONVERSATION and task["prompt"] == "Add.\n\n2+2" and task["answer"] == "4"
    assert judged(config, "4", task) == RewardResult(2.0, parts={"length": 1.0})
    assert judged(config, "5", task).value == 0.0
    brought = load_source(verl(tmp_path, "compute_score", source="environment", path=str(path)))
    assert brought[0] == task


@pytest.mark.parametrize(
    ("function", "truth", "value"), [("later", {"target": "4"}, 1.0), ("later", {"target": "5"}, 0.0), ("tupled", "4", 0.75)]
)
def test_answers_of_verl_functions_are_read_as_verl_does(tmp_path: Path, function: str, truth: Any, value: float) -> None:
    assert judged(verl(tmp_path, function), "4", verl_row(truth)).value == value


@pytest.mark.parametrize(
    ("function", "row", "said"),
    [
        ("nothing", verl_row(), "returned None, expected a number"),
        ("no_score", verl_row(), "a dict without 'score': acc"),
        ("raises", verl_row(), "LookupError: the table is gone"),
        ("compute_score", {"prompt": "p", "answer": "4"}, "needs rows with data_source and reward_model.ground_truth"),
    ],
)
def test_a_verl_function_without_a_score_gives_no_reward(tmp_path: Path, function: str, row: dict, said: str) -> None:
    with pytest.raises(VerifierError, match=said):
        judged(verl(tmp_path, function), "4", row)


def gym(name: str, settings: dict | None = None, **task: Any) -> Config:
    task = {"source": "environment", "path": "", "size": 5, "heldout_size": 4} | task
    return make_config(environment={"name": f"rg:{name}", "settings": settings or {}}, task=task)


def test_a_reasoning_gym_dataset_brings_tasks_and_judges_them() -> None:
    config = gym("leg_counting", {"max_animals": 3})
    environment = load_environment(config)
    tasks, heldout = list(environment.load("train")), list(environment.load("heldout"))
    assert len(tasks) == 5 and len(heldout) == 4
    assert not {t["prompt"] for t in tasks} & {t["prompt"] for t in heldout}
    assert list(load_environment(config).load("train")) == tasks
    task = json.loads(json.dumps(tasks[0]))
    assert judged(config, task["answer"], task).value == 1.0
    assert judged(config, f"it is 7 no <answer> {task['answer']} </answer>", task).value == 1.0
    assert judged(config, "no number", task).value < 1.0


def test_a_threshold_leaves_no_part_pay() -> None:
    task = next(iter(load_environment(gym("spell_backward")).load("train")))
    junk = task["answer"][:-1] + ("x" if task["answer"][-1] != "x" else "y")
    paid = judged(gym("spell_backward"), junk, task)
    assert paid.value is not None and 0.0 < paid.value < 1.0
    strict = gym("spell_backward", {"threshold": 1.0})
    assert judged(strict, junk, task) == RewardResult(0.0, parts={"score": paid.value})
    assert judged(strict, task["answer"], task).value == 1.0


def test_only_the_answer_span_is_scored() -> None:
    config = gym("leg_counting", {}, completion_pattern=r"= (\S+)")
    task = next(iter(load_environment(config).load("train")))
    assert judged(config, f"= {task['answer']}", task).value == 1.0
    failed = judged(config, task["answer"], task)
    assert (failed.value, failed.blame) == (0.0, Blame.MODEL) and "failed the format" in failed.evidence


def test_what_a_scorer_cannot_read_is_wrong_and_a_broken_entry_is_no_verdict() -> None:
    config = gym("prime_factorization")
    task = next(iter(load_environment(config).load("train")))
    assert judged(config, "× junk ×", task).value == 0.0
    stored = task["reasoning_gym"]
    broken = task | {"reasoning_gym": stored | {"entry": stored["entry"] | {"answer": "× junk ×"}}}
    with pytest.raises(VerifierError):
        judged(config, "× junk ×", broken)
    with pytest.raises(VerifierError, match="judges its own tasks only"):
        judged(config, "4", TASK)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("countdown", {}, "evaluates the answer as Python"),
        ("leg_countin", {}, "did you mean leg_counting"),
        ("leg_counting", {"size": 3}, "environment.settings.size: set task.size instead"),
        ("leg_counting", {"max_animal": 3}, "environment.settings do not fit reasoning_gym 'leg_counting'"),
        ("leg_counting", {"threshold": 0}, "threshold = 0: a number above 0"),
        ("leg_counting", {"threshold": 1.5}, "threshold = 1.5"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(name: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_environment(gym(name, settings))


def test_the_verifiers_adapter_takes_what_it_can_judge_and_refuses_the_rest(tmp_path: Path) -> None:
    """With the package where it is installed, else with its shape; the check is the same."""
    shape = [] if importlib.util.find_spec("verifiers") else [str(tmp_path)]
    check = Path(__file__).with_name("verifiers_check.py")
    tests = check.parents[1]
    done = subprocess.run(
        [sys.executable, str(check), *shape], capture_output=True, text=True, timeout=110,
        env={"PYTHONPATH": f"{tests.parent / 'service'}:{tests}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 3


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"needs the package: pip install 'rollbook\[verifiers\]'"):
        load_environment(make_config(environment={"name": "verifiers:gsm8k"}))


def test_another_version_of_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.1")
    with pytest.raises(ConfigError, match="verifiers 0.5.1 is installed, this adapter is written for 0.4.x"):
        load_environment(make_config(environment={"name": "verifiers:gsm8k"}))


def test_an_adapter_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="write what it is to load behind the colon"):
        load_environment(make_config(environment={"name": "rg: "}))
