"""Prompts that are conversations: rendered by the model's template, never flattened without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollbook.core.errors import TaskError
from rollbook.tasks.prompts import make_encoder, prompt_of
from rollbook.tasks.sources import TaskShape
from rollbook.tasks.tokenizer import load_tokenizer
from task_fixtures import make_config, write_byte_tokenizer

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]


def encoded(tmp_path: Path, task: dict, template: str = CHAT) -> str:
    model = write_byte_tokenizer(tmp_path / "model", template)
    encoder = make_encoder(make_config(model, model={"chat_template": bool(template)}))
    return str(load_tokenizer(model).decode(encoder.token_ids(prompt_of(task), "t.jsonl line 1")))


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_every_message_reaches_the_chat_template(tmp_path: Path, field: str) -> None:
    task = TaskShape().apply({field: ASKED, "answer": "4"}, "t.jsonl line 1")
    assert task["messages"] == ASKED and task["prompt"] == "Add.\n\n2+2"
    assert encoded(tmp_path, task) == "<system>Add.<user>2+2<assistant>"


def test_a_text_prompt_beside_messages_is_the_prompt(tmp_path: Path) -> None:
    task = TaskShape().apply({"prompt": "1+1", "messages": ASKED, "answer": "2"}, "here")
    assert task["messages"] == ASKED and encoded(tmp_path, task) == "<user>1+1<assistant>"


def test_a_template_of_the_task_replaces_the_conversation(tmp_path: Path) -> None:
    task = TaskShape("{messages[1][content]}=").apply({"messages": ASKED, "answer": "4"}, "here")
    assert encoded(tmp_path, task) == "<user>2+2=<assistant>"


def test_without_a_chat_template_one_user_message_is_its_text_and_more_are_refused(tmp_path: Path) -> None:
    one = TaskShape().apply({"messages": ASKED[1:], "answer": "4"}, "here")
    assert encoded(tmp_path, one, template="") == "2+2"
    more = TaskShape().apply({"messages": ASKED, "answer": "4"}, "here")
    with pytest.raises(TaskError, match="line 1: its prompt is a conversation .system, user., which only a chat template"):
        encoded(tmp_path, more, template="")


def test_a_role_the_chat_template_does_not_know_is_named(tmp_path: Path) -> None:
    task = TaskShape().apply({"messages": [*ASKED, {"role": "tool", "content": "4"}], "answer": "4"}, "here")
    with pytest.raises(TaskError, match="line 1: the chat template cannot render its messages .system, user, tool.: no tools"):
        encoded(tmp_path, task)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"),
        (["2+2"], "message 1 is '2+2'"),
        ([*ASKED, {"role": "robot", "content": "x"}], "message 3 is"),
        ([{"role": "user", "content": [{"type": "text", "text": "2+2"}]}], "message 1 is"),
        ([*ASKED, {"role": "assistant", "content": "4"}], "its last message is the assistant's"),
    ],
)
def test_a_broken_conversation_is_named(messages: list, said: str) -> None:
    with pytest.raises(TaskError, match=re.escape("here: ") + ".*" + re.escape(said)):
        TaskShape().apply({"messages": messages, "answer": "4"}, "here")


def test_columns_that_hold_nothing_are_left_out() -> None:
    row = {"prompt": None, "messages": [{"role": "user", "content": "2+2", "name": None}], "answer": "4"}
    assert TaskShape().apply(row, "here")["messages"] == [{"role": "user", "content": "2+2"}]
    with pytest.raises(TaskError, match="asks for 'prompt'"):
        TaskShape().apply({"prompt": None, "answer": "4"}, "here")


def test_the_answer_may_lie_in_a_table() -> None:
    row = {"prompt": "p", "reward_model": {"ground_truth": 4}, "a.b": "dotted"}
    assert TaskShape(answer_field="reward_model.ground_truth").apply(row, "here")["answer"] == "4"
    assert TaskShape(answer_field="a.b").apply(row, "here")["answer"] == "dotted"
    with pytest.raises(TaskError, match="no answer in field 'reward_model.gold'"):
        TaskShape(answer_field="reward_model.gold").apply(row, "here")
