"""Processes of roles: who is killed and who is not, what is remembered of them, and how large their logs may grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.supervise import logs
from rollbook.supervise.process import (
    EXIT_UNKNOWN,
    ProcessRecord,
    ProcessTable,
    RoleProcess,
    processes_with,
    start,
    start_time,
)
from run_support import environment, wait_until

SPAWNS_AND_DIES = """
import subprocess, sys
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
sys.exit(3)
"""
BOUND_S = 30.0


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    table = ProcessTable(tmp_path / "processes.json")
    yield table
    for record in table.records().values():
        record.kill_tree()


def started(table: ProcessTable, tmp_path: Path, *argv: str) -> RoleProcess:
    return start("role", argv, tmp_path / "role.log", {"EXTRA": "1"}, table)


def code_of(process: RoleProcess) -> int:
    wait_until("the process ends", lambda: process.exit_code() is not None, BOUND_S)
    code = process.exit_code()
    assert code is not None
    return code


def test_what_a_dead_role_had_started_is_ended_with_it(table: ProcessTable, tmp_path: Path) -> None:
    process = started(table, tmp_path, sys.executable, "-c", SPAWNS_AND_DIES)
    assert code_of(process) == 3
    wait_until("its children are gone", lambda: process.record.tree() == [], BOUND_S)


def test_killing_a_role_reports_the_signal(table: ProcessTable, tmp_path: Path) -> None:
    process = started(table, tmp_path, "sleep", "600")
    assert process.exit_code() is None and process.record.alive()
    process.kill()
    assert code_of(process) == -signal.SIGKILL
    assert not process.record.alive() and not process.record.signal(signal.SIGTERM)


def test_a_lost_exit_code_is_no_success(table: ProcessTable, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert code_of(started(table, tmp_path, "true")) == EXIT_UNKNOWN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_foreign_process_with_the_same_pid_is_not_killed() -> None:
    foreign = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        recycled = ProcessRecord("worker-0", foreign.pid, (start_time(foreign.pid) or 0) - 1, "somebody-else")
        assert not recycled.alive() and recycled.tree() == []
        recycled.kill_tree()
        recycled.end(0.0)
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_a_role_that_was_only_about_to_be_started_names_no_process() -> None:
    intent = ProcessRecord("worker-0", 0, 0, "never-started")
    assert not intent.alive() and intent.tree() == []
    intent.kill_tree()


def test_a_role_is_in_the_table_before_it_runs_even_when_it_cannot_be_started(table: ProcessTable, tmp_path: Path) -> None:
    first = started(table, tmp_path, "true")
    assert code_of(first) == 0
    with pytest.raises(FileNotFoundError):
        started(table, tmp_path, str(tmp_path / "no-such-program"))
    stored = json.loads((tmp_path / "processes.json").read_text())
    assert [r["pid"] for r in stored] == [0] and stored[0]["incarnation"] != first.record.incarnation


def test_a_role_is_told_who_it_is_and_whom_it_replaces(table: ProcessTable, tmp_path: Path) -> None:
    show = ("sh", "-c", "echo $ROLLBOOK_INCARNATION $ROLLBOOK_SUPERSEDES $ROLLBOOK_SUPERVISED $EXTRA")
    first = started(table, tmp_path, *show)
    assert code_of(first) == 0
    second = started(table, tmp_path, *show)
    assert code_of(second) == 0
    lines = [line.split() for line in (tmp_path / "role.log").read_text().splitlines()]
    mine = str(os.getpid())
    assert lines == [[first.record.incarnation, mine, "1"], [second.record.incarnation, first.record.incarnation, mine, "1"]]
    assert ProcessTable(tmp_path / "processes.json").records()["role"] == second.record


def test_a_table_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    for damaged in ("", "{", '["x"]', '[{"name": "worker-0"}]', '{"name": 1}'):
        (tmp_path / "processes.json").write_text(damaged)
        assert ProcessTable(tmp_path / "processes.json").records() == {}


def test_a_role_whose_supervisor_died_before_it_could_look_kills_itself(tmp_path: Path) -> None:
    """The process that started it stands for whoever inherits orphans: not the supervisor named in the environment."""
    code = "from rollbook.supervise.process import die_with_supervisor\ndie_with_supervisor()\nprint('lives')"
    for supervisor, expected in ((str(os.getpid()), (0, b"lives\n")), ("1", (-signal.SIGKILL, b"")), ("", (0, b"lives\n"))):
        env = environment(ROLLBOOK_SUPERVISED=supervisor)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=BOUND_S, check=False)
        assert (done.returncode, done.stdout) == expected, done.stderr


STARTS_ONE = """
import sys
from pathlib import Path
from rollbook.supervise.process import ProcessTable, start
root = Path(sys.argv[1])
start("role", ["sleep", "600"], root / "role.log", {}, ProcessTable(root / "processes.json"))
"""


@pytest.mark.parametrize(
    ("armed", "known", "running"),
    [
        ("supervisor.table.before_rename=crash", False, 0),
        ("supervisor.start.before_spawn=crash", True, 0),
        ("supervisor.start.after_spawn=crash", True, 1),
        ("supervisor.table.before_rename=crash@2", True, 1),
    ],
)
def test_what_a_supervisor_had_started_when_it_died_is_found_and_ended(
    tmp_path: Path, armed: str, known: bool, running: int
) -> None:
    env = environment(ROLLBOOK_FAILPOINTS=armed)
    done = subprocess.run([sys.executable, "-c", STARTS_ONE, str(tmp_path)], env=env, timeout=BOUND_S, check=False)
    assert done.returncode == -signal.SIGKILL
    left = ProcessTable(tmp_path / "processes.json").records()
    assert list(left) == (["role"] if known else [])
    for record in left.values():
        assert len(record.tree()) == running
        record.kill_tree()
        wait_until("it is gone", lambda record=record: record.tree() == [], BOUND_S)


def test_a_signal_is_sent_only_where_it_is_caught(table: ProcessTable, tmp_path: Path) -> None:
    catching = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nprint('ready', flush=True)\ntime.sleep(600)"
    process = started(table, tmp_path, sys.executable, "-c", catching)
    wait_until("the handler is set", lambda: "ready" in (tmp_path / "role.log").read_text(), BOUND_S)
    assert process.record.catches(signal.SIGUSR1) and not process.record.catches(signal.SIGUSR2)
    process.kill()
    code_of(process)
    assert not process.record.catches(signal.SIGUSR1)


def test_processes_are_found_by_a_whole_variable_only() -> None:
    process = subprocess.Popen(["sleep", "600"], env={"ROLLBOOK_INCARNATION": "abcdef"})
    try:
        wait_until("it runs", lambda: processes_with("ROLLBOOK_INCARNATION", "abcdef") == [process.pid], BOUND_S)
        assert processes_with("ROLLBOOK_INCARNATION", "abc") == []
    finally:
        process.kill()
        process.wait()


def test_a_log_is_moved_away_only_beyond_its_bound_while_its_role_goes_on_writing(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    with log.open("ab", buffering=0) as role:
        role.write(b"x" * 100)
        assert not logs.keep_small(log, bytes_max=100)
        role.write(b"y")
        assert logs.keep_small(log, bytes_max=100)
        role.write(b"after\n")
    assert (tmp_path / "role.log.1").read_bytes() == b"x" * 100 + b"y"
    assert log.read_bytes() == b"after\n"
    assert not logs.keep_small(tmp_path / "absent.log")


def test_only_what_a_process_itself_wrote_is_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    log.write_text("earlier process\n")
    offset = logs.size(log)
    assert logs.last_lines(log, offset) == ""
    with log.open("a") as out:
        out.write("one\ntwo\nthree\n")
    assert logs.last_lines(log, offset) == "one\ntwo\nthree"
    assert logs.last_lines(log, offset, n=2) == "two\nthree"
    assert logs.since(log, offset, bytes_max=6) == "three\n"
    log.write_text("anew\n")
    assert logs.last_lines(log, offset) == "anew", "a log that began again is read from its beginning"
    assert logs.last_lines(tmp_path / "absent.log") == ""
