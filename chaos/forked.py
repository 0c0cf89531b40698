"""`rollbook` commands forked from this process, which has imported everything already (``supervise.forkserver``).

Owns the child processes of a drill. They die with the drill; the drill must stay single-threaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollbook.cli.main import main
from rollbook.supervise import forkserver

_PR_SET_PDEATHSIG = 1


class Command:
    """One forked command."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Exit code once it has ended; negative: killed by that signal."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, bound_s: float) -> int:
        """Exit code; a command that takes longer is killed."""
        deadline = time.monotonic() + bound_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.02)
        return code

    def kill(self) -> int:
        """SIGKILL, and see it gone; returns 1 if it still lived, else 0."""
        if self.poll() is not None:
            return 0
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return 1


def rollbook(arguments: Sequence[str], out: Path, env: Mapping[str, str]) -> Command:
    """Start ``rollbook arguments`` with its output appended to ``out`` and ``env`` added to this environment."""
    whole = {k: v for k, v in os.environ.items() if not k.startswith("ROLLBOOK_")} | dict(env)
    parent = os.getpid()
    with out.open("ab") as file:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            forkserver.become(main, arguments, whole, file.fileno())
    return Command(pid)
