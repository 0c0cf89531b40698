"""Sandboxes on zygotes: the owner's side. One warm interpreter per hash seed, one job per fork.

Owns the control socket, the slots and the life of the zygotes. What contains a job is the zygote's mode: ``namespaces``
(backend ``zygote``), ``bubblewrap``, ``landlock``, or ``nothing`` (backend ``unsafe``). Never sees inside a job. A zygote is
replaced after ``JOBS_MAX`` jobs, or when it has died: jobs in flight belong to watchers of their own and go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import rollbook
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.host import host
from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Execution, Job, Limits, Program, Sandbox
from rollbook.observe.failpoints import failpoint
from rollbook.sandbox import bubblewrap
from rollbook.sandbox.job import payload_of, write_all
from rollbook.sandbox.piped import EndedJob, PipedJob, Pipes
from rollbook.sandbox.zygote_main import SLOTS_MAX

JOBS_MAX = 5000
START_S = 60.0
SLOT_WAIT_S = 120.0
"""Longest that a job waits for a slot before it says ``infra_overload``."""
MODES = {"zygote": "namespaces", "bubblewrap": "bubblewrap", "landlock": "landlock", "unsafe": "nothing"}

_PASSING_ERRNOS = frozenset({errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Why a zygote could not be started although the backend may well work here; EINTR stands for one that was killed."""

_TRIAL = "import importlib\nfor name in ('wave', 'mailbox', '_sqlite3', '_bz2'):\n  importlib.import_module(name)"
"""Modules that no zygote has imported: where they cannot be found, right programs would fail as wrong ones."""


def interpreter(mode: str) -> str:
    """The Python that jobs run: ours, or the system's of the same version where a job's user could not reach ours."""
    if mode != "landlock" or os.geteuid() != 0:
        return sys.executable
    folders = [Path(sys.base_prefix).resolve() / "lib", *(Path(sys.base_prefix).resolve() / "lib").parents]
    if all(folder.stat().st_mode & 0o001 for folder in folders):
        return sys.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return shutil.which(version, path="/usr/local/bin:/usr/bin") or sys.executable


def _passes(tried: Execution) -> bool:
    """Whether a trial that went wrong says nothing about the machine: it was killed, or got no time."""
    if tried.status in (SandboxStatus.CRASHED, SandboxStatus.INFRA_SETUP):
        return tried.signal == signal.SIGKILL
    return tried.status in (SandboxStatus.INFRA_LOST, SandboxStatus.TIMEOUT_WALL)


class _Zygote:
    """One zygote process."""

    def __init__(self, mode: str, hash_seed: int) -> None:
        """Raises OSError (it cannot work here; the message says why)."""
        program = [bubblewrap.binary()] if mode == "bubblewrap" else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(rollbook.__file__).parents[1])
        code = f"import sys; sys.path.insert(0, {package!r}); from rollbook.sandbox.zygote_main import main; main()"
        # What contains nothing leaks the environment as well: that is how the attack suite knows that it would see it.
        clean = {"PYTHONHASHSEED": str(hash_seed), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(
            [interpreter(mode), "-s", "-S", "-P", "-B", "-c", code, mode, str(theirs.fileno()), *program],
            pass_fds=[theirs.fileno()],
            env=(dict(os.environ) | clean) if mode == "nothing" else clean, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        theirs.close()
        self._control, self.jobs = ours, 0
        ours.settimeout(START_S)
        try:
            said = json.loads(ours.recv(65536) or b'{"error": "it ended at once"}')
        except TimeoutError:
            said = {"error": f"it was not ready within {START_S:.0f} s"}
        if "error" in said:
            self.close()
            why = f"{said['error']}: {self._last_words()}"
            raise OSError(errno.EINTR, why) if self._process.returncode == -signal.SIGKILL else OSError(why)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, request: dict, fds: list[int]) -> None:
        """Have one job forked. Raises OSError (the zygote is dead)."""
        self.jobs += 1
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """Let it end; its jobs are not touched."""
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read(4000).decode("utf-8", "replace").strip()[-500:]


class ZygoteSandbox(Sandbox):
    """The backends of this package."""

    def __init__(self, name: str, slots: int) -> None:
        """Raises: ConfigError (the backend cannot work on this machine); Unavailable (its trial was killed or never ran)."""
        if not 1 <= slots <= SLOTS_MAX:
            raise ConfigError(f"sandbox.slots = {slots}: 1 to {SLOTS_MAX}")
        self.name, self.slots, self._mode = name, slots, MODES[name]
        self._lock = host().condition()
        self._free = list(range(slots))
        self._zygotes: dict[int, _Zygote] = {}
        self._jobs: set[PipedJob] = set()
        self._closed = False
        try:
            tried = self._start(self._free.pop(), Program("", setup=_TRIAL), Limits()).wait()
        except OSError as error:
            kind = Unavailable if error.errno in _PASSING_ERRNOS else ConfigError
            raise kind(f"sandbox backend {name!r} cannot work here: {error}") from error
        if tried.status is not SandboxStatus.OK:
            self.close()
            said = tried.stderr.decode("utf-8", "replace").strip()[-300:]
            kind = Unavailable if _passes(tried) else ConfigError
            raise kind(f"sandbox backend {name!r} cannot work here: {tried.status}: {tried.reason}: {said}")

    def start(self, program: Program, limits: Limits) -> Job:
        """Start a job, or return one that has ended with an ``infra_*`` status."""
        slot = self._take_slot()
        if slot is None:
            reason = "the sandbox is closed" if self._closed else f"no free slot within {SLOT_WAIT_S:.0f} s"
            return EndedJob(SandboxStatus.INFRA_OVERLOAD, reason, self.name)
        try:
            failpoint("sandbox.before_spawn")
            return self._start(slot, program, limits)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread to be had, or a failpoint
            self._give_slot(slot)
            return EndedJob(SandboxStatus.INFRA_SPAWN, f"{type(error).__name__}: {error}", self.name)

    def close(self) -> None:
        """End every job and every zygote."""
        with self._lock:
            self._closed = True
            jobs, zygotes = list(self._jobs), list(self._zygotes.values())
            self._zygotes.clear()
            self._lock.notify_all()
        for job in jobs:
            job.kill()
        for job in jobs:
            job.wait()
        for zygote in zygotes:
            zygote.close()

    def zygote_pid(self, hash_seed: int = 0) -> int:
        """Process id of the zygote in use."""
        with self._lock:
            return self._zygote(hash_seed).pid

    def _take_slot(self) -> int | None:
        until = host().monotonic() + SLOT_WAIT_S
        with self._lock:
            while not self._free and not self._closed and (left := until - host().monotonic()) > 0:
                self._lock.wait(left)
            return self._free.pop() if self._free and not self._closed else None

    def _give_slot(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
            self._lock.notify()

    def _zygote(self, hash_seed: int) -> _Zygote:
        zygote = self._zygotes.get(hash_seed)
        if zygote is not None and zygote.jobs >= JOBS_MAX:
            zygote.close()
            zygote = None
        if zygote is None:
            zygote = self._zygotes[hash_seed] = _Zygote(self._mode, hash_seed)
        return zygote

    def _start(self, slot: int, program: Program, limits: Limits) -> Job:
        payload = os.memfd_create("payload")
        theirs, ours = [payload], []
        try:
            write_all(payload, payload_of(program.source, program.setup, dict(program.files)))
            os.lseek(payload, 0, os.SEEK_SET)
            for name in Pipes.NAMES:
                read, write = os.pipe()
                theirs.append(read if name in Pipes.WRITTEN else write)
                ours.append(write if name in Pipes.WRITTEN else read)
            stdin, *others = theirs[1:]
            ends = [stdin, *others[:2], payload, *others[2:]]
            self._send({"slot": slot, "limits": dataclasses.asdict(limits)}, ends, program.hash_seed)

            def over() -> None:
                with self._lock:
                    self._jobs.discard(job)
                self._give_slot(slot)

            with self._lock:
                job = PipedJob(Pipes(*ours), limits, self.name, over)
                self._jobs.add(job)
            return job
        except (OSError, RuntimeError):
            for fd in ours:  # closing the life pipe ends what may have begun
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def _send(self, request: dict, fds: list[int], hash_seed: int) -> None:
        """Hand a request to the zygote, or to a new one where it has died. Raises OSError."""
        with self._lock:
            try:
                self._zygote(hash_seed).fork(request, fds)
            except OSError:
                with contextlib.suppress(KeyError):
                    self._zygotes.pop(hash_seed).close()
                self._zygote(hash_seed).fork(request, fds)
