"""A drill: a claim, faults in a run, bounded waits, an independent verdict, one table, a truthful exit code.

Owns the order of these. A drill's own file says what a strike does; nothing here knows a fault. Exit code 0 when the claim holds,
1 when it is broken, 2 when the drill refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from drills import record, report, verdict
from drills.faults import Fault
from drills.runs import END_BOUND_S, REPOSITORY, LiveRun, OwnRun, Refused, Run
from postgres_server import NotObtainable

CONFIG = REPOSITORY / "chaos" / "soak.toml"
POLL_S = 0.05
LOOK_S = 0.5
"""How often the database is asked for progress: rarely enough not to be a load of its own."""
STILL_BOUND_S = 240.0
"""Longest that no step may be finished, whatever is being done to the run: standing still for longer is a hang."""


class Broken(Exception):
    """The claim does not hold, and going on would show nothing more."""


class Drill:
    """One drill on one run. A subclass says ``name``, ``claim`` and ``strike``, and whatever else it needs."""

    name: ClassVar[str]
    claim: ClassVar[str]
    needs_own_run: ClassVar[str] = ""
    """Why a live run cannot be disturbed in this way; empty where it can."""
    count: ClassVar[int] = 6
    interval_s: ClassVar[float] = 10.0
    clock_is_bent: ClassVar[bool] = False
    """The ledger's times are part of the disturbance: what is timed is timed by this machine's clock."""
    allowed_deaths: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(role, how) of deaths that belong to the disturbance, however many."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.seed: int = args.seed or random.SystemRandom().randrange(1, 10**6)
        self.chance = random.Random(self.seed)
        self.faults: list[Fault] = []
        self.findings: list[str] = []
        self.seen: dict[tuple[int, int], str] = {}
        self.observed: list[tuple[float, int, int]] = []
        """(time, steps, samples) as this machine's clock saw them."""
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._step, self._moved_at, self._looked_at = -1, time.monotonic(), 0.0
        self._events_from = 0

    # What a subclass may say.

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Options of this drill alone."""

    def overrides(self) -> list[str]:
        """Configuration of a run of its own, as ``--set`` takes it."""
        return []

    def failpoints(self) -> str:
        """Armed in a run of its own."""
        return ""

    def prepare(self) -> None:
        """Before a run of its own is started."""

    def would_do(self) -> list[str]:
        """Lines for ``--dry-run``."""
        return []

    def strike(self) -> Fault | None:
        """Send one fault; None when there is nothing to hit at this moment."""
        raise NotImplementedError

    def relax(self) -> None:
        """End every disturbance that ``later`` does not end."""

    def close(self) -> None:
        """Let go of what the drill holds, whatever happened."""

    def own_findings(self, result: verdict.Verdict) -> list[str]:
        """What this drill demands beyond what every drill does."""
        return []

    def own_numbers(self, result: verdict.Verdict) -> dict[str, object]:
        """Further lines of the table."""
        return {}

    # The run.

    def go(self) -> int:
        """From start to verdict; returns the exit code."""
        print(f"drill {self.name}: seed {self.seed}", flush=True)
        print(f"claim: {self.claim}", flush=True)
        try:
            self.run = self._open()
        except (Refused, NotObtainable) as refusal:
            print(f"refused: {refusal}", file=sys.stderr)
            return 2
        try:
            if self.args.dry_run:
                return self._dry_run()
            if isinstance(self.run, OwnRun):
                print(f"run {self.run.root}", flush=True)
                self.prepare()
                self.run.start()
            return self._conclude(*self._disturb())
        except Refused as refusal:
            print(f"refused: {refusal}", file=sys.stderr)
            return 2
        finally:
            self._run_due(float("inf"))
            self.close()
            if isinstance(self.run, OwnRun):
                self.run.close()

    def _open(self) -> Run:
        if self.args.run:
            if self.needs_own_run:
                raise Refused(f"{self.name} on a live run: {self.needs_own_run}")
            run = LiveRun(Path(self.args.run))
            run.rejoin = self.args.rejoin
            self._events_from = run.events_from
            return run
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self.name}-{self.seed}"
        root = Path(self.args.dir or REPOSITORY / "runs" / "drills") / stamp
        return OwnRun(
            root, Path(self.args.config), self.seed, [*self.overrides(), *self.args.overrides], steps=self.args.steps,
            database=self.args.database, fork_server=self.args.fork_server, failpoints=self.failpoints(),
            raylets=self.args.raylets,
        )  # fmt: skip

    def _dry_run(self) -> int:
        if isinstance(self.run, OwnRun):
            print(f"dry run: would start {self.run.file.name} in {self.run.root} and send {self._count()} faults")
            shutil.rmtree(self.run.root)
        for line in self.would_do():
            print(f"  would hit {line}")
        return 0

    def _count(self) -> int:
        return self.args.count if self.args.count is not None else self.count

    def _disturb(self) -> tuple[verdict.Window, bool]:
        """All faults; returns their window, and whether the run has ended by itself."""
        calm_from = begin = time.time()
        finished = False
        try:
            bound_s = self.args.patience + self.args.calm_s
            self.wait_for(f"{self.args.calm_steps} steps without a fault", self._calm_is_over, bound_s)
            calm_from, begin = self._calm_from, time.time()
            self._strike_all()
        except Broken as broken:
            self.findings.append(str(broken))
        end = time.time()
        try:
            if self.findings:
                self._dump()
                self._run_due(float("inf"))
            else:
                self._recover()
                end = time.time()
                finished = self._end()
        except (Broken, AssertionError) as broken:
            self.findings.append(str(broken))
        return verdict.Window(calm_from, begin, end), finished

    def _calm_is_over(self) -> bool:
        """Enough unbroken steps behind the first two, which are slower than the others."""
        steps = self.run.steps()
        if not hasattr(self, "_calm_from"):
            if steps >= self._first + 2:
                self._calm_from, self._calm_step = time.time(), steps
            return False
        return steps >= self._calm_step + self.args.calm_steps and time.time() >= self._calm_from + self.args.calm_s

    @property
    def _first(self) -> int:
        if not hasattr(self, "_first_step"):
            self._first_step = self.run.steps()
        return self._first_step

    def _strike_all(self) -> None:
        wanted, until = self._count(), time.monotonic() + 60.0 * self.args.minutes if self.args.minutes else float("inf")
        sent, missed = 0, 0
        while (sent < wanted or (self.args.minutes and self.args.count is None)) and time.monotonic() < until:
            if not self.go_on(min(self._gap(), max(0.0, until - time.monotonic()))):
                break
            if time.monotonic() >= until:
                break
            if (fault := self.strike()) is None:
                missed += 1
                if missed > 200:
                    raise Broken("there is nothing to hit: " + "; ".join(self.would_do()))
                continue
            sent, missed = sent + 1, 0
            self.faults.append(fault)
            print(f"{datetime.now(UTC):%H:%M:%S} {fault}  (step {self._step})", flush=True)

    def _gap(self) -> float:
        """Exact where every fault is to be seen alone; random around the interval else."""
        interval = self.args.interval if self.args.interval is not None else self.interval_s
        return interval * self.chance.uniform(0.5, 1.5)

    # Waiting.

    def go_on(self, seconds: float) -> bool:
        """Let the run be for a while; False once it has ended by itself. Raises Broken when it stands still for too long."""
        until = time.monotonic() + seconds
        while True:
            if not self._look():
                return False
            if (left := until - time.monotonic()) <= 0:
                return True
            time.sleep(min(POLL_S, left))

    def wait_for(self, what: str, happened: Callable[[], bool], bound_s: float) -> None:
        """Wait while the run goes on. Raises Broken when it does not happen in time, or the run ends before."""
        deadline = time.monotonic() + bound_s
        while not happened():
            if not self._look():
                raise Broken(f"the run ended (exit code {self.run.ended()}) before this: {what}{self._tail()}")
            if time.monotonic() > deadline:
                raise Broken(f"not within {bound_s:.0f} s: {what}{self._tail()}")
            time.sleep(0.2)

    def _look(self) -> bool:
        """One look at the run; False once it has ended by itself."""
        now = time.monotonic()
        self._run_due(now)
        self.on_turn()
        going = self.run.keep_supervisor()
        self._notice()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            if not self.run.own:
                self._witness()
            step = self.run.steps()
            self.observed.append((time.time(), step, self.run.samples() if self.clock_is_bent else 0))
            if step != self._step:
                self._step, self._moved_at = step, now
            elif going and now - self._moved_at > self.args.patience:
                raise Broken(f"hangs: no step finished for {now - self._moved_at:.0f} s after step {step}")
        return going

    def on_turn(self) -> None:
        """Called at every turn of waiting."""

    def _notice(self) -> None:
        """When a successor of a killed process was recorded, somebody has detected its death."""
        waiting = [f for f in self.faults if f.detected_s is None and f.kind != "sigstop" and f.victims]
        if waiting:
            records = self.run.records()
            for fault in waiting:
                if all(name not in records or records[name].incarnation != old for name, old in fault.victims.items()):
                    fault.detected_s = round(time.time() - fault.at, 3)

    def _witness(self) -> None:
        """What a live run's database shows is durable, so it is owed at the end."""
        rows = self.run.query(f"SELECT ordinal, sibling, payload_digest FROM sample WHERE run_id = '{self.run.id}'")
        self.seen |= {(ordinal, sibling): digest for ordinal, sibling, digest in rows}

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """End a lasting disturbance after a while; at the latest when no more faults are sent."""
        self._later.append((time.monotonic() + seconds, action))

    def _run_due(self, now: float) -> None:
        for item in list(self._later):
            if now >= item[0]:
                self._later.remove(item)
                item[1]()

    # The end.

    def _recover(self) -> None:
        """Nobody disturbs the run any more: what was killed has to live again and a step to be made, unless the run has ended."""
        while self._later and self.go_on(0.1):
            pass
        self.relax()
        if self.run.ended() is None:
            with contextlib.suppress(Broken) if self._has_steps_end() else contextlib.nullcontext():
                killed = [fault for fault in self.faults if fault.kind == "sigkill" and fault.victims]
                self.wait_for(
                    "a successor of everything that was killed", lambda: all(f.detected_s is not None for f in killed),
                    self.args.patience,
                )  # fmt: skip
                goal = self.run.steps() + 1
                self.wait_for("a new step after the last fault", lambda: self.run.steps() >= goal, self.args.patience)

    def _has_steps_end(self) -> bool:
        return isinstance(self.run, OwnRun) and not self.run.open_end

    def _end(self) -> bool:
        """Let an own run end by itself, with exit code 0. True when it has."""
        if not isinstance(self.run, OwnRun):
            return False
        if self.run.open_end:
            self.run.wind_up()
        deadline = time.monotonic() + END_BOUND_S
        while self._look():
            if time.monotonic() > deadline:
                raise Broken(f"the undisturbed run does not end within {END_BOUND_S:.0f} s{self._tail()}")
            time.sleep(POLL_S)
        if code := self.run.ended():
            raise Broken(f"the run ended with exit code {code}{self._tail()}")
        return True

    def _tail(self) -> str:
        return f"\n{self.run.output()[-2500:]}" if isinstance(self.run, OwnRun) else ""

    def _dump(self) -> None:
        """Stacks of every role into its log, for whoever has to understand."""
        for process in self.run.alive():
            if process.catches(signal.SIGUSR1):
                process.signal(signal.SIGUSR1)
        time.sleep(1.0)

    def _judged(self, window: verdict.Window, finished: bool) -> verdict.Verdict:
        try:
            return verdict.judge(
                self.run, self.faults, window, finished=finished, seen=self.seen, replay_max=self.args.replay_max,
                observed=self.observed if self.clock_is_bent else None,
            )
        except Exception:  # noqa: BLE001 - boundary of the drill: a run that cannot be judged has broken the claim
            return verdict.Verdict({}, [f"not judged: {traceback.format_exc()}"])

    def _conclude(self, window: verdict.Window, finished: bool) -> int:
        result = self._judged(window, finished)
        told = self.run.output() if isinstance(self.run, OwnRun) else self.run.events(self._events_from)
        result.findings += verdict.unexpected_deaths(told, self.faults, self.allowed_deaths)
        result.findings += [*self.findings, *self.own_findings(result)]
        if not self.faults:
            result.findings.append("faults: none was sent")
        result.numbers |= self.own_numbers(result)
        entry = record.entry(self, result, finished)
        print(record.table(entry), flush=True)
        for finding in result.findings:
            print(f"  {finding}", file=sys.stderr)
        record.keep(self.args, entry)
        if self.args.report:
            report.write(Path(self.args.report), entry, result.tables)
        return int(bool(result.findings))


def main(drill: type[Drill], argv: list[str] | None = None) -> int:
    """The command line of a drill's file."""
    parser = argparse.ArgumentParser(prog=f"chaos/{drill.name}.py", description=f"Claim: {drill.claim}")
    _add_common(parser, drill)
    drill.add_arguments(parser)
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    logging.getLogger("rollbook").addHandler(logging.NullHandler())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    return drill(args).go()


def _add_common(parser: argparse.ArgumentParser, drill: type[Drill]) -> None:
    """What every drill can be told."""
    parser.add_argument("--run", default="", metavar="DIR", help="disturb the live run in DIR; default: start one")
    parser.add_argument("--config", default=str(CONFIG), help="configuration of a run of its own")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite", help="of a run of its own")
    parser.add_argument("--dir", default="", help="where runs of its own are; default: runs/drills of the checkout")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run of its own; 0 = as many as the faults need")
    parser.add_argument("--raylets", type=int, default=0, metavar="N", help="start its own run on N Ray nodes of this machine")
    parser.add_argument("--rejoin", default="", metavar="COMMAND", help="what brings back a killed node of a live run")
    parser.add_argument("--fork-server", action="store_true", help="restart roles without their imports")
    parser.add_argument("--seed", type=int, default=0, help="default: made up and printed")
    parser.add_argument("--count", type=int, default=None,
                        help=f"faults; default: {drill.count}, or as many as --minutes has time for")  # fmt: skip
    parser.add_argument("--interval", type=float, default=None,
                        help=f"mean seconds between faults; default: {drill.interval_s:g}")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=0.0,
                        help="no fault is sent after this time; 0 = until --count is reached")  # fmt: skip
    parser.add_argument("--calm-steps", type=int, default=8,
                        help="unbroken steps before the first fault: what ETTR compares with")  # fmt: skip
    parser.add_argument("--calm-s", type=float, default=0.0, help="and no fewer seconds than this")
    parser.add_argument("--replay-max", type=int, default=verdict.REPLAYED_MAX,
                        help="rebuild all versions of runs up to so many steps")  # fmt: skip
    parser.add_argument("--patience", type=float, default=STILL_BOUND_S, metavar="S",
                        help="a run that finishes no step for so long hangs; more on a busy machine")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="show what would be hit and touch nothing")
    parser.add_argument("--json", default="", metavar="FILE", help="the table as JSON")
    parser.add_argument("--report", default="", metavar="FILE", help="an HTML file with a timeline of faults and progress")
    parser.add_argument("--record", action="store_true", help="append to chaos/results/drills.jsonl")
    parser.add_argument("--commit", default="", help="revision of the code, where this is no git checkout")
