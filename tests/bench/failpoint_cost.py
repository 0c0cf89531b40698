"""What a failpoint costs while nothing is armed, beside the call of a function that does nothing.

    python tests/bench/failpoint_cost.py

Prints nanoseconds per crossing, the best of several rounds, and the ratio; nothing is asserted.
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "service"))

from rollbook.observe import failpoints

failpoint = failpoints.failpoint

CROSSINGS = 200_000
ROUNDS = 15


def nothing(name: str) -> None:
    """The least that a call can do."""


def nanoseconds(statement: str) -> float:
    """Per execution, the best round."""
    rounds = timeit.repeat(statement, globals=globals(), number=CROSSINGS, repeat=ROUNDS)
    return min(rounds) / CROSSINGS * 1e9


def main() -> None:
    failpoints.arm("")
    empty = nanoseconds("pass")
    call = nanoseconds("nothing('learner.after_plan')") - empty
    off = nanoseconds("failpoint('learner.after_plan')") - empty
    failpoints.arm("learner.after_step=crash")
    other = nanoseconds("failpoint('learner.after_plan')") - empty
    failpoints.arm("")
    print(f"call of an empty function          {call:7.1f} ns")
    print(f"failpoint, nothing armed           {off:7.1f} ns   {off / call:5.2f} x")
    print(f"failpoint, another one is armed    {other:7.1f} ns   {other / call:5.2f} x")


if __name__ == "__main__":
    main()
