"""Runs whose policy calls tools, with workers killed between a call, its effect and its recorded answer."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.core.records import SandboxStatus
from run_support import REPOSITORY, TinyRun

pytestmark = pytest.mark.timeout(400)

ASSETS = REPOSITORY / "service" / "rollbook" / "assets"
KILLS = {
    "worker.tool.before_record": "crash@40",
    "worker.tool.after_record": "crash@30",
    "worker.tool.after_call": "crash@50",
    "worker.tool.after_answer": "crash@60",
}
COUNTING = '''
import os
from pathlib import Path
from rollbook.tasks.calculator import Calculator, evaluate
from rollbook.core.environments import ToolReply

class Counted:
    """Has an effect outside, which nobody takes back or deduplicates."""
    name = "python"
    pure = False

    def __init__(self, counter):
        self.counter = counter

    async def call(self, arguments, earlier, context):
        fd = os.open(self.counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{context.idempotency_key}\\n".encode())
        os.close(fd)
        try:
            return ToolReply(str(evaluate(arguments["code"])))
        except ValueError as error:
            return ToolReply(f"ValueError: {error}")

class Counting(Calculator):
    needs_sandbox = False

    def __init__(self, counter):
        super().__init__(sandbox=False)
        self.tools = (Counted(counter),)
'''
CONFIG = f"""
[run]
id = "tools"
dir = "run"
steps = STEPS
seed = 3

[model]
path = "{ASSETS}/calculator"

[task]
source = "environment"

[environment]
ENVIRONMENT

[sampling]
max_new_tokens = 40

[learner]
groups_per_step = 8
group_size = 8
lr = 4e-4

[checkpoint]
every_steps = 5

[supervisor]
backoff_s = 0.1
restarts_max = 30

[ledger]
attempts_max = 5

SCHEDULE

[[workers]]
engine = "transformers"
dtype = "float64"
slots = 32
count = 2
max_model_len = 64
"""


def tool_run(root: Path, environment: str, steps: int, schedule: str = "", kills: bool = True) -> TinyRun:
    run = TinyRun(root, KILLS if kills else {})
    text = CONFIG.replace("STEPS", str(steps)).replace("ENVIRONMENT", environment).replace("SCHEDULE", schedule)
    run.config.write_text(text)
    return run


def rows(run: TinyRun, statement: str) -> list[tuple]:
    with sqlite3.connect(run.dir / "ledger.sqlite") as conn:
        return conn.execute(statement).fetchall()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, Counter[str], int, str]]:
    """A run with an impure tool, four workers of which die on the way."""
    root = tmp_path_factory.mktemp("counted")
    (root / "counting.py").write_text(COUNTING)
    counter = root / "effects.txt"
    run = tool_run(root / "tool", f'name = "{root}/counting.py:Counting"\nsettings = {{counter = "{counter}"}}', steps=16)
    code, text = run.run("--plain")
    try:
        yield run, Counter(counter.read_text().split()), code, text
    finally:
        run.end()


def test_a_killed_run_with_tools_ends_and_trains_upward(counted: tuple[TinyRun, Counter[str], int, str]) -> None:
    run, _, code, text = counted
    assert code == 0, text + run.tails()
    assert {p.name for p in run.markers.iterdir()} == {f"{name}@{action.partition('@')[2]}" for name, action in KILLS.items()}
    assert "audit: clean" in text
    rewards = [json.loads(m)["reward_mean"] for (m,) in rows(run, "SELECT metrics_json FROM plan_outcome ORDER BY step")]
    assert len(rewards) == 16 and sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards


def test_every_call_of_a_slot_had_one_effect_outside(counted: tuple[TinyRun, Counter[str], int, str]) -> None:
    run, effects, _, _ = counted
    calls = rows(run, "SELECT ordinal, sibling, call_index, response_json FROM tool_call")
    recorded = {f"tools/{ordinal}.{sibling}/{index}": answer for ordinal, sibling, index, answer in calls}
    assert len(recorded) > 500 and set(effects.values()) == {1}
    assert set(effects) <= set(recorded), "nothing runs that is not recorded"
    assert {key for key, answer in recorded.items() if answer is not None} <= set(effects)
    lost = [key for key, answer in recorded.items() if answer is None]
    assert 1 <= len(lost) <= 2 * 32, "calls whose worker died before the answer was recorded"
    for key in lost:
        ordinal, _, sibling = key.split("/")[1].partition(".")
        told = rows(run, f"SELECT reason FROM verdict WHERE ordinal = {ordinal} AND sibling = {sibling}")
        assert told, f"{key} has no answer, so its slot has a verdict and not a sample"


def test_what_a_tool_said_is_masked_and_what_the_model_said_is_not(counted: tuple[TinyRun, Counter[str], int, str]) -> None:
    run, _, _, _ = counted
    found = rows(run, "SELECT token_ids, loss_mask, logprobs FROM payload WHERE length(loss_mask) > 0")
    assert len(found) > 200
    for tokens, mask, logprobs in found:
        said = bytes(b for b in tokens[::4])
        for place, sampled in enumerate(mask):
            zero = logprobs[4 * place : 4 * place + 4] == b"\0\0\0\0"
            assert sampled or zero, "what was not sampled has no log-prob"
        tool_text = bytes(said[i] for i, sampled in enumerate(mask) if not sampled)
        assert tool_text.endswith(b";") and b"[" not in tool_text and b"=" not in tool_text


def test_a_pure_tool_makes_the_killed_run_the_run_nobody_disturbed(tmp_path: Path) -> None:
    """Oracle W: in fixed lag every sample, its reward and the weights are functions of the configuration."""
    environment = 'name = "rollbook.tasks.calculator:Calculator"\nsettings = {sandbox = false}'
    schedule = '[schedule]\nkind = "fixed"\nlag_versions = 1\n'
    ended = []
    for name, kills in (("quiet", False), ("killed", True)):
        run = tool_run(tmp_path / name, environment, 6, schedule, kills)
        try:
            code, text = run.run("--plain")
            assert code == 0 and "audit: clean" in text, text + run.tails()
            fired = len(list(run.markers.iterdir()))
            samples = rows(run, "SELECT ordinal, sibling, payload_digest FROM sample WHERE ordinal < 48 ORDER BY 1, 2")
            versions = rows(run, "SELECT version, digest FROM policy_version ORDER BY version")
            ended.append((fired, samples, versions))
        finally:
            run.end()
    (quiet, *same), (killed, *again) = ended
    assert quiet == 0 and killed == len(KILLS)
    assert len(same[0]) == 48 * 8 and same == again


def test_sandboxed_calls_leave_what_bounded_them(tmp_path: Path) -> None:
    run = tool_run(tmp_path / "run", 'name = "rollbook.tasks.calculator:Calculator"', 2, kills=False)
    try:
        code, text = run.run("--plain")
        assert code == 0, text + run.tails()
        labels = [json.loads(text) for (text,) in rows(run, "SELECT labels_json FROM worker")]
        assert all(label["sandbox"]["contained"] for label in labels), labels
        answers = Counter(json.loads(a)["sandbox_status"] for (a,) in rows(run, "SELECT response_json FROM tool_call"))
        assert answers[SandboxStatus.OK.value] > 50
    finally:
        run.end()
