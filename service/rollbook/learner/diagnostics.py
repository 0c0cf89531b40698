"""Off-policy diagnostics of one optimizer step.

Owns the metrics that say how far behaviour, proximal and current policy are apart and what the correction did about it.
Never feeds back into the loss. Everything is a sum, a count or a maximum over the step's trainable tokens, so the
result does not depend on the micro-batch split, and ranks are combined by adding ``sums`` and ``counts`` and taking the
larger of ``maxima``. Raw ratios are reported next to applied weights, because metrics taken after truncation hide the
problem that truncation solves.

A row of every [B, T] tensor is one whole sequence. Values at masked positions are never read.

Source: Kish's effective sample size; Schulman 2020 for the KL estimators.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.core.errors import InvalidRequest
from rollbook.learner.corrections import kl_k1, kl_k2, kl_k3, require_same_shape, trainable_mask, upcast
from rollbook.learner.objectives import clip_indicators

LAG_LIMIT = 64
"""Lags from 0 to this value are counted one by one, larger ones together under the next key."""

_EXPONENT_MAX = 300.0  # exp(2 * 300) is still finite in float64
_BINS_PER_SIDE = 2048
_BIN_SCALE = 0.01
_BIN_STEP = math.asinh(30.0 / _BIN_SCALE) / _BINS_PER_SIDE

_TOKEN_SUMS = (
    "tokens", "behaviour_missing", "rejected", "rho", "rho_sq", "weight", "weight_sq", "total", "total_sq",
    "above_cap", "gap_abs", "mu_old_k1", "mu_old_k2", "mu_old_k3", "old_theta_k1", "old_theta_k3", "drift_sq",
    "ratio", "clip_low", "clip_high", "outside", "entropy", "entropy_tokens",
)  # fmt: skip
_SEQUENCE_SUMS = (
    "sequences", "sequence_rho", "sequence_rho_sq", "sequence_weight", "sequence_weight_sq", "ppl_mu", "ppl_old",
    "log_ppl_gap", "lag_sequences", "lag_head", "lag_tail", "lag_span",
)  # fmt: skip
_SUMS = _TOKEN_SUMS + _SEQUENCE_SUMS
_MAXIMA = ("rho", "minus_rho", "gap_abs", "ratio", "weight", "lag_head", "lag_tail", "lag_span")


@torch.no_grad()
def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0, rows_max: int = 1024) -> Tensor:
    """Entropy of the sampling distribution softmax(logits / temperature), in nats.

    Args:
        logits: [..., V]; -inf entries count as impossible tokens.
        temperature: > 0, the one the engine sampled with.
        rows_max: number of distributions held in float32 at a time, which bounds the extra memory.

    Returns:
        [...] float32 or wider.

    Raises:
        InvalidRequest: temperature is not positive; a greedy policy has no entropy to report.
    """
    if not temperature > 0:
        raise InvalidRequest(f"entropy needs a temperature above 0, got {temperature}")
    pieces = []
    for rows in torch.split(logits.reshape(-1, logits.shape[-1]), rows_max):
        logprobs = torch.log_softmax(upcast(rows) / temperature, dim=-1)
        probs = logprobs.exp()
        pieces.append(-torch.where(probs > 0, probs * logprobs, 0.0).sum(-1))
    return torch.cat(pieces).reshape(logits.shape[:-1])


@dataclass(frozen=True, kw_only=True)
class DiagnosticsBatch:
    """One micro-batch as the loss saw it.

    Log-probs, ``weights`` (applied, 0 where rejected), ``mask`` and ``entropy`` (nats) are [B, T]; ``advantages`` and
    ``keep`` are [B] or [B, T]. ``versions`` [B, T] are the policy versions the tokens were sampled under, compared with
    ``version_train``, the version the step starts from.
    """

    logp_theta: Tensor
    logp_old: Tensor
    logp_mu: Tensor
    weights: Tensor
    advantages: Tensor
    mask: Tensor
    keep: Tensor | None = None
    entropy: Tensor | None = None
    versions: Tensor | None = None
    version_train: int | None = None

    def __post_init__(self) -> None:
        names = ("logp_theta", "logp_old", "logp_mu", "weights", "mask", "entropy", "versions")
        present = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        require_same_shape(**present)
        if (self.versions is None) != (self.version_train is None):
            raise InvalidRequest("versions and version_train are given together or not at all")


@dataclass(frozen=True)
class _View:
    """A batch in float64 with masked positions set to values that add nothing."""

    mask: Tensor
    missing: Tensor
    logp_mu: Tensor
    logp_old: Tensor
    log_rho: Tensor
    log_r: Tensor
    weights: Tensor
    advantages: Tensor
    kept: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, 0.0).sum(1) / self.lengths.clamp(min=1)


def _wide(values: Tensor, mask: Tensor) -> Tensor:
    rows = values[:, None].expand(mask.shape) if values.ndim == 1 else values
    require_same_shape(mask=mask, values=rows)
    return torch.where(mask, rows.to(torch.float64), 0.0)


def _view(batch: DiagnosticsBatch) -> _View:
    mask = trainable_mask(batch.mask, batch.logp_mu)
    theta, old, mu = (_wide(values, mask) for values in (batch.logp_theta, batch.logp_old, batch.logp_mu))
    kept = mask if batch.keep is None else _wide(batch.keep, mask).to(torch.bool)
    missing = batch.mask.to(torch.bool) & ~mask
    weights, advantages = _wide(batch.weights, mask), _wide(batch.advantages, mask)
    return _View(mask, missing, mu, old, old - mu, theta - old, weights, advantages, kept)


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-_EXPONENT_MAX, _EXPONENT_MAX).exp()


def _token_sums(view: _View, entropy: Tensor | None, *, cap: float, clip_low: float, clip_high: float) -> list[Tensor]:
    rho, ratio, total = _exp(view.log_rho), _exp(view.log_r), _exp(view.log_rho + view.log_r)
    low, high, outside = clip_indicators(ratio, view.advantages, clip_low=clip_low, clip_high=clip_high)
    weights, zero = view.weights, torch.zeros_like(rho)
    values: dict[str, Tensor] = {
        "tokens": torch.ones_like(rho),
        "rejected": weights == 0,
        "rho": rho,
        "rho_sq": rho.square(),
        "weight": weights,
        "weight_sq": weights.square(),
        "total": total,
        "total_sq": total.square(),
        "above_cap": rho > cap,
        "gap_abs": view.log_rho.abs(),
        "mu_old_k1": kl_k1(view.log_rho),
        "mu_old_k2": kl_k2(view.log_rho),
        "mu_old_k3": kl_k3(view.log_rho.clamp(max=_EXPONENT_MAX)),
        "old_theta_k1": kl_k1(view.log_r),
        "old_theta_k3": kl_k3(view.log_r.clamp(max=_EXPONENT_MAX)),
        "drift_sq": (view.log_rho + view.log_r).square(),
        "ratio": ratio,
        "clip_low": low & view.kept,
        "clip_high": high & view.kept,
        "outside": outside,
        "entropy": zero if entropy is None else _wide(entropy, view.mask),
        "entropy_tokens": zero if entropy is None else torch.ones_like(rho),
    }
    sums = {name: torch.where(view.mask, value.to(torch.float64), 0.0).sum() for name, value in values.items()}
    sums["behaviour_missing"] = view.missing.sum().to(torch.float64)
    return [sums[name] for name in _TOKEN_SUMS]


def _sequence_sums(view: _View, lag: Tensor | None) -> list[Tensor]:
    used = view.lengths > 0
    product = _exp(view.log_rho.sum(1))
    weight = view.sequence_mean(view.weights)
    mean_mu, mean_old = view.sequence_mean(view.logp_mu), view.sequence_mean(view.logp_old)
    head, tail = (torch.zeros_like(product),) * 2 if lag is None else _head_and_tail(lag, view.mask)
    values: dict[str, Tensor] = {
        "sequences": torch.ones_like(product),
        "sequence_rho": product,
        "sequence_rho_sq": product.square(),
        "sequence_weight": weight,
        "sequence_weight_sq": weight.square(),
        "ppl_mu": _exp(-mean_mu),
        "ppl_old": _exp(-mean_old),
        "log_ppl_gap": mean_mu - mean_old,
        "lag_sequences": torch.full_like(product, float(lag is not None)),
        "lag_head": head,
        "lag_tail": tail,
        "lag_span": head - tail,
    }
    return [torch.where(used, values[name], 0.0).sum() for name in _SEQUENCE_SUMS]


def _head_and_tail(lag: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    wide = lag.to(torch.float64)
    return torch.where(mask, wide, -torch.inf).amax(1), torch.where(mask, wide, torch.inf).amin(1)


def trajectory_lags(versions: Tensor, mask: Tensor, version_train: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lag of the oldest token, of the newest token, and their distance, per trajectory, in versions.

    Args:
        versions: [B, T] integer policy versions; not read where masked.
        mask: [B, T]; every row needs at least one true entry.
        version_train: version the step starts from.

    Returns:
        head, tail and span, [B] int64 each. The staleness bound applies to the head.

    Raises:
        InvalidRequest: shapes differ, or a trajectory has no trainable token and so no lag.
    """
    require_same_shape(versions=versions, mask=mask)
    if not bool(mask.to(torch.bool).any(1).all()):
        raise InvalidRequest("a trajectory without a trainable token has no lag")
    head, tail = _head_and_tail(version_train - versions, mask.to(torch.bool))
    return head.long(), tail.long(), (head - tail).long()


def _maxima(view: _View, lag: Tensor | None) -> Tensor:
    rho, ratio = _exp(view.log_rho), _exp(view.log_r)
    tokens = torch.stack([rho, -rho, view.log_rho.abs(), ratio, view.weights])
    per_token = torch.where(view.mask[None], tokens, -torch.inf).flatten(1).amax(1)
    if lag is None:
        return torch.cat([per_token, per_token.new_full((3,), -torch.inf)])
    head, tail = _head_and_tail(lag, view.mask)
    rows = torch.where((view.lengths > 0)[None], torch.stack([head, tail, head - tail]), -torch.inf)
    return torch.cat([per_token, rows.amax(1)])


class DiagnosticsAccumulator:
    """Sums of one optimizer step; ``add`` every micro-batch, then ``result``.

    ``sums`` and ``counts`` of several ranks are added, ``maxima`` compared, either by ``merge`` or by an all-reduce on
    these three tensors in place. Nothing is copied to the host before ``result``.
    """

    def __init__(
        self,
        *,
        cap: float = 2.0,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start at zero.

        Args:
            cap: rho above this is counted; the truncation cap of the correction.
            clip_low: as in the objective.
            clip_high: as in the objective.
            device: where the micro-batches live.
        """
        self._limits = {"cap": cap, "clip_low": clip_low, "clip_high": clip_high}
        lags = LAG_LIMIT + 2
        self.sums = torch.zeros(len(_SUMS) + lags, dtype=torch.float64, device=device)
        self.maxima = torch.full((len(_MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
        self.counts = torch.zeros(2 * _BINS_PER_SIDE + 1 + lags + 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, batch: DiagnosticsBatch) -> None:
        """Add one micro-batch; one that has no trainable token changes only the count of missing log-probs.

        Raises:
            InvalidRequest: shapes differ.
        """
        if batch.mask.numel() == 0:
            return
        view = _view(batch)
        lag = None if batch.versions is None or batch.version_train is None else batch.version_train - batch.versions
        named = _token_sums(view, batch.entropy, **self._limits) + _sequence_sums(view, lag)
        self.sums[: len(_SUMS)] += torch.stack(named)
        self.maxima = torch.maximum(self.maxima, _maxima(view, lag))
        steps = torch.round(torch.asinh(view.log_rho / _BIN_SCALE) / _BIN_STEP)
        bins = steps.clamp(-_BINS_PER_SIDE, _BINS_PER_SIDE).nan_to_num().long() + _BINS_PER_SIDE
        self.counts.index_add_(0, bins.flatten(), view.mask.flatten().long())
        if lag is not None:
            self._add_lags(lag, view)

    def _add_lags(self, lag: Tensor, view: _View) -> None:
        slots = torch.where(view.mask, lag, 0).clamp(-1, LAG_LIMIT + 1).flatten()
        slots = torch.where(slots < 0, LAG_LIMIT + 2, slots)
        self.counts.index_add_(0, slots + 2 * _BINS_PER_SIDE + 1, view.mask.flatten().long())
        valid = view.mask.flatten() & (slots <= LAG_LIMIT + 1)
        rho = torch.where(valid, _exp(view.log_rho).flatten(), 0.0)
        self.sums.index_add_(0, torch.where(valid, slots, 0) + len(_SUMS), rho)

    def merge(self, other: DiagnosticsAccumulator) -> None:
        """Add what another accumulator of the same step has seen.

        Raises:
            InvalidRequest: the two count against different limits.
        """
        if self._limits != other._limits:
            raise InvalidRequest(f"cannot merge diagnostics with limits {self._limits} and {other._limits}")
        self.sums += other.sums
        self.counts += other.counts
        self.maxima = torch.maximum(self.maxima, other.maxima)

    def ratio_counts(self, bounds: Sequence[float]) -> list[int]:
        """Tokens by rho: at most ``bounds[0]``, at most ``bounds[1]``, ..., above all of them; exact up to the width of a bin."""
        out = [0] * (len(bounds) + 1)
        for index, n in enumerate(self.counts[: 2 * _BINS_PER_SIDE + 1].tolist()):
            if n:
                rho = math.exp(_BIN_SCALE * math.sinh((index - _BINS_PER_SIDE) * _BIN_STEP))
                out[bisect.bisect_left(bounds, rho)] += n
        return out

    def result(self) -> dict[str, float]:
        """Return the step's metrics; keys that need an input nobody gave (entropy, lags) are absent.

        Fractions are of trainable tokens before rejection, or of sequences. ESS fractions are 1 for equal weights; on
        sequence level the applied weight is the mean of a sequence's token weights. A quantile's log ratio is within
        0.25 % (plus 2.5e-5 nats) of the exact one.

        Raises:
            InvalidRequest: no trainable token was added; such a step is skipped, it has no diagnostics.
        """
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=False))
        maxima = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        if not sums["tokens"] > 0:
            raise InvalidRequest("diagnostics of a step without a trainable token")
        metrics = _token_metrics(sums) | _sequence_metrics(sums)
        metrics |= {
            "rho_max": maxima["rho"],
            "rho_min": -maxima["minus_rho"],
            "weight_max": maxima["weight"],
            "logp_gap_abs_max": maxima["gap_abs"],
            "policy_ratio_max": maxima["ratio"],
        }
        bins = self.counts[: 2 * _BINS_PER_SIDE + 1].tolist()
        rho_p99 = math.exp(_quantile_step(bins, 0.99, first=-_BINS_PER_SIDE))
        folded = [bins[_BINS_PER_SIDE]]
        folded += [bins[_BINS_PER_SIDE - k] + bins[_BINS_PER_SIDE + k] for k in range(1, _BINS_PER_SIDE + 1)]
        metrics["rho_p99"] = min(max(rho_p99, metrics["rho_min"]), metrics["rho_max"])
        metrics["logp_gap_abs_p99"] = min(_quantile_step(folded, 0.99, first=0), maxima["gap_abs"])
        return metrics | (self._lag_metrics(sums, maxima) if sums["lag_sequences"] else {})

    def _lag_metrics(self, sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in ("lag_head", "lag_tail", "lag_span"):
            metrics[f"{name}_mean"] = sums[name] / sums["lag_sequences"]
            metrics[f"{name}_max"] = maxima[name]
        counts = self.counts[2 * _BINS_PER_SIDE + 1 :].tolist()
        rho_sums = self.sums[len(_SUMS) :].tolist()
        metrics["lag_negative_tokens"] = float(counts[-1])
        for lag, (count, rho_sum) in enumerate(zip(counts[:-1], rho_sums, strict=True)):
            if count:
                metrics[f"lag_{lag}_tokens"] = float(count)
                metrics[f"lag_{lag}_rho_mean"] = rho_sum / count
        return metrics


def _quantile_step(counts: list[int], q: float, *, first: int) -> float:
    rank, seen = math.ceil(q * sum(counts)), 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _BIN_SCALE * math.sinh((first + index) * _BIN_STEP)
    raise AssertionError("the rank of a quantile is at most the number of values")


def _ess_fraction(total: float, total_of_squares: float, count: float) -> float:
    return total * total / total_of_squares / count if total_of_squares > 0 else 0.0


def _token_metrics(sums: dict[str, float]) -> dict[str, float]:
    tokens = sums["tokens"]
    means = {
        "rejected_fraction": "rejected",
        "rho_mean": "rho",
        "weight_mean": "weight",
        "rho_above_cap_fraction": "above_cap",
        "kl_behaviour_old_k1": "mu_old_k1",
        "kl_behaviour_old_k2": "mu_old_k2",
        "kl_behaviour_old_k3": "mu_old_k3",
        "kl_old_policy_k1": "old_theta_k1",
        "kl_old_policy_k3": "old_theta_k3",
        "logp_gap_abs_mean": "gap_abs",
        "logp_drift_sq_mean": "drift_sq",
        "policy_ratio_mean": "ratio",
        "clip_low_fraction": "clip_low",
        "clip_high_fraction": "clip_high",
        "outside_band_fraction": "outside",
    }
    metrics = {metric: sums[name] / tokens for metric, name in means.items()}
    metrics["tokens"] = tokens
    metrics["behaviour_missing_tokens"] = sums["behaviour_missing"]
    metrics["chi2_token"] = sums["rho_sq"] / tokens - 1.0
    metrics["ess_token_raw_fraction"] = _ess_fraction(sums["rho"], sums["rho_sq"], tokens)
    metrics["ess_token_applied_fraction"] = _ess_fraction(sums["weight"], sums["weight_sq"], tokens)
    metrics["ess_token_total_fraction"] = _ess_fraction(sums["total"], sums["total_sq"], tokens)
    if sums["entropy_tokens"]:
        metrics["entropy_mean"] = sums["entropy"] / sums["entropy_tokens"]
    return metrics


def _sequence_metrics(sums: dict[str, float]) -> dict[str, float]:
    sequences = sums["sequences"]
    raw = _ess_fraction(sums["sequence_rho"], sums["sequence_rho_sq"], sequences)
    applied = _ess_fraction(sums["sequence_weight"], sums["sequence_weight_sq"], sequences)
    return {
        "sequences": sequences,
        "chi2_sequence": sums["sequence_rho_sq"] / sequences - 1.0,
        "ess_sequence_raw_fraction": raw,
        "ess_sequence_applied_fraction": applied,
        "ppl_behaviour": sums["ppl_mu"] / sequences,
        "ppl_old": sums["ppl_old"] / sequences,
        "log_ppl_gap_mean": sums["log_ppl_gap"] / sequences,
    }


def step_diagnostics(
    batches: Iterable[DiagnosticsBatch], *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.28
) -> dict[str, float]:
    """Compute the metrics of one optimizer step from all its micro-batches; see ``DiagnosticsAccumulator``.

    Raises:
        InvalidRequest: shapes differ, or the step has no trainable token.
    """
    accumulator: DiagnosticsAccumulator | None = None
    for batch in batches:
        if accumulator is None:
            limits = {"cap": cap, "clip_low": clip_low, "clip_high": clip_high}
            accumulator = DiagnosticsAccumulator(**limits, device=batch.mask.device)
        accumulator.add(batch)
    if accumulator is None:
        raise InvalidRequest("diagnostics of a step without a micro-batch")
    return accumulator.result()
