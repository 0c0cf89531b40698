"""Public threads about sandboxes and the programs in them: what a program claims is no verdict, and nothing of it stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from threads_support import outcome_of

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Program, Sandbox
from rollbook.observe import failpoints
from rollbook.sandbox import outcome, zygote
from rollbook.sandbox.attacks.probe import Result
from rollbook.sandbox.backends import make_backend
from rollbook.sandbox.outcome import Report
from rollbook.sandbox.selection import Examination, chosen_of
from rollbook.tasks.verdicts import Case, judge_asserts, judge_functions

S = SandboxStatus
LIMITS = Limits(cpu_s=1.0, wall_s=4.0, memory_bytes=128 << 20)
SHORT = Limits(cpu_s=1.0, wall_s=0.3, memory_bytes=128 << 20)
FORKS = "import os, time\nfor i in range(20):\n  if os.fork() == 0: time.sleep(1); os._exit(0)\ntime.sleep(1)"
HONEST = "def add(a, b): return a + b"
CASES = [Case([1, 2], 3), Case([2, 2], 4)]
SUMS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.arm("")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = make_backend("zygote", 4)
    yield made
    made.close()


def children(pid: int | str) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_rllm_915_no_zombie_is_left_by_checks_that_were_killed() -> None:
    """Each check that ran out of time left a process nobody waited for."""
    before = children(os.getpid())
    made = make_backend("zygote", 2)
    for _ in range(2):
        assert made.run(Program("import time; time.sleep(30)"), SHORT).status is S.TIMEOUT_WALL
    made.close()
    assert children(os.getpid()) == before


def test_verl_7853_a_program_that_raises_earns_nothing_where_nothing_is_expected(sandbox: Sandbox) -> None:
    """The wrapper left with exit code 0 after an exception, and no output was the expected output."""
    verdict = judge_functions(sandbox, "raise ValueError", "f", [Case([], "")], LIMITS)
    assert not verdict.right and verdict.given and verdict.status is S.RUNTIME_ERROR


def test_verl_3478_jobs_beyond_the_slots_wait_for_their_turn(sandbox: Sandbox) -> None:
    """Under many requests at once the sandbox service gave errors instead of answers."""
    with ThreadPoolExecutor(12) as crowd:
        program = Program("import time; time.sleep(0.1)")
        assert {e.status for e in crowd.map(lambda _: sandbox.run(program, LIMITS), range(12))} == {S.OK}


def test_svs_3_a_check_that_ignores_every_signal_is_killed(sandbox: Sandbox) -> None:
    """A check that could not be interrupted held the reward step, and the accelerators waited."""
    stubborn = "import signal\nfor s in (1, 2, 3, 14, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    job = sandbox.start(Program(stubborn), Limits(cpu_s=0.3, wall_s=2.0))
    with ThreadPoolExecutor(1) as waiter:
        ended = waiter.submit(job.wait)
        status = outcome_of(lambda: ended.result(8.0).status)
        job.kill()
    assert status in (S.TIMEOUT_CPU, S.TIMEOUT_WALL)


def test_open_r1_546_a_run_out_of_time_says_so(sandbox: Sandbox) -> None:
    """The sandbox gave back what there was after its time and raised nothing."""
    assert sandbox.run(Program("print(1, flush=True)\nimport time; time.sleep(30)"), SHORT).status is S.TIMEOUT_WALL


def test_evalplus_5_a_wall_clock_that_ran_out_on_a_busy_host_fails_no_program(sandbox: Sandbox) -> None:
    """Right programs failed on slower machines because only the clock on the wall was looked at."""
    verdict = judge_functions(sandbox, "import time\ndef add(a, b): time.sleep(30)", "add", CASES, SHORT)
    assert (verdict.given, verdict.blame, verdict.evidence["attempts"]) == (False, Blame.UNCLEAR, 2)


def test_swe_bench_620_a_printed_line_is_no_passed_test(sandbox: Sandbox) -> None:
    """The log was searched for PASSED, which a program can print itself."""
    forged = "print('PASSED test_1\\nPASSED test_2', flush=True)\ndef add(a, b): return None"
    verdict = judge_asserts(sandbox, forged, SUMS, LIMITS)
    assert (verdict.right, verdict.passed) == (False, 0)


def test_codewars_2448_an_object_that_equals_everything_is_wrong(sandbox: Sandbox) -> None:
    """The program's own comparison decided whether its answer was right."""
    source = "class E:\n  def __eq__(self, other): return True\n  __hash__ = None\ndef add(a, b): return E()"
    assert not judge_functions(sandbox, source, "add", CASES, LIMITS).right
    assert judge_functions(sandbox, HONEST, "add", CASES, LIMITS).right


def test_codewars_runner_321_leaving_early_passes_nothing(sandbox: Sandbox) -> None:
    """A program that left with code 0 before the tests had ended was a success."""
    verdict = judge_functions(sandbox, "import os\ndef add(a, b): os._exit(0)", "add", CASES, LIMITS)
    assert (verdict.right, verdict.status, verdict.blame) == (False, S.EARLY_EXIT, Blame.MODEL)


def test_agent_os_2372_a_run_ended_by_its_memory_limit_is_not_ok(sandbox: Sandbox) -> None:
    """What the memory limit had stopped was reported as finished."""
    ended = sandbox.run(Program("x = bytearray(1 << 30)"), LIMITS)
    assert (ended.status, ended.blame) == (S.OOM, Blame.MODEL)


@pytest.mark.parametrize("killed", ["", "cpu", "wall", "memory"])
def test_rbx_807_memory_wins_whichever_limit_was_polled_first(killed: str) -> None:
    """Time or memory: the verdict was that of the limit that happened to be looked at first."""
    report = Report(ready=True, wait_status=9, killed=killed, oom=True, cpu_s=9.0, wall_s=9.0)
    assert outcome.status_of(report, LIMITS, False, False)[0] is S.OOM


def test_verifiers_399_closing_a_sandbox_ends_what_runs_in_it() -> None:
    """An interrupt left sandboxes running that nobody knew any more."""
    made = make_backend("zygote", 1)
    made.start(Program("import time; time.sleep(60)"), Limits(wall_s=60.0))
    watchers = children(made.zygote_pid())
    while not watchers:
        watchers = children(made.zygote_pid())
    made.close()
    assert [pid for pid in watchers if runs(pid)] == []


def test_autocodebenchmark_1_a_sandbox_server_is_replaced_before_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that made the sandboxes grew until it had all memory."""
    monkeypatch.setattr(zygote, "JOBS_MAX", 2)
    made = make_backend("zygote", 1)
    try:
        first = made.zygote_pid()
        assert [made.run(Program("print(1)"), LIMITS).stdout for _ in range(2)] == [b"1\n"] * 2
        assert made.zygote_pid() != first
    finally:
        made.close()


def test_codex_38909_a_chain_of_forks_ends_at_the_process_limit(sandbox: Sandbox) -> None:
    """Without a limit on processes a fork chain in the sandbox froze the host."""
    assert sandbox.run(Program(FORKS), LIMITS).status is S.PROCESS_LIMIT


def test_firejail_1956_a_backend_that_does_not_contain_is_never_taken() -> None:
    """Inside a container the tool ran its program without any sandbox."""
    leaks = Examination("zygote", (Result("network", False, "it connected", 0.1),), ("userns",))
    holds = Examination("landlock", (Result("network", True, "", 0.1),), ("landlock",))
    assert chosen_of([leaks]) is None
    chosen = chosen_of([leaks, holds])
    assert chosen is not None and chosen.backend == "landlock"


def test_bubblewrap_313_a_program_is_not_root_inside(sandbox: Sandbox) -> None:
    """A sandboxed program with the real user id 0 could undo its own bounds."""
    ended = sandbox.run(Program("import os; print(os.getuid(), os.geteuid())"), LIMITS)
    assert ended.stdout == b"1000 1000\n" and {"userns", "seccomp", "uid"} <= set(ended.enforced)


def test_bubblewrap_798_a_bound_that_cannot_be_set_blames_no_program(sandbox: Sandbox) -> None:
    """Setting the sandbox up failed, which looked like the program's failure."""
    ended = sandbox.run(Program("print(1)", setup="raise OSError('not permitted')"), LIMITS)
    assert (ended.status, ended.blame, ended.stdout) == (S.INFRA_SETUP, Blame.INFRA, b"")


def test_slime_1582_a_hiccup_of_the_sandbox_costs_neither_the_run_nor_the_verdict(sandbox: Sandbox) -> None:
    """One failed request to the reward's endpoint ended the run."""
    failpoints.arm("sandbox.before_spawn=raise@1")
    verdict = judge_functions(sandbox, HONEST, "add", CASES, LIMITS)
    assert verdict.right and verdict.evidence["attempts"] == 2
