"""`rollbook security`: certificates and tokens for a run that is heard beyond one machine.

Owns the files it makes, each with a mode that keeps other accounts out, and what it prints, which never is a secret. The
certificates are made by the ``openssl`` program; a site with an authority of its own needs none of this command but the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.core.security import (
    FEEDER,
    LEARNER,
    OBSERVER,
    ROLES,
    WORKER,
    Grants,
    load_grants,
    read_secret,
    read_token,
    token_digest,
    token_file,
)
from rollbook.rpc.credentials import client_access, server_credentials

CA_DAYS, LEAF_DAYS = 3650, 825
OPENSSL_S = 60.0
"""How long one call of ``openssl`` may take."""
TOKEN_BYTES = 32
EVERYWHERE = ("localhost", "127.0.0.1", "::1")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def register(commands: argparse._SubParsersAction) -> None:
    """Add the command group."""
    group = commands.add_parser("security", help="certificates and tokens for a ledger server that other machines reach")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    init = actions.add_parser("init", help="make a private authority, server and client certificates, and a token for every role")
    init.add_argument("dir", metavar="DIR", help="folder to make; what it holds must stay secret")
    init.add_argument(
        "--host", action="append", default=[], metavar="NAME",
        help="name or address that clients call the server by, beside this machine's own; may be given several times",
    )  # fmt: skip
    init.add_argument("--run", default="", metavar="ID", help="make the tokens good for this run only")
    init.add_argument("--no-certificates", action="store_true", help="tokens only")
    init.set_defaults(function=initialise)


def initialise(args: argparse.Namespace) -> int:
    """Make the folder and everything in it, whole or not at all; print the section of the configuration that uses it."""
    folder = Path(args.dir).absolute()
    if folder.exists():
        raise ConfigError(f"{folder} exists already, and its tokens may be in use; name a new folder, or remove it first")
    if args.run.split() not in ([], [args.run]) or "#" in args.run:
        raise ConfigError(f"--run {args.run!r}: no run has such an id")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as text:  # mkdtemp: mode 0700
        work = Path(text) / "made"
        work.mkdir(mode=0o700)
        make_tokens(work, args.run)
        if not args.no_certificates:
            make_certificates(work, [*EVERYWHERE, *_own_names(), *args.host])
        work.rename(folder)
    print(f"made {folder}: it holds secrets, and so does every copy of it")
    print(section(folder, with_tls=not args.no_certificates))
    return 0


def section(folder: Path, with_tls: bool) -> str:
    """The configuration's ``[security]``."""
    files = {"tokens": "tokens.sha256", "token_dir": "."}
    if with_tls:
        files |= {"certificate": "server.pem", "key": "server.key", "ca": "ca.pem"}
        files |= {"client_certificate": "client.pem", "client_key": "client.key"}
    lines = [f"{name} = {json.dumps(str(folder / file))}" for name, file in files.items()]
    return "\n".join(["[security]", *lines, *(["require_client_certificate = true"] if with_tls else [])])


def checked_security(config: Config) -> str:
    """For ``rollbook doctor``: whether every file is there and each role's token is one the server knows. Raises ConfigError."""
    s = config.security
    if config.ledger.password_file:
        read_secret(config.ledger.password_file, "ledger.password_file")
    server_credentials(s)
    grants = load_grants(s.tokens) if s.tokens else None
    for role in (WORKER, LEARNER, FEEDER, OBSERVER):
        client_access(s, role, {})
        if not s.token_dir:
            continue
        file = token_file(s, role)
        grant = (grants or Grants(())).of(read_token(file, f"token of role {role!r} in security.token_dir"))
        if grants is not None and (grant is None or grant.role != role or grant.run_id not in ("", config.run.id)):
            raise ConfigError(f"{file}: security.tokens = {s.tokens} knows no such token for role {role!r} of this run")
    transport = "clear text" if not s.certificate else "mutual TLS" if s.require_client_certificate else "TLS"
    return f"{transport}, {'a token for every role' if grants else 'no tokens: whoever reaches the port takes part'}"


def make_tokens(folder: Path, run_id: str = "") -> None:
    """A token for every role in ``ROLE.token``, and their digests, which are no secrets, in ``tokens.sha256``."""
    lines = ["# sha256 of a token, role, and the run it is good for where it is good for one only"]
    for role in ROLES:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        _write_private(folder / f"{role}.token", token + "\n")
        lines.append(f"{token_digest(token)} {role} {run_id}".rstrip())
    _write_private(folder / "tokens.sha256", "\n".join(lines) + "\n")


def make_certificates(folder: Path, names: Sequence[str]) -> None:
    """``ca.pem``, and ``server`` and ``client`` certificates signed by it, each with its key. Raises ConfigError."""
    before = os.umask(0o077)
    try:
        _openssl(
            folder, "req", "-x509", *_KEY, "-sha256", "-days", str(CA_DAYS), "-subj", "/CN=rollbook authority", "-keyout",
            "ca.key", "-out", "ca.pem", "-addext", "basicConstraints=critical,CA:TRUE,pathlen:0", "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        alternatives = ",".join(f"{'IP' if _is_ip(name) else 'DNS'}:{name}" for name in dict.fromkeys(names))
        _sign(folder, "server", f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth\n")
        _sign(folder, "client", "extendedKeyUsage=clientAuth\n")
    finally:
        os.umask(before)


def _sign(folder: Path, name: str, extensions: str) -> None:
    request, extra = folder / f"{name}.csr", folder / f"{name}.ext"
    extra.write_text(f"basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n{extensions}")
    _openssl(folder, "req", "-new", *_KEY, "-subj", f"/CN=rollbook {name}", "-keyout", f"{name}.key", "-out", request.name)
    _openssl(
        folder, "x509", "-req", "-in", request.name, "-CA", "ca.pem", "-CAkey", "ca.key", "-sha256", "-days", str(LEAF_DAYS),
        "-set_serial", f"0x{secrets.token_hex(16)}", "-extfile", extra.name, "-out", f"{name}.pem",
    )  # fmt: skip
    request.unlink()
    extra.unlink()


def _openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "the program openssl is not installed, and certificates are made by it: install it (apt-get install openssl), use "
            "--no-certificates for a server on loopback, or name the certificates of your own authority in [security]"
        )
    try:
        done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program} {arguments[0]} did not end within {OPENSSL_S:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(
            f"{program} {arguments[0]} failed with {done.returncode}: {said[0]}; is a --host neither a name nor an address?"
        )


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)


def _own_names() -> list[str]:
    """What other machines may call this one: its name as the server writes it into the address file, and the whole one."""
    return list(dict.fromkeys(name for name in (socket.gethostname(), socket.getfqdn()) if name))


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
