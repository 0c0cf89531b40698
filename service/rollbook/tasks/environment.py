"""The run's environment: found by its name, made with its settings, completed and checked.

Owns what ``environment.name`` may say, how an author's class becomes an ``Environment``, the defaults of its optional
attributes and the rule what its answers mean. Never runs in the worker itself: whoever calls ``load_environment`` runs the
author's code (``tasks.child`` does). Upholds P6 (what a score returns is checked before it counts) and P12 (the environment
has a digest).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.core.config import Config, code_names, portable_code, split_adapter
from rollbook.core.environments import Context, Episode, RewardResult, Tool, ToolReply, ToolRequest
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.idempotency import digest
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits
from rollbook.core.settings import SandboxConfig
from rollbook.tasks.importing import load_attribute, near, source_file
from rollbook.tasks.verifier import make_verifier, normalised

GROUP = "rollbook.environments"
"""Entry points under which packages offer environments by a short name."""

FIELD = "environment.name"
_OWN_REWARDS = "rollbook.tasks.rewards:"
_TEXT_MAX = 2000


def load_environment(config: Config) -> CompleteEnvironment:
    """The run's environment, with every optional attribute there; runs its author's code.

    Raises: ConfigError (it cannot be found or made, or is no environment), naming the field and the way out.
    """
    name = config.environment.name
    if not name:
        return complete(SingleTurn(config), f"task.reward = {config.task.reward!r}")
    shown = f"{FIELD} = {name!r}"
    prefix, rest = split_adapter(name)
    if prefix:
        from rollbook.tasks import adapters  # its libraries are optional

        return complete(adapters.load(prefix, rest, config), shown)
    target = _named(name)
    return complete(_made(target, config.environment.settings, shown), shown)


def judges_in_process(config: Config) -> bool:
    """Whether completions are judged by a reward of the service itself, which is bounded and nobody else's code."""
    return not config.environment.name and config.task.reward.startswith(_OWN_REWARDS)


def environment_digest(config: Config) -> str:
    """sha256 hex over name, settings and source file of the run's environment, for its manifest (P12).

    Raises: ConfigError (there is no such file, module or entry point).
    """
    name = config.environment.name
    if not split_adapter(name)[0]:
        spec = name if ":" in name else _entry_point(name).value
        source = source_file(spec, FIELD).read_bytes()
    else:
        try:
            source = b"\0".join(source_file(spec, FIELD).read_bytes() for spec in code_names(name))
        except ConfigError:  # names no code: a dataset of a package, whose version the manifest has
            source = b""
    settings = json.dumps(config.environment.settings, sort_keys=True)
    return digest("environment", portable_code(name), settings, source)


def limits_of(config: SandboxConfig) -> Limits:
    """The bounds of a job that the configuration asks for."""
    return Limits(
        cpu_s=config.cpu_s, wall_s=config.wall_s, memory_bytes=config.memory_mb << 20, processes=config.processes,
        output_bytes=config.output_kb << 10, disk_bytes=config.disk_mb << 20,
    )  # fmt: skip


class SingleTurn:
    """One turn, judged by ``task.reward`` behind ``task.completion_pattern``: what a run without an environment has."""

    tools: Sequence[Tool] = ()
    needs_sandbox = False

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError (no such reward function, bad pattern)."""
        self._verify = make_verifier(config)

    def score(self, episode: Episode, context: Context) -> RewardResult:
        """The verifier's result. Raises VerifierError."""
        return self._verify(episode.completion, episode.task)


@dataclass(frozen=True, slots=True)
class CompleteEnvironment:
    """An environment as the service uses it: nothing is optional, every answer is checked.

    Functions that are not coroutines run in threads, so that one that waits does not hold up the others.
    """

    inner: Any
    shown: str
    """What a message calls it."""
    tools: tuple[Tool, ...]
    needs_sandbox: bool
    concurrent: bool
    """Every score and tool is a coroutine function, so many may be in flight at once."""

    @property
    def pure_tools(self) -> dict[str, bool]:
        """Name of each tool to whether its calls may run again."""
        return {tool.name: tool.pure for tool in self.tools}

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        """The environment's tasks. Raises ConfigError (it brings none), whatever it raises."""
        if not callable(getattr(self.inner, "load", None)):
            raise ConfigError(f"{self.shown} brings no tasks: it has no load(split); name a task.source that has some")
        return self.inner.load(split)

    def parse(self, text: str) -> ToolRequest | None:
        """The call a turn ends with. Raises VerifierError when the environment raises or answers with something else."""
        if not self.tools:
            return None
        request = self._guarded("parse", self.inner.parse, text)
        if request is None:
            return None
        if not isinstance(request, ToolRequest) or not isinstance(request.arguments, dict):
            raise VerifierError(f"{self.shown}: parse returned {request!r:.80}, expected a ToolRequest or None")
        if request.tool not in self.pure_tools:
            known = ", ".join(self.pure_tools)
            raise VerifierError(f"{self.shown}: parse returned a call of {request.tool!r}, but its tools are {known}")
        return request

    def render(self, reply: ToolReply) -> str:
        """Text of a tool's answer. Raises VerifierError (see ``parse``)."""
        if not callable(getattr(self.inner, "render", None)):
            return reply.text
        text = self._guarded("render", self.inner.render, reply)
        if not isinstance(text, str):
            raise VerifierError(f"{self.shown}: render returned {text!r:.80}, expected text")
        return text

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """The environment's judgement, checked. Raises VerifierError, with what it raised chained."""
        return normalised(await self._run("score", self.inner.score, episode, context), f"{self.shown}: score")

    async def call_tool(
        self, request: ToolRequest, earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        """A tool's answer, checked. Raises VerifierError (no such tool, it raised, or it answered with something else)."""
        tool = next((tool for tool in self.tools if tool.name == request.tool), None)
        if tool is None:
            raise VerifierError(f"{self.shown} has no tool {request.tool!r}; it has {', '.join(self.pure_tools) or 'none'}")
        reply = await self._run(f"tool {tool.name!r}", tool.call, request.arguments, earlier, context)
        if isinstance(reply, str):
            return ToolReply(reply)
        fields = (reply.text, reply.reason) if isinstance(reply, ToolReply) else (None,)
        if not all(isinstance(text, str) for text in fields) or not isinstance(reply.sandbox_status, SandboxStatus):
            raise VerifierError(f"{self.shown}: tool {tool.name!r} returned {reply!r:.80}, expected a ToolReply or text")
        if not isinstance(reply.blame, Blame | None):
            raise VerifierError(f"{self.shown}: tool {tool.name!r} returned {reply!r:.200}: blame must be a Blame or None")
        return reply

    def _guarded(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:  # the author's code: whatever it raises is told, never obeyed
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: BaseException) -> VerifierError:
        told = last_line(error)
        return VerifierError(told if isinstance(error, VerifierError) else f"{self.shown}: {what} raised {told}")

    async def _run(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            returned: Any = function(*arguments)
        else:
            # Errors come back as values: a future cannot carry every kind of exception.
            returned, error = await asyncio.get_running_loop().run_in_executor(None, _outcome, function, arguments)
            if error is not None:
                raise self._failure(what, error) from error
        if not inspect.isawaitable(returned):
            return returned
        try:
            return await returned
        except BaseException as error:  # the author's code: whatever it raises is told, never obeyed
            raise self._failure(what, error) from error


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - the author's code: whatever it raises is told, never obeyed
        return None, error


def last_line(error: BaseException) -> str:
    """``ValueError: why (file.py:12)``; a VerifierError says by itself what was raised, and its cause says where."""
    cause = error.__cause__ if isinstance(error, VerifierError) and error.__cause__ is not None else error
    name = type(error).__name__
    try:
        text = str(error) if isinstance(error, VerifierError) else f"{name}: {error}".removesuffix(": ")
    except BaseException:  # noqa: BLE001 - how it is shown is the author's code as well
        text = name
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{text[:_TEXT_MAX]}{place}"


def _named(name: str) -> Any:
    if ":" in name:
        return load_attribute(name, FIELD)
    found = _entry_point(name)
    try:
        return found.load()
    except Exception as error:  # user code at import; reported with its cause
        raise ConfigError(f"{FIELD} = {name!r}: loading {found.value} raised {type(error).__name__}: {error}") from error


def _entry_point(name: str) -> importlib.metadata.EntryPoint:
    offered = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in offered:
        known = f"; installed: {', '.join(sorted(offered))}" if offered else ""
        raise ConfigError(
            f"{FIELD} = {name!r}: no installed package offers it under {GROUP!r}{near(name, offered) or known}; write "
            "module:attribute or file.py:attribute for one that is not installed"
        )
    return offered[name]


def _made(target: Any, settings: Mapping[str, Any], shown: str) -> Any:
    """The environment that a class or factory makes with the settings, or ``target`` itself where it is one."""
    if not inspect.isclass(target) and (hasattr(target, "score") or not callable(target)):
        if settings:
            raise ConfigError(f"{shown} is an object already and takes no environment.settings; name its class, or remove them")
        return target
    _check_settings(target, settings, shown)
    try:
        return target(**settings)
    except ConfigError as error:
        raise ConfigError(f"{shown}: {error}") from None
    except Exception as error:  # user code; reported with its cause
        raise ConfigError(f"{shown}: making it raised {last_line(error)}; check environment.settings") from error


def _check_settings(target: Any, settings: Mapping[str, Any], shown: str) -> None:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # written in C; calling it will tell
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in settings:
            if key not in names:
                hint = near(key, names) or f"; it takes {', '.join(names) or 'none'}"
                raise ConfigError(f"{shown} takes no setting environment.settings.{key}{hint}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in settings:
            raise ConfigError(f"{shown} needs the setting environment.settings.{parameter.name}")


def complete(inner: Any, shown: str) -> CompleteEnvironment:
    """``inner`` with its optional attributes filled in. Raises ConfigError where it is no environment."""
    score = getattr(inner, "score", None)
    if not callable(score):
        hint = near("score", [name for name in dir(inner) if not name.startswith("_")])
        raise ConfigError(f"{shown} is a {type(inner).__name__} without score(episode, context), so it is no environment{hint}")
    _check_takes(score, ("episode", "context"), f"{shown}: score")
    tools = getattr(inner, "tools", ())
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigError(f"{shown}: tools is a {type(tools).__name__}, expected a list of tools")
    for tool in tools:
        _check_tool(tool, shown)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"{shown}: two of its tools have one name ({', '.join(names)})")
    for method, wanted in (("parse", bool(tools)), ("render", False), ("load", False)):
        given = getattr(inner, method, None)
        if given is None and wanted:
            raise ConfigError(f"{shown} has tools but no parse(text), so no call of them can be read from a turn")
        if given is not None and not callable(given):
            raise ConfigError(f"{shown}: {method} is a {type(given).__name__}, expected a method")
        if inspect.iscoroutinefunction(given):
            raise ConfigError(f"{shown}: {method} is a coroutine function, expected an ordinary one")
    needs_sandbox = getattr(inner, "needs_sandbox", False)
    if not isinstance(needs_sandbox, bool):
        raise ConfigError(f"{shown}: needs_sandbox = {needs_sandbox!r}, expected True or False")
    concurrent = all(inspect.iscoroutinefunction(f) for f in (score, *(tool.call for tool in tools)))
    return CompleteEnvironment(inner, shown, tuple(tools), needs_sandbox, concurrent)


def _check_tool(tool: Any, shown: str) -> None:
    name = getattr(tool, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{shown}: the tool {tool!r:.80} has no name; give it name = 'python', for example")
    if not isinstance(getattr(tool, "pure", None), bool):
        raise ConfigError(
            f"{shown}: tool {name!r} does not say whether it is pure; set pure = True where running a call twice is the same as "
            "once, else pure = False"
        )
    call = getattr(tool, "call", None)
    if not callable(call):
        raise ConfigError(f"{shown}: tool {name!r} has no call(arguments, earlier, context)")
    _check_takes(call, ("arguments", "earlier", "context"), f"{shown}: call of tool {name!r}")


def _check_takes(function: Callable[..., Any], names: Sequence[str], shown: str) -> None:
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ConfigError(f"{shown} must take ({', '.join(names)}): {error}") from None
    except ValueError:  # written in C; calling it will tell
        return

