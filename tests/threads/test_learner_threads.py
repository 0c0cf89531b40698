"""Public threads about checkpoints and learners that did not go on where they were: the real learner on the real ledger.

Each test is named after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from learner_runs import STEPS, fixed_config, service
from threads_support import outcome_of

from learner_support import make_model_dir
from rollbook.core.errors import LedgerBehind
from rollbook.core.records import Role
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.ledger.dialects import sqlite_module
from rollbook.observe.failpoints import FailpointRaised


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def quiet(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[dict]]:
    """Version digests and metrics of a run nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        with service(fixed_config(model_dir, tmp_path_factory.mktemp("quiet")), patch) as run:
            assert run.live() is True
            return run.digests, run.metrics


def test_nemo_rl_3820_weights_data_and_position_come_back_together(model_dir, tmp_path, monkeypatch, quiet) -> None:
    """Checkpoint, buffer and data position were written one after another; a crash between them left them apart."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        for armed in ("learner.checkpoint.after_rename=raise@2", "learner.after_publish=raise", "learner.mid_step=raise"):
            assert run.live(armed) is FailpointRaised
        assert run.live() is True
        assert run.digests == quiet[0]
        trained = run.rows("SELECT ordinal, count(DISTINCT step) FROM plan_item GROUP BY ordinal ORDER BY ordinal")
        assert trained == [(ordinal, 1) for ordinal in range(STEPS * run.config.learner.groups_per_step)]
        assert run.ledger.audit() == []


def test_nemo_rl_3924_a_configured_checkpoint_is_written(model_dir, tmp_path, monkeypatch) -> None:
    """The interval was only tried: where another condition failed nothing was written, and nobody noticed before the crash."""
    with service(fixed_config(model_dir, tmp_path / "run", every_steps=1), monkeypatch) as run:
        assert run.live("learner.before_plan=raise@4") is FailpointRaised
        assert [step for (step,) in run.rows("SELECT step FROM checkpoint ORDER BY step")] == [0, 1, 2, 3]
        files = CheckpointFiles(tmp_path / "run" / "checkpoints")
        newest, *_ = run.ledger.resume_point().checkpoints
        assert files.verify(newest.dir_name, newest.manifest_digest) == newest


def test_skyrl_2010_a_ledger_older_than_the_checkpoint_is_refused(model_dir, tmp_path, monkeypatch) -> None:
    """Only a part was restored: the step was kept and the data position was not."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        assert run.live("learner.before_plan=raise@3") is FailpointRaised
        with sqlite_module().connect(tmp_path / "run" / "ledger.sqlite") as db:
            assert db.execute("UPDATE cursor SET next_ordinal = 1").rowcount == 1
        assert run.live() is LedgerBehind


def test_torchtitan_3751_a_stop_leaves_a_checkpoint_of_the_step_it_found(model_dir, tmp_path, monkeypatch, caplog) -> None:
    """A pre-empted job lost six hours: it was told to stop and ended without saving."""
    stop = threading.Event()

    class StopAtThird(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "finished step 3":
                stop.set()

    handler, logger = StopAtThird(), logging.getLogger("rollbook.learner.loop")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(handler)
    try:
        with service(fixed_config(model_dir, tmp_path / "run", every_steps=100), monkeypatch) as run:
            assert run.live(stop=stop) is False
            assert [step for (step,) in run.rows("SELECT step FROM checkpoint ORDER BY step")] == [0, 3]
            assert outcome_of(lambda: run.ledger.acquire_role(Role.LEARNER, "next", 60.0).epoch) == 2
    finally:
        logger.removeHandler(handler)


def test_ms_swift_9935_the_random_generators_go_on_where_they_were(model_dir, tmp_path, monkeypatch, quiet) -> None:
    """The random state was reset at a resume, so the resumed run took another course."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        assert run.live("learner.before_plan=raise@3") is FailpointRaised
        assert run.live() is True
        assert run.digests == quiet[0]


@pytest.mark.parametrize("armed", ["learner.before_plan=raise@3", "learner.after_publish=raise@4"])
def test_open_r1_450_every_metric_after_a_resume_is_the_unbroken_runs(model_dir, tmp_path, monkeypatch, quiet, armed) -> None:
    """Loss and reward were worse after a resume than before it."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        assert run.live(armed) is FailpointRaised
        assert run.live() is True
        differing = [
            (now["step"], name, now.get(name), then.get(name))
            for now, then in zip(run.metrics, quiet[1], strict=True)
            for name in now.keys() | then.keys()
            if now.get(name) != then.get(name)
        ]
        assert differing == []


def test_kempnerforge_102_a_checkpoint_has_its_row_only_when_it_is_whole(model_dir, tmp_path, monkeypatch) -> None:
    """The mark of the latest checkpoint moved before the asynchronous save was durable, and older ones were deleted."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        assert run.live("learner.checkpoint.mid_files=raise@3") is FailpointRaised
        files = CheckpointFiles(tmp_path / "run" / "checkpoints")
        committed = run.ledger.resume_point().checkpoints
        assert [c.step for c in committed] == [0]
        assert [outcome_of(lambda c=c: files.verify(c.dir_name, c.manifest_digest)) for c in committed] == list(committed)
        assert run.live() is True


def test_skyrl_1315_the_default_correction_sees_the_log_probs_of_the_sampler(model_dir, tmp_path, monkeypatch) -> None:
    """The asynchronous default set the old log-probs to the trainer's own, so ratios were 1 and clipping was silently off."""
    with service(fixed_config(model_dir, tmp_path / "run"), monkeypatch) as run:
        assert run.live("learner.before_plan=raise@2") is FailpointRaised
        (first,) = run.metrics
        assert first["behaviour_missing_tokens"] == 0
        assert first["weight_mean"] != 1.0
