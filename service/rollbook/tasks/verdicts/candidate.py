"""The candidate's side of both protocols: a program that is called, in a sandbox that holds nothing else.

Owns the loop that runs there and the exchange of one call. Never trusts an answer: it is bounded and decoded here.
"""

from __future__ import annotations

import json
from typing import Any

from rollbook.core.sandboxing import Job, Limits, Program, Sandbox
from rollbook.tasks.verdicts.values import ENCODING, Unreadable, encode, parse

SETUP = ENCODING + '''
import json as _json
import sys as _sys

def serve(namespace, answer, dumps=_json.dumps, loads=_json.loads, encode=_encode, decode=_decode, lines=_sys.stdin):
    for line in lines:
        asked = loads(line)
        try:
            function = namespace[asked["name"]]
            value = function(*decode(asked["args"]), **decode(asked["kwargs"]))
            said = {"id": asked["id"], "ok": encode(value)}
        except MemoryError:
            raise
        except Exception as error:
            said = {"id": asked["id"], "error": type(error).__name__, "text": str(error)[:500]}
        answer(dumps(said).encode())
'''


class Candidate:
    """A started candidate."""

    def __init__(self, sandbox: Sandbox, source: str, limits: Limits) -> None:
        self.job: Job = sandbox.start(Program(source, SETUP), limits)
        self._limits, self._asked = limits, 0

    def ask(self, name: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """One call with encoded arguments: ``{"ok": encoded}`` or ``{"error": …, "text": …}``; None where it has ended.

        Raises: Unreadable (its answer is not what the protocol allows).
        """
        self._asked += 1
        self.job.send(json.dumps({"id": self._asked, "name": name, "args": args, "kwargs": kwargs}).encode() + b"\n")
        line = self.job.read_line(self._limits.wall_s + 10.0)
        if line is None:
            return None
        said = parse(line)
        if not isinstance(said, dict) or said.get("id") != self._asked or ("ok" in said) == ("error" in said):
            raise Unreadable(f"an answer that was not asked for: {line[:100]!r}")
        return said

    def call(self, name: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """``ask`` with plain arguments."""
        return self.ask(name, encode(args), encode(kwargs))
