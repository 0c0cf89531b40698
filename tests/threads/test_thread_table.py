"""The table of public threads is complete, and every defect it names can be planted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants import registry
from mutants.threads import LOST_OR_DOUBLED, THREADS, TOO_OLD, mutants_used

ROOT = Path(__file__).parents[2]

LOST_OR_DOUBLED_IDS = """
verl#4199 verl#7579 verl#7759 verl#7762 verl#7037 verl#7401 OpenRLHF#1322 NeMo-RL#3599 NeMo-RL#3820 NeMo-RL#3594 NeMo-RL#3480
trl#5911 trl#7274 trl#7294 open-instruct#1523 miles#2254 NeMo-RL#3923 NeMo-RL#3924 SkyRL#2010 trl#6804 torchforge#362
torchtitan#3751 ms-swift#9935 open-r1#450 trl#3247
""".split()
"""The survey's threads about lost and doubled samples, in its order."""

TOO_OLD_IDS = """
AReaL#1388 miles#2835 cosmos-rl#503 verl#7938 verl#7940 prime-rl#1901 prime-rl#1902 prime-rl#2812 prime-rl#2957 prime-rl#2960
tinker-cookbook#822 rllm#622 slime#1800 SkyRL#1315 vllm#54443
""".split()
"""The survey's threads about staleness and versions, in its order."""


def test_every_thread_of_the_survey_has_a_row() -> None:
    assert [thread for row in LOST_OR_DOUBLED for thread in row.threads] == LOST_OR_DOUBLED_IDS
    assert [thread for row in TOO_OLD for thread in row.threads] == TOO_OLD_IDS
    assert (len(LOST_OR_DOUBLED), len(TOO_OLD)) == (21, 12)


def test_no_thread_has_two_rows() -> None:
    threads = [thread for row in THREADS for thread in row.threads]
    assert len(threads) == len(set(threads))


def test_a_row_has_either_tests_or_the_reason_why_it_does_not_apply() -> None:
    assert [row.threads for row in THREADS if bool(row.cases) == bool(row.reason)] == []


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_table_exists_and_every_thread_test_is_in_it() -> None:
    named: dict[str, set[str]] = {}
    for row in THREADS:
        for test, _ in row.cases:
            file, _, function = test.partition("::")
            named.setdefault(file, set()).add(function)
    for file, functions in named.items():
        assert {f for f in functions_in(ROOT / file) if f.startswith("test_")} == functions, file


def test_every_defect_is_used_and_every_used_one_is_in_the_catalogue() -> None:
    assert set(mutants_used()) == set(registry.load())


@pytest.mark.parametrize("name", mutants_used())
def test_a_defect_can_be_planted_in_the_product_as_it_is(name: str) -> None:
    planted = registry.load()[name]
    owner, last = planted.owner(), planted.target.split(".")[-1]
    original = getattr(owner, last)
    assert planted.build(original) is not original
    assert getattr(owner, last) is original, "building a defect does not plant it"
