"""Structured logs on standard error: lines for people, or one JSON object per line for machines.

Owns the formats. Never decides levels per module and never knows a secret: what is logged are events and ids. Every record may
carry ``extra={"event": ..., ...}``; events are stable snake_case names. JSON has ``ts`` (RFC 3339, UTC), ``level``, ``event``,
``message``, ``logger``, then what the process is (``run``, ``component``, ``worker``, ``policy_version``; see ``bind``), the
``extra`` fields of the record, and ``trace_id`` and ``span_id`` where it was written inside a span. A field whose name begins
with an underscore is a library's and is left out.

``ROLLBOOK_LOG`` (``json``, ``text``) decides; else ``run.log_format``, whose JSON is not for a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from rollbook.observe import tracing
from rollbook.observe.metrics import TELEMETRY_DROPPED_TOTAL

FORMATS = ("text", "json")
_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_bound: dict[str, object] = {}
_handler: logging.StreamHandler | None = None


class _Handler(logging.StreamHandler):
    """Standard error; a line that cannot be written there, as on a full disk, is counted and costs nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            TELEMETRY_DROPPED_TOTAL.labels("logs").inc()
        else:
            super().handleError(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = _fields(record)
        line = super().format(record)
        return line + ("  " + " ".join(f"{k}={_plain(v)}" for k, v in extra.items()) if extra else "")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What ``extra`` has given; names that begin with an underscore are a library's own, as Ray's is on every record."""
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD and not k.startswith("_")}


def _plain(value: object) -> str:
    """A field without what would begin a line or command a terminal: other processes' words are among them."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        out: dict[str, object] = {"ts": at, "level": record.levelname.lower(), "event": "", "message": record.getMessage()}
        out["logger"] = record.name
        out.update(_bound)
        out.update(_fields(record))
        if not out["event"]:
            del out["event"]
        if context := tracing.current():
            out |= {"trace_id": tracing.trace_id(context), "span_id": tracing.span_id(context)}
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        try:
            return json.dumps(out, default=str, allow_nan=False)
        except ValueError:  # NaN and infinity are no JSON: readers would refuse the line
            return json.dumps({key: value if _is_json(value) else str(value) for key, value in out.items()}, default=str)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return False
    return True


def configure(role: str, level: str = "INFO") -> None:
    """Send this process's logs to standard error, marked with its role."""
    global _handler
    _bound.clear()
    _bound["component"] = role
    _handler = _Handler(sys.stderr)
    use_format("")
    logging.basicConfig(level=level, handlers=[_handler], force=True)


def use_format(wanted: str) -> None:
    """Write in this format from now on, unless the environment names another; text for a terminal.

    Args:
        wanted: ``run.log_format``, or empty before the configuration is read.
    """
    if _handler is None:
        return
    said = os.environ.get("ROLLBOOK_LOG", "")
    at_terminal = _handler.stream.isatty()
    chosen = said if said in FORMATS else "json" if wanted == "json" and not at_terminal else "text"
    if chosen == "json":
        _handler.setFormatter(_Json())
    else:
        _handler.setFormatter(_Text(f"%(asctime)s %(levelname)-7s {_bound['component']:<8} %(message)s"))


def bind(**fields: object) -> None:
    """Fields of every further JSON line of this process (``run``, ``worker``, ``policy_version``)."""
    _bound.update(fields)
