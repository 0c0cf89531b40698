"""Ledger files of another age or damaged, full and read-only disks: told by name, and nothing acknowledged is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bad_input_support import (
    SERVED,
    Hand,
    ServedLedger,
    edited,
    fill,
    remount,
    served_run,
    small_disk,
    small_run,
    submission,
    trajectory,
)
from rollbook.cli.main import main
from rollbook.core.errors import StorageFull
from rollbook.core.records import SubmitOutcome
from rollbook.ledger import dialects
from rollbook.ledger.migrate import head_revision
from rollbook.rollout.delivery import Delivery
from rollbook.rollout.leases import LeaseNote
from rollbook.rollout.spool import Spool
from run_support import REPOSITORY, ROLLBOOK, environment, wait_until

pytestmark = pytest.mark.timeout(400)

NEXT_MIGRATION = '''
"""Add a remark to every run."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{previous}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("remark", sa.Text()))


def downgrade() -> None:
    op.drop_column("run", "remark")
'''


@dataclass(frozen=True)
class Place:
    """Where a run and its inputs stand."""

    root: Path

    @property
    def dir(self) -> Path:
        return self.root / "run"

    @property
    def config(self) -> Path:
        return self.root / "run.toml"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with two accepted samples, whose server has ended."""
    served = served_run(tmp_path_factory.mktemp("kept") / "kept")
    try:
        with served.client() as client:
            hand = Hand(client)
            hand.feed(2)
            results = client.submit_samples([submission(grant) for grant in hand.lease(2)])
            assert [r.outcome for r in results] == [SubmitOutcome.ACCEPTED] * 2
        served.stop()
    finally:
        served.end()
    return served.run.root


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Place:
    """A copy of it that may be damaged."""
    shutil.copytree(kept, tmp_path / "copy", ignore=shutil.ignore_patterns("model"))
    os.symlink(kept / "model", tmp_path / "copy" / "model")
    return Place(tmp_path / "copy")


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run_it(run: Place, *arguments: str, package: Path | None = None) -> tuple[int, str]:
    """A command on the run, by the installed package or by another one."""
    env = environment(**({"PYTHONPATH": str(package)} if package else {}))
    done = subprocess.run(
        [*ROLLBOOK, *arguments, str(run.config), "--set", "run.steps=1000"], env=env, cwd=run.root, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def next_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a later release would be: one migration further."""
    root = tmp_path_factory.mktemp("next")
    shutil.copytree(REPOSITORY / "service", root / "service", ignore=shutil.ignore_patterns("sort-digits"))
    shutil.copytree(REPOSITORY / "migrations", root / "migrations")
    newest = sorted(p.name for p in (root / "migrations" / "versions").glob("[0-9]*.py"))[-1][:4]
    text = NEXT_MIGRATION.format(revision=f"{int(newest) + 1:04d}", previous=newest)
    (root / "migrations" / "versions" / f"{int(newest) + 1:04d}_add_a_remark.py").write_text(text)
    return root / "service"


def test_a_ledger_of_an_older_schema_says_migrate_and_one_of_a_newer_schema_says_upgrade(
    copied: Place, next_package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = copied.dir / "ledger.sqlite"
    ours = head_revision()
    theirs = f"{int(ours) + 1:04d}"
    before = digest_of(ledger)
    for command in ("audit", "run"):
        code, text = run_it(copied, command, package=next_package)
        said = f"the ledger has schema revision {ours}, this package needs {theirs}; run `rollbook migrate`"
        assert code == 2 and said in text
    assert digest_of(ledger) == before
    assert run_it(copied, "migrate", package=next_package) == (0, f"schema: at revision {theirs}\n")
    code, text = run_it(copied, "status", package=next_package)
    assert code == 0 and "submits  accepted 2 " in text
    before = digest_of(ledger)
    for command in ("audit", "status", "migrate"):
        assert main([command, str(copied.config)]) == 2
        said = f"the ledger has schema revision {theirs}, this package knows up to {ours}; upgrade rollbook"
        assert said in capsys.readouterr().err
    code, text = run_it(copied, "run")
    assert code == 2 and f"ledger refuses to start:\nrollbook ledger: {said}" in text
    assert digest_of(ledger) == before


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a text file": (lambda data: b"this is a text, not a database\n" * 100, "is damaged (file is not a database)"),
    "cut to a part": (lambda data: data[: len(data) // 2], "is damaged"),
    "cut to its first page": (lambda data: data[:8192], "is damaged"),
    "cut to ten bytes": (lambda data: data[:10], "is damaged (file is not a database)"),
    "pages overwritten": (lambda data: data[:65536] + b"\xff" * 65536 + data[131072:], "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_ledger_is_named_and_left_as_it_is(
    copied: Place, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    damage, said = DAMAGES[kind]
    ledger = copied.dir / "ledger.sqlite"
    whole = ledger.read_bytes()
    ledger.write_bytes(damage(whole))
    before = digest_of(ledger)
    for command in ("audit", "status"):
        assert main([command, str(copied.config)]) == 2
        message = capsys.readouterr().err
        assert f"{ledger}" in message and said in message and "restore it from a backup" in message
    assert digest_of(ledger) == before
    ledger.write_bytes(whole)
    assert main(["audit", str(copied.config)]) == 0


@pytest.mark.parametrize("left", [b"", None])
def test_a_run_whose_ledger_was_emptied_or_removed_does_not_silently_begin_again(copied: Place, left: bytes | None) -> None:
    with edited(copied.dir / "ledger.sqlite", left):
        code, text = run_it(copied, "ledger")
        assert code == 2
        assert f"{copied.dir} holds the run 'tiny', but its ledger sqlite:///{copied.dir}/ledger.sqlite does not" in text
        assert "Restore it from a backup (with its -wal file), or choose another run.dir" in text
    assert main(["audit", str(copied.config)]) == 0


def test_a_run_on_a_damaged_ledger_stops_at_once_with_the_cause(copied: Place) -> None:
    (copied.dir / "ledger.sqlite").write_bytes(b"this is a text, not a database\n" * 100)
    code, text = run_it(copied, "run")
    assert code == 2 and "starting it again" not in text
    assert f"ledger refuses to start:\nrollbook ledger: {copied.dir}/ledger.sqlite: the ledger's file is damaged" in text


def test_sqlite_on_a_network_file_system_is_refused_with_the_way_out(
    copied: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"21 1 254:0 / / rw - ext4 /dev/root rw\n30 21 0:40 / {copied.dir} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(dialects, "MOUNTINFO", table)
    for command in ("audit", "migrate"):
        assert main([command, str(copied.config)]) == 2
        assert f"{copied.dir} is on a nfs4 file system, where SQLite's locks and fsync cannot be" in capsys.readouterr().err
    assert main(["doctor", str(copied.config)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL storage" in printed and "(run.dir) or set ledger.url to postgresql+psycopg://" in printed
    table.write_text("21 1 254:0 / / rw - ext4 /dev/root rw\n")
    assert main(["audit", str(copied.config)]) == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "4m") as place:
        yield place


def test_a_read_only_run_directory_is_named(copied: Place, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(copied.dir, disk / "run")
    remount(disk, "ro")
    for place in ("run", "new"):
        assert main(["run", str(copied.config), "--set", f"run.dir={disk}/{place}"]) == 2
        said = f"run.dir = {disk}/{place} cannot be written (Read-only file system): name another directory, or make this one"
        assert said in capsys.readouterr().err
    for command in ("status", "audit"):
        assert main([command, str(copied.config), "--set", f"run.dir={disk}/run"]) == 2
        message = capsys.readouterr().err
        assert f"{disk}/run/ledger.sqlite.lock cannot be written (Read-only file system)" in message
        assert "or copy the run directory to where it is" in message
    remount(disk, "rw")
    assert main(["audit", str(copied.config), "--set", f"run.dir={disk}/run"]) == 0


def test_a_run_directory_that_is_a_file_is_named(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(copied.config), "--set", "run.dir=tasks.jsonl"]) == 2
    assert f"run.dir = {copied.root}/tasks.jsonl cannot be written (File exists)" in capsys.readouterr().err


def test_a_full_disk_under_the_ledger_acknowledges_nothing_loses_nothing_and_goes_on_when_there_is_space(
    disk: Path, tmp_path: Path
) -> None:
    url = f"ledger.url=sqlite:///{disk}/ledger.sqlite"
    served = ServedLedger(small_run(tmp_path / "full", extra=SERVED.replace("[ledger]", "[ledger]\npayload_bytes_max = 8000000")),
                          "--set", "run.steps=1000", "--set", "workers.0.max_model_len=200000", "--set", url)  # fmt: skip
    try:
        with served.client() as client, served.client(retry_total_s=0.5) as hasty:
            hand = Hand(client)
            hand.feed(4)
            small, *big = hand.lease(4)
            stored = submission(small)
            assert [r.outcome for r in client.submit_samples([stored])] == [SubmitOutcome.ACCEPTED]
            filler = fill(disk, leave_bytes=200_000)
            large = [submission(grant, trajectory=trajectory(40_000)) for grant in big]
            for _ in range(2):
                with pytest.raises(StorageFull, match="the ledger's storage is full .*; nothing was acknowledged, writes resume"):
                    hasty.submit_samples(large)
            filler.unlink()
            assert client.sample(small.key).reward == 1.0, "what was acknowledged is there"
            assert hand.accepted() == 1, "and nothing else"
            assert [r.outcome for r in client.submit_samples(large)] == [SubmitOutcome.ACCEPTED] * 3
            assert [r.outcome for r in client.submit_samples([stored])] == [SubmitOutcome.REPLAYED]
            assert served.process.poll() is None, "the server itself has survived"
            assert client.audit() == []
        served.stop()
    finally:
        served.end()


def test_a_full_disk_under_the_spool_costs_no_sample(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = served_run(tmp_path / "spooled")
    try:
        with served.client() as client:
            hand = Hand(client)
            hand.feed(2)
            first, second, third, _ = hand.lease(4)
            spool, note = Spool(disk / "spool", "tiny"), LeaseNote(disk / "spool" / "leases.json", "tiny")
            delivery = Delivery(client, spool, threading.Event())
            filler = fill(disk)
            note.write("hand", [first])
            delivery.deliver([submission(first), submission(second, sequence=1)])
            assert hand.accepted() == 2 and list((disk / "spool").iterdir()) == []
            assert "the spool cannot be written, sending without it" in caplog.text and "No space left on device" in caplog.text
            filler.unlink()
            caplog.clear()
            delivery.deliver([submission(third, sequence=2)])
            assert hand.accepted() == 3 and caplog.text == "" and list((disk / "spool").iterdir()) == []
        served.stop()
    finally:
        served.end()


def test_a_full_disk_under_the_checkpoints_ends_the_learner_with_the_file_and_no_half_checkpoint_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "half")
    run.dir.mkdir()
    with small_disk(run.dir / "checkpoints", "64m") as place:
        fill(place, leave_bytes=4_000_000)  # enough for the checkpoint of step 0, which has no moments yet
        try:
            run.start("--no-report", "--set", "checkpoint.every_steps=1", "--set", "supervisor.restarts_max=100")
            run.wait_for("learner died (exit code 1); starting it again")
            wait_until("the learner says what is full", lambda: "No space left on device" in run.log("learner"))
            said = [line for line in run.log("learner").splitlines() if line.startswith("rollbook learner: ")]
            assert f"rollbook learner: {place}/tmp." in said[0] and "; free space, the same command goes on from here" in said[0]
            assert not [path for path in place.iterdir() if path.name.startswith("0.1.")], "no half checkpoint has a name"
            (place / "filler").unlink()
            code = run.code()
            assert code == 0 and "audit: clean" in run.output(), f"{run.output()}\n{run.tails()}"
            assert {path.name[:4] for path in place.iterdir()} == {"0.0.", "0.1.", "0.2."}
            assert "checkpoint_corrupt" not in run.log("learner")
            assert main(["replay", str(run.dir)]) == 0
            result = json.loads(capsys.readouterr().out)
            assert result["equal"] and (result["steps"], result["versions_compared"]) == (2, 3)
        finally:
            run.end()
