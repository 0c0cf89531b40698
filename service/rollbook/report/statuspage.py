"""The read-only status page of a run: one HTML file without anything from elsewhere, and the JSON it polls.

Owns the HTTP side: who may look, what a browser may do with the page, how often the ledger is asked. Never writes and never
computes a number: content is ``run_status``, ``step_metrics``, ``recent_events`` and ``explain``. Text of tasks and models is
untrusted; it travels as JSON and the page puts it into text nodes only, which its Content-Security-Policy and Trusted Types
enforce. On loopback without tokens a foreign ``Host`` is refused, so that no website reaches it through a name of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from rollbook.core.errors import ConfigError, Expired, NotFound, RollbookError
from rollbook.core.host import host
from rollbook.core.records import CheckpointState, SlotKey
from rollbook.core.security import LEDGER, OBSERVER, OPERATOR, Grants, check_private, check_reach, is_loopback, load_grants
from rollbook.core.settings import SecurityConfig
from rollbook.observe.failures import Failure
from rollbook.observe.pages import PageHandler, PageServer
from rollbook.report.standing import standing
from rollbook.report.trouble import troubles
from rollbook.rpc.server import reachable_host

CACHE_S = 1.0
"""How long one answer of the ledger is shown to everybody."""
CACHE_SHARE = 0.05
"""Largest share of the time that reading the ledger for the page may take."""
STEPS_SHOWN = 300
EVENTS_READ = 500
EVENTS_SHOWN = 40
"""Rows of events, of which each may stand for many that are alike."""
WAIT_S = 2.0
"""How long one request waits for the reading of another; a slow database is said, not shown as a page that hangs."""
PLOTTED = ("step", "outcome", "reward_mean", "lag_head_mean", "lag_head_max", "ess_token_raw_fraction", "finished_at_s")
READERS = (OBSERVER, OPERATOR, LEDGER)
PAGE = Path(__file__).with_name("status.html")


class Source(Protocol):
    """What the page shows."""

    def run_status(self) -> dict: ...

    def step_metrics(self, lineage: int, first_step: int = 1) -> list[dict]: ...

    def recent_events(self, n_max: int = 100) -> list[dict]: ...

    def explain(self, key: SlotKey) -> dict: ...


class Content:
    """Answers of one run, read at most once a second and a fixed share of the time; searches one at a time."""

    def __init__(self, source: Source, failures: Callable[[], Iterable[Failure]] = tuple) -> None:
        self._source, self._failures = source, failures
        self._lock, self._search = threading.Lock(), threading.Lock()
        self._shown: tuple[int, bytes] = (503, b"{}")
        self._fresh_until_s, self._began_s = float("-inf"), 0.0

    def data(self) -> tuple[int, bytes]:
        """Status and JSON of the whole page."""
        if not self._lock.acquire(timeout=WAIT_S):
            return 503, _json({"error": f"the ledger has not answered for {host().monotonic() - self._began_s:.0f} s"})
        try:
            if host().monotonic() >= self._fresh_until_s:
                self._began_s = host().monotonic()
                self._shown = self._read()
                took_s = host().monotonic() - self._began_s
                self._fresh_until_s = host().monotonic() + max(CACHE_S, took_s / CACHE_SHARE)
            return self._shown
        finally:
            self._lock.release()

    def _read(self) -> tuple[int, bytes]:
        try:
            state = self._source.run_status()
            now_s = host().time()
            first = max(1, state["steps"]["planned"] - STEPS_SHOWN)
            metrics = self._source.step_metrics(state["lineage"], first)
            events = folded(self._source.recent_events(EVENTS_READ))[:EVENTS_SHOWN]
        except RollbookError as error:
            return 503, _json({"error": f"the ledger does not answer: {type(error).__name__}: {error}"})
        shown = {
            "at_s": now_s, "standing": standing(state, now_s).as_dict(), "run": state, "events": events,
            "troubles": troubles(state, now_s, self._failures()),
            "steps": [{name: m[name] for name in PLOTTED if m.get(name) is not None} for m in metrics],
        }  # fmt: skip
        return 200, _json(shown)

    def story(self, text: str) -> tuple[int, bytes]:
        """Status and JSON of one sample's story, as ``rollbook why --json`` prints it."""
        try:
            key = SlotKey.parse(text[:64])
        except ValueError as error:
            return 400, _json({"error": str(error)})
        if not self._search.acquire(timeout=WAIT_S):
            return 503, _json({"error": "another search is still running; ask again"})
        try:
            return 200, _json(self._source.explain(key))
        except Expired as error:
            return 410, _json({"error": str(error)})
        except NotFound as error:
            return 404, _json({"error": str(error)})
        except RollbookError as error:
            return 503, _json({"error": f"{type(error).__name__}: {error}"})
        finally:
            self._search.release()


class StatusPage:
    """``http(s)://host:port/`` while it is open; ``url`` is what to open in a browser."""

    def __init__(self, address: str, content: Content, *, run_id: str, security: SecurityConfig) -> None:
        """Start it; port 0 picks a free one. Raises ConfigError: the port is taken, or the address must not be used."""
        check_reach(address, security, "ledger.status_address")
        name, _, port = address.rpartition(":")
        grants = load_grants(security.tokens) if security.tokens else None
        context = _tls(security)
        try:
            if not name:
                raise ValueError("write host:port")
            self._server = _Server((name.strip("[]"), int(port)), _Handler, "status-page", context)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ledger.status_address = {address!r}: {getattr(error, 'strerror', None) or error}; choose another port, or an "
                "empty address for no page"
            ) from None
        self._server.content, self._server.grants, self._server.run_id = content, grants, run_id
        self._server.only_loopback = grants is None
        self.port = self._server.start()
        self.url = f"{'https' if context else 'http'}://{reachable_host(address)}:{self.port}/"

    def close(self) -> None:
        """Stop answering and let the port go."""
        self._server.close()


class _Server(PageServer):
    content: Content
    grants: Grants | None
    run_id: str
    only_loopback: bool


class _Handler(PageHandler):
    server: _Server

    def do_GET(self) -> None:
        status, body, kind = self._answer()
        self.reply(status, kind, body)

    do_HEAD = do_GET

    def _answer(self) -> tuple[int, bytes, str]:
        asked = urlsplit(self.path)
        if self.server.only_loopback and not is_loopback(_with_port(self.headers.get("Host", ""))):
            return 403, _json({"error": "ask for this page by 127.0.0.1 or localhost"}), "application/json"
        if asked.path == "/":
            return 200, page()[0], "text/html; charset=utf-8"
        if asked.path not in ("/data", "/story"):
            return 404, _json({"error": "there are /, /data and /story?sample=ORDINAL.SIBLING"}), "application/json"
        if not self._is_known():
            return 401, _json({"error": "this run asks for an observer's token (Authorization: Bearer ...)"}), "application/json"
        if asked.path == "/data":
            return *self.server.content.data(), "application/json"
        return *self.server.content.story(parse_qs(asked.query).get("sample", [""])[0]), "application/json"

    def _is_known(self) -> bool:
        """Whether the request carries a token that may read this run; everybody on loopback where the run has no tokens."""
        if self.server.grants is None:
            return True
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        grant = self.server.grants.of(token.strip()) if scheme == "Bearer" else None
        return grant is not None and grant.role in READERS and grant.run_id in ("", self.server.run_id)

    def headers_of(self, status: int) -> dict[str, str]:
        extra = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return super().headers_of(status) | extra | {
            "Content-Security-Policy": page()[1], "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip


def folded(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events, newest first, with those that are alike in one: the newest, how many (``n``) and the oldest's time.

    What befalls samples befalls many of them, and checkpoints come and go: it would leave no room for what befalls the run.
    """
    rows: list[dict[str, Any]] = []
    alike: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        detail = event["detail"]
        reason = detail.get("reason") if event["what"] == "failure_reported" else None
        key = (event["what"], detail.get("status"), detail.get("verdict"), reason)
        is_routine = "sample" in event or detail.get("state") == CheckpointState.DELETING.value
        row = alike.get(key) if is_routine else None
        if row is None:
            row = {**event, "n": 0}
            rows.append(row)
            if is_routine:
                alike[key] = row
        row |= {"n": row["n"] + 1, "oldest_s": event["at_s"]}
    return rows


@cache
def page() -> tuple[bytes, str]:
    """The HTML, and a policy that lets exactly its own script and style run and talk to nobody but this server."""
    text = PAGE.read_text()
    digests = {}
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert found is not None, f"{PAGE} has no <{tag}>"
        digests[tag] = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text.encode(), policy


def _with_port(name: str) -> str:
    """A ``Host`` as ``host:port``."""
    return name if re.search(r":\d+$", name) else f"{name}:80"


def _tls(security: SecurityConfig) -> ssl.SSLContext | None:
    if not security.certificate:
        return None
    check_private(security.key, "security.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(security.certificate, security.key)
        if security.require_client_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(security.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.certificate = {security.certificate}: {error}") from None
    return context


def _json(content: object) -> bytes:
    return json.dumps(_finite(content)).encode()


def _finite(value: Any) -> Any:
    """Without NaN and infinities, which are no JSON to a browser."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
