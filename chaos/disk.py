"""Takes the checkpoint store away for a while: full, read-only, slow; and delays the fsync of checkpoints and spools.

Where this process may make a mount namespace, the store is a small tmpfs that only the run sees, filled and remounted for real.
Elsewhere (or with ``--hook``) the product's one door to storage answers ENOSPC and EROFS; the table says which it was. A delayed
fsync always comes from that door. The database's own file is not part of this drill.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from drills.drill import Drill, main
from drills.faults import Fault
from drills.mounts import SmallDisk, private_namespace
from drills.runs import OwnRun

KINDS = ("full", "read-only", "slow")
STORE = "/checkpoints/"
FSYNC_S = 0.4


class Disk(Drill):
    name = "disk"
    claim = (
        "while checkpoints cannot be written the run says so and loses nothing; as soon as they can it goes on, its newest "
        "committed checkpoint is whole, and nothing is lost, trained twice or skipped"
    )
    needs_own_run = "its checkpoint store belongs to somebody else and cannot be replaced under it"
    count = 4
    interval_s = 10.0
    allowed_deaths = (("learner", "exit code 1"),)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kind", choices=(*KINDS, "any"), default="any")
        parser.add_argument("--lasting", type=float, default=6.0, help="seconds of one disturbance")
        parser.add_argument("--size", default="64m", help="of the mounted store")
        parser.add_argument("--hook", action="store_true", help="do not mount, answer with errors")

    def would_do(self) -> list[str]:
        return [f"the checkpoint store of its own run: {kind}" for kind in KINDS]

    def prepare(self) -> None:
        self.disk: SmallDisk | None = None
        self.how = "errors at the door to storage, as asked"
        if self.args.hook:
            return
        why = private_namespace()
        if not why:
            try:
                self.disk = SmallDisk(self.run.dir / "checkpoints", self.args.size)
                self.how = f"a tmpfs of {self.args.size} in a mount namespace of the drill"
                return
            except OSError as error:
                why = str(error)
        self.how = f"errors at the door to storage: nothing can be mounted here ({why})"

    def strike(self) -> Fault | None:
        assert isinstance(self.run, OwnRun)
        kind = self.chance.choice(KINDS) if self.args.kind == "any" else self.args.kind
        fault = Fault("learner", kind)
        fault.until = fault.at + self.args.lasting
        if kind == "slow":
            slow = {"fsync_s": FSYNC_S}
            self.run.tell("storage", {"learner": slow | {"below": STORE}, "worker": slow | {"below": "/spool/"}})
        elif self.disk is None:
            error = {"full": "ENOSPC", "read-only": "EROFS"}[kind]
            self.run.tell("storage", {"learner": {"error": error, "below": STORE}})
        elif kind == "full":
            self.disk.fill()
        else:
            try:
                self.disk.read_only(True)
            except OSError:  # a checkpoint is being written at this moment
                return None
        self.later(self.args.lasting, self.relax)
        return fault

    def relax(self) -> None:
        assert isinstance(self.run, OwnRun)
        self.run.tell("storage", {})
        if self.disk is not None:
            with contextlib.suppress(OSError):
                self.disk.read_only(False)
            self.disk.free()

    def own_numbers(self, result: object) -> dict[str, object]:
        told = self.run.log("learner")
        return {"the disk was": self.how, "refusals in the learner's log": told.count("No space left") + told.count("Read-only")}


if __name__ == "__main__":
    sys.exit(main(Disk))
