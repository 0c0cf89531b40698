"""The spool: what is put is found again, what is damaged is kept and reported, nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

import pytest

from rollbook.core.errors import DigestMismatch
from rollbook.core.idempotency import payload_digest
from rollbook.core.packing import pack_f32, pack_i32
from rollbook.core.records import Blame, FinishReason, RewardStatus, SandboxStatus, SlotKey, Submission, Trajectory
from rollbook.rollout.spool import _LENGTH, _MAGIC, Spool, decode, encode


def sample(sequence: int, incarnation: str = "a1", reward: float = 0.1) -> Submission:
    n = sequence + 1
    trajectory = Trajectory(pack_i32(range(n)), pack_f32([-0.1 * i for i in range(n)]), pack_i32([2] * n), bytes([1] * n))
    return Submission(
        SlotKey(4, sequence), 3, incarnation, sequence, 0, trajectory, reward, RewardStatus.GIVEN, SandboxStatus.NOT_USED,
        FinishReason.STOP, 0.25, 0.5, '{"evidence": "é"}', Blame.MODEL if sequence % 2 else None,
        f"00-{'a' * 32}-{'b' * 16}-01" if sequence % 2 else "",
    )  # fmt: skip


def test_what_was_put_is_loaded_again_in_order_and_content(tmp_path: Path) -> None:
    made = [sample(i) for i in range(12)]
    Spool(tmp_path, "run").put(made[::-1])
    loaded = Spool(tmp_path, "run").load()
    assert loaded == made
    assert [payload_digest(s) for s in loaded] == [payload_digest(s) for s in made]
    assert not list(tmp_path.glob("*.tmp"))


def test_no_field_of_a_submission_is_forgotten() -> None:
    made = sample(1)
    for spec in dataclasses.fields(Submission):
        assert spec.default is dataclasses.MISSING or getattr(made, spec.name) != spec.default, f"{spec.name} is not tried"
    assert decode(encode("run", made)) == ("run", made)


def test_a_file_of_a_worker_that_knew_no_blame_is_loaded() -> None:
    data = encode("run", sample(0))
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(data[len(_MAGIC) : start])
    header = json.loads(data[start : start + length])
    del header["blame"]
    packed = json.dumps(header).encode()
    content = _MAGIC + _LENGTH.pack(len(packed)) + packed + data[start + length : -32]
    assert decode(content + hashlib.sha256(content).digest()) == ("run", sample(0))


@pytest.mark.parametrize("reward", [0.0, -0.0, 1 / 3, 5e-324, 1.7976931348623157e308])
def test_a_reward_keeps_every_bit(reward: float) -> None:
    _, back = decode(encode("run", sample(0, reward=reward)))
    assert back.reward is not None and back.reward.hex() == reward.hex()


def test_discarding_forgets_only_what_is_named_and_may_be_repeated(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run")
    spool.put([sample(0), sample(1)])
    spool.discard([sample(0)])
    spool.discard([sample(0)])
    assert spool.load() == [sample(1)]


def test_incarnations_do_not_overwrite_each_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run")
    spool.put([sample(0, "a1"), sample(0, "b2")])
    assert [s.incarnation for s in spool.load()] == ["a1", "b2"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_file_is_set_aside_loudly_and_the_others_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    spool = Spool(tmp_path, "run")
    spool.put([sample(0), sample(1), sample(2)])
    victim = tmp_path / "a1.00000001.sample"
    data = victim.read_bytes()
    broken = {"flip": data[:80] + bytes([data[80] ^ 1]) + data[81:], "cut": data[:-5], "empty": b"", "other": b"hello" * 30}
    victim.write_bytes(broken[damage])
    with caplog.at_level(logging.ERROR):
        assert spool.load() == [sample(0), sample(2)]
    assert (tmp_path / "a1.00000001.sample.aside").read_bytes() == broken[damage]
    assert any("set aside" in r.message and r.levelno == logging.ERROR for r in caplog.records)
    assert spool.load() == [sample(0), sample(2)]


def test_every_single_damaged_byte_is_noticed() -> None:
    data = encode("run", sample(1))
    for i in range(len(data)):
        with pytest.raises(DigestMismatch):
            decode(data[:i] + bytes([data[i] ^ 0x40]) + data[i + 1 :])


def test_a_file_of_another_run_is_not_sent(tmp_path: Path) -> None:
    Spool(tmp_path, "old-run").put([sample(0)])
    assert Spool(tmp_path, "run").load() == []
    assert [p.name for p in tmp_path.iterdir()] == ["a1.00000000.sample.aside"]


def test_a_whole_file_that_lacked_only_its_rename_is_sent_and_can_be_discarded(tmp_path: Path) -> None:
    (tmp_path / "a1.00000000.tmp").write_bytes(encode("run", sample(0)))
    spool = Spool(tmp_path, "run")
    assert spool.load() == [sample(0)]
    spool.discard([sample(0)])
    assert list(tmp_path.iterdir()) == []


def test_a_torn_temporary_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "a1.00000000.tmp").write_bytes(encode("run", sample(0))[:100])
    assert Spool(tmp_path, "run").load() == []
    assert [p.name for p in tmp_path.iterdir()] == ["a1.00000000.tmp.aside"]
