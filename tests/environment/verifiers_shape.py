"""The part of ``verifiers.v1`` 0.4.0 that the adapter touches, with the library's names, signatures and meaning, in small.

For machines that do not have the package, which brings a hundred others. That it has the library's shape is checked by running
``verifiers_check.py`` with the real one.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import types
import typing
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class RolloutError(Exception):
    pass


class TaskError(RolloutError):
    pass


class SandboxError(RolloutError):
    pass


class SystemMessage(BaseModel):
    role: Literal["system"] = "system"
    content: str


class UserMessage(BaseModel):
    role: Literal["user"] = "user"
    content: str


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None


Message = SystemMessage | UserMessage | AssistantMessage


class Request(BaseModel):
    messages: list[Message]


class Response(BaseModel):
    id: str
    created: int
    model: str
    message: AssistantMessage
    finish_reason: str | None


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    prompt: str | list[Message] | None = None
    system_prompt: str | None = None
    image: str | None = None


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskConfig(Config):
    judges: list[Any] = Field(default_factory=list)


class TasksetConfig(Config):
    id: str = ""
    task: TaskConfig = TaskConfig()


class AgentConfig(Config):
    pass


class State(BaseModel):
    pass


class AgentInfo(BaseModel):
    config: AgentConfig


class TraceTask(BaseModel):
    type: str
    data: Any
    key: str | None = None
    hash: str | None = None


class Reward(BaseModel):
    score: float
    weight: float = 1.0


class ModelCall(BaseModel):
    node: int | None = None
    model: str | None = None
    finish_reason: str | None = None


class Node(BaseModel):
    message: Message
    sampled: bool = False


class Trace(BaseModel):
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    task: TraceTask
    agent: AgentInfo
    state: State
    nodes: list[Node] = Field(default_factory=list)
    calls: list[ModelCall] = Field(default_factory=list)
    rewards: dict[str, Reward | None] = Field(default_factory=dict)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    is_completed: bool = False
    ok: bool = False
    stop_condition: str | None = None

    @property
    def reward(self) -> float:
        return sum(r.score * r.weight for r in self.rewards.values() if r is not None)

    @property
    def messages(self) -> list[Message]:
        return [node.message for node in self.nodes]

    @property
    def num_turns(self) -> int:
        return sum(node.sampled for node in self.nodes)

    @property
    def last_reply(self) -> str:
        said = [node.message.content for node in self.nodes if node.sampled]
        return (said[-1] or "").strip() if said else ""

    def stop(self, condition: str) -> None:
        self.is_completed, self.stop_condition = True, condition


class PendingTurn:
    def __init__(self, trace: Trace, prompt: list[Message]) -> None:
        self.trace, self.prompt = trace, prompt

    def commit(self, response: Response) -> int:
        self.trace.nodes += [Node(message=message) for message in self.prompt]
        self.trace.nodes.append(Node(message=response.message, sampled=True))
        return len(self.trace.nodes) - 1


def concrete_type(cls: type, bound: type, *, origin: type | None = None) -> type | None:
    for klass in cls.__mro__:
        for base in getattr(klass, "__orig_bases__", ()):
            if origin is None or typing.get_origin(base) is origin:
                for arg in typing.get_args(base):
                    if isinstance(arg, type) and issubclass(arg, bound):
                        return arg
    return None


def _mark(name: str) -> Any:
    def decorator(function: Any = None, weight: float = 1.0, priority: int = 0) -> Any:
        def marked(f: Any) -> Any:
            setattr(f, name, True)
            f._vf_weight = weight
            return f

        return marked if function is None else marked(function)

    return decorator


DataT, TaskT, ConfigT = TypeVar("DataT"), TypeVar("TaskT"), TypeVar("ConfigT")


class Task(Generic[DataT]):
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(self, data: Any, config: TaskConfig | None = None) -> None:
        self.data, self.config = data, config or TaskConfig()

    key = hash = property(lambda self: "0")

    def with_data(self, **update: Any) -> Any:
        return type(self)(self.data.model_copy(update=update), self.config)

    async def setup(self, trace: Any, runtime: Any) -> None: ...

    async def finalize(self, trace: Any, runtime: Any) -> None: ...

    @classmethod
    def data_type(cls) -> type:
        return concrete_type(cls, TaskData) or TaskData

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return []

    def hooks(self, attr: str) -> list[Any]:
        names = {n for k in type(self).__mro__ for n, f in vars(k).items() if callable(f) and hasattr(f, attr)}
        return [getattr(self, name) for name in sorted(names)]

    async def score(self, trace: Trace, runtime: Any = None) -> None:
        available = {"task": self.data, "trace": trace}
        try:
            for attr, scores in (("metric", trace.metrics), ("reward", trace.rewards)):
                functions = [f for f in self.hooks(attr) if "runtime" not in inspect.signature(f).parameters]
                scores.update({f.__name__: None for f in functions})
                given = [f(**{n: available[n] for n in inspect.signature(f).parameters}) for f in functions]
                for function, result in zip(functions, await asyncio.gather(*given), strict=True):
                    items = result if isinstance(result, Mapping) else {function.__name__: result}
                    for name, value in items.items():
                        scores[name] = value if attr == "metric" else Reward(score=value, weight=function._vf_weight)
        except RolloutError:
            raise
        except Exception as error:
            raise TaskError(f"task {type(self).__name__} scoring: {type(error).__name__}: {error}") from error


class Taskset(Generic[TaskT, ConfigT]):
    INFINITE = False
    limit: int | None = None

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def bounded(self) -> bool:
        return self.limit is not None or not self.INFINITE

    def take(self, n: int) -> Any:
        self.limit = n
        return self

    def __iter__(self) -> Any:
        return itertools.islice((task.with_data(idx=i) for i, task in enumerate(self.load())), self.limit)

    @classmethod
    def task_type(cls) -> type:
        return concrete_type(cls, Task, origin=Taskset) or Task

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return []


def _taskset_class(name: str) -> type:
    raise ModuleNotFoundError(f"taskset {name!r} not found")


_MODULES: dict[str, dict[str, Any]] = {
    "": {},
    ".v1": {
        "Task": Task, "Taskset": Taskset, "TaskData": TaskData, "TasksetConfig": TasksetConfig, "reward": _mark("reward"),
        "metric": _mark("metric"),
    },
    ".v1.errors": {"RolloutError": RolloutError, "TaskError": TaskError, "SandboxError": SandboxError},
    ".v1.graph": {"prepare_turn": PendingTurn},
    ".v1.state": {"state_cls": lambda cls: State},
    ".v1.trace": {"AgentInfo": AgentInfo, "ModelCall": ModelCall, "Trace": Trace, "TraceTask": TraceTask},
    ".v1.types": {"AssistantMessage": AssistantMessage, "Request": Request, "Response": Response},
    ".v1.configs": {},
    ".v1.configs.agent": {"AgentConfig": AgentConfig},
    ".v1.utils": {},
    ".v1.utils.generic": {"concrete_type": concrete_type},
    ".v1.utils.loaders": {"taskset_class": _taskset_class},
}  # fmt: skip


def install(folder: Path) -> None:
    """Make it importable as ``verifiers`` in this process, with a version in ``folder``."""
    about = folder / "verifiers-0.4.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n")
    sys.path.insert(0, str(folder))
    for name, content in _MODULES.items():
        module = types.ModuleType(f"verifiers{name}")
        module.__path__ = []
        vars(module).update(content)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
