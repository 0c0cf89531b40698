"""A prompt that kills every worker that generates it: it is found out after its attempts, alone, and the run goes on.

The prompt is one that the feeder has handed in and no worker has seen yet; the engine of every worker answers it with SIGKILL to
its own process (``drills/hooks``).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from drills import verdict
from drills.drill import Drill, main
from drills.faults import DIES_BY_KILL, Fault
from drills.runs import OwnRun

ATTEMPTS = 3
BOUND_S = 300.0


def _attempts(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: one death says nothing about a prompt, two are the least")
    return int(text)


class Poison(Drill):
    name = "poison"
    claim = (
        "a prompt that kills its workers gets no sample and no reward; after its attempts its group is quarantined with the "
        "workers it killed, no other prompt is, it does not come back, and the run goes on without loss"
    )
    needs_own_run = "a prompt can be made poisonous only for workers that were started for it"
    count = 1
    interval_s = 1.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--attempts", type=_attempts, default=ATTEMPTS, help="of a slot before its verdict, two at least")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.poisoned: dict[int, str] = {}

    def overrides(self) -> list[str]:
        return [f"ledger.attempts_max={self.args.attempts}", "supervisor.backoff_max_s=0.1"]

    def would_do(self) -> list[str]:
        return ["every worker that generates a prompt nobody has generated yet"]

    def strike(self) -> Fault | None:
        assert isinstance(self.run, OwnRun)
        rows = self.run.query(
            f"SELECT ordinal, prompt_ids FROM prompt_group g WHERE run_id = '{self.run.id}' AND NOT EXISTS (SELECT 1 FROM event e"
            " WHERE e.run_id = g.run_id AND e.ordinal = g.ordinal AND e.kind = 'lease_granted') ORDER BY ordinal DESC LIMIT 1"
        )
        if not rows:
            return None
        ordinal, prompt = rows[0][0], bytes(rows[0][1])
        self.poisoned[ordinal] = prompt.hex()
        self.run.tell("poison", {"prompts": list(self.poisoned.values())})
        fault = Fault("worker", f"poisonous prompt {ordinal}")
        self.wait_for(f"the group {ordinal} of the poisonous prompt is closed", lambda: self._is_closed(ordinal), BOUND_S)
        fault.until = fault.at
        fault.n_processes = self.deaths()
        fault.may_cost = (("worker", DIES_BY_KILL),) * 10_000
        return fault

    def _is_closed(self, ordinal: int) -> bool:
        """Every slot of the prompt has a verdict, in the group itself and in those that refill it."""
        rows = self.run.query(
            "SELECT g.prompt_ids, g.n_siblings, (SELECT count(*) FROM verdict v WHERE v.run_id = g.run_id AND "
            f"v.ordinal = g.ordinal) FROM prompt_group g WHERE g.run_id = '{self.run.id}' AND g.ordinal >= {ordinal}"
        )
        groups = [(n, ended) for prompt, n, ended in rows if bytes(prompt).hex() == self.poisoned[ordinal]]
        return bool(groups) and all(ended == n for n, ended in groups)

    def deaths(self) -> int:
        """Workers that the prompt has killed so far."""
        assert isinstance(self.run, OwnRun)
        counted = self.run.control / "poisoned"
        return counted.stat().st_size if counted.exists() else 0

    def own_findings(self, result: verdict.Verdict) -> list[str]:
        if not result.tables:
            return []
        tables = result.tables
        bad = {row["ordinal"] for row in tables["prompt_group"] if bytes(row["prompt_ids"]).hex() in self.poisoned.values()}
        found = [f"poison: group {row['ordinal']} has a sample" for row in tables["sample"] if row["ordinal"] in bad]
        bare = {(r["ordinal"], r["sibling"]) for r in tables["slot"] if r["ordinal"] in bad}
        bare -= {(r["ordinal"], r["sibling"]) for r in tables["verdict"]}
        found += [f"poison: slot {key} has no verdict" for key in sorted(bare)]
        taken_out = {row["ordinal"] for row in tables["verdict"] if row["kind"] == "quarantined"}
        found += [f"poison: group {ordinal}, which killed nobody, is quarantined" for ordinal in sorted(taken_out - bad)]
        caught = {bytes(row["prompt_ids"]).hex() for row in tables["prompt_group"] if row["ordinal"] in taken_out}
        found += [f"poison: the prompt of group {o} is not quarantined" for o, p in self.poisoned.items() if p not in caught]
        return found + ([] if self.deaths() else ["poison: it killed nobody"])

    def own_numbers(self, result: verdict.Verdict) -> dict[str, object]:
        if not result.tables:
            return {}
        tables = result.tables
        bad = {row["ordinal"] for row in tables["prompt_group"] if bytes(row["prompt_ids"]).hex() in self.poisoned.values()}
        kinds = Counter(row["kind"] for row in tables["verdict"] if row["ordinal"] in bad)
        others = Counter(row["kind"] for row in tables["verdict"] if row["ordinal"] not in bad)
        return {
            "workers killed by the prompt": self.deaths(),
            "its groups": f"{len(bad)}, verdicts: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())),
            "verdicts of other prompts": ", ".join(f"{kind} {n}" for kind, n in sorted(others.items())) or "none",
        }


if __name__ == "__main__":
    sys.exit(main(Poison))
