"""The tool of simulated runs: its effects are counted outside of every process, its answers are a function of the call.

Owns the judge of runs with tools and what must hold of their calls. A worker that dies takes a running call with it, before or
after the call's effect: half of its time lies on either side.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Episode, ToolReply, ToolRequest
from rollbook.core.host import host
from rollbook.core.records import SandboxStatus
from rollbook.rollout.judges import RewardJudge
from simulation import policy

TOOL = "counter"
TURNS_MAX = 3
TOKENS_MAX = 12
Call = tuple[str, int]
"""Slot and call index, as the idempotency key names them."""


def calls(text: str) -> bool:
    """Whether a turn with this text asks for the tool."""
    return hashlib.sha256(text.encode()).digest()[0] % 3 > 0


def answer(arguments: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:2]


class ToolJudge(RewardJudge):
    """The reward of simulated runs, and one tool."""

    def __init__(self, config: Config, pure: bool, effects: Counter[Call], seconds: tuple[float, float]) -> None:
        super().__init__(config)
        self.pure_tools = {TOOL: pure}
        self._effects, self._seconds, self._rng = effects, seconds, host().rng()

    def parse(self, text: str) -> ToolRequest | None:
        return ToolRequest(TOOL, {"text": text}) if calls(text) else None

    def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], *, key: str, call_index: int, seed: int
    ) -> Any:
        future, half = host().future(), self._rng.uniform(*self._seconds) / 2

        def call() -> None:
            host().sleep(half)
            if policy.no_sandbox():
                future.set_result(ToolReply("", SandboxStatus.INFRA_SPAWN, True, "no sandbox could be made"))
                return
            self._effects[key, call_index] += 1
            host().sleep(half)
            future.set_result(ToolReply(answer(request.arguments)))

        host().thread(call, f"tool-{key}").start()
        return future

    def score(self, episode: Episode, *, key: str, seed: int) -> Any:
        """The judgement, a moment later."""
        future, judged = host().future(), functools.partial(super().score, episode, key=key, seed=seed)

        def judge() -> None:
            host().sleep(self._rng.uniform(*self._seconds))
            future.set_result(judged().result())

        host().thread(judge, f"score-{key}").start()
        return future


def wait(futures: Any, timeout: float, return_when: str) -> None:
    """concurrent.futures.wait as the episodes use it: the time is over, or something is done."""
    host().sleep(timeout)


def last_turn(payload: dict[str, Any]) -> tuple[int, ...]:
    """Ids of a trajectory behind the last tool's answer."""
    ids = struct.unpack(f"<{len(payload['token_ids']) // 4}i", bytes(payload["token_ids"]))
    return ids[bytes(payload["loss_mask"]).rfind(b"\0") + 1 :]


def findings(tables: dict[str, list[dict[str, Any]]], effects: Counter[Call], run_id: str, pure: bool) -> list[str]:
    """Effects per (slot, call index): one where the tool is not pure, and one at least behind every recorded answer."""
    recorded = {(f"{run_id}/{r['ordinal']}.{r['sibling']}", r["call_index"]): r for r in tables["tool_call"]}
    found = [f"tools: {n} effects of {call}" for call, n in sorted(effects.items()) if n > 1 and not pure]
    found += [f"tools: an effect of {call}, which is not recorded" for call in sorted(effects.keys() - recorded.keys())]
    for call, row in recorded.items():
        if row["response_json"] is not None:
            told = json.loads(row["response_json"])["text"]
            if call not in effects or told != answer(json.loads(row["request_json"])["arguments"]):
                found.append(f"tools: the answer of {call} is {told!r}, effects {effects[call]}")
    return found
