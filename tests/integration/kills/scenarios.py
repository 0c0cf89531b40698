"""The runs that the tests of this folder look at: one function each, from an empty directory to a finished system.

A run takes many kills, each at most once, so that a case costs one restart instead of one run. ``name=crash@K`` counts
crossings within a process, and every process begins at a checkpoint: K >= 2 puts a learner's death past the newest one.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Process, System

from postgres_server import PostgresServer

LEARNER_KILLS = {
    "learner.before_plan": "crash@3",
    "learner.after_plan": "crash@2",
    "learner.mid_step": "crash@4",
    "learner.after_step": "crash@3",
    "learner.after_finish_plan": "crash@2",
    "learner.before_publish_row": "crash@3",
    "learner.after_publish": "crash@4",
    "learner.checkpoint.mid_files": "crash@3",
    "learner.checkpoint.before_rename": "crash@2",
    "learner.checkpoint.after_rename": "crash@2",
    "learner.checkpoint.after_row": "crash@2",
}
WORKER_KILLS = {
    "worker.after_lease": "crash@2",
    "worker.mid_generate": "crash@9",
    "worker.after_generate": "crash@3",
    "worker.mid_spool": "crash@2",
    "worker.before_submit": "crash@3",
    "worker.after_submit": "crash@2",
}
FEEDER_KILLS = {"feeder.before_append": "crash@2", "feeder.after_append": "crash@2"}
LEDGER_KILLS = {
    "ledger.submit.before_commit": "crash@3",
    "ledger.submit.after_commit": "crash@3",
    "ledger.before_commit": "crash@60",
    "ledger.after_commit": "crash@60",
}
OTHER_KILLS = WORKER_KILLS | FEEDER_KILLS | LEDGER_KILLS
POSTGRESQL_KILLS = {
    "learner.before_publish_row": "crash@1",
    "learner.checkpoint.after_rename": "crash@1",
    "learner.after_finish_plan": "crash@2",
    "worker.after_generate": "crash@3",
    "worker.before_submit": "crash@3",
    "feeder.after_append": "crash@2",
    "ledger.submit.before_commit": "crash@3",
    "ledger.submit.after_commit": "crash@3",
}
"""The first two hit the opening of a run: version 0 and checkpoint 0."""
RANDOM_TARGETS = (
    "worker-0", "worker-1", "worker-1", "learner", "learner", "ledger", "ledger", "feeder", "everything", "everything",
)  # fmt: skip
EVERY_ROLE = ("learner", "learner", "ledger", "ledger", "feeder", "everything")
RANDOM_SEED = 20

Made = list[System]
"""Systems of a session, so that its end can end whatever still runs."""


def fixed_reference(root: Path, made: Made) -> System:
    """Fixed lag, two workers, nothing dies, ordinary starts: what every killed run of the same configuration must equal."""
    return _add(made, System(root, schedule="fixed", fork_server=False)).run()


def fixed_learner_kills(root: Path, made: Made) -> System:
    """Fixed lag, one worker."""
    return _add(made, System(root, schedule="fixed", workers=1, failpoints=LEARNER_KILLS)).run()


def fixed_other_kills(root: Path, made: Made) -> System:
    return _add(made, System(root, schedule="fixed", failpoints=OTHER_KILLS)).run()


def bounded_learner_kills(root: Path, made: Made) -> System:
    return _add(made, System(root, failpoints=LEARNER_KILLS)).run()


def bounded_other_kills(root: Path, made: Made) -> System:
    """Restarted in the ordinary way, each role with all its imports."""
    return _add(made, System(root, steps=20, failpoints=OTHER_KILLS, fork_server=False)).run()


def fixed_stopped(root: Path, made: Made) -> System:
    """A worker, the learner and the ledger server are stopped for longer than their terms, then go on as zombies."""
    system = _add(made, System(root, schedule="fixed"))
    system.start()
    worker = system.until("a worker stopped while it holds leases", lambda: _stop_with_leases(system))
    system.stopped["worker"] = worker.incarnation
    worker.send(signal.SIGCONT)
    _next_steps(system, 2)
    learner = system.processes()["learner"]
    assert learner.send(signal.SIGSTOP)
    system.until("the learner's term is over", lambda: _term_is_over(system, "learner"))
    system.stopped["learner"] = learner.incarnation
    learner.send(signal.SIGCONT)
    _next_steps(system, 2)
    ledger = system.processes()["ledger"]
    assert ledger.send(signal.SIGSTOP)
    system.until("the ledger server's term is over", lambda: _term_is_over(system, "ledger"))
    system.stopped["ledger"] = ledger.incarnation
    ledger.send(signal.SIGCONT)
    return system.finish()


def random_kills(root: Path, made: Made) -> System:
    """Ten deaths at random times, two of them of everything at once, each after at least one new step."""
    return _killed_at_random(_add(made, System(root, steps=72)), RANDOM_TARGETS, RANDOM_SEED)


def fixed_one_worker(root: Path, made: Made) -> System:
    return _fixed_at_random(root, made, 1)


def fixed_two_workers(root: Path, made: Made) -> System:
    return _fixed_at_random(root, made, 2)


def fixed_four_workers(root: Path, made: Made) -> System:
    return _fixed_at_random(root, made, 4)


def fixed_two_workers_on_postgresql(root: Path, made: Made) -> System:
    """On a server of its own, which dies as well."""
    server = PostgresServer()
    try:
        return _fixed_at_random(root, made, 2, server)
    finally:
        for system in made:
            if system.root == root:
                system.end_everything()
        server.close()


def _fixed_at_random(root: Path, made: Made, workers: int, server: PostgresServer | None = None) -> System:
    """Fixed lag: every role dies at random times, then everything at once."""
    system = _add(made, System(root, schedule="fixed", workers=workers, url=server.url() if server else ""))
    targets = (*(f"worker-{i % workers}" for i in range(3)), *EVERY_ROLE, *(["postgresql"] if server else []))
    return _killed_at_random(system, targets, RANDOM_SEED + workers, server)


def _killed_at_random(system: System, targets: Sequence[str], seed: int, server: PostgresServer | None = None) -> System:
    chance = random.Random(seed)
    order = list(targets)
    chance.shuffle(order)
    system.start()
    for target in order:
        _next_steps(system, chance.randint(1, 2))
        time.sleep(chance.uniform(0.0, 0.3))  # the random moment itself; nothing is waited for
        if target == "everything":
            system.end_everything()
            system.start()
        elif target == "postgresql":
            assert server is not None
            server.kill()
            server.start_again()
        else:
            system.until(f"{target} runs and is killed", lambda name=target: _kill(system, name))
        system.killed.append(target)
    return system.finish()


def postgresql_kills(root: Path, made: Made) -> System:
    """Representative kills on PostgreSQL, then of the database server itself with all its backends."""
    server = PostgresServer()
    system = _add(made, System(root, schedule="fixed", url=server.url(), failpoints=POSTGRESQL_KILLS))
    try:
        system.start()
        _next_steps(system, 6)
        server.kill()
        system.killed.append("postgresql")
        server.start_again()
        return system.finish()
    finally:
        system.end_everything()
        server.close()


def planted_worker_seed(root: Path, made: Made) -> System:
    """A worker that lets the lease token into its seed: only a second attempt shows it."""
    kill = {"worker.mid_generate": "crash@9"}
    return _add(made, System(root, schedule="fixed", failpoints=kill, planted="seed_from_token")).run()


def planted_early_ack(root: Path, made: Made) -> System:
    """A server that answers before COMMIT, and dies between the two."""
    kill = {"planted.before_commit": "crash@4"}
    return _add(made, System(root, steps=8, workers=1, failpoints=kill, planted="acknowledged_before_commit")).run()


def planted_learner_rng(root: Path, made: Made) -> System:
    """A learner that restores everything but the order of its minibatches; ended as soon as it has refused to go on."""
    kill = {"learner.after_publish": "crash@8"}
    system = _add(made, System(root, workers=1, failpoints=kill, planted="minibatch_order_not_restored"))
    system.start()
    system.until("the learner refuses to go on", lambda: "ReplayDiverged" in system.tails())
    system.end_everything()
    return system


SCENARIOS: dict[str, Callable[[Path, Made], System]] = {
    function.__name__: function
    for function in (
        fixed_reference, fixed_learner_kills, bounded_learner_kills, fixed_other_kills, bounded_other_kills, fixed_stopped,
        random_kills, postgresql_kills, fixed_one_worker, fixed_two_workers, fixed_four_workers,
        fixed_two_workers_on_postgresql, planted_worker_seed, planted_early_ack, planted_learner_rng,
    )
}  # fmt: skip


def _add(made: Made, system: System) -> System:
    made.append(system)
    return system


def _next_steps(system: System, n: int) -> None:
    goal = system.steps_ended() + n
    system.until(f"step {goal} ended", lambda: system.steps_ended() >= goal)


def _stop_with_leases(system: System) -> Process | None:
    """Stop a worker in the middle of a batch and let its leases run out; None when it had just delivered."""
    for name, process in system.processes().items():
        held = f"SELECT count(*) FROM lease WHERE incarnation = '{process.incarnation}'"
        over = f"SELECT count(*) FROM event WHERE kind = 'lease_expired' AND incarnation = '{process.incarnation}'"
        if not name.startswith("worker") or not _count(system, held) or not process.send(signal.SIGSTOP):
            continue
        system.until("its leases are over", lambda h=held, o=over: _count(system, o) or not _count(system, h))
        if _count(system, over):
            return process
        process.send(signal.SIGCONT)
    return None


def _kill(system: System, name: str) -> bool:
    process = system.processes().get(name)
    return process is not None and process.send(signal.SIGKILL)


def _count(system: System, statement: str) -> int:
    rows = system.rows(statement)
    return rows[0][0] if rows else 0


def _term_is_over(system: System, role: str) -> bool:
    rows = system.rows(f"SELECT expires_at_us FROM fence WHERE role = '{role}'")
    return bool(rows) and rows[0][0] < time.time() * 1_000_000
