"""Keys, digests and seeds: what makes every write repeatable.

Owns the canonical bytes of a sample, the chain of plans and the per-sample seed (R2). Never compares against storage.
All digests are sha256 hex over length-prefixed fields, so no two field lists share bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from rollbook.core.records import PlanItem, SlotKey, Submission

GENESIS = "0" * 64


def digest(*fields: bytes | str | int) -> str:
    """sha256 hex over length-prefixed fields."""
    hasher = hashlib.sha256()
    for value in fields:
        data = value if isinstance(value, bytes) else str(value).encode()
        hasher.update(struct.pack("<Q", len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def payload_digest(submission: Submission) -> str:
    """Fingerprint of what was sampled and how it was judged; compared on every replayed submission (P2)."""
    t = submission.trajectory
    # Adding 0.0 makes -0.0 the 0.0 that SQLite gives back: the digest must hold for what is read again.
    reward = b"" if submission.reward is None else struct.pack("<d", submission.reward + 0.0)
    return digest(
        "payload", t.token_ids, t.logprobs, t.versions, t.loss_mask, reward, submission.reward_status.value,
        submission.sandbox_status.value, submission.finish_reason.value, submission.lineage,
    )  # fmt: skip


def items_digest(items: Iterable[PlanItem]) -> str:
    """Digest of a plan's ordered content."""
    fields: list[bytes | str | int] = ["items"]
    for item in items:
        fields += [item.pos, item.key.ordinal, item.key.sibling, item.payload_digest, int(item.valid)]
    return digest(*fields)


def chain_digest(previous: str, step: int, items: str) -> str:
    """Digest of the whole history of plans up to ``step``; the chain starts at ``genesis_digest``."""
    return digest("chain", previous, step, items)


def genesis_digest(run_id: str, config_seed: int) -> str:
    """Start of a run's chain."""
    return digest("genesis", run_id, config_seed)


def sample_seed(config_seed: int, key: SlotKey) -> int:
    """Seed of one sample in [0, 2**31): a function of configuration and key alone, so a crash changes nothing (R2)."""
    return int(digest("seed", config_seed, key.ordinal, key.sibling)[:16], 16) % 2**31


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn of an episode in [0, 2**31); the first turn has the sample's own."""
    return seed if turn == 0 else int(digest("turn", seed, turn)[:16], 16) % 2**31
