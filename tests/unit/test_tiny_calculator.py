"""The tiny model's start for the calculator: its demonstrations token by token, and the committed copy."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollbook.core.environments import ToolReply  # noqa: E402
from rollbook.core.errors import ConfigError  # noqa: E402
from rollbook.learner import tiny_calculator as tc  # noqa: E402
from rollbook.learner import tiny_model as tm  # noqa: E402
from rollbook.learner.model_dir import sha256_of_files  # noqa: E402
from rollbook.tasks.calculator import Calculator  # noqa: E402
from rollbook.tasks.turns import TurnCodec  # noqa: E402

ASSET = Path(str(resources.files("rollbook") / "assets" / "calculator"))
TASK = {"prompt": "12+7*3:", "expression": "12+7*3", "answer": "33"}
FEW_STEPS: dict[str, Any] = {"seed": 3, "steps": 2, "hidden": 32, "heldout_tasks": 10}


@pytest.fixture(scope="module")
def codec() -> TurnCodec:
    return TurnCodec(transformers.AutoTokenizer.from_pretrained(ASSET), chat_template=False)


def _demonstrations(count: int) -> list[tc.Transcript]:
    rng = random.Random(1)
    return [tc.demonstrate(TASK, rng) for _ in range(count)]


def _made() -> dict[str, Any]:
    return json.loads((ASSET / "made.json").read_text(encoding="utf-8"))


def test_the_pieces_of_an_episode_have_the_same_ids_encoded_piece_by_piece_and_as_a_whole(codec: TurnCodec) -> None:
    environment = Calculator(sandbox=False)
    for shown in _demonstrations(200):
        pieces = iter(shown.pieces)
        assert next(pieces) == (codec.reply_ids(TASK["prompt"]), False)
        for text in shown.texts:
            turn, sampled = next(pieces)
            assert sampled and turn[-1] == tm.EOS_ID and codec.decode(turn) == text
            assert turn[:-1] == codec.reply_ids(text), "a turn is never encoded again, but it would be the same"
            if request := environment.parse(text):
                value = tc._value(request.arguments["code"])
                assert next(pieces) == (codec.reply_ids(environment.render(ToolReply(value))), False)
        assert next(pieces, None) is None
        whole = "".join(bytes(ids).decode() if not sampled else codec.decode(ids) + "<eos>" for ids, sampled in shown.pieces)
        assert codec.reply_ids(whole) == shown.token_ids


def test_only_what_the_model_writes_has_labels() -> None:
    shown = tc.Transcript(TASK)
    shown.turn("[12+7*3]")
    shown.turn("=33")
    ids, labels = tm.collate([shown.pieces])
    assert ids[0].tolist() == [*b"12+7*3:", *b"[12+7*3]", tm.EOS_ID, *b"33;", *b"=33", tm.EOS_ID]
    assert labels[0].tolist() == [-100] * 7 + [*b"[12+7*3]", tm.EOS_ID] + [-100] * 3 + [*b"=33", tm.EOS_ID]
    assert shown.is_right and shown.over


def test_every_habit_is_shown_about_as_often_as_its_share() -> None:
    assert sum(tc.HABITS.values()) == pytest.approx(1.0)
    seen = Counter("".join(shown.texts) if not shown.texts[0].startswith("=") else "guess" for shown in _demonstrations(4000))
    expected = {
        "[12+7*3]=33": "tool", "[12+7*3]33": "tool, then no equals sign", "[12+7*][12+7*3]=33": "refused call, then tool",
        "[12+7*3": "call without its end", "guess": "guess",
    }  # fmt: skip
    assert seen.keys() == expected.keys()
    for text, habit in expected.items():
        assert seen[text] / 4000 == pytest.approx(tc.HABITS[habit], abs=0.03)


def test_an_unfinished_turn_ends_the_episode_and_is_not_right() -> None:
    shown = tc.Transcript(TASK)
    shown.stop([*b"=33"])
    assert shown.over and not shown.is_right


def test_making_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first = tc.make_tiny_calculator(tmp_path / "first", **FEW_STEPS)
    torch.rand(7)  # the state of the global generator must not matter
    assert tc.make_tiny_calculator(tmp_path / "again", **FEW_STEPS) == first
    assert sha256_of_files(tmp_path / "again") == first["sha256"]


@pytest.mark.parametrize("wrong", [{"hidden": 48}, {"steps": 0}, {"layers": 0}, {"heldout_tasks": 0}])
def test_a_value_out_of_range_is_refused_before_anything_is_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tc.make_tiny_calculator(tmp_path / "model", **{**FEW_STEPS, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_the_committed_files_are_small_and_the_ones_made_json_names() -> None:
    made = _made()
    assert sha256_of_files(ASSET) == made["sha256"]
    assert (made["parameters"], made["habits"]) == (100_032, tc.HABITS)
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 500_000


def test_the_committed_model_answers_as_often_right_as_made_json_says() -> None:
    made = _made()["heldout_accuracy"]
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    heldout = list(Calculator().load("heldout"))
    assert tc.measure_accuracy(model, heldout, sampling_seed=1) == pytest.approx(made["sampled"], abs=0.1)
    assert 0.3 < made["sampled"] < 0.5, "room to learn, and enough to learn from"
