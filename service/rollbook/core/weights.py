"""The one digest of policy weights, and a reader of safetensors files; used by whoever publishes and whoever loads.

Owns the identity of a policy version's tensors (P11, R18): names, dtypes, shapes and bytes, in order of name. Never
interprets a value and never imports torch: the learner hashes what it wrote and the worker hashes what it hands to its
engine, with the same function, so equal digests mean equal tensors.

Dtypes are spelled as in safetensors headers (``F32``, ``BF16``, ``I64``, ...). Bytes are little-endian and contiguous.

Source: the safetensors format, an 8-byte little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rollbook.core.errors import DigestMismatch

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes of one tensor."""

_HEADER_BYTES_MAX = 100_000_000
_LENGTH = struct.Struct("<Q")


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file; ``data`` is a view of the file, valid while the file is open."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def weights_digest(items: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """sha256 hex over (name, dtype, shape, bytes) of every tensor, in order of name.

    Args:
        items: one tuple per tensor in any order; tensors are held until all have been seen, so pass views, not copies.

    Raises:
        ValueError: a name appears twice; which of the two an engine would load is not defined.
    """
    hasher = hashlib.sha256(b"rollbook weights 1")
    previous: str | None = None
    for name, dtype, shape, data in sorted(items, key=lambda item: item[0]):
        if name == previous:
            raise ValueError(f"tensor {name!r} appears twice in one set of weights")
        previous = name
        view = memoryview(data).cast("B")
        for field in (name.encode(), dtype.encode(), ",".join(str(size) for size in shape).encode()):
            hasher.update(_LENGTH.pack(len(field)))
            hasher.update(field)
        hasher.update(_LENGTH.pack(len(view)))
        hasher.update(view)
    return hasher.hexdigest()


def map_safetensors(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """Tensors of a safetensors file in order of name; the file stays mapped as long as anybody has a view of it.

    The mapping is private: whoever writes into a view changes memory of this process alone.

    Raises:
        FileNotFoundError: no such file.
        DigestMismatch: the file is not a whole safetensors file; the message names it and what is wrong.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LENGTH.size:
            raise DigestMismatch(f"{os.fspath(path)} has {size} bytes: not a safetensors file, or cut off while written")
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    layout = _layout(whole, os.fspath(path))
    return [StoredTensor(name, dtype, shape, whole[start:end]) for name, dtype, shape, start, end in layout]


@contextmanager
def open_safetensors(path: str | os.PathLike[str]) -> Iterator[list[StoredTensor]]:
    """The tensors of a safetensors file in order of name; their ``data`` ends with the block. Raises: as ``map_safetensors``."""
    tensors = map_safetensors(path)
    try:
        yield tensors
    finally:
        for tensor in tensors:
            tensor.data.release()


def _layout(whole: memoryview, path: str) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, start, end) of every tensor in order of name, checked against the size of the file."""
    (length,) = _LENGTH.unpack(whole[: _LENGTH.size])
    data_start = _LENGTH.size + length
    if length > _HEADER_BYTES_MAX or data_start > len(whole):
        raise DigestMismatch(f"{path}: a header of {length} bytes does not fit into {len(whole)}; publish or copy it again")
    try:
        header = json.loads(bytes(whole[_LENGTH.size : data_start]))
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), *(data_start + offset for offset in entry["data_offsets"]))
            for name, entry in sorted(header.items())
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DigestMismatch(f"{path}: unreadable safetensors header ({error}); publish or copy it again") from None
    for name, _, _, start, end in entries:
        if not data_start <= start <= end <= len(whole):
            raise DigestMismatch(f"{path}: tensor {name!r} ends at byte {end} of {len(whole)}; the file was cut off")
    return entries


def read_safetensors(path: str | os.PathLike[str]) -> Iterator[StoredTensor]:
    """Yield the tensors of a safetensors file in order of name; the views are valid until the iterator ends or is closed.

    Raises: as ``open_safetensors``.
    """
    with open_safetensors(path) as tensors:
        yield from tensors


def safetensors_digest(path: str | os.PathLike[str]) -> str:
    """``weights_digest`` of a safetensors file, without copying it into memory. Raises: as ``open_safetensors``."""
    with open_safetensors(path) as tensors:
        return weights_digest(tensors)
