"""One trace a rollout: through calls, through the ledger, past the death of whoever works on it."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ledger_support import STREAM, Scene, group
from rpc_support import CALLS, CannedLedger, served, wired

from ledger_bench import Bench
from rollbook.core.errors import Fenced, InvalidRequest, NotReady, RollbookError, Unavailable
from rollbook.core.records import Cursor
from rollbook.ledger import migrate
from rollbook.observe import tracing
from rollbook.rpc.tracing import QUIET, method_of
from tracing_support import Kept, ids, traced

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def contexts(n: int, flags: str = "01") -> tuple[str, ...]:
    return tuple(f"00-{i + 1:032x}-{i + 1:016x}-{flags}" for i in range(n))


def feed(s: Scene, traceparents: tuple[str, ...]) -> None:
    before = s.ledger.cursor(STREAM)
    spec = dataclasses.replace(group(before.next_ordinal), traceparents=traceparents)
    s.ledger.append_groups(s.feeder, before, Cursor(STREAM, before.next_ordinal + 1, "{}", False), [spec])


def test_a_slot_is_stored_with_its_trace_and_every_lease_of_it_is_a_part_of_that(bench: Bench) -> None:
    s = bench.scene()
    with traced() as kept:
        feed(s, contexts(2))
        first = s.lease(2)
        assert [tracing.trace_id(g.traceparent) for g in first] == [f"{1:032x}", f"{2:032x}"]
        bench.let_time_pass(31)
        other = s.worker()
        again = s.lease(2, incarnation=other)
        leases = kept.spans("lease")
        assert [ids(span) for span in leases] == [
            (tracing.trace_id(g.traceparent), tracing.span_id(g.traceparent), f"{g.key.sibling + 1:016x}")
            for g in (*first, *again)
        ]
        told = [dict(span.attributes or {}) for span in leases]
        assert [(one["slot"], one["attempt"], one["worker"]) for one in told] == [
            ("0.0", 1, s.incarnation), ("0.1", 1, s.incarnation), ("0.0", 2, other), ("0.1", 2, other),
        ]  # fmt: skip
        s.submit(again, other)
        story = s.ledger.explain(again[0].key)
        assert (story["trace_id"], story["trace_sampled"]) == (f"{1:032x}", True)


def test_a_repeated_lease_call_names_the_same_span_and_makes_it_once(bench: Bench) -> None:
    s = bench.scene()
    with traced() as kept:
        feed(s, contexts(2))
        first = s.lease(2, request_id="call-1")
        assert s.lease(2, request_id="call-1") == first
        assert len(kept.spans("lease")) == 2


def test_a_ledger_that_does_not_trace_hands_the_context_on_as_it_is(bench: Bench) -> None:
    s = bench.scene()
    feed(s, contexts(2))
    grants = s.fill(2)
    assert tuple(g.traceparent for g in grants) == contexts(2)
    feed(s, contexts(2, "00"))
    with traced() as kept:
        assert all(tracing.trace_id(g.traceparent) and not tracing.is_sampled(g.traceparent) for g in s.fill(2))
        assert kept.spans() == [], "what is not sampled stays so"
    s.train(1)
    assert [one.traceparent for one in s.ledger.payloads(0, 1)] == [*contexts(2), *contexts(2, "00")]


def test_slots_without_a_trace_are_worked_on_as_ever(bench: Bench) -> None:
    s = bench.scene()
    with traced() as kept:
        s.feed(2)
        assert {g.traceparent for g in s.fill(4)} == {""}
        s.train(1)
        assert {one.traceparent for one in s.ledger.payloads(0, 1)} == {""}
        assert s.ledger.explain(s.plan(1).items[0].key)["trace_id"] is None
        assert kept.spans() == []


def test_an_append_made_again_with_other_traces_keeps_the_stored_ones(bench: Bench) -> None:
    s = bench.scene()
    before, after = Cursor(STREAM, 0, "{}", False), Cursor(STREAM, 1, '{"at": 1}', False)
    for traces in (contexts(2), contexts(4)[2:], ()):
        s.ledger.append_groups(s.feeder, before, after, [dataclasses.replace(group(0), traceparents=traces)])
    assert tuple(g.traceparent for g in s.lease(2)) == contexts(2)


@pytest.mark.parametrize("traces", [contexts(1), contexts(3), ("00-ab-cd-01", PARENT), (PARENT, "")])
def test_traces_that_are_none_are_refused(bench: Bench, traces: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="traceparent"):
        feed(bench.scene(), traces)


def test_a_refill_is_issued_with_traces_of_its_own(bench: Bench) -> None:
    s = bench.scene(attempts_max=1, straggler="wait")
    with traced() as kept:
        feed(s, contexts(2))
        s.lease(2)
        bench.let_time_pass(31)
        grants = s.lease(2)
        assert [str(g.key) for g in grants] == ["1.0", "1.1"]
        issued = {ids(span)[0]: dict(span.attributes or {}) for span in kept.spans("issue")}
        assert {tracing.trace_id(g.traceparent) for g in grants} == set(issued) and len(issued) == 2
        assert {one["refills"] for one in issued.values()} == {0}


def test_a_slot_of_an_older_ledger_has_no_trace_after_the_migration(sqlite_bench: Bench) -> None:
    s = sqlite_bench.scene()
    s.feed(1)
    s.ledger.close()
    sqlite_bench.ledgers.clear()
    sqlite_bench.execute("ALTER TABLE slot DROP COLUMN traceparent")
    sqlite_bench.execute("UPDATE alembic_version SET version_num = '0004'")
    assert migrate.upgrade(sqlite_bench.url) == migrate.head_revision()
    ledger = sqlite_bench.open()
    ledger.open_run(s.record)
    worker = "worker-after"
    ledger.register_worker(worker, "host", "engine")
    reply = ledger.lease_slots(worker, ledger.versions(0)[-1], 4)
    assert {g.traceparent for g in reply.grants} == {""} and len(reply.grants) == 2


def _pairs(kept: Kept, method: str) -> tuple[list[tuple[str, str, str]], list[dict[str, object]]]:
    """Ids and attributes of a method's spans, the client's first."""
    spans = sorted(kept.spans(f"rollbook.v1.LedgerService/{method}"), key=lambda span: span.kind.name)
    assert [span.kind.name for span in spans] == ["CLIENT", "SERVER"]
    return [ids(span) for span in spans], [dict(span.attributes or {}) for span in spans]


def test_a_call_is_a_span_on_either_side_of_one_trace() -> None:
    with traced() as kept, wired(CannedLedger()) as client:
        with tracing.span("outer", parent=PARENT) as outer:
            client.drain()
            args, kwargs = CALLS["payloads"]
            assert len(list(client.payloads(*args, **kwargs))) == 3
        for method in ("Drain", "Payloads"):
            (caller, callee), attributes = _pairs(kept, method)
            assert caller[0] == callee[0] == "a" * 32
            assert (caller[2], callee[2]) == (tracing.span_id(outer.traceparent), caller[1])
            for one in attributes:
                assert (one["rpc.method"], one["rpc.grpc.status_code"], one["outcome"]) == (method, 0, "ok")


@pytest.mark.parametrize("error", [Fenced("another"), NotReady("wait"), RollbookError("bad")], ids=lambda e: type(e).__name__)
def test_the_outcome_of_a_call_is_the_error_it_ended_with(error: RollbookError) -> None:
    with traced() as kept, wired(CannedLedger(drain=error)) as client:
        with pytest.raises(type(error)):
            client.drain()
        _, attributes = _pairs(kept, "Drain")
        assert [one["outcome"] for one in attributes] == [type(error).__name__] * 2
        assert all(not span.status.is_ok for span in kept.spans())


def test_each_attempt_at_a_call_is_a_span() -> None:
    left = [Unavailable("later")]
    with traced() as kept, wired(CannedLedger(drain=lambda: left.pop() if left else None)) as client:
        client.drain()
        found = [span for span in kept.spans() if span.kind.name == "CLIENT"]
        assert [(span.attributes or {})["outcome"] for span in found] == ["Unavailable", "ok"]


def test_what_only_says_that_somebody_lives_has_no_span() -> None:
    with traced() as kept, served(CannedLedger()) as server, wired(CannedLedger()) as client:
        with grpc.insecure_channel(server.address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20.0)
        for verb in ("heartbeat", "renew_role"):
            args, kwargs = CALLS[verb]
            getattr(client, verb)(*args, **kwargs)
        assert kept.spans() == []
    assert [method_of(f"/rollbook.v1.LedgerService/{name}") for name in QUIET] == ["", ""]
    assert method_of("/grpc.health.v1.Health/Check") == "" and method_of("/rollbook.v1.LedgerService/Drain") == "Drain"


def test_a_stranger_s_metadata_is_no_parent() -> None:
    with traced() as kept, served(CannedLedger()) as server, grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/rollbook.v1.LedgerService/Drain")
        with suppress(grpc.RpcError):
            call(b"", timeout=20.0, metadata=(("traceparent", "00-zz"),))
        (span,) = kept.spans()
        assert ids(span)[2] == "" and (span.attributes or {})["outcome"] == "WrongRun"


def test_whatever_is_called_while_nothing_is_traced_carries_nothing() -> None:
    seen: list[object] = []

    class Look(grpc.ServerInterceptor):
        def intercept_service(self, continuation, handler_call_details):  # type: ignore[no-untyped-def]
            seen.append([key for key, _ in handler_call_details.invocation_metadata or () if key == "traceparent"])
            return continuation(handler_call_details)

    with wired(CannedLedger(), interceptors=(Look(),)) as client:
        client.drain()
    assert seen == [[]]
