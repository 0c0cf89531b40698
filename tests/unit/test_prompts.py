"""Prompts: rendered from fields, tokenised once, refused by name when they cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.packing import unpack_i32
from rollbook.tasks.prompts import make_encoder, render_prompt
from rollbook.tasks.tokenizer import load_tokenizer, tokenizer_digest
from task_fixtures import make_config, write_byte_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_is_filled_from_the_fields_of_the_task() -> None:
    fields = {"question": "1+1?", "meta": {"word": "ab"}}
    assert render_prompt("Q: {question} ({meta[word]}) \\boxed{{}}", fields, "here") == "Q: 1+1? (ab) \\boxed{}"


@pytest.mark.parametrize("template", ["{prompt}", "{question} {prompt}", "{meta[prompt]}"])
def test_a_missing_field_is_named_with_the_template_and_the_task(template: str) -> None:
    with pytest.raises(TaskError) as caught:
        render_prompt(template, {"question": "q", "meta": {}}, "t.jsonl line 4")
    text = str(caught.value)
    assert "t.jsonl line 4" in text and "'prompt'" in text and repr(template) in text and "meta, question" in text


@pytest.mark.parametrize("template", ["{", "}", "{}", "{0}", "{question!x}", "{question:d}"])
def test_a_malformed_template_says_how_to_write_braces(template: str) -> None:
    with pytest.raises(TaskError, match="is malformed"):
        render_prompt(template, {"question": "q"}, "here")


def test_a_prompt_is_encoded_as_little_endian_int32_token_ids(tmp_path: Path) -> None:
    config = make_config(write_byte_tokenizer(tmp_path / "model"))
    encoder = make_encoder(config)
    ids = list(unpack_i32(encoder.encode("añ", "here")))
    assert ids == encoder.token_ids("añ", "here") and len(ids) == 3
    assert load_tokenizer(tmp_path / "model").decode(ids) == "añ"


def test_a_prompt_may_fill_what_the_completion_leaves_and_no_more(tmp_path: Path) -> None:
    workers = [{"engine": "transformers", "max_model_len": 64}, {"engine": "transformers", "max_model_len": 40}]
    config = make_config(write_byte_tokenizer(tmp_path / "model"), workers=workers, sampling={"max_new_tokens": 10})
    encoder = make_encoder(config)
    assert len(encoder.token_ids("x" * 30, "here")) == 30
    with pytest.raises(TaskError, match="t.jsonl line 9: its prompt has 31 tokens, more than the 30"):
        encoder.encode("x" * 31, "t.jsonl line 9")


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    encoder = make_encoder(make_config(write_byte_tokenizer(tmp_path / "model")))
    with pytest.raises(TaskError, match="here: its prompt '' has no tokens"):
        encoder.encode("", "here")


def test_the_chat_template_wraps_one_user_message_and_opens_the_answer(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path / "model", CHAT)
    encoder = make_encoder(make_config(directory, model={"chat_template": True, "path": str(directory)}))
    assert encoder.tokenizer.decode(encoder.token_ids("hi", "here")) == "<user>hi</user><assistant>"


def test_a_chat_template_that_is_wanted_but_absent_is_an_error(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no chat template"):
        make_encoder(make_config(directory, model={"chat_template": True, "path": str(directory)}))


def test_a_directory_that_holds_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for function in (load_tokenizer, tokenizer_digest):
        with pytest.raises(ConfigError, match="is not a directory"):
            function(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="holds no tokenizer"):
            function(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_the_prompt_tokenizer_digest_covers_the_chat_template_and_no_weights(tmp_path: Path) -> None:
    one = write_byte_tokenizer(tmp_path / "one", CHAT)
    same = write_byte_tokenizer(tmp_path / "same", CHAT)
    other = write_byte_tokenizer(tmp_path / "other", CHAT + " ")
    (same / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(one) == tokenizer_digest(same) != tokenizer_digest(other)
