"""Code tasks as an environment: the program in a completion, what a verdict is worth, and task files that are wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from verdict_support import Interrupted

from rollbook.core.environments import Context, Episode, RewardResult, Turn
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.observe import failpoints
from rollbook.sandbox.backends import make_backend
from rollbook.tasks.code import PROGRAM_CHARS_MAX, CodeTasks, find_program, read_rows
from rollbook.tasks.environment import complete

S = SandboxStatus
LIMITS = Limits(cpu_s=0.6, wall_s=15.0, memory_bytes=128 << 20)
OWN = [
    {"prompt": "Add two numbers.", "function": "add", "cases": [[[1, 2], 3], [[5, 5], 10]],
     "answer": "def add(a, b):\n    return a + b"},
    {"prompt": "Reverse a text.", "function": "rev", "cases": [[["abc"], "cba"]], "answer": "def rev(s):\n    return s[::-1]",
     "split": "heldout"},
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in OWN) + "\n\n")
    return path


def score(
    tasks: CodeTasks, completion: str, sandbox: Sandbox | None, task: dict | None = None, limits: Limits = LIMITS
) -> RewardResult:  # fmt: skip
    context = Context(sandbox, limits, 1, "key", 60.0)
    return asyncio.run(complete(tasks, "code").score(Episode(task or OWN[0], (Turn(completion),)), context))


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"),
        ("```py\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```Python3\nx = 1\n```", "x = 1\n"), ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"), ("def f(): return 1", "def f(): return 1"),
        ("```python\na\n```\n```python\nb = 2\n```", "b = 2\n"), ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```text\nnot this\n```\nand\n```python\nx = 2\n```", "x = 2\n"), ("```text\nnot this\n```", None),
        ("```python\nx = (", "x = ("), ("```python\n\n```", None), ("```python", None), ("use ``` here", None),
        ("I do not know.", None), ("", None), ("  \n", None), ("42", None), ("x = '\0'", None), ("(" * 5000, None),
        ("-" * 100_000 + "1", None), ("x = 1\n#" + "x" * PROGRAM_CHARS_MAX, None),
        ("The answer:\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
    ],
)  # fmt: skip
def test_the_program_is_the_last_python_block_or_all_of_it(completion: str, program: str | None) -> None:
    assert find_program(completion) == program


@pytest.mark.parametrize("line", ["~" * 200_000 + "`", "~~~" + " " * 200_000 + "`", "~~~" + "a" * 200_000 + "`"])
def test_a_line_that_is_nearly_a_fence_takes_no_quadratic_time(line: str) -> None:
    began = time.process_time()
    assert find_program(line) is None
    assert time.process_time() - began < 1.0


def test_right_programs_are_paid_and_wrong_ones_are_not_and_say_why(zygote: Sandbox, file: Path) -> None:
    tasks = CodeTasks(kind="functions", path=str(file))
    (task,) = tasks.load("train")
    right = score(tasks, tasks.gold(task), zygote)
    assert (right.value, right.status, right.sandbox_status, right.blame) == (1.0, RewardStatus.GIVEN, S.OK, None)
    assert right.parts == {"passed": 2.0, "total": 2.0} and json.loads(right.evidence)["backend"] == "zygote"
    for body, passed, status in (
        ("def add(a, b): return 3", 1, S.OK), ("def add(a, b): raise ValueError(a)", 0, S.RUNTIME_ERROR),
        ("while True: pass", 0, S.TIMEOUT_CPU), ("import os; os._exit(0)", 0, S.EARLY_EXIT), ("def add(", 0, S.SYNTAX_ERROR),
        ("def add(a, b): return object()", 0, S.INVALID_RESULT), ("x = bytearray(1 << 30)", 0, S.OOM),
        ("print('x' * 10_000_000)", 0, S.OUTPUT_LIMIT),
    ):  # fmt: skip
        wrong = score(tasks, f"```python\n{body}\n```", zygote)
        assert (wrong.value, wrong.status) == (0.0, RewardStatus.GIVEN), wrong
        assert (wrong.sandbox_status, wrong.blame) == (status, Blame.MODEL), wrong
        assert wrong.parts == {"passed": passed, "total": 2.0} and json.loads(wrong.evidence)["reason"]
    none = score(tasks, "no idea", zygote)
    assert (none.value, none.status, none.sandbox_status, none.blame) == (0.0, RewardStatus.GIVEN, S.NO_CODE, Blame.MODEL)


def test_part_of_the_tests_pays_its_part_where_that_is_asked_for(zygote: Sandbox, file: Path) -> None:
    tasks = CodeTasks("functions", str(file), partial=True)
    assert score(tasks, "```python\ndef add(a, b): return 3\n```", zygote).value == 0.5
    assert score(tasks, tasks.gold(OWN[0]), zygote).value == 1.0
    assert score(tasks, "```python\ndef add(a, b): return 3 if a == 1 else exit()\n```", zygote).value == 0.5


def test_where_infrastructure_fails_or_nobody_can_tell_there_is_no_value(zygote: Sandbox, file: Path) -> None:
    tasks = CodeTasks("functions", str(file))
    failpoints.arm("sandbox.before_spawn=raise~1")
    try:
        lost = score(tasks, tasks.gold(OWN[0]), zygote)
    finally:
        failpoints.arm("")
    assert (lost.value, lost.status, lost.sandbox_status, lost.blame) == (
        None, RewardStatus.INFRA_ERROR, S.INFRA_SPAWN, Blame.INFRA,
    )  # fmt: skip
    waits = "```python\nimport time\ntime.sleep(60)\n```"
    unclear = score(tasks, waits, zygote, limits=Limits(cpu_s=0.6, wall_s=0.6))
    assert (unclear.value, unclear.status, unclear.sandbox_status, unclear.blame) == (
        None, RewardStatus.INFRA_ERROR, S.TIMEOUT_WALL, Blame.UNCLEAR,
    )  # fmt: skip
    assert json.loads(unclear.evidence)["attempts"] == 2


def test_a_backend_that_is_closed_in_the_middle_gives_no_value(file: Path) -> None:
    sandbox, results = Interrupted(make_backend("zygote", 2)), []
    tasks = CodeTasks("functions", str(file))
    waits = "```python\nimport time\ntime.sleep(60)\n```"
    thread = threading.Thread(target=lambda: results.append(score(tasks, waits, sandbox)))
    thread.start()
    assert sandbox.started.wait(30.0)
    sandbox.close()
    thread.join(60.0)
    assert (results[0].value, results[0].status, results[0].blame) == (None, RewardStatus.INFRA_ERROR, Blame.INFRA)


def test_options_of_comparison_reach_the_verdict(zygote: Sandbox, file: Path) -> None:
    floats = "```python\ndef add(a, b): return float(a + b)\n```"
    assert score(CodeTasks("functions", str(file)), floats, zygote).value == 0.0
    assert score(CodeTasks("functions", str(file), numbers="loose"), floats, zygote).value == 1.0
    pairs = {"prompt": "p", "function": "f", "cases": [[[], [1, 2]]]}
    tuples = "```python\ndef f(): return 1, 2\n```"
    assert score(CodeTasks("functions", str(file)), tuples, zygote, pairs).value == 1.0
    assert score(CodeTasks("functions", str(file), sequences="strict"), tuples, zygote, pairs).value == 0.0


def test_tasks_load_the_same_each_time_from_every_shape_of_file(file: Path, tmp_path: Path) -> None:
    listed, zipped = tmp_path / "tasks.json", tmp_path / "tasks.jsonl.gz"
    listed.write_text(json.dumps(OWN))
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    for path in (file, listed, zipped):
        tasks = CodeTasks("functions", str(path))
        assert list(tasks.load("train")) == [OWN[0]] and list(tasks.load("heldout")) == [OWN[1]]


def test_settings_that_cannot_be_meant_are_named(file: Path) -> None:
    for settings, said in (({"kind": "mbbp", "path": "x"}, "kind"), ({"kind": "mbpp"}, "path is missing"),
                           ({"kind": "functions", "path": "x", "numbers": "lose"}, "numbers")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            CodeTasks(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split 'test'"):
        CodeTasks("functions", str(file)).load("test")
    with pytest.raises(ConfigError, match="sandbox"):
        CodeTasks("functions", str(file)).judge("x = 1", OWN[0], Context(None, LIMITS, 1, "key", 60.0))
    with pytest.raises(TaskError, match="no right program"):
        CodeTasks("functions", str(file)).gold({"prompt": "p"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "p"}\n{broken\n', "line 2"), ('[{"a": 1}', "not valid JSON"), ("[1]", "row 1"), ("7", "row 1"),
        ('{"prompt": "p", "function": "f"}', "row 1.*cases"), ('{"prompt": "p", "function": "f", "cases": []}', "row 1.*cases"),
        ('{"prompt": "p", "function": "f", "cases": [[1, 2]]}', "row 1.*cases"),
        ('{"prompt": 1, "function": "f", "cases": []}', "prompt"),
        ('{"prompt": "p", "function": "f()", "cases": [[[], 1]]}', "function"),
    ],
)  # fmt: skip
def test_task_files_that_are_wrong_are_named_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=rf"bad\.jsonl.*{said}"):
        list(CodeTasks("functions", str(path)).load("train"))
    with pytest.raises(TaskError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")
