"""What several commands share: loading the configuration and reaching a run's ledger, running or not.

Owns the rule how a command finds a run: a configuration file, or a run directory that holds ``config.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.core.config import Config, config_from_json, load_config
from rollbook.core.errors import ConfigError, RoleHeld, RollbookError, Unavailable, WrongRun
from rollbook.core.host import COMMAND_HOLDER, incarnation
from rollbook.core.ports import LedgerPort
from rollbook.core.security import OBSERVER
from rollbook.observe import failpoints
from rollbook.rpc.address import addresses_in
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.credentials import client_access

if TYPE_CHECKING:
    from rollbook.ledger.ledger import Ledger


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG and --set, as every command that starts something takes them."""
    parser.add_argument("config", metavar="CONFIG", help="TOML configuration file, or the directory of an existing run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="override one field")


def add_accept(parser: argparse.ArgumentParser) -> None:
    """--accept, as the commands that open a run take it."""
    parser.add_argument(
        "--accept", action="append", default=[], metavar="FIELD",
        help="accept that FIELD differs from what the run was opened with, as a revision from the first unplanned step on",
    )  # fmt: skip


def read_config(args: argparse.Namespace) -> Config:
    """The configuration a command was given."""
    path = Path(args.config)
    if path.is_dir():
        if getattr(args, "overrides", []):
            raise ConfigError("--set needs the TOML file; a run directory stands for the configuration as it was")
        return _stored_config(path.resolve())
    config = load_config(path, getattr(args, "overrides", []))
    if "://" not in config.ledger.url:
        raise ConfigError(f"{path}: ledger.url is no URL: use sqlite:///FILE or postgresql+psycopg://…")
    failpoints.check(config.chaos.failpoints)
    return config


def _stored_config(directory: Path) -> Config:
    """The configuration a run directory holds, with the directory's own place in it: it may have been moved."""
    stored = directory / "config.json"
    try:
        config = config_from_json(json.dumps(json.loads(stored.read_text())["config"]))
    except FileNotFoundError:
        raise ConfigError(f"{directory} holds no config.json, so it is not a run directory; name the run's TOML file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{stored} is damaged ({error!r}); name the run's TOML file instead") from None
    url = config.ledger.url
    if url == f"sqlite:///{config.run.dir}/ledger.sqlite":
        url = f"sqlite:///{directory}/ledger.sqlite"
    replace = dataclasses.replace
    return replace(config, run=replace(config.run, dir=str(directory)), ledger=replace(config.ledger, url=url))


def config_args(args: argparse.Namespace) -> list[str]:
    """The same configuration for a child process."""
    out = [str(Path(args.config).resolve())]
    for override in args.overrides:
        out += ["--set", override]
    return out


def address_file(config: Config) -> Path:
    """Where the ledger server of a run writes the address it listens on."""
    return Path(config.run.dir) / "ledger.address"


def client_for(config: Config, retry_s: float = 120.0, role: str = OBSERVER) -> LedgerClient:
    """A client of the run's ledger servers; addresses and token are read again whenever it reconnects.

    ``role`` names whose token it takes from ``security.token_dir`` when the environment gives none.
    """
    return LedgerClient(
        addresses_in(config.run.dir, config.ledger.addresses), config.run.id, retry_total_s=retry_s,
        access=client_access(config.security, role, os.environ), max_message_bytes=config.security.message_bytes_max,
    )  # fmt: skip


@contextlib.contextmanager
def ledger_of(config: Config, retry_s: float = 120.0, role: str = OBSERVER) -> Iterator[LedgerPort]:
    """The run's ledger: through its server where that answers, else the database itself, opened for the command.

    An address file may be older than what listens there now, so the server is asked, not only dialled. Opening the
    database makes this process the run's ledger server for the length of the block: a server that starts meanwhile waits.
    """
    if answering(config, role):
        with client_for(config, retry_s, role) as client:
            yield client
        return
    ledger = _open_database(config)
    try:
        yield ledger
    finally:
        ledger.close()


def answering(config: Config, role: str = OBSERVER) -> bool:
    """Whether the run's own ledger server answers at the address it wrote."""
    if not (address_file(config).exists() or config.ledger.addresses):
        return False
    try:
        with client_for(config, retry_s=0.0, role=role) as client:
            client.resume_point()
    except (Unavailable, WrongRun):  # nobody there, something else there, or another run's server
        return False
    except RollbookError as error:
        if type(error) is RollbookError:  # a status that no ledger server gives
            return False
        raise
    return True


def _open_database(config: Config) -> Ledger:
    """The run's database, once no server holds it; a server that died without a word holds it for one term."""
    from rollbook.ledger.ledger import Ledger  # only commands that need the database pay for it

    url = config.ledger.url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        raise ConfigError(f"no ledger at {url}: the run {config.run.id!r} was never started (rollbook run CONFIG)")
    ledger = Ledger(
        url, holder=f"{COMMAND_HOLDER}{incarnation()}", role_ttl_s=config.ledger.role_ttl_s,
        password_file=config.ledger.password_file,
    )  # fmt: skip
    deadline = time.monotonic() + config.ledger.role_ttl_s + 1.0
    told = False
    try:
        while True:
            try:
                ledger.attach(config.run.id)
                return ledger
            except RoleHeld as held:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    print(f"waiting for a ledger server that does not answer: {held}", file=sys.stderr)
                told = True
                time.sleep(0.2)
    except BaseException:
        ledger.close()
        raise
