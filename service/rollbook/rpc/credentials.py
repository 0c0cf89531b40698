"""How a client shows who it is and knows its server, and what the server proves itself with.

Owns TLS on both sides and the metadata that carries a token. Never stores a secret in an attribute that is shown, and never
sends a token in clear text beyond this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from rollbook.core.errors import ConfigError
from rollbook.core.security import TokenSource, check_private, is_loopback, token_source
from rollbook.core.settings import SecurityConfig

TOKEN_KEY = "authorization"
SCHEME = "Bearer "

Dial = Callable[[str, list[tuple[str, int]]], grpc.Channel]
"""(address, channel options) to a channel; a simulator dials its own network."""


class Access:
    """A client's side: the token it sends and, over TLS, the channel's credentials."""

    def __init__(self, token: TokenSource = lambda: "", channel: grpc.ChannelCredentials | None = None) -> None:
        self._token = token
        self._channel = channel

    def dial(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """Open a channel."""
        if self._channel is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, self._channel, options)

    def sent_to(self, address: str) -> dict[str, Any]:
        """Arguments of every call to ``address``: the metadata with the token, if there is one. Raises ConfigError."""
        token = self._token()
        if not token:
            return {}
        if self._channel is None and not is_loopback(address):
            raise ConfigError(
                f"the ledger server is at {address}, on another machine, and security.ca is not set: a token is not sent there "
                "in clear text; set security.ca to the certificate of the run's authority"
            )
        return {"metadata": ((TOKEN_KEY, SCHEME + token),)}


STRANGER = Access()
"""No token, no TLS."""


def client_access(security: SecurityConfig, role: str, environ: Mapping[str, str]) -> Access:
    """Access of a client of ``role``. Raises ConfigError when a file it needs cannot be read."""
    return Access(token_source(security, role, environ), _channel(security))


def _channel(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    if not security.ca:
        return None
    key = chain = None
    if security.client_certificate:
        key, chain = _key(security, "client_key"), _read(security, "client_certificate")
    return grpc.ssl_channel_credentials(_read(security, "ca"), key, chain)


def server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """TLS of a server, from its files as they are now; None for clear text. Raises ConfigError."""
    if not security.certificate:
        return None
    pair = (_key(security, "key"), _read(security, "certificate"))
    asks = security.require_client_certificate
    return grpc.ssl_server_credentials([pair], _read(security, "ca") if asks else None, asks)


def _key(security: SecurityConfig, name: str) -> bytes:
    check_private(getattr(security, name), f"security.{name}")
    return _read(security, name, "PRIVATE KEY-----")


def _read(security: SecurityConfig, name: str, holds: str = "BEGIN CERTIFICATE-----") -> bytes:
    path = getattr(security, name)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"security.{name} = {path}: {error.strerror}") from None
    if holds.encode() not in content:
        raise ConfigError(f"security.{name} = {path}: no PEM file with {holds.strip('-').removeprefix('BEGIN ').lower()} in it")
    return content
