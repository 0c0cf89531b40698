"""`rollbook doctor --sandbox`: which backend contains which attack on this machine, and which one a run would take.

Owns the table. Never chooses by other rules than a worker does (``rollbook.sandbox.selection``), and never reuses a result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rollbook.core.settings import SandboxConfig
from rollbook.sandbox.attacks.probe import Result
from rollbook.sandbox.attacks.suite import ATTACKS
from rollbook.sandbox.selection import CANDIDATES, UNSAFE, Examination, Selection, chosen_of, examine

_WORDS = {True: "contained", False: "ESCAPED", None: "not tried"}


def sandbox_doctor(config: SandboxConfig, as_json: bool, control: bool) -> int:
    """Attack every backend and print what became of it; returns 1 when none that ``config`` allows contains.

    ``control`` adds a column that shows that the attacks work here where nothing contains them.
    """
    examined = [examine(name) for name in CANDIDATES]
    allowed = [each for each in examined if config.backend in ("auto", each.backend)]
    chosen = chosen_of(allowed)
    if control:
        examined.append(examine(UNSAFE, control=True))
    if as_json:
        print(json.dumps({"selection": asdict(chosen) if chosen else None, "examined": [asdict(each) for each in examined]}))
    else:
        print("\n".join(_table(examined)))
        print(_conclusion(config, chosen))
    return 0 if chosen else 1


def _table(examined: Sequence[Examination]) -> list[str]:
    found = {each.backend: {result.attack: result for result in each.results} for each in examined}
    lines = [f"{'attack':<24}" + "".join(f"{each.backend:<12}" for each in examined) + "what it tries"]
    notes = [f"{each.backend} cannot be used: {each.unavailable}" for each in examined if each.unavailable]
    for attack in ATTACKS:
        results = {name: row.get(attack.name) for name, row in found.items()}
        name = attack.name if attack.required else f"{attack.name} (optional)"
        lines.append(f"{name:<24}" + "".join(f"{_cell(result):<12}" for result in results.values()) + attack.tries)
        for backend, result in results.items():
            if result is not None and not result.contained and backend != UNSAFE:
                notes.append(f"{backend}, {attack.name}: {_WORDS[result.contained]}: {result.reason}")
    return [*lines, "", *notes]


def _cell(result: Result | None) -> str:
    return "-" if result is None else _WORDS[result.contained]


def _conclusion(config: SandboxConfig, chosen: Selection | None) -> str:
    if config.backend == UNSAFE:
        return "sandbox.backend = unsafe is configured: model-written code runs with everything that the worker may do"
    if chosen is None:
        return f"sandbox.backend = {config.backend}: nothing contains every attack here; model-written code is refused"
    return f"sandbox.backend = {config.backend}: takes {chosen.backend}, which enforces {', '.join(chosen.enforced)}"
