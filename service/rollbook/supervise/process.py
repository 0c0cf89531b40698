"""One child process of a role: start it in its own session, know it again after a restart, end it as a tree.

Owns process identity. A live process is known by (pid, start time from /proc), and everything a role has started by the
incarnation id in its environment, so a recycled pid is never killed. Never decides when to restart.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from rollbook.core.errors import Unavailable
from rollbook.observe.failpoints import failpoint

SUPERVISED_BY = "ROLLBOOK_SUPERVISED"
"""Environment variable of a supervised role: pid of its supervisor."""

EXIT_UNKNOWN = 255
"""Stands for the exit code of a process whose real one was lost."""

PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none (or only a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def die_with_supervisor() -> bool:
    """Ask the kernel to SIGKILL this process when its supervisor dies, so that no role outlives it; False without one.

    To be called before a role does anything: a supervisor that died before the call is noticed by its pid, which is no
    longer the parent's. The kernel watches the thread that started the role, so roles are started by a thread that
    lives as long as the supervisor does.
    """
    supervisor = int(os.environ.pop(SUPERVISED_BY, "") or 0)
    if not supervisor:
        return False
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def processes_with(variable: str, value: str) -> list[int]:
    """Live processes of this user that were started with ``variable=value`` in their environment, without this one."""
    marker = f"{variable}={value}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue  # gone meanwhile, or somebody else's
        if marker in environment.split(b"\0") and start_time(int(name)) is not None:
            found.append(int(name))
    return found


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What identifies a started process across supervisor restarts; pid 0 while it is only about to be started."""

    name: str
    pid: int
    start_time: int
    incarnation: str

    @property
    def is_here(self) -> bool:
        """A record is of a process of this machine."""
        return True

    def alive(self) -> bool:
        """Whether the process itself lives; what it has started may outlive it."""
        return self.pid > 0 and start_time(self.pid) == self.start_time

    def signal(self, number: int) -> bool:
        """Signal the process alone; False when it is gone."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for the signal by now; without one most signals would end it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
        return bool(masks) and self.alive() and bool(int(masks[0], 16) >> (number - 1) & 1)

    def tree(self) -> list[int]:
        """The process and everything it has started that still lives."""
        own = [self.pid] if self.alive() else []
        return sorted({*own, *processes_with("ROLLBOOK_INCARNATION", self.incarnation)})

    def kill_tree(self) -> None:
        """SIGKILL the process, its process group, and what it has started outside of it."""
        if self.alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # forked a moment ago, it has no group of its own yet
                self.signal(signal.SIGKILL)
        for pid in processes_with("ROLLBOOK_INCARNATION", self.incarnation):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def end(self, bound_s: float) -> None:
        """Kill the tree and wait until it is gone. Raises Unavailable when it does not die within the bound."""
        deadline = time.monotonic() + bound_s
        while left := self.tree():
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.name} (pid {', '.join(map(str, left))}) does not die; end it by hand before starting the run again"
                )
            self.kill_tree()
            time.sleep(_POLL_S)


class Handle(Protocol):
    """A child process as its parent handles it."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


Launcher = Callable[[Sequence[str], Mapping[str, str], IO[bytes], Callable[[int], None]], Handle]
"""Starts ``argv`` in its own session with exactly the given environment and its output in the given file. Tells the pid to the
function as soon as there is one; when that fails, no process is left. Raises OSError."""


def spawn(argv: Sequence[str], env: Mapping[str, str], out: IO[bytes], known: Callable[[int], None]) -> Handle:
    """The ordinary ``Launcher``: a new interpreter."""
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
    )  # fmt: skip
    try:
        known(child.pid)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return child


class RoleProcess:
    """A started role. Its death is noticed before its pid is given back, so its group can still be ended by that number."""

    def __init__(self, handle: Handle, record: ProcessRecord) -> None:
        self.record = record
        self._handle = handle
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Exit code once the process is dead (negative: killed by that signal), and then its whole tree is; else None."""
        if self._code is not None:
            return self._code
        try:
            if os.waitid(os.P_PID, self.record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        except ChildProcessError:  # somebody else has taken the code; that is no success
            self._code = EXIT_UNKNOWN
        else:
            # The zombie keeps its process group id from being used again.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signal.SIGKILL)
            self._code = self._handle.wait(timeout=10.0)
        self.record.kill_tree()
        return self._code

    def terminate(self) -> None:
        """Ask the role to stop."""
        self._handle.terminate()

    def kill(self) -> None:
        """SIGKILL the whole tree."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signal.SIGKILL)
        self.record.kill_tree()


def identity(env: Mapping[str, str], incarnation: str, supersedes: str) -> dict[str, str]:
    """``env`` with what a role is told by the process that starts it: who it is, whom it replaces, with whom it dies."""
    mine = {"ROLLBOOK_INCARNATION": incarnation, "ROLLBOOK_SUPERSEDES": supersedes, SUPERVISED_BY: str(os.getpid())}
    return {**env, **mine}


def start(
    name: str, argv: Sequence[str], log: Path, env: dict[str, str], table: ProcessTable, launch: Launcher = spawn
) -> RoleProcess:
    """Start a role in its own session with its output appended to ``log``; the table knows it before it runs.

    The role is told its incarnation and the one it replaces, the newest of its name in the table. To be called from a
    thread that lives as long as the supervisor (``die_with_supervisor``). Raises OSError when no process can be started.
    """
    incarnation = uuid.uuid4().hex
    previous = table.records().get(name)
    whole_env = os.environ | identity(env, incarnation, previous.incarnation if previous else "")
    record = ProcessRecord(name, 0, 0, incarnation)

    def known(pid: int) -> None:
        nonlocal record
        failpoint("supervisor.start.after_spawn")
        record = ProcessRecord(name, pid, start_time(pid) or 0, incarnation)
        table.put(record)

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        table.put(record)
        failpoint("supervisor.start.before_spawn")
        handle = launch(argv, whole_env, out, known)
    return RoleProcess(handle, record)


def role_command(*args: str) -> list[str]:
    """Command line of a role of this installation."""
    return [sys.executable, "-m", "rollbook.cli.main", *args]


class ProcessTable:
    """The newest process of every role, durable on disk so that the next supervisor can end what is left of them.

    A file that cannot be read counts as empty: the roles of a supervisor end with it even without the table.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, ProcessRecord] = {}
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            self._records = {r["name"]: ProcessRecord(**r) for r in json.loads(path.read_text())}

    def records(self) -> dict[str, ProcessRecord]:
        """By role name."""
        return dict(self._records)

    def put(self, record: ProcessRecord) -> None:
        """Remember the newest process of a role; written before anything depends on it."""
        self._records[record.name] = record
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w") as handle:
            json.dump([asdict(r) for r in self._records.values()], handle)
            handle.flush()
            os.fsync(handle.fileno())
        failpoint("supervisor.table.before_rename")
        temporary.rename(self._path)
