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
from contextlib import contextmanager, suppress
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
from rollbook.observe import pages
from rollbook.report import statuspage
from rollbook.report.standing import standing
from rollbook.report.statuspage import Content, StatusPage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "security"))

from security_support import make_folder, whole

from run_support import CONFIG, wait_until

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


@pytest.mark.parametrize("address", [":0", "0", "", "nonsense", "[::1:0]", "localhost:x"])
def test_an_address_without_a_host_or_a_port_is_refused_before_anything_listens(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ledger.status_address"):
        StatusPage(address, Content(None), run_id="run", security=SecurityConfig())  # type: ignore[arg-type]
    (tmp_path / "run.toml").write_text(CONFIG)
    if address:
        with pytest.raises(ConfigError, match="ledger.status_address"):
            load_config(tmp_path / "run.toml", [f"ledger.status_address={address}"])


def test_the_page_answers_on_the_loopback_of_version_6_too() -> None:
    try:
        page = StatusPage("[::1]:0", Content(Away()), run_id="run", security=SecurityConfig())
    except ConfigError as error:
        pytest.skip(f"NO IPV6 HERE: {error}")
    try:
        with urllib.request.urlopen(page.url, timeout=60) as reply:
            assert reply.status == 200 and page.url.startswith("http://[::1]:")
    finally:
        page.close()


DATA = b"GET /data HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"


def talk(port: int, said: bytes) -> bytes:
    """Everything the page answers to these bytes until it hangs up."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client, suppress(ConnectionError):
        client.sendall(said)
        while part := client.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(("said", "status"), [
    (b"GET /" + b"x" * 65_530 + b" HTTP/1.1\r\n\r\n", b"414"), (b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n", b"405"),
    (b"GET <script>alert(1)</script> HTTP/9.9.9\r\n\r\n", b"400"), (b"\x16\x03\x01 not http\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"), (b"BREW /data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"405"),
])  # fmt: skip
def test_what_is_no_request_is_refused_with_the_policy_and_without_an_echo(said: bytes, status: bytes) -> None:
    page = StatusPage("127.0.0.1:0", Content(Away()), run_id="run", security=SecurityConfig())
    try:
        head, _, body = talk(page.port, said).partition(b"\r\n\r\n")
    finally:
        page.close()
    assert head.split(b" ")[1] == status and b"Content-Security-Policy: default-src 'none'" in head
    assert b"text/plain" in head and b"script" not in body and len(body) < 100


def test_a_client_that_does_not_come_to_its_end_is_cut_off_and_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OPEN_MAX", 1)
    monkeypatch.setattr(pages.PageHandler, "timeout", 600.0)
    monkeypatch.setattr(pages, "REQUEST_S", 0.0)
    page = StatusPage("127.0.0.1:0", Content(Away()), run_id="run", security=SecurityConfig())
    try:
        assert talk(page.port, b"GET /da") == b""
        monkeypatch.setattr(pages, "REQUEST_S", 600.0)
        wait_until("the place is free again", lambda: b" 503 " in talk(page.port, DATA))
    finally:
        page.close()


def test_a_client_that_never_shakes_hands_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "secrets")
    monkeypatch.setattr(pages, "SILENT_S", 600.0)
    monkeypatch.setattr(pages, "REQUEST_S", 0.0)
    security = replace(whole(tmp_path / "secrets"), require_client_certificate=False)
    page = StatusPage("127.0.0.1:0", Content(Away()), run_id="run", security=security)
    try:
        assert talk(page.port, b"\x16\x03\x01") == b"", "the beginning of a greeting, and no more"
    finally:
        page.close()


def test_a_client_beyond_the_limit_is_turned_away_and_the_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OPEN_MAX", 1)
    asked, answers = threading.Event(), threading.Event()

    class Held(Away):
        def explain(self, key: SlotKey) -> dict:
            asked.set()
            answers.wait(100)
            return {"sample_id": str(key)}

    page, got = StatusPage("127.0.0.1:0", Content(Held()), run_id="run", security=SecurityConfig()), []
    try:
        story = DATA.replace(b"data", b"story?sample=1.2")
        first = threading.Thread(target=lambda: got.append(talk(page.port, story)), daemon=True)
        first.start()
        assert asked.wait(100)
        assert talk(page.port, DATA) == b""
        answers.set()
        first.join(100)
        assert got[0].endswith(b'{"sample_id": "1.2"}')
        wait_until("the place is free again", lambda: b" 503 " in talk(page.port, DATA))
    finally:
        answers.set()
        page.close()


def test_events_that_are_alike_are_one_row_so_that_those_of_the_run_are_seen(bench: Bench) -> None:
    s = bench.scene(attempts_max=1000)
    s.feed(4)
    for _ in range(30):
        grants = s.lease(4)
        s.ledger.report_failures(
            [FailureReport(g.key, g.token, s.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow") for g in grants]
        )
    rows = statuspage.folded(s.ledger.recent_events(statuspage.EVENTS_READ))
    failed, *others = [row for row in rows if row["what"] == "failure_reported"]
    assert failed["n"] == 120 and failed["oldest_s"] <= failed["at_s"] and not others
    roles = [row for row in rows if row["what"] == "role_acquired"]
    assert [row["n"] for row in roles] == [1] * len(roles) and len(roles) >= 2
    one = {"what": "failure_reported", "sample": "1.0", "at_s": 5.0, "detail": {"status": "timeout", "reason": "slow"}}
    other = one | {"detail": {"status": "timeout", "reason": "other"}}
    apart = [one, other, one | {"at_s": 3.0}, {"what": "x", "at_s": 1.0, "detail": {}}]
    assert [(row["n"], row["oldest_s"]) for row in statuspage.folded(apart)] == [(2, 3.0), (1, 5.0), (1, 1.0)]


def test_what_the_run_waits_for_is_the_cause_that_somebody_can_do_something_about(bench: Bench) -> None:
    s = bench.scene(steps=1)

    def waits() -> tuple[str, str]:
        found = standing(s.ledger.run_status(), 0.0)
        return found.state, found.waits_for

    assert waits() == ("running", "the feeder: no slot waits")
    s.feed(2)
    assert waits() == ("running", "rollout workers to load version 0: none of 1 has any")
    grants = s.lease()
    assert waits() == ("running", "rollouts: 4 slots with 1 worker")
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
