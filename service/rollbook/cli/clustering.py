"""`rollbook up · down · scale`: a run on a Ray cluster, in the foreground or detached, and what it can be told meanwhile.

Owns the life of a cluster run as a person sees it. ``down`` and ``scale`` leave an order in the run directory, which reaches any
supervisor of the run, also the one of ``rollbook run``. Exit codes are those of ``rollbook run``.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rollbook.cli.common import add_accept, add_config, client_for, config_args, read_config
from rollbook.cli.running import conclude, stopped_by
from rollbook.core import errors
from rollbook.core.changes import check_names
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, RollbookError, Unavailable
from rollbook.report.progress import Progress, shown_url
from rollbook.supervise import control, logs
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.supervisor import Supervisor

POLL_S = 0.5
SILENT_S = 120.0
"""A supervisor that has shown no sign of life for this long is gone: longer than Ray takes to start it again elsewhere."""
_PATIENCE = "they wait for nodes that join, {} where nothing advances without them (--wait-for-resources S)"
DOWN_S = 60.0
"""What ``down`` waits beyond the grace of the roles."""


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands."""
    parser = commands.add_parser("up", help="run everything on a Ray cluster; the same command again resumes or attaches")
    add_config(parser)
    add_accept(parser)
    parser.add_argument("--ray", required=True, metavar="ADDRESS", help="HOST:PORT of a running cluster, or auto")
    parser.add_argument("--detach", action="store_true", help="return when it runs; it goes on without this terminal")
    parser.add_argument(
        "--wait-for-resources", type=float, default=None, metavar="S",
        help="end the run when it cannot advance for want of nodes for so long; default: wait for them",
    )  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    parser.add_argument("--no-report", action="store_true", help="skip the report at the end")
    parser.set_defaults(function=up)
    parser = commands.add_parser("down", help="drain a run and end it, wherever its supervisor is")
    add_config(parser)
    parser.set_defaults(function=down)
    parser = commands.add_parser("scale", help="change the number of workers of a run, now and for its next starts")
    add_config(parser)
    parser.add_argument("order", metavar="workers=N", help="N; fill: as many as fit; config: as configured")
    parser.set_defaults(function=scale)


def up(args: argparse.Namespace) -> int:
    """Start, resume or attach to the run on the cluster."""
    from rollbook.cli.preflight import check_inputs, check_run_dir
    from rollbook.cli.record import run_record

    try:
        from rollbook.supervise import ray_backend, ray_supervisor
    except ImportError as error:
        raise ConfigError(f"Ray is not installed here ({error}); pip install 'rollbook[ray]', or use `rollbook run`") from None
    if args.wait_for_resources is not None:
        args.overrides.append(f"cluster.wait_for_resources_s={args.wait_for_resources}")
    config = read_config(args)
    check_inputs(config)
    check_run_dir(config)
    record = run_record(config)
    check_names(record.config_json, args.accept)
    print(f"run {config.run.id}  directory {config.run.dir}  cluster {args.ray}")
    print(f"configuration {record.config_digest[:16]}  ledger {shown_url(config.ledger.url)}", flush=True)
    ray_backend.connect(args.ray, config.run.id)
    env = ray_backend.carried_environment()
    attempt = uuid.uuid4().hex
    backend = ray_backend.RayBackend(config, env, attempt)
    backend.check(config)
    if ray_supervisor.find(config.run.id) is not None:
        print("its supervisor runs on the cluster already", flush=True)
        return 0 if args.detach else _follow(config, args)
    if shortfall := backend.shortfall(config):
        bound = config.cluster.wait_for_resources_s
        print("\n".join([*shortfall, _PATIENCE.format(f"{bound:g} s at most" if bound else "without a bound")]), flush=True)
    if args.detach:
        ray_supervisor.start_detached(config, config_args(args), env, args.accept, attempt)
        print(f"it runs detached; attach: rollbook up {args.config} --ray {args.ray}  end: rollbook down {args.config}")
        return 0
    progress = Progress(lambda: client_for(config, retry_s=1.0), config, plain=args.plain)
    supervisor = Supervisor(config, config_args(args), backend, progress.event, args.accept, attempt)
    with progress, stopped_by(supervisor.request_stop):
        complete = supervisor.run(progress.opened, progress.flush)
    if deaths := supervisor.deaths():
        print("restarts: " + ", ".join(f"{name} {n}" for name, n in deaths.items()))
    return _ended(config, args, complete)


def _ended(config: Config, args: argparse.Namespace, complete: bool) -> int:
    if not complete:
        print("stopped; the same command goes on from here")
        return EXIT_STOPPED
    return conclude(config, with_report=not args.no_report)


def _follow(config: Config, args: argparse.Namespace) -> int:
    """Show a detached run until it ends; a signal to stop leaves it alone."""
    log = Path(config.run.dir) / "logs" / "supervisor.log"
    seen = logs.size(log)
    progress = Progress(lambda: client_for(config, retry_s=1.0), config, plain=args.plain)
    opened, state = False, control.read_state(Path(config.run.dir))
    left = threading.Event()
    with progress, stopped_by(left.set):  # also where the shell has SIGINT ignored, as for what runs in its background
        for state in _states(config, left=left):  # noqa: B007 - the last one is the outcome
            size = logs.size(log)
            for line in logs.since(log, seen).splitlines() if size != seen else []:
                progress.event(line)
            seen = size
            if not opened:
                with contextlib.suppress(RollbookError), client_for(config, retry_s=0.0) as client:
                    progress.opened(client.resume_point())
                    opened = True
    if left.is_set():
        print("detached from the run, which goes on")
        return EXIT_STOPPED
    if state["outcome"] == control.FAILED:
        kind = getattr(errors, str(state.get("error")), RollbookError)
        raise kind(str(state.get("message"))) if issubclass(kind, RollbookError) else RollbookError(f"{state}")
    return _ended(config, args, state["outcome"] == control.COMPLETE)


def _states(config: Config, bound_s: float = float("inf"), left: threading.Event | None = None) -> Iterator[dict]:
    """The supervisor's state again and again, the last one when it has ended, or when whoever looks has left.

    Raises: Unavailable when it shows no sign of life, or has not ended within the bound.
    """
    began = heard_at = time.monotonic()
    previous: dict = {}
    left = left or threading.Event()
    while not left.is_set():
        state = control.read_state(Path(config.run.dir))
        if state != previous:
            previous, heard_at = state, time.monotonic()
        if state:
            yield state
        if state and state["outcome"] != control.RUNNING:
            return
        who = f"the supervisor of {config.run.id!r}"
        if time.monotonic() - heard_at > SILENT_S:
            raise Unavailable(f"{who} has shown no sign of life for {SILENT_S:.0f} s; {_where(state)}")
        if time.monotonic() - began > bound_s:
            raise Unavailable(f"{who} has not ended within {bound_s:.0f} s; {_where(state)}")
        left.wait(POLL_S)


def _where(state: dict) -> str:
    return f"it is pid {state.get('pid')} on {state.get('host')}, started {state.get('started_at')}"


def down(args: argparse.Namespace) -> int:
    """Have the supervisor drain the run; returns when it has."""
    config = read_config(args)
    run_dir = Path(config.run.dir)
    state = control.read_state(run_dir)
    if not state or state["outcome"] != control.RUNNING:
        print(f"run {config.run.id} is not running" + (f": its last supervisor ended as {state['outcome']}" if state else ""))
        return 0
    control.order_stop(run_dir, state["supervisor"])
    for state in _states(config, 2 * config.supervisor.drain_s + DOWN_S):
        if state["outcome"] == control.RUNNING:
            control.order_stop(run_dir, state["supervisor"])  # it may have been replaced meanwhile
    print(f"run {config.run.id} has ended as {state['outcome']}; the command that started it goes on from here")
    return 1 if state["outcome"] == control.FAILED else 0


def scale(args: argparse.Namespace) -> int:
    """Order a number of workers."""
    config = read_config(args)
    name, separator, value = args.order.partition("=")
    if name != "workers" or not separator:
        raise ConfigError(f"{args.order!r}: write workers=N, workers={control.FILL} or workers={control.CONFIGURED}")
    control.order_workers(Path(config.run.dir), int(value) if value.isdecimal() else value)
    running = control.read_state(Path(config.run.dir)).get("outcome") == control.RUNNING
    print(f"workers = {value} ordered" + ("" if running else "; the run's next start has them"))
    return 0
