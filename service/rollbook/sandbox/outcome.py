"""How a job ended, from what its watcher saw; the same rules for every backend.

Owns the order in which causes are believed: what was done to the program from outside comes first, what the program claims last,
and that claim can only choose among its own failures. Standard library and core only.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import dataclass

from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Limits

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Report:
    """What a watcher says of its job."""

    ready: bool = False
    """The set-up was over when it ended."""
    claim: str = ""
    """JSON written from inside; empty when it ended without a word."""
    wait_status: int | None = None
    """As of waitpid(2)."""
    killed: str = ""
    """The limit for which it was killed: ``wall``, ``cpu``, ``memory``, ``disk``, or ``asked``."""
    oom: bool = False
    """The kernel killed for memory."""
    crowded: bool = False
    """Its process limit was reached."""
    error: str = ""
    """What failed before the program began."""
    is_spawned: bool = True
    lost: bool = False
    """What held it was ended by something that is neither its limits nor the program."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0
    enforced: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int | None:
        known = self.wait_status is not None and os.WIFEXITED(self.wait_status)
        return os.WEXITSTATUS(self.wait_status) if known else None  # type: ignore[arg-type]

    @property
    def signal(self) -> int | None:
        known = self.wait_status is not None and os.WIFSIGNALED(self.wait_status)
        return os.WTERMSIG(self.wait_status) if known else None  # type: ignore[arg-type]

    @classmethod
    def parse(cls, data: bytes) -> Report | None:
        """The report as a watcher wrote it; None when it was cut off."""
        try:
            content = json.loads(data)
            return cls(**content | {"enforced": tuple(content["enforced"])})
        except (ValueError, KeyError, TypeError):
            return None


def status_of(
    report: Report | None, limits: Limits, over_output: bool, cancelled: bool, overdue: bool = False
) -> tuple[SandboxStatus, str]:
    """Status and reason of a job whose watcher has ended; ``overdue``: its owner ended it, since its watcher had not."""
    s = SandboxStatus
    if report is None:
        return (s.CANCELLED, "ended on its owner's word") if cancelled else (s.INFRA_LOST, "its watcher vanished")
    if not report.is_spawned:
        return s.INFRA_SPAWN, report.error
    if cancelled and report.killed == "asked" and not over_output:
        return s.CANCELLED, "ended on its owner's word"
    if not report.ready:
        return s.INFRA_SETUP, report.error or f"it ended before the program began (killed: {report.killed or 'no'})"
    if over_output:
        return s.OUTPUT_LIMIT, f"more than {limits.output_bytes} bytes of output"
    if overdue and report.killed == "asked":
        return s.INFRA_LOST, "its watcher did not end it in time"
    if report.killed == "memory" or report.oom:
        return s.OOM, f"more than {limits.memory_bytes >> 20} MiB of memory"
    by_kernel = report.signal == signal.SIGXCPU or (report.signal == signal.SIGKILL and report.cpu_s >= limits.cpu_s)
    if report.killed == "cpu" or (by_kernel and not report.killed):
        return s.TIMEOUT_CPU, f"more than {limits.cpu_s:g} s of processor time"
    if report.killed == "disk":
        return s.DISK_LIMIT, f"more than {limits.disk_bytes >> 20} MiB of files"
    if report.killed == "wall":
        return s.TIMEOUT_WALL, f"more than {limits.wall_s:g} s, {report.cpu_s:.2f} s of them on a processor"
    if report.lost:
        return s.INFRA_LOST, report.error or f"its sandbox was ended by signal {report.signal}"
    if report.signal is not None:
        return s.CRASHED, f"signal {report.signal}"
    return _claimed(report)


def _claimed(report: Report) -> tuple[SandboxStatus, str]:
    s = SandboxStatus
    try:
        claim = json.loads(report.claim)
        end, said, number = str(claim["end"]), str(claim.get("text", "")), claim.get("errno", 0)
    except (ValueError, KeyError, TypeError, RecursionError):
        return s.EARLY_EXIT, f"it left with exit code {report.exit_code} before its end"
    if end == "ok":
        return s.OK, ""
    if end == "error":
        if number in _FULL:
            return s.DISK_LIMIT, said
        return (s.PROCESS_LIMIT if report.crowded and number == errno.EAGAIN else s.RUNTIME_ERROR), said
    return {"memory": s.OOM, "syntax": s.SYNTAX_ERROR}.get(end, s.EARLY_EXIT), said or f"it claims {end!r:.40}"
