"""A candidate: a program in a sandbox that holds nothing else, called function by function.

Owns the exchange of one call. Never believes an answer: it is bounded, checked and tied to its question by a word that was not
known before the question, so that answers in advance are told from answers.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rollbook.core.host import host
from rollbook.core.sandboxing import Limits, Program, Sandbox
from rollbook.tasks.verdicts.values import Unreadable, checked, parse, setup_of
from rollbook.tasks.verdicts.verdict import Verdict, line_wait_s, usage

_SETUP = setup_of("candidate_side")
_ERROR_CHARS_MAX = 500


class Candidate:
    """A started candidate; used by one thread."""

    def __init__(self, sandbox: Sandbox, source: str, limits: Limits) -> None:
        self.job = sandbox.start(Program(source, _SETUP), limits)
        self._limits = limits

    def ask(self, name: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """One call with encoded arguments.

        Returns: ``{"ok": checked encoded value}`` or ``{"error": name, "text": …}``; None where it has ended.
        Raises: Unreadable (its answer is not what the protocol allows).
        """
        word = host().token()
        self.job.send(json.dumps({"id": word, "name": name, "args": args, "kwargs": kwargs}).encode() + b"\n")
        line = self.job.read_line(line_wait_s(self._limits))
        if line is None:
            return None
        said = parse(line)
        if not isinstance(said, dict) or said.pop("id", None) != word:
            raise Unreadable(f"an answer that was not asked for: {line[:100]!r}")
        if said.keys() == {"ok"}:
            checked(said["ok"])
            return said
        if said.keys() == {"error", "text"} and all(isinstance(t, str) and len(t) <= _ERROR_CHARS_MAX for t in said.values()):
            return said
        raise Unreadable(f"{said['invalid']:.200}" if isinstance(said.get("invalid"), str) else f"no answer: {line[:100]!r}")

    def close(self, verdict: Verdict) -> Verdict:
        """End it; the verdict with what its sandbox used."""
        self.job.kill()
        return dataclasses.replace(verdict, evidence=verdict.evidence | usage(self.job.wait()))
