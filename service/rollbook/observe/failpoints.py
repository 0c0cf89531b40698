"""Named crash points: nothing unless armed or observed; then a SIGKILL, stop, delay or error at an exact place.

Owns parsing, arming and firing; the names and what each means are in ``CATALOGUE`` (module ``catalogue``). Never decides
where points stand: the call sites do, at every place where a crash changes what recovery must do. Syntax, comma
separated, ``NAME=ACTION[@K]`` (at the K-th crossing of a process, else the first) or ``NAME=ACTION~P`` (at a share P of all
crossings, again and again):

``crash``          SIGKILL to this process
``raise``          FailpointRaised
``error:ENOSPC``   OSError with that errno (``ENOSPC`` or ``EIO``)
``delay:SECONDS``  waits, then goes on; the other threads of the process run meanwhile
``pause``          SIGSTOP to this process: everything stands still until somebody sends SIGCONT

Armed by ``ROLLBOOK_FAILPOINTS``, by ``[chaos] failpoints`` of a configuration with ``run.chaos_allowed = true``, or by
``arm``. With ``ROLLBOOK_FAILPOINTS_ONCE_DIR`` a point fires at most once over restarts: a marker file is made durable
before it fires. A simulator sees every crossing through ``set_observer``.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.errors import ConfigError
from rollbook.core.host import host
from rollbook.observe.catalogue import CATALOGUE, Failpoint

__all__ = ["CATALOGUE", "Failpoint", "FailpointRaised", "arm", "arm_configured", "arm_from_environment", "armed", "check",
           "failpoint", "set_observer", "unknown"]  # fmt: skip

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
Observer = Callable[[str], None]


class FailpointRaised(RuntimeError):
    """An armed failpoint raised."""


@dataclass(slots=True)
class _Armed:
    action: str
    argument: str
    at_crossing: int
    share: float = 0.0
    crossings: int = 0


def _parse(text: str) -> dict[str, _Armed]:
    points: dict[str, _Armed] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, action = part.partition("=")
        action, at, crossing = action.partition("@")
        action, often, share = action.partition("~")
        action, _, argument = action.partition(":")
        bad = (at and not (crossing.isdecimal() and int(crossing))) or (often and (bool(at) or not _is_share(share)))
        if bad or not _understood(action, argument):
            raise ValueError(
                f"failpoint {part!r}: write NAME=ACTION, NAME=ACTION@K with K >= 1 or NAME=ACTION~P with 0 < P <= 1; actions: "
                "crash, raise, pause, delay:SECONDS, error:ENOSPC, error:EIO"
            )
        points[name.strip()] = _Armed(action, argument, int(crossing or 1), float(share or 0))
    return points


def _is_share(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and 0 < float(text) <= 1


def _understood(action: str, argument: str) -> bool:
    if action == "error":
        return argument in ERRORS
    if action == "delay":
        return argument.replace(".", "", 1).isdecimal()
    return action in ("crash", "raise", "pause") and not argument


_armed: dict[str, _Armed] = {}
_once_dir = ""
_observer: Observer | None = None
_live = False
"""Whether a crossing has to look further: the one thing a failpoint costs when nothing is armed."""


def failpoint(name: str) -> None:
    """Cross the point ``name``; does nothing unless it is armed or observed."""
    if _live:
        _cross(name)


def set_observer(observer: Observer | None) -> None:
    """Call ``observer`` with the name at every crossing of this process, before what is armed; None ends that.

    What it raises leaves the crossing like a failpoint's own error: that is how a simulator kills a simulated process.
    """
    global _observer, _live
    _observer = observer
    _live = bool(_armed) or observer is not None


def arm(text: str) -> None:
    """Replace what is armed in this process; an empty text disarms. Raises ValueError where the text is not understood."""
    global _live
    points = _parse(text)
    _armed.clear()
    _armed.update(points)
    _live = bool(_armed) or _observer is not None


def arm_from_environment() -> None:
    """Replace what is armed by what ``ROLLBOOK_FAILPOINTS`` says; done once when the module is loaded."""
    global _once_dir
    _once_dir = os.environ.get("ROLLBOOK_FAILPOINTS_ONCE_DIR", "")
    arm(os.environ.get("ROLLBOOK_FAILPOINTS", ""))


def arm_configured(text: str, once_dir: str | Path = "") -> None:
    """Arm what a configuration says beside what the environment says, which wins where both name a point.

    ``once_dir``: keep markers there, so that each fires at most once over restarts; created at the first.
    Raises ConfigError as ``check``.
    """
    global _live, _once_dir
    check(text)
    for name, point in _parse(text).items():
        _armed.setdefault(name, point)
    if text and not _once_dir:
        _once_dir = str(once_dir)
    _live = bool(_armed) or _observer is not None


def check(text: str) -> None:
    """Refuse a text that would not arm what it says. Raises ConfigError naming the nearest name or the known actions."""
    try:
        points = _parse(text)
    except ValueError as error:
        raise ConfigError(f"chaos.failpoints: {error}") from None
    for name in points:
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.0)
            raise ConfigError(
                f"chaos.failpoints: there is no failpoint {name!r}; did you mean {near[0]!r}? "
                "`rollbook doctor --failpoints` lists them"
            )


def armed() -> dict[str, str]:
    """What is armed in this process: name to action, as it would be written."""
    return {
        name: p.action + (f":{p.argument}" if p.argument else "") + (f"@{p.at_crossing}" if p.at_crossing > 1 else "")
        + (f"~{p.share:g}" if p.share else "")
        for name, p in _armed.items()
    }


def unknown() -> list[str]:
    """Armed names that the catalogue lacks: the product crosses no such point."""
    return [name for name in _armed if name not in CATALOGUE]


def _cross(name: str) -> None:
    if _observer is not None:
        _observer(name)
    if (point := _armed.get(name)) is None:
        return
    if point.share:
        if host().rng().random() < point.share:
            _fire(name, point)
        return
    point.crossings += 1
    if point.crossings == point.at_crossing and _claim(name, point):
        _fire(name, point)


def _fire(name: str, point: _Armed) -> None:
    match point.action:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise FailpointRaised(name)
        case "error":
            number = ERRORS[point.argument]
            raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
        case "delay":
            host().sleep(float(point.argument))


def _claim(name: str, point: _Armed) -> bool:
    """True when this firing is the first over all processes that share the directory."""
    if not _once_dir:
        return True
    marker = Path(_once_dir) / f"{name}@{point.at_crossing}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.fsync(fd)
    os.close(fd)
    return True


arm_from_environment()
