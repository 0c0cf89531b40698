"""What several commands share: loading the configuration and reaching a run's ledger, running or not.

Owns the rule how a command finds a run: a configuration file, or a run directory that holds ``config.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.errors import ConfigError
from rollbook.core.ports import LedgerPort
from rollbook.rpc.address import address_in
from rollbook.rpc.client import LedgerClient


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG and --set, as every command that starts something takes them."""
    parser.add_argument("config", metavar="CONFIG", help="TOML configuration file, or the directory of an existing run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="override one field")


def read_config(args: argparse.Namespace) -> Config:
    """The configuration a command was given."""
    path = Path(args.config)
    if path.is_dir():
        stored = path / "config.json"
        if not stored.exists():
            raise ConfigError(f"{path} holds no config.json, so it is not a run directory; name the run's TOML file")
        if getattr(args, "overrides", []):
            raise ConfigError("--set needs the TOML file; a run directory stands for the configuration as it was")
        return config_from_json(json.dumps(json.loads(stored.read_text())["config"]))
    return load_config(path, getattr(args, "overrides", []))


def config_args(args: argparse.Namespace) -> list[str]:
    """The same configuration for a child process."""
    out = [str(Path(args.config).resolve())]
    for override in args.overrides:
        out += ["--set", override]
    return out


def incarnation() -> str:
    """Identity of this process as holder of a role or lease."""
    return os.environ.get("ROLLBOOK_INCARNATION") or uuid.uuid4().hex


def supersedes() -> str:
    """Identity of the dead process this one replaces, told by whoever saw it die."""
    return os.environ.get("ROLLBOOK_SUPERSEDES", "")


def address_file(config: Config) -> Path:
    """Where the ledger server of a run writes the address it listens on."""
    return Path(config.run.dir) / "ledger.address"


def client_for(config: Config, retry_s: float = 120.0) -> LedgerClient:
    """A client of the run's ledger server; the address is read again whenever it reconnects."""
    return LedgerClient(address_in(config.run.dir), config.run.id, retry_total_s=retry_s)


def _answers(file: Path) -> bool:
    """Whether something listens where the run's server said it would."""
    try:
        host, _, port = file.read_text().strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def ledger_of(config: Config) -> Iterator[LedgerPort]:
    """The run's ledger: through its server where one answers, else the database itself, opened for the command."""
    if _answers(address_file(config)):
        with client_for(config) as client:
            yield client
        return
    from rollbook.ledger.ledger import Ledger  # only commands that need the database pay for it

    url = config.ledger.url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        raise ConfigError(f"no ledger at {url}: the run {config.run.id!r} was never started (rollbook run CONFIG)")
    ledger = Ledger(url, holder=incarnation(), role_ttl_s=config.ledger.role_ttl_s)
    try:
        ledger.attach(config.run.id)
        yield ledger
    finally:
        ledger.close()
