"""The metrics page: scraped over loopback, counted in SQL, closed labels, nothing old while the ledger is away."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from ledger_bench import Bench
from rollbook.cli.record import run_record as record_of
from rollbook.cli.serving import serve_ledger
from rollbook.cli.showing import shown_metrics
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.records import Blame, FailureReport, RewardStatus
from rollbook.observe import exporter, ledger_metrics, pages
from rollbook.observe.exporter import MetricsPage
from rollbook.observe.ledger_metrics import LedgerCollector
from rollbook.observe.metric_table import BY_NAME
from rollbook.observe.metrics import REGISTRY
from rollbook.observe.targets import announced

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_support import CONFIG, wait_until

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
EMPTY = {"opened": 0, "finished": 0, "trained": 0, "waiting": 0, "dropped": {}, "dimensions": {}, "failures": [], "outcomes": [],
         "breaker": {"opened": 0, "events": []}, "unsafe_workers": 0}  # fmt: skip

READING: dict[str, Any] = {
    "survival": EMPTY, "figures": {}, "slots": dict.fromkeys(BY_NAME["ledger_tasks"].labels["state"], 0), "oldest_s": {},
    "events": {}, "steps": {}, "lag_bound": 2, "head": None, "roles": [], "epoch": 1, "last_step_at_s": None,
    "checkpoint_at_s": None,
    "run_state": "starting", "workers": [], "draining": False, "breaker": {"state": "closed"}, "size_bytes": 0, "schema": 4,
}  # fmt: skip


def scrape(port: int) -> Series:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


@contextmanager
def page_of(collector: LedgerCollector) -> Iterator[int]:
    registry = CollectorRegistry()
    registry.register(collector)
    page = MetricsPage(0, registry)
    try:
        yield page.port
    finally:
        page.close()


def test_what_the_ledger_counts_is_on_the_page(bench: Bench) -> None:
    s = bench.scene(attempts_max=1)
    s.feed(3)
    first, second, *others = s.lease(6)
    s.submit([second, *others])
    failed = FailureReport(first.key, first.token, s.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow")
    s.ledger.report_failures([failed])
    s.train(1)
    s.ledger.register_worker("odd", "host", "engine", json.dumps({"sandbox": {"backend": "unsafe"}}))
    with page_of(LedgerCollector(s.ledger.reading)) as port:
        series = scrape(port)
    counts = s.ledger.survival()
    assert value(series, "rollbook_ledger_readable") == 1
    assert value(series, "rollbook_slots_opened_total") == counts["opened"] == 6
    assert value(series, "rollbook_slots_opened_by_end", end="trained") == 4
    assert value(series, "rollbook_slots_dropped_total", reason="failed") == 1
    assert value(series, "rollbook_slots_dropped_total", reason="dropped_stale") == 0
    assert value(series, "rollbook_survival_ratio", dimension="length", bucket="2-3") == pytest.approx(0.8)
    assert value(series, "rollbook_trained_reward_mean", estimator="naive") == 1
    assert value(series, "rollbook_drop_bias_alarm", dimension="length") == 0
    assert value(series, "rollbook_failures_total", status="timeout", blame="unclear") == 1
    assert value(series, "rollbook_failures_total", status="infra_error", blame="infra") == 0
    assert value(series, "rollbook_sandbox_unsafe") == 1
    assert value(series, "rollbook_breaker_state", state="closed") == 1
    assert value(series, "rollbook_breaker_opened_total") == 0
    assert len(series) < 500 and all(name.startswith("rollbook_") for name, _ in series)
    assert not any(("dimension", "task") in pairs for name, pairs in series if name == "rollbook_survival_ratio")


def test_a_biased_run_raises_the_alarm_metric_of_its_dimension_alone() -> None:
    rows = [
        {"bucket": name, "opened": 500, "finished": 500, "trained": k, "waiting": 0, "dropped": {"failed": 500 - k},
         "rewarded": k, "rewarded_sum": 0.0, "reward_sum": 0.0}
        for name, k in (("1", 490), ("2-3", 200))
    ]  # fmt: skip
    fair = [rows[0]]
    counts = EMPTY | {"dimensions": {"length": rows, "duration": fair}}
    with page_of(LedgerCollector(lambda: READING | {"survival": counts, "breaker": {"state": "open"}})) as port:
        series = scrape(port)
    assert value(series, "rollbook_drop_bias_alarm", dimension="length") == 1
    assert value(series, "rollbook_drop_bias_alarm", dimension="duration") == 0
    assert value(series, "rollbook_breaker_state", state="open") == 1
    assert value(series, "rollbook_breaker_state", state="closed") == 0
    assert value(series, "rollbook_drop_kl_nats", dimension="length") > 0.02


def test_the_ledger_is_read_once_for_scrapes_that_follow_each_other_and_again_later() -> None:
    reads: list[int] = []

    def reading() -> dict[str, Any]:
        reads.append(1)
        return READING

    with page_of(LedgerCollector(reading, cache_s=600.0)) as port:
        assert reads == [], "registering reads nothing"
        assert scrape(port) == scrape(port)
    assert len(reads) == 1
    with page_of(LedgerCollector(reading, cache_s=0.0)) as port:
        scrape(port)
        wait_until("another reading", lambda: scrape(port) and len(reads) >= 3)


def test_while_the_ledger_does_not_answer_no_old_value_is_shown() -> None:
    def away() -> dict[str, Any]:
        raise Unavailable("the database is away")

    with page_of(LedgerCollector(away)) as port:
        assert scrape(port) == {("rollbook_ledger_readable", ()): 0.0}


def dropped() -> float:
    return REGISTRY.get_sample_value("rollbook_telemetry_dropped_total", {"signal": "metrics"}) or 0.0


def test_a_scrape_waits_for_no_slow_ledger_and_what_it_gives_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_metrics, "WAIT_S", 0.01)
    began, go_on, before = threading.Event(), threading.Event(), dropped()

    def slow() -> dict[str, Any]:
        began.set()
        assert go_on.wait(60.0)
        return READING

    with page_of(LedgerCollector(slow)) as port:
        first = threading.Thread(target=scrape, args=(port,), daemon=True)
        first.start()
        try:
            assert began.wait(60.0)
            assert scrape(port) == {}, "there was no reading before"
            assert dropped() - before == 1
        finally:
            go_on.set()
            first.join(30.0)
        assert value(scrape(port), "rollbook_ledger_readable") == 1
        assert dropped() - before == 1


def test_more_scrapes_at_once_than_are_answered_are_turned_away_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OPEN_MAX", 1)
    began, go_on, before = threading.Event(), threading.Event(), dropped()

    def slow() -> dict[str, Any]:
        began.set()
        assert go_on.wait(60.0)
        return READING

    with page_of(LedgerCollector(slow)) as port:
        first = threading.Thread(target=scrape, args=(port,), daemon=True)
        first.start()
        try:
            assert began.wait(60.0)
            with pytest.raises(OSError):  # closed unanswered
                scrape(port)
            assert dropped() - before == 1
        finally:
            go_on.set()
            first.join(30.0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="ledger.metrics_port"):
        MetricsPage(taken.getsockname()[1], CollectorRegistry())


def test_a_page_whose_port_is_taken_moves_to_a_free_one_and_is_announced(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config(tmp_path / "run.toml", [f"ledger.metrics_port={port}"])
        with shown_metrics(config, "ledger", "ledger", 0, lambda: [{"targets": ["here"], "labels": {}}]):
            (target,) = announced(Path(config.run.dir))
            assert target.address != f"127.0.0.1:{port}"
            with urllib.request.urlopen(f"http://{target.address}/sd", timeout=30) as answer:
                assert json.load(answer)[0]["targets"] == ["here"]
    assert announced(Path(config.run.dir)) == []


@pytest.mark.parametrize("port", [0, 9])
def test_a_process_that_can_open_no_page_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(exporter, "_Server", refused)
    (tmp_path / "run.toml").write_text(CONFIG)
    config, went_on = load_config(tmp_path / "run.toml", [f"run.metrics_port={port}"]), False
    with shown_metrics(config, "ledger", "ledger", 0):
        went_on = True
        assert announced(Path(config.run.dir)) == []
    assert went_on


def test_a_ledger_server_shows_its_metrics_where_the_configuration_says_and_stops_with_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml", [f"ledger.metrics_port={port}"])
    Path(config.run.dir).mkdir(parents=True)
    record, stop = record_of(config), threading.Event()
    server = threading.Thread(target=serve_ledger, args=(config, record, stop), daemon=True)
    server.start()

    def shown() -> Series | None:
        try:
            return scrape(port)
        except OSError:
            return None

    try:
        series = wait_until("the metrics page", shown, bound_s=60.0)
        assert value(series, "rollbook_ledger_readable") == 1 and value(series, "rollbook_slots_opened_total") == 0
    finally:
        stop.set()
        server.join(30.0)
    assert not server.is_alive() and shown() is None
    assert "rollbook_ledger_readable" not in {family.name for family in REGISTRY.collect()}
