"""Files that roles write their output to: the end of one, what came since a moment, and a bound on its size.

Owns ``logs/<role>.log`` of the run directory as files. Never interprets a line.
"""

from __future__ import annotations

import shutil
from pathlib import Path

LOG_BYTES_MAX = 64 << 20
"""A log that has grown beyond it is moved to ``<name>.log.1``, over the one before, and begins again."""

TAIL_BYTES = 16_384


def size(log: Path) -> int:
    """Bytes in the file; 0 when there is none."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def since(log: Path, offset: int, bytes_max: int = TAIL_BYTES) -> str:
    """What was written after byte ``offset``, at most the last ``bytes_max`` of it; a shorter file began again."""
    end = size(log)
    if end == 0:
        return ""
    first = offset if offset <= end else 0
    with log.open("rb") as handle:
        handle.seek(max(first, end - bytes_max))
        return handle.read(bytes_max).decode(errors="replace")


def last_lines(log: Path, offset: int = 0, n: int = 20) -> str:
    """The last ``n`` lines written after byte ``offset``."""
    return "\n".join(since(log, offset).splitlines()[-n:])


def keep_small(log: Path, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Bound a log, also while its role writes to it; True when it was moved away.

    The role holds the file open in append mode, so the file is copied and emptied, not renamed; lines written between
    the two are lost. Where the copy cannot be stored the log is emptied all the same: the run's own data needs the space.
    """
    if size(log) <= bytes_max:
        return False
    kept = log.with_name(f"{log.name}.1")
    try:
        shutil.copyfile(log, kept)
    except OSError:
        kept.unlink(missing_ok=True)
    with log.open("r+b") as handle:
        handle.truncate(0)
    return True
