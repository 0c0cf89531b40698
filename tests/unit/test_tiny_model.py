"""The tiny model's tokenizer, task splits, warm start and the committed copy of it."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from rollbook.core.errors import ConfigError  # noqa: E402
from rollbook.learner import tiny_model as tm  # noqa: E402

ASSET = Path(str(resources.files("rollbook") / "assets" / "sort-digits"))
FEW_STEPS: dict[str, Any] = {"seed": 3, "steps": 3, "hidden": 32, "train_prompts": 40, "heldout_prompts": 20}


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("few") / "model"
    tm.make_tiny_model(directory, **FEW_STEPS)
    return directory


def test_the_ids_of_a_text_are_its_bytes_and_nothing_is_added(tokenizer: Any) -> None:
    texts = ["sort 73915:", "", " ", "  leading, trailing  ", "\n\t\r\x00\x7f", "Grüße €5 🎲 日本", "it's don't 12+345="]
    for text in texts:
        assert tokenizer(text).input_ids == list(text.encode()), repr(text)
        assert tokenizer.decode(tokenizer(text).input_ids) == text, repr(text)
    assert tokenizer.bos_token is None


def test_every_byte_that_utf8_allows_survives_encoding_and_decoding(tokenizer: Any) -> None:
    # Two-byte sequences cover the lead bytes C2-DF, one character per further lead byte covers E0-F4.
    three_bytes = [0x800, *range(0x1000, 0xD800, 0x1000), 0xE000, 0xF000]
    code_points = [*range(0x800), *three_bytes, *range(0x10000, 0x110000, 0x40000), 0x10FFFF]
    seen: set[int] = set()
    for character in map(chr, code_points):
        text = unicodedata.normalize("NFC", character)
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode()), repr(text)
        assert tokenizer.decode(ids) == text, repr(text)
        seen |= set(ids)
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert seen == set(range(256)) - never_in_utf8


def test_text_is_brought_to_nfc_by_every_loader_alike(tokenizer: Any) -> None:
    text = "Cafe\u0301 sort 12:"
    expected = list(unicodedata.normalize("NFC", text).encode())
    assert expected != list(text.encode())
    assert tokenizer(text).input_ids == expected
    assert tokenizers.Tokenizer.from_file(str(ASSET / "tokenizer.json")).encode(text).ids == expected
    assert transformers.PreTrainedTokenizerFast.from_pretrained(ASSET)(text).input_ids == expected


def test_each_of_the_272_ids_has_its_own_token_and_the_way_back(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(list(range(tm.VOCAB_SIZE)))
    assert len(set(tokens)) == tm.VOCAB_SIZE == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(tm.VOCAB_SIZE))


def test_filler_ids_show_up_in_decoded_text_and_never_in_encoded_text(tokenizer: Any) -> None:
    for token_id in range(tm.EOS_ID + 1, tm.VOCAB_SIZE):
        decoded = tokenizer.decode([ord("1"), token_id, ord("3")], skip_special_tokens=True)
        assert decoded == f"1<unused{token_id}>3"
        assert max(tokenizer(decoded).input_ids) < 256


def test_eos_ends_an_answer_and_is_skipped_in_its_text(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (tm.PAD_ID, tm.EOS_ID) == (256, 257)
    ids = [*b"13579", tm.EOS_ID, tm.PAD_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "13579"
    assert tm.text_before_eos([*b"13579", tm.EOS_ID, *b"77"]) == "13579"
    assert tm.text_before_eos([tm.EOS_ID]) == ""
    assert tm.text_before_eos([*b"13579"]) is None, "an answer without eos is unfinished"
    assert tm.text_before_eos([*b"135", tm.PAD_ID, *b"79", tm.EOS_ID]) is None, "pad is no part of an answer"
    assert tm.text_before_eos([*b"135", 258, tm.EOS_ID]) is None


def test_the_split_of_a_prompt_is_one_of_three_in_the_ratio_10_40_50() -> None:
    counts = Counter(tm.split_of(f"sort {number:05d}:") for number in range(20_000))
    shares = {split: count / 20_000 for split, count in counts.items()}
    assert shares == pytest.approx({"heldout": 0.1, "demonstration": 0.4, "train": 0.5}, abs=0.02)


def test_the_three_prompt_sets_are_distinct_and_disjoint() -> None:
    drawn = {split: {task.prompt for task in tm.draw_tasks(split, 800, random.Random(5))} for split in tm.SPLITS}
    assert [len(prompts) for prompts in drawn.values()] == [800, 800, 800]
    assert not drawn["train"] & drawn["heldout"]
    assert not drawn["train"] & drawn["demonstration"]
    assert not drawn["heldout"] & drawn["demonstration"]
    for split, prompts in drawn.items():
        assert {tm.split_of(prompt) for prompt in prompts} == {split}


def test_a_split_is_not_asked_for_more_prompts_than_it_can_quickly_give() -> None:
    with pytest.raises(ConfigError, match="give at most 1111100"):
        tm.draw_tasks("heldout", 1_111_101, random.Random(0))


def test_the_committed_prompt_files_hold_sorted_digits_of_their_own_split() -> None:
    train, heldout = _lines(ASSET / tm.TRAIN_FILE), _lines(ASSET / tm.HELDOUT_FILE)
    assert (len(train), len(heldout)) == (4096, 500)
    for split, lines in (("train", train), ("heldout", heldout)):
        assert len({line["prompt"] for line in lines}) == len(lines)
        for line in lines:
            assert line.keys() == {"prompt", "answer"}
            digits = line["prompt"].removeprefix("sort ").removesuffix(":")
            assert digits.isdigit() and 4 <= len(digits) <= 8
            assert line["answer"] == "".join(sorted(digits))
            assert tm.split_of(line["prompt"]) == split


def test_the_committed_files_are_the_ones_made_json_names() -> None:
    made = json.loads((ASSET / "made.json").read_text(encoding="utf-8"))
    found = _digests(ASSET)
    del found["made.json"]
    assert found == made["sha256"]
    assert made["seed"] == 0 and made["steps"] == 150 and made["parameters"] == 363_904


def test_the_committed_directory_is_small() -> None:
    assert (ASSET / "model.safetensors").stat().st_size <= 1_500_000
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 2_000_000


def test_the_committed_model_loads_tied_in_float32_without_sampling_defaults(model: Any) -> None:
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(weight.numel() for weight in model.parameters()) == 363_904
    written = json.loads((ASSET / "generation_config.json").read_text(encoding="utf-8"))
    assert written.keys() - {"transformers_version"} == {"eos_token_id", "pad_token_id"}


def test_the_committed_model_answers_as_often_right_as_made_json_says(model: Any) -> None:
    made = json.loads((ASSET / "made.json").read_text(encoding="utf-8"))
    heldout = [tm.SortTask(**line) for line in _lines(ASSET / tm.HELDOUT_FILE)]
    # Another CPU may round a few near-ties to the other side.
    greedy = tm.measure_accuracy(model, heldout)
    assert greedy == pytest.approx(made["heldout_accuracy"]["greedy"], abs=0.02)
    sampled = tm.measure_accuracy(model, heldout, sampling_seed=1)
    assert sampled == pytest.approx(made["heldout_accuracy"]["sampled"], abs=0.1)
    assert sampled - greedy > 0.1, "the wrong habit must be the likelier one, the right one within reach of sampling"


def test_generate_of_transformers_stops_at_eos(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer("sort 73915:", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=13, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    assert output[-1] == tm.EOS_ID and len(output) == 6
    assert tokenizer.decode(output, skip_special_tokens=True) in {"13579", "97531"}


def test_making_twice_gives_the_same_bytes_and_returns_what_it_wrote(few_steps: Path, tmp_path: Path) -> None:
    torch.rand(7)  # the state of the global generator must not matter
    losses: list[tuple[int, float]] = []
    made = tm.make_tiny_model(tmp_path / "again", **FEW_STEPS, report_loss=lambda step, loss: losses.append((step, loss)))
    assert _digests(tmp_path / "again") == _digests(few_steps)
    assert made == json.loads((tmp_path / "again" / "made.json").read_text(encoding="utf-8"))
    assert [step for step, _ in losses] == [1, 2, 3]
    assert made["final_loss"] == round(losses[-1][1], 4)


def test_another_seed_gives_other_weights_for_the_same_prompts(few_steps: Path, tmp_path: Path) -> None:
    made = tm.make_tiny_model(tmp_path / "other", **{**FEW_STEPS, "seed": 4})["sha256"]
    first = json.loads((few_steps / "made.json").read_text(encoding="utf-8"))["sha256"]
    assert {name for name in made if made[name] != first[name]} == {"model.safetensors"}


def test_making_leaves_the_callers_torch_settings_alone(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    tm.make_tiny_model(tmp_path / "model", **FEW_STEPS)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_only_answer_and_eos_have_labels() -> None:
    input_ids, labels = tm._collate_demonstrations([("sort 1432:", "1234"), ("sort 54321:", "12345")])
    assert input_ids.shape == labels.shape == (2, 17)
    assert input_ids[0].tolist() == [*b"sort 1432:1234", tm.EOS_ID, tm.PAD_ID, tm.PAD_ID]
    assert labels[0].tolist() == [-100] * 10 + [*b"1234", tm.EOS_ID] + [-100] * 2
    assert labels[1].tolist() == [-100] * 11 + [*b"12345", tm.EOS_ID]


@pytest.mark.parametrize(("mistake_share", "shown"), [(0.0, {"1234"}), (0.6, {"1234", "4321"}), (1.0, {"4321"})])
def test_the_share_of_mistakes_decides_what_is_demonstrated(mistake_share: float, shown: set[str]) -> None:
    rng, task = random.Random(1), tm.SortTask("sort 1432:", "1234")
    answers = Counter(tm._demonstrate(task, mistake_share, rng)[1] for _ in range(2000))
    assert answers.keys() == shown
    assert answers["4321"] / 2000 == pytest.approx(mistake_share, abs=0.05)


def test_the_learning_rate_rises_for_50_steps_and_falls_over_the_last_30_percent() -> None:
    factors = {step: tm._learning_rate_factor(step, 150) for step in (1, 25, 50, 51, 105, 106, 107, 150)}
    assert factors == pytest.approx({1: 0.02, 25: 0.5, 50: 1.0, 51: 1.0, 105: 1.0, 106: 1.0, 107: 44 / 45, 150: 1 / 45})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 0}, "multiple of 32"),
        ({"hidden": 48}, "multiple of 32"),
        ({"steps": 0}, "steps=0"),
        ({"layers": 0}, "layers=0"),
        ({"train_prompts": 0}, "train_prompts=0"),
        ({"heldout_prompts": 0}, "heldout_prompts=0"),
        ({"mistake_share": -0.1}, "mistake_share=-0.1"),
        ({"mistake_share": 1.1}, "mistake_share=1.1"),
    ],
)
def test_a_value_out_of_range_is_refused_before_anything_is_written(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tm.make_tiny_model(tmp_path / "model", **{**FEW_STEPS, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_content_is_refused_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="name a new directory, or remove this one first"):
        tm.make_tiny_model(full, **FEW_STEPS)
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    tm.make_tiny_model(empty, **FEW_STEPS)
    assert (empty / "made.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_a_failure_half_way_leaves_no_directory_behind(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tm.make_tiny_model(tmp_path / "model", **FEW_STEPS, report_loss=stop)
    assert list(tmp_path.iterdir()) == []
