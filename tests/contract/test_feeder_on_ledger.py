"""The feeder on the real ledger, in processes that are really killed: no task is skipped, none is issued twice."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from ledger_support import version

from rollbook.core.config import Config
from rollbook.core.records import TASK_STREAM, Role, RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.tasks.feeder import run_feeder
from rollbook.tasks.stream import task_order
from rollbook.tasks.tokenizer import load_tokenizer
from task_fixtures import make_config, numbered_tasks, write_byte_tokenizer

TASKS, STEPS, GROUPS_PER_STEP, SEED = 5, 4, 3, 7
WANTED = STEPS * GROUPS_PER_STEP
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Twelve groups over five tasks. A lag this long lets every slot be leased under version 0."""
    made = make_config(
        write_byte_tokenizer(tmp_path / "model"),
        run={"steps": STEPS, "seed": SEED, "dir": str(tmp_path)},
        task={"path": str(numbered_tasks(tmp_path / "tasks.jsonl", TASKS))},
        learner={"groups_per_step": GROUPS_PER_STEP},
        schedule={"kind": "fixed", "lag_versions": 10},
        ledger={"url": f"sqlite:///{tmp_path}/ledger.sqlite"},
    )
    load_tokenizer(made.model.path)  # imported before the forks, so that each life starts at once
    return made


def open_ledger(config: Config, holder: str) -> Ledger:
    ledger = Ledger(config.ledger.url, holder=holder)
    ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
    return ledger


class _Telling(logging.Handler):
    """Sends the name of every event down a pipe."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(getattr(record, "event", ""))


def _live(config: Config, lookahead_groups: int, life: int, armed: str, pipe: Connection) -> None:
    """One process: ledger and feeder, like a feeder that reaches its server, with a crash point armed."""
    os.environ["ROLLBOOK_INCARNATION"] = f"feeder-{life}"
    os.environ["ROLLBOOK_SUPERSEDES"] = f"feeder-{life - 1}"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    logger = logging.getLogger("rollbook.tasks.feeder")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Telling(pipe))
    failpoints.arm(armed)
    task = dataclasses.replace(config.task, lookahead_groups=lookahead_groups)
    with open_ledger(config, f"server-{life}") as ledger:
        run_feeder(dataclasses.replace(config, task=task), ledger, stop)


def start(config: Config, lookahead_groups: int, life: int, armed: str = "") -> tuple[BaseProcess, Connection]:
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_live, args=(config, lookahead_groups, life, armed, there))
    process.start()
    there.close()
    return process, here


def exit_code(process: BaseProcess) -> int | None:
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail("the feeder did not end within a minute")
    return process.exitcode


def issued(config: Config) -> list[tuple[int, str, bytes]]:
    """(ordinal, prompt, token ids) of all groups, as a worker gets them; the audit must be clean."""
    with open_ledger(config, "reader") as ledger:
        ledger.publish_version(ledger.acquire_role(Role.LEARNER, "learner", 60.0), version(0))
        ledger.register_worker("worker", "host", "engine")
        grants = ledger.lease_slots("worker", version(0), 1000).grants
        assert ledger.audit() == []
        assert ledger.cursor(TASK_STREAM).next_ordinal * config.learner.group_size == len(grants)
    firsts = [grant for grant in grants if grant.key.sibling == 0]
    return [(grant.key.ordinal, json.loads(grant.task_json)["prompt"], grant.prompt_ids) for grant in firsts]


def expected(count: int) -> list[tuple[int, str]]:
    return [(n, f"task {task_order(SEED, n // TASKS, TASKS)[n % TASKS]}") for n in range(count)]


def test_a_feeder_killed_before_and_after_each_append_skips_and_repeats_no_task(config: Config) -> None:
    life = 0
    for lookahead in (1, 3, 5, 6, 10, 11):  # inside an epoch, at its end, behind it
        for point in ("feeder.before_append", "feeder.after_append"):
            process, _ = start(config, lookahead, life, f"{point}=crash")
            assert exit_code(process) == -signal.SIGKILL
            life += 1
    process, _ = start(config, WANTED + 5, life)
    assert exit_code(process) == 0
    assert [(ordinal, prompt) for ordinal, prompt, _ in issued(config)] == expected(WANTED)


def test_a_terminated_feeder_leaves_cleanly_and_its_successor_need_not_wait(config: Config) -> None:
    process, events = start(config, 4, 0)
    assert events.poll(60) and events.recv() == "groups_appended"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert exit_code(process) == 0
    with open_ledger(config, "reader") as ledger:
        assert ledger.acquire_role(Role.FEEDER, "another", 60.0).epoch == 2
        assert ledger.cursor(TASK_STREAM).next_ordinal == 4
    assert [(ordinal, prompt) for ordinal, prompt, _ in issued(config)] == expected(4)


def test_the_last_task_of_the_last_epoch_stores_the_exhausted_flag(config: Config) -> None:
    task = dataclasses.replace(config.task, epochs=1)
    run = dataclasses.replace(config.run, steps=1)
    learner = dataclasses.replace(config.learner, groups_per_step=TASKS)
    short = dataclasses.replace(config, task=task, run=run, learner=learner)
    process, _ = start(short, TASKS, 0)
    assert exit_code(process) == 0
    with open_ledger(short, "reader") as ledger:
        assert ledger.cursor(TASK_STREAM).exhausted
    assert [(ordinal, prompt) for ordinal, prompt, _ in issued(short)] == expected(TASKS)
