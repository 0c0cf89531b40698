"""Ends what the roles of a dead supervisor have started: a small process that waits for its supervisor to be gone.

Owns that process and its two ends. The kernel kills the roles themselves when their supervisor dies; what an engine or an
environment has started outlives them, and nobody would look for it before the run is started again. Never ends anything while
the supervisor lives, and nothing of a later one: who starts next ends the guardian first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from rollbook.supervise.process import ProcessRecord, ProcessTable, start_time

END_S = 10.0
"""How long each role's left-over may take to be gone."""


class Guardian:
    """The supervisor's end: a pipe that closes when the supervisor dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        """``folder`` holds the supervisor's ``processes.json``; the guardian has a table of its own beside it."""
        self._folder = folder
        self._own = ProcessTable(folder / "guardian.json")
        self._child: subprocess.Popen[bytes] | None = None

    def end_previous(self) -> None:
        """End the guardian of an earlier supervisor. Raises Unavailable."""
        for record in self._own.records().values():
            record.end(END_S)

    def start(self) -> None:
        """Begin to guard. Where no process can be started nobody does: the run needs its roles more."""
        incarnation = uuid.uuid4().hex
        self._own.put(ProcessRecord("guardian", 0, 0, incarnation))
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "rollbook.supervise.guardian", str(self._folder / "processes.json")],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"ROLLBOOK_INCARNATION": incarnation},
            )  # fmt: skip
        except OSError:
            return
        self._own.put(ProcessRecord("guardian", self._child.pid, start_time(self._child.pid) or 0, incarnation))

    def stop(self) -> None:
        """Guard no longer: the supervisor has ended its roles itself."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child = None


def guard(table: Path, supervisor_fd: int) -> None:
    """Wait until the other end of the pipe is closed, then end every role of the table with all it has started."""
    while os.read(supervisor_fd, 64):
        pass
    for record in ProcessTable(table).records().values():
        with contextlib.suppress(Exception):  # one that does not die must not keep the others
            record.end(END_S)


def main() -> None:
    """The guardian's process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(Path(sys.argv[1]), sys.stdin.fileno())


if __name__ == "__main__":
    main()
