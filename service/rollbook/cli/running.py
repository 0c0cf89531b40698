"""`rollbook run`: everything on this machine, with live progress; the same command again resumes.

Owns the life of a local run as a person sees it: what is printed at start, during and at the end, and the exit code.
0 is given only when every configured step is made and the audit is clean.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.cli.common import add_accept, add_config, client_for, config_args, ledger_of, read_config
from rollbook.cli.inspecting import print_audit, write_report
from rollbook.core.changes import check_names
from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.core.ports import LedgerPort
from rollbook.report.mirror import check_mirrors, mirrored, rebuild
from rollbook.report.progress import Progress, shown_url
from rollbook.supervise.forkserver import ForkServer
from rollbook.supervise.local import LocalSupervisor
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.process import spawn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("run", help="run everything on this machine; the same command again resumes")
    add_config(parser)
    add_accept(parser)
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    parser.add_argument("--no-report", action="store_true", help="skip the report at the end")
    parser.add_argument(
        "--fork-server", action="store_true", help="start roles from a process that has imported everything (drills, Linux)"
    )
    parser.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Supervise the run to its end, then audit it and write the report."""
    from rollbook.cli.preflight import check_inputs, check_run_dir
    from rollbook.cli.record import run_record

    config = read_config(args)
    launch = _fork_server().launch if args.fork_server else spawn
    check_mirrors(config.run.mirror)
    check_inputs(config)
    check_run_dir(config)
    record = run_record(config)
    check_names(record.config_json, args.accept)
    print(f"run {config.run.id}  directory {config.run.dir}")
    print(f"configuration {record.config_digest[:16]}  ledger {shown_url(config.ledger.url)}", flush=True)
    progress = Progress(lambda: client_for(config, retry_s=1.0), config, plain=args.plain)
    supervisor = LocalSupervisor(config, config_args(args), progress.event, args.accept, launch)
    with progress, mirrored(config, lambda: client_for(config, retry_s=1.0), progress.event), stopped_by(supervisor.request_stop):
        complete = supervisor.run(progress.opened, progress.flush)
    if deaths := supervisor.deaths():
        print("restarts: " + ", ".join(f"{name} {n}" for name, n in deaths.items()))
    if not complete:
        print("stopped; the same command goes on from here")
        return EXIT_STOPPED
    return conclude(config, with_report=not args.no_report)


def _fork_server() -> ForkServer:
    from rollbook.cli.main import main

    return ForkServer(main)


@contextlib.contextmanager
def stopped_by(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C, SIGTERM and a closed terminal call ``stop``; after it they have their usual effect again."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # Inherited as ignored, it would hide the exit codes of the roles.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, handler in before.items():
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:  # under nohup a closed terminal means nothing
            signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def conclude(config: Config, with_report: bool) -> int:
    """Check that a run is whole, audit it and write its report."""
    try:
        with ledger_of(config) as ledger:
            steps = ledger.run_status()["steps"]
            clean = print_audit(ledger)
            _mirror(config, ledger)
            if with_report:
                print(f"report {write_report(config, ledger, Path(config.run.dir) / 'report')}")
    except (RollbookError, ImportError) as error:
        print(f"every role has finished, but the run could not be audited and reported: {type(error).__name__}: {error}")
        return 1
    made = steps["trained"] + steps["skipped"]
    if made < config.run.steps:
        print(f"the learner has finished, but only {made} of {config.run.steps} steps are recorded")
        return 1
    return 0 if clean else 1


def _mirror(config: Config, ledger: LedgerPort) -> None:
    """What was finished after the mirrors were last written."""
    try:
        rebuild(config, ledger, config.run.mirror)
    except Exception as error:  # noqa: BLE001 - boundary: other people's code must not turn a whole run into a failed one
        print(f"the mirrors were not completed: {error!r}")
