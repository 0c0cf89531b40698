"""The learner dying at the first and the last crossing of each of its failpoints: the weights are the unbroken run's."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner_support import MemoryLedger, make_config, make_model_dir
from rollbook.core.config import Config
from rollbook.core.errors import Fenced
from rollbook.core.records import CheckpointState, Role
from rollbook.learner.checkpoint import CheckpointFiles
from rollbook.learner.loop import run_learner
from rollbook.learner.role import HeldRole
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from run_support import environment

STEPS = 6
IN_EVERY_RUN = (
    "learner.after_role", "learner.start.after_version", "learner.resume.opened", "learner.before_plan", "learner.after_plan",
    "learner.after_fetch", "learner.revision.before_rename", "learner.revision.after_rename", "learner.mid_step",
    "learner.after_step", "learner.after_finish_plan", "learner.publish.after_file", "learner.publish.before_rename",
    "learner.durable.mid_write", "learner.durable.after_rename", "learner.before_publish_row", "learner.after_publish",
    "learner.checkpoint.mid_files", "learner.checkpoint.before_manifest", "learner.checkpoint.after_manifest",
    "learner.checkpoint.before_rename", "learner.checkpoint.after_rename", "learner.checkpoint.after_row",
    "learner.checkpoint.after_mark", "learner.durable.after_doom", "learner.durable.before_unlink",
    "learner.checkpoint.after_removal", "learner.versions.between_removals", "learner.before_release",
)  # fmt: skip
FIRST_ELSEWHERE = {
    "learner.before_plan", "learner.after_plan", "learner.mid_step", "learner.after_step", "learner.after_finish_plan",
    "learner.before_publish_row", "learner.after_publish", "learner.checkpoint.mid_files", "learner.checkpoint.before_rename",
    "learner.checkpoint.after_rename", "learner.checkpoint.after_row",
}  # fmt: skip
"""Whose first crossings ``test_learner_loop`` dies at."""
AFTER_A_DEATH = {
    "learner.resume.between_clears": "learner.checkpoint.before_rename=raise@2",
    "learner.resume.before_adopt": "learner.checkpoint.after_rename=raise@2",
    "learner.resume.after_adopt": "learner.checkpoint.after_rename=raise@2",
    "learner.publish.between_clears": "learner.publish.before_rename=raise@4",
    "learner.checkpoint.after_removal": "learner.checkpoint.after_mark=raise@1",
    "learner.publish.rewritten": "learner.after_publish=raise@6",
    "learner.resume.after_corrupt": "learner.before_plan=raise@6",
    "learner.resume.after_aside": "learner.before_plan=raise@6",
}
"""Points that only a start after a death crosses, and the death before it."""
DAMAGE = {
    "learner.publish.rewritten": "versions/0.5.*/model.safetensors",
    "learner.resume.after_corrupt": "checkpoints/0.4.*/model.safetensors",
    "learner.resume.after_aside": "checkpoints/0.4.*/model.safetensors",
}
"""What is damaged between that death and the start."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir: Path, tmp_path: Path) -> Config:
    return make_config(model_dir, tmp_path / "run", steps=STEPS)


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    failpoints.arm("")
    yield
    failpoints.set_observer(None)
    failpoints.arm("")


@pytest.fixture(scope="module")
def unbroken(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str, Counter[str]]:
    """Digests of the versions and of the last state of a run in which nothing dies, and how often it crosses each point."""
    config = make_config(model_dir, tmp_path_factory.mktemp("unbroken"), steps=STEPS)
    ledger, crossed = MemoryLedger(config), Counter[str]()
    failpoints.set_observer(lambda name: crossed.update([name]))
    try:
        assert run_learner(config, ledger, threading.Event())
    finally:
        failpoints.set_observer(None)
    return digests(ledger), final_state(config), crossed


def digests(ledger: MemoryLedger) -> list[str]:
    return [ledger.published[v].digest for v in sorted(ledger.published)]


def final_state(config: Config) -> str:
    files = CheckpointFiles(Path(config.run.dir) / "checkpoints")
    return files.read(files.verify(files.names()[0])).digest()


def live(config: Config, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch, number: int, armed: str) -> None:
    """One learner process, which dies where it is armed to."""
    monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life {number}")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life {number - 1}")
    failpoints.arm(armed)
    if not armed:
        assert run_learner(config, ledger, threading.Event())
        return
    with pytest.raises(FailpointRaised, match=armed.partition("=")[0]):
        run_learner(config, ledger, threading.Event())
    failpoints.arm("")


def check(config: Config, ledger: MemoryLedger, unbroken: tuple[list[str], str, Counter[str]]) -> None:
    assert digests(ledger) == unbroken[0] and final_state(config) == unbroken[1]
    assert not list(Path(config.run.dir).rglob("tmp.*"))
    assert [s for s, c in ledger.checkpoints.items() if c.state is CheckpointState.COMMITTED][-2:] == [4, 6]


def test_a_run_crosses_every_point_that_is_not_a_restarts(unbroken: tuple[list[str], str, Counter[str]]) -> None:
    assert set(unbroken[2]) == set(IN_EVERY_RUN)


@pytest.mark.parametrize(
    ("point", "which"),
    [(p, "last") for p in IN_EVERY_RUN] + [(p, "first") for p in IN_EVERY_RUN if p not in FIRST_ELSEWHERE],
)
def test_a_learner_that_dies_at(
    point: str, which: str, config: Config, monkeypatch: pytest.MonkeyPatch, unbroken: tuple[list[str], str, Counter[str]]
) -> None:
    ledger = MemoryLedger(config)
    live(config, ledger, monkeypatch, 1, f"{point}=raise@{1 if which == 'first' else unbroken[2][point]}")
    live(config, ledger, monkeypatch, 2, "")
    check(config, ledger, unbroken)


@pytest.mark.parametrize("point", AFTER_A_DEATH)
def test_a_learner_that_dies_while_it_recovers_from_a_death_at(
    point: str, config: Config, monkeypatch: pytest.MonkeyPatch, unbroken: tuple[list[str], str, Counter[str]]
) -> None:
    ledger = MemoryLedger(config)
    live(config, ledger, monkeypatch, 1, AFTER_A_DEATH[point])
    if point in DAMAGE:
        (damaged,) = Path(config.run.dir).glob(DAMAGE[point])
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    live(config, ledger, monkeypatch, 2, f"{point}=raise")
    live(config, ledger, monkeypatch, 3, "")
    check(config, ledger, unbroken)


@pytest.mark.parametrize(
    "point", ["learner.durable.mid_write", "learner.checkpoint.after_manifest", "learner.publish.after_file"]
)
def test_a_full_disk_ends_the_learner_with_the_name_of_the_file_and_leaves_nothing_of_it(
    point: str, config: Config, monkeypatch: pytest.MonkeyPatch, unbroken: tuple[list[str], str, Counter[str]]
) -> None:
    ledger = MemoryLedger(config)
    failpoints.arm(f"{point}=error:ENOSPC@3")
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "life 1")
    with pytest.raises(OSError, match="No space left"):
        run_learner(config, ledger, threading.Event())
    assert not list(Path(config.run.dir).rglob("tmp.*.*.*"))
    live(config, ledger, monkeypatch, 2, "")
    assert digests(ledger) == unbroken[0] and final_state(config) == unbroken[1]


def test_a_learner_that_is_taken_over_learns_it_and_may_write_nothing_more(config: Config) -> None:
    ledger, told = MemoryLedger(config), threading.Event()
    failpoints.set_observer(lambda name: told.set() if name == "learner.role_lost" else None)
    role = HeldRole(ledger, ledger.acquire_role(Role.LEARNER, "zombie", 0.06))  # type: ignore[arg-type]
    ledger.acquire_role(Role.LEARNER, "successor", 60.0, "zombie")
    assert told.wait(60)
    with pytest.raises(Fenced):
        role.check()
    role.close()


ZOMBIE = """
from threading import Event
from rollbook.core.errors import Fenced
from rollbook.core.records import Role, RoleTerm
from rollbook.learner.role import HeldRole

class Successor:
    def renew_role(self, term):
        raise Fenced("epoch 2 holds the role")

role = HeldRole(Successor(), RoleTerm(Role.LEARNER, 1, "zombie", 0.06))
Event().wait(60)
"""


def test_a_learner_may_die_the_moment_it_learns_that_it_was_taken_over() -> None:
    env = environment(ROLLBOOK_FAILPOINTS="learner.role_lost=crash")
    assert subprocess.run([sys.executable, "-c", ZOMBIE], env=env, timeout=60, check=False).returncode == -signal.SIGKILL
