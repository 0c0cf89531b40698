"""Episodes of several turns: what stands between turns, who goes on after a death, and what a failure does not become."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest
from rollbook.core.errors import Conflict, Fenced
from rollbook.core.idempotency import turn_seed
from rollbook.core.packing import pack_f32, pack_i32, unpack_f32, unpack_i32
from rollbook.core.ports import Generation, GenerationRequest
from rollbook.core.records import Blame, FinishReason, LeaseGrant, RewardStatus, SandboxStatus, SlotKey, ToolCall, Trajectory
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.observe.metrics import GPU_SECONDS_TOTAL
from rollbook.rollout.episodes import Episodes, Finished, play
from rollbook.rollout.journal import RecordedCalls
from rollbook.tasks.tokenizer import load_tokenizer
from rollbook.tasks.turns import TurnCodec
from rollout_doubles import SORT_DIGITS, AddingLanguage, LastingCalls

EOS = 257
POINTS = ("worker.tool.before_record", "worker.tool.after_record", "worker.tool.after_call", "worker.tool.after_answer")
CODEC = TurnCodec(load_tokenizer(SORT_DIGITS), chat_template=False)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.arm("")


def ids(text: str) -> list[int]:
    return list(text.encode())


def grant(ordinal: int = 0, token: int = 1, prompt: str = "2+3") -> LeaseGrant:
    task = json.dumps({"prompt": prompt})
    return LeaseGrant(SlotKey(ordinal, 0), token, token, 30.0, 77, pack_i32(ids(prompt)), task, 0, 4, "d")


class Policy:
    """Writes ``[SUM]`` first and ``=`` with what the tool said last; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.requests += requests
        return [self.one(request) for request in requests]

    def one(self, request: GenerationRequest) -> Generation:
        text = bytes(i for i in request.prompt_ids if i < 256).decode()
        said = ids(f"={text.rpartition('>')[2]}") if ">" in text else ids(f"[{text}]")
        tokens = [*said, EOS][: request.max_new_tokens]
        n = len(tokens)
        reason = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
        return Generation(request.key, Trajectory(pack_i32(tokens), pack_f32([-0.25] * n), pack_i32([4] * n)), reason)


class Judge(AddingLanguage):
    """A tool that adds, with its effects counted outside, and a reward for the right sum."""

    def __init__(self, pure: bool, reply: Callable[[ToolRequest], ToolReply] | None = None) -> None:
        self.pure_tools = {"add": pure}
        self.effects: Counter[str] = Counter()
        self.reply = reply or (lambda request: ToolReply(str(eval(request.arguments["sum"]))))
        self.held: list[tuple[Future[ToolReply], ToolReply]] | None = None
        self.scored: list[Episode] = []

    def score(self, episode: Episode, *, key: str, seed: int) -> Future[RewardResult]:
        self.scored.append(episode)
        return done(RewardResult(float(episode.completion == "=5")))

    def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], *, key: str, call_index: int, seed: int
    ) -> Future[ToolReply]:
        self.effects[f"{key}/{call_index}"] += 1
        answer = self.reply(request)
        if self.held is None:
            return done(answer)
        self.held.append((Future(), answer))
        return self.held[-1][0]


def done(value):
    future = Future()
    future.set_result(value)
    return future


def episodes(judge: Judge, journal: RecordedCalls, policy: Policy, *, tokens_max: int = 40, turns_max: int = 4) -> Episodes:
    return Episodes("run", judge, CODEC, journal, policy, tokens_max, turns_max, lambda: 4)


def life(judge: Judge, journal: RecordedCalls, token: int = 1, **limits: int) -> Finished:
    return play(episodes(judge, journal, Policy(), **limits), [grant(token=token)])[0]


def test_a_tools_answer_stands_between_the_turns_and_is_masked_from_the_loss() -> None:
    judge, policy = Judge(pure=True), Policy()
    over = play(episodes(judge, LastingCalls(), policy), [grant()])[0]
    turn, reply, last = [*ids("[2+3]"), EOS], ids(">5"), [*ids("=5"), EOS]
    assert list(unpack_i32(over.trajectory.token_ids)) == turn + reply + last
    assert over.trajectory.loss_mask == b"\x01" * len(turn) + b"\x00" * len(reply) + b"\x01" * len(last)
    assert list(unpack_f32(over.trajectory.logprobs)) == [-0.25] * len(turn) + [0.0] * len(reply) + [-0.25] * len(last)
    assert over.result is not None and over.result.value == 1.0 and over.evidence["turns"] == 2
    assert [t.text for t in judge.scored[0].turns] == ["[2+3]", "=5"] and judge.scored[0].turns[0].reply == ToolReply("5")
    first, second = policy.requests
    assert second.prompt_ids == (*first.prompt_ids, *turn, *reply), "ids cross the turn as they were sampled"
    assert (first.seed, second.seed) == (77, turn_seed(77, 1)) and second.seed != 77
    assert second.max_new_tokens == 40 - len(turn) - len(reply)


def test_a_single_turn_has_no_mask() -> None:
    judge = Judge(pure=True)
    judge.parse = lambda text: None  # type: ignore[method-assign]
    over = life(judge, LastingCalls())
    assert over.trajectory.loss_mask == b"" and not judge.effects and over.evidence == {}


@pytest.mark.parametrize("point", POINTS)
def test_after_a_death_at_a_pure_tools_call_the_rollout_goes_on_from_what_is_recorded(point: str) -> None:
    unbroken = life(Judge(pure=True), LastingCalls())
    judge, journal = Judge(pure=True), LastingCalls()
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        life(judge, journal)
    failpoints.arm("")
    over = life(judge, journal, token=2)
    assert dataclasses.replace(over, grant=unbroken.grant, generate_s=0, verify_s=0, evidence={}) == dataclasses.replace(
        unbroken, generate_s=0, verify_s=0, evidence={}
    )
    assert [turn.text for turn in judge.scored[-1].turns] == ["[2+3]", "=5"] and over.evidence["turns"] == 2
    assert judge.effects.total() == (2 if point == "worker.tool.after_call" else 1), "repeated only where the answer was lost"


@pytest.mark.parametrize("point", POINTS)
def test_an_impure_tool_has_one_effect_per_slot_and_call_whenever_its_worker_dies(point: str) -> None:
    judge, journal = Judge(pure=False), LastingCalls()
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        life(judge, journal)
    failpoints.arm("")
    over = life(judge, journal, token=2)
    assert max(judge.effects.values(), default=0) <= 1
    if point in ("worker.tool.before_record", "worker.tool.after_answer"):
        assert over.result is not None and over.result.value == 1.0 and judge.effects == {"run/0.0/0": 1}
    else:
        assert over.result is None and over.final and "is not pure" in over.reason
        assert over.status is RewardStatus.NO_VERDICT, "a worker that dies says nothing about sandboxes"
        assert judge.effects.total() == (1 if point == "worker.tool.after_call" else 0)


@pytest.mark.parametrize("blame", [None, Blame.UNCLEAR])
@pytest.mark.parametrize("pure", [True, False])
def test_a_failure_of_a_tool_is_never_text_and_never_a_reward(pure: bool, blame: Blame | None) -> None:
    failed = ToolReply("sandbox is on fire", SandboxStatus.INFRA_SPAWN, failed=True, reason="no slot", blame=blame)
    judge = Judge(pure, lambda request: failed)
    journal = LastingCalls()
    over = life(judge, journal)
    status = RewardStatus.INFRA_ERROR if blame is None else RewardStatus.VERIFIER_ERROR
    assert (over.status, over.blame) == (status, blame or Blame.INFRA)
    assert over.result is None and over.final is not pure and over.sandbox_status is SandboxStatus.INFRA_SPAWN
    assert "no slot" in over.reason and b"fire" not in bytes(i for i in unpack_i32(over.trajectory.token_ids) if i < 256)
    assert journal.calls(grant())[0].response_json is None and not judge.scored


def test_turns_and_room_are_bounded_and_what_was_said_is_judged() -> None:
    judge = Judge(pure=True)
    assert life(judge, LastingCalls(), turns_max=1).finish_reason is FinishReason.TURNS and not judge.effects
    assert life(judge, LastingCalls(), tokens_max=3).finish_reason is FinishReason.LENGTH
    no_room = life(judge, LastingCalls(), tokens_max=8)
    assert no_room.finish_reason is FinishReason.LENGTH and no_room.trajectory.n_tokens == 6, "the answer does not fit"
    assert no_room.result is not None and no_room.result.value == 0.0
    assert life(judge, LastingCalls(), tokens_max=9).trajectory.n_tokens == 9


def test_while_one_episode_waits_for_a_tool_the_others_are_generated() -> None:
    judge, policy = Judge(pure=True), Policy()
    judge.held = []
    turn = episodes(judge, LastingCalls(), policy)
    turn.add([grant(0)])
    assert turn.advance() == [] and turn.waiting
    turn.add([grant(1, prompt="4+4")])
    assert not turn.waiting
    turn.advance()
    assert [r.key.ordinal for r in policy.requests] == [0, 1], "generated while the first one waits"
    future, answer = judge.held[1]
    future.set_result(answer)
    turn.advance()
    assert [f.grant.key.ordinal for f in turn.advance()] == [1], "overtakes the one that waits"
    judge.held[0][0].set_result(judge.held[0][1])
    turn.advance()
    assert [f.grant.key.ordinal for f in turn.advance()] == [0] and len(turn) == 0


def test_a_lease_that_is_lost_while_its_tool_runs_is_let_go_and_a_judged_one_is_handed_over() -> None:
    judge = Judge(pure=True)
    judge.held = []
    turn = episodes(judge, LastingCalls(), Policy())
    turn.add([grant(0)])
    turn.advance()
    turn.is_usable = lambda grant: False
    wasted = GPU_SECONDS_TOTAL.labels("actor", "wasted")._value
    before_s, turn._live[0].generate_s = wasted.get(), 2.5
    assert turn.advance() == [] and len(turn) == 0
    assert wasted.get() - before_s == 2.5, "nobody will be told of what was generated"


def test_a_slot_that_somebody_else_holds_is_left_to_him() -> None:
    class Taken(LastingCalls):
        def record(self, call: ToolCall, grant: LeaseGrant) -> ToolCall:
            raise Fenced("newer lease")

    judge = Judge(pure=True)
    turn = episodes(judge, Taken(), Policy())
    turn.add([grant()])
    assert turn.advance() == [] and len(turn) == 0 and not judge.effects


def test_another_request_than_the_recorded_one_ends_the_rollout_without_a_reward() -> None:
    journal = LastingCalls()
    life(Judge(pure=True), journal)
    stored = journal.calls(grant())[0]
    journal._calls[stored.key, 0] = dataclasses.replace(stored, request_digest="other")
    judge = Judge(pure=True)
    over = life(judge, journal)
    assert over.result is None and over.final and "another request" in over.reason and not judge.effects


def test_a_prefix_of_a_closed_lineage_is_not_gone_on_from() -> None:
    journal = LastingCalls()
    life(Judge(pure=True), journal)
    stored = journal.calls(grant())[0]
    n = stored.prefix.n_tokens
    journal._calls[stored.key, 0] = dataclasses.replace(
        stored, prefix=dataclasses.replace(stored.prefix, versions=pack_i32([9] * n))
    )
    over = life(Judge(pure=True), journal, token=2)
    assert over.result is None and over.final and "lineage" in over.reason


def test_a_closed_journal_answers_what_is_recorded_and_runs_nothing() -> None:
    journal = LastingCalls()
    first = life(Judge(pure=True), journal)
    judge = Judge(pure=True)
    again = life(judge, RecordedCalls(journal.calls(grant()), closed=True))
    assert again.trajectory == first.trajectory and not judge.effects
    nothing = life(judge, RecordedCalls((), closed=True))
    assert nothing.result is None and "no recorded answer" in nothing.reason and not judge.effects
    with pytest.raises(Conflict):
        RecordedCalls((), closed=True).record(journal.calls(grant())[0], grant())


def test_a_reward_without_a_value_stays_without_one() -> None:
    judge = Judge(pure=True)
    judge.score = lambda episode, *, key, seed: done(RewardResult(None, RewardStatus.TIMEOUT, "hung"))  # type: ignore[method-assign]
    over = life(judge, LastingCalls())
    assert over.result is not None and over.result.value is None and over.result.status is RewardStatus.TIMEOUT
