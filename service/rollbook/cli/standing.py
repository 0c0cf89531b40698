"""What the ledger server says of itself: whether its database answers under its own term, and whether the run advances.

Owns these two questions as ``observe.progress`` asks them. Never serves and never renews anything (``serving`` does).
"""

from __future__ import annotations

from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.core.records import ResumePoint
from rollbook.ledger.ledger import Ledger
from rollbook.observe import progress
from rollbook.supervise.policy import is_complete


class RunWatch:
    """Follows the run from the thread that keeps the server's term."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._position: tuple[int, int, int] | None = None
        progress.mark(progress.State.SERVING)
        progress.ready(True, check=self.wrong)

    def wrong(self) -> str:
        """Why no caller could be served now; empty when one could."""
        if self._ledger.fenced:
            return "another ledger server took over"
        try:
            self._ledger.resume_point()
        except RollbookError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def look(self) -> None:
        """To be called now and then: what was finished since the last look?"""
        progress.mark(progress.State.SERVING)
        if not progress.is_open():
            return
        try:
            point = self._ledger.resume_point()
        except RollbookError:
            return  # ``wrong`` says so to whoever asks; nothing was finished
        if _position(point) != self._position:
            self._position = _position(point)
            progress.finished(f"step {point.head.version if point.head else 0}")
        elif is_complete(point, self._config):
            progress.finished("every step of the run")


def _position(point: ResumePoint) -> tuple[int, int, int]:
    return point.lineage, point.head.version if point.head else -1, point.last_planned_step
