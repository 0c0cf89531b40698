"""A recorded run whose worker, ledger server and learner are killed: what a real Prometheus has scraped of it, kept for replay.

Owns the order of the kills and the file. Samples are thinned to one in five seconds; nothing else is changed.
"""

from __future__ import annotations

import gzip
import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drills.faults import kill
from drills.screens import DASHBOARDS, NotReady, ask, check, recorded_lines
from drills.seen_table import CHAOS

if TYPE_CHECKING:
    from seen import Watched

FILE = CHAOS / "results" / "recovery.om.gz"
KILLED = ("worker", "ledger", "learner", "worker", "ledger", "learner")
CALM_S, APART_S, END_S = 40.0, 38.0, 30.0
EVERY_S = 5
BYTES_MAX = 1_500_000
SELECTORS = ('{job="rollbook",__name__!~"ALERTS.*"}', '{__name__=~"run:.+"}', '{__name__="ALERTS"}')


def record(made: Watched, kills: Iterable[str] = KILLED, file: Path = FILE) -> int:
    """Kill, look at every query of every dashboard, keep the samples in ``file``. Returns an exit code."""
    began, chance = time.time(), random.Random(made.run.config.run.seed)
    _let_be(made, CALM_S)
    for role in kills:
        victim = f"no {role} lives to be killed"
        made.wait(victim, partial(_killed, made, role, chance), 60.0)
        print(f"{time.time() - began:6.1f} s  SIGKILL {role}", flush=True)
        _let_be(made, APART_S)
    steps = made.run.steps()
    made.wait("two steps after the last kill", lambda: made.run.steps() >= steps + 2, 120.0)
    _let_be(made, END_S)
    end = time.time()
    found = check(made.screens.url, sorted((DASHBOARDS / "grafana").glob("*.json")), began, end)
    for title, lines in (("EMPTY OR REFUSED", found.bad), ("empty, as it may be", found.empty), ("on no panel", found.unused)):
        print("\n".join(f"{title}: {line}" for line in lines))
    print(f"{found.queries} queries, {len(found.bad)} bad, {len(found.empty)} empty, {len(found.unused)} unused")
    try:
        firing = 'max by (alertname) (ALERTS{alertstate="firing"})'
        fired = ask(made.screens.url, "query_range", query=firing, start=began, end=end, step=5)["result"]
    except NotReady as error:
        raise SystemExit(str(error)) from None
    print("alerts that fired: " + (", ".join(sorted(one["metric"]["alertname"] for one in fired)) or "none"))
    lines = thinned(recorded_lines(made.screens.url, SELECTORS, int(end - began), end))
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        out.writelines(line.encode() for line in lines)
    print(f"{file.name}: {file.stat().st_size:,} bytes, {end - began:.0f} s that end at {end:.0f}")
    return int(bool(found.bad) or file.stat().st_size > BYTES_MAX)


def _killed(made: Watched, role: str, chance: random.Random) -> bool:
    return kill(made.run, role, chance, one=True) is not None


def thinned(lines: Iterable[str]) -> Iterator[str]:
    """The first sample of each series in every ``EVERY_S`` seconds."""
    before: tuple[str, int] = ("", -1)
    for line in lines:
        if line.startswith("#"):
            yield line
            continue
        series, _, rest = line.rpartition("} ")
        now = (series, int(float(rest.split()[1]) // EVERY_S))
        if now != before:
            yield line
        before = now


def _let_be(made: Watched, seconds: float) -> None:
    until = time.monotonic() + seconds
    made.wait("time passes", lambda: time.monotonic() >= until, seconds + 60.0)
