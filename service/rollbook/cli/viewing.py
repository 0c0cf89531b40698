"""`rollbook top · compare · export · mirror`: look at runs while they go on, beside each other, and from other programs.

Owns the refreshing of a terminal and where files go. Never changes what a run has recorded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.cli.common import add_config, client_for, ledger_of, read_config
from rollbook.core.config_checks import MIRRORS
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
    export_parser = commands.add_parser("export", help="steps, samples, failures and events as Parquet files")
    add_config(export_parser)
    export_parser.add_argument("--format", choices=("parquet",), default="parquet")
    export_parser.add_argument("--to", type=Path, metavar="DIR", help="default: export/ in the run directory")
    export_parser.add_argument("--tokens", action="store_true", help="with the tokens and log-probs of every sample")
    export_parser.set_defaults(function=export)
    compare_parser = commands.add_parser("compare", help="runs on the same axes, in one HTML file")
    compare_parser.add_argument("configs", metavar="RUN", nargs="+", help="configuration files or run directories, two or more")
    compare_parser.add_argument("--to", type=Path, default=Path("compare"), metavar="DIR", help="default: compare/")
    compare_parser.set_defaults(function=compare)
    mirror_parser = commands.add_parser("mirror", help="make the mirrors of run.mirror anew from the ledger")
    add_config(mirror_parser)
    mirror_parser.add_argument("--with", dest="names", action="append", default=[], choices=sorted(MIRRORS))
    mirror_parser.set_defaults(function=mirror)


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

    with Live(Text("asking the ledger"), console=Console(), auto_refresh=False, screen=True) as live:
        for text in _looks(config, args.every):
            live.update(Text(text), refresh=True)
    return 0


def export(args: argparse.Namespace) -> int:
    """Write the tables; the server may be up or down, and is not asked."""
    from rollbook.ledger.readonly import Reader
    from rollbook.report.export import export as write_tables

    config = read_config(args)
    out_dir = args.to or Path(config.run.dir) / "export"
    with Reader(config.ledger.url, config.run.id, config.ledger.password_file) as reader:
        for name, n in write_tables(reader, out_dir, with_tokens=args.tokens).items():
            print(f"{out_dir / name}.parquet  {n} rows")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Write the comparison of two or more runs."""
    from rollbook.report.compare import Side, named_apart, write

    if len(args.configs) < 2:
        raise ConfigError("name two runs or more: rollbook compare RUN RUN")
    configs = [read_config(argparse.Namespace(config=name, overrides=[])) for name in args.configs]
    sides = []
    for name, config in zip(named_apart(configs), configs, strict=True):
        with ledger_of(config) as ledger:
            state = ledger.run_status()
            sides.append(Side(name, config, state, ledger.step_metrics(state["lineage"])))
    print(write(sides, args.to))
    return 0


def mirror(args: argparse.Namespace) -> int:
    """Write every mirror once; for runs whose supervisor does not, and for finished ones."""
    from rollbook.report.mirror import check_mirrors, rebuild

    config = read_config(args)
    names = args.names or config.run.mirror
    if not names:
        raise ConfigError("run.mirror names nothing; set it, or give --with tensorboard")
    check_mirrors(names)
    with ledger_of(config) as ledger:
        for name, n in rebuild(config, ledger, names).items():
            print(f"{name}  {n} steps  {Path(config.run.dir) / 'mirror' / name}")
    return 0


def _looks(config: Config, every_s: float) -> Iterator[str]:
    """One screen after the other. Where no server answers, the first is read from the database, and the last one stays and says
    so: opening the database again and again would keep a server from starting."""
    lines: list[str] = []
    source: Callable[[Config, float], AbstractContextManager[LedgerPort]] = ledger_of
    while True:
        began = time.monotonic()
        try:
            with source(config, LOOK_S) as ledger:
                lines = _look(ledger, config)
            yield "\n".join(lines)
        except ConfigError:
            raise
        except RollbookError as error:
            yield "\n".join([f"NO LEDGER SERVER ANSWERS ({type(error).__name__}: {error}); what follows is old", *lines])
        source = client_for
        time.sleep(max(every_s, 10 * (time.monotonic() - began)))


def _look(ledger: LedgerPort, config: Config) -> list[str]:
    from rollbook.report.top import STEPS_SHOWN, screen_width, top_lines

    state = ledger.run_status()
    metrics = ledger.step_metrics(state["lineage"], max(1, state["steps"]["planned"] - STEPS_SHOWN))
    return top_lines(state, metrics, config, time.time(), screen_width())
