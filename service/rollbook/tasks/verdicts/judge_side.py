"""Runs in the judge's sandbox: trusted tests, and in place of the candidate's functions calls that leave the sandbox.

Owns the count of tests that pass. Nothing of the candidate is here but plain values. The text of this file is what a sandbox gets
(``plain`` stands before it there).
"""

import builtins
import json
import sys

from rollbook.tasks.verdicts.plain import OpaqueUsed, TooDeep, Unplain, decode, encode


class Stop(BaseException):
    """Ends the tests: what was to be said has been said."""


_deepest = 0
"""Levels of the most deeply nested value that the program has given."""


def _levels(value):
    """How deeply an encoded value is nested."""
    if isinstance(value, dict):
        ((tag, value),) = value.items()
        if tag == "d":
            value = [item for pair in value for item in pair]
        elif tag not in ("t", "s", "z", "it"):
            return 0
    return 1 + max(map(_levels, value), default=0) if isinstance(value, list) else 0


def _is_programs_fault(error, args, kwargs):
    """Whether arguments that have no encoding would have one if the program had given flat values."""
    if isinstance(error, OpaqueUsed):
        return True
    if not isinstance(error, TooDeep) or not _deepest:
        return False
    try:
        encode([list(args), kwargs], -1 - _deepest)
    except Unplain:
        return False
    return True


def _proxy(name, answer):
    def call(*args, **kwargs):
        global _deepest
        try:
            said = {"name": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        except Unplain as error:
            at_fault = "invalid" if _is_programs_fault(error, args, kwargs) else "broken"
            answer(json.dumps({at_fault: f"an argument of {name}: {error}"}).encode())
            raise Stop from None
        if '"o":' in (text := json.dumps(said)) and _has_opaque([said["args"], said["kwargs"]]):
            answer(json.dumps({"broken": f"{name} is called with an argument that is no plain value"}).encode())
            raise Stop
        answer(text.encode())
        given = json.loads(sys.stdin.readline())
        if "ok" in given:
            _deepest = max(_deepest, _levels(given["ok"]))
            return decode(given["ok"])
        raise _error_of(given["error"], given["text"])

    call.__name__ = name
    return call


def _has_opaque(value):
    if isinstance(value, list):
        return any(_has_opaque(item) for item in value)
    return isinstance(value, dict) and ("o" in value or _has_opaque(list(value.values())))


def _error_of(name, text):
    """The builtin exception of that name, so that tests may expect it; marked as the program's own."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is MemoryError:
        kind = RuntimeError
    elif issubclass(kind, (StopIteration, StopAsyncIteration)):
        kind = RuntimeError  # it would end the test's own loop without a word, and ``all`` of nothing is true
    try:
        error = kind(text)
    except TypeError:  # one that takes more than a text
        error = RuntimeError(text)
    error.of_program = True
    return error


def serve(namespace, answer):
    """Read the tests, run them, say how many passed."""
    asked = json.loads(sys.stdin.readline())
    space = {"__name__": "__tests__"}
    try:
        exec(compile(asked["imports"], "<imports>", "exec"), space)
        tests = [compile(test, "<test>", "exec") for test in asked["tests"]]
    except Exception as error:  # noqa: BLE001 - whatever it is, the tests are at fault
        answer(json.dumps({"broken": f"{type(error).__name__}: {error}"[:500]}).encode())
        return
    # After the trusted code, which may hold an empty function of the same name.
    space.update({name: _proxy(name, answer) for name in asked["names"]})
    passed, first, raised = 0, "", False
    try:
        for test in tests:
            try:
                exec(test, space)
                passed += 1
            except MemoryError:
                raise  # of this sandbox: it says nothing about the program
            except Exception as error:  # noqa: BLE001 - a test that raises has failed
                if not first:
                    first, raised = f"{type(error).__name__}: {error}"[:500], hasattr(error, "of_program")
    except Stop:
        return
    answer(json.dumps({"passed": passed, "first": first, "raised": raised}).encode())
