"""Roles as any scheduler runs them: health over HTTP, an end within the grace, exit codes; and roles that hang under ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.supervise.policy import EXIT_LATE, EXIT_STOPPED
from run_support import BOUND_S, ROLLBOOK, TinyRun, environment, wait_until

pytestmark = pytest.mark.timeout(900)
ROLES = ("ledger", "feeder", "learner", "worker")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path)
    yield run
    run.end()


class Plain:
    """The roles of a run without a supervisor."""

    def __init__(self, run: TinyRun, steps: int) -> None:
        self.run = run
        self.settings = ["--set", f"run.steps={steps}", "--set", "supervisor.drain_s=30", "--set", "run.chaos_allowed=true"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {role: free_port() for role in ROLES}

    def start(self, role: str, *arguments: str, **env: str) -> None:
        with (self.run.root / f"{role}.txt").open("ab") as out:
            self.processes[role] = subprocess.Popen(
                [*ROLLBOOK, role, str(self.run.config), *self.settings, "--health-port", str(self.ports[role]), *arguments],
                env=environment(**env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def health(self, role: str, path: str) -> int:
        """HTTP status; 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[role]}{path}", timeout=10.0) as answer:
                return answer.status if json.load(answer)["ok"] else -1
        except urllib.error.HTTPError as error:
            assert not json.load(error)["ok"]
            return error.code
        except OSError:
            return 0

    def leased(self) -> int:
        code, text = self.run.command("status", str(self.run.config), "--json")
        assert code == 0, text
        return json.loads(text)["slots"]["leased"]

    def stop(self, role: str) -> int:
        self.processes[role].send_signal(signal.SIGTERM)
        return self.processes[role].wait(BOUND_S)

    def said(self) -> str:
        return "\n".join(f"--- {role}\n{(self.run.root / f'{role}.txt').read_text()[-2500:]}" for role in self.processes)

    def end(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def plain(tiny: TinyRun) -> Iterator[Plain]:
    roles = Plain(tiny, steps=100_000)
    yield roles
    roles.end()


def test_every_role_shows_its_health_and_ends_within_its_grace(plain: Plain) -> None:
    for role in ROLES:
        plain.start(role)
    for role in ROLES:
        wait_until(f"{role} is alive", lambda role=role: plain.health(role, "/livez") == 200)
        wait_until(f"{role} is ready\n{plain.said()}", lambda role=role: plain.health(role, "/readyz") == 200)
        assert plain.health(role, "/progressz") == 200
    wait_until(
        "a step is finished", lambda: "finished step 2" in (plain.run.root / "learner.txt").read_text(), bound_s=2 * BOUND_S
    )
    assert [plain.stop(role) for role in ("worker", "learner", "feeder")] == [EXIT_STOPPED] * 3, plain.said()
    assert "committed a checkpoint" in (plain.run.root / "learner.txt").read_text()
    assert plain.leased() == 0, "a worker that ends in order holds nothing"

    plain.start("worker", ROLLBOOK_FAILPOINTS="worker.mid_generate=delay:600")
    plain.settings[3] = "supervisor.drain_s=2"
    plain.processes["worker"].kill()
    plain.processes["worker"].wait()
    plain.start("learner")
    plain.start("worker", ROLLBOOK_FAILPOINTS="worker.mid_generate=delay:600")
    wait_until("the worker hangs with slots in hand", lambda: (plain.run.dir / "spool" / "worker-0" / "leases.json").exists())
    assert plain.stop("worker") == EXIT_LATE, plain.said()
    assert plain.leased() == 0, "what a worker out of time held is free at once"
    plain.processes["learner"].send_signal(signal.SIGTERM)
    plain.processes["learner"].send_signal(signal.SIGTERM)
    assert plain.processes["learner"].wait(BOUND_S) in (EXIT_STOPPED, -signal.SIGTERM)
    assert plain.stop("ledger") == 0, plain.said()


def test_roles_that_hang_are_replaced_and_the_run_completes(tiny: TinyRun) -> None:
    tiny.failpoints = {"learner.after_step": "delay:600@2"}
    limits = {"idle_s": 20, "busy_s": 25, "startup_s": 300, "stall_s": 300}
    sets = [part for name, value in limits.items() for part in ("--set", f"supervisor.{name}={value}")]
    tiny.start(*sets, "--set", "run.chaos_allowed=true", "--set", "supervisor.restarts_max=50", "--no-report")
    tiny.wait_fired("learner.after_step@2")
    worker = tiny.records()["worker-0"]
    assert worker.signal(signal.SIGSTOP)
    output = tiny.wait_for("learner died (killed as hung: no progress for")
    output = tiny.wait_for("worker-0 died (killed as hung: no progress for")
    assert tiny.code(3 * BOUND_S) == 0, f"{tiny.output()}\n{tiny.tails()}"
    assert "the process is stopped" in output and "while training" in output
    assert not worker.tree() and tiny.alive() == []
    reports = [file.read_text() for file in (tiny.dir / "supervisor" / "hangs").glob("*-learner.txt")]
    assert any("in _fire" in report for report in reports), "the line that hangs"
    assert os.path.getsize(tiny.dir / "supervisor" / "progress" / "learner") <= 4096
