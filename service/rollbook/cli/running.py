"""`rollbook run`: everything on this machine, with live progress; the same command again resumes.

Owns the life of a local run as a person sees it: what is printed at start, during and at the end, and the exit code.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from rollbook.cli.common import add_config, client_for, config_args, ledger_of, read_config
from rollbook.cli.inspecting import print_audit, write_report
from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.report.progress import Progress
from rollbook.supervise.local import LocalSupervisor


def register(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("run", help="run everything on this machine; the same command again resumes")
    add_config(parser)
    parser.add_argument(
        "--accept-config-change", action="store_true", help="resume with a changed configuration, stored as a revision"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    parser.add_argument("--no-report", action="store_true", help="skip the report at the end")
    parser.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Supervise the run to its end, then audit it and write the report."""
    from rollbook.cli.record import run_record

    config = read_config(args)
    record = run_record(config)
    print(f"run {config.run.id}  directory {config.run.dir}")
    print(f"configuration {record.config_digest[:16]}  ledger {config.ledger.url}")
    progress = Progress(lambda: client_for(config, retry_s=1.0), config, plain=args.plain)
    supervisor = LocalSupervisor(config, config_args(args), progress.event, args.accept_config_change)
    interrupted = []

    def on_signal(number: int, frame: object) -> None:
        interrupted.append(number)
        supervisor.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with progress:
        supervisor.run()
    if deaths := supervisor.deaths():
        print("restarts: " + ", ".join(f"{name} {n}" for name, n in deaths.items()))
    if interrupted:
        print("drained; the same command goes on from here")
        return 130
    return conclude(config, with_report=not args.no_report)


def conclude(config: Config, with_report: bool) -> int:
    """Audit and report a finished run."""
    try:
        with ledger_of(config) as ledger:
            clean = print_audit(ledger)
            if with_report:
                print(f"report {write_report(config, ledger, Path(config.run.dir) / 'report')}")
    except RollbookError as error:
        print(f"the run is complete, but its report failed: {error}")
        return 1
    return 0 if clean else 1
