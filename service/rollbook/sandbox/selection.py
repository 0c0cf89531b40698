"""Which backend runs model-written code here: the first that contains every required attack, never the first that is installed.

Owns the choice, its record and its reuse by processes of the same machine. Never attacks in its own process and never falls back
to ``unsafe``, which is taken only where it is configured by name and then says that it contains nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError, RollbookError, Unavailable
from rollbook.core.host import host
from rollbook.core.sandboxing import Sandbox
from rollbook.core.settings import SandboxConfig
from rollbook.sandbox.attacks import arena
from rollbook.sandbox.attacks.probe import Result

CANDIDATES = ("zygote", "bubblewrap", "landlock")
UNSAFE = "unsafe"
PASS_S = 120.0
"""Longest pass of the suite over one backend."""
_FILE, _LOCK = "sandbox-selection.json", "sandbox-selection.lock"


@dataclass(frozen=True, slots=True)
class Examination:
    """A pass of the attack suite over one backend."""

    backend: str
    results: tuple[Result, ...] = ()
    enforced: tuple[str, ...] = ()
    unavailable: str = ""
    """Why it could not be attacked at all."""
    cut_short: bool = False
    """It was killed or ran out of time: that says nothing about the backend."""

    def failed(self) -> tuple[str, ...]:
        """Required attacks that were not contained, or could not be tried."""
        return tuple(result.attack for result in self.results if result.required and not result.contained)

    @property
    def contained(self) -> bool:
        return not self.unavailable and bool(self.results) and not self.failed()

    @property
    def disturbed(self) -> bool:
        """Nothing escaped, yet something could not be tried: worth a second pass, never a verdict."""
        escaped = any(result.required and result.contained is False for result in self.results)
        return self.cut_short or (bool(self.failed()) and not escaped)

    def why_not(self) -> str:
        """For a human; empty when it contains everything."""
        if self.unavailable:
            return self.unavailable
        words = {False: "escaped", None: "could not be tried"}
        bad = [result for result in self.results if result.required and not result.contained]
        return "; ".join(f"{each.attack} {words[each.contained]} ({each.reason})" for each in bad)


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend taken here, with what it was taken on."""

    backend: str
    contained: bool
    """False only for ``unsafe``: nothing keeps a program from the machine."""
    enforced: tuple[str, ...]
    kernel: str
    uid: int
    examinations: tuple[Examination, ...] = field(default=())

    def to_json(self) -> str:
        """Everything, for the worker's and the run's record."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """Inverse of ``to_json``."""
        return _selection_of(json.loads(text))


def _selection_of(value: Mapping[str, Any]) -> Selection:
    return Selection(
        value["backend"],
        value["contained"],
        tuple(value["enforced"]),
        value["kernel"],
        value["uid"],
        tuple(_examination_of(each) for each in value["examinations"]),
    )


def _examination_of(value: Mapping[str, Any]) -> Examination:
    results = tuple(Result(**each) for each in value["results"])
    return Examination(value["backend"], results, tuple(value["enforced"]), value["unavailable"], value["cut_short"])


def examine(backend: str, attacks: Sequence[str] = (), control: bool = False, uid: int | None = None) -> Examination:
    """Attack ``backend`` in a process of its own; ``control`` lifts the limits, ``uid`` makes root be another user.

    ``backend`` may be ``module:function`` for one of somebody's own. That, ``unsafe``, controls and other users run in an arena.
    """
    argv = [sys.executable, "-m", "rollbook.sandbox.attacks", backend, *(f"--only={name}" for name in attacks)]
    if control:
        argv.append("--control")
    if control or uid is not None or backend not in CANDIDATES:
        argv = arena.command(argv, uid)
    paths = [str(Path(__file__).parents[2]), *filter(None, [host().environ.get("PYTHONPATH", "")])]
    environment = {**host().environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=PASS_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Examination(backend, unavailable=f"the attack suite did not end within {PASS_S:.0f} s", cut_short=True)
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        said = errors.decode("utf-8", "replace").strip()[-300:]
        killed = abs(child.returncode) % 128 in (signal.SIGKILL, signal.SIGTERM)  # an arena says 128 + the number
        return Examination(backend, unavailable=f"the attack suite ended with {child.returncode}: {said}", cut_short=killed)
    if "error" in answer:
        return Examination(backend, unavailable=answer["error"], cut_short=answer["cut_short"])
    return _examination_of({"backend": backend, "unavailable": "", "cut_short": False, **answer})


def select(
    config: SandboxConfig, directory: Path | None = None, fresh: bool = False, candidates: Sequence[str] = CANDIDATES
) -> Selection:
    """Choose by attack; a result in ``directory`` from the same boot, kernel, user, sources and settings is used again.

    ``fresh`` ignores such a result and replaces it. Raises: ConfigError (nothing contains; it names what escaped); Unavailable
    (nothing was seen to contain, and a pass that could have shown it was disturbed).
    """
    if config.backend == UNSAFE:
        return Selection(UNSAFE, False, (), platform.release(), os.geteuid())
    names = tuple(candidates) if config.backend == "auto" else (config.backend,)
    if directory is None:
        return _select(config, names)
    key = key_of(config, names)
    path = directory / _FILE
    with _locked(directory):
        if not fresh and (found := kept(path, key)) is not None:
            return found
        selection = _select(config, names)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"key": key, "selection": asdict(selection)}))
        partial.replace(path)
    return selection


def _select(config: SandboxConfig, names: Sequence[str]) -> Selection:
    examined: list[Examination] = []
    kind: type[RollbookError] = ConfigError
    for name in names:
        examination = examine(name)
        if examination.disturbed:
            first, examination = examination, examine(name)
            if examination.cut_short or (examination.disturbed and examination.failed() != first.failed()):
                kind = Unavailable  # what this machine cannot try fails the same attacks twice
        examined.append(examination)
        if (chosen := chosen_of(examined)) is not None:
            return chosen
    why = "\n".join(f"  {each.backend}: {each.why_not()}" for each in examined)
    raise kind(
        f"sandbox.backend = {config.backend!r}: no backend contains the attacks here, so no model-written code is run:\n{why}\n"
        "allow user namespaces, start as root, or see `rollbook doctor --sandbox`; sandbox.backend = 'unsafe' contains nothing"
    )


def chosen_of(examined: Sequence[Examination]) -> Selection | None:
    """The first that contains, None where none does."""
    for each in examined:
        if each.contained:
            return Selection(each.backend, True, each.enforced, platform.release(), os.geteuid(), tuple(examined))
    return None


def make_sandbox(config: SandboxConfig, selection: Selection | None = None) -> Sandbox:
    """A backend as ``selection`` says, or as ``select`` says. Raises like it and ``make_backend``."""
    from rollbook.sandbox.backends import make_backend

    return make_backend((selection or select(config)).backend, config.slots)


def key_of(config: SandboxConfig, names: Sequence[str]) -> dict[str, Any]:
    """What a result holds for."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode() + b"\0" + source.read_bytes() + b"\0")
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "kernel": platform.release(),
        "uid": os.geteuid(),
        "python": sys.version,
        "sources": digest.hexdigest(),
        "config": asdict(config),
        "candidates": list(names),
    }


def kept(path: Path, key: dict[str, Any]) -> Selection | None:
    """A result for exactly ``key``; a file that cannot be read is none."""
    try:
        value = json.loads(path.read_text())
        return _selection_of(value["selection"]) if value["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One selection at a time; the others wait for its result, at most as long as all its passes may take."""
    directory.mkdir(parents=True, exist_ok=True)
    deadline = host().monotonic() + 2 * PASS_S * len(CANDIDATES)
    with open(directory / _LOCK, "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if host().monotonic() > deadline:
                    raise Unavailable(f"{directory / _LOCK} is held too long: end the process that selects a sandbox") from None
                host().sleep(0.1)
        yield
