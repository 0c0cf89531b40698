"""Do the screens tell the truth? Eight faults in a real run, one after another, and what a person would have read of each.

Starts a run of the tiny model with a tool, and a real Prometheus on it whose rules run faster than in operation (`--factor`; see
`dashboards/src/scaled_rules.py`). Sends a fault, waits until `rollbook status`, the status page and the alerts tell what was
declared beforehand (`drills/eight.py`), ends it, and waits until all of them are quiet again. Exit code 0: every screen told, in
time, and no other page fired; 1: one did not; 2: Prometheus is not installed, or the run does not start. With `--recovery` it
records a run whose worker, ledger server and learner are killed instead (`drills/recovery.py`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drills.eight import EIGHT, Holder, Named
from drills.mounts import SmallDisk, private_namespace
from drills.runs import REPOSITORY, OwnRun
from drills.screens import Screens, Seen, first_step, is_installed, ledger_page, scraped
from drills.seen_table import RESULTS, TABLE, keep, table
from soak import commit, machine

CONFIG = REPOSITORY / "chaos" / "seen.toml"
START_S, TELL_S, QUIET_S = 240.0, 240.0, 300.0
"""Longest that a run takes to start, a fault to be told by every screen, and the screens to be quiet again."""
CALM_STEPS, STILL_LOOKS = 6, 3
DISK_SIZE = "48m"
POLL_S = 1.0


class NotSeen(Exception):
    """The run is not in a state in which anything could be shown."""


class Watched:
    """A run, its Prometheus, and the faults sent into it."""

    def __init__(self, run: OwnRun, screens: Screens, holder: Holder) -> None:
        self.run, self.screens, self.holder = run, screens, holder
        self.until_forgotten = True
        """Quiet means that the lines of trouble are gone as well, which stay for a minute."""
        self.findings: list[str] = []

    def calm(self, seconds: float) -> None:
        """A healthy stretch, in which no page may fire."""
        self.wait("the screens of the healthy run are quiet", self._is_quiet((), 0), QUIET_S)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._must_run()
            seen = self.screens.look(status=False)
            self.findings += [f"healthy: {name} fires: {seen.summaries[name]}" for name, s in seen.alerts.items() if s == "page"]
            time.sleep(POLL_S)

    def show(self, fault: Named) -> dict[str, Any]:
        """One fault, from quiet to quiet; what was seen of it."""
        at, found, fired = time.time(), len(self.findings), dict[str, float]()
        print(f"{datetime.now(UTC):%H:%M:%S} {fault.name}: {fault.how}", flush=True)
        already = set(self.screens.look(status=False).alerts) - set(fault.alerts)
        pages, summaries, told = set[str](), dict[str, str](), dict[str, Any]()

        def note(seen: Seen) -> None:
            already.intersection_update(seen.alerts)  # what went away in between and comes again is about this fault
            for name, severity in seen.alerts.items():
                if name in already:
                    continue
                fired.setdefault(name, round(seen.at - at, 1))
                summaries.setdefault(name, seen.summaries[name])
                pages.update({name} if severity == "page" else ())

        def told_all() -> bool:
            """Everything is to be told by one look at each screen; the command, slow to start, is asked last."""
            seen = self.screens.look(status=False)
            note(seen)
            for screen in ("page", "status"):
                if screen not in told:
                    if screen == "status":
                        seen = self.screens.look()
                        note(seen)
                    if all(word in seen.says(screen) for word in fault.words):
                        told[screen] = {"after_s": round(seen.at - at, 1), "lines": getattr(seen, screen)}
                    self.newest = seen
            return set(told) >= {"page", "status"} and set(fault.alerts) <= set(fired)

        fault.send(self.run, self.holder)
        try:
            self.wait(f"{fault.name} is on every screen", told_all, TELL_S)
        except NotSeen:
            missing = sorted({"page", "status", *fault.alerts} - set(told) - set(fired))
            self.findings.append(f"{fault.name}: not told within {TELL_S:.0f} s by {', '.join(missing)}: {self.newest.as_dict()}")
        undone, steps = time.time(), self.run.steps()
        self.holder.release()
        fault.undo(self.run, self.holder)
        quiet = self._recover(fault, undone, steps, note)
        wrong = sorted(pages - set(fault.alerts) - set(fault.may))
        self.findings += [f"{fault.name}: {name} fired, which nobody expected: {summaries[name]}" for name in wrong]
        return {
            "fault": fault.name, "how": fault.how, "lasted_s": round(undone - at, 1), "expected": {"words": fault.words,
            "alerts": fault.alerts}, "status": told.get("status"), "page": told.get("page"),
            "alerts": {name: {"after_s": s, "summary": summaries[name], "severity": "page" if name in pages else "ticket"}
                       for name, s in sorted(fired.items(), key=lambda item: item[1])},
            "quiet_after_s": quiet, "runbook": {name: first_step(name) for name in fault.alerts},
            "findings": self.findings[found:],
        }  # fmt: skip

    def _recover(self, fault: Named, undone: float, steps: int, note: Callable[[Seen], None]) -> float | None:
        try:
            self.wait(f"the screens are quiet after {fault.name}", self._is_quiet(fault.alerts, steps + 2, note), QUIET_S)
        except NotSeen as late:
            self.findings.append(f"{fault.name}: {late}; {self.newest.as_dict()}")
            return None
        return round(time.time() - undone, 1)

    def _is_quiet(
        self, alerts: tuple[str, ...], steps: int, note: Callable[[Seen], None] = lambda seen: None
    ) -> Callable[[], bool]:
        """Steps are made, the page has no trouble, and neither an expected alert nor any page fires; for several looks."""
        still = 0

        def looked() -> bool:
            nonlocal still
            self.newest = seen = self.screens.look(status=False)
            note(seen)
            loud = [name for name, severity in seen.alerts.items() if severity == "page" or name in alerts]
            is_told = self.until_forgotten and len(seen.page) > 1
            is_still = not loud and not is_told and seen.page[0].startswith("running") and self.run.steps() >= steps
            still = still + 1 if is_still else 0
            return still >= STILL_LOOKS

        return looked

    def wait(self, what: str, happened: Callable[[], bool], bound_s: float) -> None:
        """Poll while the run lives. Raises NotSeen."""
        deadline = time.monotonic() + bound_s
        while not happened():
            self._must_run()
            if time.monotonic() > deadline:
                raise NotSeen(f"not within {bound_s:.0f} s: {what}")
            time.sleep(POLL_S)

    def _must_run(self) -> None:
        if (code := self.run.ended()) is not None:
            raise SystemExit(f"the run ended with exit code {code}\n{self.run.output()[-2500:]}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def watched(args: argparse.Namespace, factor: float, small_disk: bool) -> Iterator[Watched]:
    """A run that makes steps, scraped by a Prometheus; both end with the block, the run drained and audited."""
    root = Path(args.dir or tempfile.gettempdir()) / f"seen-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    port, holder = free_port(), Holder()
    overrides = [f"ledger.metrics_port={port}", *args.overrides]
    with ExitStack() as stack:
        run = OwnRun(root, CONFIG, args.seed, overrides)
        stack.callback(run.close)
        if small_disk and not private_namespace():
            holder.disk = SmallDisk(run.dir / "checkpoints", DISK_SIZE)
        run.start()
        stack.callback(holder.release)
        url = stack.enter_context(scraped(run, root / "prometheus", factor, port))
        made = Watched(run, Screens(run, url), holder)
        made.wait("the run makes steps", lambda: bool(ledger_page(run)) and run.steps() >= CALM_STEPS, START_S)
        yield made
        holder.release()
        _end(made)


def _end(made: Watched) -> None:
    """The run is drained as an operator would, and its ledger audited."""
    assert made.run.process is not None
    made.run.process.send_signal(signal.SIGTERM)
    code = made.run.process.wait(made.run.config.supervisor.drain_s + 60.0)
    audited, said = made.run.command("audit")
    if code != 130 or audited:
        made.findings.append(f"end: the drained run ended with exit code {code}, its audit says: {said.strip()[-500:]}")


def see(args: argparse.Namespace) -> int:
    """The faults that were asked for; returns the exit code."""
    wanted = [fault for fault in EIGHT if "each" in args.fault or fault.name in args.fault]
    seen: list[dict[str, Any]] = []
    with watched(args, args.factor, any(fault.name == "full disk" for fault in wanted)) as made:
        made.calm(args.calm_s)
        for fault in wanted:
            seen.append(made.show(fault))
            print(json.dumps(seen[-1], indent=1), flush=True)
    entry = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": shlex.join(["python", "chaos/seen.py", *args.shown]),
        "machine": machine(), "commit": args.commit or commit(), "factor": args.factor, "seed": args.seed,
    }  # fmt: skip
    rows = [one | {"run": entry} for one in seen]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.record:
        keep(rows)
    for finding in made.findings:
        print(f"  {finding}", file=sys.stderr)
    print(f"seen: {len(seen)} faults, {len(made.findings)} findings", flush=True)
    return int(bool(made.findings))


def _shown(argv: list[str]) -> list[str]:
    """The command without where its files go."""
    places = {i for i, part in enumerate(argv) if part in ("--dir", "--json", "--commit")}
    return [part for i, part in enumerate(argv) if part != "--record" and not {i, i - 1} & places]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="chaos/seen.py", description="what the screens of a run say of eight faults")
    names = ["each", *(fault.name for fault in EIGHT)]
    parser.add_argument("--fault", choices=names, action="append", help="may be given several times; default: each")
    parser.add_argument("--recovery", action="store_true", help="record a run whose roles are killed")
    parser.add_argument("--recording", type=Path, metavar="FILE", help="where --recovery keeps the run, a gzip file")
    parser.add_argument("--factor", type=float, default=30.0, help="how much faster than in operation the rules run")
    parser.add_argument("--calm-s", type=float, default=45.0, help="healthy seconds before the first fault")
    parser.add_argument("--dir", default="", help="where the run is; default: a temporary directory")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--record", action="store_true", help=f"keep what was seen in {RESULTS.name} and write {TABLE.name}")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--commit", default="", help="revision of the code, where this is no git checkout")
    parser.add_argument("--table", action="store_true", help=f"only write {TABLE.name} from what is recorded")
    args = parser.parse_args(argv)
    args.fault = args.fault or ["each"]
    args.shown = _shown(sys.argv[1:] if argv is None else argv)
    if args.table:
        TABLE.write_text(table(json.loads(RESULTS.read_text())))
        return 0
    if args.recording and not (args.recovery and args.recording.parent.is_dir()):
        parser.error(f"--recording {args.recording} belongs to --recovery and to a folder that exists")
    if not is_installed():
        print("seen: Prometheus is not installed (Debian package prometheus)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    if args.recovery:
        from drills.recovery import FILE, record

        with watched(args, 1.0, False) as made:
            return record(made, file=args.recording or FILE)
    return see(args)


if __name__ == "__main__":
    sys.exit(main())
