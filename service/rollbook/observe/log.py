"""Structured logs: human-readable lines on a terminal, JSON lines elsewhere when asked for.

Owns the format. Never decides levels per module. Every record may carry ``extra={"event": ..., ...}``; events are stable
snake_case names. ``ROLLBOOK_LOG=json`` switches the format.
"""

from __future__ import annotations

import json
import logging
import os
import sys

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        line = super().format(record)
        return line + ("  " + " ".join(f"{k}={v}" for k, v in extra.items()) if extra else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, object] = {"at": record.created, "level": record.levelname.lower(), "logger": record.name}
        out["message"] = record.getMessage()
        out.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, default=str)


def configure(role: str, level: str = "INFO") -> None:
    """Send this process's logs to standard error, marked with its role."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("ROLLBOOK_LOG") == "json":
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(_Text(f"%(asctime)s %(levelname)-7s {role:<8} %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
