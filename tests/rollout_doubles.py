"""Doubles of the worker's two ports for tests: a ledger in memory with scripted faults, and an engine that plays a script.

They implement ``core.ports``; nothing of the worker itself is replaced.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollbook.core.config import Config, config_from_table
from rollbook.core.environments import ToolReply, ToolRequest
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.ports import Generation, GenerationRequest, SamplingSettings
from rollbook.core.records import (
    FailureReport,
    FinishReason,
    HeartbeatReply,
    LeaseGrant,
    LeaseReply,
    PolicyVersion,
    SlotKey,
    Submission,
    SubmitOutcome,
    SubmitResult,
    ToolCall,
    Trajectory,
)
from rollbook.rollout.journal import RecordedCalls
from rollbook.rollout.weights import weights_digest

SORT_DIGITS = Path(__file__).parents[1] / "service" / "rollbook" / "assets" / "sort-digits"
EOS = 257
PROBE = {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0]}


def worker_config(run_dir: Path, *, reward: str = "rollbook.tasks.rewards:exact_match", **sections: dict) -> Config:
    """A configuration with one transformers worker on the tiny model; keywords overlay sections."""
    table: dict = {
        "run": {"id": "test", "dir": str(run_dir), "steps": 4},
        "model": {"path": str(SORT_DIGITS)},
        "task": {"source": "jsonl", "path": str(SORT_DIGITS / "train.jsonl"), "reward": reward},
        "sampling": {"max_new_tokens": 9},
        "learner": {"groups_per_step": 2, "group_size": 2},
        "ledger": {"heartbeat_s": 0.05, "lease_ttl_s": 30.0},
        "workers": [{"engine": "transformers", "slots": 4, "max_model_len": 64}],
    }
    for name, overlay in sections.items():
        table[name] = overlay if name == "workers" else table.get(name, {}) | overlay  # type: ignore[operator]
    return config_from_table(table)


def publish(run_dir: Path, version: int, value: float | None = None) -> PolicyVersion:
    """Write one small tensor as a version's weights and return its row."""
    directory = run_dir / "versions" / f"0.{version}"
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((3,), float(version) if value is None else value)}, directory / "model.safetensors")
    path = str(directory.relative_to(run_dir))
    return PolicyVersion(0, version, weights_digest(directory), path, json.dumps(PROBE))


class MemoryLedger:
    """The worker's verbs of the ledger. Slots are granted once each; everything recorded can be asked for."""

    def __init__(self, versions: Sequence[PolicyVersion], answers: Sequence[str] = (), drain_when_done: bool = True) -> None:
        self.versions = list(versions)
        self.drain_when_done = drain_when_done
        self.waiting = deque((SlotKey(i // 2, i % 2), f"sort {answer}:", answer) for i, answer in enumerate(answers))
        self.prompt_of: Callable[[str], bytes] = lambda prompt: pack_i32(list(prompt.encode()))
        self.events: list[str] = []
        self.submitted: dict[SlotKey, Submission] = {}
        self.submit_calls: list[list[Submission]] = []
        self.failures: list[FailureReport] = []
        self.granted: list[LeaseGrant] = []
        self.lease_requests: list[str] = []
        self.beats: list[list[tuple[SlotKey, int]]] = []
        self.lost: set[SlotKey] = set()
        self.draining = False
        self.faults: dict[str, deque[Exception]] = {}
        self._lock = threading.RLock()

    def fail(self, verb: str, *errors: Exception) -> None:
        """The next calls of ``verb`` raise these, in order."""
        self.faults.setdefault(verb, deque()).extend(errors)

    def _enter(self, verb: str) -> None:
        self.events.append(verb)
        if faults := self.faults.get(verb):
            raise faults.popleft()

    def register_worker(self, incarnation: str, host: str, engine: str, labels_json: str = "{}") -> None:
        with self._lock:
            self._enter("register_worker")

    def heartbeat(
        self, incarnation: str, loaded: PolicyVersion | None, leases: Sequence[tuple[SlotKey, int]], wait_s: float = 0.0,
        known_version: int = -1,
    ) -> HeartbeatReply:  # fmt: skip
        with self._lock:
            self._enter("heartbeat")
            self.beats.append(list(leases))
            lost = tuple(key for key, _ in leases if key in self.lost)
            return HeartbeatReply(self.versions[-1] if self.versions else None, lost, self.draining)

    def lease_slots(
        self, incarnation: str, loaded: PolicyVersion | None, n_max: int, wait_s: float = 0.0, request_id: str = ""
    ) -> LeaseReply:
        with self._lock:
            self.lease_requests.append(request_id)
            self._enter("lease_slots")
            head = self.versions[-1]
            if loaded is None or (loaded.lineage, loaded.version, loaded.digest) != (head.lineage, head.version, head.digest):
                return LeaseReply((), head, 0.0)
            grants = tuple(self._grant(head) for _ in range(min(n_max, len(self.waiting))))
            self.granted += grants
            return LeaseReply(grants, None, 0.01, drain=not grants and self.drain_when_done)

    def _grant(self, head: PolicyVersion) -> LeaseGrant:
        key, prompt, answer = self.waiting.popleft()
        task = json.dumps({"prompt": prompt, "answer": answer})
        seed = hash(key) % 2**31
        return LeaseGrant(key, 5, 1, 30.0, seed, self.prompt_of(prompt), task, head.lineage, head.version, head.digest)

    def submit_samples(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        with self._lock:
            self.submit_calls.append(list(submissions))
            self._enter("submit_samples")
            results = []
            for submission in submissions:
                stored = self.submitted.setdefault(submission.key, submission)
                same = stored == submission and stored is not submission
                outcome = SubmitOutcome.REPLAYED if same else SubmitOutcome.ACCEPTED
                results.append(SubmitResult(submission.key, outcome if stored == submission else SubmitOutcome.CONFLICT))
            return results

    def report_failures(self, failures: Sequence[FailureReport]) -> list[SubmitResult]:
        with self._lock:
            self._enter("report_failures")
            self.failures += failures
            return [SubmitResult(f.key, SubmitOutcome.ACCEPTED) for f in failures]


class ScriptedEngine:
    """Answers a prompt ``sort X:`` with X and end of sequence; hooks let a test change one thing at a time."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self.events = ledger.events if ledger else []
        self.scores = list(PROBE["logprobs"])
        self.answer: Callable[[GenerationRequest], list[int]] = _sorted_prompt
        self.on_generate: Callable[[Sequence[GenerationRequest]], None] = lambda requests: None
        self.generated: list[SlotKey] = []
        self.version = -1

    def manifest(self) -> dict[str, object]:
        return {"engine": "scripted"}

    def load(self, weights_dir: str, version: int) -> str:
        digest = weights_digest(weights_dir)
        self.version = version
        return digest

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        self.on_generate(requests)
        out = []
        for request in requests:
            ids = self.answer(request)
            self.generated.append(request.key)
            trajectory = Trajectory(pack_i32(ids), pack_f32([-0.5] * len(ids)), pack_i32([self.version] * len(ids)))
            out.append(Generation(request.key, trajectory, FinishReason.STOP))
        return out

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return self.scores

    def close(self) -> None:
        self.events.append("closed")


def _sorted_prompt(request: GenerationRequest) -> list[int]:
    digits = bytes(request.prompt_ids).decode().removeprefix("sort ").removesuffix(":")
    return [*digits.encode(), EOS]


class AddingLanguage:
    """The words of an environment whose tool adds: ``[2+3]`` calls it, ``>5`` is its answer."""

    def parse(self, text: str) -> ToolRequest | None:
        return ToolRequest("add", {"sum": text[1:-1]}) if text.startswith("[") and text.endswith("]") else None

    def render(self, reply: ToolReply) -> str:
        return f">{reply.text}"

    def close(self) -> None:
        pass


class LastingCalls(RecordedCalls):
    """A ledger's table of calls: it outlives the worker."""

    def calls(self, grant: LeaseGrant) -> list[ToolCall]:
        return [call for (key, _), call in sorted(self._calls.items()) if key == grant.key]


def raising_reward(completion: str, task: dict) -> float:
    """A verifier that fails on one answer."""
    if task["answer"] == "13":
        raise LookupError("the verifier's table is gone")
    return 1.0


def nan_reward(completion: str, task: dict) -> float:
    return float("nan") if task["answer"] == "13" else 1.0
