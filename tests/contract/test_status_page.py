"""The status page over HTTP: read-only, bounded, cached, for whom it is meant, and up while the learner or the ledger is not."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger_bench import Bench
from rollbook.cli.paging import page_url, status_page
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.records import Blame, FailureReport, RewardStatus, Role, SlotKey
from rollbook.core.security import OBSERVER, WORKER, token_digest
from rollbook.core.settings import SecurityConfig
from rollbook.report import statuspage
from rollbook.report.standing import standing
from rollbook.report.statuspage import Content, StatusPage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "security"))

from security_support import make_folder, whole

from run_support import CONFIG

TOKENS = {role: f"token-of-{role}-that-is-long-enough-0123456789" for role in (OBSERVER, WORKER)}
Ask = Callable[..., tuple[int, dict[str, str], Any]]


class Away:
    """A ledger whose database does not answer."""

    def __init__(self) -> None:
        self.reads = 0

    def run_status(self) -> dict:
        self.reads += 1
        raise Unavailable("the database cannot answer now")


@contextmanager
def shown(source: Any, security: SecurityConfig | None = None, run_id: str = "run") -> Iterator[Ask]:
    page = StatusPage("127.0.0.1:0", Content(source), run_id=run_id, security=security or SecurityConfig())

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        is_json = answer.headers["Content-Type"] == "application/json" and body
        return answer.status, dict(answer.headers), json.loads(body) if is_json else body

    try:
        yield ask
    finally:
        page.close()


def test_the_page_shows_status_steps_and_events_and_tells_stories_as_why_does(bench: Bench) -> None:
    s = bench.scene(steps=3)
    s.feed(3)
    s.fill(4)
    s.train(1)
    grant = s.lease(1)[0]
    s.ledger.report_failures([FailureReport(grant.key, grant.token, s.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow")])
    with shown(s.ledger) as ask:
        status, headers, data = ask("/data")
        assert status == 200 and headers["Cache-Control"] == "no-store"
        assert data["run"]["steps"]["trained"] == 1 and data["run"]["failures"] == {"timeout: slow": 1}
        (step,) = data["steps"]
        assert step == {"step": 1, "outcome": "trained", "reward_mean": 0.25, "finished_at_s": step["finished_at_s"]}
        kinds = [event["what"] for event in data["events"]]
        assert kinds[0] == "failure_reported" and "role_acquired" in kinds and "lease_granted" not in kinds
        assert ask("/story?sample=0.1")[2] == json.loads(json.dumps(s.ledger.explain(SlotKey(0, 1))))
        assert ask("/story?sample=77.0")[0] == 404 and "ordinals go from 0 to 2" in ask("/story?sample=77.0")[2]["error"]
        assert ask("/story?sample=%3Cscript%3E")[0] == 400 and ask("/story")[0] == 400


def test_nothing_but_reading_is_answered() -> None:
    with shown(Away()) as ask:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = ask("/data", method)
            assert status == 405 and headers["Allow"] == "GET, HEAD"
        assert ask("/data", "HEAD")[0] == 503 and ask("/data", "HEAD")[2] == b""
        assert ask("/../etc/passwd")[0] == 404
        status, headers, body = ask("/")
        policy = headers["Content-Security-Policy"]
        assert status == 200 and b"<script>" in body and "unsafe" not in policy and "default-src 'none'" in policy
        assert b"src=\"http" not in body and b"innerHTML" not in body


def test_the_ledger_is_read_once_for_looks_that_follow_each_other_and_its_outage_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statuspage, "CACHE_S", 600.0)
    source = Away()
    with shown(source) as ask:
        answers = [ask("/data") for _ in range(5)]
        assert {status for status, _, _ in answers} == {503} and "cannot answer now" in answers[0][2]["error"]
        assert source.reads == 1
    monkeypatch.setattr(statuspage, "CACHE_S", 0.0)
    monkeypatch.setattr(statuspage, "CACHE_SHARE", float("inf"))
    with shown(source) as ask:
        ask("/data")
        ask("/data")
    assert source.reads == 3


def test_a_website_cannot_reach_the_page_through_a_name_of_its_own() -> None:
    with shown(Away()) as ask:
        assert ask("/data", Host="evil.example:80")[0] == 403
        assert ask("/data", Host="127.0.0.1.evil.example")[0] == 403
        assert ask("/data", Host="localhost:1234")[0] == 503, "let in, and told that the ledger is away"


def test_where_there_are_tokens_only_those_who_may_read_this_run_see_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    other = "token-of-observer-of-another-run-0123456789"
    known = [f"{token_digest(token)} {role}\n" for role, token in TOKENS.items()]
    tokens.write_text("".join([*known, f"{token_digest(other)} observer elsewhere\n"]))
    with shown(Away(), SecurityConfig(tokens=str(tokens))) as ask:
        assert ask("/")[0] == 200, "the empty page asks for the token"
        status, headers, body = ask("/data")
        assert status == 401 and headers["WWW-Authenticate"] == "Bearer" and "run" not in body
        assert ask("/story?sample=0.0")[0] == 401
        assert ask("/data", Authorization=f"Bearer {TOKENS[OBSERVER]}")[0] == 503, "known, and told that the ledger is away"
        for wrong in (f"Bearer {TOKENS[WORKER]}", f"Bearer {other}", "Bearer x", f"Basic {TOKENS[OBSERVER]}", ""):
            assert ask("/data", Authorization=wrong)[0] == 401


def test_beyond_loopback_the_page_is_refused_without_tokens_and_tls() -> None:
    for security in (SecurityConfig(), SecurityConfig(tokens="some")):
        with pytest.raises(ConfigError, match="ledger.status_address"):
            StatusPage("0.0.0.0:0", Content(None), run_id="run", security=security)  # type: ignore[arg-type]


def test_what_the_run_waits_for_is_the_cause_that_somebody_can_do_something_about(bench: Bench) -> None:
    s = bench.scene(steps=1)

    def waits() -> tuple[str, str]:
        found = standing(s.ledger.run_status(), 0.0)
        return found.state, found.waits_for

    assert waits() == ("running", "the feeder: no slot waits")
    s.feed(2)
    assert waits() == ("running", "rollout workers to load version 0: none of 1 has any")
    grants = s.lease()
    assert waits() == ("running", "rollouts: 4 slots are with 1 workers")
    s.submit(grants)
    s.plan(1)
    assert waits() == ("running", "the learner: step 1 is planned and not finished")
    s.finish(1)
    s.ledger.release_role(s.learner)
    assert waits()[0] == "stuck" and waits()[1].startswith("a learner: nobody holds its role")
    s.learner = s.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0)
    s.checkpoint(1)
    assert waits()[0] == "complete"
    s.ledger.drain()
    assert waits()[0] == "complete", "nothing is left to wait for"


def test_the_page_of_a_restarted_server_is_where_it_was_and_its_file_goes_with_it(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml", [f"run.dir={tmp_path}/run", "run.id=run"])
    Path(config.run.dir).mkdir()
    ledger = bench.scene().ledger
    with status_page(config, ledger):
        url = page_url(config.run.dir)
        assert url.startswith("http://127.0.0.1:")
    assert page_url(config.run.dir) == ""
    (Path(config.run.dir) / "status.address").write_text(url)  # as one that was killed leaves it
    with status_page(config, ledger):
        assert page_url(config.run.dir) == url
        with status_page(config, ledger):  # the port is taken: another one, and the run goes on
            assert page_url(config.run.dir) != url
    with status_page(load_config(tmp_path / "run.toml", ["ledger.status_address="]), ledger):
        assert page_url(config.run.dir) == ""


def test_over_tls_the_page_answers_its_own_clients_only(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_folder(folder)
    security = replace(whole(folder), require_client_certificate=False)

    class Quiet:
        def explain(self, key: SlotKey) -> dict:
            return {"sample_id": str(key)}

    page = StatusPage("127.0.0.1:0", Content(Quiet()), run_id="run", security=security)  # type: ignore[arg-type]
    try:
        assert page.url.startswith("https://")
        token = (folder / "observer.token").read_text().strip()
        asked = urllib.request.Request(f"{page.url}story?sample=1.2", headers={"Authorization": f"Bearer {token}"})
        trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        trusting.check_hostname = False
        with urllib.request.urlopen(asked, timeout=60, context=trusting) as reply:
            assert json.loads(reply.read()) == {"sample_id": "1.2"}
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(asked, timeout=60, context=ssl.create_default_context())
        with socket.create_connection(("127.0.0.1", page.port), timeout=60) as stranger:
            stranger.sendall(b"GET /data HTTP/1.0\r\n\r\n")
            try:
                answer = stranger.recv(1000)
            except ConnectionError:
                answer = b""
            assert b"HTTP" not in answer, "a TLS alert or nothing"
    finally:
        page.close()


def test_a_database_that_does_not_answer_in_time_is_said_to_whoever_asks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statuspage, "WAIT_S", 0.01)
    asked, answers = threading.Event(), threading.Event()

    class Slow(Away):
        def run_status(self) -> dict:
            asked.set()
            answers.wait(100)
            return super().run_status()

    with shown(Slow()) as ask:
        first = threading.Thread(target=ask, args=("/data",), daemon=True)
        first.start()
        assert asked.wait(100)
        status, _, body = ask("/data")
        answers.set()
        first.join(100)
    assert status == 503 and "has not answered for" in body["error"]
