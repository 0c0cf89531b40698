"""How much one client and all of them may take: refused with a hint, and the client comes back when it was told to."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_support import KEY, CannedLedger, QuickClock, in_thread, submission
from security_support import RUN_ID, bare_stub, client_of, secured, tokens_of

from rollbook.core.errors import Overloaded, RollbookError, TooLarge, Unavailable
from rollbook.core.records import SubmitOutcome
from rollbook.core.settings import SecurityConfig
from rollbook.rpc import limits, status
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.limits import Rates, overloaded
from rollbook.v1 import ledger_service_pb2 as pb

REQUEST = pb.RunStatusRequest(run_id=RUN_ID)


def refused_with(caught: Any) -> dict[str, str]:
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return dict(caught.value.trailing_metadata())


class Held:
    """A ledger whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.go, self.entered, self.running, self.most = threading.Event(), threading.Semaphore(0), 0, 0
        self._lock = threading.Lock()

    def ledger(self) -> CannedLedger:
        return CannedLedger(run_status=self.answer)

    def answer(self) -> dict[str, int]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.entered.release()
        assert self.go.wait(60)
        with self._lock:
            self.running -= 1
        return {"steps": 4}


def bounded(happened: Callable[[], bool]) -> None:
    for _ in range(6000):
        if happened():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within a minute")


def test_calls_beyond_a_clients_rate_are_refused_with_a_hint_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = QuickClock()
    monkeypatch.setattr(limits, "host", lambda: clock)
    with secured(CannedLedger(), SecurityConfig(calls_per_s_max=5.0)) as server:
        with bare_stub(server) as greedy, bare_stub(server) as other:
            for _ in range(5):
                greedy.RunStatus(REQUEST, timeout=20)
            with pytest.raises(grpc.RpcError) as caught:
                greedy.RunStatus(REQUEST, timeout=20)
            assert refused_with(caught) | {status.RETRY_AFTER_KEY: "200", status.CLASS_KEY: "Overloaded"} == refused_with(caught)
            assert "security.calls_per_s_max" in caught.value.details()
            other.RunStatus(REQUEST, timeout=20)
            clock.now += 0.2
            greedy.RunStatus(REQUEST, timeout=20)
            with pytest.raises(grpc.RpcError):
                greedy.RunStatus(REQUEST, timeout=20)


def test_a_bucket_fills_again_up_to_one_seconds_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = QuickClock()
    monkeypatch.setattr(limits, "host", lambda: clock)
    rates = Rates(2.0)
    for pause, allowed in ((0.0, 2), (0.5, 1), (1.0, 2), (1000.0, 2)):
        clock.now += pause
        for _ in range(allowed):
            rates.take("a")
        with pytest.raises(Overloaded):
            rates.take("a")
    slow = Rates(0.25)  # less than one a second: still one at once
    slow.take("a")
    with pytest.raises(Overloaded) as caught:
        slow.take("a")
    assert caught.value.retry_after_s == 4.0


def test_the_table_of_clients_is_bounded_and_forgets_the_one_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host", lambda: QuickClock())
    rates = Rates(1.0)
    rates.take("first")
    for n in range(limits.PEERS_MAX - 1):
        rates.take(str(n))
    with pytest.raises(Overloaded):
        rates.take("first")  # still known, and now the newest
    rates.take("one more")
    assert len(rates) == limits.PEERS_MAX
    with pytest.raises(Overloaded):
        rates.take("first")
    rates.take("0")  # forgotten, so a stranger with a full bucket


def test_one_client_has_no_more_calls_open_than_it_may(folder: Path) -> None:
    """Others are served meanwhile: one client cannot take every thread."""
    held = Held()
    security = tokens_of(folder, calls_open_max=4)
    with secured(held.ledger(), security, threads=16) as server:
        with client_of(server, security, "observer", timeout_s=60.0) as greedy:
            started = [in_thread(greedy.run_status) for _ in range(4)]
            for _ in started:
                assert held.entered.acquire(timeout=30)
            for _ in range(3):
                with pytest.raises(Overloaded, match="4 calls of this client are open"):
                    greedy.resume_point()
            with client_of(server, security, "observer") as other:
                other.resume_point()
            assert held.running == 4
            held.go.set()
            for thread, outcome in started:
                thread.join(60)
                assert outcome == [{"steps": 4}]
            greedy.resume_point()
    assert held.most == 4


def test_a_call_that_fails_is_no_longer_open() -> None:
    clients = limits.Clients(1000.0, 4)
    for _ in range(10):
        with pytest.raises(KeyError), clients.call("a"):
            raise KeyError
    with clients.call("a"), clients.call("a"), clients.call("b"), clients.call("a"), clients.call("a"):
        with pytest.raises(Overloaded) as caught, clients.call("a"):
            raise AssertionError("let in")
        assert caught.value.retry_after_s == limits.WAIT_S_FIRST
    assert not clients._open, "nothing is kept of a client that has no call open"


def test_an_overloaded_server_refuses_with_a_hint_before_it_reads_the_message() -> None:
    held = Held()
    with secured(held.ledger(), SecurityConfig(calls_waiting_max=2), threads=2) as server, bare_stub(server) as stub:
        busy = [stub.RunStatus.future(REQUEST, timeout=60) for _ in range(2)]
        for _ in busy:
            assert held.entered.acquire(timeout=30)
        waiting = [stub.RunStatus.future(REQUEST, timeout=60) for _ in range(2)]
        bounded(lambda: server._server._state.thread_pool.waiting == 2)
        for _ in range(20):  # a refusal needs no thread of those that are busy, so all of them are told
            with pytest.raises(grpc.RpcError) as caught:
                stub.RunStatus(REQUEST, timeout=60)
            assert refused_with(caught)[status.CLASS_KEY] == "Overloaded"
            assert refused_with(caught)[status.RETRY_AFTER_KEY] == "200"
        assert server._server._state.thread_pool.waiting == 2, "what is refused does not wait"
        held.go.set()
        assert [json_of(call.result(60)) for call in (*busy, *waiting)] == ['{"steps": 4}'] * 4
        stub.RunStatus(REQUEST, timeout=60)


def json_of(answer: Any) -> str:
    return str(answer.status_json)


def test_a_client_of_an_overloaded_server_comes_back_and_loses_nothing() -> None:
    held = Held()
    with secured(held.ledger(), SecurityConfig(calls_waiting_max=1), threads=1) as server:
        with bare_stub(server) as stub:
            busy = [stub.RunStatus.future(REQUEST, timeout=60)]
            assert held.entered.acquire(timeout=30)
            busy.append(stub.RunStatus.future(REQUEST, timeout=60))
            bounded(lambda: server._server._state.thread_pool.waiting == 1)
            clock = Releasing(held)
            with LedgerClient(server.address, RUN_ID, clock=clock, rng=NoJitter(), timeout_s=60.0, retry_total_s=600.0) as client:
                (result,) = client.submit_samples([submission()])
            assert (result.key, result.outcome) == (KEY, SubmitOutcome.ACCEPTED)
            assert clock.slept[0] == 0.2, "as long as it was told, one call waiting for the one thread"
            assert [call.result(60) for call in busy]


class NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return 0.0


class Releasing(QuickClock):
    """The overload ends during the first wait."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._held.go.set()
        threading.Event().wait(0.05)


def test_the_hint_is_added_to_the_jitter_and_counts_against_the_budget() -> None:
    clock, error = QuickClock(), overloaded("busy", 3.0)
    with secured(CannedLedger(run_status=error), SecurityConfig()) as server:
        with LedgerClient(
            server.address, RUN_ID, clock=clock, rng=random.Random(1), retry_total_s=20.0, backoff_s=0.1, timeout_s=60.0
        ) as client:
            with pytest.raises(Overloaded, match="RunStatus failed 6 times over"):
                client.run_status()
    assert len(clock.slept) == 5 and all(3.0 <= s <= 5.0 for s in clock.slept)
    assert len(set(clock.slept)) == 5, "who was sent away together does not come back together"


@pytest.mark.parametrize(("sent", "believed"), [
    ("1", 0.001), ("30000", 30.0), ("30001", 30.0), ("999999999", 30.0), ("9" * 5000, 0.0), ("-1", 0.0), ("", 0.0), ("soon", 0.0),
    ("1.5", 0.0), ("٣", 0.0),
])  # fmt: skip
def test_a_hint_is_believed_within_a_bound(sent: str, believed: float) -> None:
    class Call:
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.RESOURCE_EXHAUSTED

        def details(self) -> str:
            return "busy"

        def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((status.CLASS_KEY, "Overloaded"), (status.RETRY_AFTER_KEY, sent))

    error = status.error_of(Call())  # type: ignore[arg-type]
    assert isinstance(error, Overloaded) and error.retry_after_s == pytest.approx(believed)


@pytest.mark.parametrize(("wanted", "sent"), [(0.0, "1"), (0.0001, "1"), (0.0015, "2"), (2.0, "2000"), (9999.0, "30000")])
def test_a_hint_that_is_sent_is_bounded(wanted: float, sent: str) -> None:
    error = Overloaded("busy")
    error.retry_after_s = wanted
    assert dict(status.metadata_of(error))[status.RETRY_AFTER_KEY] == sent
    assert status.RETRY_AFTER_KEY not in dict(status.metadata_of(Unavailable("gone")))
    assert overloaded("busy", 1e9).retry_after_s == limits.WAIT_S_MAX


def test_health_is_answered_while_the_server_is_overloaded() -> None:
    """Or a cluster manager would kill a server for having work."""
    held = Held()
    with secured(held.ledger(), SecurityConfig(calls_waiting_max=1), threads=1) as server, bare_stub(server) as stub:
        calls = [stub.RunStatus.future(REQUEST, timeout=60)]
        assert held.entered.acquire(timeout=30)
        calls.append(stub.RunStatus.future(REQUEST, timeout=60))
        bounded(lambda: server._server._state.thread_pool.waiting == 1)
        with grpc.insecure_channel(server.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        held.go.set()
        assert all(call.result(60) for call in calls)


def test_a_message_above_the_configured_size_is_refused_by_the_server_and_by_the_client() -> None:
    limit = 2 << 20
    with secured(CannedLedger(), SecurityConfig(message_bytes_max=limit)) as server:
        for size, taken in ((limit - 4096, True), (limit, False)):
            with LedgerClient(server.address, RUN_ID, max_message_bytes=64 << 20, retry_total_s=0.0, timeout_s=60.0) as careless:
                if taken:
                    careless.retry_group(12, "x" * size)
                else:
                    with pytest.raises(TooLarge, match="larger than max"):
                        careless.retry_group(12, "x" * size)
            with LedgerClient(server.address, RUN_ID, max_message_bytes=limit, retry_total_s=0.0, timeout_s=60.0) as ours:
                if not taken:
                    with pytest.raises(TooLarge, match="the limit is 2097152"):
                        ours.retry_group(12, "x" * size)


def test_a_stranger_takes_no_memory_with_its_message(folder: Path) -> None:
    """Who has no token is refused before the message arrives: one that is far too large gets the same answer."""
    ledger = CannedLedger()
    with secured(ledger, tokens_of(folder, message_bytes_max=2 << 20)) as server, bare_stub(server) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.RetryGroup(pb.RetryGroupRequest(run_id=RUN_ID, ordinal=1, reason="x" * (32 << 20)), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not ledger.calls and issubclass(Overloaded, Unavailable) and issubclass(Unavailable, RollbookError)
