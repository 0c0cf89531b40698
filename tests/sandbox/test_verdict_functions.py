"""Verdicts by calls, in real sandboxes: cheats are not paid, honest programs are, and nobody is blamed for what failed here."""

from __future__ import annotations

import threading

import pytest
from cheats import CHEATS, LIMITS, RAW_LINES, WORD
from verdict_support import CASES, HONEST, Interrupted, check_invalid, check_not_paid, check_paid, source_that_writes

from rollbook.core.errors import TaskError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.observe import failpoints
from rollbook.sandbox.backends import make_backend
from rollbook.tasks.verdicts import Case, Verdict, judge_functions

S = SandboxStatus


def judged(sandbox: Sandbox, source: str, limits: Limits = LIMITS, **options: int) -> Verdict:
    return judge_functions(sandbox, source, "add", CASES, limits, **options)


def test_there_are_at_least_twenty_cheats() -> None:
    assert len(CHEATS) >= 20


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_is_not_paid(zygote: Sandbox, name: str) -> None:
    check_not_paid(judged(zygote, CHEATS[name].source, limits=CHEATS[name].limits), CHEATS[name].calls)


@pytest.mark.parametrize("name", RAW_LINES)
def test_a_line_that_the_protocol_does_not_allow_is_an_invalid_result(zygote: Sandbox, name: str) -> None:
    check_invalid(judged(zygote, source_that_writes(RAW_LINES[name])))


@pytest.mark.parametrize(
    "source",
    [
        HONEST, "print('noise')\n" + HONEST, "add = lambda a, b: b + a\n", "import math\nadd = lambda *v: sum(v)\n",
        "class Adder:\n  def __call__(self, a, b): return a + b\nadd = Adder()\n",
        "class I(int): pass\ndef add(a, b): return I(a + b)\n",
    ],
)  # fmt: skip
def test_an_honest_program_is_paid_whatever_it_prints(zygote: Sandbox, source: str) -> None:
    check_paid(judged(zygote, source))


def test_a_partly_right_program_passes_that_part(zygote: Sandbox) -> None:
    verdict = judged(zygote, "def add(a, b): return 4 if a == b else 3")
    assert (verdict.passed, verdict.total, verdict.status, verdict.blame) == (2, 3, S.OK, Blame.MODEL)


def test_a_program_that_raises_in_one_case_is_asked_the_others(zygote: Sandbox) -> None:
    verdict = judged(zygote, "def add(a, b):\n  if a == 1: raise KeyError('one')\n  return a + b")
    assert (verdict.passed, verdict.status, verdict.blame) == (2, S.RUNTIME_ERROR, Blame.MODEL) and "KeyError" in verdict.reason


def test_a_program_that_ends_keeps_what_it_had_passed(zygote: Sandbox) -> None:
    verdict = judged(zygote, "import os\ndef add(a, b):\n  if a == 10: os._exit(0)\n  return a + b")
    assert (verdict.passed, verdict.total, verdict.status) == (2, 3, S.EARLY_EXIT)


@pytest.mark.parametrize(
    ("expected", "body", "strict", "loose"),
    [
        (1, "1", True, True), (1, "True", False, False), (1, "1.0", False, True), (1.0, "1", False, True),
        (True, "1", False, False), ([1, 2], "(1, 2)", False, True), ([1, 2], "[2, 1]", False, False),
        ({"a": 1, "b": [2]}, "{'b': [2], 'a': 1}", True, True), ({"a": 1}, "{'a': True}", False, False),
        (None, "None", True, True), (None, "0", False, False), ("3", "3", False, False), (0.3, "0.1 + 0.2", False, True),
        pytest.param(10**400, "1.0", False, False, id="large"), pytest.param(10**400, "10**400 + 1", False, False, id="next"),
        (0.5, "10 ** 400", False, False), (float("inf"), "10 ** 400", False, False), ([1.0, 2**99], "[1, 2**99]", False, True),
        (float("nan"), "float('nan')", False, False), (10**40, "10 ** 40", True, True), ([], "()", False, True),
        ({"1": 2}, "{1: 2}", False, False),
    ],
)  # fmt: skip
def test_comparison_is_strict_unless_the_task_says_otherwise(
    zygote: Sandbox, expected: object, body: str, strict: bool, loose: bool
) -> None:
    source, cases = f"def f(): return {body}", [Case([], expected)]
    assert judge_functions(zygote, source, "f", cases, LIMITS).right is strict
    assert judge_functions(zygote, source, "f", cases, LIMITS, numbers="loose", sequences="loose").right is loose


def test_expected_values_and_later_inputs_are_not_in_the_candidates_sandbox(zygote: Sandbox) -> None:
    source = (
        "import gc, os, select\ndef add(a, b):\n"
        "  if any(''.join(['313', '37']) in str(o)[:4000] for o in gc.get_objects() if type(o) in (list, dict, tuple)):\n"
        "    return 'expected'\n"
        "  waiting = select.poll()\n"
        "  for fd in range(5, 40):\n"
        "    try: os.fstat(fd); waiting.register(fd, select.POLLIN)\n"
        "    except OSError: pass\n"
        "  if a == 1 and any(how & select.POLLIN for _, how in waiting.poll(200)): return 'more input'\n"
        "  return a + b"
    )
    verdict = judge_functions(zygote, source, "add", [Case([1, 2], 3), Case([31000, 337], 31337), Case([5, 6], 11)], LIMITS)
    assert verdict.right, verdict
    watched = Interrupted(zygote)
    assert judge_functions(watched, HONEST, "add", [Case([31000, 337], 31337)], LIMITS).right
    assert "31337" not in str(watched.programs)


def test_a_word_that_ties_an_answer_to_its_question_is_never_used_twice(zygote: Sandbox) -> None:
    source = WORD + "words = set()\ndef n_seen():\n  words.add(word())\n  return len(words)"
    assert judge_functions(zygote, source, "n_seen", [Case([], n) for n in (1, 2, 3, 4)], LIMITS).right


def test_where_infrastructure_fails_there_is_no_verdict(zygote: Sandbox) -> None:
    failpoints.arm("sandbox.before_spawn=raise~1")
    try:
        verdict = judged(zygote, HONEST)
    finally:
        failpoints.arm("")
    assert not verdict.given and verdict.blame is Blame.INFRA and verdict.evidence["attempts"] == 3
    assert judged(zygote, HONEST).right, "and in a fresh sandbox there is one"


def test_a_sandbox_that_is_lost_once_is_replaced_and_the_verdict_stands(zygote: Sandbox) -> None:
    verdict = judged(Interrupted(zygote, {0}), HONEST)
    assert verdict.right and verdict.evidence["attempts"] == 2
    verdict = judged(Interrupted(zygote, {0, 1, 2}), HONEST)
    assert (verdict.given, verdict.blame, verdict.evidence["attempts"]) == (False, Blame.INFRA, 3)
    assert judged(Interrupted(zygote, {0}), HONEST, attempts_max=1).blame is Blame.INFRA


def test_a_backend_that_is_closed_while_it_judges_gives_no_verdict() -> None:
    sandbox = Interrupted(make_backend("zygote", 2))
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(judged(sandbox, "import time\ndef add(a, b): time.sleep(60)")))
    thread.start()
    assert sandbox.started.wait(30.0)
    sandbox.close()
    thread.join(60.0)
    assert not verdicts[0].given and verdicts[0].blame is Blame.INFRA and verdicts[0].passed == 0


def test_cases_that_cannot_be_judged_are_the_tasks_fault(zygote: Sandbox) -> None:
    for cases in ([], [Case([len], 3)], [Case([1], object())], [Case([1], iter([1]))]):
        with pytest.raises(TaskError, match="add"):
            judge_functions(zygote, HONEST, "add", cases, LIMITS)
