"""Tool calls of multi-turn rollouts, recorded before and after they run.

Owns ``record_tool_call`` and ``tool_calls``. Never runs a tool. Upholds R13: key (slot, call index), request
digests are compared, and the trajectory up to the call is stored with it, so that a re-leased rollout continues from there.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollbook.core.errors import Conflict, Fenced, InvalidRequest, UnknownSlot
from rollbook.core.packing import unpack_i32
from rollbook.core.records import SlotKey, ToolCall, Trajectory
from rollbook.ledger import schema as t
from rollbook.ledger.forking import Forking
from rollbook.ledger.submitting import check_trajectory, orphan_reason, pack_versions, unpack_versions
from rollbook.ledger.writer import Txn


class Tools(Forking):
    """Verbs of multi-turn workers."""

    def record_tool_call(self, call: ToolCall, lease_token: int) -> ToolCall:
        """Record a call before it runs (response None) or its answer after; returns what is stored.

        Idempotent: by (slot, call index). Raises: Conflict (other request), Fenced (the lease token is not the newest, or a fork
        left the turns before the call behind), UnknownSlot, InvalidRequest (an answer without a recorded call, or a gap in the
        call indices).
        """

        self._check_prefix(call)

        def record(txn: Txn) -> ToolCall | Conflict:
            lineage = self._check_holder(txn.conn, call.key, lease_token)
            stored = self._tool_rows(txn.conn, call.key)
            row = next((r for r in stored if r.call_index == call.call_index), None)
            if row is None:
                return self._insert_call(txn, call, lease_token, lineage, len(stored))
            if row.request_digest != call.request_digest:
                self._event(txn, "tool_conflict", call.key, token=lease_token, call_index=call.call_index)
                return Conflict(
                    f"call {call.call_index} of slot {call.key} was recorded with another request ({row.tool}); "
                    "the stored one stands"
                )
            if call.response_json is None or row.response_json is not None:
                return _tool_call_of(row)
            c = t.tool_call.c
            here = (c.run_id == self.run.run_id, c.ordinal == call.key.ordinal, c.sibling == call.key.sibling)
            txn.conn.execute(
                sa.update(t.tool_call).where(*here, c.call_index == call.call_index)
                .values(response_json=call.response_json, answered_at_us=txn.now_us)
            )  # fmt: skip
            return _tool_call_of(row, call.response_json)

        result = self._write(record)
        if isinstance(result, Conflict):
            raise result  # after COMMIT: the conflict itself is counted
        return result

    def _check_prefix(self, call: ToolCall) -> None:
        """Refuse a trajectory that could not be gone on from; a call before the first token has an empty one."""
        p = call.prefix
        if not (p.token_ids or p.logprobs or p.versions or p.loss_mask):
            return
        reason, oldest, _ = check_trajectory(p, self.rules.tokens_max, self._payload_bytes_max)
        if reason or oldest < 0:
            raise InvalidRequest(f"call {call.call_index} of slot {call.key}: {reason or 'a version is negative'}")

    def _check_holder(self, conn: sa.Connection, key: SlotKey, lease_token: int) -> int:
        """The lineage of the slot's newest lease. Raises Fenced (another token's), UnknownSlot."""
        c = t.lease.c
        where = (c.run_id == self.run.run_id, c.ordinal == key.ordinal, c.sibling == key.sibling)
        row = conn.execute(sa.select(c.token, c.lineage).where(*where)).first()
        token = row.token if row else None
        if row is not None and token == lease_token:
            return int(row.lineage)
        if token is None and not self._slot_exists(conn, key):
            self._refuse_expired(key.ordinal)
            raise UnknownSlot(f"the run has no slot {key}")
        raise Fenced(f"lease token {lease_token} of slot {key} is not the newest ({token}); stop this rollout")

    def _insert_call(self, txn: Txn, call: ToolCall, lease_token: int, lineage: int, n_stored: int) -> ToolCall:
        if call.response_json is not None:
            raise InvalidRequest(f"call {call.call_index} of slot {call.key} was never recorded; record it before it runs")
        if call.call_index != n_stored:
            raise InvalidRequest(
                f"slot {call.key} has {n_stored} recorded calls; the next one has index {n_stored}, not {call.call_index}"
            )
        p = call.prefix
        fork = self._fork_dropping(lineage)
        newest = max(unpack_i32(p.versions)) if p.n_tokens else 0
        if fork is not None and newest > fork:
            raise Fenced(f"slot {call.key}: {orphan_reason(lineage, newest, fork)}; stop this rollout")
        if (head := self._version(txn.conn, lineage, None)) is None or newest > head.version:
            raise InvalidRequest(f"slot {call.key}: version {newest} of lineage {lineage} is not published")
        txn.conn.execute(
            sa.insert(t.tool_call).values(
                run_id=self.run.run_id,
                ordinal=call.key.ordinal,
                sibling=call.key.sibling,
                call_index=call.call_index,
                request_digest=call.request_digest,
                lease_token=lease_token,
                tool=call.tool,
                request_json=call.request_json,
                token_ids=p.token_ids,
                logprobs=p.logprobs,
                versions=pack_versions(p),
                loss_mask=p.loss_mask,
                requested_at_us=txn.now_us,
            )  # fmt: skip
        )
        return call

    def _tool_rows(self, conn: sa.Connection, key: SlotKey) -> list[Any]:
        c = t.tool_call.c
        where = (c.run_id == self.run.run_id, c.ordinal == key.ordinal, c.sibling == key.sibling)
        return list(conn.execute(sa.select(t.tool_call).where(*where).order_by(c.call_index)).all())

    def tool_calls(self, key: SlotKey) -> list[ToolCall]:
        """Recorded calls of a slot in order of call index. Raises UnknownSlot, Expired."""
        self._refuse_expired(key.ordinal)
        with self._read() as conn:
            rows = self._tool_rows(conn, key)
            if not rows and not self._slot_exists(conn, key):
                raise UnknownSlot(f"the run has no slot {key}")
        return [_tool_call_of(row) for row in rows]


def _tool_call_of(row: Any, response_json: str | None = None) -> ToolCall:
    n = len(row.token_ids) // 4
    prefix = Trajectory(row.token_ids, row.logprobs, unpack_versions(row.versions, n) if n else b"", row.loss_mask)
    return ToolCall(
        SlotKey(row.ordinal, row.sibling), row.call_index, row.request_digest, prefix, row.tool, row.request_json,
        row.response_json if response_json is None else response_json,
    )  # fmt: skip
