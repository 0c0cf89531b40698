"""Turns that no honest model writes but a sampled one may."""

from __future__ import annotations

import pytest
from test_episodes import Judge, grant, life

from rollbook.core.environments import ToolReply, ToolRequest
from rollout_doubles import LastingCalls


@pytest.mark.parametrize("pure", [True, False])
def test_half_a_character_in_a_request_or_an_answer_ends_no_worker(pure: bool) -> None:
    seen: list[ToolRequest] = []

    def reply(request: ToolRequest) -> ToolReply:
        seen.append(request)
        return ToolReply("\udcff5")

    judge = Judge(pure, reply)
    real = judge.parse
    judge.parse = lambda text: real(text) and ToolRequest("add", {"sum": "\ud800"})  # type: ignore[method-assign]
    journal = LastingCalls()
    over = life(judge, journal)
    assert over.result is not None and over.result.value == 0.0 and len(judge.scored[0].turns) == 2
    assert seen == [ToolRequest("add", {"sum": "\ud800"})]
    assert journal.calls(grant())[0].request_json.isascii()
    assert life(judge, journal, token=2).trajectory == over.trajectory and len(seen) == 1
