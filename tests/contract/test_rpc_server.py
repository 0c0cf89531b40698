"""The server: every verb crosses the wire, errors keep their class, and nothing is answered that must not be."""

from __future__ import annotations

import inspect
import logging
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_support import (
    ANSWERS,
    CALLS,
    GRANT,
    RUN,
    RUN_ID,
    TERM,
    CannedLedger,
    in_thread,
    served,
    submission,
    trajectory,
    wired,
)

from rollbook.core import errors
from rollbook.core.errors import (
    ConfigError,
    Fenced,
    NotReady,
    RollbookError,
    ServerFenced,
    StorageFull,
    TooLarge,
    Unavailable,
    WrongRun,
)
from rollbook.core.ports import LedgerPort
from rollbook.core.records import HeartbeatReply, LeaseReply, SampleData, SlotKey
from rollbook.core.settings import SecurityConfig
from rollbook.observe.metric_table import CODES, METHODS, RETRIED
from rollbook.observe.metrics import REGISTRY
from rollbook.rpc import status
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.convert import role_term_message
from rollbook.rpc.guard import DEADLINE_S_MAX
from rollbook.rpc.server import serve
from rollbook.rpc.servicer import CHUNK_BYTES_MAX, WAIT_S_MAX
from rollbook.rpc.wrapping import SERVICE
from rollbook.v1 import ledger_service_pb2 as pb
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc

VERBS = [name for name, _ in inspect.getmembers(LedgerPort, inspect.isfunction) if not name.startswith("_")]
ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, RollbookError)]
ONCE = {"retry_total_s": 0.0}


def camel(verb: str) -> str:
    return "".join(word.capitalize() for word in verb.split("_"))


def counted() -> tuple[float, float, float]:
    """Calls of FinishPlan, calls of methods without a series, calls that ended with ABORTED."""
    names = (("rpc_seconds_count", "method", "FinishPlan"), ("rpc_seconds_count", "method", "other"),
             ("rpc_failures_total", "code", "ABORTED"))  # fmt: skip
    first, other, failed = (REGISTRY.get_sample_value(f"rollbook_{name}", {label: v}) or 0.0 for name, label, v in names)
    return first, other, failed


def health_of(address: str, service: str) -> Any:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def test_every_verb_of_the_port_is_an_rpc_with_its_own_request_and_response() -> None:
    methods = pb.DESCRIPTOR.services_by_name["LedgerService"].methods_by_name
    assert set(methods) == {camel(v) for v in VERBS} == {camel(v) for v in CALLS}
    for name, method in methods.items():
        assert (method.input_type.name, method.output_type.name) == (f"{name}Request", f"{name}Response")
        assert method.input_type.fields[0].name == "run_id"
    assert [name for name, method in methods.items() if method.server_streaming] == ["Payloads"]


@pytest.mark.parametrize("verb", VERBS)
def test_arguments_and_answer_of_a_verb_cross_the_wire_unchanged(verb: str) -> None:
    args, kwargs = CALLS[verb]
    ledger = CannedLedger()
    with wired(ledger) as client:
        answer = getattr(client, verb)(*args, **kwargs)
        assert (list(answer) if verb == "payloads" else answer) == ANSWERS[verb]
    ((called, got_args, got_kwargs),) = ledger.calls
    assert (called, got_args, got_kwargs) == (verb, args, kwargs)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class_and_message_over_the_wire(kind: type[RollbookError]) -> None:
    message = f"what went wrong with é, 50 % and {kind.__name__}\nand the way out"
    with served(CannedLedger(renew_role=kind(message))) as server:
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            request = pb.RenewRoleRequest(run_id=RUN_ID, term=role_term_message(TERM))
            pb_grpc.LedgerServiceStub(channel).RenewRole(request, timeout=5)
        assert type(status.error_of(caught.value)) is kind
        if kind is not ServerFenced:  # a fenced server says so with its own text
            assert str(status.error_of(caught.value)) == message
            assert caught.value.code() is status.TABLE[kind]


def test_the_status_table_knows_every_error_class() -> None:
    assert set(status.TABLE) == set(ERRORS)


def test_a_subclass_outside_the_table_travels_as_its_nearest_listed_ancestor() -> None:
    class OddlyFenced(Fenced):
        """Odd."""

    with wired(CannedLedger(drain=OddlyFenced("odd"))) as client, pytest.raises(Fenced, match="odd"):
        client.drain()


@pytest.mark.parametrize("length", [status.MESSAGE_BYTES_MAX, status.MESSAGE_BYTES_MAX + 1])
@pytest.mark.parametrize("letter", ["a", "é"])
def test_a_message_up_to_the_limit_arrives_whole_and_a_longer_one_shortened(letter: str, length: int) -> None:
    text = letter * (length if letter == "a" else length // 6 + (length > status.MESSAGE_BYTES_MAX))
    with wired(CannedLedger(drain=Fenced(text))) as client, pytest.raises(Fenced) as caught:
        client.drain()
    whole = length <= status.MESSAGE_BYTES_MAX
    assert (str(caught.value) == text) is whole
    assert str(caught.value).rstrip("…") == text[: len(str(caught.value).rstrip("…"))]


def test_a_bug_in_the_ledger_is_logged_and_becomes_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    with wired(CannedLedger(drain=KeyError("no such thing"))) as client, caplog.at_level(logging.ERROR):
        with pytest.raises(RollbookError, match=r"internal error in Drain \(KeyError\)") as caught:
            client.drain()
    assert type(caught.value) is RollbookError
    assert "KeyError: 'no such thing'" in caplog.text


@pytest.mark.parametrize(("timeout", "refused"), [(None, True), (2 * DEADLINE_S_MAX, True), (DEADLINE_S_MAX / 2, False)])
def test_a_call_needs_a_bounded_deadline(timeout: float | None, refused: bool) -> None:
    ledger = CannedLedger()
    with served(ledger) as server, grpc.insecure_channel(server.address) as channel:
        call = pb_grpc.LedgerServiceStub(channel).Drain
        if not refused:
            call(pb.DrainRequest(run_id=RUN_ID), timeout=timeout)
            return
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.DrainRequest(run_id=RUN_ID), timeout=timeout)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "set a deadline" in caught.value.details()
    assert ledger.calls == []


def test_a_request_of_another_run_is_refused_before_the_ledger_sees_it() -> None:
    ledger = CannedLedger()
    with served(ledger) as server, LedgerClient(server.address, "another") as client:
        with pytest.raises(WrongRun, match="'another'.*'demo'"):
            client.drain()
        with pytest.raises(WrongRun):
            list(client.payloads(0, 1))
    with wired(ledger) as client, pytest.raises(WrongRun):
        client.open_run(replace(RUN, run_id="another"))
    assert ledger.calls == []


def test_a_request_without_its_term_is_refused() -> None:
    with served(CannedLedger()) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.LedgerServiceStub(channel).PlanStep(pb.PlanStepRequest(run_id=RUN_ID, step=1), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "PlanStepRequest.term is missing" in caught.value.details()


def test_a_port_in_use_is_an_error_that_names_the_address_and_the_way_out() -> None:
    with served(CannedLedger()) as server:
        with pytest.raises(ConfigError, match=rf"{server.address}.*127\.0\.0\.1:0"):
            serve(CannedLedger(), server.address, run_id=RUN_ID)
    with pytest.raises(ConfigError, match="write host:port"):
        serve(CannedLedger(), "localhost", run_id=RUN_ID)


def test_a_port_is_free_again_once_its_server_has_stopped() -> None:
    with served(CannedLedger()) as first:
        address = first.address
    serve(CannedLedger(), address, run_id=RUN_ID).stop(0.0)


def test_health_says_serving_while_the_ledger_answers_and_not_otherwise() -> None:
    ledger = CannedLedger()
    with served(ledger) as server:
        for service in ("", SERVICE):
            assert health_of(server.address, service) == health_pb2.HealthCheckResponse.SERVING
        ledger.answers["resume_point"] = StorageFull()
        assert health_of(server.address, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_of(server.address, "") == health_pb2.HealthCheckResponse.SERVING
        ledger.answers["resume_point"] = NotReady("no run is open yet")
        assert health_of(server.address, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        ledger.answers["resume_point"] = ValueError("a bug")
        assert health_of(server.address, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_lists_the_ledger_service() -> None:
    shown = SecurityConfig(reflection=True)
    with served(CannedLedger(), security=shown) as server, grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
    assert SERVICE in {s.name for s in reply.list_services_response.service}


@pytest.mark.parametrize("how", ["ledger raises", "role runs out", "owner fences"])
def test_a_server_that_lost_its_role_answers_nothing_any_more(how: str) -> None:
    told = threading.Event()
    holds = threading.Event()
    holds.set()
    ledger = CannedLedger()
    with served(ledger, on_fenced=told.set, holds_role=holds.is_set) as server:
        with LedgerClient(server.address, RUN_ID, **ONCE) as client:
            client.drain()
            if how == "ledger raises":
                ledger.answers["drain"] = ServerFenced()
            elif how == "role runs out":
                holds.clear()
            else:
                server.fence()
            with pytest.raises(ServerFenced):
                client.drain()
            assert told.wait(5)
            ledger.answers["drain"] = None
            holds.set()
            n_calls = len(ledger.calls)
            for call in (client.drain, client.run_status, lambda: list(client.payloads(0, 1))):
                with pytest.raises(ServerFenced):
                    call()
            assert len(ledger.calls) == n_calls
            assert server.fenced
            for service in ("", SERVICE):
                assert health_of(server.address, service) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_role_lost_during_a_call_keeps_its_answer_from_leaving() -> None:
    holds = threading.Event()
    holds.set()

    def submit(_: Any) -> Any:
        holds.clear()
        return ANSWERS["submit_samples"]

    with wired(CannedLedger(submit_samples=submit), holds_role=holds.is_set, client=ONCE) as client:
        with pytest.raises(ServerFenced):
            client.submit_samples([submission()])


def test_a_caller_that_is_fenced_does_not_fence_the_server() -> None:
    ledger = CannedLedger(renew_role=Fenced("epoch 5 holds the role"))
    with served(ledger) as server, LedgerClient(server.address, RUN_ID) as client:
        with pytest.raises(Fenced, match="epoch 5"):
            client.renew_role(TERM)
        client.drain()
        assert not server.fenced


def test_a_ledger_error_of_a_server_without_its_role_is_not_passed_on_as_the_callers_own() -> None:
    holds = threading.Event()
    holds.set()

    def renew(_: Any) -> Any:
        holds.clear()
        return Fenced("ledger epoch 1 was superseded")

    with wired(CannedLedger(renew_role=renew), holds_role=holds.is_set, client=ONCE) as client:
        with pytest.raises(ServerFenced):
            client.renew_role(TERM)


def test_calls_are_counted_by_method_and_failures_by_status() -> None:
    args, kwargs = CALLS["finish_plan"]
    with wired(CannedLedger(audit=Fenced("no"))) as client:
        before = counted()
        client.drain()
        client.finish_plan(*args, **kwargs)
        with pytest.raises(Fenced):
            client.audit()
        assert counted() == (before[0] + 1, before[1] + 2, before[2] + 1)


def test_every_status_and_every_error_that_is_repeated_has_a_series_from_the_start() -> None:
    assert set(CODES) == {code.name for code in status.TABLE.values()} | {"CANCELLED"}
    assert set(RETRIED) == {error.__name__ for error in status.TABLE if issubclass(error, Unavailable)}
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["LedgerService"].methods}
    assert set(METHODS) - {"other"} < methods


@pytest.mark.parametrize(("asked", "granted"), [(0.5, 0.5), (10 * WAIT_S_MAX, WAIT_S_MAX)])
def test_a_long_poll_is_held_as_asked_within_the_bound(asked: float, granted: float) -> None:
    ledger = CannedLedger()
    with wired(ledger) as client:
        client.heartbeat("worker-1", None, [], wait_s=asked)
        client.lease_slots("worker-1", None, 1, wait_s=asked)
        client.plan_step(TERM, 0, 1, wait_s=asked)
    assert [args[3] for _, args, _ in ledger.calls] == [granted] * 3


def test_a_long_poll_ends_before_the_callers_deadline() -> None:
    ledger = CannedLedger()
    with served(ledger) as server, grpc.insecure_channel(server.address) as channel:
        pb_grpc.LedgerServiceStub(channel).Heartbeat(pb.HeartbeatRequest(run_id=RUN_ID, wait_s=30.0), timeout=5)
    assert 0 < ledger.calls[0][1][3] < 5


def test_polls_beyond_their_number_do_not_wait() -> None:
    held, release = threading.Semaphore(0), threading.Event()
    waits: list[float] = []

    def heartbeat(incarnation: str, loaded: Any, leases: Any, wait_s: float, known: int) -> HeartbeatReply:
        waits.append(wait_s)
        held.release()
        if wait_s:
            release.wait(20)
        return HeartbeatReply(None, (), False)

    with wired(CannedLedger(heartbeat=heartbeat), threads=4, polls=3) as client:
        waiting = [in_thread(lambda: client.heartbeat("worker-1", None, [], wait_s=20.0)) for _ in range(3)]
        for _ in waiting:
            assert held.acquire(timeout=10)
        client.heartbeat("worker-2", None, [], wait_s=20.0)
        client.submit_samples([submission()])
        release.set()
        for thread, _ in waiting:
            thread.join(10)
    assert waits == [20.0, 20.0, 20.0, 0.0]


def test_the_payload_stream_packs_samples_up_to_the_chunk_limit_and_a_larger_one_alone() -> None:
    def sample(sibling: int, n_bytes: int) -> SampleData:
        return SampleData(SlotKey(0, sibling), bytes(n_bytes), trajectory(1), 0.5, "")

    half = CHUNK_BYTES_MAX // 2 - 100
    samples = [sample(0, half), sample(1, half), sample(2, half), sample(3, 2 * CHUNK_BYTES_MAX), sample(4, 10)]
    with served(CannedLedger(payloads=samples)) as server, grpc.insecure_channel(server.address) as channel:
        chunks = list(pb_grpc.LedgerServiceStub(channel).Payloads(pb.PayloadsRequest(run_id=RUN_ID), timeout=20))
    assert [[m.key.sibling for m in c.samples] for c in chunks] == [[0, 1], [2], [3], [4]]
    assert all(c.ByteSize() <= CHUNK_BYTES_MAX for c in chunks if len(c.samples) > 1)


def test_an_answer_above_the_message_limit_says_to_ask_for_less() -> None:
    ledger = CannedLedger(lease_slots=LeaseReply((replace(GRANT, prompt_ids=bytes(1000)),) * 20, None, 0.0))
    with wired(ledger, max_message_bytes=10_000, client={"max_message_bytes": 10_000}) as client:
        with pytest.raises(TooLarge, match="fewer items"):
            client.lease_slots("worker-1", None, 20)


def test_too_many_open_calls_are_refused_as_repeatable() -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def drain() -> None:
        entered.release()
        release.wait(20)

    ledger = CannedLedger(drain=drain)
    with served(ledger, threads=1) as server:
        clients = [LedgerClient(server.address, RUN_ID, **ONCE) for _ in range(5)]
        started = [in_thread(client.drain) for client in clients]
        assert entered.acquire(timeout=10)
        ended = []
        for _ in range(1000):
            ended = [outcome[0] for _, outcome in started if outcome]
            if ended:
                break
            threading.Event().wait(0.01)
        release.set()
        for thread, _ in started:
            thread.join(10)
        for client in clients:
            client.close()
    assert isinstance(ended[0], Unavailable)
    assert sum(outcome == [None] for _, outcome in started) == 4
