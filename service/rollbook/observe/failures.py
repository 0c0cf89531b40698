"""What went wrong in a run and often ends the process that it happens to: checkpoints, weight updates, deaths of roles.

Owns ``supervisor/failures/NAME.json`` of the run directory, one writer each: how often each kind of failure happened, when last,
and in what words. A counter in the process that fails would end with it, mostly before anybody has read it. The ledger server
shows the counts, ``rollbook status`` and the status page the words. A file that cannot be written costs the entry, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.host import host

CHECKPOINT, WEIGHTS, DEATH = "checkpoint", "weights", "death"
TEXT_MAX = 400
KINDS_MAX = 64
"""Entries of one file; what is new beyond them is not kept."""

_file: Path | None = None
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Failure:
    """One kind of failure at one place."""

    who: str
    """The role it happened to: ``learner``, ``worker-0``, …"""
    what: str
    """``checkpoint``, ``weights`` or ``death``."""
    reason: str
    """The metric's word, or how a process died."""
    n: int
    at_s: float
    """Of the newest one, seconds since the epoch."""
    text: str
    """What the newest one said."""


def keep_in(run_dir: str | Path, name: str) -> None:
    """Note this process's failures under ``name`` from now on."""
    global _file
    _file = _place(run_dir) / f"{name}.json"


def note(what: str, reason: str, text: str) -> None:
    """Count one failure of this process; nothing where nobody has said where."""
    if _file is not None:
        note_at(_file, _file.stem, what, reason, text)


def note_death(run_dir: str | Path, who: str, reason: str, text: str) -> None:
    """Count a death; for the supervisor, the one writer of its file."""
    note_at(_place(run_dir) / "supervisor.json", who, DEATH, reason, text)


def note_at(file: Path, who: str, what: str, reason: str, text: str) -> None:
    """Count one failure in a file."""
    with _lock, contextlib.suppress(OSError):
        entries = _entries(file)
        name = f"{who}/{what}/{reason[:80]}"
        if name not in entries and len(entries) >= KINDS_MAX:
            return
        n = entries[name]["n"] if name in entries else 0
        newest = {"n": n + 1, "at_s": host().time(), "text": text[:TEXT_MAX]}
        entries[name] = {"who": who, "what": what, "reason": reason[:TEXT_MAX], **newest}
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(entries))
        temporary.replace(file)


def read(run_dir: str | Path) -> list[Failure]:
    """Every kind of failure of a run, the newest first."""
    found: list[Failure] = []
    for file in sorted(_place(run_dir).glob("[!.]*.json")):
        for entry in _entries(file).values():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found.append(Failure(
                    str(entry["who"]), str(entry["what"]), str(entry["reason"]), int(entry["n"]), float(entry["at_s"]),
                    str(entry["text"]),
                ))  # fmt: skip
    return sorted(found, key=lambda failure: -failure.at_s)


def counts(failures: Iterable[Failure], what: str) -> dict[str, int]:
    """How many of one kind there were, by reason."""
    out: dict[str, int] = {}
    for failure in failures:
        if failure.what == what:
            out[failure.reason] = out.get(failure.reason, 0) + failure.n
    return out


def last_word(said: str) -> str:
    """The last line of what a dead role wrote; the message of one that is JSON."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    with contextlib.suppress(ValueError):
        parsed = json.loads(last)
        last = str(parsed.get("message", last)) if isinstance(parsed, dict) else last
    return last


def _place(run_dir: str | Path) -> Path:
    return Path(run_dir) / "supervisor" / "failures"


def _entries(file: Path) -> dict:
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
