"""The environment process: the user's environment, alone with what it starts.

Three processes, two of which run nobody's code. A *guardian* makes everything that is started below it its own (child
subreaper), watches the process it has forked, and kills whatever is left when that one ends, when the worker asks for it or when
its own parent is gone. The outer guardian watches the inner one, and that one the *server*: whichever of them is killed, by the
author's code or for want of memory, another is left to kill the rest. The server, in a session of its own so that a signal to its
process group misses them, loads the environment, makes its sandbox and answers requests.

Owns verbs and the order of the opening. Standard output is the log, so nothing that is printed can pass for an answer. Uses
no alarm signals: bounds are kept by whoever asks. Upholds P6: an exception is an error record, never a value.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollbook.sandbox import kernel

if TYPE_CHECKING:  # the guardians stay small: what the server needs is imported after the fork
    from rollbook.core.config import Config
    from rollbook.core.environments import Context
    from rollbook.core.sandboxing import Sandbox
    from rollbook.tasks.environment import CompleteEnvironment
    from rollbook.tasks.wire import Channel

THREADS = 32
"""Functions that are no coroutines run in so many threads at most."""
ROWS_MAX = 2_000_000
"""Most tasks of a split; an endless ``load`` ends here."""

_WATCH_S = 1.0
_END_S = 5.0
_AGAIN_S = 0.005
_ROWS_BYTES = 1 << 20
_WELL = "exit code 0"


def main() -> None:
    """Arguments: file descriptors of the control and the request socket, and the pid of the worker."""
    control, requests, owner = (int(argument) for argument in sys.argv[1:4])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outer = os.getpid()

    def guard_server() -> None:
        inner = os.getpid()
        _tell(control, _guard(outer, control, requests, lambda: _start_server(inner, control, requests)))

    ended = _guard(owner, control, requests, guard_server)
    if ended != _WELL:  # the inner guardian could not tell how the server ended
        _tell(control, ended)
    os._exit(0)  # nothing here needs an interpreter's end


def _guard(owner: int, control: int, requests: int, go_on: Callable[[], None]) -> str:
    """Fork a process that goes on elsewhere; returns how it ended by itself, or nothing, when all that was below is dead."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _note)
    if os.getppid() != owner:
        return ""
    try:
        child = os.fork()
    except OSError:  # for want of processes or memory, which no environment is to blame for: what was killed is tried again
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for fd in (awake, wake):
            os.close(fd)
        go_on()
        os._exit(0)
    os.close(requests)
    ended = _watch(child, control, awake, owner)
    _end_descendants()
    return ended


def _start_server(guardian: int, control: int, requests: int) -> None:
    os.close(control)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if os.getppid() == guardian:
        _serve(requests)


def _tell(control: int, ended: str) -> None:
    with contextlib.suppress(OSError):
        os.write(control, ended.encode())


_told_to_end = False


def _note(number: int, frame: object) -> None:
    global _told_to_end
    _told_to_end = _told_to_end or number == signal.SIGTERM


def _watch(child: int, control: int, awake: int, owner: int) -> str:
    """Wait until the child ends or shall end; returns how it ended by itself, or nothing."""
    while not _told_to_end and os.getppid() == owner:
        readable, _, _ = select.select([control, awake], [], [], _WATCH_S)
        if awake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)
        for pid, status in _reaped():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if control in readable:
            break
    return ""


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, orphans among them."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _end_descendants() -> None:
    """Kill everything below this process; what is forked meanwhile is found in the next round."""
    until = time.monotonic() + _END_S
    while (found := _descendants(os.getpid())) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for _ in _reaped():
            pass
        time.sleep(_AGAIN_S)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: set[int] = set()
    below = [root]
    while below:
        new = [pid for pid in children.get(below.pop(), []) if pid not in found]
        found.update(new)
        below += new
    return found


def _serve(fd: int) -> None:
    """Open the environment, then answer until the worker closes its end."""
    os.dup2(2, 1)  # what is printed belongs into the log
    import faulthandler

    from rollbook.core.errors import RollbookError
    from rollbook.tasks.wire import Channel

    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    channel = Channel(sock)
    opening = channel.read()
    if opening is None:
        return
    sys.path[:] = opening["sys_path"]
    try:
        opened = _open(channel, opening)
    except BaseException as error:  # noqa: BLE001 - the author's code: whatever it raises is told, never obeyed
        again = isinstance(error, RollbookError) and error.retryable
        channel.write({"refused": _told(error), "kind": type(error).__name__, "again": again})
        return
    if opened is not None:
        _Server(channel, *opened).run()


def _told(error: BaseException) -> str:
    from rollbook.core.errors import RollbookError
    from rollbook.tasks.environment import last_line

    try:
        return str(error) if isinstance(error, RollbookError) else last_line(error)
    except BaseException:  # noqa: BLE001 - how it is shown is the author's code as well
        return type(error).__name__


def _open(channel: Channel, opening: dict[str, Any]) -> tuple[Config, CompleteEnvironment, Sandbox | None] | None:
    """What a server needs; None when all that was asked for were tasks, or the worker is gone. Raises ConfigError, TaskError."""
    from rollbook.core.config import config_from_json
    from rollbook.core.errors import ConfigError
    from rollbook.tasks.environment import load_environment

    config = config_from_json(opening["config"])
    environment = load_environment(config)
    if opening["split"]:
        _send_tasks(channel, environment, opening["split"])
        return None
    channel.write(
        {"loaded": environment.pure_tools, "needs_sandbox": environment.needs_sandbox, "concurrent": environment.concurrent}
    )
    chosen = channel.read()
    if chosen is None:
        return None
    sandbox = None
    if environment.needs_sandbox:
        from rollbook.sandbox.backends import make_backend

        if not chosen["backend"]:
            raise ConfigError(f"{environment.shown} needs a sandbox, but none may be used here")
        sandbox = make_backend(chosen["backend"], config.sandbox.slots)
    if opening.get("faults"):  # a worker's environment takes part in drills; one that only looks does not
        from rollbook.observe import failpoints

        failpoints.arm_configured(config.chaos.failpoints, os.path.join(config.run.dir, "chaos") if config.chaos.once else "")
    channel.write({"ready": True})
    return config, environment, sandbox


def _send_tasks(channel: Channel, environment: CompleteEnvironment, split: str) -> None:
    """The tasks of a split in pieces. Raises TaskError naming the row that is no task, or the cause why there are none."""
    from rollbook.core.errors import RollbookError, TaskError
    from rollbook.tasks.environment import last_line
    from rollbook.tasks.sources import canonical

    rows: list[str] = []
    size = number = 0
    try:
        for number, row in enumerate(environment.load(split), start=1):
            where = f"{environment.shown}, {split} task {number}"
            if number > ROWS_MAX:
                raise TaskError(f"{where}: more than {ROWS_MAX} tasks; load() must end")
            if not isinstance(row, dict):
                raise TaskError(f"{where}: expected a dict with the task's fields, found {type(row).__name__}")
            if not isinstance(row.get("prompt"), str):
                raise TaskError(f"{where}: no text in field 'prompt'; its fields are {', '.join(map(str, row)) or 'none'}")
            rows.append(canonical(row, where).decode())
            size += len(rows[-1])
            if size > _ROWS_BYTES:
                channel.write({"rows": rows})
                rows, size = [], 0
    except RollbookError:
        raise
    except BaseException as error:  # the author's code: whatever it raises is told, never obeyed
        raise TaskError(f"{environment.shown}: load({split!r}) raised {last_line(error)} after {number} tasks") from error
    channel.write({"rows": rows})
    channel.write({"end": number})


class _Server:
    """Answers requests: scores and tools in an event loop of the main thread, texts in the thread that reads."""

    def __init__(self, channel: Channel, config: Config, environment: CompleteEnvironment, sandbox: Sandbox | None) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        from rollbook.tasks.environment import limits_of

        self._channel, self._environment, self._sandbox = channel, environment, sandbox
        self._limits = limits_of(config.sandbox)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS))
        asyncio.set_event_loop(self._loop)

    def run(self) -> None:
        """Serve until the worker closes its end, which ends the process."""
        import threading

        threading.Thread(target=self._read, name="requests", daemon=True).start()
        self._loop.run_forever()

    def _read(self) -> None:
        import asyncio

        try:
            while (request := self._channel.read()) is not None:
                if request["verb"] in ("parse", "render"):
                    self._channel.send(self._texts(request))
                else:
                    asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
            if self._sandbox is not None:
                self._sandbox.close()
        except (OSError, ValueError):  # the worker is gone, or what it sent is no message
            traceback.print_exc()
        finally:
            os._exit(0)

    def _texts(self, request: dict[str, Any]) -> bytes:
        from rollbook.core.environments import ToolReply
        from rollbook.tasks import wire

        try:
            if request["verb"] == "parse":
                answer: Any = wire.request_out(self._environment.parse(request["text"]))
            else:
                answer = self._environment.render(wire.reply_in(request["reply"]) or ToolReply(""))
            return wire.frame({"id": request["id"], "answer": answer})
        except BaseException as error:  # noqa: BLE001 - the author's objects, see _answer
            return wire.frame({"id": request["id"], "error": _told(error)})

    async def _answer(self, request: dict[str, Any]) -> None:
        from rollbook.tasks import wire

        record: dict[str, Any] = {"id": request["id"]}
        try:
            context = self._context(request)
            if request["verb"] == "score":
                result = await self._environment.score(wire.episode_in(request["episode"]), context)
                record["answer"] = wire.result_out(result)
            else:
                asked = wire.request_in(request["request"])
                assert asked is not None
                reply = await self._environment.call_tool(asked, wire.earlier_in(request["earlier"]), context)
                record["answer"] = wire.reply_out(reply)
            data = wire.frame(record)
        except BaseException as error:  # noqa: BLE001 - reading the author's objects is the author's code: told, never obeyed
            data = wire.frame({"id": request["id"], "error": _told(error)})
        self._channel.send(data)

    def _context(self, request: dict[str, Any]) -> Context:
        from rollbook.core.environments import Context

        return Context(self._sandbox, self._limits, request["seed"], request["key"], request["limit_s"])


if __name__ == "__main__":
    main()
