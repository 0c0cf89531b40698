"""Loopback by default; beyond it only with tokens and TLS, whatever the way a server is started."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from security_support import RUN_ID, CannedLedger, client_of, make_folder, secured, tokens_of, whole
from test_tls import RUN

from rollbook.cli.main import main
from rollbook.cli.securing import checked_security
from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.errors import ConfigError
from rollbook.core.security import is_loopback
from rollbook.core.settings import LedgerConfig, SecurityConfig
from rollbook.observe.exporter import MetricsPage
from rollbook.observe.pages import LOOPBACK
from rollbook.rpc.server import serve


def config(tmp_path: Path, security: SecurityConfig | None = None, *overrides: str) -> Config:
    fields = {} if security is None else {name: getattr(security, name) for name in SecurityConfig.__slots__}
    lines = [f"{name} = {str(v).lower() if isinstance(v, bool | int | float) else repr(v)}" for name, v in fields.items() if v]
    file = tmp_path / "run.toml"
    file.write_text(RUN + "[security]\n" + "\n".join(lines))
    return load_config(file, overrides)


def test_the_default_address_is_loopback() -> None:
    assert LedgerConfig().address == "127.0.0.1:0" and is_loopback(LedgerConfig().address)


@pytest.mark.parametrize(("address", "here"), [
    ("127.0.0.1:1", True), ("127.8.9.10:1", True), ("localhost:1", True), ("[::1]:1", True), ("0.0.0.0:1", False),
    ("[::]:1", False),
    ("*:1", False), ("10.0.0.1:1", False), ("localhost.example:1", False), ("127.0.0.1.example:1", False), ("unix:1", False),
    ("[::ffff:10.0.0.1]:1", False), ("2130706433:1", False), ("169.254.1.1:1", False),
])  # fmt: skip
def test_what_counts_as_loopback(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:5", "ledger.example:5", "unix:5"])
@pytest.mark.parametrize(("given", "said"), [
    ("nothing", r"security.certificate \(TLS\) and security.tokens"), ("tokens", r"security.certificate \(TLS\) is not set"),
    ("tls", r"and security.tokens \(who may call\) is not set"), ("both", ""),
])  # fmt: skip
def test_listening_beyond_loopback_needs_tokens_and_tls(
    folder: Path, tmp_path: Path, address: str, given: str, said: str
) -> None:
    both = whole(folder)
    tls = {n: getattr(both, n) for n in ("certificate", "key", "ca", "client_certificate", "client_key")}
    security = {"nothing": SecurityConfig(), "tokens": tokens_of(folder), "tls": SecurityConfig(**tls), "both": both}[given]
    if not said:
        assert config(tmp_path, security, f"ledger.address={address}").security == security
        return
    with pytest.raises(ConfigError, match=said) as caught:
        config(tmp_path, security, f"ledger.address={address}")
    assert "security init" in str(caught.value) and "127.0.0.1" in str(caught.value), "the ways out"
    with pytest.raises(ConfigError, match=said):  # and where no configuration was read
        serve(CannedLedger(), address, run_id=RUN_ID, security=security)


def test_a_server_with_both_is_heard_on_every_interface(folder: Path) -> None:
    security = whole(folder)
    server = serve(CannedLedger(), "0.0.0.0:0", run_id=RUN_ID, security=security, threads=4)
    try:
        server.address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        with client_of(server, security, "observer") as client:
            client.run_status()
    finally:
        server.stop(0.0)


def test_a_server_by_default_is_not_heard_beyond_loopback() -> None:
    with secured(CannedLedger(), SecurityConfig()) as server:
        port = int(server.address.rpartition(":")[2])
        assert heard_at(port) <= LOOPBACKS


def test_the_metrics_page_is_heard_on_loopback_only() -> None:
    page = MetricsPage(0, CollectorRegistry())
    try:
        assert heard_at(page.port) <= LOOPBACKS
        assert LOOPBACK == "127.0.0.1"
        with socket.create_connection((LOOPBACK, page.port), timeout=10):
            pass
    finally:
        page.close()


LOOPBACKS = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel writes it, the second for a socket that could speak IPv6 too."""


def heard_at(port: int) -> set[str]:
    """Addresses at which this machine listens on ``port``, by the kernel's own table."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    found = {line[1].partition(":")[0] for line in lines if line[3] == "0A" and int(line[1].partition(":")[2], 16) == port}
    assert found, "nobody listens there"
    return found


@pytest.mark.parametrize(("fields", "said"), [
    ({"certificate": "a"}, "security.certificate and security.key belong together"),
    ({"key": "a"}, "security.certificate and security.key belong together"),
    ({"client_key": "a"}, "security.client_certificate and security.client_key belong together"),
    ({"certificate": "a", "key": "b"}, "security.ca is missing"),
    ({"require_client_certificate": True}, "needs security.certificate and key"),
    ({"certificate": "a", "key": "b", "ca": "c", "require_client_certificate": True}, "client_certificate and client_key"),
    ({"tokens": "a", "reflection": True}, "not together with security.tokens"),
    ({"calls_open_max": 3}, "security.calls_open_max = 3: must be at least 4"),
    ({"message_bytes_max": 1 << 20}, "security.message_bytes_max"),
])  # fmt: skip
def test_a_section_that_cannot_be_meant_is_refused(tmp_path: Path, fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, SecurityConfig(**fields))


def test_paths_start_at_the_configuration_and_change_no_digest(tmp_path: Path) -> None:
    made = config(tmp_path, SecurityConfig(tokens="sub/tokens", token_dir="."))
    assert made.security.tokens == str(tmp_path / "sub" / "tokens") and made.security.token_dir == str(tmp_path)
    assert made.digest() == config(tmp_path).digest()
    assert config_from_json(made.to_json()).security == made.security


def test_doctor_says_how_the_server_is_secured_and_what_does_not_fit(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_folder(other, "--no-certificates")
    assert checked_security(config(tmp_path)) == "clear text, no tokens: whoever reaches the port takes part"
    assert checked_security(config(tmp_path, tokens_of(folder))) == "clear text, a token for every role"
    assert checked_security(config(tmp_path, whole(folder))) == "mutual TLS, a token for every role"
    for security, said in (
        (replace(tokens_of(folder), token_dir=str(other)), "knows no such token for role 'worker'"),
        (replace(tokens_of(folder), token_dir=str(tmp_path)), "No such file"),
        (replace(whole(folder), key=str(folder / "none")), "security.key"),
    ):
        with pytest.raises(ConfigError, match=said):
            checked_security(config(tmp_path, security))


def test_a_command_refuses_to_start_a_server_that_everybody_can_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    for command in ("run", "doctor"):
        assert main([command, str(tmp_path / "run.toml"), "--set", "ledger.address=0.0.0.0:0"]) in (1, 2)
        said = capsys.readouterr()
        assert "can be reached from other machines" in said.err + said.out
    assert not (tmp_path / "run").exists()
