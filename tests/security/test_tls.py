"""TLS and mutual TLS between real servers and clients, and the command that makes what they need."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from security_support import RUN_ID, CannedLedger, client_of, make_folder, secured, tokens_of, whole

from rollbook.cli.main import main
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, Unauthenticated, Unavailable
from rollbook.core.security import ROLES, load_grants
from rollbook.core.settings import SecurityConfig
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.credentials import Access, client_access, server_credentials
from rollbook.v1 import ledger_service_pb2 as pb
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc


def test_a_role_calls_over_mutual_tls_by_name_and_by_address(folder: Path) -> None:
    security = whole(folder)
    with secured(CannedLedger(), security) as server:
        for host in ("127.0.0.1", "localhost"):
            address = f"{host}:{server.address.rpartition(':')[2]}"
            access = client_access(security, "observer", {})
            with LedgerClient(address, RUN_ID, access=access, retry_total_s=0.0, timeout_s=20.0) as client:
                assert client.run_status()["steps"] == 4
                assert len(list(client.payloads(0, 4))) == 3


def test_what_crosses_the_wire_under_tls_is_not_readable(folder: Path) -> None:
    """A relay between client and server sees neither the token nor the message; without TLS it sees both."""
    token = (folder / "operator.token").read_text().strip().encode()
    reason = "a reason that nobody else reads"
    for security, readable in ((whole(folder), False), (tokens_of(folder), True)):
        with secured(CannedLedger(), security) as server, Relay(server.address) as relay:
            access = client_access(security, "operator", {})
            with LedgerClient(relay.address, RUN_ID, access=access, retry_total_s=0.0, timeout_s=20.0) as client:
                client.retry_group(12, reason)
        assert (reason.encode() in relay.seen) is readable
        assert len(relay.seen) > 100 and (readable or token not in relay.seen)


def test_a_client_without_tls_gets_nothing_from_a_server_with_it(folder: Path) -> None:
    ledger = CannedLedger()
    with secured(ledger, whole(folder)) as server:
        with client_of(server, tokens_of(folder), "observer", timeout_s=5.0) as client, pytest.raises(Unavailable):
            client.run_status()
    assert not ledger.calls


def test_a_client_without_a_certificate_is_turned_away_where_one_is_asked_for(folder: Path) -> None:
    mutual = whole(folder)
    only_server = replace(mutual, require_client_certificate=False, client_certificate="", client_key="")
    for server_side, welcome in ((only_server, True), (mutual, False)):
        ledger = CannedLedger()
        with secured(ledger, server_side) as server, client_of(server, only_server, "observer", timeout_s=5.0) as client:
            if welcome:
                client.run_status()
            else:
                with pytest.raises(Unavailable):
                    client.run_status()
        assert bool(ledger.calls) is welcome


def test_a_client_certificate_of_another_authority_is_turned_away(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "other")
    foreign = replace(whole(folder), client_certificate=f"{tmp_path}/other/client.pem", client_key=f"{tmp_path}/other/client.key")
    ledger = CannedLedger()
    with secured(ledger, whole(folder)) as server, client_of(server, foreign, "observer", timeout_s=5.0) as client:
        with pytest.raises(Unavailable):
            client.run_status()
    assert not ledger.calls


def test_a_certificate_is_no_token(folder: Path) -> None:
    nobody = replace(whole(folder), token_dir="")
    with secured(CannedLedger(), whole(folder)) as server, client_of(server, nobody, "observer") as client:
        with pytest.raises(Unauthenticated, match="asks for a token"):
            client.run_status()


def test_a_server_of_another_authority_is_not_believed_and_gets_no_token(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "other")
    impostor = replace(whole(tmp_path / "other"), require_client_certificate=False, tokens="")
    ledger = CannedLedger()
    with secured(ledger, impostor) as server:
        with client_of(server, whole(folder), "observer", retry_total_s=600.0) as client:
            with pytest.raises(Unauthenticated, match="security.ca is not the authority"):  # at once, not after 600 s
                client.run_status()
    assert not ledger.calls


def test_a_certificate_for_another_name_is_not_believed(folder: Path, tmp_path: Path) -> None:
    """Signed by the right authority, but a client's: it names no server, so the holder of a worker's key cannot pose as one."""
    posing = replace(
        whole(folder), certificate=f"{folder}/client.pem", key=f"{folder}/client.key", require_client_certificate=False
    )
    ledger = CannedLedger()
    with secured(ledger, posing) as server, client_of(server, whole(folder), "observer", timeout_s=5.0) as client:
        with pytest.raises((Unauthenticated, Unavailable)):
            client.run_status()
    assert not ledger.calls


def test_a_token_is_not_sent_in_clear_text_to_another_machine(folder: Path) -> None:
    for address in ("192.0.2.1:1", "ledger.example:50051", "[2001:db8::1]:1", "127.0.0.1.example:1"):
        with LedgerClient(address, RUN_ID, access=Access(lambda: "t" * 43), retry_total_s=0.0) as client:
            with pytest.raises(ConfigError, match="security.ca is not set"):
                client.run_status()


def test_certificates_are_read_when_the_server_starts_and_not_before_the_next_start(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    security = whole(moved)
    with secured(CannedLedger(), security) as server:
        for name in ("server.pem", "server.key", "tokens.sha256"):
            (moved / name).unlink()
        with client_of(server, security, "observer") as client:
            client.run_status()
    for name in ("server.pem", "server.key", "tokens.sha256"):
        with pytest.raises(ConfigError, match="No such file"):
            with secured(CannedLedger(), security):
                raise AssertionError("started")
        shutil.copy(folder / name, moved / name)
    with secured(CannedLedger(), security) as server, client_of(server, security, "observer") as client:
        client.run_status()


@pytest.mark.parametrize(("field", "content", "mode", "said"), [
    ("key", "", 0o604, "chmod 600"), ("key", "nothing", 0o600, "no PEM file with private key"),
    ("certificate", "nothing", 0o600, "no PEM file with certificate"), ("ca", "nothing", 0o600, "no PEM file with certificate"),
])  # fmt: skip
def test_a_file_that_is_no_certificate_is_named(
    folder: Path, tmp_path: Path, field: str, content: str, mode: int, said: str
) -> None:
    security, file = whole(folder), tmp_path / "file.pem"
    file.write_text(content or Path(getattr(security, field)).read_text())
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        server_credentials(replace(security, **{field: str(file)}))
    assert f"security.{field}" in str(caught.value)


def test_a_stranger_with_tls_alone_may_ask_for_health_and_nothing_else(folder: Path) -> None:
    security = replace(whole(folder), require_client_certificate=False, client_certificate="", client_key="", token_dir="")
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    with secured(CannedLedger(), security) as server, grpc.secure_channel(server.address, credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.LedgerServiceStub(channel).RunStatus(pb.RunStatusRequest(run_id=RUN_ID), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=10) == b"\x08\x01"


def test_init_makes_private_files_and_a_section_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = make_folder(tmp_path / "made", "--host", "ledger.example", "--host", "192.0.2.7", "--run", "demo")
    made = tmp_path / "made"
    for path in (made, *made.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert {p.name for p in made.glob("*.token")} == {f"{role}.token" for role in ROLES}
    tokens = {p.name: p.read_text().strip() for p in made.glob("*.token")}
    assert len(set(tokens.values())) == len(ROLES) and all(len(t) == 43 for t in tokens.values())
    keys = "".join(p.read_text() for p in made.glob("*.key"))
    assert not any(t in said for t in tokens.values()) and not any(line in said for line in keys.splitlines() if len(line) > 40)
    assert not any(t in (made / "tokens.sha256").read_text() for t in tokens.values())
    grants = load_grants(str(made / "tokens.sha256"))
    for role in ROLES:
        grant = grants.of(tokens[f"{role}.token"])
        assert grant is not None and (grant.role, grant.run_id) == (role, "demo")
    looked = ["openssl", "x509", "-in", "server.pem", "-noout", "-text"]
    shown = subprocess.run(looked, cwd=made, capture_output=True, text=True, timeout=60).stdout
    for name in ("DNS:ledger.example", "IP Address:192.0.2.7", "DNS:localhost", "IP Address:127.0.0.1", "TLS Web Server"):
        assert name in shown
    assert not list(tmp_path.glob(".made*")), "nothing is left of the making"

    file = tmp_path / "run.toml"
    file.write_text(RUN + said[said.index("[security]") :])
    assert load_config(file, ["ledger.address=0.0.0.0:0"]).security == whole(made)

    before = {p.name: p.read_bytes() for p in made.iterdir()}
    assert main(["security", "init", str(made)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in made.iterdir()} == before


RUN = """
[run]
id = "demo"
dir = "run"
steps = 1
[model]
path = "model"
[task]
source = "jsonl"
path = "tasks.jsonl"
[learner]
groups_per_step = 1
group_size = 2
[[workers]]
engine = "transformers"
"""


def test_init_without_openssl_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["security", "init", str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err
    assert "apt-get install openssl" in said and "--no-certificates" in said and "[security]" in said
    assert not list(tmp_path.iterdir()), "half of it must not stay"
    assert main(["security", "init", str(tmp_path / "made"), "--no-certificates"]) == 0
    assert len(list((tmp_path / "made").iterdir())) == len(ROLES) + 1
    with secured(CannedLedger(), tokens_of(tmp_path / "made")) as server:
        with client_of(server, tokens_of(tmp_path / "made"), "observer") as client:
            client.run_status()


def test_init_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so no certificates can be made")
    assert main(["security", "init", str(tmp_path / "made"), "--host", "two words,IP:x"]) == 2
    assert "openssl" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_private_umask_is_not_needed_and_not_changed(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_folder(tmp_path / "made")
        assert os.umask(0o000) == 0o000
    finally:
        os.umask(before)
    assert not [p for p in (tmp_path / "made").iterdir() if p.stat().st_mode & 0o077]
    assert SecurityConfig() == SecurityConfig(certificate="", key="", ca="")


class Relay:
    """Passes bytes between one client and a server and keeps what the client sent."""

    def __init__(self, address: str) -> None:
        import socket
        import threading

        host, _, port = address.rpartition(":")
        self.seen = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]

        def pump(source: socket.socket, target: socket.socket, keep: bool) -> None:
            try:
                while data := source.recv(65536):
                    self.seen += data if keep else b""
                    target.sendall(data)
            except OSError:
                pass

        def accept() -> None:
            try:
                while True:
                    near, _ = self._listener.accept()
                    far = socket.create_connection((host, int(port)))
                    self._sockets += [near, far]
                    for pair in ((near, far, True), (far, near, False)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()
