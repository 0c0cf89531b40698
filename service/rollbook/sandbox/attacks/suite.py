"""A pass of the attacks over one backend, in this process.

Owns order and bounds of the trials. What only looks runs first, in parallel; what would leave something behind follows only where
nothing has escaped yet, or in an arena, so that a weak backend never lets an attack at the machine. Never chooses.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rollbook.core.host import host
from rollbook.core.records import SandboxStatus
from rollbook.core.sandboxing import INFRA, Job, Sandbox
from rollbook.sandbox.attacks import arena, exhausting, kernel_surface, leaving, neighbours, reaching
from rollbook.sandbox.attacks.bait import Bait, end, look
from rollbook.sandbox.attacks.probe import SLACK_S, Attack, Result, Trial, Untried

ATTACKS: tuple[Attack, ...] = (
    *reaching.ATTACKS, *kernel_surface.ATTACKS, *leaving.ATTACKS, *neighbours.ATTACKS, *exhausting.ATTACKS
)  # fmt: skip
AT_ONCE = 4
SLOTS = 2 * AT_ONCE
"""Jobs at a time that the suite asks a backend for: an attack on a neighbour needs two."""
_GONE_S = 1.0
_OWN_FAULTS = ("ModuleNotFoundError", "ImportError", "NameError", "AttributeError", "TypeError", "SyntaxError")
"""Errors of a program that came nowhere near a wall."""
_CONTAINED_BARE = frozenset({"zygote", "bubblewrap", "landlock"})
"""Backends that are made to contain; anything else is attacked in an arena only."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a backend contained."""

    results: tuple[Result, ...]
    enforced: tuple[str, ...]
    """What its executions say bounded them."""


def attack(sandbox: Sandbox, bait: Bait, attacks: Sequence[Attack] = ATTACKS, lifted: bool = False) -> Pass:
    """Put ``sandbox`` to ``attacks``; ``lifted`` makes it a control, run without the limits that it is judged by.

    Raises ConfigError when the backend is not made to contain, or is a control, and this is no arena.
    """
    if lifted or sandbox.name not in _CONTAINED_BARE:
        arena.require(f"the attack suite on {sandbox.name}{' without limits' if lifted else ''}")
    enforced: set[str] = set()
    found: dict[str, Result] = {}
    for stage in (0, 1, 2):
        chosen = [each for each in attacks if each.stage == stage]
        escaped = [name for name, result in found.items() if result.contained is False and result.required]
        if escaped and not arena.inside():
            reason = f"not tried on this machine, since {escaped[0]} escaped already"
            found.update({each.name: Result(each.name, None, reason, 0.0, each.required) for each in chosen})
            continue
        with ThreadPoolExecutor(AT_ONCE if stage < 2 else 1) as pool:
            for result, bounds in pool.map(lambda each: attempt(each, sandbox, bait, lifted), chosen):
                found[result.attack] = result
                enforced |= set(bounds)
    return Pass(tuple(found[each.name] for each in attacks), tuple(sorted(enforced)))


def attempt(tried: Attack, sandbox: Sandbox, bait: Bait, lifted: bool = False) -> tuple[Result, tuple[str, ...]]:
    """One attack; its result and what the backend says it enforced."""
    trial = Trial(tried, sandbox, bait, lifted)
    began = host().monotonic()
    contained: bool | None
    with bait.process() if tried.needs_victim else contextlib.nullcontext() as victim:
        trial.victim = victim
        try:
            (tried.drive or _drive)(trial)
            effects = _effects(trial)
            contained, reason = not effects, "; ".join(dict.fromkeys(effects)) or _how_it_ended(trial)
        except Untried as error:
            contained, reason = None, str(error)
        finally:
            end(trial.name)
    bounds = trial.execution.enforced if trial.execution else ()
    return Result(tried.name, contained, reason[:500], round(host().monotonic() - began, 3), tried.required), bounds


def _how_it_ended(trial: Trial) -> str:
    execution = trial.execution
    return "" if execution is None else f"{execution.status}{': ' if execution.reason else ''}{execution.reason}"


def _effects(trial: Trial) -> list[str]:
    """Everything that was seen of it. Raises Untried where that is nothing and it did not run either."""
    effects = trial.common_effects()
    after = trial.attack.afterwards(trial) if trial.attack.afterwards else ""
    effects += [after] if after else []
    execution = trial.execution
    if execution is not None and trial.attack.infra_is_escape and execution.status in INFRA:
        effects.append(f"its end looks like the service's own failure: {execution.status}")
    if effects or execution is None:
        return effects
    if execution.status in INFRA and not trial.lifted:
        raise Untried(f"{execution.status}: {execution.reason}")
    if not trial.held and b"tried" not in execution.stdout:
        raise Untried(f"the program did not begin: {execution.status}: {execution.reason}")
    if not trial.held and execution.signal == signal.SIGKILL and execution.status is SandboxStatus.CRASHED:
        raise Untried("something killed it that was not a limit")
    if not trial.held and execution.reason.startswith(_OWN_FAULTS):
        raise Untried(f"the attack itself failed: {execution.reason}")
    return effects


def _drive(trial: Trial) -> None:
    """Start, wait until it holds or ends, look, let go, wait again: each wait has an end."""
    job = trial.sandbox.start(trial.program(), trial.limits)
    longest_s = trial.attack.limits.wall_s + trial.slack_s
    began = host().monotonic()
    trial.held = job.read_line(longest_s) == b"tried"
    trial.seen = look(trial.name)
    if not trial.held and trial.seen and host().monotonic() - began >= longest_s:
        trial.overdue = f"it still ran {trial.slack_s:.0f} s after its time was over"
        job.kill()
    if trial.held and trial.attack.while_held:
        effect = trial.attack.while_held(trial)
        trial.noticed += [effect] if effect else []
    _wait(trial, job, longest_s)
    trial.bait.settle()
    deadline = host().monotonic() + _GONE_S
    while (left := look(trial.name)) and host().monotonic() < deadline:
        host().sleep(0.02)
    trial.left = left


def _wait(trial: Trial, job: Job, longest_s: float) -> None:
    """``job.wait()`` in a thread of its own: a backend that hangs on what a program left behind is found out."""

    def wait() -> None:
        trial.execution = job.wait()

    waiting = threading.Thread(target=wait, name="attack-wait", daemon=True)
    waiting.start()
    waiting.join(longest_s if not trial.lifted else trial.slack_s)
    if not waiting.is_alive():
        return
    trial.overdue = trial.overdue or "the backend did not come back when it ended"
    trial.left = look(trial.name)
    job.kill()
    end(trial.name)
    waiting.join(SLACK_S)
    if waiting.is_alive():
        raise Untried("the backend hangs")


def examine(make: Callable[[int], Sandbox], names: Iterable[str] = (), lifted: bool = False) -> Pass:
    """Lay out bait, make a backend with ``SLOTS`` slots, attack it with the attacks called ``names`` (all of them when empty)."""
    wanted = set(names)
    chosen = [each for each in ATTACKS if not wanted or each.name in wanted]
    bait = Bait()
    try:
        sandbox = make(SLOTS)
        try:
            return attack(sandbox, bait, chosen, lifted)
        finally:
            sandbox.close()
    finally:
        bait.close()
