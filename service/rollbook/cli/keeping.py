"""`rollbook ledger vacuum · ledger backup · ledger restore`: what an operator does to a run's database.

Owns their output. ``rollbook ledger CONFIG`` is the role; followed by one of these words and a run it is the command, which
can also be called without the word ``ledger``. Only ``restore`` replaces anything, and it moves aside what it replaces.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollbook.cli.common import add_config, answering, ledger_of, read_config
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.learner.history import refuse_when_ahead
from rollbook.report.progress import shown_url
from rollbook.rpc.client import LedgerClient

if TYPE_CHECKING:
    from rollbook.ledger.ledger import Ledger

WORDS = ("vacuum", "backup", "restore")
ROUND_S = 60.0
"""Longest time that one round of a running server is given, beside its interval."""


def spelled(argv: Sequence[str]) -> list[str]:
    """``ledger vacuum RUN`` as ``vacuum RUN``; ``ledger vacuum`` alone is the role with a configuration of that name."""
    if len(argv) > 2 and argv[0] == "ledger" and argv[1] in WORDS and not argv[2].startswith("-"):
        return list(argv[1:])
    return list(argv)


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands."""
    vacuum_parser = commands.add_parser("vacuum", help="let go of what [retention] allows now, and give space back")
    add_config(vacuum_parser)
    vacuum_parser.set_defaults(function=vacuum)
    backup_parser = commands.add_parser("backup", help="copy a run's whole database to a file, while it is in use")
    add_config(backup_parser)
    backup_parser.add_argument("file", type=Path, help="new file; SQLite: a database, PostgreSQL: an archive of pg_dump")
    backup_parser.set_defaults(function=backup)
    restore_parser = commands.add_parser("restore", help="put a backup in the place of a stopped run's database")
    add_config(restore_parser)
    restore_parser.add_argument("file", type=Path, help="what `rollbook ledger backup` wrote")
    restore_parser.set_defaults(function=restore)


def vacuum(args: argparse.Namespace) -> int:
    """Retention now: by the running server's next round, or by this command where none runs; then the database's own part."""
    from rollbook.ledger.backup import tidy

    config = read_config(args)
    with ledger_of(config) as ledger:
        before = ledger.run_status()["retention"]
        is_own = not isinstance(ledger, LedgerClient)
        if not is_own and before["enabled"]:
            _next_round(config, ledger, before["rounds"])
        elif is_own:
            for name, n in cast("Ledger", ledger).expire(config.retention).items():
                print(f"freed {name:<11} {n}")
        after = ledger.run_status()["retention"]
    if not (config.retention.enabled or before["enabled"]):
        print("retention is off: every row is kept ([retention] enabled = true lets finished groups go)")
    print(f"groups let go {after['groups'] - before['groups']}, since the run began {after['groups']}")
    print(f"low watermark {after['low_watermark']}; steps from {after['replayable_from']} on can be replayed")
    if is_own or not config.ledger.url.startswith("sqlite"):
        for line in tidy(config.ledger.url, config.ledger.password_file):
            print(line)
    return 0


def _next_round(config: Config, ledger: Any, rounds: int) -> None:
    """Wait for a round that began after this call: the one after the next. Raises Unavailable when the time is over."""
    deadline = time.monotonic() + 2 * config.retention.every_s + ROUND_S
    while ledger.run_status()["retention"]["rounds"] < rounds + 2:
        if time.monotonic() > deadline:
            raise Unavailable("the ledger server makes no rounds of retention; its log says why")
        time.sleep(min(1.0, config.retention.every_s / 4))


def backup(args: argparse.Namespace) -> int:
    """Copy the database, whoever uses it."""
    from rollbook.ledger.backup import back_up

    ledger = read_config(args).ledger
    n_bytes = back_up(ledger.url, args.file, ledger.password_file)
    print(f"{shown_url(ledger.url)} copied to {args.file}: {n_bytes} bytes")
    return 0


def restore(args: argparse.Namespace) -> int:
    """Replace the database by a copy, then say whether the run can go on from it."""
    from rollbook.ledger.backup import restore as put_back

    config = read_config(args)
    if answering(config):
        raise ConfigError(f"run {config.run.id!r} has a running ledger server; stop the run first (rollbook down, or SIGTERM)")
    aside = put_back(config.ledger.url, args.file, config.ledger.password_file)
    print(f"{shown_url(config.ledger.url)} restored from {args.file}" + (f"; the replaced one is {aside}" if aside else ""))
    with ledger_of(config) as ledger:
        refuse_when_ahead(Path(config.run.dir), ledger)
    print("nothing in the run directory is newer: the run goes on from here")
    return 0
