"""The command line itself: what it accepts, how it finds a run, and which exit code a refusal has."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.cli.common import config_args, read_config
from rollbook.cli.inspecting import story_lines
from rollbook.cli.main import build_parser, main
from rollbook.cli.maintaining import failpoint_rows
from rollbook.core.config import Config, load_config
from rollbook.core.errors import ConfigError
from rollbook.core.records import Checkpoint, PolicyVersion, ResumePoint
from rollbook.observe import failpoints
from rollbook.report.progress import resume_line, shown_url, step_line
from rollbook.report.regenerate import engines_that_made
from run_support import CONFIG, MODEL, ROLLBOOK, environment

COMMANDS = (
    "run", "ledger", "worker", "learner", "feeder", "status", "audit", "why", "replay", "report", "evaluate", "regenerate",
    "migrate", "doctor", "quarantine", "retry", "repair", "model", "top", "compare", "export", "mirror",
)  # fmt: skip


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    return file


def stored(config: Config, directory: Path) -> None:
    """What the ledger server leaves in a run directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"config": dataclasses.asdict(config), "inputs": {}}))


def arguments(*words: str | Path) -> argparse.Namespace:
    return build_parser().parse_args([str(w) for w in words])


def test_every_command_has_help_and_a_function() -> None:
    parser = build_parser()
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([command, "--help"])
        assert ended.value.code == 0
    for words in (["run", "c"], ["worker", "c", "--index", "1"], ["why", "c", "0.0"], ["doctor"], ["model", "tiny", "d"]):
        assert callable(parser.parse_args(words).function)


def test_an_unknown_command_or_argument_is_exit_code_2() -> None:
    for words in (["fly"], ["run"], ["status", "c", "--fast"], []):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2


def test_a_child_process_gets_the_same_configuration(config_file: Path) -> None:
    args = arguments("run", config_file, "--set", "run.steps=7", "--set", "run.seed=1")
    again = arguments("learner", *config_args(args))
    assert read_config(again) == read_config(args)
    assert read_config(again).run.steps == 7


def test_a_run_directory_stands_for_the_configuration_also_when_it_was_moved(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file)
    stored(config, tmp_path / "run")
    assert read_config(arguments("status", tmp_path / "run")) == config
    stored(config, tmp_path / "moved")
    moved = read_config(arguments("status", tmp_path / "moved"))
    assert moved.run.dir == str(tmp_path / "moved")
    assert moved.ledger.url == f"sqlite:///{tmp_path}/moved/ledger.sqlite"
    assert moved.digest() == config.digest()
    elsewhere = load_config(config_file, ["ledger.url=postgresql+psycopg://host/db"])
    stored(elsewhere, tmp_path / "cluster")
    assert read_config(arguments("status", tmp_path / "cluster")).ledger.url == "postgresql+psycopg://host/db"


def test_a_directory_that_is_no_run_is_refused(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json"):
        read_config(arguments("status", tmp_path))
    stored(load_config(config_file), tmp_path / "run")
    with pytest.raises(ConfigError, match="--set needs the TOML file"):
        read_config(arguments("status", tmp_path / "run", "--set", "run.steps=9"))
    for damaged in ("", "{}", "[]", '{"config": {}}'):
        (tmp_path / "run" / "config.json").write_text(damaged)
        with pytest.raises(ConfigError):
            read_config(arguments("status", tmp_path / "run"))


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["status", "absent.toml"], 2, "absent.toml"),
        (["status", "run.toml"], 2, "was never started"),
        (["status", "run.toml", "--set", "run.stepz=1"], 2, "run.steps"),
        (["status", "run.toml", "--set", "ledger.url=foo"], 2, "ledger.url"),
        (["why", "run.toml", "zero"], 2, "ORDINAL.SIBLING"),
        (["regenerate", "run.toml", "zero"], 2, "ORDINAL.SIBLING"),
        (["audit"], 2, "name the run"),
        (["run", "run.toml", "--set", "model.path=nowhere"], 2, "nowhere"),
        (["worker", "run.toml", "--index", "7"], 2, "worker index 7"),
    ],
)
def test_wrong_input_is_exit_code_2_and_named(
    words: list[str], code: int, named: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_file.parent)
    done = subprocess.run([*ROLLBOOK, *words], env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, named in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    listing = subprocess.Popen(
        [*ROLLBOOK, "audit", "--list"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    told = listing.stderr.read().decode()
    assert listing.wait(60) in (0, 1) and told == ""


@pytest.fixture
def nothing_armed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.arm("")


@pytest.mark.usefixtures("nothing_armed")
def test_every_failpoint_is_listed_with_what_a_crash_there_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--failpoints"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(failpoints.CATALOGUE)
    (row,) = [line for line in lines if line.startswith("learner.checkpoint.after_rename ")]
    assert "learner " in row and " L9 L12 " in row and row.endswith(failpoints.CATALOGUE[row.split()[0]].recovery)
    assert main(["doctor", "--failpoints", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == failpoint_rows(None)


@pytest.mark.usefixtures("nothing_armed")
def test_doctor_says_which_failpoints_the_environment_and_a_configuration_arm(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = ["--set", "run.chaos_allowed=true"]
    configured = ["--set", "chaos.failpoints=learner.after_plan=crash@2,feeder.before_append=delay:1.5"]
    words = [*ROLLBOOK, "doctor", str(config_file), *allowed, *configured, "--failpoints", "--json"]
    env = environment(ROLLBOOK_FAILPOINTS="worker.after_lease=pause,feeder.before_append=raise")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    armed = {row["name"]: row["armed"] for row in json.loads(done.stdout) if row["armed"]}
    assert armed == {"learner.after_plan": "crash@2", "worker.after_lease": "pause", "feeder.before_append": "raise"}
    for wrong, told in (
        ("chaos.failpoints=learner.after_plam=crash", "did you mean 'learner.after_plan'?"),
        ("chaos.failpoints=learner.after_plan=crash@0", "NAME=ACTION@K"),
        ("chaos.failpoints=learner.after_plan=explode", "error:ENOSPC"),
    ):
        assert main(["doctor", str(config_file), *allowed, "--set", wrong, "--failpoints"]) == 2
        assert told in capsys.readouterr().err
    assert main(["doctor", str(config_file), *configured, "--failpoints"]) == 2
    assert "run.chaos_allowed = true" in capsys.readouterr().err


def test_doctor_says_what_a_configuration_lacks(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    assert "ok   python" in capsys.readouterr().out
    for override, check in (
        ("ledger.address=nowhere", "port"),
        ("ledger.address=127.0.0.1:70000", "port"),
        ("ledger.url=postgresql+psycopg://u@127.0.0.1:1/x", "storage"),
        (f"task.path={MODEL}/absent.jsonl", "inputs"),
    ):
        code = main(["doctor", str(config_file), "--set", override])
        out = capsys.readouterr().out
        assert code == 1 and f"FAIL {check}" in out, out


def test_a_password_is_never_shown() -> None:
    assert shown_url("postgresql+psycopg://me:p@ss@host:5432/db") == "postgresql+psycopg://me:***@host:5432/db"
    assert shown_url("postgresql+psycopg://host/db?user=me&password=secret&x=1") == (
        "postgresql+psycopg://host/db?user=me&password=***&x=1"
    )
    for plain in ("sqlite:////data/a:b@c/ledger.sqlite", "postgresql+psycopg://me@host/db"):
        assert shown_url(plain) == plain


def test_a_story_leaves_out_what_is_not_known_and_commands_no_terminal() -> None:
    story = {
        "sample_id": "3.0", "end": "pending: it waits", "refills": None, "reward": 0.1 + 0.2, "task": "\x1b[2J\nred\u202e",
        "trace_id": None, "trace_sampled": None,
        "history": [
            {"at_s": 1000.5, "what": "issued", "ordinal": 3}, {"at_s": 1002.0, "what": "trained", "step": 1, "reason": ""},
        ],
    }  # fmt: skip
    assert story_lines(story) == [
        "3.0  pending: it waits",
        "reward             0.3",
        r"task               \x1b[2J\nred\u202e",
        "issued at 1970-01-01 00:16:40 UTC; seconds since then:",
        "      +0.000  issued           ordinal=3",
        "      +1.500  trained          step=1",
    ]


def test_a_skipped_step_says_why_and_missing_numbers_are_dashes() -> None:
    assert step_line({"step": 2, "outcome": "skipped", "reason": "no signal"}, 9) == "step    2/9  skipped: no signal"
    assert "reward -" in step_line({"step": 2, "outcome": "trained"}, 9)


def test_where_a_run_goes_on_is_one_line() -> None:
    head = PolicyVersion(0, 7, "d" * 64, "versions/0.7", "{}", 1)
    checkpoint = Checkpoint(0, 5, "0.5.1", "m" * 64, "c" * 64)
    assert resume_line(ResumePoint(0, (), 0, None), 9) == "a new run: nothing is recorded yet"
    line = resume_line(ResumePoint(0, (checkpoint,), 7, head), 9)
    assert line.startswith("resuming from the checkpoint of step 5 of 9") and "steps 6 to 7 are trained from stored plans" in line
    assert "stored plans" not in resume_line(ResumePoint(0, (checkpoint,), 5, head), 9)
    assert resume_line(ResumePoint(0, (checkpoint,), 7, head), 5) == "complete: all 5 steps are made and checkpointed"


def test_the_engine_of_a_sample_is_named_only_as_far_as_it_is_known(config_file: Path) -> None:
    one = load_config(config_file)
    both = dataclasses.replace(one, workers=(*one.workers, dataclasses.replace(one.workers[0], engine="vllm")))
    assert engines_that_made(one, {}) == ["transformers"]
    assert engines_that_made(both, {}) == ["transformers", "vllm"]
    assert engines_that_made(both, {"engine": "vllm"}) == ["vllm"]
