"""Sending finished rollouts: spooled before, forgotten after a final outcome, repeated with the same key in between.

Owns retry of submissions and failure reports, and what becomes of each outcome. Never changes a submission. Upholds
P1 and P2 on the worker's side.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollbook.core.errors import InvalidRequest, RollbookError, WrongRun
from rollbook.core.host import host
from rollbook.core.ports import LedgerPort
from rollbook.core.records import (
    Blame,
    FailureReport,
    RewardStatus,
    Submission,
    SubmitOutcome,
    SubmitResult,
)
from rollbook.observe import metrics, progress, tracing
from rollbook.observe.failpoints import failpoint
from rollbook.rollout.spool import Spool

log = logging.getLogger(__name__)

UNREACHABLE_MAX_S = 300.0
"""How long a call is repeated while the ledger cannot answer; then the process ends, and its spool stays."""
STOPPING_MAX_S = 5.0
"""The same once the process was asked to stop."""
SAMPLES_PER_CALL = 32

_DURABLE = (SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED)

Answer = TypeVar("Answer")


def repeat_call(call: Callable[[], Answer], stop: threading.Event, unreachable_max_s: float = UNREACHABLE_MAX_S) -> Answer:
    """Repeat a keyed call while its error is retryable, 0.1 s to 5 s apart. Raises the last error when time is up."""
    started, pause_s = host().monotonic(), 0.1
    stopping_since: float | None = None
    while True:
        progress.mark()
        try:
            return call()
        except RollbookError as error:
            now = host().monotonic()
            if stop.is_set():
                stopping_since = stopping_since or now
            spent = now - started >= unreachable_max_s or (stopping_since and now - stopping_since >= STOPPING_MAX_S)
            if not error.retryable or spent:
                raise
            log.warning("ledger call repeated", extra={"event": "call_repeated", "reason": str(error), "wait_s": pause_s})
        if stop.is_set():
            host().sleep(min(pause_s, 0.5))
        else:
            stop.wait(pause_s)
        pause_s = min(2 * pause_s, 5.0)


class Delivery:
    """The way from a finished rollout to the ledger's answer."""

    def __init__(self, client: LedgerPort, spool: Spool, stop: threading.Event) -> None:
        self._client, self._spool, self._stop = client, spool, stop
        self.outcomes: Counter[SubmitOutcome] = Counter()
        """Outcomes of this process so far."""

    def send_spooled(self) -> int:
        """Send what an earlier process left behind; returns how many there were."""
        left = self._spool.load()
        if left:
            log.info("sending the spool", extra={"event": "spool_sent", "samples": len(left)})
            self._send(left, keep_invalid=True)
        return len(left)

    def deliver(self, submissions: Sequence[Submission]) -> None:
        """Make the submissions durable here, then in the ledger, then forget them here; a full disk here stops nothing."""
        if not submissions:
            return
        try:
            self._spool.put(submissions)
        except OSError as error:
            # Sending needs no disk. Without the spool a death before the answer costs these generations; ending here would too.
            log.error(
                "the spool cannot be written, sending without it: %s; free space or repair the disk", error,
                extra={"event": "spool_failed", "samples": len(submissions)},
            )  # fmt: skip
        failpoint("worker.before_submit")
        self._send(submissions)
        failpoint("worker.after_submit")

    def report(self, failures: Sequence[FailureReport]) -> None:
        """Tell the ledger about rollouts that gave no sample."""
        for failure in failures:
            log.warning(
                "rollout failed",
                extra={"event": "rollout_failed", "slot": str(failure.key), "status": failure.status.value,
                       "reason": failure.reason},
            )  # fmt: skip
        if failures:
            failpoint("worker.before_report")
            repeat_call(lambda: self._client.report_failures(failures), self._stop)

    def _send(self, submissions: Sequence[Submission], *, keep_invalid: bool = False) -> None:
        for start in range(0, len(submissions), SAMPLES_PER_CALL):
            self._send_call(submissions[start : start + SAMPLES_PER_CALL], keep_invalid=keep_invalid)

    def _send_call(self, submissions: Sequence[Submission], *, keep_invalid: bool = False) -> None:
        """One call; what the ledger refuses as a whole is sent alone, so that one sample cannot block the others.

        ``keep_invalid`` keeps the files of samples that can never be accepted: an earlier process made them, maybe for a
        ledger that has since been restored from an older copy.
        """
        began = host().monotonic()
        try:
            results = repeat_call(lambda: self._client.submit_samples(submissions), self._stop)
        except WrongRun:
            raise
        except InvalidRequest as error:
            if len(submissions) > 1:
                for submission in submissions:
                    self._send_call([submission], keep_invalid=keep_invalid)
            else:
                self._refused(submissions[0], str(error))
            return
        failpoint("worker.submit.after_answer")
        kept_out: list[FailureReport] = []
        for submission, result in zip(submissions, results, strict=True):
            self._note(submission, result)
            tracing.record(
                "submit", submission.traceparent, began, failed="" if result.outcome in _DURABLE else result.outcome.value,
                attributes={
                    "slot": str(submission.key), "worker": submission.incarnation, "outcome": result.outcome.value,
                },
            )  # fmt: skip
            if result.outcome is SubmitOutcome.INVALID:
                kept_out.append(_failure(submission, result.reason))
                if keep_invalid:
                    self._spool.set_aside(submission, result.reason)
        self._spool.discard(submissions)
        self.report(kept_out)

    def _refused(self, submission: Submission, reason: str) -> None:
        self._spool.set_aside(submission, reason)
        self.report([_failure(submission, reason)])

    def _note(self, submission: Submission, result: SubmitResult) -> None:
        self.outcomes[result.outcome] += 1
        metrics.WORKER_SUBMISSIONS_TOTAL.labels(result.outcome.value).inc()
        if result.outcome not in _DURABLE:
            if result.outcome is not SubmitOutcome.INVALID:  # which is reported, with its time; of the others no row tells
                metrics.GPU_SECONDS_TOTAL.labels("actor", "wasted").inc(submission.generate_s)
            log.warning(
                "sample not accepted",
                extra={"event": "sample_not_accepted", "slot": str(submission.key), "token": submission.lease_token,
                       "outcome": result.outcome.value, "reason": result.reason},
            )  # fmt: skip


def _failure(submission: Submission, reason: str) -> FailureReport:
    """Report that frees the slot of a submission which will never be accepted."""
    return FailureReport(
        submission.key, submission.lease_token, submission.incarnation, RewardStatus.INFRA_ERROR, Blame.INFRA,
        f"submission refused: {reason}", generate_s=submission.generate_s, verify_s=submission.verify_s,
    )  # fmt: skip
