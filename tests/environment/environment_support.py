"""An environment that does what its completion says, in a file of its own, and pools over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Episode, Turn
from task_fixtures import make_config

SCRIPTED = '''
import asyncio, ctypes, os, signal, sys, threading, time
from pathlib import Path
from rollbook.core.environments import RewardResult, ToolReply, ToolRequest
from rollbook.core.records import Blame, RewardStatus, SandboxStatus


class Raised(Exception):
    pass


class Shameful(Exception):
    def __str__(self):
        raise ZeroDivisionError


class Oddly(str):
    def __getitem__(self, index):
        raise Shameful


class Neither:
    def __bool__(self):
        raise Shameful


def daemon(folder):
    """A process that leaves its session and keeps every descriptor it has inherited."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            (folder / "daemon").write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        os._exit(0)
    os.waitpid(pid, 0)
    while not (folder / "daemon").exists() or not (folder / "daemon").read_text():
        time.sleep(0.01)


class Calls:
    def __init__(self, environment, name, pure):
        self.environment, self.name, self.pure = environment, name, pure

    async def call(self, arguments, earlier, context):
        self.environment.note(self.name, context.idempotency_key)
        what = arguments["do"]
        if what == "echo":
            return ToolReply(f"{context.seed} {len(earlier)} {[r.text for _, r in earlier]}", SandboxStatus.OK)
        if what == "fail":
            return ToolReply("", SandboxStatus.INFRA_LOST, failed=True, reason="the sandbox is gone")
        if what == "unclear":
            return ToolReply("", SandboxStatus.TIMEOUT_WALL, failed=True, reason="too slow", blame=Blame.UNCLEAR)
        if what == "neither":
            return ToolReply("", failed=Neither())
        if what == "huge":
            return ToolReply("x" * (65 << 20))
        if what == "nothing":
            return None
        return await getattr(self.environment, what)(None, context)


class Scripted:
    def __init__(self, folder, ordinary=False):
        self.folder = Path(folder)
        if (self.folder / "refuse").exists():
            raise Raised("it does not want to")
        self.barrier = threading.Barrier(4)
        self.tools = [Calls(self, "pure", True), Calls(self, "impure", False)]
        if ordinary:
            self.score, self.tools = self.ordinary, []

    def note(self, name, text):
        with (self.folder / name).open("a") as file:
            file.write(f"{text}\\n")

    def parse(self, text):
        if text == "raise":
            raise Raised("no such grammar")
        if text == "spin":
            while True:
                pass
        if text == "odd":
            return 7
        return ToolRequest("unknown" if text == "unknown" else "pure", {"do": text}) if text != "end" else None

    def render(self, reply):
        if reply.text == "raise":
            raise Raised("no such form")
        return f"<{reply.text}>"

    async def score(self, episode, context):
        return await getattr(self, episode.completion)(episode, context)

    def ordinary(self, episode, context):
        if episode.completion == "stop":
            raise StopIteration
        if episode.completion == "sleep":
            time.sleep(3600)
        return float(self.barrier.wait(timeout=60) >= 0)

    async def one(self, episode, context):
        return 1

    async def full(self, episode, context):
        parts = {"form": 1, "seed": context.seed}
        return RewardResult(0.25, evidence=context.idempotency_key, parts=parts, sandbox_status=SandboxStatus.OK)

    async def mutate(self, episode, context):
        seen = episode.task["items"]
        seen.append("mine")
        return float(len(seen))

    async def none(self, episode, context):
        return None

    async def nan(self, episode, context):
        return float("nan")

    async def infinite(self, episode, context):
        return RewardResult(float("inf"))

    async def text(self, episode, context):
        return "1.0"

    async def lost(self, episode, context):
        return RewardResult(None, RewardStatus.INFRA_ERROR, "the judge is down")

    async def lost_once(self, episode, context):
        self.note("lost", context.idempotency_key)
        lost = len((self.folder / "lost").read_text().splitlines()) == 1
        return RewardResult(None, RewardStatus.INFRA_ERROR, "the judge is down") if lost else 0.5

    async def throw(self, episode, context):
        self.note("processes", os.getpid())
        raise Raised("why not")

    async def throw_once(self, episode, context):
        self.note("processes", os.getpid())
        if (self.folder / "processes").read_text().count("\\n") == 1:
            raise Raised("why not")
        return 0.75

    async def throw_shameful(self, episode, context):
        raise Shameful

    async def odd_evidence(self, episode, context):
        return RewardResult(1.0, evidence=Oddly("x"))

    async def leave(self, episode, context):
        sys.exit(0)

    async def interrupt(self, episode, context):
        raise KeyboardInterrupt

    async def cancel(self, episode, context):
        raise asyncio.CancelledError

    async def hog(self, episode, context):
        return bytearray(1 << 62)

    async def kill(self, episode, context):
        os.kill(os.getpid(), signal.SIGKILL)

    async def crash(self, episode, context):
        ctypes.string_at(0)

    async def depart(self, episode, context):
        os._exit(0)

    async def spin(self, episode, context):
        while True:
            pass

    async def sleep(self, episode, context):
        await asyncio.sleep(3600)

    async def first_time_forever(self, episode, context):
        mark = self.folder / context.idempotency_key.replace("/", "-")
        if not mark.exists():
            mark.touch()
            await asyncio.sleep(3600)
        return 1.0

    async def kill_when_others_are_there(self, episode, context):
        while len(list(self.folder.glob("r-*"))) < 3:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    async def overlap(self, episode, context):
        begin = time.monotonic()
        await asyncio.sleep(0.5)
        return RewardResult(1.0, parts={"begin": begin, "end": time.monotonic()})

    async def slow(self, episode, context):
        await asyncio.sleep(2)
        return ToolReply("done")

    async def print(self, episode, context):
        print("garbage", flush=True)
        os.write(1, b"\\x00\\x00\\x00\\x02{}" * 1000)
        sys.stdout.write("x" * (3 << 20))
        sys.stdout.flush()
        return 1.0

    async def daemon(self, episode, context):
        daemon(self.folder)
        return 1.0

    async def daemon_and_kill(self, episode, context):
        (self.folder / "daemon").unlink(missing_ok=True)
        daemon(self.folder)
        os.kill(os.getpid(), signal.SIGKILL)

    async def daemon_and_kill_group(self, episode, context):
        daemon(self.folder)
        os.killpg(0, signal.SIGKILL)

    async def daemon_and_kill_guardian(self, episode, context):
        daemon(self.folder)
        os.kill(os.getppid(), signal.SIGKILL)
        await asyncio.sleep(3600)
'''


def scripted(folder: Path, settings: dict[str, Any] | None = None, **environment: Any) -> Config:
    """A configuration of the scripted environment, whose file and marks are in ``folder``."""
    (folder / "scripted.py").write_text(SCRIPTED)
    settings = {"folder": str(folder)} | (settings or {})
    return make_config(environment={"name": f"{folder / 'scripted.py'}:Scripted", "settings": settings} | environment)


def said(completion: str, **task: Any) -> Episode:
    return Episode(task, (Turn(completion),))


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        os.sched_yield()
        time.sleep(0.01)
    return True
