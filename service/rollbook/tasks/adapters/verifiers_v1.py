"""A taskset of the verifiers library, version 0.4, through its v1 API: ``verifiers:NAME`` or ``verifiers:FILE.py:CLASS``.

Owns how a completion of ours becomes the ``Trace`` that a task's ``@reward`` functions read, and which tasksets fit: single turn,
judged from the trace alone. The completion comes from the run's own engine, so nothing of the library's agents, harnesses,
runtimes or clients is used, and a taskset that needs one is refused by name. A reward the library left unscored is no reward, and
neither is anything its typed errors tell of (P6).
Source: verifiers 0.4.0 (MIT), ``verifiers.v1``; the classic names at the package's root are not supported.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
from collections.abc import Iterable
from typing import Any

from rollbook.core.config import Config
from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.core.errors import ConfigError, TaskError, VerifierError
from rollbook.core.records import Blame, RewardStatus
from rollbook.tasks.adapters.common import FIELD, finite_parts, refuse_pattern, settings_of
from rollbook.tasks.importing import load_attribute
from rollbook.tasks.prompts import plain_text, prompt_of, read_messages

VERSION = "0.4"
_INFRASTRUCTURE = ("ProviderError", "SandboxError", "InterceptionError", "TunnelError")
"""Its typed errors that say nothing about the completion."""


def make(rest: str, config: Config) -> VerifiersTaskset:
    """An installed taskset by its name, or a class by its place. Raises ConfigError."""
    refuse_pattern(config, "a verifiers taskset")
    settings = settings_of(config, {"taskset": {}, "heldout": {}, "tasks_max": None})
    tasks_max = settings["tasks_max"]
    if tasks_max is not None and (isinstance(tasks_max, bool) or not isinstance(tasks_max, int) or tasks_max < 1):
        raise ConfigError(f"environment.settings.tasks_max = {tasks_max!r}: a whole number, at least 1")
    return VerifiersTaskset(rest, settings["taskset"], settings["heldout"], tasks_max)


def _library(name: str) -> Any:
    """The module ``verifiers.v1``. Raises ConfigError (absent, or of another version)."""
    shown = f"{FIELD} = 'verifiers:{name}'"
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{shown} needs the package: pip install 'rollbook[verifiers]'") from None
    if version != VERSION and not version.startswith(f"{VERSION}."):
        raise ConfigError(f"{shown}: verifiers {version} is installed, this adapter is written for {VERSION}.x; "
                          "pip install 'rollbook[verifiers]'")  # fmt: skip
    try:
        import verifiers.v1  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"{shown}: verifiers {version} cannot be imported: {error}") from error
    return verifiers.v1


def _taskset_class(name: str) -> Any:
    library = _library(name)
    if ":" in name:
        found = load_attribute(name, FIELD)
    else:
        from verifiers.v1.utils.loaders import taskset_class  # type: ignore[import-not-found]

        try:
            found = taskset_class(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{FIELD} = 'verifiers:{name}': {error}") from error
    if not (isinstance(found, type) and issubclass(found, library.Taskset)):
        raise ConfigError(f"{FIELD} = 'verifiers:{name}' is no verifiers.v1.Taskset; the classic API is not supported")
    return found


class VerifiersTaskset:
    """A taskset as an environment of single-turn tasks.

    Args:
        name: an installed taskset's id, or ``FILE.py:CLASS`` or ``MODULE:CLASS``.
        taskset: its configuration.
        heldout: what of it is different for the held-out tasks; without any there are none.
        tasks_max: most tasks of a split; needed where the taskset has no end.
    """

    tools = ()
    needs_sandbox = False

    def __init__(self, name: str, taskset: dict[str, Any], heldout: dict[str, Any], tasks_max: int | None) -> None:
        self._shown = f"{FIELD} = 'verifiers:{name}'"
        self._class, self._name = _taskset_class(name), name
        self._settings, self._heldout, self._tasks_max = taskset, heldout, tasks_max
        self._task_config = self._taskset({}).config.task
        self._task_class = self._class.task_type()
        self._refuse_class()

    def _taskset(self, overlay: dict[str, Any]) -> Any:
        from verifiers.v1 import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type  # type: ignore[import-not-found]

        kind = concrete_type(self._class, TasksetConfig, origin=_library(self._name).Taskset)
        try:
            named = {} if ":" in self._name else {"id": self._name}
            config = (kind or TasksetConfig).model_validate(named | self._settings | overlay)
            return self._class(config)
        except Exception as error:  # the taskset's own code and its configuration's checks; reported with the cause
            raise ConfigError(f"{self._shown}: environment.settings.taskset does not fit: {error}") from error

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """Tasks of the taskset, or of the one that ``heldout`` makes of it.

        Raises: ConfigError (a taskset without end), TaskError naming the task that cannot be judged here.
        """
        if split != "train" and not self._heldout:
            return
        taskset = self._taskset(self._heldout if split != "train" else {})
        if self._tasks_max is not None:
            taskset = taskset.take(self._tasks_max)
        elif not taskset.bounded:
            raise ConfigError(f"{self._shown} has no end: set environment.settings.tasks_max")
        for number, task in enumerate(taskset, start=1):
            yield self._row(task, f"{self._shown}, {split} task {number}")

    def _row(self, task: Any, where: str) -> dict[str, Any]:
        if type(task) is not self._task_class:
            raise TaskError(f"{where} is a {type(task).__name__}, but the taskset says its tasks are {self._task_class.__name__}")
        data = task.data
        if data.prompt is None:
            raise TaskError(f"{where} has no prompt: a simulated user would open it, which is not supported")
        if data.image is not None:
            raise TaskError(f"{where} runs in the container image {data.image!r}, which is not supported")
        wire = data.model_dump(mode="json", exclude_none=True)
        asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else wire["prompt"]
        if data.system_prompt is not None:
            asked = [{"role": "system", "content": data.system_prompt}, *asked]
        messages = read_messages(asked, where)
        row = {"messages": messages, "prompt": plain_text(messages), "verifiers": wire}
        answer = getattr(data, "answer", None)
        return row if answer is None else row | {"answer": answer if isinstance(answer, str) else json.dumps(answer)}

    def _refuse_class(self) -> None:
        """Refuse what a completion alone cannot be judged by. Raises ConfigError."""
        base, kind = _library(self._name).Task, self._task_class
        why = ""
        if kind is base:
            why = "does not name the type of its tasks: declare class MyTaskset(Taskset[MyTask, MyConfig])"
        elif kind.NEEDS_CONTAINER:
            why = "needs a container"
        elif kind.toolsets(self._task_config) or self._class.toolsets(self._taskset({}).config):
            why = "has tools"
        elif self._task_config.judges:
            why = "asks a judge model"
        else:
            hooks = [name for name in ("setup", "finalize") if getattr(kind, name) is not getattr(base, name)]
            why = f"has the runtime hook {hooks[0]}()" if hooks else ""
        if why:
            raise ConfigError(f"{self._shown} {why}; only single-turn tasksets judged from the trace alone are supported")

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """The weighted sum of the task's rewards over a trace of one turn.

        Raises: VerifierError (not its task, or a reward was not given), the library's ``TaskError`` with what a reward raised.
        """
        from verifiers.v1.errors import RolloutError  # type: ignore[import-not-found]

        task = self._task(episode)
        trace = self._trace(task, episode)
        try:
            await task.score(trace)
        except RolloutError as error:
            if type(error).__name__ not in _INFRASTRUCTURE:
                raise
            told = f"verifiers: {type(error).__name__}: {error}"
            return RewardResult(None, RewardStatus.INFRA_ERROR, told, blame=Blame.INFRA)
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored or not trace.rewards:
            raise VerifierError(f"{self._shown}: {', '.join(unscored) or 'no reward at all'} was not given")
        parts = finite_parts({name: reward.score for name, reward in trace.rewards.items()} | trace.metrics)
        value = float(trace.reward)
        if not math.isfinite(value):
            raise VerifierError(f"{self._shown}: its reward is {value}")
        return RewardResult(value, parts=parts)

    def _task(self, episode: Episode) -> Any:
        row = episode.task.get("verifiers")
        if not isinstance(row, dict):
            raise VerifierError(f"{self._shown} judges its own tasks only: set task.source = 'environment'")
        task = self._task_class(self._task_class.data_type().model_validate(row), self._task_config)
        needing = [f.__name__ for f in (*task.hooks("reward"), *task.hooks("metric")) if _needs_runtime(f)]
        if needing:
            raise VerifierError(f"{self._shown}: {needing[0]}() needs the library's runtime and would be left out of the reward")
        return task

    def _trace(self, task: Any, episode: Episode) -> Any:
        """The trace of one turn: the prompt's messages, then the completion as the assistant's."""
        from verifiers.v1 import graph
        from verifiers.v1.configs.agent import AgentConfig  # type: ignore[import-not-found]
        from verifiers.v1.state import state_cls  # type: ignore[import-not-found]
        from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask  # type: ignore[import-not-found]
        from verifiers.v1.types import AssistantMessage, Request, Response  # type: ignore[import-not-found]

        seed = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = Trace(task=seed, state=state_cls(type(task))(), agent=AgentInfo(config=AgentConfig()))
        asked = prompt_of(episode.task)
        prompt = Request(messages=[{"role": "user", "content": asked}] if isinstance(asked, str) else asked).messages
        said = AssistantMessage(content=episode.completion)
        response = Response(id=trace.id, created=0, model="rollbook", message=said, finish_reason="stop")
        node = graph.prepare_turn(trace, prompt).commit(response)
        trace.calls.append(ModelCall(node=node, model="rollbook", finish_reason="stop"))
        trace.stop("agent_completed")
        trace.is_completed = trace.ok = True
        return trace


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
