"""The digest of weights and the safetensors reader: equal for equal tensors, different for everything else."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollbook.core.errors import DigestMismatch
from rollbook.core.weights import open_safetensors, read_safetensors, safetensors_digest, weights_digest
from rollbook.learner.state import tensors_digest
from rollbook.rollout.weights import read_weights

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


def test_tensors_are_read_as_they_were_written(file):
    read = dict(read_weights(file))
    assert list(read) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_tensor_that_is_read_outlives_its_reader_and_cannot_change_the_file(file):
    before = file.read_bytes()
    read = dict(read_weights(file))["b.weight"]
    file.unlink()
    read.add_(1)
    assert torch.equal(read, TENSORS["b.weight"] + 1)
    save_file(TENSORS, file, metadata={"format": "pt"})
    dict(read_weights(file))["b.weight"].zero_()
    assert file.read_bytes() == before


def test_a_shape_that_its_bytes_do_not_fill_and_an_unknown_dtype_are_named(tmp_path):
    for dtype, shape, said in (("F32", [3], "needs 12 bytes and has 8"), ("F7", [2], "'x' is F7; known are")):
        header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        with pytest.raises(DigestMismatch, match=said):
            list(read_weights(tmp_path))


def test_reading_versions_again_and_again_takes_no_memory(tmp_path):
    """The library's own reader keeps 64 bytes of every tensor: 10 MiB here."""
    save_file({f"t{i}": torch.zeros(16) for i in range(200)}, tmp_path / "model.safetensors")

    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def read(times: int) -> None:
        for _ in range(times):
            assert sum(1 for _ in read_weights(tmp_path)) == 200

    read(100)
    before = memory()
    read(800)
    assert memory() - before < 2 << 20
