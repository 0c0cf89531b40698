"""The long run: thousands of steps of a small model, during which nothing may grow that the ledger's rows do not explain.

Claim: over the run, memory, file descriptors and threads of every role, the run directory, the lease rows, the metric series
and the time in which a killed ledger server answers again stay where they were; the database grows with the samples it holds and
with nothing else. The ledger server is SIGKILLed every few minutes. Growth is fitted by least squares against steps made, its
first fifth left out; limits and verdicts are in ``growth``.

Starts a run of its own (its configuration allows chaos), kills nothing else, waits with bounds. Writes
``chaos/results/long_run.json`` and, with the same name, an HTML page with the plot. Exit 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import growth
import oracle
import soak
from rollbook.cli.common import client_for
from rollbook.core.config import Config, load_config
from rollbook.core.errors import RollbookError
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.process import ProcessRecord, ProcessTable

HERE = Path(__file__).resolve().parent
ROLLBOOK = [sys.executable, "-m", "rollbook.cli.main"]
START_S, STOP_S, ANSWER_S, COMMAND_S = 600.0, 180.0, 300.0, 900.0
COUNTED = ("lease", "sample", "prompt_group", "plan", "failure", "event", "worker")
"""Tables whose rows are counted, where the database has them; receipts of submissions are columns of ``sample``."""


class Broken(Exception):
    """The run did not do what it had to within its bound."""


class LongRun:
    """One run under observation."""

    def __init__(self, config: Config, arguments: list[str], every_s: float, kill_every_s: float) -> None:
        self.config, self.dir = config, Path(config.run.dir)
        self.every_s, self.kill_every_s = every_s, kill_every_s
        self.samples: list[dict[str, Any]] = []
        self.restarts: list[dict[str, float]] = []
        self.began = time.monotonic()
        self.dir.parent.mkdir(parents=True, exist_ok=True)
        with (self.dir.parent / "output.txt").open("wb") as out:
            self.process = subprocess.Popen(
                [*ROLLBOOK, "run", *arguments, "--plain", "--no-report"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def observe(self, minutes: float) -> None:
        """Sample until the time is over; the ledger server is killed now and then. Raises Broken."""
        self._until(lambda: self._steps() >= 1, START_S, "the first step is made")
        self.began = time.monotonic()
        end, kill_at = self.began + 60 * minutes, self.began + self.kill_every_s
        while (now := time.monotonic()) < end:
            if self.process.poll() is not None:
                raise Broken(f"the run ended with exit code {self.process.returncode}\n{self.output()[-3000:]}")
            if now >= kill_at:
                self._kill_ledger()
                kill_at = time.monotonic() + self.kill_every_s
            self.sample()
            time.sleep(max(0.0, now + self.every_s - time.monotonic()))

    def stop(self) -> int:
        """Drain the run; its exit code. Raises Broken when it does not end."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"the run did not end within {STOP_S:.0f} s of being told to") from None

    def end(self) -> None:
        """SIGKILL whatever of this run still lives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for record in self._records().values():
            record.kill_tree()

    def output(self) -> str:
        return (self.dir.parent / "output.txt").read_text(errors="replace")

    def sample(self) -> None:
        """One look at everything; what cannot be read at this moment is left out of it."""
        seen: dict[str, Any] = {"at_s": round(time.monotonic() - self.began, 1)}
        with suppress(RollbookError, OSError):
            seen["steps"] = self._steps()
        seen["roles"] = {name: of_process(record) for name, record in self._records().items() if record.alive()}
        seen["supervisor"] = of_pid(self.process.pid)
        seen["bytes"] = bytes_of(self.dir)
        with suppress(Exception):  # the database is being written or restarted: this sample goes without its rows
            seen["rows"] = self._rows()
        with suppress(OSError):
            seen["series"] = self._series()
        if "steps" in seen:
            self.samples.append(seen)

    def _rows(self) -> dict[str, int]:
        with closing(oracle.connect(self.config.ledger.url)) as connection:
            cursor = connection.cursor()
            known = {name for (name,) in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            return {t: cursor.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in COUNTED if t in known}

    def _series(self) -> int:
        url = f"http://127.0.0.1:{self.config.ledger.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return sum(1 for line in answer.read().decode().splitlines() if line and not line.startswith("#"))

    def _steps(self) -> int:
        with client_for(self.config, retry_s=0.0) as client:
            steps = client.run_status()["steps"]
        return int(steps["trained"] + steps["skipped"])

    def _kill_ledger(self) -> None:
        """SIGKILL the ledger server and measure until its successor answers."""
        record = self._records()["ledger"]
        before = self._steps()
        if not record.signal(signal.SIGKILL):
            return
        killed_at = time.monotonic()
        self._until(lambda: self._replaced(record) and self._steps() >= 0, ANSWER_S, "the next ledger server answers", 0.05)
        self.restarts.append({"steps": before, "seconds": round(time.monotonic() - killed_at, 3)})

    def _replaced(self, old: ProcessRecord) -> bool:
        return self._records()["ledger"].incarnation != old.incarnation

    def _until(self, happened: Any, bound_s: float, what: str, poll_s: float = 0.5) -> None:
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Broken(f"the run ended with exit code {self.process.returncode}\n{self.output()[-3000:]}")
            with suppress(RollbookError, OSError):
                if happened():
                    return
            time.sleep(poll_s)
        raise Broken(f"not within {bound_s:.0f} s: {what}\n{self.output()[-3000:]}")

    def _records(self) -> dict[str, ProcessRecord]:
        return ProcessTable(self.dir / "supervisor" / "processes.json").records()


def of_process(record: ProcessRecord) -> dict[str, Any]:
    """Memory, descriptors and threads of a role and which process it was; its children are counted with their memory."""
    seen = of_pid(record.pid)
    children = [pid for pid in record.tree() if pid != record.pid]
    return seen | {"rss": seen["rss"] + sum(of_pid(pid)["rss"] for pid in children), "incarnation": record.incarnation[:8]}


def of_pid(pid: int) -> dict[str, int]:
    """Zeros for a process that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fds, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return {"rss": 0, "fds": 0, "threads": 0}
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "fds": fds, "threads": threads}


def bytes_of(run_dir: Path) -> dict[str, int]:
    """Bytes of the run directory by folder; the database with its journals, and everything else."""
    found = {"database": 0, "logs": 0, "other": 0}
    for folder, _, files in os.walk(run_dir):
        for name in files:
            with suppress(OSError):
                size = (Path(folder) / name).stat().st_size
                kind = "database" if name.startswith("ledger.sqlite") else "logs" if folder.endswith("/logs") else "other"
                found[kind] += size
    return found


def main() -> int:
    """Run, observe, stop, audit, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sample-s", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--kill-s", type=float, default=300.0, help="seconds between two kills of the ledger server")
    parser.add_argument("--dir", default="", help="default: runs/long_run of the checkout, with the time")
    parser.add_argument("--config", default=str(HERE / "long_run.toml"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--results", default=str(HERE / "results" / "long_run.json"))
    args = parser.parse_args()
    logging.getLogger("rollbook").addHandler(logging.NullHandler())  # a client that asks too early is no news
    root = Path(args.dir or HERE.parent / "runs" / "long_run" / f"{datetime.now(UTC):%Y%m%dT%H%M%S}").resolve()
    overrides = [f"run.dir={root / 'run'}", *args.overrides]
    config = load_config(args.config, overrides)
    if not config.run.chaos_allowed:
        print(f"{args.config} does not say run.chaos_allowed = true: the ledger server is killed", file=sys.stderr)
        return 2
    print(f"long run: {args.minutes:g} minutes, directory {root}", flush=True)
    run = LongRun(config, [args.config, *(p for o in overrides for p in ("--set", o))], args.sample_s, args.kill_s)
    broken, code, audit = "", -1, "not audited"
    try:
        run.observe(args.minutes)
        code = run.stop()
        done = subprocess.run([*ROLLBOOK, "audit", str(run.dir)], capture_output=True, text=True, timeout=COMMAND_S, check=False)
        audit = "clean" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
    except Broken as error:
        broken = str(error)
    finally:
        run.end()
    every = config.checkpoint.every_steps
    period = (every if isinstance(every, int) else 50, config.checkpoint.keep)
    verdicts = growth.judge(run.samples, run.restarts, period)
    kept = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "machine": soak.machine(), "commit": soak.commit(),
        "command": f"python chaos/long_run.py --minutes {args.minutes:g} --sample-s {args.sample_s:g} --kill-s {args.kill_s:g}",
        "minutes": args.minutes, "broken": broken,
        "exit_code": code, "audit": audit, "load": round(os.getloadavg()[0], 1),
        "steps": run.samples[-1]["steps"] if run.samples else 0, "restarts": run.restarts,
        "verdicts": [v.to_values() for v in verdicts], "samples": growth.thinned(run.samples),
    }  # fmt: skip
    kept["verdict"] = growth.overall(verdicts, fine=not broken and code == EXIT_STOPPED and audit == "clean")
    results = Path(args.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    growth.page(kept, run.samples, run.restarts, verdicts, results.with_suffix(".html"))
    print(growth.table(verdicts))
    print(f"{kept['steps']} steps, {len(run.restarts)} restarts of the ledger server, exit code {code}, audit: {audit} {broken}")
    print(f"claim {kept['verdict']}; {results} and {results.with_suffix('.html')}")
    return 0 if kept["verdict"] == "holds" else 1


if __name__ == "__main__":
    sys.exit(main())
