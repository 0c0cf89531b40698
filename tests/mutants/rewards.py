"""Defects in rewards, sandboxes, verdicts, tools and what follows from their failures."""

from __future__ import annotations

import dataclasses
import os
import signal
from concurrent.futures import Future
from typing import Any

import torch

from mutants.registry import mutant
from rollbook.core.environments import RewardResult
from rollbook.core.errors import ConfigError
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import Blame, FinishReason, RewardStatus, SandboxStatus, VerdictKind

S = SandboxStatus
_kept: list[Any] = []


def done(value: Any) -> Future[Any]:
    """A future that has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def instead(original: Any, wrong: dict[SandboxStatus, SandboxStatus]) -> Any:
    """``status_of`` that says something else."""

    def status_of(*args: Any, **kwargs: Any) -> Any:
        status, reason = original(*args, **kwargs)
        return wrong.get(status, status), reason

    return status_of


def sending(original: Any, **limits: float) -> Any:
    """``ZygoteSandbox._send`` with other limits."""

    def send(self: Any, request: dict, *rest: Any) -> None:
        original(self, request | {"limits": request["limits"] | limits}, *rest)

    return send


def zero_where(status: RewardStatus, original: Any) -> Any:
    """``original`` with the value 0 in place of results of that status."""

    def result_of(answer: Any) -> Any:
        result = original(answer)
        return RewardResult(0.0) if result.status is status else result

    return result_of


@mutant("rollbook.rollout.episodes", "Episodes._score")
def a_cut_is_logged_as_an_end(original: Any) -> Any:
    """rllm#710: an episode that a limit ended is logged as done."""

    def score(self: Any, episode: Any, finish: Any = None) -> None:
        episode.finish = FinishReason.STOP
        original(self, episode, None)

    return score


@mutant("rollbook.sandbox.zygote", "_Zygote.close")
def what_was_killed_is_not_waited_for(original: Any) -> Any:
    """rllm#915: a process is ended without a wait and stays a zombie."""

    def close(self: Any) -> None:
        self._control.close()
        _kept.append(self)

    return close


@mutant("rollbook.learner.advantages", "group_statistics")
def no_verdict_counts_as_zero(original: Any) -> Any:
    """NeMo-RL#2207: a verifier's failure is a 0 in its group's baseline."""
    return lambda rewards, valid, ids: original(torch.nan_to_num(rewards), None, ids)


@mutant("rollbook.tasks.child_client", "_to_result")
def an_environment_that_failed_gives_zero(original: Any) -> Any:
    """NeMo-Gym#2611: an environment whose service is broken scores 0."""
    return zero_where(RewardStatus.INFRA_ERROR, original)


@mutant("rollbook.rollout.judges", "RewardJudge.score")
def an_exception_is_zero(original: Any) -> Any:
    """NeMo-Gym#2015: an exception of the grader is a legitimate-looking 0."""

    def score(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs).result()
        return done(RewardResult(0.0) if result.status is RewardStatus.VERIFIER_ERROR else result)

    return score


@mutant("rollbook.tasks.verifier", "load_reward")
def a_missing_reward_is_zero(original: Any) -> Any:
    """OpenEnv#1025: without its file every reward is 0."""

    def load(spec: str) -> Any:
        try:
            return original(spec)
        except ConfigError:
            return lambda completion, task: 0.0

    return load


@mutant("rollbook.rollout.episodes", "Episodes._is_judged")
def the_outer_clock_drops_the_reward(original: Any) -> Any:
    """OpenEnv#965: an outer time limit drops a reward that is being written."""
    return lambda self, episode: False


@mutant("rollbook.rollout.judges", "RewardJudge.score")
def an_alarm_bounds_the_score(original: Any) -> Any:
    """verl#5635, trl#5281: the alarm cannot be set outside the main thread, and the exception is swallowed."""

    def score(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        except ValueError:
            return done(RewardResult(0.0))
        return original(self, *args, **kwargs)

    return score


@mutant("rollbook.rollout.judges", "RewardJudge.score")
def the_alarm_is_left_to_its_default(original: Any) -> Any:
    """verl#1331: the verifier's alarm kills the process it was set in."""

    def score(self: Any, *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(1))
        return original(self, *args, **kwargs)

    return score


@mutant("rollbook.tasks.child_pool", "Pool._check_time")
def scores_have_no_limit(original: Any) -> Any:
    """verl#6673: a score that hangs is waited for without a limit."""
    return lambda self, seat, now: None if seat.ready else original(self, seat, now)


@mutant("rollbook.tasks.verdicts.functions", "no_more_answers")
def an_exception_with_exit_code_0_answers_nothing_rightly(original: Any) -> Any:
    """verl#7853: the wrapper leaves with 0 after an exception, and an empty output is what was expected."""

    def ended(execution: Any, passed: int, total: int) -> Any:
        verdict = original(execution, passed, total)
        empty = execution.exit_code == 0 and verdict.status is S.RUNTIME_ERROR and not execution.stdout
        return dataclasses.replace(verdict, passed=total, status=S.OK, blame=None) if empty else verdict

    return ended


@mutant("rollbook.sandbox.zygote", "ZygoteSandbox._take_slot")
def a_full_sandbox_refuses(original: Any) -> Any:
    """verl#3478: requests beyond what the sandbox runs at once fail."""

    def take(self: Any) -> Any:
        with self._lock:
            return self._free.pop() if self._free and not self._closed else None

    return take


@mutant("rollbook.rollout.episodes", "Episodes._answered")
def a_tools_failure_is_its_answer(original: Any) -> Any:
    """verl#6978: the failure of a tool's service becomes text of the trajectory."""

    def answered(self: Any, episode: Any) -> None:
        reply = episode.future.result()
        if episode.call is not None and reply.failed:
            episode.future = done(dataclasses.replace(reply, text=reply.reason, failed=False))
        original(self, episode)

    return answered


@mutant("rollbook.sandbox.zygote", "ZygoteSandbox._send")
def checks_are_never_killed(original: Any) -> Any:
    """SvS#3, code-r1#7: nothing kills a check that does not end."""
    return sending(original, cpu_s=60.0, wall_s=60.0)


@mutant("rollbook.sandbox.piped", "status_of")
def a_timeout_is_ok(original: Any) -> Any:
    """open-r1#546: a run that was out of time is like one that ended."""
    return instead(original, {S.TIMEOUT_WALL: S.OK})


@mutant("rollbook.tasks.verdicts.verdict", "blame_of")
def every_timeout_is_the_programs(original: Any) -> Any:
    """evalplus#5: a program fails when the clock on the wall runs out, however busy the host was."""
    return lambda status, *used: Blame.MODEL if status is S.TIMEOUT_WALL else original(status, *used)


@mutant("rollbook.tasks.verdicts.verdict", "Verdict.right")
def none_of_none_is_all(original: Any) -> Any:
    """SWE-smith#24: no test has failed, for none was there."""
    return property(lambda self: self.given and self.passed == self.total)


@mutant("rollbook.tasks.verdicts.asserts", "_relay")
def a_printed_line_is_believed(original: Any) -> Any:
    """SWE-bench#620: PASSED in the output is a passed test."""

    def relay(judge: Any, candidate: Any, total: int, wait_s: float) -> Any:
        verdict = original(judge, candidate, total, wait_s)
        passed = candidate.job.wait().stdout.count(b"PASSED") == total
        return dataclasses.replace(verdict, passed=total, status=S.OK, blame=None) if passed else verdict

    return relay


@mutant("rollbook.tasks.verdicts.functions", "model_failed")
def an_objects_own_comparison_decides(original: Any) -> Any:
    """codewars#2448: an answer that says it equals what was expected does."""

    def model_failed(status: Any, passed: int, total: int, reason: str) -> Any:
        verdict = original(status, passed, total, reason)
        believed = status is S.INVALID_RESULT and "object" in reason
        return dataclasses.replace(verdict, passed=total, status=S.OK, blame=None) if believed else verdict

    return model_failed


@mutant("rollbook.tasks.verdicts.functions", "no_more_answers")
def exit_code_0_is_success(original: Any) -> Any:
    """codewars-runner#321: leaving with 0 before the tests are over passes them."""

    def ended(execution: Any, passed: int, total: int) -> Any:
        verdict = original(execution, passed, total)
        left = execution.exit_code == 0 and execution.status is S.EARLY_EXIT
        return dataclasses.replace(verdict, passed=total, status=S.OK, blame=None) if left else verdict

    return ended


@mutant("rollbook.sandbox.piped", "status_of")
def out_of_memory_is_ok(original: Any) -> Any:
    """agent-os#2372: a run stopped by its memory limit is reported as finished."""
    return instead(original, {S.OOM: S.OK})


@mutant("rollbook.sandbox.outcome", "status_of")
def the_limit_polled_first_wins(original: Any) -> Any:
    """rbx#807: time or memory depends on which was looked at first."""

    def status_of(report: Any, *rest: Any, **more: Any) -> Any:
        first = report is not None and report.killed in ("cpu", "wall")
        return original(dataclasses.replace(report, oom=False) if first else report, *rest, **more)

    return status_of


@mutant("rollbook.sandbox.zygote", "ZygoteSandbox.close")
def jobs_outlive_their_sandbox(original: Any) -> Any:
    """verifiers#399, #1920, #1750: what runs when the owner ends goes on running."""

    def close(self: Any) -> None:
        self._closed = True
        for each in self._zygotes.values():
            each.close()

    return close


@mutant("rollbook.rollout.episodes", "Episodes._end")
def failed_episodes_are_scored(original: Any) -> Any:
    """verifiers#1412: a rollout that ended in an error is scored like any other."""

    def end(self: Any, episode: Any, result: Any, *rest: Any, **more: Any) -> None:
        if result is None:
            self.judge.score(None, key=episode.key, seed=0)
        original(self, episode, result, *rest, **more)

    return end


@mutant("rollbook.ledger.failing", "Failing._exhaust")
def one_failure_ends_its_group(original: Any) -> Any:
    """SkyRL#1613: one failed rollout aborts the step."""

    def exhaust(self: Any, txn: Any, rows: Any) -> None:
        original(self, txn, rows)
        for row in rows:
            group, _, _ = self._group_counts(txn.conn, row.ordinal)
            self._close_group(txn, group, VerdictKind.CANCELLED, "a member failed", refill=False)

    return exhaust


@mutant("rollbook.tasks.child_pool", "Pool._again")
def a_failed_score_is_dropped(original: Any) -> Any:
    """tinker-cookbook#497: what failed once is dropped."""
    return lambda self, question, without: self._resolve(question, without)


@mutant("rollbook.learner.advantages", "group_statistics")
def an_empty_group_has_no_mean(original: Any) -> Any:
    """trl#5775: the mean over no reward is NaN and goes into every advantage."""

    def statistics(rewards: Any, valid: Any, ids: Any) -> Any:
        made = original(rewards, valid, ids)
        return dataclasses.replace(made, centred=torch.where(made.count == 0, torch.nan, made.centred))

    return statistics


@mutant("rollbook.rollout.worker", "_Worker._outcome")
def a_check_out_of_time_is_sent_as_zero(original: Any) -> Any:
    """compose-rl#87: a check has a time limit now, and the answer is reward 0."""

    def outcome(self: Any, f: Any) -> Any:
        late = f.result is not None and f.result.status is RewardStatus.TIMEOUT
        return original(self, dataclasses.replace(f, result=RewardResult(0.0)) if late else f)

    return outcome


@mutant("rollbook.sandbox.zygote", "ZygoteSandbox._zygote")
def one_server_for_ever(original: Any) -> Any:
    """AutoCodeBenchmark#1: one server process takes every job and grows."""

    def server(self: Any, hash_seed: int) -> Any:
        if hash_seed in self._zygotes:
            self._zygotes[hash_seed].jobs = 0
        return original(self, hash_seed)

    return server


@mutant("rollbook.sandbox.zygote", "ZygoteSandbox._send")
def processes_are_not_counted(original: Any) -> Any:
    """codex#38909: a sandbox without a limit on processes."""
    return sending(original, processes=500)


@mutant("rollbook.sandbox.selection", "Examination.contained")
def installed_is_good_enough(original: Any) -> Any:
    """firejail#1956, #380: the sandbox is used because it is there, and contains nothing."""
    return property(lambda self: not self.unavailable)


@mutant("rollbook.sandbox.zygote", "MODES")
def programs_run_as_who_started_them(original: Any) -> Any:
    """bubblewrap#313: inside it is still root."""
    return original | {"zygote": "nothing"}


@mutant("rollbook.sandbox.piped", "status_of")
def a_setup_that_failed_is_the_programs_error(original: Any) -> Any:
    """bubblewrap#798: a bound that could not be set reads like a failing program."""
    return instead(original, {S.INFRA_SETUP: S.RUNTIME_ERROR})


@mutant("rollbook.rollout.episodes", "Episodes._continue")
def every_tool_may_run_again(original: Any) -> Any:
    """crewAI#5802: a retry repeats the effects of a tool."""

    def go_on(self: Any, episode: Any, calls: Any) -> None:
        self.judge.pure_tools = dict.fromkeys(self.judge.pure_tools, True)
        original(self, episode, calls)

    return go_on


@mutant("rollbook.ledger.breaker", "Breaker._record_failures")
def failures_leave_no_row(original: Any) -> Any:
    """NeMo-Gym#1351, #2552, #2750: nobody can see how often the environment failed."""
    return lambda self, txn, failures: None


@mutant("rollbook.rollout.worker", "_Worker._outcome")
def an_exception_is_an_empty_row(original: Any) -> Any:
    """NeMo-RL#3589: a rollout that raised is stored with reward 0."""

    def outcome(self: Any, f: Any) -> Any:
        return original(self, dataclasses.replace(f, result=RewardResult(0.0)) if f.result is None else f)

    return outcome


@mutant("rollbook.tasks.child_pool", "Pool._give_up")
def dying_environments_are_replaced_for_ever(original: Any) -> Any:
    """NeMo-RL#2305, #2394: environments die of memory, epoch after epoch is empty."""
    return lambda self, reason: None


@mutant("rollbook.tasks.verifier", "normalised")
def abstaining_is_zero(original: Any) -> Any:
    """trl#6427, #6430: a reward nobody gave is 0.0 by default."""
    return lambda result, who: original(0.0 if result is None else result, who)


@mutant("rollbook.tasks.child_client", "_to_result")
def a_score_out_of_time_is_zero(original: Any) -> Any:
    """AReaL#1541, #1651, miles#3221: a reward that is late is 0."""
    return zero_where(RewardStatus.TIMEOUT, original)


@mutant("rollbook.ledger.breaker", "Breaker._trip")
def sandbox_errors_alarm_nobody(original: Any) -> Any:
    """ToRL#27: most sandbox runs fail, training goes on."""
    return lambda self, txn: None


@mutant("rollbook.learner.advantages", "group_statistics")
def rejected_samples_move_the_mean(original: Any) -> Any:
    """verl#6362, #6452: a sample that is not trained still counts in the baseline."""

    def statistics(rewards: Any, valid: Any, ids: Any) -> Any:
        if valid is None or bool(torch.isnan(rewards).any()):
            return original(rewards, valid, ids)
        made = original(rewards, None, ids)
        return dataclasses.replace(made, valid=valid, centred=torch.where(valid, made.centred, 0.0))

    return statistics


@mutant("rollbook.tasks.child_client", "_is_infra")
def a_scorers_error_is_final(original: Any) -> Any:
    """verl-omni#366: an error of the scorer's service is taken for its answer."""
    return lambda answer: False


@mutant("rollbook.tasks.verdicts.functions", "settled")
def a_hiccup_is_final(original: Any) -> Any:
    """slime#1582: one failed request ends it."""
    return lambda attempt, attempts_max: original(attempt, 1)


@mutant("rollbook.rollout.episodes", "Episodes._score")
def nothing_is_padded_to_one_token(original: Any) -> Any:
    """agentcore-rl-toolkit#122: an empty rollout becomes a row of one padding token."""

    def score(self: Any, episode: Any, finish: Any = None) -> None:
        if not episode.tokens:
            episode.extend([0], pack_f32([0.0]), pack_i32([0]), True)
        original(self, episode, finish)

    return score


@mutant("rollbook.ledger.planning", "Planning._wait_for_breaker")
def it_waits_for_ever(original: Any) -> Any:
    """prime-rl#1563, #3015: batches in which everything failed never end the run."""
    return lambda self, txn, step, breaker: self._why_broken(txn, breaker)
