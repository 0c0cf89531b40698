"""A run that cannot go on before an operator has decided: why, what the ways out are, and that they work."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bad_input_support import small_run
from rollbook.cli.main import main
from run_support import TinyRun

pytestmark = pytest.mark.timeout(400)

FIXED = """
[schedule]
kind = "fixed"
lag_versions = 1

[ledger]
attempts_max = 2
role_ttl_s = 2.0
"""


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, int, str, tuple[int, str]]]:
    """A fixed schedule whose first prompt cannot be judged; beside it a second supervisor was started."""
    run = small_run(tmp_path_factory.mktemp("paused"), "breaks_for_a_prompt", FIXED)
    run.start("--no-report")
    run.wait_for("a new run")
    second = run.command("run", str(run.config))
    code = run.code()
    yield run, code, run.output(), second
    run.end()


def test_the_fixed_schedule_pauses_with_the_slot_the_cause_and_both_ways_out(
    paused: tuple[TinyRun, int, str, tuple[int, str]],
) -> None:
    run, code, text, _ = paused
    assert code == 4 and "starting it again" not in text, f"{text}\n{run.tails()}"
    said = text[text.index("rollbook run: paused: ") :]
    judge = f"{run.root}/judge.py"
    assert "gave no sample in 2 attempts (last: verifier_error: reward function" in said
    assert f"{judge}:breaks_for_a_prompt raised LookupError: the table of answers is gone ({judge}:" in said
    assert "the fixed schedule may not go on without it" in said
    assert "`rollbook retry CONFIG 0 --reason WHY`" in said and "`rollbook quarantine CONFIG 0 --reason WHY`" in said
    assert "Then start the run again" in said and "Traceback" not in said
    assert run.alive() == []


def test_a_second_supervisor_of_the_directory_is_refused_and_disturbs_nothing(
    paused: tuple[TinyRun, int, str, tuple[int, str]],
) -> None:
    run, code, text, (second_code, second_text) = paused
    assert run.process is not None
    assert second_code == 1
    assert f"another supervisor (pid {run.process.pid}) runs 'tiny' in {run.dir}; stop it or choose another" in second_text
    assert code == 4 and "died" not in text


def test_a_repaired_cause_gets_fresh_attempts_and_a_quarantined_group_is_left_out(
    paused: tuple[TinyRun, int, str, tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, *_ = paused
    assert main(["status", str(run.dir)]) == 0
    assert "PAUSED  slot 0.0 gave no sample in 2 attempts" in capsys.readouterr().out
    assert main(["retry", str(run.dir), "0", "--reason", "the table is back"]) == 0
    assert "group 0 may be tried again: the table is back" in capsys.readouterr().out
    assert main(["status", str(run.dir)]) == 0
    assert "PAUSED" not in capsys.readouterr().out
    assert main(["quarantine", str(run.dir), "0", "--reason", "the table is lost"]) == 0
    assert "group 0 quarantined: the table is lost" in capsys.readouterr().out
    code, text = run.run("--no-report")
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    assert "step    1/2  skipped: " in text and "step    2/2  reward" in text
    assert main(["why", "--json", str(run.dir), "0.1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["reason"]) == ("quarantined", "the table is lost") and "reward" not in told
    assert "group_retried" in [entry["what"] for entry in told["history"]]
