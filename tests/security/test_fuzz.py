"""Hostile messages to every RPC of a served ledger, with fixed seeds: nothing internal, nothing accepted, nothing grows.

The long form is ``python chaos/fuzz.py --messages 100000``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_support import CannedLedger, served

import fuzz
from fuzz_messages import INTEGERS, MAYBE, NO_EFFECT, REFUSED, TEXTS, Hostile, mutate, raw
from fuzz_stage import METHODS, REQUESTS, RUN_ID, Base, Remote, ServerProcess, Stage, protected_rows
from postgres_server import PostgresServer
from rollbook.v1 import ledger_service_pb2 as pb

SEED, MESSAGES, POSTGRESQL_MESSAGES = 20261130, 8000, 600


@pytest.mark.timeout(900)  # seconds on an idle machine; many on one that is shared
def test_hostile_messages_are_answered_and_change_nothing(tmp_path: Path) -> None:
    arms = fuzz.fuzz(MESSAGES, SEED, tmp_path, None)
    assert [text for arm in arms for text in arm.findings] == []
    assert sum(arm.sent for arm in arms) == MESSAGES
    for arm in arms:
        assert set(arm.by_rpc) == set(METHODS) - ({"ReleaseRole", "Drain"} if arm.name.startswith("open") else set())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["closed", "open"])
def test_hostile_messages_are_answered_and_change_nothing_on_postgresql(
    kind: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    arm = fuzz.Arm(f"{kind}-postgresql")
    url = postgres.url(postgres.create(f"fuzz_{kind}"))
    run = fuzz.run_closed if kind == "closed" else fuzz.run_open
    run(arm, url, tmp_path / "log", random.Random(SEED), POSTGRESQL_MESSAGES // 2)
    assert arm.findings == []


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("fuzz")
    server = ServerProcess(f"sqlite:///{directory}/ledger.sqlite", directory / "log")
    made = Stage(server)
    made.play()
    yield made
    assert made.client.audit() == []
    server.close()


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT64: st.sampled_from(INTEGERS) | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(TEXTS) | st.text(max_size=40) | st.just("{}"),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "run_id":
        return st.sampled_from([RUN_ID, RUN_ID, RUN_ID, "another"])
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        one = messages(field.message_type)
    elif field.type == FieldDescriptor.TYPE_ENUM:
        one = st.sampled_from([v.number for v in field.enum_type.values]) | st.integers(-(2**31), 2**31 - 1)
    else:
        one = SCALARS[field.type]
    return st.lists(one, max_size=3) if field.is_repeated else one


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Any message of this type, as the arguments of its constructor; every field may be absent."""
    return st.fixed_dictionaries({}, optional={field.name: values(field) for field in descriptor.fields})


@pytest.mark.timeout(600)
@settings(
    max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=st.sampled_from(sorted(METHODS)).flatmap(lambda m: st.tuples(st.just(m), messages(REQUESTS[m].DESCRIPTOR))))
def test_any_message_at_all_gets_a_defined_answer(stage: Stage, request: tuple[str, dict[str, Any]]) -> None:
    method, fields = request
    message = REQUESTS[method](**{"run_id": RUN_ID, **fields})
    arm = fuzz.Arm("any")
    fuzz.judge(arm, stage.server, Hostile(method, message.SerializeToString(), str(fields), MAYBE), False)
    assert arm.findings == []


def found_of(server: Remote, hostile: Hostile, *, live: bool = False) -> list[str]:
    arm = fuzz.Arm("closed-test")
    fuzz.judge(arm, server, hostile, live)
    return arm.findings


def test_the_judge_sees_internal_errors_and_acceptance() -> None:
    """A fuzzer that finds nothing says little unless it is known to find what is there."""
    empty = pb.CursorRequest(run_id=RUN_ID, stream="s").SerializeToString()
    broken = pb.CursorRequest(run_id="demo", stream="s").SerializeToString()
    with served(CannedLedger(cursor=ValueError("a bug"))) as server:
        assert "INTERNAL" in found_of(Remote(server.address), Hostile("Cursor", broken, "", MAYBE))[0]
        assert found_of(Remote(server.address), Hostile("Cursor", empty, "", REFUSED)) == []  # another run
    with served(CannedLedger()) as server:
        remote = Remote(server.address)
        assert "accepted" in found_of(remote, Hostile("Cursor", broken, "", REFUSED))[0]
        assert "accepted" in found_of(remote, Hostile("Cursor", broken, "", NO_EFFECT), live=True)[0]
        assert found_of(remote, Hostile("Cursor", broken, "", NO_EFFECT)) == []
        assert found_of(remote, Hostile("Cursor", broken, "", MAYBE), live=True) == []


def test_changed_rows_are_seen(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    server = ServerProcess(url, tmp_path / "log")
    try:
        stage = Stage(server)
        stage.play()
        rows, arm = protected_rows(url), fuzz.Arm("closed-test")
        fuzz.look(arm, server, url, rows)
        assert arm.findings == []
        live = next(b for b in stage.bases if b.method == "SubmitSamples" and b.live)
        server.deliver("SubmitSamples", live.message.SerializeToString(), 30.0)
        fuzz.look(arm, server, url, rows)
        assert {text.split()[2] for text in arm.findings} == {"lease", "sample", "payload"}
        assert arm.memory_kib and arm.threads
    finally:
        server.close()
    assert not server.healthy()


def test_growth_is_what_the_second_half_adds() -> None:
    assert fuzz.Arm("a", memory_kib=[100, 200, 200, 200]).growth_kib() == 0
    assert fuzz.Arm("a", memory_kib=[100, 200, 200, 900]).growth_kib() == 700
    assert fuzz.Arm("a", memory_kib=[900, 200, 200, 200]).growth_kib() == 0


def test_of_a_live_message_only_broken_copies_are_made() -> None:
    rng = random.Random(5)
    drain = Base("Drain", pb.DrainRequest(run_id=RUN_ID), True)
    for _ in range(50):
        assert mutate(rng, "Drain", drain.message, live=True).sure == REFUSED
    changed = [mutate(rng, "Sample", pb.SampleRequest(run_id=RUN_ID, key={"ordinal": 1}), live=True) for _ in range(50)]
    assert {h.sure for h in changed} == {NO_EFFECT, REFUSED}


def test_a_seed_names_its_messages() -> None:
    message: Message = pb.AcquireRoleRequest(run_id=RUN_ID, role=3, holder="h", ttl_s=1.0)  # type: ignore[arg-type]
    for make in (raw, lambda *a: mutate(*a, live=False)):
        one, two = ([make(random.Random(seed), "AcquireRole", message) for seed in range(40)] for _ in range(2))
        assert one == two
        assert len({h.data for h in one}) > 20
