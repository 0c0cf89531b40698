"""Finished rollouts that the ledger has not acknowledged yet, as files that outlive the worker process.

Owns the file format and its durability: write, fsync, rename, fsync of the directory; a file that cannot be read is set
aside under another name and reported, never deleted. Never decides what is sent when. Upholds P1 on the worker's side:
a crash between generation and acknowledgement costs no sample where the worker comes back (R11).

Format: magic, header length (u32 LE), JSON header, the trajectory's four arrays, sha256 over all of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from rollbook.core.errors import DigestMismatch
from rollbook.core.host import fsync_directory, host
from rollbook.core.records import Blame, FinishReason, RewardStatus, SandboxStatus, SlotKey, Submission, Trajectory
from rollbook.observe.failpoints import failpoint

log = logging.getLogger(__name__)

_MAGIC = b"rollbook spool 1\n"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_ARRAYS = ("token_ids", "logprobs", "versions", "loss_mask")
_PLAIN = ("lease_token", "incarnation", "sequence", "lineage", "reward", "generate_s", "verify_s", "evidence_json")


def encode(run_id: str, submission: Submission) -> bytes:
    """One submission as the bytes of its file."""
    arrays = [getattr(submission.trajectory, name) for name in _ARRAYS]
    header = {name: getattr(submission, name) for name in _PLAIN} | {
        "run_id": run_id,
        "key": list(submission.key),
        "reward_status": submission.reward_status.value,
        "sandbox_status": submission.sandbox_status.value,
        "finish_reason": submission.finish_reason.value,
        "blame": submission.blame.value if submission.blame else None,
        "traceparent": submission.traceparent,
        "array_bytes": [len(array) for array in arrays],
    }
    packed = json.dumps(header).encode()
    content = b"".join([_MAGIC, _LENGTH.pack(len(packed)), packed, *arrays])
    return content + hashlib.sha256(content).digest()


def decode(data: bytes) -> tuple[str, Submission]:
    """(run id, submission) of a file's bytes. Raises DigestMismatch saying what is wrong with them."""
    content, stored = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not data.startswith(_MAGIC):
        raise DigestMismatch("not a spool file of this format")
    if hashlib.sha256(content).digest() != stored:
        raise DigestMismatch(f"digest does not match its {len(content)} bytes: cut off or damaged")
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(content[len(_MAGIC) : start])
    header = json.loads(content[start : start + length])
    offset, arrays = start + length, []
    for n_bytes in header["array_bytes"]:
        arrays.append(content[offset : offset + n_bytes])
        offset += n_bytes
    submission = Submission(
        key=SlotKey(*header["key"]),
        trajectory=Trajectory(*arrays),
        reward_status=RewardStatus(header["reward_status"]),
        sandbox_status=SandboxStatus(header["sandbox_status"]),
        finish_reason=FinishReason(header["finish_reason"]),
        blame=Blame(blame) if (blame := header.get("blame")) else None,  # files of older workers have none
        traceparent=header.get("traceparent", ""),
        **{name: header[name] for name in _PLAIN},
    )
    return header["run_id"], submission


class Spool:
    """One worker's directory of unacknowledged submissions."""

    def __init__(self, directory: str | Path, run_id: str) -> None:
        self._directory, self._run_id = Path(directory), run_id
        self._directory.mkdir(parents=True, exist_ok=True)

    def put(self, submissions: Sequence[Submission]) -> None:
        """Make submissions durable; when this returns they survive the process and the machine.

        Raises: OSError (no space, for example); nothing of these submissions is left then.
        """
        if not submissions:
            return
        written = [(self._path(s).with_suffix(".tmp"), self._path(s)) for s in submissions]
        try:
            for submission, (temporary, _) in zip(submissions, written, strict=True):
                with open(temporary, "wb") as file:
                    host().writing(temporary)
                    file.write(encode(self._run_id, submission))
                    file.flush()
                    failpoint("worker.spool.before_sync")
                    host().fsync(file.fileno(), temporary)
                failpoint("worker.spool.after_sync")
        except OSError:
            for temporary, _ in written:  # half a file is of no use and takes the space that is missing
                temporary.unlink(missing_ok=True)
            raise
        failpoint("worker.mid_spool")
        for temporary, final in written:
            os.replace(temporary, final)
            failpoint("worker.spool.between_renames")
        failpoint("worker.spool.before_directory_sync")
        fsync_directory(self._directory)

    def load(self) -> list[Submission]:
        """Everything unacknowledged, in the order it was made per incarnation; what cannot be sent is set aside, loudly."""
        found: list[Submission] = []
        for path in sorted(self._directory.iterdir()):
            if path.suffix not in (".sample", ".tmp"):
                continue
            try:
                run_id, submission = decode(path.read_bytes())
                if run_id != self._run_id:
                    raise DigestMismatch(f"it belongs to run {run_id!r}, this is {self._run_id!r}")
            except (DigestMismatch, ValueError, KeyError, TypeError) as error:
                self._set_aside(path, str(error))
                continue
            if path.suffix == ".tmp":  # whole, so only the rename is missing
                os.replace(path, self._path(submission))
                failpoint("worker.spool.after_adopted")
            found.append(submission)
        return found

    def discard(self, submissions: Sequence[Submission]) -> None:
        """Forget submissions that have a final outcome; one already gone is fine."""
        for submission in submissions:
            self._path(submission).unlink(missing_ok=True)
            failpoint("worker.spool.between_discards")

    def set_aside(self, submission: Submission, reason: str) -> None:
        """Keep a submission's file, if it has one, for a human, but never send it again."""
        if self._path(submission).exists():
            self._set_aside(self._path(submission), reason)

    def _set_aside(self, path: Path, reason: str) -> None:
        aside = path.with_name(path.name + ".aside")
        os.replace(path, aside)
        failpoint("worker.spool.after_aside")
        fsync_directory(self._directory)
        log.error(
            "spooled sample set aside: it will not be sent; its slot is generated again",
            extra={"event": "spool_set_aside", "file": str(aside), "reason": reason},
        )

    def _path(self, submission: Submission) -> Path:
        return self._directory / f"{submission.incarnation}.{submission.sequence:08d}.sample"
