"""Found by every process of a run that a drill has started: makes it die with the drill, record what it was told, and bend.

Reads one JSON file per subject from the directory that ``DRILL_CONTROL`` names, each time it matters, so that a drill turns a
disturbance on and off while the run goes on. Each change is made when its module is imported, so that no role loads a library
that it would not have loaded. Nothing of this is reachable in a run that no drill has started.

``clock.json``    ``{role: {"offset_s": s, "rate": r}}``: wall clock stepped by s; monotonic clock running r times as fast
``storage.json``  ``{role: {"below": "/checkpoints/", "error": "ENOSPC" | "EROFS" | "EIO", "fsync_s": s}}``
``poison.json``   ``{"prompts": [hex of int32 token ids]}``: generating one of these is a SIGKILL of the worker
``proxy.json``    ``{role: "host:port"}``: where the role finds the ledger server
``old.json``      ``{"workers": ["0"]}``: these workers speak the protocol of the previous release
``start.json``    ``{"roles": ["worker"], "error": text}``: these roles die when they are started
``weights.json``  ``{"roles": ["worker"]}``: the files of published versions are not there for these roles
``sandbox.json``  ``{"error": text}``: no sandbox can be made
``heat.json``     ``{"times": x}``: engines sample at so many times the temperature that the configuration says
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

CONTROL = Path(os.environ["DRILL_CONTROL"]) if os.environ.get("DRILL_CONTROL") else None
_read: dict[str, tuple[int, dict[str, Any]]] = {}


def told(subject: str) -> dict[str, Any]:
    """What the drill says of it now; empty while it says nothing."""
    assert CONTROL is not None
    path = CONTROL / f"{subject}.json"
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return {}
    if _read.get(subject, (0, {}))[0] != stamp:
        try:
            _read[subject] = (stamp, json.loads(path.read_text()))
        except (OSError, ValueError):
            return {}
    return _read[subject][1]


def role() -> str:
    """The ``rollbook`` command this process runs, as far as it is known."""
    return sys.argv[1] if len(sys.argv) > 1 else ""


def bend_host(module: ModuleType) -> None:
    """Clocks and storage as this process sees them."""
    host = module.Host
    plain_fsync = host.fsync
    base: list[float] = [0.0, 0.0, 1.0]  # real, shown, rate

    def now(self: Any) -> float:
        return time.time() + told("clock").get(role(), {}).get("offset_s", 0.0)

    def monotonic(self: Any) -> float:
        real, rate = time.monotonic(), told("clock").get(role(), {}).get("rate", 1.0)
        shown = base[1] + (real - base[0]) * base[2] if base[0] else real
        if rate != base[2] or not base[0]:
            base[:] = [real, shown, rate]
        return shown

    def writing(self: Any, path: Path) -> None:
        said = told("storage").get(role(), {})
        if said.get("error") and said.get("below", "") in str(path):
            number = getattr(errno, said["error"])
            raise OSError(number, os.strerror(number), str(path))

    def fsync(self: Any, fd: int, path: Path) -> None:
        said = told("storage").get(role(), {})
        if said.get("fsync_s") and said.get("below", "") in str(path):
            time.sleep(said["fsync_s"])
        plain_fsync(self, fd, path)

    host.time, host.monotonic, host.writing, host.fsync = now, monotonic, writing, fsync


def record_acknowledgements(module: ModuleType) -> None:
    """One line per answer to a submission, as the soak has it."""
    file = Path(__file__).resolve().parents[2] / "acknowledgements.py"
    spec = importlib.util.spec_from_file_location("drill_acknowledgements", file)
    assert spec is not None and spec.loader is not None
    acknowledgements = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(acknowledgements)
    acknowledgements.record()


def bend_engine(module: ModuleType) -> None:
    """Generating a poisonous prompt kills the process, and each death leaves one byte; engines sample as hot as they are told."""
    generate = module.TransformersEngine.generate

    def poisoned(self: Any, requests: Any, sampling: Any) -> Any:
        bad = told("poison").get("prompts", [])
        if bad and any(struct.pack(f"<{len(r.prompt_ids)}i", *r.prompt_ids).hex() in bad for r in requests):
            assert CONTROL is not None
            fd = os.open(CONTROL / "poisoned", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(fd, b".")
            os.close(fd)
            os.kill(os.getpid(), signal.SIGKILL)
        hotter = told("heat").get("times", 1.0)
        return generate(self, requests, dataclasses.replace(sampling, temperature=sampling.temperature * hotter))

    module.TransformersEngine.generate = poisoned


def reroute(module: ModuleType) -> None:
    """Clients find the drill's proxy in place of the server once the server has written its address."""
    plain = module.addresses_in

    def addresses_in(*args: Any) -> Callable[[], list[str]]:
        read = plain(*args)

        def found() -> list[str]:
            addresses = read()
            return [told("proxy")[role()]] if role() in told("proxy") else addresses

        return found

    module.addresses_in = addresses_in


def speak_as_before(module: ModuleType) -> None:
    """Messages without the fields that the newest release has added."""
    submission, report = module.submission_message, module.failure_report_message

    def is_old() -> bool:
        index = sys.argv[sys.argv.index("--index") + 1] if "--index" in sys.argv else ""
        return role() == "worker" and index in told("old").get("workers", [])

    def without(message: Any, *fields: str) -> Any:
        if is_old():
            for field in fields:
                message.ClearField(field)
        return message

    module.submission_message = lambda r: without(submission(r), "blame")
    module.failure_report_message = lambda r: without(
        report(r), "sandbox_status", "n_tokens", "generate_s", "verify_s", "evidence_json", "final"
    )


def hide_weights(module: ModuleType) -> None:
    """A shared file system on which published versions do not appear."""
    plain = module.weight_files

    def weight_files(path: Any) -> Any:
        if role() in told("weights").get("roles", []):
            raise module.NotReady(f"no safetensors file in {path}: the version's bytes are not there")
        return plain(path)

    module.weight_files = weight_files


def refuse_sandboxes(module: ModuleType) -> None:
    """What sandboxes are made with is gone."""
    plain = module.ZygoteSandbox._start

    def start(self: Any, *args: Any) -> Any:
        if error := told("sandbox").get("error"):
            raise OSError(errno.ENOENT, error)
        return plain(self, *args)

    module.ZygoteSandbox._start = start


class _OnImport(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it is loaded."""

    def __init__(self, target: str, change: Callable[[ModuleType], None]) -> None:
        self._target, self._change = target, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if CONTROL is not None:
    if os.environ.get("DRILL_PID") == str(os.getppid()):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ["DRILL_PID"]):
            os._exit(1)
    if role() in told("start").get("roles", []):
        print(told("start")["error"], file=sys.stderr, flush=True)
        os._exit(1)
    for _target, _change in (
        ("rollbook.core.host", bend_host), ("rollbook.rollout.delivery", record_acknowledgements),
        ("rollbook.rollout.transformers_engine", bend_engine), ("rollbook.rpc.address", reroute),
        ("rollbook.rpc.convert", speak_as_before), ("rollbook.rollout.weights", hide_weights),
        ("rollbook.sandbox.zygote", refuse_sandboxes),
    ):  # fmt: skip
        sys.meta_path.insert(0, _OnImport(_target, _change))
