"""Verdicts by assertions, in pairs of real sandboxes: what a test may see of a program, and who is blamed for what."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cheats import CHEATS, LIMITS, RAW_LINES
from verdict_support import HONEST, TESTS, Interrupted, check_invalid, check_not_paid, check_paid, source_that_writes

from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.observe import failpoints
from rollbook.sandbox.backends import make_backend
from rollbook.tasks.verdicts import Verdict, judge_asserts
from rollbook.tasks.verdicts.asserts import names_called

S = SandboxStatus


def judged(sandbox: Sandbox, source: str, limits: Limits = LIMITS, **options: int) -> Verdict:
    return judge_asserts(sandbox, source, TESTS, limits, **options)


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_is_not_paid(zygote: Sandbox, name: str) -> None:
    check_not_paid(judged(zygote, CHEATS[name].source, limits=CHEATS[name].limits), CHEATS[name].asserts)


@pytest.mark.parametrize("name", RAW_LINES)
def test_a_line_that_the_protocol_does_not_allow_is_an_invalid_result(zygote: Sandbox, name: str) -> None:
    check_invalid(judged(zygote, source_that_writes(RAW_LINES[name])))


@pytest.mark.parametrize("source", [HONEST, "print('noise')\n" + HONEST, "add = lambda a, b: b + a\n"])
def test_an_honest_program_is_paid_whatever_it_prints(zygote: Sandbox, source: str) -> None:
    check_paid(judged(zygote, source))


def test_a_partly_right_program_passes_that_part(zygote: Sandbox) -> None:
    verdict = judged(zygote, "def add(a, b): return 4 if a == b else 3")
    assert (verdict.passed, verdict.total, verdict.status, verdict.blame) == (2, 3, S.OK, Blame.MODEL)


@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("return (1, (2, 'x'))", "assert f() == (1, (2, 'x')) and isinstance(f(), tuple)"),
        ("return {1, (2, 3)}", "assert f() == {(2, 3), 1}"), ("return {frozenset([1])}", "assert f() == {frozenset([1])}"),
        ("return {1: 'a', (2, 3): None}", "assert f() == {(2, 3): None, 1: 'a'} and list(f()) == [1, (2, 3)]"),
        ("return b'\\x00\\xff'", "assert f() == b'\\x00\\xff'"), ("return 1 + 2j", "assert f().imag == 2.0"),
        ("return -2 ** 200", "assert f() == -(1 << 200)"), ("return float('nan')", "assert f() != f()"),
        ("return float('-inf')", "assert f() < -1e308"), ("return 0.1", "assert repr(f()) == '0.1'"),
        ("from decimal import Decimal\n  return Decimal('1.10')", "assert str(f()) == '1.10'"),
        ("from fractions import Fraction\n  return Fraction(1, 3)", "assert f() * 3 == 1"),
        ("return [[], [[None]], True]", "assert f() == [[], [[None]], True] and f()[2] is True"),
        ("from collections import Counter\n  return Counter('aab')", "assert f() == {'a': 2, 'b': 1}"),
        ("from collections import namedtuple\n  return namedtuple('P', 'x y')(1, 2)", "assert f() == (1, 2)"),
        ("return (i * i for i in range(4))", "assert list(f()) == [0, 1, 4, 9]"),
        ("return map(str, [1, 2])", "assert next(f()) == '1' and f() != ['1', '2']"),
        ("import re\n  return re.match('a', 'a')", "assert f() and f() is not None"),
        ("return 'ü\\ud800\\n'", "assert f() == 'ü\\ud800\\n'"),
        ("raise ValueError('no')", "try:\n  f()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False"),
        ("class Own(Exception): pass\n  raise Own('no')", "try:\n  f()\nexcept RuntimeError: pass\nelse: assert False"),
    ],
)  # fmt: skip
def test_a_test_sees_the_value_that_the_program_returned(zygote: Sandbox, body: str, test: str) -> None:
    verdict = judge_asserts(zygote, f"def f():\n  {body}", [test], LIMITS, names=["f"])
    assert verdict.right, verdict


@pytest.mark.parametrize("test", ["assert f() != 3", "assert f() > 3", "assert f() in [3]", "assert len(f())", "assert {f()}"])
def test_an_object_that_is_no_plain_value_fails_whatever_compares_it(zygote: Sandbox, test: str) -> None:
    source = (
        "class E:\n  __eq__ = __ne__ = __gt__ = __lt__ = __contains__ = lambda s, o: True\n  __hash__ = lambda s: 3\n"
        "  __len__ = lambda s: 1\ndef f(): return E()"
    )
    verdict = judge_asserts(zygote, source, [test], LIMITS)
    assert (verdict.passed, verdict.given) == (0, True), verdict


def test_arguments_arrive_with_their_types_and_by_name(zygote: Sandbox) -> None:
    source = "def f(x, *, key): return [type(x).__name__, sorted(map(type(key).__name__.__add__, x))]"
    tests = ["assert f(('b', 'a'), key={1}) == ['tuple', ['seta', 'setb']]"]
    assert judge_asserts(zygote, source, tests, LIMITS).right


def test_a_program_keeps_its_state_between_calls(zygote: Sandbox) -> None:
    source = "n = 0\ndef count():\n  global n\n  n += 1\n  return n"
    assert judge_asserts(zygote, source, ["assert count() == 1", "assert count() == 2"], LIMITS).right


def test_looser_equality_is_the_tests_own_affair(zygote: Sandbox) -> None:
    assert judged(zygote, "def add(a, b): return float(a + b)").right, "3.0 == 3, as the test says it"


def test_a_candidate_cannot_answer_for_both_sides_of_a_comparison(zygote: Sandbox) -> None:
    tests = ["assert set(f(1)) == set((1, 2))"]
    cheat = "def f(x): return [9]\ndef set(x): return 1\n"
    assert names_called(tests) == ["f"] and not judge_asserts(zygote, cheat, tests, LIMITS).right
    assert names_called(["assert sum(1, 2) == 3"], reference="def sum(a, b): return a + b") == ["sum"]


def test_the_tests_enter_the_judges_sandbox_only(zygote: Sandbox) -> None:
    watched = Interrupted(zygote)
    source = (
        "import gc\ndef add(a, b):\n"
        "  seen = any(''.join(['313', '37']) in str(o)[:4000] for o in gc.get_objects() if type(o) in (list, dict, tuple))\n"
        "  return 'seen' if seen else a + b"
    )
    verdict = judge_asserts(watched, source, ["assert add(1, 2) == 3 and add(31000, 300) == 31337 - 37"], LIMITS)
    assert verdict.right, verdict
    candidate = [program for program in watched.programs if program.source]
    assert len(candidate) == 1 and "31337" not in candidate[0].setup + candidate[0].source and not candidate[0].files


def test_where_infrastructure_fails_there_is_no_verdict(zygote: Sandbox) -> None:
    failpoints.arm("sandbox.before_spawn=raise~1")
    try:
        verdict = judged(zygote, HONEST)
    finally:
        failpoints.arm("")
    assert not verdict.given and verdict.blame is Blame.INFRA and verdict.evidence["attempts"] == 3
    assert judged(zygote, HONEST).right, "and in a fresh sandbox there is one"


@pytest.mark.parametrize("ended", [0, 1], ids=["judge", "candidate"])
def test_either_sandbox_being_lost_is_infrastructures_failure(zygote: Sandbox, ended: int) -> None:
    verdict = judged(Interrupted(zygote, {ended}), HONEST, attempts_max=1)
    assert (verdict.given, verdict.status, verdict.blame) == (False, S.INFRA_LOST, Blame.INFRA), verdict
    verdict = judged(Interrupted(zygote, {ended}), HONEST)
    assert verdict.right and verdict.evidence["attempts"] == 2


def test_a_judge_that_dies_is_infrastructures_failure(zygote: Sandbox) -> None:
    verdict = judge_asserts(zygote, HONEST, ["import os; os._exit(0)"], LIMITS, names=["add"], attempts_max=1)
    assert (verdict.given, verdict.status, verdict.blame) == (False, S.INFRA_LOST, Blame.INFRA), verdict


def test_a_judge_that_its_own_limits_end_is_nobodys_verdict(zygote: Sandbox) -> None:
    test = "x = add(1, 2)\nwhile True: x = [x] * 1000"
    verdict = judge_asserts(zygote, HONEST, [test], LIMITS)
    assert (verdict.given, verdict.status, verdict.blame) == (False, S.INFRA_LOST, Blame.UNCLEAR), verdict
    assert verdict.evidence["attempts"] == 2


def test_a_backend_that_is_closed_while_it_judges_gives_no_verdict() -> None:
    sandbox = Interrupted(make_backend("zygote", 2))
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(judged(sandbox, "import time\ndef add(a, b): time.sleep(60)")))
    thread.start()
    assert sandbox.started.wait(30.0)
    sandbox.close()
    thread.join(60.0)
    assert not verdicts[0].given and verdicts[0].blame is Blame.INFRA and verdicts[0].passed == 0


def test_verdicts_that_need_two_sandboxes_each_do_not_wait_for_each_other() -> None:
    sandbox = make_backend("zygote", 2)
    try:
        with ThreadPoolExecutor(6) as pool:
            verdicts = list(pool.map(lambda _: judged(sandbox, HONEST), range(12)))
    finally:
        sandbox.close()
    assert all(verdict.right and verdict.evidence["attempts"] == 1 for verdict in verdicts), verdicts


def test_one_slot_is_refused_with_the_way_out() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        with pytest.raises(ConfigError, match=r"sandbox\.slots = 1.*at least 2"):
            judged(sandbox, HONEST)
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("tests", "imports"),
    [
        ([], ""), (["assert 1 == 1"], ""), (["assert add(1, 2) =="], ""), (["assert add(1, 2) == 3"], "import no_such_module"),
        (["assert add(len, 2) == 3"], ""), (["assert add([[x for x in range(3)]], iter(int, 1)) == 3"], ""),
        (["assert add(1, 2) == 3", "return 3"], ""),
    ],
)  # fmt: skip
def test_tests_that_cannot_run_are_the_tasks_fault_and_never_a_zero(zygote: Sandbox, tests: list[str], imports: str) -> None:
    with pytest.raises(TaskError):
        judge_asserts(zygote, HONEST, tests, LIMITS, imports=imports)


CHAIN = "def nest(x): return [x]\ndef flat(x): return 1\ndef deep(n):\n  v = []\n  for _ in range(n): v = [v]\n  return v\n"


@pytest.mark.parametrize("test", [
    "assert flat(deep(60)) == 1", "x = []\nfor _ in range(99): x = nest(x)", "assert flat([deep(30), [[deep(59)]]]) == 1",
    "assert flat(x={'a': (deep(58),)}) == 1",
])  # fmt: skip
def test_a_value_that_is_too_deep_to_be_passed_back_is_the_programs_failure(zygote: Sandbox, test: str) -> None:
    verdict = judge_asserts(zygote, CHAIN, [test], LIMITS, names=["nest", "flat", "deep"])
    assert (verdict.status, verdict.blame, verdict.passed) == (S.INVALID_RESULT, Blame.MODEL, 0), verdict
    assert "60 deep" in verdict.reason


def test_a_value_that_a_test_nested_too_deeply_itself_is_the_tasks_fault(zygote: Sandbox) -> None:
    own = "x = {}\nfor _ in range(70): x = [x]\nassert flat(x) == 1"
    assert judge_asserts(zygote, CHAIN, ["assert flat(deep(50)) == 1"], LIMITS, names=["flat", "deep"]).right
    for value, source in (("[]", CHAIN), ("deep(3)", CHAIN)):
        with pytest.raises(TaskError, match="60 deep"):
            judge_asserts(zygote, source, [own.format(value)], LIMITS, names=["flat", "deep"])
    with pytest.raises(TaskError, match="more than"):
        judge_asserts(zygote, CHAIN, ["deep(40)\nflat(iter(range(100_001)))"], LIMITS, names=["flat", "deep"])
