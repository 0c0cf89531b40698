"""How a role process is told to stop: gracefully, within its grace, and at once the second time.

Owns the signal handlers of a role and the thread that keeps the time of a drain. A handler of the interpreter runs only when
the main thread returns to it, so a loop that hangs in a library would hear nothing; the kernel's word is therefore read from a
pipe as well. Never decides what a role finishes first. Upholds P10.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from rollbook.observe import progress
from rollbook.supervise.policy import EXIT_LATE, EXIT_STOPPED

log = logging.getLogger(__name__)

NUMBERS = (signal.SIGTERM, signal.SIGINT)
GIVE_BACK_S = 3.0
"""How long a role that is out of time may take to say so."""


class StopSignals:
    """SIGTERM and SIGINT of this process; to be made by its main thread."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set by the first signal."""
        self._grace_s: float | None = None
        self._late: Callable[[], None] = lambda: None
        self._told_at: float | None = None
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in NUMBERS:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def limit(self, grace_s: float, late: Callable[[], None] = lambda: None) -> None:
        """End the process when it has not ended ``grace_s`` after the first signal; ``late`` is called before, bounded."""
        self._grace_s, self._late = grace_s, late

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop.set()
        signal.signal(number, signal.SIG_DFL)

    def _listen(self) -> None:
        n_told = 0
        while True:
            ready, _, _ = select.select([self._read], [], [], self._left_s())
            if not ready:
                self._end_late()
            for number in os.read(self._read, 64):
                if number in NUMBERS:
                    n_told += 1
            if n_told and self._told_at is None:
                self._told_at = time.monotonic()
                self.stop.set()
                progress.ready(False, "it was told to stop")
            if n_told > 1:
                os._exit(EXIT_STOPPED)

    def _left_s(self) -> float | None:
        if self._told_at is None or self._grace_s is None:
            return None if self._told_at is None else 1.0
        return max(0.0, self._told_at + self._grace_s - time.monotonic())

    def _end_late(self) -> None:
        """What is lost is what a crash loses, which is nothing that was acknowledged."""
        if self._grace_s is None or self._told_at is None or time.monotonic() < self._told_at + self._grace_s:
            return
        log.error("did not end within %.0f s of being told to stop", self._grace_s, extra={"event": "drain_late"})
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback()
        told = threading.Thread(target=self._late, name="late", daemon=True)
        told.start()
        told.join(GIVE_BACK_S)
        os._exit(EXIT_LATE)
