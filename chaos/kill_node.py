"""Kills roles or a whole node of a run, again and again, and shows that nothing of it was lost.

Every process of one role (``--role``; ``--one`` kills one of them), one role after the other by chance, or the whole node; at
random times or at failpoints (``--at``). Only processes that the run's own table records.
"""

from __future__ import annotations

import argparse
import sys

from drills.drill import Broken, Drill, main
from drills.faults import DIES_BY_KILL, ENDS_ITSELF, ROLES, Fault, kill, possible
from drills.verdict import Verdict
from rollbook.observe.catalogue import CATALOGUE

ANY = ("worker", "learner", "ledger", "feeder", "supervisor")
IN_TURN = ("worker", "engine", "learner", "learner-rank", "ledger", "standby", "feeder", "supervisor", "database", "node")


class KillNode(Drill):
    name = "kill_node"
    claim = (
        "whatever role or whole node is killed with SIGKILL, the run goes on by itself, and no acknowledged sample is lost, none "
        "is trained twice or too stale, no prompt is skipped"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--role", choices=(*ROLES, "node", "any", "each"), default="any",
                            help="any: by chance, each time anew; each: one after the other, a node last")  # fmt: skip
        parser.add_argument("--one", action="store_true", help="one process of the role by chance, not all of them")
        parser.add_argument("--at", action="append", default=[], metavar="FAILPOINT[@K]",
                            help="kill whoever crosses this point (for the K-th time), once; needs a run of its own")  # fmt: skip

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._waiting = list(args.at)
        if self._waiting and args.count is None:
            args.count = len(self._waiting)
        self._struck: list[str] = []

    def overrides(self) -> list[str]:
        role = self.args.role
        ranks = role in ("each", "learner-rank") or any(point.startswith("learner.rank.") for point in self.args.at)
        return [*(["ledger.standbys=1"] if role in ("each", "standby") else []), *(["learner.ranks=2"] if ranks else [])]

    def failpoints(self) -> str:
        from drills.runs import Refused

        parts = []
        for point in self.args.at:
            name, _, crossing = point.partition("@")
            if name not in CATALOGUE:
                raise Refused(f"there is no failpoint {name!r}; `rollbook doctor --failpoints` lists them")
            parts.append(f"{name}=crash@{crossing or 1}")
        return ",".join(parts)

    def would_do(self) -> list[str]:
        if self.args.at:
            return [f"whoever crosses {point}" for point in self.args.at]
        found = [line for role in self._roles() for line in possible(self.run, role)]
        return found or [f"{self.args.role}: none of it lives now"]

    def _roles(self) -> list[str]:
        if self.args.role == "any":
            more = ["database"] if self.run.server else []
            return [*ANY, "node", *more, *(["learner-rank"] if self.run.config.learner.ranks > 1 else [])]
        return self._in_turn() if self.args.role == "each" else [self.args.role]

    def _in_turn(self) -> list[str]:
        """What the run has: an engine is a process of its own only in workers of vLLM."""
        config = self.run.config
        has = {
            "engine": any(worker.engine == "vllm" for worker in config.workers), "learner-rank": config.learner.ranks > 1,
            "standby": config.ledger.standbys > 0, "database": self.run.server is not None,
        }  # fmt: skip
        return [role for role in IN_TURN if has.get(role, True)]

    def strike(self) -> Fault | None:
        if self.args.at:
            return self._next_failpoint()
        if self.args.role == "each":
            return self._strike_next()
        return kill(self.run, self.chance.choice(self._roles()), self.chance, self.args.one)

    def _count(self) -> int:
        return len(self._in_turn()) if self.args.role == "each" and self.args.count is None else super()._count()

    def _strike_next(self) -> Fault | None:
        roles = self._in_turn()
        fault = kill(self.run, roles[len(self._struck) % len(roles)], self.chance, self.args.one)
        if fault is not None:
            self._struck.append(fault.role)
        return fault

    def own_findings(self, result: Verdict) -> list[str]:
        spared = set(self._in_turn()) - set(self._struck) if self.args.role == "each" else set()
        return [f"never killed: {', '.join(sorted(spared))}"] if spared else []

    def _next_failpoint(self) -> Fault | None:
        """The next armed point that somebody has died at; its time is the marker's."""
        run = self.run
        found: list[Fault] = []

        def fired() -> bool:
            for point in self._waiting:
                name, _, crossing = point.partition("@")
                marker = run.markers / f"{name}@{crossing or 1}"  # type: ignore[attr-defined]
                if marker.exists():
                    self._waiting.remove(point)
                    role = CATALOGUE[name].role
                    how = ENDS_ITSELF if name.startswith("learner.rank.") else DIES_BY_KILL
                    found.append(Fault(role, name, marker.stat().st_mtime, n_processes=1, may_cost=((role, how),)))
                    return True
            return False

        try:
            self.wait_for(f"somebody crosses one of {', '.join(self._waiting)}", fired, 120.0)
        except Broken:
            if not found:
                raise
        return found[0]


if __name__ == "__main__":
    sys.exit(main(KillNode))
