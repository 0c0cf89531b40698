"""What runs inside a sandbox, the same in every backend; standard library only.

Owns the order set-up → ready byte → program → ``serve`` and the claim about how it ended. The claim comes from where untrusted
code runs, so whoever reads it lets it choose among the program's own failures only. Never judges.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
import types
from typing import NoReturn

READY = b"R"
ANSWERS_FD, CLAIM_FD = 3, 4
CLAIM_BYTES_MAX = 8192
_TEXT_MAX = 2000
COUNT_S = 0.25
"""A job that could not fork stays this long, so that its watcher can count processes before they end with it."""


def run(payload_fd: int, answers_fd: int, claim_fd: int) -> None:
    """Run one program; returns when it has ended by itself, whatever it did."""
    with os.fdopen(payload_fd, "rb") as file:
        payload = json.loads(file.read())
    for name, content in payload["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    setup: dict = {"__name__": "__setup__"}
    exec(compile(payload["setup"], "<setup>", "exec"), setup)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    source, me = payload.pop("source"), os.getpid()
    os.write(claim_fd, READY)
    claim: dict = {"end": "ok"}
    try:
        exec(compile(source, "<program>", "exec"), main.__dict__)
        if "serve" in setup:
            setup["serve"](main.__dict__, lambda line: write_all(answers_fd, line + b"\n"))
    except BaseException as error:  # noqa: BLE001 - model-written code raises what it likes
        claim = _claim_of(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    if os.getpid() != me:
        return  # a child of the program has come here as well: its end is not the program's
    if claim.get("errno") == errno.EAGAIN:
        time.sleep(COUNT_S)
    write_all(claim_fd, json.dumps(claim).encode()[:CLAIM_BYTES_MAX])


def _claim_of(error: BaseException) -> dict:
    if isinstance(error, MemoryError):
        return {"end": "memory"}
    if isinstance(error, SystemExit):
        return {"end": "exit", "text": f"SystemExit: {error.code!r:.100}"}
    end = "syntax" if isinstance(error, SyntaxError) and getattr(error, "filename", "") == "<program>" else "error"
    number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else 0
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        said = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - its own __str__ may raise as well
        said = "an exception that cannot be shown"
    return {"end": end, "errno": number, "text": f"{said[:_TEXT_MAX]} (line {line})"}


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however little a call takes."""
    while data:
        data = data[os.write(fd, data) :]


def payload_of(source: str, setup: str, files: dict[str, bytes]) -> bytes:
    """The bytes ``run`` reads."""
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return json.dumps({"source": source, "setup": setup, "files": encoded}).encode()


def reap(inner: tuple[int, int, int, int, int, int], status: int) -> NoReturn:
    """As first process of a pid namespace: start the job, reap, write its wait status, end; the kernel ends what is left."""
    # The kernel keeps from a first process what it does not handle, and Python handles this one: before anybody can send it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if (job := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            become_job(*inner)
        for fd in inner:
            os.close(fd)
        while True:
            pid, how = os.wait()
            if pid == job:
                os.write(status, str(how).encode())
                break
    finally:
        os._exit(0)


def become_job(stdin: int, stdout: int, stderr: int, payload: int, answers: int, claim: int) -> NoReturn:
    """Put the descriptors where they belong, close all others, run, and leave without a trace of the interpreter's exit."""
    code = 1
    try:
        moved = [os.dup(fd) for fd in (stdin, stdout, stderr, answers, claim, payload)]
        # Two moves, so that no target is still needed as a source.
        high = [os.dup2(fd, 200 + place) for place, fd in enumerate(moved)]
        for target, fd in enumerate(high):
            os.dup2(fd, target, inheritable=target < 3)
        os.closerange(6, 4096)
        run(5, ANSWERS_FD, CLAIM_FD)
        code = 0
    except BaseException as error:  # noqa: BLE001 - before the ready byte this is the sandbox's own failure
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(code)


if __name__ == "__main__":
    # PAYLOAD ANSWERS CLAIM STATUS PROCESSES, as first process of namespaces that somebody else has made.
    _payload, _answers, _claim, _status, _processes = map(int, sys.argv[1:6])
    resource.setrlimit(resource.RLIMIT_NPROC, (_processes, _processes))
    reap((0, 1, 2, _payload, _answers, _claim), _status)
