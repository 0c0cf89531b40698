"""A learner of two ranks: bits that repeat, a rank that dies or hangs anywhere, and a run that goes on to the same weights."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from learner_support import VOCAB_SIZE, MemoryLedger, make_config, make_model_dir, plan_of, rollouts
from learner_worker import service
from rollbook.core.config import Config
from rollbook.core.errors import RankLost, RanksDiffer
from rollbook.core.records import PlanOutcome
from rollbook.learner import gang
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.collate import StepBatch, collate
from rollbook.learner.gang import GangTrainer, learner_group, trainer_of
from rollbook.learner.loop import run_learner
from rollbook.learner.model import load_policy
from rollbook.learner.replay import replay
from rollbook.learner.trainer import Trainer
from rollbook.supervise.process import start_time
from run_support import environment, wait_until

pytestmark = pytest.mark.timeout(600)

STEPS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not the learner's own: it may not be ended from a thread, however slow the machine."""
    monkeypatch.setattr(gang, "GRACE_S", 300.0)
    if torch.distributed.is_initialized():  # a vLLM engine that an earlier test had in this process leaves its group behind
        torch.distributed.destroy_process_group()
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES", "ROLLBOOK_FAILPOINTS", "ROLLBOOK_FAILPOINTS_ONCE_DIR"):
        monkeypatch.delenv(name, raising=False)


def make(model_dir: Path, run_dir: Path, **learner: object) -> Config:
    """Fixed lag, two ranks, two minibatches of three micro-batches: the ranks have unequal shares."""
    settings = {"ranks": 2, "micro_batch_size": 2} | learner
    config = make_config(model_dir, run_dir, steps=STEPS, every_steps=2, **settings)
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, kind="fixed", lag_versions=1))


def final_digest(config: Config) -> str:
    files = CheckpointFiles(Path(config.run.dir) / "checkpoints")
    name = files.names()[0]
    assert files.manifest(name)["ranks"] == 2
    return files.read(files.verify(name)).digest()


@pytest.fixture(scope="module")
def unbroken(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Version digests and final state of a run nobody disturbed, on the real ledger."""
    config = make(model_dir, tmp_path_factory.mktemp("unbroken"))
    with service(config) as (ledger, _):
        assert run_learner(config, ledger, threading.Event())
        assert ledger.audit() == []
        return [version.digest for version in ledger.versions(0)], final_digest(config)


def batch_of(step: int) -> StepBatch:
    samples = rollouts(step)
    return collate(plan_of(step, samples, "0" * 64), samples, vocab_size=VOCAB_SIZE, max_lag_versions=2)


@contextmanager
def group(config: Config) -> Iterator[Trainer]:
    """Rank 0's trainer with its group."""
    with learner_group(config) as members:
        trainer = trainer_of(load_policy(config), config, members)
        assert isinstance(trainer, GangTrainer)
        yield trainer


def test_a_group_makes_every_bit_of_its_ranks_taken_in_turn_also_over_skips_and_restored_states(
    model_dir: Path, tmp_path: Path
) -> None:
    config = make(model_dir, tmp_path, minibatches=1)
    alone = Trainer(load_policy(config), config)
    warmer = dataclasses.replace(config, learner=dataclasses.replace(config.learner, lr=0.01))
    with group(config) as together:
        for trainer in (alone, together):
            results = [trainer.train_step(batch_of(1))]
            kept = trainer.state_dict()
            trainer.skip_step()
            trainer.use(warmer)
            results.append(trainer.train_step(batch_of(3)))
            trainer.use(config)
            trainer.load_state_dict(kept)
            trainer.skip_step()
            results.append(trainer.train_step(batch_of(3)))
            assert [result.outcome for result in results] == [PlanOutcome.TRAINED] * 3
            metrics = [{k: v for k, v in r.metrics.items() if k != "seconds_step"} for r in results]
            if trainer is alone:
                expected = metrics
        assert metrics == expected
        assert together.state_dict().digest() == alone.state_dict().digest()
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "learner").iterdir()) == []


@pytest.mark.parametrize("point", ["learner.rank.after_state", "learner.rank.before_sum", "learner.rank.after_sum"])
def test_a_rank_that_dies_ends_the_learner_with_its_name_and_the_run_goes_on_to_the_same_weights(
    point: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: tuple[list[str], str]
) -> None:
    config = make(model_dir, tmp_path / "run")
    crossing = 1 if point.endswith("state") else 6  # in the second minibatch of step 3, behind the checkpoint of step 2
    with service(config) as (ledger, _):
        monkeypatch.setenv("ROLLBOOK_INCARNATION", "life 1")
        monkeypatch.setenv("ROLLBOOK_FAILPOINTS", f"{point}=crash@{crossing},learner.mid_step=crash")
        with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            run_learner(config, ledger, threading.Event())
        assert not torch.distributed.is_initialized()
        monkeypatch.delenv("ROLLBOOK_FAILPOINTS")
        monkeypatch.setenv("ROLLBOOK_INCARNATION", "life 2")
        monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "life 1")
        assert run_learner(config, ledger, threading.Event())
        assert [version.digest for version in ledger.versions(0)] == unbroken[0]
        assert ledger.audit() == []
        replayed = replay(config, ledger, STEPS)
        assert replayed["equal"] and replayed["state_digest"] == unbroken[1]
    assert final_digest(config) == unbroken[1]


@pytest.mark.parametrize("point", ["learner.rank.before_sum", "learner.rank.after_sum"])
def test_a_rank_that_hangs_is_named_within_its_bound(
    point: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(model_dir, tmp_path, rank_timeout_s=3.0)
    monkeypatch.setenv("ROLLBOOK_FAILPOINTS", f"{point}=pause@2")
    with pytest.raises(RankLost) as caught:
        run_learner(config, MemoryLedger(config), threading.Event())  # type: ignore[arg-type]
    said = str(caught.value)
    assert "rank 1 (pid " in said and "the process is stopped (SIGSTOP or a debugger)" in said


def test_ranks_that_hold_other_weights_are_found_at_the_next_step_and_at_the_next_checkpoint(
    model_dir: Path, tmp_path: Path
) -> None:
    config = make(model_dir, tmp_path)
    with group(config) as trainer:
        trainer.train_step(batch_of(1))
        with torch.no_grad():
            next(trainer.policy.model.parameters()).view(-1)[0] += 1e-3
        with pytest.raises(RanksDiffer, match="rank 1 has told its weights after step 1 with"):
            trainer.state_dict()
        with pytest.raises(RanksDiffer, match="rank 1 has finished step 2 with"):
            trainer.train_step(batch_of(2))


def test_a_rank_that_was_killed_while_nothing_happened_is_noticed(model_dir: Path, tmp_path: Path) -> None:
    config = make(model_dir, tmp_path)
    with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"), learner_group(config) as members:
        assert members is not None
        (member,) = members._members
        os.kill(member.process.pid, signal.SIGKILL)

        def noticed() -> bool:
            try:
                members.check()
            except RankLost:
                return True
            return False

        wait_until("the death is noticed", noticed)
        assert start_time(member.process.pid) is None
        members.check()


LEARNER = """
import sys, threading
from pathlib import Path
from rollbook.core.config import config_from_json
from rollbook.learner.gang import learner_group

with learner_group(config_from_json(Path(sys.argv[1]).read_text())):
    print("ready", flush=True)
    threading.Event().wait(400)
"""


@pytest.fixture
def busy(model_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process of rank 0 whose loop looks at nothing, and the pid of its rank 1."""
    (tmp_path / "config.json").write_text(make(model_dir, tmp_path / "run").to_json())
    with (tmp_path / "said").open("wb") as said, subprocess.Popen(
        [sys.executable, "-c", LEARNER, str(tmp_path / "config.json")], env=environment(), stdout=subprocess.PIPE, stderr=said
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            (entry,) = json.loads((tmp_path / "run" / gang.RANKS_FILE).read_text())["ranks"]
            assert entry["rank"] == 1 and start_time(entry["pid"]) is not None
            yield process, entry["pid"]
        finally:
            process.kill()


def test_a_dead_rank_0_takes_the_others_with_it(busy: tuple[subprocess.Popen[bytes], int]) -> None:
    process, rank = busy
    process.kill()
    wait_until("rank 1 is gone", lambda: start_time(rank) is None)


def test_a_learner_that_computes_is_ended_with_the_name_of_the_rank_that_died(
    busy: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    process, rank = busy
    os.kill(rank, signal.SIGKILL)
    assert process.wait(300) == 1
    assert f"rollbook learner: RankLost: rank 1 (pid {rank}) was killed by SIGKILL" in (tmp_path / "said").read_text()
