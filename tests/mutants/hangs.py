"""Defects in what notices, tells and ends: hangs, deaths, health, left-overs."""

from __future__ import annotations

import types
from typing import Any

from mutants.registry import mutant


@mutant("rollbook.supervise.hangs", "HangWatch._judge")
def nobody_watches_the_loop(original: Any) -> Any:
    """SkyRL#1173: a deadlocked role is waited for, 29 hours long."""
    return lambda self, one, followed, bound_s: None


@mutant("rollbook.supervise.hangs", "HangWatch.left_in")
def every_code_of_zero_is_a_success(original: Any) -> Any:
    """verl-omni#433: a dead engine is reported as a success."""
    return lambda self, record: ""


@mutant("rollbook.supervise.hangs", "kernel_state")
def what_is_stopped_is_at_work(original: Any) -> Any:
    """slime#2350: an engine that hangs is taken for one that works."""
    return lambda pid: "S"


@mutant("rollbook.supervise.watchdog", "logs.since")
def stacks_are_not_kept(original: Any) -> Any:
    """verl#7180, ms-swift#6962: a run stops and there is nothing to look at."""
    return lambda log, offset, bytes_max=0: ""


@mutant("rollbook.rollout.worker", "_Worker._generate")
def a_dead_engine_gives_nothing_for_ever(original: Any) -> Any:
    """SkyRL#1691: the engine's death is swallowed, its rollouts are asked for again and again."""

    def generate(self: Any, requests: Any) -> Any:
        while not self.stop.is_set():
            try:
                return original(self, requests)
            except ConnectionError:
                self.stop.wait(0.05)
        raise ConnectionError

    return generate


@mutant("rollbook.rollout.heartbeat", "Heartbeat.raise_failure")
def a_dead_helper_is_not_missed(original: Any) -> Any:
    """NeMo-RL#3488: a background collector dies and the loop goes on polling."""
    return lambda self: None


@mutant("rollbook.rollout.worker", "_Worker._load")
def weights_are_waited_for_without_a_bound(original: Any) -> Any:
    """NeMo-RL#2717: the first weight sync never ends."""

    def load(self: Any, version: Any) -> None:
        self.missing_since = None
        original(self, version)

    return load


@mutant("rollbook.rollout.worker", "_Worker._outcome")
def a_sync_in_the_middle_crashes(original: Any) -> Any:
    """verl#7611: a weight sync during partial rollouts crashes the rollouter."""

    def outcome(self: Any, finished: Any) -> Any:
        if self._newer_head() is not None:
            raise RuntimeError("weights changed under a rollout")
        return original(self, finished)

    return outcome


@mutant("rollbook.rollout.heartbeat", "Heartbeat.__init__")
def a_hung_engine_keeps_its_slots(original: Any) -> Any:
    """verl#7155: a rollout that stays running is waited for without an end."""

    def init(self: Any, client: Any, incarnation: str, interval_s: float, renew_max_s: float) -> None:
        original(self, client, incarnation, interval_s, float("inf"))

    return init


@mutant("rollbook.ledger.failing", "Failing._exhaust")
def attempts_are_never_spent(original: Any) -> Any:
    """NeMo-RL#3238, #3938: a straggler or a failing prompt is tried for ever."""
    return lambda self, *rest, **named: None


@mutant("rollbook.supervise.policy", "RestartPolicy.first_cause")
def the_last_cause_is_told(original: Any) -> Any:
    """NeMo-RL#2368: what is told is a consequence, the cause was invisible."""
    return property(lambda self: self.deaths[-1][1] if self.deaths else "")


@mutant("rollbook.supervise.supervisor", "Supervisor._on_death")
def a_spent_budget_ends_a_background_task(original: Any) -> Any:
    """prime-rl#1609: the budget is used up, only a task ends, the orchestrator goes on."""

    def on_death(self: Any, child: Any, how: str, code: Any = None) -> None:
        from rollbook.core.errors import RestartBudgetSpent

        try:
            original(self, child, how, code)
        except RestartBudgetSpent:
            child.finished = True

    return on_death


@mutant("rollbook.cli.running", "conclude")
def a_failure_is_a_success(original: Any) -> Any:
    """verl#6387, #6395: the rollouter failed, the run succeeded."""
    return lambda config, with_report: 0


@mutant("rollbook.supervise.local", "LocalBackend._end_leftovers")
def zombies_are_left_alone(original: Any) -> Any:
    """prime-rl#2574, #2577: what a crash left lives on."""
    return lambda self, emit: None


@mutant("rollbook.supervise.local", "LocalRole.kill")
def what_does_not_drain_is_left(original: Any) -> Any:
    """prime-rl#2912: the end of the run waits for a process that does not end."""
    return lambda self: None


@mutant("rollbook.observe.health", "Health._live")
def a_process_that_exists_is_alive(original: Any) -> Any:
    """trl#3433, #6628: the server hangs and its health stays green."""
    return lambda self, seen: ""


@mutant("rollbook.observe.health", "Checked.__call__")
def health_is_always_200(original: Any) -> Any:
    """sglang#8115: the health endpoint asks nobody."""
    return lambda self: ""


@mutant("rollbook.observe.progress", "Bounds.silence_s")
def a_compiling_engine_hangs(original: Any) -> Any:
    """training-gym#307: a probe kills an engine that is still compiling."""
    return lambda self, state: self.busy_s


@mutant("rollbook.supervise.guardian", "Guardian.start")
def orphans_live_on(original: Any) -> Any:
    """prime-rl#2028: environment servers outlive the orchestrator."""

    def start(self: Any) -> None:
        import subprocess
        from unittest.mock import patch

        real = subprocess.Popen
        idle = lambda argv, **named: real(["sh", "-c", "read x"], **named)  # noqa: E731
        with patch("rollbook.supervise.guardian.subprocess.Popen", idle):
            original(self)

    return start


@mutant("rollbook.supervise.process", "ProcessRecord.kill_tree")
def engines_outlive_their_worker(original: Any) -> Any:
    """SkyRL#1216: the actor is dead, what it had started keeps the device."""
    return lambda self: None


@mutant("rollbook.supervise.supervisor", "how")
def a_death_has_no_name(original: Any) -> Any:
    """verl#429, #439, #2987: an actor died, and nothing says of what."""
    return lambda code: "unexpectedly"


@mutant("rollbook.supervise.supervisor", "oom_kills")
def want_of_memory_is_not_looked_for(original: Any) -> Any:
    """verl#4921: a kill for memory is an unknown exit."""
    return lambda: 0


@mutant("rollbook.ledger.roles", "Roles._take")
def a_dead_holder_is_waited_for(original: Any) -> Any:
    """trl#3408, NeMo-RL#3613: after a crash the place of the dead one is taken."""
    return lambda self, txn, run_id, wanted, supersede: original(self, txn, run_id, wanted, "")


@mutant("rollbook.rpc.server", "_options")
def ports_are_shared(original: Any) -> Any:
    """SkyRL#284: what listens at an address after a crash is a matter of luck."""
    return lambda *given: [(name, 1 if name == "grpc.so_reuseport" else value) for name, value in original(*given)]


@mutant("rollbook.supervise.process", "uuid")
def attempts_share_their_name(original: Any) -> Any:
    """EasyR1#97: the name of the first attempt is in use when the second begins."""
    return types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex="0" * 32))


@mutant("rollbook.learner.checkpoint", "save_tensors")
def a_checkpoint_is_built_in_memory_first(original: Any) -> Any:
    """verl#402, #5079: saving needs the state a second time."""

    def save(tensors: Any, path: Any) -> None:
        original({name: tensor.clone() for name, tensor in tensors.items()}, path)

    return save
