"""Finished rollouts: validation, idempotency, one batched transaction.

Owns ``submit_samples`` and every row of ``sample`` and ``payload``. Never stores an answer for a refused submission: only what
was accepted is remembered, so a corrected retry is judged afresh. Upholds P1 (durable before it returns), P2 (the sample row is
its own receipt: same key and content is replayed, other content is a counted conflict), P6 (reward only with status ``given``)
and R11 (a late submit is salvaged while its slot is empty and its versions admissible).

A lease row exists exactly while its slot has neither sample nor verdict. The common case (every slot still leased) therefore
needs one look-up per call; receipts, verdicts and unknown slots are looked up only for slots without a lease row.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollbook.core.bounds import INT32_MAX
from rollbook.core.errors import InvalidRequest
from rollbook.core.idempotency import payload_digest
from rollbook.core.records import (
    RewardStatus,
    Submission,
    SubmitOutcome,
    SubmitResult,
    Trajectory,
    VerdictKind,
)
from rollbook.core.sandboxing import blame_of
from rollbook.core.staleness import fixed_step_of, fixed_version, head_lag, oldest_effective
from rollbook.ledger import schema as t
from rollbook.ledger.base import storable
from rollbook.ledger.breaker import counts
from rollbook.ledger.leasing import Leasing
from rollbook.ledger.writer import Txn
from rollbook.observe.failpoints import failpoint

SUBMISSIONS_MAX = 4096
LOGPROB_MAX = 1e-3
"""A log-prob may exceed 0 by rounding only."""


@dataclass(slots=True)
class _Checked:
    """A submission that passed the checks which need no database."""

    item: Submission
    digest: str
    version_min: int
    version_max: int


@dataclass(slots=True)
class _View:
    """What the ledger holds about the slots of one batch; kept up to date while the batch is worked through."""

    leases: dict[tuple[int, int], Any]
    samples: dict[tuple[int, int], Any]
    verdicts: dict[tuple[int, int], Any]
    known: set[tuple[int, int]]
    heads: dict[int, int]
    """Newest version by lineage; -1 where none is published."""
    next_step: int


def check_trajectory(trajectory: Trajectory, tokens_max: int, payload_bytes_max: int) -> tuple[str, int, int]:
    """(reason it is refused or "", smallest version, largest version) of a trajectory's bytes."""
    n_bytes = len(trajectory.token_ids)
    n = n_bytes // 4
    if n == 0 or n_bytes % 4:
        return "token_ids: needs at least one whole int32", 0, 0
    if len(trajectory.logprobs) != n_bytes or len(trajectory.versions) != n_bytes:
        return (
            f"lengths differ: {n} tokens, {len(trajectory.logprobs) / 4:g} logprobs, {len(trajectory.versions) / 4:g} versions",
            0,
            0,
        )
    if n > tokens_max:
        return f"{n} tokens; at most {tokens_max}", 0, 0
    size = 3 * n_bytes + len(trajectory.loss_mask)
    if size > payload_bytes_max:
        return f"{size} bytes; at most {payload_bytes_max} beside the evidence (ledger.payload_bytes_max)", 0, 0
    if trajectory.token_ids[3::4].translate(None, _POSITIVE):
        return "a token id is negative", 0, 0
    if reason := _check_logprobs(trajectory.logprobs):
        return reason, 0, 0
    if trajectory.loss_mask:
        if len(trajectory.loss_mask) != n:
            return f"lengths differ: {n} tokens, {len(trajectory.loss_mask)} mask entries", 0, 0
        if trajectory.loss_mask.translate(None, b"\x00\x01"):
            return "loss_mask holds values other than 0 and 1", 0, 0
        if b"\x01" not in trajectory.loss_mask:
            return "every token is masked: nothing here was sampled by the policy", 0, 0
    first = trajectory.versions[:4]
    if trajectory.versions == first * n:
        version: int = struct.unpack("<i", first)[0]
        return "", version, version
    versions = array("i", trajectory.versions)
    return "", min(versions), max(versions)


_POSITIVE = bytes(range(0x80))
"""High bytes of int32 values that are not negative."""
_ORDINARY = bytes(range(0x80, 0xFF))
"""High bytes of float32 values that are negative and finite (all but the largest exponents)."""


def _check_logprobs(data: bytes) -> str:
    """Why these float32 LE log-probs cannot be right; empty when every one is finite and at most LOGPROB_MAX."""
    if not data[3::4].translate(None, _ORDINARY):
        return ""
    values = array("f", data)
    if not math.isfinite(sum(values)):
        return "a log-prob is not finite"
    if (largest := max(values)) > LOGPROB_MAX:
        return f"a log-prob is {largest:g}; a probability is at most 1"
    return ""


def pack_versions(trajectory: Trajectory) -> bytes:
    """One int32 when every token has the same version, else the array as it is."""
    first = trajectory.versions[:4]
    return first if trajectory.versions == first * trajectory.n_tokens else trajectory.versions


def unpack_versions(stored: bytes, n_tokens: int) -> bytes:
    """Inverse of ``pack_versions``."""
    return stored * n_tokens if len(stored) == 4 else stored


class Submitting(Leasing):
    """The verb that makes rollouts durable."""

    _n_touched: int = 0
    """Groups that samples were stored for, counted once for each transaction."""
    _plan_due_at: int = 0
    """The same number from which on the next step may have all its groups; below it nobody need look."""

    def submit_samples(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        """Store finished rollouts; one outcome per item, in order.

        Transaction: samples, payloads, leases, events (calls that wait together share it). Idempotent: by submit key.
        """
        if len(submissions) > SUBMISSIONS_MAX:
            raise InvalidRequest(f"{len(submissions)} samples in one call; at most {SUBMISSIONS_MAX}")
        results: list[SubmitResult | None] = [None] * len(submissions)
        checked: list[tuple[int, _Checked]] = []
        for i, item in enumerate(submissions):
            reason, low, high = self._check(item)
            if reason:
                results[i] = SubmitResult(item.key, SubmitOutcome.INVALID, reason)
            else:
                checked.append((i, _Checked(item, payload_digest(item), low, high)))
        if checked:
            self._refuse_when_fenced()
            answers = self._writer.run_merged(self._submit_batch, [c for _, c in checked])
            for (i, _), answer in zip(checked, answers, strict=True):
                results[i] = answer
        return [r for r in results if r is not None]

    def _check(self, item: Submission) -> tuple[str, int, int]:
        if not 0 <= item.key.sibling <= INT32_MAX:
            return f"the run has no slot {item.key}", 0, 0
        given = item.reward_status is RewardStatus.GIVEN
        if given != (item.reward is not None):
            return f"reward {item.reward!r} with status {item.reward_status.value!r}: a value goes with 'given' only", 0, 0
        if item.reward is not None and not math.isfinite(item.reward):
            return f"reward {item.reward!r} is not finite", 0, 0
        if not (math.isfinite(item.generate_s) and math.isfinite(item.verify_s)):
            return "generate_s and verify_s must be finite", 0, 0
        room = self._payload_bytes_max - len(item.evidence_json)
        return check_trajectory(item.trajectory, self.rules.tokens_max, room)

    def _submit_batch(self, txn: Txn, calls: list[list[_Checked]]) -> list[list[SubmitResult]]:
        """Judge and store the samples of several calls together."""
        everything = [c for call in calls for c in call]
        view = self._view(txn.conn, everything)
        accepted: list[tuple[_Checked, Any, bool]] = []
        events: list[dict[str, object]] = []
        freed: list[Any] = []
        results = []
        for c in everything:
            outcome, reason, lease = self._judge(view, c, txn.now_us)
            key = c.item.key
            if outcome is SubmitOutcome.ACCEPTED:
                salvaged = reason != ""
                accepted.append((c, lease, salvaged))
                view.samples[key] = _receipt(c)
                del view.leases[key]
            if outcome is not SubmitOutcome.ACCEPTED or reason:
                events.append(self._submit_event(txn, c.item, outcome, reason))
            if outcome is SubmitOutcome.REFUSED and _holds(lease, c.item):
                freed.append(lease)
            results.append(SubmitResult(c.item.key, outcome, reason))
        self._store(txn, accepted)
        self._events(txn, events)
        if freed:
            self._free(txn, freed, counts=False)
            self._drop_outdated(txn, freed)
            txn.rings.add("lease")
        if accepted:
            if any(counts(c.item.reward_status.value, _blame(c.item)) for c, _, _ in accepted):
                self._trip(txn)
            self._recover(txn)
        if unrewarded := sorted({c.item.key.ordinal for c, _, _ in accepted if c.item.reward is None}):
            self._settle_groups(txn, unrewarded)
        out, start = [], 0
        for call in calls:
            out.append(results[start : start + len(call)])
            start += len(call)
        return out

    def _drop_outdated(self, txn: Txn, refused: Sequence[Any]) -> None:
        """Close and refill groups whose slots go on from recorded calls (R13) that are too old: each attempt would be refused."""
        if self._is_fixed:
            return
        c = t.tool_call.c
        for ordinal in sorted({row.ordinal for row in refused}):
            siblings = [row.sibling for row in refused if row.ordinal == ordinal]
            here = (c.run_id == self.run.run_id, c.ordinal == ordinal, c.sibling.in_(siblings))
            if txn.conn.execute(sa.select(c.call_index).where(*here).limit(1)).first() is None:
                continue
            group, verdicts, _ = self._group_counts(txn.conn, ordinal)
            if verdicts < group.n_siblings:
                reason = f"group {ordinal} has recorded turns that are too old to be trained"
                self._close_group(txn, group, VerdictKind.DROPPED_STALE, reason, refill=True)

    def _submit_event(self, txn: Txn, item: Submission, outcome: SubmitOutcome, reason: str) -> dict[str, object]:
        kind = "sample_salvaged" if outcome is SubmitOutcome.ACCEPTED else f"submit_{outcome.value}"
        return self._event_row(txn, kind, item.key, token=item.lease_token, incarnation=item.incarnation, reason=reason)

    def _view(self, conn: sa.Connection, items: Sequence[_Checked]) -> _View:
        lineage = self._newest_lineage()
        keys = list({(c.item.key.ordinal, c.item.key.sibling) for c in items})
        leases = self._by_slot(conn, t.lease, _LEASE, keys)
        rest = [key for key in keys if key not in leases]
        named = {c.item.lineage for c in items} & {line.number for line in self._lineages}
        newest = {number: self._version(conn, number, None) for number in named}
        heads = {number: version.version if version else -1 for number, version in newest.items()}
        view = _View(leases, {}, {}, set(leases), heads, self._last_planned(conn, lineage) + 1)
        if rest:
            view.samples = self._by_slot(conn, t.sample, _SAMPLE, rest)
            view.verdicts = self._by_slot(conn, t.verdict, _VERDICT, rest)
            view.known |= set(self._by_slot(conn, t.slot, _SLOT, rest))
        return view

    def _by_slot(
        self, conn: sa.Connection, table: sa.Table, columns: Sequence[str], keys: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Any]:
        rows = self._database.rows_by_slot(conn, table, columns, self.run.run_id, keys)
        return {(r.ordinal, r.sibling): r for r in rows}

    def _judge(self, view: _View, c: _Checked, now_us: int) -> tuple[SubmitOutcome, str, Any]:
        """(outcome, reason, lease row). An accepted sample with a reason is a salvaged one."""
        item, key = c.item, c.item.key
        if key.ordinal < (low := self._kept.low_watermark):
            return SubmitOutcome.REFUSED, f"slot {key} is below the low watermark {low}: it ended and was let go", None
        if key not in view.known:
            return SubmitOutcome.INVALID, f"the run has no slot {item.key}", None
        if (stored := view.samples.get(key)) is not None:
            if stored.payload_digest == c.digest:
                return SubmitOutcome.REPLAYED, "", None
            return SubmitOutcome.CONFLICT, _conflict(item, stored), None
        if (verdict := view.verdicts.get(key)) is not None:
            return SubmitOutcome.REFUSED, f"slot {item.key} ended as {verdict.kind}: {verdict.reason}", None
        lease = view.leases.get(key)
        if lease is None or item.lease_token > lease.token or item.lease_token < 1:
            return SubmitOutcome.INVALID, f"lease token {item.lease_token} of slot {item.key} was never granted", lease
        if reason := self._refuse_versions(view, c):
            return reason[0], reason[1], lease
        if item.lease_token == lease.token and lease.incarnation == item.incarnation and lease.expires_at_us > now_us:
            return SubmitOutcome.ACCEPTED, "", lease
        if item.lease_token == lease.token and lease.incarnation not in (item.incarnation, None):
            return SubmitOutcome.FENCED, f"lease token {lease.token} of slot {item.key} belongs to {lease.incarnation}", lease
        late = f"lease token {item.lease_token} of slot {item.key} is over (newest is {lease.token})"
        if self.rules.late_submit == "strict":
            return SubmitOutcome.FENCED, f"{late} and late submits are refused", lease
        return SubmitOutcome.ACCEPTED, f"{late}; the slot was still empty", lease

    def _refuse_versions(self, view: _View, c: _Checked) -> tuple[SubmitOutcome, str] | None:
        item, rules = c.item, self.rules
        head = view.heads.get(item.lineage)
        if head is None:
            return SubmitOutcome.INVALID, f"the run has no lineage {item.lineage}"
        if c.version_min < 0 or c.version_max > head:
            return SubmitOutcome.INVALID, f"versions {c.version_min}..{c.version_max}: only 0..{head} are published"
        fork = self._fork_dropping(item.lineage)
        if fork is not None and c.version_max > fork:
            return SubmitOutcome.REFUSED, orphan_reason(item.lineage, c.version_max, fork)
        if self._is_fixed:
            step = fixed_step_of(item.key.ordinal, rules.groups_per_step)
            due = fixed_version(step, rules.fixed_lag_versions)
            if not c.version_min == c.version_max == due:
                return (
                    SubmitOutcome.INVALID,
                    f"slot {item.key} of step {step} is sampled under version {due}, got {c.version_min}..{c.version_max}",
                )
            return None
        oldest = oldest_effective(c.version_min, c.version_max, self._fork_beyond(item.lineage))
        lag = head_lag(view.next_step, oldest)
        if lag > rules.max_lag_versions:
            return (
                SubmitOutcome.REFUSED,
                f"too stale: version {c.version_min} lags {lag} at step {view.next_step}, bound {rules.max_lag_versions}",
            )
        return None

    def _store(self, txn: Txn, accepted: Sequence[tuple[_Checked, Any, bool]]) -> None:
        if not accepted:
            return
        run_id = self.run.run_id
        samples, payloads = [], []
        for c, lease, salvaged in accepted:
            item, trajectory = c.item, c.item.trajectory
            samples.append({
                "run_id": run_id, "ordinal": item.key.ordinal, "sibling": item.key.sibling, "lineage": item.lineage,
                "lease_token": item.lease_token, "attempt": lease.attempt, "incarnation": item.incarnation,
                "sequence": item.sequence, "payload_digest": c.digest, "version_min": c.version_min,
                "version_max": c.version_max, "n_tokens": trajectory.n_tokens, "reward": item.reward,
                "reward_status": item.reward_status.value, "sandbox_status": item.sandbox_status.value,
                "finish_reason": item.finish_reason.value, "generate_s": item.generate_s, "verify_s": item.verify_s,
                "salvaged": salvaged, "accepted_at_us": txn.now_us, "blame": _blame(item),
            })  # fmt: skip
            payloads.append({
                "run_id": run_id, "ordinal": item.key.ordinal, "sibling": item.key.sibling, "token_ids": trajectory.token_ids,
                "logprobs": trajectory.logprobs, "versions": pack_versions(trajectory), "loss_mask": trajectory.loss_mask,
                "evidence_json": storable(item.evidence_json),
            })  # fmt: skip
        self._database.insert_rows(txn.conn, t.sample, samples)
        failpoint("ledger.submit.before_payloads")
        self._database.insert_rows(txn.conn, t.payload, payloads)
        self._database.delete_by_slot(txn.conn, t.lease, run_id, [(s["ordinal"], s["sibling"]) for s in samples])
        self._n_touched += len({s["ordinal"] for s in samples})
        if self._n_touched >= self._plan_due_at:
            txn.rings.add("plan")
        failpoint("ledger.submit.before_commit")
        txn.after_commit.append(lambda: failpoint("ledger.submit.after_commit"))


@dataclass(frozen=True, slots=True)
class _Receipt:
    lease_token: int
    incarnation: str
    sequence: int
    payload_digest: str


def orphan_reason(lineage: int, version: int, fork_step: int) -> str:
    """Why a sample of a version that a fork left behind is not used (R7)."""
    return f"orphan_version: version {version} of lineage {lineage} lies behind the fork at step {fork_step}"


def _holds(lease: Any, item: Submission) -> bool:
    """Whether the submission was made under the lease that stands now; a late one may not touch a newer lease (P8)."""
    return lease is not None and (lease.token, lease.incarnation) == (item.lease_token, item.incarnation)


def _receipt(c: _Checked) -> _Receipt:
    return _Receipt(c.item.lease_token, c.item.incarnation, c.item.sequence, c.digest)


def _blame(item: Submission) -> str | None:
    """Whose failure it was; where the worker does not say, what the sandbox's status says of unknown processor time."""
    blame = item.blame or blame_of(item.sandbox_status, cpu_s=0.0, wall_s=math.inf)
    return None if blame is None else blame.value


def _conflict(item: Submission, stored: Any) -> str:
    same_key = (stored.lease_token, stored.incarnation, stored.sequence) == (item.lease_token, item.incarnation, item.sequence)
    what = "the same submit key was used with other content" if same_key else f"filled by {stored.incarnation} with other content"
    return f"slot {item.key}: {what}; the stored sample {stored.payload_digest[:12]}… stands"


_LEASE = ("ordinal", "sibling", "token", "attempt", "incarnation", "expires_at_us")
_SAMPLE = ("ordinal", "sibling", "lease_token", "incarnation", "sequence", "payload_digest")
_VERDICT = ("ordinal", "sibling", "kind", "reason")
_SLOT = ("ordinal", "sibling")
