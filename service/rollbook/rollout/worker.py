"""The worker role: lease, generate, verify, submit, until the run drains or the process is told to stop.

Owns the order of these steps and what happens to each leased slot. Never speaks SQL, never judges staleness, and never
generates from weights that were not proven (``probe``). Upholds P1 (spool before submit), P6 (no value without a
verifier's), P8 (leases are used only while confirmed), P11.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError, NotReady, StaleWeights
from rollbook.core.host import host, incarnation, superseded
from rollbook.core.packing import unpack_i32
from rollbook.core.ports import Engine, Generation, GenerationRequest, LedgerPort, SamplingSettings
from rollbook.core.records import (
    Blame,
    FailureReport,
    LeaseGrant,
    LeaseReply,
    PolicyVersion,
    RewardStatus,
    ScheduleKind,
    SlotKey,
    Submission,
)
from rollbook.core.statuses import ENGINE_FAILED
from rollbook.observe import log as logs
from rollbook.observe import metrics, progress, tracing
from rollbook.observe.devices import WORKER_CLOCK
from rollbook.observe.failpoints import failpoint
from rollbook.rollout.delivery import Delivery, repeat_call
from rollbook.rollout.engines import make_engine
from rollbook.rollout.episodes import Episodes, Finished, Judge
from rollbook.rollout.heartbeat import Heartbeat
from rollbook.rollout.journal import LedgerJournal
from rollbook.rollout.judges import open_judge
from rollbook.rollout.leases import LeaseNote
from rollbook.rollout.model_files import prompt_error, read_model_files
from rollbook.rollout.probe import load_verified
from rollbook.rollout.spool import Spool
from rollbook.tasks.turns import TurnCodec, make_codec

log = logging.getLogger(__name__)

LEASE_WAIT_S = 2.0
"""How long the ledger may hold a lease call that it cannot grant yet."""
VERSION_WAIT_S = 60.0
"""How long a worker asks again while the bytes of the version it wants are missing."""


def worker_kind(config: Config, index: int) -> WorkerConfig:
    """Configuration of the worker process ``index``; processes are counted over all ``[[workers]]`` in order."""
    kinds = [kind for kind in config.workers for _ in range(kind.count)]
    if not 0 <= index < len(kinds):
        raise ConfigError(f"worker index {index}: the configuration has {len(kinds)} workers, counted from 0")
    return kinds[index]


def run_worker(
    config: Config,
    index: int,
    client: LedgerPort,
    beat_client: LedgerPort,
    stop: threading.Event,
    *,
    engine_factory: Callable[[Config, WorkerConfig], Engine] = make_engine,
) -> None:
    """Work until the run drains or ``stop`` is set; the batch in hand is finished and submitted first.

    Args:
        client: for leases and submissions.
        beat_client: for heartbeats, from a thread of its own.

    Raises: Fenced, WrongRun, StaleWeights, DigestMismatch, ConfigError, Unavailable (out of patience; the spool stays).
    """
    kind = worker_kind(config, index)
    me = incarnation()
    place = Path(config.run.dir) / "spool" / f"worker-{index}"
    delivery = Delivery(client, Spool(place, config.run.id), stop)
    note = LeaseNote(place / "leases.json", config.run.id)
    delivery.send_spooled()
    failpoint("worker.start.after_spool")
    delivery.report(note.left_by(superseded()))
    failpoint("worker.start.after_note")
    opened = open_judge(config, Path(config.run.dir) / "logs" / f"environment-{index}.log")
    judge = opened.judge
    engine = None
    try:
        codec = make_codec(config)
        engine = engine_factory(config, kind)
        manifest = engine.manifest()
        log.info("engine ready", extra={"event": "engine_ready", "manifest": json.dumps(manifest)})
        labels = {"name": f"worker-{index}", "pid": os.getpid(), "engine": manifest, **opened.labels()}
        repeat_call(
            lambda: client.register_worker(me, socket.gethostname(), kind.engine, json.dumps(labels)), stop
        )
        failpoint("worker.start.after_register")
        beat = Heartbeat(beat_client, me, config.ledger.heartbeat_s, config.supervisor.stall_s).start()
        try:
            _Worker(config, kind, me, client, beat, note, delivery, engine, judge, codec, stop).run()
        finally:
            beat.stop()
    finally:
        progress.mark(progress.State.ENDING)
        judge.close()
        if engine is not None:
            engine.close()
    log.info("worker done", extra={"event": "worker_done", **{o.value: n for o, n in delivery.outcomes.items()}})


@dataclass(slots=True)
class _Worker:
    config: Config
    kind: WorkerConfig
    incarnation: str
    client: LedgerPort
    beat: Heartbeat
    note: LeaseNote
    delivery: Delivery
    engine: Engine
    judge: Judge
    codec: TurnCodec
    stop: threading.Event
    loaded: PolicyVersion | None = None
    missing_since: float | None = None
    leases_asked: int = 0
    sequence: int = 0
    in_hand: list[LeaseGrant] = field(default_factory=list)
    taken_at: dict[SlotKey, float] = field(default_factory=dict)
    """When the leases in hand were asked for."""
    refused: list[FailureReport] = field(default_factory=list)
    sampling: SamplingSettings = field(init=False)
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        s = self.config.sampling
        self.sampling = SamplingSettings(s.temperature, s.max_new_tokens, s.ignore_eos)
        self.vocab_size = read_model_files(self.config.model.path).vocab_size

    def run(self) -> None:
        """The loop; one turn is one lease call."""
        while not self.stop.is_set() and not self.beat.draining:
            self.beat.raise_failure()
            progress.mark(progress.State.WAITING)
            if (newer := self._newer_head()) is not None:
                self._load(newer)
            asked_at = host().monotonic()
            reply = self._lease(self.kind.slots)
            if reply.wanted is not None:
                if self.config.schedule.kind == ScheduleKind.BOUNDED:
                    self.beat.told(reply.wanted)
                self._load(reply.wanted)
            elif reply.grants:
                self._work(reply.grants, asked_at)
            elif reply.drain:
                return
            else:
                progress.finished("asked for slots, there was none to lease")
                self.stop.wait(min(max(reply.retry_after_s, 0.02), self.config.ledger.heartbeat_s))

    def _newer_head(self) -> PolicyVersion | None:
        """The head, when the schedule lets the worker choose and it is newer than what is loaded.

        After a fork the head may also be an older version than the loaded one; the lease call says so.
        """
        head, loaded = self.beat.head, self.loaded
        if self.config.schedule.kind != ScheduleKind.BOUNDED or head is None or loaded is None:
            return None
        return head if (head.lineage, head.version) > (loaded.lineage, loaded.version) else None

    def _lease(self, n_max: int, wait_s: float = LEASE_WAIT_S) -> LeaseReply:
        self.leases_asked += 1
        request_id = f"{self.incarnation}.{self.leases_asked}"
        try:
            return repeat_call(
                lambda: self.client.lease_slots(
                    self.incarnation, self.loaded, n_max, wait_s=wait_s, request_id=request_id
                ),
                self.stop,
            )
        except StaleWeights as error:
            if self.loaded is None:
                raise
            # The ledger holds other weights under this name (restored from an older copy, say): be told what to load.
            log.warning("loaded version was replaced", extra={"event": "version_replaced", "reason": str(error)})
            self._set_loaded(None)
            return LeaseReply((), None, 0.0)

    def _load(self, version: PolicyVersion) -> None:
        """Load and prove a version; missing bytes are asked for again until ``VERSION_WAIT_S`` is over."""
        self._set_loaded(None)
        progress.mark(progress.State.LOADING)
        try:
            with (
                WORKER_CLOCK.busy("weight_sync"),
                tracing.span("weight_update", attributes={"version": version.version, "digest": version.digest[:12]}),
            ):
                load_verified(self.engine, version, self.config.run.dir, self.kind.probe_tolerance)
        except NotReady as error:
            now = host().monotonic()
            self.missing_since = self.missing_since or now
            if now - self.missing_since > VERSION_WAIT_S:
                raise NotReady(
                    f"version {version.lineage}.{version.version} cannot be loaded for {VERSION_WAIT_S:.0f} s: {error}; "
                    "check that the run directory is shared with this machine"
                ) from error
            self.stop.wait(0.5)
            return
        self.missing_since = None
        failpoint("worker.load.after_proof")
        self._set_loaded(version)
        metrics.recovered("actor")

    def _set_loaded(self, version: PolicyVersion | None) -> None:
        self.loaded = version
        logs.bind(policy_version=None if version is None else version.version)
        self.beat.set_loaded(version)
        metrics.WORKER_POLICY_VERSION.labels("actor").set(-1 if version is None else version.version)
        progress.ready(version is not None, "no version of the policy is loaded", check=self.beat.wrong)

    def _work(self, grants: Sequence[LeaseGrant], asked_at: float) -> None:
        """Bring a batch of leased slots to samples or failures; while tools keep it waiting, more slots join it."""
        self.in_hand, self.taken_at = [], {}
        episodes = self._episodes()
        try:
            self._take(grants, asked_at, episodes)
            while len(episodes) or self.refused:
                progress.mark(progress.State.JUDGING if episodes.waiting else progress.State.GENERATING)
                finished = episodes.advance()
                outcomes = [*map(self._outcome, finished), *self.refused]
                if outcomes:
                    progress.mark(progress.State.WAITING)
                self.refused = []
                began = host().monotonic()
                self.delivery.deliver([o for o in outcomes if isinstance(o, Submission)])
                self._observe(finished, began)
                self.delivery.report([o for o in outcomes if isinstance(o, FailureReport)])
                self.beat.release([f.grant for f in finished])
                if outcomes:
                    progress.finished(f"delivered {len(outcomes)} rollouts")
                if episodes.waiting and self.judge.pure_tools and len(episodes) < self.kind.slots:
                    self._take_more(self.kind.slots - len(episodes), episodes)
            failpoint("worker.before_note_removed")
            self.note.write(self.incarnation, ())
        finally:
            self.beat.release(self.in_hand)
        if self.judge.pure_tools:
            said = {"generate_s": round(episodes.generated_s, 3), "waited_s": round(episodes.waited_s, 3)}
            log.info("episodes done", extra={"event": "episodes_done", **said})

    def _observe(self, finished: Sequence[Finished], sent_at: float) -> None:
        """How long these rollouts took, by stage, as of now, when the ledger has answered."""
        now = host().monotonic()
        for f in finished:
            metrics.WORKER_TOKENS_TOTAL.inc(f.trajectory.n_tokens)
            total_s = now - self.taken_at.get(f.grant.key, sent_at)
            stages = {"generate": f.generate_s, "reward": f.verify_s, "commit": now - sent_at, "total": total_s}
            exemplar = tracing.exemplar(f.grant.traceparent) if f.grant.traceparent else None
            for stage, seconds in stages.items():
                metrics.ROLLOUT_DURATION_SECONDS.labels(stage).observe(seconds, exemplar)

    def _episodes(self) -> Episodes:
        assert self.loaded is not None
        version = self.loaded.version
        return Episodes(
            run_id=self.config.run.id, judge=self.judge, codec=self.codec, journal=LedgerJournal(self.client, self.stop),
            generate=self._generate, tokens_max=self.sampling.max_new_tokens, turns_max=self.config.environment.turns_max,
            version=lambda: version, is_usable=self.beat.usable, may_salvage=self.config.ledger.late_submit != "strict",
        )  # fmt: skip

    def _take(self, grants: Sequence[LeaseGrant], asked_at: float, episodes: Episodes) -> None:
        """Hold these leases, note them, and begin their episodes; what cannot be generated is reported."""
        self.in_hand += grants
        self.taken_at |= {grant.key: asked_at for grant in grants}
        self.beat.hold(grants, asked_at)
        failpoint("worker.before_note")
        self.note.write(self.incarnation, self.in_hand)
        failpoint("worker.after_lease")
        self._check_version(grants)
        ready, failures = self._screen(grants)
        self.refused += failures
        episodes.add(ready)

    def _take_more(self, n_max: int, episodes: Episodes) -> None:
        """Lease further slots of the loaded version, unless something else is due."""
        if self.stop.is_set() or self.beat.draining or self._newer_head() is not None:
            return
        asked_at = host().monotonic()
        reply = self._lease(n_max, wait_s=0.0)
        if reply.grants:
            self._take(reply.grants, asked_at, episodes)

    def _check_version(self, grants: Sequence[LeaseGrant]) -> None:
        assert self.loaded is not None
        mine = (self.loaded.lineage, self.loaded.version, self.loaded.digest)
        for grant in grants:
            if (grant.lineage, grant.version, grant.version_digest) != mine:
                raise StaleWeights(
                    f"slot {grant.key} is leased for version {grant.lineage}.{grant.version} {grant.version_digest[:12]}, but "
                    f"{mine[0]}.{mine[1]} {mine[2][:12]} is loaded; restart the worker"
                )

    def _screen(self, grants: Sequence[LeaseGrant]) -> tuple[list[LeaseGrant], list[FailureReport]]:
        """Slots that can be generated, and reports for those that cannot: one bad prompt must not cost a batch."""
        ready: list[LeaseGrant] = []
        failures: list[FailureReport] = []
        for grant in grants:
            prompt = tuple(unpack_i32(grant.prompt_ids))
            reason = prompt_error(prompt, self.sampling.max_new_tokens, self.vocab_size, self.kind.max_model_len)
            if reason:
                failures.append(self._failure(grant, RewardStatus.INFRA_ERROR, Blame.INFRA, reason))
            else:
                ready.append(grant)
        return ready, failures

    def _generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        try:
            with WORKER_CLOCK.busy():
                return self.engine.generate(requests, self.sampling)
        except Exception as error:
            # The process ends with this error; the slots are freed at once instead of after their TTL.
            reason = f"{ENGINE_FAILED}{type(error).__name__}: {error}"[:500]
            asked = {request.key for request in requests}
            mine = [grant for grant in self.in_hand if grant.key in asked]
            self.delivery.report([self._failure(g, RewardStatus.NO_VERDICT, Blame.INFRA, reason) for g in mine])
            raise

    def _outcome(self, f: Finished) -> Submission | FailureReport:
        """A submission with a reward, or a report why there is none."""
        result = f.result
        if result is None or result.value is None:
            status = f.status if result is None else result.status
            blame = f.blame if result is None else result.blame or Blame.UNCLEAR
            reason = f.reason if result is None else result.evidence or result.status.value
            return dataclasses.replace(
                self._failure(f.grant, status, blame, reason), sandbox_status=f.sandbox_status,
                n_tokens=f.trajectory.n_tokens, generate_s=f.generate_s, verify_s=f.verify_s,
                evidence_json=json.dumps(f.evidence), final=f.final,
            )  # fmt: skip
        self.sequence += 1
        return Submission(
            key=f.grant.key,
            lease_token=f.grant.token,
            incarnation=self.incarnation,
            sequence=self.sequence,
            lineage=f.grant.lineage,
            trajectory=f.trajectory,
            reward=float(result.value),
            reward_status=result.status,
            sandbox_status=result.sandbox_status,
            finish_reason=f.finish_reason,
            generate_s=f.generate_s,
            verify_s=f.verify_s,
            evidence_json=json.dumps(f.evidence),
            blame=result.blame,
            traceparent=f.grant.traceparent,
        )

    def _failure(self, grant: LeaseGrant, status: RewardStatus, blame: Blame, reason: str) -> FailureReport:
        return FailureReport(grant.key, grant.token, self.incarnation, status, blame, reason)
