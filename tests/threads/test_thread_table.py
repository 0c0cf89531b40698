"""The table of public threads is complete, and every defect it names can be planted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants import registry
from mutants.threads import (
    CODE_AND_SANDBOXES,
    DEATHS_AND_LEFTOVERS,
    FAILED_AS_ZERO,
    HANGS_AND_SILENCE,
    LOST_OR_DOUBLED,
    THREADS,
    TOO_OLD,
    mutants_used,
)

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

CODE_AND_SANDBOXES_IDS = """
rllm#710 rllm#915 NeMo-RL#2207 NeMo-Gym#2611 NeMo-Gym#2015 OpenEnv#1025 OpenEnv#965 verl#5635 trl#5281 verl#1331 verl#6673
verl#7853 verl#3478 verl#6978 SvS#3 code-r1#7 open-r1#546 evalplus#5 SWE-smith#24 SWE-bench#620 codewars.com#3083
codewars.com#2448 codewars-runner-cli#279 codewars-runner#321 agent-os#2372 rbx#807 verifiers#399 verifiers#1920
verifiers#1750 verifiers#1412 SkyRL#1613 tinker-cookbook#497 trl#5775 compose-rl#87 AutoCodeBenchmark#1 codex#38909
firejail#1956 firejail#380 bubblewrap#313 bubblewrap#798 crewAI#5802
""".split()
"""The threads about code, sandboxes, verdicts and tools, in the order of their list."""

FAILED_AS_ZERO_IDS = """
NeMo-Gym#1351 NeMo-Gym#2552 NeMo-Gym#2750 NeMo-RL#3589 NeMo-RL#431 NeMo-RL#2305 NeMo-RL#2394 trl#6427 trl#6430 AReaL#1541
AReaL#1651 miles#3221 ToRL#27 verl#6362 verl#6452 verl-omni#366 slime#1582 agentcore-rl-toolkit#122 prime-rl#1563
prime-rl#3015
""".split()
"""The survey's threads about failed rewards, in its order, without those of the list before."""

HANGS_AND_SILENCE_IDS = """
SkyRL#1173 SkyRL#1986 NeMo-RL#3238 NeMo-RL#3938 NeMo-RL#3488 NeMo-RL#2368 NeMo-RL#2717 SkyRL#1691 verl#7155 verl#6395
verl#7611 verl-omni#433 verl#7180 ms-swift#6962 verl#5327 verl#5668 prime-rl#1801 prime-rl#1546 prime-rl#3139 prime-rl#3140
prime-rl#1609 prime-rl#2574 prime-rl#2577 prime-rl#2912 trl#3433 trl#6628 slime#1484 slime#1487 slime#2176 slime#2350
cosmos-rl#736
""".split()
"""The survey's threads about hangs, in its order, without those of the lists before."""

DEATHS_AND_LEFTOVERS_IDS = """
verl#1314 verl#429 verl#439 verl#2987 verl#4921 verl#402 verl#5079 trl#3408 NeMo-RL#3592 NeMo-RL#3591 NeMo-RL#3613
NeMo-RL#3187 NeMo-RL#4178 prime-rl#2028 training-gym#307 sglang#8115 SkyRL#284 SkyRL#1216 EasyR1#97
""".split()
"""The survey's threads about deaths and left-overs, in its order."""


def test_every_thread_of_the_survey_has_a_row() -> None:
    assert [thread for row in LOST_OR_DOUBLED for thread in row.threads] == LOST_OR_DOUBLED_IDS
    assert [thread for row in TOO_OLD for thread in row.threads] == TOO_OLD_IDS
    assert [thread for row in CODE_AND_SANDBOXES for thread in row.threads] == CODE_AND_SANDBOXES_IDS
    assert [thread for row in FAILED_AS_ZERO for thread in row.threads] == FAILED_AS_ZERO_IDS
    assert [thread for row in HANGS_AND_SILENCE for thread in row.threads] == HANGS_AND_SILENCE_IDS
    assert [thread for row in DEATHS_AND_LEFTOVERS for thread in row.threads] == DEATHS_AND_LEFTOVERS_IDS
    assert (len(LOST_OR_DOUBLED), len(TOO_OLD), len(CODE_AND_SANDBOXES), len(FAILED_AS_ZERO)) == (21, 12, 23, 12)
    assert (len(HANGS_AND_SILENCE), len(DEATHS_AND_LEFTOVERS)) == (22, 13)


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
