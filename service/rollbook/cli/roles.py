"""`rollbook ledger · worker · learner · feeder`: one role each, as a plain process any scheduler can run.

Owns signals, identity and exit codes of a role process. The roles' work is in the layers below.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

from rollbook.cli.common import add_config, client_for, incarnation, read_config, supersedes
from rollbook.core.config import Config
from rollbook.core.errors import Fenced, LedgerLocked, RoleHeld
from rollbook.observe import log as logs
from rollbook.rpc.address import write_address
from rollbook.supervise.process import die_with_parent

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
            parser.add_argument("--accept-config-change", action="store_true", help="store a changed configuration as a revision")
        parser.set_defaults(function=function)


def _begin(role: str, args: argparse.Namespace) -> tuple[Config, threading.Event]:
    """Common start of a role: die with the supervisor, logs, configuration, SIGTERM and SIGINT set the stop event."""
    if os.environ.get("ROLLBOOK_SUPERVISED"):
        die_with_parent()
    logs.configure(role)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return read_config(args), stop


def run_ledger(args: argparse.Namespace) -> int:
    """Open the database, take the ledger fence, serve until told to stop or fenced."""
    from rollbook.cli.record import run_record
    from rollbook.rpc.server import serve

    config, stop = _begin("ledger", args)
    record = run_record(config)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    ledger = _open_ledger(config, stop)
    try:
        opened = ledger.open_run(record, accept_revision=args.accept_config_change)
        write_run_files(config, opened.config_json)
        server = serve(ledger, config.ledger.address, run_id=config.run.id, on_fenced=stop.set)
        file = write_address(config.run.dir, server.address)
        log.info("serving", extra={"address": server.address, "run": config.run.id, "config": record.config_digest[:12]})
        while not stop.wait(config.ledger.role_ttl_s / 3):
            ledger.renew_self()
        if server.fenced:
            raise Fenced("another ledger server took over; this one has stopped answering")
        server.stop(5.0)
        file.unlink(missing_ok=True)
    finally:
        ledger.close()
    return 0


def _open_ledger(config: Config, stop: threading.Event):
    """The ledger, waiting for a dying predecessor to let go, at most two terms."""
    from rollbook.ledger.ledger import Ledger

    deadline = time.monotonic() + 2 * config.ledger.role_ttl_s + 2
    while True:
        try:
            return Ledger(
                config.ledger.url, holder=incarnation(), supersede=supersedes(), role_ttl_s=config.ledger.role_ttl_s,
                group_commit_max=config.ledger.group_commit_max, ordinals_per_partition=config.ledger.ordinals_per_partition,
                payload_bytes_max=config.ledger.payload_bytes_max,
            )  # fmt: skip
        except (RoleHeld, LedgerLocked):
            if time.monotonic() > deadline or stop.wait(0.2):
                raise


def write_run_files(config: Config, config_json: str) -> None:
    """Leave the resolved configuration in the run directory, so that the directory alone names the run."""
    path = Path(config.run.dir) / "config.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(json.loads(config_json), indent=1, sort_keys=True))
    temporary.rename(path)


def run_feeder(args: argparse.Namespace) -> int:
    """Feed groups until the run has all it needs."""
    from rollbook.tasks.feeder import run_feeder as feed

    config, stop = _begin("feeder", args)
    feed(config, client_for(config), stop)
    return 0


def run_learner(args: argparse.Namespace) -> int:
    """Train until the configured number of steps is made."""
    config, stop = _begin("learner", args)
    from rollbook.learner.loop import run_learner as learn

    finished = learn(config, client_for(config), stop)
    return 0 if finished or stop.is_set() else 1


def run_worker(args: argparse.Namespace) -> int:
    """Generate until the run drains."""
    config, stop = _begin("worker", args)
    from rollbook.rollout.worker import run_worker as work

    work(config, args.index, client_for(config), client_for(config), stop)
    return 0
