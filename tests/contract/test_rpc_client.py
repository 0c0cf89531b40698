"""The client: what is repeated and what is not, lost answers, moved servers, limits on size and time."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_support import (
    CALLS,
    RUN_ID,
    SAMPLES,
    TERM,
    CannedLedger,
    LoseReplies,
    QuickClock,
    failure,
    in_thread,
    served,
    submission,
    wired,
)

from rollbook.core.errors import (
    Conflict,
    DeadlineExceeded,
    DigestMismatch,
    Fenced,
    InvalidRequest,
    LedgerLocked,
    NotReady,
    RoleHeld,
    RollbookError,
    RunPaused,
    ServerFenced,
    StorageFull,
    TooLarge,
    Unavailable,
)
from rollbook.core.records import Role, SlotKey, SubmitOutcome, SubmitResult
from rollbook.observe.metrics import REGISTRY
from rollbook.rpc.address import FILE_NAME, address_in, write_address
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.convert import submission_message


def failing(*errors: Exception | None) -> Any:
    """A verb that fails as listed, then answers for ever."""
    left = list(errors)
    return lambda *args, **kwargs: left.pop(0) if left else None


@pytest.mark.parametrize("kind", [Unavailable, StorageFull, DeadlineExceeded])
def test_a_call_that_was_not_carried_out_is_repeated_with_the_same_arguments(kind: type[RollbookError]) -> None:
    ledger, clock = CannedLedger(drain=failing(kind(), kind())), QuickClock()
    with wired(ledger, client={"clock": clock}) as client:
        client.drain()
    assert ledger.n_calls("drain") == 3
    assert len(clock.slept) == 2


@pytest.mark.parametrize("kind", [Fenced, Conflict, NotReady, RoleHeld, LedgerLocked, RunPaused, RollbookError])
def test_what_the_ledger_did_answer_goes_to_the_caller_at_once(kind: type[RollbookError]) -> None:
    ledger, clock = CannedLedger(drain=kind("as said")), QuickClock()
    with wired(ledger, client={"clock": clock}) as client, pytest.raises(kind, match="as said"):
        client.drain()
    assert ledger.n_calls("drain") == 1
    assert clock.slept == []


def test_repetition_ends_with_its_budget_and_says_what_was_tried() -> None:
    ledger, clock = CannedLedger(drain=StorageFull("disk full")), QuickClock()
    with wired(ledger, client={"clock": clock, "retry_total_s": 30.0}) as client:
        with pytest.raises(StorageFull, match=r"Drain failed \d+ times over \d+ s at 127.*disk full.*rollbook ledger"):
            client.drain()
    assert 10.0 < sum(clock.slept) <= 30.0
    assert ledger.n_calls("drain") == len(clock.slept) + 1


def test_the_backoff_is_jittered_doubles_and_is_bounded() -> None:
    clock = QuickClock()
    client = {"clock": clock, "backoff_s": 0.1, "backoff_max_s": 1.0, "rng": random.Random(3), "retry_total_s": 60.0}
    with wired(CannedLedger(drain=failing(*[Unavailable()] * 40)), client=client) as connected:
        connected.drain()
    for i, slept in enumerate(clock.slept):
        assert 0.0 <= slept <= min(1.0, 0.1 * 2**i)
    assert max(clock.slept) > 0.5
    assert len(set(clock.slept)) == 40


def test_repetitions_are_counted() -> None:
    def count() -> float:
        labels = {"reason": "StorageFull"}
        return REGISTRY.get_sample_value("rollbook_rpc_retries_total", labels) or 0.0

    before = count()
    with wired(CannedLedger(audit=lambda: [] if count() > before else StorageFull()), client={"clock": QuickClock()}) as client:
        client.audit()
    assert count() == before + 1


def test_a_lost_answer_is_asked_for_again_with_the_same_request() -> None:
    ledger = CannedLedger()
    with wired(ledger, interceptors=(LoseReplies("LeaseSlots", 2),), client={"clock": QuickClock()}) as client:
        client.lease_slots("worker-1", None, 4)
    keys = [args[4] for _, args, _ in ledger.calls]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0]


def test_two_lease_calls_without_a_key_are_two_calls() -> None:
    ledger = CannedLedger()
    with wired(ledger) as client:
        client.lease_slots("worker-1", None, 4)
        client.lease_slots("worker-1", None, 4)
    assert len({args[4] for _, args, _ in ledger.calls}) == 2


def test_a_deadline_ends_a_call_that_hangs() -> None:
    release = threading.Event()
    ledger = CannedLedger(drain=lambda: release.wait(20) and None)
    with wired(ledger, client={"timeout_s": 0.2, "retry_total_s": 0.0}) as client:
        with pytest.raises(DeadlineExceeded):
            client.drain()
        release.set()


def test_the_deadline_of_a_long_poll_is_its_wait_and_the_timeout() -> None:
    seen: list[float] = []

    class Watch(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            handler = continuation(handler_call_details)

            def behavior(request: Any, context: Any) -> Any:
                seen.append(context.time_remaining())
                return handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(behavior, handler.request_deserializer, handler.response_serializer)

    with wired(CannedLedger(), interceptors=(Watch(),), client={"timeout_s": 20.0}) as client:
        client.drain()
        client.heartbeat("worker-1", None, [], wait_s=40.0)
        client.lease_slots("worker-1", None, 1, wait_s=40.0)
        client.plan_step(TERM, 0, 1, wait_s=40.0)
    assert 10 < seen[0] < 21
    assert all(50 < s < 61 for s in seen[1:])


def test_a_server_that_comes_back_on_another_port_is_found_during_a_call(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        entered.set()
        release.wait(20)
        return None

    first_ledger, second_ledger = CannedLedger(drain=hang), CannedLedger()
    with served(first_ledger) as first:
        write_address(tmp_path, first.address)
        with LedgerClient(address_in(tmp_path), RUN_ID, backoff_s=0.01, backoff_max_s=0.05) as client:
            thread, outcome = in_thread(client.drain)
            assert entered.wait(10)
            (tmp_path / FILE_NAME).unlink()
            stopping, _ = in_thread(lambda: first.stop(0.0))
            with served(second_ledger) as second:
                assert second.address != first.address
                write_address(tmp_path, second.address)
                thread.join(20)
                assert outcome == [None]
            release.set()
            stopping.join(20)
    assert (first_ledger.n_calls("drain"), second_ledger.n_calls("drain")) == (1, 1)


def test_a_fenced_server_is_left_for_its_successor() -> None:
    with served(CannedLedger()) as old, served(CannedLedger()) as new:
        addresses = iter([old.address, old.address, new.address])
        old.fence()
        with LedgerClient(lambda: next(addresses), RUN_ID, clock=QuickClock()) as client:
            client.drain()


def test_an_absent_server_is_an_error_that_says_what_to_start(tmp_path: Path) -> None:
    with LedgerClient(address_in(tmp_path), RUN_ID, clock=QuickClock(), retry_total_s=5.0) as client:
        with pytest.raises(Unavailable, match=r"ledger\.address.*rollbook ledger"):
            client.drain()
    (tmp_path / FILE_NAME).write_text("\n")
    with pytest.raises(Unavailable, match="is empty"):
        address_in(tmp_path)()


def test_threads_that_share_a_client_survive_a_reconnect_of_one_of_them() -> None:
    entered, release = threading.Event(), threading.Event()

    def heartbeat(*_: Any) -> Any:
        entered.set()
        assert release.wait(20)
        return CannedLedger().answers["heartbeat"]

    ledger = CannedLedger(heartbeat=heartbeat)
    with wired(ledger, interceptors=(LoseReplies("Drain"),), client={"clock": QuickClock()}) as client:
        thread, outcome = in_thread(lambda: client.heartbeat("worker-1", None, [], wait_s=20.0))
        assert entered.wait(10)
        client.drain()
        release.set()
        thread.join(20)
    assert outcome == [CannedLedger().answers["heartbeat"]]
    assert (ledger.n_calls("heartbeat"), ledger.n_calls("drain")) == (1, 2)


def test_a_closed_client_ends_its_calls_and_takes_no_more() -> None:
    entered, release = threading.Event(), threading.Event()
    ledger = CannedLedger(drain=lambda: entered.set() or release.wait(20) and None)
    with served(ledger) as server:
        client = LedgerClient(server.address, RUN_ID)
        thread, outcome = in_thread(client.drain)
        assert entered.wait(10)
        client.close()
        thread.join(20)
        release.set()
        assert isinstance(outcome[0], RollbookError)
        with pytest.raises(RollbookError, match="closed"):
            client.drain()


LIMIT = 10_000
ROOM = LIMIT - 1024 - 8
"""What an item may have: the limit less the envelope and the framing."""


def sized(sibling: int, n_bytes: int) -> Any:
    """A submission whose message has exactly ``n_bytes`` bytes."""
    base = replace(submission(SlotKey(0, sibling)), evidence_json=" " * (n_bytes // 2))
    missing = n_bytes - submission_message(base).ByteSize()
    result = replace(base, evidence_json=" " * (n_bytes // 2 + missing))
    assert submission_message(result).ByteSize() == n_bytes
    return result


def accept(submissions: Any) -> list[SubmitResult]:
    return [SubmitResult(s.key, SubmitOutcome.ACCEPTED) for s in submissions]


def test_an_oversized_sample_is_refused_by_name_and_the_others_go_through() -> None:
    ledger = CannedLedger(submit_samples=accept)
    with wired(ledger, max_message_bytes=LIMIT, client={"max_message_bytes": LIMIT}) as client:
        results = client.submit_samples([sized(0, 500), sized(1, ROOM + 1), sized(2, ROOM)])
    assert [r.key for r in results] == [SlotKey(0, 0), SlotKey(0, 1), SlotKey(0, 2)]
    assert [r.outcome for r in results] == [SubmitOutcome.ACCEPTED, SubmitOutcome.INVALID, SubmitOutcome.ACCEPTED]
    assert results[1].reason.startswith(f"TooLarge: slot 0.1 has {ROOM + 1 + 8} bytes")


def test_a_large_batch_is_split_below_the_message_limit_in_order() -> None:
    ledger = CannedLedger(submit_samples=accept)
    with wired(ledger, max_message_bytes=LIMIT, client={"max_message_bytes": LIMIT}) as client:
        results = client.submit_samples([sized(i, 3000) for i in range(7)])
    assert [r.key.sibling for r in results] == list(range(7))
    assert [[s.key.sibling for s in args[0]] for _, args, _ in ledger.calls] == [[0, 1], [2, 3], [4, 5], [6]]


def test_nothing_to_submit_is_no_call() -> None:
    ledger = CannedLedger()
    with wired(ledger) as client:
        assert client.submit_samples([]) == []
        assert client.report_failures([]) == []
    assert ledger.calls == []


def test_failure_reports_are_split_too() -> None:
    def answer(failures: Any) -> list[SubmitResult]:
        return [SubmitResult(f.key, SubmitOutcome.ACCEPTED) for f in failures]

    ledger = CannedLedger(report_failures=answer)
    with wired(ledger, client={"max_message_bytes": 1024 + 200}) as client:
        results = client.report_failures([failure(SlotKey(0, i)) for i in range(5)])
    assert [r.key.sibling for r in results] == list(range(5))
    assert ledger.n_calls("report_failures") > 1


def test_a_request_that_cannot_be_split_is_too_large() -> None:
    ledger = CannedLedger()
    with wired(ledger, client={"max_message_bytes": 100}) as client:
        with pytest.raises(TooLarge, match="AppendGroups.*limit is 100"):
            client.append_groups(*CALLS["append_groups"][0])
    assert ledger.calls == []


class BreakStream(grpc.ServerInterceptor):
    """Each of the first ``n`` payload streams breaks after one message."""

    def __init__(self, n: int) -> None:
        self.left = n

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)

        def behavior(request: Any, context: Any) -> Any:
            for message in handler.unary_stream(request, context):
                yield message
                if self.left > 0:
                    self.left -= 1
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")

        return grpc.unary_stream_rpc_method_handler(behavior, handler.request_deserializer, handler.response_serializer)


def test_a_broken_payload_stream_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.rpc.servicer.CHUNK_BYTES_MAX", 1)
    ledger = CannedLedger()
    with wired(ledger, interceptors=(BreakStream(2),), client={"clock": QuickClock()}) as client:
        assert list(client.payloads(0, 1)) == SAMPLES
    assert ledger.n_calls("payloads") == 3


def test_a_damaged_payload_is_not_asked_for_again() -> None:
    def damaged(*_: Any) -> Any:
        yield SAMPLES[0]
        raise DigestMismatch("slot 12.1: stored bytes differ from their digest")

    ledger = CannedLedger(payloads=damaged)
    with wired(ledger) as client, pytest.raises(DigestMismatch, match=r"12\.1"):
        list(client.payloads(0, 1))
    assert ledger.n_calls("payloads") == 1


def test_a_payload_stream_left_half_way_frees_its_call() -> None:
    ledger = CannedLedger(payloads=SAMPLES * 1000)
    with wired(ledger, threads=1) as client:
        for _ in range(6):
            stream = client.payloads(0, 1)
            next(stream)
            stream.close()
        client.drain()


def test_an_unknown_checkpoint_state_is_refused_with_the_choices() -> None:
    with LedgerClient("127.0.0.1:1", RUN_ID) as client, pytest.raises(InvalidRequest, match="committed, deleting, corrupt"):
        client.mark_checkpoint(TERM, 0, 1, "gone")


def test_role_held_is_for_the_callers_loop() -> None:
    ledger = CannedLedger(acquire_role=RoleHeld("held by holder-9 for 12 s"))
    with wired(ledger) as client, pytest.raises(RoleHeld, match="holder-9"):
        client.acquire_role(Role.LEARNER, "holder-1", 15.0)
    assert ledger.n_calls("acquire_role") == 1


def test_a_fenced_server_without_successor_is_given_up_after_the_budget() -> None:
    with served(CannedLedger()) as server:
        server.fence()
        with LedgerClient(server.address, RUN_ID, clock=QuickClock(), retry_total_s=10.0) as client, pytest.raises(ServerFenced):
            client.drain()


def test_the_address_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_address(tmp_path, "127.0.0.1:1")
    path = write_address(tmp_path, "127.0.0.1:22222")
    assert address_in(tmp_path)() == "127.0.0.1:22222"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
