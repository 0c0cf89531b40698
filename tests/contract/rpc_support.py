"""What the RPC tests share: records to send, a ledger with prepared answers, interceptors that lose or repeat messages."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc

from rollbook.core.records import (
    Blame,
    Checkpoint,
    Cursor,
    FailureReport,
    FinishReason,
    ForkVerdict,
    GroupSpec,
    HeartbeatReply,
    LeaseGrant,
    LeaseReply,
    Lineage,
    Plan,
    PlanItem,
    PlanOutcome,
    PolicyVersion,
    ResumePoint,
    RewardStatus,
    Role,
    RoleTerm,
    RunRecord,
    RunRules,
    SampleData,
    SandboxStatus,
    ScheduleKind,
    SlotKey,
    Submission,
    SubmitOutcome,
    SubmitResult,
    ToolCall,
    Trajectory,
    Violation,
)
from rollbook.rpc.client import LedgerClient
from rollbook.rpc.server import RunningServer, serve

RUN_ID = "demo"

RULES = RunRules(
    group_size=2, groups_per_step=1, schedule=ScheduleKind.BOUNDED, max_lag_versions=2, fixed_lag_versions=1, config_seed=7,
    lease_ttl_s=30.0, attempts_max=3, survivors_min=2, late_submit="salvage", straggler="wait", straggler_wait_s=60.0,
    tokens_max=100, steps=10,
)  # fmt: skip
RUN = RunRecord(RUN_ID, "c" * 64, '{"learner": {"lr": 0.1}}', 0, RULES, '{"torch": "2.13.0"}')
KEY = SlotKey(12, 3)
TERM = RoleTerm(Role.LEARNER, 4, "holder-1", 15.0)
FEEDER = RoleTerm(Role.FEEDER, 2, "holder-2", 15.0)
VERSION = PolicyVersion(0, 3, "d" * 64, "versions/0.3", '{"token_ids": [1], "logprobs": []}', 4096)
PLAN = Plan(0, 4, 3, 0, (PlanItem(0, KEY, "e" * 64, None, False), PlanItem(1, SlotKey(12, 4), "f" * 64, 0.5)), "a" * 64, "b" * 64)
CHECKPOINT = Checkpoint(0, 4, "0.4.1", "1" * 64, "2" * 64)


def trajectory(n_tokens: int, version: int = 3) -> Trajectory:
    """``n_tokens`` tokens with ids 0, 1, 2, … and log-prob -0.5."""
    return Trajectory(
        struct.pack(f"<{n_tokens}i", *range(n_tokens)),
        struct.pack(f"<{n_tokens}f", *[-0.5] * n_tokens),
        struct.pack(f"<{n_tokens}i", *[version] * n_tokens),
    )


def submission(key: SlotKey = KEY, *, n_tokens: int = 4, token: int = 1, sequence: int = 0, reward: float | None = 1.0,
               incarnation: str = "worker-1", version: int = 3) -> Submission:  # fmt: skip
    status = RewardStatus.NO_VERDICT if reward is None else RewardStatus.GIVEN
    return Submission(
        key, token, incarnation, sequence, 0, trajectory(n_tokens, version), reward, status, SandboxStatus.NOT_USED,
        FinishReason.STOP, 0.25, 0.125,
    )  # fmt: skip


def failure(key: SlotKey = KEY, token: int = 1, incarnation: str = "worker-1") -> FailureReport:
    return FailureReport(key, token, incarnation, RewardStatus.VERIFIER_ERROR, Blame.INFRA, "the verifier raised")


TOOL_CALL = ToolCall(KEY, 0, "9" * 64, trajectory(2), "python", '{"code": "1+1"}')
SAMPLES = [SampleData(SlotKey(12, s), b"\1\0\0\0", trajectory(3), None if s == 1 else 0.5, str(s) * 64) for s in range(3)]

GRANT = LeaseGrant(KEY, 8, 2, 30.0, 99, b"\1\0\0\0", "{}", 0, 3, "d" * 64, "00-ab-cd-01")

ANSWERS: dict[str, Any] = {
    "open_run": RUN,
    "acquire_role": TERM,
    "renew_role": TERM,
    "release_role": None,
    "cursor": Cursor("tasks", 5, '{"epoch": 1}', False),
    "append_groups": Cursor("tasks", 6, '{"epoch": 1}', True),
    "feed_demand": 17,
    "register_worker": None,
    "heartbeat": HeartbeatReply(VERSION, (KEY,), True),
    "lease_slots": LeaseReply((GRANT,), VERSION, 0.5, True),
    "submit_samples": [SubmitResult(KEY, SubmitOutcome.ACCEPTED)],
    "report_failures": [SubmitResult(KEY, SubmitOutcome.FENCED, "lease 1 was lost")],
    "record_tool_call": TOOL_CALL,
    "tool_calls": [TOOL_CALL],
    "plan_step": PLAN,
    "read_plan": PLAN,
    "payloads": SAMPLES,
    "sample": SAMPLES[0],
    "finish_plan": None,
    "publish_version": VERSION,
    "versions": [VERSION],
    "fork_lineage": Lineage(1, 0, 4, ForkVerdict.KEPT, 0.25, 0.125, 3, 0),
    "commit_checkpoint": CHECKPOINT,
    "mark_checkpoint": None,
    "resume_point": ResumePoint(0, (CHECKPOINT,), 4, None, {0: "0" * 64, 4: "2" * 64}),
    "run_status": {"steps": 4, "slots": {"pending": 1}},
    "survival": {"opened": 3, "dimensions": {"length": [{"bucket": "1", "reward_sum": 0.5}]}},
    "step_metrics": [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}],
    "audit": [Violation("P3", "step_gap", "step 3 is missing", ("0.3",))],
    "explain": {"events": [{"kind": "leased"}]},
    "quarantine_group": None,
    "retry_group": None,
    "drain": None,
}
"""One answer for every verb of the port."""

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "open_run": ((RUN,), {"accept": ("learner.lr", "task.dataset_sha256")}),
    "acquire_role": ((Role.LEARNER, "holder-1", 15.0, "holder-0"), {}),
    "renew_role": ((TERM,), {}),
    "release_role": ((TERM,), {}),
    "cursor": (("tasks",), {}),
    "append_groups": ((FEEDER, Cursor("tasks", 5, "{}", False), Cursor("tasks", 6, "{}", True),
                       [GroupSpec(5, b"\1\0\0\0", '{"prompt": "é"}', 2), GroupSpec(6, b"", "{}", 2, 0)]), {}),
    "feed_demand": ((20,), {}),
    "register_worker": (("worker-1", "host", "transformers", '{"gpu": "none"}'), {}),
    "heartbeat": (("worker-1", VERSION, [(KEY, 8), (SlotKey(0, 0), 1)], 0.0, 3), {}),
    "lease_slots": (("worker-1", None, 16, 0.0, "request-1"), {}),
    "submit_samples": (([submission()],), {}),
    "report_failures": (([failure()],), {}),
    "record_tool_call": ((TOOL_CALL, 8), {}),
    "tool_calls": ((KEY,), {}),
    "plan_step": ((TERM, 0, 4, 0.0), {}),
    "read_plan": ((0, 4), {}),
    "payloads": ((0, 4), {}),
    "sample": ((KEY,), {}),
    "finish_plan": ((TERM, 0, 4, PlanOutcome.SKIPPED, "no valid sample", '{"loss": 0.5}'), {}),
    "publish_version": ((TERM, VERSION), {}),
    "versions": ((0,), {}),
    "fork_lineage": ((TERM, 2, 4, 0.25, 0.125, True), {}),
    "commit_checkpoint": ((TERM, CHECKPOINT), {}),
    "mark_checkpoint": ((TERM, 0, 4, "corrupt"), {}),
    "resume_point": ((), {}),
    "run_status": ((), {}),
    "survival": ((), {}),
    "step_metrics": ((0, 2), {}),
    "audit": ((), {}),
    "explain": ((KEY,), {}),
    "quarantine_group": ((12, "kills its workers"), {}),
    "retry_group": ((12, "the judge is back"), {}),
    "drain": ((), {}),
}  # fmt: skip
"""Arguments for every verb of the port, none of them at its default."""


class CannedLedger:
    """A ``LedgerPort`` whose answers are given: a value, an exception to raise, or a function to call."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {**ANSWERS, **answers}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, verb: str) -> Any:
        if verb not in ANSWERS:
            raise AttributeError(verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((verb, args, kwargs))
            answer = self.answers[verb]
            if callable(answer):
                answer = answer(*args, **kwargs)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def n_calls(self, verb: str) -> int:
        return sum(name == verb for name, _, _ in self.calls)


class QuickClock:
    """A clock whose sleeps take no time but count."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class _Wrapping(grpc.ServerInterceptor):
    """Wraps the unary methods of the ledger service."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if service != "rollbook.v1.LedgerService" or handler is None or handler.response_streaming:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.deliver(method, handler.unary_unary, request, context),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def deliver(self, method: str, behavior: Any, request: Any, context: Any) -> Any:
        raise NotImplementedError


class LoseReplies(_Wrapping):
    """The first ``n`` calls of ``method`` are carried out, then their answer is lost."""

    def __init__(self, method: str, n: int = 1) -> None:
        self.method, self.left = method, n

    def deliver(self, method: str, behavior: Any, request: Any, context: Any) -> Any:
        answer = behavior(request, context)
        if method == self.method and self.left > 0:
            self.left -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return answer


class DeliverTwice(_Wrapping):
    """Every request is carried out twice; the second answer is the one that arrives."""

    def __init__(self) -> None:
        self.methods: set[str] = set()

    def deliver(self, method: str, behavior: Any, request: Any, context: Any) -> Any:
        behavior(request, context)
        self.methods.add(method)
        return behavior(request, context)


@contextmanager
def served(ledger: Any, **options: Any) -> Iterator[RunningServer]:
    """The ledger behind a server on a free loopback port."""
    server = serve(ledger, "127.0.0.1:0", run_id=RUN_ID, **{"threads": 8, **options})
    try:
        yield server
    finally:
        server.stop(0.0)


@contextmanager
def wired(ledger: Any, *, client: dict[str, Any] | None = None, **options: Any) -> Iterator[LedgerClient]:
    """A client that talks to the ledger through a real server."""
    with ExitStack() as stack:
        server = stack.enter_context(served(ledger, **options))
        yield stack.enter_context(LedgerClient(server.address, RUN_ID, **(client or {})))


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Start ``work`` in a thread; its result or exception is appended to the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001  thread boundary: the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome
