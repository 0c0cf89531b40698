"""Roles that are forked instead of started: the same processes to the supervisor, and an ordinary start where that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_support import TinyRun, environment, wait_until

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import json, os, signal, subprocess, sys, tempfile
from pathlib import Path
from rollbook.supervise import process
from rollbook.supervise.forkserver import ONE_THREAD, ForkServer, ForkedRole
from rollbook.supervise.process import ProcessTable, role_command, start

def entry(argv):
    process.die_with_supervisor()
    print(json.dumps({"argv": argv, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "files": sorted(os.listdir("/proc/self/fd")),
        "env": {k: os.environ.get(k) for k in ("ROLLBOOK_INCARNATION", "MARK", "ONLY")}}), flush=True)
    if argv[0] == "fail":
        raise ValueError("what the role says")
    if argv[0] == "wait":
        signal.pause()
    return 7

def role(name, threads="1", launch=None):
    log = folder / f"{name}.log"
    env = {**ONE_THREAD, "OMP_NUM_THREADS": threads, "MARK": "yes"}
    one = start(name, role_command(name, "x"), log, env, table, launch or server.launch)
    if name == "wait":
        while not log.read_text().strip(): pass
        one.record.signal(signal.SIGKILL)
    while (code := one.exit_code()) is None: pass
    return {"forked": isinstance(one._handle, ForkedRole), "code": code, "pid": one.record.pid, "log": log.read_text()}

folder = Path(sys.argv[1])
table = ProcessTable(folder / "table.json")
server = ForkServer(entry, modules=("json",))
out = {"me": os.getpid(), "server": server.pid, "ends": role("end"), "dies": role("wait"), "fails": role("fail")}
out["threads"] = role("threads", threads="2")

def refused(argv, env, log, known):
    def full(pid):
        out["unknown"] = pid
        raise OSError("no space")
    return server.launch(argv, env, log, full)
try:
    role("unknown", launch=refused)
except OSError as error:
    out["refused"] = str(error)
while process.start_time(out["unknown"]) is not None: pass
out["never_ran"] = (folder / "unknown.log").read_text()
os.kill(server.pid, signal.SIGKILL)
out["after"] = role("after")
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a process with a fork server saw of the roles it started."""
    folder = tmp_path_factory.mktemp("forked")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment(ONLY="parent"), capture_output=True, text=True, timeout=200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_forked_role_is_a_child_of_the_supervisor_in_a_session_of_its_own(told: dict) -> None:
    ended = told["ends"]
    said = json.loads(ended["log"])
    assert ended["forked"] and ended["code"] == 7
    assert said["argv"] == ["end", "x"] and said["parent"] == told["me"]
    assert said["pid"] == said["session"] == ended["pid"]


def test_a_forked_role_has_the_environment_it_was_given_and_no_file_but_its_own(told: dict) -> None:
    said = json.loads(told["ends"]["log"])
    assert said["env"]["MARK"] == "yes" and said["env"]["ONLY"] == "parent" and len(said["env"]["ROLLBOOK_INCARNATION"]) == 32
    assert said["files"][:3] == ["0", "1", "2"] and len(said["files"]) == 4, "the fourth is the listing itself"


def test_how_a_forked_role_died_is_known(told: dict) -> None:
    assert told["dies"]["code"] == -signal.SIGKILL
    assert told["fails"]["code"] == 1 and "ValueError: what the role says" in told["fails"]["log"]


def test_a_role_with_more_threads_is_started_in_the_ordinary_way(told: dict) -> None:
    assert not told["threads"]["forked"] and told["threads"]["code"] == 2
    assert "invalid choice: 'threads'" in told["threads"]["log"], "the real command line, which knows no such role"


def test_a_role_whose_pid_could_not_be_recorded_never_runs(told: dict) -> None:
    assert told["refused"] == "no space" and told["never_ran"] == ""


def test_without_its_fork_server_a_role_is_started_in_the_ordinary_way(told: dict) -> None:
    assert not told["after"]["forked"] and told["after"]["code"] == 2


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path, {"learner.after_publish": "crash@2", "worker.after_lease": "pause@2"})
    yield run
    run.end()


def test_a_run_goes_on_when_its_fork_server_is_killed(tiny: TinyRun) -> None:
    tiny.start("--fork-server", "--no-report")
    tiny.wait_fired("worker.after_lease@2")
    worker = tiny.records()["worker-0"]
    assert "--fork-server" in command_line(worker.pid), "a forked role shows what it was forked from"
    others = set(children(tiny.process.pid)) - {record.pid for record in tiny.records().values()}
    (server,) = {pid for pid in others if "rollbook.supervise.guardian" not in command_line(pid)}
    os.kill(server, signal.SIGKILL)
    assert worker.signal(signal.SIGKILL)
    wait_until("the worker is started again", lambda: tiny.records()["worker-0"].pid not in (0, worker.pid))
    again = tiny.records()["worker-0"].pid
    wait_until("it runs", lambda: "worker" in command_line(again) and "--fork-server" not in command_line(again))
    assert tiny.code() == 0, f"{tiny.output()}\n{tiny.tails()}"
    assert "audit: clean" in tiny.output() and "learner 1" in tiny.output()
    assert tiny.alive() == []


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(name))
    return found
