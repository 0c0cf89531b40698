"""Which tasks are the cause of what happened to their attempts, and how they are told from tasks that only stood beside them.

Owns the questions whether a task whose attempts are spent is poison, which slots have to be tried alone before anybody can
know, and what was taken out. Never writes. A worker that dies takes every slot in its hands along, so a death alone accuses
nobody: a slot whose worker has died at all attempts but the last is leased alone, to a process that has brought a sample and
holds nothing else, or to any when there is nothing else to lease. Innocent slots get their sample there; a healthy process that
dies then dies of that task. Upholds P9 and R14.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from rollbook.core.records import Blame, RewardStatus, SlotKey, VerdictKind
from rollbook.core.statuses import ENGINE_FAILED, WORKER_DIED
from rollbook.ledger import schema as t
from rollbook.ledger.breaker import Breaker, is_silent

ALIVE_TTLS = 2
"""A worker is alive that was heard of within so many lease TTLs."""
OF_LATE_S = 600.0
"""How long before a task's first death others are remembered, as long as a supervisor by default remembers restarts."""
NEWEST_GROUPS = 256
"""Groups behind the watermark whose samples are looked through for a worker's own."""
QUARANTINES_SHOWN = 8
_TASK_FAILS = (RewardStatus.INFRA_ERROR.value, RewardStatus.VERIFIER_ERROR.value, RewardStatus.TIMEOUT.value)
Offer = tuple[SlotKey, int, int, bool]
"""What may be leased: slot, token, attempt, whether it is new."""
_ENDED = ("incarnation", "status", "blame", "reason", "n_tokens")


class Poison(Breaker):
    """What the rows of failed attempts say of a task."""

    def _poisoned(self, conn: sa.Connection, now_us: int, ordinal: int, failures: Sequence[Any]) -> set[str] | None:
        """The workers it has killed, where it is poison: it failed, or they died, wherever it was tried, and on nothing else.

        None where it is not poison (R14, P9).
        Failures count by workers, whatever their incarnation, that have brought samples of other groups since; deaths by
        processes, of which the last had brought one itself. It takes as many as a slot has attempts, but two at least, since one
        alone cannot tell a poisonous task from a sick worker. Deaths do not count where a slot of another group was there at each
        of them, or where of late one worker in as many has died at random. Where fewer workers live than a slot has attempts, a
        failure on all of these is enough. While the breaker is open every task fails, so none is to blame.
        """
        dead = self._died_over(conn, failures)
        failed = {f.incarnation for f in failures if f.status in _TASK_FAILS and f.blame == Blame.INFRA.value} - dead
        if len(dead | failed) < 2 or self._breaker(conn).is_open:
            return None
        since_us = min(f.reported_at_us for f in failures if f.incarnation in dead | failed)
        s, w = t.sample.c, t.worker.c
        well = conn.execute(
            sa.select(s.incarnation).distinct().where(
                s.run_id == self.run.run_id, s.ordinal >= self._watermark, s.ordinal != ordinal, s.accepted_at_us > since_us
            )
        ).scalars().all()  # fmt: skip
        alive_us = now_us - int(ALIVE_TTLS * self.rules.lease_ttl_s * 1e6)
        names, alive = {}, set()
        asked = {*well, *dead, *failed}
        here = (w.run_id == self.run.run_id, sa.or_(w.incarnation.in_(asked), w.seen_at_us >= alive_us))
        for row in conn.execute(sa.select(w.incarnation, w.host, w.labels_json, w.seen_at_us).where(*here)):
            names[row.incarnation] = _name_of(row)
            alive |= {_name_of(row)} if row.seen_at_us >= alive_us else set()
        healthy = {names[incarnation] for incarnation in well if incarnation in names}
        convinced = healthy & {names[incarnation] for incarnation in failed if incarnation in names}
        if dead:
            last = max((f for f in failures if f.incarnation in dead), key=lambda f: f.lease_token).incarnation
            storm = self._died_at_random(conn, ordinal, since_us) * self.rules.attempts_max >= len(alive | healthy)
            if storm or not self._is_proven(conn, last, ordinal) or self._others_at(conn, ordinal, dead, since_us):
                dead = set()
        everywhere = len(convinced) > 1 and alive & healthy <= convinced
        return dead if everywhere or len(convinced) + len(dead) >= max(2, self.rules.attempts_max) else None

    def _died_over(self, conn: sa.Connection, failures: Sequence[Any]) -> set[str]:
        """Incarnations whose process ended over a slot: told so, or silent for a TTL by then and not heard of since."""
        told = {f.incarnation for f in failures if _is_death(f) and not is_silent(f)}
        ttl_us = int(self.rules.lease_ttl_s * 1e6)
        silent = {f.incarnation: f.reported_at_us - ttl_us for f in failures if is_silent(f)}
        if silent:
            w = t.worker.c
            seen = sa.select(w.incarnation, w.seen_at_us).where(w.run_id == self.run.run_id, w.incarnation.in_(silent))
            told |= {row.incarnation for row in conn.execute(seen) if row.seen_at_us <= silent[row.incarnation]}
        return told

    def _died_at_random(self, conn: sa.Connection, ordinal: int, since_us: int) -> int:
        """How many workers have died of late over nothing that lost another one, and not over this group."""
        f = t.failure.c
        rows = conn.execute(
            sa.select(f.ordinal, f.sibling, *(f[name] for name in _ENDED)).where(
                f.run_id == self.run.run_id, f.reported_at_us >= since_us - int(OF_LATE_S * 1e6),
                f.status == RewardStatus.NO_VERDICT.value,
            )
        )  # fmt: skip
        over: dict[tuple[int, int], set[str]] = defaultdict(set)
        for row in rows:
            if _is_death(row):
                over[row.ordinal, row.sibling].add(row.incarnation)
        again = {i for (group, _), dead in over.items() if group == ordinal or len(dead) > 1 for i in dead}
        return len({incarnation for dead in over.values() for incarnation in dead} - again)

    def _others_at(self, conn: sa.Connection, ordinal: int, incarnations: Collection[str], since_us: int) -> bool:
        """Whether a slot of another group was in the hands of all these workers when they died."""
        f, earlier_us = t.failure.c, since_us - int(self.rules.lease_ttl_s * 1e6)  # one death may end leases one after another
        there = (
            sa.select(f.ordinal)
            .where(
                f.run_id == self.run.run_id, f.reported_at_us >= earlier_us, f.ordinal != ordinal,
                f.incarnation.in_(incarnations), f.status == RewardStatus.NO_VERDICT.value,
            )
            .group_by(f.ordinal, f.sibling)
            .having(sa.func.count(sa.distinct(f.incarnation)) >= len(incarnations))
        )  # fmt: skip
        return conn.execute(there.limit(1)).first() is not None

    def _set_apart(self, conn: sa.Connection, slots: Sequence[Offer]) -> tuple[list[Offer], list[Offer]]:
        """Free slots without the suspects, and these: all but their last attempt are over, and at each a worker fell silent."""
        before = self.rules.attempts_max - 1
        last = [(key.ordinal, key.sibling) for key, _, attempt, _ in slots if attempt > before > 0]
        ended: dict[tuple[int, int], set[str]] = defaultdict(set)
        columns = ("ordinal", "sibling", *_ENDED)
        for row in self._database.rows_by_slot(conn, t.failure, columns, self.run.run_id, last) if last else ():
            if _is_death(row):
                ended[row.ordinal, row.sibling].add(row.incarnation)
        suspects = {key for key, incarnations in ended.items() if len(incarnations) >= before}
        apart = [slot for slot in slots if slot[0] in suspects]
        return [slot for slot in slots if slot[0] not in suspects] if apart else list(slots), apart

    def _quarantines(self, conn: sa.Connection) -> list[dict[str, Any]]:
        """The newest groups that were taken out, by a rule or by an operator, newest first."""
        taken_out = t.event.c.detail_json.contains(f'"verdict": "{VerdictKind.QUARANTINED.value}"')
        rows = self._newest_events(conn, ("group_closed",), QUARANTINES_SHOWN, taken_out)
        return [{"ordinal": r.ordinal, "at_s": r.at_us / 1e6, "reason": json.loads(r.detail_json)["reason"]} for r in rows]

    def _is_proven(self, conn: sa.Connection, incarnation: str, ordinal: int = -1) -> bool:
        """Whether the worker has brought one of the newest samples, of another group than this one."""
        s, low = t.sample.c, self._watermark - NEWEST_GROUPS
        brought = sa.select(s.ordinal).where(
            s.run_id == self.run.run_id, s.ordinal >= low, s.ordinal != ordinal, s.incarnation == incarnation
        )
        return conn.execute(brought.limit(1)).first() is not None

    def _may_try_alone(self, conn: sa.Connection, incarnation: str, has_others: bool) -> bool:
        """Whether a suspect may be leased to this worker, which holds nothing, while there are other slots for it or none."""
        c = t.lease.c
        held = sa.select(c.ordinal).where(c.run_id == self.run.run_id, c.incarnation == incarnation)
        is_idle = conn.execute(held.limit(1)).first() is None
        return is_idle and (not has_others or self._is_proven(conn, incarnation))


def _is_death(row: Any) -> bool:
    """Whether an attempt ended with its worker's process, as far as its row of ``failure`` says."""
    ended = is_silent(row) or row.reason == WORKER_DIED or row.reason.startswith(ENGINE_FAILED)
    return bool(row.status == RewardStatus.NO_VERDICT.value and row.blame != Blame.MODEL.value and ended)


def _name_of(worker: Any) -> tuple[str, str]:
    """What stays of a worker when it starts again; its incarnation where it has no name."""
    try:
        labels = json.loads(worker.labels_json)
    except ValueError:
        labels = {}
    name = labels.get("name") if isinstance(labels, dict) else None
    return worker.host, str(name or worker.incarnation)
