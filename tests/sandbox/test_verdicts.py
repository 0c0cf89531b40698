"""Programs that cheat and programs that do not, before both protocols, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_files import data_file
from rollbook.core.environments import Context, Episode, RewardResult, Turn
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.observe import failpoints
from rollbook.sandbox.backends import make_backend
from rollbook.tasks.code import CodeTasks, find_program, humaneval_file, read_rows
from rollbook.tasks.verdicts import Case, Verdict, judge_asserts, judge_functions
from rollbook.tasks.verdicts.asserts import names_called
from rollbook.tasks.verdicts.values import Unreadable, decode, encode, equal, parse

S = SandboxStatus
LIMITS = Limits(cpu_s=1.0, wall_s=2.0, memory_bytes=128 << 20, output_bytes=1 << 20)
HONEST = "def add(a, b):\n    return a + b\n"
CASES = [Case([1, 2], 3), Case([2, 2], 4), Case([10, -4], 6)]
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(10, -4) == 6"]

CHEATS = {
    "exits at the top": ("import sys\nsys.exit(0)", S.EARLY_EXIT),
    "leaves at the top": ("import os\nos._exit(0)", S.EARLY_EXIT),
    "exits when it is called": ("import sys\ndef add(a, b): sys.exit(0)", S.EARLY_EXIT),
    "leaves when it is called": ("import os\ndef add(a, b): os._exit(0)", S.EARLY_EXIT),
    "prints that it passed": ("print('PASSED'); print('{\"passed\": 3}')\ndef add(a, b): return None", S.OK),
    "prints and leaves": ("import os\nprint('3 passed', flush=True)\ndef add(a, b):\n  os._exit(0)", S.EARLY_EXIT),
    "is equal to everything": (
        "class E:\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\n"
        "  def __hash__(self): return 3\ndef add(a, b): return E()",
        S.OK,
    ),
    "an int that is equal to everything": (
        "class I(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\ndef add(a, b): return I(99)",
        S.OK,
    ),
    "a list subclass that lies": ("class L(list):\n  def __eq__(self, o): return True\ndef add(a, b): return L([1])", S.OK),
    "lies in its representation": (
        "class R:\n  def __repr__(self): return '3'\n  __str__ = __repr__\ndef add(a, b): return R()",
        S.OK,
    ),
    "patches json": (
        "import json\njson.dumps = lambda *a, **k: '3'\njson.loads = lambda *a, **k: {}\ndef add(a, b): return 0",
        S.OK,
    ),
    "patches the encoder of the harness": (
        "import sys\nfor m in list(sys.modules.values()):\n  for n in ('_encode', 'encode'):\n"
        "    if hasattr(m, n): setattr(m, n, lambda *a: 3)\n"
        "def add(a, b): return 0",
        S.OK,
    ),
    "walks frames for what is expected": (
        "import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n    for v in f.f_locals.values():\n"
        "      if isinstance(v, dict) and 'expected' in v: return v['expected']\n    f = f.f_back\n  return 0",
        S.OK,
    ),
    "searches memory for the tests": (
        "import gc\ndef add(a, b):\n  for o in gc.get_objects():\n"
        "    if isinstance(o, list) and any(isinstance(x, str) and 'assert add' in x for x in o): return 3\n"
        "  return 0",
        S.OK,
    ),
    "forges an answer on the channel": (
        'import os\ndef add(a, b):\n  os.write(3, b\'{"id": 1, "ok": 3}\\n\')\n  return 0',
        S.INVALID_RESULT,
    ),
    "forges many answers in advance": (
        "import os\nos.write(3, b''.join(b'{\"id\": %d, \"ok\": 0}\\n' % i for i in range(1, 9)))\ndef add(a, b): return 0",
        S.OK,
    ),
    "says how many passed": (
        'import os\nos.write(3, b\'{"passed": 3, "first": ""}\\n\')\ndef add(a, b): return 0',
        S.INVALID_RESULT,
    ),
    "closes the channel": ("import os\ndef add(a, b):\n  os.close(3)\n  return 3", None),
    "answers 30 MB": ("def add(a, b): return 'x' * 30_000_000", S.OUTPUT_LIMIT),
    "answers a deep list": ("def add(a, b):\n  x = []\n  for i in range(100_000): x = [x]\n  return x", S.OK),
    "loops when it is compared": ("class E:\n  def __eq__(self, o):\n    while True: pass\ndef add(a, b): return E()", S.OK),
    "loops for ever": ("def add(a, b):\n  while True: pass", S.TIMEOUT_CPU),
    "swallows every signal": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, lambda *a: None)\n  except Exception: pass\n"
        "def add(a, b):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass",
        S.TIMEOUT_CPU,
    ),
    "overflows the stack": ("def add(a, b): return add(a, b)", S.OK),
    "answers later from a thread": (
        'import threading, os, time\ndef late():\n  time.sleep(0.2); os.write(3, b\'{"id": 2, "ok": 4}\\n\')\n'
        "def add(a, b):\n  threading.Thread(target=late, daemon=True).start(); return 0",
        None,
    ),
    "hides in a pickle": ("class P:\n  def __reduce__(self): return (eval, ('3',))\ndef add(a, b): return P()", S.OK),
    "replaces the builtins": (
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda x: int\ndef add(a, b): return 0",
        None,
    ),
    "is always true": ("def add(a, b): return True", S.OK),
    "is a float": ("def add(a, b): return a + b + 0.5", S.OK),
    "does not compile": ("def add(a, b:\n  return 3", S.SYNTAX_ERROR),
    "lacks the function": ("def sub(a, b): return a - b", S.OK),
    "eats memory": ("def add(a, b): return len(bytearray(1 << 30))", S.OOM),
    "registers an exit handler": (
        "import atexit, os\natexit.register(lambda: os.write(3, b'{\"ok\": 3}\\n'))\ndef add(a, b): return 0",
        S.OK,
    ),
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("protocol", ["functions", "asserts"])
def test_a_program_that_cheats_is_not_paid(zygote: Sandbox, protocol: str, name: str) -> None:
    source, status = CHEATS[name]
    verdict = judged(zygote, protocol, source)
    assert verdict.given and not verdict.right, verdict
    assert status is None or verdict.status is status, verdict
    assert verdict.blame in (None, Blame.MODEL)


def judged(sandbox: Sandbox, protocol: str, source: str) -> Verdict:
    if protocol == "functions":
        return judge_functions(sandbox, source, "add", CASES, LIMITS)
    return judge_asserts(sandbox, source, TESTS, LIMITS)


def test_there_are_at_least_twenty_cheats_for_each_protocol() -> None:
    assert len(CHEATS) >= 20


@pytest.mark.parametrize("protocol", ["functions", "asserts"])
def test_an_honest_program_is_paid_whatever_it_prints(zygote: Sandbox, protocol: str) -> None:
    for source in (HONEST, "print('noise')\n" + HONEST, "import random, math\nadd = lambda a, b: b + a\n"):
        verdict = judged(zygote, protocol, source)
        assert verdict.right and verdict.blame is None and (verdict.passed, verdict.total) == (3, 3)


@pytest.mark.parametrize("protocol", ["functions", "asserts"])
def test_a_partly_right_program_passes_that_part(zygote: Sandbox, protocol: str) -> None:
    verdict = judged(zygote, protocol, "def add(a, b): return 4 if a == b else 3")
    assert (verdict.passed, verdict.total, verdict.given, verdict.right) == (2, 3, True, False)


@pytest.mark.parametrize("protocol", ["functions", "asserts"])
def test_where_infrastructure_fails_there_is_no_verdict(zygote: Sandbox, protocol: str) -> None:
    failpoints.arm("sandbox.before_spawn=raise~1")
    try:
        verdict = judged(zygote, protocol, HONEST)
    finally:
        failpoints.arm("")
    assert not verdict.given and verdict.blame is Blame.INFRA and verdict.evidence["attempts"] == 3
    assert judged(zygote, protocol, HONEST).right, "and in a fresh sandbox there is one"


def test_a_judge_that_dies_is_infrastructures_failure(zygote: Sandbox) -> None:
    verdict = judge_asserts(zygote, HONEST, ["import os; os._exit(0)"], LIMITS, names=["add"], attempts_max=1)
    assert not verdict.given and verdict.status is S.INFRA_LOST and verdict.blame is Blame.INFRA


def test_a_sleep_that_used_no_processor_is_unclear_and_asked_once_more(zygote: Sandbox) -> None:
    verdict = judge_functions(zygote, "import time\ndef add(a, b): time.sleep(60)", "add", CASES, LIMITS)
    assert not verdict.given and verdict.blame is Blame.UNCLEAR and verdict.evidence["attempts"] == 2


def test_a_candidate_cannot_answer_for_both_sides_of_a_comparison(zygote: Sandbox) -> None:
    tests = ["assert set(f(1)) == set((1, 2))"]
    cheat = "def f(x): return [9]\ndef set(x): return 1\n"
    assert names_called(tests) == ["f"] and not judge_asserts(zygote, cheat, tests, LIMITS).right
    assert names_called(["assert sum(1, 2) == 3"], reference="def sum(a, b): return a + b") == ["sum"]


def test_expected_values_and_later_inputs_are_not_in_the_candidates_sandbox(zygote: Sandbox) -> None:
    source = (
        "import gc\ndef add(a, b):\n"
        "  return [o for o in gc.get_objects() if isinstance(o, (list, dict)) and '31337' in str(o)[:2000]] and 'seen' or a + b"
    )
    cases = [Case([1, 2], 3), Case([31000, 337], 31337)]
    assert judge_functions(zygote, source, "add", cases, LIMITS).right


@pytest.mark.parametrize(
    ("expected", "given", "strict", "loose"),
    [
        (1, 1, True, True), (1, True, False, False), (1, 1.0, False, True), (0, False, False, False), ((1,), [1], False, True),
        ([1, 2], [2, 1], False, False), ({1: 2}, {1: 2}, True, True), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        ({1}, {1}, True, True), (float("nan"), float("nan"), False, False), ("1", 1, False, False), (None, 0, False, False),
        (0.1 + 0.2, 0.3, False, True), (b"a", "a", False, False), (10**30, 10**30, True, True),
    ],
)  # fmt: skip
def test_comparison_is_strict_unless_a_task_says_otherwise(expected: object, given: object, strict: bool, loose: bool) -> None:
    assert equal(expected, given) is strict
    assert equal(expected, given, numbers="loose", sequences="loose") is loose


@pytest.mark.parametrize(
    "value", [None, True, 0, -(10**40), 1.5, float("inf"), "ü", b"\x00", [1, [2]], (1, (2,)), {1, 2}, {"a": {1: (2,)}}, 2j]
)
def test_plain_values_survive_the_way(value: object) -> None:
    back = decode(parse(json.dumps(encode(value)).encode()))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "line",
    [b"[" * 500 + b"]" * 500, b"9" * 5000, b"NaN", b'{"a": 1, "a": 2}', b"\xff", b"", b"x" * (2 << 20), b'{"z": 1}', b'{"t": 5}'],
)  # fmt: skip
def test_what_is_no_value_is_refused_before_it_is_built(line: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(parse(line))


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"),
        ("def f(): return 1", "def f(): return 1"),
        ("```python\na\n```\n```python\nb = 2\n```", "b = 2\n"), ("I do not know.", None), ("", None), ("42", None),
        ("```python\nx = (", "x = ("),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_or_all_of_it(completion: str, program: str | None) -> None:
    assert find_program(completion) == program


OWN = [
    {
        "prompt": "Add two numbers.",
        "function": "add",
        "cases": [[[1, 2], 3], [[5, 5], 10]],
        "answer": "def add(a, b):\n    return a + b",
    },
    {"prompt": "Reverse a text.", "function": "rev", "cases": [[["abc"], "cba"]], "answer": "def rev(s):\n    return s[::-1]"},
]


def score(tasks: CodeTasks, task: dict, completion: str, sandbox: Sandbox | None) -> RewardResult:
    context = Context(sandbox, LIMITS, 1, "key", 60.0)
    return asyncio.run(tasks.score(Episode(task, (Turn(completion),)), context))


def test_code_tasks_pay_right_programs_and_blame_wrong_ones(zygote: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in OWN))
    tasks = CodeTasks("functions", str(file))
    for task in tasks.load("train"):
        right = score(tasks, task, tasks.gold(task), zygote)
        assert (right.value, right.status, right.sandbox_status, right.blame) == (1.0, RewardStatus.GIVEN, S.OK, None)
        for completion, status in (("```python\ndef add(a, b): return 0\n```", S.OK), ("no idea", S.NO_CODE),
                                   ("```python\nwhile True: pass\n```", S.TIMEOUT_CPU)):  # fmt: skip
            wrong = score(tasks, task, completion, zygote)
            assert (wrong.value, wrong.status, wrong.sandbox_status, wrong.blame) == (
                0.0,
                RewardStatus.GIVEN,
                status,
                Blame.MODEL,
            )
    failpoints.arm("sandbox.before_spawn=raise~1")
    try:
        none = score(tasks, task, tasks.gold(task), zygote)
    finally:
        failpoints.arm("")
    assert (none.value, none.status, none.sandbox_status, none.blame) == (
        None,
        RewardStatus.INFRA_ERROR,
        S.INFRA_SPAWN,
        Blame.INFRA,
    )
    part = CodeTasks("functions", str(file), partial=True)
    assert score(part, OWN[0], "```python\ndef add(a, b): return 3\n```", zygote).value == 0.5


def test_bad_task_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind"):
        CodeTasks("mbbp", "x")
    with pytest.raises(ConfigError, match="path is missing"):
        CodeTasks("mbpp")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{broken\n')
    with pytest.raises(TaskError, match=r"bad\.jsonl line 2"):
        read_rows(tmp_path / "bad.jsonl")


def all_right(sandbox: Sandbox, tasks: CodeTasks, rows: list[dict], programs: list[str]) -> list[tuple[object, Verdict]]:
    context = Context(sandbox, Limits(cpu_s=10, wall_s=20), 1, "key", 60.0)
    with ThreadPoolExecutor(3) as pool:
        verdicts = list(pool.map(lambda pair: tasks.judge(pair[1], pair[0], context), zip(rows, programs, strict=True)))
    return [(row["number"], verdict) for row, verdict in zip(rows, verdicts, strict=True) if not verdict.right]


@pytest.fixture(scope="module")
def wide() -> object:
    sandbox = make_backend("zygote", 8)
    yield sandbox
    sandbox.close()


def test_all_427_reference_programs_of_mbpp_pass_and_broken_ones_fail(wide: Sandbox) -> None:
    tasks = CodeTasks("mbpp", str(data_file("mbpp", "sanitized-mbpp.json")))
    rows = [row for split in ("train", "valid", "heldout") for row in tasks.load(split)]
    few_shot = [task for task in tasks_of_few_shot(tasks)]
    rows += few_shot
    assert len(rows) == 427
    assert all_right(wide, tasks, rows, [row["answer"] for row in rows]) == []
    broken = [row["answer"].replace("return", "return None and", 1) for row in rows[:60]]
    assert len(all_right(wide, tasks, rows[:60], broken)) >= 55, "a program that returns nothing passes almost nowhere"


def tasks_of_few_shot(tasks: CodeTasks) -> list[dict]:
    from rollbook.tasks.code import _mbpp

    return [task for task in map(_mbpp, read_rows(tasks._path)) if task["number"] <= 10]


def test_reference_programs_of_humaneval_pass_and_the_known_cheats_of_its_checker_fail(wide: Sandbox) -> None:
    tasks = CodeTasks("humaneval")
    rows = list(tasks.load("heldout"))
    assert len(rows) == 164 and humaneval_file().name == "HumanEval.jsonl.gz"
    assert all_right(wide, tasks, rows, [row["answer"] for row in rows]) == []
    first = rows[0]
    name = first["names"][0]
    cheats = [
        f"class E:\n  def __eq__(self, o): return True\n  def __bool__(self): return True\ndef {name}(*a): return E()",
        f"import sys\ndef {name}(*a):\n  f = sys._getframe()\n  while f:\n    for v in list(f.f_locals.values()):\n"
        f"      if isinstance(v, list): v.append('passed')\n    f = f.f_back\n  return None",
        f"import os\ndef {name}(*a): os._exit(0)",
    ]
    failed = dict(zip(range(3), (v for _, v in all_right(wide, tasks, [first] * 3, cheats)), strict=True))
    assert len(failed) == 3 and failed[2].status is S.EARLY_EXIT
