"""Named crash points: nothing unless armed, a SIGKILL, pause or exception at an exact place when armed.

Owns parsing of ``ROLLBOOK_FAILPOINTS`` and firing. Never decides where points stand: the call sites do, at every place
where a crash changes what recovery must do. Syntax, comma separated: ``name=crash``, ``name=crash@3`` (third crossing),
``name=pause:2.5``, ``name=raise``. With ``ROLLBOOK_FAILPOINTS_ONCE_DIR`` a point fires at most once over restarts:
a marker file is made durable before it fires.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


class FailpointRaised(RuntimeError):
    """An armed failpoint raised."""


@dataclass(slots=True)
class _Armed:
    action: str
    argument: float
    at_crossing: int
    crossings: int = 0


def _parse(text: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, action = part.partition("=")
        action, _, crossing = action.partition("@")
        action, _, argument = action.partition(":")
        if action not in ("crash", "pause", "raise"):
            raise ValueError(f"failpoint {part!r}: the action is crash, pause:SECONDS or raise")
        armed[name] = _Armed(action, float(argument or 0), int(crossing or 1))
    return armed


_armed = _parse(os.environ.get("ROLLBOOK_FAILPOINTS", ""))
_once_dir = os.environ.get("ROLLBOOK_FAILPOINTS_ONCE_DIR", "")


def failpoint(name: str) -> None:
    """Cross the point ``name``; does nothing unless it is armed."""
    if _armed and name in _armed:
        _fire(name, _armed[name])


def _fire(name: str, point: _Armed) -> None:
    point.crossings += 1
    if point.crossings != point.at_crossing or not _claim(name, point):
        return
    if point.action == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "raise":
        raise FailpointRaised(name)
    time.sleep(point.argument)


def _claim(name: str, point: _Armed) -> bool:
    """True when this firing is the first over all processes that share the directory."""
    if not _once_dir:
        return True
    marker = Path(_once_dir) / f"{name}@{point.at_crossing}"
    try:
        fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.fsync(fd)
    os.close(fd)
    return True


def arm(text: str) -> None:
    """Replace what is armed in this process (tests)."""
    _armed.clear()
    _armed.update(_parse(text))
