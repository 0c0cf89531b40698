"""Everything a simulated run consists of, drawn from its seed: configuration, weather, faults. Printed with every failure.

Each seed enables a subset of the kinds of fault (swarm testing, Groce et al., ISSTA 2012): a mix of everything in every run
would hide what only shows when one thing goes wrong and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from rollbook.observe.failpoints import CATALOGUE
from simulation.network import Weather

ROLES = ("ledger", "feeder", "learner", "worker")


@dataclass
class Options:
    """One run."""

    seed: int
    schedule: str = "bounded"
    config_seed: int = 0
    lag: int = 1
    workers: int = 2
    steps: int = 6
    groups_per_step: int = 2
    group_size: int = 2
    slots: int = 2
    minibatches: int = 2
    checkpoint_every: int = 2
    late_submit: str = "salvage"
    straggler: str = "wait"
    one_epoch: bool = False
    no_verdict: float = 0.0
    outage: tuple[float, float] = (0.0, 0.0)
    """From when to when (simulated seconds) no sandbox can be made."""
    tools: str = ""
    """``pure`` or ``once``: tasks have a tool, whose calls may run again or not."""
    generate_s: tuple[float, float] = (0.2, 1.2)
    server_locked: bool = True
    """The database file is locked by its server, as SQLite's is; without, two servers may live, as on PostgreSQL."""
    standby: bool = False
    """A second ledger server waits for the role of the first."""
    replaces_paused: bool = False
    """The supervisor takes a paused process for lost and starts a successor beside it."""
    weather: Weather = field(default_factory=Weather)
    crash_rate: float = 0.0
    """Chance of a crash at each crossing of a failpoint."""
    crashes_max: int = 0
    crash_at: dict[str, int] = field(default_factory=dict)
    """Failpoint -> crossing at which its process dies."""
    strikes: tuple[str, ...] = ()
    """Kinds of faults the nemesis draws from."""
    strike_every_s: float = 4.0
    strikes_max: int = 0

    def describe(self) -> str:
        """The complete option set."""
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))

    def unbroken(self) -> Options:
        """The same configuration with nothing going wrong: what oracle W compares with."""
        keep = ("schedule", "config_seed", "lag", "steps", "groups_per_step", "group_size", "minibatches", "one_epoch", "tools")
        return Options(seed=0, **{name: getattr(self, name) for name in keep})


STANDBY_WINDOWS = tuple(sorted(name for name in CATALOGUE if name.startswith("ledger.standby.")))
"""Failpoints that only a run with a standby comes by; such a run dies at one of them."""
WINDOWS = tuple(sorted(name for name, point in CATALOGUE.items() if point.role in ROLES and name not in STANDBY_WINDOWS))
"""Failpoints of the simulated roles; each seed dies at one of them in turn."""

UNREACHED = {
    "ledger.migrate.before_commit": "simulated ledgers start migrated: tests/contract/test_ledger_schema.py",
    "ledger.fork.before_commit": "arithmetic is bitwise here: tests/contract/test_ledger_crash_points.py",
    "ledger.fork.after_commit": "arithmetic is bitwise here: tests/contract/test_ledger_crash_points.py",
    "learner.before_fork": "arithmetic is bitwise here: tests/integration/test_learner_forking.py",
    "learner.after_fork": "arithmetic is bitwise here: tests/integration/test_learner_forking.py",
    "learner.resume.after_corrupt": "nothing that was flushed is damaged here: tests/integration/test_learner_crash_points.py",
    "learner.resume.after_aside": "nothing that was flushed is damaged here: tests/integration/test_learner_crash_points.py",
    "learner.publish.rewritten": "nothing that was flushed is lost here: tests/integration/test_learner_crash_points.py",
    "worker.spool.after_aside": "nothing in a spool is refused here: tests/unit/test_worker_crash_points.py",
    "learner.revision.before_rename": "the ledger server writes revisions first: tests/integration/test_learner_crash_points.py",
    "learner.revision.after_rename": "the ledger server writes revisions first: tests/integration/test_learner_crash_points.py",
    "ledger.open.after_revision": "the configuration does not change here: tests/contract/test_ledger_crash_points.py",
    "ledger.expire.before_commit": "nothing expires here: tests/contract/test_ledger_retention.py",
    "ledger.expire.after_commit": "nothing expires here: tests/contract/test_ledger_retention.py",
    "ledger.expire.before_drop_commit": "nothing expires here: tests/contract/test_ledger_retention.py",
    "ledger.expire.before_batch_commit": "nothing expires here: tests/contract/test_ledger_retention.py",
    "learner.rank.after_state": "a simulated learner has one rank: tests/integration/test_learner_ranks.py",
    "learner.rank.before_sum": "a simulated learner has one rank: tests/integration/test_learner_ranks.py",
    "learner.rank.after_sum": "a simulated learner has one rank: tests/integration/test_learner_ranks.py",
    "ledger.backup.before_rename": "a command of its own makes backups: tests/contract/test_ledger_backup.py",
    "ledger.restore.before_rename": "a command of its own restores: tests/contract/test_ledger_backup.py",
}
"""Windows that simulated runs do not come by, why, and where a process dies in them instead."""

OPENED_BY = {
    "learner.resume.before_adopt": "learner.checkpoint.after_rename",
    "learner.resume.after_adopt": "learner.checkpoint.after_rename",
    "learner.resume.between_clears": "learner.checkpoint.before_rename",
    "learner.publish.between_clears": "learner.publish.before_rename",
    "worker.spool.after_adopted": "worker.mid_spool",
}
"""Windows of recovery: a process comes by only after another one has died there."""

STRIKES = (
    "kill", "kill", "kill_all", "pause", "pause_long", "power_loss", "disk_error", "disk_full", "database_error", "cut_off",
    "clock_worker", "clock_ledger", "second_learner", "second_server",
)  # fmt: skip


def draw(seed: int, *needs: str) -> Options:
    """The options of a seed, with the faults, the crash windows (late in the run), tools and standbys that ``needs`` names."""
    rng = random.Random(f"options.{seed}")
    o = Options(seed=seed)
    o.schedule = rng.choice(("bounded", "fixed"))
    if o.schedule == "fixed":  # few configurations, so that their unbroken runs can be kept
        o.config_seed, o.lag = rng.choice(((0, 1), (1, 1), (0, 2), (2, 0)))
    else:
        o.config_seed, o.lag = rng.randrange(1000), rng.choice((1, 1, 2, 4))
        o.steps, o.groups_per_step, o.group_size = rng.randint(4, 7), rng.choice((1, 2, 2)), rng.choice((2, 2, 3))
        o.minibatches = rng.choice((1, 2)) if o.groups_per_step > 1 else 1
        o.no_verdict = rng.choice((0.0, 0.0, 0.1))
        o.straggler = rng.choice(("wait", "wait", "drop"))
    o.workers, o.slots = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 4))
    o.checkpoint_every = rng.choice((1, 2, 2, 3))
    o.late_submit = rng.choice(("salvage", "salvage", "strict"))
    o.one_epoch = rng.random() < 0.2 and o.no_verdict == 0.0 and o.straggler == "wait" and o.schedule == "fixed"
    o.server_locked = rng.random() < 0.5
    o.replaces_paused = rng.random() < 0.5
    if rng.random() < 0.6:
        o.weather = Weather(*(rng.choice((0.0, rng.random() * 0.08)) for _ in range(4)), very_late=rng.choice((0.0, 0.03)))
    if rng.random() < 0.5:
        o.crash_rate, o.crashes_max = rng.choice((0.002, 0.01, 0.03)), rng.randint(1, 6)
    window = WINDOWS[seed % len(WINDOWS)]
    o.crash_at[window] = 1 if window in OPENED_BY else (1, 1, 2, 1, 3)[seed // len(WINDOWS) % 5]
    if window in OPENED_BY:
        o.crash_at[OPENED_BY[window]] = 2
    for name in rng.sample(WINDOWS, rng.choice((0, 0, 1, 3))):
        o.crash_at.setdefault(name, rng.choice((1, 1, 2, 3, 5)))
    if rng.random() < 0.8:
        o.strikes = tuple(rng.sample(STRIKES, rng.randint(1, 6)))
        o.strikes_max = rng.randint(1, 8)
        o.strike_every_s = rng.choice((1.0, 3.0, 8.0))
    o.crash_at |= {late: random.Random(f"{late}.{seed}").randint(10, 150) for late in needs if late in WINDOWS}
    if faults := [need for need in needs if need not in ("tools", "standby", *WINDOWS)]:
        o.strikes, o.strikes_max = tuple(dict.fromkeys((*faults, *o.strikes[:2]))), max(o.strikes_max, 4)
        o.server_locked = o.server_locked and "second_server" not in needs
    if window in ("learner.role_lost", "ledger.fence_lost"):
        o.strikes, o.strikes_max, o.strike_every_s, o.server_locked, o.replaces_paused = ("pause_long",), 12, 2.0, False, True
        o.weather, o.crash_at = Weather(), {window: 1}
    if window == "ledger.verdict.before_refill":  # the fixed schedule loses no group, so it refills none
        o.schedule, o.one_epoch, o.no_verdict, o.crash_at[window] = "bounded", False, 0.2, 1
    outages = random.Random(f"outage.{seed}")  # of its own: what else a seed draws stays as it was
    if outages.random() < 0.25:
        o.outage = (begins := outages.uniform(0.0, 10.0), begins + outages.uniform(1.0, 30.0))
    standby = random.Random(f"standby.{seed}")
    if standby.random() < 0.25 or "standby" in needs:
        o.standby = True
        o.crash_at[standby.choice(STANDBY_WINDOWS)] = standby.choice((1, 2))
    tools = random.Random(f"tools.{seed}")
    if tools.random() < 0.25 or "tools" in needs or any(name.startswith("worker.tool.") for name in o.crash_at):
        # The fixed schedule may lose no member, so a call that may not run again would end the run.
        o.tools = "pure" if o.schedule == "fixed" else tools.choice(("pure", "once"))
    return o
