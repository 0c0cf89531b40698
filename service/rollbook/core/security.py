"""Who may call the ledger server, and where secrets are read: the rules, without a network.

Owns the roles a token may have, the two places a token comes from (a file, the environment), the file of token digests, and
what a configuration must say before the ledger server may be heard beyond this machine. Never prints a secret: an error names
the file or the variable that holds it. A configuration, and so everything that is stored with a run, holds paths only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from rollbook.core.errors import ConfigError

if TYPE_CHECKING:
    from rollbook.core.config import Config
    from rollbook.core.settings import SecurityConfig

LEDGER, WORKER, LEARNER, FEEDER, OBSERVER, OPERATOR = ROLES = ("ledger", "worker", "learner", "feeder", "observer", "operator")
"""What a token makes its bearer. ``ledger`` may do everything: it is for who administers the run, no role process needs it."""

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "ROLLBOOK_TOKEN", "ROLLBOOK_TOKEN_FILE"
"""Environment variables a client takes its token from; the file wins, an empty variable counts as absent."""

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 24, 512
"""Shorter ones can be guessed, longer ones are no tokens."""
GRANTS_MAX = 256
"""Tokens one server knows; each call is compared with all of them."""
SECRET_BYTES_MAX = 1 << 16

_USERS_PASSWORD = re.compile(r"[^:/]*://[^:/]*:[^@]+@")
"""As the database library reads it: up to the first ``@``, slashes included."""
_PARAMETER = re.compile(r"[^?]*\?(?:[^#]*&)?(?:ssl)?password=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Grant:
    """One line of the file of token digests."""

    digest: bytes
    role: str
    run_id: str
    """The only run the token is good for; empty = the run of whichever server knows it."""


class Grants:
    """The tokens a server knows, by their digests. Reads the file once: it is read again when the server starts again."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._grants = grants

    def of(self, token: str) -> Grant | None:
        """The grant of a token; None for one that is unknown. Takes the same time whichever it is."""
        presented = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found = None
        for grant in self._grants:
            if hmac.compare_digest(grant.digest, presented):
                found = grant
        return found


def token_digest(token: str) -> str:
    """What the server's file holds instead of the token: sha256 hex. Enough for random tokens, which nobody can try in turn."""
    return hashlib.sha256(token.encode()).hexdigest()


def load_grants(path: str) -> Grants:
    """Read ``SHA256 ROLE [RUN]`` lines; ``#`` begins a comment. Raises ConfigError naming file and line, never its text."""
    grants: list[Grant] = []
    for number, line in enumerate(_text_of(path, "security.tokens").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if len(words) not in (2, 3):
            raise ConfigError(f"{where}: write SHA256 ROLE, or SHA256 ROLE RUN for a token of one run only")
        if len(words[0]) != 64 or set(words[0]) - set("0123456789abcdef"):
            raise ConfigError(
                f"{where}: the first word is no sha256 digest in hexadecimal; this file holds digests, never tokens "
                "(`rollbook security init DIR` writes one)"
            )
        if words[1] not in ROLES:
            raise ConfigError(f"{where}: role {words[1]!r}: one of {', '.join(ROLES)}")
        grants.append(Grant(bytes.fromhex(words[0]), words[1], words[2] if len(words) == 3 else ""))
    if not grants:
        raise ConfigError(f"security.tokens = {path}: it names no token, so nobody could call the ledger server")
    if len(grants) > GRANTS_MAX:
        raise ConfigError(f"security.tokens = {path}: {len(grants)} tokens; at most {GRANTS_MAX}")
    if len({grant.digest for grant in grants}) != len(grants):
        raise ConfigError(f"security.tokens = {path}: a digest stands there twice; every role needs a token of its own")
    return Grants(tuple(grants))


def read_secret(path: str, what: str) -> str:
    """The one line of a file that holds a secret. Raises ConfigError when others may read it, or it is no one line of text."""
    check_private(path, what)
    text = _text_of(path, what).strip()
    if not text or "\n" in text or not text.isprintable():
        raise ConfigError(f"{what} = {path}: it must hold one line of printable text, the secret and nothing else")
    return text


def check_private(path: str, what: str) -> None:
    """Refuse a file with a secret that every account of the machine may read. Raises ConfigError."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"{what} = {path}: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{what} = {path}: every account of this machine may read or write it; chmod 600 {path}")


def read_token(path: str, what: str) -> str:
    """A token from its file. Raises ConfigError."""
    return _checked_token(read_secret(path, what), f"{what} = {path}")


TokenSource = Callable[[], str]
"""Gives the token to send, empty for none; asked again for every new connection, so a replaced file is taken up."""


def token_source(security: SecurityConfig, role: str, environ: Mapping[str, str]) -> TokenSource:
    """Where a client of ``role`` takes its token: the environment's file, the environment, ``security.token_dir``, or none.

    Raises ConfigError, from the source or here, when the file is missing, readable by everybody, or holds no token.
    """
    file, token = environ.get(TOKEN_FILE_VARIABLE, ""), environ.get(TOKEN_VARIABLE, "")
    if file:
        return lambda: read_token(file, TOKEN_FILE_VARIABLE)
    if token:
        checked = _checked_token(token.strip(), TOKEN_VARIABLE)
        return lambda: checked
    if security.token_dir:
        path = token_file(security, role)
        return lambda: read_token(path, f"token of role {role!r} in security.token_dir")
    return lambda: ""


def forget_tokens(environ: MutableMapping[str, str]) -> None:
    """Take both variables out of a role's environment: what it starts has no use for them, the user's code least of all."""
    environ.pop(TOKEN_FILE_VARIABLE, None)
    environ.pop(TOKEN_VARIABLE, None)


def token_file(security: SecurityConfig, role: str) -> str:
    """Where ``security.token_dir`` keeps the token of a role."""
    return str(Path(security.token_dir) / f"{role}.token")


def supervised_tokens(security: SecurityConfig, role: str) -> dict[str, str]:
    """Environment of a role's process: its own token as a file's name, and none that the supervisor was given."""
    if not security.token_dir:
        return {}
    file = "" if role == LEDGER else token_file(security, role)
    return {TOKEN_FILE_VARIABLE: file, TOKEN_VARIABLE: ""}


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` can only be reached from this machine. A name is taken for another machine's, ``localhost`` apart."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_security(c: Config) -> None:
    """What ``[security]`` must say together, and what the ledger's address and URL must not. Raises ConfigError."""
    check_url(c.ledger.url)
    s = c.security
    for one, other in (("certificate", "key"), ("client_certificate", "client_key")):
        if bool(getattr(s, one)) != bool(getattr(s, other)):
            raise ConfigError(f"security.{one} and security.{other} belong together: name both files, or none")
    if s.certificate and not s.ca:
        raise ConfigError(
            "security.ca is missing: without it clients cannot know the server behind security.certificate; name the file with "
            "the authority's certificate (`rollbook security init DIR` makes one)"
        )
    if s.require_client_certificate and not (s.certificate and s.client_certificate):
        raise ConfigError(
            "security.require_client_certificate = true needs security.certificate and key for the server, and "
            "security.client_certificate and client_key, or the run's own roles are turned away"
        )
    if s.reflection and s.tokens:
        raise ConfigError("security.reflection = true: it tells strangers what can be called; not together with security.tokens")
    check_reach(c.ledger.address, s)
    if c.ledger.status_address:
        check_reach(c.ledger.status_address, s, "ledger.status_address")


def check_reach(address: str, s: SecurityConfig, field: str = "ledger.address") -> None:
    """Refuse to be heard beyond this machine by strangers, or with tokens in clear text. Raises ConfigError."""
    if ":" not in address or is_loopback(address) or (s.tokens and s.certificate):
        return  # the first is no address, as whoever listens will say; an empty host is every interface of this machine
    missing = " and ".join(
        [*([] if s.certificate else ["security.certificate (TLS)"]), *([] if s.tokens else ["security.tokens (who may call)"])]
    )
    raise ConfigError(
        f"{field} = {address!r} can be reached from other machines, and {missing} is not set: anybody could take part in "
        "the run, or read what is sent. `rollbook security init DIR` makes certificates and tokens; or listen on 127.0.0.1"
    )


def check_url(url: str) -> None:
    """Refuse a password in the database URL: it would be stored with the run. Raises ConfigError, which does not show the URL."""
    if _USERS_PASSWORD.match(url) or _PARAMETER.match(unquote(url)):
        raise ConfigError(
            "ledger.url holds a password, which would be stored with the run and shown by ps: leave it out and put it into a "
            "file named by ledger.password_file, into the file PGPASSFILE names (~/.pgpass), or into PGPASSWORD"
        )


def _checked_token(token: str, what: str) -> str:
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{what}: this is no token: {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable ASCII characters without a space "
            "(`rollbook security init DIR` makes them)"
        )
    return token


def _text_of(path: str, what: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise ConfigError(f"{what} = {path}: more than {SECRET_BYTES_MAX} bytes; name the right file")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{what} = {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} = {path}: it is no text file") from None
