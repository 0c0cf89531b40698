"""The clock of the machine behind the ``Clock`` port.

Owns nothing but the three calls of the standard library; time enters every layer through it so that tests can bring their own.
"""

from __future__ import annotations

import time


class SystemClock:
    """Wall time, monotonic time and sleep of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
