"""`rollbook top · compare · export`: look at runs while they go on, beside each other, and from other programs.

Owns the refreshing of a terminal and where files go. Never changes what a run has recorded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollbook.cli.common import add_config, client_for, ledger_of, read_config
from rollbook.core.errors import ConfigError, RollbookError
from rollbook.core.ports import LedgerPort

if TYPE_CHECKING:
    from rollbook.core.config import Config

LOOK_S = 15.0
"""How long a look waits for a server that stops answering meanwhile."""
EVERY_S_MIN = 0.5


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands."""
    top_parser = commands.add_parser("top", help="the run on this terminal, refreshed; --once for one look")
    add_config(top_parser)
    top_parser.add_argument("--once", action="store_true", help="print one look and end")
    top_parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between looks; default: 2")
    top_parser.set_defaults(function=top)


def top(args: argparse.Namespace) -> int:
    """Show the run until interrupted; once where asked to or where nobody could see it change."""
    if args.every < EVERY_S_MIN:
        raise ConfigError(f"--every {args.every}: at least {EVERY_S_MIN} seconds, so that looking does not slow the run")
    config = read_config(args)
    if args.once or not sys.stdout.isatty():
        with ledger_of(config, LOOK_S) as ledger:
            print("\n".join(_look(ledger, config)))
        return 0
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("starting"), console=Console(), auto_refresh=False, screen=True) as live:
        for text in _looks(config, args.every):
            live.update(Text(text), refresh=True)
    return 0


def _looks(config: Config, every_s: float) -> Iterator[str]:
    """One screen after the other. Where no server answers, the last one stays and says so: opening the database again and again
    would keep a server from starting."""
    lines: list[str] = []
    while True:
        began = time.monotonic()
        try:
            with client_for(config, LOOK_S) as client:
                lines = _look(client, config)
            yield "\n".join(lines)
        except RollbookError as error:
            yield "\n".join([f"NO LEDGER SERVER ANSWERS ({type(error).__name__}: {error}); what follows is old", *lines])
        time.sleep(max(every_s, 10 * (time.monotonic() - began)))


def _look(ledger: LedgerPort, config: Config) -> list[str]:
    from rollbook.report.top import STEPS_SHOWN, screen_width, top_lines

    state = ledger.run_status()
    metrics = ledger.step_metrics(state["lineage"], max(1, state["steps"]["planned"] - STEPS_SHOWN))
    return top_lines(state, metrics, config, time.time(), screen_width())
