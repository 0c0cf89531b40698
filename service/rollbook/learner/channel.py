"""Messages between the ranks of a learner: a JSON header, and tensors as safetensors bytes behind it.

Owns the frame on a socket pair, which only the two processes that inherited its ends can reach. Never unpickles anything and
never waits without a bound, except a rank for its next order: that wait ends with the process that gives orders.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from rollbook.core.records import SlotKey
from rollbook.learner.collate import StepBatch

_FRAME = struct.Struct("<IQ")
_POLL_S = 0.2

_TENSORS = (
    "token_ids", "attention_mask", "prompt_lengths", "mask", "behaviour_logprobs", "versions", "rewards", "valid", "group_ids",
)  # fmt: skip


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socket pair; the other side may take ``bound_s`` to read a message, or to write one it has begun."""

    def __init__(self, end: socket.socket, bound_s: float) -> None:
        self._socket = end
        end.settimeout(bound_s)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Raises Closed when the other side is gone, or reads nothing any more."""
        text = json.dumps(header).encode()
        try:
            self._socket.sendall(_FRAME.pack(len(text), len(body)) + text)
            self._socket.sendall(body)
        except OSError as error:
            raise Closed(str(error)) from error

    def has_come(self, bound_s: float = _POLL_S) -> bool:
        """Whether something can be read, or the other side is gone, waiting for it at most so long."""
        return bool(select.select([self._socket], [], [], bound_s)[0])

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next message, waited for as long as the other side lives. Raises Closed."""
        while not self.has_come():
            pass
        n_text, n_body = _FRAME.unpack(self._read(_FRAME.size))
        header = json.loads(self._read(n_text))
        return header, self._read(n_body)

    def _read(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            try:
                part = self._socket.recv(min(1 << 20, n - len(data)))
            except OSError as error:
                raise Closed(str(error)) from error
            if not part:
                raise Closed("the other side has closed the connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def pair(bound_s: float) -> tuple[Channel, socket.socket]:
    """Our end, and the one that a child process is to inherit."""
    ours, theirs = socket.socketpair()
    return Channel(ours, bound_s), theirs


def pack_batch(batch: StepBatch) -> tuple[dict[str, Any], bytes]:
    """A batch as fields of a header and the body behind it."""
    tensors = {name: getattr(batch, name).contiguous() for name in _TENSORS}
    tensors["keys"] = torch.tensor([[key.ordinal, key.sibling] for key in batch.keys], dtype=torch.int64)
    return {"version_train": batch.version_train, "behaviour_missing": batch.behaviour_missing}, save(tensors)


def unpack_batch(header: dict[str, Any], body: bytes) -> StepBatch:
    """Inverse of ``pack_batch``."""
    tensors: dict[str, Tensor] = load(body)
    keys = tuple(SlotKey(ordinal, sibling) for ordinal, sibling in tensors.pop("keys").tolist())
    return StepBatch(
        keys=keys, version_train=header["version_train"], behaviour_missing=header["behaviour_missing"], **tensors
    )  # fmt: skip
