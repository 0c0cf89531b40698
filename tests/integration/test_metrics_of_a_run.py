"""A real run's metrics as a scraper sees them: targets that live, series within their budget, numbers that outlive servers."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollbook.observe import targets
from rollbook.observe.metric_table import BY_NAME
from run_support import CONFIG, TinyRun, wait_until

pytestmark = pytest.mark.timeout(600)

SERIES_MAX = {"ledger": 500, "worker": 150, "learner": 300, "feeder": 50}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    made = TinyRun(tmp_path)
    made.config.write_text(CONFIG.replace("steps = 3", "steps = 2000\nmetrics_port = 0").replace(
        "[supervisor]", "[ledger]\nheartbeat_s = 1.0\n\n[supervisor]"))  # fmt: skip
    yield made
    made.end()


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=30) as answer:
        body: bytes = answer.read()
        return body


def ledger_page(run: TinyRun) -> str:
    """Address of the newest ledger server's page."""
    return next((target.address for target in targets.announced(run.dir) if target.role == "ledger"), "")


def listed(run: TinyRun) -> dict[str, tuple[str, dict[str, str]]]:
    """Targets of the list by name; empty while no server answers."""
    try:
        found = json.loads(get(ledger_page(run), "sd"))
    except OSError:
        return {}
    return {entry["labels"].get("worker", entry["labels"]["role"]): (entry["targets"][0], entry["labels"]) for entry in found}


def series(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(get(address, "metrics").decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def counted(run: TinyRun) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Counters of the run on the ledger server's page; empty while there is none."""
    own = {"ledger_commits_total", "ledger_conflicts_total"}
    names = {spec.full_name for spec in BY_NAME.values() if spec.sql and spec.name.endswith("_total") and spec.name not in own}
    try:
        found = series(ledger_page(run))
    except OSError:
        return {}
    return {key: value for key, value in found.items() if key[0] in names and dict(key[1]).get("event") != "renewed"}


def test_the_living_are_listed_the_dead_leave_and_no_count_of_the_run_falls(run: TinyRun) -> None:
    run.start()
    wait_until("everybody is listed", lambda: listed(run).keys() >= {"ledger", "learner", "feeder", "worker-0"})
    assert listed(run)["worker-0"][1] == {"run": "tiny", "role": "worker", "worker": "worker-0"}
    steps = ("rollbook_learner_steps_total", ())
    wait_until("three steps are counted", lambda: counted(run).get(steps, 0) >= 3)

    found = listed(run)
    pages = {name: series(address) for name, (address, _) in found.items()}
    for name, page in pages.items():
        role = found[name][1]["role"]
        assert 0 < len(page) < SERIES_MAX[role], (name, len(page))
        for (metric, labels), _ in page.items():
            base = metric.removeprefix("rollbook_")
            suffixes = ("", "_bucket", "_count", "_sum", "_info")
            spec = next((BY_NAME[known] for known in map(base.removesuffix, suffixes) if known in BY_NAME), None)
            assert spec is not None and role in spec.roles, (name, metric)
            assert all(value in spec.labels[label] for label, value in labels if spec.labels.get(label)), (metric, labels)
    worker, learner = pages["worker-0"], pages["learner"]
    assert worker["rollbook_rollout_duration_seconds_count", (("stage", "total"),)] >= 6
    assert worker["rollbook_worker_tokens_total", ()] > 0
    assert worker["rollbook_weight_sync_duration_seconds_count", (("phase", "load"),)] >= 1
    assert learner["rollbook_learner_step_phase_duration_seconds_count", (("phase", "forward_backward"),)] >= 3
    assert learner["rollbook_offpolicy_importance_ratio_count", (("level", "token"),)] > 0
    assert 0 < learner["rollbook_offpolicy_ess_ratio", ()] <= 1
    assert learner["rollbook_checkpoint_size_bytes", ()] > 0

    dead = found["worker-0"][0]
    os.kill(run.records()["worker-0"].pid, signal.SIGKILL)
    wait_until("the dead worker's successor is listed alone", lambda: dead not in {a for a, _ in listed(run).values()}
               and "worker-0" in listed(run))  # fmt: skip
    restarts = ("rollbook_worker_restarts_total", (("pool", "actor"), ("reason", "crash")))
    wait_until("its death is counted", lambda: series(ledger_page(run)).get(restarts, 0) >= 1)

    before, page = counted(run), ledger_page(run)
    os.kill(run.records()["ledger"].pid, signal.SIGKILL)
    wait_until("another ledger server shows the run", lambda: ledger_page(run) != page and counted(run))
    after = wait_until("it has counted", lambda: counted(run) if counted(run).get(steps, 0) >= before[steps] else None)
    assert after.keys() == before.keys()
    assert {key: value for key, value in before.items() if value > after[key]} == {}
