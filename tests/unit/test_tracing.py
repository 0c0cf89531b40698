"""Tracing: off unless asked for, W3C in and out, decisions that are obeyed, and collectors that are of no use."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from otlp_receiver import hanging, receiver, refusing
from rollbook.core.host import host
from rollbook.observe import log as logs
from rollbook.observe import tracing
from rollbook.observe.metrics import REGISTRY
from rollbook.observe.tracing_sdk import Pipeline, exporter_named
from run_support import environment, wait_until
from tracing_support import ids, traced

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"
OTEL = (
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED",
    "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in OTEL:
        monkeypatch.delenv(name, raising=False)
    yield
    tracing.close()


@pytest.mark.parametrize(
    ("environ", "exporter"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": " Console "}, "console"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a"}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp"),
    ],
)
def test_the_standard_variables_alone_decide_whether_anything_is_traced(environ: dict[str, str], exporter: str) -> None:
    assert tracing.wanted(environ) == exporter


def test_a_process_that_does_not_trace_does_not_load_the_sdk() -> None:
    code = (
        "import sys, rollbook.rpc.client, rollbook.rpc.server, rollbook.ledger.ledger\n"
        "from rollbook.observe import tracing\n"
        "tracing.configure('worker', 'demo', 'worker-0')\n"
        "with tracing.span('a') as a: tracing.record('b', a.traceparent, 0.0); assert tracing.exemplar() is None\n"
        "print(tracing.enabled(), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    env = {name: value for name, value in environment().items() if not name.startswith("OTEL_")}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.split() == ["False", "[]"]


def test_nothing_costs_and_nothing_happens_while_tracing_is_off() -> None:
    assert tracing.span("a") is tracing.span("b") is tracing.within(PARENT) is tracing.NOTHING
    assert (tracing.current(), tracing.exemplar(PARENT), tracing.issue("run", 0, 2)) == ("", None, [])
    assert tracing.of_attempt(PARENT, 3) == PARENT


@pytest.mark.parametrize(
    "text",
    ["", "00", PARENT[:-1], PARENT + "0", PARENT.upper(), f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01",
     f"ff-{'a' * 32}-{'b' * 16}-01", PARENT + "\n", "00-ab-cd-01"],
)  # fmt: skip
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert not tracing.is_traceparent(text) and not tracing.is_sampled(text) and tracing.trace_id(text) == ""
    with traced() as kept:
        tracing.record("lost", text, 0.0)
        with tracing.span("of its own", parent=text), tracing.within(text):
            pass
        assert ids(kept.only("of its own"))[2] == "" and kept.spans("lost") == []


def test_a_span_goes_on_in_the_trace_it_is_given_and_hands_itself_on() -> None:
    with traced() as kept:
        with tracing.span("outer", parent=PARENT) as outer:
            assert tracing.current() == outer.traceparent and tracing.is_traceparent(outer.traceparent)
            assert tracing.exemplar() == {"trace_id": "a" * 32}
            with tracing.span("inner", attributes={"n": 1}) as inner:
                inner.set(more="x")
            with tracing.within(f"00-{'c' * 32}-{'d' * 16}-01"), tracing.span("elsewhere"):
                pass
            assert tracing.current() == outer.traceparent
        assert tracing.current() == "" and tracing.exemplar() is None
        assert ids(kept.only("outer"))[::2] == ("a" * 32, "b" * 16)
        assert ids(kept.only("inner"))[::2] == ("a" * 32, tracing.span_id(outer.traceparent))
        assert ids(kept.only("elsewhere"))[::2] == ("c" * 32, "d" * 16)
        assert dict(kept.only("inner").attributes or {}) == {"n": 1, "more": "x"}


def test_an_error_is_the_outcome_of_the_span_it_leaves() -> None:
    with traced() as kept:
        with pytest.raises(KeyError), tracing.span("broken"):
            raise KeyError("a")
        with pytest.raises(KeyError), tracing.span("told") as told:
            told.fail("Fenced")
            raise KeyError("b")
        for name, outcome in (("broken", "KeyError"), ("told", "Fenced")):
            span = kept.only(name)
            assert not span.status.is_ok and (span.attributes or {})["outcome"] == outcome


def test_what_a_parent_has_decided_is_obeyed_whatever_this_process_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.0")
    with traced() as kept:
        tracing.record("kept", PARENT, 0.0)
        tracing.record("not kept", UNSAMPLED, 0.0)
        (root,) = tracing.issue("demo", 4, 1)
        root.end()
        assert tracing.is_traceparent(root.traceparent) and not tracing.is_sampled(root.traceparent)
        tracing.record("of an unsampled rollout", root.traceparent, 0.0)
        with tracing.span("unsampled"):
            assert tracing.exemplar() is None
        assert [span.name for span in kept.spans()] == ["kept"]
        assert tracing.exemplar(PARENT) == {"trace_id": "a" * 32} and tracing.exemplar(UNSAMPLED) is None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
    with traced() as kept:
        tracing.record("not kept", UNSAMPLED, 0.0)
        assert kept.spans() == []


def test_a_finished_span_has_the_times_it_was_measured_with() -> None:
    with traced() as kept:
        now = host().monotonic()
        tracing.record("generate", PARENT, now - 3.0, now - 1.0, failed="timeout", attributes={"slot": "1.0"})
        span = kept.only("generate")
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.0, abs=1e-3)
        assert not span.status.is_ok and (span.attributes or {})["slot"] == "1.0"


def test_each_slot_has_a_trace_and_each_attempt_a_span_that_everybody_can_name() -> None:
    with traced() as kept:
        issued = tracing.issue("demo", 7, 2)
        assert kept.spans() == [], "what is not stored is never seen"
        for span in issued:
            span.end()
        stored = [span.traceparent for span in issued]
        assert len({tracing.trace_id(one) for one in stored}) == 2
        first, second = tracing.of_attempt(stored[0], 1), tracing.of_attempt(stored[0], 2)
        assert first == tracing.of_attempt(stored[0], 1) != second and tracing.is_traceparent(first)
        assert tracing.trace_id(first) == tracing.trace_id(second) == tracing.trace_id(stored[0])
        tracing.record_attempts([(stored[0], first, {"attempt": 1}), (stored[0], second, {"attempt": 2})])
        found = [ids(span) for span in kept.spans("lease")]
        assert found == [(tracing.trace_id(one), tracing.span_id(one), tracing.span_id(stored[0])) for one in (first, second)]
        tracing.record("generate", first, 0.0)
        assert ids(kept.only("generate"))[1] not in (tracing.span_id(first), tracing.span_id(second)), "a given id is used once"


@pytest.mark.parametrize(("n", "linked"), [(3, 3), (tracing.LINKS_MAX, tracing.LINKS_MAX), (200, tracing.LINKS_MAX)])
def test_links_are_capped_and_their_number_is_said(n: int, linked: int) -> None:
    rollouts = [f"00-{i + 1:032x}-{'b' * 16}-01" for i in range(n)]
    with traced() as kept:
        with tracing.span("step"):
            tracing.link([*rollouts, UNSAMPLED, ""])
        step = kept.only("step")
        assert [f"{link.context.trace_id:032x}" for link in step.links] == [tracing.trace_id(r) for r in rollouts[:linked]]
        assert dict(step.attributes or {}) == {"rollouts": n + 2, "rollouts_sampled": n, "links": linked}


def test_tracing_draws_from_no_global_generator() -> None:
    with receiver() as collector, sending(collector.endpoint, timeout_s="60"):
        random.seed(5)
        before = random.getstate()
        with tracing.span("a"):
            pass
        [span.end() for span in tracing.issue("demo", 0, 3)]
        tracing.close(60.0)
        assert random.getstate() == before, "the learner's generators are part of its checkpoint"
        assert len(collector.spans()) == 4


def dropped(signal: str = "traces") -> float:
    return REGISTRY.get_sample_value("rollbook_telemetry_dropped_total", {"signal": signal}) or 0.0


@contextmanager
def sending(endpoint: str, timeout_s: str = "1", queue: str = "64") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", timeout_s)
        patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", queue)
        patch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing.use(Pipeline(exporter_named("otlp"), "worker", "demo", "worker-0"))
        yield


def test_spans_reach_a_collector_with_what_made_them() -> None:
    before = dropped()
    with receiver() as collector, sending(collector.endpoint, timeout_s="60"):
        with tracing.span("step"):
            pass
        tracing.close(60.0)
        (span,) = collector.spans()
        said = {"rollbook.run": "demo", "service.instance.id": "worker-0", "service.name": "rollbook-worker"}
        assert said.items() <= span.resource.items() and dropped() == before


@contextmanager
def failing() -> Iterator[str]:
    with receiver(500) as collector:
        yield collector.endpoint


@pytest.mark.parametrize("useless", [hanging, refusing, failing], ids=["hangs", "refuses", "answers 500"])
def test_a_collector_that_is_of_no_use_costs_its_spans_and_nothing_else(useless: object) -> None:
    """More spans than fit are made at once; none is waited for, each is counted, the end is bounded."""
    endpoint: AbstractContextManager[str] = useless()  # type: ignore[operator]
    n, before = 500, dropped()
    with endpoint as url, sending(url):
        done = threading.Event()

        def work() -> None:
            for i in range(n):
                tracing.record("generate", PARENT, 0.0, attributes={"i": i})
            done.set()

        host().thread(work, "work").start()
        assert done.wait(60.0), "making spans waited for the collector"
        assert dropped() - before >= n - 64 - 16 * 2, "the queue is bounded"
        wait_until("every span is counted as dropped", lambda: dropped() - before == n, 90.0)
        closing = host().thread(tracing.close, "closing")
        closing.start()
        closing.join(60.0)
        assert not closing.is_alive() and not tracing.enabled()


def test_what_is_wrong_with_the_exporter_is_logged_and_traces_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.ERROR):
        tracing.configure("worker", "demo", "worker-0")
    assert not tracing.enabled() and "install opentelemetry-exporter-otlp-proto-http" in caplog.text


def test_a_collectors_key_is_not_left_to_what_the_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    tracing.configure("worker", "demo", "worker-0")
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in host().environ


def _lines(code: str, **env: str) -> list[str]:
    begin = "import logging\nfrom rollbook.observe import log as logs, tracing\nlogs.configure('worker')\n"
    whole = begin + "log = logging.getLogger('a')\n" + code
    said = subprocess.run(
        [sys.executable, "-c", whole], env=environment(**env), capture_output=True, text=True, timeout=100, check=True
    )
    return said.stderr.splitlines()


def test_a_json_line_says_when_what_who_and_in_which_trace() -> None:
    code = (
        "logs.use_format('json'); logs.bind(run='demo', worker='worker-0', policy_version=3)\n"
        "from rollbook.observe.tracing_sdk import Pipeline, exporter_named\n"
        "tracing.use(Pipeline(exporter_named('console'), 'worker', 'demo', 'worker-0'))\n"
        f"with tracing.span('a', parent='{PARENT}'): log.warning('slow %s', 'x', extra={{'event': 'slow', 'slot': '1.0'}})\n"
        "log.info('later')"
    )
    first, second = map(json.loads, _lines(code))
    assert first.pop("ts").endswith("Z") and len(first.pop("span_id")) == 16
    assert first == {
        "level": "warning", "event": "slow", "message": "slow x", "logger": "a", "component": "worker", "run": "demo",
        "worker": "worker-0", "policy_version": 3, "slot": "1.0", "trace_id": "a" * 32,
    }  # fmt: skip
    assert second["level"] == "info" and {"event", "trace_id", "span_id"}.isdisjoint(second)


def test_a_line_with_a_number_that_json_lacks_is_still_json() -> None:
    extra = "{'loss': float('nan'), 'lr': 0.5, 'fine': {'b': 1.5}, 'parts': {'a': float('inf')}, '_of_a_library': 7}"
    (line,) = _lines(f"logs.use_format('json'); log.info('said', extra={extra})")
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["loss"], found["lr"], found["fine"], found["parts"]) == ("nan", 0.5, {"b": 1.5}, "{'a': inf}")
    assert "_of_a_library" not in found, "what a library puts on every record is no field of ours"


@pytest.mark.parametrize(
    ("configured", "env", "is_json"),
    [
        ("text", {}, False),
        ("json", {}, True),
        ("text", {"ROLLBOOK_LOG": "json"}, True),
        ("json", {"ROLLBOOK_LOG": "text"}, False),
    ],
)
def test_a_file_gets_the_configured_format_unless_the_environment_names_one(
    configured: str, env: dict[str, str], is_json: bool
) -> None:
    (line,) = _lines(f"logs.use_format('{configured}'); log.info('said', extra={{'event': 'e'}})", **env)
    assert line.startswith("{") == is_json
    assert is_json or ("INFO    worker   said  event=e" in line)


def test_people_at_a_terminal_get_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLBOOK_LOG", raising=False)
    monkeypatch.setattr(logs, "_handler", logging.StreamHandler(_Terminal()))
    monkeypatch.setattr(logs, "_bound", {"component": "worker"})
    logs.use_format("json")
    assert logs._handler is not None and type(logs._handler.formatter).__name__ == "_Text"


def test_a_line_that_no_disk_takes_is_counted_and_costs_nothing_else() -> None:
    code = (
        "import logging\nfrom rollbook.observe import log as logs, metrics\nlogs.configure('worker')\n"
        "for i in range(3): logging.getLogger('a').warning('lost')\n"
        "print(metrics.REGISTRY.get_sample_value('rollbook_telemetry_dropped_total', {'signal': 'logs'}))"
    )
    with Path("/dev/full").open("wb") as full:
        said = subprocess.run(
            [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=full, text=True, timeout=100
        )
    assert said.stdout == "3.0\n"


class _Terminal:
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        """Nothing."""
