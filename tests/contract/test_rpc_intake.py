"""What the fuzzer found, kind by kind: a request is refused before anything is done with it, or by the verb that can judge it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ledger_support import STREAM, Scene, group, run_record, sample_for, term_of, trajectory, version
from rpc_support import CALLS, RUN, RUN_ID, CannedLedger, in_thread, served

from ledger_bench import Bench
from rollbook.core.bounds import JSON_DEPTH_MAX, SIBLINGS_MAX, inside, json_object
from rollbook.core.errors import DeadlineExceeded, Fenced, InvalidRequest, NotFound
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import (
    Blame,
    Checkpoint,
    Cursor,
    FailureReport,
    PlanOutcome,
    RewardStatus,
    Role,
    SlotKey,
    SubmitOutcome,
    ToolCall,
)
from rollbook.rpc import convert, intake
from rollbook.rpc.client import LedgerClient
from rollbook.v1 import ledger_pb2, ledger_service_pb2

SERVICE = ledger_service_pb2.DESCRIPTOR.services_by_name["LedgerService"]
DEEP = '{"a":' * 5000 + "1" + "}" * 5000


def delivered(server: Any, method: str, data: bytes) -> tuple[grpc.StatusCode, dict[str, str]]:
    with grpc.insecure_channel(server.address) as channel:
        streaming = SERVICE.methods_by_name[method].server_streaming
        call = (channel.unary_stream if streaming else channel.unary_unary)(f"/{SERVICE.full_name}/{method}")
        try:
            answer = call(data, timeout=30)
            return (grpc.StatusCode.OK if not streaming or list(answer) is not None else grpc.StatusCode.OK), {}
        except grpc.RpcError as refused:
            return refused.code(), dict(refused.trailing_metadata())


@pytest.mark.parametrize("method", [m.name for m in SERVICE.methods])
def test_bytes_that_are_no_message_are_the_senders_error(method: str) -> None:
    ledger = CannedLedger()
    with served(ledger) as server:
        for data in (b"\xff" * 9, b"\x0b" * 30_000, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xed\xa0"):
            code, metadata = delivered(server, method, data)
            assert (code, metadata["rollbook-error"]) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
    assert ledger.calls == []


def test_bytes_that_are_no_health_check_are_the_senders_error_too() -> None:
    with served(CannedLedger()) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff" * 9, timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_can_still_be_watched() -> None:
    with served(CannedLedger()) as server, grpc.insecure_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        watching = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=30)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()


def test_a_request_within_bounds_reaches_the_ledger_unchanged() -> None:
    ledger = CannedLedger()
    with served(ledger) as server:
        request = ledger_service_pb2.OpenRunRequest(run_id=RUN_ID, run=convert.run_message(RUN), accept=["learner.lr"])
        assert delivered(server, "OpenRun", request.SerializeToString())[0] is grpc.StatusCode.OK
    assert ledger.calls == [("open_run", (RUN,), {"accept": ("learner.lr",)})]
    assert CALLS["open_run"][0] == (RUN,)


def test_a_call_whose_caller_has_gone_before_a_thread_was_free_is_not_begun() -> None:
    """Or a server behind its callers would only ever work for those who are gone."""
    going_on, begun = threading.Event(), threading.Event()

    def held(stream: str) -> Cursor:
        begun.set()
        assert going_on.wait(30.0)
        return Cursor(stream, 0, "{}", False)

    ledger = CannedLedger(cursor=held)
    with served(ledger, threads=1) as server, LedgerClient(server.address, RUN_ID, timeout_s=60.0) as patient:
        thread, outcome = in_thread(lambda: patient.cursor("one"))
        assert begun.wait(30.0)
        with LedgerClient(server.address, RUN_ID, timeout_s=0.2, retry_total_s=0.0) as hasty:
            with pytest.raises(DeadlineExceeded):
                hasty.feed_demand(1)
        going_on.set()
        thread.join(30.0)
        assert outcome == [Cursor("one", 0, "{}", False)]
        assert patient.resume_point().lineage == 0
    assert [verb for verb, _, _ in ledger.calls] == ["cursor", "resume_point"]


V, S, H = ledger_pb2.PolicyVersion, ledger_pb2.SlotKey, ledger_service_pb2.HeartbeatRequest
REFUSED: dict[str, tuple[Any, str]] = {
    "a NUL in a name": (ledger_service_pb2.CursorRequest(stream="a\0"), "NUL"),
    "a name wider than its column": (ledger_service_pb2.CursorRequest(stream="x" * 201), "201 characters; at most 200"),
    "a NUL in a list of names": (ledger_service_pb2.OpenRunRequest(accept=["ok", "\0"]), "NUL"),
    "a number wider than its column": (ledger_service_pb2.ReadPlanRequest(step=2**31), "ReadPlanRequest.step = 2147483648"),
    "the same of a nested key": (ledger_service_pb2.ExplainRequest(key=S(sibling=2**40)), "SlotKey.sibling"),
    "a negative version": (H(loaded=V(version=-1)), "PolicyVersion.version = -1"),
    "negative bytes": (H(loaded=V(n_bytes=-1)), "PolicyVersion.n_bytes"),
    "too many held leases": (H(leases=[ledger_pb2.HeldLease()] * 10_001), "10001 entries"),
    "a group of no slots": (ledger_service_pb2.AppendGroupsRequest(groups=[ledger_pb2.GroupSpec()]), "n_siblings = 0"),
    "broken JSON": (ledger_service_pb2.RegisterWorkerRequest(labels_json="{"), "RegisterWorkerRequest.labels_json: expected"),
    "JSON that is no object": (ledger_service_pb2.RegisterWorkerRequest(labels_json="[]"), "found list"),
    "JSON deeper than a stack": (ledger_service_pb2.FinishPlanRequest(metrics_json=DEEP), "nested deeper than 100"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_out_of_bounds_is_refused_by_its_name(name: str) -> None:
    message, words = REFUSED[name]
    with pytest.raises(InvalidRequest, match=words):
        intake.check(message)


def test_what_is_just_inside_the_bounds_is_let_through() -> None:
    nested = '{"a":' * JSON_DEPTH_MAX + "1" + "}" * JSON_DEPTH_MAX
    for message in (
        ledger_service_pb2.CursorRequest(stream="x" * 200),
        ledger_service_pb2.ReadPlanRequest(step=2**31 - 1),
        H(leases=[ledger_pb2.HeldLease()] * 10_000, loaded=V(version=2**31 - 1)),
        ledger_service_pb2.AppendGroupsRequest(groups=[ledger_pb2.GroupSpec(n_siblings=SIBLINGS_MAX)]),
        ledger_service_pb2.FinishPlanRequest(metrics_json=nested, reason="free\0text"),
        ledger_service_pb2.RegisterWorkerRequest(labels_json=json.dumps({"text": "[" * 5000})),
    ):
        intake.check(message)


def test_one_broken_item_does_not_hold_up_the_others_of_its_call() -> None:
    broken = ledger_pb2.Submission(key=S(sibling=2**40), evidence_json="\0", reward=float("nan"))
    intake.check(ledger_service_pb2.SubmitSamplesRequest(submissions=[broken]))
    intake.check(ledger_service_pb2.ReportFailuresRequest(failures=[ledger_pb2.FailureReport(key=S(sibling=2**40), reason="\0")]))


def test_json_is_measured_outside_of_its_strings() -> None:
    assert json_object(json.dumps({"a": "[[" * 400, "b": '"[' * 200}), "x")["a"] == "[[" * 400
    with pytest.raises(InvalidRequest, match="deeper"):
        json_object("[" * 101 + "]" * 101, "x")


@pytest.mark.parametrize("path", ["", "/", "/etc", "..", "a/../../b", ".", "a\0b", "x" * 1001])
def test_a_path_that_leaves_its_directory_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        inside(path, "path")


def test_a_path_below_its_directory_is_let_through_and_a_single_name_has_one_part() -> None:
    inside("versions/0.1.abc", "path")
    inside("0.1.1", "dir", single=True)
    with pytest.raises(InvalidRequest, match="one name"):
        inside("a/b", "dir", single=True)


@pytest.fixture
def scene(bench: Bench) -> Scene:
    made = bench.scene()
    made.feed(4)
    return made


def appended(s: Scene, **changes: Any) -> Cursor:
    before = s.ledger.cursor(STREAM)
    after = Cursor(STREAM, before.next_ordinal + 1, "{}", False)
    spec = dataclasses.replace(group(before.next_ordinal), **changes)
    return s.ledger.append_groups(s.feeder, before, after, [spec])


def tool_call(s: Scene, **changes: Any) -> ToolCall:
    grant = s.lease(1)[0]
    prefix = dataclasses.replace(trajectory(2), **changes)
    return s.ledger.record_tool_call(ToolCall(grant.key, 0, "9" * 64, prefix, "python", "{}"), grant.token)


VERB_REFUSES: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "a term that never ends": (lambda s: s.ledger.renew_role(dataclasses.replace(s.learner, ttl_s=1e9)), "ttl_s"),
    "a term that is no number": (lambda s: s.ledger.renew_role(dataclasses.replace(s.learner, ttl_s=float("nan"))), "ttl_s"),
    "a term of no time": (lambda s: s.ledger.acquire_role(Role.LEARNER, "learner-1", 1e-320), "ttl_s"),
    "renewing the server's own role": (lambda s: s.ledger.renew_role(term_of(s.learner, role=Role.LEDGER)), "ledger"),
    "releasing the server's own role": (lambda s: s.ledger.release_role(term_of(s.learner, role=Role.LEDGER)), "ledger"),
    "more slots than memory": (lambda s: appended(s, n_siblings=2**62), "n_siblings"),
    "a negative prompt token": (lambda s: appended(s, prompt_ids=pack_i32([1, -1])), "negative"),
    "a version outside the run": (
        lambda s: s.ledger.publish_version(s.learner, dataclasses.replace(version(0), path="../../etc")), "relative path"
    ),
    "a checkpoint outside the run": (
        lambda s: s.ledger.commit_checkpoint(s.learner, Checkpoint(0, 0, "../..", "5" * 64, "")), "one name"
    ),
    "a checkpoint before step 0": (
        lambda s: s.ledger.commit_checkpoint(s.learner, Checkpoint(0, -1, "0.1", "5" * 64, "")), "steps begin with 0"
    ),
    "a prefix of unequal arrays": (lambda s: tool_call(s, logprobs=pack_f32([-0.5])), "lengths differ"),
    "a prefix of no numbers": (lambda s: tool_call(s, logprobs=pack_f32([float("nan")] * 2)), "finite"),
    "a prefix of a negative version": (lambda s: tool_call(s, versions=pack_i32([-1, -1])), "negative"),
    "a prefix of a version nobody has published": (lambda s: tool_call(s, versions=pack_i32([9, 9])), "not published"),
    "more held leases than a statement takes": (
        lambda s: s.ledger.heartbeat(s.incarnation, None, [(SlotKey(0, 0), 1)] * 10_001), "10001 leases"
    ),
    "a configuration that is no JSON": (
        lambda s: s.ledger.open_run(dataclasses.replace(s.record, config_json="{")), "config_json"
    ),
    "a configuration of another shape": (
        lambda s: s.ledger.open_run(dataclasses.replace(s.record, config_json='{"inputs": 3}')), "no resolved configuration"
    ),
    "rules that are no numbers": (lambda s: s.ledger.open_run(run_record(lease_ttl_s=float("nan"))), "lease_ttl_s"),
    "rules under which nothing is granted": (lambda s: s.ledger.open_run(run_record(attempts_max=0)), "attempts_max"),
    "rules with an unknown word": (lambda s: s.ledger.open_run(run_record(straggler="shrug")), "straggler"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERB_REFUSES)
def test_a_verb_refuses_what_only_it_can_judge(scene: Scene, name: str) -> None:
    call, words = VERB_REFUSES[name]
    with pytest.raises(InvalidRequest, match=words):
        call(scene)


def test_a_checkpoint_of_a_lineage_that_does_not_exist_is_refused(scene: Scene) -> None:
    genesis = scene.ledger.resume_point().chain_digests[0]
    with pytest.raises(NotFound, match="no lineage 1"):
        scene.ledger.commit_checkpoint(scene.learner, Checkpoint(1, 0, "1.0.1", "5" * 64, genesis))
    scene.ledger.commit_checkpoint(scene.learner, Checkpoint(0, 0, "0.0.1", "5" * 64, genesis))


def test_nothing_is_remembered_of_a_worker_who_never_registered(scene: Scene) -> None:
    for i in range(20):
        with pytest.raises(InvalidRequest, match="unknown"):
            scene.lease(1, incarnation=f"stranger-{i}", request_id="a.1")
    assert not [name for name in scene.ledger._newest_asked if name.startswith("stranger")]


def test_a_call_number_of_thousands_of_digits_is_part_of_a_name(scene: Scene) -> None:
    assert len(scene.lease(1, request_id="w." + "9" * 150)) == 1
    assert len(scene.lease(1, request_id="w.1")) == 1


def test_a_report_of_an_impossible_slot_or_size_is_answered_by_itself(scene: Scene) -> None:
    grant = scene.lease(1)[0]
    lost = FailureReport(grant.key, grant.token, scene.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA, "gone", n_tokens=2**40)
    nowhere = dataclasses.replace(lost, key=SlotKey(0, 2**40))
    outcomes = [r.outcome for r in scene.ledger.report_failures([nowhere, lost])]
    assert outcomes == [SubmitOutcome.INVALID, SubmitOutcome.ACCEPTED]


def test_a_sample_of_an_impossible_slot_is_answered_by_itself(scene: Scene) -> None:
    one, two = scene.lease(2)
    for sibling in (2**31, -1):
        nowhere = dataclasses.replace(sample_for(one, scene.incarnation), key=SlotKey(0, sibling))
        results = scene.ledger.submit_samples([nowhere, sample_for(two if sibling < 0 else one, scene.incarnation)])
        assert [r.outcome for r in results] == [SubmitOutcome.INVALID, SubmitOutcome.ACCEPTED]


def test_an_answer_of_no_characters_is_an_answer(scene: Scene) -> None:
    grant = scene.lease(1)[0]
    call = ToolCall(grant.key, 0, "9" * 64, trajectory(2), "python", "{}")
    scene.ledger.record_tool_call(call, grant.token)
    assert scene.ledger.record_tool_call(dataclasses.replace(call, response_json=""), grant.token).response_json == ""
    assert scene.ledger.record_tool_call(call, grant.token).response_json == ""


def test_a_reason_with_a_nul_does_not_stop_the_learner(scene: Scene) -> None:
    scene.fill()
    scene.plan(1)
    scene.ledger.finish_plan(scene.learner, 0, 1, PlanOutcome.SKIPPED, "no\0reward", "{}")
    assert "no" in scene.ledger.read_plan(0, 1).reason


def test_the_servers_own_role_is_not_a_callers_to_give_up(scene: Scene) -> None:
    own = next(r for r in scene.ledger.run_status()["roles"] if r["role"] == "ledger")
    stolen = dataclasses.replace(scene.learner, role=Role.LEDGER, epoch=own["epoch"], holder=own["holder"])
    with pytest.raises((InvalidRequest, Fenced)):
        scene.ledger.release_role(stolen)
    assert next(r for r in scene.ledger.run_status()["roles"] if r["role"] == "ledger")["expires_in_s"] > 0
