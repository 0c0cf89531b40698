"""Rewards and the verifier: wrong is 0, broken is no reward, and the two never meet."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.ports import RewardResult
from rollbook.core.records import RewardStatus
from rollbook.tasks.procedural import ProceduralTasks
from rollbook.tasks.rewards import exact_match, numeric_match, parse_number, reasoning_gym_score
from rollbook.tasks.sources import TaskShape
from rollbook.tasks.verifier import Verifier, load_reward, make_verifier, reward_digest
from task_fixtures import make_config


def verifier_of(tmp_path: Path, body: str, **task: str) -> Verifier:
    """A verifier whose reward function is the given source of ``def reward(completion, task)``."""
    file = tmp_path / "my_reward.py"
    file.write_text(body)
    return make_verifier(make_config(task={"reward": f"{file}:reward"} | task))


@pytest.mark.parametrize(
    ("completion", "value"), [("1359", 1.0), (" 1359\n", 1.0), ("1358", 0.0), ("1359 5", 0.0), ("", 0.0)]
)
def test_exact_match_ignores_surrounding_space_only(completion: str, value: float) -> None:
    assert exact_match(completion, {"answer": "1359"}) == RewardResult(value)


@pytest.mark.parametrize("text", ["1234", "1,234", "$1,234", "1234.", "1,234.00", " +1234 ", "$1234.0.", "01234"])
def test_one_number_written_differently_matches(text: str) -> None:
    assert numeric_match(text, {"answer": "1,234"}).value == 1.0


@pytest.mark.parametrize(
    "text", ["1235", "-1234", "1234.01", "12,34", "1234 apples", "", ".", "$", "+", "--1234", "nan", "1e3", "1234%"]
)
def test_another_number_or_no_number_does_not_match(text: str) -> None:
    assert numeric_match(text, {"answer": "1,234"}).value == 0.0


def test_numbers_keep_sign_fraction_and_all_digits() -> None:
    assert parse_number("-$7.50") == parse_number("$-7.5") == parse_number("-7.5")
    assert parse_number(".5") == parse_number("0.5")
    assert parse_number("9" * 5000) != parse_number("9" * 4999 + "8")


def test_a_task_whose_answer_is_no_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(VerifierError, match="is not a number; numeric_match cannot judge it") as caught:
        make_verifier(make_config(task={"reward": "rollbook.tasks.rewards:numeric_match"}))("3", {"answer": "three"})
    assert isinstance(caught.value.__cause__, ValueError)


def test_reasoning_gym_answers_are_scored_by_their_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    task = ProceduralTasks("chain_sum", {"max_terms": 2}, 5, 3, TaskShape())[1]
    assert reasoning_gym_score(f" {task['answer']}\n", task).value == 1.0
    assert reasoning_gym_score("x", task).value == 0.0


def test_an_answer_its_scorer_cannot_read_is_wrong_but_a_broken_task_is_an_error() -> None:
    pytest.importorskip("reasoning_gym")
    task = ProceduralTasks("prime_factorization", {}, 5, 3, TaskShape())[0]
    result = reasoning_gym_score("junk", task)
    assert result.value == 0.0 and "cannot read the answer" in result.evidence
    task["reasoning_gym"]["entry"]["answer"] = "damaged"
    with pytest.raises(ValueError, match="damaged"):
        reasoning_gym_score("junk", task)


def test_a_scorer_that_would_execute_the_answer_is_refused_at_start() -> None:
    pytest.importorskip("reasoning_gym")
    task = {"source": "reasoning_gym", "name": "countdown", "reward": "rollbook.tasks.rewards:reasoning_gym_score"}
    with pytest.raises(ConfigError, match="'countdown' evaluates the answer as Python"):
        make_verifier(make_config(task=task))


def test_scoring_by_a_dataset_needs_tasks_of_a_dataset() -> None:
    with pytest.raises(ConfigError, match="judges tasks of task.source = 'reasoning_gym' only"):
        make_verifier(make_config(task={"reward": "rollbook.tasks.rewards:reasoning_gym_score"}))
    with pytest.raises(ValueError, match="judges tasks of task.source = 'reasoning_gym' only"):
        reasoning_gym_score("1", {"answer": "1"})


def test_the_reward_sees_the_extracted_answer() -> None:
    verify = make_verifier(make_config(task={"completion_pattern": r"####\s*(\S+)"}))
    assert verify("so #### 4 no, #### 75", {"answer": "75"}) == RewardResult(1.0)
    assert verify("so #### 75 no, #### 4", {"answer": "75"}) == RewardResult(0.0)


def test_a_completion_without_the_format_is_a_reward_of_zero(tmp_path: Path) -> None:
    verify = verifier_of(tmp_path, "def reward(completion, task):\n    return 1.0\n", completion_pattern="#### (.*)")
    result = verify("no idea", {"answer": ""})
    assert result.value == 0.0 and result.status is RewardStatus.GIVEN and "failed the format" in result.evidence
    assert verify("#### ", {"answer": ""}).value == 1.0


@pytest.mark.parametrize("returned", ["0.5", "True", "1", "numpy.float32(0.25)", "RewardResult(0.5, evidence='why')"])
def test_numbers_of_every_kind_become_floats(tmp_path: Path, returned: str) -> None:
    head = "import numpy\nfrom rollbook.core.ports import RewardResult\n"
    result = verifier_of(tmp_path, f"{head}def reward(completion, task):\n    return {returned}\n")("x", {})
    expected = eval(returned, {"numpy": numpy, "RewardResult": RewardResult})
    value = expected.value if isinstance(expected, RewardResult) else float(expected)
    assert result.value == value and type(result.value) is float


@pytest.mark.parametrize("returned", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("form", ["float('{}')", "RewardResult(float('{}'))"])
def test_a_value_that_is_not_finite_is_a_verifier_error_without_reward(tmp_path: Path, returned: str, form: str) -> None:
    head = "from rollbook.core.ports import RewardResult\n"
    result = verifier_of(tmp_path, f"{head}def reward(completion, task):\n    return {form.format(returned)}\n")("x", {})
    assert result.value is None and result.status is RewardStatus.VERIFIER_ERROR and returned in result.evidence


def test_none_is_no_verdict(tmp_path: Path) -> None:
    result = verifier_of(tmp_path, "def reward(completion, task):\n    pass\n")("x", {})
    assert result.value is None and result.status is RewardStatus.NO_VERDICT


def test_a_result_without_a_value_passes_unchanged(tmp_path: Path) -> None:
    body = """
from rollbook.core.ports import RewardResult
from rollbook.core.records import RewardStatus
def reward(completion, task):
    return RewardResult(None, RewardStatus.INFRA_ERROR, "the judge is down")
"""
    assert verifier_of(tmp_path, body)("x", {}) == RewardResult(None, RewardStatus.INFRA_ERROR, "the judge is down")


@pytest.mark.parametrize(
    "result", ["1.0, evidence=None", "0.5, evidence=b'x'", "None, 'no_verdict'", "None, RewardStatus.NO_VERDICT, 7"]
)
def test_a_result_of_wrong_types_is_an_error_of_the_function_and_not_of_the_worker(tmp_path: Path, result: str) -> None:
    head = "from rollbook.core.ports import RewardResult\nfrom rollbook.core.records import RewardStatus\n"
    with pytest.raises(VerifierError, match="status must be a RewardStatus, evidence a text"):
        verifier_of(tmp_path, f"{head}def reward(completion, task):\n    return RewardResult({result})\n")("x", {})


@pytest.mark.parametrize("returned", ["'1.0'", "b'1'", "[1.0]", "{}", "object()"])
def test_something_that_is_no_number_is_an_error(tmp_path: Path, returned: str) -> None:
    with pytest.raises(VerifierError, match="expected a number or a RewardResult"):
        verifier_of(tmp_path, f"def reward(completion, task):\n    return {returned}\n")("x", {})


@pytest.mark.parametrize("raised", ["KeyError('tests')", "SystemExit(0)", "RecursionError()", "AssertionError()"])
def test_an_exception_of_the_reward_function_propagates_with_its_cause(tmp_path: Path, raised: str) -> None:
    verify = verifier_of(tmp_path, f"def reward(completion, task):\n    raise {raised}\n")
    with pytest.raises(VerifierError, match=f"raised {raised.partition('(')[0]}") as caught:
        verify("x", {})
    assert type(caught.value.__cause__).__name__ == raised.partition("(")[0]


def test_keyboard_interrupts_are_not_taken_for_verdicts(tmp_path: Path) -> None:
    verify = verifier_of(tmp_path, "def reward(completion, task):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        verify("x", {})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("exact_match", "write module:attribute or file.py:attribute"),
        ("rollbook.tasks.rewards:", "write module:attribute"),
        ("rollbook.tasks.rewards:exact_mach", "has no 'exact_mach'; did you mean 'exact_match'"),
        ("rollbook.tasks.reward:exact_match", "there is no module 'rollbook.tasks.reward'"),
        ("no_such_package.inner:f", "there is no module 'no_such_package'"),
        ("/no/such/file.py:reward", "there is no file /no/such/file.py"),
        ("rollbook.tasks.verifier:Verifier.nothing", "has no 'nothing'"),
        ("math:pi", "is a float, expected a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_names_what_is_missing(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec)
    assert said in str(caught.value)


@pytest.mark.parametrize(("body", "cause"), [("import no_such_library\n", ModuleNotFoundError), ("1 / 0\n", ZeroDivisionError),
                                             ("def (:\n", SyntaxError)])  # fmt: skip
def test_a_reward_file_that_fails_to_import_shows_the_cause_and_can_be_repaired(tmp_path: Path, body: str, cause: type) -> None:
    file = tmp_path / "broken.py"
    file.write_text(body)
    with pytest.raises(ConfigError, match="broken.py raised") as caught:
        load_reward(f"{file}:reward")
    assert isinstance(caught.value.__cause__, cause)
    file.write_text("def reward(completion, task):\n    return 0.5  # longer than what was there\n")
    assert load_reward(f"{file}:reward")("x", {}) == 0.5


def test_two_reward_files_of_one_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    for name, value in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text(f"def reward(completion, task):\n    return {value}\n")
    values = [load_reward(f"{tmp_path / name / 'reward.py'}:reward")("x", {}) for name in ("a", "b")]
    assert values == [0.25, 0.75]


def test_a_reward_file_is_found_beside_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, task):\n    return 1\n")
    (tmp_path / "c.toml").write_text(
        '[run]\nid = "t"\ndir = "run"\nsteps = 1\n[model]\npath = "m"\n[task]\nsource = "jsonl"\npath = "t.jsonl"\n'
        'reward = "mine.py:reward"\n[learner]\ngroups_per_step = 1\ngroup_size = 2\n[[workers]]\nengine = "transformers"\n'
    )
    config = load_config(tmp_path / "c.toml")
    assert make_verifier(config)("x", {}) == RewardResult(1.0)


def test_the_reward_digest_changes_with_the_code(tmp_path: Path) -> None:
    for name, body in (("a.py", "def reward(c, t): return 1\n"), ("b.py", "def reward(c, t): return 0\n")):
        (tmp_path / name).write_text(body)
    one, other = (reward_digest(f"{tmp_path / name}:reward") for name in ("a.py", "b.py"))
    assert one != other and math.log2(int(one, 16)) > 200
    assert reward_digest("rollbook.tasks.rewards:exact_match") != reward_digest("rollbook.tasks.rewards:numeric_match")
