"""Eight faults that a person has to recognise on the screens of a run: how each is made, ended, and what must be said of it.

Owns what is expected, declared before anything is sent. Every fault is one that happens in operation; those that cannot be made
from outside bend the product at its own door (``hooks``) and say so in ``how``.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from drills.mounts import SmallDisk
from drills.runs import OwnRun

STANDS = ("LearnerStalled", "CheckpointTooOld")
"""Pages about what every fault brings about that lets no step be made."""
HELD_S, FREE_S = 3.0, 0.2
LOCK_WAIT_S = 20.0


@dataclass(frozen=True)
class Named:
    """One of the eight."""

    name: str
    how: str
    words: tuple[str, ...]
    """Each must stand in `rollbook status` and on the status page, in one reading."""
    alerts: tuple[str, ...]
    """Each must fire."""
    may: tuple[str, ...] = ()
    """Pages that may fire as well, because the fault really costs that."""
    send: Callable[[OwnRun, Holder], None] = field(default=lambda run, holder: None)
    undo: Callable[[OwnRun, Holder], None] = field(default=lambda run, holder: None)


class Holder:
    """What lasts between sending and undoing: a thread that keeps the database's lock, a stopped process, a small disk."""

    def __init__(self) -> None:
        self.disk: SmallDisk | None = None
        self.stopped: list[Callable[[], object]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def hold_lock(self, file: str) -> None:
        """Hold SQLite's write lock most of the time, as another program on the same file would."""
        self._end.clear()
        self._thread = threading.Thread(target=self._hold, args=(file,), daemon=True)
        self._thread.start()

    def _hold(self, file: str) -> None:
        while not self._end.is_set():
            conn = sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None)
            try:
                conn.execute("BEGIN IMMEDIATE")
                self._end.wait(HELD_S)
                conn.execute("ROLLBACK")
            except sqlite3.OperationalError:
                pass  # the server was quicker
            finally:
                conn.close()
            self._end.wait(FREE_S)

    def release(self) -> None:
        """End everything that lasts."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(LOCK_WAIT_S + HELD_S)
            self._thread = None
        for wake in self.stopped:
            wake()
        self.stopped = []
        if self.disk is not None:
            self.disk.free()


def _kill_pool(run: OwnRun, holder: Holder) -> None:
    error = "ImportError: libengine.so.2: cannot open shared object file: No such file or directory"
    run.tell("start", {"roles": ["worker"], "error": error})
    for record in run.alive("worker"):
        record.kill_tree()


def _stop_learner(run: OwnRun, holder: Holder) -> None:
    for record in run.alive("learner"):
        record.signal(signal.SIGSTOP)
        holder.stopped.append(lambda r=record: r.signal(signal.SIGCONT))  # type: ignore[misc]


def _fill_disk(run: OwnRun, holder: Holder) -> None:
    if holder.disk is not None:
        holder.disk.fill()
    else:
        run.tell("storage", {"learner": {"error": "ENOSPC", "below": "/checkpoints/"}})


def _reward(run: OwnRun, text: str) -> None:
    place = run.control / "reward.failing"
    if text:
        place.write_text(text)
    else:
        place.unlink(missing_ok=True)


EIGHT = (
    Named(
        "dead pool", "SIGKILL to both workers, and every new one dies at its start (hook)",
        ("rollout workers: none was heard of", "libengine.so.2"), ("WorkersBelowQuorum",), ("TargetDown", *STANDS),
        _kill_pool, lambda run, holder: run.tell("start", {}),
    ),
    Named(
        "slow database", "another program holds the SQLite file's write lock for 3 of every 3.2 s",
        ("database: slow",), ("LedgerSlow",), ("TargetDown", "WorkersBelowQuorum", "LeaderCountWrong", *STANDS),
        lambda run, holder: holder.hold_lock(str(run.dir / "ledger.sqlite")),
    ),
    Named(
        "stuck learner", "SIGSTOP to the learner",
        ("a learner: nobody holds its role",), ("LearnerStalled",), ("TargetDown", "WorkersBelowQuorum", *STANDS), _stop_learner,
    ),
    Named(
        "failing reward", "the environment's score raises",
        ("rewards:", "no verdict", "grader is out of credit"), ("RewardFailureRatioHigh",), STANDS,
        lambda run, holder: _reward(run, "grader is out of credit"), lambda run, holder: _reward(run, ""),
    ),
    Named(
        "sandbox gone", "no sandbox can be made: ENOENT where one is started (hook)",
        ("rewards:", "no verdict", "sandbox", "bwrap: gone"), ("RewardFailureRatioHigh",), STANDS,
        lambda run, holder: run.tell("sandbox", {"error": "bwrap: gone"}), lambda run, holder: run.tell("sandbox", {}),
    ),
    Named(
        "stale weights", "the files of new versions are not there for the workers, as on a shared file system that lags (hook)",
        ("weights cannot be published or loaded (missing)", "no safetensors file"), ("WeightSyncFailing",),
        ("WorkersBelowQuorum", *STANDS),
        lambda run, holder: run.tell("weights", {"roles": ["worker"]}), lambda run, holder: run.tell("weights", {}),
    ),
    Named(
        "full disk", "the checkpoint store is full",
        ("learner: checkpoints fail (storage)", "No space left"), ("CheckpointFailing",),
        ("TargetDown", "WorkersBelowQuorum", *STANDS),
        _fill_disk, lambda run, holder: run.tell("storage", {}),
    ),
    Named(
        "ESS collapse", "the workers' engines sample twenty times as hot as the trainer believes (hook)",
        ("training: the effective sample size",), ("EssCollapse",), ("NonFiniteLoss",),
        lambda run, holder: run.tell("heat", {"times": 20.0}), lambda run, holder: run.tell("heat", {}),
    ),
)  # fmt: skip
