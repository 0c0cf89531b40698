"""Tasksets written against ``verifiers.v1``: what the adapter must take, and one for each thing it must refuse."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, task, trace) -> dict:
        if trace.last_reply == "raise":
            raise LookupError("the table is gone")
        if trace.last_reply == "lost":
            raise SandboxError("no box")
        if trace.last_reply == "nan":
            return {"short": float("nan")}
        return {"short": 0.5 if len(trace.messages) > 1 and len(trace.last_reply) < 3 else 0.0}

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    n: int = 3
    start: int = 0


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.start, self.config.start + self.config.n):
            yield SumTask(SumData(prompt=f"{i}+1=", answer=str(i + 1), system_prompt="Add."), self.config.task)


class Endless(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield SumTask(SumData(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task)
            i += 1


class Hooked(SumTask):
    async def setup(self, trace, runtime) -> None:
        await runtime.start()


class NeedsSetup(vf.Taskset[Hooked, SumConfig]):
    def load(self):
        return []


class Contained(SumTask):
    NEEDS_CONTAINER = True


class NeedsContainer(vf.Taskset[Contained, SumConfig]):
    def load(self):
        return []


class Silent(vf.Task[SumData]):
    pass


class NoReward(vf.Taskset[Silent, SumConfig]):
    def load(self):
        yield Silent(SumData(prompt="1+1=", answer="2"), self.config.task)


class Runs(SumTask):
    @vf.reward
    async def ran(self, trace, runtime) -> float:
        return 1.0


class NeedsRuntime(vf.Taskset[Runs, SumConfig]):
    def load(self):
        yield Runs(SumData(prompt="1+1=", answer="2"), self.config.task)


class UserOpens(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        yield SumTask(SumData(prompt=None, answer="2"), self.config.task)
