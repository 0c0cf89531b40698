"""Published weights as torch tensors, and their digest as handed to an engine.

Owns reading a version's directory and hashing what was really read (P11, R18). Never decides which version to load and
never imports an engine: the digest itself is ``core.weights``, shared with whoever publishes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from rollbook.core import weights as stored
from rollbook.core.errors import DigestMismatch, NotReady

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def weight_files(path: str | os.PathLike[str]) -> list[Path]:
    """Safetensors files of a directory in order of name, or the one file given.

    Raises: NotReady (there are none, which a version just announced over a slow file system may cure).
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        raise NotReady(f"no safetensors file in {place}: the version's bytes are not there (deleted, or not yet visible)")
    return files


def read_weights(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) over all files of ``path`` in order of name; tensors are views of the mapped files.

    By our own reader: that of safetensors 0.8.0 keeps 64 bytes for ever of each tensor it gives out, and a worker loads
    hundreds of tensors for each of a million versions.

    Raises: NotReady (no files), DigestMismatch (a file is cut off or damaged), ValueError (a name in two files).
    """
    found: dict[str, stored.StoredTensor] = {}
    for file in weight_files(path):
        try:
            tensors = stored.map_safetensors(file)
        except OSError as error:
            raise DigestMismatch(f"{file} cannot be read: {error}") from error
        for tensor in tensors:
            if tensor.name in found:
                raise ValueError(f"tensor {tensor.name!r} is in two files of {path}")
            if tensor.dtype not in _DTYPES:
                raise DigestMismatch(f"{file}: tensor {tensor.name!r} is {tensor.dtype}; known are {', '.join(_DTYPES)}")
            found[tensor.name] = tensor
    for name in sorted(found):
        yield name, _view(found.pop(name))


def _view(tensor: stored.StoredTensor) -> torch.Tensor:
    """Raises DigestMismatch when its bytes are not as many as its shape needs."""
    dtype, n = _DTYPES[tensor.dtype], math.prod(tensor.shape)
    if (needed := n * dtype.itemsize) != len(tensor.data):
        raise DigestMismatch(
            f"tensor {tensor.name!r} of shape {tensor.shape} needs {needed} bytes and has {len(tensor.data)}; publish it again"
        )
    return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape) if n else torch.empty(tensor.shape, dtype=dtype)


def _item(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...], memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, _CODES[tensor.dtype], tuple(tensor.shape), flat.data


def weights_digest(
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> str:
    """sha256 hex over names, dtypes, shapes and bytes in order of name; a file and the tensors read from it agree.

    Raises: NotReady, DigestMismatch (as ``read_weights``), ValueError (a name appears twice).
    """
    if isinstance(source, str | os.PathLike):
        with ExitStack() as stack:
            opened = [stack.enter_context(stored.open_safetensors(file)) for file in weight_files(source)]
            return stored.weights_digest(tensor for tensors in opened for tensor in tensors)
    named = source.items() if isinstance(source, Mapping) else source
    return stored.weights_digest(_item(name, tensor) for name, tensor in named)
