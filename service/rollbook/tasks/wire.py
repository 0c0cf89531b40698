"""What passes between a worker and an environment process: frames of JSON over a socket.

Owns the frame (four bytes of length, big endian, then JSON) and how the records of ``core.environments`` are written in it.
Never carries code or pickles. Whatever an environment prints goes elsewhere. An environment can write to the socket itself, so
what is read is checked as if nobody had checked it before: who reads gets records of the right types, or an exception.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from rollbook.core.environments import Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.records import Blame, RewardStatus, SandboxStatus
from rollbook.tasks.verifier import normalised

FRAME_BYTES_MAX = 64 << 20
TEXT_CHARACTERS_MAX = 2000
"""Of evidence and reasons; the rest is cut off."""

_HEAD = struct.Struct(">I")
_READ_BYTES = 1 << 18


class FrameTooLarge(ValueError):
    """A message is larger than a frame may be."""


def frame(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message. Raises FrameTooLarge, TypeError or ValueError (not JSON-able)."""
    try:
        data = json.dumps(message, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if len(data) > FRAME_BYTES_MAX:
        raise FrameTooLarge(f"a message of {len(data)} bytes is larger than the {FRAME_BYTES_MAX} that may pass")
    return _HEAD.pack(len(data)) + data


class Unframed:
    """Messages from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now. Raises ValueError (no frame of ours: the stream is of no use any more)."""
        self._bytes += data
        out = []
        while len(self._bytes) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise FrameTooLarge(f"a frame says it has {length} bytes")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                break
            out.append(_message(self._bytes[_HEAD.size : end]))
            del self._bytes[:end]
        return out


def _message(data: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message is a {type(message).__name__}")
    return message


class Channel:
    """The environment process's end: one thread reads, any thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unframed = Unframed()
        self._arrived: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any] | None:
        """The next message; None when the other end is closed."""
        while not self._arrived:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                return None
            self._arrived += self._unframed.feed(data)
        return self._arrived.pop(0)

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises like ``frame``, OSError when the other end is closed."""
        self.send(frame(message))

    def send(self, data: bytes) -> None:
        """Send a frame. Raises OSError when the other end is closed."""
        with self._lock:
            self._socket.sendall(data)


def request_out(request: ToolRequest | None) -> dict[str, Any] | None:
    return None if request is None else {"tool": request.tool, "arguments": request.arguments}


def request_in(content: Mapping[str, Any] | None) -> ToolRequest | None:
    """Raises ValueError, KeyError or TypeError: it is no request."""
    if content is None:
        return None
    return ToolRequest(_typed(content["tool"], str), _typed(content["arguments"], dict))


def reply_out(reply: ToolReply | None) -> dict[str, Any] | None:
    if reply is None:
        return None
    return {
        "text": reply.text,
        "sandbox_status": reply.sandbox_status.value,
        "failed": bool(reply.failed),
        "reason": reply.reason[:TEXT_CHARACTERS_MAX],
        "blame": None if reply.blame is None else reply.blame.value,
    }


def reply_in(content: Mapping[str, Any] | None) -> ToolReply | None:
    """Raises ValueError, KeyError or TypeError: it is no reply. A message of before there was a blame has none."""
    if content is None:
        return None
    return ToolReply(
        _typed(content["text"], str),
        SandboxStatus(content["sandbox_status"]),
        _typed(content["failed"], bool),
        _typed(content["reason"], str)[:TEXT_CHARACTERS_MAX],
        _blame_in(content.get("blame")),
    )


def episode_out(episode: Episode) -> dict[str, Any]:
    turns = [{"text": t.text, "request": request_out(t.request), "reply": reply_out(t.reply)} for t in episode.turns]
    return {"task": episode.task, "turns": turns}


def episode_in(content: Mapping[str, Any]) -> Episode:
    turns = tuple(Turn(t["text"], request_in(t["request"]), reply_in(t["reply"])) for t in content["turns"])
    return Episode(content["task"], turns)


def earlier_out(earlier: Iterable[tuple[ToolRequest, ToolReply]]) -> list[list[Any]]:
    return [[request_out(request), reply_out(reply)] for request, reply in earlier]


def earlier_in(content: Iterable[list[Any]]) -> list[tuple[ToolRequest, ToolReply]]:
    pairs = ((request_in(request), reply_in(reply)) for request, reply in content)
    return [(request, reply) for request, reply in pairs if request is not None and reply is not None]


def result_out(result: RewardResult) -> dict[str, Any]:
    return {
        "value": result.value,
        "status": result.status.value,
        "evidence": result.evidence[:TEXT_CHARACTERS_MAX],
        "parts": {name: float(value) for name, value in result.parts.items()},
        "sandbox_status": result.sandbox_status.value,
        "blame": None if result.blame is None else result.blame.value,
    }


def result_in(content: Mapping[str, Any]) -> RewardResult:
    """A judgement, normalised like what an environment returns: a number that is none is no value (P6).

    Raises: VerifierError, ValueError, KeyError, TypeError (it is no judgement, or a value stands beside a status without one).
    """
    result = RewardResult(
        content["value"],
        RewardStatus(content["status"]),
        _typed(content["evidence"], str)[:TEXT_CHARACTERS_MAX],
        content["parts"],
        SandboxStatus(content["sandbox_status"]),
        _blame_in(content["blame"]),
    )
    return normalised(result, "the environment process")


def text_in(content: Any) -> str:
    """Raises ValueError: it is no text."""
    text: str = _typed(content, str)
    return text


def _blame_in(content: Any) -> Blame | None:
    return None if content is None else Blame(content)


def _typed(content: Any, kind: type) -> Any:
    if not isinstance(content, kind):
        raise ValueError(f"{content!r:.80} is a {type(content).__name__}, expected a {kind.__name__}")
    return content
