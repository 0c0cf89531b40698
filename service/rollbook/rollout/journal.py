"""Where calls of tools are recorded, and what of an answer is.

Owns the journals: the ledger's, as a worker writes to it, and one in memory for looking at a policy. Never runs a tool. Upholds
R13: a slot's call with another request than the recorded one is a Conflict.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Protocol

from rollbook.core.environments import ToolReply
from rollbook.core.errors import Conflict
from rollbook.core.ports import LedgerPort
from rollbook.core.records import LeaseGrant, SandboxStatus, SlotKey, ToolCall
from rollbook.rollout.delivery import repeat_call


class Journal(Protocol):
    """Where calls of tools are recorded."""

    def calls(self, grant: LeaseGrant) -> list[ToolCall]:
        """What is recorded of the slot, in order."""
        ...

    def record(self, call: ToolCall, grant: LeaseGrant) -> ToolCall:
        """Record the call, or its answer; returns what is stored. Raises Conflict (another request), Fenced."""
        ...


def reply_to_json(reply: ToolReply) -> str:
    """What is recorded of a tool's answer."""
    return json.dumps({"text": reply.text, "sandbox_status": reply.sandbox_status.value}, sort_keys=True)


def reply_from_json(text: str) -> ToolReply:
    """The answer as it was recorded."""
    content = json.loads(text)
    return ToolReply(content["text"], SandboxStatus(content["sandbox_status"]))


class RecordedCalls:
    """A journal that nothing is written to: calls that are recorded have their answers, others are kept in memory.

    ``closed``: another call than the recorded ones is a Conflict instead of being run.
    """

    def __init__(self, recorded: Iterable[ToolCall] = (), closed: bool = False) -> None:
        self._calls: dict[tuple[SlotKey, int], ToolCall] = {(c.key, c.call_index): c for c in recorded}
        self._closed = closed

    def calls(self, grant: LeaseGrant) -> list[ToolCall]:
        """None: an episode is played from its beginning."""
        return []

    def record(self, call: ToolCall, grant: LeaseGrant) -> ToolCall:
        """The recorded call, else ``call``. Raises Conflict (another request was recorded, or none where closed)."""
        stored = self._calls.get((call.key, call.call_index))
        if stored is not None and stored.request_digest != call.request_digest:
            raise Conflict(f"call {call.call_index} of slot {call.key} was recorded with another request: {stored.request_json}")
        if self._closed and (stored is None or stored.response_json is None):
            raise Conflict(f"call {call.call_index} of slot {call.key} has no recorded answer")
        if stored is None or stored.response_json is None:
            self._calls[call.key, call.call_index] = stored = call
        return stored


class LedgerJournal:
    """The ledger as a worker writes to it: every call repeated with its key until it is answered."""

    def __init__(self, client: LedgerPort, stop: threading.Event) -> None:
        self._client, self._stop = client, stop

    def calls(self, grant: LeaseGrant) -> list[ToolCall]:
        return repeat_call(lambda: self._client.tool_calls(grant.key), self._stop)

    def record(self, call: ToolCall, grant: LeaseGrant) -> ToolCall:
        return repeat_call(lambda: self._client.record_tool_call(call, grant.token), self._stop)
