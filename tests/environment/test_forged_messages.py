"""Messages that the author's code writes to the socket itself: they end their process, and neither the pool nor P6."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.errors import ConfigError, TaskError, VerifierError
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks import wire
from rollbook.tasks.child_client import EnvironmentPool
from rollbook.tasks.environment_tasks import check_environment, read_tasks
from task_fixtures import make_config

FORGER = """
import asyncio, os, stat, struct


def forge(texts):
    for fd in range(3, 64):
        try:
            found = stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_blocking(fd)  # those of the event loop do not block
        except OSError:
            continue
        for text in texts if found else ():
            os.write(fd, struct.pack(">I", len(text)) + text.encode())


def answers(text):
    return [text.replace("ID", str(number)) for number in range(1, 300)] if "ID" in text else [text]


class Tool:
    name, pure = "tool", True
    async def call(self, arguments, earlier, context):
        forge(answers(arguments["forge"]))
        return "honest"


class Mine:
    tools = (Tool(),)
    def parse(self, text):
        forge(answers(text))
    def render(self, reply):
        forge(answers(reply.text))
        return "honest"
    async def score(self, episode, context):
        if episode.completion == "wait":
            await asyncio.sleep(0.5)
        elif episode.completion:
            forge(answers(episode.completion))
        return 0.5
"""
JUDGED = '{"value": %s, "status": "given", "evidence": %s, "parts": %s, "sandbox_status": "ok", "blame": null}'


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    folder = tmp_path_factory.mktemp("forger")
    (folder / "mine.py").write_text(FORGER)
    section = {"name": f"{folder / 'mine.py'}:Mine", "attempts_max": 2, "score_s": 60.0, "tool_s": 60.0}
    pool = EnvironmentPool(make_config(environment=section))
    yield pool
    pool.close()


def said(text: str) -> Episode:
    return Episode({}, (Turn(text),))


def judge(pool: EnvironmentPool, text: str) -> RewardResult:
    return pool.score(said(text), key="r/1.0", seed=5).result(30)


@pytest.mark.parametrize(
    "text",
    [
        "1", "[]", "null", '"x"', "{}", "[" * 60_000, '{"id": []}', '{"id": ID}',
        '{"id": ID, "error": 5}', '{"id": ID, "answer": null}', '{"id": ID, "answer": "x"}', '{"id": ID, "answer": {}}',
        '{"refused": 5, "again": false}', '{"refused": "no", "again": false}', '{"ready": true}',
        '{"loaded": {"x": true}, "needs_sandbox": false, "concurrent": true}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_message_ends_its_process_and_nothing_else(pool: EnvironmentPool, text: str) -> None:
    other = pool.score(said("wait"), key="r/2.0", seed=5)
    result = judge(pool, text)
    assert (result.value, result.status, result.blame) == (None, RewardStatus.VERIFIER_ERROR, Blame.UNCLEAR)
    assert "what it sent is no message" in result.evidence
    assert other.result(30).value == 0.5, "asked again elsewhere"
    assert judge(pool, "").value == 0.5


@pytest.mark.parametrize(
    ("value", "evidence", "parts"),
    [
        ("NaN", '""', "{}"),
        ("1e999", '""', "{}"),
        ("[1]", '""', "{}"),
        ('"1"', '""', "{}"),
        ("null", '""', "{}"),
        ("1" + "0" * 400, '""', "{}"),
        ("1.0", "5", "{}"),
        ("1.0", '""', "[]"),
        ("1.0", '""', '{"a": NaN}'),
        ("1.0", '""', '{"a": "x"}'),
    ],
)
def test_a_judgement_with_other_types_is_no_value(pool: EnvironmentPool, value: str, evidence: str, parts: str) -> None:
    result = judge(pool, '{"id": ID, "answer": ' + JUDGED % (value, evidence, parts) + "}")
    assert (result.value, result.status, result.blame) == (None, RewardStatus.VERIFIER_ERROR, Blame.UNCLEAR)


@pytest.mark.parametrize(
    "answer",
    [
        '{"failed": false}',
        '{"failed": false, "text": 5, "sandbox_status": "ok", "reason": ""}',
        '{"failed": 0, "text": "", "sandbox_status": "ok", "reason": ""}',
        '{"failed": false, "text": "", "sandbox_status": "odd", "reason": ""}',
        '{"failed": false, "text": "", "sandbox_status": "ok", "reason": "", "blame": "odd"}',
        "null",
        '"x"',
    ],
)
def test_a_reply_with_other_types_is_a_failed_call(pool: EnvironmentPool, answer: str) -> None:
    request = ToolRequest("tool", {"forge": '{"id": ID, "answer": ' + answer + "}"})
    reply = pool.call_tool(request, [], key="r/1.0", call_index=0, seed=5).result(30)
    assert (reply.failed, reply.text, reply.blame) == (True, "", Blame.UNCLEAR)
    assert judge(pool, "").value == 0.5


@pytest.mark.parametrize("answer", ["5", "[]", '{"tool": "tool"}', '{"tool": "tool", "arguments": []}'])
def test_a_parse_with_other_types_is_an_error(pool: EnvironmentPool, answer: str) -> None:
    forged = '{"id": ID, "answer": ' + answer + "}"
    with pytest.raises(VerifierError, match="its answer cannot be used"):
        pool.parse(forged)
    with pytest.raises(VerifierError, match="its answer cannot be used"):
        pool.render(ToolReply(forged))


@pytest.mark.parametrize(
    "text",
    ["5", '{"ready": true}', '{"loaded": {"x": 1}, "needs_sandbox": false, "concurrent": true}', '{"refused": 5, "again": true}'],
)
def test_an_environment_that_forges_its_own_opening_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(FORGER + f"\nforge([{text!r}])\n")
    with pytest.raises(ConfigError, match="what it sent is no message"):
        EnvironmentPool(make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"}))


FLOODER = FORGER.replace(
    """        if episode.completion == "wait":""",
    """        while episode.completion == "flood":
            forge(['{"id": -1}' for _ in range(1000)])
        if episode.completion == "wait":""",
)


def test_a_flood_of_messages_holds_up_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FLOODER)
    section = {"name": f"{tmp_path / 'mine.py'}:Mine", "attempts_max": 1, "score_s": 4.0, "processes": 2}
    pool = EnvironmentPool(make_config(environment=section))
    try:
        flood = pool.score(said("flood"), key="r/1.0", seed=5)
        assert judge(pool, "wait").value == 0.5, "by the other process"
        assert not flood.done()
        result = flood.result(60)
        assert (result.value, result.status) == (None, RewardStatus.TIMEOUT)
        assert judge(pool, "").value == 0.5
    finally:
        pool.close()


def test_a_flood_of_what_is_no_message_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FLOODER.replace('{"id": -1}', "{}"))
    section = {"name": f"{tmp_path / 'mine.py'}:Mine", "attempts_max": 1, "score_s": 60.0}
    pool = EnvironmentPool(make_config(environment=section))
    try:
        result = judge(pool, "flood")
        assert result.value is None and "what it sent is no message" in result.evidence
    finally:
        pool.close()


@pytest.mark.parametrize(
    "text",
    [
        "1", "{}", '{"rows": 5}', '{"rows": [5]}', '{"rows": ["x"]}', '{"rows": ["[]"]}', '{"loaded": 5}', '{"loaded": {"x": 1}}',
        '{"refused": "no"}', '{"refused": 5, "kind": "ConfigError", "again": false}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_neither_a_task_nor_an_environment(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(FORGER + f"\nforge([{text!r}])\n")
    config = make_config(environment={"name": f"{tmp_path / 'mine.py'}:Mine"})
    with pytest.raises(TaskError, match="what it sent is no message: "):
        read_tasks(config, "train")
    with pytest.raises(TaskError, match="what it sent is no message: "):
        check_environment(config)


def _again(content: dict[str, Any]) -> dict[str, Any]:
    """As it arrives at the other end."""
    (message,) = wire.Unframed().feed(wire.frame(content))
    return message


@pytest.mark.parametrize(
    "reply",
    [
        ToolReply("7", SandboxStatus.OK),
        ToolReply("", failed=True, reason="gone", blame=Blame.INFRA),
        ToolReply("", SandboxStatus.TIMEOUT_WALL, failed=True, reason="slow", blame=Blame.UNCLEAR),
    ],
)
def test_a_reply_arrives_as_it_was(reply: ToolReply) -> None:
    assert wire.reply_in(_again({"reply": wire.reply_out(reply)})["reply"]) == reply


def test_a_reply_of_before_there_was_a_blame_can_be_read() -> None:
    old = {"text": "7", "sandbox_status": "ok", "failed": False, "reason": ""}
    assert wire.reply_in(old) == ToolReply("7", SandboxStatus.OK)


def test_what_is_nested_too_deeply_is_no_message() -> None:
    deep: Sequence[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        wire.frame({"deep": deep})
    data = json.dumps({}).encode().replace(b"}", b'"a": ' + b"[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        wire.Unframed().feed(len(data).to_bytes(4, "big") + data)
