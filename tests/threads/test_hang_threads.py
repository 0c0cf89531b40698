"""Public threads about runs that hang, and about failures that nobody heard of: the real watch, supervisor, worker and ledger.

Each test is named after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import BOUND_S, supervised
from threads_support import ACCEPTED, ordinals_of, outcome_of

from ledger_bench import Bench
from rollbook.cli.running import conclude
from rollbook.core.config import SupervisorConfig
from rollbook.core.errors import Fenced, NotReady, RestartBudgetSpent
from rollbook.core.records import Blame, FailureReport, RewardStatus, RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.observe.health import Health, HealthPage
from rollbook.observe.progress import Bounds, Reporter, State
from rollbook.rollout import worker
from rollbook.rollout.heartbeat import Heartbeat
from rollbook.rollout.worker import run_worker
from rollbook.supervise.hangs import HangWatch
from rollbook.supervise.policy import RestartPolicy
from rollbook.supervise.process import ProcessRecord, start_time
from rollbook.supervise.watchdog import Watched, dump_stacks
from rollout_doubles import MemoryLedger, ScriptedEngine, publish, worker_config
from run_support import python_process, wait_until
from task_fixtures import make_config

ROLE = """
import faulthandler, os, signal, sys, threading, time
from pathlib import Path
from rollbook.observe import progress
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[2], "ab", buffering=0))
progress.open_reporter("learner", Path(sys.argv[1]) / "supervisor" / "progress" / "learner")
first, second = threading.Lock(), threading.Lock()

def waits_for_the_other(mine, other):
    with mine:
        progress.mark(progress.State.TRAINING)
        print("ready", flush=True)
        other.acquire()

def loop():
    progress.mark(progress.State.GENERATING)
    print("ready", flush=True)
    while True:
        progress.mark()
        time.sleep(0.01)

def ends_in_the_middle():
    progress.mark(progress.State.GENERATING)
    print("ready", flush=True)
    os._exit(0)

def ends_in_order():
    progress.mark(progress.State.ENDING)
    print("ready", flush=True)
    os._exit(0)
"""
DEADLOCKS = ROLE + "second.acquire(); waits_for_the_other(first, second)"


class OneRole:
    """A watch over one process that speaks as the learner; ``pass_time`` lets its silence grow."""

    def __init__(self, tmp_path: Path, **limits: float) -> None:
        supervisor = {"startup_s": 300.0, "busy_s": 100.0, "idle_s": 20.0} | limits
        self.config = make_config(run={"dir": str(tmp_path)}, supervisor=supervisor, ledger={"role_ttl_s": 3.0})
        self.dir, self.log, self.told = tmp_path, tmp_path / "learner.log", []
        self.record: ProcessRecord | None = None
        self.watch = HangWatch(self.config, self._watched, self.told.append)

    def _watched(self) -> list[Watched]:
        return [] if self.record is None else [Watched(self.record, self.log)]

    def follow(self, pid: int) -> None:
        self.record = ProcessRecord("learner", pid, start_time(pid) or 0, "mine")
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> str:
        """The verdict after a look that counts for so many seconds."""
        self.watch.look(seconds)
        assert self.record is not None
        return self.watch.verdict(self.record.incarnation)

    def role(self, code: str) -> object:
        return python_process(code, str(self.dir), str(self.log), ROLLBOOK_INCARNATION="mine")


def test_skyrl_1173_a_role_that_hangs_is_ended_with_its_cause_and_its_stacks(tmp_path: Path) -> None:
    """Three runs were dead-locked at one step for more than 29 hours."""
    one = OneRole(tmp_path)
    with one.role(DEADLOCKS) as process:
        one.follow(process.pid)
        assert one.pass_time(99.0) == "", "a long step is no hang"
        verdict = one.pass_time(2.0)
        assert "no progress for 101 s (allowed: 100 s) while training" in verdict
        assert "a deadlock, or a wait without an end" in verdict
        (report,) = (tmp_path / "supervisor" / "hangs").glob("*-learner.txt")
        assert "in waits_for_the_other" in report.read_text() and verdict in report.read_text()
        assert [text.partition(":")[0] for text in one.told] == ["HANG"]


def test_verl_omni_433_a_process_that_ended_in_the_middle_is_no_success(tmp_path: Path) -> None:
    """A dead engine was reported as a success, and the trainer waited for its rollouts for ever."""
    one = OneRole(tmp_path)
    for code, expected in (("ends_in_the_middle()", "while generating: something ended"), ("ends_in_order()", "")):
        with one.role(ROLE + code) as process:
            one.record = ProcessRecord("learner", process.pid, start_time(process.pid) or 0, "mine")
            assert process.wait(BOUND_S) == 0
            left = one.watch.left_in(one.record)
            assert (expected in left) if expected else left == ""
    assert one.watch.left_in(ProcessRecord("learner", 1, 1, "another")) == "", "a record of another process says nothing"


def test_slime_2350_an_engine_that_stands_still_is_noticed_though_it_was_at_work(tmp_path: Path) -> None:
    """Engines hung, and nothing restarted them or ended the run."""
    one = OneRole(tmp_path)
    with one.role(ROLE + "loop()") as process:
        one.follow(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until("it is stopped", lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        one.pass_time(0.0)
        assert one.pass_time(24.0) == ""
        assert "the process is stopped" in one.pass_time(2.0), "what is stopped cannot be at work: the shorter bound holds"


def test_verl_7180_a_silent_run_is_told_with_the_stacks_of_every_role(tmp_path: Path) -> None:
    """A run stopped after hours: no error, idle devices, and nothing to look at."""
    one = OneRole(tmp_path)
    with one.role(ROLE + "loop()") as process:
        one.follow(process.pid)
        assert one.record is not None
        gone = ProcessRecord("worker-0", 2**22 + 1, 1, "gone")
        stacks = dump_stacks([Watched(one.record, one.log), Watched(gone, tmp_path / "no.log")])
        assert "in loop" in stacks["learner"] and "no stacks" in stacks["worker-0"]


def life_of(ledger: MemoryLedger, tmp_path: Path, engine: ScriptedEngine, **sections: dict) -> object:
    """What becomes of a worker's life; a life that does not end by itself is stopped and says so."""
    stop = threading.Event()
    timer = threading.Timer(BOUND_S, stop.set)
    timer.start()
    config = worker_config(tmp_path, **sections)
    try:
        ended = outcome_of(lambda: run_worker(config, 0, ledger, ledger, stop, engine_factory=lambda c, k: engine))  # type: ignore[arg-type]
    finally:
        timer.cancel()
    return "it had to be stopped" if stop.is_set() else ended


def test_skyrl_1691_an_engine_that_dies_ends_its_worker_and_frees_what_it_held(tmp_path: Path) -> None:
    """The engine's process died and the run hung on it."""
    ledger = MemoryLedger([publish(tmp_path, 0)], ["12", "34", "56"], drain_when_done=False)
    engine = ScriptedEngine(ledger)

    def die(requests: object) -> None:
        raise ConnectionError("engine core died")

    engine.on_generate = die
    assert life_of(ledger, tmp_path, engine) is ConnectionError
    assert {f.key for f in ledger.failures} == {g.key for g in ledger.granted} != set()
    assert {f.status for f in ledger.failures} == {RewardStatus.NO_VERDICT} and "closed" in ledger.events


def test_nemo_rl_3488_a_helper_that_died_ends_its_role(tmp_path: Path) -> None:
    """The collector was dead, the trainer polled an empty buffer; 64 nodes stood idle for 3.7 hours."""
    ledger = MemoryLedger([publish(tmp_path, 0)], [], drain_when_done=False)
    ledger.fail("heartbeat", Fenced("another worker has this name"))
    assert life_of(ledger, tmp_path, ScriptedEngine(ledger)) is Fenced


def test_nemo_rl_2717_weights_that_do_not_come_end_the_wait_with_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weight sync was a deadlock: idle devices and no error."""
    monkeypatch.setattr(worker, "VERSION_WAIT_S", 0.5)
    absent = publish(tmp_path, 0)
    (tmp_path / absent.path / "model.safetensors").unlink()
    ledger = MemoryLedger([absent], ["12"], drain_when_done=False)
    assert life_of(ledger, tmp_path, ScriptedEngine(ledger)) is NotReady


def test_verl_7611_a_version_that_comes_in_the_middle_of_a_batch_waits_for_its_end(tmp_path: Path) -> None:
    """A weight sync in the middle of partial rollouts crashed the rollouter."""
    ledger = MemoryLedger([publish(tmp_path, 0)], ["12", "34", "56", "78", "90", "21"])
    engine = ScriptedEngine(ledger)
    seen = threading.Event()

    def meanwhile(requests: object) -> None:
        if len(ledger.versions) == 1:
            ledger.versions.append(publish(tmp_path, 1))
            beats = len(ledger.beats)
            wait_until("the worker hears of it", lambda: len(ledger.beats) > beats + 1)
            seen.set()

    engine.on_generate = meanwhile
    assert life_of(ledger, tmp_path, engine) is None and seen.is_set()
    made = [(s.key, s.trajectory.versions[:4]) for s in ledger.submitted.values()]
    assert sorted(made) == [(g.key, g.version.to_bytes(4, "little")) for g in sorted(ledger.granted, key=lambda g: g.key)]
    assert {g.version for g in ledger.granted} == {0, 1} and len(made) == 6


@pytest.mark.parametrize("held_s", [0.0, 61.0])
def test_verl_7155_a_hung_engine_keeps_its_slots_no_longer_than_its_bound(bench: Bench, held_s: float) -> None:
    """A rollout stayed running, and whoever sampled the buffer waited for it for ever."""
    s = bench.scene(attempts_max=5)
    s.feed(1)
    held = s.lease()
    beat = Heartbeat(s.ledger, s.incarnation, 5.0, renew_max_s=60.0)
    beat.hold(held, time.monotonic() - held_s)
    other = s.worker()
    for _ in range(2):
        bench.let_time_pass(20.0)
        beat.beat(0.0)
    taken = s.lease(incarnation=other)
    assert [g.key for g in taken] == ([g.key for g in held] if held_s else [])


def test_nemo_rl_3238_a_straggler_has_spent_its_attempts_also_after_a_restart(bench: Bench) -> None:
    """A rollout that never ended wedged the step, and wedged it again after the resume."""
    s = bench.scene(attempts_max=2, groups_per_step=1, max_lag_versions=5)
    s.feed(3)
    straggler = s.lease(2)
    s.submit(s.lease(4))
    for _ in range(2):
        bench.let_time_pass(100.0)
        bench.crash(s)
        bench.let_time_pass(100.0)
        s.incarnation = s.worker()
        s.lease(2)
    assert bench.rows("SELECT DISTINCT ordinal FROM verdict") == [(straggler[0].key.ordinal,)]
    assert ordinals_of(s.train(1)) == [1], "the others are trained"


def test_nemo_rl_3938_a_prompt_that_always_fails_is_taken_out_and_the_run_goes_on(bench: Bench) -> None:
    """One prompt failed for ever, and more than a hundred devices waited for it."""
    s = bench.scene(attempts_max=3, groups_per_step=1, max_lag_versions=5, infra_failures_max=1.1)
    s.feed(3)
    for _ in range(3):
        bad = [g for g in s.lease(2) if g.key.ordinal == 0]
        reports = [FailureReport(g.key, g.token, s.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "boom") for g in bad]
        s.ledger.report_failures(reports)
    assert s.submit(s.lease(4)) == [ACCEPTED] * 4
    assert [ordinal for (ordinal,) in bench.rows("SELECT DISTINCT ordinal FROM verdict")] == [0]
    assert ordinals_of(s.train(1)) == [1]


def test_nemo_rl_2368_the_first_cause_is_kept_and_told() -> None:
    """Failures of background rollouts were invisible; what ended the run at last was a consequence of them."""
    policy = RestartPolicy(SupervisorConfig(restarts_max=2))
    for at, cause in enumerate(("out of memory", "connection refused", "connection refused")):
        policy.on_death(float(at), cause)
    assert policy.first_cause == "out of memory"


def test_prime_rl_1609_a_spent_budget_ends_the_whole_run_with_the_first_cause(tmp_path: Path, sqlite_url: str) -> None:
    """The budget of restarts was used up, only a background task ended, and the orchestrator went on."""
    counting = f"echo x >> {tmp_path}/n; echo cause $(wc -l < {tmp_path}/n); exit 7"
    with supervised(tmp_path / "run", sqlite_url, {"worker": counting}, restarts_max=2) as run:
        said: list[str] = []

        def live() -> bool:
            try:
                return run.run()
            except RestartBudgetSpent as error:
                said.append(str(error))
                raise

        assert outcome_of(live) is RestartBudgetSpent
        assert "worker-0 died 3 times" in said[0] and "first cause: exit code 7\ncause 1\n" in said[0]
        assert run.left() == []


def test_verl_6395_a_run_that_lacks_steps_is_not_reported_as_a_success(tmp_path: Path, sqlite_url: str, capsys) -> None:
    """The rollouter failed and the run was reported as successful."""
    config = make_config(run={"dir": str(tmp_path), "steps": 2}, ledger={"url": sqlite_url})
    (tmp_path / "versions").mkdir()
    with Ledger(sqlite_url, holder="server") as ledger:
        ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
    assert conclude(config, with_report=False) == 1
    assert "only 0 of 2 steps are recorded" in capsys.readouterr().out


def test_prime_rl_2574_what_a_crashed_supervisor_left_is_ended_before_anything_starts(tmp_path: Path, sqlite_url: str) -> None:
    """After a crash the allocation lived on as a zombie and had to be ended by hand."""
    with supervised(tmp_path / "run", sqlite_url, {"learner": "exit 0"}) as run:
        with python_process("print('ready', flush=True)\nimport time; time.sleep(600)", ROLLBOOK_INCARNATION="zombie") as left:
            run.supervisor.table.put(ProcessRecord("worker-7", left.pid, start_time(left.pid) or 0, "zombie"))
            assert run.run() is True
            wait_until("it has ended", lambda: left.poll() is not None, BOUND_S)
            assert left.returncode == -signal.SIGKILL
        assert any(text.startswith("ending worker-7") for text in run.events)


def test_prime_rl_2912_the_end_of_a_run_waits_for_nobody_longer_than_its_grace(tmp_path: Path, sqlite_url: str) -> None:
    """A dead-lock at the end of the run held six nodes for 2 h 40 min."""
    deaf = "trap '' TERM; while true; do sleep 0.1; done"
    with supervised(tmp_path / "run", sqlite_url, {"learner": "exit 0", "worker": deaf, "feeder": "exit 0"}) as run:
        assert run.run() is True
        assert run.left() == []
        assert "worker-0 did not stop within 1 s; killing it" in run.events


def get(port: int, path: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def page() -> Iterator[tuple[Reporter, HealthPage]]:
    """The health of this thread, which is silent too long after half a second."""
    reporter = Reporter("worker-0", None)
    served = HealthPage(0, Health(reporter, Bounds(startup_s=60.0, busy_s=0.5, idle_s=60.0, stall_s=60.0)))
    yield reporter, served
    served.close()


def test_trl_3433_health_turns_red_when_the_loop_hangs_and_green_when_it_moves(page: tuple[Reporter, HealthPage]) -> None:
    """After an error of its worker the server hung, and nobody was told."""
    reporter, served = page
    reporter.set_ready(True)
    reporter.mark(State.WAITING)
    assert [get(served.port, path)[0] for path in ("/livez", "/readyz", "/progressz")] == [200, 200, 200]
    reporter.mark(State.GENERATING)
    status, said = wait_until("it is noticed", lambda: (a := get(served.port, "/livez"))[0] != 200 and a, BOUND_S)
    assert status == 503 and "the loop has not moved for" in said["reason"] and said["state"] == "generating"
    assert [get(served.port, path)[0] for path in ("/readyz", "/progressz")] == [503, 503]
    helper = threading.Thread(target=reporter.mark)
    helper.start()
    helper.join()
    assert get(served.port, "/livez")[0] == 503, "a helper thread that lives proves nothing about the loop"
    reporter.mark(State.WAITING)
    assert get(served.port, "/livez")[0] == 200

