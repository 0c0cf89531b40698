"""`rollbook repair`: an operator's decision to go on from a ledger that is older than the files beside it.

Owns what is said before and after. Moves files aside, never deletes one and never writes a row: the run then goes on from
what the ledger has. It holds the learner's role while it acts, so that no learner publishes meanwhile (P8).
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from rollbook.cli.common import add_config, ledger_of, read_config
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.core.host import incarnation
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Role
from rollbook.core.security import LEDGER, OBSERVER
from rollbook.learner.history import Position, Stray, goes_on_from, move_aside, strays_of
from rollbook.learner.role import acquire, holding

SHOWN_MAX = 20
"""Spooled samples listed by name."""


def register(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("repair", help="go on from a ledger that is older than its checkpoints; a dry run without --yes")
    add_config(parser)
    parser.add_argument(
        "--discard-newer-checkpoints", action="store_true",
        help="set aside checkpoints, versions and spooled samples of the history that the ledger has lost",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do it")
    parser.set_defaults(function=repair)


def repair(args: argparse.Namespace) -> int:
    """Show what would be set aside and made again; with --yes, set it aside."""
    if not args.discard_newer_checkpoints:
        raise ConfigError("name the repair: rollbook repair RUN --discard-newer-checkpoints [--yes]")
    config = read_config(args)
    with ledger_of(config, role=LEDGER if args.yes else OBSERVER) as ledger:
        if not args.yes:
            strays = _show(config, ledger)
            if strays:
                print("nothing was changed; the same command with --yes sets these aside")
            return 0
        ttl_s = config.ledger.role_ttl_s
        term = acquire(ledger, Role.LEARNER, incarnation(), ttl_s, "", threading.Event(), wait_s=ttl_s + 1.0)
        assert term is not None, "only a stop makes acquire give up"
        with holding(ledger, term):
            for stray in reversed(_show(config, ledger)):  # what proves the loss goes last: a repair that dies is repeated
                print(f"moved {stray.path} to {move_aside(stray).name}")
    return 0


def _show(config: Config, ledger: LedgerPort) -> list[Stray]:
    """Print both positions and the consequences; returns what has to be set aside."""
    run_dir, position = Path(config.run.dir), Position.of(ledger)
    strays = strays_of(run_dir, ledger, position, ledger.run_status()["revision"])
    print(f"the ledger stands at {position}")
    if not strays:
        print(f"nothing in {run_dir} is newer than that; there is nothing to repair")
        return []
    newest = max(stray.step for stray in strays)
    print(f"{run_dir} holds the results of steps up to {newest}. To set aside:")
    spooled = [stray for stray in strays if stray.path.suffix == ".sample"]
    for stray in [s for s in strays if s not in spooled] + spooled[:SHOWN_MAX]:
        print(f"  {stray.path.relative_to(run_dir)}  {stray.why}")
    if len(spooled) > SHOWN_MAX:
        print(f"  … and {len(spooled) - SHOWN_MAX} more spooled samples")
    for line in _consequences(config, position, strays, newest):
        print(line)
    return strays


def _consequences(config: Config, position: Position, strays: list[Stray], newest: int) -> list[str]:
    """What the run will do afterwards, and the better way."""
    base, planned = goes_on_from(Path(config.run.dir), position, strays), position.point.last_planned_step
    lines = [f"The run then goes on from {f'the checkpoint of step {base}' if base else 'its starting weights'}:"]
    if planned > base:
        lines.append(f"  steps {base + 1} to {planned} are trained again from stored plans, nothing is generated for them")
    if newest > planned:
        n_steps, learner = newest - planned, config.learner
        n_rollouts = n_steps * learner.groups_per_step * learner.group_size
        lines.append(
            f"  steps {planned + 1} to {newest} are planned, generated and trained anew, about {n_rollouts} rollouts; in the "
            "bounded schedule they will not be the same ones"
        )
    better = "restore the newer database (with its -wal file) and start again; nothing is lost then"
    return [*lines, f"Better, where there is one: {better}."]
