"""A note of the leases a worker process holds, so that its successor can give them back at once.

Owns one small file beside the spool. Without it a killed worker's slots wait out their TTL; with it the successor, who
was told by the supervisor that the note's author is dead, reports them within a second. The note is a hint: it need not
survive the machine, and a report about a lease that is no longer held changes nothing (P8).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rollbook.core.host import host
from rollbook.core.records import Blame, FailureReport, LeaseGrant, RewardStatus, SlotKey
from rollbook.core.statuses import WORKER_DIED
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)


class LeaseNote:
    """The file that says what the current process holds."""

    def __init__(self, path: str | Path, run_id: str) -> None:
        self._path, self._run_id = Path(path), run_id

    def write(self, incarnation: str, grants: Sequence[LeaseGrant]) -> None:
        """Replace the note; no grants remove it. Where it cannot be written the work goes on without it."""
        held = [[grant.key.ordinal, grant.key.sibling, grant.token] for grant in grants]
        temporary = self._path.with_suffix(".new")
        try:
            if held:
                host().writing(temporary)
                temporary.write_text(json.dumps({"run_id": self._run_id, "incarnation": incarnation, "held": held}))
                failpoint("worker.note.before_rename")
                os.replace(temporary, self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("lease note not written", extra={"event": "note_failed", "file": str(self._path), "reason": str(error)})
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def left_by(self, dead: str, reason: str = WORKER_DIED) -> list[FailureReport]:
        """Reports that free what the incarnation ``dead`` held when it ended; empty when the note is not its own."""
        if not dead or not self._path.is_file():
            return []
        try:
            note = json.loads(self._path.read_text())
            if (note["run_id"], note["incarnation"]) != (self._run_id, dead):
                return []
            held = [(SlotKey(int(ordinal), int(sibling)), int(token)) for ordinal, sibling, token in note["held"]]
        except (ValueError, KeyError, TypeError) as error:
            log.warning("lease note unreadable, its slots expire", extra={"event": "note_unreadable", "reason": str(error)})
            return []
        # No verdict, as after an expiry: a killed worker says nothing about sandboxes or rewards.
        return [FailureReport(key, token, dead, RewardStatus.NO_VERDICT, Blame.INFRA, reason) for key, token in held]
