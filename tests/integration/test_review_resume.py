"""What a run is resumed with: records of the first release, places that moved, files of a lineage the ledger lost."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_input_support import edited, small_run
from learner_support import MemoryLedger, make_config
from rollbook.cli.record import file_sha256, run_record
from rollbook.cli.serving import write_run_files
from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.errors import ConfigMismatch, LedgerBehind
from rollbook.core.records import TASK_STREAM, Cursor, GroupSpec, PolicyVersion, Role, RunRecord
from rollbook.learner.history import Position, ahead_of, move_aside, refuse_when_ahead, strays_of
from rollbook.ledger.ledger import Ledger
from rollbook.supervise.process import ProcessRecord, start_time

LATER_FIELDS = {"learner": ("on_divergence", "fork_tolerance", "keep_orphans"), "checkpoint": ("mtbf_s",)}


def record_of_the_first_release(config: Config) -> RunRecord:
    """As it was stored before inputs had names of their own: file by file, without the fields of later releases."""
    model = Path(config.model.path)
    inputs = {
        f"model/{path.name}": file_sha256(path)
        for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".jinja", ".model") and path.name != "made.json"
    }  # fmt: skip
    inputs |= {"task.path": file_sha256(Path(config.task.path))}
    inputs |= {"task.reward": file_sha256(Path(config.task.reward.partition(":")[0]))}
    table = json.loads(config.to_json())
    del table["chaos"]
    for section, names in LATER_FIELDS.items():
        for name in names:
            del table[section][name]
    content = json.dumps({"config": table, "inputs": inputs}, sort_keys=True)
    return RunRecord(config.run.id, "digest of the first release", content, 0, config.rules())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ledger]]:
    """(folder of a run's own inputs, its ledger), opened by the first release, with a group issued and version 0 published."""
    root = small_run(tmp_path_factory.mktemp("begun")).root
    ledger = Ledger(f"sqlite:///{root}/ledger.sqlite", holder="server", role_ttl_s=600.0)
    ledger.open_run(record_of_the_first_release(load_config(root / "run.toml")))
    before = ledger.cursor(TASK_STREAM)
    term = ledger.acquire_role(Role.FEEDER, "feeder", 600.0)
    ledger.append_groups(term, before, Cursor(TASK_STREAM, 1, '{"n": 1}', False), [GroupSpec(0, b"\1\0\0\0", "{}", 2)])
    learner = ledger.acquire_role(Role.LEARNER, "learner", 600.0)
    ledger.publish_version(learner, PolicyVersion(0, 0, "0" * 64, "versions/0.0", "{}"))
    yield root, ledger
    ledger.close()


def test_a_run_opened_by_the_first_release_goes_on_with_unchanged_inputs(begun: tuple[Path, Ledger]) -> None:
    root, ledger = begun
    assert ledger.open_run(run_record(load_config(root / "run.toml"))).revision == 0
    assert ledger.cursor(TASK_STREAM).state_json == '{"n": 1}', "its stream is not begun again"


CHANGED = {
    "model/model.safetensors": "model.weights_sha256",
    "model/config.json": "model.config_sha256",
    "tasks.jsonl": "task.dataset_sha256",
    "judge.py": "task.reward_sha256",
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_first_release_recorded_is_still_compared(begun: tuple[Path, Ledger], name: str) -> None:
    root, ledger = begun
    with edited(root / name, (root / name).read_bytes() + b"\n"), pytest.raises(ConfigMismatch) as caught:
        ledger.open_run(run_record(load_config(root / "run.toml")))
    assert f"({CHANGED[name]}: " in str(caught.value) and "; model." not in str(caught.value).partition(")")[0]
    with pytest.raises(ConfigMismatch, match=r"task\.heldout_sha256: None -> "):
        ledger.open_run(run_record(load_config(root / "run.toml", ["task.heldout_path=tasks.jsonl"])))


def test_a_run_directory_names_the_places_of_today(tmp_path: Path) -> None:
    root = small_run(tmp_path / "run").root
    first = load_config(root / "run.toml")
    ledger = Ledger(f"sqlite:///{root}/ledger.sqlite", holder="server", role_ttl_s=600.0)
    try:
        Path(first.run.dir).mkdir(exist_ok=True)
        write_run_files(first, ledger.open_run(run_record(first)))
        (root / "moved").mkdir()
        for name in ("tasks.jsonl", "judge.py"):
            (root / name).rename(root / "moved" / name)
        changes = ["task.path=moved/tasks.jsonl", "task.reward=moved/judge.py:good", "checkpoint.every_steps=7",
                   "ledger.url=postgresql+psycopg://elsewhere/ledger"]  # fmt: skip
        moved = load_config(root / "run.toml", changes)
        opened = ledger.open_run(run_record(moved))
        assert opened.revision == 0
        write_run_files(moved, opened)
    finally:
        ledger.close()
    stored = json.loads((Path(first.run.dir) / "config.json").read_text())
    assert config_from_json(json.dumps(stored["config"])) == moved
    assert stored["inputs"] == json.loads(opened.config_json)["inputs"]
    assert config_from_json((Path(first.run.dir) / "revisions" / "0.json").read_text()).digest() == first.digest()


def test_a_version_of_a_lineage_the_ledger_has_lost_proves_it_even_without_a_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path / "model", tmp_path / "run", steps=4)
    ledger = MemoryLedger(config)
    for step in range(4):
        ledger.published[step] = PolicyVersion(0, step, f"{step}" * 64, f"versions/0.{step}", "{}")
    run_dir = Path(config.run.dir)
    (run_dir / "versions" / "0.3.333333333333").mkdir(parents=True)
    assert ahead_of(run_dir, ledger, Position.of(ledger)) == []
    lost = run_dir / "versions" / "1.2.abcdefabcdef"
    lost.mkdir()
    with pytest.raises(LedgerBehind, match=r"versions/1\.2\.abcdefabcdef \(lineage 1 is unknown to the ledger\)"):
        refuse_when_ahead(run_dir, ledger)
    assert [stray.path for stray in strays_of(run_dir, ledger, Position.of(ledger), 0)] == [lost], "and a repair finds it"
    assert dataclasses.asdict(strays_of(run_dir, ledger, Position.of(ledger), 0)[0])["lineage"] == 1


def test_a_repair_that_is_interrupted_anywhere_finds_the_rest_when_it_is_repeated(tmp_path: Path) -> None:
    config = make_config(tmp_path / "model", tmp_path / "run", steps=4)
    ledger = MemoryLedger(config)
    ledger.published[0] = PolicyVersion(0, 0, "0" * 64, "versions/0.0", "{}")
    run_dir = Path(config.run.dir)
    for name in ("spool/worker-0", "revisions", *(f"versions/0.{n}.aaaaaaaaaaaa" for n in (1, 2, 3))):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "revisions" / "1.json").write_text("{}")
    (run_dir / "spool" / "worker-0" / "w.00000001.sample").write_bytes(b"")
    strays = strays_of(run_dir, ledger, Position.of(ledger), 0)
    assert len(strays) == 5
    for n, stray in enumerate(reversed(strays)):
        assert len(strays_of(run_dir, ledger, Position.of(ledger), 0)) == 5 - n
        move_aside(stray)
    assert strays_of(run_dir, ledger, Position.of(ledger), 0) == []


def test_a_role_that_leads_no_group_yet_is_killed_all_the_same() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ProcessRecord("worker-0", child.pid, start_time(child.pid) or 0, "nobody has this").kill_tree()
        assert child.wait(timeout=30) == -9
    finally:
        child.kill()
        child.wait()
