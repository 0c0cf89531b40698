"""`rollbook ledger · worker · learner · feeder`: one role each, as a plain process any scheduler can run.

Owns identity, health and exit codes of a role process. The roles' work is in the layers below. SIGTERM and SIGINT ask for
a graceful end within ``supervisor.drain_s``, a second one ends the process at once (``signals``); SIGUSR1 writes the stacks of
all threads to standard error.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rollbook.cli.common import add_accept, add_config, client_for, read_config
from rollbook.cli.showing import place_of, shown_metrics
from rollbook.cli.signals import StopSignals
from rollbook.core.config import Config, with_worker
from rollbook.core.errors import ConfigError
from rollbook.core.host import incarnation
from rollbook.core.security import FEEDER, LEARNER, WORKER, forget_tokens
from rollbook.observe import failpoints, failures, progress, tracing
from rollbook.observe import log as logs
from rollbook.observe.health import Health, HealthPage
from rollbook.rpc.client import LedgerClient
from rollbook.supervise.policy import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
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
            parser.add_argument(
                "--more", action="store_true", help="with an index beyond the configuration: one more of the last configured kind"
            )
        if name == "ledger":
            add_accept(parser)
            parser.add_argument(
                "--index", type=int, default=0, help="which ledger server of the configuration this is, from 0; the others wait"
            )
            parser.add_argument("--standby", action="store_true", help="wait until the role is free, as every index but 0 does")
        parser.add_argument(
            "--health-port", type=int, metavar="PORT", help="show /livez, /readyz and /progressz on loopback; 0 = not"
        )  # fmt: skip
        parser.set_defaults(function=_whole(function))


def _whole(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The role, whose process ends with 0 only when the role itself says so: not when a library calls ``sys.exit``."""

    def run(args: argparse.Namespace) -> int:
        try:
            return function(args)
        except SystemExit as ended:
            log.error("a library ended this process with %r", ended.code, extra={"event": "ended_by_library"})
            return ended.code if isinstance(ended.code, int) and ended.code else EXIT_FAILED
        finally:
            tracing.close()

    return run


def _begin(role: str, args: argparse.Namespace) -> tuple[Config, threading.Event]:
    """Common start of a role: die with the supervisor, stack dumps, logs, signals, configuration, progress and health."""
    supervised = die_with_supervisor()
    os.environ["ROLLBOOK_INCARNATION"] = incarnation()  # from here on the same whenever asked, and known to what is started
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logs.configure(role)
    signals = StopSignals()
    config = read_config(args)
    index = _index(role, args)
    name = f"{role}-{index}" if role == "worker" or index else role
    logs.use_format(config.run.log_format)
    logs.bind(run=config.run.id, **({"worker": name} if role == "worker" else {}))
    tracing.configure(role, config.run.id, name)
    reporter = progress.open_reporter(name, progress.progress_file(config.run.dir, name) if supervised else None)
    failures.keep_in(config.run.dir, name)
    _show_health(reporter, config, role, args)
    if role != "ledger":  # whose page begins when it holds the role
        shown = ExitStack()
        atexit.register(shown.close)
        shown.enter_context(shown_metrics(config, role, name, index))
    if not supervised:  # a supervisor keeps the time of a drain itself
        signals.limit(config.supervisor.drain_s, lambda: _give_back(config, args.index) if role == "worker" else None)
    failpoints.arm_configured(config.chaos.failpoints, Path(config.run.dir) / "chaos" if config.chaos.once else "")
    if armed := failpoints.armed():
        log.warning("failpoints are armed", extra={"event": "failpoints_armed", "points": armed, "unknown": failpoints.unknown()})
    return config, signals.stop


def _index(role: str, args: argparse.Namespace) -> int:
    """Which of the processes of its role this is; a standby that was given none is the first one."""
    if role == "ledger" and args.standby:
        return args.index or 1
    return args.index if role in ("worker", "ledger") else 0


def _show_health(reporter: progress.Reporter, config: Config, role: str, args: argparse.Namespace) -> None:
    """Answer probes while the process lives. A port that is taken costs the page and not the role."""
    port = args.health_port
    if port is None:
        port = config.run.health_port + place_of(config, role, _index(role, args)) if config.run.health_port else 0
    if port == 0:
        return
    try:
        page = HealthPage(port, Health(reporter, progress.Bounds.of(config)))
    except ConfigError as error:
        log.error("no health is shown: %s", error, extra={"event": "health_unserved"})
    else:
        log.info("health", extra={"event": "health_served", "port": page.port})


def _give_back(config: Config, index: int) -> None:
    """Free the slots that a worker out of time still holds, instead of letting them wait for their TTL."""
    from rollbook.rollout.leases import LeaseNote

    note = LeaseNote(Path(config.run.dir) / "spool" / f"worker-{index}" / "leases.json", config.run.id)
    if held := note.left_by(incarnation(), "its worker had no time left"):
        with client_for(config, retry_s=1.0) as client:
            client.report_failures(held)
        log.warning("leases given back", extra={"event": "leases_given_back", "slots": len(held)})


def run_ledger(args: argparse.Namespace) -> int:
    """Open the database, take the ledger fence, serve until told to stop or fenced; a standby first waits for the fence."""
    from rollbook.cli.record import run_record
    from rollbook.cli.serving import serve_ledger
    from rollbook.cli.standby import serve_in_turn, server_index

    config, stop = _begin("ledger", args)
    forget_tokens(os.environ)
    index = server_index(config, args.index, args.standby)
    if index is None:
        serve_ledger(config, run_record(config), stop, accept=args.accept)
    else:
        serve_in_turn(config, run_record(config), stop, index=index, accept=args.accept)
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
    progress.mark(progress.State.ENDING)
    if done:
        return EXIT_DONE
    return EXIT_STOPPED if stop.is_set() else EXIT_FAILED


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
    if args.more:
        config = with_worker(config, args.index)
    _check_model(config)  # its weights are a version's, known by their own digest
    from rollbook.rollout.worker import run_worker as work

    client, beat_client = _clients(config, WORKER, 2)
    work(config, args.index, client, beat_client, stop)
    return _ended(not stop.is_set(), stop)
