"""`rollbook ledger · worker · learner · feeder`: one role each, as a plain process any scheduler can run.

Owns signals, identity and exit codes of a role process. The roles' work is in the layers below. SIGTERM and SIGINT ask for
a graceful end, a second one ends the process at once; SIGUSR1 writes the stacks of all threads to standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollbook.cli.common import add_config, client_for, incarnation, read_config, supersedes
from rollbook.core.config import Config
from rollbook.core.errors import Fenced, LedgerLocked, RoleHeld, ServerFenced, Unavailable
from rollbook.core.records import RunRecord
from rollbook.observe import log as logs
from rollbook.rpc.address import write_address
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.process import die_with_supervisor

if TYPE_CHECKING:
    from rollbook.ledger.ledger import Ledger

T = TypeVar("T")
STOP_GRACE_S = 2.0
"""How long calls in flight may take when the ledger server stops; an unanswered one is repeated with the same key."""

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
    return read_config(args), stop


def run_ledger(args: argparse.Namespace) -> int:
    """Open the database, take the ledger fence, serve until told to stop or fenced."""
    from rollbook.cli.preflight import check_run_dir, check_still_recorded
    from rollbook.cli.record import run_record
    from rollbook.rpc.server import serve

    config, stop = _begin("ledger", args)
    record = run_record(config)
    check_run_dir(config)
    patience = _Patience(2 * config.ledger.role_ttl_s + 2, stop)
    ledger = patience.repeat(lambda: _open_ledger(config))
    try:
        check_still_recorded(config, ledger.run_ids())
        opened = patience.repeat(lambda: ledger.open_run(record, accept_revision=args.accept_config_change))
        write_run_files(config, opened)
        server = serve(ledger, config.ledger.address, run_id=config.run.id, on_fenced=stop.set)
        file = write_address(config.run.dir, server.address)
        log.info("serving", extra={"address": server.address, "run": config.run.id, "config": record.config_digest[:12]})
        try:
            _keep_term(ledger, config.ledger.role_ttl_s / 3, stop)
            if server.fenced:
                raise Fenced("another ledger server took over; this one has stopped answering")
            file.unlink(missing_ok=True)
        finally:
            server.stop(STOP_GRACE_S)
    finally:
        ledger.close()
    return 0


def _keep_term(ledger: Ledger, every_s: float, stop: threading.Event) -> None:
    """Renew the server's own term until told to stop; a database that cannot answer now is asked again.

    Meanwhile the server answers its callers that the ledger is unavailable, and past its term nothing (R12).
    Raises ServerFenced.
    """
    while not stop.wait(every_s):
        try:
            ledger.renew_self()
        except ServerFenced:
            raise
        except Unavailable as error:
            log.warning("the server's term was not renewed: %s", error, extra={"event": "renewal_failed"})


class _Patience:
    """Waiting for a dying predecessor to let go, or for the database to answer: bounded, and less when told to stop."""

    def __init__(self, bound_s: float, stop: threading.Event) -> None:
        self._deadline = time.monotonic() + bound_s
        self._stop = stop

    def repeat(self, attempt: Callable[[], T]) -> T:
        """The attempt's result; its last error when the time is over."""
        while True:
            try:
                return attempt()
            except (RoleHeld, LedgerLocked, Unavailable):
                if time.monotonic() > self._deadline or self._stop.wait(0.2):
                    raise


def _open_ledger(config: Config) -> Ledger:
    from rollbook.ledger.ledger import Ledger

    return Ledger(
        config.ledger.url, holder=incarnation(), supersede=supersedes(), role_ttl_s=config.ledger.role_ttl_s,
        group_commit_max=config.ledger.group_commit_max, ordinals_per_partition=config.ledger.ordinals_per_partition,
        payload_bytes_max=config.ledger.payload_bytes_max,
    )  # fmt: skip


def write_run_files(config: Config, opened: RunRecord) -> None:
    """Leave the resolved configuration in the run directory, so that the directory alone names the run.

    Its revision gets a file of its own before the first step can be planned under it: a plan that is replayed after the
    configuration has changed is trained under what it was planned for (R15).
    """
    directory = Path(config.run.dir)
    content = json.loads(opened.config_json)
    _replace(directory / "config.json", json.dumps(content, indent=1, sort_keys=True))
    (directory / "revisions").mkdir(exist_ok=True)
    revision = directory / "revisions" / f"{opened.revision}.json"
    if not revision.exists():
        _replace(revision, json.dumps(content["config"], sort_keys=True))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _ended(done: bool, stop: threading.Event) -> int:
    """Exit code: 0 only when the role's work is done; a role that was told to stop before says so."""
    if done:
        return 0
    return EXIT_STOPPED if stop.is_set() else 1


def run_feeder(args: argparse.Namespace) -> int:
    """Feed groups until the run has all it needs."""
    from rollbook.tasks.feeder import run_feeder as feed

    config, stop = _begin("feeder", args)
    feed(config, client_for(config), stop)
    return _ended(not stop.is_set(), stop)


def run_learner(args: argparse.Namespace) -> int:
    """Train until the configured number of steps is made."""
    config, stop = _begin("learner", args)
    from rollbook.learner.loop import run_learner as learn

    return _ended(learn(config, client_for(config), stop), stop)


def run_worker(args: argparse.Namespace) -> int:
    """Generate until the run drains."""
    config, stop = _begin("worker", args)
    from rollbook.rollout.worker import run_worker as work

    work(config, args.index, client_for(config), client_for(config), stop)
    return _ended(not stop.is_set(), stop)
