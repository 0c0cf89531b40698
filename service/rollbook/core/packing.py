"""Packed little-endian arrays: how token ids, log-probs and versions travel and are stored.

Owns the byte layout. Never interprets values. int32 for token ids and versions, float32 for log-probs, uint8 for masks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def _little_endian(values: array) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def pack_i32(values: Iterable[int]) -> bytes:
    """Pack integers as little-endian int32."""
    return _little_endian(array("i", values))


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32 (rounded to nearest)."""
    return _little_endian(array("f", values))


def _unpack(typecode: str, data: bytes) -> array:
    values = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def unpack_i32(data: bytes) -> array:
    """Little-endian int32 bytes to an ``array('i')``. Raises ValueError when the length is not a multiple of 4."""
    return _unpack("i", data)


def unpack_f32(data: bytes) -> array:
    """Little-endian float32 bytes to an ``array('f')``. Raises ValueError when the length is not a multiple of 4."""
    return _unpack("f", data)
