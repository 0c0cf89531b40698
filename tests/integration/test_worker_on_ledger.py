"""Worker, feeder and learner against the real ledger: real prompts, a real engine, real updates, and killed workers."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rollbook.core.config import Config
from rollbook.core.packing import unpack_i32
from rollbook.core.records import RunRecord, SlotKey
from rollbook.learner.loop import run_learner
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints, metrics
from rollbook.observe.exporter import MetricsPage
from rollbook.rollout.worker import run_worker
from rollbook.tasks.feeder import run_feeder
from rollout_doubles import worker_config
from tracing_support import ids, traced

STEPS = 3
POINTS = ("worker.after_lease", "worker.mid_generate", "worker.after_generate", "worker.before_submit", "worker.after_submit")


@pytest.fixture(autouse=True)
def _no_failpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ROLLBOOK_INCARNATION", "ROLLBOOK_SUPERSEDES"):
        monkeypatch.delenv(name, raising=False)
    yield
    failpoints.arm("")


def fixed_lag_config(run_dir: Path) -> Config:
    return worker_config(
        run_dir,
        run={"id": "test", "dir": str(run_dir), "steps": STEPS, "seed": 3},
        schedule={"kind": "fixed", "lag_versions": 1},
        sampling={"max_new_tokens": 13},
        learner={"groups_per_step": 4, "group_size": 4, "lr": 1e-3, "warmup_steps": 1},
        checkpoint={"every_steps": 2},
        ledger={"heartbeat_s": 0.1, "lease_ttl_s": 30.0, "attempts_max": 20},
        workers=[{"engine": "transformers", "dtype": "float64", "slots": 6, "max_model_len": 64}],
    )


@contextmanager
def roles_beside(config: Config) -> Iterator[Ledger]:
    """An open ledger with a feeder and a learner running until the block ends; their errors are raised there."""
    Path(config.run.dir).mkdir(parents=True)
    ledger = Ledger(f"sqlite:///{config.run.dir}/ledger.sqlite", holder="server", role_ttl_s=60.0)
    stop, errors = threading.Event(), []

    def role(run: object) -> None:
        try:
            run(config, ledger, stop)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - raised by the test below
            errors.append(error)

    try:
        ledger.open_run(RunRecord(config.run.id, config.digest(), config.to_json(), 0, config.rules()))
        threads = [threading.Thread(target=role, args=(run,), daemon=True) for run in (run_feeder, run_learner)]
        for thread in threads:
            thread.start()
        # Models are not loaded by two threads at once: transformers switches torch's defaults while it loads.
        until = time.monotonic() + 60
        while not ledger.versions(0) and not errors and time.monotonic() < until:
            time.sleep(0.05)
        yield ledger
        threads[1].join(60.0)
        stop.set()
        threads[0].join(20.0)
        assert errors == [] and not any(thread.is_alive() for thread in threads)
        assert ledger.audit() == []
    finally:
        stop.set()
        ledger.close()


def tokens_and_logprobs(ledger: Ledger) -> dict[SlotKey, tuple[bytes, bytes, float | None]]:
    out = {}
    for step in range(1, STEPS + 1):
        for sample in ledger.payloads(0, step):
            out[sample.key] = (sample.trajectory.token_ids, sample.trajectory.logprobs, sample.reward)
    return out


def test_a_run_with_killed_workers_is_the_unbroken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = fixed_lag_config(tmp_path / "quiet")
    with roles_beside(quiet) as ledger:
        run_worker(quiet, 0, ledger, ledger, threading.Event())
    ledger = Ledger(f"sqlite:///{quiet.run.dir}/ledger.sqlite", holder="again")
    ledger.attach(quiet.run.id)
    expected, digests = tokens_and_logprobs(ledger), [v.digest for v in ledger.versions(0)]
    ledger.close()
    assert len(expected) == STEPS * 16 and len(set(digests)) == STEPS + 1

    killed, lives = fixed_lag_config(tmp_path / "killed"), 0
    with roles_beside(killed) as ledger:
        done = False
        while not done:
            monkeypatch.setenv("ROLLBOOK_INCARNATION", f"life-{lives}")
            monkeypatch.setenv("ROLLBOOK_SUPERSEDES", f"life-{lives - 1}" if lives else "")
            # The learner runs in this process too: only the worker's points are armed, one per life.
            failpoints.arm(f"{POINTS[lives]}=raise" if lives < len(POINTS) else "")
            try:
                run_worker(killed, 0, ledger, ledger, threading.Event())
                done = True
            except failpoints.FailpointRaised:
                lives += 1
    assert lives == len(POINTS)
    ledger = Ledger(f"sqlite:///{killed.run.dir}/ledger.sqlite", holder="again")
    ledger.attach(killed.run.id)
    assert tokens_and_logprobs(ledger) == expected
    assert [v.digest for v in ledger.versions(0)] == digests
    ledger.close()


def test_each_sample_says_which_version_sampled_it_and_its_probe_was_the_trainers(tmp_path: Path) -> None:
    config = fixed_lag_config(tmp_path / "run")
    with roles_beside(config) as ledger:
        run_worker(config, 0, ledger, ledger, threading.Event())
        lag = {1: 0, 2: 0, 3: 1}
        for step, version in lag.items():
            for sample in ledger.payloads(0, step):
                assert set(unpack_i32(sample.trajectory.versions)) == {version}
        assert all(len(json.loads(v.probe_json)["logprobs"]) >= 1 for v in ledger.versions(0))
    assert not list((tmp_path / "run" / "spool" / "worker-0").iterdir())


def exemplars() -> set[tuple[str, str]]:
    """Stage and trace of each exemplar of a rollout's duration on this process' page, as a scraper gets it."""
    page = MetricsPage(0, metrics.REGISTRY)
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{page.port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        page.close()
    return {
        (sample.labels["stage"], sample.exemplar.labels["trace_id"])
        for family in families if family.name == "rollbook_rollout_duration_seconds"
        for sample in family.samples if sample.exemplar is not None
    }  # fmt: skip


def test_the_time_of_a_rollout_leads_to_its_trace_where_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    config = fixed_lag_config(tmp_path / "run")
    metrics.expose("worker")
    try:
        before = exemplars()
        with traced() as kept, roles_beside(config) as ledger:
            run_worker(config, 0, ledger, ledger, threading.Event())
            kept_traces = {ids(span)[0] for span in kept.spans("issue")}
        found = exemplars() - before
    finally:
        metrics.hide_all()
    assert 0 < len(kept_traces) < STEPS * 16
    assert {stage for stage, _ in found} == {"generate", "reward", "commit", "total"}
    assert {trace for _, trace in found} <= kept_traces
