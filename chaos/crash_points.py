"""Prints, as markdown, every crash point of the protocol with its failpoints and the tests that crash there.

    python chaos/crash_points.py           the table
    python chaos/crash_points.py --check   exit 1 when a crash point has no failpoint, or a failpoint no test

Tests are found by reading them: a test covers a failpoint when its own text, a table or a helper it uses, names it and names
a fault (crash, raise, error or pause); watching is not enough. The simulation covers what ``chaos/results/crash_windows.json``
says it crashed at. Never runs a test.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY / "service") not in sys.path:
    sys.path.insert(0, str(REPOSITORY / "service"))

from rollbook.observe.failpoints import CATALOGUE  # noqa: E402

WINDOWS = REPOSITORY / "chaos" / "results" / "crash_windows.json"
"""Written by the simulation: failpoint to {"crossed": n, "crashed": n}."""
NAMES_ONLY = ("tests/unit/test_failpoint_actions.py", "tests/unit/test_cli.py", "tests/contract/test_failpoints.py")
"""Tests that speak about failpoints; nothing has to recover in them."""

CRASH_POINTS: dict[str, str] = {
    "W1": "A worker dies before or while it generates.",
    "W2": "A worker dies with finished rollouts it has not submitted.",
    "W3": "The server dies before the COMMIT of a submission.",
    "W4": "The server dies after that COMMIT, or the worker before it has seen the answer.",
    "W5": "A worker sleeps past its leases, wakes up and submits.",
    "W6": "A call arrives twice, or after a later one.",
    "W7": "Tokens of a version arrive while the learner stands at an older checkpoint.",
    "W8": "A worker dies between a tool's call, its effect and its recorded answer.",
    "S1": "The server dies while a group of calls shares a commit.",
    "S2": "The server starts again.",
    "S3": "The storage is full or fails while the ledger writes.",
    "S4": "The database goes away and the outcome of a commit is unknown.",
    "S5": "Two servers believe that they serve the run.",
    "L1": "The learner dies while it takes its role.",
    "L2": "A step is being planned when the server or the learner dies.",
    "L3": "The learner dies with planned steps that no checkpoint covers.",
    "L4": "The learner dies around the publication of a version.",
    "L5": "The learner dies with a checkpoint whose files are not all written.",
    "L6": "The learner dies while it writes the manifest.",
    "L7": "The learner dies with a whole checkpoint that has no name yet.",
    "L8": "The power fails between the rename and the directory's fsync.",
    "L9": "A whole, named checkpoint lacks its row.",
    "L10": "Whether a checkpoint's row was committed is unknown.",
    "L11": "The learner dies while old checkpoints or versions are deleted.",
    "L12": "A learner that was replaced wakes up in the middle of a checkpoint.",
    "L13": "A committed checkpoint does not load.",
    "L14": "The database is older than the checkpoints: it was restored from a backup.",
    "L15": "One writer of a checkpoint in several parts dies.",
    "L16": "A pointer to a checkpoint moves before the checkpoint is whole.",
    "D1": "The process dies between moving the cursor and inserting the slots.",
    "D2": "The tasks end exactly at the edge of an append.",
}
"""The crash points of the protocol between ledger, worker and learner."""

IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "L15": (
        "one process writes all parts, and the manifest names them after the last one: a missing part is a crash like L5",
        "tests/unit/test_checkpoint.py::test_a_crash_at_any_line_leaves_the_one_before_or_the_new_one",
    ),
    "L16": (
        "there is no pointer: the row is the commit, and it is written after rename and fsync",
        "tests/unit/test_checkpoint.py::test_a_crash_at_any_line_leaves_the_one_before_or_the_new_one",
    ),
    "D1": (
        "cursor and slots change in one transaction; a crash between the two statements leaves neither",
        "tests/contract/test_ledger_crash_points.py::test_a_transaction_that_dies_between_two_statements_leaves_nothing",
    ),
}
"""What cannot happen here: by what, and the test that shows it."""


def call_sites() -> dict[str, list[str]]:
    """Failpoint name to the places (file:line) of the product that cross it; a name that is no literal is its expression."""
    root = REPOSITORY / "service" / "rollbook"
    found: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            if name != "failpoint":
                continue
            assert isinstance(node, ast.Call)
            first = node.args[0] if node.args else None
            is_literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
            text = first.value if is_literal else f"({ast.unparse(node)})"  # type: ignore[union-attr]
            found.setdefault(str(text), []).append(f"{file.relative_to(root)}:{node.lineno}")
    return dict(sorted(found.items()))


@dataclass
class _Symbol:
    """A function, class or constant of a test module: the failpoints and faults its text names, and the symbols it uses."""

    names: set[str]
    uses: set[str]
    has_fault: bool = False


_FAULT = re.compile(r"(^|=)(crash|raise|pause|error:)")
_WORD = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.])" for name in sorted(CATALOGUE, key=len, reverse=True)))


def _symbol(node: ast.AST) -> _Symbol:
    symbol = _Symbol(set(), set())
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            symbol.names |= set(_WORD.findall(part.value))
            symbol.has_fault |= _FAULT.search(part.value) is not None
        elif isinstance(part, ast.Name):
            symbol.uses.add(part.id)
        elif isinstance(part, ast.arg):
            symbol.uses.add(part.arg)  # a fixture
    return symbol


def _symbols(file: Path, seen: frozenset[Path] = frozenset()) -> dict[str, _Symbol]:
    """Symbols of a module and of the test modules beside it that it imports from."""
    out: dict[str, _Symbol] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            out[node.name] = _symbol(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            out |= {t.id: _symbol(node) for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            other = file.with_name(f"{node.module}.py")
            if other.is_file() and other not in seen:
                theirs = _symbols(other, seen | {file})
                out = {name: symbol for name, symbol in theirs.items() if not name.startswith("test_")} | out
    return out


def _covered(name: str, symbols: dict[str, _Symbol]) -> set[str]:
    """Failpoints that a symbol names, itself or through what it uses; none where no fault is named."""
    names: set[str] = set()
    has_fault = False
    todo, seen = [name], set[str]()
    while todo:
        here = todo.pop()
        if here in seen or here not in symbols:
            continue
        seen.add(here)
        names |= symbols[here].names
        has_fault |= symbols[here].has_fault
        todo += symbols[here].uses
    return names if has_fault else set()


def tests_by_failpoint() -> dict[str, list[str]]:
    """Failpoint to the tests (path::function) that name it, and the simulation where it crashed there."""
    found: dict[str, list[str]] = {name: [] for name in CATALOGUE}
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        path = file.relative_to(REPOSITORY).as_posix()
        if path in NAMES_ONLY:
            continue
        symbols = _symbols(file)
        for name in (n for n in symbols if n.startswith("test_")):
            for covered in _covered(name, symbols):
                found[covered].append(f"{path}::{name}")
    for name, counts in crash_windows().items():
        if name in found and counts.get("crashed", 0) > 0:
            found[name].append(f"simulation, {counts['crashed']} crashes")
    return found


def crash_windows() -> dict[str, dict[str, int]]:
    """How often the simulation crossed and crashed at each failpoint; empty where it has published nothing."""
    return json.loads(WINDOWS.read_text()) if WINDOWS.is_file() else {}


def failpoints_of(crash_point: str) -> list[str]:
    return [name for name, point in CATALOGUE.items() if crash_point in point.crash_points]


def problems() -> Iterator[str]:
    """What is missing in the table."""
    sites, tests = call_sites(), tests_by_failpoint()
    for name, places in sites.items():
        if name not in CATALOGUE:
            yield f"{', '.join(places)}: {name} is not in the catalogue (observe/catalogue.py)"
    for name, point in CATALOGUE.items():
        if name not in sites:
            yield f"{name} is in the catalogue and nothing crosses it"
        if not tests[name]:
            yield f"{name}: no test crashes there"
        for number in point.crash_points:
            if number not in CRASH_POINTS:
                yield f"{name} names crash point {number}, which there is not"
    for number in CRASH_POINTS:
        if not failpoints_of(number) and number not in IMPOSSIBLE:
            yield f"{number} has neither a failpoint nor a reason why it cannot happen"
    for number, (_, test) in IMPOSSIBLE.items():
        file, _, function = test.partition("::")
        path = REPOSITORY / file
        if not path.is_file() or f"def {function}(" not in path.read_text():
            yield f"{number}: there is no test {test}"


def table() -> Iterator[str]:
    """The lines of the markdown table."""
    tests = tests_by_failpoint()
    yield "| # | crash point | failpoint | tests that crash there |"
    yield "|---|---|---|---|"
    for number, text in CRASH_POINTS.items():
        start = f"| {number} | {text}"
        if number in IMPOSSIBLE:
            reason, test = IMPOSSIBLE[number]
            yield f"{start} | impossible: {reason} | `{test}` |"
            start = "| | "
        for name in failpoints_of(number):
            yield f"{start} | `{name}` | {_shown(tests[name])} |"
            start = "| | "
    for name, point in CATALOGUE.items():
        if not point.crash_points:
            yield f"| - | beside them | `{name}` | {_shown(tests[name])} |"


def summary() -> Iterator[str]:
    """One line per crash point: failpoints that stand there, test files that die at them, deaths in the recorded simulation."""
    tests, windows = tests_by_failpoint(), crash_windows()
    yield "| # | crash point | failpoints | test files | deaths in simulation |"
    yield "|---|---|---|---|---|"
    for number, text in CRASH_POINTS.items():
        names = failpoints_of(number)
        crashed = sum(windows.get(name, {}).get("crashed", 0) for name in names)
        files = {test.partition("::")[0] for name in names for test in tests[name] if "::" in test}
        if number in IMPOSSIBLE:
            text = f"{text} *Impossible: {IMPOSSIBLE[number][0]}.*"
            files.add(IMPOSSIBLE[number][1].partition("::")[0])
        yield f"| {number} | {text} | {len(names)} | {len(files)} | {crashed} |"


def _shown(tests: list[str]) -> str:
    return "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests) or "**none**"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="print what is missing instead; exit 1 when anything is")
    parser.add_argument("--summary", action="store_true", help="one line per crash point")
    arguments = parser.parse_args()
    if arguments.summary:
        print("\n".join(summary()))
        return 0
    if arguments.check:
        missing = list(problems())
        print("\n".join(missing) if missing else f"{len(CRASH_POINTS)} crash points, {len(CATALOGUE)} failpoints: complete")
        return 1 if missing else 0
    print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
