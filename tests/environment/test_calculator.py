"""The calculator: its tasks, its language of calls and answers, its tools on real sandboxes, and the tokens of an episode."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollbook.core.environments import Context, Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.errors import ConfigError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.core.sandboxing import Execution, Job, Limits, Program, Sandbox
from rollbook.tasks import calculator as calc
from rollbook.tasks.calculator import Calculator, evaluate

LIMITS = Limits(cpu_s=5.0, wall_s=30.0)
Call = tuple[ToolRequest, ToolReply]


class Down(Sandbox):
    """A backend that is broken in one way."""

    name = "down"

    def __init__(self, status: SandboxStatus, blame: Blame) -> None:
        self._execution = Execution(status, blame, "it went away")

    def start(self, program: Program, limits: Limits) -> Job:
        raise NotImplementedError

    def run(self, program: Program, limits: Limits, data: bytes = b"") -> Execution:
        return self._execution

    def close(self) -> None: ...


@pytest.fixture(scope="module", params=["unsafe", "zygote"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    from rollbook.sandbox.backends import make_backend

    try:
        backend = make_backend(request.param, 1)
    except ConfigError as error:
        if request.param == "unsafe":
            raise
        pytest.skip(f"{request.param}: {error}")
    yield backend
    backend.close()


def _context(sandbox: Sandbox | None = None, limits: Limits = LIMITS, seed: int = 5) -> Context:
    return Context(sandbox, limits, seed, "run/0.0/0", 60.0)


def _call(
    environment: Calculator, code: str, sandbox: Sandbox | None = None, earlier: Sequence[Call] = (), **context: Any
) -> ToolReply:
    tool = environment.tools[0]
    return asyncio.run(tool.call({"code": code}, earlier, _context(sandbox, **context)))


def _session(sandbox: Sandbox, *cells: str, **context: Any) -> list[Call]:
    """Write cells one after the other, each call with those before it."""
    environment, log = Calculator(session=True), []
    for code in cells:
        request = environment.parse(f"[{code}]")
        assert request is not None
        log.append((request, _call(environment, request.arguments["code"], sandbox, tuple(log), **context)))
    return log


def _texts(log: Sequence[Call]) -> list[str]:
    return [reply.text for _, reply in log]


def _score(completion: str, answer: str = "33", called: bool = True) -> RewardResult:
    call = Turn("[12+7*3]", ToolRequest("python", {"code": "12+7*3"}), ToolReply("33"))
    episode = Episode({"prompt": "12+7*3:", "answer": answer}, (*([call] if called else []), Turn(completion)))
    return asyncio.run(Calculator(sandbox=False).score(episode, _context()))


# Tasks


def test_the_splits_are_disjoint_and_hold_every_expression() -> None:
    prompts = {split: {task["prompt"] for task in calc.tasks_of(split)} for split in calc.SPLITS}
    assert sum(map(len, prompts.values())) == len(set().union(*prompts.values())) == 90 * 3 * 9 * 3 * 9
    assert {split: round(len(p) / 65_610, 2) for split, p in prompts.items()} == {
        "heldout": 0.1, "demonstration": 0.4, "train": 0.5,
    }  # fmt: skip


def test_tasks_are_json_and_pythons_own_arithmetic_agrees_with_their_answers() -> None:
    tasks = [*Calculator().load("train"), *Calculator().load("heldout")]
    assert len(tasks) == 4596
    assert json.loads(json.dumps(tasks)) == tasks
    for task in tasks:
        assert task["prompt"] == task["expression"] + ":"
        assert task["answer"] == str(eval(task["expression"])), task


def test_another_process_loads_the_same_tasks_whatever_its_hash_seed() -> None:
    code = (
        "import json; from rollbook.tasks.calculator import Calculator as C\n"
        "print(json.dumps([list(C().load(s))[:50] for s in ('train', 'heldout')]))"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert shown[0] == shown[1]
    assert json.loads(shown[0]) == [list(Calculator().load(split))[:50] for split in ("train", "heldout")]


def test_fewer_tasks_are_the_first_of_more() -> None:
    assert list(Calculator(train_tasks=7).load("train")) == list(Calculator().load("train"))[:7]


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_number_of_tasks_that_a_split_does_not_hold_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="heldout_tasks"):
        Calculator(heldout_tasks=count).load("heldout")


@pytest.mark.parametrize("split", ["test", "demonstration"])
def test_no_other_split_is_loaded(split: str) -> None:
    with pytest.raises(ConfigError, match="train and heldout"):
        Calculator().load(split)


# Arithmetic without a sandbox


@pytest.mark.parametrize("expression", ["12+7*3", "1-2-3", "-4*-(2+3)", "((7))", " 1 + 2 ", "0", "00", "+5", "2--3", "-2*3+1"])
def test_the_parser_agrees_with_python(expression: str) -> None:
    assert evaluate(expression) == eval(expression.strip())


@pytest.mark.parametrize(
    "expression", ["", "12+", "(1", "1)", "07", "1 2", "2**3", "4/2", "a", "1.0", "1_0", "\u00b2", "__import__('os')"]
)
def test_what_is_no_integer_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


def test_length_nesting_and_size_are_bounded_on_both_sides() -> None:
    most = calc.EXPRESSION_CHARACTERS_MAX
    assert evaluate("1" + " " * (most - 3) + "+1") == 2
    with pytest.raises(ValueError, match="characters"):
        evaluate("1" * (most + 1))
    deep = calc.NESTING_MAX - 1
    assert evaluate("(" * deep + "1" + ")" * deep) == 1
    with pytest.raises(ValueError, match="nested"):
        evaluate("(" * (deep + 1) + "1" + ")" * (deep + 1))
    assert evaluate("1000000*1000000") == calc.INTEGER_MAX
    for beyond in ("1000000*1000000+1", "-1000000*1000000-1", "1000000000001"):
        with pytest.raises(ValueError, match="beyond"):
            evaluate(beyond)


def test_the_tool_without_a_sandbox_answers_values_and_errors() -> None:
    environment = Calculator(sandbox=False)
    assert not environment.needs_sandbox and environment.tools[0].pure
    assert _call(environment, "12+7*3") == ToolReply("33")
    wrong = _call(environment, "12+")
    assert wrong.text.startswith("error: ") and not wrong.failed


# The language of turns


@pytest.mark.parametrize("text", ["", "[]", "12+7", "=33", "[12+7*3", "12+7*3]", "=[1]", "[1]=", " [1]", "[1] "])
def test_what_is_no_call_ends_the_episode(text: str) -> None:
    assert Calculator().parse(text) is None


@pytest.mark.parametrize(("session", "tool"), [(False, "python"), (True, "session")])
def test_a_call_names_the_tool_and_survives_json(session: bool, tool: str) -> None:
    environment = Calculator(session=session)
    for code in ("12+7*3", "x = [1, 2]\nx", "]["):
        request = environment.parse(f"[{code}]")
        assert request == ToolRequest(tool, {"code": code})
        assert ToolRequest.from_json(request.to_json()) == request
    assert [t.name for t in environment.tools] == [tool]


def test_an_answer_is_rendered_in_the_words_the_model_knows() -> None:
    render = Calculator().render
    assert render(ToolReply("33")) == "33;" and render(ToolReply("-7")) == "-7;"
    for text in ("", "error: ZeroDivisionError", "3.5", "1\n2", "33\n", "9" * 13, "٣"):
        assert render(ToolReply(text)) == "error;"


def test_only_the_exact_answer_in_its_form_has_a_reward() -> None:
    assert _score("=33").value == 1.0
    for wrong in ("33", "=34", "= 33", "=033", "=33;", "[12+7*3]", ""):
        result = _score(wrong)
        assert (result.value, result.status) == (0.0, RewardStatus.GIVEN)
    assert _score("=-7", "-7").value == 1.0


def test_parts_tell_form_and_use_of_the_tool_apart() -> None:
    assert _score("=34").parts == {"form": 1.0, "called": 1.0}
    assert _score("=33", called=False).parts == {"form": 1.0, "called": 0.0}
    assert _score("33").parts == {"form": 0.0, "called": 1.0}


def test_a_session_without_a_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="sandbox"):
        Calculator(sandbox=False, session=True)


# Tools in a sandbox


def test_the_sandbox_works_out_what_the_parser_does(sandbox: Sandbox) -> None:
    environment = Calculator()
    assert environment.needs_sandbox and environment.tools[0].pure
    for expression in ("12+7*3", "10-9*9", "99*9*9"):
        assert _call(environment, expression, sandbox) == ToolReply(str(evaluate(expression)), SandboxStatus.OK)


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("1//0", SandboxStatus.RUNTIME_ERROR, "ZeroDivisionError"),
        ("12+", SandboxStatus.SYNTAX_ERROR, "SyntaxError"),
        ("nothing", SandboxStatus.RUNTIME_ERROR, "NameError"),
    ],
)
def test_an_error_of_the_model_is_an_answer(sandbox: Sandbox, code: str, status: SandboxStatus, shown: str) -> None:
    reply = _call(Calculator(), code, sandbox)
    assert (reply.sandbox_status, reply.failed) == (status, False)
    assert shown in reply.text and Calculator().render(reply) == "error;"


def test_an_endless_call_is_an_answer_too(sandbox: Sandbox) -> None:
    reply = _call(Calculator(), "[0 for _ in iter(int, 1)]", sandbox, limits=Limits(cpu_s=1.0, wall_s=30.0))
    assert (reply.sandbox_status, reply.failed) == (SandboxStatus.TIMEOUT_CPU, False)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize(
    ("status", "blame"),
    [
        (SandboxStatus.INFRA_SPAWN, Blame.INFRA),
        (SandboxStatus.INFRA_LOST, Blame.INFRA),
        (SandboxStatus.TIMEOUT_WALL, Blame.UNCLEAR),
    ],
)
def test_what_is_not_the_models_fault_is_never_shown_to_it(session: bool, status: SandboxStatus, blame: Blame) -> None:
    reply = _call(Calculator(session=session), "1+1", Down(status, blame))
    assert reply.failed and reply.text == "" and reply.sandbox_status is status
    assert "it went away" in reply.reason and reply.blame is blame


def test_a_tool_that_was_given_no_sandbox_says_so() -> None:
    with pytest.raises(ConfigError, match="sandbox = false"):
        _call(Calculator(), "1+1", None)


# The session


def test_variables_live_from_cell_to_cell_and_only_the_new_cell_answers(sandbox: Sandbox) -> None:
    log = _session(sandbox, "x = 12", "print('once'); x + 7", "x = x * 2\nx", "x")
    assert _texts(log) == ["", "once\n19", "24", "24"]
    assert all(reply.sandbox_status is SandboxStatus.OK for _, reply in log)


def test_an_error_in_a_cell_is_an_answer_and_keeps_the_session(sandbox: Sandbox) -> None:
    log = _session(sandbox, "x = 3", "x / 0", "x +", "x")
    assert [reply.sandbox_status.value for _, reply in log] == ["ok", "runtime_error", "syntax_error", "ok"]
    assert log[1][1].text == "error: ZeroDivisionError: division by zero"
    assert log[3][1].text == "3" and not any(reply.failed for _, reply in log)


def test_a_cell_that_ends_the_interpreter_ends_the_session(sandbox: Sandbox) -> None:
    log = _session(sandbox, "x = 3", "raise SystemExit", "x", "y = 4", "y")
    assert log[1][1] == ToolReply("error: early_exit", SandboxStatus.EARLY_EXIT)
    assert log[2][1].text.startswith("error: NameError"), "the variables are gone"
    assert log[4][1].text == "4"


def test_a_cell_that_runs_into_a_limit_is_not_run_again(sandbox: Sandbox) -> None:
    log = _session(sandbox, "while True: pass", "1", limits=Limits(cpu_s=1.0, wall_s=30.0))
    assert log[0][1] == ToolReply("error: timeout_cpu", SandboxStatus.TIMEOUT_CPU)
    assert log[1][1] == ToolReply("1", SandboxStatus.OK)


OVER = ToolReply("error: the session is over, cell 0 does not run as it did", SandboxStatus.EARLY_EXIT)


def test_a_replayed_cell_that_shows_something_else_ends_the_session(sandbox: Sandbox) -> None:
    log = _session(sandbox, "import time; x = time.time_ns(); x", "1+1", "x", "y = 4", "y")
    assert log[1][1] == OVER
    assert log[2][1].text.startswith("error: NameError"), "it begins anew"
    assert log[4][1].text == "4" and not any(reply.failed for _, reply in log)


def test_a_replayed_cell_that_ends_the_interpreter_ends_the_session(sandbox: Sandbox) -> None:
    recorded = (ToolRequest("session", {"code": "raise SystemExit"}), ToolReply("", SandboxStatus.OK))
    assert _call(Calculator(session=True), "1", sandbox, [recorded]) == OVER


def test_a_cell_that_waits_for_too_long_is_nobodys_fault_for_sure(sandbox: Sandbox) -> None:
    reply = _call(Calculator(session=True), "import time; time.sleep(60)", sandbox, limits=Limits(cpu_s=1.0, wall_s=1.0))
    assert (reply.failed, reply.text, reply.sandbox_status) == (True, "", SandboxStatus.TIMEOUT_WALL)
    assert reply.blame is Blame.UNCLEAR


def test_random_numbers_are_the_rollouts_own_and_can_be_rebuilt(sandbox: Sandbox) -> None:
    cells = ("import random; random.random()", "random.random()")
    first, again, other = _session(sandbox, *cells), _session(sandbox, *cells), _session(sandbox, *cells, seed=6)
    assert _texts(first) == _texts(again) != _texts(other)
    generator = random.Random(5)
    assert _texts(first) == [repr(generator.random()), repr(generator.random())]


def test_a_cell_cannot_read_the_cells_behind_it_from_its_input(sandbox: Sandbox) -> None:
    assert _texts(_session(sandbox, "import sys; sys.stdin.read()", "1")) == ["''", "1"]


def test_junk_on_the_answer_channel_ends_the_session_and_nothing_else(sandbox: Sandbox) -> None:
    from rollbook.sandbox.job import ANSWERS_FD

    log = _session(sandbox, "x = 1", f"import os; _ = os.write({ANSWERS_FD}, b'junk\\n')", "x")
    assert not any(reply.failed for _, reply in log)
    assert log[1][1] == ToolReply("error: early_exit", SandboxStatus.EARLY_EXIT)
    assert log[2][1].text.startswith("error: NameError")


def test_the_output_of_a_cell_is_cut_the_same_way_each_time(sandbox: Sandbox) -> None:
    log = _session(sandbox, f"'a' * {calc.TEXT_MAX}", "1")
    assert log[0][1].text == "'" + "a" * (calc.TEXT_MAX - 1) and log[1][1].text == "1"
