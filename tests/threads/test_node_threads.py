"""Public threads about nodes and processes that die, and about what they leave behind: real processes, ledger, health.

Each test is named after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ledger_support import Scene, version
from supervised import BOUND_S, supervised
from test_hang_threads import OneRole, get
from threads_support import ACCEPTED, outcome_of

from ledger_bench import Bench
from rollbook.cli.standing import RunWatch
from rollbook.core.errors import ConfigError, RestartBudgetSpent, RoleHeld
from rollbook.core.records import Role, RunRecord
from rollbook.ledger.dialects import sqlite_module
from rollbook.ledger.ledger import Ledger
from rollbook.observe import progress
from rollbook.observe.failpoints import FailpointRaised
from rollbook.observe.health import Health, HealthPage
from rollbook.observe.progress import Bounds, Reporter, State
from rollbook.rollout.worker import run_worker
from rollbook.rpc.server import serve
from rollbook.supervise import memory
from rollbook.supervise.process import ProcessTable, start
from rollout_doubles import ScriptedEngine, publish, worker_config
from run_support import environment, planted, python_process, wait_until
from task_fixtures import make_config

ROLES = ("ledger", "learner", "worker", "feeder")


def restart(s: Scene, bench: Bench, dead: tuple[str, ...], life: int) -> None:
    """These roles died at once; each comes back as its successor, the ledger server first."""
    if "ledger" in dead:
        bench.crash(s)
    if "learner" in dead:
        s.learner = s.ledger.acquire_role(Role.LEARNER, f"learner-{life + 2}", 60.0, supersede=s.learner.holder)
    if "feeder" in dead:
        s.feeder = s.ledger.acquire_role(Role.FEEDER, f"feeder-{life + 2}", 60.0, supersede=s.feeder.holder)
    if "worker" in dead:
        s.incarnation = s.worker()
        bench.let_time_pass(s.record.rules.lease_ttl_s + 1.0)


def test_nemo_rl_3613_whatever_dies_together_comes_back_together(bench: Bench) -> None:
    """Some combinations of restarts were refused, or broke the run."""
    s = bench.scene(attempts_max=30, groups_per_step=1, max_lag_versions=3)
    together = [dead for n in range(1, 5) for dead in itertools.combinations(ROLES, n)]
    for life, dead in enumerate(together):
        s.feed(1)
        s.lease(1)
        assert outcome_of(lambda dead=dead, life=life: restart(s, bench, dead, life)) is None, dead
        bench.let_time_pass(s.record.rules.lease_ttl_s + 1.0)
        s.fill()
        assert outcome_of(lambda step=life + 1: s.train(step).step) == life + 1, dead
    assert s.ledger.run_status()["steps"]["trained"] == len(together) == 15


def test_verl_1314_a_node_that_dies_with_everything_on_it_is_recovered_from(bench: Bench) -> None:
    """What happens when a node fails was answered with an exception."""
    s = bench.scene(attempts_max=5, groups_per_step=1)
    s.feed(2)
    grants = s.lease()
    assert s.submit(grants[:2]) == [ACCEPTED] * 2
    bench.let_time_pass(10.0)
    restart(s, bench, ROLES, 0)
    assert [(g.key, g.token) for g in s.lease()] == [(g.key, 2) for g in grants[2:]]
    assert {item.key for item in s.train(1).items} == {g.key for g in grants[:2]}


def test_verl_429_a_role_that_is_killed_is_named_with_its_cause_and_started_again(tmp_path: Path, sqlite_url: str) -> None:
    """Actors were killed, mostly for memory, and the run ended with an error that said nothing of it."""
    with supervised(tmp_path / "run", sqlite_url, {"learner": "echo loading; kill -9 $$"}, restarts_max=1) as run:
        assert outcome_of(run.run) is RestartBudgetSpent
        died = [text for text in run.events if text.startswith("learner died")]
        assert died and "killed by SIGKILL" in died[0] and "learner started again" in " ".join(run.events)


@pytest.mark.parametrize(("before", "after", "named"), [(3, 4, True), (3, 3, False)])
def test_verl_4921_a_kill_for_want_of_memory_is_told_apart(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, before: int, after: int, named: bool
) -> None:
    """A worker was killed by the kernel for memory; its death was reported as an unknown exit."""
    events = tmp_path / "vmstat"
    events.write_text(f"nr_free_pages 12\noom_kill {before}\n")
    for name in ("CGROUPS", "OWN_CGROUP"):
        monkeypatch.setattr(memory, name, tmp_path / "absent")
    monkeypatch.setattr(memory, "VMSTAT", events)
    kills = f"echo oom_kill {after} > {events}; kill -9 $$"
    with supervised(tmp_path / "run", sqlite_url, {"learner": kills}, restarts_max=0) as run:
        said: list[str] = []
        try:
            run.run()
        except RestartBudgetSpent as error:
            said.append(str(error))
        assert ("killed for want of memory" in said[0]) is named


def test_trl_3408_workers_go_on_with_the_learner_that_replaces_a_dead_one(bench: Bench) -> None:
    """After a crash of the trainer the generation server could not be used any more."""
    s = bench.scene(groups_per_step=1)
    s.feed(3)
    held = s.lease()
    successor = outcome_of(lambda: s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="learner-1"))
    assert successor is not RoleHeld and successor.epoch == 2
    s.learner = successor
    assert s.submit(held) == [ACCEPTED] * 4
    s.train(1)
    assert {g.version for g in s.lease(loaded=version(1))} == {1}


def test_nemo_rl_3592_a_restarted_worker_works_as_much_as_before(tmp_path: Path, sqlite_url: str, monkeypatch) -> None:
    """A restarted shard got its weights and stayed idle for ever; tests of its parts had hidden it."""
    config = worker_config(tmp_path, ledger={"url": sqlite_url, "lease_ttl_s": 600.0, "heartbeat_s": 0.1, "attempts_max": 9})
    with Ledger(sqlite_url, holder="server") as ledger:
        record = RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules())
        s = Scene(ledger, record, publish=False)
        ledger.publish_version(s.learner, publish(tmp_path, 0))
        s.feed(2)

        def live(name: str, dead: str, engine: ScriptedEngine) -> object:
            monkeypatch.setenv("ROLLBOOK_INCARNATION", name)
            monkeypatch.setenv("ROLLBOOK_SUPERSEDES", dead)
            stop = threading.Event()
            engine.answer = lambda request: [49, 257]
            done = threading.Timer(BOUND_S, stop.set)
            done.start()
            try:
                return outcome_of(lambda: run_worker(config, 0, ledger, ledger, stop, engine_factory=lambda c, k: engine))  # type: ignore[arg-type]
            finally:
                done.cancel()

        class Killed(ScriptedEngine):
            def generate(self, *rest: object) -> list:
                raise FailpointRaised("the process dies here, holding every slot")

        monkeypatch.setattr(ledger, "report_failures", lambda failures: [])  # a process that is killed reports nothing
        assert live("first", "", Killed()) is FailpointRaised
        monkeypatch.undo()
        held = ledger.run_status()["slots"]["leased"]
        second = ScriptedEngine()

        def drain_when_filled() -> None:
            wait_until("its slots are filled", lambda: len(second.generated) >= 4 or not running.is_set(), BOUND_S)
            ledger.drain()

        running = threading.Event()
        running.set()
        finisher = threading.Thread(target=drain_when_filled)
        finisher.start()
        ended = live("second", "first", second)
        running.clear()
        finisher.join()
        assert ended is None
        assert held == 4 and len(set(second.generated)) == 4, "all of its slots, none after a TTL"


OUTLIVES = """
import subprocess, sys, time
from rollbook.supervise.process import die_with_supervisor
die_with_supervisor()
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
SUPERVISES = """
import signal, sys, time
from pathlib import Path
from rollbook.supervise.guardian import Guardian
from rollbook.supervise.process import ProcessTable, start
folder = Path(sys.argv[1])
guardian = Guardian(folder)
guardian.start()
start("worker-0", [sys.executable, "-c", sys.argv[2]], folder / "role.log", {}, ProcessTable(folder / "processes.json"))
print("ready", flush=True)
time.sleep(600)
"""


def test_prime_rl_2028_nothing_outlives_its_supervisor(tmp_path: Path) -> None:
    """Environment servers outlived the orchestrator, and the job looked as if it ran."""
    with python_process(SUPERVISES, str(tmp_path), OUTLIVES) as supervisor:
        log = tmp_path / "role.log"
        wait_until("the role has started its own", lambda: log.exists() and "ready" in log.read_text(), BOUND_S)
        record = ProcessTable(tmp_path / "processes.json").records()["worker-0"]
        assert len(record.tree()) == 3
        supervisor.kill()
        supervisor.wait()
        (guardian,) = ProcessTable(tmp_path / "guardian.json").records().values()
        wait_until("its guardian has done its work", lambda: not guardian.alive(), BOUND_S)
        left = record.tree()
        record.kill_tree()
        assert left == []


def test_skyrl_1216_what_an_engine_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    """Engine processes were left behind and kept the devices' memory."""
    table = ProcessTable(tmp_path / "processes.json")
    role = start("worker-0", [sys.executable, "-c", OUTLIVES], tmp_path / "role.log", {}, table)
    try:
        log = tmp_path / "role.log"
        wait_until("the role has started its own", lambda: log.exists() and "ready" in log.read_text(), BOUND_S)
        assert len(role.record.tree()) == 3
        os.kill(role.record.pid, signal.SIGKILL)
        assert wait_until("its death is noticed", role.exit_code, BOUND_S) == -signal.SIGKILL
        deadline = time.monotonic() + 5.0
        while role.record.tree() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = role.record.tree()
        assert left == []
    finally:
        for pid in role.record.tree():
            os.kill(pid, signal.SIGKILL)


def test_training_gym_307_a_cold_engine_is_neither_killed_nor_called_dead(tmp_path: Path) -> None:
    """A health probe killed an engine that was still compiling; nothing started it again."""
    one = OneRole(tmp_path, startup_s=300.0, busy_s=100.0, idle_s=20.0)
    compiling = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    with one.role(compiling) as process:
        one.follow(process.pid)
        assert one.pass_time(299.0) == "", "longer than a role at work may be silent"
        assert "while starting" in one.pass_time(2.0), "but not for ever"
    reporter = Reporter("worker-0", None)
    health = Health(reporter, Bounds(startup_s=300.0, busy_s=0.0, idle_s=0.0, stall_s=0.0))
    assert [health.answer(path)[0] for path in ("/livez", "/readyz", "/progressz")] == [200, 503, 200]
    reporter.mark(State.GENERATING)
    assert health.answer("/livez")[0] == health.answer("/progressz")[0] == 503


def test_sglang_8115_health_asks_the_database_and_says_what_is_wrong(tmp_path: Path, sqlite_url: str) -> None:
    """The health endpoint answered 200 whatever was the matter."""
    config = make_config(run={"dir": str(tmp_path)}, ledger={"url": sqlite_url})
    reporter = progress.open_reporter("ledger", None)
    page = HealthPage(0, Health(reporter, Bounds.of(config)))
    try:
        assert get(page.port, "/readyz")[0] == 503, "it is starting"
        with Ledger(sqlite_url, holder="server") as ledger:
            ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
            RunWatch(config, ledger).look()
            status, said = get(page.port, "/readyz")
            assert (status, said["reason"]) == (200, "yes")
            assert get(page.port, "/healthz")[0] == 404
            with sqlite_module().connect(sqlite_url.removeprefix("sqlite:///")) as db:
                db.execute("UPDATE fence SET epoch = epoch + 1, holder = 'successor' WHERE role = 'ledger'")
            ready = wait_until("the lost fence is told", lambda: (a := get(page.port, "/readyz"))[0] != 200 and a, BOUND_S)
            assert ready[0] == 503 and "ServerFenced" in ready[1]["reason"]
            assert get(page.port, "/livez")[0] == 200, "a database that fails restarts nobody"
    finally:
        page.close()
        progress.close_reporter()


def test_skyrl_284_a_port_is_taken_again_after_a_crash_and_never_shared(tmp_path: Path, sqlite_url: str) -> None:
    """After a crash the address was said to be in use."""
    with Ledger(sqlite_url, holder="server") as ledger:
        first = serve(ledger, "127.0.0.1:0", run_id="run")
        shared = outcome_of(lambda: serve(ledger, first.address, run_id="run"))
        if shared is not ConfigError:
            shared.stop(0.0)
        first.stop(0.0)
        assert shared is ConfigError
        again = serve(ledger, first.address, run_id="run")
        assert again.address == first.address
        again.stop(0.0)


def test_easyr1_97_every_attempt_has_a_name_of_its_own_and_knows_whom_it_replaces(tmp_path: Path) -> None:
    """After a retry the name of the placement group existed already."""
    table, seen = ProcessTable(tmp_path / "processes.json"), []
    say = ["sh", "-c", "echo $ROLLBOOK_INCARNATION $ROLLBOOK_SUPERSEDES"]
    for _ in range(3):
        role = start("worker-0", say, tmp_path / "role.log", {}, table)
        assert wait_until("it ends", lambda role=role: role.exit_code() is not None, BOUND_S)
        seen.append(role.record.incarnation)
    told = [line.split() for line in (tmp_path / "role.log").read_text().splitlines()]
    assert len(set(seen)) == 3
    assert told == [[seen[0]], [seen[1], seen[0]], [seen[2], seen[1]]]


PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from rollbook.learner.checkpoint import _fill
from rollbook.learner.state import Progress, TrainingState
size = 32 << 20
tensors = {"model": {"w": torch.ones(size // 4)}, "optimizer": {f"m{i}": torch.ones(size // 8) for i in range(4)}}
values = {"progress": Progress(chain_digest="c").to_values() | {"cursor": None}, "config_digest": "d",
          "config_json": '{"learner": {}}'}
state = TrainingState(tensors=tensors, values=values)
_fill(Path(sys.argv[1]) / "warm", TrainingState(tensors={"model": {"w": torch.ones(4)}, "optimizer": {}}, values=values), 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_fill(Path(sys.argv[1]) / "big", state, 1)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown": (after - before) * 1024, "state": 3 * size}))
"""


def test_verl_402_saving_a_checkpoint_takes_no_second_copy_of_it_in_memory(tmp_path: Path) -> None:
    """Saving and resuming ran out of memory."""
    done = subprocess.run(
        [sys.executable, "-c", planted(PEAK), str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=300.0,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["grown"] < 0.5 * measured["state"], measured
