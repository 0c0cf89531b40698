"""Found by every process of a run: writes down what the ledger acknowledged, and plants a known bug when asked to.

``KILLS_ACKS`` names the file of acknowledgements as the workers received them; ``KILLS_PLANTED`` names a bug. Both hook in when
their module is imported, so that no role loads a library that it would not have loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

ACKS = os.environ.get("KILLS_ACKS", "")
PLANTED = os.environ.get("KILLS_PLANTED", "")


def record_acknowledgements(module: ModuleType) -> None:
    """One line per answer, written before the worker acts on it."""
    original = module.Delivery._note

    def note(self: Any, submission: Any, result: Any) -> None:
        t = submission.trajectory
        line = {
            "outcome": result.outcome.value, "key": list(submission.key), "incarnation": submission.incarnation,
            "sequence": submission.sequence, "bytes": hashlib.sha256(t.token_ids + t.logprobs + t.versions).hexdigest(),
        }  # fmt: skip
        fd = os.open(ACKS, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(fd, json.dumps(line).encode() + b"\n")
        os.close(fd)
        original(self, submission, result)

    module.Delivery._note = note


def seed_from_token(module: ModuleType) -> None:
    """The seed of a sample depends on which attempt makes it."""
    original = module.Episodes.add

    def add(self: Any, grants: Any) -> None:
        original(self, [dataclasses.replace(g, seed=(g.seed + g.token - 1) % 2**31) for g in grants])

    module.Episodes.add = add


def minibatch_order_not_restored(module: ModuleType) -> None:
    """A restored learner shuffles its minibatches from the start again."""
    original = module.Trainer.load_state_dict

    def load_state_dict(self: Any, state: Any) -> None:
        order = self._order.get_state()
        original(self, state)
        self._order.set_state(order)

    module.Trainer.load_state_dict = load_state_dict


def acknowledged_before_commit(module: ModuleType) -> None:
    """Submissions are answered when their rows are written, not when they are durable."""
    from rollbook.observe.failpoints import failpoint

    original = module.Writer._apply
    batches = []

    def apply(self: Any, conn: Any, now_us: int, batch: Any, failed: Any, *, alone: bool) -> Any:
        done = original(self, conn, now_us, batch, failed, alone=alone)
        if batch[0].mergeable:
            for operation, result in ((o, r) for part in done for o, r in zip(part.operations, part.results, strict=True)):
                operation.future.set_result(result)
                operation.future = Future()
            batches.append(len(batch))
            time.sleep(0.3 if len(batches) == 4 else 0)  # time for the answer to reach the worker before the death
            failpoint("planted.before_commit")
        return done

    module.Writer._apply = apply


BUGS: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "seed_from_token": ("rollbook.rollout.episodes", seed_from_token),
    "minibatch_order_not_restored": ("rollbook.learner.trainer", minibatch_order_not_restored),
    "acknowledged_before_commit": ("rollbook.ledger.writer", acknowledged_before_commit),
}


class _OnImport(importlib.abc.MetaPathFinder):
    def __init__(self, target: str, change: Callable[[ModuleType], None]) -> None:
        self._target, self._change = target, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if ACKS:
    sys.meta_path.insert(0, _OnImport("rollbook.rollout.delivery", record_acknowledgements))
if PLANTED:
    sys.meta_path.insert(0, _OnImport(*BUGS[PLANTED]))
