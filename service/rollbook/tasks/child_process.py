"""An environment process as the one who started it holds it: start, messages, death.

Owns the two sockets, the log and the end of the whole tree. Never waits for an answer and never starts a process again
(``child_pool`` does). Used by one thread, which must live as long as the process: the kernel ends the process with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rollbook.core.errors import Unavailable
from rollbook.core.host import host
from rollbook.tasks import wire

LOG_BYTES_MAX = 64 << 20
"""A log that environments have filled to this size begins again."""

HUNG_UP_S = 6.0
"""Longest from the end of what a process says to the word of its guardians how it ended: they kill what it has started first."""

_KILLED = "it was killed"
_KILLED_BY_OTHERS = frozenset({_KILLED, "killed by SIGKILL", "killed by SIGTERM"})
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 8
_END_S = 6.0
_READ_BYTES = 1 << 18
_READS_MAX, _MESSAGES_MAX = 16, 4096
"""At once: more than a socket holds of a process that has ended, and no more than leaves time for the others."""
_ROOT = str(Path(__file__).resolve().parents[2])


class ChildProcess:
    """One started environment process."""

    def __init__(self, log_path: Path | None, opening: Mapping[str, Any]) -> None:
        """Start it and send it what to open; what it prints is appended to the log (None: to a file without a name).

        Raises: OSError (no process, no log).
        """
        self._log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else _opened(log_path)
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._control, control = socket.socketpair()
        self._requests, requests = socket.socketpair()
        self._unframed, self._unsent = wire.Unframed(), bytearray()
        self._hung_up_at: float | None = None
        environ = {"PYTHONHASHSEED": "0"} | dict(host().environ)
        environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [environ.get("PYTHONPATH")])])
        fds = (control.fileno(), requests.fileno())
        argv = [sys.executable, "-P", "-u", "-m", "rollbook.tasks.child", *map(str, fds), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=fds, start_new_session=True,
                env=environ,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        finally:
            control.close()
            requests.close()
        self.pid = self._process.pid
        self._requests.setblocking(False)
        self._control.setblocking(False)
        self.send({"split": "", "sys_path": [path or os.getcwd() for path in sys.path]} | dict(opening))

    def watched(self) -> list[tuple[int, int]]:
        """File descriptors with the events that mean there is something to do (``select.poll``)."""
        control = (self._control.fileno(), select.POLLIN)
        if self.hung_up:  # a socket at its end is always ready
            return [control]
        return [control, (self._requests.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0))]

    @property
    def hung_up(self) -> bool:
        """Whether it has ended, or closed its end of the socket: it answers nothing any more."""
        return self._hung_up_at is not None

    def silent(self) -> str | None:
        """What is wrong when it has hung up and nobody has said in time how it ended."""
        if self._hung_up_at is None or host().monotonic() < self._hung_up_at + HUNG_UP_S:
            return None
        return "it closed the socket on which it is asked, and did not end"

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, or keep until it can be sent. Raises like ``wire.frame``."""
        self._unsent += wire.frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before; a dead process loses it silently."""
        try:
            while self._unsent:
                del self._unsent[: self._requests.send(self._unsent)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()

    def received(self) -> list[dict[str, Any]]:
        """Messages that have arrived; of a flood, the first. Raises ValueError (what arrived is no message)."""
        self.flush()
        out: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            for _ in range(_READS_MAX):
                if self.hung_up or len(out) >= _MESSAGES_MAX:
                    break
                if data := self._requests.recv(_READ_BYTES):
                    out += self._unframed.feed(data)
                else:
                    self._hung_up_at = host().monotonic()
        return out

    def ended(self) -> str | None:
        """How it ended, once the whole tree has; None while it lives."""
        said = b""
        try:
            while data := self._control.recv(256):
                said += data
        except BlockingIOError:
            if not said:
                return None
        except ConnectionResetError:
            pass
        return said.decode(errors="replace") or _KILLED

    def finish(self) -> None:
        """Ask it to close its sandbox and end; ``end`` is still to be called."""
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> None:
        """Kill it with everything it has started, after the grace that it has for ending by itself.

        Raises: Unavailable (it does not die, which only a kernel in trouble makes happen).
        """
        self._wait_gone(grace_s)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # what the guardians wait for
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGCONT)  # one that somebody has stopped shall see it
        self._wait_gone(_END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # both guardians; it is not reaped yet, so the number is still its own
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"the environment process {self.pid} does not die; end it by hand") from None
        finally:
            self._close()

    def last_lines(self) -> str:
        """The end of what it has printed, in one line; empty when it printed nothing."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(min(self._log_start, size), size - _LOG_TAIL_BYTES)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-_LOG_TAIL_LINES:])

    def bound_log(self) -> None:
        """Begin the log again when it has become too large; the process appends, so it goes on at the beginning."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES_MAX:
            os.ftruncate(self._log.fileno(), 0)

    def _wait_gone(self, within_s: float) -> None:
        if within_s <= 0:
            return
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        until = host().monotonic() + within_s
        while self.ended() is None and (left := until - host().monotonic()) > 0:
            poll.poll(left * 1000)

    def _close(self) -> None:
        for thing in (self._control, self._requests, self._log):
            thing.close()


def killed_by_others(how: str) -> bool:
    """Whether a process that ended like this may well open next time; a crash and an exit code are its own."""
    return how in _KILLED_BY_OTHERS


def _opened(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+b")
