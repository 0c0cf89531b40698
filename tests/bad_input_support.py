"""What the tests of bad input share: a run's own copies of its inputs, its ledger server, and its roles played by hand.

Everything goes through the ``rollbook`` command or through the real client over gRPC; nothing of the product is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollbook.core.records import (
    Cursor,
    FinishReason,
    GroupSpec,
    LeaseGrant,
    PolicyVersion,
    RewardStatus,
    Role,
    SandboxStatus,
    Submission,
    Trajectory,
)
from rollbook.rpc.client import LedgerClient
from run_support import CONFIG, MODEL, ROLLBOOK, TinyRun, environment, wait_until

RUN_ID = "tiny"
JUDGE = '''
import math
import zlib
from pathlib import Path

NOTE = Path(__file__).with_name("first_prompt")
first, calls = {}, {}


def good(completion, task):
    """Differs between nearly all completions, so that every step has something to learn."""
    return zlib.crc32(completion.encode()) % 1000 / 999


def breaks_for_one(completion, task):
    """One completion of the first prompt cannot be judged, ever; another prompt's first call gives no number."""
    prompt = task["prompt"]
    calls[prompt] = calls.get(prompt, 0) + 1
    if not first:
        first[prompt] = completion
    if first.get(prompt) == completion:
        raise LookupError("the table of answers is gone")
    return math.nan if prompt not in first and calls[prompt] == 1 else good(completion, task)


def breaks_for_a_prompt(completion, task):
    """No completion of the prompt that was judged first, by any process, can be judged."""
    if not NOTE.exists():
        NOTE.write_text(task["prompt"])
    if NOTE.read_text() == task["prompt"]:
        raise LookupError("the table of answers is gone")
    return good(completion, task)


number = 3
'''


def small_run(root: Path, reward: str = "good", extra: str = "") -> TinyRun:
    """A run of two steps whose model, tasks and reward functions are copies of its own, so that a test may damage them."""
    run = TinyRun(root)
    shutil.copytree(MODEL, root / "model")
    tasks = (MODEL / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (root / "tasks.jsonl").write_text("".join(tasks))
    (root / "judge.py").write_text(JUDGE)
    text = CONFIG.replace(f"{MODEL}/train.jsonl", "tasks.jsonl").replace(f'"{MODEL}"', '"model"')
    text = text.replace("steps = 3", "steps = 2").replace("max_new_tokens = 13", "max_new_tokens = 4\ntemperature = 3.0")
    run.config.write_text(text.replace('source = "jsonl"', f'source = "jsonl"\nreward = "judge.py:{reward}"') + extra)
    return run


@contextlib.contextmanager
def edited(file: Path, data: bytes | None) -> Iterator[None]:
    """The file with other content, or without, for the length of the block."""
    kept = file.read_bytes()
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(kept)


SERVED = """
[schedule]
max_lag_versions = 1000

[ledger]
role_ttl_s = 1.0
lease_ttl_s = 600.0
"""
"""Settings under which a test may hold many slots for as long as it likes."""


class ServedLedger:
    """``rollbook ledger`` on a small run of many steps; the address file says when it serves."""

    def __init__(self, run: TinyRun, *arguments: str) -> None:
        self.run = run
        self._arguments = arguments
        self.start()

    def start(self) -> None:
        self.log = self.run.root / "server.log"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*ROLLBOOK, "ledger", str(self.run.config), *self._arguments], env=environment(), stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        address = self.run.dir / "ledger.address"

        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return address.exists()

        wait_until("the ledger server serves", serves)

    def client(self, run_id: str = RUN_ID, **options: float) -> LedgerClient:
        return LedgerClient((self.run.dir / "ledger.address").read_text().strip(), run_id, **{"retry_total_s": 20.0} | options)  # type: ignore[arg-type]

    def stop(self) -> None:
        """As an orderly end: what is written is in the database file."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60.0) == 0, self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)


def served_run(root: Path, *arguments: str, extra: str = SERVED) -> ServedLedger:
    """A served run of a thousand steps."""
    return ServedLedger(small_run(root, extra=extra), "--set", "run.steps=1000", *arguments)


class Hand:
    """Feeder, learner and one worker as a test plays them."""

    def __init__(self, client: LedgerClient, name: str = "hand") -> None:
        self.client, self.name = client, name
        self.feeder = client.acquire_role(Role.FEEDER, name, 600.0)
        self.learner = client.acquire_role(Role.LEARNER, name, 600.0)
        self.version = client.publish_version(self.learner, PolicyVersion(0, 0, "0" * 64, "versions/0.0", "{}"))
        client.register_worker(name, "host", "hand")

    def feed(self, n_groups: int) -> None:
        before = self.client.cursor("train")
        first = before.next_ordinal
        groups = [GroupSpec(first + i, struct.pack("<2i", 1, i), '{"prompt": "p", "answer": "a"}', 2) for i in range(n_groups)]
        self.client.append_groups(self.feeder, before, Cursor("train", first + n_groups, f'{{"n": {first}}}', False), groups)

    def lease(self, n_slots: int) -> tuple[LeaseGrant, ...]:
        return self.client.lease_slots(self.name, self.version, n_slots).grants

    def accepted(self) -> int:
        """Samples the ledger holds."""
        return self.client.run_status()["submits"]["accepted"]


def trajectory(
    n: int = 3, version: int = 0, logprobs: Sequence[float] | None = None, versions: int | None = None, mask: bytes = b""
) -> Trajectory:
    """``n`` tokens 5, 6, 7, … at log-prob -0.5, with other log-probs, another number of versions or a mask where named."""
    chosen = [-0.5] * n if logprobs is None else logprobs
    n_versions = n if versions is None else versions
    return Trajectory(
        struct.pack(f"<{n}i", *range(5, 5 + n)), struct.pack(f"<{len(chosen)}f", *chosen),
        struct.pack(f"<{n_versions}i", *[version] * n_versions), mask,
    )  # fmt: skip


def submission(grant: LeaseGrant, worker: str = "hand", **changes: object) -> Submission:
    """A good sample for a granted slot, with fields replaced."""
    good = Submission(
        grant.key, grant.token, worker, 0, grant.lineage, trajectory(), 1.0, RewardStatus.GIVEN, SandboxStatus.NOT_USED,
        FinishReason.STOP, 0.5, 0.1,
    )  # fmt: skip
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of that size at ``place``; skips where this user may not mount one."""
    place.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"A FULL DISK WAS NOT TRIED: a small file system cannot be mounted here ({mounted.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def fill(place: Path, leave_bytes: int = 0) -> Path:
    """A file that takes what the file system has left but ``leave_bytes``."""
    filler = place / "filler"
    left = os.statvfs(place)
    with filler.open("wb") as file, contextlib.suppress(OSError):
        file.write(b"\0" * max(0, left.f_bavail * left.f_frsize - leave_bytes))
    return filler
