"""Tasks that an environment brings: read in a process of their own, checked row by row, the same wherever they are read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from environment_support import alive

from rollbook.cli.record import input_digests
from rollbook.core import changes
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, TaskError, Unavailable
from rollbook.tasks import environment_tasks
from rollbook.tasks.environment_tasks import check_environment, read_tasks
from rollbook.tasks.sources import load_heldout, load_source
from task_fixtures import make_config, write_byte_tokenizer

HEAD = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent

class Mine:
    def __init__(self, n=3):
        self.n = n
    async def score(self, episode, context):
        return 1.0
"""
GOOD = """
    def load(self, split):
        print("garbage")
        first = 0 if split == "train" else 2
        for i in range(first, first + self.n):
            yield {"prompt": f"task {i} é", "answer": str(i), "tags": {"b": 1, "a": [i]}}
"""


def mine(tmp_path: Path, load: str, **task: object) -> Config:
    (tmp_path / "mine.py").write_text(HEAD + load)
    task = {"source": "environment", "path": ""} | task
    return make_config(tmp_path / "model", task=task, environment={"name": f"{tmp_path / 'mine.py'}:Mine"})


def test_tasks_come_from_the_environment_with_every_field(tmp_path: Path) -> None:
    config = mine(tmp_path, GOOD)
    source = load_source(config)
    assert len(source) == 3
    assert source[1] == {"prompt": "task 1 é", "answer": "1", "tags": {"b": 1, "a": [1]}}
    assert source.name(1) == f"{tmp_path / 'mine.py'}:Mine train task 2"
    assert load_source(config).digest() == source.digest()
    templated = load_source(mine(tmp_path, GOOD, prompt_template="Q: {prompt}"))
    assert templated[0]["prompt"] == "Q: task 0 é"


def test_heldout_tasks_are_none_of_the_trained_ones(tmp_path: Path) -> None:
    config = mine(tmp_path, GOOD)
    heldout = load_heldout(config, load_source(config))
    assert heldout is not None
    assert [heldout[i]["prompt"] for i in range(len(heldout))] == ["task 3 é", "task 4 é"]


def test_an_environment_may_have_no_heldout_tasks(tmp_path: Path) -> None:
    config = mine(tmp_path, "\n    def load(self, split):\n        return [{'prompt': 'x'}] if split == 'train' else []\n")
    assert load_heldout(config, load_source(config)) is None


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("yield {'prompt': 'a'}; yield ['b']", "train task 2: expected a dict with the task's fields, found list"),
        ("yield {'prompt': 3}", "train task 1: no text in field 'prompt'; its fields are prompt"),
        ("yield {'prompt': 'a', 'x': {1, 2}}", "train task 1: cannot be stored as JSON text"),
        ("yield {'prompt': 'a', 'x': float('nan')}", "train task 1: cannot be stored as JSON text"),
        ("yield {'prompt': 'a'}; raise OSError('no disk')", "load('train') raised OSError: no disk"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("print('last words', flush=True); os._exit(4)", "its process ended: exit code 4; it said last: last words"),
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended: killed by SIGSEGV"),
        ("return None", "load('train') raised TypeError"),
        ("return []", "load('train') gives no tasks"),
    ],
)
def test_what_is_no_task_is_refused_by_its_number(tmp_path: Path, load: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_source(mine(tmp_path, f"\n    def load(self, split):\n        {load}\n"))
    assert said in str(caught.value)


@pytest.mark.parametrize("pid", ["os.getpid()", "os.getppid()"], ids=["server", "guardian"])
def test_a_process_that_somebody_kills_says_nothing_about_the_tasks(tmp_path: Path, pid: str) -> None:
    kill = f"os.kill({pid}, 9); time.sleep(60)"
    with pytest.raises(Unavailable, match=r"load\('train'\): its process ended: .*killed"):
        load_source(mine(tmp_path, f"\n    def load(self, split):\n        {kill}\n"))
    with pytest.raises(Unavailable, match="its process ended: .*killed"):
        check_environment(mine(tmp_path, f"\n{kill}\n"))


def test_an_environment_that_wants_to_be_tried_again_says_nothing_about_the_tasks(tmp_path: Path) -> None:
    load = """
    def load(self, split):
        from rollbook.core.errors import Unavailable
        raise Unavailable("the hub is down")
"""
    with pytest.raises(Unavailable, match="the hub is down"):
        load_source(mine(tmp_path, load))


def test_a_process_that_cannot_be_started_says_nothing_about_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(environment_tasks, "ChildProcess", start)
    with pytest.raises(Unavailable, match="no process can be started: no more processes"):
        load_source(mine(tmp_path, GOOD))


def test_an_environment_without_load_cannot_be_the_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"brings no tasks: it has no load\(split\)"):
        load_source(mine(tmp_path, ""))


def test_a_load_that_does_not_end_is_ended_with_all_it_started(tmp_path: Path) -> None:
    load = """
    def load(self, split):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            (HERE / "daemon").write_text(str(os.getpid()))
            time.sleep(3600)
        while not (HERE / "daemon").exists():
            time.sleep(0.01)
        (HERE / "started").touch()
        while True:
            pass
"""
    config = mine(tmp_path, load)
    before = threading.active_count()
    with pytest.raises(TaskError, match="did not end within 6 s"):
        read_tasks(config, "train", within_s=6.0)
    assert (tmp_path / "started").exists() and not alive(int((tmp_path / "daemon").read_text()))
    assert threading.active_count() == before


def test_many_tasks_arrive_whole_and_in_order(tmp_path: Path) -> None:
    load = "\n    def load(self, split):\n        return ({'prompt': f'{i} ' + 'x' * 3000} for i in range(2000))\n"
    rows = read_tasks(mine(tmp_path, load), "train")
    assert [int(row["prompt"].split()[0]) for row in rows] == list(range(2000))


def test_an_environment_can_be_checked_before_a_run(tmp_path: Path) -> None:
    assert check_environment(mine(tmp_path, "")) == {}
    with pytest.raises(ConfigError, match="there is no file"):
        check_environment(make_config(environment={"name": "/no/such/file.py:Mine"}))


def test_a_run_records_digests_of_the_environment_and_its_tasks(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    config = mine(tmp_path, GOOD)
    inputs = input_digests(config)
    assert inputs[changes.DATASET] == load_source(config).digest()
    (tmp_path / "mine.py").write_text(HEAD + GOOD.replace("task {i}", "Task {i}"))
    again = input_digests(config)
    assert {name for name in inputs if inputs[name] != again[name]} == {changes.DATASET, changes.ENVIRONMENT}
