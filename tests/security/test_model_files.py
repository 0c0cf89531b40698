"""Model files are what their digests say, wherever they are read, and only as data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rollbook.cli.record import check_recorded_model, run_record
from rollbook.cli.serving import write_run_files
from rollbook.core.config import Config, load_config
from rollbook.core.errors import ConfigError, ConfigMismatch
from rollbook.learner.model import load_policy
from run_support import CONFIG, MODEL


@pytest.fixture
def opened(tmp_path: Path) -> Config:
    """A run whose directory holds the record it was opened with, and a model of its own."""
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace(f'path = "{MODEL}"\n\n[task]', f'path = "{tmp_path}/model"\n\n[task]'))
    config = load_config(file)
    Path(config.run.dir).mkdir()
    write_run_files(config, run_record(config))
    return config


def change_a_weight(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})


def change_text(path: Path) -> None:
    content = json.loads(path.read_text())
    content["changed"] = True
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(("name", "with_weights", "said"), [
    ("weights", True, "model.weights_sha256"), ("config.json", False, "model.config_sha256"),
    ("tokenizer.json", False, "model.tokenizer_sha256"), ("config.json", True, "model.config_sha256"),
])  # fmt: skip
def test_a_model_file_that_is_not_the_recorded_one_is_refused_by_name(
    opened: Config, name: str, with_weights: bool, said: str
) -> None:
    model = Path(opened.model.path)
    check_recorded_model(opened, with_weights=with_weights)
    change_a_weight(model) if name == "weights" else change_text(model / name)
    with pytest.raises(ConfigMismatch, match=f"{said} is [0-9a-f]{{12}} here and .* put back"):
        check_recorded_model(opened, with_weights=with_weights)


def test_the_same_files_elsewhere_are_the_same_model(opened: Config, tmp_path: Path) -> None:
    import dataclasses

    shutil.copytree(opened.model.path, tmp_path / "elsewhere")
    check_recorded_model(dataclasses.replace(opened, model=dataclasses.replace(opened.model, path=f"{tmp_path}/elsewhere")),
                         with_weights=True)  # fmt: skip


def test_before_a_run_is_opened_nothing_is_compared(opened: Config) -> None:
    (Path(opened.run.dir) / "config.json").unlink()
    change_a_weight(Path(opened.model.path))
    check_recorded_model(opened, with_weights=True)


def test_weights_in_a_format_that_can_carry_code_are_not_read(opened: Config) -> None:
    """A model directory with a pickled state dict and no safetensors is no model, although the library could read it."""
    import torch

    model = Path(opened.model.path)
    (weights,) = model.glob("*.safetensors")
    torch.save(load_file(weights), model / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match="no loadable causal language model"):
        load_policy(opened)


def test_a_model_that_brings_its_own_code_is_not_run(opened: Config, tmp_path: Path) -> None:
    model, ran = Path(opened.model.path), tmp_path / "ran"
    (model / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: ...\nclass OwnConfig: ...\n")
    content = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    content |= {"model_type": "own", "auto_map": own}
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        load_policy(opened)
    assert not ran.exists()
