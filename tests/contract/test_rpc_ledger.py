"""The real ledger behind the real wire: lost and repeated messages, restarts, takeover, against what SQL then holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger_support import STREAM, Scene, group, run_record, sample_for, trajectory, version
from rpc_support import DeliverTwice, LoseReplies, in_thread

from rollbook.core.errors import Conflict, CursorMoved, Fenced, NotReady, RoleHeld, ServerFenced, UnknownSlot
from rollbook.core.idempotency import payload_digest
from rollbook.core.records import (
    Blame,
    Cursor,
    FailureReport,
    PlanOutcome,
    RewardStatus,
    Role,
    SlotKey,
    SubmitOutcome,
    ToolCall,
)
from rollbook.ledger.dialects import sqlite_module
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.address import address_in, write_address
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import RunningServer, serve
from rollbook.v1 import ledger_service_pb2 as pb

RUN = run_record("run")


def open_ledger(folder: Path, name: str = "ledger") -> Ledger:
    ledger = Ledger(f"sqlite:///{folder}/{name}.sqlite", holder=f"server-{name}")
    ledger.open_run(RUN)
    return ledger


def serve_at(ledger: Ledger, **options: Any) -> RunningServer:
    return serve(ledger, "127.0.0.1:0", run_id=RUN.run_id, threads=8, **options)


class Wired:
    """A ledger on a file, its server and a client."""

    def __init__(self, folder: Path, name: str = "ledger", **options: Any) -> None:
        self.path = folder / f"{name}.sqlite"
        self.ledger = open_ledger(folder, name)
        self.server = serve_at(self.ledger, **options)
        self.client = LedgerClient(self.server.address, RUN.run_id, backoff_s=0.01, retry_total_s=20.0)

    def close(self) -> None:
        self.client.close()
        self.server.stop(0.0)
        self.ledger.close()

    def scene(self) -> Scene:
        return Scene(self.client, RUN)  # type: ignore[arg-type]

    def counts(self) -> dict[str, int]:
        """Rows per table, events aside: they record that a message came, which a repeated one may do twice."""
        with sqlite_module().connect(self.path) as db:
            tables = [row[0] for row in db.execute("select name from sqlite_master where type = 'table' order by name")]
            return {t: db.execute(f'select count(*) from "{t}"').fetchone()[0] for t in tables if t != "event"}


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Wired]:
    made = Wired(tmp_path)
    yield made
    made.close()


def live(scene: Scene) -> dict[str, Any]:
    """Every verb once or more, in the order of a run; returns what a reader sees at the end."""
    ledger = scene.ledger
    scene.feed(4)
    assert ledger.feed_demand(6) >= 0
    grants = scene.lease(4)
    ledger.heartbeat(scene.incarnation, scene.head(), [(g.key, g.token) for g in grants])
    call = ToolCall(grants[0].key, 0, "9" * 64, trajectory(1), "python", "{}")
    assert ledger.record_tool_call(call, grants[0].token).response_json is None
    assert ledger.record_tool_call(replace(call, response_json="2"), grants[0].token).response_json == "2"
    results = ledger.submit_samples([sample_for(g, scene.incarnation) for g in grants])
    assert {r.outcome for r in results} <= {SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED}
    (lost, *_) = scene.lease(1)
    report = FailureReport(lost.key, lost.token, scene.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "gone")
    ledger.report_failures([report])
    plan = ledger.plan_step(scene.learner, 0, 1)
    scene.finish(1)
    checkpoint = scene.checkpoint(1)
    ledger.mark_checkpoint(scene.learner, 0, 1, "corrupt")
    ledger.retry_group(lost.key.ordinal, "the cause is repaired")
    ledger.quarantine_group(3, "a human said so")
    assert ledger.renew_role(scene.learner) == scene.learner
    seen = {
        "plan": plan, "checkpoint": checkpoint, "stored": ledger.read_plan(0, 1), "versions": ledger.versions(0),
        "cursor": ledger.cursor(STREAM), "tool_calls": ledger.tool_calls(grants[0].key), "resume": ledger.resume_point(),
        "payloads": list(ledger.payloads(0, 1)), "sample": ledger.sample(grants[0].key), "audit": ledger.audit(),
        "metrics": [m["loss"] for m in ledger.step_metrics(0)], "slots": ledger.run_status()["slots"],
        "lengths": ledger.survival()["dimensions"]["length"],
    }  # fmt: skip
    assert seen["audit"] == []
    assert ledger.explain(grants[0].key)
    seen["lineage"] = ledger.fork_lineage(scene.learner, 0, 0, None, 0.125, True)
    assert seen["lineage"].number == 1 and ledger.audit() == []
    ledger.drain()
    ledger.release_role(scene.feeder)
    return seen


def test_a_run_over_the_wire_is_the_run_made_directly(tmp_path: Path, wired: Wired) -> None:
    with open_ledger(tmp_path, "direct") as direct:
        assert live(wired.scene()) == live(Scene(direct, RUN))


def test_every_rpc_delivered_twice_is_delivered_once(tmp_path: Path, wired: Wired) -> None:
    twice = DeliverTwice()
    doubled = Wired(tmp_path, "doubled", interceptors=(twice,))
    try:
        assert live(doubled.scene()) == live(wired.scene())
        assert doubled.counts() == wired.counts()
    finally:
        doubled.close()
    methods = pb.DESCRIPTOR.services_by_name["LedgerService"].methods
    assert twice.methods == {m.name for m in methods if not m.server_streaming}


@pytest.mark.parametrize(
    "method", ["OpenRun", "AcquireRole", "RegisterWorker", "AppendGroups", "LeaseSlots", "SubmitSamples", "PlanStep",
               "ReportFailures", "RecordToolCall", "FinishPlan", "PublishVersion", "CommitCheckpoint", "MarkCheckpoint",
               "ForkLineage"],
)  # fmt: skip
def test_an_answer_lost_after_the_commit_changes_nothing(tmp_path: Path, wired: Wired, method: str) -> None:
    losing = LoseReplies(method)
    lossy = Wired(tmp_path, "lossy", interceptors=(losing,))
    try:
        assert live(lossy.scene()) == live(wired.scene())
        assert lossy.counts() == wired.counts()
        assert losing.left == 0
    finally:
        lossy.close()


def test_a_submission_whose_answer_was_lost_is_answered_as_replayed(tmp_path: Path) -> None:
    lossy = Wired(tmp_path, interceptors=(LoseReplies("SubmitSamples"),))
    try:
        scene = lossy.scene()
        scene.feed(1)
        assert set(scene.submit(scene.lease())) == {SubmitOutcome.REPLAYED}
    finally:
        lossy.close()


def test_payloads_arrive_as_they_were_submitted(wired: Wired) -> None:
    scene = wired.scene()
    scene.feed(2)
    submitted = {g.key: sample_for(g, scene.incarnation, reward=float(g.key.sibling)) for g in scene.lease()}
    wired.client.submit_samples(list(submitted.values()))
    plan = scene.plan(1)
    samples = list(wired.client.payloads(0, 1))
    assert [s.key for s in samples] == [item.key for item in plan.items]
    for sample in samples:
        sent = submitted[sample.key]
        assert (sample.trajectory, sample.reward) == (sent.trajectory, sent.reward)
        assert sample.payload_digest == payload_digest(sent)


def test_refusals_of_the_real_ledger_keep_their_class(wired: Wired) -> None:
    scene = wired.scene()
    scene.feed(1)
    with pytest.raises(NotReady):
        scene.plan(1)
    with pytest.raises(RoleHeld, match="learner-1"):
        wired.client.acquire_role(Role.LEARNER, "learner-2", 60.0)
    with pytest.raises(CursorMoved):
        wired.client.append_groups(scene.feeder, Cursor(STREAM, 9, "{}", False), Cursor(STREAM, 10, "{}", False), [group(9)])
    with pytest.raises(UnknownSlot):
        wired.client.explain(SlotKey(99, 0))
    (grant, *_) = scene.lease()
    call = ToolCall(grant.key, 0, "9" * 64, trajectory(1), "python", "{}")
    wired.client.record_tool_call(call, grant.token)
    with pytest.raises(Conflict):
        wired.client.record_tool_call(replace(call, request_digest="8" * 64), grant.token)


def test_a_learner_that_was_replaced_is_fenced_and_the_server_goes_on(wired: Wired) -> None:
    scene = wired.scene()
    wired.client.acquire_role(Role.LEARNER, "learner-2", 60.0, "learner-1")
    with pytest.raises(Fenced):
        wired.client.publish_version(scene.learner, version(1))
    with pytest.raises(Fenced):
        wired.client.finish_plan(scene.learner, 0, 1, PlanOutcome.TRAINED, "", "{}")
    assert wired.client.versions(0) == [version(0)]
    assert not wired.server.fenced


def test_a_server_whose_epoch_was_superseded_answers_nothing_any_more(tmp_path: Path) -> None:
    told = threading.Event()
    wired = Wired(tmp_path, on_fenced=told.set)
    try:
        scene = wired.scene()
        scene.feed(1)
        grants = scene.lease()
        with sqlite_module().connect(wired.path) as db:
            assert db.execute("update fence set epoch = epoch + 1 where role = 'ledger'").rowcount == 1
        impatient = LedgerClient(wired.server.address, RUN.run_id, retry_total_s=0.0)
        for call in (lambda: impatient.submit_samples([sample_for(grants[0], scene.incarnation)]), impatient.resume_point):
            with pytest.raises(ServerFenced):
                call()
        impatient.close()
        assert told.wait(10)
        assert wired.counts()["sample"] == 0
    finally:
        wired.close()


def test_a_server_restart_on_another_port_loses_no_acknowledged_sample_and_doubles_none(tmp_path: Path) -> None:
    first = open_ledger(tmp_path)
    server = serve_at(first)
    write_address(tmp_path, server.address)
    client = LedgerClient(address_in(tmp_path), RUN.run_id, backoff_s=0.01, backoff_max_s=0.1)
    scene = Scene(client, RUN)  # type: ignore[arg-type]
    scene.feed(4)
    grants = scene.lease(4)
    assert scene.submit(grants[:1]) == [SubmitOutcome.ACCEPTED]
    server.stop(0.0)
    first.close(release=False)
    thread, outcome = in_thread(lambda: scene.submit(grants))
    second = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite", holder="server-2", supersede="server-ledger")
    second.open_run(RUN)
    successor = serve_at(second)
    assert successor.address != server.address
    write_address(tmp_path, successor.address)
    thread.join(30)
    assert outcome == [[SubmitOutcome.REPLAYED] + [SubmitOutcome.ACCEPTED] * (len(grants) - 1)]
    assert client.run_status()["slots"]["submitted"] == len(grants)
    assert client.audit() == []
    client.close()
    successor.stop(0.0)
    second.close()
