"""What the learner reports: how steps ended, versions, checkpoints, and where to go on after a crash.

Owns ``finish_plan``, ``publish_version``, ``versions``, ``commit_checkpoint``, ``mark_checkpoint``, ``resume_point``. Never looks
at files. Upholds R8 (outcome before version), P4 (a checkpoint row is the commit and its chain digest is the ledger's), P8.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollbook.core.bounds import inside, json_object
from rollbook.core.errors import ChainMismatch, Conflict, InvalidRequest, NotFound, ReplayDiverged
from rollbook.core.idempotency import genesis_digest
from rollbook.core.records import Checkpoint, CheckpointState, PlanOutcome, PolicyVersion, ResumePoint, Role, RoleTerm
from rollbook.ledger import schema as t
from rollbook.ledger.base import again_on_conflict, policy_version_of, storable
from rollbook.ledger.planning import Planning
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

KEPT_CHECKPOINTS = 2
"""So many newest committed checkpoints can never be deleted: with one, a damaged file would leave nothing."""


class Publishing(Planning):
    """Verbs of the learner after a step."""

    def finish_plan(self, term: RoleTerm, lineage: int, step: int, outcome: PlanOutcome, reason: str, metrics_json: str) -> None:
        """Write how the step ended, before its version is published. Idempotent: by (lineage, step); the first outcome stands.

        Raises: NotFound (no such plan), InvalidRequest (an earlier step has no outcome, or a skip has no reason).
        """
        if outcome is PlanOutcome.SKIPPED and not reason:
            raise InvalidRequest(f"step {step}: a skipped step needs a reason")
        json_object(metrics_json, "metrics_json")

        def finish(txn: Txn) -> None:
            self._check_term(txn, term, Role.LEARNER)
            plan = self._stored_plan(txn.conn, lineage, step)
            if plan is None:
                raise NotFound(f"lineage {lineage} has no plan of step {step}")
            if plan.outcome is not None:
                return
            if step > 1:
                before = self._stored_plan(txn.conn, lineage, step - 1)
                if before is None or before.outcome is None:
                    raise InvalidRequest(f"step {step - 1} has no outcome yet; steps end in order")
            txn.conn.execute(
                sa.insert(t.plan_outcome).values(
                    run_id=self.run.run_id,
                    lineage=plan.lineage,
                    step=step,
                    outcome=outcome.value,
                    reason=storable(reason),
                    metrics_json=metrics_json,
                    epoch=term.epoch,
                    finished_at_us=txn.now_us,
                )  # fmt: skip
            )
            failpoint("ledger.finish.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.finish.after_commit"))

        self._write(finish)

    def publish_version(self, term: RoleTerm, version: PolicyVersion) -> PolicyVersion:
        """Announce weights whose bytes are already durable. Idempotent: by (lineage, version).

        Raises: ReplayDiverged (another digest is recorded), InvalidRequest (a gap, or the step has no outcome).
        """
        if version.version < 0 or not version.digest or version.n_bytes < 0:
            raise InvalidRequest(f"version {version.version}: needs version >= 0, a digest and n_bytes >= 0")
        json_object(version.probe_json, "probe_json")
        inside(version.path, "path of a version")

        def publish(txn: Txn) -> PolicyVersion:
            self._check_term(txn, term, Role.LEARNER)
            stored = self._version(txn.conn, version.lineage, version.version)
            if stored is not None:
                if stored.digest == version.digest:
                    return stored
                raise ReplayDiverged(
                    f"version {version.version} of lineage {version.lineage} was published with digest {stored.digest[:12]}…, "
                    f"now {version.digest[:12]}…: the replay computed other weights"
                )
            self._check_publishable(txn.conn, version)
            txn.conn.execute(
                sa.insert(t.policy_version).values(
                    run_id=self.run.run_id,
                    lineage=version.lineage,
                    version=version.version,
                    digest=version.digest,
                    path=version.path,
                    probe_json=version.probe_json,
                    n_bytes=version.n_bytes,
                    epoch=term.epoch,
                    published_at_us=txn.now_us,
                )  # fmt: skip
            )
            txn.rings |= {"head", "lease", "plan"}
            failpoint("ledger.publish.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.publish.after_commit"))
            return version

        return self._write(publish)

    def _check_publishable(self, conn: sa.Connection, version: PolicyVersion) -> None:
        if version.lineage != self._newest_lineage():
            raise InvalidRequest(f"lineage {version.lineage} is closed; publish in lineage {self._newest_lineage()}")
        if version.version == 0:
            return
        if self._version(conn, version.lineage, version.version - 1) is None:
            raise InvalidRequest(f"version {version.version} leaves a gap: version {version.version - 1} is not published")
        plan = self._stored_plan(conn, version.lineage, version.version)
        if plan is None or plan.outcome is None:
            raise InvalidRequest(
                f"version {version.version} comes from step {version.version}, which has no outcome yet (finish_plan)"
            )

    @again_on_conflict
    def versions(self, lineage: int) -> list[PolicyVersion]:
        """Published versions along the ancestry, in order."""
        c = t.policy_version.c
        with self._read() as conn:
            rows = conn.execute(
                sa.select(t.policy_version)
                .where(c.run_id == self.run.run_id, self._along(c.lineage, c.version, lineage))
                .order_by(c.version, c.lineage)
            ).all()
        return [policy_version_of(row) for row in rows]

    def commit_checkpoint(self, term: RoleTerm, checkpoint: Checkpoint) -> Checkpoint:
        """Insert the row that makes a checkpoint real. Idempotent: by (lineage, step); the same manifest digest is success.

        A row marked ``corrupt`` or ``deleting`` is replaced by another directory: its step was replayed and saved again.
        Raises: ChainMismatch, Conflict (a committed one with another manifest stands), InvalidRequest, Fenced.
        """
        inside(checkpoint.dir_name, "directory of a checkpoint", single=True)
        if checkpoint.step < 0:
            raise InvalidRequest(f"checkpoint of step {checkpoint.step}: steps begin with 0")
        if checkpoint.state is not CheckpointState.COMMITTED:
            raise InvalidRequest("a checkpoint is committed in state 'committed'; mark_checkpoint changes it later")

        def commit(txn: Txn) -> Checkpoint:
            self._check_term(txn, term, Role.LEARNER)
            self._check_chain(txn.conn, checkpoint)
            c = t.checkpoint.c
            here = (c.run_id == self.run.run_id, c.lineage == checkpoint.lineage, c.step == checkpoint.step)
            row = txn.conn.execute(sa.select(t.checkpoint).where(*here)).first()
            if row is not None and (row.dir_name, row.manifest_digest) == (checkpoint.dir_name, checkpoint.manifest_digest):
                return _checkpoint_of(row)  # also when it was marked since: a late repetition must not bring it back
            if row is not None and row.state == CheckpointState.COMMITTED.value:
                if row.manifest_digest == checkpoint.manifest_digest:
                    return _checkpoint_of(row)
                raise Conflict(
                    f"checkpoint {checkpoint.lineage}.{checkpoint.step} is committed as {row.dir_name} with manifest "
                    f"{row.manifest_digest[:12]}…, not {checkpoint.manifest_digest[:12]}…"
                )
            values = {"dir_name": checkpoint.dir_name, "manifest_digest": checkpoint.manifest_digest,
                      "chain_digest": checkpoint.chain_digest, "state": checkpoint.state.value, "epoch": term.epoch,
                      "committed_at_us": txn.now_us}  # fmt: skip
            if row is None:
                key = {"run_id": self.run.run_id, "lineage": checkpoint.lineage, "step": checkpoint.step}
                txn.conn.execute(sa.insert(t.checkpoint).values(**key, **values))
            else:
                self._event(txn, "checkpoint_replaced", lineage=checkpoint.lineage, step=checkpoint.step, was=row.state,
                            dir_name=row.dir_name)  # fmt: skip
                txn.conn.execute(sa.update(t.checkpoint).where(*here).values(**values))
            failpoint("ledger.checkpoint.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.checkpoint.after_commit"))
            return checkpoint

        return self._write(commit)

    def _check_chain(self, conn: sa.Connection, checkpoint: Checkpoint) -> None:
        lineage, step = checkpoint.lineage, checkpoint.step
        self._ancestry(lineage)  # step 0 is every lineage's, so its chain would fit one that does not exist
        plan = self._stored_plan(conn, lineage, step) if step > 0 else None
        if step > 0 and (plan is None or plan.outcome is None):
            raise InvalidRequest(f"checkpoint of step {step}: the step has no {'plan' if plan is None else 'outcome'} yet")
        expected = plan.chain_digest if plan else genesis_digest(self.run.run_id, self.rules.config_seed)
        if expected != checkpoint.chain_digest:
            found = checkpoint.chain_digest
            raise ChainMismatch(
                f"checkpoint {lineage}.{step} carries chain digest {found[:12]}…, the ledger's is {expected[:12]}…: it belongs "
                "to another history (was the ledger restored from a backup, or the run directory copied?)"
            )

    def mark_checkpoint(self, term: RoleTerm, lineage: int, step: int, state: str) -> None:
        """Move a checkpoint to ``corrupt`` or ``deleting``. Idempotent: by (lineage, step, state).

        Raises: NotFound, InvalidRequest (one of the newest two committed ones may not be deleted).
        """
        if state not in (CheckpointState.CORRUPT.value, CheckpointState.DELETING.value):
            raise InvalidRequest(f"a checkpoint is marked 'corrupt' or 'deleting', not {state!r}")

        def mark(txn: Txn) -> None:
            self._check_term(txn, term, Role.LEARNER)
            c = t.checkpoint.c
            here = (c.run_id == self.run.run_id, c.lineage == lineage, c.step == step)
            row = txn.conn.execute(sa.select(t.checkpoint).where(*here)).first()
            if row is None:
                raise NotFound(f"there is no checkpoint {lineage}.{step}")
            if row.state == state:
                return
            newest = self._committed(txn.conn)[:KEPT_CHECKPOINTS]
            if state == CheckpointState.DELETING.value and any((k.lineage, k.step) == (lineage, step) for k in newest):
                raise InvalidRequest(
                    f"checkpoint {lineage}.{step} is one of the newest {KEPT_CHECKPOINTS} committed ones; they are never deleted"
                )
            self._event(txn, "checkpoint_marked", lineage=lineage, step=step, was=row.state, state=state)
            txn.conn.execute(sa.update(t.checkpoint).where(*here).values(state=state))
            failpoint("ledger.mark.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.mark.after_commit"))

        self._write(mark)

    def _committed(self, conn: sa.Connection) -> list[Checkpoint]:
        """Committed checkpoints of the newest lineage's ancestry, newest first."""
        c = t.checkpoint.c
        where = (c.run_id == self.run.run_id, self._along(c.lineage, c.step, self._newest_lineage()),
                 c.state == CheckpointState.COMMITTED.value)  # fmt: skip
        rows = conn.execute(sa.select(t.checkpoint).where(*where).order_by(c.step.desc(), c.lineage.desc())).all()
        return [_checkpoint_of(row) for row in rows]

    @again_on_conflict
    def resume_point(self) -> ResumePoint:
        """Newest lineage, its usable checkpoints newest first, last planned step, head version, chain digests."""
        lineage = self._newest_lineage()
        with self._read() as conn:
            checkpoints = self._committed(conn)
            chains = {c.step: self._chain_at(conn, lineage, c.step) for c in checkpoints}
            chains[0] = self._chain_at(conn, lineage, 0)
            return ResumePoint(lineage, tuple(checkpoints), self._last_planned(conn, lineage), self._head(conn), chains)


def _checkpoint_of(row: Any) -> Checkpoint:
    return Checkpoint(row.lineage, row.step, row.dir_name, row.manifest_digest, row.chain_digest, CheckpointState(row.state))
