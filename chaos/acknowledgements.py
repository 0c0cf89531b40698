"""Writes down what workers were told about their submissions, so that an oracle can hold the ledger to it.

Owns one line of JSON per answer, appended before the worker acts on it to the file that an environment variable names.
Changes nothing of what the worker does.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

FILE = "CHAOS_ACKS"
"""Environment variable: path of the file; nothing is written where it is empty."""


def record() -> None:
    """From now on, in this process and those forked from it."""
    from rollbook.rollout.delivery import Delivery

    original = Delivery._note

    def note(self: Any, submission: Any, result: Any) -> None:
        if path := os.environ.get(FILE, ""):
            _append(path, submission, result)
        original(self, submission, result)

    Delivery._note = note  # type: ignore[method-assign]


def _append(path: str, submission: Any, result: Any) -> None:
    t = submission.trajectory
    line = {
        "outcome": result.outcome.value, "key": list(submission.key), "incarnation": submission.incarnation,
        "sequence": submission.sequence, "bytes": hashlib.sha256(t.token_ids + t.logprobs + t.versions).hexdigest(),
    }  # fmt: skip
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)
