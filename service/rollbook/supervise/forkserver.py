"""Quicker restarts for drills: roles are forked from a process that has imported everything already.

Owns the fork server, a single-threaded child of the supervisor, and how a forked process becomes a role. Never used unless
asked for (``rollbook run --fork-server``): what runs in a role is the same code, only its imports are not repeated.

A role is forked twice, so that it becomes a child of the supervisor, which is made the reaper of its orphans: pid, exit code
and death with the supervisor are as in an ordinary start, and the death of the fork server ends no role. A role begins only
after the supervisor has recorded its pid. Whatever goes wrong, the role is started in the ordinary way, from then on always.

Differences that remain: ``/proc/PID/environ`` of a forked role shows the supervisor's environment, and orphans of a dead role
stay zombies until the supervisor ends. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from rollbook.observe.failpoints import arm_from_environment
from rollbook.supervise.process import PR_SET_PDEATHSIG, Handle, role_command, spawn

MODULES = (
    "rollbook.ledger.ledger", "rollbook.rpc.server", "rollbook.rpc.client", "rollbook.tasks.feeder", "rollbook.learner.loop",
    "rollbook.rollout.worker", "rollbook.rollout.transformers_engine", "alembic.command", "psycopg",
)  # fmt: skip
"""What the roles import; one that is not installed is left out."""

ANSWER_S = 60.0
"""How long the fork server may take to answer; its first answer includes its imports."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Read by libraries when they are loaded, so a role that is to have more threads is not forked."""

_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES_MAX = 1 << 18
_GO = b"g"

Entry = Callable[[Sequence[str]], int]
"""The command line as a function: arguments to exit code."""


def preload(modules: Sequence[str] = MODULES) -> None:
    """Import what the roles will need and keep the collector off it, so that forked processes share the memory.

    Raises RuntimeError when an import has started a thread: such a process cannot be forked safely.
    """
    os.environ.update(ONE_THREAD)
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import has started threads; this process cannot be forked safely")
    gc.collect()
    gc.freeze()


def become(entry: Entry, argv: Sequence[str], env: Mapping[str, str], out_fd: int) -> NoReturn:
    """In a process just forked: run ``rollbook argv`` as a process of its own session, and exit with its code.

    Nothing of the forking process is left but its imports: open files are closed, signals have their usual effect, the
    environment is ``env``, output goes to ``out_fd``.
    """
    code: object = 1
    try:
        os.setsid()
        in_fd = os.open(os.devnull, os.O_RDONLY)
        for fd, target in ((in_fd, 0), (out_fd, 1), (out_fd, 2)):
            os.dup2(fd, target)
        os.closerange(3, 4096)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        arm_from_environment()
        sys.argv = ["rollbook", *argv]
        code = entry(argv)
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - boundary of the process: what the interpreter would print it prints here
        traceback.print_exc()
    finally:
        _exit(code)


def _exit(code: object) -> NoReturn:
    """End as the interpreter would, without unwinding the stack of the process that was forked."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


class ForkedRole:
    """A forked role as its parent handles it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Exit code of the dead process; negative: killed by that signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def terminate(self) -> None:
        """SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The supervisor's side; to be made by its main thread before it starts any other.

    Args:
        entry: ``rollbook.cli.main.main``.
    """

    def __init__(self, entry: Entry, modules: Sequence[str] = MODULES) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self._usable = True
        supervisor = os.getpid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _serve(theirs, supervisor, entry, modules)
        theirs.close()

    def launch(self, argv: Sequence[str], env: Mapping[str, str], out: IO[bytes], known: Callable[[int], None]) -> Handle:
        """Start a role (``process.Launcher``); in the ordinary way when it cannot be forked."""
        plain = role_command()
        one_thread = all(env.get(name) == value for name, value in ONE_THREAD.items())
        if not self._usable or list(argv[: len(plain)]) != plain or not one_thread:
            return spawn(argv, env, out, known)
        go_read, go_write = os.pipe()
        try:
            request = json.dumps([list(argv[len(plain) :]), dict(env)]).encode()
            try:
                socket.send_fds(self._socket, [request], [out.fileno(), go_read])
                role = ForkedRole(int(self._socket.recv(64)))
            except (OSError, ValueError):
                self.close()  # a role that is forked all the same reads no word to begin, and ends
                return spawn(argv, env, out, known)
            known(role.pid)
            os.write(go_write, _GO)
            return role
        finally:
            os.close(go_read)
            os.close(go_write)

    def close(self) -> None:
        """End the fork server; roles it has started live on."""
        if not self._usable:
            return
        self._usable = False
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _serve(requests: socket.socket, supervisor: int, entry: Entry, modules: Sequence[str]) -> NoReturn:
    """The fork server: fork a role per request until the supervisor is gone."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    try:
        preload(modules)
        while True:
            request, (out_fd, go_fd), _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 2)
            argv, env = json.loads(request)
            between = os.fork()
            if between == 0:
                if os.fork() != 0:
                    os._exit(0)
                _begin_role(requests, supervisor, go_fd)
                become(entry, argv, env, out_fd)
            os.waitpid(between, 0)
            os.close(out_fd)
            os.close(go_fd)
    except BaseException:  # noqa: BLE001 - boundary of the process: the supervisor sees the socket close
        os._exit(1)


def _begin_role(requests: socket.socket, supervisor: int, go_fd: int) -> None:
    """Become the supervisor's child, say so, and wait for its word."""
    deadline = time.monotonic() + ANSWER_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    requests.send(str(os.getpid()).encode())
    requests.close()
    if os.read(go_fd, 1) != _GO:
        os._exit(1)
