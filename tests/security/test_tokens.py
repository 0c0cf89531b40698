"""Who may call what: every method, every role, through a real server."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_support import CALLS, FEEDER, TERM, CannedLedger
from security_support import RUN_ID, bare_stub, client_of, make_folder, secured, tokens_of

from rollbook.core.errors import ConfigError, PermissionDenied, RollbookError, Unauthenticated
from rollbook.core.records import Role
from rollbook.core.security import ROLES, Grants, forget_tokens, load_grants, supervised_tokens, token_digest
from rollbook.core.settings import SecurityConfig
from rollbook.observe.metrics import REGISTRY
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.credentials import Access
from rollbook.rpc.gate import OWN_ROLE, PERMISSIONS
from rollbook.rpc.wrapping import SERVICE
from rollbook.v1 import ledger_service_pb2 as pb

TERMS = {"acquire_role", "renew_role", "release_role"}
READS = {
    "cursor", "tool_calls", "read_plan", "payloads", "sample", "versions", "resume_point", "run_status", "survival",
    "step_metrics", "audit", "explain",
}  # fmt: skip
MAY = {
    "ledger": set(CALLS),
    "worker": {
        "register_worker", "heartbeat", "lease_slots", "submit_samples", "report_failures", "record_tool_call", "tool_calls",
    },
    "learner": TERMS | {
        "cursor", "plan_step", "read_plan", "payloads", "finish_plan", "publish_version", "versions", "fork_lineage",
        "commit_checkpoint", "mark_checkpoint", "resume_point",
    },
    "feeder": TERMS | {"cursor", "append_groups", "feed_demand", "resume_point"},
    "observer": READS,
    "operator": READS | {"quarantine_group", "retry_group", "drain"},
}  # fmt: skip
"""Written out once more, apart from the product's table: what each role needs and nothing else."""


def call(client: LedgerClient, verb: str, role: str = "") -> Any:
    arguments, more = CALLS[verb]
    if role == "feeder" and verb in TERMS:  # the prepared calls are the learner's
        arguments = (Role.FEEDER, *arguments[1:]) if verb == "acquire_role" else (FEEDER,)
    answer = getattr(client, verb)(*arguments, **more)
    return list(answer) if verb == "payloads" else answer


def test_every_rpc_of_the_service_has_its_roles() -> None:
    methods = {m.name for m in pb.DESCRIPTOR.services_by_name["LedgerService"].methods}
    assert set(PERMISSIONS) == methods, "a method without an entry in PERMISSIONS"
    assert set(OWN_ROLE) <= methods
    assert {role for roles in PERMISSIONS.values() for role in roles} == set(ROLES) - {"ledger"}
    assert set(MAY) == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_what_it_needs_and_nothing_else(folder: Path, role: str) -> None:
    security, ledger = tokens_of(folder), CannedLedger()
    with secured(ledger, security) as server, client_of(server, security, role) as client:
        for verb in CALLS:
            before = len(ledger.calls)
            if verb in MAY[role]:
                call(client, verb, role)
                assert len(ledger.calls) == before + 1, verb
            else:
                with pytest.raises(PermissionDenied, match=f"role '{role}' may not call .*; use one of role"):
                    call(client, verb, role)
                assert len(ledger.calls) == before, f"{verb} reached the ledger"


@pytest.mark.parametrize(("role", "other"), [("learner", FEEDER), ("feeder", TERM)])
def test_a_token_is_good_for_its_own_fenced_role_only(folder: Path, role: str, other: Any) -> None:
    security, ledger = tokens_of(folder), CannedLedger()
    with secured(ledger, security) as server, client_of(server, security, role) as client:
        for attempt in (
            lambda: client.acquire_role(other.role, "holder-9", 15.0), lambda: client.acquire_role(Role.LEDGER, "holder-9", 15.0),
            lambda: client.renew_role(other), lambda: client.release_role(other),
        ):  # fmt: skip
            with pytest.raises(PermissionDenied, match=f"for the role '{role}' only"):
                attempt()
    assert not ledger.calls


def test_a_token_of_one_run_does_not_open_another(tmp_path: Path) -> None:
    for run_id, welcome in ((RUN_ID, True), ("another", False)):
        security = tokens_of(tmp_path / run_id)
        make_folder(tmp_path / run_id, "--no-certificates", "--run", run_id)
        with secured(CannedLedger(), security) as server, client_of(server, security, "worker") as client:
            if welcome:
                call(client, "lease_slots")
            else:
                with pytest.raises(PermissionDenied, match="is for run 'another', this server is of 'demo'"):
                    call(client, "lease_slots")


@pytest.mark.parametrize("sent", [
    None, "", "Bearer ", "bearer {}", "Basic {}", "{}", "Bearer {}x", "Bearer  {}", "Bearer " + "a" * 600, "Bearer {digest}",
])  # fmt: skip
def test_a_stranger_is_unauthenticated_and_its_message_is_not_read(folder: Path, sent: str | None) -> None:
    ledger, token = CannedLedger(), (folder / "ledger.token").read_text().strip()
    metadata = None if sent is None else (("authorization", sent.format(token, digest=token_digest(token))),)
    with secured(ledger, tokens_of(folder)) as server, grpc.insecure_channel(server.address) as channel:
        raw = channel.unary_unary(f"/{SERVICE}/RunStatus")  # bytes that are no message: only who is let in is told so
        with pytest.raises(grpc.RpcError) as caught:
            raw(b"\xff\xff\xff", timeout=10, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "ROLLBOOK_TOKEN_FILE" in caught.value.details() or "security.tokens" in caught.value.details()
    assert not ledger.calls


def test_two_tokens_in_one_call_are_none(folder: Path) -> None:
    token = (folder / "ledger.token").read_text().strip()
    twice = (("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}"))
    with secured(CannedLedger(), tokens_of(folder)) as server, bare_stub(server) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.RunStatus(pb.RunStatusRequest(run_id=RUN_ID), timeout=10, metadata=twice)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_stranger_is_not_repeated_and_is_told_the_way_out(folder: Path) -> None:
    before = _refused("UNAUTHENTICATED")
    with secured(CannedLedger(), tokens_of(folder)) as server:
        for access in (Access(), Access(lambda: "x" * 43)):
            with LedgerClient(server.address, RUN_ID, access=access, retry_total_s=600.0) as client:
                with pytest.raises(Unauthenticated, match="token"):
                    client.run_status()
    assert _refused("UNAUTHENTICATED") == before + 2, "each was sent once"


def _refused(code: str) -> float:
    return REGISTRY.get_sample_value("rollbook_rpc_failures_total", {"code": code}) or 0.0


def test_a_flood_of_strangers_fills_neither_the_log_nor_the_metrics(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with secured(CannedLedger(), tokens_of(folder)) as server, grpc.insecure_channel(server.address) as channel:
        with caplog.at_level(logging.WARNING):
            for n in range(40):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(f"/{SERVICE}/Made{n}")(b"", timeout=10)
    assert len([r for r in caplog.records if getattr(r, "event", "") == "rpc_refused"]) == 6, "the 1st, 2nd, 4th, …, 32nd"
    assert not any("Made" in (s.labels.get("method") or "") for m in REGISTRY.collect() for s in m.samples)


def test_health_is_told_to_everybody_but_not_held_open_for_strangers(folder: Path) -> None:
    with secured(CannedLedger(), tokens_of(folder)) as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_client_takes_its_token_from_the_file_then_the_environment_then_the_folder(folder: Path) -> None:
    security = tokens_of(folder)
    learner = str(folder / "learner.token")
    operator = (folder / "operator.token").read_text().strip()
    with secured(CannedLedger(), security) as server:
        for environ, may, may_not in (
            ({"ROLLBOOK_TOKEN_FILE": learner, "ROLLBOOK_TOKEN": operator}, "finish_plan", "drain"),
            ({"ROLLBOOK_TOKEN_FILE": "", "ROLLBOOK_TOKEN": operator}, "drain", "finish_plan"),
            ({}, "lease_slots", "drain"),
        ):
            with client_of(server, security, "worker", environ) as client:
                call(client, may)
                with pytest.raises(PermissionDenied):
                    call(client, may_not)


def test_a_new_connection_takes_up_a_replaced_token_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text((folder / "observer.token").read_text())
    environ, security = {"ROLLBOOK_TOKEN_FILE": str(file)}, tokens_of(folder)
    with secured(CannedLedger(), security) as first, secured(CannedLedger(), security) as second:
        addresses = iter([first.address, second.address])
        client = client_of(first, security, "worker", environ, retry_total_s=30.0)
        client._connection._address = lambda: next(addresses)
        with client:
            call(client, "run_status")
            file.write_text((folder / "worker.token").read_text())
            first.stop(0.0)
            with pytest.raises(PermissionDenied, match="role 'worker' may not call RunStatus"):
                call(client, "run_status")


@pytest.mark.parametrize(("content", "mode", "said"), [
    ("a" * 43, 0o604, "chmod 600"), ("a" * 43, 0o602, "chmod 600"), ("", 0o600, "one line"),
    ("a" * 43 + "\nb", 0o600, "one line"),
    ("a" * 23, 0o600, "24 to 512"), ("a" * 513, 0o600, "24 to 512"), ("a" * 30 + " b", 0o600, "without a space"),
    ("é" * 43, 0o600, "ASCII"),
])  # fmt: skip
def test_a_token_file_that_is_none_is_refused_without_showing_it(tmp_path: Path, content: str, mode: int, said: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with LedgerClient("127.0.0.1:1", RUN_ID, access=_from(file), retry_total_s=0.0) as client:
        with pytest.raises(ConfigError, match=said) as caught:
            client.run_status()
    assert not content or content not in str(caught.value)


def _from(file: Path) -> Access:
    from rollbook.rpc.credentials import client_access

    return client_access(SecurityConfig(), "worker", {"ROLLBOOK_TOKEN_FILE": str(file)})


@pytest.mark.parametrize("length", [24, 512])
def test_the_shortest_and_the_longest_token_work(tmp_path: Path, length: int) -> None:
    token = "t" * length
    file = tmp_path / "tokens"
    file.write_text(f"{token_digest(token)} observer\n")
    with secured(CannedLedger(), SecurityConfig(tokens=str(file))) as server:
        with client_of(server, SecurityConfig(), "worker", {"ROLLBOOK_TOKEN": token}) as client:
            call(client, "run_status")


@pytest.mark.parametrize(("line", "said"), [
    ("secret-token-in-the-wrong-file-0123456789 worker", "holds digests, never tokens"), ("{} boss", "role 'boss': one of"),
    ("{}", "SHA256 ROLE"), ("{} worker run more", "SHA256 ROLE"), ("{upper} worker", "holds digests"), ("", "names no token"),
    ("{} worker\n{} learner", "twice"),
])  # fmt: skip
def test_a_digest_file_that_is_wrong_is_refused_by_line_and_not_shown(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "tokens"
    digest = token_digest("x" * 43)
    file.write_text("# comment\n\n" + line.replace("{}", digest).replace("{upper}", digest.upper()) + "\n")
    with pytest.raises(ConfigError, match=said) as caught:
        load_grants(str(file))
    assert "secret-token" not in str(caught.value) and str(file) in str(caught.value)


def test_a_server_knows_a_bounded_number_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    lines = [f"{token_digest(f'{n:043}')} worker" for n in range(257)]
    file.write_text("\n".join(lines[:256]))
    grants = load_grants(str(file))
    assert (grant := grants.of(f"{255:043}")) is not None and grant.role == "worker"
    assert grants.of(f"{256:043}") is None and Grants(()).of("") is None
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="257 tokens; at most 256"):
        load_grants(str(file))


def test_every_token_is_compared_in_constant_time_with_every_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen: list[bytes] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append(a) or real(a, b))
    file = tmp_path / "tokens"
    file.write_text("\n".join(f"{token_digest(f'{n:043}')} worker" for n in range(6)))
    grants = load_grants(str(file))
    for token in (f"{0:043}", f"{5:043}", "unknown"):
        seen.clear()
        grants.of(token)
        assert len(seen) == 6


def test_a_supervised_role_gets_its_own_token_and_not_its_supervisors(folder: Path) -> None:
    security = tokens_of(folder)
    assert supervised_tokens(security, "worker") == {"ROLLBOOK_TOKEN_FILE": f"{folder}/worker.token", "ROLLBOOK_TOKEN": ""}
    assert supervised_tokens(security, "ledger") == {"ROLLBOOK_TOKEN_FILE": "", "ROLLBOOK_TOKEN": ""}
    assert supervised_tokens(replace(security, token_dir=""), "worker") == {}, "then what it was given is all there is"


def test_what_a_role_starts_inherits_no_token() -> None:
    environ = dict(os.environ) | {"ROLLBOOK_TOKEN_FILE": "/a", "ROLLBOOK_TOKEN": "b" * 43}
    forget_tokens(environ)
    assert not {"ROLLBOOK_TOKEN_FILE", "ROLLBOOK_TOKEN"} & environ.keys()


def test_the_new_errors_are_for_a_person_and_not_for_a_loop() -> None:
    assert not Unauthenticated.retryable and not PermissionDenied.retryable
    assert issubclass(Unauthenticated, RollbookError) and issubclass(PermissionDenied, RollbookError)
