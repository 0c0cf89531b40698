"""The configuration: what a wrong one is told, with the full path of the key and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook.core.changes import changed_fields, check_names, differences
from rollbook.core.changes import refusal as why_refused
from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.config_checks import AT_LEAST, CHOICES, ENGINE_DTYPES
from rollbook.core.errors import ConfigError, UnsupportedSampling

GOOD = """
[run]
id = "t"
dir = "run"
steps = 2
[model]
path = "model"
[task]
source = "jsonl"
path = "tasks.jsonl"
[sampling]
max_new_tokens = 16
[learner]
groups_per_step = 1
group_size = 2
[[workers]]
engine = "transformers"
[[workers]]
engine = "transformers"
slots = 8
"""


def load(tmp_path: Path, *overrides: str, text: str = GOOD) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_config(file, overrides)


def refusal(tmp_path: Path, *overrides: str, text: str = GOOD, error: type[ConfigError] = ConfigError) -> str:
    """The message, which begins with the file."""
    with pytest.raises(error) as caught:
        load(tmp_path, *overrides, text=text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'run.toml'}")
    return message


def test_the_example_of_this_file_is_a_good_one(tmp_path: Path) -> None:
    assert load(tmp_path).workers[1].slots == 8


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('id = "t"', 'idd = "t"', "unknown key run.idd; did you mean run.id?"),
        ("[sampling]", "[samplings]", "unknown key samplings; did you mean sampling?"),
        ("group_size = 2", "group_size = 2\ngroup = 3", "unknown key learner.group; did you mean learner.group_size?"),
        ("slots = 8", "slot = 8", "unknown key workers[1].slot; did you mean workers[1].slots?"),
        ("slots = 8", "zzz = 8", "unknown key workers[1].zzz; valid keys: engine, count, slots"),
        ("group_size = 2\n", "", "missing key learner.group_size: add it to [learner]"),
        ('[model]\npath = "model"\n', "", "missing key model: add a [model] table"),
        ('engine = "transformers"\nslots = 8', "slots = 8", "missing key workers[1].engine: add it to [workers[1]]"),
        ("[[workers]]", "[[worker]]", "unknown key worker; did you mean workers?"),
        ("steps = 2", 'steps = "2"', "run.steps = '2': expected an integer"),
        ("steps = 2", "steps = 2.0", "run.steps = 2.0: expected an integer"),
        ("steps = 2", "steps = true", "run.steps = True: expected an integer"),
        ("steps = 2", "steps = 2\nchaos_allowed = 1", "run.chaos_allowed = 1: expected true or false"),
        ("slots = 8", "slots = [8]", "workers[1].slots = [8]: expected an integer"),
        ("group_size = 2", 'group_size = 2\nlr = "fast"', "learner.lr = 'fast': expected a number"),
        ('path = "model"', "path = 3", "model.path = 3: expected a string"),
        ('source = "jsonl"', 'source = "jsonl"\nsettings = 3', "task.settings = 3: expected a table"),
        ('[model]\npath = "model"', 'model = "model"', "expected a table [model]"),
        ("[run]", "[run", "is not valid TOML: "),
    ],
)
def test_a_key_that_is_unknown_missing_or_of_another_type_is_named_with_its_full_path(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    if new.startswith("model ="):  # a bare key belongs before the first table
        text = f"{new}\n{GOOD.replace(old, '')}"
    assert said in refusal(tmp_path, text=text)


def test_a_file_without_workers_says_which_table_to_add(tmp_path: Path) -> None:
    text = GOOD.partition("[[workers]]")[0]
    assert "missing key workers: add a [[workers]] table" in refusal(tmp_path, text=text)
    assert "workers: expected [[workers]] tables" in refusal(tmp_path, text=text + '[workers]\nengine = "vllm"\n')


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.group_sizes=3", "unknown key learner.group_sizes; did you mean learner.group_size?"),
        ("leaner.lr=1", "unknown key leaner; did you mean learner?"),
        ("workers.1.slot=3", "unknown key workers[1].slot; did you mean workers[1].slots?"),
        ("workers.1.slots=many", "workers[1].slots = 'many': expected an integer"),
        ("workers.2.slots=3", "--set workers.2.slots: '2' is no entry of [[workers]], which has 2, counted from 0"),
        ("workers.x.slots=3", "'x' is no entry of [[workers]]"),
        ("workers.slots=3", "--set workers.slots: name one entry, for example workers.0.slots"),
        ("workers=3", "workers: expected [[workers]] tables"),
        ("run=3", "run: expected a table [run]"),
        ("run.id.x=3", "--set run.id.x: run.id is a value, not a table"),
        ("run.steps", "--set 'run.steps': write SECTION.KEY=VALUE"),
        ("run.steps=", "run.steps = '': expected an integer"),
        ("run.steps=1.5", "run.steps = 1.5: expected an integer"),
    ],
)
def test_an_override_is_told_the_same_as_the_file(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, override)


def test_an_override_replaces_one_value(tmp_path: Path) -> None:
    config = load(tmp_path, "workers.1.slots=3", "run.id=other", "learner.lr=1", "task.settings={a = 1}")
    assert (config.workers[0].slots, config.workers[1].slots, config.run.id) == (64, 3, "other")
    assert (config.learner.lr, config.task.settings) == (1.0, {"a": 1})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lr=nan", "learner.lr = nan: must be a finite number"),
        ("workers.1.probe_tolerance=inf", "workers[1].probe_tolerance = inf: must be a finite number"),
        ("run.id='a/b'", "run.id = 'a/b': use letters"),
        ("run.dir=", "run.dir is empty"),
        ("run.seed=-1", "run.seed = -1: must be at least 0"),
        ("run.seed=9223372036854775808", "run.seed = 9223372036854775808: at most"),
        ("ledger.role_ttl_s=0", "ledger.role_ttl_s = 0.0: must exceed 0"),
        ("ledger.lease_ttl_s=15", "must exceed 3 x ledger.heartbeat_s"),
        ("workers.0.slots=4097", "workers[0].slots = 4097: one lease call grants at most 4096; raise workers[0].count"),
        ("workers.0.count=-1", "workers[0].count = -1: must be at least 0"),
        ("workers.0.max_model_len=16", "workers[0].max_model_len = 16 leaves no room for a prompt"),
        ("workers.0.engine=sglang", "workers[0].engine = 'sglang': 'transformers' or 'vllm'"),
        ("workers.0.device=tpu", "workers[0].device = 'tpu': 'cpu' or 'cuda'"),
        ("workers.0.dtype=float16", "workers[0].dtype = 'float16': the transformers engine computes in float64"),
        ("workers.0.batch_invariant=true", "workers[0].batch_invariant = true needs engine = 'vllm'"),
        ("learner.objective=pppo", "learner.objective = 'pppo': one of 'decoupled'"),
        ("learner.minibatches=3", "learner.minibatches = 3: between 1 and the 2 samples of a step"),
        ("checkpoint.keep=1", "checkpoint.keep must be >= 2"),
        ("task.source=csv", "task.source = 'csv': one of 'jsonl', 'parquet', 'reasoning_gym'"),
        ("task.path=", "task.path is missing: the jsonl file to read"),
        ("task.source=reasoning_gym", "task.name is missing: the reasoning_gym dataset"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, override)


@pytest.mark.parametrize("path", sorted(AT_LEAST))
def test_a_number_may_be_as_small_as_its_limit_and_no_smaller(tmp_path: Path, path: str) -> None:
    least = AT_LEAST[path]
    load(tmp_path, f"{path}={least}")
    assert f"{path} = {least - 1}" in refusal(tmp_path, f"{path}={least - 1}").replace(".0:", ":")


def test_vllm_is_not_asked_for_float64_and_the_engine_that_has_it_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, "workers.1.engine=vllm", "workers.1.dtype=float64")
    assert "workers[1].dtype = 'float64': the vllm engine computes in float32, bfloat16, float16" in message
    assert message.endswith("float64 is computed by engine = 'transformers'")
    assert load(tmp_path, "workers.1.engine=transformers", "workers.1.dtype=float64").workers[1].dtype == "float64"


@pytest.mark.parametrize(
    ("setting", "only"),
    [
        ("top_p=0.9", "1.0"), ("top_k=5", "0"), ("min_p=0.1", "0.0"), ("min_tokens=1", "0"), ("repetition_penalty=1.1", "1.0"),
        ("presence_penalty=0.1", "0.0"), ("frequency_penalty=-0.1", "0.0"),
    ],
)  # fmt: skip
def test_a_sampling_setting_the_trainer_cannot_follow_is_refused(tmp_path: Path, setting: str, only: str) -> None:
    name, _, value = setting.partition("=")
    message = refusal(tmp_path, f"sampling.{setting}", error=UnsupportedSampling)
    assert f"sampling.{name} = {value}: only {only} is supported, because" in message
    load(tmp_path, f"sampling.{name}={only}")


@pytest.mark.parametrize("temperature", ["0.0", "-1.0", "nan", "inf"])
def test_greedy_sampling_is_refused(tmp_path: Path, temperature: str) -> None:
    message = refusal(tmp_path, f"sampling.temperature={temperature}", error=UnsupportedSampling)
    assert "greedy rows are not samples of the policy; use a value > 0" in message
    assert load(tmp_path, "sampling.temperature=0.7").sampling.temperature == 0.7


def test_names_known_to_the_check_are_the_names_known_to_learner_and_engines() -> None:
    from rollbook.learner.advantages import ADVANTAGES
    from rollbook.learner.corrections import WEIGHTS
    from rollbook.learner.model import DTYPES
    from rollbook.learner.objectives import OBJECTIVES
    from rollbook.learner.schedule import KINDS
    from rollbook.rollout import transformers_engine, vllm_engine

    assert set(CHOICES["learner.objective"]) == set(OBJECTIVES)
    assert set(CHOICES["learner.correction"]) == set(WEIGHTS)
    assert set(CHOICES["learner.advantage"]) == set(ADVANTAGES)
    assert CHOICES["learner.lr_schedule"] == KINDS
    assert set(CHOICES["learner.dtype"]) == set(DTYPES) == set(CHOICES["learner.publish_dtype"]) - {""}
    assert set(ENGINE_DTYPES["transformers"]) == set(transformers_engine.DTYPES)
    assert set(ENGINE_DTYPES["vllm"]) == set(vllm_engine.DTYPES)


def test_a_configuration_survives_its_storage(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config_from_json(config.to_json()) == config


def test_differences_name_what_changes_the_result_and_nothing_else(tmp_path: Path) -> None:
    one = load(tmp_path)
    free = ("run.dir=elsewhere", "supervisor.drain_s=1", "ledger.address='127.0.0.1:9'", "ledger.role_ttl_s=3")
    assert differences(one.to_json(), load(tmp_path, *free).to_json()) == []
    assert load(tmp_path, *free).digest() == one.digest()
    bound = ("learner.lr=0.5", "ledger.attempts_max=9", "workers.0.slots=1")
    found = differences(one.to_json(), load(tmp_path, *bound, *free).to_json())
    assert found == ["learner.lr: 0.0001 -> 0.5", "ledger.attempts_max: 3 -> 9", "workers[0].slots: 64 -> 1"]
    assert all(load(tmp_path, override).digest() != one.digest() for override in bound)


def test_a_changed_input_is_named_by_the_beginning_of_its_digest() -> None:
    stored, offered = (json.dumps({"config": {}, "inputs": {"task.dataset_sha256": digit * 64}}) for digit in "ab")
    assert differences(stored, offered) == ["task.dataset_sha256: aaaaaaaaaaaa… -> bbbbbbbbbbbb…"]


def test_places_of_inputs_cadence_of_checkpoints_and_what_a_fault_does_are_free(tmp_path: Path) -> None:
    one = load(tmp_path)
    free = (
        "model.path=moved", "task.path=moved.jsonl", "task.heldout_path=moved.jsonl", "checkpoint.every_steps=3",
        "checkpoint.keep=9", "learner.on_divergence=fork",
    )  # fmt: skip
    moved = load(tmp_path, *free)
    assert moved.digest() == one.digest() and differences(one.to_json(), moved.to_json()) == []
    files = [load(tmp_path, f"task.reward={place}") for place in ("judge.py:good", "elsewhere/judge.py:good", "judge.py:bad")]
    assert files[0].digest() == files[1].digest() != files[2].digest()
    assert differences(files[0].to_json(), files[1].to_json()) == []


def test_a_field_that_a_later_release_adds_at_its_default_changes_neither_digest_nor_record(tmp_path: Path) -> None:
    one = load(tmp_path)
    older = json.loads(one.to_json())
    del older["learner"]["rho_max"], older["sampling"]["top_k"], older["workers"][0]["probe_tolerance"]
    assert changed_fields(json.dumps(older), one.to_json()) == {}
    assert changed_fields(json.dumps({"config": older, "inputs": {}}), json.dumps({"config": json.loads(one.to_json())})) == {}
    assert list(changed_fields(json.dumps(older), load(tmp_path, "learner.rho_max=3").to_json())) == ["learner.rho_max"]
    assert config_from_json(json.dumps(older)).digest() == one.digest()


def test_every_change_has_to_be_accepted_by_its_own_name() -> None:
    changed = {"learner.lr": "1 -> 2", "workers[0].slots": "1 -> 2"}
    assert why_refused("r", changed, [], ["learner.lr", "workers[0].slots", "run.steps"]) == ""
    said = why_refused("r", changed, [], ["learner.lr", "learner", "workers"])
    assert "(learner.lr: 1 -> 2; workers[0].slots: 1 -> 2); not accepted: workers[0].slots." in said
    assert "--accept learner.lr --accept 'workers[0].slots'" in said
    said = why_refused("r", changed | {"run.seed": "1 -> 2"}, ["run.seed"], [*changed, "run.seed"])
    assert "run.seed cannot change within a run: the order of tasks" in said and "workers[0].slots: 1 -> 2" in said


def test_a_name_that_no_field_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    record = json.dumps({"config": json.loads(load(tmp_path).to_json()), "inputs": {"task.reward_sha256": "0"}})
    check_names(record, ["learner.lr", "task.reward_sha256", "task.dataset_sha256", "workers[0].slots", "task.settings.x"])
    with pytest.raises(ConfigError, match="--accept learner.lrr: the run has no such field; did you mean learner.lr"):
        check_names(record, ["learner.lrr"])
    with pytest.raises(ConfigError, match="names look like"):
        check_names(record, ["?"])
