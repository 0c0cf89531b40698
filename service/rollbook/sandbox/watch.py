"""The watcher of one job: a trusted process outside it that bounds time and memory of the whole tree and says how it ended.

Owns the loop between the job's start and its end. Never reads what the program writes, but for its claim, and is not reachable
from inside. Everything below the watcher is the job: it ends with the first process of its pid namespace, or, in weaker
backends, with what can be found. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from dataclasses import dataclass, field

from rollbook.sandbox.cgroups import Groups
from rollbook.sandbox.job import CLAIM_BYTES_MAX, READY, write_all
from rollbook.sandbox.trees import size_of
from rollbook.sandbox.unlinked import Unlinked

TICK_S = 0.05
SETUP_S = 10.0
"""Longest that a job may take to its ready byte."""
_CLAIM_READS_MAX = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Usage:
    """Of all processes of a job together."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    processes: int = 0
    """Processes and threads."""


@dataclass(slots=True)
class Meter:
    """Measures everything below this process; what is seen once counts on after it has ended."""

    base_bytes: int
    """Resident size that each process has from the zygote, which is nobody's doing."""
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    """Clock ticks by process id and start time: a program that ignores SIGCHLD hides its children from their parent's count."""

    def read(self) -> Usage:
        """What it uses now, and the processor time used until now."""
        total, with_reaped = Usage(), 0
        for pid in descendants(os.getpid()):
            if (fields := _stat(pid)) is None:
                continue
            own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            self.seen[pid, int(fields[19])] = own
            with_reaped += own + waited
            total.rss_bytes += max(0, _pages(pid, fields) * _PAGE - self.base_bytes)
            total.processes += int(fields[17])
        total.cpu_s = max(with_reaped, sum(self.seen.values())) / _TICKS
        return total


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
    scratch: str = ""
    """A directory whose size nothing but this watcher bounds; empty where the scratch space is a file system of its own."""
    unlinked: Unlinked | None = None
    started: float = field(default_factory=time.monotonic)
    claim: bytearray = field(default_factory=bytearray)
    ready_at: float | None = None
    killed: str = ""
    crowded: bool = False
    cpu_s: float = 0.0
    cpu_before_s: float = 0.0
    """Of the job's group, by the jobs before."""
    rss_bytes: int = 0
    base_bytes: int = 0
    error: str = ""

    def run(self, pid: int) -> dict:
        """Watch ``pid`` to its end; returns the fields of ``outcome.Report``."""
        before = self.groups.counts() if self.groups else (0, 0)
        self.cpu_before_s = self.groups.cpu_s() if self.groups else 0.0
        meter = Meter(self.base_bytes)
        pidfd = os.pidfd_open(pid)
        os.set_blocking(self.claim_fd, False)  # where there is no pid namespace, what the job left may hold the other end
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
            self._bound(pid, meter, before[0])
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        for _ in range(_CLAIM_READS_MAX):
            if self.claim_fd not in open_fds or not self._read_claim():
                break
        own = self._own_status()
        after = self.groups.counts() if self.groups else (0, 0)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "ready": self.ready_at is not None, "claim": bytes(self.claim[1:]).decode("utf-8", "replace"),
            "wait_status": status if own is None else own, "killed": self.killed, "oom": after[0] > before[0],
            "lost": self.status_fd >= 0 and own is None and not self.killed,
            "crowded": self.crowded or after[1] > before[1], "error": self.error,
            "cpu_s": max(self.cpu_s, used.ru_utime + used.ru_stime, self._group_cpu_s()),
            "wall_s": time.monotonic() - (self.ready_at or self.started),
            "rss_bytes": max(self.rss_bytes, used.ru_maxrss * 1024),
            "enforced": self._all_enforced(),
        }  # fmt: skip

    def _all_enforced(self) -> list[str]:
        groups = self.groups.enforced if self.groups else ()
        # No process's size shows pages of shared memory that it has let go of and not freed.
        return [*self.enforced, *groups, "memory:polled" if "memory:cgroup" in groups else "memory:polled (not shared)"]

    def _group_cpu_s(self) -> float:
        """Processor time of the job's group, also of children that nobody waited for; 0 where nobody counts it."""
        return max(0.0, self.groups.cpu_s() - self.cpu_before_s) if self.groups else 0.0

    def _read_claim(self) -> bool:
        try:
            data = os.read(self.claim_fd, CLAIM_BYTES_MAX)
        except BlockingIOError:
            return False
        if data and self.ready_at is None and data[:1] == READY:
            self.ready_at = time.monotonic()
        self.claim += data[: CLAIM_BYTES_MAX + 1 - len(self.claim)]
        return bool(data)

    def _bound(self, pid: int, meter: Meter, ooms: int) -> None:
        """Kill for a limit that is passed; ``ooms``: the kernel's kills for memory before this job."""
        limits, now = self.limits, time.monotonic()
        if self.ready_at is None:
            if now - self.started > SETUP_S:
                self.error = f"not ready within {SETUP_S:g} s"
                self._kill(pid, "wall")
            return
        used = meter.read()
        self.rss_bytes, self.cpu_s = max(self.rss_bytes, used.rss_bytes), max(self.cpu_s, used.cpu_s, self._group_cpu_s())
        self.crowded = self.crowded or used.processes > limits["processes"]
        if used.rss_bytes > limits["memory_bytes"] or (self.groups and self.groups.counts()[0] > ooms):
            self._kill(pid, "memory")
        elif self.cpu_s > limits["cpu_s"]:
            self._kill(pid, "cpu")
        elif now - self.ready_at > limits["wall_s"]:
            self._kill(pid, "wall")
        elif self.scratch and self._disk_bytes() > limits["disk_bytes"]:
            self._kill(pid, "disk")

    def _disk_bytes(self) -> int:
        """What the job occupies of the machine's disk, with names and without."""
        self.unlinked = self.unlinked or Unlinked(self.scratch)
        unlinked = self.unlinked.occupied(descendants(os.getpid()))  # first: what loses its name meanwhile counts once at most
        return unlinked + size_of(self.scratch)

    def _kill(self, pid: int, why: str) -> None:
        self.killed = self.killed or why
        for child in [pid, *descendants(os.getpid())]:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _own_status(self) -> int | None:
        """Wait status of the job itself; None where its namespace's first process ended before it could say."""
        text = os.read(self.status_fd, 32) if self.status_fd >= 0 else b""
        return int(text) if text else None


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


def _pages(pid: int, fields: list[str]) -> int:
    """Resident pages of one process; where its first thread has ended, what the others say."""
    if int(fields[20]):
        return int(fields[21])
    with contextlib.suppress(OSError):
        others = [_stat(f"{pid}/task/{name}") for name in os.listdir(f"/proc/{pid}/task")]
        return max((int(found[21]) for found in others if found), default=0)
    return 0


def _stat(pid: int | str) -> list[str] | None:
    """Fields of proc_pid_stat(5) from the third on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # its name is whatever bytes the program likes
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def resident_bytes(pid: int) -> int:
    """Resident size of one process; 0 when it has ended."""
    fields = _stat(pid)
    return int(fields[21]) * _PAGE if fields else 0


def sweep(uid: int, bound_s: float = 5.0) -> None:
    """Without a pid namespace: kill what the job left, below this watcher or under the job's own user id, until none is left.

    ``uid`` 0: the job had none of its own. Reaps: a zombie would count against the limits of that user's next job.
    """
    until = time.monotonic() + bound_s
    while (left := descendants(os.getpid()) + (_processes_of(uid) if uid else [])) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def threads_of(uid: int) -> int:
    """Threads of a user on this machine, as limits per user count them."""
    return sum(int(fields[17]) for pid in _processes_of(uid) if (fields := _stat(pid)))


def _processes_of(uid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{int(name)}").st_uid == uid:
                found.append(int(name))
    return found


def write_report(fd: int, report: dict) -> None:
    """Hand the report to the owner."""
    write_all(fd, json.dumps(report).encode())
