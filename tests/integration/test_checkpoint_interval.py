"""A learner that chooses its own checkpoint interval: measured, shown, and without any effect on what is computed."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from learner_support import MemoryLedger, make_config, make_model_dir
from learner_worker import Worker, feed, steps_of
from rollbook.core.config import config_from_table
from rollbook.core.errors import ConfigError
from rollbook.core.records import RunRecord
from rollbook.learner.interval import FIRST_STEPS
from rollbook.learner.loop import run_learner
from rollbook.learner.replay import replay
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.report.progress import status_lines

STEPS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def test_the_cadence_of_checkpoints_changes_no_weight_whatever_crashes(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "one")
    often = make_config(model_dir, tmp_path / "often", steps=STEPS, every_steps=1)
    auto = make_config(model_dir, tmp_path / "auto", steps=STEPS, every_steps="auto")  # type: ignore[arg-type]
    assert often.digest() == auto.digest()
    expected, ledger = MemoryLedger(often), MemoryLedger(auto)
    assert run_learner(often, expected, threading.Event())
    caplog.clear()
    try:
        failpoints.arm("learner.after_publish=raise@8")
        with pytest.raises(FailpointRaised):
            run_learner(auto, ledger, threading.Event())
    finally:
        failpoints.arm("")
    assert sorted(ledger.checkpoints) == [0, FIRST_STEPS], "small until something is measured"
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "two")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "one")
    assert run_learner(auto, ledger, threading.Event())
    assert {v: p.digest for v, p in ledger.published.items()} == {v: p.digest for v, p in expected.published.items()}
    decisions = [record for record in caplog.records if getattr(record, "event", "") == "checkpoint_interval"]
    assert {r.checkpoint_interval_rule for r in decisions} == {"first", "young_daly"}  # type: ignore[attr-defined]
    measured = json.loads(ledger.metrics[7])
    assert measured["checkpoint_interval_rule"] == "young_daly" and measured["checkpoint_interval_steps"] >= 1
    assert measured["checkpoint_interval_save_s"] > 0 and measured["checkpoint_interval_checkpoint_bytes"] > 30_000


def test_the_arithmetic_is_in_the_status_and_replay_does_not_depend_on_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "one")
    config = make_config(model_dir, tmp_path / "run", steps=STEPS, every_steps="auto")  # type: ignore[arg-type]
    (tmp_path / "run").mkdir()
    ledger = Ledger(f"sqlite:///{tmp_path}/run/ledger.sqlite", holder="server", role_ttl_s=60.0)
    worker = Worker(ledger)
    try:
        ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
        feed(ledger, steps_of(config))
        worker.start()
        assert run_learner(config, ledger, threading.Event())
        (line,) = [line for line in status_lines(ledger.run_status(), config) if line.startswith("checkpoints  ")]
        assert "(young/daly); save " in line and "device-seconds of replay" in line and "no generation" in line
        assert replay(config, ledger, STEPS)["equal"] and ledger.audit() == []
    finally:
        worker.stop()
        ledger.close()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"every_steps": "often"}, "checkpoint.every_steps = 'often': a number of steps, or 'auto'"),
        ({"every_steps": 0}, "checkpoint.every_steps = 0: must be at least 1"),
        ({"every_steps": True}, "checkpoint.every_steps = True: expected an integer or a string"),
        ({"every_steps": 2.5}, "checkpoint.every_steps = 2.5: expected an integer or a string"),
        ({"mtbf_s": 0.0}, "checkpoint.mtbf_s = 0.0: must exceed 0"),
    ],
)
def test_an_interval_that_is_none_is_refused(model_dir: Path, tmp_path: Path, setting: dict, said: str) -> None:
    table = json.loads(make_config(model_dir, tmp_path).to_json())
    table["checkpoint"] |= {"every_steps": "auto", "mtbf_s": 1.0}
    assert config_from_table(table).checkpoint.every_steps == "auto"
    table["checkpoint"] |= setting
    with pytest.raises(ConfigError, match="^" + said.replace("(", r"\(")):
        config_from_table(table)
