"""The drills as a user starts them, short: what they claim of a run holds, and a broken claim, a refusal and a dry run say so."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drills_table
import oracle
from drills import faults, verdict
from drills.faults import Fault
from drills.proc import descendants
from rollbook.core.config import load_config
from rollbook.supervise.process import ProcessTable
from run_support import MODEL, REPOSITORY, ROLLBOOK, environment, wait_until

pytestmark = pytest.mark.timeout(600)

CHAOS = REPOSITORY / "chaos"
SHORT = ("--fork-server", "--calm-steps", "4", "--interval", "1.5", "--seed", "11", "--patience", "400")
AT_ONCE = 2
DRILLS = {
    "kill_node": ("kill_node", "--count", "4", "--one"),
    "broken": ("kill_node", "--role", "learner", "--count", "1", "--set", "supervisor.restarts_max=0"),
    "storm": ("storm", "--count", "10", "--replay-max", "0"),
    "poison": ("poison", "--replay-max", "0"),
    "upgrade": ("upgrade", "--replay-max", "0"),
}


@dataclass(frozen=True)
class Done:
    """A drill that has ended."""

    code: int
    output: str
    entry: dict[str, Any]
    root: Path

    @property
    def numbers(self) -> dict[str, Any]:
        return self.entry["numbers"]


def drill(folder: Path, name: str, *arguments: str) -> Done:
    """Start ``chaos/NAME.py`` and wait for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(CHAOS / f"{name}.py"), "--dir", str(folder), "--json", str(folder / "drill.json"), *arguments],
        env=environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    entry = json.loads((folder / "drill.json").read_text()) if (folder / "drill.json").exists() else {}
    return Done(done.returncode, done.stdout + done.stderr, entry, folder)


@pytest.fixture(scope="module")
def drilled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """Every drill of ``DRILLS`` that a collected test asks for, two at a time."""
    root = tmp_path_factory.mktemp("drills")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    wanted = [name for name in DRILLS if name in asked]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="drills") as pool:
        yield {name: pool.submit(drill, root / name, DRILLS[name][0], *SHORT, *DRILLS[name][1:]) for name in wanted}


def clean(done: Done, faults: int) -> None:
    """The claim held, with so many faults at least, and every number that must be 0 is."""
    assert done.code == 0, done.output
    assert done.entry["verdict"] == "holds" and done.entry["findings"] == [] and done.entry["ended_by_itself"]
    assert done.numbers["faults injected"] == faults == len(done.entry["faults"])
    wrong = ("acknowledged samples lost", "trained twice", "prompts skipped", "stale tokens trained")
    assert [done.numbers[name] for name in wrong] == [0, 0, 0, 0]
    assert done.numbers["samples"] > 0 and "verdict" in done.output and "claim holds" in done.output


@pytest.mark.parametrize("name", ["kill_node"])
def test_a_run_whose_roles_are_killed_loses_nothing(name: str, drilled: dict[str, Future[Done]]) -> None:
    done = drilled[name].result()
    clean(done, 4)
    assert f"drill {name}: seed 11" in done.output and "bit for bit" in done.numbers["versions rebuilt"]
    assert all(f[6] is not None or i == 3 for i, f in enumerate(done.entry["faults"])), "each fault was followed by a new step"


@pytest.mark.parametrize("name", ["kill_node"])
def test_the_verdict_sees_what_is_planted_in_its_tables(name: str, drilled: dict[str, Future[Done]]) -> None:
    (ledger,) = drilled[name].result().root.glob("*/run/ledger.sqlite")
    tables = oracle.read_ledger(f"sqlite:///{ledger}", "drill")
    assert verdict.skipped_prompts(tables) == [] and verdict.stale_tokens(tables) == 0

    skipped = copy.deepcopy(tables)
    del skipped["prompt_group"][5]
    assert len(verdict.skipped_prompts(skipped)) == len(tables["prompt_group"]) - 6

    stale = copy.deepcopy(tables)
    for row in stale["plan_item"]:
        row["step"] += 3
    for row in stale["plan"]:
        row["step"] += 3
    assert verdict.stale_tokens(stale) > 0

    last = max(row["version"] for row in tables["policy_version"])
    live = copy.deepcopy(tables)
    live["policy_version"] = [row for row in live["policy_version"] if row["version"] < last]
    live["checkpoint"] = [row for row in live["checkpoint"] if row["step"] < last]
    part = verdict.published_part(live)
    assert max(row["step"] for row in part["plan_item"]) == last - 1 and oracle.findings(part, None, steps=last - 1) == []


@pytest.mark.parametrize("name", ["broken"])
def test_a_run_that_does_not_survive_breaks_the_claim(name: str, drilled: dict[str, Future[Done]]) -> None:
    """No restart is allowed, so the first death of a role ends the run."""
    done = drilled[name].result()
    assert done.code == 1 and "CLAIM DOES NOT HOLD" in done.output, done.output
    assert done.entry["verdict"] == "broken" and any("the run ended" in finding for finding in done.entry["findings"])


@pytest.mark.parametrize("name", ["storm"])
def test_a_storm_of_every_kind_of_fault_ends_clean(name: str, drilled: dict[str, Future[Done]]) -> None:
    clean(drilled[name].result(), 10)


@pytest.mark.parametrize("name", ["poison"])
def test_a_prompt_that_kills_its_workers_is_taken_out_and_the_run_goes_on(name: str, drilled: dict[str, Future[Done]]) -> None:
    done = drilled[name].result()
    clean(done, 1)
    assert done.numbers["workers killed by the prompt"] >= 3 and "quarantined" in done.numbers["its groups"]


@pytest.mark.parametrize("name", ["upgrade"])
def test_a_run_is_upgraded_in_the_middle_although_its_migration_dies(name: str, drilled: dict[str, Future[Done]]) -> None:
    done = drilled[name].result()
    clean(done, 1)
    assert done.numbers["a migration dies before its commit"] == "exit code -9"
    assert done.numbers["samples of the worker with the old protocol"] > 0


class Live:
    """A run that somebody else has started."""

    def __init__(self, root: Path) -> None:
        config = (CHAOS / "soak.toml").read_text().replace("../service/rollbook/assets/sort-digits", str(MODEL))
        (root / "run.toml").write_text(config)
        self.dir = root / "run"
        self.process = subprocess.Popen(
            [*ROLLBOOK, "run", str(root / "run.toml"), "--plain", "--no-report", "--fork-server", "--set", "run.steps=100000"],
            env=environment(), stdin=subprocess.DEVNULL, stdout=(root / "out.txt").open("wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_until("every role runs", lambda: len(self.incarnations()) == 5 and (self.dir / "config.json").exists())

    def incarnations(self) -> dict[str, str]:
        table = ProcessTable(self.dir / "supervisor" / "processes.json")
        return {r.name: r.incarnation for r in table.records().values() if r.alive()}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    run = Live(tmp_path_factory.mktemp("live"))
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait(10.0)
    for record in ProcessTable(run.dir / "supervisor" / "processes.json").records().values():
        record.kill_tree()


def test_a_dry_run_names_what_it_would_kill_and_kills_nothing(live: Live, tmp_path: Path) -> None:
    before = live.incarnations()
    done = drill(tmp_path, "kill_node", "--run", str(live.dir), "--dry-run")
    assert done.code == 0 and "would hit learner: pid " in done.output and "would hit node local: pid" in done.output
    assert live.incarnations() == before and live.process.poll() is None


def test_a_live_run_is_disturbed_judged_and_left_alive(live: Live, tmp_path: Path) -> None:
    before = live.incarnations()
    done = drill(tmp_path, "kill_node", "--run", str(live.dir), "--role", "learner", "--count", "1", *SHORT[1:])
    assert done.code == 0, done.output
    assert done.entry["run"] == "a live one" and "as the database showed them" in done.numbers["acknowledged samples"]
    assert done.numbers["of these"] == "learner 1" and done.entry["faults"][0][4] is not None, "its death was noticed"
    after = wait_until("the learner is back", lambda: (now := live.incarnations()).get("learner") and now)
    assert after["learner"] != before["learner"] and live.process.poll() is None
    done = drill(tmp_path / "network", "partition", "--run", str(live.dir), *SHORT[1:], "--count", "2", "--toxic", "reset")
    assert done.code == 0, done.output
    assert done.numbers["connections made through the proxies"] > 0
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(120.0) == 130


def test_a_run_that_does_not_allow_it_is_left_alone(tmp_path: Path) -> None:
    config = (CHAOS / "soak.toml").read_text().replace("chaos_allowed = true", "chaos_allowed = false")
    (tmp_path / "soak.toml").write_text(config.replace("../service/rollbook/assets/sort-digits", str(MODEL)))
    done = drill(tmp_path, "kill_node", "--config", str(tmp_path / "soak.toml"))
    assert done.code == 2 and "does not say run.chaos_allowed = true" in done.output
    stored = load_config(tmp_path / "soak.toml").to_json()
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(stored)}))
    done = drill(tmp_path, "kill_node", "--run", str(tmp_path))
    assert done.code == 2 and "opened without run.chaos_allowed = true" in done.output, done.output


@pytest.mark.parametrize(("name", "what"), [("disk", "the checkpoint store"), ("clock", "its clocks"), ("pause", "")])
def test_a_dry_run_without_a_run_starts_none(name: str, what: str, tmp_path: Path) -> None:
    done = drill(tmp_path, name, "--dry-run", "--count", "3")
    assert done.code == 0 and "dry run: would start soak.toml" in done.output and "send 3 faults" in done.output
    assert what in done.output and not [*tmp_path.glob("2*")]


@pytest.mark.parametrize("name", ["disk", "clock", "poison", "upgrade"])
def test_what_needs_its_own_run_refuses_a_live_one_and_says_why(name: str, tmp_path: Path) -> None:
    done = drill(tmp_path, name, "--run", str(tmp_path))
    assert done.code == 2 and f"{name} on a live run: its " in done.output.replace("a prompt", "its prompt")


def test_deaths_that_nobody_sent_are_found() -> None:
    text = "worker-0 died (killed by SIGKILL); starting\nworker-1 died (exit code 1); starting\nlearner died (exit code 3); x"
    sent = [Fault("worker", "sigkill", may_cost=(("worker", "killed by SIGKILL"),))]
    assert len(verdict.unexpected_deaths(text, [])) == 3
    found = verdict.unexpected_deaths(text, sent, allowed=(("learner", "exit code 3"),))
    assert found == ["deaths: worker, exit code 1, 1 times more than was sent"]
    guessed = "worker-0 died (killed by SIGKILL; meanwhile the kernel has killed for want of memory); starting"
    assert verdict.unexpected_deaths(guessed, sent) == [] and len(verdict.unexpected_deaths(f"{guessed}\n{guessed}", sent)) == 1


def test_a_lost_node_may_cost_the_roles_that_were_on_it() -> None:
    text = "ledger died (node lost: 192.0.2.2 (76c51d74): The actor died.); starting it again in 0.1 s"
    sent = [Fault("node", "sigkill", may_cost=(("ledger", faults.NODE_LOST),))]
    assert verdict.unexpected_deaths(text, sent) == []
    assert verdict.unexpected_deaths(text, []) == ["deaths: ledger, node lost, 1 times more than was sent"]


@pytest.mark.parametrize("standbys", [0, 1])
def test_a_database_that_is_away_may_cost_the_holder_its_term_where_another_waits(standbys: int) -> None:
    server = SimpleNamespace(kill=lambda: 5, start_again=lambda: None)
    run: Any = SimpleNamespace(server=server, config=SimpleNamespace(ledger=SimpleNamespace(standbys=standbys)))
    fault = faults.kill(run, "database", random.Random(1), True)
    assert fault is not None
    once = "ledger died (exit code 3); starting it again in 0.1 s"
    assert len(verdict.unexpected_deaths(once, [fault])) == 1 - standbys
    assert len(verdict.unexpected_deaths(f"{once}\n{once}", [fault])) == 1, "and no more than once"


def test_ettr_is_steps_kept_by_the_median_unbroken_step_over_wall_time() -> None:
    calm = [10.0 + i for i in range(6)]
    disturbed = [17.0, 18.0, 25.0]
    numbers = verdict.progress([*calm, *disturbed], verdict.Window(10.0, 15.0, 25.0))
    assert (numbers["ettr"], numbers["ettr_unbroken"], numbers["step_s_unbroken"]) == (0.3, 1.0, 1.0)
    assert verdict.progress(calm, verdict.Window(14.0, 15.0, 25.0))["ettr"] is None


def test_time_lost_to_faults_is_what_steps_took_longer_around_them() -> None:
    times = [float(i) for i in range(11)] + [15.0, 16.0, 17.0]
    window = verdict.Window(0.0, 5.0, 17.0)
    one = Fault("learner", "sigkill", at=10.5)
    assert verdict.lost_time([one], times, window)["lost_share"] == round(4.0 / 12.0, 4)
    again = Fault("worker", "sigkill", at=12.0)
    assert verdict.lost_time([one, again], times, window)["lost_share"] == round(4.0 / 12.0, 4), "the same gap counts once"
    assert verdict.lost_time([Fault("worker", "sigkill", at=8.5)], times, window)["lost_share"] == 0.0
    assert verdict.lost_time([], times, window) == {}


def test_children_of_a_process_are_found_and_no_others() -> None:
    script = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); sys.stdin.read(); c.kill()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert descendants(process.pid) == [child] and descendants(child) == []
        assert {process.pid, child} <= set(descendants(os.getpid()))
        process.communicate("")


def test_the_readme_holds_the_newest_verdicts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS / "drills_table.py"), "--check"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    entry = {"drill": "storm", "claim": "c", "database": "sqlite", "command": "python chaos/storm.py", "verdict": "broken",
             "findings": ["steps: 3 are missing"], "date": "2026-01-01T00:00:00Z", "commit": "abc", "code": "1",
             "machine": {"cores": 2, "cpu": "x"}, "numbers": {"acknowledged samples lost": 1}}  # fmt: skip
    text = drills_table.table([entry | {"verdict": "holds"}, entry])
    assert "**BROKEN**: steps: 3 are missing" in text and text.count("`python chaos/storm.py`") == 1
    shutil.rmtree(tmp_path)
