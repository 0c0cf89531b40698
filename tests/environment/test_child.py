"""Environment processes: whatever the author's code does, questions end with the right status and never with a made-up number."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from environment_support import alive, eventually, said, scripted

from rollbook.core.environments import RewardResult, ToolReply, ToolRequest
from rollbook.core.errors import ConfigError, RestartBudgetSpent, TaskError, Unavailable, VerifierError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks import child, child_client, child_pool, child_process
from rollbook.tasks.child_client import EnvironmentPool
from rollbook.tasks.environment_tasks import read_tasks
from task_fixtures import make_config


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvironmentPool, Path]]:
    folder = tmp_path_factory.mktemp("shared")
    pool = EnvironmentPool(scripted(folder, attempts_max=2), log_path=folder / "logs" / "environment.log")
    yield pool, folder
    pool.close()


@pytest.fixture
def pool(shared: tuple[EnvironmentPool, Path]) -> EnvironmentPool:
    """Asks each question twice at most."""
    return shared[0]


@pytest.fixture
def folder(shared: tuple[EnvironmentPool, Path]) -> Path:
    """Where the scripted environment of ``pool`` leaves its marks; none are there yet."""
    for mark in shared[1].iterdir():
        if mark.is_file() and mark.suffix != ".py":
            mark.unlink()
    return shared[1]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EnvironmentPool]:
    """A pool for one test, with marks in its ``tmp_path``."""
    pool = EnvironmentPool(scripted(tmp_path))
    yield pool
    pool.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[EnvironmentPool]:
    """Judgements of more than a second are too long."""
    pool = EnvironmentPool(scripted(tmp_path, score_s=1.0))
    yield pool
    pool.close()


def judge(pool: EnvironmentPool, completion: str, key: str = "r/1.0") -> RewardResult:
    return pool.score(said(completion), key=key, seed=5).result(60)


def call(pool: EnvironmentPool, tool: str, do: str, key: str = "r/1.0") -> ToolReply:
    return pool.call_tool(ToolRequest(tool, {"do": do}), [], key=key, call_index=2, seed=5).result(60)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_values_come_back_with_everything_said_beside_them(pool: EnvironmentPool) -> None:
    assert judge(pool, "one") == RewardResult(1.0)
    full = RewardResult(0.25, evidence="r/1.0", parts={"form": 1.0, "seed": 5.0}, sandbox_status=SandboxStatus.OK)
    assert judge(pool, "full") == full
    assert pool.pure_tools == {"pure": True, "impure": False} and not pool.needs_sandbox


def test_a_run_without_environment_is_judged_by_its_reward_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, task):\n    return 1 / len(completion)\n")
    pool = EnvironmentPool(make_config(task={"reward": f"{tmp_path / 'mine.py'}:reward"}))
    try:
        assert judge(pool, "four").value == 0.25
        wrong = judge(pool, "")
        assert wrong.value is None and wrong.status is RewardStatus.VERIFIER_ERROR
        assert "raised ZeroDivisionError: division by zero" in wrong.evidence and "mine.py:2)" in wrong.evidence
        assert pool.pure_tools == {} and pool.parse("anything") is None
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("does", "status", "told"),
    [
        ("none", RewardStatus.NO_VERDICT, "returned None"),
        ("nan", RewardStatus.VERIFIER_ERROR, "returned nan"),
        ("infinite", RewardStatus.VERIFIER_ERROR, "returned inf"),
        ("text", RewardStatus.VERIFIER_ERROR, "returned '1.0', expected a number"),
        ("throw", RewardStatus.VERIFIER_ERROR, "raised Raised: why not"),
        ("leave", RewardStatus.VERIFIER_ERROR, "raised SystemExit: 0"),
        ("interrupt", RewardStatus.VERIFIER_ERROR, "raised KeyboardInterrupt"),
        ("cancel", RewardStatus.VERIFIER_ERROR, "raised CancelledError"),
        ("throw_shameful", RewardStatus.VERIFIER_ERROR, "raised Shameful"),
        ("odd_evidence", RewardStatus.VERIFIER_ERROR, "Shameful"),
        ("hog", RewardStatus.VERIFIER_ERROR, "MemoryError"),
        ("no_such_method", RewardStatus.VERIFIER_ERROR, "AttributeError"),
        ("kill", RewardStatus.VERIFIER_ERROR, "killed by SIGKILL"),
        ("crash", RewardStatus.VERIFIER_ERROR, "killed by SIGSEGV"),
        ("depart", RewardStatus.VERIFIER_ERROR, "exit code 0"),
    ],
)
def test_no_verdict_is_told_by_its_status_and_never_a_number(
    pool: EnvironmentPool, does: str, status: RewardStatus, told: str
) -> None:
    result = judge(pool, does)
    assert (result.value, result.status, result.blame) == (None, status, Blame.UNCLEAR)
    assert told in result.evidence
    assert judge(pool, "one").value == 1.0


@pytest.mark.parametrize("does", ["spin", "sleep"])
def test_a_score_that_does_not_end_is_a_timeout_after_one_repetition(hasty: EnvironmentPool, does: str) -> None:
    result = judge(hasty, does)
    assert (result.value, result.status, result.blame) == (None, RewardStatus.TIMEOUT, Blame.UNCLEAR)
    assert "no answer within 1 s" in result.evidence
    assert judge(hasty, "one").value == 1.0 and hasty.restarts == 2


def test_the_line_that_raised_is_told(pool: EnvironmentPool) -> None:
    assert "scripted.py:" in judge(pool, "throw").evidence


def test_a_score_that_raised_is_asked_once_and_its_process_goes_on(own: EnvironmentPool, tmp_path: Path) -> None:
    assert judge(own, "throw").value is None
    assert len(lines(tmp_path / "processes")) == 1 and own.restarts == 0


def test_a_failure_of_infrastructure_is_asked_again_and_blamed_on_it(pool: EnvironmentPool, folder: Path) -> None:
    assert judge(pool, "lost_once") == RewardResult(0.5)
    assert judge(pool, "lost") == RewardResult(None, RewardStatus.INFRA_ERROR, "the judge is down", blame=Blame.INFRA)


def test_one_that_hangs_takes_no_other_score_with_it(hasty: EnvironmentPool) -> None:
    others = [hasty.score(said("first_time_forever"), key=f"r/{i}.0", seed=1) for i in range(3)]
    hanging = hasty.score(said("sleep"), key="r/9.0", seed=1)
    assert [future.result(60).value for future in others] == [1.0] * 3
    assert hanging.result(60).status is RewardStatus.TIMEOUT


def test_one_that_kills_its_process_takes_no_other_score_with_it(pool: EnvironmentPool, folder: Path) -> None:
    others = [pool.score(said("first_time_forever"), key=f"r/{i}.0", seed=1) for i in range(3)]
    killing = pool.score(said("kill_when_others_are_there"), key="r/9.0", seed=1)
    assert [future.result(60).value for future in others] == [1.0] * 3
    result = killing.result(60)
    assert result.value is None and result.status is RewardStatus.VERIFIER_ERROR


def test_scores_that_wait_overlap(pool: EnvironmentPool) -> None:
    futures = [pool.score(said("overlap"), key=f"r/{i}.0", seed=1) for i in range(10)]
    parts = [future.result(60).parts for future in futures]
    assert max(p["begin"] for p in parts) < min(p["end"] for p in parts)


def test_ordinary_functions_run_beside_each_other(tmp_path: Path) -> None:
    pool = EnvironmentPool(scripted(tmp_path, {"ordinary": True}, score_s=70.0))
    try:
        futures = [pool.score(said("meet"), key=f"r/{i}.0", seed=1) for i in range(8)]
        assert [future.result(60).value for future in futures] == [1.0] * 8
        assert "raised StopIteration" in judge(pool, "stop").evidence
    finally:
        pool.close()


def test_an_ordinary_function_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    pool = EnvironmentPool(scripted(tmp_path, {"ordinary": True}, score_s=1.0, attempts_max=1))
    try:
        assert judge(pool, "sleep").status is RewardStatus.TIMEOUT
    finally:
        pool.close()


def test_a_task_that_is_changed_while_it_is_judged_stays_what_it_was(pool: EnvironmentPool) -> None:
    episode = said("mutate", items=["a"])
    assert [pool.score(episode, key="r/1.0", seed=1).result(60).value for _ in range(2)] == [2.0, 2.0]
    assert episode.task == {"items": ["a"]}


def test_what_is_printed_goes_to_the_log_and_is_no_answer(pool: EnvironmentPool, folder: Path) -> None:
    assert judge(pool, "print") == RewardResult(1.0)
    assert b"garbage" in (folder / "logs" / "environment.log").read_bytes()


def test_a_log_that_becomes_too_large_begins_again(
    pool: EnvironmentPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES_MAX", 1 << 20)
    judge(pool, "print")
    judge(pool, "one")
    assert eventually(lambda: (folder / "logs" / "environment.log").stat().st_size < 1 << 20)


def test_any_thread_may_ask(pool: EnvironmentPool) -> None:
    values: list[float | None] = []
    threads = [threading.Thread(target=lambda: values.append(judge(pool, "one").value)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == [1.0] * 6


def test_what_a_process_has_started_dies_with_it(pool: EnvironmentPool, folder: Path) -> None:
    assert judge(pool, "daemon_and_kill").value is None
    assert not alive(int((folder / "daemon").read_text()))


def test_what_a_process_has_started_dies_when_the_pool_is_closed(own: EnvironmentPool, tmp_path: Path) -> None:
    assert judge(own, "daemon").value == 1.0
    daemon = int((tmp_path / "daemon").read_text())
    assert alive(daemon)
    own.close()
    assert not alive(daemon)


@pytest.mark.parametrize("does", ["daemon_and_kill_group", "daemon_and_kill_guardian"])
def test_what_a_process_has_started_dies_with_its_group_and_its_guardian(tmp_path: Path, does: str) -> None:
    pool = EnvironmentPool(scripted(tmp_path, attempts_max=1, score_s=60.0))
    try:
        result = pool.score(said(does), key="r/1.0", seed=5).result(30)
        assert result.value is None and "killed by SIGKILL" in result.evidence
        assert not alive(int((tmp_path / "daemon").read_text()))
    finally:
        pool.close()


def test_a_killed_outer_guardian_leaves_nothing(own: EnvironmentPool, tmp_path: Path) -> None:
    assert judge(own, "daemon").value == 1.0
    outer = own._pool._seats[0].process.pid
    below = [*child._descendants(outer), int((tmp_path / "daemon").read_text())]
    os.kill(outer, signal.SIGKILL)
    assert judge(own, "one").value == 1.0
    assert eventually(lambda: not any(alive(pid) for pid in below)), below


def test_guardians_that_were_stopped_end_what_is_left(own: EnvironmentPool, tmp_path: Path) -> None:
    assert judge(own, "daemon").value == 1.0
    os.killpg(own._pool._seats[0].process.pid, signal.SIGSTOP)
    own.close()
    assert not alive(int((tmp_path / "daemon").read_text()))


WORKER = """
import sys
from pathlib import Path
from environment_support import said, scripted
from rollbook.tasks.child_client import EnvironmentPool
pool = EnvironmentPool(scripted(Path(sys.argv[1])))
pool.score(said("daemon"), key="r/1.0", seed=1).result()
hanging = pool.score(said("spin"), key="r/1.1", seed=1)
seat = pool._pool._seats[0]
print(seat.process.pid, flush=True)
hanging.result()
"""


def test_nothing_outlives_a_killed_worker(tmp_path: Path) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = os.environ | {"PYTHONPATH": paths}
    argv = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, text=True) as worker:
        assert worker.stdout is not None
        guardian = int(worker.stdout.readline())
        pids = [guardian, *child._descendants(guardian)]
        assert len(pids) == 4 and int((tmp_path / "daemon").read_text()) in pids and all(alive(pid) for pid in pids)
        worker.send_signal(signal.SIGKILL)
        assert eventually(lambda: not any(alive(pid) for pid in pids)), pids


def test_a_killed_guardian_is_the_death_of_its_process(own: EnvironmentPool, tmp_path: Path) -> None:
    hanging = own.score(said("first_time_forever"), key="r/1.0", seed=1)
    assert eventually(lambda: (tmp_path / "r-1.0").exists())
    os.kill(own._pool._seats[0].process.pid, signal.SIGKILL)
    assert hanging.result(60).value == 1.0
    assert own.restarts == 1


FORKLESS = """
import os, sys
from rollbook.tasks import child
real, outer = os.fork, os.getpid()
def fork():
    if os.getpid() != outer:
        raise BlockingIOError(11, "no more processes")
    return real()
os.fork = fork
sys.argv[1:] = [*sys.argv[1:3], str(os.getppid())]
child.main()
"""


def test_a_guardian_that_cannot_fork_reads_as_killed() -> None:
    control, control_there = socket.socketpair()
    requests, requests_there = socket.socketpair()
    with control, control_there, requests, requests_there:
        fds = (control_there.fileno(), requests_there.fileno())
        paths = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-c", FORKLESS, *map(str, fds)], pass_fds=fds, env=os.environ | {"PYTHONPATH": paths},
            stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        said_last = control.recv(256).decode()
    assert child_process.killed_by_others(said_last), said_last
    assert "no more processes" in done.stderr


MUTE = """
import os, socket, stat, time


def hang_up():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_blocking(fd):
                socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_WR)
        except OSError:
            continue


class Mine:
    def load(self, split):
        hang_up()
        time.sleep(60)
    async def score(self, episode, context):
        if episode.completion == "mute":
            hang_up()
            time.sleep(60)
        return 0.5
"""


def test_a_process_that_closes_its_socket_and_lives_on_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "HUNG_UP_S", 2.0)
    (tmp_path / "mine.py").write_text(MUTE)
    config = make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine", "attempts_max": 1, "score_s": 100.0})
    pool = EnvironmentPool(config)
    try:
        mute = pool.score(said("mute"), key="r/1.0", seed=5)
        process = pool._pool._seats[0].process
        assert eventually(lambda: process.hung_up)
        assert len(process.watched()) == 1, "a socket at its end would be ready always"
        next_one = pool.score(said("one"), key="r/2.0", seed=5)
        result = mute.result(60)
        assert result.value is None and "closed the socket on which it is asked" in result.evidence
        assert next_one.result(60).value == 0.5, "not asked where nobody answers"
    finally:
        pool.close()
    with pytest.raises(TaskError, match="closed the socket on which it is asked"):
        read_tasks(config, "train")


def test_tools_answer_with_key_seed_and_earlier_calls(pool: EnvironmentPool, folder: Path) -> None:
    request = ToolRequest("pure", {"do": "echo"})
    earlier = [(request, ToolReply("before"))]
    reply = pool.call_tool(request, earlier, key="r/1.0", call_index=2, seed=5).result(60)
    assert reply == ToolReply("5 1 ['before']", SandboxStatus.OK)
    assert lines(folder / "pure") == ["r/1.0/2"]


@pytest.mark.parametrize(
    ("does", "told", "blame"),
    [
        ("throw", "raised Raised: why not", Blame.UNCLEAR),
        ("throw_shameful", "raised Shameful", Blame.UNCLEAR),
        ("kill", "killed by SIGKILL", Blame.UNCLEAR),
        ("leave", "raised SystemExit", Blame.UNCLEAR),
        ("fail", "the sandbox is gone", None),
        ("unclear", "too slow", Blame.UNCLEAR),
        ("neither", "Shameful", Blame.UNCLEAR),
        ("nothing", "returned None", Blame.UNCLEAR),
    ],
)
@pytest.mark.parametrize(("tool", "times"), [("pure", 2), ("impure", 1)])
def test_a_tool_that_fails_is_called_again_only_where_it_is_pure(
    pool: EnvironmentPool, folder: Path, tool: str, times: int, does: str, told: str, blame: Blame | None
) -> None:
    reply = call(pool, tool, does)
    assert (reply.failed, reply.text, reply.blame) == (True, "", blame) and told in reply.reason
    assert lines(folder / tool) == ["r/1.0/2"] * times


@pytest.mark.parametrize(("tool", "times"), [("pure", 2), ("impure", 1)])
def test_a_tool_that_hangs_is_called_again_only_where_it_is_pure(tmp_path: Path, tool: str, times: int) -> None:
    pool = EnvironmentPool(scripted(tmp_path, tool_s=1.0))
    try:
        reply = call(pool, tool, "spin")
        assert reply.failed and "no answer within 1 s" in reply.reason and reply.blame is Blame.UNCLEAR
        assert lines(tmp_path / tool) == ["r/1.0/2"] * times
    finally:
        pool.close()


def test_a_call_that_the_worker_gives_up_is_blamed_on_infrastructure(own: EnvironmentPool, tmp_path: Path) -> None:
    hanging = own.call_tool(ToolRequest("impure", {"do": "sleep"}), [], key="r/1.0", call_index=0, seed=1)
    assert eventually(lambda: (tmp_path / "impure").exists())
    own.close()
    reply = hanging.result(0)
    assert reply.failed and reply.blame is Blame.INFRA


def test_a_call_that_cannot_be_repeated_is_finished_before_its_process_is_killed(hasty: EnvironmentPool, tmp_path: Path) -> None:
    slow = hasty.call_tool(ToolRequest("impure", {"do": "slow"}), [], key="r/1.0", call_index=0, seed=1)
    hanging = hasty.score(said("sleep"), key="r/9.0", seed=1)
    assert slow.result(60) == ToolReply("done")
    assert hanging.result(60).status is RewardStatus.TIMEOUT
    assert lines(tmp_path / "impure") == ["r/1.0/0"]


def test_an_answer_that_is_too_large_is_a_failed_call(pool: EnvironmentPool) -> None:
    reply = call(pool, "impure", "huge")
    assert reply.failed and "larger than" in reply.reason


def test_a_tool_nobody_has_is_a_failed_call(pool: EnvironmentPool) -> None:
    reply = call(pool, "screwdriver", "echo")
    assert reply.failed and "has no tool 'screwdriver'; it has pure, impure" in reply.reason


def test_turns_are_parsed_and_replies_rendered_by_the_environment(pool: EnvironmentPool) -> None:
    assert pool.parse("echo") == ToolRequest("pure", {"do": "echo"})
    assert pool.parse("end") is None
    assert pool.render(ToolReply("7")) == "<7>"


@pytest.mark.parametrize(
    ("text", "told"),
    [("raise", "raised Raised: no such grammar"), ("odd", "returned 7"), ("unknown", "its tools are pure, impure")],
)
def test_a_parse_that_fails_is_an_error(pool: EnvironmentPool, text: str, told: str) -> None:
    with pytest.raises(VerifierError, match=told):
        pool.parse(text)
    with pytest.raises(VerifierError, match="raised Raised: no such form"):
        pool.render(ToolReply("raise"))


def test_a_parse_that_hangs_is_an_error(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_client, "TEXT_S", 0.5)
    with pytest.raises(VerifierError, match="no answer within 0.5 s"):
        pool.parse("spin")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import no_such_library\n", "No module named 'no_such_library'"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
        ("import os\nprint('last words')\nos._exit(3)\n", "exit code 3; it said last: last words"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "killed by SIGSEGV"),
        ("class Mine:\n    def scores(self, episode, context): pass\n", "without score(episode, context)"),
    ],
)
def test_an_environment_that_cannot_be_opened_is_refused_with_the_cause(tmp_path: Path, body: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(body)
    before = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}))
    assert told in str(caught.value)
    assert threading.active_count() == before


ONCE = """
import os, signal, time
from pathlib import Path
class Mine:
    needs_sandbox = False
    async def score(self, episode, context):
        return 1
mark = Path(__file__).with_name("mark")
if not mark.exists():
    mark.touch()
    {fault}
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "guardian killed": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_process_that_is_killed_while_it_opens_is_no_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "mine.py").write_text(ONCE.format(fault=fault))
    if "SIGSTOP" in fault:
        monkeypatch.setattr(child_pool, "OPEN_S", 3.0)
    pool = EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}))
    try:
        assert (tmp_path / "mark").exists() and judge(pool, "one").value == 1.0
    finally:
        pool.close()


def test_a_pool_whose_processes_are_killed_before_they_are_open_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "OPENINGS_MAX", 2)
    (tmp_path / "mine.py").write_text(ONCE.format(fault=FAULTS["killed"]).replace("mark.touch()", "pass"))
    before = threading.active_count()
    with pytest.raises(RestartBudgetSpent, match="cannot be started any more: killed by SIGKILL"):
        EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}))
    assert threading.active_count() == before


def test_processes_that_are_killed_together_while_they_open_are_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_pool, "OPENINGS_MAX", 3)
    body = ONCE.format(fault="pass") + """
for number in range(3):
    try:
        mark.with_name(f"mark{number}").touch(exist_ok=False)
    except FileExistsError:
        continue
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "mine.py").write_text(body)
    pool = EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine", "processes": 3}))
    try:
        assert (tmp_path / "mark2").exists() and judge(pool, "one").value == 1.0
    finally:
        pool.close()


def test_a_process_that_cannot_be_started_at_first_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def start(*arguments: object) -> child_process.ChildProcess:
        starts.append(arguments)
        if len(starts) == 1:
            raise OSError("no more processes")
        return child_process.ChildProcess(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(child_pool, "ChildProcess", start)
    pool = EnvironmentPool(scripted(tmp_path))
    try:
        assert judge(pool, "one").value == 1.0 and len(starts) > 1
    finally:
        pool.close()


def test_a_sandbox_that_cannot_be_chosen_now_is_chosen_later(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONCE.format(fault="pass").replace("needs_sandbox = False", "needs_sandbox = True"))
    asked = []

    def choose() -> str:
        asked.append(None)
        if len(asked) == 1:
            raise Unavailable("the attacks were disturbed")
        return "unsafe"

    pool = EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}), choose)
    try:
        assert judge(pool, "one").value == 1.0 and len(asked) == 2
    finally:
        pool.close()


def test_a_sandbox_whose_trial_is_killed_is_made_later(tmp_path: Path) -> None:
    patch = """
    from rollbook.sandbox import zygote
    zygote._TRIAL = "import os; os.kill(os.getpid(), 9)"
"""
    body = ONCE.format(fault=patch.strip()).replace("needs_sandbox = False", "needs_sandbox = True")
    (tmp_path / "mine.py").write_text(body)
    pool = EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}), lambda: "unsafe")
    try:
        assert (tmp_path / "mark").exists() and judge(pool, "one").value == 1.0
    finally:
        pool.close()


def test_an_environment_that_needs_a_sandbox_is_refused_where_there_is_none(tmp_path: Path) -> None:
    body = "class Mine:\n    needs_sandbox = True\n    async def score(self, episode, context): pass\n"
    (tmp_path / "mine.py").write_text(body)
    config = make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"})
    with pytest.raises(ConfigError, match="needs a sandbox, but none may be used here"):
        EnvironmentPool(config)

    def refuse() -> str:
        raise ConfigError("no backend contains the attacks")

    with pytest.raises(ConfigError, match="no backend contains the attacks"):
        EnvironmentPool(config, refuse)


def test_a_pool_whose_processes_only_die_gives_up_and_says_why(own: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "RESTARTS_MAX", 1)
    assert judge(own, "kill").value is None
    with pytest.raises(RestartBudgetSpent, match="ended 2 times without one answer.*killed by SIGKILL"):
        judge(own, "one")


def test_answers_in_between_keep_a_pool_alive(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(pool, "one").value == 1.0
    monkeypatch.setattr(child_pool, "RESTARTS_MAX", 2)
    for _ in range(2):
        assert judge(pool, "kill").value is None
        assert judge(pool, "one").value == 1.0


def test_a_pool_that_cannot_start_processes_any_more_gives_up(
    own: EnvironmentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_pool, "OPENINGS_MAX", 2)
    (tmp_path / "refuse").touch()
    result = judge(own, "kill")
    assert (result.value, result.status, result.blame) == (None, RewardStatus.INFRA_ERROR, Blame.INFRA)
    assert "it does not want to" in result.evidence
    with pytest.raises(RestartBudgetSpent, match="cannot be started any more"):
        judge(own, "one")


@pytest.mark.parametrize("does", ["spin", "sleep"])
def test_closing_ends_what_hangs_and_leaves_no_thread(tmp_path: Path, does: str) -> None:
    before = threading.active_count()
    pool = EnvironmentPool(scripted(tmp_path))
    process = pool._pool._seats[0].process.pid
    hanging = pool.score(said(does), key="r/1.0", seed=1)
    pool.close()
    assert hanging.result(0).status is RewardStatus.INFRA_ERROR
    assert threading.active_count() == before and not alive(process)
    with pytest.raises(ConfigError, match="closed"):
        judge(pool, "one")
    pool.close()


def test_whoever_asks_too_much_waits_until_something_is_answered(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "QUESTIONS_MAX", 2)
    futures = []
    for i in range(6):
        futures.append(pool.score(said("overlap"), key=f"r/{i}.0", seed=1))
        assert sum(not future.done() for future in futures) <= 2
    assert [future.result(60).value for future in futures] == [1.0] * 6


def test_a_tool_runs_in_the_sandbox_of_its_process(tmp_path: Path) -> None:
    asked: list[str] = []

    def backend() -> str:
        asked.append("unsafe")
        return asked[0]

    pool = EnvironmentPool(make_config(environment={"name": "rollbook.tasks.calculator:Calculator"}), backend)
    try:
        request = pool.parse("[12+7*3]")
        assert request == ToolRequest("python", {"code": "12+7*3"})
        reply = pool.call_tool(request, [], key="r/1.0", call_index=0, seed=1).result(60)
        assert reply == ToolReply("33", SandboxStatus.OK) and pool.needs_sandbox and asked == ["unsafe"]
    finally:
        pool.close()
