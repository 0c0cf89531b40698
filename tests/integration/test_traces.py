"""A run of real processes seen through a collector: one trace a rollout, past the death of its worker."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from otlp_receiver import Received, receiver
from run_support import TinyRun


def test_a_rollout_is_one_trace_whoever_dies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        run = TinyRun(tmp_path, {"worker.after_generate": "crash"})
        run.start()
        assert run.code() == 0, run.tails()
        spans = collector.spans()
    traces: dict[str, list[Received]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    rollouts = {trace: found for trace, found in traces.items() if any(span.name == "issue" for span in found)}
    by_id = {span.span_id: span for span in spans}
    for found in rollouts.values():
        (issue,) = [span for span in found if span.name == "issue"]
        assert issue.parent_id == "" and {span.attributes["slot"] for span in found} == {issue.attributes["slot"]}
        for lease in (span for span in found if span.name == "lease"):
            assert lease.parent_id == issue.span_id and lease.resource["rollbook.component"] == "ledger"
        for span in found:
            if span.name in ("generate", "reward", "submit"):
                assert by_id[span.parent_id].name == "lease" and span.resource["service.instance.id"] == "worker-0"
    killed = [found for found in rollouts.values() if sum(span.name == "lease" for span in found) > 1]
    assert killed, "the slots of the worker that died were leased again"
    for found in killed:
        first, second = sorted((s for s in found if s.name == "lease"), key=lambda s: s.attributes["attempt"])
        assert (first.attributes["attempt"], second.attributes["attempt"]) == (1, 2)
        assert first.attributes["worker"] != second.attributes["worker"]
        done = {span.name for span in found if span.parent_id == second.span_id}
        assert {"generate", "reward", "submit"} <= done
    _check_learner(spans, set(rollouts))
    code, told = run.command("why", str(run.dir), killed[0][0].attributes["slot"], "--json")
    assert code == 0 and killed[0][0].trace_id in told


def _check_learner(spans: list[Received], rollouts: set[str]) -> None:
    """Every step is a trace of its own with links to what it applied; publishing, saving and loading are spans."""
    steps = [span for span in spans if span.name == "step"]
    assert sorted(span.attributes["step"] for span in steps) == [1, 2, 3] and all(span.parent_id == "" for span in steps)
    for step in steps:
        assert set(step.links) <= rollouts and len(set(step.links)) == 2
        assert step.attributes["links"] == step.attributes["rollouts"] == 2
        inside = {span.name for span in spans if span.parent_id == step.span_id}
        assert {"fetch", "train", "weight_publish"} <= inside
    assert len({step.trace_id for step in steps} | rollouts) == len(steps) + len(rollouts)
    assert {"checkpoint", "weight_update"} <= {span.name for span in spans}
    calls = [span for span in spans if span.name.startswith("rollbook.v1.")]
    ids = {span.span_id: span for span in spans}
    served = [span for span in calls if span.resource["rollbook.component"] == "ledger" and span.parent_id in ids]
    assert served and all(ids[span.parent_id].name == span.name for span in served)
