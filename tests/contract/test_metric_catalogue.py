"""The catalogue of metrics: names, units, closed labels, series from the start, and the page that is made of it."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from test_ledger_metrics import EMPTY, READING

from rollbook.core.survival import UNKNOWN
from rollbook.ledger.survival import named_buckets
from rollbook.observe import devices, metrics, targets, tracing
from rollbook.observe.counted import CountedHistogram
from rollbook.observe.devices import DeviceClock, GpuCollector
from rollbook.observe.engine_metrics import EngineCollector
from rollbook.observe.exporter import MetricsPage
from rollbook.observe.ledger_metrics import LedgerCollector, Surroundings
from rollbook.observe.metric_table import BY_NAME, EVERY, SPECS, UNITS, Kind, table_text
from rollbook.observe.targets import Target
from rollbook.rpc import status
from rollbook.v1 import ledger_service_pb2 as pb
from tracing_support import traced

PAGE = Path(__file__).resolve().parents[2] / "dashboards" / "METRICS.md"
NEVER_LABELS = {"prompt", "task", "task_id", "sample", "rollout", "step", "version_id", "host", "port", "address", "exception"}
SHORTENED = ("_ms", "_sec", "_secs", "_s", "_kb", "_mb", "_gb", "_pct", "_percent", "_minutes", "_hours", "_milliseconds")
OPEN_LABELS = {"env", "bucket", "method", "outcome", "reason", "device", "version", "python", "config_sha"}
SERIES_MAX = {"ledger": 500, "worker": 150, "learner": 300, "feeder": 50}


@pytest.fixture
def hidden() -> Iterator[None]:
    metrics.hide_all()
    yield
    metrics.hide_all()


def shown(role: str) -> CollectorRegistry:
    """Registry of a process of this role that has just begun."""
    metrics.hide_all()
    shared = (metrics.RPC_SECONDS, metrics.RPC_FAILURES_TOTAL, metrics.RPC_RETRIES_TOTAL, metrics.RECOVERY_DURATION_SECONDS)
    for one in shared:
        one.clear()
    metrics.expose(role, config_sha="abc", version="1")
    return metrics.REGISTRY


def test_a_name_tells_type_and_unit_and_the_help_is_a_sentence() -> None:
    for spec in SPECS:
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert not spec.name.removesuffix("_total").endswith(SHORTENED), spec.name
        assert not spec.name.endswith(("_count", "_sum", "_bucket", "_info")), spec.name
        measured = {word for word in spec.name.split("_") if word in UNITS} - {"tokens"}  # which are things as well
        assert spec.unit or not measured, f"{spec.name}: the unit stands last"
        assert re.fullmatch(r"[A-Z1].{10,}\.", spec.help), spec.name
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name
        assert spec.roles and set(spec.roles) <= set(EVERY), spec.name


def test_names_are_unique_and_labels_are_closed_sets() -> None:
    assert len(BY_NAME) == len(SPECS)
    for spec in SPECS:
        assert not NEVER_LABELS & set(spec.labels) and not {"run", "role", "worker"} & set(spec.labels)
        for name, values in spec.labels.items():
            assert values or name in OPEN_LABELS, (spec.name, name)
            assert len(set(values)) == len(values) <= 20


@pytest.mark.parametrize("role", EVERY)
def test_every_series_of_closed_labels_is_there_before_anything_happened_and_within_the_budget(role: str, hidden: None) -> None:
    registry = shown(role)
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert len(samples) <= SERIES_MAX[role]
    assert not any(sample.name.endswith("_created") for sample in samples)
    seen = {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}
    for spec in SPECS:
        if role not in spec.roles or spec.sql or spec.of_run or spec.kind is Kind.INFO or not all(spec.labels.values()):
            continue
        if (role, spec.name) in metrics._FROM_READING:
            continue
        own = metrics._OWN.get(spec.name, {})
        suffix = "_count" if spec.kind is Kind.HISTOGRAM else ""
        for values in itertools.product(*(own.get((role, name), known) for name, known in spec.labels.items())):
            labels = tuple(sorted(zip(spec.labels, values, strict=True)))
            assert (spec.full_name + suffix, labels) in seen


def test_what_the_ledger_shows_stands_in_the_catalogue_with_its_labels_within_the_budget(hidden: None) -> None:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(lambda: READING, Surroundings(env="e")))
    families = {family.name: family for family in registry.collect()}
    for family in families.values():
        name = family.name.removeprefix("rollbook_") + ("_total" if family.type == "counter" else "")
        spec = BY_NAME[name]
        assert family.type == spec.kind.value and family.documentation == spec.help and "ledger" in spec.roles
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), sample
            assert all(sample.labels[label] in values for label, values in spec.labels.items() if values), sample


def test_a_server_that_has_seen_everything_is_within_the_budget(hidden: None) -> None:
    """Every bucket of every dimension has slots, every reason has dropped some, the database is PostgreSQL."""
    def row(bucket: str) -> dict[str, Any]:
        return {"bucket": bucket, "opened": 9, "finished": 9, "trained": 5, "waiting": 0, "dropped": {"failed": 4}, "rewarded": 5,
                "rewarded_sum": 1.0, "reward_sum": 1.0}  # fmt: skip

    buckets = {name: [*names, UNKNOWN] for name, names in named_buckets().items()} | {"task": ["a", "b"]}
    survival = EMPTY | {
        "dimensions": {name: [row(bucket) for bucket in names] for name, names in buckets.items()},
        "dropped": dict.fromkeys(BY_NAME["slots_dropped_total"].labels["reason"], 1),
    }
    oldest_s = dict.fromkeys(BY_NAME["ledger_oldest_task_age_seconds"].labels["state"], 1.0)
    full = READING | {
        "survival": survival, "oldest_s": oldest_s, "head": 1, "last_step_at_s": 1.0, "checkpoint_at_s": 1.0,
        "database": {"oldest_xmin_age": 1, "dead_tuples": 1},
        "retention": {"groups": 1, "low_watermark": 1}, "writer": {"conflicts": 1, "commits": 1, "waiting": 1},
    }  # fmt: skip
    registry = CollectorRegistry()
    registry.register(LedgerCollector(lambda: full, Surroundings(env="e")))
    own = shown("ledger")
    for method in pb.DESCRIPTOR.services_by_name["LedgerService"].methods:
        for code in status.TABLE.values():
            metrics.rpc_ended(method.name, 0.1, code.name)
    families = list(registry.collect())
    known = {spec.full_name for spec in SPECS if "ledger" in spec.roles and (spec.sql or spec.of_run)}
    assert known <= {family.name + ("_total" if family.type == "counter" else "") for family in families}, "nothing is left out"
    n_own = sum(len(family.samples) for family in own.collect())
    assert 400 < sum(len(family.samples) for family in families) + n_own < SERIES_MAX["ledger"]


def test_the_page_is_the_catalogue() -> None:
    made = table_text()
    assert PAGE.read_text() == made, "write it again: python -m rollbook.observe.metric_table > dashboards/METRICS.md"


@pytest.mark.parametrize("role", EVERY)
def test_promtool_finds_nothing_to_say(role: str, hidden: None) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus): the names were checked by our own rules only")
    text = generate_latest(shown(role))
    if role == "ledger":
        registry = CollectorRegistry()
        registry.register(LedgerCollector(lambda: READING, Surroundings(env="e")))
        text += generate_latest(registry)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_observation_carries_its_trace_only_where_the_scraper_asks_for_it(hidden: None) -> None:
    registry = shown("worker")
    with traced():
        exemplar = tracing.exemplar(f"00-{'a' * 32}-{'b' * 16}-01")
    metrics.ROLLOUT_DURATION_SECONDS.labels("total").observe(3.0, exemplar)
    assert b'trace_id="' + b"a" * 32 in openmetrics(registry)
    assert b"trace_id" not in generate_latest(registry)


def test_time_that_is_neither_generation_nor_a_weight_update_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(devices, "host", lambda: SimpleNamespace(monotonic=lambda: now[0]))
    clock, child = DeviceClock("actor"), metrics.GPU_SECONDS_TOTAL.labels
    before = {name: child("actor", name)._value.get() for name in ("idle", "weight_sync", "generate")}

    def spent() -> dict[str, float]:
        return {name: child("actor", name)._value.get() - value for name, value in before.items()}

    now[0] += 2
    with clock.busy("weight_sync"):
        now[0] += 3
        clock.settle()
    now[0] += 4
    with clock.busy():
        now[0] += 5
        with clock.busy("weight_sync"):
            now[0] += 1
    now[0] += 8
    clock.settle()
    assert spent() == {"idle": 14.0, "weight_sync": 4.0, "generate": 0.0}


class _Nvml:
    """What NVML answers on a machine with two GPUs."""

    class NVMLError(Exception):
        pass

    broken = False

    def nvmlDeviceGetCount(self) -> int:
        if self.broken:
            raise self.NVMLError("lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=10 + handle, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 * handle)


def test_gpus_are_shown_as_far_as_the_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml()
    registry = CollectorRegistry()
    registry.register(GpuCollector("learner", nvml))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    labels = {"pool": "learner", "device": "1"}
    assert registry.get_sample_value("rollbook_gpu_memory_used_bytes", labels) == 11
    assert registry.get_sample_value("rollbook_gpu_utilization_ratio", labels) == 0.5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert registry.get_sample_value("rollbook_gpu_memory_used_bytes", labels) is None
    assert registry.get_sample_value("rollbook_gpu_memory_capacity_bytes", labels | {"device": "0"}) == 100
    nvml.broken = True
    assert list(registry.collect()) == []


def test_an_engines_own_metrics_stand_beside_ours_and_nothing_stands_there_without_one() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    ours.register(EngineCollector(theirs))
    Counter("python_things", "Not an engine's.", registry=theirs).inc()
    assert generate_latest(ours) == b""
    Counter("vllm:prompt_tokens", "Prompt tokens.", registry=theirs).inc(3)
    assert ours.get_sample_value("vllm:prompt_tokens_total") == 3


OPENMETRICS = "application/openmetrics-text"


@pytest.mark.parametrize(("accept", "form"), [
    (f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPENMETRICS),
    (OPENMETRICS, OPENMETRICS), (f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8", OPENMETRICS),
    *((f"{OPENMETRICS};version=1.0.0;escaping={how}", OPENMETRICS) for how in ("underscores", "dots", "values")),
    *((f"text/plain;version=1.0.0;escaping={how}", "text/plain") for how in ("underscores", "dots", "values", "allow-utf-8")),
    ("", "text/plain"), (f'{OPENMETRICS};version="1.0.0"', "text/plain"), (f"{OPENMETRICS};version=new", "text/plain"),
])  # fmt: skip
def test_a_name_with_a_colon_is_sent_as_it_is_whatever_a_scraper_accepts(accept: str, form: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests.", ["engine"], registry=registry).labels("0").set(3)
    page = MetricsPage(0, registry)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{page.port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30) as answer:
            lines, content_type = answer.read().decode().splitlines(), answer.headers["Content-Type"]
    finally:
        page.close()
    assert lines[1:3] == ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 3.0']
    assert content_type.startswith(form) and (lines[-1] == "# EOF") == (form == OPENMETRICS)


def test_only_the_living_of_this_machine_are_listed_and_who_ends_leaves(tmp_path: Path) -> None:
    worker = Target("worker-0", "worker", "here", "127.0.0.1:1", "a")
    others = [Target("learner", "learner", "here", "127.0.0.1:2", "b"), Target("worker-1", "worker", "there", "127.0.0.1:3", "c")]
    for target in (worker, *others):
        targets.announce(tmp_path, target)
    (tmp_path / "supervisor" / "metrics" / "torn").write_text('{"name": "to')
    assert [target.name for target in targets.announced(tmp_path)] == ["learner", "worker-0", "worker-1"]
    assert targets.service_discovery(tmp_path, "r", "here", {"a", "c"}) == [
        {"targets": ["127.0.0.1:1"], "labels": {"run": "r", "role": "worker", "worker": "worker-0"}}
    ]
    successor = Target("worker-0", "worker", "here", "127.0.0.1:4", "d")
    targets.announce(tmp_path, successor)
    targets.withdraw(tmp_path, worker)
    assert successor in targets.announced(tmp_path), "a successor's entry is not the dead one's to take"
    targets.withdraw(tmp_path, successor)
    assert successor not in targets.announced(tmp_path)


def test_counts_become_a_histogram() -> None:
    spec = BY_NAME["offpolicy_importance_ratio"]
    histogram, registry = CountedHistogram(spec, ("token",)), CollectorRegistry()
    registry.register(histogram)
    counts = [0] * (len(spec.buckets) + 1)
    counts[0], counts[6], counts[-1] = 2, 3, 1
    histogram.add(counts, 23.0)
    histogram.add(counts, 23.0)

    def bucket(le: str) -> float | None:
        return registry.get_sample_value(f"{spec.full_name}_bucket", {"level": "token", "le": le})

    assert (bucket("0.1"), bucket("0.95"), bucket("1.0"), bucket("10.0"), bucket("+Inf")) == (4, 4, 10, 10, 12)
    assert registry.get_sample_value(f"{spec.full_name}_sum", {"level": "token"}) == 46
