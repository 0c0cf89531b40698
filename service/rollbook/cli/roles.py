"""`rollbook ledger · worker · learner · feeder`: one role each, as a plain process any scheduler can run.

Owns signals, identity and exit codes of a role process. The roles' work is in the layers below. SIGTERM and SIGINT ask for
a graceful end, a second one ends the process at once; SIGUSR1 writes the stacks of all threads to standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import threading
from pathlib import Path

from rollbook.cli.common import add_accept, add_config, client_for, read_config
from rollbook.core.config import Config
from rollbook.core.security import FEEDER, LEARNER, WORKER, forget_tokens
from rollbook.observe import failpoints
from rollbook.observe import log as logs
from rollbook.rpc.client import LedgerClient
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.process import die_with_supervisor

log = logging.getLogger(__name__)


def register(commands: argparse._SubParsersAction) -> None:
    """Add the role commands."""
    for name, function, text in (
        ("ledger", run_ledger, "the ledger server: the only writer of the database"),
        ("feeder", run_feeder, "turns the task source into groups and slots"),
        ("learner", run_learner, "trains on plans, publishes versions, commits checkpoints"),
        ("worker", run_worker, "leases slots, generates, verifies, submits"),
    ):
        parser = commands.add_parser(name, help=text)
        add_config(parser)
        if name == "worker":
            parser.add_argument("--index", type=int, default=0, help="which worker of the configuration this is, from 0")
        if name == "ledger":
            add_accept(parser)
        parser.set_defaults(function=function)


def _begin(role: str, args: argparse.Namespace) -> tuple[Config, threading.Event]:
    """Common start of a role: die with the supervisor, stack dumps, logs, signals, configuration."""
    die_with_supervisor()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logs.configure(role)
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    config = read_config(args)
    failpoints.arm_configured(config.chaos.failpoints, Path(config.run.dir) / "chaos" if config.chaos.once else "")
    if armed := failpoints.armed():
        log.warning("failpoints are armed", extra={"event": "failpoints_armed", "points": armed, "unknown": failpoints.unknown()})
    return config, stop


def run_ledger(args: argparse.Namespace) -> int:
    """Open the database, take the ledger fence, serve until told to stop or fenced."""
    from rollbook.cli.record import run_record
    from rollbook.cli.serving import serve_ledger

    config, stop = _begin("ledger", args)
    forget_tokens(os.environ)
    serve_ledger(config, run_record(config), stop, accept=args.accept)
    return 0


def _check_model(config: Config, *, with_weights: bool = False) -> None:
    from rollbook.cli.record import check_recorded_model

    check_recorded_model(config, with_weights=with_weights)


def _clients(config: Config, role: str, n: int = 1) -> list[LedgerClient]:
    """Clients of a role; after this the token is theirs alone and not in the environment of what the role starts."""
    clients = [client_for(config, role=role) for _ in range(n)]
    forget_tokens(os.environ)
    return clients


def _ended(done: bool, stop: threading.Event) -> int:
    """Exit code: 0 only when the role's work is done; a role that was told to stop before says so."""
    if done:
        return 0
    return EXIT_STOPPED if stop.is_set() else 1


def run_feeder(args: argparse.Namespace) -> int:
    """Feed groups until the run has all it needs."""
    from rollbook.tasks.feeder import run_feeder as feed

    config, stop = _begin("feeder", args)
    _check_model(config)
    (client,) = _clients(config, FEEDER)
    feed(config, client, stop)
    return _ended(not stop.is_set(), stop)


def run_learner(args: argparse.Namespace) -> int:
    """Train until the configured number of steps is made."""
    config, stop = _begin("learner", args)
    _check_model(config, with_weights=True)
    from rollbook.learner.loop import run_learner as learn

    (client,) = _clients(config, LEARNER)
    return _ended(learn(config, client, stop), stop)


def run_worker(args: argparse.Namespace) -> int:
    """Generate until the run drains."""
    config, stop = _begin("worker", args)
    _check_model(config)  # its weights are a version's, known by their own digest
    from rollbook.rollout.worker import run_worker as work

    client, beat_client = _clients(config, WORKER, 2)
    work(config, args.index, client, beat_client, stop)
    return _ended(not stop.is_set(), stop)
