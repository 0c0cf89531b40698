"""A database restored from an older copy beside newer checkpoints: refused, repaired by decision, and gone on from."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_input_support import small_run
from learner_support import MemoryLedger, make_config, make_model_dir
from rollbook.cli.main import main
from rollbook.cli.serving import write_run_files
from rollbook.core.config import config_from_json
from rollbook.core.errors import LedgerBehind
from rollbook.core.records import Cursor, FinishReason, RewardStatus, RunRecord, SandboxStatus, SlotKey, Submission, Trajectory
from rollbook.learner.history import Position, ahead_of, is_behind, move_aside, strays_of
from rollbook.learner.loop import run_learner
from rollbook.rollout.spool import Spool
from run_support import TinyRun

pytestmark = pytest.mark.timeout(600)

STEPS = 6


def copy_ledger(source: Path, target: Path) -> None:
    """The database with its write-ahead log, as a backup of a stopped run is taken."""
    target.mkdir(exist_ok=True)
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (target / name).unlink(missing_ok=True)
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """A finished run of six steps whose database is again the one it had after step 3."""
    run = small_run(tmp_path_factory.mktemp("restored"))
    run.config.write_text(run.config.read_text().replace("steps = 2\nseed", f"steps = {STEPS}\nseed"))
    run.failpoints = {"learner.after_publish": "crash@4"}
    code, text = run.run("--no-report", "--set", "supervisor.restarts_max=0")
    assert code == 1 and "learner died 1 times" in text, f"{text}\n{run.tails()}"
    copy_ledger(run.dir, run.root / "backup")
    code, text = run.run("--no-report")
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    copy_ledger(run.dir, run.root / "newest")
    copy_ledger(run.root / "backup", run.dir)
    leave_spooled_sample(run)
    yield run
    run.end()


def leave_spooled_sample(run: TinyRun) -> None:
    """A rollout of the lost history that was never acknowledged, for a slot the restored ledger does not have."""
    worker = sorted((run.dir / "spool").iterdir())[0]
    four = b"\5\0\0\0"
    spooled = Submission(
        SlotKey(900, 0), 1, "lost", 0, 0, Trajectory(four, b"\0\0\0\xbf", b"\0\0\0\0"), 1.0, RewardStatus.GIVEN,
        SandboxStatus.NOT_USED, FinishReason.STOP, 0.1, 0.1,
    )  # fmt: skip
    Spool(worker, "tiny").put([spooled])


def tree(run: TinyRun) -> list[str]:
    folders = [run.dir / name for name in ("checkpoints", "versions", "spool")]
    return sorted(str(path.relative_to(run.dir)) for folder in folders for path in folder.rglob("*"))


def test_an_older_database_is_refused_shown_repaired_and_the_run_then_finishes(
    restored: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, before = restored, tree(restored)
    code, text = run.run("--no-report")
    assert code == 4 and "starting it again" not in text, f"{text}\n{run.tails()}"
    assert "paused: the ledger stands at lineage 0, step 3 planned, version 3 published, task ordinal" in text
    assert f"newest checkpoint step 2, but {run.dir} is ahead of it: checkpoints/0.4." in text
    assert f"checkpoints/0.{STEPS}.2 (step {STEPS}, the ledger's last plan is of step 3)" in text
    assert f"versions/0.{STEPS}." in text
    assert "Best: restore the newer database (with its -wal file)" in text
    assert "`rollbook repair RUN --discard-newer-checkpoints`" in text
    assert tree(run) == before and main(["audit", str(run.dir)]) == 0

    capsys.readouterr()
    assert main(["repair", str(run.dir), "--discard-newer-checkpoints"]) == 0
    shown = capsys.readouterr().out
    assert f"holds the results of steps up to {STEPS}" in shown and "nothing was changed" in shown
    assert "goes on from the checkpoint of step 2" in shown and "steps 3 to 3 are trained again from stored plans" in shown
    assert "steps 4 to 6 are planned, generated and trained anew, about 6 rollouts" in shown
    assert ".sample  sampled under a lease of the lost history" in shown and "Better, where there is one" in shown
    assert tree(run) == before
    assert main(["repair", str(run.dir)]) == 2

    assert main(["repair", str(run.dir), "--discard-newer-checkpoints", "--yes"]) == 0
    assert "moved " in capsys.readouterr().out
    after = tree(run)
    assert len(after) == len(before), "nothing is deleted"
    assert any(name.startswith(f"checkpoints/discarded.0.{STEPS}.") for name in after)
    assert any(name.startswith(f"versions/discarded.0.{STEPS}.") for name in after)
    assert [name for name in after if name.startswith("spool/") and name.endswith(".sample.aside")]
    assert main(["repair", str(run.dir), "--discard-newer-checkpoints"]) == 0
    assert "there is nothing to repair" in capsys.readouterr().out

    code, text = run.run("--no-report")
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    assert main(["replay", str(run.dir)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] and (result["steps"], result["versions_compared"]) == (STEPS, STEPS + 1)


def test_a_spooled_sample_of_a_lost_history_is_set_aside_loudly_and_changes_nothing(restored: TinyRun) -> None:
    """Where no repair reached the spool, the worker meets the ledger's refusal itself; runs after the repaired run."""
    run = restored
    leave_spooled_sample(run)
    changes = ("--set", f"run.steps={STEPS + 1}", "--accept", "run.steps")
    code, text = run.run("--no-report", *changes)
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    assert "spooled sample set aside" in run.log("worker-0") and "the run has no slot 900.0" in run.log("worker-0")
    assert not list((run.dir / "spool").glob("*/*.sample"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """(configuration, ledger) of a finished run of four steps."""
    monkeypatch.delenv("ROLLBOOK_INCARNATION", raising=False)
    config = make_config(model_dir, tmp_path / "run", steps=4, every_steps=2)
    ledger = MemoryLedger(config)
    assert run_learner(config, ledger, threading.Event())
    return config, ledger


def forget(ledger: MemoryLedger, after: int) -> None:
    """Let the ledger be as it was after a step."""
    for table in (ledger.plans, ledger.published, ledger.checkpoints):
        for step in [step for step in table if step > after]:
            del table[step]


def refused(config, ledger) -> str:  # type: ignore[no-untyped-def]
    before = sorted(str(path) for path in Path(config.run.dir).rglob("*"))
    with pytest.raises(LedgerBehind) as caught:
        run_learner(config, ledger, threading.Event())
    assert sorted(str(path) for path in Path(config.run.dir).rglob("*")) == before, "nothing was touched"
    assert ledger.term is None, "and the role is free"
    return str(caught.value)


def test_the_learner_itself_refuses_a_checkpoint_beyond_the_last_plan(trained) -> None:  # type: ignore[no-untyped-def]
    config, ledger = trained
    forget(ledger, 3)
    assert "checkpoints/0.4.1 (step 4, the ledger's last plan is of step 3)" in refused(config, ledger)


def test_the_learner_refuses_a_checkpoint_of_another_chain_and_of_an_unknown_lineage(trained) -> None:  # type: ignore[no-untyped-def]
    config, ledger = trained
    plan = ledger.plans[4]
    ledger.plans[4] = dataclasses.replace(plan, chain_digest="f" * 64)
    said = refused(config, ledger)
    assert f"its chain of plans is {plan.chain_digest[:12]}, the ledger's at step 4 is ffffffffffff" in said
    ledger.plans[4] = plan
    root = Path(config.run.dir) / "checkpoints"
    shutil.copytree(root / "0.4.1", root / "1.4.1")
    manifest = json.loads((root / "1.4.1" / "MANIFEST.json").read_text()) | {"lineage": 1}
    (root / "1.4.1" / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "checkpoints/1.4.1 (lineage 1 is unknown to the ledger)" in refused(config, ledger)


def test_versions_beyond_the_one_being_published_prove_a_lost_history_too(trained) -> None:  # type: ignore[no-untyped-def]
    config, ledger = trained
    run_dir = Path(config.run.dir)
    shutil.rmtree(run_dir / "checkpoints" / "0.4.1")
    forget(ledger, 2)
    assert "versions/0.4." in refused(config, ledger)
    shutil.rmtree(next((run_dir / "versions").glob("0.4.*")))
    assert ahead_of(run_dir, ledger, Position.of(ledger)) == [], "one version's bytes may be there before its row"
    assert strays_of(run_dir, ledger, Position.of(ledger), 0) == []
    assert run_learner(config, ledger, threading.Event())


def test_after_everything_newer_is_set_aside_the_learner_goes_on(trained, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level(logging.INFO)
    config, ledger = trained
    digests = {step: version.digest for step, version in ledger.published.items()}
    forget(ledger, 3)
    run_dir = Path(config.run.dir)
    (run_dir / "revisions" / "1.json").write_text("{}")
    strays = strays_of(run_dir, ledger, Position.of(ledger), revision=0)
    assert sorted(stray.path.name[:3] for stray in strays) == ["0.4", "0.4", "1.j"]
    names = [move_aside(stray).name for stray in strays]
    assert all(name.startswith("discarded.") for name in names)
    assert run_learner(config, ledger, threading.Event())
    assert {step: version.digest for step, version in ledger.published.items()} == digests, "same rollouts, same weights"


def test_a_damaged_newer_directory_proves_nothing(trained) -> None:  # type: ignore[no-untyped-def]
    config, ledger = trained
    run_dir = Path(config.run.dir)
    forget(ledger, 3)
    file = run_dir / "checkpoints" / "0.4.1" / "state.json"
    file.write_bytes(file.read_bytes()[:-1])
    assert ahead_of(run_dir, ledger, Position.of(ledger)) == []


def test_a_revision_file_of_a_lost_history_is_set_aside_for_the_one_the_ledger_has(model_dir: Path, tmp_path: Path) -> None:
    config = make_config(model_dir, tmp_path / "run")
    lost = dataclasses.replace(config, learner=dataclasses.replace(config.learner, lr=0.5))
    (tmp_path / "run").mkdir()
    for one in (lost, config, config):
        content = json.dumps({"config": json.loads(one.to_json()), "inputs": {}})
        write_run_files(one, RunRecord("r", one.digest(), content, 1, one.rules()))
        assert config_from_json((tmp_path / "run" / "revisions" / "1.json").read_text()).digest() == one.digest()
    names = sorted(path.name for path in (tmp_path / "run" / "revisions").iterdir())
    assert names == ["1.json", "discarded.1.json"]


def test_two_directories_of_one_name_are_both_kept(tmp_path: Path) -> None:
    from rollbook.learner.history import Stray

    names = []
    for _ in range(3):
        (tmp_path / "0.4.1").mkdir()
        names.append(move_aside(Stray(tmp_path / "0.4.1", 4, "")).name)
    assert names == ["discarded.0.4.1", "discarded.0.4.1~2", "discarded.0.4.1~3"]


@pytest.mark.parametrize(
    ("ordinal", "state", "expected"),
    [(11, "a", True), (12, "b", True), (12, "a", False), (13, "b", False), (12, "{}", False), (11, "{}", True)],
)
def test_a_stream_begun_again_by_an_accepted_dataset_is_not_behind(ordinal: int, state: str, expected: bool) -> None:
    assert is_behind(Cursor("train", ordinal, state, False), Cursor("train", 12, "a", False)) is expected
