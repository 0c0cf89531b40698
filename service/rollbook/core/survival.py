"""What dropping does to what is trained: survival by bucket, the distance between histograms, corrected reward means, alarms.

Owns the arithmetic; the counts come from the ledger's ``survival`` verb. Never reads a ledger. Slots that are still under way
(leased, submitted, planned without an outcome) have neither survived nor been dropped, so they are left out of every ratio.
Source: Wilson 1927 (the interval); Horvitz and Thompson 1952 (the weights); algorithms page, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
"""Bucket of slots whose value nobody knows: no attempt produced what it is measured on."""
DIMENSIONS = ("length", "duration", "task", "difficulty", "version_span")
Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
WEIGHT_CAP = 2.0
"""Largest inverse-propensity weight."""
MARGIN = 0.05
"""How far below the survival of all known slots a bucket's interval must lie."""
SETTLED_MIN = 50
"""Fewest settled slots of a bucket (or of a run, for the other alarms) that can raise an alarm."""
KL_MAX_NATS = 0.02
"""Largest distance between the histograms of dispatched and of trained slots."""
UNKNOWN_MAX = 0.1
"""Largest share of settled slots without a length."""
SMOOTHING = 0.5
"""Added to every bucket of both histograms (Jeffreys), so that a bucket without a survivor is far away and not infinitely far."""
KL_DIMENSIONS = ("length", "duration", "task")
"""Dimensions whose histograms are compared."""


def wilson(survived: int, settled: int, z: float = Z95) -> tuple[float, float]:
    """Interval of a share; (0, 1) where nothing was counted. Raises ValueError unless 0 <= survived <= settled."""
    if not 0 <= survived <= settled:
        raise ValueError(f"{survived} of {settled} is no share")
    if settled == 0:
        return 0.0, 1.0
    share, z2 = survived / settled, z * z
    centre = (share + z2 / (2 * settled)) / (1 + z2 / settled)
    half = z / (1 + z2 / settled) * math.sqrt(share * (1 - share) / settled + z2 / (4 * settled * settled))
    low = 0.0 if survived == 0 else max(0.0, centre - half)
    high = 1.0 if survived == settled else min(1.0, centre + half)
    return low, high


def kl_nats(dispatched: Sequence[float], trained: Sequence[float], smoothing: float = SMOOTHING) -> float:
    """KL(dispatched || trained) of two histograms over the same buckets, each smoothed by ``smoothing`` per bucket.

    Buckets that are empty in both are left out; 0 where either histogram is empty.
    """
    pairs = [(d, t) for d, t in zip(dispatched, trained, strict=True) if d > 0 or t > 0]
    n_dispatched, n_trained = sum(d for d, _ in pairs), sum(t for _, t in pairs)
    if not (n_dispatched > 0 and n_trained > 0):
        return 0.0
    total_p, total_q = n_dispatched + smoothing * len(pairs), n_trained + smoothing * len(pairs)
    terms = []
    for d, t in pairs:
        p, q = (d + smoothing) / total_p, (t + smoothing) / total_q
        if p > 0:
            terms.append(p * math.log(p / q) if q > 0 else math.inf)
    return max(0.0, sum(terms))


def kl_noise_nats(n_buckets: int, dispatched: int, trained: int) -> float:
    """Distance that dropping at random reaches: mean and two standard deviations of chi-squared with ``n_buckets`` - 1 degrees.

    2 n KL is about chi-squared; drawing ``trained`` of ``dispatched`` slots without replacement makes 1 / n the difference of
    1 / trained and 1 / dispatched.
    0 where all or none were trained.
    """
    if not 0 < trained < dispatched or n_buckets < 2:
        return 0.0
    degrees = n_buckets - 1
    return (degrees + 2 * math.sqrt(2 * degrees)) / 2 * (1 / trained - 1 / dispatched)


@dataclass(frozen=True, slots=True)
class Means:
    """Reward means of trained samples. None where nothing was trained."""

    naive: float | None
    """As trained."""
    ipw: float | None
    """Weighted by 1 / survival of each sample's bucket: the mean had nothing been dropped, if dropping depends on the bucket."""
    capped: float | None
    """The same with weights at most ``cap``."""
    ess: float
    """Effective number of samples under the capped weights."""
    unrepaired: tuple[str, ...]
    """Buckets without a survivor: no weight brings them back."""
    unrepaired_slots: int
    cap: float


def reward_means(
    names: Sequence[str], settled: Sequence[int], trained: Sequence[int], reward_sums: Sequence[float], cap: float = WEIGHT_CAP
) -> Means:
    """Naive and inverse-propensity means over buckets; ``reward_sums`` are over trained samples. ``cap`` is at least 1."""
    if cap < 1:
        raise ValueError(f"cap {cap}: a weight is 1 / survival, so it is never below 1")
    rows = list(zip(names, settled, trained, reward_sums, strict=True))
    lost = [(name, n) for name, n, k, _ in rows if n > 0 and k == 0]
    unrepaired, slots = tuple(name for name, _ in lost), sum(n for _, n in lost)
    alive = [(n / k, k, total) for _, n, k, total in rows if k > 0]
    if not alive:
        return Means(None, None, None, 0.0, unrepaired, slots, cap)
    capped = [(min(w, cap), k, total) for w, k, total in alive]
    weight, square = sum(w * k for w, k, _ in capped), sum(w * w * k for w, k, _ in capped)
    return Means(
        sum(total for _, _, total in alive) / sum(k for _, k, _ in alive),
        sum(w * total for w, _, total in alive) / sum(w * k for w, k, _ in alive),
        sum(w * total for w, _, total in capped) / weight,
        weight * weight / square, unrepaired, slots, cap,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots of one bucket. ``settled`` = opened - waiting = trained + dropped."""

    name: str
    opened: int
    finished: int
    trained: int
    waiting: int
    dropped: int
    reward_sum: float
    """Over trained samples."""
    low: float
    """Wilson interval of ``survival``."""
    high: float

    @property
    def settled(self) -> int:
        return self.opened - self.waiting

    @property
    def survival(self) -> float | None:
        return self.trained / self.settled if self.settled else None


@dataclass(frozen=True, slots=True)
class Dimension:
    """One way of looking at every opened slot of a run."""

    name: str
    buckets: tuple[Bucket, ...]
    kl_nats: float | None
    """KL(dispatched || trained) over settled slots of known buckets; None where it is not looked at."""
    means: Means
    known_survival: float | None
    """Survival over all buckets but ``unknown``: what each of them is held against."""
    alarms: tuple[str, ...]
    """What is wrong, one sentence each."""

    @property
    def alarm(self) -> bool:
        return bool(self.alarms)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a difference is an alarm."""

    margin: float = MARGIN
    settled_min: int = SETTLED_MIN
    kl_max_nats: float = KL_MAX_NATS
    unknown_max: float = UNKNOWN_MAX
    cap: float = WEIGHT_CAP


def assess(counts: Mapping[str, Any], limits: Limits = Limits()) -> tuple[Dimension, ...]:
    """Every dimension of an answer of ``LedgerPort.survival``."""
    return tuple(_assess(name, counts["dimensions"][name], limits) for name in DIMENSIONS if name in counts["dimensions"])


def _assess(name: str, rows: Sequence[Mapping[str, Any]], limits: Limits) -> Dimension:
    buckets = tuple(_bucket(row) for row in rows)
    known = [b for b in buckets if b.name != UNKNOWN]
    n_known, k_known = sum(b.settled for b in known), sum(b.trained for b in known)
    overall = k_known / n_known if n_known else None
    # A slot without a sample has no version span and, without a failure that says so, no length: by construction none of them
    # was trained. Comparing ``unknown`` with the others would only find that again, so its share has a limit of its own.
    kl = kl_nats([b.settled for b in known], [b.trained for b in known]) if name in KL_DIMENSIONS else None
    means = reward_means(
        [b.name for b in buckets], [b.settled for b in buckets], [b.trained for b in buckets], [b.reward_sum for b in buckets],
        limits.cap,
    )  # fmt: skip
    alarms = [
        f"{name} {b.name}: {b.trained} of {b.settled} slots were trained ({b.low:.3f} to {b.high:.3f}), {overall:.3f} of all"
        for b in known
        if overall is not None and b.settled >= limits.settled_min and b.high < overall - limits.margin
    ]
    kl_max = limits.kl_max_nats + kl_noise_nats(sum(b.settled > 0 for b in known), n_known, k_known)
    if kl is not None and n_known >= limits.settled_min and kl > kl_max:
        alarms.append(f"{name}: what is trained is {kl:.4f} nats from what was dispatched, limit {kl_max:.4f} for so many slots")
    n_all = sum(b.settled for b in buckets)
    if name == "length" and n_all >= limits.settled_min and n_all - n_known > limits.unknown_max * n_all:
        alarms.append(
            f"length: {n_all - n_known} of {n_all} slots were dropped with nothing known of their length, limit "
            f"{limits.unknown_max:.0%}: whether the long ones are missing cannot be told"
        )
    return Dimension(name, buckets, kl, means, overall, tuple(alarms))


def _bucket(row: Mapping[str, Any]) -> Bucket:
    settled = row["opened"] - row["waiting"]
    low, high = wilson(row["trained"], settled)
    return Bucket(
        row["bucket"], row["opened"], row["finished"], row["trained"], row["waiting"], sum(row["dropped"].values()),
        row["reward_sum"], low, high,
    )  # fmt: skip


def octave_names(first: int, last: int) -> tuple[str, ...]:
    """Names of buckets [2^i, 2^(i+1)) for i = first ... last, the outer ones open: values in base units.

    ``first`` = 0 is for counts (``1``, ``2-3``, ``4-7``, …, ``1024+``); a negative one for amounts (``<0.5``, ``0.5-1``, …).
    """
    if first >= 0:
        names = [f"{2**i}" if i == 0 else f"{2**i}-{2 ** (i + 1) - 1}" for i in range(first, last)]
        return (*names, f"{2**last}+")
    names = [f"<{2.0 ** (first + 1):g}"]
    names += [f"{2.0**i:g}-{2.0 ** (i + 1):g}" for i in range(first + 1, last)]
    return (*names, f"{2.0**last:g}+")
