"""Every invariant as one query that returns its violations.

Owns the audit and most of its checks: name, promise, sentence, query; what forks may do stands in ``audit_forks``, failures and
the breaker in ``audit_failures``, what was let go in ``audit_retention``. Never repairs anything. Each check reads only rows, so
it says the same after any restart; the audit runs in one snapshot. Digests and chains are recomputed from the stored bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from rollbook.core.idempotency import chain_digest, genesis_digest, items_digest, sample_seed
from rollbook.core.records import PlanItem, SlotKey, Violation
from rollbook.core.staleness import fixed_step_of, fixed_version
from rollbook.ledger import audit_failures as _audit_failures  # noqa: F401  their checks enter the list
from rollbook.ledger import audit_forks as _audit_forks  # noqa: F401
from rollbook.ledger import audit_retention as _audit_retention  # noqa: F401
from rollbook.ledger import schema as t
from rollbook.ledger.checks import CHECKS, Subject, both, check, missing, same_slot, slot_ids
from rollbook.ledger.planning import STORED, stored_digest

__all__ = ["CHECKS", "Subject", "run_audit"]

IDS_MAX = 1000
"""Ids reported per finding."""


def run_audit(subject: Subject) -> list[Violation]:
    """Run every check; an empty list means clean."""
    out = []
    for c in CHECKS:
        for detail, ids in c.find(subject):
            out.append(Violation(c.promise, c.name, detail, tuple(ids)[:IDS_MAX]))
    return out


@check("sample_has_payload", "P1", "Every accepted sample has its bytes, and no bytes are without a sample.")
def _sample_has_payload(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    if ids := missing(s, t.sample, t.payload):
        yield "samples without payload", ids
    if ids := missing(s, t.payload, t.sample):
        yield "payloads without sample", ids


@check("payload_digest", "P1", "The digest recomputed from the stored bytes is the one that was acknowledged (I6).")
def _payload_digest(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    wrong = []
    query = STORED.where(s.here(t.sample)).order_by(t.sample.c.ordinal, t.sample.c.sibling)
    for row in s.conn.execution_options(yield_per=64).execute(query):
        if stored_digest(row) != row.payload_digest:
            wrong.append(f"{row.ordinal}.{row.sibling}")
    if wrong:
        yield "stored bytes differ from the acknowledged digest", wrong


@check("sample_in_slot", "P2", "Every sample, verdict and lease belongs to an issued slot; one sample per slot.")
def _sample_in_slot(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    for table in (t.sample, t.verdict, t.lease):
        if ids := missing(s, table, t.slot):
            yield f"{table.name} rows without an issued slot", ids
    c = t.sample.c
    twice = s.rows(
        sa.select(c.ordinal, c.sibling).where(s.here(t.sample)).group_by(c.ordinal, c.sibling).having(sa.func.count() > 1)
    )
    if twice:
        yield "slots with more than one sample", slot_ids(twice)


@check("trained_once", "P3", "A sample is in at most one plan along every lineage's ancestry.")
def _trained_once(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c = t.plan_item.c
    for lineage in s.lineages:
        rows = s.rows(
            sa.select(c.ordinal, c.sibling).where(s.here(t.plan_item), s.along(c.lineage, c.step, lineage))
            .group_by(c.ordinal, c.sibling).having(sa.func.count() > 1)
        )  # fmt: skip
        if rows:
            yield f"samples planned more than once in lineage {lineage}", slot_ids(rows)


@check("steps_gapless", "P3", "Planned steps are 1, 2, 3, … without a gap; outcomes exist for a prefix of them.")
def _steps_gapless(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    for lineage in s.lineages:
        for table in (t.plan, t.plan_outcome):
            c = table.c
            steps = [
                r.step for r in s.rows(
                    sa.select(c.step).where(s.here(table), s.along(c.lineage, c.step, lineage)).order_by(c.step)
                )
            ]  # fmt: skip
            gaps = [str(i) for i in range(1, (steps[-1] if steps else 0) + 1) if i not in set(steps)]
            if gaps:
                yield f"{table.name}: steps missing in lineage {lineage}", gaps


@check("chain_digest", "P4", "Items, item digests and the chain of digests recompute to what each plan stores.")
def _chain_digest(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    p, i = t.plan.c, t.plan_item.c
    for lineage in s.lineages:
        wrong = []
        previous = genesis_digest(s.run.run_id, s.run.rules.config_seed)
        for plan in s.rows(sa.select(t.plan).where(s.here(t.plan), s.along(p.lineage, p.step, lineage)).order_by(p.step)):
            rows = s.rows(
                sa.select(t.plan_item).where(s.here(t.plan_item), i.lineage == plan.lineage, i.step == plan.step).order_by(i.pos)
            )
            items = [PlanItem(r.pos, SlotKey(r.ordinal, r.sibling), r.payload_digest, r.reward, bool(r.valid)) for r in rows]
            content = items_digest(items)
            if plan.step < s.kept.replayable_from:  # some of its items are gone; what they digested to is still in the chain
                if chain_digest(previous, plan.step, plan.items_digest) != plan.chain_digest:
                    wrong.append(f"{plan.lineage}.{plan.step}")
                previous = plan.chain_digest
                continue
            in_order = [r.pos for r in rows] == list(range(plan.n_items)) and [x.key for x in items] == sorted(
                x.key for x in items
            )
            if not in_order or content != plan.items_digest or chain_digest(previous, plan.step, content) != plan.chain_digest:
                wrong.append(f"{plan.lineage}.{plan.step}")
            previous = plan.chain_digest
        if wrong:
            yield f"plans whose content does not give their digests (lineage {lineage})", wrong


@check("item_matches_sample", "P4", "Every plan item carries its sample's digest and reward.")
def _item_matches_sample(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    i, c = t.plan_item.c, t.sample.c
    same = sa.and_(
        same_slot(i, c), c.payload_digest == i.payload_digest,
        sa.or_(c.reward == i.reward, sa.and_(c.reward.is_(None), i.reward.is_(None))),
    )  # fmt: skip
    rows = s.rows(sa.select(i.ordinal, i.sibling).where(s.here(t.plan_item), ~sa.exists().where(same)))
    if rows:
        yield "plan items that differ from their sample", slot_ids(rows)


@check("checkpoint_chain", "P4", "Every committed checkpoint carries the ledger's chain digest at its step (I8).")
def _checkpoint_chain(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c, p = t.checkpoint.c, t.plan.c
    wrong = []
    for row in s.rows(sa.select(t.checkpoint).where(s.here(t.checkpoint), c.state == "committed").order_by(c.lineage, c.step)):
        expected: str | None = genesis_digest(s.run.run_id, s.run.rules.config_seed)
        if row.step > 0:
            expected = s.conn.execute(
                sa.select(p.chain_digest).where(s.here(t.plan), s.along(p.lineage, p.step, row.lineage), p.step == row.step)
                .order_by(p.lineage.desc()).limit(1)
            ).scalar_one_or_none()  # fmt: skip
        if row.chain_digest != expected:
            wrong.append(f"{row.lineage}.{row.step}")
    if wrong:
        yield "checkpoints of another history", wrong


@check(
    "versions_possible", "P5", "No planned token is from the future of its step; fixed-lag samples have exactly the due version."
)
def _versions_possible(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    i, p, c = t.plan_item.c, t.plan.c, t.sample.c
    rows = s.rows(
        sa.select(i.ordinal, i.sibling)
        .join(t.plan, sa.and_(p.run_id == i.run_id, p.lineage == i.lineage, p.step == i.step))
        .join(t.sample, same_slot(c, i))
        .where(s.here(t.plan_item), c.version_max > p.base_version)
    )
    if rows:
        yield "planned samples of a version newer than the step's base", slot_ids(rows)
    rules = s.run.rules
    if rules.schedule.value == "fixed":
        off = []
        for row in s.rows(sa.select(c.ordinal, c.sibling, c.version_min, c.version_max).where(s.here(t.sample))):
            due = fixed_version(fixed_step_of(row.ordinal, rules.groups_per_step), rules.fixed_lag_versions)
            if not row.version_min == row.version_max == due:
                off.append(row)
        if off:
            yield "samples not generated under the version their step asks for", slot_ids(off)


@check("reward_rule", "P6", "A reward stands exactly where a verifier gave one; only rewarded members are valid.")
def _reward_rule(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c, i = t.sample.c, t.plan_item.c
    given = c.reward_status == "given"
    rows = s.rows(
        sa.select(c.ordinal, c.sibling).where(
            s.here(t.sample), sa.or_(sa.and_(given, c.reward.is_(None)), sa.and_(~given, c.reward.is_not(None)))
        )
    )
    if rows:
        yield "samples whose reward and reward_status contradict each other", slot_ids(rows)
    rows = s.rows(
        sa.select(i.ordinal, i.sibling).where(
            s.here(t.plan_item), sa.or_(sa.and_(i.valid, i.reward.is_(None)), sa.and_(~i.valid, i.reward.is_not(None)))
        )
    )
    if rows:
        yield "plan items valid without a reward, or the other way round", slot_ids(rows)


@check("verdict_excludes_plan", "P7", "No slot has both a verdict and a place in a plan.")
def _verdict_excludes_plan(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    if ids := both(s, t.verdict, t.plan_item):
        yield "slots with a verdict that are planned too", ids


@check("ordinals_gapless", "P7", "Ordinals are 0, 1, 2, …; every group has all its slots, and the cursors stand behind them.")
def _ordinals_gapless(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    g, slot, c = t.prompt_group.c, t.slot.c, t.cursor.c
    n, last = s.conn.execute(sa.select(sa.func.count(), sa.func.max(g.ordinal)).where(s.here(t.prompt_group))).one()
    n += s.kept.low_watermark
    if n and last != n - 1:
        yield f"{n} groups, but the last ordinal is {last}", [str(last)]
    counts = (
        sa.select(sa.func.count()).where(slot.run_id == g.run_id, slot.ordinal == g.ordinal, slot.sibling < g.n_siblings)
        .correlate(t.prompt_group).scalar_subquery()
    )  # fmt: skip
    short = s.rows(sa.select(g.ordinal).where(s.here(t.prompt_group), counts != g.n_siblings))
    if short:
        yield "groups without all their slots", [str(r.ordinal) for r in short]
    issued = sa.select(sa.func.coalesce(sa.func.sum(g.n_siblings), 0)).where(s.here(t.prompt_group))
    n_slots = s.conn.execute(sa.select(sa.func.count()).where(s.here(t.slot))).scalar_one()
    if n_slots != s.conn.execute(issued).scalar_one():
        yield "the number of slots is not the sum over the groups", [str(n_slots)]
    off = s.rows(sa.select(c.stream).where(s.here(t.cursor), c.next_ordinal != n))
    if off:
        yield f"cursors that do not stand at ordinal {n}", [r.stream for r in off]


@check("conservation", "P7", "issued = pending + leased + submitted + planned + verdicts: every slot is in exactly one state.")
def _conservation(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    slot, i = t.slot.c, t.plan_item.c
    for lineage in s.lineages[-1:]:
        leased = sa.exists().where(same_slot(t.lease.c, slot))
        sampled = sa.exists().where(same_slot(t.sample.c, slot))
        judged = sa.exists().where(same_slot(t.verdict.c, slot))
        planned = sa.exists().where(same_slot(i, slot), s.along(i.lineage, i.step, lineage))
        for detail, condition in (
            ("slots with a lease that have a sample or a verdict already", sa.and_(leased, sa.or_(sampled, judged))),
            ("slots planned without a sample", sa.and_(planned, ~sampled)),
        ):
            rows = s.rows(sa.select(slot.ordinal, slot.sibling).where(s.here(t.slot), condition))
            if rows:
                yield detail, slot_ids(rows)


@check("groups_planned_whole", "P7", "All slots of a planned group that have no verdict are in the same plan.")
def _groups_planned_whole(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    i, slot, p = t.plan_item.c, t.slot.c, t.plan.c
    for lineage in s.lineages:
        along = s.along(i.lineage, i.step, lineage)
        groups = sa.select(i.ordinal).where(s.here(t.plan_item), along).distinct()
        rows = s.rows(
            sa.select(slot.ordinal, slot.sibling).where(
                s.here(t.slot),
                slot.ordinal.in_(groups),
                ~sa.exists().where(same_slot(t.verdict.c, slot)),
                ~sa.exists().where(same_slot(i, slot), along),
            )  # fmt: skip
        )
        if rows:
            yield f"members left out of their group's plan (lineage {lineage})", slot_ids(rows)
        split = s.rows(
            sa.select(i.ordinal)
            .where(s.here(t.plan_item), along)
            .group_by(i.ordinal)
            .having(sa.func.count(sa.distinct(i.step)) > 1)
        )
        if split:
            yield f"groups spread over several steps (lineage {lineage})", [str(r.ordinal) for r in split]
    n_groups = (
        sa.select(sa.func.count(sa.distinct(i.ordinal))).where(i.run_id == p.run_id, i.lineage == p.lineage, i.step == p.step)
        .correlate(t.plan).scalar_subquery()
    )  # fmt: skip
    whole = p.step >= s.kept.replayable_from
    wrong = s.rows(sa.select(p.lineage, p.step).where(s.here(t.plan), whole, n_groups != p.n_groups))
    if wrong:
        yield "plans whose group count is not that of their items", [f"{r.lineage}.{r.step}" for r in wrong]


@check("refills", "P7", "A refill names a closed group, has its prompt, and no group is refilled twice.")
def _refills(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    g = t.prompt_group.c
    old = t.prompt_group.alias("old")
    v = t.verdict.c
    judged = (
        sa.select(sa.func.count()).where(v.run_id == old.c.run_id, v.ordinal == old.c.ordinal).correlate(old).scalar_subquery()
    )
    fits = sa.exists().where(
        old.c.run_id == g.run_id, old.c.ordinal == g.refills, old.c.prompt_ids == g.prompt_ids, old.c.task_json == g.task_json,
        judged == old.c.n_siblings,
    )  # fmt: skip
    rows = s.rows(sa.select(g.ordinal).where(s.here(t.prompt_group), g.refills >= s.kept.low_watermark, ~fits))
    if rows:
        yield "refills of a group that is not closed or has another prompt", [str(r.ordinal) for r in rows]
    twice = s.rows(
        sa.select(g.refills).where(s.here(t.prompt_group), g.refills.is_not(None)).group_by(g.refills).having(sa.func.count() > 1)
    )
    if twice:
        yield "groups refilled more than once", [str(r.refills) for r in twice]


@check("epochs", "P8", "No row carries an epoch that its role has not reached, and epochs never fall from step to step (I7).")
def _epochs(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    f = t.fence.c
    newest = s.conn.execute(sa.select(f.epoch).where(s.here(t.fence), f.role == "learner")).scalar_one_or_none() or 0
    for table, number in ((t.plan, "step"), (t.plan_outcome, "step"), (t.policy_version, "version"), (t.checkpoint, "step")):
        c = table.c
        ahead = s.rows(sa.select(c.lineage, c[number].label("n")).where(s.here(table), c.epoch > newest))
        if ahead:
            yield f"{table.name} rows with an epoch nobody held", [f"{r.lineage}.{r.n}" for r in ahead]
        if table is t.checkpoint:
            continue  # a damaged one is replaced by a later epoch
        later = table.alias("later")
        falls = s.rows(
            sa.select(c.lineage, c[number].label("n")).where(
                s.here(table), sa.exists().where(later.c.run_id == c.run_id, later.c.lineage == c.lineage,
                                                 later.c[number] == c[number] + 1, later.c.epoch < c.epoch)
            )
        )  # fmt: skip
        if falls:
            yield f"{table.name} rows followed by an older epoch", [f"{r.lineage}.{r.n}" for r in falls]


@check("lease_tokens", "P8", "Lease tokens of a slot are granted strictly upwards, and no sample has a token never granted.")
def _lease_tokens(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    e, c = t.event.c, t.sample.c
    granted = sa.exists().where(
        e.run_id == c.run_id, e.ordinal == c.ordinal, e.sibling == c.sibling, e.kind == "lease_granted", e.token == c.lease_token
    )
    rows = s.rows(sa.select(c.ordinal, c.sibling).where(s.here(t.sample), ~granted))
    if rows:
        yield "samples under a lease token that was never granted", slot_ids(rows)
    twice = s.rows(
        sa.select(e.ordinal, e.sibling).where(s.here(t.event), e.kind == "lease_granted")
        .group_by(e.ordinal, e.sibling, e.token).having(sa.func.count() > 1)
    )  # fmt: skip
    if twice:
        yield "slots whose lease token was granted twice", slot_ids(twice)
    lease = t.lease.c
    newest = (
        sa.select(sa.func.max(e.token))
        .where(e.run_id == lease.run_id, e.ordinal == lease.ordinal, e.sibling == lease.sibling, e.kind == "lease_granted")
        .correlate(t.lease).scalar_subquery()
    )  # fmt: skip
    behind = s.rows(sa.select(lease.ordinal, lease.sibling).where(s.here(t.lease), sa.func.coalesce(newest, 0) != lease.token))
    if behind:
        yield "leases whose token is not the newest granted one", slot_ids(behind)


@check("versions_gapless", "P11", "Versions are 0, 1, 2, … and version s has the outcome of step s before it (R8).")
def _versions_gapless(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c, o = t.policy_version.c, t.plan_outcome.c
    for lineage in s.lineages:
        published = s.rows(
            sa.select(c.version, c.published_at_us).where(s.here(t.policy_version), s.along(c.lineage, c.version, lineage))
            .order_by(c.version)
        )  # fmt: skip
        ended = {
            r.step: r.finished_at_us
            for r in s.rows(
                sa.select(o.step, o.finished_at_us).where(s.here(t.plan_outcome), s.along(o.lineage, o.step, lineage))
            )
        }
        numbers = [r.version for r in published]
        gaps = [str(v) for v in range((numbers[-1] if numbers else -1) + 1) if v not in set(numbers)]
        if gaps:
            yield f"versions missing in lineage {lineage}", gaps
        early = [str(r.version) for r in published if r.version > 0 and r.version not in ended]
        if early:
            yield f"versions published without the outcome of their step (lineage {lineage})", early


@check("seeds", "P12", "Every slot's seed is the function of configuration seed and key that R2 states.")
def _seeds(s: Subject) -> Iterator[tuple[str, Sequence[str]]]:
    c, seed = t.slot.c, s.run.rules.config_seed
    wrong = [
        row for row in s.conn.execute(sa.select(c.ordinal, c.sibling, c.seed).where(s.here(t.slot)))
        if sample_seed(seed, SlotKey(row.ordinal, row.sibling)) != row.seed
    ]  # fmt: skip
    if wrong:
        yield "slots whose seed is not derived from their key", slot_ids(wrong)
