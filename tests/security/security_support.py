"""What the security tests share: a folder of certificates and tokens as the command makes it, and servers that use it."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_support import RUN_ID, CannedLedger

from rollbook.cli.main import main
from rollbook.core.settings import SecurityConfig
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.credentials import client_access
from rollbook.rpc.server import RunningServer, serve
from rollbook.v1 import ledger_service_pb2_grpc as pb_grpc


def make_folder(folder: Path, *arguments: str) -> str:
    """``rollbook security init``; what it printed. Skips by name where openssl is missing."""
    if "--no-certificates" not in arguments and shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so no certificates can be made")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["security", "init", str(folder), *arguments]) == 0
    return said.getvalue()


def tokens_of(folder: Path, **more: Any) -> SecurityConfig:
    """Tokens without TLS, for loopback."""
    return SecurityConfig(tokens=str(folder / "tokens.sha256"), token_dir=str(folder), **more)


def whole(folder: Path, **more: Any) -> SecurityConfig:
    """Tokens and mutual TLS."""
    files = {
        "certificate": "server.pem", "key": "server.key", "ca": "ca.pem", "client_certificate": "client.pem",
        "client_key": "client.key",
    }  # fmt: skip
    return replace(
        tokens_of(folder), require_client_certificate=True, **{k: str(folder / v) for k, v in files.items()}, **more
    )


@contextmanager
def secured(ledger: Any, security: SecurityConfig, **options: Any) -> Iterator[RunningServer]:
    """The ledger behind a server on a free loopback port."""
    server = serve(ledger, "127.0.0.1:0", run_id=RUN_ID, security=security, **{"threads": 8, **options})
    try:
        yield server
    finally:
        server.stop(0.0)


def client_of(
    server: RunningServer, security: SecurityConfig, role: str, environ: dict[str, str] | None = None, **options: Any
) -> LedgerClient:
    """A client with the token of ``role``, which gives up at once."""
    access = client_access(security, role, environ or {})
    return LedgerClient(server.address, RUN_ID, access=access, **{"retry_total_s": 0.0, "timeout_s": 20.0, **options})


@contextmanager
def bare_stub(server: RunningServer) -> Iterator[pb_grpc.LedgerServiceStub]:
    """A stub of somebody who uses none of our client's code."""
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield pb_grpc.LedgerServiceStub(channel)


__all__ = ["CannedLedger", "RUN_ID", "bare_stub", "client_of", "make_folder", "secured", "tokens_of", "whole"]
