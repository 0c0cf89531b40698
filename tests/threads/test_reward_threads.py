"""Public threads about rewards and tools: a failure is told by its status, and no number is made up where there is none."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from threads_support import outcome_of

from ledger_bench import Bench
from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.errors import ConfigError, RestartBudgetSpent, RunPaused
from rollbook.core.packing import pack_f32, pack_i32, unpack_i32
from rollbook.core.ports import Generation, GenerationRequest
from rollbook.core.records import (
    Blame,
    FailureReport,
    FinishReason,
    LeaseGrant,
    RewardStatus,
    SandboxStatus,
    SlotKey,
    Submission,
    Trajectory,
)
from rollbook.learner.advantages import group_advantages
from rollbook.observe import failpoints
from rollbook.rollout.episodes import Episodes, Finished, play
from rollbook.rollout.journal import RecordedCalls
from rollbook.rollout.judges import RewardJudge
from rollbook.rollout.worker import _Worker
from rollbook.tasks import child_pool
from rollbook.tasks.child_client import EnvironmentPool
from rollbook.tasks.tokenizer import load_tokenizer
from rollbook.tasks.turns import TurnCodec
from rollbook.tasks.verdicts import Verdict
from rollbook.tasks.verifier import make_verifier
from rollout_doubles import SORT_DIGITS, AddingLanguage, LastingCalls, worker_config
from task_fixtures import make_config

S = SandboxStatus
EOS = 257
ENVIRONMENT = """
import asyncio, os, signal
from pathlib import Path
from rollbook.core.environments import RewardResult
from rollbook.core.records import RewardStatus


class Mine:
    def __init__(self, folder):
        self.seen = Path(folder) / "seen"

    def note(self, key):
        with self.seen.open("a") as file:
            file.write(f"{key} {os.getpid()}\\n")
        return len(self.seen_by(key))

    def seen_by(self, key):
        lines = (line.split() for line in self.seen.read_text().splitlines())
        return [process for other, process in lines if other == key]

    async def score(self, episode, context):
        times, what = self.note(context.idempotency_key), episode.completion
        if what == "hang":
            await asyncio.sleep(3600)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "die once" and times == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "die once":
            return RewardResult(0.5, parts={"processes": len(set(self.seen_by(context.idempotency_key)))})
        if what == "lost" or (what == "lost once" and times == 1):
            return RewardResult(None, RewardStatus.INFRA_ERROR, "503 from the scorer")
        return 0.5
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.arm("")


def pool_in(folder: Path, attempts_max: int = 2) -> EnvironmentPool:
    (folder / "mine.py").write_text(ENVIRONMENT)
    section = {"name": f"{folder / 'mine.py'}:Mine", "settings": {"folder": str(folder)}, "score_s": 1.0}
    return EnvironmentPool(make_config(environment=section | {"attempts_max": attempts_max}))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    made = pool_in(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


def said(completion: str) -> Episode:
    return Episode({}, (Turn(completion),))


def judged(pool: EnvironmentPool, completion: str, key: str = "") -> RewardResult:
    return pool.score(said(completion), key=key or completion.replace(" ", "-"), seed=1).result(60)


def reward_judge(folder: Path, body: str) -> RewardJudge:
    (folder / "reward.py").write_text(f"def reward(completion, task):\n    {body}\n")
    return RewardJudge(worker_config(folder, reward=f"{folder / 'reward.py'}:reward"))


def verdict_of(judge: RewardJudge) -> RewardResult:
    return judge.score(said("42"), key="run/0.0", seed=1).result()


def grant(token: int = 1) -> LeaseGrant:
    prompt = pack_i32(list(b"2+3"))
    return LeaseGrant(SlotKey(0, 0), token, token, 30.0, 77, prompt, json.dumps({"prompt": "2+3"}), 0, 4, "d")


def policy(requests: list[GenerationRequest]) -> list[Generation]:
    """Calls the tool, then gives its answer."""
    made = []
    for request in requests:
        text = bytes(i for i in request.prompt_ids if i < 256).decode()
        reply = [*(f"={text.rpartition('>')[2]}" if ">" in text else f"[{text}]").encode(), EOS][: request.max_new_tokens]
        n, reason = len(reply), FinishReason.STOP if reply[-1] == EOS else FinishReason.LENGTH
        made.append(Generation(request.key, Trajectory(pack_i32(reply), pack_f32([-0.5] * n), pack_i32([4] * n)), reason))
    return made


def silent(requests: list[GenerationRequest]) -> list[Generation]:
    return [Generation(r.key, Trajectory(b"", b"", b""), FinishReason.STOP) for r in requests]


class Adder(AddingLanguage):
    """An environment with one tool."""

    def __init__(self, pure: bool = True, reply: ToolReply | None = None) -> None:
        self.pure_tools, self.reply = {"add": pure}, reply or ToolReply("5")
        self.calls: list[str] = []
        self.scored: list[Future[RewardResult]] = []
        self.waits = False

    def score(self, episode: Episode, *, key: str, seed: int) -> Future[RewardResult]:
        self.scored.append(Future())
        if not self.waits:
            self.scored[-1].set_result(RewardResult(1.0))
        return self.scored[-1]

    def call_tool(self, request: ToolRequest, earlier: object, *, key: str, call_index: int, seed: int) -> Future[ToolReply]:
        self.calls.append(f"{key}/{call_index}")
        future: Future[ToolReply] = Future()
        future.set_result(self.reply)
        return future


def episodes(judge: Adder, journal: RecordedCalls | None = None, generate=policy, tokens: int = 40, turns: int = 4) -> Episodes:
    codec = TurnCodec(load_tokenizer(SORT_DIGITS), chat_template=False)
    return Episodes("run", judge, codec, journal or LastingCalls(), generate, tokens, turns, lambda: 4)


def sent_of(folder: Path, result: RewardResult | None) -> Submission | FailureReport:
    """What a worker makes of an episode with this end."""
    config = worker_config(folder)
    worker = _Worker(config, config.workers[0], "w", *[None] * 7, threading.Event())  # type: ignore[arg-type]
    t = Trajectory(pack_i32([5]), pack_f32([-0.5]), pack_i32([0]))
    ended = (result, "no slot", RewardStatus.INFRA_ERROR, Blame.UNCLEAR, S.NOT_USED, False, 0.1, 0.1, {})
    return worker._outcome(Finished(grant(), t, FinishReason.STOP, *ended))


def failed(grants: object, worker: str, **changes: object) -> list[FailureReport]:
    end = {"status": RewardStatus.INFRA_ERROR, "blame": Blame.INFRA, "reason": "no sandbox"} | changes
    return [FailureReport(key=g.key, lease_token=g.token, incarnation=worker, **end) for g in grants]  # type: ignore


def test_rllm_710_an_episode_that_is_cut_is_not_a_finished_one() -> None:
    """Episodes ended by a limit were logged like those that had come to their end."""
    assert play(episodes(Adder(), turns=1), [grant()])[0].finish_reason is FinishReason.TURNS
    assert play(episodes(Adder(), tokens=8), [grant()])[0].finish_reason is FinishReason.LENGTH
    assert play(episodes(Adder()), [grant()])[0].finish_reason is FinishReason.STOP


def test_nemo_rl_2207_a_member_without_a_verdict_leaves_the_baseline_alone() -> None:
    """A verifier's failure stood as 0 among the rewards and lowered its group's mean."""
    rewards, ids = torch.tensor([1.0, 0.0, torch.nan, torch.nan]), torch.zeros(4, dtype=torch.int64)
    valid = torch.tensor([True, True, False, False])
    assert group_advantages(rewards, valid, ids).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_nemo_gym_2611_an_environment_can_say_that_infrastructure_failed(pool: EnvironmentPool) -> None:
    """An environment had no other way to tell of a broken service than a reward of 0."""
    result = judged(pool, "lost")
    assert (result.value, result.status, result.blame) == (None, RewardStatus.INFRA_ERROR, Blame.INFRA)


def test_nemo_gym_2015_an_exception_while_grading_is_no_reward(tmp_path: Path) -> None:
    """Whatever the grader raised came out as a 0 that looked earned."""
    result = verdict_of(reward_judge(tmp_path, "raise ValueError('no such column')"))
    assert (result.value, result.status) == (None, RewardStatus.VERIFIER_ERROR)


def test_openenv_1025_a_missing_reward_file_is_an_error(tmp_path: Path) -> None:
    """A run without its reward file scored everything 0."""
    config = worker_config(tmp_path, reward=f"{tmp_path / 'absent.py'}:reward")
    assert outcome_of(lambda: make_verifier(config)) is ConfigError


def test_openenv_965_a_reward_that_is_being_given_outlives_its_lease() -> None:
    """A clock around the whole episode threw away a reward that was there."""
    judge = Adder()
    judge.waits = True
    turn = episodes(judge)
    turn.add([grant()])
    for _ in range(6):
        turn.advance() if not judge.scored else None
    turn.is_usable = lambda grant: False
    turn.advance()
    judge.scored[0].set_result(RewardResult(1.0))
    assert [f.result for f in [*turn.advance(), *turn.advance()]] == [RewardResult(1.0)]


def test_verl_5635_a_score_asked_for_in_another_thread_is_the_same(tmp_path: Path) -> None:
    """A time limit made of an alarm works in the main thread only; elsewhere every answer became 0."""
    judge = reward_judge(tmp_path, "return float(completion == '42')")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(verdict_of, judge).result(30).value == verdict_of(judge).value == 1.0


def test_verl_1331_judging_leaves_the_alarm_signal_alone(tmp_path: Path) -> None:
    """An alarm of the verifier went off outside it and killed the worker."""
    before = signal.getsignal(signal.SIGALRM)
    verdict_of(reward_judge(tmp_path, "return 1.0"))
    after = signal.signal(signal.SIGALRM, before)
    assert after == before


def test_verl_6673_a_score_that_hangs_ends_and_holds_up_no_other(pool: EnvironmentPool) -> None:
    """Answers were scored one after the other without a limit, so one that hung stopped the run."""
    hanging = pool.score(said("hang"), key="one", seed=1)
    others = [pool.score(said("right"), key=f"other-{i}", seed=1) for i in range(3)]
    assert [future.result(60).value for future in others] == [0.5] * 3
    assert outcome_of(lambda: hanging.result(15).status) is RewardStatus.TIMEOUT


def test_verl_6978_a_tools_broken_sandbox_is_not_text_for_the_model() -> None:
    """An error of the tool's service was put into the conversation and trained on."""
    broken = ToolReply("", S.INFRA_SPAWN, failed=True, reason="no slot")
    over = play(episodes(Adder(reply=broken)), [grant()])[0]
    assert over.result is None and b"no slot" not in bytes(i for i in unpack_i32(over.trajectory.token_ids) if i < 256)


def test_swe_smith_24_tests_that_did_not_run_are_not_passed() -> None:
    """The model broke the collection of tests, and none that failed counted as all that passed."""
    assert not Verdict(0, 0, S.OK, None).right and Verdict(1, 1, S.OK, None).right


def test_verifiers_1412_an_episode_that_failed_is_not_scored() -> None:
    """Rollouts that had ended in an error were given to the scorer like all others."""
    judge = Adder(reply=ToolReply("", S.INFRA_LOST, failed=True, reason="gone"))
    play(episodes(judge), [grant()])
    assert judge.scored == []


def test_skyrl_1613_one_failed_rollout_leaves_its_step_to_the_others(bench: Bench) -> None:
    """A single rollout that failed took the whole step with it."""
    s = bench.scene(group_size=4, groups_per_step=1, attempts_max=1, survivors_min=2)
    s.feed(1)
    grants = s.lease(4)
    s.ledger.report_failures(failed(grants[:1], s.incarnation))
    s.submit(grants[1:])
    assert outcome_of(lambda: [item.key for item in s.plan(1).items]) == [g.key for g in grants[1:]]


def test_tinker_cookbook_497_a_failed_score_is_tried_again_in_a_fresh_process(pool: EnvironmentPool) -> None:
    """Failed trajectories were dropped, so what was hard to run was trained less."""
    result = judged(pool, "die once")
    assert result.value == 0.5 and result.parts == {"processes": 2.0}


def test_trl_5775_a_group_without_any_verdict_has_no_statistics_and_poisons_none() -> None:
    """The mean of no reward at all was no number, and it spread."""
    rewards, valid = torch.tensor([torch.nan, torch.nan, 1.0, 0.0]), torch.tensor([False, False, True, True])
    assert group_advantages(rewards, valid, torch.tensor([0, 0, 1, 1])).tolist() == [0.0, 0.0, 0.5, -0.5]


def test_compose_rl_87_a_check_out_of_time_is_sent_as_a_failure(tmp_path: Path) -> None:
    """A time limit was added to the check, and its answer was reward 0."""
    sent = sent_of(tmp_path, RewardResult(None, RewardStatus.TIMEOUT, "hung"))
    assert isinstance(sent, FailureReport) and sent.status is RewardStatus.TIMEOUT and sent.n_tokens == 1


def test_crewai_5802_a_tool_with_effects_is_not_called_twice() -> None:
    """A repetition after a failure did the tool's effect again, for there was no key to know it by."""
    judge, journal = Adder(pure=False), LastingCalls()
    failpoints.arm("worker.tool.after_call=raise")
    outcome_of(lambda: play(episodes(judge, journal), [grant()]))
    failpoints.arm("")
    over = play(episodes(judge, journal), [grant(token=2)])[0]
    assert judge.calls == ["run/0.0/0"] and over.result is None and over.final


def test_nemo_gym_1351_failures_are_counted_and_seen_and_no_reward_is_made_up(bench: Bench) -> None:
    """Failures of the environment were zeros among the rewards, and nobody could see how many."""
    s = bench.scene(attempts_max=2, group_size=4, survivors_min=2)
    s.feed(1)
    for _ in range(2):
        s.ledger.report_failures(failed(s.lease(1), s.incarnation))
    assert bench.rows("SELECT status, reason FROM failure") == [("infra_error", "no sandbox")] * 2
    assert bench.rows("SELECT kind FROM verdict") == [("failed",)] and bench.rows("SELECT count(*) FROM sample") == [(0,)]


def test_nemo_rl_3589_a_rollout_that_failed_is_no_sample(tmp_path: Path) -> None:
    """Exceptions were stored as empty rows with reward 0."""
    sent = sent_of(tmp_path, None)
    assert isinstance(sent, FailureReport) and (sent.status, sent.reason) == (RewardStatus.INFRA_ERROR, "no slot")
    assert sent.blame is Blame.UNCLEAR


def test_nemo_rl_2305_an_environment_that_keeps_dying_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment processes were killed for memory, and one epoch after the other was empty."""
    monkeypatch.setattr(child_pool, "RESTARTS_MAX", 1)
    made = pool_in(tmp_path, attempts_max=1)
    try:
        ended = [outcome_of(lambda: judged(made, "kill").value) for _ in range(4)]
    finally:
        made.close()
    assert ended[:2] == [None, None] and ended[-1] is RestartBudgetSpent


def test_trl_6427_a_reward_function_that_abstains_gives_no_zero(tmp_path: Path) -> None:
    """What no reward function had judged got 0.0 by default, and its group an advantage."""
    result = verdict_of(reward_judge(tmp_path, "return None"))
    assert (result.value, result.status) == (None, RewardStatus.NO_VERDICT)


def test_areal_1541_a_score_out_of_time_has_a_status_and_no_value(pool: EnvironmentPool) -> None:
    """A reward that did not come in time was 0."""
    result = judged(pool, "hang", key="late")
    assert (result.value, result.status) == (None, RewardStatus.TIMEOUT)


def test_torl_27_a_rising_share_of_sandbox_errors_opens_the_breaker(bench: Bench) -> None:
    """Most runs of the sandbox failed, and training went on as if nothing were wrong."""
    s = bench.scene(infra_window=4, infra_failures_max=0.5, attempts_max=9, max_lag_versions=20)
    s.feed(4)
    s.ledger.report_failures(failed(s.lease(4), s.incarnation))
    status = s.ledger.run_status()
    assert status["breaker"]["state"] == "open" and status["failed_attempts"][0]["n"] == 4


def test_verl_6362_a_rejected_sample_does_not_move_the_baseline() -> None:
    """A sample that was masked out of the loss still counted in its group's mean."""
    valid = torch.tensor([True, True, False])
    assert group_advantages(torch.tensor([1.0, 0.0, 5.0]), valid, torch.zeros(3)).tolist() == [0.5, -0.5, 0.0]


def test_verl_omni_366_a_scorer_that_fails_once_is_asked_again(pool: EnvironmentPool) -> None:
    """An error of the scorer's service was a score of 0."""
    assert judged(pool, "lost once").value == 0.5


def test_agentcore_122_an_empty_completion_is_not_padded_into_a_sample() -> None:
    """A rollout without tokens was filled up to a row of one token and trained."""
    judge = Adder()
    over = play(episodes(judge, generate=silent), [grant()])[0]
    assert (over.trajectory.n_tokens, over.result, judge.scored) == (0, None, [])


def test_prime_rl_3015_a_run_whose_every_rollout_fails_stops_loudly(bench: Bench) -> None:
    """Batches in which everything had failed were empty, and the run neither went on nor ended."""
    s = bench.scene(infra_window=4, attempts_max=9, max_lag_versions=20, breaker_pause_s=100.0)
    s.feed(4)
    s.ledger.report_failures(failed(s.lease(4), s.incarnation))
    bench.let_time_pass(101.0)
    assert outcome_of(lambda: s.plan(1)) is RunPaused
