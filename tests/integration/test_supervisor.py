"""``rollbook run`` as a user starts it: real processes that are killed, stopped, refused, drained and started again."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.core.config import load_config
from rollbook.supervise import supervisor as supervisor_module
from rollbook.supervise import watchdog
from rollbook.supervise.local import LocalSupervisor
from rollbook.supervise.process import ProcessRecord, ProcessTable, start_time
from run_support import ROLLBOOK, TinyRun, environment, wait_until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path)
    yield run
    run.end()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, str]]:
    """A run in which the learner and the worker were killed once each, and what it printed."""
    kills = {"learner.after_publish": "crash@2", "worker.after_generate": "crash"}
    run = TinyRun(tmp_path_factory.mktemp("finished"), kills)
    code, output = run.run()
    assert code == 0, f"{output}\n{run.tails()}"
    yield run, output
    run.end()


def lines_of_steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/\d+ ", output)]


def test_killed_roles_are_started_again_and_the_run_completes(finished: tuple[TinyRun, str]) -> None:
    run, output = finished
    assert {p.name for p in run.markers.iterdir()} == {"learner.after_publish@2", "worker.after_generate@1"}
    for role in ("learner", "worker-0"):
        assert f"{role} died (killed by SIGKILL); starting it again" in output
        assert f"{role} started again" in output
    assert "restarts: learner 1, worker-0 1" in output
    assert output.count("audit: clean") == 1
    assert run.alive() == []
    assert not (run.dir / "ledger.address").exists()


def test_without_a_terminal_every_step_is_one_plain_line(finished: tuple[TinyRun, str]) -> None:
    _, output = finished
    assert lines_of_steps(output) == [1, 2, 3]
    assert "a new run: nothing is recorded yet" in output
    assert "\x1b[" not in output


def test_a_run_that_is_complete_says_so_and_starts_no_engine(finished: tuple[TinyRun, str]) -> None:
    run, _ = finished
    before = {role: run.log(role) for role in ("feeder", "learner", "worker-0")}
    code, output = run.run("--no-report")
    assert code == 0, output
    assert "complete: all 3 steps are made and checkpointed" in output and "audit: clean" in output
    assert lines_of_steps(output) == []
    assert {role: run.log(role) for role in before} == before


def test_a_finished_run_can_be_replayed_and_its_rollouts_made_again(finished: tuple[TinyRun, str]) -> None:
    run, _ = finished
    code, text = run.command("replay", str(run.dir))
    assert code == 0 and json.loads(text)["equal"] is True and json.loads(text)["steps"] == 3
    code, text = run.command("regenerate", str(run.dir), "0.1")
    made = json.loads(text)
    assert code == 0 and made["tokens_equal"] is True
    assert made["made_by"] == "transformers" and made["generated_by"] == "transformers (float32 on cpu)"
    assert "depend on the batch" in made["note"]


def test_another_configuration_is_refused_with_its_difference_and_exit_code_2(finished: tuple[TinyRun, str]) -> None:
    run, _ = finished
    code, output = run.run("--set", "run.steps=4")
    assert code == 2
    assert "ledger refuses to start" in output and "run.steps: 3 -> 4" in output
    assert run.alive() == []


def test_more_steps_are_made_when_the_change_is_accepted_and_a_terminal_gets_the_live_view(
    finished: tuple[TinyRun, str],
) -> None:
    run, _ = finished
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS="160", LINES="40")
    process = subprocess.Popen(
        [*ROLLBOOK, "run", str(run.config), "--set", "run.steps=4", "--accept", "run.steps", "--no-report"],
        env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=run.root,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass  # how a pseudo-terminal says that its other side is closed
    os.close(ours)
    screen = shown.decode(errors="replace")
    assert process.wait(60) == 0, screen[-3000:]
    assert "resuming from the checkpoint of step 3 of 4" in screen
    assert "\x1b[" in screen and "slots  issued 8" in screen and "step 4/4" in screen
    first, *others = run.command("status", str(run.dir))[1].splitlines()
    assert first.startswith("COMPLETE  waits for nothing") and any(line.startswith("run tiny  step 4/4") for line in others)


def test_a_stalled_run_is_reported_with_the_stacks_of_every_role_then_drains_and_goes_on(tiny: TinyRun) -> None:
    tiny.failpoints = {"worker.after_lease": "delay:600@2"}
    limits = ["--set", "supervisor.stall_s=4", "--set", "supervisor.drain_s=3"]
    tiny.start(*limits)
    tiny.wait_fired("worker.after_lease@2")
    # The run may have been reported while it was starting; the report that counts names the line that hangs.
    stacks = wait_until("a report of the hanging worker", lambda: stacks_of_stall(tiny, "failpoints.py"))
    assert sorted(stacks) == ["feeder", "learner", "ledger", "worker-0"]
    assert "in _fire" in stacks["worker-0"]
    for role, stack in stacks.items():
        assert "most recent call first" in stack and "roles.py" in stack, f"{role}\n{stack}"
    told = tiny.wait_for("1 steps finished, 1 planned; slots: ")
    assert "STALL: no finished step for" in told and "1 workers heard of in the last minute" in told

    code, text = tiny.command("status", str(tiny.config))
    assert code == 0 and "worker " in text and "no ledger server answers" not in text
    tiny.signal(signal.SIGINT)
    assert tiny.code() == 130
    output = tiny.output()
    assert "worker-0 did not stop within 3 s; killing it" in output
    assert "stopped; the same command goes on from here" in output
    assert tiny.alive() == []

    code, output = tiny.run(*limits, "--no-report")
    assert code == 0, f"{output}\n{tiny.tails()}"
    assert "resuming from the checkpoint of step 1 of 3" in output
    assert lines_of_steps(output) == [2, 3]


def stacks_of_stall(run: TinyRun, named: str) -> dict[str, str]:
    """By role, out of the first stall report whose worker stands in ``named``; empty when there is none yet."""
    for file in sorted((run.dir / "supervisor" / "stalls").glob("*.txt")):
        _, *parts = file.read_text().split("===== ")
        stacks = {part.partition("\n")[0]: part for part in parts}
        if named in stacks.get("worker-0", ""):
            return stacks
    return {}


def test_a_second_signal_kills_at_once_also_while_the_roles_start(tiny: TinyRun) -> None:
    tiny.start("--set", "supervisor.drain_s=600")
    ledger = wait_until("the ledger server is started", lambda: tiny.records().get("ledger"))
    wait_until("it runs", lambda: tiny.records()["ledger"].alive())
    assert tiny.records()["ledger"].signal(signal.SIGSTOP), "a role that cannot react"
    tiny.signal(signal.SIGTERM)
    tiny.wait_for("a second signal kills at once")
    tiny.signal(signal.SIGTERM)
    assert tiny.code() == 130
    assert "killing ledger" in tiny.output() and not ledger.tree()


def test_roles_die_with_their_supervisor_and_the_next_one_ends_what_is_left(tiny: TinyRun) -> None:
    tiny.failpoints = {"worker.after_lease": "delay:600@2"}
    tiny.start()
    tiny.wait_fired("worker.after_lease@2")
    assert sorted(tiny.alive()) == ["feeder", "learner", "ledger", "worker-0"]
    assert tiny.process is not None
    code, text = tiny.command("run", str(tiny.config))
    assert code == 1 and f"another supervisor (pid {tiny.process.pid}) runs 'tiny'" in text
    for role in ("learner", "feeder"):  # told to stop by somebody else, which is no end of their work
        assert tiny.records()[role].signal(signal.SIGTERM)
        tiny.wait_for(f"{role} died (told to stop by somebody else, exit code 130)")
        tiny.wait_for(f"{role} started again")

    tiny.signal(signal.SIGKILL)
    assert tiny.code() == -signal.SIGKILL
    wait_until("every role is gone", lambda: not tiny.alive(), bound_s=20)
    code, text = tiny.command("status", str(tiny.config))
    assert code == 0 and "no ledger server answers" in text, "an address that nobody answers at is no server"

    left = subprocess.Popen(["sleep", "600"], env={"ROLLBOOK_INCARNATION": "left-over"}, start_new_session=True)
    table = ProcessTable(tiny.dir / "supervisor" / "processes.json")
    table.put(ProcessRecord("worker-9", left.pid, start_time(left.pid) or 0, "left-over"))
    code, output = tiny.run("--no-report")
    assert code == 0, f"{output}\n{tiny.tails()}"
    assert f"ending worker-9 (pid {left.pid}) left by an earlier supervisor" in output
    assert left.wait(10) == -signal.SIGKILL
    assert lines_of_steps(output) == [2, 3]


def test_a_spent_restart_budget_ends_the_run_with_the_first_cause(tiny: TinyRun) -> None:
    tiny.failpoints, tiny.once = {"ledger.before_commit": "crash"}, False
    code, output = tiny.run("--set", "supervisor.restarts_max=1")
    assert code == 1
    assert "ledger died (killed by SIGKILL); starting it again in 0.1 s" in output
    assert "RestartBudgetSpent: ledger died 2 times" in output
    first = output.partition("first cause: killed by SIGKILL\n")[2]
    assert "Create the ledger" in first, "what the first process wrote; the second had nothing to create\n" + output
    assert "audit" not in output
    assert tiny.alive() == []
    assert "ledger died" in tiny.log("supervisor") and "RestartBudgetSpent" in tiny.log("supervisor")


def test_a_wrong_configuration_starts_nothing(tiny: TinyRun) -> None:
    for override, named in (
        ("learner.group_sice=2", "learner.group_size"),
        ("supervisor.stall_s=0", "supervisor.stall_s"),
        ("task.answer_field=nothing", "nothing"),
    ):
        code, text = tiny.command("run", str(tiny.config), "--set", override)
        assert code == 2 and named in text, text
    assert not (tiny.dir / "logs").exists()


def test_a_ledger_server_that_hangs_is_replaced(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that the bound can be short; the roles are processes all the same."""
    monkeypatch.setattr(supervisor_module, "HANG_S_MIN", 6.0)
    monkeypatch.setattr(watchdog, "ANSWER_S", 2.0)
    for name, value in environment(ROLLBOOK_FAILPOINTS="learner.before_plan=delay:1.5").items():
        monkeypatch.setenv(name, value)
    events: list[str] = []
    config = load_config(tiny.config, ["ledger.role_ttl_s=3.0"])
    supervisor = LocalSupervisor(config, [str(tiny.config), "--set", "ledger.role_ttl_s=3.0"], events.append)
    stopped: list[ProcessRecord] = []

    def stop_the_ledger(point: object) -> None:
        record = tiny.records()["ledger"]
        assert record.signal(signal.SIGSTOP)
        stopped.append(record)

    assert supervisor.run(stop_the_ledger)
    assert any("the ledger server lives but has answered nothing" in event for event in events), events
    assert "ledger died (killed by SIGKILL); starting it again in 0.1 s" in events
    assert tiny.records()["ledger"].incarnation != stopped[0].incarnation
    assert supervisor.deaths() == {"ledger": 1}, events
    assert tiny.steps() == [1, 2, 3]
    assert json.loads((tiny.dir / "report" / "metrics.json").read_text())[-1]["step"] == 3
