"""How long nobody is answered when the ledger's holder vanishes: time until a standby acknowledges a submission.

    python tests/bench/takeover.py --out tests/bench/results/takeover.json

Two ledger servers on a PostgreSQL of their own, as real processes. The holder is killed, stopped between calls, or stopped
inside the transaction of a submission, whose row lock on the fence it keeps. ``standby_s`` is the time from that signal to the
first submission that the standby acknowledges when asked all the time at its own address; ``client_s`` to the answer of an
ordinary client, which was calling the holder and goes round the run's addresses. The bound is the term of the role plus 2 s.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / part) for part in ("service", "tests", "tests/contract", "chaos")]

from ledger_support import Scene, sample_for  # noqa: E402

from postgres_server import PostgresServer  # noqa: E402
from rollbook.cli.record import run_record  # noqa: E402
from rollbook.core.config import load_config  # noqa: E402
from rollbook.core.errors import RollbookError  # noqa: E402
from rollbook.core.records import SubmitOutcome  # noqa: E402
from rollbook.rpc.address import addresses_in, announced, holder_index  # noqa: E402
from rollbook.rpc.client import LedgerClient  # noqa: E402
from run_support import CONFIG, ROLLBOOK, environment, wait_until  # noqa: E402

TERMS_S = (2.0, 5.0, 15.0)
MARGIN_S = 2.0
POINT = "ledger.submit.before_commit"
HOW = ("killed", "stopped", "stopped in a transaction")
DURABLE = (SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED)


def start(root: Path, index: int, failpoints: str = "") -> subprocess.Popen[bytes]:
    with (root / f"ledger-{index}.log").open("ab") as out:
        return subprocess.Popen(
            [*ROLLBOOK, "ledger", str(root / "run.toml"), "--index", str(index)], cwd=root, stdin=subprocess.DEVNULL,
            env=environment(ROLLBOOK_FAILPOINTS=failpoints), stdout=out, stderr=out,
        )  # fmt: skip


def measure(server: PostgresServer, term_s: float, how: str) -> dict[str, float]:
    """One takeover; seconds from the holder's last moment."""
    root = Path(tempfile.mkdtemp(prefix="takeover-"))
    database = server.create(f"takeover_{root.name.rpartition('-')[2].lower()}")
    (root / "run.toml").write_text(CONFIG + f'\n[ledger]\nurl = "{server.url(database)}"\nrole_ttl_s = {term_s}\nstandbys = 1\n')
    config = load_config(root / "run.toml")
    run_dir = config.run.dir
    holder = start(root, 0, f"{POINT}=pause" if how == HOW[2] else "")
    processes = [holder]
    try:
        wait_until("the holder serves", lambda: holder_index(run_dir) == 0)
        processes.append(start(root, 1))
        wait_until("the standby listens", lambda: 1 in announced(run_dir))
        standby = announced(run_dir)[1]
        wait_until("clients are told of the standby", lambda: standby in addresses_in(run_dir)())
        client = LedgerClient(addresses_in(run_dir), config.run.id)
        scene = Scene(client, run_record(config))  # type: ignore[arg-type]
        scene.feed(4)
        one, two, *_ = (sample_for(grant, scene.incarnation) for grant in scene.lease(6))
        found: dict[str, float] = {}

        def ordinary() -> None:
            results = client.submit_samples([one])
            found["client_s"] = time.monotonic()
            assert all(r.outcome in DURABLE for r in results), results

        def probe() -> None:
            with LedgerClient(standby, config.run.id, retry_total_s=0.0) as direct:
                while "standby_s" not in found:
                    try:
                        direct.submit_samples([two])
                        found["standby_s"] = time.monotonic()
                    except RollbookError:
                        time.sleep(0.02)

        probing, calling = (threading.Thread(target=target, daemon=True) for target in (probe, ordinary))
        probing.start()
        if how == HOW[2]:
            calling.start()
            state = Path(f"/proc/{holder.pid}/stat")
            wait_until("the holder stands", lambda: state.read_text().rpartition(")")[2].split()[0] == "T", poll_s=0.005)
            began = time.monotonic()
        else:
            time.sleep(term_s / 3)  # somewhere between two renewals
            began = time.monotonic()
            os.kill(holder.pid, signal.SIGKILL if how == HOW[0] else signal.SIGSTOP)
            calling.start()
        for thread in (probing, calling):
            thread.join(term_s + 120.0)
        return {name: round(at - began, 3) for name, at in found.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
        server.drop(database)
        shutil.rmtree(root, ignore_errors=True)


def write(file: Path, cells: list[dict], repeats: int) -> None:
    """What was measured so far."""
    record = {"cells": cells, "machine": f"{os.cpu_count()} cores, {platform.machine()}", "date": date.today().isoformat(),
              "command": f"tests/bench/takeover.py --repeats {repeats}"}  # fmt: skip
    file.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--terms", type=float, nargs="+", default=TERMS_S, metavar="SECONDS")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what takes the servers down
    logging.disable(logging.WARNING)  # what clients say while nobody answers
    server = PostgresServer()
    cells: list[dict] = []
    try:
        for term_s in arguments.terms:
            for how in HOW:
                runs = [measure(server, term_s, how) for _ in range(arguments.repeats)]
                cell = {
                    "role_ttl_s": term_s, "holder": how, "bound_s": term_s + MARGIN_S, "load": round(os.getloadavg()[0], 1),
                    **{name: sorted(run.get(name, float("inf")) for run in runs) for name in ("standby_s", "client_s")},
                }  # fmt: skip
                cell["kept"] = max(*cell["standby_s"], *cell["client_s"]) <= cell["bound_s"]
                cells.append(cell)
                print(json.dumps(cell), flush=True)
                if arguments.out:
                    write(arguments.out, cells, arguments.repeats)
    finally:
        server.close()
    return 0 if all(cell["kept"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
