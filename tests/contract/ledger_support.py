"""Small builders for the ledger's contract tests; everything goes through the public verbs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Sequence

from rollbook.core.idempotency import digest
from rollbook.core.records import (
    Checkpoint,
    Cursor,
    FinishReason,
    GroupSpec,
    LeaseGrant,
    Plan,
    PlanOutcome,
    PolicyVersion,
    RewardStatus,
    Role,
    RoleTerm,
    RunRecord,
    RunRules,
    SandboxStatus,
    ScheduleKind,
    SlotKey,
    Submission,
    SubmitOutcome,
    Trajectory,
)
from rollbook.ledger.ledger import Ledger

STREAM = "tasks"
_sequence = itertools.count()


def rules(**changes: object) -> RunRules:
    base = RunRules(
        group_size=2, groups_per_step=2, schedule=ScheduleKind.BOUNDED, max_lag_versions=1, fixed_lag_versions=1, config_seed=7,
        lease_ttl_s=30.0, attempts_max=3, survivors_min=2, straggler="drop", straggler_wait_s=60.0, tokens_max=64, steps=0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def run_record(run_id: str = "run", **changes: object) -> RunRecord:
    chosen = rules(**changes)
    content = json.dumps({"rules": dataclasses.asdict(chosen)}, sort_keys=True)
    return RunRecord(run_id, digest("config", content), content, 0, chosen)


def version(number: int, lineage: int = 0, content: str = "") -> PolicyVersion:
    return PolicyVersion(lineage, number, digest("weights", lineage, number, content), f"versions/{lineage}.{number}", "{}", 10)


def group(ordinal: int, n_siblings: int = 2) -> GroupSpec:
    return GroupSpec(ordinal, struct.pack("<3i", 1, 2, ordinal), json.dumps({"prompt": f"p{ordinal}", "answer": "a"}), n_siblings)


class Scene:
    """One ledger with a feeder, a learner and workers that do as they are told."""

    def __init__(self, ledger: Ledger, record: RunRecord, *, publish: bool = True) -> None:
        self.ledger = ledger
        self.record = record
        ledger.open_run(record)
        self.feeder = ledger.acquire_role(Role.FEEDER, "feeder-1", 60.0)
        self.learner = ledger.acquire_role(Role.LEARNER, "learner-1", 60.0)
        self.incarnation = self.worker()
        if publish:
            ledger.publish_version(self.learner, version(0))

    def worker(self, name: str = "") -> str:
        name = name or f"worker-{next(_sequence)}"
        self.ledger.register_worker(name, "host", "engine")
        return name

    def feed(self, n: int, n_siblings: int | None = None) -> Cursor:
        before = self.ledger.cursor(STREAM)
        size = n_siblings or self.record.rules.group_size
        groups = [group(before.next_ordinal + i, size) for i in range(n)]
        state = json.dumps({"at": before.next_ordinal + n})
        return self.ledger.append_groups(self.feeder, before, Cursor(STREAM, before.next_ordinal + n, state, False), groups)

    def head(self) -> PolicyVersion:
        return self.ledger.versions(0)[-1]

    def lease(
        self, n: int = 100, incarnation: str = "", loaded: PolicyVersion | None = None, request_id: str = ""
    ) -> tuple[LeaseGrant, ...]:
        return self.ledger.lease_slots(incarnation or self.incarnation, loaded or self.head(), n, request_id=request_id).grants

    def submit(self, grants: Sequence[LeaseGrant], incarnation: str = "", **changes: object) -> list[SubmitOutcome]:
        items = [sample_for(g, incarnation or self.incarnation, **changes) for g in grants]
        return [r.outcome for r in self.ledger.submit_samples(items)]

    def fill(self, n: int = 100) -> tuple[LeaseGrant, ...]:
        grants = self.lease(n)
        assert set(self.submit(grants)) <= {SubmitOutcome.ACCEPTED}
        return grants

    def plan(self, step: int) -> Plan:
        return self.ledger.plan_step(self.learner, 0, step)

    def train(self, step: int) -> Plan:
        """Plan, finish and publish one step."""
        plan = self.plan(step)
        self.finish(step)
        return plan

    def finish(self, step: int) -> None:
        self.ledger.finish_plan(self.learner, 0, step, PlanOutcome.TRAINED, "", json.dumps({"loss": 0.5, "reward_mean": 0.25}))
        self.ledger.publish_version(self.learner, version(step))

    def checkpoint(self, step: int, content: str = "") -> Checkpoint:
        chain = self.ledger.read_plan(0, step).chain_digest if step else self.ledger.resume_point().chain_digests[0]
        made = Checkpoint(0, step, f"0.{step}.1", digest("manifest", step, content), chain)
        return self.ledger.commit_checkpoint(self.learner, made)


def trajectory(n: int = 3, policy_version: int = 0, first_token: int = 5, mask: bytes = b"") -> Trajectory:
    return Trajectory(
        struct.pack(f"<{n}i", *range(first_token, first_token + n)),
        struct.pack(f"<{n}f", *[-0.5 - i for i in range(n)]),
        struct.pack(f"<{n}i", *[policy_version] * n),
        mask,
    )


def sample_for(grant: LeaseGrant, incarnation: str, **changes: object) -> Submission:
    base = Submission(
        grant.key, grant.token, incarnation, grant.token, grant.lineage,
        trajectory(3, grant.version, 5 + grant.key.ordinal), 1.0, RewardStatus.GIVEN, SandboxStatus.NOT_USED, FinishReason.STOP,
        0.5, 0.1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def term_of(term: RoleTerm, **changes: object) -> RoleTerm:
    return dataclasses.replace(term, **changes)  # type: ignore[arg-type]


def key(text: str) -> SlotKey:
    return SlotKey.parse(text)
