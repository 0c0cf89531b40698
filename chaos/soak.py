"""The soak: real systems run again and again while their roles, they as a whole and their database are killed.

Claim: whatever is killed, whenever, a run ends by itself with a clean audit, nothing acknowledged lost, nothing trained twice,
no prompt skipped, every version reproduced by replay and, in fixed lag, equal to the unbroken run. Runs both schedules on SQLite
and PostgreSQL with 1, 2 and 4 workers, two systems at a time, with the real learner on the model that sorts digits. Restarts are
shortened by a fork server: roles skip their imports. Refuses a configuration without ``run.chaos_allowed = true``.

Every run is one line of ``chaos/results/soak.jsonl``; ``--table`` adds them up. A run that breaks the claim keeps its directory
and prints its seed and what was found; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import logging
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import acknowledgements
import soak_table
import soaked_run
from postgres_server import NotObtainable, PostgresServer
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError
from rollbook.supervise import forkserver
from soaked_run import Setting, SoakedRun

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "soak.jsonl"
SCHEDULES, DATABASES, WORKERS = ("bounded", "fixed"), ("sqlite", "postgresql"), (1, 2, 4)


class Interrupted(BaseException):
    """The soak was asked to stop."""


def main() -> int:
    """Soak for the given time, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="no run is started after this time")
    parser.add_argument("--seed", type=int, default=0, help="default: made up and printed")
    parser.add_argument("--runs", type=int, default=0, help="stop after so many runs; 0 = the time alone decides")
    parser.add_argument("--only", default="", help="run the settings whose name contains this, for example fixed-postgresql-2w")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to repeat one that failed")
    parser.add_argument("--kills", type=int, default=0, help="kills of one run at random times; 0 = as many as are planned")
    parser.add_argument("--lanes", type=int, default=2, help="systems at once")
    parser.add_argument("--config", default=str(HERE / "soak.toml"))
    parser.add_argument("--dir", default="", help="where the runs are; default: runs/soak of the checkout")
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument("--commit", default="", help="revision of the code, where this is no git checkout")
    parser.add_argument("--table", action="store_true", help="add up all recorded runs")
    args = parser.parse_args()
    if args.table:
        print(soak_table.table(soak_table.read(Path(args.results))))
        return 0
    logging.getLogger("rollbook").addHandler(logging.NullHandler())
    try:
        config = load_config(args.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if not config.run.chaos_allowed:
        print(f"{args.config} does not say run.chaos_allowed = true: the soak kills processes of the run", file=sys.stderr)
        return 2
    return soak(args, config.run.steps)


def soak(args: argparse.Namespace, steps: int) -> int:
    """Fork the lanes and wait for them; 1 when one of them had a run that failed."""
    seed = args.seed or random.SystemRandom().randrange(1, 10**6)
    root = Path(args.dir or HERE.parent / "runs" / "soak").resolve() / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{seed}"
    (root / "references").mkdir(parents=True)
    about = {
        "machine": machine(), "commit": args.commit or commit(), "code": code_digest(), "seed": seed, "fork_server": True,
        "soak": root.name,
    }  # fmt: skip
    print(f"soak: seed {seed}, {args.minutes:g} minutes, {args.lanes} systems at once, directory {root}", flush=True)
    acknowledgements.record()
    forkserver.preload()
    until = time.monotonic() + 60 * args.minutes
    lanes = []
    for index in range(args.lanes):
        pid = os.fork()
        if pid == 0:
            _exit_with(lambda index=index: Lane(args, index, root, about, steps, until).run())
        lanes.append(pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: [os.kill(pid, n) for pid in lanes] and None)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in lanes]
    print(soak_table.table([r for r in soak_table.read(Path(args.results)) if r["soak"] == root.name]))
    return int(any(codes))


def _exit_with(work: Callable[[], int]) -> None:
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - boundary of the forked process: it must not return into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


class Lane:
    """Runs one system after the other: every ``lanes``-th of the plan."""

    def __init__(
        self, args: argparse.Namespace, index: int, root: Path, about: dict[str, Any], steps: int, until: float
    ) -> None:  # fmt: skip
        self.args, self.index, self.root, self.about, self.steps, self.until = args, index, root, about, steps, until
        self.server: PostgresServer | None = None
        self.failed = 0

    def run(self) -> int:
        """0 when every run was clean."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        try:
            for n in itertools.count(self.args.first + self.index, self.args.lanes):
                if time.monotonic() > self.until or (self.args.runs and n >= self.args.first + self.args.runs):
                    break
                self._one(n)
        except Interrupted:
            print(f"lane {self.index}: stopped; its last run is not recorded", flush=True)
        finally:
            if self.server:
                self.server.close()
        return int(self.failed > 0)

    def _one(self, n: int) -> None:
        seed = self.about["seed"]
        settings = plan(seed, self.steps, self.args.only, self._postgresql())
        setting = settings[n % len(settings)]
        run: SoakedRun | None = None
        try:
            reference = self._reference(setting)
            run = self._make(f"run_{n:04d}", setting, random.Random(f"{seed}/{n}"))
            run.soak(self.args.kills)
            verdict = self._judged(run, reference)
            self._record(n, run, verdict)
            if not verdict.findings:
                soaked_run.remove(run)
        finally:
            if run:
                run.end_everything()

    def _judged(self, run: SoakedRun, reference: dict[str, Any]) -> soaked_run.Verdict:
        try:
            verdict = soaked_run.judge(run, reference)
            soaked_run.measure(run, verdict.tables)
            return verdict
        except Exception:  # noqa: BLE001 - boundary of one run: what cannot be judged has failed, and the soak goes on
            counts = dict.fromkeys(soaked_run.COUNTS, 0)
            return soaked_run.Verdict({}, [*run.findings, f"not judged: {traceback.format_exc()}"], counts)

    def _make(self, name: str, setting: Setting, chance: random.Random) -> SoakedRun:
        server = self._postgresql() if setting.database == "postgresql" else None
        return SoakedRun(self.root / name, Path(self.args.config).resolve(), setting, server, chance)

    def _reference(self, setting: Setting) -> dict[str, Any]:
        """The unbroken fixed-lag run: of the same setting where runs must be equal, of any where only prompts must."""
        if setting.schedule != "fixed":
            setting = Setting("fixed", "sqlite", 2, setting.steps, setting.seed)
        with (self.root / "references" / f"{setting.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return soaked_run.reference_for(
                setting, self.root / "references", lambda s: self._make(f"unbroken_{s.name}", s, random.Random(0))
            )

    def _postgresql(self) -> PostgresServer | None:
        if self.server is None:
            try:
                self.server = PostgresServer()
            except NotObtainable as error:
                print(f"lane {self.index}: PostgreSQL NOT RUN: {error}", flush=True)
        return self.server

    def _record(self, n: int, run: SoakedRun, verdict: soaked_run.Verdict) -> None:
        deaths, stops = soaked_run.kills_by_role(run.kills)
        line = {
            "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **self.about, "run": n, "schedule": run.setting.schedule,
            "database": run.setting.database, "workers": run.setting.workers, "steps": run.setting.steps,
            "wall_s": round(time.time() - run.began, 1), "load": round(os.getloadavg()[0], 1), "kills": deaths, "stops": stops,
            "processes_killed": run.n_processes, **verdict.counts, "verdict": "failed" if verdict.findings else "clean",
            "findings": [finding[:1000] for finding in verdict.findings[:20]],
            "each": [[k.role, k.kind, round(k.at - run.began, 2), k.new_rollout_s, k.new_step_s] for k in run.kills],
        }  # fmt: skip
        results = Path(self.args.results)
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as out:
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
        print(
            f"run {n} {run.setting.name}: {line['verdict']}, {sum(deaths.values())} kills, {sum(stops.values())} stops, "
            f"{line['wall_s']} s", flush=True,
        )  # fmt: skip
        if verdict.findings:
            self.failed += 1
            told = "\n  ".join(verdict.findings[:10])
            print(f"RUN FAILED: seed {self.about['seed']}, run {n}, kept in {run.root}\n  {told}", flush=True)


def plan(seed: int, steps: int, only: str, server: PostgresServer | None) -> list[Setting]:
    """Every setting once, in an order that the seed decides."""
    settings = [
        Setting(schedule, database, workers, steps, 1 + seed % 1000)
        for schedule, database, workers in itertools.product(SCHEDULES, DATABASES, WORKERS)
        if database != "postgresql" or server is not None
    ]
    settings = [setting for setting in settings if only in setting.name]
    random.Random(seed).shuffle(settings)
    return settings


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def machine() -> dict[str, Any]:
    """Where the soak runs."""
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {"cores": os.cpu_count(), "cpu": cpu[0] if cpu else platform.processor(), "python": platform.python_version()}


def commit() -> str:
    """Revision of the checkout, with a plus where it is changed; empty outside of one."""
    git = shutil.which("git")
    if not git:
        return ""
    ask = [[git, "rev-parse", "--short", "HEAD"], [git, "status", "--porcelain", "--", "service", "migrations"]]
    said = [subprocess.run(a, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip() for a in ask]
    return said[0] + "+" * bool(said[0] and said[1])


def code_digest() -> str:
    """First digits of a digest over the product's own files."""
    import rollbook

    hasher = hashlib.sha256()
    root = Path(rollbook.__file__).parent
    for file in sorted(root.rglob("*.py")):
        hasher.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return hasher.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
