"""A job as its owner holds it: pipes, caps on what comes through them, and the end.

Owns one reading thread per job. Never decides how a job is isolated: a backend hands over the descriptors, and closing the
life pipe ends the job with everything it started. Every wait is bounded by the job's own wall time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import selectors
from collections.abc import Callable
from typing import ClassVar

from rollbook.core.host import host
from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import Execution, Limits, blame_of
from rollbook.sandbox.outcome import Report, status_of
from rollbook.sandbox.watch import SETUP_S

log = logging.getLogger(__name__)

GRACE_S = 30.0
"""How long beyond set-up and wall time a job's watcher may take, on a busy host, to say how it ended."""
REPORT_BYTES_MAX = 1 << 20
_CHUNK = 1 << 16
_CHUNKS_MAX = 1024
"""Most that is read of pipes whose job is over."""


@dataclasses.dataclass(slots=True)
class Pipes:
    """The owner's ends."""

    stdin: int
    stdout: int
    stderr: int
    answers: int
    report: int
    life: int
    """Closing it ends the job."""

    NAMES: ClassVar = ("stdin", "stdout", "stderr", "answers", "report", "life")
    WRITTEN: ClassVar = ("stdin", "life")
    """Those whose writing end is the owner's."""


class PipedJob:
    """Implements ``core.sandboxing.Job``."""

    def __init__(self, pipes: Pipes, limits: Limits, backend: str, on_end: Callable[[], None]) -> None:
        self._pipes, self._limits, self._backend, self._on_end = pipes, limits, backend, on_end
        self._lock = host().condition()
        self._lines, self._rest = bytearray(), {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self._answered = 0
        self._over = self._cancelled = self._overdue = self._ended = False
        self._result: Execution | None = None
        self._deadline = host().monotonic() + SETUP_S + limits.wall_s + GRACE_S
        os.set_blocking(pipes.stdin, False)
        self._thread = host().thread(self._read, "sandbox-job")
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Write to its standard input; whoever does not read loses it, within the job's time."""
        view = memoryview(data)
        while view:
            # Under the lock, so that the number written to is never one that was closed and given to another file.
            with self._lock:
                stdin = self._pipes.stdin
                if stdin < 0 or self._ended:
                    return
                try:
                    view = view[os.write(stdin, view[:_CHUNK]) :]
                    continue
                except BlockingIOError:
                    if host().monotonic() > self._deadline:
                        return
                except OSError:
                    return
            waiting = select.poll()  # select(2) knows no descriptor from 1024 on
            waiting.register(stdin, select.POLLOUT)
            waiting.poll(100)

    def close_input(self) -> None:
        """End of its standard input."""
        with self._lock:
            if self._pipes.stdin >= 0:
                os.close(self._pipes.stdin)
                self._pipes.stdin = -1

    def read_line(self, timeout_s: float) -> bytes | None:
        """Next line of the answer channel; None when there is none and will be none, or after the timeout."""
        until = host().monotonic() + timeout_s
        with self._lock:
            while True:
                if (end := self._lines.find(b"\n")) >= 0:
                    line = bytes(self._lines[:end])
                    del self._lines[: end + 1]
                    return line
                left = until - host().monotonic()
                if self._ended or left <= 0:
                    return None
                self._lock.wait(left)

    def kill(self) -> None:
        """End it with everything it started."""
        with self._lock:
            if not self._ended:
                self._cancelled = True
            self._cut()

    def wait(self) -> Execution:
        """How it ended."""
        self.close_input()
        with self._lock:
            while not self._ended:
                self._lock.wait(1.0)
            assert self._result is not None
            return self._result

    def _cut(self) -> None:
        if self._pipes.life >= 0:
            os.close(self._pipes.life)
            self._pipes.life = -1

    def _read(self) -> None:
        """The thread: collect until the watcher has ended, then say how it was."""
        try:
            self._collect_all()
        finally:
            self._finish()

    def _collect_all(self) -> None:
        p = self._pipes
        with selectors.DefaultSelector() as selector:
            for name in ("stdout", "stderr", "answers", "report"):
                selector.register(getattr(p, name), selectors.EVENT_READ, name)
            while "report" in (key.data for key in selector.get_map().values()):
                left = self._deadline - host().monotonic()
                if left <= 0:
                    with self._lock:
                        self._overdue = True
                        self._cut()
                    if left < -GRACE_S:
                        break  # its watcher hangs as well: what it says is not waited for
                self._collect(selector, min(max(left, 0.05), 1.0))
            # Whoever still holds a pipe is dead or not the job's any more; what was written before is taken.
            for _ in range(_CHUNKS_MAX):
                if not (selector.get_map() and self._collect(selector, 0.0)):
                    break

    def _collect(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        events = selector.select(timeout_s)
        for key, _ in events:
            try:
                data = os.read(key.fd, _CHUNK)
            except OSError:
                data = b""
            if not data:
                selector.unregister(key.fileobj)
            elif not self._keep(key.data, data):
                with self._lock:
                    self._over = True
                    self._cut()
                    self._lock.notify_all()
        return bool(events)

    def _keep(self, name: str, data: bytes) -> bool:
        """False when the cap is passed; what is beyond it is dropped."""
        if name == "answers":
            with self._lock:
                room = self._limits.output_bytes - self._answered
                self._answered += len(data)
                self._lines += data[: max(room, 0)]
                self._lock.notify_all()
            return len(data) <= room
        kept = self._rest[name]
        room = (REPORT_BYTES_MAX if name == "report" else self._limits.output_bytes) - len(kept)
        kept += data[: max(room, 0)]
        return len(data) <= room

    def _finish(self) -> None:
        report = Report.parse(bytes(self._rest["report"]))
        status, reason = status_of(report, self._limits, self._over, self._cancelled, self._overdue)
        seen = report or Report()
        if self._over and status is SandboxStatus.OK:
            status, reason = SandboxStatus.OUTPUT_LIMIT, f"more than {self._limits.output_bytes} bytes of output"
        with self._lock:
            self._cut()
            p = self._pipes
            for fd in (p.stdin, p.stdout, p.stderr, p.answers, p.report):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            p.stdin = -1
            self._result = Execution(
                status, blame_of(status, seen.cpu_s, seen.wall_s), reason, bytes(self._rest["stdout"]),
                bytes(self._rest["stderr"]), bytes(self._lines), seen.cpu_s, seen.wall_s, seen.rss_bytes, seen.exit_code,
                seen.signal, self._over, self._backend, seen.enforced,
            )  # fmt: skip
            self._ended = True
            self._lock.notify_all()
        self._on_end()


class EndedJob:
    """A job that could not be started."""

    def __init__(self, status: SandboxStatus, reason: str, backend: str) -> None:
        self._result = Execution(status, blame_of(status), reason, backend=backend)

    def send(self, data: bytes) -> None:
        pass

    def close_input(self) -> None:
        pass

    def read_line(self, timeout_s: float) -> bytes | None:
        return None

    def wait(self) -> Execution:
        return self._result

    def kill(self) -> None:
        pass
