"""The watcher of one job: a trusted process outside it that bounds time and memory of the whole tree and says how it ended.

Owns the loop between the job's start and its end. Never reads what the program writes, but for its claim, and is not reachable
from inside. Killing the given process must end everything the job started: it is the first of a pid namespace, or, in weaker
backends, the leader of what can be found. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from dataclasses import dataclass, field

from rollbook.sandbox.cgroups import Groups
from rollbook.sandbox.job import CLAIM_BYTES_MAX, READY

TICK_S = 0.05
SETUP_S = 10.0
"""Longest that a job may take to its ready byte."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Usage:
    """Of all processes of a job together."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    processes: int = 0


@dataclass(slots=True)
class Watch:
    """What the watcher knows so far."""

    limits: dict
    life_fd: int
    claim_fd: int
    status_fd: int
    """Where the first process of the namespace writes the job's own wait status; -1 where there is none."""
    groups: Groups | None = None
    enforced: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)
    claim: bytearray = field(default_factory=bytearray)
    ready_at: float | None = None
    killed: str = ""
    crowded: bool = False
    cpu_s: float = 0.0
    rss_bytes: int = 0
    error: str = ""

    def run(self, pid: int) -> dict:
        """Watch ``pid`` to its end; returns the fields of ``outcome.Report``."""
        before = self.groups.counts() if self.groups else (0, 0)
        base = usage_of(pid).rss_bytes
        pidfd = os.pidfd_open(pid)
        open_fds = {pidfd, self.life_fd, self.claim_fd}
        while True:
            readable, _, _ = select.select(list(open_fds), [], [], TICK_S)
            if self.claim_fd in readable and not self._read_claim():
                open_fds.discard(self.claim_fd)
            if pidfd in readable:
                break
            if self.life_fd in readable:
                open_fds.discard(self.life_fd)
                self._kill(pid, "asked")
            self._bound(pid, base)
        _, status = os.waitpid(pid, 0)
        while self.claim_fd in open_fds and self._read_claim():
            pass
        after = self.groups.counts() if self.groups else (0, 0)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "ready": self.ready_at is not None, "claim": bytes(self.claim[1:]).decode("utf-8", "replace"),
            "wait_status": self._own_status(status), "killed": self.killed, "oom": after[0] > before[0],
            "crowded": self.crowded or after[1] > before[1], "error": self.error,
            "cpu_s": max(self.cpu_s, used.ru_utime + used.ru_stime),
            "wall_s": time.monotonic() - (self.ready_at or self.started),
            "rss_bytes": max(self.rss_bytes, used.ru_maxrss * 1024),
            "enforced": [*self.enforced, *(self.groups.enforced if self.groups else ()), "memory:polled"],
        }  # fmt: skip

    def _read_claim(self) -> bool:
        data = os.read(self.claim_fd, CLAIM_BYTES_MAX)
        if data and self.ready_at is None and data[:1] == READY:
            self.ready_at = time.monotonic()
        self.claim += data[: CLAIM_BYTES_MAX + 1 - len(self.claim)]
        return bool(data)

    def _bound(self, pid: int, base: int) -> None:
        """Kill for a limit that is passed."""
        limits, now = self.limits, time.monotonic()
        if self.ready_at is None:
            if now - self.started > SETUP_S:
                self.error = f"not ready within {SETUP_S:g} s"
                self._kill(pid, "wall")
            return
        used = usage_of(pid)
        # Pages shared with the zygote are in every process's resident size and are nobody's doing.
        rss = max(0, used.rss_bytes - base * used.processes)
        self.rss_bytes, self.cpu_s = max(self.rss_bytes, rss), max(self.cpu_s, used.cpu_s)
        self.crowded = self.crowded or used.processes > limits["processes"]
        if rss > limits["memory_bytes"]:
            self._kill(pid, "memory")
        elif used.cpu_s > limits["cpu_s"]:
            self._kill(pid, "cpu")
        elif now - self.ready_at > limits["wall_s"]:
            self._kill(pid, "wall")

    def _kill(self, pid: int, why: str) -> None:
        self.killed = self.killed or why
        for child in [pid, *descendants(pid)]:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _own_status(self, status: int) -> int | None:
        """Wait status of the job itself; that of its namespace's first process where that was killed first."""
        if self.status_fd < 0:
            return status
        text = os.read(self.status_fd, 32)
        return int(text) if text else status


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``; what is orphaned in a pid namespace belongs to its first process and is found as well."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    waiting += (children := [int(word) for word in file.read().split()])
                    found += children
        except OSError:
            continue
    return found


def usage_of(pid: int) -> Usage:
    """What a tree of processes uses now; those that have ended and were reaped count with their parents."""
    total = Usage()
    for one in [pid, *descendants(pid)]:
        try:
            with open(f"/proc/{one}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total.cpu_s += sum(map(int, fields[11:15])) / _TICKS
        total.rss_bytes += int(fields[21]) * _PAGE
        total.processes += int(fields[17])
    return total


def write_report(fd: int, report: dict) -> None:
    """Hand the report to the owner."""
    data = json.dumps(report).encode()
    while data:
        data = data[os.write(fd, data) :]
