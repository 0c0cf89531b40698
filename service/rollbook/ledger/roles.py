"""Opening a run, attaching a server to it, and the fenced roles.

Owns ``open_run``, ``attach``, ``acquire_role``, ``renew_role``, ``release_role``. Never grants a lease. Upholds P8 (epochs
only grow), P12 (a resumed run has the configuration it was started with, or a recorded revision, R15) and R11 (leases are
extended by the time the server was down).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Collection

import sqlalchemy as sa

from rollbook.core.bounds import INT32_MAX, json_object, within
from rollbook.core.changes import DATASET, NEVER, ONCE_ISSUED, ONCE_PUBLISHED, changed_fields, refusal
from rollbook.core.errors import ConfigMismatch, Fenced, InvalidRequest, NotFound, RoleHeld, WrongRun
from rollbook.core.records import ROOT_LINEAGE, Role, RoleTerm, RunRecord, RunRules, ScheduleKind
from rollbook.ledger import schema as t
from rollbook.ledger.base import load_kept, load_lineages, store_term
from rollbook.ledger.failing import Failing
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

FENCED_ROLES = (Role.LEARNER, Role.FEEDER)
ROLE_TTL_S_MAX = 86_400.0
"""Longest term of a role: a dead holder nobody names keeps it that long."""
SECONDS_MAX = 1e9
"""Longest time of a rule: with every stored time it stays within 64-bit microseconds."""
COUNTS = ("group_size", "groups_per_step", "attempts_max", "tokens_max")
"""Rules that are at least one."""
WORDS = {"late_submit": ("salvage", "strict"), "straggler": ("wait", "drop")}
SETTLED_RULES = {
    "group_size": "learner.group_size", "groups_per_step": "learner.groups_per_step", "schedule": "schedule.kind",
    "fixed_lag_versions": "schedule.lag_versions", "config_seed": "run.seed",
}  # fmt: skip
"""Rules that existing groups and seeds depend on, and their names in the configuration; no revision may change them."""


def rules_to_json(rules: RunRules) -> str:
    return json.dumps(dataclasses.asdict(rules), sort_keys=True)


def rules_from_json(text: str) -> RunRules:
    values = json.loads(text)
    return RunRules(**{**values, "schedule": ScheduleKind(values["schedule"])})


class Roles(Failing):
    """Verbs about the run and its roles."""

    _holder: str
    _role_ttl_s: float
    _supersede: str
    _attach_lock: threading.Lock

    def open_run(self, run: RunRecord, *, accept: Collection[str] = ()) -> RunRecord:
        """Create the run, or attach to it; an equal record is success, one whose every change is accepted a revision.

        Transaction: run, revision, root lineage, the server's own term. Idempotent: by run id and digest.
        Raises: ConfigMismatch, RoleHeld (another server serves the run), WrongRun.
        """
        check_record(run)
        with self._attach_lock:
            if self._run is not None and self._run.run_id != run.run_id:
                raise WrongRun(f"this ledger serves run {self._run.run_id!r}, not {run.run_id!r}")
            if self._run is None:
                self._create(run)
                failpoint("ledger.open.after_create")
                self._attach(run.run_id)
            stored = self.run
            if not _changed(stored, run):
                return stored
            self._run = self._write(lambda txn: self._revise(txn, stored, run, accept))
            failpoint("ledger.open.after_revision")
            return self._run

    def attach(self, run_id: str) -> RunRecord:
        """Serve an existing run. Raises NotFound, RoleHeld."""
        with self._attach_lock:
            if self._run is not None and self._run.run_id != run_id:
                raise WrongRun(f"this ledger serves run {self._run.run_id!r}, not {run_id!r}")
            if self._run is None:
                self._attach(run_id)
            return self.run

    def run_ids(self) -> list[str]:
        """Runs this ledger holds, oldest first."""
        with self._database.reading() as conn:
            return list(conn.execute(sa.select(t.run.c.run_id).order_by(t.run.c.opened_at_us)).scalars())

    def server_term(self, run_id: str) -> tuple[str, float] | None:
        """Holder of the ``ledger`` role and the seconds its term still has (negative: over); None when nobody ever held it.

        Only reads, and leaves no transaction open: what a standby asks again and again. Raises Unavailable.
        """
        with self._database.reading() as conn:
            row = conn.execute(_fence_row(run_id, Role.LEDGER)).first()
            return None if row is None else (row.holder, (row.expires_at_us - self._database.now_us(conn)) / 1e6)

    def _create(self, run: RunRecord) -> None:
        def create(txn: Txn) -> None:
            if txn.conn.execute(sa.select(t.run.c.run_id).where(t.run.c.run_id == run.run_id)).first():
                return
            rules = rules_to_json(run.rules)
            content = {
                "run_id": run.run_id,
                "config_digest": run.config_digest,
                "config_json": run.config_json,
                "rules_json": rules,
            }
            txn.conn.execute(sa.insert(t.run).values(**content, manifest_json=run.manifest_json, opened_at_us=txn.now_us))
            txn.conn.execute(
                sa.insert(t.config_revision).values(
                    **content,
                    revision=run.revision,
                    from_step=1,
                    accepted_at_us=txn.now_us,
                    max_lag_versions=run.rules.max_lag_versions,
                )  # fmt: skip
            )
            txn.conn.execute(sa.insert(t.lineage).values(run_id=run.run_id, lineage=ROOT_LINEAGE, created_at_us=txn.now_us))

        self._write(create)

    def _attach(self, run_id: str) -> None:
        """Take the server's own role and load what is kept in memory; nothing is remembered unless it was committed."""
        asked = self._clock.monotonic()
        with self._database.reading() as conn:
            self._database.not_before(_newest_time_us(conn, run_id))

        def attach(txn: Txn) -> tuple[RunRecord, RoleTerm]:
            record = _load_run(txn.conn, run_id)
            previous = txn.conn.execute(_fence_row(run_id, Role.LEDGER)).first()
            supersede = previous.holder if previous is not None and self._database.exclusive else self._supersede
            term = self._take(txn, run_id, RoleTerm(Role.LEDGER, 0, self._holder, self._role_ttl_s), supersede)
            if previous is not None:
                _extend_leases(txn, record, previous.renewed_at_us)
            failpoint("ledger.open.before_commit")
            return record, term

        record, term = self._write(attach)
        failpoint("ledger.open.after_fence")
        with self._database.reading() as conn:
            lineages = load_lineages(conn, run_id)
            last = conn.execute(sa.select(sa.func.max(t.event.c.seq)).where(t.event.c.run_id == run_id)).scalar()
            # The run comes last: it opens the verbs, which need everything else.
            self._lineages = lineages
            self._kept = load_kept(conn, run_id)
            self._sequence = itertools.count((last if last is not None else -1) + 1)
            self._term_ends_s = asked + term.ttl_s
            self._run = record
            self._term = term
            self._watermark = self._find_watermark(conn, self._kept.low_watermark)
        self._write(lambda txn: self._event(txn, "server_attached", epoch=term.epoch, holder=term.holder))

    def _revise(self, txn: Txn, stored: RunRecord, offered: RunRecord, accept: Collection[str]) -> RunRecord:
        changed = _changed(stored, offered)
        if why := refusal(stored.run_id, changed, self._settled(txn.conn, stored, offered, changed), accept):
            raise ConfigMismatch(why)
        revision = stored.revision + 1
        step = self._last_planned(txn.conn, self._newest_lineage()) + 1
        txn.conn.execute(
            sa.insert(t.config_revision).values(
                run_id=stored.run_id,
                revision=revision,
                config_digest=offered.config_digest,
                config_json=offered.config_json,
                rules_json=rules_to_json(offered.rules),
                max_lag_versions=offered.rules.max_lag_versions,
                from_step=step,
                accepted_at_us=txn.now_us,
            )  # fmt: skip
        )
        # Whether the tasks are used up is for the feeder of the new configuration to say; other tasks begin at their first.
        begun_again = {"state_json": "{}"} if DATASET in changed else {}
        moved = sa.update(t.cursor).where(t.cursor.c.run_id == stored.run_id).values(exhausted=False, **begun_again)
        txn.conn.execute(moved)
        self._event(txn, "config_revised", revision=revision, from_step=step, changed=changed)
        txn.rings |= {"lease", "plan", "head"}
        return dataclasses.replace(offered, revision=revision, manifest_json=stored.manifest_json)

    def _settled(self, conn: sa.Connection, stored: RunRecord, offered: RunRecord, changed: Collection[str]) -> list[str]:
        """Names of what differs and may not; what nothing has been made from yet may."""
        issued, published = self._next_ordinal(conn, stored.run_id) > 0, self._head(conn) is not None
        open_yet = (() if issued else ONCE_ISSUED) + (() if published else ONCE_PUBLISHED)
        names = [name for name in changed if name in NEVER and name not in open_yet]
        rules = [(rule, name) for rule, name in SETTLED_RULES.items() if name not in changed]
        return names + [f"rules.{rule}" for rule, _ in rules if getattr(stored.rules, rule) != getattr(offered.rules, rule)]

    def acquire_role(self, role: Role, holder: str, ttl_s: float, supersede: str = "") -> RoleTerm:
        """Take the role with a larger epoch; the current holder gets its own term again.

        Idempotent: by (role, holder). Raises: RoleHeld.
        """
        check_term(role, holder, ttl_s)

        def acquire(txn: Txn) -> RoleTerm:
            term = self._take(txn, self.run.run_id, RoleTerm(role, 0, holder, ttl_s), supersede)
            failpoint("ledger.role.before_commit")
            txn.after_commit.append(lambda: failpoint("ledger.role.after_commit"))
            return term

        return self._write(acquire)

    def _take(self, txn: Txn, run_id: str, wanted: RoleTerm, supersede: str) -> RoleTerm:
        row = txn.conn.execute(_fence_row(run_id, wanted.role).with_for_update()).first()
        if row is None:
            term = dataclasses.replace(wanted, epoch=1)
        elif row.holder == wanted.holder and wanted.role is not Role.LEDGER:
            term = dataclasses.replace(wanted, epoch=row.epoch)
        elif row.expires_at_us <= txn.now_us or (supersede and supersede == row.holder):
            term = dataclasses.replace(wanted, epoch=row.epoch + 1)
        else:
            left_s = (row.expires_at_us - txn.now_us) / 1e6
            raise RoleHeld(
                f"role {wanted.role.value} is held by {row.holder} (epoch {row.epoch}) for another {left_s:.1f} s; "
                "wait, or name it as superseded when it is known to be dead"
            )
        store_term(txn, run_id, term, renewed=row is not None)
        if self._run is not None and (row is None or term.epoch != row.epoch):
            self._event(txn, "role_acquired", role=term.role.value, epoch=term.epoch, holder=term.holder)
        return term

    def renew_role(self, term: RoleTerm) -> RoleTerm:
        """Extend a held term. Raises Fenced when a newer epoch exists."""
        check_term(term.role, term.holder, term.ttl_s)

        def renew(txn: Txn) -> RoleTerm:
            self._check_term(txn, term, term.role)
            store_term(txn, self.run.run_id, term, renewed=True)
            return term

        return self._write(renew)

    def release_role(self, term: RoleTerm) -> None:
        """Give the role up; harmless when already lost."""
        check_role(term.role)

        def release(txn: Txn) -> None:
            try:
                self._check_term(txn, term, term.role)
            except Fenced:
                return
            expire_term(txn, self.run.run_id, term)

        self._write(release)


def _changed(stored: RunRecord, offered: RunRecord) -> dict[str, str]:
    """Fields that differ. Raises InvalidRequest for an offered object that has not the shape of a configuration."""
    try:
        return changed_fields(stored.config_json, offered.config_json)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"config_json is no resolved configuration ({type(error).__name__}: {error})") from None


def check_role(role: Role) -> None:
    """Refuse roles that nobody takes by call: the server's own is the server's to keep and to give up."""
    if role not in FENCED_ROLES:
        raise InvalidRequest(f"role {role.value!r} is not taken by call; only learner and feeder are")


def check_term(role: Role, holder: str, ttl_s: float) -> None:
    """Refuse terms that cannot be stored, or would keep a dead holder's role for ever."""
    check_role(role)
    if not holder or not 1e-6 <= ttl_s <= ROLE_TTL_S_MAX:
        raise InvalidRequest(f"a role needs a holder and 0 < ttl_s <= {ROLE_TTL_S_MAX:g}, got {ttl_s}")


def check_record(run: RunRecord) -> None:
    """Refuse a record whose texts are no JSON objects, or under whose rules no verb could work."""
    json_object(run.config_json, "config_json")
    json_object(run.manifest_json, "manifest_json")
    within(run.revision, "revision", 0, INT32_MAX)
    for field in dataclasses.fields(run.rules):
        value = getattr(run.rules, field.name)
        if isinstance(value, float) and not 0 <= value <= SECONDS_MAX:
            raise InvalidRequest(f"rules.{field.name} = {value}: must be a number between 0 and {SECONDS_MAX:g}")
        if type(value) is int and field.name != "config_seed":
            within(value, f"rules.{field.name}", 1 if field.name in COUNTS else 0, INT32_MAX)
    for name, known in WORDS.items():
        if getattr(run.rules, name) not in known:
            raise InvalidRequest(f"rules.{name} = {getattr(run.rules, name)[:40]!r}: must be one of {', '.join(known)}")


def _fence_row(run_id: str, role: Role) -> sa.Select:
    return sa.select(t.fence).where(t.fence.c.run_id == run_id, t.fence.c.role == role.value)


_STAMPED = (
    (t.fence, "renewed_at_us"), (t.plan, "planned_at_us"), (t.plan_outcome, "finished_at_us"),
    (t.policy_version, "published_at_us"), (t.checkpoint, "committed_at_us"), (t.cursor, "moved_at_us"),
)  # fmt: skip
"""Where the newest time of a run may stand: between two renewals of its term a server has written later ones elsewhere."""


def _newest_time_us(conn: sa.Connection, run_id: str) -> int:
    """The latest time the ledger has given out: a successor's clock, should it be behind, goes on from there.

    Samples are left out: their table is the largest, and nothing is ordered by the time of their acceptance.
    """
    newest = [
        sa.select(sa.func.max(table.c[name])).where(table.c.run_id == run_id).scalar_subquery() for table, name in _STAMPED
    ]
    e = t.event.c
    newest.append(sa.select(e.at_us).where(e.run_id == run_id).order_by(e.seq.desc()).limit(1).scalar_subquery())
    return max(value or 0 for value in conn.execute(sa.select(*newest)).one())


def expire_term(txn: Txn, run_id: str, term: RoleTerm) -> None:
    where = (t.fence.c.run_id == run_id, t.fence.c.role == term.role.value, t.fence.c.epoch == term.epoch)
    txn.conn.execute(sa.update(t.fence).where(*where).values(expires_at_us=txn.now_us, renewed_at_us=txn.now_us))


def _load_run(conn: sa.Connection, run_id: str) -> RunRecord:
    row = conn.execute(sa.select(t.run).where(t.run.c.run_id == run_id)).first()
    if row is None:
        raise NotFound(f"this ledger holds no run {run_id!r}; `rollbook run CONFIG.toml` opens it")
    c = t.config_revision.c
    newest = conn.execute(sa.select(t.config_revision).where(c.run_id == run_id).order_by(c.revision.desc()).limit(1)).one()
    return RunRecord(
        run_id, newest.config_digest, newest.config_json, newest.revision, rules_from_json(newest.rules_json), row.manifest_json
    )


def _extend_leases(txn: Txn, record: RunRecord, last_sign_us: int) -> None:
    """Leases that lived when the server was last seen get its downtime back, at most one TTL over their life (R11)."""
    ttl_us = int(record.rules.lease_ttl_s * 1_000_000)
    down_us = min(max(0, txn.now_us - last_sign_us), ttl_us)
    c = t.lease.c
    room = sa.case((c.extended_us + down_us > ttl_us, ttl_us - c.extended_us), else_=down_us)
    txn.conn.execute(
        sa.update(t.lease)
        .where(c.run_id == record.run_id, c.incarnation.is_not(None), c.expires_at_us > last_sign_us, c.extended_us < ttl_us)
        .values(expires_at_us=c.expires_at_us + room, extended_us=c.extended_us + room)
    )
