"""Play seeds, judge them, and say what was covered: ``python -m simulation.run`` from ``tests/``.

    python -m simulation.run --seeds 0:500              # two processes; prints a table, exit 1 on a finding
    python -m simulation.run --seed 17 --log            # one seed with its event log
    python -m simulation.run --seed 17 --shrink         # the smallest options that still show its finding
    python -m simulation.run --defects --seeds 0:60     # every planted defect must be caught; prints the table
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollbook.core.errors import RollbookError
from rollbook.learner.replay import replay
from rollbook.ledger.ledger import Ledger
from simulation import tools
from simulation.kernel import Stuck
from simulation.network import Weather
from simulation.options import STANDBY_WINDOWS, UNREACHED, WINDOWS, Options, draw
from simulation.policy import reward
from simulation.world import MODEL, RUN_ID, World, tokenizer_of

CHAOS = Path(__file__).resolve().parents[2] / "chaos"
sys.path.insert(0, str(CHAOS))

import oracle  # noqa: E402  shared with the drills, and with nothing of the product

RESULTS = CHAOS / "results"


@dataclass
class Verdict:
    """What one seed gave."""

    seed: int
    findings: list[str]
    event_hash: str = ""
    n_events: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    crossed: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    """Kinds of events and of verdicts, with their numbers."""
    deaths: int = 0
    options: str = ""
    events: list[str] = field(default_factory=list)


@functools.cache
def template() -> Path:
    """A migrated, empty ledger, copied for every run."""
    directory = Path(tempfile.mkdtemp(prefix="rollbook-sim-template-"))
    Ledger(f"sqlite:///{directory}/ledger.sqlite", holder="template").close()
    return directory / "ledger.sqlite"


def play(options: Options, *, keep_events: bool = False) -> Verdict:
    """One run and its verdict; never raises for what the product did."""
    began = time.process_time()
    world = World(options, template())
    world.kernel.keep_events = keep_events
    verdict = Verdict(options.seed, [], options=options.describe())
    with world.patched():
        try:
            world.run()
        except Stuck as stuck:
            verdict.findings.append(f"progress: {stuck}")
        except Exception as error:  # noqa: BLE001  a process failed by itself
            verdict.findings.append(f"a process failed: {type(error).__name__}: {error}")
        try:
            world.kernel.over = True
            verdict.findings = verdict.findings or judge(world)
            verdict.happened = world.happened
        except RollbookError as error:
            verdict.findings = [f"not judged: {type(error).__name__}: {error}"]
        finally:
            verdict.event_hash, verdict.n_events = world.kernel.event_hash(), world.kernel.n_events
            verdict.simulated_s, verdict.events = world.kernel.now, world.kernel.events
            verdict.crossed, verdict.crashed, verdict.struck = world.crossed, world.crashed, world.struck
            verdict.deaths = sum(role.restarts.n_deaths for role in world.roles.values())
            world.close()
    verdict.cpu_s = time.process_time() - began
    return verdict


def judge(world: World) -> list[str]:
    """Everything that must hold after a run: the product's audit, the independent oracle, oracle R, oracle W in fixed lag."""
    found = [f"told: {text}" for text in world.broken]
    with Ledger(world.config.ledger.url, holder="judge") as ledger:
        ledger.attach(RUN_ID)
        found += [f"audit: {v}" for v in ledger.audit()]
        result = replay(world.config, ledger, world.config.run.steps)
        if not result["equal"] or result["versions_missing"] or result["versions_compared"] != world.config.run.steps + 1:
            found.append(f"oracle R: {result}")
        tables = oracle.read_ledger(world.config.ledger.url, RUN_ID)
    found += [f"oracle: {text}" for text in
              oracle.findings(tables, world.dir, steps=world.config.run.steps, acks=world.acks)
              if not text.startswith("rewards: ")]  # fmt: skip
    world.happened = Counter(row["kind"] for row in (*tables["event"], *tables["verdict"]))
    found += [*_rewards(tables), *_tasks(tables)]
    found += tools.findings(tables, world.effects, RUN_ID, world.options.tools == "pure")
    if world.options.schedule == "fixed" and not found and world.options != world.options.unbroken():
        if oracle.identity(tables) != unbroken(_key(world.options)):
            found.append("oracle W: the run is not the unbroken run of its configuration")
    return found


def _rewards(tables: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The oracle knows the shipped task's reward; this is the one of simulated runs, asked again."""
    tasks = {g["ordinal"]: json.loads(g["task_json"]) for g in tables["prompt_group"]}
    tokens = {(p["ordinal"], p["sibling"]): tools.last_turn(p) for p in tables["payload"]}
    found = []
    for sample in tables["sample"]:
        key = sample["ordinal"], sample["sibling"]
        text = tokenizer_of(str(MODEL)).decode(list(tokens[key]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answer = reward(text, tasks[key[0]])
        if sample["reward"] != (answer if isinstance(answer, float) else answer.value):
            found.append(f"rewards: sample {key} has {sample['reward']}, its verifier says {answer}")
    return found


def _tasks(tables: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Every epoch deals every task once before the next begins: none is skipped and none comes twice."""
    groups = sorted(tables["prompt_group"], key=lambda g: g["ordinal"])
    origins = [json.loads(g["task_json"])["task_origin"] for g in groups if g["refills"] is None]
    size = max((origin["task_index"] for origin in origins), default=0) + 1
    dealt: dict[int, list[int]] = {}
    for origin in origins:
        dealt.setdefault(origin["epoch"], []).append(origin["task_index"])
    last = max(dealt, default=0)
    wrong = [e for e, tasks in dealt.items() if len(set(tasks)) != len(tasks) or (e != last and len(tasks) != size)]
    in_order = [origin["epoch"] for origin in origins] == sorted(origin["epoch"] for origin in origins)
    return [f"tasks: epochs {wrong} deal a task twice or not at all: {dealt}"] if wrong or not in_order else []


def _key(options: Options) -> tuple[Any, ...]:
    o = options.unbroken()
    return (o.config_seed, o.lag, o.steps, o.groups_per_step, o.group_size, o.minibatches, o.one_epoch, o.tools)


@functools.cache
def unbroken(key: tuple[Any, ...]) -> dict[str, Any]:
    """Identity of the run of a fixed-lag configuration in which nothing goes wrong."""
    names = ("config_seed", "lag", "steps", "groups_per_step", "group_size", "minibatches", "one_epoch", "tools")
    options = Options(seed=0, schedule="fixed", **dict(zip(names, key, strict=True)))
    world = World(options, template())
    with world.patched():
        try:
            world.run()
            world.kernel.over = True
            return oracle.identity(oracle.read_ledger(world.config.ledger.url, RUN_ID))
        finally:
            world.close()


def play_seed(seed: int, defect: str = "") -> Verdict:
    """One seed, with a planted defect where one is named."""
    from simulation.defects import DEFECTS

    if not defect:
        return play(draw(seed))
    with DEFECTS[defect].install():
        return play(draw(seed, *DEFECTS[defect].needs))


def pool(processes: int = 2) -> ProcessPoolExecutor:
    """Processes to play in, each with one thread for arithmetic."""
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    torch.set_num_threads(1)
    gc.freeze()


@dataclass
class Coverage:
    """What many runs crossed, died at and were struck by."""

    seeds: int = 0
    crossed: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    deaths: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    failed: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.seeds += 1
        self.crossed += verdict.crossed
        self.crashed += verdict.crashed
        self.struck += verdict.struck
        self.deaths += verdict.deaths
        self.simulated_s += verdict.simulated_s
        self.cpu_s += verdict.cpu_s
        if verdict.findings:
            self.failed.append(verdict)

    def line(self) -> str:
        """The sentence to publish."""
        died = [self.crashed[name] for name in (*WINDOWS, *STANDBY_WINDOWS) if name not in UNREACHED]
        n = sum(count > 0 for count in died)
        return (
            f"crash windows crossed: {n} of {len(died)}, least often crossed: {min(died)} times "
            f"({len(UNREACHED)} more are crossed by real processes only)"
        )

    def to_json(self) -> dict[str, Any]:
        """What ``chaos/results/crash_windows.json`` holds."""
        return {name: {"crossed": self.crossed[name], "crashed": self.crashed[name]} for name in (*WINDOWS, *STANDBY_WINDOWS)}

    def record(self, seeds: str) -> dict[str, Any]:
        """One line of ``chaos/results/simulation.jsonl``."""
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "cores": os.cpu_count(), "python": platform.python_version(),
            "torch": torch.__version__, "first": seeds.partition(":")[0], "seeds": self.seeds,
            "findings": [f"seed {v.seed}: {v.findings[0].splitlines()[0]}" for v in self.failed], "deaths": self.deaths,
            "simulated_h": round(self.simulated_s / 3600, 1), "cpu_s_per_seed": round(self.cpu_s / max(1, self.seeds), 2),
            "faults": dict(self.struck), "windows": self.line(),
        }  # fmt: skip

    def table(self) -> str:
        """Markdown: the totals, and the windows in which a process died least often."""
        rows = [
            f"| seeds | {self.seeds} |", f"| findings | {len(self.failed)} |", f"| process deaths | {self.deaths} |",
            f"| simulated time | {self.simulated_s / 3600:.1f} h |",
            f"| processor time per seed | {self.cpu_s / max(1, self.seeds):.2f} s |",
            f"| faults by kind | {', '.join(f'{k} {n}' for k, n in sorted(self.struck.items()))} |",
            f"| windows | {self.line()} |",
        ]  # fmt: skip
        return "\n".join(["| simulation | |", "|---|---|", *rows])


def shrink(options: Options, is_caught: Callable[[Options], bool]) -> Options:
    """The options with everything taken away that the finding does not need."""
    candidates: list[Callable[[Options], Options]] = [
        lambda o: dataclasses.replace(o, strikes=(), strikes_max=0),
        lambda o: dataclasses.replace(o, strikes_max=max(1, o.strikes_max // 2)) if o.strikes else o,
        lambda o: dataclasses.replace(o, crash_rate=0.0, crashes_max=0),
        lambda o: dataclasses.replace(o, crash_at={}),
        lambda o: dataclasses.replace(o, weather=Weather()),
        *[lambda o, n=name: dataclasses.replace(o, weather=dataclasses.replace(o.weather, **{n: 0.0}))
          for name in ("lost", "reply_lost", "duplicated", "slow", "very_late")],
        *[lambda o, n=name: dataclasses.replace(o, crash_at={k: v for k, v in o.crash_at.items() if k != n})
          for name in options.crash_at],
        *[lambda o, n=name: dataclasses.replace(o, strikes=tuple(k for k in o.strikes if k != n))
          for name in options.strikes],
        lambda o: dataclasses.replace(o, workers=1),
        lambda o: dataclasses.replace(o, no_verdict=0.0),
        lambda o: dataclasses.replace(o, outage=(0.0, 0.0)),
        lambda o: dataclasses.replace(o, tools=""),
        lambda o: dataclasses.replace(o, server_locked=True, replaces_paused=False),
    ]  # fmt: skip
    for change in candidates:
        smaller = change(options)
        if smaller != options and is_caught(smaller):
            options = smaller
    return options


def options_to_json(options: Options) -> dict[str, Any]:
    return dataclasses.asdict(options)


def options_from_json(values: dict[str, Any]) -> Options:
    """Inverse of ``options_to_json``."""
    values = dict(values)
    values["weather"] = Weather(**values["weather"])
    for name in ("strikes", "generate_s", "outage"):
        values[name] = tuple(values.get(name, (0.0, 0.0)))
    return Options(**values)


def _run_seeds(first: int, last: int, processes: int, minutes: float) -> Coverage:
    coverage, began = Coverage(), time.monotonic()
    with pool(processes) as workers:
        seed = first
        while seed < last and (not minutes or time.monotonic() - began < 60 * minutes):
            part = range(seed, min(last, seed + 20 * processes))
            for verdict in workers.map(play_seed, part):
                coverage.add(verdict)
                if verdict.findings:
                    print(f"seed {verdict.seed}: {verdict.findings[0]}\n  {verdict.options}", flush=True)
            seed = part.stop
    return coverage


def catch(defect: str, seeds: Iterable[int]) -> tuple[int, str, int] | None:
    """(seed, finding, seeds played) of the first seed that catches a planted defect."""
    for n, seed in enumerate(seeds, start=1):
        verdict = play_seed(seed, defect)
        if verdict.findings:
            return seed, verdict.findings[0].splitlines()[0][:110], n
    return None


def _run_defects(n_seeds: int, processes: int) -> int:
    from simulation.defects import DEFECTS

    print("| planted defect | as in | caught by | seeds needed |\n|---|---|---|---|")
    caught: dict[str, dict[str, Any]] = {}
    with pool(processes) as workers:
        jobs = {name: workers.submit(catch, name, range(n_seeds)) for name in DEFECTS}
        for name, job in jobs.items():
            result = job.result()
            if result is not None:
                caught[name] = {"seed": result[0], "seeds": result[2], "finding": result[1]}
            by, n = (result[1].replace("|", "/"), result[2]) if result else ("**not caught**", n_seeds)
            print(f"| {DEFECTS[name].what} | {DEFECTS[name].like} | {by} | {n} |", flush=True)
    (RESULTS / "planted_defects.json").write_text(json.dumps(caught, indent=1) + "\n")
    print(f"\n{len(caught)} of {len(DEFECTS)} caught within {n_seeds} seeds")
    return 0 if len(caught) == len(DEFECTS) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:500", help="first:last")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time, whatever is left of the seeds")
    parser.add_argument("--seed", type=int, help="play one and print its finding; with --log also its events")
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--shrink", action="store_true", help="take away what the finding of --seed does not need")
    parser.add_argument("--defects", action="store_true", help="play seeds against every planted defect and print the table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write windows and totals to chaos/results")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    if arguments.defects:
        return _run_defects(last - first, arguments.processes)
    if arguments.seed is None:
        coverage = _run_seeds(first, last, arguments.processes, arguments.minutes)
        print(coverage.table())
        if arguments.record:
            (RESULTS / "crash_windows.json").write_text(json.dumps(coverage.to_json(), indent=1) + "\n")
            with (RESULTS / "simulation.jsonl").open("a") as out:
                out.write(json.dumps(coverage.record(arguments.seeds)) + "\n")
        return 1 if coverage.failed else 0
    options = draw(arguments.seed)
    verdict = play(options, keep_events=arguments.log)
    if verdict.findings and arguments.shrink:
        kind = verdict.findings[0].partition(":")[0]
        options = shrink(options, lambda o: any(f.partition(":")[0] == kind for f in play(o).findings))
        print(json.dumps(options_to_json(options)))
        verdict = play(options, keep_events=arguments.log)
    print("\n".join([verdict.options, *verdict.events, *verdict.findings, f"events {verdict.n_events} {verdict.event_hash}"]))
    return 1 if verdict.findings else 0


if __name__ == "__main__":
    sys.exit(main())
