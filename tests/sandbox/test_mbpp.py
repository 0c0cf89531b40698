"""Tasks in the shape of MBPP: right programs are paid, wrong ones are not, and the sandboxes agree with plain Python."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_files import data_file
from rollbook.core.environments import Context
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.sandbox.backends import make_backend
from rollbook.tasks import mbpp
from rollbook.tasks.code import CodeTasks, read_rows
from rollbook.tasks.verdicts import Verdict

OWN = Path(__file__).parents[1] / "data" / "mbpp_shape.jsonl"
LIMITS = Limits(cpu_s=10.0, wall_s=60.0)
QUICK = Limits(cpu_s=3.0, wall_s=60.0)
MUTANTS = 90
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # published programs have them

_PLAIN = """
import contextlib, io, json, signal, sys
def stop(*_): raise BaseException("time")
signal.signal(signal.SIGVTALRM, stop)
results = []
for program, imports, tests in json.load(sys.stdin):
    space, passed = {"__name__": "program"}, 0
    for test in tests:
        signal.setitimer(signal.ITIMER_VIRTUAL, 2.0)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(imports, space)
                exec(program, space)
                exec(test, space)
            passed += 1
        except BaseException as error:
            if str(error) == "time":
                passed = None
                break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    results.append(passed)
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def wide() -> Iterator[Sandbox]:
    sandbox = make_backend("zygote", 8)
    yield sandbox
    sandbox.close()


def rows_of(tasks: CodeTasks) -> list[dict]:
    return [row for split in mbpp.SPLITS for row in tasks.load(split)]


def judge_all(
    sandbox: Sandbox, tasks: CodeTasks, rows: list[dict], programs: list[str], limits: Limits = LIMITS
) -> list[Verdict]:  # fmt: skip
    context = Context(sandbox, limits, 1, "key", 60.0)
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda pair: tasks.judge(pair[1], pair[0], context), zip(rows, programs, strict=True)))


def test_right_programs_of_our_own_tasks_pass_and_subtly_wrong_ones_do_not(wide: Sandbox) -> None:
    tasks = CodeTasks("mbpp", str(OWN))
    rows, wrong = rows_of(tasks), {row["task_id"]: row["wrong"] for row in read_rows(OWN)}
    assert len(rows) == len(wrong) == 12
    for row, verdict in zip(rows, judge_all(wide, tasks, rows, [row["answer"] for row in rows]), strict=True):
        assert verdict.right, (row["number"], verdict)
    for row, verdict in zip(rows, judge_all(wide, tasks, rows, [wrong[row["number"]] for row in rows]), strict=True):
        assert verdict.blame is Blame.MODEL and verdict.passed < verdict.total, (row["number"], verdict)


def test_tasks_are_split_by_their_published_numbers(tmp_path: Path) -> None:
    tasks = CodeTasks("mbpp", str(OWN))
    numbers = {split: [row["number"] for row in tasks.load(split)] for split in ("prompt", "heldout", "valid", "train")}
    assert numbers == {"prompt": [3], "heldout": [12, 13, 14, 15, 16], "valid": [512], "train": [601, 602, 603, 604, 605]}
    for number, split in ((1, "prompt"), (10, "prompt"), (11, "heldout"), (510, "heldout"), (511, "valid"), (600, "valid"),
                          (601, "train"), (974, "train")):  # fmt: skip
        assert mbpp.split_of({"task_id": number}) == split
    with pytest.raises(ConfigError, match="'test'.*heldout"):
        tasks.load("test")
    file = tmp_path / "mbpp.jsonl"
    broken = {"task_id": 700, "text": "t", "code": "def (", "test_list": ["x"]}
    for row in ({"task_id": 975}, {"task_id": 700, "code": "x"}, broken):
        file.write_text(json.dumps(row))
        with pytest.raises(TaskError, match=r"mbpp\.jsonl row 1"):
            CodeTasks("mbpp", str(file)).load("train")


def test_the_unsanitised_shape_is_read_as_well(tmp_path: Path, wide: Sandbox) -> None:
    row = {
        "task_id": 700, "text": "Write a function to double.", "code": "def double(x):\r\n  return 2 * x",
        "challenge_test_list": [], "test_setup_code": "import math", "test_list": ["assert double(math.floor(2.5)) == 4"],
    }  # fmt: skip
    file = tmp_path / "mbpp.jsonl"
    file.write_text(json.dumps(row))
    tasks = CodeTasks("mbpp", str(file))
    (task,) = tasks.load("train")
    assert row["test_list"][0] in task["prompt"] and "math.floor" in task["prompt"]
    assert judge_all(wide, tasks, [task], [task["answer"]])[0].right


def test_all_427_published_reference_programs_pass(wide: Sandbox) -> None:
    tasks = CodeTasks("mbpp", str(data_file("mbpp", "sanitized-mbpp.json")))
    rows = rows_of(tasks)
    assert len(rows) == 427 and len(list(tasks.load("heldout"))) > len(list(tasks.load("train"))) > 100
    verdicts = judge_all(wide, tasks, rows, [tasks.program_of(tasks.gold(row), row) or "" for row in rows])
    assert [(row["number"], verdict) for row, verdict in zip(rows, verdicts, strict=True) if not verdict.right] == []


def test_changed_reference_programs_get_the_verdict_that_plain_python_gives_them(wide: Sandbox) -> None:
    tasks = CodeTasks("mbpp", str(data_file("mbpp", "sanitized-mbpp.json")))
    changed = [(row, source) for row in rows_of(tasks) if (source := mutant(row["answer"], row["number"])) is not None]
    changed = changed[:: max(1, len(changed) // MUTANTS)]
    rows, programs = [row for row, _ in changed], [source for _, source in changed]
    asked = json.dumps([[source, row["imports"], row["tests"]] for row, source in changed])
    ran = subprocess.run([sys.executable, "-c", _PLAIN], input=asked, capture_output=True, text=True, timeout=100, check=True)
    n_wrong = n_slow = 0
    for row, source, passed, verdict in zip(
        rows, programs, json.loads(ran.stdout), judge_all(wide, tasks, rows, programs, QUICK), strict=True
    ):
        said = (row["number"], source, passed, verdict)
        if passed is None:  # too slow, or endless: which of them is not known
            n_slow += 1
        elif verdict.status in (SandboxStatus.OK, SandboxStatus.RUNTIME_ERROR):
            assert verdict.passed == passed, said
        else:
            assert not verdict.right and passed < len(row["tests"]), said
        n_wrong += not verdict.right
    assert len(rows) >= MUTANTS and n_slow <= len(rows) // 10
    assert n_wrong >= 0.7 * len(rows), "most changes are found by the published tests"


_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutant(source: str, number: int) -> str | None:
    """``source`` with one comparison, operation or constant changed, which one ``number`` decides; None where there is none."""
    tree = ast.parse(source)
    places: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            places.append((node, "ops"))
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
            places.append((node, "op"))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            places.append((node, "value"))
    if not places:
        return None
    node, what = places[number % len(places)]
    if what == "ops":
        node.ops[0] = _SWAPPED[type(node.ops[0])]()  # type: ignore[attr-defined]
    elif what == "op":
        node.op = _SWAPPED[type(node.op)]()  # type: ignore[attr-defined]
    else:
        node.value += 1  # type: ignore[attr-defined]
    return ast.unparse(tree)
