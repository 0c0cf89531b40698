"""What may change when a run goes on: every field by its own name, from the first unplanned step, and some never."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_input_support import edited, small_run
from learner_support import make_config, make_model_dir
from learner_worker import Worker, feed, steps_of
from rollbook.cli.main import main
from rollbook.cli.record import run_record
from rollbook.cli.serving import write_run_files
from rollbook.core.changes import NEVER
from rollbook.core.config import Config, load_config
from rollbook.core.errors import ConfigMismatch
from rollbook.core.records import TASK_STREAM, Cursor, GroupSpec, PolicyVersion, Role, RunRecord
from rollbook.learner.loop import run_learner
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised

STEPS, PLANNED = 8, 5


def record(config: Config) -> RunRecord:
    return RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules())


@pytest.fixture
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "first")
    monkeypatch.setenv("ROLLBOOK_SUPERSEDES", "")
    yield monkeypatch
    failpoints.arm("")


def test_an_override_accepted_with_five_steps_to_replay_holds_from_the_first_new_one(
    tmp_path: Path, disarmed: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(make_model_dir(tmp_path / "model"), tmp_path / "run", steps=STEPS, every_steps=100)
    config = dataclasses.replace(config, ledger=dataclasses.replace(config.ledger, url=f"sqlite:///{tmp_path}/run/ledger.sqlite"))
    changed = dataclasses.replace(config, learner=dataclasses.replace(config.learner, lr=1e-3, rho_max=1.5))
    (tmp_path / "run").mkdir()
    ledger = Ledger(config.ledger.url, holder="server", role_ttl_s=60.0)
    worker = Worker(ledger)
    try:
        write_run_files(config, at_config(ledger.open_run(record(config))))
        feed(ledger, steps_of(config))
        worker.start()
        failpoints.arm(f"learner.after_publish=raise@{PLANNED + 1}")
        with pytest.raises(FailpointRaised):
            run_learner(config, ledger, threading.Event())
        failpoints.arm("")
        recorded = [version.digest for version in ledger.versions(0)]
        assert len(recorded) == PLANNED + 1 and ledger.resume_point().last_planned_step == PLANNED

        with pytest.raises(ConfigMismatch, match=r"not accepted: learner\.rho_max"):
            ledger.open_run(record(changed), accept=["learner.lr"])
        assert ledger.run.revision == 0, "an acceptance that names too little accepts nothing"
        opened = ledger.open_run(record(changed), accept=["learner.lr", "learner.rho_max"])
        write_run_files(changed, at_config(opened))
        assert opened.revision == 1 and ledger.open_run(record(changed)).revision == 1

        disarmed.setenv("ROLLBOOK_INCARNATION", "second")
        disarmed.setenv("ROLLBOOK_SUPERSEDES", "first")
        caplog.clear()
        assert run_learner(changed, ledger, threading.Event())
        (started,) = [r for r in caplog.records if getattr(r, "event", "") == "learner_opened"]
        assert started.plans_to_replay == PLANNED  # type: ignore[attr-defined]
        assert [version.digest for version in ledger.versions(0)][: PLANNED + 1] == recorded, "replayed to the same bits"
        plans = [ledger.read_plan(0, step) for step in range(1, STEPS + 1)]
        assert [plan.revision for plan in plans] == [0] * PLANNED + [1] * (STEPS - PLANNED)
        rates = {metrics["step"]: metrics["lr"] for metrics in ledger.step_metrics(0)}
        assert rates[PLANNED] == pytest.approx(learning_rate(config, PLANNED))
        assert rates[PLANNED + 1] == pytest.approx(learning_rate(changed, PLANNED + 1))
        assert ledger.audit() == []
    finally:
        worker.stop()
        ledger.close()
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] and (result["steps"], result["versions_compared"]) == (STEPS, STEPS + 1)


def learning_rate(config: Config, step: int) -> float:
    from rollbook.learner.schedule import learning_rate as rate

    return rate(config.learner, step, config.run.steps)


def at_config(opened: RunRecord) -> RunRecord:
    """The record as ``rollbook ledger`` keeps it: the configuration beside digests of inputs."""
    return dataclasses.replace(opened, config_json=json.dumps({"config": json.loads(opened.config_json), "inputs": {}}))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ledger]]:
    """(folder of a run's own inputs, its ledger) with one group issued and version 0 published."""
    root = small_run(tmp_path_factory.mktemp("begun")).root
    ledger = Ledger(f"sqlite:///{root}/ledger.sqlite", holder="server", role_ttl_s=600.0)
    ledger.open_run(run_record(load_config(root / "run.toml")))
    before = ledger.cursor(TASK_STREAM)
    term = ledger.acquire_role(Role.FEEDER, "feeder", 600.0)
    ledger.append_groups(term, before, Cursor(TASK_STREAM, 1, '{"n": 1}', False), [GroupSpec(0, b"\1\0\0\0", "{}", 2)])
    learner = ledger.acquire_role(Role.LEARNER, "learner", 600.0)
    ledger.publish_version(learner, PolicyVersion(0, 0, "0" * 64, "versions/0.0", "{}"))
    yield root, ledger
    ledger.close()


def refusal_of(ledger: Ledger, offered: RunRecord, *accept: str) -> str:
    with pytest.raises(ConfigMismatch) as caught:
        ledger.open_run(offered, accept=accept)
    assert ledger.run.revision == 0
    return str(caught.value)


FIELDS = {
    "learner.lr=0.5": "learner.lr: 0.0001 -> 0.5",
    "learner.objective=ppo_clip": "learner.objective: 'decoupled' -> 'ppo_clip'",
    "learner.minibatches=2": "learner.minibatches: 1 -> 2",
    "learner.threads=2": "learner.threads: 1 -> 2",
    "learner.ranks=2": "learner.ranks: 1 -> 2",
    "run.steps=9": "run.steps: 2 -> 9",
    "sampling.temperature=1.0": "sampling.temperature: 3.0 -> 1.0",
    "schedule.max_lag_versions=5": "schedule.max_lag_versions: 2 -> 5",
    "task.prompt_template='{prompt} now'": "task.prompt_template: '{prompt}' -> '{prompt} now'",
    "task.reward=judge.py:breaks_for_one": "task.reward: 'judge.py:good' -> 'judge.py:breaks_for_one'",
    "model.chat_template=true": "model.chat_template: False -> True",
    "workers.0.dtype=float64": "workers[0].dtype: 'float32' -> 'float64'",
    "ledger.attempts_max=9": "ledger.attempts_max: 3 -> 9",
}


@pytest.mark.parametrize("override", FIELDS)
def test_a_changed_field_is_refused_by_name_with_its_old_and_new_value(begun: tuple[Path, Ledger], override: str) -> None:
    root, ledger = begun
    name = FIELDS[override].partition(": ")[0]
    said = refusal_of(ledger, run_record(load_config(root / "run.toml", [override])), "learner.eps")
    assert f"({FIELDS[override]}); not accepted: {name}." in said
    assert f"--accept {name}" in said or f"--accept '{name}'" in said


INPUTS = {
    "tasks.jsonl": "task.dataset_sha256",
    "judge.py": "task.reward_sha256",
    "model/chat_template.jinja": "model.chat_template_sha256",
    "model/tokenizer.json": "model.tokenizer_sha256",
    "model/config.json": "model.config_sha256",
    "model/generation_config.json": "model.config_sha256",
    "model/model.safetensors": "model.weights_sha256",
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_changed_input_is_refused_by_the_name_of_its_digest(begun: tuple[Path, Ledger], name: str) -> None:
    root, ledger = begun
    file, field = root / name, INPUTS[name]
    is_new = not file.exists()
    file.touch()
    with edited(file, file.read_bytes() + b"\n"):
        offered = run_record(load_config(root / "run.toml"))
        assert re.search(rf"\({field}: [0-9a-f]{{12}}… -> [0-9a-f]{{12}}…\)", refusal_of(ledger, offered))
        if field in NEVER:
            assert f"{field} cannot change within a run: {NEVER[field]}" in refusal_of(ledger, offered, field)
    if is_new:
        file.unlink()


NEVER_CHANGED = {
    "learner.group_size=4": "learner.group_size",
    "learner.groups_per_step=2": "learner.groups_per_step",
    "schedule.kind=fixed": "schedule.kind",
    "schedule.lag_versions=0": "schedule.lag_versions",
    "run.seed=6": "run.seed",
    "learner.dtype=float64": "learner.dtype",
}


@pytest.mark.parametrize("override", NEVER_CHANGED)
def test_a_field_that_what_is_recorded_depends_on_never_changes(begun: tuple[Path, Ledger], override: str) -> None:
    root, ledger = begun
    name = NEVER_CHANGED[override]
    said = refusal_of(ledger, run_record(load_config(root / "run.toml", [override, "learner.lr=0.5"])), name, "learner.lr")
    assert f"{name} cannot change within a run: {NEVER[name]}" in said and "learner.lr: 0.0001 -> 0.5" in said
    assert "start a new run under another run.id and run.dir" in said


def test_every_field_that_never_changes_is_tried_above() -> None:
    assert set(NEVER) <= {*NEVER_CHANGED.values(), *INPUTS.values()}


def test_places_of_inputs_may_change_and_a_template_inside_the_tokenizer_settings_is_no_tokenizer(
    begun: tuple[Path, Ledger],
) -> None:
    root, ledger = begun
    (root / "moved").mkdir(exist_ok=True)
    (root / "moved" / "judge.py").write_bytes((root / "judge.py").read_bytes())
    (root / "moved" / "tasks.jsonl").write_bytes((root / "tasks.jsonl").read_bytes())
    moved = load_config(root / "run.toml", ["task.path=moved/tasks.jsonl", "task.reward=moved/judge.py:good"])
    assert ledger.open_run(run_record(moved)).revision == 0
    settings = json.loads((root / "model" / "tokenizer_config.json").read_text())
    with edited(root / "model" / "tokenizer_config.json", json.dumps(settings | {"chat_template": "{{ x }}"}).encode()):
        said = refusal_of(ledger, run_record(load_config(root / "run.toml")))
        assert "not accepted: model.chat_template_sha256." in said
    with edited(root / "model" / "tokenizer_config.json", json.dumps(settings | {"model_max_length": 9}).encode()):
        assert "model.tokenizer_sha256 cannot change" in refusal_of(ledger, run_record(load_config(root / "run.toml")))


def test_an_accepted_dataset_begins_at_its_first_task_after_the_groups_already_issued(tmp_path: Path) -> None:
    root = small_run(tmp_path / "run").root
    ledger = Ledger(f"sqlite:///{root}/ledger.sqlite", holder="server", role_ttl_s=600.0)
    try:
        ledger.open_run(run_record(load_config(root / "run.toml")))
        term = ledger.acquire_role(Role.FEEDER, "feeder", 600.0)
        ledger.append_groups(
            term, ledger.cursor(TASK_STREAM), Cursor(TASK_STREAM, 1, '{"n": 1}', True), [GroupSpec(0, b"\1\0\0\0", "{}", 2)]
        )
        (root / "tasks.jsonl").write_text('{"prompt": "sort 2 1:", "answer": "1 2"}\n')
        ledger.open_run(run_record(load_config(root / "run.toml")), accept=["task.dataset_sha256"])
        assert ledger.cursor(TASK_STREAM) == Cursor(TASK_STREAM, 1, "{}", False)
    finally:
        ledger.close()
