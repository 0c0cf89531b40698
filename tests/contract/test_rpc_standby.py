"""Several ledger servers of one run: what a standby answers, how clients go round them, and the files that name them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_support import CALLS, RUN_ID, CannedLedger, QuickClock, in_thread, served, wired

from rollbook.core.errors import DeadlineExceeded, ServerFenced, Standby, Unavailable
from rollbook.core.ports import LedgerPort
from rollbook.rpc.address import (
    FILE_NAME,
    address_in,
    addresses_in,
    announce,
    announced,
    forget,
    forget_all,
    holder_index,
    write_address,
)
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.connection import STANDBY_WAIT_S
from rollbook.rpc.standby import StandbyPort
from rollbook.rpc.wrapping import SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Held(CannedLedger):
    """A canned ledger that knows whether it holds the role: what it answers, or raises, is given."""

    def __init__(self, holds: Any = True, **answers: Any) -> None:
        super().__init__(**answers)
        self.holds = holds

    def holds_role(self) -> bool:
        if isinstance(self.holds, Exception):
            raise self.holds
        return bool(self.holds)


def health_of(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def client_of(*addresses: str, **options: Any) -> LedgerClient:
    return LedgerClient(lambda: list(addresses), RUN_ID, **{"clock": QuickClock(), **options})


@pytest.mark.parametrize("verb", sorted(CALLS))
def test_a_standby_has_every_verb_of_the_port_and_refuses_it(verb: str) -> None:
    args, keywords = CALLS[verb]
    with pytest.raises(Standby, match="waits for the run's role"):
        getattr(StandbyPort(), verb)(*args, **keywords)


def test_a_standby_has_no_other_verbs_than_the_ports() -> None:
    assert hasattr(StandbyPort(), "drain") and hasattr(LedgerPort, "drain")
    assert not hasattr(StandbyPort(), "renew_self") and not hasattr(StandbyPort(), "__wrapped__")


def test_a_standby_lives_and_does_not_serve_until_it_is_promoted() -> None:
    port, ledger = StandbyPort(), Held()
    with served(port) as server, LedgerClient(server.address, RUN_ID, retry_total_s=0.0) as client:
        assert (health_of(server.address, ""), health_of(server.address, SERVICE)) == (SERVING, NOT_SERVING)
        for call in (client.drain, client.run_status, lambda: list(client.payloads(0, 1))):
            with pytest.raises(Standby):
                call()
        assert not server.fenced and ledger.calls == []
        port.promote(ledger)  # type: ignore[arg-type]
        client.drain()
        assert (health_of(server.address, ""), health_of(server.address, SERVICE)) == (SERVING, SERVING)
        ledger.holds = False
        with pytest.raises(ServerFenced):
            client.drain()
        assert server.fenced and ledger.n_calls("drain") == 1


def test_watchers_of_a_servers_health_are_told_what_its_owner_says() -> None:
    with served(StandbyPort()) as server, grpc.insecure_channel(server.address) as channel:
        server.shows_serving(False)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert next(watch).status == NOT_SERVING
        server.shows_serving(True)
        assert next(watch).status == SERVING
        watch.cancel()


def test_a_server_that_cannot_say_whether_it_still_holds_the_role_answers_nothing_and_is_not_lost() -> None:
    ledger = Held()
    with wired(ledger, client={"retry_total_s": 0.0}) as client:
        ledger.holds = Standby("this server's term is over and was not renewed")
        for call in (client.drain, client.resume_point):
            with pytest.raises(Standby, match="was not renewed"):
                call()
        assert ledger.calls == []
        ledger.holds = True
        client.drain()


def test_a_role_that_becomes_doubtful_during_a_call_keeps_its_answer_from_leaving() -> None:
    ledger = Held()

    def drain() -> None:
        ledger.holds = Standby("in doubt")

    ledger.answers["drain"] = drain
    with wired(ledger, client={"retry_total_s": 0.0}) as client, pytest.raises(Standby, match="in doubt"):
        client.drain()


def test_a_standby_and_a_dead_address_are_passed_at_once_and_the_holder_is_kept() -> None:
    clock, holder = QuickClock(), CannedLedger()
    with served(StandbyPort()) as standby, served(holder) as server:
        with client_of(nobody(), standby.address, server.address, clock=clock, retry_total_s=0.0) as client:
            client.drain()
            assert client._connection.last_address == server.address
            client.drain()
    assert holder.n_calls("drain") == 2 and clock.slept == []


def test_a_holder_that_only_cannot_answer_now_is_asked_again_and_not_left() -> None:
    left = [Unavailable("the database restarts")] * 3
    holder, other = CannedLedger(drain=lambda: left.pop() if left else None), CannedLedger()
    with served(holder) as server, served(other) as second, client_of(server.address, second.address) as client:
        client.drain()
    assert holder.n_calls("drain") == 4 and other.calls == []


def test_a_fenced_server_is_left_for_the_next_one_listed() -> None:
    clock, new = QuickClock(), CannedLedger()
    with served(CannedLedger()) as old, served(new) as server:
        old.fence()
        with client_of(old.address, server.address, clock=clock) as client:
            client.drain()
    assert new.n_calls("drain") == 1 and clock.slept == []


def test_standbys_alone_are_asked_again_soon_and_given_up_with_the_budget() -> None:
    clock = QuickClock()
    with served(StandbyPort()) as one, served(StandbyPort()) as two:
        with client_of(one.address, two.address, clock=clock, retry_total_s=30.0, backoff_max_s=60.0) as client:
            with pytest.raises(Standby, match=r"Drain failed \d+ times over \d+ s"):
                client.drain()
    assert 20.0 < sum(clock.slept) <= 30.0
    assert STANDBY_WAIT_S / 2 < max(clock.slept) <= STANDBY_WAIT_S


def test_a_standby_that_takes_over_answers_the_call_that_waited() -> None:
    port, ledger = StandbyPort(), Held()

    class Promoting(QuickClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                port.promote(ledger)  # type: ignore[arg-type]

    with served(port) as server, client_of(nobody(), server.address, clock=Promoting()) as client:
        client.drain()
    assert ledger.n_calls("drain") == 1


def test_a_server_that_hangs_is_what_a_round_is_said_to_have_failed_with() -> None:
    release = threading.Event()
    with served(CannedLedger(drain=lambda: release.wait(20) and None)) as hanging, served(StandbyPort()) as standby:
        for addresses in ((hanging.address, standby.address), (standby.address, hanging.address)):
            with client_of(*addresses, timeout_s=0.3, retry_total_s=0.0) as client, pytest.raises(DeadlineExceeded):
                client.drain()
        release.set()


def test_a_call_in_flight_is_given_up_when_another_server_has_become_the_holder(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(100)

    stopped, successor = CannedLedger(drain=hang), CannedLedger()
    with served(stopped) as old, served(successor) as new:
        write_address(tmp_path, old.address, [new.address])
        with LedgerClient(addresses_in(tmp_path), RUN_ID, timeout_s=90.0) as client:
            thread, outcome = in_thread(client.drain)
            assert entered.wait(20)
            write_address(tmp_path, new.address, [old.address])
            thread.join(60)
            assert outcome == [None]
        release.set()
    assert (stopped.n_calls("drain"), successor.n_calls("drain")) == (1, 1)


def test_a_long_call_goes_on_while_the_address_file_is_written_again_or_away(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        release.wait(100)

    ledger = CannedLedger(drain=slow)
    with served(ledger) as server:
        write_address(tmp_path, server.address, [nobody()])
        with LedgerClient(addresses_in(tmp_path), RUN_ID, timeout_s=90.0) as client:
            thread, outcome = in_thread(client.drain)
            assert entered.wait(20)
            (tmp_path / FILE_NAME).unlink()
            thread.join(1.5)
            assert thread.is_alive()
            write_address(tmp_path, server.address)
            release.set()
            thread.join(60)
    assert outcome == [None] and ledger.n_calls("drain") == 1


def test_the_address_file_names_the_holder_first_and_everybody_once(tmp_path: Path) -> None:
    write_address(tmp_path, "a:1", ["b:2", "a:1", "b:2"])
    assert (tmp_path / FILE_NAME).read_text() == "a:1\nb:2\n"
    assert addresses_in(tmp_path)() == ["a:1", "b:2"] and address_in(tmp_path)() == "a:1"
    assert addresses_in(tmp_path, ["c:3", "b:2"])() == ["a:1", "b:2", "c:3"]
    before = (tmp_path / FILE_NAME).stat().st_ino
    write_address(tmp_path, "a:1", ["b:2"])
    assert (tmp_path / FILE_NAME).stat().st_ino == before, "an equal file need not be written again"
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_fixed_addresses_are_enough_without_a_file(tmp_path: Path) -> None:
    assert addresses_in(tmp_path, ["c:3"])() == ["c:3"]
    with pytest.raises(Unavailable, match="rollbook ledger"):
        addresses_in(tmp_path)()


def test_a_server_that_ended_is_taken_out_of_the_files_and_the_others_stay(tmp_path: Path) -> None:
    for index, address in enumerate(("a:1", "b:2", "c:3")):
        announce(tmp_path, index, address)
    write_address(tmp_path, "b:2", ["a:1", "c:3"])
    assert announced(tmp_path) == {0: "a:1", 1: "b:2", 2: "c:3"} and holder_index(tmp_path) == 1
    forget(tmp_path, 1, "another:1")
    assert announced(tmp_path)[1] == "b:2", "somebody else is that server by now"
    forget(tmp_path, 1, "b:2")
    assert addresses_in(tmp_path)() == ["a:1", "c:3"] and announced(tmp_path) == {0: "a:1", 2: "c:3"}
    forget(tmp_path, 1)
    assert addresses_in(tmp_path)() == ["a:1", "c:3"], "one that was not found names nobody"
    forget(tmp_path, 0)
    forget(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_only_server_of_a_run_leaves_no_file(tmp_path: Path) -> None:
    write_address(tmp_path, "a:1")
    assert holder_index(tmp_path) is None
    forget(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    announce(tmp_path, 1, "b:2")
    write_address(tmp_path, "b:2")
    forget_all(tmp_path)
    assert list(tmp_path.iterdir()) == []
