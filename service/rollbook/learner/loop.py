"""The learner: plan, collate, step, finish, publish, checkpoint.

Owns the order of these six and what each failure between two of them means. A stored plan is trained exactly as a new one
is, so replay after a crash is this same loop over plans that already exist (P3, P4). Never chooses samples, never writes
after its role is lost (P8), never waits without saying for what (P10).
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.config import Config
from rollbook.core.errors import ChainMismatch, NotReady
from rollbook.core.host import host, incarnation, superseded
from rollbook.core.idempotency import chain_digest, items_digest
from rollbook.core.ports import LedgerPort
from rollbook.core.records import TASK_STREAM, Plan, PlanOutcome, PolicyVersion, Role
from rollbook.learner.checkpoint import Checkpoints
from rollbook.learner.collate import collate
from rollbook.learner.forking import Divergence, fork, other_weights, stopped
from rollbook.learner.gang import Gang, learner_group, trainer_of
from rollbook.learner.history import refuse_when_ahead
from rollbook.learner.interval import Cadence
from rollbook.learner.model import load_policy
from rollbook.learner.publish import Publisher
from rollbook.learner.resume import restore_newest
from rollbook.learner.revisions import Revisions
from rollbook.learner.role import HeldRole, acquire, holding
from rollbook.learner.showing import show_checkpoint, show_phases, show_replayed, show_step, timed_checkpoint
from rollbook.learner.trainer import StepResult, Trainer
from rollbook.observe import log as logs
from rollbook.observe import progress, tracing
from rollbook.observe.failpoints import failpoint
from rollbook.observe.metrics import recovered

log = logging.getLogger(__name__)

PLAN_WAIT_S = 2.0
"""Longest the ledger holds one request for a plan; also how late a stop is noticed."""

REPORT_EVERY_S = 30.0
"""Interval of the log lines that say what a waiting learner lacks."""


def run_learner(config: Config, client: LedgerPort, stop: threading.Event) -> bool:
    """Train until the configured number of steps is made, or until ``stop`` is set; True when all steps are made.

    A stop takes effect after the current step: its checkpoint is committed and the role given up.

    Raises:
        Fenced: another learner took over; nothing was written after that.
        RoleHeld: another learner holds the role and keeps renewing it.
        ReplayDiverged: a replayed step gave other weights than the recorded ones, and the lineage does not fork.
        RunPaused: the schedule needs an operator's decision.
        RankLost: another rank of the learner died or hangs.
        RanksDiffer: the ranks of the learner hold different weights.
    """
    holder = incarnation()
    supersede = superseded()
    ttl_s = config.ledger.role_ttl_s
    term = acquire(client, Role.LEARNER, holder, ttl_s, supersede, stop, wait_s=3 * ttl_s + 30.0)
    if term is None:
        return False
    failpoint("learner.after_role")
    with holding(client, term) as role, learner_group(config) as gang:
        learner = open_learner(config, client, role, gang)
        progress.ready(True, check=role.wrong)
        while learner.step < config.run.steps:
            plan = learner.next_plan(stop)
            if plan is None:
                break
            try:
                learner.advance(plan)
            except Divergence as found:
                fork(learner, found)
        progress.ready(False, "it ends")
        learner.checkpoint()
        failpoint("learner.before_release")
    return learner.step >= config.run.steps


@dataclass
class Learner:
    """A trainer bound to its ledger role.

    ``recorded`` versions and ``last_planned_step`` say what existed when it started, or when its lineage began.
    """

    config: Config
    client: LedgerPort
    role: HeldRole
    trainer: Trainer
    publisher: Publisher
    checkpoints: Checkpoints
    revisions: Revisions
    recorded: dict[int, PolicyVersion]
    last_planned_step: int
    cadence: Cadence
    seconds_waited: float = 0.0
    seconds_published: float = 0.0
    seconds_checkpointed: float = 0.0

    @property
    def step(self) -> int:
        return self.trainer.progress.step

    @property
    def lineage(self) -> int:
        return self.trainer.progress.lineage

    def next_plan(self, stop: threading.Event) -> Plan | None:
        """The plan of the next step, waited for with a report every 30 s; None when told to stop."""
        failpoint("learner.before_plan")
        started = reported = host().monotonic()
        while not stop.is_set():
            self.role.check()
            progress.mark(progress.State.WAITING)
            try:
                plan = self.client.plan_step(self.role.term, self.lineage, self.step + 1, wait_s=PLAN_WAIT_S)
            except NotReady as missing:
                if host().monotonic() - reported >= REPORT_EVERY_S:
                    reported = host().monotonic()
                    self._report_wait(reported - started, missing)
                stop.wait(0.05)
            else:
                self.seconds_waited = host().monotonic() - started
                failpoint("learner.after_plan")
                return plan
        return None

    def _report_wait(self, waited_s: float, missing: NotReady) -> None:
        is_stalled = waited_s >= self.config.supervisor.stall_s
        log.log(
            logging.ERROR if is_stalled else logging.WARNING, "step %d has no plan after %.0f s: %s", self.step + 1, waited_s,
            missing, extra={"event": "plan_stalled" if is_stalled else "plan_waited_for"},
        )  # fmt: skip

    def advance(self, plan: Plan) -> None:
        """Train one plan to its published version and, when due, its checkpoint."""
        logs.bind(policy_version=plan.step)
        with tracing.span("step", attributes={"run": self.config.run.id, "lineage": plan.lineage, "step": plan.step}):
            self._advance(plan)

    def _advance(self, plan: Plan) -> None:
        began = host().monotonic()
        progress.mark(progress.State.TRAINING)
        result = self.train(plan)
        if result is not None:
            self._finish(plan, result)
            show_step(result.metrics)
            if plan.outcome is not None:
                show_replayed(self.config, result.metrics["seconds_step"])
        elif plan.outcome is None:
            self._skip_as_recorded(plan)
        started = host().monotonic()
        progress.mark(progress.State.SAVING)
        self._publish(plan)
        progress.finished(f"step {plan.step}")
        self.seconds_published, trained_s, started = host().monotonic() - started, started - began, host().monotonic()
        show_phases({"publish": self.seconds_published, "data_wait": self.seconds_waited})
        if plan.step >= self.last_planned_step:
            recovered("learner")
        self.cadence.stepped(self.seconds_waited + trained_s + self.seconds_published, trained_s)
        if self.cadence.due(self.step, max(self.checkpoints.steps(), default=0)):
            self.checkpoint()
        self.seconds_checkpointed = host().monotonic() - started

    def train(self, plan: Plan) -> StepResult | None:
        """Make the plan's step and write nothing; None where it is skipped because it is recorded so (R8).

        That holds as well for a plan copied at a fork from a lineage in which the step was skipped.
        """
        self._check_chain(plan)
        config = self.revisions.config_of(plan.revision, planned_now=plan.step > self.last_planned_step)
        self.trainer.require_same_arithmetic(config)
        self.trainer.use(config)
        if PlanOutcome.SKIPPED in (plan.outcome, plan.obeys):
            self.trainer.skip_step()
            return None
        return self._train(plan)

    def _skip_as_recorded(self, plan: Plan) -> None:
        self.role.check()
        self.client.finish_plan(self.role.term, plan.lineage, plan.step, PlanOutcome.SKIPPED, plan.reason, "{}")
        failpoint("learner.after_finish_plan")

    def _check_chain(self, plan: Plan) -> None:
        expected = chain_digest(self.trainer.progress.chain_digest, plan.step, items_digest(plan.items))
        if plan.step != self.step + 1 or plan.base_version != self.step or plan.chain_digest != expected:
            raise ChainMismatch(
                f"the plan of step {plan.step} does not continue the history trained up to step {self.step}; run `rollbook audit`"
            )

    def _train(self, plan: Plan) -> StepResult:
        started = host().monotonic()
        with tracing.span("fetch"):
            samples = list(self.client.payloads(plan.lineage, plan.step))
        lag_max = self.trainer.config.rules().max_lag_versions  # of the plan's revision, which the bound of today may not judge
        failpoint("learner.after_fetch")
        batch = collate(plan, samples, vocab_size=self.trainer.policy.vocab_size, max_lag_versions=lag_max)
        seconds_fetch = host().monotonic() - started
        tracing.link([sample.traceparent for sample in samples])
        with tracing.span("train"):
            result = self.trainer.train_step(batch)
        failpoint("learner.after_step")
        result.metrics.update(
            seconds_plan_wait=self.seconds_waited, seconds_fetch=seconds_fetch, seconds_publish_before=self.seconds_published,
            seconds_checkpoint_before=self.seconds_checkpointed, **self.cadence.interval.to_values(),
        )  # fmt: skip
        return result

    def _finish(self, plan: Plan, result: StepResult) -> None:
        if plan.outcome is not None and plan.outcome is not result.outcome:
            raise Divergence(
                f"step {plan.step} is recorded as {plan.outcome.value}, its replay was {result.outcome.value} ({result.reason})",
                plan,
            )
        self.role.check()
        if plan.outcome is None:
            metrics = json.dumps(result.metrics, allow_nan=False)
            self.client.finish_plan(self.role.term, plan.lineage, plan.step, result.outcome, result.reason, metrics)
        failpoint("learner.after_finish_plan")
        log.info(
            "finished step %d", plan.step,
            extra={"event": "step_finished", "outcome": result.outcome.value, "reward_mean": result.metrics["reward_mean"],
                   "seconds": round(result.metrics["seconds_step"], 3)},
        )  # fmt: skip

    def _publish(self, plan: Plan) -> None:
        """Announce the step's weights, or compare them with the version recorded before a crash."""
        recorded = self.recorded.get(plan.step)
        self.role.check()
        if recorded is None:
            with tracing.span("weight_publish", attributes={"version": plan.step}):
                digest = self.publisher.publish(self.lineage, plan.step).digest
        else:
            digest = self.publisher.digest()
            if digest != recorded.digest:
                raise Divergence(other_weights(plan.step, recorded.digest, digest), plan)
            if plan.step == max(self.recorded):
                self.publisher.ensure_bytes(recorded)
        self.trainer.note(chain_digest=plan.chain_digest, version_digest=digest)

    def checkpoint(self) -> None:
        """Commit a checkpoint of the current step unless it has one, then delete versions nobody can need."""
        if self.step in self.checkpoints.steps():
            return
        self.role.check()
        progress.mark(progress.State.SAVING)
        started = host().monotonic()
        self.trainer.note(cursor=self.client.cursor(TASK_STREAM))
        with tracing.span("checkpoint", attributes={"step": self.step}):
            with timed_checkpoint("snapshot"):
                state = self.trainer.state_dict()
            saved = self.checkpoints.save(state)
        head = max([self.step, *self.recorded])
        lag_max = self.config.rules().max_lag_versions
        deleted = self.publisher.retain(self.lineage, head, lag_max, self.checkpoints.steps())
        if deleted:
            log.info("deleted weights of %d versions", len(deleted), extra={"event": "versions_deleted"})
        took_s, n_bytes = host().monotonic() - started, self.checkpoints.files.n_bytes(saved.dir_name)
        self.cadence.saved(self.step, took_s, n_bytes)
        show_phases({"checkpoint": took_s})
        show_checkpoint(n_bytes, self.cadence.interval)


def open_learner(config: Config, client: LedgerPort, role: HeldRole, gang: Gang | None = None) -> Learner:
    """A learner at the newest state that can be restored; a new run gets version 0 and checkpoint 0 first (R8)."""
    run_dir = Path(config.run.dir)
    point = client.resume_point()
    refuse_when_ahead(run_dir, client)
    checkpoints = Checkpoints(run_dir / "checkpoints", client, role.term, config.checkpoint.keep)
    checkpoints.open(point, config.run.id, config.run.seed)
    recorded = {version.version: version for version in client.versions(point.lineage)}
    trainer = trainer_of(load_policy(config), config, gang)
    trainer.note(lineage=point.lineage)
    restored = restore_newest(trainer, checkpoints, client, point, recorded)
    trainer.note(lineage=point.lineage)  # a checkpoint from before a fork names the lineage it was made in
    learner = Learner(
        config=config,
        client=client,
        role=role,
        trainer=trainer,
        publisher=Publisher(config, trainer.policy, client, role.term),
        checkpoints=checkpoints,
        revisions=Revisions(run_dir / "revisions", config),
        recorded=recorded,
        last_planned_step=point.last_planned_step,
        cadence=Cadence(config.checkpoint.every_steps, config.checkpoint.mtbf_s, config.learner.ranks),
    )
    if restored is None:
        _begin(learner)
    failpoint("learner.resume.opened")
    to_replay = max(0, point.last_planned_step - learner.step)
    log.info(
        "learner starts from step %d of %d", learner.step, config.run.steps,
        extra={"event": "learner_opened", "plans_to_replay": to_replay},
    )  # fmt: skip
    return learner


def _begin(learner: Learner) -> None:
    """Version 0 and checkpoint 0; a repetition after a crash in between finds what it would write."""
    recorded = learner.recorded.get(0)
    if recorded is None:
        digest = learner.publisher.publish(learner.lineage, 0).digest
    else:
        digest = learner.publisher.digest()
        if digest != recorded.digest:
            raise stopped(other_weights(0, recorded.digest, digest))
    learner.trainer.note(version_digest=digest)
    failpoint("learner.start.after_version")
    learner.checkpoint()
