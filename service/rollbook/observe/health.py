"""Health of one role process over HTTP on loopback: is it alive, can it do its job, is it getting on?

Owns the three questions, their status codes and the page. Never decides what is done about an answer.

- ``/livez``: the loop turns. Depends on nothing outside the process, so that an outage of the database restarts nobody.
- ``/readyz``: the role can do its job now; for the ledger server, its database was asked.
- ``/progressz``: something was finished within ``supervisor.stall_s``; while it starts, within ``supervisor.startup_s``.

200 for yes, 503 for no, both with the reason as JSON. Upholds P10. Source: Kubernetes, "Liveness, readiness and startup probes".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from rollbook.core.errors import ConfigError
from rollbook.core.host import host
from rollbook.observe.pages import LOOPBACK, PageHandler, PageServer
from rollbook.observe.progress import Bounds, Reporter, Seen, State

CHECK_AGE_S = 1.0
"""How long the answer of a check is repeated."""

Check = Callable[[], str]
"""Asks what a role depends on; returns what is wrong, or nothing."""


class Checked:
    """A check that is run by one caller at a time; another one is told how long it has been running."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._began_at = host().monotonic()
        self._ended_at = float("-inf")
        self._wrong = ""

    def __call__(self) -> str:
        if not self._lock.acquire(blocking=False):
            return f"the check has not been answered for {host().monotonic() - self._began_at:.0f} s"
        try:
            if host().monotonic() - self._ended_at >= CHECK_AGE_S:
                self._began_at = host().monotonic()
                self._wrong = self._check()
                self._ended_at = host().monotonic()
            return self._wrong
        finally:
            self._lock.release()


class Health:
    """The answers of one process."""

    def __init__(self, reporter: Reporter, bounds: Bounds) -> None:
        self._reporter, self._bounds = reporter, bounds
        self._check = Checked(lambda: reporter.check() if reporter.check is not None else "")

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of ``path``; 404 for any other than the three."""
        questions = {"/livez": self._live, "/readyz": self._ready, "/progressz": self._progress}
        question = questions.get(path)
        if question is None:
            return 404, {"ok": False, "reason": f"there is no {path}; ask {', '.join(questions)}"}
        seen = self._reporter.seen()
        wrong = question(seen)
        return (503 if wrong else 200), {
            "ok": not wrong, "reason": wrong or "yes", "role": seen.role, "state": seen.state,
            "silent_s": round(seen.silent_s, 1), "in_state_s": round(seen.in_state_s, 1), "finished": seen.finished,
            "finished_s": round(seen.finished_s, 1),
        }  # fmt: skip

    def _live(self, seen: Seen) -> str:
        bound_s = self._bounds.silence_s(seen.state)
        if seen.silent_s <= bound_s:
            return ""
        return f"the loop has not moved for {seen.silent_s:.0f} s while {seen.state}; {bound_s:.0f} s are allowed"

    def _ready(self, seen: Seen) -> str:
        if not seen.ready:
            return seen.reason or "it is not ready"
        return self._live(seen) or self._check()

    def _progress(self, seen: Seen) -> str:
        if wrong := self._live(seen):
            return wrong
        if seen.state == State.STARTING and not seen.finished:
            bound_s, since = max(self._bounds.startup_s, self._bounds.stall_s), "the start"
        else:
            bound_s, since = self._bounds.stall_s, seen.finished or "the start"
        if seen.finished_s <= bound_s:
            return ""
        return f"nothing was finished for {seen.finished_s:.0f} s since {since}, now {seen.state}; {bound_s:.0f} s are allowed"


class HealthPage:
    """``http://127.0.0.1:PORT`` while it is open."""

    def __init__(self, port: int, health: Health) -> None:
        """Start it; port 0 picks a free one. Raises ConfigError when the port is taken."""
        try:
            self._server = _Server((LOOPBACK, port), _Handler, "health")
        except OSError as error:
            raise ConfigError(
                f"health port {port}: {error.strerror or error}; choose another run.health_port, or 0 for none"
            ) from None
        self._server.health = health
        self.port = self._server.start()

    def close(self) -> None:
        """Stop answering and let the port go."""
        self._server.close()


class _Server(PageServer):
    health: Health


class _Handler(PageHandler):
    server: _Server

    def do_GET(self) -> None:
        status, content = self.server.health.answer(self.path.partition("?")[0])
        self.reply(status, "application/json", (json.dumps(content) + "\n").encode())

    do_HEAD = do_GET
