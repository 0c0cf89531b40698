"""The commands that look at a run, on both databases: with its server up, down, abandoned, or another one at its address."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_support import Scene, run_record

from rollbook.cli.main import main
from rollbook.core.records import Blame, FailureReport, RewardStatus
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.address import write_address
from rollbook.rpc.server import RunningServer, serve

MODEL = Path(__file__).resolve().parents[2] / "service" / "rollbook" / "assets" / "sort-digits"
ROLE_TTL_S = 2.0
CONFIG = """
run = {{ id = "run", dir = "{dir}", steps = 2 }}
model = {{ path = "{model}" }}
task = {{ source = "jsonl", path = "{model}/train.jsonl" }}
learner = {{ groups_per_step = 2, group_size = 2 }}
ledger = {{ url = "{url}", role_ttl_s = {ttl} }}
workers = [{{ engine = "transformers" }}]
"""


class Recorded:
    """A run with one trained step, one failure and one open group, and the configuration that names it."""

    def __init__(self, directory: Path, url: str) -> None:
        self.dir = directory / "run"
        self.dir.mkdir()
        self.config = directory / "run.toml"
        self.config.write_text(CONFIG.format(dir=self.dir, model=MODEL, url=url, ttl=ROLE_TTL_S))
        self.ledger = Ledger(url, holder="server", role_ttl_s=ROLE_TTL_S)
        scene = Scene(self.ledger, run_record(steps=2))
        scene.feed(3)
        scene.fill(4)
        scene.train(1)
        scene.checkpoint(1)
        grant = scene.lease(1)[0]
        self.ledger.report_failures(
            [FailureReport(grant.key, grant.token, scene.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "out of memory")]
        )

    def serve(self) -> RunningServer:
        server = serve(self.ledger, "127.0.0.1:0", run_id="run")
        write_address(self.dir, server.address)
        return server


@pytest.fixture
def recorded(tmp_path: Path, ledger_url: str) -> Iterator[Recorded]:
    run = Recorded(tmp_path, ledger_url)
    yield run
    run.ledger.close()


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_status_is_the_same_from_the_server_and_from_the_database(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    server = recorded.serve()
    code, served, _ = said(capsys, "status", recorded.config)
    server.stop(0.0)
    recorded.ledger.close()
    assert code == 0
    code, read, _ = said(capsys, "status", recorded.config)
    assert code == 0
    for text in (served, read):
        assert "run run  step 1/2  planned 1  version 1  checkpoint 1" in text
        assert "failures  1 attempts without a sample\n       1  infra_error: out of memory\n" in text
        assert "verdicts  none" in text
        assert re.search(r"role learner  epoch 1  held by learner- for another \d+", text)
    assert "role ledger" in served and "no ledger server answers" not in served
    assert "role ledger" not in read and "no ledger server answers" in read
    code, text, _ = said(capsys, "status", recorded.config, "--json")
    assert code == 0 and json.loads(text)["server"] is False


def test_audit_says_clean_or_names_what_is_wrong(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    server = recorded.serve()
    assert said(capsys, "audit", recorded.config)[:2] == (0, "audit: clean\n")
    server.stop(0.0)
    with recorded.ledger._database.writer.begin() as conn:
        conn.exec_driver_sql("UPDATE sample SET n_tokens = n_tokens + 1 WHERE ordinal = 0")
        conn.exec_driver_sql("DELETE FROM payload WHERE ordinal = 0 AND sibling = 1")
    recorded.ledger.close()
    code, text, _ = said(capsys, "audit", recorded.config)
    assert code == 1
    assert re.search(r"^P1 sample_has_payload: .*\[.*0\.1.*\]$", text, re.M), text
    assert re.search(r"^audit: \d+ violations$", text, re.M)


def test_why_tells_the_story_in_seconds_since_the_rollout_was_issued(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.ledger.close()
    code, text, _ = said(capsys, "why", recorded.config, "0.1")
    assert code == 0
    story = re.findall(r"^ +\+(\d+\.\d{3})  (\w+)", text, re.M)
    assert [what for _, what in story] == ["issued", "lease_granted", "sample_accepted", "planned", "trained", "checkpoint"]
    seconds = [float(s) for s, _ in story]
    assert seconds[0] == 0.0 and seconds == sorted(seconds) and seconds[-1] < 60
    assert "at_s" not in text
    assert json.loads(said(capsys, "why", recorded.config, "0.1", "--json")[1])["state"] == "applied"
    assert said(capsys, "why", recorded.config, "9.0")[0] == 1
    assert said(capsys, "why", recorded.config, "nine")[0] == 2


def test_a_server_that_died_without_a_word_is_waited_for_one_term(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    server = recorded.serve()
    server.stop(0.0)
    recorded.ledger.close(release=False)
    code, text, told = said(capsys, "status", recorded.config)
    assert code == 0 and "no ledger server answers" in text
    assert ("waiting for a ledger server" in told) == ("postgresql" in recorded.config.read_text())


def test_what_listens_at_an_old_address_is_not_taken_for_the_runs_server(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.ledger.close()
    other = Ledger(f"sqlite:///{tmp_path}/other.sqlite", holder="other")
    other.open_run(run_record("other"))
    server = serve(other, "127.0.0.1:0", run_id="other")
    write_address(recorded.dir, server.address)
    code, text, _ = said(capsys, "status", recorded.config)
    assert code == 0 and "run run  step 1/2" in text and "no ledger server answers" in text
    server.stop(0.0)
    other.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_address(recorded.dir, f"127.0.0.1:{silent.getsockname()[1]}")
        silent.close()
        assert said(capsys, "status", recorded.config)[0] == 0


def test_the_report_and_an_operators_verdict_work_without_a_server(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.ledger.close()
    code, text, _ = said(capsys, "quarantine", recorded.config, "2", "--reason", "kills its sandbox")
    assert code == 0, text
    assert "verdicts  quarantined 2" in said(capsys, "status", recorded.config)[1]
    code, text, _ = said(capsys, "report", recorded.config)
    assert code == 0 and str(recorded.dir / "report" / "report.html") in text
    assert json.loads((recorded.dir / "report" / "metrics.json").read_text())[0]["reward_mean"] == 0.25


def test_migrate_checks_and_upgrades(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.ledger.close()
    assert said(capsys, "migrate", recorded.config, "--check")[:2] == (0, "schema: as this version expects\n")
    assert said(capsys, "migrate", recorded.config)[0] == 0
    absent = tmp_path / "absent" / "ledger.sqlite"
    code, text, _ = said(capsys, "migrate", recorded.config, "--set", f"ledger.url=sqlite:///{absent}", "--check")
    assert code == 1 and "no ledger there yet" in text
    assert not absent.parent.exists(), "looking creates nothing"
    assert said(capsys, "migrate", recorded.config, "--set", f"ledger.url=sqlite:///{absent}")[0] == 0
    assert absent.exists()


def test_a_look_at_the_database_leaves_the_run_to_its_next_server(
    recorded: Recorded, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.ledger.close()
    assert said(capsys, "status", recorded.config, "--set", "ledger.role_ttl_s=600.0")[0] == 0
    with Ledger(ledger_url, holder="next", role_ttl_s=ROLE_TTL_S) as ledger:
        ledger.attach("run")  # refused as long as somebody holds the server's role
        assert ledger.audit() == []


def test_top_once_shows_what_the_run_waits_for_with_the_server_up_and_down(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    server = recorded.serve()
    code, served, _ = said(capsys, "top", recorded.config, "--once")
    server.stop(0.0)
    recorded.ledger.close()
    assert code == 0
    code, read, _ = said(capsys, "top", recorded.config)
    assert code == 0, "where there is no terminal, one look is what top gives"
    for text in (served, read):
        assert "waits for" in text.splitlines()[0] and "run run  step 1/2" in text
        assert re.search(r"^reward +▁  0.25 to 0.25, now 0.25$", text, re.M)
        assert max(map(len, text.splitlines())) <= 90
    assert said(capsys, "top", recorded.config, "--once", "--every", "0.1")[0] == 2
