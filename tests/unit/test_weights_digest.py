"""The digest of weights and the safetensors reader: equal for equal tensors, different for everything else."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rollbook.core.errors import DigestMismatch
from rollbook.core.weights import open_safetensors, read_safetensors, safetensors_digest, weights_digest
from rollbook.learner.state import tensors_digest

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.weight": torch.arange(4, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_a_file_and_the_tensors_in_it_have_one_digest(file):
    assert safetensors_digest(file) == tensors_digest(TENSORS)


def test_the_reader_gives_names_in_order_with_dtype_shape_and_bytes(file):
    with open_safetensors(file) as tensors:
        found = {t.name: (t.dtype, t.shape, bytes(t.data)) for t in tensors}
    assert list(found) == sorted(TENSORS)
    assert found["b.weight"] == ("F32", (2, 3), TENSORS["b.weight"].numpy().tobytes())
    assert found["a.weight"][:2] == ("BF16", (4,))
    assert found["empty"] == ("F32", (0, 3), b"")
    assert [t.name for t in read_safetensors(file)] == sorted(TENSORS)


def test_the_order_of_tensors_does_not_change_the_digest():
    assert tensors_digest(TENSORS) == tensors_digest(dict(reversed(TENSORS.items())))


@pytest.mark.parametrize(
    "changed",
    [
        {"b.weight": TENSORS["b.weight"] + 1},
        {"b.weight": TENSORS["b.weight"].reshape(3, 2)},
        {"b.weight": TENSORS["b.weight"].view(torch.int32)},
        {"c.weight": TENSORS["b.weight"]},
    ],
    ids=["one value", "shape", "dtype", "another tensor"],
)
def test_every_change_of_a_tensor_changes_the_digest(changed):
    assert tensors_digest(TENSORS | changed) != tensors_digest(TENSORS)


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="appears twice"):
        weights_digest([("a", "F32", (1,), b"1234"), ("a", "F32", (1,), b"1234")])


@pytest.mark.parametrize("size", [0, 7, 20, -1])
def test_a_file_cut_off_is_named(file, size):
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(DigestMismatch, match="model.safetensors"):
        safetensors_digest(file)


def test_a_header_that_is_not_json_is_named(file):
    file.write_bytes(b"\x08" + bytes(7) + b"not json")
    with pytest.raises(DigestMismatch, match="unreadable safetensors header"):
        safetensors_digest(file)
